"""Check context parallelism; the functions are rows of the table in ``rules``."""

from __future__ import annotations

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.models.moe import Router
from meshwright.planning.case import Case, Found


def context_companions(case: Case) -> Found:
    """Refuse techniques and kinds of experts that do not go with rows cut over ranks."""
    ranks = case.layout.cp
    if ranks == 1:
        return
    if case.technique != "fully_shard":
        yield ConfigError(
            f"layout.cp = {ranks} shards parameters over dp_shard × cp, and techniques.data_parallel ="
            f" {case.technique} keeps them whole. Set techniques.data_parallel = fully_shard."
        )
    if case.techniques.compile and case.facts.module is not None:
        flex = [caller.path for caller in case.facts.measurements.mixing().callers if caller.flex]
        if flex:
            yield ConfigError(
                f"layout.cp = {ranks} takes the calls of flex_attention in {flex[0]} out of its forward, which a"
                f" compiled block does not allow. Set techniques.compile = false."
            )
    yield from _routers(case)


def _routers(case: Case) -> Found:
    routers = [] if case.facts.module is None else [m for m in case.facts.module.modules() if isinstance(m, Router)]
    for key in ("capacity_factor", "sequence_loss"):
        if value := next((getattr(r.config, key) for r in routers if getattr(r.config, key)), 0):
            yield UnsupportedError(
                f"model.moe.{key} = {value} with layout.cp = {case.layout.cp}: it is about whole sequences, of which a"
                f" rank has a part. Set model.moe.{key} = 0, or layout.cp = 1."
            )
