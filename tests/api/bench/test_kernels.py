"""Measuring a bundle's nodes, on a CPU and with times of our own; what is made of the table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import families
import msgspec
import pytest
import torch
from recitation import Command

import precast
from precast.bench.kernels import measure
from precast.bench.steps import CONTEXT, Step, random_tensors, step_inputs, steps_of
from precast.cli.kernels_bench import text
from precast.ir.artifact import Bundle
from precast.kernels.machine import this_machine
from precast.kernels.measured import Machine, Table, read_table, write_table
from precast.kernels.timing import replayed
from precast.loader.placement import bind_world, place
from precast.loader.program.restore import restore

CPU = torch.device("cpu")
HERE = Machine("NVIDIA H200", (9, 0), "580.95", "2.11.0", "3.6.0", 130100)
STEPS = (Step(3, 1, 40, dict.fromkeys("TBR", (2, 4))), Step(1, 20, 20, {"T": (17, 32)}))


class Clock:
    """A timer that runs everything, and says that each thing took less time than the one before."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        for run in runs:
            run()
        self.now -= 1
        return [self.now] * len(runs)


@pytest.fixture(scope="module")
def table(other_bundle: Path) -> Table:
    return measure(Bundle.open(other_bundle), place("cpu"), HERE, Clock(), steps=STEPS)


def test_what_fits_alone_has_no_row(table: Table) -> None:
    found = {row.op: row.order for row in table.choices}

    assert found == {"precast.paged_attention": ("reference.paged_attention", "torch.paged_attention")}


def test_rows_are_the_fastest_first_by_the_sizes_that_a_node_knows(table: Table) -> None:
    attention = [row for row in table.choices if row.op == "precast.paged_attention"]

    assert [row.sizes for row in attention] == [{"T": (2, 4), "B": (2, 4)}]
    for row in table.choices:
        assert list(row.microseconds) == sorted(row.microseconds)
        assert len(row.microseconds) == len(row.order) > 1


def test_the_table_grows_with_each_step(table: Table, other_bundle: Path) -> None:
    """Whoever is told of the steps may keep it: a run that is ended early has measured what it has."""
    told: list[tuple[int, int, int]] = []
    measure(
        Bundle.open(other_bundle), place("cpu"), HERE, Clock(), steps=STEPS,
        say=lambda done, total, found: told.append((done, total, len(found.choices))),
    )  # fmt: skip

    assert told == [(0, 2, 0), (1, 2, len(table.choices)), (2, 2, len(table.choices))]


def test_what_fails_has_no_time(other_bundle: Path) -> None:
    """Whatever is raised: a compiler's errors are no RuntimeErrors."""
    fails = iter((ValueError("out of shared memory"), RuntimeError("no memory")))

    def timer(runs: Sequence[Callable[[], object]]) -> list[float]:
        raise next(fails)

    assert measure(Bundle.open(other_bundle), place("cpu"), HERE, timer, steps=STEPS[:1]).choices == ()


def test_tables_are_read_as_they_are_written(table: Table, tmp_path: Path) -> None:
    write_table(table, tmp_path / "table.json")
    again = read_table(tmp_path / "table.json")

    assert again == table
    assert msgspec.json.decode((tmp_path / "table.json").read_bytes())["machine"]["gpu"] == "NVIDIA H200"


def test_the_machine_at_hand_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its versions are text, whatever torch says its own is."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    write_table(Table(this_machine()), tmp_path / "table.json")

    assert read_table(tmp_path / "table.json").machine.torch == torch.__version__


def test_a_table_decides_what_computes(table: Table, other_bundle: Path, command: Command, tmp_path: Path) -> None:
    write_table(table, tmp_path / "table.json")
    shown = command(
        "inspect", other_bundle, "--kernels", "--target", "cpu", "--choices", tmp_path / "table.json", "--json"
    )
    rows = [row for row in json.loads(shown.stdout)["kernels"] if row["op"] == "precast.paged_attention@1"]
    chosen = {row["sizes"]: (row["implementation"], row["reason"].split(";")[0]) for row in rows}

    assert chosen["T 2 to 4, B 2 to 4"][0] == "reference.paged_attention"
    assert chosen["T 2 to 4, B 2 to 4"][1].startswith("measured: ")
    assert chosen["T 2 to 4, B 5 to any"] == ("torch.paged_attention", "the fastest of 2")
    assert json.loads(shown.stdout)["measured_on"] == "NVIDIA H200"


def test_text_has_the_machine_and_all_rows(table: Table) -> None:
    shown = text(table)

    assert shown.startswith("NVIDIA H200, driver 580.95, torch 2.11.0, Triton 3.6.0, cuBLASLt 130100\n")
    assert shown.count("precast.paged_attention") == sum(row.op == "precast.paged_attention" for row in table.choices)


