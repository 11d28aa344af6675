"""Define the values that a plan consists of, besides those of one technique, and the input and output of its rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshwright.core.dtypes import dtype_bytes
from meshwright.core.errors import MeshwrightError
from meshwright.core.names import pattern
from meshwright.introspection.facts import ModelFacts, ParameterFact
from meshwright.introspection.mixing.values import MaskRule
from meshwright.planning.layout import Layout, shares_of
from meshwright.planning.techniques import Techniques


@dataclass(frozen=True)
class Batch:
    """The shape of one optimizer step's data.

    Attributes:
        global_rows: sequences per optimizer step over all ranks.
        seq_len: tokens per sequence.
        microbatch_rows: sequences per forward on one rank; 0: the rank's whole share.
        vocab_size: number of token ids that the data may hold; 0: unknown.
        pairs: whether each two rows are a pair of answers, whose loss is ``PreferenceLoss``.
    """

    global_rows: int
    seq_len: int
    microbatch_rows: int = 0
    vocab_size: int = 0
    pairs: bool = False

    @property
    def rows_together(self) -> int:
        """Rows that stay in one microbatch."""
        return 2 if self.pairs else 1

    def microbatches(self, data_ranks: int) -> int:
        """Return the number of forward passes per step on each of ``data_ranks`` ranks."""
        rows = self.global_rows // data_ranks
        return -(-rows // self.microbatch_rows) if self.microbatch_rows else 1


@dataclass(frozen=True)
class ParameterPlan:
    """Parameters with the same role: same name but for indices, same shape, same placement on every mesh axis.

    Attributes:
        dtype: dtype at rest, or "nf4" of weights in 4 bits.
        placements: (axis, "Shard(dim)" or "Replicate()") for the axes larger than 1.
        summed: whether the tensor axis's ranks compute partial gradients of them.
    """

    pattern: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    placements: tuple[tuple[str, str], ...]
    summed: bool = False

    @property
    def bytes(self) -> int:
        """Bytes at rest of all of them, whole."""
        if self.dtype == NF4:
            return self.count * math.prod(stored_shape(self.shape))
        return self.count * math.prod(self.shape) * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class LossPlan:
    """A head that computes the loss itself, in chunks of tokens, so that its logits are never whole.

    Attributes:
        head: path of the linear layer that computes the logits.
        chunks: number of chunks of a microbatch's tokens.
    """

    head: str
    chunks: int


@dataclass(frozen=True)
class Unit:
    """An all-gather group, whose trained parameters have one dtype.

    It has the parameters of one or several blocks, of a stack of experts, of a module whose trained parameters have
    another dtype than those around it, or ("") the others.

    Attributes:
        name: path of its module; of several blocks the first one's.
        elements: elements gathered, padding of uneven shards included.
        trainable_elements: those of them that are trained, padding included.
        bytes_at_rest: bytes at rest on all ranks that shard the unit.
        bytes_gathered: bytes gathered.
        gathered_in: dtype of the all-gather; torch sends several dtypes as "uint8".
        dtype: dtype at rest of the trained parameters.
        experts: whether the unit is a rank's share of a stack of experts, gathered over efsdp.
        outside_blocks: whether its parameters are outside the blocks.
        trainable_behind: elements outside the blocks that backward reaches before them.
        largest: most elements of one trained parameter on the first rank.
        state_elements: elements of the optimizer's state on the first rank.
        rounded_tensors, rounded_elements: number and elements of the trained parameters with low-bit optimizer state on
            the first rank.
        blocks: paths of the blocks that it gathers, in forward order; empty: a unit inside or outside of blocks.
    """

    name: str
    elements: int
    trainable_elements: int
    bytes_at_rest: int
    bytes_gathered: int
    gathered_in: str
    dtype: str
    reshard_after_forward: bool | int
    gathers_in_backward: bool
    experts: bool = False
    outside_blocks: bool = False
    trainable_behind: int = 0
    largest: int = 0
    state_elements: int = 0
    rounded_tensors: int = 0
    rounded_elements: int = 0
    blocks: tuple[str, ...] = ()

    @property
    def trainable_bytes(self) -> int:
        """Bytes at rest of the trained parameters."""
        return self.trainable_elements * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class DataParallel:
    """The technique by which ranks with different samples stay one model.

    Attributes:
        reduction: "sum" (the loss is already divided by the global token count) or "mean" (the public functions that
            keep torch's averaging).
        gathers_per_step: whether parameters that stay gathered after a forward stay so through all microbatches of a
            step.
        idle: trained parameters that some ranks may leave without a gradient; after a backward the ranks exchange which
            of them have one.
        own_units: whether the model's own ``fully_shard(**options)`` chooses the all-gather groups.
        replicates_tokens: whether fully_shard leaves parameters whole on the ranks of the context axis.
        blocks_per_unit: most blocks that are gathered together, as requested; 0: chosen by their bytes.
    """

    technique: Literal["none", "ddp", "fully_shard"]
    reduction: Literal["sum", "mean"] = "sum"
    sync_grad_accum: bool | Literal["shard"] = False
    cpu_offload: bool = False
    pin_memory: bool = False
    ddp_options: tuple[tuple[str, bool], ...] = ()
    gathers_per_step: bool = False
    idle: tuple[str, ...] = ()
    own_units: bool = False
    replicates_tokens: bool = False
    blocks_per_unit: int = 0


@dataclass(frozen=True)
class PrecisionPlan:
    """dtypes of parameters at rest (with optimizer state), compute, gradient reduction, output (None: as computed).

    ``loss_scale``: the initial loss factor, 0 if the loss is not scaled; see ``distributed/optimizer/step``.
    ``is_kept``: parameters have several dtypes and nobody asked for one: each keeps its own, and ``master`` is that of
    most elements. ``casts``: parameters are cast to ``compute``; else each kept one computes in its own dtype.
    ``widens``: gradients of kept float64 parameters are summed in float64, others in ``reduce``.
    """

    master: str
    compute: str
    reduce: str
    output: str | None = None
    cast_forward_inputs: bool = True
    loss_scale: float = 0.0
    is_kept: bool = False
    casts: bool = True
    widens: bool = False

    def computed_in(self, dtype: str) -> str:
        """Return the dtype in which a parameter computes that rests in ``dtype``."""
        return self.compute if self.casts else dtype

    def reduced_in(self, dtype: str) -> str:
        """Return the dtype in which fully_shard sums gradients of parameters that rest in ``dtype``."""
        return dtype if self.widens and dtype == "float64" else self.reduce

    @property
    def is_mixed(self) -> bool:
        if self.is_kept:
            return self.casts or not self.widens or self.output is not None
        return self.compute != self.master or self.reduce != self.master or self.output is not None


@dataclass(frozen=True)
class Collective:
    """A collective of a step, for any batch.

    Attributes:
        elements: elements of the larger side of one call: the gathered output of an all_gather, the input of a
            reduce_scatter, the tensor of an all_reduce or a send; for an all_to_all the elements that a rank sends to
            all ranks, itself included, if tokens spread evenly.
        per: the period of ``calls``.
        calls: number of calls; None: torch cuts one total into buckets of its own choice.
        by_token: ``elements`` counts all calls together, for one token of the microbatch (activations).
        by_row: ``elements`` counts one row of the microbatch.
        filled: whether a cut sequence is padded to a multiple of the axis.
        among: number of ranks that each send a part of the elements.
        sees: a mask's rule, if only the tokens are sent that another rank's queries see.
        returns: gradients of those tokens go back to the ranks that sent them.
        to_others: ``elements`` counts those that the rank that sends most sends to others, in all calls together.
    """

    op: Literal["all_gather", "reduce_scatter", "all_reduce", "send", "all_to_all"]
    axis: str
    ranks: int
    unit: str
    elements: int
    dtype: str
    per: Literal["microbatch", "step"]
    calls: int | None = 1
    by_token: bool = False
    by_row: bool = False
    filled: bool = False
    among: int = 1
    sees: MaskRule | None = None
    returns: bool = False
    to_others: bool = False

    @property
    def element_bytes(self) -> int:
        return {"int64": 8, "uint8": 1}.get(self.dtype) or dtype_bytes(self.dtype)


# --- define how a weight is stored in 4 bits


NF4_BLOCK = 64
"""Weights of a row, side by side, that share a scale."""
NF4_BLOCK_BYTES = NF4_BLOCK // 2 + 4
"""Bytes of a block: two weights a byte, and a float32 scale. So a weight takes 4.5 bits."""
NF4_STORED = "uint8"
"""dtype of the stored bytes."""
NF4 = "nf4"
"""Word for a weight in 4 bits, where others have a dtype."""


def stored_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the bytes that store a weight of shape (out, in): (out, in / NF4_BLOCK · NF4_BLOCK_BYTES)."""
    rows, columns = shape
    return rows, columns // NF4_BLOCK * NF4_BLOCK_BYTES


def plain_shape(stored: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the weight that is stored in bytes of shape ``stored``."""
    rows, columns = stored
    return rows, columns // NF4_BLOCK_BYTES * NF4_BLOCK


# --- define the input and the output of a rule


Found = Iterator[MeshwrightError]
"""The errors that one rule yields, worded for the user."""


@dataclass(frozen=True)
class Case:
    """The input of a rule: facts, a resolved layout, the requested techniques and what they resolved to.

    Attributes:
        facts: with the request's frozen parameters.
    """

    facts: ModelFacts
    layout: Layout
    techniques: Techniques
    precision: PrecisionPlan
    technique: str
    device: str
    reduction: str = "sum"

    @property
    def trained(self) -> tuple[ParameterFact, ...]:
        """The parameters that the request leaves trained."""
        return tuple(p for p in self.facts.parameters if p.trainable)

    @property
    def trained_dtypes(self) -> tuple[str, ...]:
        """The dtypes in which those rest."""
        kept = tuple(dict.fromkeys(p.dtype for p in self.trained))
        return kept if self.precision.is_kept else (self.precision.master,)

    @property
    def data_ranks(self) -> int:
        return shares_of(self.layout).data_ranks

    @property
    def batch_ranks(self) -> int:
        return shares_of(self.layout).batch_ranks


def no_blocks(request: str, facts: ModelFacts) -> str:
    """Return the error text for a request that acts on repeated blocks and finds none."""
    lacks = f"{request} acts on repeated blocks, and none was found in {facts.kind}: "
    for parameter in facts.parameters:
        alike = [name for name in parameter.aliases if pattern(name) == pattern(parameter.name)]
        if alike:  # sibling modules share one weight
            return (
                f"{lacks}{parameter.name} is one parameter with {', '.join(alike)}, and blocks need parameters of their"
                f" own. Give each block a copy, or use the shared module outside the blocks"
            )
    return (
        f"{lacks}put them into an nn.ModuleList or nn.ModuleDict, each with parameters of its own, or name them:"
        f" hints=meshwright.Hints(blocks=('layer_*',))"
    )
