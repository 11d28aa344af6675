"""Decide activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch

from meshwright.core.errors import ConfigError, MeshwrightError, UnsupportedError, import_object, nearest
from meshwright.core.names import clean, is_within, selected
from meshwright.core.torch_private import schema_of
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.module_kinds import DROPOUTS
from meshwright.introspection.structure.experts import find_stacks
from meshwright.planning.techniques import Techniques
from meshwright.planning.tensor.plan import TensorPlan
from meshwright.planning.values import Case, Found, no_blocks

# --- choose the modules to recompute

KEPT = ("attention", "matmuls", "collectives", "topk")
"""Names of groups of operators whose results selective_op can save."""

ACTS_WITH = {
    "checkpoint_every": "every_n",
    "checkpoint_modules": "modules",
    "checkpoint_keep": "selective_op",
    "checkpoint_keep_every": "selective_op",
    "activation_memory_budget": "memory_budget",
}
"""Keys of the techniques that one mode of activation_checkpointing reads, with that mode."""


def checkpointed_modules(facts: ModelFacts, requested: Techniques) -> tuple[str, ...]:
    """List the modules that are recomputed, or (offload) whose saved activations go to host memory."""
    match requested.activation_checkpointing:
        case "full" | "selective_op" | "offload":
            return facts.blocks
        case "selective":
            return facts.attentions
        case "every_n":
            every = max(requested.checkpoint_every, 1)
            return facts.blocks[every - 1 :: every]
        case "modules":
            names = modules_of_blocks(facts)
            chosen = {name for text in requested.checkpoint_modules for name in selected(text, names)}
            return tuple(name for name in names if name in chosen)
        case _:
            return ()


def modules_of_blocks(facts: ModelFacts) -> list[str]:
    """List the paths of the repeated blocks and of all modules inside them."""
    names = (clean(name) for name, _ in facts.module.named_modules())
    return [name for name in names if any(is_within(name, block) for block in facts.blocks)]


# --- find the operators whose results a selective recomputation can save, by name

OPERATOR, OVERLOADED = type(torch.ops.aten.mm.default), type(torch.ops.aten.mm)
"""torch's classes of one form of an operator, and of an operator with all its forms."""


def check_kept(words: tuple[str, ...], where: str) -> Iterator[MeshwrightError]:
    """Yield errors in a list of results to save: names of groups, of operators, or "module:function"."""
    if not words:
        yield ConfigError(
            f"{where} is empty: nothing would be kept, which is techniques.activation_checkpointing = full"
        )
    for word in words:
        if word in KEPT:
            continue
        try:
            if ":" in word:
                policy_function(word, where)
            else:
                operators(word, where)
        except MeshwrightError as error:
            yield error


def policy_function(path: str, where: str) -> Any:
    """Import a user's policy, (context, operator, *args, **kwargs) → torch.utils.checkpoint.CheckpointPolicy.

    Raises:
        ConfigError: it cannot be imported, or called.
    """
    found = import_object(path)
    if not callable(found):
        raise ConfigError(
            f"{where}: '{path}' is a {type(found).__name__}, and not a function of (context, operator, *args, **kwargs)"
        )
    return found


def operators(name: str, where: str) -> tuple[Any, ...]:
    """Find torch's operator of a full name (``aten.mm.default``), or all savable forms of one (``aten.mm``).

    Raises:
        ConfigError: there is no operator of that name.
        UnsupportedError: its results cannot be saved.
    """
    found: Any = torch.ops
    parts = name.removeprefix("torch.ops.").split(".")
    try:
        for part in parts:
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        found = None
    if not isinstance(found, OPERATOR | OVERLOADED) or len(parts) not in (2, 3):
        raise ConfigError(
            f"{where}: '{name}' is neither a word nor an operator.{nearest(name, KEPT)} Legal: {', '.join(KEPT)}; an"
            f" operator of torch such as aten.mm.default; or module:function, a policy."
        )
    if parts[0] in ("c10d", "_c10d_functional"):
        raise UnsupportedError(
            f"{where}: '{name}' sends into a buffer that it is given. Say collectives, which keeps all that is"
            f" received."
        )
    forms = [getattr(found, form) for form in found.overloads()] if isinstance(found, OVERLOADED) else [found]
    fresh = tuple(form for form in forms if is_fresh(form))
    if not fresh:
        raise UnsupportedError(
            f"{where}: '{name}' writes into its inputs or gives a view of them, so that there is no result of its own"
            f" to keep. Name the operator that makes the tensor."
        )
    return fresh


def is_fresh(operator: Any) -> bool:
    """Return whether an operator's results are new: it writes into no argument, and returns no view of one."""
    schema = schema_of(operator)
    return bool(schema.returns) and all(value.alias_info is None for value in (*schema.arguments, *schema.returns))


# --- check activation checkpointing

ON_BLOCKS = ("full", "every_n", "modules", "selective_op", "offload", "memory_budget")


def checkpointing_keys(case: Case) -> Found:
    """Require the right mode for keys that act with one mode only."""
    t = case.techniques
    mode = t.activation_checkpointing
    defaults = {field.name: field.default for field in fields(Techniques)}
    for key, wanted in ACTS_WITH.items():
        if getattr(t, key) != defaults[key] and mode != wanted:
            yield ConfigError(
                f"techniques.{key} acts only with techniques.activation_checkpointing = {wanted}, and here that is"
                f" {mode}. Leave it out, or set techniques.activation_checkpointing = {wanted}."
            )
    if mode == "selective_op":
        yield from check_kept(t.checkpoint_keep, "techniques.checkpoint_keep")


def checkpointing_matches(case: Case) -> Found:
    """Require that a mode finds modules to act on, none inside another, and none that only compute with others."""
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
    if mode != "modules":
        return
    if not t.checkpoint_modules:
        yield ConfigError(
            "techniques.activation_checkpointing = modules recomputes the modules of techniques.checkpoint_modules,"
            f" and none is named. Name some, such as {facts.blocks[0].rpartition('.')[0]}.*."
        )
    layout, names = case.layout, modules_of_blocks(facts)
    found: dict[str, str] = {}  # path of a module -> the pattern that names it
    for text in t.checkpoint_modules:
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
    chosen = checkpointed_modules(facts, t)
    inside: dict[str, str] = {}  # part of modules that compute together on several ranks -> the axis
    if layout.tp > 1 and facts.applied_plan(TensorPlan) is None:
        for kind in facts.measurements.structure(layout.tp).structure.kinds:
            whole = {region.container for region in kind.regions}
            for block in kind.blocks:
                parts = {path for path in chosen if is_within(path, block) and path != block}
                inside |= {
                    path: f"layout.tp = {layout.tp}" for path in parts if path[len(block) + 1 :] not in whole - {""}
                }
    if layout.ep > 1:
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
                " compiled block keeps: compiled blocks are needed. Set techniques.compile = true, or use selective_op."
            )
        names = modules_of_blocks(case.facts)
        modules = case.facts.module.named_modules()
        drops = (clean(name) for name, layer in modules if isinstance(layer, DROPOUTS) and layer.p > 0)
        if (dropout := next((name for name in drops if name in names), None)) is not None:
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
