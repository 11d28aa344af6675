"""Locate a rank's shards of a tensor in the whole, and draw their random values by seeds that no layout changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from meshwright.comparison.sketch import TENSOR_WIDTH, sketch_part
from meshwright.core.errors import UnsupportedError
from meshwright.core.parts import FusedPart, LocalRange, is_plain, runs_of_chunk, runs_of_parts
from meshwright.distributed.process import agree
from meshwright.distributed.recompute.kept import drawn_number, restore_streams, streams
from meshwright.distributed.torch_private import STRIDED, DTensorSpec, TensorMeta, local_part
from meshwright.planning.tensor.plan import words_of_cut

from .torch_2_11 import may_hash

# --- define the placement of a tensor of which a rank holds several runs of slices

CANNOT = (
    "torch cannot deal out, or compute with, a weight that a rank holds several parts of (fused queries, keys and"
    " values; key heads that several ranks have). To write it: meshwright.load; pretrained weights from Hugging Face"
    " files; or tensor.copy_ of a whole tensor that distribute_tensor placed as Replicate() on every axis. To read it:"
    " full_tensor(), a full state dict, torch.distributed.checkpoint."
)


class PartsShard(Placement):
    """Sharded along ``dim``, each of its ``parts`` separately: a rank holds its shards of all parts, side by side.

    None of torch's placements describes this, so the placement is none of them. A ``PartsTensor`` answers all operators
    itself. Wherever torch would derive other placements from this one, it looks them up by their hash first: there is
    none, and so nothing is computed as if the tensor were not sharded.
    """

    def __init__(self, dim: int, parts: tuple[FusedPart, ...]):
        super().__init__()
        self.dim, self.parts = dim, parts

    def __reduce__(self) -> tuple[Any, ...]:
        return PartsShard, (self.dim, self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartsShard) and (self.dim, self.parts) == (other.dim, other.parts)

    def __hash__(self) -> int:
        if may_hash():
            return hash((self.dim, self.parts))
        raise UnsupportedError(CANNOT)

    def __repr__(self) -> str:
        return words_of_cut(self.dim, self.parts)

    def __str__(self) -> str:
        return words_of_cut(self.dim, self.parts)


def placement_of_cut(dim: int, parts: tuple[FusedPart, ...], ranks: int) -> Placement:
    """Return torch's Shard if it gives every rank the same shard, else a PartsShard."""
    return Shard(dim) if is_plain(parts, ranks) else PartsShard(dim, parts)


# --- locate a rank's shards of a tensor in the whole

SHARDS = (Shard, *STRIDED, PartsShard)
BLOCK_ELEMENTS = 2**20
"""Most elements that one generator draws, whatever the layout."""


def seed_of(*parts: object) -> int:
    """Hash any values to a 63-bit seed (blake2b; equal on every machine)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def own_streams(model: nn.Module, begins: nn.Module, is_wanted: Callable[[], bool], words: tuple[object, ...]) -> None:
    """Give each rank a random stream of its own from the start of a module's forward to the end of the model's.

    Outside of these all ranks draw alike. A rank's own stream is seeded by a number that all draw and by ``words``, its
    rank among them, so there is no state besides torch's to be saved or restored.
    """
    shared: list[dict[str, Tensor]] = []

    def enter(*_: Any) -> None:
        if is_wanted() and not shared:
            number = drawn_number()
            shared.append(streams())
            torch.manual_seed(seed_of(words[0], number, *words[1:]))

    def leave(*_: Any) -> None:
        if shared:
            restore_streams(shared.pop())

    begins.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor that this rank holds, without its graph.

    Attributes:
        local: a view of the local memory.
        offset: global index of its first element.
        copy, copies: see ``LocalRange``.
    """

    local: Tensor
    offset: tuple[int, ...]
    copy: int = 0
    copies: int = 1

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices of the whole that select the piece."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.local.shape, strict=True))


def pieces(tensor: Tensor) -> list[Piece]:
    """Return this rank's shard of a tensor as boxes of the whole; an empty list if it holds no element.

    There are several boxes if the shard is not one run, as for fused queries, keys and values.
    """
    if not isinstance(tensor, DTensor):
        return [Piece(tensor.detach(), (0,) * tensor.dim())]
    where = tensor.device_mesh.get_coordinate()
    assert where is not None
    found = [Piece(local_part(tensor).detach(), ())]
    for dim, runs in enumerate(runs_at(tensor, where)):
        sizes = [run.size for run in runs]
        found = [
            Piece(view, (*piece.offset, run.low), piece.copy + run.copy, piece.copies * run.copies)
            for piece in found
            for view, run in zip(piece.local.split(sizes, dim=dim), runs, strict=True)
        ]
    return [piece for piece in found if piece.local.numel()]


