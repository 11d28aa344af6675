"""Check float8; the functions are rows of the table in ``rules``."""

from __future__ import annotations

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.planning.case import Case, Found
from meshwright.planning.float8.plan import Float8Plan
from meshwright.planning.tensor.rules import no_blocks

from .plan import RECIPES

AROUND = ("float32", "bfloat16", "float16")
"""Dtypes allowed for the computation outside the products."""


def float8_requested(case: Case) -> Found:
    """Require that the float8 settings fit together, and fit the model."""
    t = case.techniques
    if t.float8 not in RECIPES:
        if t.float8_filter:
            yield ConfigError(
                "techniques.float8_filter leaves layers out of float8, but techniques.float8 = none: leave it out, or"
                " set that"
            )
        if t.float8_all_gather:
            yield ConfigError(
                "techniques.float8_all_gather = true gathers the weights of layers in float8, but techniques.float8 ="
                " none. Set techniques.float8 = tensorwise, or techniques.float8_all_gather = false."
            )
        return
    if case.precision.compute not in AROUND:
        yield ConfigError(
            f"techniques.float8 = {t.float8} rounds the operands of products, so the rest need not be"
            f" {case.precision.compute}."
            f" Set techniques.precision.compute = bfloat16 (or float32, float16), or techniques.float8 = none."
        )
    if not case.facts.blocks:
        yield ConfigError(no_blocks(f"techniques.float8 = {t.float8}", case.facts))


def float8_companions(case: Case) -> Found:
    """Refuse techniques that do not combine with float8."""
    t, done = case.techniques, case.facts.applied_plan(Float8Plan)
    if t.async_tensor_parallel and (t.float8 in RECIPES or done is not None):
        request = f"techniques.float8 = {t.float8}" if done is None else "apply_float8"
        yield UnsupportedError(
            f"{request} does not go with techniques.async_tensor_parallel = true, whose products are in"
            f" {case.precision.compute}. Set techniques.async_tensor_parallel = false, or leave float8 out."
        )


def float8_gathering(case: Case) -> Found:
    """Require sharding that can gather weights in float8."""
    t, shards, done = case.techniques, case.layout.dp_shard, case.facts.applied_plan(Float8Plan)
    wanted = t.float8 in RECIPES and t.float8_all_gather
    if wanted and t.float8 != "tensorwise":
        yield UnsupportedError(
            f"techniques.float8_all_gather = true gathers a weight with one scale, and techniques.float8 = {t.float8}"
            f" has one for each row, another in forward than in backward. Set techniques.float8 = tensorwise, or"
            f" techniques.float8_all_gather = false."
        )
    if t.float8_all_gather and (case.technique != "fully_shard" or shards == 1):
        yield ConfigError(
            f"techniques.float8_all_gather = true is about weights that FSDP gathers, and here none are:"
            f" layout.dp_shard = {shards},"
            f" {case.technique}. Set techniques.float8_all_gather = false, or layout.dp_shard = 2 or more."
        )
    if (wanted or (done is not None and done.all_gather)) and not isinstance(t.reshard_after_forward, bool | str):
        asked = "techniques.float8_all_gather" if wanted else "enable_fsdp_float8_all_gather"
        yield UnsupportedError(
            f"{asked} = true does not go with techniques.reshard_after_forward = {t.reshard_after_forward}: torch"
            f" does not shard what was"
            f" gathered in float8 over fewer ranks. Set techniques.reshard_after_forward = true or false."
        )
