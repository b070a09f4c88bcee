"""Makes Triton's interpreter quicker, by leaving out work whose results it does not use, or had before.

- It puts its own functions in the place of those of `triton.language` when a kernel is launched, and takes them back at
  its end. In between it does the same again for each function that the kernel calls. Each of them takes its arguments
  apart, and hands them on to one that looks whether the interpreter is among them.
- It looks for overflows in sums and products of integers, but raises nothing where it finds one, as its `debug` is off.
- Each result of each operation gets a type, whose shape it takes apart and checks, and names; shapes are few.
- Each time that it asks for numpy's type of numbers it makes the whole table of them.
- It looks what shape two tensors of one shape have together, and what type two numbers of one type have.
- It makes a block of each number in each place where a block and a number meet; these are few as well.
"""

from __future__ import annotations

import dataclasses
from types import FunctionType
from typing import Any, NamedTuple

from triton import language as tl
from triton.runtime import interpreter


class _Scope:
    """What one launch has replaced."""

    def __init__(self, scope: Any, replaced: set[int]) -> None:
        self._scope, self._replaced = scope, replaced

    def restore(self) -> None:
        """At the end of the launch."""
        self._replaced.clear()
        self._scope.restore()


class _Shape(NamedTuple):
    """A shape as a type of blocks has it, and as a tensor of that type has it."""

    of_type: Any
    numel: int
    text: str
    of_tensor: Any
    numel_of_tensor: Any


def install() -> None:
    """From now on, in this process. Another version's interpreter, without these functions, stays as it is."""
    options: Any = getattr(interpreter.interpreter_builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        _replace_once()
    if hasattr(interpreter, "_patch_attr") and hasattr(interpreter, "interpreter_semantic"):
        interpreter._patch_attr = _replace
    if hasattr(interpreter, "_get_np_dtype"):
        _keep_numpy_types()
    if vars(tl.block_type(tl.int32, [2])).keys() == {"element_ty", "shape", "numel", "name"}:
        _keep_shapes()
        _keep_numbers()
    tl.dtype.__eq__ = _is_equal


def _replace_once() -> None:
    replace, replaced = interpreter._patch_lang, set[int]()

    def replace_once(function: FunctionType) -> Any:
        languages = {id(each) for each in function.__globals__.values() if each is tl or each is tl.core}
        if languages <= replaced:
            return interpreter._LangPatchScope()
        replaced.update(languages)
        return _Scope(replace(function), replaced)

    interpreter._patch_lang = replace_once


_ASKS = tl.core.builtin(lambda: None).__code__
"""Of a function that looks for the interpreter among its arguments."""


def _replace(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    semantic = interpreter.interpreter_semantic
    function = member.__wrapped__ if getattr(member, "__code__", None) is _ASKS else member

    def call(*args: Any, **more: Any) -> Any:
        more["_semantic"] = semantic
        return function(*args, **more)

    scope.set_attr(place, name, call)


def _keep_numpy_types() -> None:
    find, found = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if element.name not in found:
            found[element.name] = find(element)
        return found[element.name]

    interpreter._get_np_dtype = numpy_type


def _keep_shapes() -> None:
    """Types of blocks of one shape have one object as their shape, and tensors of these types have another."""
    make_type, make_tensor, constexpr = tl.block_type.__init__, tl.tensor.__init__, tl.constexpr
    broadcast = tl.semantic.TritonSemantic.broadcast_impl_value
    shapes: dict[tuple[int, ...], _Shape] = {}
    scalar = tl.tensor(None, tl.int32)

    def new_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, constexpr) else size for size in shape])
        known = shapes.get(sizes)
        if known is None:
            make_type(self, element_ty, shape)
            tensor = tl.tensor.__new__(tl.tensor)
            make_tensor(tensor, None, self)
            known = shapes[sizes] = _Shape(self.shape, self.numel, str(self.shape), tensor.shape, tensor.numel)
        self.element_ty, self.shape, self.numel = element_ty, known.of_type, known.numel
        self.name, self._known = f"<{known.text}, {element_ty}>", known

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        known = getattr(type, "_known", None)
        if known is not None:
            self.shape, self.numel = known.of_tensor, known.numel_of_tensor
        elif type.is_block():  # of before these functions were put here
            make_tensor(self, handle, type)
        else:
            self.shape, self.numel = scalar.shape, scalar.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def broadcast_if_unlike(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        is_alike = right.is_block() and left.shape is right.shape if left.is_block() else not right.is_block()
        return (lhs, rhs) if is_alike else broadcast(self, lhs, rhs)

    tl.block_type.__init__, tl.tensor.__init__ = new_type, new_tensor
    tl.semantic.TritonSemantic.broadcast_impl_value = broadcast_if_unlike


def _keep_numbers() -> None:
    """A block and a number, the same number as before, get the same block for it, which nobody may write to."""
    check = tl.semantic.TritonSemantic.binary_op_type_checking_impl
    kept: dict[tuple[type, float, str], Any] = {}

    def check_if_unlike(self: Any, lhs: Any, rhs: Any, *allowed: bool, **more: bool) -> Any:
        x, number = (lhs, rhs) if isinstance(lhs, tl.tensor) else (rhs, lhs)
        # Pointers have rules of their own, and so have quotients, and what isn't arithmetic.
        if more or len(allowed) > 2 or not isinstance(x, tl.tensor) or type(x.dtype) is not tl.dtype:
            return check(self, lhs, rhs, *allowed, **more)
        if isinstance(number, tl.tensor) and number.dtype is x.dtype:
            return self.broadcast_impl_value(lhs, rhs)
        if type(number) not in (int, float):
            return check(self, lhs, rhs, *allowed)
        key = (type(number), number, x.type.name)
        if key not in kept:
            found = check(self, lhs, rhs, *allowed)
            if not any(each is x for each in found):  # it became another type
                return found
            kept[key] = found[1] if x is lhs else found[0]
            kept[key].handle.data.setflags(write=False)
        return (x, kept[key]) if x is lhs else (kept[key], x)

    tl.semantic.TritonSemantic.binary_op_type_checking_impl = check_if_unlike


_compare = tl.dtype.__eq__


def _is_equal(self: tl.dtype, other: Any) -> bool:
    return self is other or _compare(self, other)
