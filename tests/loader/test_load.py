"""From a bundle and a checkpoint on disk to an engine: phases, sizes, and what is refused."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from file_server import serving
from safetensors.torch import save_file
from tiny import random_weights, reference_answer, tiny_graph, tiny_model
from tokenizers_by_hand import letters

from precast.ir import artifact
from precast.ir.artifact import Bundle, ops_of, write_bundle
from precast.ir.encoding import FORMAT
from precast.ir.errors import BundleError, PrecastError, RequestError, TargetError, WeightsError
from precast.ir.graph.schema import Call, CapturePlan, Const, Graph, Node, Ref, TensorType, Value
from precast.ir.manifest import Checkpoint, ConfigFacts, Manifest
from precast.loader import collector
from precast.loader.collector import collector_held
from precast.loader.engine.params import SamplingParams
from precast.loader.load import load
from precast.loader.run.batch import BatchInputs
from precast.loader.timeline import Timeline

WEIGHTS = random_weights()
GRAPH = tiny_graph()
CPU = torch.device("cpu")
SLAB = 1024  # one page of pool small, two of pool large
SLABS_OF_64 = 64 // 4 + 64 // 8 // 2  # for a sequence of 64 tokens


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bundle") / "tiny.bundle", GRAPH)


def write(path: Path, graph: Graph, config: ConfigFacts | None = None, tokenizer: bytes | None = None) -> Path:
    """The bundle of the tiny model with this graph."""
    inv_freq = WEIGHTS["inv_freq"]
    write_bundle(
        path,
        manifest_without_blobs=Manifest(FORMAT, tiny_model(), ops_of(graph), Checkpoint(), (), {}, (), config=config),
        graph=graph,
        constants={"inv_freq": ("float32", tuple(inv_freq.shape), inv_freq.numpy().tobytes())},
        files={"tokenizer.json": letters(48) if tokenizer is None else tokenizer},
        provenance={},
    )
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    save_file({name: tensor for name, tensor in WEIGHTS.items() if name != "inv_freq"}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(("planned", "captured"), [((4, 1, 2), [1, 2, 4]), ((6, 16, 3), [3, 6, 7]), ((), [1, 2, 4, 7])])
def test_the_bundle_s_capture_plan_counts_and_else_the_loader_s(
    planned: tuple[int, ...], captured: list[int], checkpoint: Path, tmp_path: Path
) -> None:
    """Of the sizes above the 7 tokens of a step the first is one of 7 tokens."""
    bundle = write(tmp_path / "b", msgspec.structs.replace(GRAPH, capture=CapturePlan(planned)))

    with load(bundle, weights=checkpoint, device="cpu", max_num_tokens=7, capture="before") as engine:
        paddings = []
        for length in range(1, 8):
            before = engine.stats
            engine.generate([[5] * length], SamplingParams(max_tokens=1))
            padded = engine.stats.tokens_padded - before.tokens_padded
            paddings.append(None if engine.stats.eager_steps > before.eager_steps else length + padded)
            engine.forget_prefixes()

    assert sorted({size for size in paddings if size is not None}) == captured


def test_a_bundle_and_a_checkpoint_become_tokens(bundle: Path, checkpoint: Path) -> None:
    with load(str(bundle), weights=str(checkpoint), device="cpu", max_num_tokens=7) as engine:
        outputs = engine.generate([[5], [9] * 17], SamplingParams(max_tokens=9))
        assert [output.token_ids for output in outputs] == [
            reference_answer(WEIGHTS, prompt, 9) for prompt in ([5], [9] * 17)
        ]
        assert all(output.text for output in outputs)
        phases = {phase.name: phase for phase in engine.timeline.phases}
        assert list(phases) == ["import", "context", "bundle", "weights", "pools", "first token"]
        assert all(phase.seconds is not None for phase in phases.values())
        size = sum(tensor.nbytes for name, tensor in WEIGHTS.items() if name != "inv_freq")
        assert phases["weights"].bytes == phases["weights"].counters["bytes_needed"] == size
        # 16 sequences of 64 tokens, the model's limit: 8 pages, and those for the window of 6 and steps of 7 tokens
        assert phases["pools"].bytes == 16 * (8 // 2 + 4) * SLAB
        assert phases["pools"].counters["slabs"] * phases["pools"].counters["slab_bytes"] == phases["pools"].bytes
        assert json.loads(engine.timeline.to_json())["phases"][-1]["name"] == "first token"


def test_weights_may_be_on_a_server(bundle: Path, checkpoint: Path) -> None:
    files = {f"m/{file.name}": file.read_bytes() for file in checkpoint.iterdir()}

    with serving(files) as server, load(bundle, weights=f"{server.address}/m", device="cpu") as engine:
        (answer,) = engine.generate([[9] * 17], SamplingParams(max_tokens=9))

    assert answer.token_ids == reference_answer(WEIGHTS, [9] * 17, 9)


@pytest.mark.parametrize(
    ("options", "code"),
    [({"weights": "ftp://host/m"}, "checkpoint-address"), ({"weights_timeout": 0}, "engine-option-invalid")],
)
def test_what_can_t_be_weights_is_refused_before_the_bundle_is_read(
    options: dict[str, Any], code: str, tmp_path: Path
) -> None:
    with pytest.raises(PrecastError) as caught:
        load(tmp_path / "no.bundle", **{"weights": tmp_path, "device": "cpu"} | options)
    assert caught.value.code == code


@pytest.mark.parametrize("reuses", [True, False])
def test_prefixes_are_reused_unless_that_is_switched_off(bundle: Path, checkpoint: Path, reuses: bool) -> None:
    with load(bundle, weights=checkpoint, device="cpu", reuse_prefixes=reuses) as engine:
        first, second = (engine.generate([[9] * 17], SamplingParams(max_tokens=3)) for _ in range(2))
        assert first == second
        assert (engine.stats.tokens_reused, engine.stats.prefix_spans) == ((16, 2) if reuses else (0, 0))


@pytest.mark.gpu
def test_a_gpu_is_filled_with_as_many_pages_as_can_be_used(bundle: Path, checkpoint: Path) -> None:
    with load(bundle, weights=checkpoint, device="cuda", max_num_seqs=5) as engine:
        assert engine.stats.slabs == 5 * SLABS_OF_64
        (output,) = engine.generate([[9] * 17], SamplingParams(max_tokens=9))
        assert output.token_ids == reference_answer(WEIGHTS, [9] * 17, 9)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"max_num_seqs": 33}, "engine-option-invalid"),
        ({"max_num_seqs": 8, "cache_bytes": 100}, "cache-too-small"),
    ],
)
def test_what_can_be_known_is_refused_before_a_tensor_is_read(
    options: Any, code: str, tmp_path: Path, checkpoint: Path
) -> None:
    symbols = tuple(msgspec.structs.replace(each, max=32) if each.name == "B" else each for each in GRAPH.symbols)
    limited = write(tmp_path / "limited.bundle", msgspec.structs.replace(GRAPH, symbols=symbols))
    timeline = Timeline()
    with pytest.raises(PrecastError) as error:
        load(limited, weights=checkpoint, device="cpu", timeline=timeline, **options)
    assert error.value.code == code
    assert [phase.name for phase in timeline.phases] == ["import", "context", "bundle"]


def test_inputs_that_nobody_feeds_make_no_bundle(tmp_path: Path) -> None:
    unknown = Value("patches", TensorType("float32", (1, "T", 16)))
    graph = msgspec.structs.replace(GRAPH, inputs=(*GRAPH.inputs, unknown))

    with pytest.raises(BundleError, match=r"IR056 input %patches: .* no step gives it"):
        write(tmp_path / "other.bundle", graph)
    with pytest.raises(BundleError, match="the graph takes patches") as error:
        BatchInputs(graph)
    assert error.value.code == "input-mismatch"


def poisoned(graph: Graph, name: str) -> Graph:
    """The graph, with 1,000,000 more in the place of an input wherever it is used."""
    kind = next(value.type for value in graph.inputs if value.name == name)
    more = Node("aten.add.Tensor", {"self": Ref(name), "other": Const(10**6)}, (Value("wrong", kind),))

    def spoilt(step: Node | Call) -> Node | Call:
        if isinstance(step, Call):
            bound = {formal: "wrong" if actual == name else actual for formal, actual in step.args.items()}
            return msgspec.structs.replace(step, args=bound)
        args = {key: Ref("wrong") if arg == Ref(name) else arg for key, arg in step.args.items()}
        return msgspec.structs.replace(step, args=args)

    return msgspec.structs.replace(graph, main=(more, *map(spoilt, graph.main)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *((name, "IR051") for name in ("cu_seqlens", "kv_lens", "logit_rows")),
        *((name, "IR047") for name in ("slot_mapping_far", "page_indices_near", "page_indptr_far", "page_start_near")),
        ("slot_ids", "IR047"),
        ("input_ids", "IR052"),
    ],
)
def test_a_poisoned_graph_is_refused_before_a_tensor_is_read(
    name: str, rule: str, device: str, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as unchecked:
        unchecked.setattr(artifact, "check", lambda *_: None)
        bad = write(tmp_path / "bad.bundle", poisoned(tiny_graph(state=True), name))
    timeline = Timeline()
    with pytest.raises(BundleError, match=rule) as error:
        load(bad, weights=checkpoint, device=device, timeline=timeline)
    assert error.value.code == "graph-invalid"
    assert [phase.name for phase in timeline.phases] == [*(["import", "context"] if device == "cpu" else []), "bundle"]


def test_a_graph_without_logits_is_refused_before_a_tensor_is_read(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (logits,) = GRAPH.outputs.values()
    with monkeypatch.context() as unchecked:
        unchecked.setattr(artifact, "check", lambda *_: None)
        other = write(tmp_path / "other.bundle", msgspec.structs.replace(GRAPH, outputs={"hidden": logits}))
    timeline = Timeline()
    with pytest.raises(BundleError, match="no output logits") as error:
        load(other, weights=checkpoint, device="cpu", timeline=timeline)
    assert error.value.code == "graph-invalid"
    assert [phase.name for phase in timeline.phases] == ["import", "context", "bundle"]


def test_a_native_layer_that_is_asked_for_is_not_passed_over_on_a_cpu(bundle: Path, checkpoint: Path) -> None:
    with pytest.raises(TargetError, match="--allow-native is given, and the device is cpu") as error:
        load(bundle, weights=checkpoint, device="cpu", native=Bundle.open(bundle).digest)
    assert error.value.code == "native-refused"


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (letters(48)[:-1], "truncated"),
        (b"<html>", "malformed"),
        (b"{}", "missing required field `model`"),
        (b'{"model": {"type": "Sentences"}}', "'Sentences'"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused_before_a_tensor_is_read(
    tokenizer: bytes, message: str, tmp_path: Path, checkpoint: Path
) -> None:
    damaged = write(tmp_path / "damaged.bundle", GRAPH, tokenizer=tokenizer)
    timeline = Timeline()
    with pytest.raises(BundleError, match=message) as error:
        load(damaged, weights=checkpoint, device="cpu", timeline=timeline)
    assert error.value.code == "tokenizer-invalid"
    assert error.value.where == "tokenizer.json"
    assert [phase.name for phase in timeline.phases] == ["import", "context", "bundle"]


def test_a_checkpoint_with_another_config_is_served_on_request_alone(tmp_path: Path, checkpoint: Path) -> None:
    traced = write(tmp_path / "traced.bundle", GRAPH, ConfigFacts({"rope_theta": 1e4, "rms_norm_eps": 1e-6}))
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    (other / "config.json").write_text('{"rope_theta": 10000.0, "rms_norm_eps": 1e-05}')
    timeline = Timeline()
    with pytest.raises(WeightsError, match="rms_norm_eps: 1e-06 in the bundle, 1e-05 here") as error:
        load(traced, weights=other, device="cpu", timeline=timeline)
    assert error.value.code == "config-mismatch"
    assert [phase.name for phase in timeline.phases] == ["import", "context", "bundle"]

    with load(traced, weights=other, device="cpu", allow_config_mismatch=True) as engine:
        (output,) = engine.generate([[5]], SamplingParams(max_tokens=3))
    assert output.token_ids == reference_answer(WEIGHTS, [5], 3)


def test_a_policy_that_keeps_the_bundle_out_is_obeyed_before_a_tensor_is_read(
    bundle: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "precast" / "trust.json"
    policy.parent.mkdir()
    policy.write_text('{"version": 1, "portable": "vouched"}')
    timeline = Timeline()

    with pytest.raises(BundleError) as by_option:
        load(bundle, weights=checkpoint, device="cpu", trust=policy, timeline=timeline)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(BundleError) as by_default:
        load(bundle, weights=checkpoint, device="cpu")

    assert (by_option.value.code, by_default.value.code) == ("untrusted", "untrusted")
    assert "weights" not in [phase.name for phase in timeline.phases]


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_as_it_was(was_enabled: bool, bundle: Path) -> None:
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(WeightsError):
            load(bundle, weights=bundle, device="cpu")
        assert gc.isenabled() == was_enabled
        with collector_held():
            assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_is_made_meanwhile_is_old_at_once(is_frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A young collection that came next would look through all of it. What somebody has frozen stays frozen."""
    monkeypatch.setattr(collector, "_frozen_once", False)
    was_frozen = gc.get_freeze_count() > 0
    (gc.freeze if is_frozen else gc.unfreeze)()
    try:
        with collector_held():
            made = [[each] for each in range(1000)]
        old = {id(each) for each in gc.get_objects(generation=2)}
        assert (id(made[0]) in old) == (not is_frozen)
        assert (gc.get_freeze_count() > 0) == is_frozen
    finally:
        (gc.freeze if was_frozen else gc.unfreeze)()


