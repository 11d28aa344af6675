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
    for key in ("capacity_factor", "sequence_loss"):
        if value := next((getattr(r.config, key) for r in routers if getattr(r.config, key)), 0):
            yield UnsupportedError(
                f"model.moe.{key} = {value} with layout.cp = {case.layout.cp}: it is about whole sequences, of which a"
                f" rank has a part. Set model.moe.{key} = 0, or layout.cp = 1."
            )
