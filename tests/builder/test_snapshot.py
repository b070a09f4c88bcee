"""Snapshots of the pipeline: what their key covers, and that what is not whole is a miss."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import odd_models
import pytest
import transformers
from fx_text import read_graph, write_graph
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from precast.builder import pipeline, snapshot
from precast.builder.build import build
from precast.builder.capture.capture import Captured
from precast.builder.graph.context import Options
from precast.builder.graph.nodes import layer_of
from precast.builder.graph.stored import load, store
from precast.builder.passes.graph_pass import Pass
from precast.builder.snapshot import Store
from precast.builder.source.source import Source, open_source
from precast.ir.errors import BuildError
from precast.ir.manifest import Checkpoint, ModelInfo

OPTIONS = Options("float32", 64)
EARLY, LATE = pipeline.split(pipeline.passes(), "shard")


@pytest.fixture(scope="module")
def source() -> Source:
    return open_source(families.make_config("llama"))


def key(source: Source, options: Options = OPTIONS, passes: tuple[Pass, ...] = EARLY) -> str:
    return snapshot.key(source, options, passes)


# --- the key -----------------------------------------------------------------------------------------------------


def test_the_key_is_64_hexadecimal_digits(source: Source) -> None:
    assert len(key(source)) == 64
    assert key(source) == key(open_source(families.make_config("llama")))


@pytest.mark.parametrize(
    ("attribute", "value"), [("rms_norm_eps", 1e-5), ("num_hidden_layers", 4), ("tie_word_embeddings", True)]
)
def test_a_change_of_the_config_is_another_key(attribute: str, value: Any, source: Source) -> None:
    changed = open_source(source.config)
    setattr(changed.config, attribute, value)

    assert key(changed) != key(source)


def test_another_architecture_of_equal_entries_is_another_key() -> None:
    found = {key(open_source(transformers.AutoConfig.for_model(name))) for name in ("llama", "mistral")}

    assert len(found) == 2


@pytest.mark.parametrize(
    "options", [Options("bfloat16", 64), Options("float32", 63), Options("float32", 64, dequantise=True)]
)
def test_options_of_the_graph_are_in_the_key(options: Options, source: Source) -> None:
    assert key(source, options) != key(source)


def test_the_page_size_is_not(source: Source) -> None:
    assert key(source, Options("float32", 64, page_size=64)) == key(source)


def test_the_end_of_answers_is_in_the_key(source: Source) -> None:
    changed = dataclasses.replace(source, facts=source.facts._replace(eos_token_ids=(7,)))

    assert key(changed) != key(source)


def test_a_pass_of_another_version_is_another_key(source: Source) -> None:
    first, *others = EARLY

    assert key(source, passes=(dataclasses.replace(first, version=first.version + 1), *others)) != key(source)
    assert key(source, passes=tuple(others)) != key(source)


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_another_version_of_a_package_is_another_key(
    package: str, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(source)

    monkeypatch.setattr(f"precast.builder.snapshot.{package}.__version__", "99.0")

    assert key(source) != before


def test_a_change_of_our_sources_is_another_key(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(source)

    monkeypatch.setattr(snapshot, "_sources_digest", lambda: "other sources")

    assert key(source) != before


@pytest.mark.parametrize("place", ["registered.py", "registered/__init__.py", "registered/layers.py"])
def test_a_change_of_a_registered_models_source_is_another_key(
    place: str, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class is none of transformers': its file counts, and so do the others of its package."""
    file = tmp_path / "registered.py" if place == "registered.py" else tmp_path / "registered" / "__init__.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(REGISTERED)
    (tmp_path / place).touch()
    monkeypatch.syspath_prepend(tmp_path)
    try:
        registered = open_source(importlib.import_module("registered").OwnConfig())
        before = key(registered)
        assert before == key(registered)

        with (tmp_path / place).open("a") as stream:
            stream.write("SCALE = 2\n")

        assert key(registered) != before
    finally:
        sys.modules.pop("registered")
        CONFIG_MAPPING._extra_content.pop("own-llama")


def test_a_registered_model_without_a_file_is_never_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source can't be read: it was typed into an interpreter."""
    (tmp_path / "registered.py").write_text(REGISTERED)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        module = importlib.import_module("registered")
        registered = open_source(module.OwnConfig())
        monkeypatch.delattr(module, "__file__")

        assert key(registered) != key(registered)
    finally:
        sys.modules.pop("registered")
        CONFIG_MAPPING._extra_content.pop("own-llama")


