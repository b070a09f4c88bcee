"""Tables of what was measured on a GPU, as JSON: which record of an op is the fastest, and cuBLASLt's algorithms.

A GPU's table is `measured/<name>.json` of this room. No torch: `inspect` reads them too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from precast.ir.errors import RequestError, shown
from precast.ir.files import read_file
from precast.ir.graph.schema import Dtype

MAX_TABLE_BYTES = 64 << 20
"""A table has some hundred bytes a row, and a model some hundred rows."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Name = Annotated[str, msgspec.Meta(min_length=1)]
_Microseconds = Annotated[float, msgspec.Meta(gt=0)]
_Algorithm = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{128}$")]


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What measured: the GPU and its compute capability, its driver, the versions of torch, Triton and cuBLASLt; "" and
    0 where it isn't there."""

    gpu: _Name
    capability: tuple[_Count, _Count]
    driver: str
    torch: str
    triton: str
    cublaslt: _Count


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For a node in steps of these sizes, the op's records, the fastest first, with microseconds of each.

    `arguments` are the node's, as `precast.kernels.use.Use.text` writes them; "" stands for any of that `dtype`.
    """

    op: _Name
    dtype: Dtype
    sizes: Mapping[str, tuple[_Count, _Count | None]]
    order: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    microseconds: tuple[_Microseconds, ...] = ()
    arguments: str = ""


class MeasuredProduct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a linear layer in steps of a class of rows, which has so many at most, the fastest of cuBLASLt's algorithms.

    `algorithm`: its 64 bytes in hexadecimal. `first_microseconds` are those of the library's first choice.
    """

    dtype: Dtype
    outputs: _Count
    inputs: _Count
    bias: bool
    rows: _Count
    algorithm: _Algorithm
    microseconds: _Microseconds
    first_microseconds: _Microseconds


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured on a machine."""

    machine: Machine
    choices: tuple[Measured, ...] = ()
    products: tuple[MeasuredProduct, ...] = ()

    def algorithms(self, dtype: Dtype | None, outputs: int, inputs: int, *, bias: bool) -> dict[int, str]:
        """Of a linear layer, by the most rows of a class."""
        wanted = (dtype, outputs, inputs, bias)
        return {
            each.rows: each.algorithm
            for each in self.products
            if (each.dtype, each.outputs, each.inputs, each.bias) == wanted
        }


_GPUS = Path("/proc/driver/nvidia/gpus")

NOTHING = Table(Machine("none", (0, 0), "", "", "", 0))
"""Where nothing was measured."""


def read_table(path: Path) -> Table:
    """The table of a file. Raises RequestError `choices-invalid` for what is none."""
    try:
        found = msgspec.json.decode(read_file(path, MAX_TABLE_BYTES), type=Table)
    except OSError as error:
        raise RequestError("choices-invalid", f"the table can't be read: {error.strerror}", where=str(path)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        message = f"this is no table of measured choices: {shown(str(error))}"
        raise RequestError("choices-invalid", message, where=str(path)) from None
    for row in found.choices:
        if row.microseconds and len(row.microseconds) != len(row.order):
            message = f"{shown(row.op)} has {len(row.order)} records and {len(row.microseconds)} times: one for each"
            raise RequestError("choices-invalid", message, where=str(path))
    return found


def write_table(table: Table, path: Path) -> None:
    """Write a table as `read_table` reads it, a row a line, equal tables as equal bytes."""
    rows = [
        f'"{name}": [\n' + ",\n".join(msgspec.json.encode(row).decode() for row in getattr(table, name)) + "\n]"
        for name in ("choices", "products")
    ]
    machine = f'"machine": {msgspec.json.encode(table.machine).decode()}'
    path.write_text("{\n" + ",\n".join([machine, *rows]) + "\n}\n", encoding="utf-8")


@cache
def table_of(gpu: str) -> Table:
    """The table that comes with Precast for a GPU of this name, as its driver gives it; `NOTHING` where none does."""
    path = Path(__file__).parent / "measured" / f"{file_name(gpu)}.json"
    return read_table(path) if path.is_file() else NOTHING


@cache
def shipped_tables() -> tuple[Table, ...]:
    """All tables that come with Precast."""
    return tuple(read_table(path) for path in sorted((Path(__file__).parent / "measured").glob("*.json")))


def gpu_at_hand() -> str | None:
    """The name of this machine's first GPU, as the driver's files say it; None where there are none."""
    for file in sorted(_GPUS.glob("*/information")):
        try:
            found = re.search(r"^Model:\s*(.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        except (OSError, UnicodeDecodeError):
            return None
        return found and found[1].strip()
    return None


def file_name(gpu: str) -> str:
    """The name of a GPU's table: `nvidia-h200` of "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
