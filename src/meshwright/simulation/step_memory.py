"""Compute the bytes of a step by what they hold, and put rehearsals in the place of what is foreseen.

Activations of a block are counted as in arXiv 2205.05198 (Korthikanti et al.), tensor by tensor: what a backward needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.core.errors import ConfigError
from meshwright.planning.memory import beside_buckets
from meshwright.simulation.job import PARTS, BlockShape, Job
from meshwright.simulation.pipeline import Held, held_on, pipeline_seconds
from meshwright.simulation.products import CAST
from meshwright.simulation.step_time import (
    Cost,
    Costs,
    Kinds,
    StepTime,
    optimizer_seconds,
    rank_costs,
    stage_seconds,
    step_time,
)

# --- forecast the bytes of the fullest rank of a layout, from the dims of a model and the way a system runs it

WORKSPACE = 0.25e9
"""Workspaces of the libraries of products and of messages: assumed, not measured."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of the fullest rank at its peak.

    Attributes:
        parameters: at rest: the rank's master shard, and a whole copy where the system has one.
        gradients: those that accumulate.
        optimizer: state of the optimizer.
        activations: saved between forward and backward, of all microbatches in flight, with the block being computed
            and its gradients.
        logits: of the last stage, for all microbatches whose backward is to come.
        gathered: parameters of blocks that are whole for a while; buffers of messages.
        context: the driver, libraries and messages.
        fragmented: reserved by the allocator and not used.
        rank: the pipeline rank.
        rehearsed: most bytes of a real step by the device's allocator, where these stand for all but the context.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    gathered: float = 0.0
    context: float = 0.0
    fragmented: float = 0.0
    rank: int = 0
    rehearsed: float = 0.0

    @property
    def total(self) -> float:
        allocated = self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.gathered
        return allocated + self.context + self.fragmented + self.rehearsed

    def parts(self) -> dict[str, float]:
        """Return the bytes by name, those that are not zero."""
        return {name: size for name, size in vars(self).items() if name != "rank" and size}


def step_memory(job: Job, saved: SavedBytes | None = None) -> StepMemory:
    """Forecast the fullest rank's bytes.

    Args:
        saved: bytes of the job's blocks, where they are known from a job that differs in data ranks or stages alone.
    """
    *_, fullest = rising_memory(job, saved or SavedBytes(job))
    return fullest


def rising_memory(job: Job, saved: SavedBytes) -> Iterator[StepMemory]:
    """Yield ever higher lower bounds of a job's ``step_memory``, and that last: of the first rank, of both ends, of all
    ranks.
    """
    last = job.layout.pp - 1
    fullest = rank_memory(job, 0, saved)
    yield fullest
    if not last:
        return
    ranks: Iterable[int] = range(1, last)
    if job.schedule in ("1f1b", "interleaved_1f1b"):
        # among ranks with equal blocks the first one is the fullest, or the last of all
        bounds, parts = job.stage_bounds, {}
        for rank in range(last):
            part = job.architecture.part(bounds[rank :: job.layout.pp])
            parts.setdefault((part.dense, part.experts, part.number), rank)
        ranks = [rank for rank in parts.values() if rank]
    for others in ([last], ranks):
        found = [fullest, *(rank_memory(job, rank, saved) for rank in others)]
        fullest = max(found, key=lambda memory: (memory.total, -memory.rank))
        yield fullest