REGISTERED = """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own-llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

AutoConfig.register("own-llama", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
"""
"""A family of somebody's own."""


def test_where_the_model_lies_is_not_in_the_key(tmp_path: Path, source: Source) -> None:
    for place in ("here", "there"):
        source.config.save_pretrained(tmp_path / place)
    (tmp_path / "there" / "tokenizer_config.json").write_text("{}")

    here, there = (open_source(tmp_path / place) for place in ("here", "there"))

    assert here.name != there.name
    assert here.files != there.files
    assert key(here) == key(there)


# --- the store ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stored:
    """A directory with one snapshot, and what was built with it."""

    folder: Path
    digest: str

    @property
    def file(self) -> Path:
        (file,) = self.folder.iterdir()
        return file


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, source: Source) -> Stored:
    folder = tmp_path_factory.mktemp("stored")
    bundle = build(source.config, folder / "bundle", max_seq_len=64, snapshots=folder / "snapshots")
    assert bundle.provenance["from_snapshot"] is False
    return Stored(folder / "snapshots", bundle.digest)


@pytest.fixture
def copied(stored: Stored, tmp_path: Path) -> Stored:
    shutil.copytree(stored.folder, tmp_path / "snapshots")
    return dataclasses.replace(stored, folder=tmp_path / "snapshots")


def test_one_file_a_build_named_by_its_key(stored: Stored, source: Source) -> None:
    assert stored.file.name == key(source)


def test_a_rebuild_starts_from_the_snapshot(copied: Stored, source: Source, tmp_path: Path) -> None:
    stages: list[str] = []

    again = build(source.config, tmp_path / "again", max_seq_len=64, snapshots=copied.folder, progress=stages.append)

    assert again.provenance["from_snapshot"] is True
    assert again.digest == copied.digest
    assert stages == ["config", "caches", "lower", "pack"]


def test_another_page_size_starts_from_the_snapshot(copied: Stored, source: Source, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_seq_len": 64, "page_size": 32}

    quick = build(source.config, tmp_path / "quick", snapshots=copied.folder, **options)
    fresh = build(source.config, tmp_path / "fresh", **options)

    assert quick.provenance["from_snapshot"] is True
    assert quick.digest == fresh.digest
    assert quick.digest != copied.digest


@pytest.mark.parametrize(
    ("stage", "variant"),
    [("export", "gemma3"), ("normalise", "jamba"), ("match", "deepseek_v2"), ("cache", "jamba"), ("plan", "gemma3")],
)
def test_a_snapshot_after_any_stage(stage: str, variant: str, tmp_path: Path) -> None:
    """Caches of several kinds, sizes that only passes know, layers of experts."""
    options: dict[str, Any] = {"dtype": "bfloat16", "snapshots": tmp_path / "snapshots", "snapshot_after": stage}
    config = families.make_config(variant)

    bundles = [build(config, tmp_path / name, **options) for name in ("first", "second")]

    assert [bundle.provenance["from_snapshot"] for bundle in bundles] == [False, True]
    assert bundles[0].digest == bundles[1].digest


def test_a_stage_without_snapshots_is_refused(tmp_path: Path, source: Source) -> None:
    with pytest.raises(BuildError, match=r"snapshot_after is .lower., which is no stage") as error:
        build(source.config, tmp_path / "bundle", snapshots=tmp_path, snapshot_after="lower")

    assert error.value.code == "option-invalid"
    assert error.value.fix == "name one of export, normalise, match, shard, cache, plan"

    with pytest.raises(BuildError) as error:
        build(source.config, tmp_path / "bundle", snapshots=tmp_path, snapshot_after="normalize")

    assert error.value.fix == "name normalise"


def test_a_stage_without_a_directory_is_refused(tmp_path: Path, source: Source) -> None:
    with pytest.raises(BuildError, match="snapshot_after is match, but there is no directory for snapshots") as error:
        build(source.config, tmp_path / "bundle", snapshot_after="match")

    assert error.value.code == "option-invalid"
    assert error.value.fix == "name one as snapshots, or leave snapshot_after out"


@pytest.mark.parametrize("options", [Options("float32", 64, 8), Options("float32", 64, None, "float8_e4m3fn")])
def test_options_of_caches_are_in_the_key_of_a_graph_with_caches(options: Options, source: Source) -> None:
    assert key(source, options, pipeline.PASSES) != key(source, OPTIONS, pipeline.PASSES)
    assert key(source, options) == key(source)


def test_a_stored_graph_is_read_back_node_for_node() -> None:
    small = read_graph(
        """
        x: input(float32, 1, T, 8)
        w: param(float32, 8)
        c: constant(float32, [0.5, 1.5])
        size = aten.sym_size.int(x, 1)
        with layer("layers.0"):
            y = aten.slice.Tensor(x, 1, 0, size, 2)
            wide = aten.transpose.int(y, 1, 2)
            a, b = aten.split.Tensor(wide, 4, 1)
        z = aten.to.dtype(a, bfloat16)
        return z, b, c, w
        """
    )
    stored = store(small.graph, small.ctx)
    assert stored is not None

    graph, ctx = load(stored, OPTIONS)

    assert write_graph(graph, ctx) == write_graph(small.graph, small.ctx)
    assert store(graph, ctx) == stored
    assert [layer_of(node) for node in graph.nodes] == [layer_of(node) for node in small.graph.nodes]


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(at: float) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        place = int(at * len(data))
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    return flip


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[:10], id="a part of the head"),
        pytest.param(truncated, id="half"),
        pytest.param(lambda data: data[:-1], id="all but a byte"),
        pytest.param(flipped(0.0), id="a bit at the start"),
        pytest.param(flipped(0.03), id="a bit of the digest"),
        pytest.param(flipped(0.5), id="a bit in the middle"),
        pytest.param(flipped(0.999), id="a bit at the end"),
        pytest.param(lambda data: b"precast-snapshot-0" + data[18:], id="another format"),
    ],
)
def test_a_damaged_snapshot_is_a_miss(damage: Callable[[bytes], bytes], copied: Stored, source: Source) -> None:
    copied.file.write_bytes(damage(copied.file.read_bytes()))

    assert Store(copied.folder).read(key(source), OPTIONS) is None


