"""Choose the modules to recompute, and those that send again (arXiv 1604.06174, 2205.05198)."""

from __future__ import annotations

from meshwright.core.names import clean, is_within, selected
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.techniques import Techniques

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
    names = (clean(name) for name, _ in facts.module.named_modules()) if facts.module is not None else facts.blocks
    return [name for name in names if any(is_within(name, block) for block in facts.blocks)]


def sent_again(mode: str, checkpointed: tuple[str, ...], keep: tuple[str, ...]) -> tuple[str, ...]:
    """List the checkpointed modules whose recomputed forward sends its messages again in backward."""
    return () if mode == "offload" or "collectives" in keep else checkpointed