def test_without_a_gpu_the_command_says_so(bundle: Path, command: Command, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    found = command("bench", "kernels", bundle, "-o", tmp_path / "table.json", "--json")

    assert found.exit_code == 4
    assert json.loads(found.stdout)["error"]["code"] == "device-missing"
    assert not (tmp_path / "table.json").exists()


def test_a_bundle_that_is_none_is_refused_first(command: Command, tmp_path: Path) -> None:
    found = command("bench", "kernels", tmp_path / "nothing")

    assert found.exit_code == 3
    assert "bundle-missing" in found.stderr


@pytest.mark.gpu
def test_on_a_gpu(other_bundle: Path) -> None:
    """Linear layers of 16 rows have two records or more, and algorithms where cuBLASLt takes them."""
    steps = (*STEPS, Step(16, 1, 40, dict.fromkeys("TBR", (9, 16))))
    table = measure(Bundle.open(other_bundle), place("cuda"), this_machine(), replayed, steps=steps)

    linear = [row for row in table.choices if row.op == "aten.linear.default" and row.sizes.get("T") == (9, 16)]
    assert linear
    assert all({"torch.linear.default", "cublaslt.linear"} <= set(row.order) for row in linear)
    assert {product.rows for product in table.products} == {16, 32}
    assert all(0 < product.microseconds <= product.first_microseconds for product in table.products)


# --- steps -------------------------------------------------------------------------------------------------------


def test_steps_follow_one_another() -> None:
    decode, prefill = steps_of(1 << 20)[:7], steps_of(1 << 20)[7:]

    assert [step.sizes["T"] for step in decode] == [(1, 1), (2, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256)]
    assert {(step.num_tokens, step.context) for step in decode} == {(1, CONTEXT)}
    assert [(step.num_tokens, step.sizes) for step in prefill] == [
        (1024, {"T": (257, 1024)}),
        (4096, {"T": (1025, 4096)}),
        (8192, {"T": (4097, 8192)}),
    ]
    assert {step.context for step in steps_of(200)} == {200}


@pytest.mark.parametrize("variant", ["gemma3", "mamba2", "qwen3_moe", "deepseek_v3"])
def test_random_steps_run(variant: str, tmp_path: Path) -> None:
    """Windows, states, experts and latents; with nothing but finite logits."""
    bundle = precast.build(families.make_config(variant), tmp_path / "b", dtype="float32")
    graph = bind_world(bundle.graph, place("cpu"))
    program = restore(graph, device=CPU)
    program.bind(random_tensors(graph, STEPS, CPU))
    for step in STEPS:
        logits = program(**step_inputs(graph, step, CPU))["logits"]

        assert logits.shape[-2] == step.num_seqs
        assert bool(logits.isfinite().all())


# --- files -------------------------------------------------------------------------------------------------------

GOOD = {"machine": msgspec.to_builtins(HERE)}
ROW = {"op": "aten.linear.default", "dtype": "bfloat16", "sizes": {"T": [9, None]}, "order": ["torch.linear.default"]}
PRODUCT = {
    "dtype": "bfloat16", "outputs": 8, "inputs": 8, "bias": False, "rows": 16, "algorithm": "0" * 128,
    "microseconds": 1.0, "first_microseconds": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{}", b"\xff",
        json.dumps({**GOOD, "more": 1}).encode(),
        json.dumps({"machine": {**GOOD["machine"], "date": "today"}}).encode(),
        json.dumps({**GOOD, "choices": [{**ROW, "order": []}]}).encode(),
        json.dumps({**GOOD, "choices": [{**ROW, "sizes": {"T": [-1, 2]}}]}).encode(),
        json.dumps({**GOOD, "choices": [{**ROW, "microseconds": [1.0, 2.0]}]}).encode(),
        json.dumps({**GOOD, "choices": [{**ROW, "dtype": "int3"}]}).encode(),
        json.dumps({**GOOD, "products": [{**PRODUCT, "algorithm": "00"}]}).encode(),
        json.dumps({**GOOD, "products": [{**PRODUCT, "algorithm": "x" * 128}]}).encode(),
    ],
    ids=range(12),
)  # fmt: skip
def test_what_is_no_table_is_refused(content: bytes, bundle: Path, command: Command, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_bytes(content)
    found = command("inspect", bundle, "--kernels", "--choices", tmp_path / "table.json")

    assert found.exit_code == 1
    assert "choices-invalid" in found.stderr


def test_a_table_that_is_not_there(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(precast.RequestError, match="can't be read") as error:
        precast.load(bundle, weights=tmp_path, device="cpu", choices=tmp_path / "nothing")

    assert error.value.code == "choices-invalid"


def test_rows_are_read(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps({**GOOD, "choices": [ROW], "products": [PRODUCT]}))
    found = read_table(tmp_path / "table.json")

    assert found.choices[0].sizes == {"T": (9, None)}
    assert found.algorithms("bfloat16", 8, 8, bias=False) == {16: "0" * 128}
    assert found.algorithms("bfloat16", 8, 8, bias=True) == {}
