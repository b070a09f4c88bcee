"""`precast bench kernels`: the table of what was measured, as text, fields and a file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from precast.cli.progress import counted
from precast.cli.show import Report, table
from precast.ir.artifact import Bundle
from precast.ir.errors import PrecastError, TargetError
from precast.ir.trust.loading import repository_of, rules_of
from precast.kernels.measured import Table, write_table


def bench(bundle: Path, out: Path | None) -> Report:
    """Measure a bundle's nodes on this machine's GPU, and write the table. Raises what `measured` does."""
    found = measured(bundle, out)
    return Report(msgspec.to_builtins(found), text(found))


def measured(bundle: Path, out: Path | None) -> Table:
    """The table of a bundle's nodes on this machine's GPU; `out`: its file, which grows with each step.

    Raises TargetError `device-missing` without a GPU, BundleError for a bundle that is refused, also by this machine's
    trust policy (`untrusted`), PrecastError `write-failed` where the file can't be written.
    """
    opened = Bundle.open(bundle)
    rules_of(opened, None, repository_of(bundle))  # what the policy keeps out isn't run here either
    from precast.bench.kernels import measure
    from precast.bench.steps import steps_of
    from precast.kernels.machine import this_machine
    from precast.kernels.timing import replayed
    from precast.loader.placement import place

    try:
        placement = place("cuda")
    except TargetError as error:
        error.fix = "run it on the machine whose GPU is to be measured; check its driver with nvidia-smi"
        raise
    with placement.device.use(), counted(len(steps_of(opened.manifest.model.max_seq_len)), "steps") as count:

        def say(done: int, total: int, found: Table) -> None:
            if out is not None:
                _write(found, out)
            if count is not None:
                count(done, total)

        return measure(opened, placement, this_machine(), replayed, say=say)


def _write(found: Table, out: Path) -> None:
    try:
        write_table(found, out)
    except OSError as error:
        message = f"the table can't be written: {error.strerror}"
        raise PrecastError("write-failed", message, where=str(out)) from error


def text(found: Table) -> str:
    """The machine, a row for each node and class of sizes, and one for each product of cuBLASLt's."""
    machine = found.machine
    rows = [("op", "sizes", "fastest", "us", "others")]
    for row in found.choices:
        sizes = ", ".join(f"{symbol} {low} to {high}" for symbol, (low, high) in row.sizes.items())
        first, *others = (f"{name} {time:.1f}" for name, time in zip(row.order, row.microseconds, strict=True))
        name, _, time = first.rpartition(" ")
        rows.append((row.op, sizes or "all", name, time, ", ".join(others)))
    products = [("linear", "dtype", "rows", "us", "first choice")]
    for each in found.products:
        shape = f"{each.outputs} x {each.inputs}{' + bias' if each.bias else ''}"
        products.append(
            (shape, each.dtype, f"{each.rows}", f"{each.microseconds:.1f}", f"{each.first_microseconds:.1f}")
        )
    versions = f"torch {machine.torch}, Triton {machine.triton}, cuBLASLt {machine.cublaslt}"
    return f"{machine.gpu}, driver {machine.driver}, {versions}\n\n{table(rows)}\n\n{table(products)}"
