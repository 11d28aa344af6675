"""Choose the modules that are gathered as units, as requested from ``nvfsdp_strategy_parallelize``."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.imports import import_classes_from_paths
from meshwright.core.names import clean, is_within, owner
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.collectives import step_collectives
from meshwright.planning.context.collectives import context_collectives
from meshwright.planning.data.units import Holding, Narrow, at_rest, trained_cuts, units_of
from meshwright.planning.float8.messages import scales_of_gathered
from meshwright.planning.plan import Plan

from .options import ZeroOptions


def with_units(model: nn.Module, facts: ModelFacts, plan: Plan, options: ZeroOptions) -> Plan:
    """Return the plan with the requested units.

    Raises:
        ConfigError: a class of which the model has no module; units inside each other.
        UnsupportedError: units that tensor or expert parallelism cannot have.
    """
    if options.disable_bucketing:
        key, chosen = "disable_bucketing", tuple(_holders(model, facts))
    elif options.nvfsdp_unit_modules is not None:
        key, chosen = "nvfsdp_unit_modules", _of_classes(model, facts, classes_of(options))
    else:
        return plan
    if set(chosen) == set(facts.blocks):
        return plan
    if plan.tensor is not None or plan.experts is not None:
        raise UnsupportedError(
            f"{key}: beside tensor or expert parallelism the units are the repeated blocks"
            f" ({', '.join(facts.blocks[:2])} …), whose modules use each other's parameters. Leave it out."
        )
    facts = replace(at_rest(facts, plan.precision), blocks=chosen)
    reshard = options.stage in (0, 3)
    shares = plan.shares
    narrow = Narrow.of(plan.float8, plan.quantize)
    units = units_of(facts, Holding(shares.shards, plan.precision, narrow=narrow, optimizer=plan.optimizer), reshard)
    scales = tuple(scales_of_gathered(plan.float8, None, shares.shards))
    of_rows = () if plan.context is None else context_collectives(facts, plan.context, plan.precision, {})
    moved = step_collectives(shares, units, plan.data, plan.precision, (*scales, *of_rows), trained_cuts(facts, None))
    return replace(plan, units=units, collectives=moved)


def classes_of(options: ZeroOptions) -> list[type]:
    requested = options.nvfsdp_unit_modules or ()
    return [one if isinstance(one, type) else import_classes_from_paths([one])[0] for one in requested]


def _of_classes(model: nn.Module, facts: ModelFacts, classes: list[type]) -> tuple[str, ...]:
    found = [clean(name) for name, module in model.named_modules() if name and isinstance(module, tuple(classes))]
    for one in classes:
        if not any(isinstance(module, one) for module in model.modules()):
            raise ConfigError(
                f"nvfsdp_unit_modules: {facts.kind} has no module of the class {one.__module__}.{one.__qualname__}"
            )
    for inner in found:
        if outer := next((other for other in found if other != inner and is_within(inner, other)), None):
            raise ConfigError(
                f"nvfsdp_unit_modules: {inner} is inside {outer}, and both are named. Name one of their classes."
            )
    return tuple(found)


def _holders(model: nn.Module, facts: ModelFacts) -> list[str]:
    """List modules that hold parameters of their own, and contain no other unit; tied ones stay with the root."""
    tied = {owner(name) for p in facts.parameters if p.aliases for name in (p.name, *p.aliases)}
    holding = [
        clean(name)
        for name, module in model.named_modules()
        if name and next(module.parameters(recurse=False), None) is not None
    ]
    # its forward calls no child
    read = [clean(name) for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    holding = [name for name in holding if not any(is_within(name, outer) and name != outer for outer in read)]
    nested = {outer for outer in holding for inner in holding if inner != outer and is_within(inner, outer)}
    return [name for name in holding if name not in tied and name not in nested]
