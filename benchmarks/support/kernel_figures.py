"""The table of docs/kernel_speed.md: what each kernel reaches of what the machine itself reaches.

A row is a kernel in one case: its microseconds, and the share that the least possible time has of them: that of the
bytes that it must move or of the products that it must compute, whichever takes longer, at the machine's own rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Figures = Mapping[str, Any]


class Row(NamedTuple):
    """A kernel in one case; `floor`: the least possible microseconds."""

    kernel: str
    case: str
    microseconds: float
    floor: float

    @property
    def cells(self) -> tuple[str, ...]:
        """As the table has them."""
        digits = 1 if self.microseconds < 100 else 0
        return self.kernel, self.case, f"{self.microseconds:,.{digits}f}", f"{self.floor / self.microseconds:.0%}"


def stream(found: Figures) -> Iterator[Row]:
    """All linear layers of a step."""
    for rows, one in found["rows"].items():
        least = 1e3 * found["gigabytes"] / found["one_launch_terabytes_per_second"]
        taken = 1e3 * one["stream_pdl_milliseconds"]
        yield Row("weight stream", f"8B shape, {rows} row{_plural(rows)}", taken, least)


def attention(found: Figures) -> Iterator[Row]:
    """Paged attention of one layer."""
    for case, one in found["rows"].items():
        rate, most = (
            (one["gb_per_s"], found["read_gb_per_s"])
            if "gb_per_s" in one
            else (one["tflop_per_s"], found["product_tflop_per_s"])
        )
        yield Row("attention", case, one["us"], one["us"] * rate / most)


def experts(found: Figures) -> Iterator[Row]:
    """Routed experts of one layer."""
    for case, one in found["rows"].items():
        share = max(one["bytes_of_read_rate"], one["flops_of_product_rate"])
        yield Row("experts", f"{case} token{_plural(case)}", one["built_in_us"], one["built_in_us"] * share)


def states(found: Figures) -> Iterator[Row]:
    """Scans, linear attention and convolutions of one layer."""
    for name, steps in found["cases"].items():
        for step, one in steps.items():
            if "floor" in one:
                yield Row(name, step, one["microseconds"], one["floor"])


def small_kernels(found: Figures) -> Iterator[Row]:
    """Norms, rotary and gates of 4,096 tokens; with fewer they are as long as a launch."""
    for name, one in found["cases"].items():
        last = one["4096"]
        share = last["gigabytes_per_second"] / found["copy_gigabytes_per_second"]
        yield Row(name.replace("_", " "), "4096 tokens", last["microseconds"], last["microseconds"] * share)


def sampling(found: Figures) -> Iterator[Row]:
    """One token for each row, of Qwen's vocabulary."""
    for case, one in found["rows"].items():
        if " x 152064 bfloat16" in case:
            yield Row("sampling", case.replace(" bfloat16", ""), one["microseconds"], one["bytes_microseconds"])


def _plural(case: str) -> str:
    return "" if case.split()[-1] == "1" else "s"


KERNELS: Mapping[str, Callable[[Figures], Iterator[Row]]] = {
    "gpu_stream": stream, "gpu_attention": attention, "gpu_experts": experts, "gpu_states": states,
    "gpu_small_kernels": small_kernels, "gpu_sampling": sampling,
}  # fmt: skip
"""The claims, in the order of the table."""
HEADS = ("kernel", "case", "us", "of the machine's rate")
