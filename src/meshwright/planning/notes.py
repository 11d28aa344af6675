"""Write the notes that a plan carries about a model and a layout."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.axes import Axis
from meshwright.core.names import is_within, owner, pattern
from meshwright.core.units import bytes_text
from meshwright.introspection.constructor.recording import STREAM_ELEMENTS
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.source import builder_of
from meshwright.introspection.structure.experts import find_stacks
from meshwright.introspection.transformers_private import brings_initialiser

from .layout import Layout
from .shares import shares_of
from .techniques import Techniques
from .tensor.plan import TensorPlan
from .values import ParameterPlan


def _uncompiled(requested: Techniques, tensor: TensorPlan | None):
    if tensor is not None and requested.compile and requested.activation_checkpointing != "none":
        what = {"selective": "attentions", "modules": "modules"}.get(requested.activation_checkpointing, "blocks")
        yield f"{what} that are recomputed run uncompiled on the tensor axis: torch finds no graph for them"


def of(
    facts: ModelFacts,
    layout: Layout,
    requested: Techniques,
    technique: str,
    parameters: tuple[ParameterPlan, ...],
    tensor: TensorPlan | None,
) -> Iterator[str]:
    """Yield notes on decisions that a plan's reader may not expect."""
    yield from _uncompiled(requested, tensor)
    yield from _unrehearsed(facts, layout)
    yield from _whole_on_tensor_ranks(facts, layout, parameters)
    yield from _initial_weights(facts)
    for p in facts.parameters:
        if p.aliases:
            yield f"{p.name} is tied to {', '.join(p.aliases)}: one parameter, counted once"
    if technique == "fully_shard" and shares_of(layout, technique).shards == 1:
        yield "dp_shard = 1: nothing is sharded; fully_shard acts for its precision or offload only"
    if technique == "fully_shard" and not facts.blocks:
        yield f"no repeated block was found in {facts.kind}: all parameters are gathered at once"


def _unrehearsed(facts: ModelFacts, layout: Layout):
    if layout.world > 1 and (why := facts.measurements.premises().unknown):
        unseen = "whether rows depend on each other, or calls leave state, is not known"
        yield f"the forward of {facts.kind} could not be rehearsed ({why}): {unseen}"


def _initial_weights(facts: ModelFacts):
    """Note whether initial weights differ in the last bits from those of the constructor in one process."""
    if not facts.on_meta or facts.module is None or hasattr(facts.module, "weight_law"):
        return
    if builder_of(facts.module) is None and not brings_initialiser(facts.module):
        note = f"initial weights: by the reset_parameters of {facts.kind}'s modules, since it was built on meta"
        yield (
            f"{note}; what its constructor did besides is not known. Give {facts.kind} itself, or a function that"
            f" builds it"
        )
    elif facts.numel > STREAM_ELEMENTS:
        note = "initial weights: by the constructor's distributions, drawn by (seed, name, position)"
        yield f"{note}; up to {STREAM_ELEMENTS:,} elements they are the constructor's own numbers"


def _whole_on_tensor_ranks(facts: ModelFacts, layout: Layout, parameters: tuple[ParameterPlan, ...]):
    """Note the matrices that the tensor axis does not cut."""
    whole = [p for p in parameters if dict(p.placements).get(Axis.TP.value) == "Replicate()" and len(p.shape) > 1]
    stacks = {pattern(path) for path in find_stacks(facts.module)} if whole and facts.module is not None else set()
    sizes: dict[str, int] = {}
    towers = facts.measurements.image_modules() if whole else ()
    of_towers: dict[str, int] = {}
    for p in whole:
        size = p.bytes
        if (tower := next((path for path in towers if is_within(p.pattern, path)), "")) != "":
            of_towers[tower] = of_towers.get(tower, 0) + size
        elif owner(p.pattern) in stacks:
            sizes[owner(p.pattern)] = sizes.get(owner(p.pattern), 0) + size
        else:
            yield f"{p.pattern} stays whole on every rank of the tensor axis: {bytes_text(size)} ({p.count} of them)"
    for path, size in of_towers.items():
        yield f"{path}, which computes images, stays whole on every rank of the tensor axis: {bytes_text(size)}"
    for path, size in sizes.items():
        note = (
            f"the experts of {path} are not tensor-sharded: every rank of the tensor axis has all of them,"
            f" {bytes_text(size)}"
        )
        yield f"{note}. layout.ep = {layout.tp} would share them out over its ranks"
