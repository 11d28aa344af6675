"""Describe a step to forecast: a model by its dims, how a system runs its layout, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import ceil
from typing import Literal

from meshwright.planning.data import blocks_by_bytes
from meshwright.planning.layout import Layout, shares_of
from meshwright.planning.pipeline.orders import schedule_kind
from meshwright.planning.pipeline.plan import balanced
from meshwright.planning.pipeline.schedule import read_schedule
from meshwright.simulation.cards import Group, Machines

# --- describe a transformer by the dims that decide its work: products, attention, experts, vocabulary


@dataclass(frozen=True)
class Product:
    """A linear layer, or several equal ones.

    Attributes:
        depth: input features.
        columns: output features.
        cut: how the tensor axis cuts the weight: its output features (column), its input features (row), or not (none).
        attends: whether it is a part of an attention module.
    """

    depth: int
    columns: int
    cut: str = "column"
    attends: bool = False

    @property
    def elements(self) -> int:
        return self.depth * self.columns


@dataclass(frozen=True)
class AttentionShape:
    """Attention's core: products of queries with keys, and of probabilities with values.

    Attributes:
        window: keys that a query reaches at most; 0: all before it.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    causal: bool = True

    def flops(self, rows: float, length: float) -> float:
        """Return the forward products of ``rows`` sequences of ``length`` tokens, without masked blocks."""
        reached = min(self.window, length) if self.window else length / (2 if self.causal else 1)
        return 2.0 * rows * length * reached * self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class ExpertsShape:
    """A mixture of experts: ``number`` of them, of which each token takes ``top_k``.

    Attributes:
        products: the linear layers of one expert.
        shared: those of the experts that all tokens take.
        width: features inside one expert.
        biased: whether experts' outputs have biases, added in fp32 where products are not grouped.
        clamped: whether both halves that a gate joins are clamped first, in kernels of their own where products are
            not grouped.
        whole: whether, without an expert axis, owners share them out by whole experts where they cannot cut each one
            evenly, and a tensor axis not at all, as this library does with stacks.
    """

    number: int
    top_k: int
    width: int
    products: tuple[Product, ...]
    shared: tuple[Product, ...] = ()
    biased: bool = False
    clamped: bool = False
    whole: bool = False

    @cached_property
    def elements(self) -> int:
        return self.number * sum(product.elements for product in self.products)


@dataclass(frozen=True)
class BlockShape:
    """One repeated block.

    Attributes:
        products: its linear layers, without experts.
        width: features inside the feed-forward layer (0 where experts take its place).
        gated: whether that layer multiplies two projections (SwiGLU).
        other: elements of norms and biases.
        eager_hidden: bytes for each token of hidden states that the block's own code saves without fusion, measured,
            beyond those of arithmetic: ``tp`` cuts them by sequence parallelism alone.
        eager, eager_recomputed: the others that it saves, over those of arithmetic: with nothing recomputed, and with
            attention recomputed.
        pairs: bytes for each pair of a row's tokens that it saves beside them, measured: of masks of its own, which
            ``tp`` does not cut.
        kept: fraction of all that stays where parts of blocks are computed again that a request states.
    """

    hidden: int
    products: tuple[Product, ...]
    attention: AttentionShape | None = None
    width: int = 0
    gated: bool = True
    experts: ExpertsShape | None = None
    other: int = 0
    dropout: bool = False
    eager_hidden: float = 0.0
    eager: float = 1.0
    eager_recomputed: float = 1.0
    pairs: float = 0.0
    kept: float = 0.0

    @cached_property
    def elements(self) -> int:
        return self.dense_elements + (self.experts.elements if self.experts else 0)

    @cached_property
    def dense_elements(self) -> int:
        """Elements outside the routed experts."""
        shared = sum(product.elements for product in self.experts.shared) if self.experts else 0
        router = self.hidden * self.experts.number if self.experts else 0
        return sum(product.elements for product in self.products) + shared + router + self.other

    @cached_property
    def active_elements(self) -> int:
        """Elements of the products that one token passes."""
        routed = self.experts.top_k * sum(p.elements for p in self.experts.products) if self.experts else 0
        return self.dense_elements - self.other + routed


