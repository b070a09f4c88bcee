"""Makes Triton's interpreter quicker, by leaving out work whose results it does not use, or had before.

- It puts its own functions in the place of those of `triton.language` when a kernel is launched, and takes them back at
  its end. In between it does the same again for each function that the kernel calls.
- It looks for overflows in sums and products of integers, but raises nothing where it finds one, as its `debug` is off.
- Each result of each operation gets a type, whose shape it takes apart and checks, and names; shapes are few.
- Each time that it asks for numpy's type of numbers it makes the whole table of them.
- It looks what shape two tensors of one shape have together.
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
    options = getattr(interpreter.interpreter_builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        _replace_once()
    if hasattr(interpreter, "_get_np_dtype"):
        _keep_numpy_types()
    if vars(tl.block_type(tl.int32, [2])).keys() == {"element_ty", "shape", "numel", "name"}:
        _keep_shapes()


def _replace_once() -> None:
    replace, replaced = interpreter._patch_lang, set[int]()

    def replace_once(function: FunctionType) -> Any:
        languages = {id(each) for each in function.__globals__.values() if each is tl or each is tl.core}
        if languages <= replaced:
            return interpreter._LangPatchScope()
        replaced.update(languages)
        return _Scope(replace(function), replaced)

    interpreter._patch_lang = replace_once


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
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    tl.block_type.__init__, tl.tensor.__init__ = new_type, new_tensor
    tl.semantic.TritonSemantic.broadcast_impl_value = broadcast_if_unlike
