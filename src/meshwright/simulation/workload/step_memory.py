"""Forecast the bytes of the fullest rank of a layout, from the dims of a model and the way a system runs it.

Activations of a block are counted as in arXiv 2205.05198 (Korthikanti et al.), tensor by tensor: what a backward needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .architecture import BlockShape
from .block_times import CAST
from .execution import Job

WORKSPACE = 0.25e9
"""Workspaces of the libraries of products and of messages: assumed, not measured."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of the fullest rank at its peak.

    Attributes:
        parameters: at rest: the rank's master shard, and a whole copy where the system has one.
        gradients: those that accumulate.
        optimizer: state of the optimizer.
        activations: saved between forward and backward, of all microbatches in flight, with the block being computed.
        logits: of the last stage.
        gathered: parameters and gradients of blocks that are whole for a while, and buffers of their messages.
        context: the driver, libraries and messages.
        fragmented: reserved by the allocator and not used.
        rank: the pipeline rank.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    gathered: float
    context: float
    fragmented: float
    rank: int = 0

    @property
    def total(self) -> float:
        allocated = self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.gathered
        return allocated + self.context + self.fragmented

    def parts(self) -> dict[str, float]:
        """Return the bytes by name, those that are not zero."""
        return {name: size for name, size in vars(self).items() if name != "rank" and size}


def step_memory(job: Job) -> StepMemory:
    """Forecast the fullest rank's bytes: a pipeline's first has most microbatches in flight, its last the logits."""
    ranks = {0, job.layout.pp - 1}
    return max((_rank_memory(job, rank) for rank in sorted(ranks)), key=lambda memory: memory.total)


def least_memory(job: Job) -> float:
    """Return a lower bound of a rank's bytes: master weights, one gradient and the optimizer's state, all sharded."""
    run, layout, model = job.execution, job.layout, job.architecture
    dense = model.dense_elements / layout.tp / job.owners
    experts = model.expert_elements / layout.ep / job.expert_owners
    each = run.master_bytes + (run.gradient_bytes + run.optimizer_bytes) * run.trained
    return (dense + experts) / layout.pp * each + job.machines.device.context_bytes


def _rank_memory(job: Job, rank: int) -> StepMemory:
    run, layout = job.execution, job.layout
    blocks = job.blocks_of(rank)
    dense = sum(block.dense_elements for block in blocks) / layout.tp + _ends(job, rank) / layout.tp
    experts = sum(block.experts.elements for block in blocks if block.experts) / layout.ep
    elements = dense + experts
    owned = dense / job.owners + experts / job.expert_owners
    trained, weight = run.trained, run.weight_bytes or run.compute_bytes
    if run.zero == 3:
        parameters = owned * (run.master_bytes if trained == 1.0 else weight)
        gradients = owned * run.gradient_bytes * trained
        if job.microbatches > 1 and not run.reduces_each:
            gradients = elements * run.gradient_bytes * trained
    else:
        parameters = elements * (run.copy_bytes or run.master_bytes) if trained == 1.0 else elements * weight
        parameters += owned * run.master_bytes * (trained if run.copy_bytes else 0)
        gradients = (owned if run.zero == 2 and job.microbatches == 1 else elements) * run.gradient_bytes * trained
    activations = _activations(job, blocks, rank)
    logits = _logits(job) if rank == layout.pp - 1 else 0.0
    gathered = _gathered(job, blocks)
    used = parameters + gradients + owned * run.optimizer_bytes * trained + activations + logits + gathered
    return StepMemory(
        parameters,
        gradients,
        owned * run.optimizer_bytes * trained,
        activations,
        logits,
        gathered,
        run.buffers_bytes + job.machines.device.context_bytes + (WORKSPACE if job.machines.device.context_bytes else 0),
        used * run.reserved if job.machines.device.context_bytes else 0.0,
        rank,
    )


def _ends(job: Job, rank: int) -> float:
    """Return the elements of embedding and head on a pipeline rank."""
    model, last = job.architecture, job.layout.pp - 1
    ends = model.embedding_elements if rank == 0 else 0
    if rank == last and (not model.tied or last > 0):
        ends += model.head_elements
    return ends