@dataclass(frozen=True)
class BlocksPart:
    """Sizes of some of a model's blocks.

    Attributes:
        number: number of blocks.
        dense, experts: elements outside the routed experts, and inside.
        largest_dense, largest_experts: those of the block that has most.
        counts: how many there are of each of the model's distinct blocks.
    """

    number: int
    dense: int
    experts: int
    largest_dense: int
    largest_experts: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Architecture:
    """A whole model.

    Attributes:
        blocks: in forward order.
        tied: whether one weight is embedding and head.
        positions: rows of a learned table of positions.
        extra_heads: heads beside the first, each with its loss (multi-token prediction).
        masks: bytes for each pair of a row's tokens that all blocks of a stage keep together, measured.
    """

    name: str
    blocks: tuple[BlockShape, ...]
    vocab: int
    tied: bool = False
    positions: int = 0
    extra_heads: int = 0
    masks: float = 0.0

    @property
    def hidden(self) -> int:
        return self.blocks[0].hidden

    @property
    def embedding_elements(self) -> int:
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_elements(self) -> int:
        return self.vocab * self.hidden

    @cached_property
    def dense_elements(self) -> int:
        """Elements of all blocks outside the routed experts."""
        return self.part(((0, len(self.blocks)),)).dense

    @cached_property
    def expert_elements(self) -> int:
        return self.part(((0, len(self.blocks)),)).experts

    def part(self, bounds: tuple[tuple[int, int], ...]) -> BlocksPart:
        """Return the sizes of the blocks in (first, end) ranges."""
        if bounds not in self._parts:
            blocks = [block for a, b in bounds for block in self.blocks[a:b]]
            dense = [block.dense_elements for block in blocks]
            experts = [block.experts.elements for block in blocks if block.experts]
            shapes, order = self.kinds
            there = [kind for a, b in bounds for kind in order[a:b]]
            counts = tuple(there.count(kind) for kind in range(len(shapes)))
            sizes = sum(dense), sum(experts), max(dense, default=0), max(experts, default=0)
            self._parts[bounds] = BlocksPart(len(blocks), *sizes, counts)
        return self._parts[bounds]

    def balanced_cuts(self, stages: int) -> tuple[tuple[int, int], ...]:
        """Return (first block, end) of each pipeline stage as a plan cuts them, embedding and head counted."""
        if stages not in self._cuts:
            sizes = [float(block.elements) for block in self.blocks]
            head, embedding = float(self.head_elements), float(self.embedding_elements)
            self._cuts[stages] = tuple(balanced(sizes, stages, head=head, embedding=embedding))
        return self._cuts[stages]

    @cached_property
    def _parts(self) -> dict[tuple[tuple[int, int], ...], BlocksPart]:
        return {}

    @cached_property
    def _cuts(self) -> dict[int, tuple[tuple[int, int], ...]]:
        return {}

    @cached_property
    def kinds(self) -> tuple[tuple[BlockShape, ...], tuple[int, ...]]:
        """The distinct blocks, and for each block in order which of them it is."""
        found: dict[int, int] = {}
        order = tuple(found.setdefault(id(block), len(found)) for block in self.blocks)
        return tuple(self.blocks[order.index(number)] for number in range(len(found))), order

    def sums(self, of_kinds: Sequence[float]) -> list[float]:
        """Return for each number of first blocks the sum of a value that each kind of block has."""
        return [0.0, *accumulate(of_kinds[kind] for kind in self.kinds[1])]

    @cached_property
    def elements(self) -> int:
        outside = self.embedding_elements + (0 if self.tied else self.head_elements) + self.hidden
        return sum(block.elements for block in self.blocks) + outside

    def model_flops_per_token(self, length: int, trained: float = 1.0) -> float:
        """Return 6 FLOPs per active product element and 12 per attended feature (PaLM, appendix B), masked half
        included; 4 per element that is frozen: ``trained`` is the fraction that is not."""
        products = sum(block.active_elements for block in self.blocks) + self.head_elements * (1 + self.extra_heads)
        attended = sum(
            block.attention.heads * (block.attention.key_dim + block.attention.value_dim) / 2
            for block in self.blocks
            if block.attention
        )
        return (4.0 + 2.0 * trained) * products + 12.0 * attended * length


# --- describe how a system runs a layout: precision, recomputation, sharding, and which messages its work hides


@dataclass(frozen=True)
class MixtureRun:
    """Facts about how a training system runs mixtures of experts; the defaults are this library's.

    Attributes:
        dispatch: each of a token's copies travels for itself (copies), or a token once to each node and rank with some
            of its experts, written by expert on the way (tokens; DeepEP, HybridEP).
        waits: whether the host waits in each forward for the numbers of rows that experts get.
        grouped: whether kernels take all of a rank's experts at once, not one after the other.
        weighs_inside: whether a token's weights multiply inside its experts, so that their outputs need not be saved.
        pads: whether experts get as many rows each as the fullest one.
        stashes: whether rows that experts save for their backward are copied out of buffers of fixed size, which a
            graph of a whole step needs.
    """

    dispatch: Literal["copies", "tokens"] = "copies"
    waits: bool = True
    grouped: bool = True
    weighs_inside: bool = False
    pads: bool = False
    stashes: bool = False


