"""Makes Triton's interpreter quicker, by leaving out work whose results it does not use.

It puts its own functions in the place of those of `triton.language` when a kernel is launched, and takes them back at
its end. In between it does the same again for each function that the kernel calls: a third of its time. And it looks
for overflows in sums and products of integers, but raises nothing where it finds one, as its `debug` is off: half of
what is left.
"""

from __future__ import annotations

import dataclasses
from types import FunctionType
from typing import Any

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


def install() -> None:
    """From now on, in this process. Another version's interpreter, without these functions, stays as it is."""
    options = getattr(interpreter.interpreter_builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    replace: Any = getattr(interpreter, "_patch_lang", None)
    if replace is None or not hasattr(interpreter, "_LangPatchScope"):
        return
    replaced = set[int]()

    def replace_once(function: FunctionType) -> Any:
        languages = {id(each) for each in function.__globals__.values() if each is tl or each is tl.core}
        if languages <= replaced:
            return interpreter._LangPatchScope()
        replaced.update(languages)
        return _Scope(replace(function), replaced)

    interpreter._patch_lang = replace_once
