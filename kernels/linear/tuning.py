"""Measures which of cuBLASLt's algorithms computes a linear layer the fastest on this GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch

from precast.ir.graph.schema import Dtype
from precast.kernels.dtypes import BY_NAME
from precast.kernels.linear.cublaslt import Product
from precast.kernels.linear.records import workspace_bytes
from precast.kernels.measured import MeasuredProduct
from precast.kernels.timing import Timer, replayed, replayed_briefly

ROTATED_BYTES, ROTATED_BYTES_OF_MANY = 256 << 20, 96 << 20
"""Weights in turn of that many bytes together: more than a GPU's L2, so that each is read from memory; of up to
`MANY_ROWS` rows, and of more, where less depends on it."""
MANY_ROWS = 256
FEWEST = 8
"""Of up to 256 rows, so many products at least are timed together: beside them a graph begins in no time."""
FINALISTS = 5
"""So many of the fastest are measured again, in turn, beside the first choice."""
MOST_ERROR = 0.01
"""Of a result in 16 bits against the product in float32: |y - exact| / |exact|, over all elements."""


class Tuned(NamedTuple):
    """What was measured: the fastest, what `torch.mm` took, how many candidates there were, and what was wrong."""

    product: MeasuredProduct
    torch_microseconds: float
    num_candidates: int
    faults: tuple[str, ...]


class _Layer:
    """A linear layer of random weights in turn, so many that L2 holds none of them when it is read again."""

    def __init__(self, dtype: Dtype, outputs: int, inputs: int, *, bias: bool, rows: int) -> None:
        kind, device = BY_NAME[dtype], torch.device("cuda")
        num_bytes = workspace_bytes(outputs)
        num_rotated = ROTATED_BYTES if rows <= MANY_ROWS else ROTATED_BYTES_OF_MANY
        count = max(2, -(-num_rotated // (2 * outputs * inputs)))
        self.rows, self.has_bias = rows, bias
        weights = [
            torch.empty(outputs, inputs, dtype=kind, device=device).normal_(0, inputs**-0.5) for _ in range(count)
        ]
        self.weights = weights * (1 if rows > MANY_ROWS else -(-FEWEST // count))
        self.bias = torch.randn(outputs, device=device).to(kind) if bias else None
        self.x = torch.randn(rows, inputs, device=device).to(kind)
        self.y = torch.empty(rows, outputs, dtype=kind, device=device)
        self.workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.product = Product(dtype=dtype, outputs=outputs, inputs=inputs, bias=bias, workspace_bytes=num_bytes)

    @cached_property
    def expected(self) -> torch.Tensor:
        """The last product in float32."""
        return self.x.float() @ self.weights[-1].float().t() + (0 if self.bias is None else self.bias.float())

    def by(self, algorithm: str) -> Callable[[], None]:
        """All products, by an algorithm of cuBLASLt's."""
        plan = self.product.planned_by(self.rows, algorithm, None if self.bias is None else self.bias.data_ptr())

        def run() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for weight in self.weights:
                self.product.run(
                    plan, self.y.data_ptr(), self.x.data_ptr(), weight.data_ptr(), self.workspace.data_ptr(), stream
                )

        return run

    def by_torch(self) -> None:
        """All products, by torch."""
        for weight in self.weights:
            if self.bias is None:
                torch.mm(self.x, weight.t(), out=self.y)
            else:
                torch.addmm(self.bias, self.x, weight.t(), out=self.y)

    def fault(self, run: Callable[[], None]) -> str | None:
        """What is wrong with what `run` leaves as the result; None if nothing is."""
        found = []
        for _ in range(2):
            self.y.fill_(torch.nan)
            run()
            found.append(self.y.clone())
        error = ((found[0].float() - self.expected).norm() / self.expected.norm()).item()
        if not error <= MOST_ERROR:  # NaN isn't
            return f"its error is {error:.3g}"
        return None if torch.equal(*found) else "it gives other bits each time"


def tune(
    dtype: Dtype, outputs: int, inputs: int, *, rows: int, bias: bool = False, timer: Timer = replayed,
    survey: Timer = replayed_briefly,
) -> Tuned:  # fmt: skip
    """The fastest algorithm of a weight [outputs, inputs] for `rows` rows, of those that the library proposes.

    All are timed by `survey`, and the fastest again by `timer`, in turn with the first choice. What fails,
    gives wrong results or other bits in a second run is left out and named in `faults`. Raises RuntimeError where
    nothing is left.
    """
    layer = _Layer(dtype, outputs, inputs, bias=bias, rows=rows)
    faults, once = [], list[tuple[float, str]]()
    candidates = layer.product.candidates(rows)
    for algorithm in candidates:
        try:
            (microseconds,) = survey([layer.by(algorithm)])
            once.append((microseconds, algorithm))
        except RuntimeError as error:
            faults.append(str(error))
    finalists = list[str]()
    for algorithm in dict.fromkeys([*candidates[:1], *(algorithm for _, algorithm in sorted(once))]):
        if len(finalists) > FINALISTS:
            break
        try:
            fault = layer.fault(layer.by(algorithm))
        except RuntimeError:  # as above
            continue
        faults += [fault] if fault else []
        finalists += [] if fault else [algorithm]
    if not finalists:
        raise RuntimeError(f"none of {len(candidates)} algorithms is left: {'; '.join(faults) or 'there are none'}")
    runs = [layer.by_torch, *(layer.by(algorithm) for algorithm in finalists)]
    torch_time, *times = (time / len(layer.weights) for time in timer(runs))
    microseconds, best = min(zip(times, finalists, strict=True))
    product = MeasuredProduct(
        dtype=dtype, outputs=outputs, inputs=inputs, bias=bias, rows=rows, algorithm=best,
        microseconds=round(microseconds, 2), first_microseconds=round(times[0], 2),
    )  # fmt: skip
    return Tuned(product, torch_time, len(candidates), tuple(faults))