class SavedBytes:
    """Bytes that blocks save of a microbatch, summed over the blocks before each, so that stages are differences.

    Attributes:
        kinds: for each distinct block, without recomputation of it all.
        kept: between forward and backward.
        again: what each distinct block's backward computes again, or has back from host memory.
        deferred: between the gradients of a block's input and of its weights, where these are put off.
    """

    def __init__(self, job: Job):
        run, model = job.execution, job.architecture
        blocks = model.kinds[0]
        self.wide = job.tokens * model.hidden * run.compute_bytes
        gathered = 2 * self.wide * (1 - 1 / job.layout.tp) * (run.keeps_gathered and run.sequence_parallel)
        self.kinds = [block_activations(block, job) + gathered for block in blocks]
        if run.recompute == "full":
            entering = self.wide / (job.layout.tp if run.sequence_parallel else 1)
            shares = [block.kept if run.named in PARTS else 0.0 for block in blocks]
            least = [
                size * share + gathered * (1 - share) if share else min(size, entering)
                for share, size in zip(shares, self.kinds, strict=True)
            ]
        else:
            least = self.kinds
        kept = [run.recomputed * few + (1 - run.recomputed) * size for few, size in zip(least, self.kinds, strict=True)]
        self.again = [size - few for few, size in zip(kept if run.fused else least, self.kinds, strict=True)]
        if run.offloads:  # one block behind another
            self.again = [2 * size for size in self.kinds]
        self.kept = model.sums(kept)
        self.deferred = model.sums([_deferred(block, job) for block in blocks])
        self._known: dict[tuple, tuple[float, ...]] = {}

    def elements(self, job: Job, rank: int) -> tuple[float, ...]:
        """Return a rank's elements outside the routed experts and inside, those of all its blocks, of the most that is
        gathered together, and of embedding or head, as they stay gathered."""
        layout, run = job.layout, job.execution
        if (key := (rank, layout.pp, run.stages_per_rank, run.schedule)) not in self._known:
            model, homes, part = job.architecture, job.rank_of, job.architecture.part(job.bounds_on(rank))
            ends = model.embedding_elements if homes[0] == rank else 0
            if homes[-1] == rank and not (model.tied and layout.pp == 1):  # each stage has a weight of its own
                ends += model.head_elements
            dense, experts = part.dense / layout.tp, part.experts / layout.ep
            largest = part.largest_dense / layout.tp + part.largest_experts / layout.ep * job.expert_shares[1]
            largest *= max((job.joined(b) for b, n in zip(model.kinds[0], part.counts, strict=True) if n), default=1)
            outside = ends if run.gathers_ends else model.head_elements
            self._known[key] = (part.dense + ends) / layout.tp, experts, dense + experts, largest, outside
        return self._known[key]

    def most(self, job: Job, rank: int) -> tuple[float, ...]:
        """Return what a rank holds at most of activations and logits together, and of both once there are gradients.

        And last, what an allocator has for loss and blocks apart.
        """
        run = job.execution
        key = rank, job.layout, job.microbatches, run.stages_per_rank, run.schedule, run.loss_chunks
        key += run.gathers_each, run.reduces_each
        if key not in self._known:
            saves = HeldBytes.of(job, rank, self)
            moments, later = held_on(job, rank), ()
            few = job.microbatches <= job.layout.pp > 1  # of which published runs hold more than that
            if moments == (Held((job.microbatches,), (0,)),) and not few:  # all; only a backward makes them fewer
                later = (Held((job.microbatches - 1,), (0,)),)
            most = [max(map(saves.at, some), key=sum) for some in (moments, later or moments)]
            # loss and blocks need it after each other, and an allocator has it for both, by published runs
            apart = min(saves.logits, saves.backward + saves.head)
            self._known[key] = *most[0], *most[1], apart
        return self._known[key]


def least_memory(job: Job) -> float:
    """Return a lower bound of a rank's bytes: master weights, one gradient and the optimizer's state, all sharded."""
    run, layout, model = job.execution, job.layout, job.architecture
    dense = model.dense_elements / layout.tp / job.owners
    experts = model.expert_elements / layout.ep / job.expert_shares[0]
    resting = run.master_bytes if run.trained == 1.0 else run.weight_bytes or run.compute_bytes
    each = resting + (run.gradient_bytes + run.optimizer_bytes) * run.trained
    return (dense + experts) / layout.pp * each * (not run.rests_on_host) + job.machines.device.context_bytes