def test_frozen_objects_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a million objects that takes 0.05 s, and a load holds the collector back a few times."""
    monkeypatch.setattr(collector, "_frozen_once", False)
    counted: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or 1_000_000)
    for _ in range(2):
        with collector_held():
            pass

    assert counted == [1]


def test_an_opened_bundle_and_a_begun_timeline_are_carried_on(bundle: Path, checkpoint: Path) -> None:
    timeline = Timeline()
    timeline.add("import", start=timeline.origin, seconds=0.5)
    engine = load(Bundle.open(bundle), weights=checkpoint, device=CPU, timeline=timeline)
    assert engine.timeline is timeline
    assert [phase.name for phase in timeline.phases] == ["import", "context", "bundle", "weights", "pools"]
    engine.generate(["hello"], SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0, expected an integer of at least 1"),
        (
            {"max_num_seqs": 10**5000},
            "max_num_seqs is an integer of 16610 bits, expected an integer of at least 1, of 64",
        ),
        ({"cache_bytes": 2**63}, "cache_bytes is 9223372036854775808"),
        ({"max_num_tokens": True}, "max_num_tokens is True"),
        ({"max_num_tokens": 1.5}, "max_num_tokens is 1.5"),
        ({"cache_bytes": 0}, "cache_bytes is 0"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens is 0, expected an integer of at least 1"),
        ({"world_port": 0}, "world_port is 0, expected a port from 1 to 65535"),
        ({"world_port": 65536, "tp": 2}, "world_port is 65536, expected a port from 1 to 65535"),
        ({"device": "gpu"}, "device is 'gpu', expected 'cpu', 'cuda'"),
        ({"device": 3.5}, "device is 3.5"),
        ({"bundle": None}, "bundle is None, expected a path or a Bundle"),
        ({"weights": None}, "weights is None, expected the path of a checkpoint"),
    ],
)
def test_options_that_are_refused(options: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        load(**{"bundle": "no such bundle", "weights": "no such checkpoint", **options})
    assert error.value.code == "engine-option-invalid"


def test_what_is_not_there_is_named(bundle: Path, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError) as error:
        load(tmp_path / "none", weights=checkpoint, device="cpu")
    assert error.value.code == "bundle-missing"
    with pytest.raises(WeightsError) as other:
        load(bundle, weights=tmp_path / "none", device="cpu")
    assert other.value.code == "checkpoint-missing"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_num_seqs": 2, "max_num_tokens": 2**40},
            "max_num_tokens is 1099511627776, and a step of this bundle takes at most 512",
        ),
        ({"max_num_seqs": 33}, "max_num_seqs is 33, and a step of this bundle takes at most 32"),
    ],
)
def test_steps_that_no_graph_takes(options: Any, message: str, tmp_path: Path) -> None:
    limits = {"T": 512, "B": 32}
    symbols = tuple(msgspec.structs.replace(each, max=limits.get(each.name)) for each in GRAPH.symbols)
    limited = write(tmp_path / "limited.bundle", msgspec.structs.replace(GRAPH, symbols=symbols))
    with pytest.raises(RequestError, match=message) as error:
        load(limited, weights="no such checkpoint", device="cpu", **options)
    assert error.value.code == "engine-option-invalid"
