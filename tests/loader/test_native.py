"""Which native layer a load uses, by what rule, and what it says of it. GPUs run it at the end."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from tiny import random_weights, tiny_graph, tiny_model
from tokenizers_by_hand import letters

from precast.builder.native.layer import native_layer, target_named
from precast.ir.artifact import Bundle, ops_of, write_bundle
from precast.ir.bundle.trust import Admitted, MadeHere, Refusal, folder_of_layers
from precast.ir.encoding import FORMAT
from precast.ir.errors import TargetError
from precast.ir.manifest import Checkpoint, Manifest
from precast.ir.native import NativeLayer
from precast.kernels.sources import file_digest
from precast.loader.engine.params import SamplingParams
from precast.loader.load import load
from precast.loader.native import Chosen, choose
from precast.loader.timeline import Timeline

WEIGHTS, GRAPH = random_weights(), tiny_graph()
SOURCE = "precast.kernels.rms_norm.triton"
LAYER = NativeLayer("sm_90", 13000, {"triton": "3.7.1"}, {SOURCE: file_digest(SOURCE) or ""}, (), {})


@pytest.fixture(autouse=True)
def _data_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def written(path: Path, *layers: NativeLayer) -> Bundle:
    """The bundle of the tiny model with these layers."""
    inv_freq = WEIGHTS["inv_freq"]
    return write_bundle(
        path,
        manifest_without_blobs=Manifest(FORMAT, tiny_model(), ops_of(GRAPH), Checkpoint(), (), {}, ()),
        graph=GRAPH,
        constants={"inv_freq": ("float32", tuple(inv_freq.shape), inv_freq.numpy().tobytes())},
        files={"tokenizer.json": letters(48)},
        provenance={},
        native=layers,
    )


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return written(tmp_path / "bundle", LAYER)


def test_a_layer_of_unknown_origin_is_not_used(bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "precast"):
        found = choose(bundle, "sm_90", cuda=13000)

    assert found.layer is None
    assert found.note == (
        f"kernels are compiled here: native layer {bundle.native_digest('sm_90')} is not trusted, "
        "as its digest is not allowed and it was not compiled here"
    )
    assert [record.message for record in caplog.records] == [found.note]


@pytest.mark.parametrize("which", ["layer", "bundle"])
def test_a_layer_is_used_where_its_digest_is_allowed(which: str, bundle: Bundle) -> None:
    allowed = bundle.native_digest("sm_90") if which == "layer" else bundle.digest
    found = choose(bundle, "sm_90", allowed=[allowed], cuda=13000)

    assert found.layer == LAYER
    assert found.note.endswith("it is allowed by " + ("its digest" if which == "layer" else "the bundle's digest"))


def test_a_layer_is_used_where_it_was_compiled_here(bundle: Bundle) -> None:
    MadeHere(folder_of_layers()).record(bundle.native_digest("sm_90"))

    assert choose(bundle, "sm_90", cuda=13000).layer == LAYER
    assert "compiled by this user on this machine" in choose(bundle, "sm_90", cuda=13000).note


def test_whoever_is_trusted_lets_a_layer_in(bundle: Bundle) -> None:
    """Signatures come this way."""

    class Signed:
        def admits(self, manifest_digest: str, layer_digest: str) -> Admitted | Refusal:
            is_known = (manifest_digest, layer_digest) == (bundle.digest, bundle.native_digest("sm_90"))
            return Admitted("signed by release@example.org") if is_known else Refusal("it is not signed")

    assert choose(bundle, "sm_90", trust=Signed(), cuda=13000).note.endswith("it is signed by release@example.org")


def test_a_layer_for_other_worlds_says_so_and_gives_what_it_has(tmp_path: Path, bundle: Bundle) -> None:
    of_two = written(tmp_path / "two", msgspec.structs.replace(LAYER, worlds=((2, 1), (4, 2))))
    for each, world, lacks in (
        (bundle, (1, 1), ""), (bundle, (2, 1), "it was compiled for tp=1, not for tp=2"), (of_two, (2, 1), ""),
        (of_two, (4, 2), ""), (of_two, (4, 1), "it was compiled for tp=2 and tp=4,ep=2, not for tp=4"),
        (of_two, (1, 1), "it was compiled for tp=2 and tp=4,ep=2, not for tp=1"),
    ):  # fmt: skip
        found = choose(each, "sm_90", allowed=[each.digest], cuda=13000, world=world)

        assert found.layer == each.native["sm_90"]
        assert found.lacks == lacks
        assert found.note.endswith(f"; {lacks}, so what it lacks is compiled here" if lacks else "bundle's digest")


def test_a_layer_is_not_for_ranks_with_sequences_of_their_own(tmp_path: Path) -> None:
    of_two = written(tmp_path / "two", msgspec.structs.replace(LAYER, worlds=((2, 1),)))

    found = choose(of_two, "sm_90", allowed=[of_two.digest], cuda=13000, world=(2, 1), dp=2)

    assert found.lacks == "it was compiled for tp=2, not for tp=2,dp=2"


def test_what_ranks_agree_on_counts(bundle: Bundle) -> None:
    def refuse(chosen: Chosen) -> Chosen:
        assert chosen.layer == LAYER
        return Chosen(None, "kernels are compiled here: rank 1 refuses", chosen.digest)

    MadeHere(folder_of_layers()).record(bundle.native_digest("sm_90"))
    assert choose(bundle, "sm_90", cuda=13000, agree=refuse).layer is None
    with pytest.raises(TargetError, match="--allow-native is given, and kernels are compiled here: rank 1 refuses"):
        choose(bundle, "sm_90", allowed=[bundle.digest], cuda=13000, agree=refuse)


def refusal(bundle: Bundle, target: str = "sm_90", cuda: int = 13000) -> str:
    """Why a layer that is allowed isn't used all the same."""
    with pytest.raises(TargetError) as error:
        choose(bundle, target, allowed=[bundle.digest], cuda=cuda)
    assert error.value.code == "native-refused"
    MadeHere(folder_of_layers()).record(bundle.native_digest("sm_90"))
    unasked = choose(bundle, target, cuda=cuda)
    assert unasked.layer is None
    assert unasked.note in error.value.message
    return error.value.message


