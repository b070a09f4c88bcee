"""Tensors given by name, checked against their types, and the symbols that their sizes stand for.

The check runs before every step, so what can be prepared is: where each symbol is read, and which sizes are constant.
Only when something does not fit is it all looked at again, to report every mismatch in one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from precast.ir.errors import RequestError
from precast.ir.graph import symbols as exprs
from precast.ir.graph.schema import Expr, Symbol, TensorType, Value
from precast.kernels import dtypes
from precast.loader.program.sources import sources_of

Sizes = dict[str, int]


class Binding:
    """Which tensors must be given, and what their sizes say about the symbols."""

    def __init__(self, values: Sequence[Value], symbols: Iterable[Symbol], device: torch.device) -> None:
        self._values = values
        self._device = device
        self._ranges = {symbol.name: symbol for symbol in symbols}
        self._sources = sources_of(values)
        # Name, dtype and sizes of each tensor, and whether one of the sizes holds a symbol.
        self._expected = [
            (value.name, dtypes.BY_NAME[value.type.dtype], shape, not all(isinstance(size, int) for size in shape))
            for value, shape in ((value, value.type.shape) for value in values)
        ]

    @property
    def symbols(self) -> frozenset[str]:
        """The symbols that the sizes of the tensors give a value."""
        return frozenset(source.symbol for source in self._sources)

    def bind(self, tensors: Mapping[str, torch.Tensor], known: Mapping[str, int]) -> Sizes:
        """The value of each symbol: the `known` ones and those that the shapes of `tensors` give.

        Raises RequestError (input-mismatch) that names every tensor that is missing, unexpected, or of another dtype,
        shape or device, and every symbol outside its range.
        """
        sizes, origin = self._sizes(tensors, known)
        if self._fits(tensors, sizes):
            return sizes
        problems = self._problems(tensors, sizes, origin)
        raise RequestError(
            "input-mismatch",
            f"{len(problems)} tensors do not fit the graph:\n" + "\n".join(f"  {problem}" for problem in problems),
            fix="give exactly the tensors that the graph names, with the dtypes and shapes that it states",
        )

    def _sizes(self, tensors: Mapping[str, torch.Tensor], known: Mapping[str, int]) -> tuple[Sizes, dict[str, str]]:
        """The symbols' values as far as the tensors give them, and from which tensor each comes that isn't `known`."""
        sizes, origin = dict(known), {}
        for symbol, name, axis, factor, offset in self._sources:
            tensor = tensors.get(name)
            if symbol not in sizes and tensor is not None and tensor.dim() > axis:
                sizes[symbol] = (tensor.shape[axis] - offset) // factor
                origin[symbol] = name
        return sizes, origin

    def _fits(self, tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> bool:
        if len(tensors) != len(self._expected) or not all(source.symbol in sizes for source in self._sources):
            return False
        for name, dtype, shape, is_symbolic in self._expected:
            tensor = tensors.get(name)
            if tensor is None or tensor.dtype != dtype or tensor.device != self._device:
                return False
            if tensor.shape != (tuple(_value(size, sizes) for size in shape) if is_symbolic else shape):
                return False
        return not any(self._out_of_range(source.symbol, sizes) for source in self._sources)

    def _out_of_range(self, name: str, sizes: Mapping[str, int]) -> str | None:
        symbol, size = self._ranges[name], sizes[name]
        if size < symbol.min or (symbol.max is not None and size > symbol.max):
            return f"{name} is {size}, allowed is {symbol.min} to {'any' if symbol.max is None else symbol.max}"
        return None

    def _problems(
        self, tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, int], origin: Mapping[str, str]
    ) -> list[str]:
        names = {value.name for value in self._values}
        problems = [f"{value.name}: missing, expected {type_text(value.type)}" for value in self._values
                    if value.name not in tensors]  # fmt: skip
        problems += [f"{name}: unexpected" for name in sorted(tensors.keys() - names)]
        for value in self._values:
            if value.name in tensors:
                problems += self._tensor_problem(value, tensors[value.name], sizes, origin)
        problems += filter(None, (self._out_of_range(symbol, sizes) for symbol in origin))
        return problems

    def _tensor_problem(
        self, value: Value, tensor: torch.Tensor, sizes: Mapping[str, int], origin: Mapping[str, str]
    ) -> list[str]:
        free = set().union(*(exprs.free_symbols(size) for size in value.type.shape))
        found = f"found {dtypes.NAMES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}"
        shape_known = free <= sizes.keys()
        shape_fits = len(tensor.shape) == len(value.type.shape) and (
            not shape_known or tensor.shape == tuple(_value(size, sizes) for size in value.type.shape)
        )
        if tensor.dtype != dtypes.BY_NAME[value.type.dtype] or not shape_fits:
            given = [f"{name} = {sizes[name]}" + (f" from {origin[name]}" if name in origin else "")
                     for name in sorted(free & sizes.keys())]  # fmt: skip
            note = f" ({', '.join(given)})" if given else ""
            return [f"{value.name}: expected {type_text(value.type)}{note}, {found}"]
        if tensor.device != self._device:
            return [f"{value.name}: expected on {self._device}, found on {tensor.device}"]
        return []


def type_text(kind: TensorType) -> str:
    """The type as messages write it: `int64 [1, T]`."""
    return f"{kind.dtype} [{', '.join(exprs.text(size) for size in kind.shape)}]"


def _value(size: Expr, sizes: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else exprs.evaluate(size, sizes)