def apply_to_tensors(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Apply ``change`` to the local tensor of every parameter and buffer; placements stay."""
    model._apply(
        lambda tensor: with_local(tensor, change(local_part(tensor))) if isinstance(tensor, DTensor) else change(tensor)
    )


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of a model to a device; those that modules share stay shared."""
    moved: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer not in moved:
                local = local_part(buffer).to(device)
                moved[buffer] = with_local(buffer, local) if isinstance(buffer, DTensor) else local
            module._buffers[name] = moved[buffer]


def with_local(like: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor with the class and placements of ``like`` and the local tensor ``local``, on any device.

    ``DTensor.from_local`` would copy a local tensor in host memory to the mesh's device, so that loading a checkpoint
    or scaling a gradient would change the copy.
    """
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    return type(like)(
        local, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=local.requires_grad
    )


def local_gradient(parameter: Tensor) -> Tensor:
    """Return the local part of a parameter's gradient, placed as the parameter."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)


def memory_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that store a tensor on this rank.

    These are the tensor itself, a DTensor's local tensor, or the codes and scales of a torchao tensor.
    """
    local: Any = local_part(tensor)
    if hasattr(local, "__tensor_flatten__"):
        return [plain for name in local.__tensor_flatten__()[0] for plain in memory_of(getattr(local, name))]
    return [local]


def in_memory(like: Any, memory: Sequence[Tensor]) -> Tensor:
    """Return a tensor like ``like`` that is stored in other plain tensors, in the order of ``memory_of``."""
    if isinstance(like, DTensor):
        return with_local(like, in_memory(local_part(like), memory))
    if hasattr(like, "__tensor_flatten__"):
        kind, (names, context) = type(like), like.__tensor_flatten__()
        return kind.__tensor_unflatten__(dict(zip(names, memory, strict=True)), context, like.shape, like.stride())
    (plain,) = memory
    return plain


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy in another dtype, without its graph."""
    local = (local_part(tensor)).detach().to(dtype)
    return with_local(tensor, local) if isinstance(tensor, DTensor) else local


def first_copies(tensor: Tensor) -> list[Piece]:
    """Return the pieces of which this rank holds the first copy."""
    return [piece for piece in pieces(tensor) if piece.copy == 0]


def runs_at(tensor: DTensor, where: Sequence[int]) -> list[list[LocalRange]]:
    """Return the ranges of each dim that the rank at ``where`` on the tensor's mesh holds, in memory order.

    If two axes shard a dim, parts are taken from the whole before other axes cut what a rank holds; then plain shards
    apply, outermost first; FSDP2's strided shard is a chunk of the inner axis's shard.
    """
    runs: list[list[LocalRange]] = [[LocalRange(0, size)] for size in tensor.shape]
    placed = [
        (place, where[i], tensor.device_mesh.size(i))
        for i, place in enumerate(tensor.placements)
        if isinstance(place, SHARDS)
    ]
    for place, rank, size in sorted(placed, key=lambda entry: _turn(entry[0])):
        if isinstance(place, PartsShard):
            runs[place.dim] = runs_of_parts(place.parts, rank, size)
        else:
            runs[place.dim] = runs_of_chunk(runs[place.dim], rank, size)
    return runs


def _turn(place: Placement) -> int:
    return 0 if isinstance(place, PartsShard) else 2 if isinstance(place, STRIDED) else 1


def sketches(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sketch of each whole tensor, summed over the ranks' shards: (TENSOR_WIDTH,) float64 on the CPU.

    Collective over the groups that shard a tensor. Each replica computes its own sketch.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            groups = tuple(
                mesh.get_group(i)
                for i, place in enumerate(tensor.placements)
                if isinstance(place, SHARDS) and mesh.size(i) > 1
            )
        here = [sketch_part(piece.local, piece.offset, tuple(tensor.shape)) for piece in first_copies(tensor)]
        by_groups.setdefault(groups, {})[name] = sum(
            here, torch.zeros(TENSOR_WIDTH, dtype=torch.float64, device=tensor.device)
        )
    found: dict[str, Tensor] = {}
    for groups, parts in by_groups.items():
        found |= zip(parts, agree.total(torch.stack([*parts.values()]), list(groups)), strict=True)
    return {name: found[name] for name in tensors}


def draw_rows(
    local: Tensor,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    draw: Callable[[Tensor, torch.Generator], object],
    seed: int,
    name: str,
    draw_on: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Draw the shard ``local``, which begins at ``offset`` in a parameter of global ``shape``, by blocks of whole rows.

    A block has at most ``BLOCK_ELEMENTS`` elements (but at least one row). ``draw`` fills it from a generator seeded by
    (seed, name, number of the block).
    """
    if local.numel() == 0:
        return
    row = max(1, int(torch.Size(shape[1:]).numel()))
    rows_per_block = max(1, BLOCK_ELEMENTS // row)
    device = local.device if draw_on in (None, local.device.type) else torch.device(draw_on)
    generator = torch.Generator(device)
    local, offset, shape = (local, offset, shape) if shape else (local.view(1), (0,), (1,))
    first, last = offset[0], offset[0] + local.shape[0]
    rest = tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:], strict=True))
    for number in range(first // rows_per_block, -(-last // rows_per_block)):
        start = number * rows_per_block
        rows = min(rows_per_block, shape[0] - start)
        generator.manual_seed(seed_of(seed, name, number))
        block = torch.empty((rows, *shape[1:]), dtype=dtype, device=device)
        draw(block, generator)
        low, high = max(first, start), min(last, start + rows)
        local[low - first : high - first].copy_(block[(slice(low - start, high - start), *rest)])