def test_a_layer_for_another_gpu_is_refused(bundle: Bundle) -> None:
    assert "the bundle's native layers are for sm_90, not sm_80" in refusal(bundle, target="sm_80")


def test_a_driver_that_is_too_old_is_refused(bundle: Bundle) -> None:
    assert "wants a driver with CUDA 13.0 or newer, and this one has 12.4" in refusal(bundle, cuda=12040)


def test_kernels_of_other_sources_are_refused(tmp_path: Path) -> None:
    other = msgspec.structs.replace(LAYER, sources={SOURCE: "0" * 64})

    assert f"other sources than this Precast has of {SOURCE}" in refusal(written(tmp_path / "b", other))


def test_kernels_that_this_release_does_not_have_are_refused_by_name(tmp_path: Path) -> None:
    other = msgspec.structs.replace(LAYER, sources=LAYER.sources | {"precast.kernels.warp.triton": "0" * 64})

    said = refusal(written(tmp_path / "b", other))
    assert "from kernels that this Precast does not have: precast.kernels.warp.triton" in said


@pytest.mark.parametrize(
    "name", ["precast.kernels..secret", "precast.kernels.../../etc/passwd.cu", "os", "/etc/passwd"]
)
def test_a_source_s_name_leads_nowhere_else(name: str) -> None:
    assert file_digest(name) is None


def test_a_digest_that_is_allowed_must_be_found(tmp_path: Path, bundle: Bundle) -> None:
    with pytest.raises(TargetError, match="is not trusted, as its digest is not allowed"):
        choose(bundle, "sm_90", allowed=["sha256:" + "0" * 64], cuda=13000)
    with pytest.raises(TargetError, match="the bundle has no native layer"):
        choose(written(tmp_path / "plain"), "sm_90", allowed=[bundle.digest], cuda=13000)
    assert choose(written(tmp_path / "plain"), "sm_90", cuda=13000) == Chosen(
        None, "kernels are compiled here: the bundle has no native layer"
    )


def test_a_cpu_wants_no_layer(bundle: Bundle, checkpoint: Path) -> None:
    timeline = Timeline()
    with load(bundle, weights=checkpoint, device="cpu", timeline=timeline) as engine:
        assert engine.stats.compilations == 0
    assert [phase.note for phase in timeline.phases if phase.note] == []


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file({name: x for name, x in WEIGHTS.items() if name != "inv_freq"}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_load_with_a_layer_compiles_nothing(tmp_path: Path, checkpoint: Path) -> None:
    """In steps of many sizes, captured and not, drawn greedily and not, the tokens are those without a layer."""
    name = "sm_{}{}".format(*torch.cuda.get_device_capability())
    made = written(tmp_path / "made", native_layer(GRAPH, target_named(name)))
    plain = written(tmp_path / "plain")
    params = [SamplingParams(max_tokens=6), SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, seed=3)]

    def answers(bundle: Bundle, capture: str) -> tuple[list[list[int]], int]:
        with load(
            bundle, weights=checkpoint, device="cuda", max_num_tokens=96, capture=capture, native=[bundle.digest]
            if bundle.native else (),
        ) as engine:  # type: ignore[arg-type]  # fmt: skip
            given = [[1 + i % 40 for i in range(length)] for length in (1, 2, 3, 17, 33, 48)]
            found = [output.token_ids for each in params for output in engine.generate(given, each)]
            return found, engine.stats.compilations

    for capture in ("off", "before"):
        found, compilations = answers(made, capture)
        expected, without = answers(plain, capture)

        assert compilations == 0
        assert without > 5
        assert found == expected
