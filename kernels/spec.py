"""`OpSpec`: the axes, dtypes, reference and tolerances of an op, for tests and docs; it stands beside the reference.

The signature, the shape rule and what it mutates stand in `precast.ir.ops.table`; a spec adds what only torch can say,
and takes all else from there. What computes the op fast stands in its family's records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from precast.ir.ops import table as ops


class Tolerance(NamedTuple):
    """How far an implementation may be from the reference: `|found - expected| <= atol + rtol * |expected|`."""

    rtol: float
    atol: float


# One rounding of the result for what is computed in float32 element by element.
ELEMENTWISE: Mapping[torch.dtype, Tolerance] = {
    torch.float16: Tolerance(2e-3, 1e-5),
    torch.bfloat16: Tolerance(1.6e-2, 1e-5),
    torch.float32: Tolerance(1e-5, 1e-6),
    torch.float64: Tolerance(1e-7, 1e-9),
}
# Two roundings one upon the other, of numbers up to 4 from which others as large may be taken away.
TWICE: Mapping[torch.dtype, Tolerance] = {
    torch.float16: Tolerance(4e-3, 4e-3),
    torch.bfloat16: Tolerance(3.2e-2, 3.2e-2),
    torch.float32: Tolerance(1e-5, 2e-6),
    torch.float64: Tolerance(1e-7, 1e-9),
}
# Products of half precision, whose terms and probabilities are rounded in an order of the kernel's own.
PRODUCT: Mapping[torch.dtype, Tolerance] = {
    torch.float16: Tolerance(4e-3, 2e-3),
    torch.bfloat16: Tolerance(2e-2, 1.6e-2),
    torch.float32: Tolerance(1e-4, 1e-5),
    torch.float64: Tolerance(1e-7, 1e-9),
}
# Results that are copies or integers.
EXACT: Mapping[torch.dtype, Tolerance] = {}


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """One version of an op.

    `axes` and `results` give each tensor's axes, results in order: `"1 T H D"`, with `...` for any number of leading
    axes, `2F` for a multiple and `B+1` for a sum; one letter has one size in a call. `"*"` alone: as a word among the
    arguments says. `dtypes` names the element types of each tensor argument that it takes. `tolerances` are for the
    largest of the floating results' dtypes, and for what is written; a dtype that isn't in it must be met exactly.
    `products_of` names the argument in whose type kernels multiply, where results are wider: its tolerances count then.
    """

    name: str
    version: int = 1
    axes: Mapping[str, str]
    results: Mapping[str, str]
    dtypes: Mapping[str, tuple[torch.dtype, ...]]
    reference: Callable[..., Any]
    tolerances: Mapping[torch.dtype, Tolerance] = field(default_factory=dict)
    products_of: str | None = None

    @property
    def torch_name(self) -> str:
        """The name in `torch.ops.precast`: that of the op, for later versions with the version."""
        name = self.name.removeprefix("precast.")
        return name if self.version == 1 else f"{name}_{self.version}"

    @property
    def definition(self) -> ops.OpDef:
        """The op's row of the op table: its signature, its shape rule, what it mutates."""
        definition = ops.lookup(self.name, self.version)
        assert definition is not None, f"{self.name}@{self.version} is not in the op table"
        return definition
