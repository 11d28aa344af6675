"""Check the optimizer's state; the functions are rows of the table in ``rules``."""

from __future__ import annotations

from meshwright.core.dtypes import dtype_bytes
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.planning.case import Case, Found

from .kinds import KINDS, OptimizerKind, kind_of

ROUNDED_FROM = ("float32", "bfloat16")
"""Dtypes of parameters for which torchao's low-bit state is allowed: torchao computes the step in float32."""


def optimizer_fits(case: Case) -> Found:
    """Require a known optimizer, and settings that fit it and the dtypes at rest."""
    t = case.techniques
    try:
        row = kind_of(t.optimizer)
    except ConfigError as unknown:
        yield unknown
        return
    together = [p for p in case.trained if row.sums_parts or (row.by_role and p.hidden)]
    if case.precision.is_kept and len(dtypes := list(dict.fromkeys(p.dtype for p in together))) > 1:
        yield UnsupportedError(
            f"the optimizer {t.optimizer} computes on parts of several"
            f" {'parameters' if row.sums_parts else 'matrices'} together, and those that it trains rest in"
            f" {' and '.join(dtypes)}. Set techniques.precision.master = {max(dtypes, key=dtype_bytes)}, or choose the"
            f" optimizer adamw."
        )
    if row.by_role:
        yield from _matrices(case, row)
    if row.averages:
        yield from _average(case, row)
    if row.sums_parts and t.cpu_offload == "optimizer":
        yield UnsupportedError(
            f"techniques.cpu_offload = optimizer and the optimizer {t.optimizer}: its state comes to the"
            f" device by portions of parameters, and the sums of all parameters travel together. Set"
            f" techniques.cpu_offload = false: the state of a matrix is a row and a column."
        )
    if not row.low_bit and (t.optimizer_state != "full" or t.stochastic_rounding):
        able = ", ".join(word for word, other in KINDS.items() if other.low_bit)
        yield ConfigError(
            f"techniques.optimizer_state = {t.optimizer_state}, techniques.stochastic_rounding ="
            f" {str(t.stochastic_rounding).lower()} and the optimizer {t.optimizer}: torchao has low-bit state"
            f" and stochastic rounding of {able}. Set optimizer_state = full and stochastic_rounding = false, or"
            f" the optimizer {able}."
        )
    if t.optimizer_state in ("8bit", "4bit") and (others := [d for d in case.trained_dtypes if d not in ROUNDED_FROM]):
        yield UnsupportedError(
            f"techniques.optimizer_state = {t.optimizer_state} is computed in float32, and trained parameters rest in"
            f" {others[0]}. Set techniques.precision.master = float32 (or bfloat16), or optimizer_state = full."
        )
    if t.stochastic_rounding and (others := [dtype for dtype in case.trained_dtypes if dtype != "bfloat16"]):
        yield ConfigError(
            f"techniques.stochastic_rounding = true is about weights that rest in bfloat16, and trained ones rest in"
            f" {others[0]}."
            f" Set techniques.precision.master = bfloat16, or leave it out."
        )


def _matrices(case: Case, row: OptimizerKind) -> Found:
    """Require hidden matrices, and parameters on the device, for an optimizer that computes on whole ones."""
    word, trained = case.techniques.optimizer, case.trained
    if trained and not any(p.hidden for p in trained):
        yield ConfigError(
            f"the optimizer {word} steps the matrices of linear layers and experts inside repeated blocks,"
            f" and {case.facts.kind} trains none ({len(trained)} parameters in {len(case.facts.blocks)} blocks). Choose"
            f" the optimizer adamw."
        )
    if (offload := case.techniques.cpu_offload) is not False:
        where = "its state comes to the device by portions of parameters" if offload == "optimizer" else "on the host"
        why = "and the parts of all matrices travel together" if offload == "optimizer" else "matrix products are slow"
        yield UnsupportedError(
            f"techniques.cpu_offload = {str(offload).lower()} and the optimizer {word}: {where}, {why}. Set"
            f" techniques.cpu_offload = false ({row.title} holds one tensor of state for each matrix, AdamW two), or"
            f" choose the optimizer adamw."
        )


def _average(case: Case, row: OptimizerKind) -> Found:
    """Require weights in which an average can move, with its state on the device, where the average is taken."""
    word = case.techniques.optimizer
    if narrow := [dtype for dtype in case.trained_dtypes if dtype not in ("float32", "float64")]:
        yield UnsupportedError(
            f"the optimizer {word} averages all steps, and in techniques.precision.master = {narrow[0]} an"
            f" average of some hundred steps no longer moves. Set techniques.precision.master = float32 (compute may be"
            f" bfloat16)."
        )
    if case.techniques.cpu_offload == "optimizer":
        yield UnsupportedError(
            f"techniques.cpu_offload = optimizer and the optimizer {word}: evaluation needs the state of all"
            f" parameters on the device, and it comes there by portions for a step only. Set techniques.cpu_offload ="
            f" false, or true (parameters too)."
        )