def rank_memory(job: Job, rank: int, saved: SavedBytes) -> StepMemory:
    """Forecast the bytes of one pipeline rank at its peak."""
    run, layout, model = job.execution, job.layout, job.architecture
    dense, experts, blocks, largest, outside = saved.elements(job, rank)
    activations, logits, *later, apart = saved.most(job, rank)
    elements = dense + experts
    owned = dense / job.owners + experts / job.expert_shares[0]
    trained, weight, gathered = run.trained, run.weight_bytes or run.compute_bytes, run.buffers_bytes
    if run.zero == 3:
        parameters = owned * (run.master_bytes if trained == 1.0 else weight)
        gradients = owned * run.gradient_bytes * trained
        if job.microbatches > 1 and not run.reduces_each:
            gradients = elements * run.gradient_bytes * trained
            casts = run.compute_bytes != run.gradient_bytes and run.recompute != "full"
            if casts and any(any(held.deferred) for held in held_on(job, rank)):
                gradients += elements * run.compute_bytes * trained  # new ones, before they are added in fp32
        gathered += outside / layout.tp * run.compute_bytes
        if run.gathers_each:  # the block that computes, and the one behind it
            gathered += blocks / run.reshards_to * run.gathered_element if run.reshards_to else 0.0
            gathered += 2 * largest * run.gathered_element
        else:  # everything stays gathered from its first forward on
            gathered += blocks * run.gathered_element
    else:
        parameters = elements * (run.copy_bytes or run.master_bytes) if trained == 1.0 else elements * weight
        parameters += owned * run.master_bytes * (trained if run.copy_bytes else 0)
        gradients = (owned if run.zero == 2 and job.microbatches == 1 else elements) * run.gradient_bytes * trained
        if run.buckets:
            delays, head = job.microbatches > 1 and not run.reduces_each, model.head_elements * run.gradient_bytes
            gradients += beside_buckets(gradients, min(gradients, head / layout.tp), delays=delays)
    if run.rests_on_host:
        parameters = gradients = owned = 0.0
    if run.frees_gradients and later != [activations, logits]:
        # gradients grow as activations go, from the loss to the first block: the peak is at one of the two ends
        before = gradients
        if job.microbatches == layout.pp == trained == 1 and not run.buckets:  # first block and embedding have none yet
            first = largest + (0 if model.tied else model.embedding_elements / layout.tp)
            before *= 1 - min(1.0, first / elements)
        ends = (0.0, activations, logits), (before, *later), (gradients, 0.0, 0.0)
        gradients, activations, logits = max(ends, key=sum)
    context, state = job.machines.device.context_bytes, owned * run.optimizer_bytes * trained
    held = parameters, gradients, state, activations, logits, gathered
    unused = (context + WORKSPACE, sum(held) * run.reserved + apart) if context else (0.0, 0.0)
    return StepMemory(*held, *unused, rank)


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that a pipeline rank holds of microbatches.

    Attributes:
        kept, deferred: for each of its stages, of one microbatch between forward and backward, and between the
            gradients of inputs and of weights.
        working: of the block that computes.
        backward, head: beside that in a backward: what it computes again, and its gradients; the head's, until the last
            microbatch's backward has left the last block.
        logits, softmax: of the loss while its backward runs; of one microbatch whose backward is to come, with what
            the last norm saves.
    """

    kept: tuple[float, ...]
    deferred: tuple[float, ...]
    working: float
    backward: float
    head: float
    logits: float
    softmax: float

    @classmethod
    def of(cls, job: Job, rank: int, saved: SavedBytes) -> HeldBytes:
        run, model, bounds = job.execution, job.architecture, job.bounds_on(rank)
        backward, head, reduces = 0.0, 0.0, job.microbatches == 1 or run.reduces_each
        for block, again, count in zip(model.kinds[0], saved.again, model.part(bounds).counts, strict=True):
            gates, rows = 2 if block.gated else 1, job.expert_copies(block) * run.imbalance if block.experts else 0.0
            inside = rows * (gates * block.experts.width + 2 * block.hidden) if block.experts else 0.0
            passed = max(gates * block.width * job.tokens / job.layout.tp, inside) * run.compute_bytes
            backward = max(backward, (again + passed) * (count > 0))
        if run.zero == 3 and (reduces or run.gathers_each):  # gradients, whole and as they are reduced
            # a unit of its own is reduced behind the last block; chunks add up in the dtype of the reduction
            new = run.compute_bytes if run.gathers_ends and run.loss_chunks == 1 else run.reduce_bytes
            head = model.head_elements / job.layout.tp * (reduces and job.rank_of[-1] == rank) * new * run.trained
            largest = saved.elements(job, rank)[3] * (run.compute_bytes + reduces * run.reduce_bytes)
            backward += run.trained * largest
            backward += saved.wide * (job.layout.tp > 1 and not run.sequence_parallel)  # DTensors are summed in a copy
        beside = 2 * saved.wide if run.keeps_outputs and job.layout.pp > 1 else 0.0  # received and sent
        beside += model.masks * job.microbatch * job.seq_len**2 / job.layout.cp
        # fp32 copies of them; in chunks, none outlives the loss
        logits = job.tokens / run.loss_chunks * model.vocab / job.layout.tp * 4 if job.rank_of[-1] == rank else 0.0
        inputs = 1 if run.fused or run.compute_bytes == 4 else 2  # of the last norm, which saves its output, too
        norm = saved.wide * (inputs + 1) * (job.rank_of[-1] == rank)
        return cls(
            tuple((saved.kept[b] - saved.kept[a]) * (not run.offloads) + beside for a, b in bounds),
            tuple(saved.deferred[b] - saved.deferred[a] for a, b in bounds),
            2 * saved.wide,
            backward,
            head,
            (run.logits_copies + run.chunk_copies * (run.loss_chunks > 1)) * logits,
            (logits if run.loss_chunks == 1 else 0.0) + norm,
        )

    def at(self, held: Held, *, computes: bool = True) -> tuple[float, float]:
        """Return the bytes of activations, and of logits, at a moment in which something is computed, or nothing is."""
        activations = self.working if computes else 0.0
        activations += sum(number * size for number, size in zip(held.whole, self.kept, strict=True))
        activations += sum(number * size for number, size in zip(held.deferred, self.deferred, strict=True) if number)
        waiting = max(0, held.whole[-1] - 1) * self.softmax
        at_loss = activations, (self.logits + waiting) * (held.whole[-1] > 0)
        in_block = activations + self.backward + self.head * (held.whole[-1] > 0), waiting
        return max(in_block, at_loss, key=sum) if computes else at_loss


def block_activations(block: BlockShape, job: Job) -> float:
    """Return the bytes that one block saves of a microbatch for its backward, without recomputation of it all."""
    run, layout = job.execution, job.layout
    b, tokens = run.compute_bytes, job.tokens
    entering = CAST.get(run.products, b)  # an input that a product saves in the dtype that it multiplies in
    wide = tokens * block.hidden / (layout.tp if run.sequence_parallel else 1)
    cut = tokens / layout.tp
    cheap = 0.0 if run.recompute == "modules" else 1.0  # outputs of norms and activations
    gates = 2 if run.fused else 3  # both projections, and what the activation function gives to its own kernel
    saved = 2 * wide * b + cheap * 2 * wide * entering
    if block.dropout:
        saved += 2 * wide  # masks
    if (core := block.attention) is not None and run.recompute != "selective":
        saved += cut * core.heads * core.value_dim * entering
    if core is not None and run.recompute == "latents":  # what projects up to queries, keys and values
        ranks = {p.depth for p in block.products if p.attends and p.cut == "column" and p.depth != block.hidden}
        saved += tokens * sum(ranks) * b
    elif core is not None and run.recompute != "selective":
        saved += cut * (core.heads * core.key_dim + core.kv_heads * (core.key_dim + core.value_dim)) * b
        if run.attention == "unfused" and run.recompute != "core":
            scores = job.microbatch * core.heads / layout.tp * job.seq_len / layout.cp * job.seq_len
            # with a gradient of theirs, where a whole block is computed again
            saved += scores * ((2 if run.recompute == "full" else 1) * b + (1 + b if block.dropout else 0))
    saved += cut * block.width * ((gates if block.gated else 1) * b + cheap * entering)
    if block.experts:
        copies = job.expert_copies(block) * run.imbalance
        saved += copies * (
            block.hidden * ((not run.mixture.weighs_inside) * b + entering)
            + block.experts.width * (gates * b + cheap * entering)
        )
        saved += cut * sum(product.columns for product in block.experts.shared[:1]) * (gates * b + cheap * entering) / 2
    if run.fused:
        return saved
    hidden = tokens * block.eager_hidden / (layout.tp if run.sequence_parallel else 1)
    if run.recompute == "selective":
        return saved * block.eager_recomputed + hidden
    return saved * block.eager + hidden + block.pairs * job.microbatch * job.seq_len**2 / layout.cp


def _deferred(block: BlockShape, job: Job) -> float:
    """Return the bytes that the weight gradients of a block's linear layers wait with: inputs, gradients of outputs."""
    run, tp = job.execution, job.layout.tp
    entering = CAST.get(run.products, run.compute_bytes)
    wide = block.hidden / (tp if run.sequence_parallel else 1)
    shared, elements, outputs = set(), 0.0, 0.0
    for product in (*block.products, *(block.experts.shared if block.experts else ())):
        if product.cut != "row" and product.depth == block.hidden:
            if product.attends not in shared:  # queries, keys and values read one tensor, as do gate and up
                elements += wide
            shared.add(product.attends)
        else:
            elements += product.depth / tp
        outputs += wide if product.cut == "row" else product.columns / (tp if product.cut == "column" else 1)
    return job.tokens * (elements * entering + outputs * run.compute_bytes)