PARTS = ("modules", "selective_op")
"""Modes that compute parts of blocks again, which a request states."""


@dataclass(frozen=True)
class Execution:
    """Facts about a training system that decide a step's time and memory; the defaults are this library's.

    Attributes:
        products: dtype of the linear layers' products.
        casts_weights: whether weights are cast for each microbatch, not once a step.
        compute_bytes: bytes of a gathered parameter and of an activation.
        master_bytes: bytes of a parameter at rest, in its owner's shard.
        copy_bytes: bytes of a further copy in the compute dtype that every rank keeps at rest (Megatron, DeepSpeed).
        gradient_bytes: bytes of an accumulated gradient.
        frees_gradients: whether gradients go with each optimizer step, so that a step of one microbatch begins without.
        buckets: whether gradients are copied to buckets that stay, as DDP does.
        reduce_bytes: bytes of a gradient in messages.
        optimizer_bytes: bytes of optimizer state per element of its owner's shard, master copy left out.
        zero: what is sharded over the data ranks (arXiv 1910.02054), 0 to 3.
        blocks_per_unit: most blocks of which parameters are gathered together; 0: by their bytes, as in this library.
        shards: ranks over which it is; 0: all of dp_shard and cp (ZeRO 1 and 2 of others: all data ranks).
        attention: kernel of attention: "unfused", "flash1", "flash2", "fused" (the newest that the device has).
        fused: whether chains of elementwise operators run as one kernel.
        fused_rotary: whether rotary positions are applied by one kernel where other chains are.
        recompute: parts that are computed again in backward: norms and activation functions (modules), attention's
            products of queries, keys and values (core), attention modules with their linear layers (selective), whole
            blocks (full).
        recomputed: fraction of the blocks that ``recompute`` is about.
        stops_early: whether computing a block again ends once its backward has all it reads, before its last product
            (torch's checkpoint without re-entrant autograd, and graphs, where nothing reads the result).
        named: the mode as users name it, where ``recompute`` stands for another one; "": as there.
        offloads: whether what blocks save rests in host memory until their backward.
        balances_ends: whether stages with embedding or head get fewer blocks, as in this library's plans.
        rests_on_host: whether parameters, gradients and optimizer state do, until blocks are gathered.
        loss_chunks: chunks of tokens in which head and loss are computed.
        gathers_logits: whether each rank of the tensor axis computes the loss of all logits.
        logits_copies, chunk_copies: fp32 copies of a microbatch's logits at the loss, such as log-probabilities; and
            how many more there are of a chunk's.
        hides_gradients: whether gradients are reduced behind the last microbatch's backward.
        hides_gathers: whether parameters are gathered behind the block before.
        keeps_gathered: whether what the tensor axis gathered stays for the backward.
        tensor_passes: gathers and reductions of a block's forward over the tensor axis.
        hides_tensor: fraction of the tensor axis' messages that runs behind products.
        graphs: parts whose kernels a CUDA graph launches: none, attention and router (partial), all (full).
        mixture: how mixtures of experts are run.
        hides_experts: fraction of the experts' messages that runs behind other work.
        exposed_sends: fraction of the time of a message between stages that its reader waits for.
        sequence_parallel: whether activations between blocks are cut over the tensor axis.
        stages_per_rank: stages of each pipeline rank.
        schedule: name of the pipeline's schedule, or the path of its CSV file; "": 1f1b, or interleaved_1f1b where a
            rank has several stages.
        cuts: first block of each pipeline stage, and the one behind its last; empty: as even as possible.
        reduces_each: whether gradients are reduced with every microbatch.
        sums_replicas_once: whether shards of them are, and summed over replicas with the last one alone.
        gathers_each: whether parameters are gathered for every microbatch (ZeRO 3).
        reshards_to: ranks that share a block's parameters between its forward and backward; 0: as at rest.
        gathers_ends: whether embedding and head are one unit that stays gathered, not the head alone.
        imbalance: tokens of the fullest expert rank over the mean.
        straggler: time of the slowest rank over the mean.
        keeps_outputs: whether a pipeline keeps what a stage sent until its backward.
        buffers_bytes: buffers of messages that the system allocates once.
        reserved: fraction by which the allocator's reserve exceeds what is allocated.
        trained: fraction of the elements that are trained (adapters).
        weight_bytes: bytes of a weight at rest where some are frozen, the mean of all; 0: as ``compute_bytes``.
        gather_bytes: bytes of a block's element as it is gathered, the mean of all; 0: as ``compute_bytes``.
        unpacked: fraction of a block's elements that rest in 4 bits, which each forward and backward unpacks.
    """

    products: str = "bfloat16"
    casts_weights: bool = True
    compute_bytes: float = 2.0
    master_bytes: float = 4.0
    copy_bytes: float = 0.0
    gradient_bytes: float = 4.0
    frees_gradients: bool = False
    buckets: bool = False
    reduce_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    zero: int = 3
    blocks_per_unit: int = 1
    shards: int = 0
    attention: str = "fused"
    fused: bool = False
    fused_rotary: bool = True
    recompute: Literal["none", "modules", "latents", "core", "selective", "full"] = "none"
    recomputed: float = 1.0
    stops_early: bool = True
    named: str = ""
    offloads: bool = False
    balances_ends: bool = True
    rests_on_host: bool = False
    loss_chunks: int = 1
    gathers_logits: bool = False
    logits_copies: float = 2.0
    chunk_copies: float = 0.0
    hides_gradients: bool = True
    hides_gathers: bool = True
    keeps_gathered: bool = False
    tensor_passes: int = 4
    hides_tensor: float = 0.0
    graphs: Literal["none", "partial", "full"] = "none"
    mixture: MixtureRun = MixtureRun()
    hides_experts: float = 0.0
    exposed_sends: float = 1.0
    sequence_parallel: bool = True
    stages_per_rank: int = 1
    schedule: str = ""
    cuts: tuple[tuple[int, int], ...] = ()
    reduces_each: bool = False
    sums_replicas_once: bool = False
    gathers_each: bool = True
    reshards_to: int = 0
    gathers_ends: bool = False
    imbalance: float = 1.0
    straggler: float = 1.0
    keeps_outputs: bool = False
    buffers_bytes: float = 0.0
    reserved: float = 0.03
    trained: float = 1.0
    weight_bytes: float = 0.0
    gather_bytes: float = 0.0
    unpacked: float = 0.0

    @property
    def gathered_element(self) -> float:
        return self.gather_bytes or self.compute_bytes


