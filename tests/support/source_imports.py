"""The imports of a source file, wherever they stand in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def imported_names(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import of `source`, `import_module` included; a relative one starts with a dot."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from precast import ir` names a package, `from precast.ir import Graph` a thing inside one.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value
