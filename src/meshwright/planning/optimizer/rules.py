"""Check the optimizer's state; the functions are rows of the table in ``rules``."""

from __future__ import annotations

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.planning.case import Case, Found

ROUNDED_FROM = ("float32", "bfloat16")
"""Dtypes for which torchao's low-bit state may stand: torchao computes the step in float32."""


def optimizer_fits(case: Case) -> Found:
    """Require that the optimizer settings fit the dtypes at rest."""
    t, master = case.techniques, case.precision.master
    if t.optimizer_state in ("8bit", "4bit") and master not in ROUNDED_FROM:
        yield UnsupportedError(
            f"techniques.optimizer_state = {t.optimizer_state} is computed in float32, and the parameters rest in {master}. Set"
            f" techniques.precision.master = float32 (or bfloat16), or techniques.optimizer_state = full."
        )
    if t.stochastic_rounding and master != "bfloat16":
        yield ConfigError(
            f"techniques.stochastic_rounding = true is about weights that rest in bfloat16, and these rest in {master}. Set"
            f" techniques.precision.master = bfloat16, or leave it out."
        )
