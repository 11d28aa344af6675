"""What ranks of the expert axis send each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.core.axes import DATA_AXES, Axis
from meshwright.core.names import is_within
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.structure.router_loss import RouterLoss

from .expert_plan import ExpertPlan
from .plan import Collective, PrecisionPlan
from .tensor_plan import TensorPlan


def router_collectives(
    facts: ModelFacts,
    mesh: Mapping[str, int],
    tensor: TensorPlan | None,
    precision: PrecisionPlan,
    recomputed: Mapping[str, tuple[str, ...]],
    router_loss: RouterLoss | None,
) -> Iterator[Collective]:
    """Of our routers: what a loss per sequence sums where ranks have parts of it, one per microbatch over the ranks that have others of
    its sequences, and the load that moves biases, once in a step. Of others the loss of all layers, once in a microbatch."""
    cut = tensor is not None and tensor.sequence_parallel
    wide = "float64" if precision.compute == "float64" else "float32"
    ranks = mesh.get(Axis.TP, 1)
    for router in facts.routers:
        calls, what = 1 + _is_recomputed(router.path, recomputed), f"load by {router.path}"
        elements = calls * (router.experts + 1)
        if cut and router.sums_sequences:
            yield Collective("all_reduce", Axis.TP.value, ranks, what, elements, wide, "microbatch", calls, by_row=True)
        for axis in DATA_AXES if router.sums_batches else ():
            if (others := mesh.get(axis, 1)) > 1:
                yield Collective("all_reduce", axis.value, others, what, router.experts + 1, wide, "microbatch", calls)
    balanced = sum(router.experts for router in facts.routers if router.balances)
    for axis in (*DATA_AXES, *((Axis.TP,) if cut else ())):
        if (ranks := mesh.get(axis, 1)) > 1 and balanced:
            yield Collective("all_reduce", axis.value, ranks, "tokens per expert", balanced, "int64", "step")
        if ranks > 1 and router_loss is not None:
            yield Collective("all_reduce", axis.value, ranks, "load of all routers", router_loss.experts + 1, "int64", "microbatch")


def _is_recomputed(path: str, recomputed: Mapping[str, tuple[str, ...]]) -> bool:
    inside = [f"{block}.{path}".rstrip(".") for block, paths in recomputed.items() for path in paths]
    return any(is_within(path, one) for one in inside)


def expert_collectives(experts: ExpertPlan, precision: PrecisionPlan, recomputed: Mapping[str, tuple[str, ...]]) -> Iterator[Collective]:
    """Of each stack in a microbatch: how many tokens each expert is given, and these tokens there and back, in forward and backward.

    Args:
        recomputed: block -> paths of what is recomputed in it: what is sent in its forward is sent again.
    """
    axis, ranks = Axis.EP.value, experts.ranks
    for stack in experts.stacks:
        again = _is_recomputed(stack.path, recomputed)
        counts, tokens = f"tokens per expert of {stack.path}", f"tokens of {stack.path}"
        yield Collective("all_to_all", axis, ranks, counts, stack.experts, "int64", "microbatch", 1 + again)
        calls = 4 + 2 * again
        elements = calls * stack.top_k * stack.width
        yield Collective("all_to_all", axis, ranks, tokens, elements, precision.compute, "microbatch", calls, by_token=True)