def test_the_undamaged_one_is_none(copied: Stored, source: Source) -> None:
    assert Store(copied.folder).read(key(source), OPTIONS) is not None


def test_a_snapshot_under_another_key_is_a_miss(copied: Stored) -> None:
    other = "0" * 64
    copied.file.rename(copied.folder / other)

    assert Store(copied.folder).read(other, OPTIONS) is None


def test_a_damaged_snapshot_is_replaced_by_the_next_build(copied: Stored, source: Source, tmp_path: Path) -> None:
    whole = copied.file.read_bytes()
    copied.file.write_bytes(truncated(whole))

    bundle = build(source.config, tmp_path / "bundle", max_seq_len=64, snapshots=copied.folder)

    assert bundle.provenance["from_snapshot"] is False
    assert bundle.digest == copied.digest
    assert copied.file.read_bytes() == whole


def test_a_directory_in_a_snapshots_place_is_a_miss(copied: Stored, source: Source) -> None:
    copied.file.unlink()
    (copied.folder / key(source)).mkdir()

    assert Store(copied.folder).read(key(source), OPTIONS) is None


def test_no_directory_is_a_miss(tmp_path: Path, source: Source) -> None:
    assert Store(tmp_path / "nothing").read(key(source), OPTIONS) is None


def test_a_model_without_attention(tmp_path: Path) -> None:
    """Its graph doesn't use cu_seqlens, so that the one restored has no such input."""
    config = odd_models.odd_config(("tanh",), ("tanh",))

    bundles = [build(config, tmp_path / name, snapshots=tmp_path / "snapshots") for name in ("first", "second")]

    assert [bundle.provenance["from_snapshot"] for bundle in bundles] == [False, True]
    assert bundles[0].digest == bundles[1].digest
    assert [value.name for value in bundles[1].graph.inputs] == ["input_ids", "logit_rows"]


def test_a_graph_that_a_snapshot_cannot_hold_is_not_stored(tmp_path: Path) -> None:
    """A size that depends on values: it is none of the batch, and has no name."""
    small = read_graph("x: input(float32, 1, T, 8)\ny = aten.nonzero(x)\nreturn y")
    info = ModelInfo("Small", "small", "float32", vocab_size=8, max_seq_len=64, num_layers=0, num_parameters=0)

    stored = Store(tmp_path / "snapshots").write("0" * 64, Captured(small.graph, small.ctx, info, Checkpoint()), ())

    assert not stored
    assert not (tmp_path / "snapshots").exists()
