"""Check context parallelism; the functions are rows of the table in ``rules``."""

from __future__ import annotations

from meshwright.core.errors import UnsupportedError
from meshwright.models.moe import Router
from meshwright.planning.case import Case, Found


def context_companions(case: Case) -> Found:
    """Refuse techniques and kinds of experts that do not go with rows cut over ranks."""
    if case.layout.cp > 1:
        yield from _routers(case)


def _routers(case: Case) -> Found:
    routers = [] if case.facts.module is None else [m for m in case.facts.module.modules() if isinstance(m, Router)]
    if value := next((r.config.capacity_factor for r in routers if r.config.capacity_factor), 0):
        yield UnsupportedError(
            f"model.moe.capacity_factor = {value} with layout.cp = {case.layout.cp}: who is over an expert's capacity"
            f" depends on the whole sequence, of which a rank has a part. Set model.moe.capacity_factor = 0 (no token"
            f" is dropped), or layout.cp = 1."
        )
