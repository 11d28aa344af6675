"""Code as trees, each read and walked once."""

from __future__ import annotations

import ast
from functools import cache


@cache
def parsed(code: str) -> ast.Module:
    return ast.parse(code)


@cache
def nodes(code: str) -> tuple[ast.AST, ...]:
    """Every node, as ``ast.walk`` orders them: the module first."""
    return tuple(ast.walk(parsed(code)))