# --- put rehearsed seconds and bytes of ranks in the place of a forecast's terms

MESSAGES = (Cost.TENSOR, Cost.CONTEXT, Cost.EXPERTS, Cost.DATA)
"""Costs that a rehearsal without links leaves out."""


@dataclass(frozen=True)
class RehearsedRank:
    """The figures of a rank's rehearsal.

    Attributes:
        pipeline_rank: the rank's place on the pipeline axis.
        seconds: seconds of a step.
        mem_bytes: most bytes at one time by the device's allocator.
        has_messages: whether messages took their time in these seconds; else computing alone did.
    """

    pipeline_rank: int
    seconds: float
    mem_bytes: float
    has_messages: bool


def rehearsed_time(job: Job, ranks: Sequence[RehearsedRank]) -> StepTime:
    """Forecast the seconds of a step whose ranks compute as long as was rehearsed.

    Without a pipeline the slowest rank counts, and messages that nothing hides come on top as they are foreseen. With
    one, each rank's stages take their foreseen seconds times what the rank was slower, and the schedule is simulated.

    Raises:
        ConfigError: a rank of the pipeline was not rehearsed.
    """
    slowest = _by_place(job, ranks)
    if job.layout.pp == 1:
        (rank,) = slowest
        foreseen = step_time(job)
        messages = () if rank.has_messages else MESSAGES
        costs = Costs({cost: foreseen.costs[cost] for cost in messages if cost in foreseen.costs})
        costs.add(Cost.REHEARSED, rank.seconds)
        return StepTime(costs, foreseen.hidden_s)
    kinds, slower = Kinds(job), []
    for rank in slowest:  # its rehearsed seconds over those foreseen, with the messages that a rehearsal may leave out
        costs = Costs()
        for one in rank_costs(job, kinds, rank.pipeline_rank):
            costs.add_all(one, job.microbatches)
        messages = 0.0 if rank.has_messages else sum(costs.get(cost, 0.0) for cost in MESSAGES)
        slower.append((rank.seconds + messages) / (costs.seconds + optimizer_seconds(job)))
    stages = stage_seconds(job, kinds)
    homes = job.rank_of

    def scaled(seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(slower[home] * one for home, one in zip(homes, seconds, strict=True))

    stages = replace(
        stages, forward=scaled(stages.forward), backward=scaled(stages.backward), weight=scaled(stages.weight)
    )
    busy = [0.0] * job.layout.pp
    for home, forward, backward in zip(homes, stages.forward, stages.backward, strict=True):
        busy[home] += job.microbatches * (forward + backward)
    fullest = busy.index(max(busy))
    foreseen, makespan = step_time(job), pipeline_seconds(job, stages)
    costs = Costs({Cost.REHEARSED: busy[fullest], Cost.BUBBLE: max(0.0, makespan - busy[fullest])})
    costs.add(Cost.OPTIMIZER, slower[fullest] * optimizer_seconds(job))
    if not slowest[fullest].has_messages and Cost.DATA in foreseen.costs:
        costs.add(Cost.DATA, foreseen.costs[Cost.DATA])
    return StepTime(costs, foreseen.hidden_s)


def rehearsed_memory(job: Job, ranks: Sequence[RehearsedRank]) -> StepMemory:
    """Return the bytes of the fullest rehearsed rank; the driver's and fragmentation come on top as foreseen."""
    fullest = max(_by_place(job, ranks), key=lambda rank: rank.mem_bytes)
    foreseen = step_memory(job)
    lost = fullest.mem_bytes * foreseen.fragmented / (foreseen.total - foreseen.context - foreseen.fragmented)
    rank, size = fullest.pipeline_rank, fullest.mem_bytes
    return StepMemory(context=foreseen.context, fragmented=lost, rank=rank, rehearsed=size)


def _by_place(job: Job, ranks: Sequence[RehearsedRank]) -> list[RehearsedRank]:
    """Return, for each place of the pipeline, the most seconds and bytes of its rehearsed ranks."""
    found = []
    for place in range(job.layout.pp):
        here = [rank for rank in ranks if rank.pipeline_rank == place]
        if not here:
            places = ", ".join(map(str, sorted({rank.pipeline_rank for rank in ranks})))
            raise ConfigError(
                f"rank {place} of the pipeline was not rehearsed (those at {places} were). Rehearse with --each-kind"
            )
        most = max(rank.seconds for rank in here), max(rank.mem_bytes for rank in here)
        found.append(RehearsedRank(place, *most, all(rank.has_messages for rank in here)))
    return found
