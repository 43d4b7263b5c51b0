"""Whether a test that is named elsewhere exists."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def _functions(file: str) -> frozenset[str]:
    tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def has_test(name: str) -> bool:
    """`name` is `file::function`."""
    file, function = name.split("::")
    return function in _functions(file)
