"""Check expert parallelism; the functions are rows of the table in ``rules``."""

from __future__ import annotations

import math

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import clean, owner, pattern
from meshwright.introspection.structure.experts import find_stacks
from meshwright.models.moe import Router
from meshwright.planning.case import Case, Found
from meshwright.planning.experts.plan import ExpertPlan

from .plan import sharing_ranks


def experts_fit(case: Case) -> Found:
    """Require an expert axis that divides the ranks it distributes over, and the experts of every stack."""
    layout, ranks = case.layout, case.layout.ep
    if ranks == 1 or case.facts.applied_plan(ExpertPlan) is not None:
        return
    among = sharing_ranks(layout)
    if layout.tp > 1 and not case.techniques.sequence_parallel:
        yield ConfigError(
            f"layout.ep = {ranks} with layout.tp = {layout.tp} needs techniques.sequence_parallel = true: else all"
            f" {layout.tp} ranks of the"
            f" tensor axis would send the same tokens to the experts. Set it true, or layout.ep = 1."
        )
    stacks = find_stacks(case.facts.module) if case.facts.module is not None else {}
    if not stacks:
        yield ConfigError(
            f"layout.ep = {ranks} shares experts out, and {case.facts.kind} has no module of stacked experts inside its"
            f" blocks (parameters whose first dim is the experts, and a forward that takes tokens, numbers of experts"
            f" and weights). Set layout.ep = 1."
        )
        return
    adapted = next(
        (path for path in stacks if owner(path).rpartition(".")[2] == "base_layer" or path.endswith(".base_layer")),
        None,
    )
    if adapted is not None:
        yield UnsupportedError(
            f"layout.ep = {ranks}: the experts of {pattern(adapted.partition('.base_layer')[0])} have adapters around"
            f" them, which would add to stacks that are shared out. Leave the experts out of adapters.targets (peft:"
            f" target_parameters), or set layout.ep = 1."
        )
        return
    least = math.gcd(among, *(stack.experts for stack in stacks.values()))
    legal = ", ".join(str(n) for n in range(1, least + 1) if least % n == 0)
    for stack in stacks.values():
        if stack.experts % ranks:
            where = pattern(stack.path)
            yield ConfigError(
                f"layout.ep = {ranks} does not divide the {stack.experts} experts of {where}. Legal here: {legal}."
            )
            return


def _routers(case: Case) -> list[Router]:
    return (
        []
        if case.facts.module is None
        else [module for module in case.facts.module.modules() if isinstance(module, Router)]
    )


def own_loss_of_experts(case: Case) -> Found:
    """Refuse a router loss over all layers and tokens (transformers) if a rank or stage has only a part of them."""
    if not case.facts.asks_for_router_loss:
        return
    cause = f"the config of {case.facts.kind} has output_router_logits = true, which adds a loss of its routers"
    if case.reduction == "mean":
        yield UnsupportedError(
            f"{cause}: of the tokens that a rank has, where the model computes its loss for a loop of your own. Set"
            f" output_router_logits = false, or use parallelize(), which takes those of all ranks."
        )
    elif case.layout.pp > 1:
        yield UnsupportedError(
            f"{cause} that belongs to all layers together, and layout.pp = {case.layout.pp} has them in several places."
            f" Set output_router_logits = false, or layout.pp = 1."
        )


def experts_companions(case: Case) -> Found:
    """Refuse techniques and kinds of experts that do not combine with each other."""
    if case.layout.ep > 1 and case.technique == "ddp":
        yield UnsupportedError(
            f"techniques.data_parallel = ddp does not go with layout.ep = {case.layout.ep}: its buckets would sum the"
            f" gradients of different experts. Set techniques.data_parallel = fully_shard; with techniques.zero_stage"
            f" = 0 all but the experts stays whole on every rank."
        )
    capacity = next((r.config.capacity_factor for r in _routers(case) if r.config.capacity_factor), 0)
    if case.layout.tp > 1 and case.techniques.sequence_parallel and capacity:
        yield UnsupportedError(
            f"model.moe.capacity_factor = {capacity} with layout.tp = {case.layout.tp}: who is over an expert's"
            f" capacity depends on the whole sequence, of which a rank has a part. Set capacity_factor = 0 (no token is"
            f" dropped), or techniques.sequence_parallel = false."
        )


def stacked_adapters(case: Case) -> Found:
    """Refuse what does not carry peft's adapters beside stacked experts.

    In each forward peft takes the parameter out of its module and puts the sum in its place: a rank's view of a
    parameter, which tensor parallelism leaves there, would be in the way, and a compiled module does not see it.
    """
    name = _beside(case)
    if name is None:
        return
    for key, value, legal in (
        ("layout.tp", case.layout.tp if case.layout.tp > 1 else None, "1"),
        ("techniques.compile", "true" if case.techniques.compile else None, "false"),
    ):
        if value is not None:
            yield UnsupportedError(
                f"{key} = {value}: adapters beside stacked experts ({pattern(name)}) take the experts' weights out of"
                f" their module while it computes. Leave the stacks out of adapters.targets, or set {key} = {legal}."
            )


def _beside(case: Case) -> str | None:
    """Return a stacked parameter with adapters."""
    if case.facts.module is None:
        return None
    named = ((clean(raw), parameter) for raw, parameter in case.facts.module.named_parameters())
    return next((name for name, p in named if p.dim() == 3 and ".base_layer." in name), None)
