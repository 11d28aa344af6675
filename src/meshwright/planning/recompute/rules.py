"""Check activation checkpointing; the functions are rows of the table in ``rules``."""

from __future__ import annotations

from dataclasses import fields

from meshwright.core.errors import ConfigError, UnsupportedError, nearest
from meshwright.core.names import clean, is_within, selected
from meshwright.introspection.module_kinds import DROPOUTS
from meshwright.introspection.structure.experts import find_stacks
from meshwright.planning.case import Case, Found
from meshwright.planning.techniques import Techniques
from meshwright.planning.tensor.plan import TensorPlan
from meshwright.planning.tensor.rules import no_blocks

from .operators import check_kept
from .plan import ACTS_WITH, checkpointed_modules, modules_of_blocks

ON_BLOCKS = ("full", "every_n", "modules", "selective_op", "offload", "memory_budget")


def checkpointing_keys(case: Case) -> Found:
    """Require legal values, and the right mode for keys that act with one mode only."""
    t = case.techniques
    mode = t.activation_checkpointing
    defaults = {field.name: field.default for field in fields(Techniques)}
    for key, wanted in ACTS_WITH.items():
        if getattr(t, key) != defaults[key] and mode != wanted:
            yield ConfigError(
                f"techniques.{key} acts only with techniques.activation_checkpointing = {wanted}, and here that is"
                f" {mode}. Leave it out, or set techniques.activation_checkpointing = {wanted}."
            )
    for key in ("checkpoint_every", "checkpoint_keep_every"):
        if getattr(t, key) < 1:
            yield ConfigError(f"techniques.{key} = {getattr(t, key)}: every n-th one, where n is 1 (every one) or more")
    if not 0 < t.activation_memory_budget < 1:
        yield ConfigError(
            f"techniques.activation_memory_budget = {t.activation_memory_budget}: a share of what would be kept, above"
            f" 0 and below 1; for all of it set techniques.activation_checkpointing = none, for nothing full."
        )
    if mode == "selective_op":
        yield from check_kept(t.checkpoint_keep, "techniques.checkpoint_keep")


def checkpointing_matches(case: Case) -> Found:
    """Require that a mode finds modules to act on."""
    t, facts = case.techniques, case.facts
    mode = t.activation_checkpointing
    if mode in ON_BLOCKS and not facts.blocks:
        yield ConfigError(no_blocks(f"techniques.activation_checkpointing = {mode}", facts))
        return
    if mode == "selective" and not facts.attentions:
        yield ConfigError(
            f"techniques.activation_checkpointing = selective recomputes attention, but no module of {facts.kind}"
            f" inside a repeated block is called attention. Use full, or name the module *attention*."
        )
    if mode == "every_n" and t.checkpoint_every > len(facts.blocks):
        yield ConfigError(
            f"techniques.checkpoint_every = {t.checkpoint_every} is more than the {len(facts.blocks)} blocks of"
            f" {facts.kind}: none would be recomputed"
        )
    if mode == "modules":
        if not t.checkpoint_modules:
            yield ConfigError(
                "techniques.activation_checkpointing = modules recomputes the modules of techniques.checkpoint_modules,"
                f" and none is named. Name some, such as {facts.blocks[0].rpartition('.')[0]}.*."
            )
        yield from _patterns_match(case)
        yield from _parts_fit(case, checkpointed_modules(facts, t))


def _patterns_match(case: Case) -> Found:
    """Require that every pattern names modules, and no module inside another's."""
    facts, names = case.facts, modules_of_blocks(case.facts)
    found: dict[str, str] = {}
    for text in case.techniques.checkpoint_modules:
        hits = selected(text, names)
        if not hits:
            yield ConfigError(
                f"techniques.checkpoint_modules: '{text}' matches no module in the repeated blocks of"
                f" {facts.kind}.{nearest(text, names)}"
                f" * stands for one part of a name: {facts.blocks[0].rpartition('.')[0]}.* is every block."
            )
        found = dict.fromkeys(hits, text) | found
    nested = [(inner, outer) for inner in found for outer in found if inner != outer and is_within(inner, outer)]
    for inner, outer in nested[:1]:
        yield ConfigError(
            f"techniques.checkpoint_modules: '{found[inner]}' matches {inner}, which lies in {outer}"
            f" ('{found[outer]}'): it would be recomputed twice. Leave one of them out."
        )


def _parts_fit(case: Case, chosen: tuple[str, ...]) -> Found:
    """Refuse to recompute alone a part of modules that compute together on several ranks."""
    facts, layout = case.facts, case.layout
    inside: dict[str, str] = {}
    if layout.tp > 1 and facts.applied_plan(TensorPlan) is None:
        for kind in facts.measurements.structure(layout.tp).structure.kinds:
            whole = {region.container for region in kind.regions}
            for block in kind.blocks:
                parts = {path for path in chosen if is_within(path, block) and path != block}
                inside |= {
                    path: f"layout.tp = {layout.tp}" for path in parts if path[len(block) + 1 :] not in whole - {""}
                }
    if layout.ep > 1 and facts.module is not None:
        stacks = find_stacks(facts.module)
        inside |= {
            path: f"layout.ep = {layout.ep}" for path in chosen for s in stacks if path != s and is_within(path, s)
        }
    for path, axis in list(inside.items())[:1]:
        yield UnsupportedError(
            f"techniques.checkpoint_modules: {path} is a part of what computes together with {axis}, and cannot be"
            f" recomputed alone. Name blocks, or whole attentions, feed-forwards and stacks of experts."
        )


def checkpointing_companions(case: Case) -> Found:
    """Require the settings that a mode needs, and refuse those that it does not combine with."""
    t = case.techniques
    mode = t.activation_checkpointing
    if mode == "memory_budget":
        if not t.compile:
            yield ConfigError(
                "techniques.activation_checkpointing = memory_budget is a request to the compiler, which chooses what a"
                " compiled block keeps: it needs techniques.compile = true. Set it, or use selective_op."
            )
        if (dropout := _dropout_in_blocks(case)) is not None:
            yield UnsupportedError(
                f"techniques.activation_checkpointing = memory_budget: '{dropout}' drops at random, and the compiler"
                f" could drop others when it recomputes. Use selective_op or full, or set its p to 0."
            )
        if case.layout.tp > 1:
            yield UnsupportedError(
                f"techniques.activation_checkpointing = memory_budget does not go with layout.tp = {case.layout.tp}:"
                f" the compiler could"
                f" send again what it does not keep, and no plan foresees that. Use selective_op or full."
            )
    if mode == "offload" and t.compile:
        yield UnsupportedError(
            "techniques.activation_checkpointing = offload does not go with techniques.compile = true: a compiled block"
            " keeps what its graph says, as one. Set techniques.compile = false, or use memory_budget."
        )
    if mode == "selective_op" and t.async_tensor_parallel and "collectives" in t.checkpoint_keep:
        yield UnsupportedError(
            "techniques.async_tensor_parallel = true sends and multiplies at once, so techniques.checkpoint_keep cannot"
            " keep what was sent without the product. Leave collectives out of techniques.checkpoint_keep, or set"
            " async_tensor_parallel = false."
        )


def _dropout_in_blocks(case: Case) -> str | None:
    module = case.facts.module
    if module is None:
        return None
    names = modules_of_blocks(case.facts)
    layers = ((clean(name), layer) for name, layer in module.named_modules())
    return next((name for name, layer in layers if isinstance(layer, DROPOUTS) and layer.p > 0 and name in names), None)
