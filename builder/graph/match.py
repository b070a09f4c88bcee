"""Patterns over FX graphs: what a subgraph looks like, written as an expression.

    norm = Mul(Bind("w"), Cast(Mul(Bind("x"), Op(aten.rsqrt.default, ...))))

A pattern is matched from its root upwards against a node; `Bind` gives names to what stands there, and the same
name must bind the same thing everywhere. Nothing is asked about other users of the inner nodes: a match only
replaces its root, and what is still used stays.
"""

from __future__ import annotations

from typing import Any

import torch

from precast.builder.graph.context import FxNode

aten = torch.ops.aten
Bindings = dict[str, Any]


class Bind:
    """Binds whatever stands there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def match(self, value: Any, found: Bindings) -> Bindings | None:
        if self.name in found:
            return found if _same(found[self.name], value) else None
        return {**found, self.name: value}


class Anything:
    """Matches, and binds nothing."""

    def match(self, value: Any, found: Bindings) -> Bindings | None:
        return found


class Number(Bind):
    """Binds a Python number."""

    def match(self, value: Any, found: Bindings) -> Bindings | None:
        return super().match(value, found) if isinstance(value, (int, float)) else None


class Op:
    """A call of `target` with these arguments, positional and by name, and no other; missing last ones match None.

    Ops of our own, which are registered after this, are given by their name: `precast.rotary.default`.
    """

    def __init__(self, target: Any, *args: Any, commutes: bool = False, **kwargs: Any) -> None:
        self.target, self.args, self.kwargs = target, args, kwargs
        self.commutes = commutes

    def match(self, value: Any, found: Bindings) -> Bindings | None:
        if not isinstance(value, FxNode) or self.target not in (value.target, str(value.target)):
            return None
        if len(value.args) > len(self.args):
            return None
        if value.kwargs.keys() != self.kwargs.keys():  # such as alpha of add, which changes the result
            return None
        named = [value.kwargs[name] for name in self.kwargs]
        args = [*value.args, *[None] * (len(self.args) - len(value.args)), *named]
        patterns = [*self.args, *self.kwargs.values()]
        result = _match_all(patterns, args, found)
        if result is None and self.commutes:
            result = _match_all(patterns, [args[1], args[0], *args[2:]], found)
        return result


class Either:
    """The first of several patterns that matches."""

    def __init__(self, *patterns: Any) -> None:
        self.patterns = patterns

    def match(self, value: Any, found: Bindings) -> Bindings | None:
        results = (_match(pattern, value, found) for pattern in self.patterns)
        return next((result for result in results if result is not None), None)


def Add(a: Any, b: Any) -> Op:
    """a + b, in either order."""
    return Op(aten.add.Tensor, a, b, commutes=True)


def Mul(a: Any, b: Any) -> Op:
    """a * b, in either order."""
    return Op(aten.mul.Tensor, a, b, commutes=True)


def Cast(inner: Any) -> Either:
    """The inner pattern, converted to another dtype or not: a float32 build has no conversions."""
    return Either(Op(aten.to.dtype, inner, Anything()), inner)


def match(pattern: Any, node: FxNode) -> Bindings | None:
    """What the pattern's names stand for at `node`, or None."""
    return _match(pattern, node, {})


def _match(pattern: Any, value: Any, found: Bindings) -> Bindings | None:
    if hasattr(pattern, "match"):
        result: Bindings | None = pattern.match(value, found)
        return result
    if isinstance(pattern, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(pattern) != len(value):
            return None
        return _match_all(pattern, value, found)
    return found if type(pattern) is type(value) and pattern == value else None


def _match_all(patterns: Any, values: Any, found: Bindings) -> Bindings | None:
    result: Bindings | None = found
    for pattern, value in zip(patterns, values, strict=True):
        if result is None:
            return None
        result = _match(pattern, value, result)
    return result


def _same(a: Any, b: Any) -> bool:
    return a is b if isinstance(a, FxNode) or isinstance(b, FxNode) else bool(a == b)
