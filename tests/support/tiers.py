"""Cases of a product of which `make test` has a few, and `make test-all` every one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], number: int) -> list[Any]:
    """All cases for ``parametrize``, all but so many, evenly spread, marked ``thorough``. A tuple is a case of several arguments."""
    found = list(cases)
    kept = {index * len(found) // number for index in range(number)}
    return [case if index in kept else _thorough(case) for index, case in enumerate(found)]


def _thorough(case: Any) -> Any:
    if isinstance(case, tuple) and hasattr(case, "marks"):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.thorough], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough)


SIX = ("llama", "gpt2", "phi3", "gpt_neox", "gemma2", "deepseek_v3", "qwen3_moe")
"""One family of each structure (support/ways), and one with experts that grouped products compute."""


def only_six(families: Iterable[str]) -> list[Any]:
    """All families for ``parametrize``, those beside one of each structure marked ``thorough``."""
    return [name if name in SIX else _thorough(name) for name in families]
