"""Describe a transformer by the dims that decide its work: products, attention, experts, vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from meshwright.planning.pipeline.plan import balanced


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
    """

    number: int
    top_k: int
    width: int
    products: tuple[Product, ...]
    shared: tuple[Product, ...] = ()
    biased: bool = False
    clamped: bool = False

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
        eager, eager_recomputed: bytes that the block's own code saves without fusion, measured, over those of
            arithmetic: with nothing recomputed, and with attention recomputed.
    """

    hidden: int
    products: tuple[Product, ...]
    attention: AttentionShape | None = None
    width: int = 0
    gated: bool = True
    experts: ExpertsShape | None = None
    other: int = 0
    dropout: bool = False
    eager: float = 1.0
    eager_recomputed: float = 1.0

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
    """

    name: str
    blocks: tuple[BlockShape, ...]
    vocab: int
    tied: bool = False
    positions: int = 0
    extra_heads: int = 0

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

    def model_flops_per_token(self, length: int) -> float:
        """Return 6 FLOPs per active product element and 12 per attended feature (PaLM, appendix B), masked half
        included."""
        products = sum(block.active_elements for block in self.blocks) + self.head_elements * (1 + self.extra_heads)
        attended = sum(
            block.attention.heads * (block.attention.key_dim + block.attention.value_dim) / 2
            for block in self.blocks
            if block.attention
        )
        return 6.0 * products + 12.0 * attended * length


def decoder_block(
    hidden: int,
    heads: int,
    kv_heads: int,
    width: int,
    *,
    head_dim: int = 0,
    gated: bool = True,
    window: int = 0,
    experts: ExpertsShape | None = None,
    dropout: bool = False,
) -> BlockShape:
    """Return a block of attention and a feed-forward layer, the latter replaced by ``experts`` where given."""
    size = head_dim or hidden // heads
    products = [
        Product(hidden, (heads + 2 * kv_heads) * size, attends=True),
        Product(heads * size, hidden, "row", attends=True),
    ]
    if experts is None:
        products += [Product(hidden, width * (2 if gated else 1)), Product(width, hidden, "row")]
    return BlockShape(
        hidden,
        tuple(products),
        AttentionShape(heads, kv_heads, size, size, window),
        0 if experts else width,
        gated,
        experts,
        other=2 * hidden,
        dropout=dropout,
    )


def latent_block(
    hidden: int,
    heads: int,
    *,
    query_rank: int,
    key_rank: int,
    rotary: int,
    key_dim: int,
    value_dim: int,
    width: int,
    experts: ExpertsShape | None = None,
) -> BlockShape:
    """Return a block whose attention projects through low-rank latents (MLA, arXiv 2405.04434)."""
    products = [
        Product(hidden, query_rank, "none", attends=True),
        Product(query_rank, heads * (key_dim + rotary), attends=True),
        Product(hidden, key_rank + rotary, "none", attends=True),
        Product(key_rank, heads * (key_dim + value_dim), attends=True),
        Product(heads * value_dim, hidden, "row", attends=True),
    ]
    if experts is None:
        products += [Product(hidden, 2 * width), Product(width, hidden, "row")]
    attention = AttentionShape(heads, heads, key_dim + rotary, value_dim)
    return BlockShape(hidden, tuple(products), attention, 0 if experts else width, True, experts, other=2 * hidden)


def gated_experts(hidden: int, number: int, top_k: int, width: int, *, shared_width: int = 0) -> ExpertsShape:
    """Return SwiGLU experts, with shared ones of ``shared_width`` features together."""
    shared = (Product(hidden, 2 * shared_width), Product(shared_width, hidden, "row")) if shared_width else ()
    return ExpertsShape(number, top_k, width, (Product(hidden, 2 * width), Product(width, hidden, "row")), shared)
