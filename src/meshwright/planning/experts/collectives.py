"""List the messages between ranks of the expert axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.core.axes import Axis
from meshwright.core.names import is_within, owner
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.structure.router_loss import RouterLoss
from meshwright.planning.shares import BATCH, TOKENS, Shares
from meshwright.planning.values import Collective, PrecisionPlan

from .plan import ExpertPlan


def router_collectives(
    facts: ModelFacts,
    shares: Shares,
    precision: PrecisionPlan,
    recomputed: Mapping[str, tuple[str, ...]],
    router_loss: RouterLoss | None,
    *,
    begins: bool = True,
) -> Iterator[Collective]:
    """List the all-reduces of routers.

    Meshwright's routers sum a loss per sequence over the ranks with other parts of the sequence, a loss per microbatch
    over the ranks with other sequences of it, and, once in a step, the load that moves biases. Routers of other models
    sum the load for the loss of all layers, once in a microbatch.

    Args:
        recomputed, begins: see ``expert_collectives``; behind frozen layers alone nothing is recomputed.
    """
    wide = "float64" if precision.compute == "float64" else "float32"
    ranks = shares.size(Axis.TP)
    for router in facts.routers:
        again = _recomputed_around(router.path, recomputed)
        calls = 1 + (again is not None and (not begins or _has_gradient(facts, again)))
        what = f"load by {router.path}"
        elements = calls * (router.experts + 1)
        if shares.cuts_sequences and router.sums_sequences:
            yield Collective("all_reduce", Axis.TP.value, ranks, what, elements, wide, "microbatch", calls, by_row=True)
        if (others := shares.size(*TOKENS)) > 1 and router.counts_sequences:
            over = TOKENS[0].value
            yield Collective("all_reduce", over, others, what, elements, wide, "microbatch", calls, by_row=True)
        for axis in BATCH if router.sums_batches else ():
            if (others := shares.size(axis)) > 1:
                yield Collective("all_reduce", axis.value, others, what, router.experts + 1, wide, "microbatch", calls)
    balanced = sum(router.experts for router in facts.routers if router.balances)
    for axis in shares.routed:
        if (ranks := shares.size(axis)) > 1 and balanced:
            yield Collective("all_reduce", axis.value, ranks, "tokens per expert", balanced, "int64", "step")
        if ranks > 1 and router_loss is not None:
            yield Collective(
                "all_reduce", axis.value, ranks, "load of all routers", router_loss.experts + 1, "int64", "microbatch"
            )


def _recomputed_around(path: str, recomputed: Mapping[str, tuple[str, ...]]) -> str | None:
    """Return the recomputed module that a module is in; None if there is none."""
    inside = [f"{block}.{path}".rstrip(".") for block, paths in recomputed.items() for path in paths]
    return next((one for one in inside if is_within(path, one)), None)


def _has_gradient(facts: ModelFacts, path: str) -> bool:
    """Return whether something is trained in a module or before it."""
    trained = [number for number, p in enumerate(facts.parameters) if p.trainable]
    last = max((number for number, p in enumerate(facts.parameters) if is_within(p.name, path)), default=-1)
    return bool(trained) and trained[0] <= last


def expert_collectives(
    facts: ModelFacts,
    experts: ExpertPlan,
    precision: PrecisionPlan,
    recomputed: Mapping[str, tuple[str, ...]],
    *,
    begins: bool = True,
) -> Iterator[Collective]:
    """List the all-to-alls of each stack in a microbatch: token counts per expert, then tokens, there and back.

    Tokens are sent in forward and backward. A gradient is sent back to the experts if they or a module before them is
    trained, and on to the tokens' own ranks if a module before them is.

    Args:
        facts: the parameters, trained or not, in the order of the model.
        recomputed: block -> paths of the modules recomputed in it, whose forwards send their messages again.
        begins: whether the first block's input derives from the token ids; else another pipeline stage sends it.
    """
    axis, ranks = Axis.EP.value, experts.ranks
    for stack in experts.stacks:
        inside = _module_of(stack.path, facts)
        flows = not begins or any(_trained_before(facts, stack.path))
        trains = any(p.trainable and owner(p.name) == stack.path for p in facts.parameters)
        again = _recomputed_around(stack.path, recomputed) is not None and (
            flows or any(p.trainable and is_within(p.name, inside) for p in facts.parameters)
        )
        counts, tokens = f"tokens per expert of {stack.path}", f"tokens of {stack.path}"
        yield Collective("all_to_all", axis, ranks, counts, stack.experts, "int64", "microbatch", 1 + again)
        calls = 2 * (1 + again) + (flows or trains) + flows
        elements = calls * stack.top_k * stack.width
        yield Collective(
            "all_to_all", axis, ranks, tokens, elements, precision.compute, "microbatch", calls, by_token=True
        )


def _trained_before(facts: ModelFacts, path: str) -> Iterator[str]:
    """Yield the trained parameters on which the input of a stack of experts depends.

    They lie in earlier blocks, in its own block except the module around the stack, or, outside blocks, before the
    first.
    """
    block = next(block for block in facts.blocks if is_within(path, block))
    front, inside = facts.blocks[: facts.blocks.index(block)], _module_of(path, facts)
    in_blocks = [any(is_within(p.name, block) for block in facts.blocks) for p in facts.parameters]
    first = in_blocks.index(True)
    for number, p in enumerate(facts.parameters):
        outside = number < first and not in_blocks[number]
        own = is_within(p.name, block) and not is_within(p.name, inside)
        if p.trainable and (outside or own or any(is_within(p.name, other) for other in front)):
            yield p.name


def _module_of(path: str, facts: ModelFacts) -> str:
    """Return the module that holds a stack and its router; the stack itself if that would be the whole block."""
    return path if owner(path) in facts.blocks else owner(path)
