"""Decide expert parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from meshwright.core.axes import Axis
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import is_within, owner, pattern
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.structure.experts import RouterLoss, Stack, find_stacks
from meshwright.planning.layout import BATCH, EXPERTS, TOKENS, Layout, Shares, sharded_dim, shares_of
from meshwright.planning.values import Case, Collective, Found, PrecisionPlan

# --- decide which stacks of experts are distributed, and over which mesh

EXPERT_AXES = (Axis.PP, Axis.DP_REPLICATE, Axis.EFSDP, Axis.EP)
"""Axes of the expert mesh, outermost first: the ranks of dp_shard, cp and tp, in other rows and columns."""


@dataclass(frozen=True)
class ExpertPlan:
    """The work of every rank of the expert axis.

    Attributes:
        mesh: the axes of the expert mesh and their sizes.
        stacks: the stacks of which each rank of ``ep`` has a share; ranks of ``efsdp`` shard that share.
    """

    mesh: tuple[tuple[str, int], ...]
    stacks: tuple[Stack, ...]

    @property
    def ranks(self) -> int:
        return dict(self.mesh)[Axis.EP.value]

    @property
    def shards(self) -> int:
        return dict(self.mesh)[Axis.EFSDP.value]

    def has(self, name: str) -> bool:
        """Return whether a parameter belongs to distributed experts."""
        return any(owner(name) == stack.path for stack in self.stacks)

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a rank's share of a stack's parameter, before it is sharded."""
        return (shape[0] // self.ranks, *shape[1:])

    def sharded_dim(self, shape: tuple[int, ...]) -> int:
        """Return the dim along which a rank's share is sharded."""
        return sharded_dim(self.local_shape(shape), self.shards)

    def padded(self, shape: tuple[int, ...]) -> int:
        """Count the elements of a rank's share, padded to a multiple of the shards, as FSDP2 sends it."""
        local = list(self.local_shape(shape))
        dim = self.sharded_dim(shape)
        local[dim] = -(-local[dim] // self.shards) * self.shards
        return math.prod(local)

    def placements(self, shape: tuple[int, ...]) -> tuple[tuple[str, str], ...]:
        """List (axis, "Shard(dim)" or "Replicate()") of a stack's parameter on the axes larger than 1."""
        places = {Axis.EFSDP.value: f"Shard({self.sharded_dim(shape)})", Axis.EP.value: "Shard(0)"}
        return tuple(
            (axis, places.get(axis, "Replicate()")) for axis, size in self.mesh if size > 1 and axis != Axis.PP
        )

    def only(self, blocks: tuple[str, ...]) -> ExpertPlan | None:
        """Restrict the plan to some blocks; None if they have no experts."""
        stacks = tuple(stack for stack in self.stacks if any(is_within(stack.path, block) for block in blocks))
        return replace(self, stacks=stacks) if stacks else None


def without_experts(facts: ModelFacts, experts: ExpertPlan | None) -> ModelFacts:
    """Leave distributed experts out of the facts."""
    return (
        facts
        if experts is None
        else replace(facts, parameters=tuple(p for p in facts.parameters if not experts.has(p.name)))
    )


def expert_mesh_of(layout: Layout) -> tuple[tuple[str, int], ...]:
    """Return the expert mesh of a resolved layout whose ``ep`` divides dp_shard * cp * tp."""
    sizes = {
        Axis.PP: layout.pp,
        Axis.DP_REPLICATE: layout.dp_replicate,
        Axis.EFSDP: shares_of(layout).size(*EXPERTS) // layout.ep,
        Axis.EP: layout.ep,
    }
    return tuple((axis.value, sizes[axis]) for axis in EXPERT_AXES)


# --- list the messages between ranks of the expert axis


def router_collectives(
    facts: ModelFacts,
    shares: Shares,
    precision: PrecisionPlan,
    recomputed: tuple[str, ...],
    router_loss: RouterLoss | None,
) -> Iterator[Collective]:
    """List the all-reduces of routers.

    Meshwright's routers sum a loss per sequence over the ranks with other parts of the sequence, a loss per microbatch
    over the ranks with other sequences of it, and, once in a step, the load that moves biases. Routers of other models
    sum the load for the loss of all layers, once in a microbatch.

    Args:
        recomputed: see ``expert_collectives``.
    """
    wide = "float64" if precision.compute == "float64" else "float32"
    ranks = shares.size(Axis.TP)
    for router in facts.routers:
        again, calls = next((module for module in recomputed if is_within(router.path, module)), None), 1
        if again is not None:  # behind frozen layers alone nothing is recomputed
            last = max((n for n, p in enumerate(facts.parameters) if is_within(p.name, again)), default=-1)
            calls += any(p.trainable for p in facts.parameters[: last + 1])
        what = f"load by {router.path}"
        elements = calls * (router.experts + 1)
        if shares.cuts_sequences and (router.counts_sequences or router.sums_batches):
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


def expert_collectives(
    facts: ModelFacts,
    experts: ExpertPlan,
    precision: PrecisionPlan,
    recomputed: tuple[str, ...],
    *,
    begins: bool = True,
    among: int = 1,
) -> Iterator[Collective]:
    """List the all-to-alls of each stack in a microbatch: token counts per expert, then tokens, there and back.

    Tokens are sent in forward and backward. A gradient is sent back to the experts if they or a module before them is
    trained, and on to the tokens' own ranks if a module before them is.

    Args:
        facts: the parameters, trained or not, in the order of the model.
        recomputed: paths of the modules whose forwards send their messages again (``Plan.sends_again``).
        begins: whether the first block's input derives from the token ids; else another pipeline stage sends it.
        among: the ranks of the tensor axis, which have a part of each sequence.
    """
    axis, ranks, sent = Axis.EP.value, experts.ranks, partial(Collective, by_token=True, filled=True, among=among)
    in_blocks = (any(is_within(p.name, block) for block in facts.blocks) for p in facts.parameters)
    first = next((number for number, is_inside in enumerate(in_blocks) if is_inside), 0)
    for stack in experts.stacks:
        # the module that holds the stack and its router; the stack itself if that would be the whole block
        inside = stack.path if owner(stack.path) in facts.blocks else owner(stack.path)
        block = next(block for block in facts.blocks if is_within(stack.path, block))
        front = facts.blocks[: facts.blocks.index(block)]
        flows = not begins
        # its input depends on earlier blocks, its own except the module around it, and what is before the first block
        for number, p in enumerate(facts.parameters):
            own = is_within(p.name, block) and not is_within(p.name, inside)
            flows |= p.trainable and (number < first or own or any(is_within(p.name, other) for other in front))
        trains = any(p.trainable and owner(p.name) == stack.path for p in facts.parameters)
        again = any(is_within(stack.path, module) for module in recomputed) and (
            flows or any(p.trainable and is_within(p.name, inside) for p in facts.parameters)
        )
        counts, tokens = f"tokens per expert of {stack.path}", f"tokens of {stack.path}"
        yield Collective("all_to_all", axis, ranks, counts, stack.experts, "int64", "microbatch", 1 + again)
        calls = 2 * (1 + again) + (flows or trains) + flows
        elements = calls * stack.top_k * stack.width
        yield sent("all_to_all", axis, ranks, tokens, elements, precision.compute, "microbatch", calls)


# --- check expert parallelism


def experts_fit(case: Case) -> Found:
    """Require an expert axis that divides the ranks it distributes over, and the experts of every stack."""
    layout, ranks = case.layout, case.layout.ep
    if ranks == 1 or case.facts.applied_plan(ExpertPlan) is not None:
        return
    among = shares_of(layout).size(*EXPERTS)
    if layout.tp > 1 and not case.techniques.sequence_parallel:
        yield ConfigError(
            f"layout.ep = {ranks} with layout.tp = {layout.tp} needs cut sequences: else all {layout.tp} ranks of the"
            f" tensor axis would send the same tokens to the experts. Set techniques.sequence_parallel = true, or"
            f" layout.ep = 1."
        )
    stacks = find_stacks(case.facts.module)
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
    capacity = case.facts.capacity_factor
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
    name = next((p.name for p in case.facts.parameters if len(p.shape) == 3 and ".base_layer." in p.name), None)
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
