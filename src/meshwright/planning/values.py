"""Define the values that a plan consists of, besides those of one technique."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.core.dtypes import dtype_bytes
from meshwright.introspection.mixing.values import MaskRule
from meshwright.introspection.structure.tail import Tail


@dataclass(frozen=True)
class Batch:
    """The shape of one optimizer step's data.

    Attributes:
        global_rows: sequences per optimizer step over all ranks.
        seq_len: tokens per sequence.
        microbatch_rows: sequences per forward on one rank; 0: the rank's whole share.
        vocab_size: number of token ids that the data may hold; 0: unknown.
    """

    global_rows: int
    seq_len: int
    microbatch_rows: int = 0
    vocab_size: int = 0

    def microbatches(self, data_ranks: int) -> int:
        """Return the number of forward passes per step on each of ``data_ranks`` ranks."""
        rows = self.global_rows // data_ranks
        return -(-rows // self.microbatch_rows) if self.microbatch_rows else 1


@dataclass(frozen=True)
class ParameterPlan:
    """Parameters with the same role: same name but for indices, same shape, same placement on every mesh axis.

    ``placements`` holds (axis, "Shard(dim)" or "Replicate()") for the axes larger than 1. ``summed``: its gradient is
    the sum of what each rank of the tensor axis finds for its part of the work.
    """

    pattern: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    placements: tuple[tuple[str, str], ...]
    summed: bool = False


@dataclass(frozen=True)
class LossPlan:
    """A head that computes the loss itself, in chunks of tokens, so that its logits are never whole.

    Attributes:
        head: path of the linear layer that gives the logits.
        tail: what the model does to the logits afterwards.
        chunks: number of chunks of a microbatch's tokens.
    """

    head: str
    tail: Tail
    chunks: int


@dataclass(frozen=True)
class Unit:
    """Parameters that travel together: a block, or ("") what lies outside the blocks.

    ``elements`` and ``trainable_elements`` count what travels, padding of uneven shards included. ``experts``: the
    unit is a rank's share of a stack of experts on the expert axis, and travels along efsdp. ``trainable_behind``:
    elements outside the blocks that backward reaches before them. ``in_float8``: those of ``elements`` that are
    gathered in float8. On the first rank, of its share of each trained parameter: ``largest``, the most elements of
    one; ``state_elements``, those of the optimizer's state; ``rounded_tensors`` and ``rounded_elements``, those of
    trained parameters whose optimizer state is low-bit.
    """

    name: str
    elements: int
    trainable_elements: int
    reshard_after_forward: bool | int
    gathers_in_backward: bool
    experts: bool = False
    trainable_behind: int = 0
    in_float8: int = 0
    largest: int = 0
    state_elements: int = 0
    rounded_tensors: int = 0
    rounded_elements: int = 0

    def gathered_bytes(self, compute: str) -> int:
        """Count the bytes gathered, where all that is not in float8 is in dtype ``compute``."""
        return self.in_float8 + (self.elements - self.in_float8) * dtype_bytes(compute)


@dataclass(frozen=True)
class DataParallel:
    """The technique by which ranks with different samples stay one model.

    ``reduction``: "sum" (the loss is already divided by the global token count) or "mean" (the public functions that
    keep torch's averaging). ``gathers_per_step``: parameters that stay gathered after a forward stay so through all
    microbatches of a step. ``idle``: trained parameters that some ranks may leave without a gradient; after a
    backward the ranks exchange which of them have one. ``own_units``: the model's own ``fully_shard(**options)``
    decides what travels together. ``replicates_tokens``: fully_shard leaves parameters whole on the ranks of the
    context axis.
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


@dataclass(frozen=True)
class PrecisionPlan:
    """dtypes of parameters at rest (with optimizer state), compute, gradient reduction, output (None: as computed).

    ``loss_scale``: the initial loss factor, 0 where the loss is not scaled; see ``distributed/optimizer/loss_scale``.
    """

    master: str
    compute: str
    reduce: str
    output: str | None = None
    cast_forward_inputs: bool = True
    loss_scale: float = 0.0

    @property
    def is_mixed(self) -> bool:
        return self.compute != self.master or self.reduce != self.master or self.output is not None


@dataclass(frozen=True)
class Collective:
    """A collective of a step, batch-free: ``calls`` per microbatch or step (``per``), ``elements`` of ``dtype`` each.

    ``elements`` counts the larger side: the gathered output of an all_gather, the input of a reduce_scatter, the
    tensor of an all_reduce or a send; for an all_to_all what a rank sends to all, itself among them, where tokens
    spread evenly. For activations (``by_token``) it counts what all calls together move for one token of the
    microbatch, where the sequence is cut (``filled``) with its padding to a multiple of the axis; ``among`` ranks
    each move a part of it. ``by_row``: it counts one row of the microbatch. ``calls`` is None where torch cuts one
    total into buckets of its own choice. ``sees``: only the tokens travel that another rank's queries reach, by this
    rule of a mask.
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

    @property
    def element_bytes(self) -> int:
        return {"int64": 8, "uint8": 1}.get(self.dtype) or dtype_bytes(self.dtype)