@lru_cache(maxsize=10_000)
def _data_ranks(layout: Layout) -> int:
    return shares_of(layout).data_ranks


@lru_cache(maxsize=10_000)
def even_cuts(blocks: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Cut blocks into stages as even as possible; of more stages than blocks, some hold embedding or loss alone."""
    return tuple(pairwise((0, *(round(blocks * (stage + 1) / stages) for stage in range(stages)))))


@lru_cache(maxsize=10_000)
def blocks_of_size(blocks: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Cut blocks into stages of one size, the last one smaller."""
    size = -(-blocks // stages)
    return tuple((min(stage * size, blocks), min((stage + 1) * size, blocks)) for stage in range(stages))


@lru_cache(maxsize=10_000)
def _rank_of(schedule: str, ranks: int, per_rank: int) -> tuple[int, ...]:
    return schedule_kind(schedule).rank_of(ranks, per_rank)


@lru_cache(maxsize=10_000)
def stages_on(rank_of_stage: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the stages of a rank."""
    return tuple(stage for stage, home in enumerate(rank_of_stage) if home == rank)


@dataclass(frozen=True)
class Job:
    """Describe a step to forecast: a model, its layout and batch, how a system runs them, and where.

    Attributes:
        layout: sizes of all axes, none open.
        rows: sequences of an optimizer step over all ranks.
        microbatch: sequences of a forward.
        together: sequences that stay in one forward.
    """

    architecture: Architecture
    layout: Layout
    seq_len: int
    rows: int
    microbatch: float
    execution: Execution
    machines: Machines
    together: int = 1

    @property
    def stages(self) -> int:
        return self.layout.pp * self.execution.stages_per_rank

    @cached_property
    def schedule(self) -> str:
        """Name of the pipeline's schedule, or the path of its CSV file."""
        run = self.execution
        return run.schedule or ("1f1b" if run.stages_per_rank == 1 else "interleaved_1f1b")

    @property
    def switches(self) -> dict[str, int | str | bool]:
        """The choices of a search beside the layout, under the documented keys of ``meshwright plan --json``."""
        run = self.execution
        return {
            "microbatch": int(self.microbatch),
            "recompute": run.named or run.recompute,
            "schedule": self.schedule if self.layout.pp > 1 else "",
            "stages_per_rank": run.stages_per_rank,
            "reshard_after_forward": run.gathers_each and (run.reshards_to or True),
            "sync_grad_accum": run.reduces_each,
            "loss_chunks": run.loss_chunks,
        }

    @cached_property
    def stage_bounds(self) -> tuple[tuple[int, int], ...]:
        """The first block of each pipeline stage, and the one behind its last."""
        model, run = self.architecture, self.execution
        if run.cuts:
            return run.cuts
        blocks = len(model.blocks)
        # as techniques.layers_per_stage cuts them
        if run.balances_ends and run.stages_per_rank > 1 and not run.schedule:
            return blocks_of_size(blocks, self.stages)
        if run.balances_ends and self.stages <= blocks:
            return model.balanced_cuts(self.stages)
        return even_cuts(blocks, self.stages)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        if self.schedule.endswith(".csv"):
            return read_schedule(self.schedule).rank_of
        return _rank_of(self.schedule, self.layout.pp, self.execution.stages_per_rank)

    def bounds_on(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the first block and the end of each stage on a pipeline rank."""
        bounds = self.stage_bounds
        return tuple(bounds[stage] for stage in stages_on(self.rank_of, rank))

    @cached_property
    def data_ranks(self) -> int:
        return _data_ranks(self.layout)

    @property
    def turns(self) -> float:
        """Microbatches of a rank, of which the last may have fewer rows."""
        return max(1.0, self.rows / self.data_ranks / self.microbatch)

    @cached_property
    def microbatches(self) -> int:
        return ceil(self.turns - 1e-6)

    @cached_property
    def tokens(self) -> float:
        """Tokens of a microbatch on one rank of the context axis."""
        return self.microbatch * self.seq_len / self.layout.cp

    def expert_copies(self, block: BlockShape) -> float:
        """Return the copies of a microbatch's tokens that a rank sends to experts, and as many for its own experts."""
        assert block.experts is not None
        # a rank of the tensor axis holds its part of the tokens where experts are spread over it
        return self.tokens / (self.layout.tp if self.layout.ep > 1 else 1) * block.experts.top_k

    @property
    def tensor_group(self) -> Group:
        return Group(self.layout.tp, 1)

    @cached_property
    def owners(self) -> int:
        """Ranks that share a dense parameter's optimizer state."""
        if self.execution.zero == 0:
            return 1
        return self.execution.shards or self.layout.dp_shard * self.layout.cp

    @cached_property
    def expert_shares(self) -> tuple[float, float]:
        """Ranks that share an expert's optimizer state, among those with the same experts, by the fullest's share; and
        how many times larger padding for ranks without one makes gathered experts."""
        kinds, ep = self.architecture.kinds[0], self.layout.ep
        stacks = [block.experts for block in kinds if block.experts and block.experts.whole and ep == 1]
        ranks = max(1, self.owners * (1 if stacks else self.layout.tp) // ep) if self.execution.zero else 1
        whole = {stack.number for stack in stacks if any(product.columns % ranks for product in stack.products)}
        most = [(n, -(-n // ranks)) for n in whole]
        owners = min((n / fullest for n, fullest in most), default=ranks)
        return owners, max((ranks * fullest / n for n, fullest in most), default=1.0)

    @cached_property
    def owner_group(self) -> Group:
        return Group(self.owners, self.layout.tp)

    @property
    def replica_group(self) -> Group:
        """Ranks that hold the same shards."""
        ranks = self.data_ranks * self.layout.cp
        return Group(max(1, ranks // self.owners), self.layout.tp * self.owners)

    @property
    def expert_replicas(self) -> Group:
        """Ranks that hold the same experts."""
        ranks = self.data_ranks * self.layout.cp * self.layout.tp
        return Group(max(1, ranks // self.layout.ep), self.layout.ep)

    def joined(self, block: BlockShape) -> int:
        """Return how many such blocks are gathered together."""
        run, layout = self.execution, self.layout
        if run.zero < 3 or self.data_ranks * layout.cp == 1 or (block.experts is not None and layout.ep > 1):
            return 1
        size, every = int(block.elements / layout.tp * run.gathered_element), len(self.architecture.blocks)
        if not run.blocks_per_unit and blocks_by_bytes(size, every, every) == 1:
            return 1  # however long stages are
        blocks = max(end - start for start, end in self.stage_bounds)
        return min(run.blocks_per_unit, blocks) or blocks_by_bytes(size, blocks, every)

    def with_layout(self, layout: Layout) -> Job:
        return Job(self.architecture, layout, self.seq_len, self.rows, self.microbatch, self.execution, self.machines)

    def with_execution(self, **changes: object) -> Job:
        return replace(self, execution=_changed(self.execution, **changes))


_changed = lru_cache(maxsize=10_000, typed=True)(replace)