def _gathered(job: Job, blocks: Sequence[BlockShape]) -> float:
    """Return the bytes of whole parameters and gradients beside those at rest."""
    run = job.execution
    if run.zero < 3:
        return 0.0
    if not run.gathers_each:  # everything stays gathered from its first forward on
        whole = sum(block.dense_elements for block in blocks) / job.layout.tp
        whole += sum(block.experts.elements for block in blocks if block.experts) / job.layout.ep
        return (whole + job.architecture.head_elements / job.layout.tp) * run.compute_bytes
    largest = max(block.dense_elements for block in blocks) / job.layout.tp
    largest += max((block.experts.elements for block in blocks if block.experts), default=0) / job.layout.ep
    ends = job.architecture.head_elements / job.layout.tp
    # the block that computes and the one behind it, gathered; gradients of one, whole, and its reduction
    return (2 * largest + ends) * run.compute_bytes + largest * (run.compute_bytes + run.reduce_bytes)


def _in_flight(job: Job, rank: int) -> float:
    """Return how many microbatches' activations a pipeline rank holds, in units of all its blocks (1F1B)."""
    ranks, per_rank, microbatches = job.layout.pp, job.execution.stages_per_rank, job.microbatches
    if ranks == 1:
        return 1.0
    if per_rank == 1:
        return min(microbatches, ranks - rank)
    warmup = (ranks - rank - 1) * 2 + (per_rank - 1) * ranks + 1
    return min(microbatches * per_rank, warmup) / per_rank


def _activations(job: Job, blocks: Sequence[BlockShape], rank: int) -> float:
    run = job.execution
    saved = sum(block_activations(block, job) for block in blocks)
    wide = job.tokens * job.architecture.hidden * run.compute_bytes
    inputs = len(blocks) * wide / (job.layout.tp if run.sequence_parallel else 1)
    flight = _in_flight(job, rank)
    if run.keeps_outputs and job.layout.pp > 1:
        inputs += run.stages_per_rank * 2 * wide  # received and sent
        saved += run.stages_per_rank * 2 * wide
    if run.recompute == "full":
        whole = max(block_activations(block, job) for block in blocks)
        kept = run.recomputed * inputs + (1 - run.recomputed) * saved
        return kept * flight + whole + 2 * wide
    return saved * flight + 2 * wide


def block_activations(block: BlockShape, job: Job) -> float:
    """Return the bytes that one block saves of a microbatch for its backward, without recomputation of it all."""
    run, layout = job.execution, job.layout
    b, tokens = run.compute_bytes, job.tokens
    entering = CAST.get(run.products, b)  # an input that a product saves in the dtype that it multiplies in
    wide = tokens * block.hidden / (layout.tp if run.sequence_parallel else 1)
    cut = tokens / layout.tp
    cheap = 0.0 if run.recompute == "modules" else 1.0  # outputs of norms and activations
    saved = 2 * wide * b + cheap * 2 * wide * entering
    if block.dropout:
        saved += 2 * wide  # masks
    core = block.attention
    if core is not None and run.recompute != "selective":
        saved += cut * core.heads * core.value_dim * entering
    if core is not None and run.recompute not in ("core", "selective"):
        saved += cut * (core.heads * core.key_dim + core.kv_heads * (core.key_dim + core.value_dim)) * b
        if run.attention == "unfused":
            scores = job.microbatch * core.heads / layout.tp * job.seq_len / layout.cp * job.seq_len
            saved += scores * (2 * b + (1 + b if block.dropout else 0))
    saved += cut * block.width * ((2 if block.gated else 1) * b + cheap * entering)
    if block.experts:
        copies = tokens / (layout.tp if layout.ep > 1 else 1) * block.experts.top_k * run.imbalance
        saved += copies * (block.hidden * (b + entering) + block.experts.width * (2 * b + cheap * entering))
        saved += cut * sum(product.columns for product in block.experts.shared[:1]) * (b + cheap * entering / 2)
    return saved


def _logits(job: Job) -> float:
    """Return the bytes of log-probabilities and of their gradient, both in fp32."""
    return job.tokens / job.execution.loss_chunks * job.architecture.vocab / job.layout.tp * (4 + 4)
