"""`precast seal`: what was measured on this machine's GPU, attached to a bundle whose digest stays what it was."""

from __future__ import annotations

from pathlib import Path

import msgspec

from precast.cli.show import Report, table
from precast.ir.artifact import Bundle, attach
from precast.kernels.measured import Table, read_table
from precast.kernels.sealed import sealed, sealed_tables


def seal(path: Path, choices: Path | None) -> Report:
    """Attach a table of measured choices to a bundle: that of a file, or one that is measured now.

    A table of the same machine (GPU, driver, versions) is replaced. Raises what `precast bench kernels` raises, and
    what `precast.ir.artifact.attach` does.
    """
    bundle = Bundle.open(path)
    found = _measured(path) if choices is None else read_table(choices)
    held = sealed_tables(bundle.attached)
    old = [digest for digest, each in held.items() if each.machine == found.machine]
    made = sealed(bundle.descriptor, found)
    attach(path, made, replacing=old)
    return report(bundle.digest, {**{d: each for d, each in held.items() if d not in old}, made.digest: found})


def report(digest: str, tables: dict[str, Table]) -> Report:
    """A row for each table."""
    rows: list[tuple[str, ...]] = [("GPU", "driver", "torch", "Triton", "cuBLASLt", "choices", "products", "manifest")]
    for name, each in tables.items():
        machine, counts = each.machine, (len(each.choices), len(each.products))
        versions = (machine.driver, machine.torch, machine.triton, str(machine.cublaslt))
        rows.append((machine.gpu, *versions, *map(str, counts), name))
    fields = {
        "digest": digest,
        "tables": [
            {"manifest": name, "machine": msgspec.to_builtins(each.machine), "choices": len(each.choices),
             "products": len(each.products)}
            for name, each in tables.items()
        ],
    }  # fmt: skip
    return Report(fields, f"{digest}\n\n{table(rows)}")


def _measured(path: Path) -> Table:
    from precast.cli.kernels_bench import measured

    return measured(path, None)
