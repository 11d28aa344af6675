"""Locate a rank's shards of a tensor in the whole, draw their values by seeds of no layout, gather whole tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, Shard

from meshwright.comparison.sketch import TENSOR_WIDTH, sketch_part
from meshwright.core.devices import is_accelerator
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.parts import FusedPart, LocalRange, is_plain, runs_of_chunk, runs_of_parts
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.recompute.kept import drawn_number, restore_streams, streams
from meshwright.distributed.torch_private import STRIDED, DTensorSpec, TensorMeta, local_part
from meshwright.distributed.weights.torch_2_11 import may_hash
from meshwright.planning.tensor.plan import words_of_cut

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
            seed = seed_of(words[0], number, *words[1:])
            torch.default_generator.manual_seed(seed)  # torch.manual_seed traces the stack for each unused accelerator
            for device in filter(is_accelerator, shared[0]):
                torch.get_device_module(device).manual_seed_all(seed)

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


def placed_gradient(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient, placed as the parameter."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient


def local_gradient(parameter: Tensor) -> Tensor:
    """Return the local part of a parameter's gradient, placed as the parameter."""
    return local_part(placed_gradient(parameter))


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
    turns = [(0 if isinstance(place, PartsShard) else 2 if isinstance(place, STRIDED) else 1) for place, *_ in placed]
    for _, (place, rank, size) in sorted(zip(turns, placed, strict=True), key=lambda entry: entry[0]):
        if isinstance(place, PartsShard):
            runs[place.dim] = runs_of_parts(place.parts, rank, size)
        else:
            runs[place.dim] = runs_of_chunk(runs[place.dim], rank, size)
    return runs


def groups_that_cut(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which a tensor's shards are disjoint; none if it is no DTensor."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    cut = (i for i, place in enumerate(tensor.placements) if isinstance(place, SHARDS) and mesh.size(i) > 1)
    return tuple(mesh.get_group(i) for i in cut)


def sketches(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sketch of each whole tensor, summed over the ranks' shards: (TENSOR_WIDTH,) float64 on the CPU.

    Collective over the groups that shard a tensor. Each replica computes its own sketch.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups = groups_that_cut(tensor)
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


# --- gather whole tensors from shards, many at a time

PACK_ELEMENTS = 2**20
"""Number of elements of whole tensors after which a pack of shards is sent."""


def whole_on_first(tensors: Mapping[str, Tensor], *, differ: bool = False) -> dict[str, Tensor]:
    """Return copies of the whole tensors on the CPU of rank 0, and an empty dict on other ranks.

    Collective: the ranks of a tensor's mesh pass the same names. ``differ``: other ranks may pass other names.

    For small shards the number of collectives costs more than their bytes. So each rank writes its shards of many
    tensors into one buffer of zeros, and one all-reduce sums the buffers.
    """
    packed: dict[str, DTensor] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.size() == dist.get_world_size() and _has_offsets(tensor):
            packed[name] = tensor
        else:
            whole = whole_everywhere(tensor) if isinstance(tensor, DTensor) else tensor
            found[name] = whole.detach().to("cpu", copy=True)
    for pack in _packs(packed):
        like, sizes = next(iter(pack.values())).to_local(), [tensor.numel() for tensor in pack.values()]
        flat = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
        wholes = [part.view(t.shape) for part, t in zip(flat.split(sizes), pack.values(), strict=True)]
        for whole, tensor in zip(wholes, pack.values(), strict=True):
            for piece in first_copies(tensor) if _is_first_replica(tensor) else ():
                whole[piece.slices] = piece.local
        dist.all_reduce(flat)
        found |= {name: whole.to("cpu", copy=True) for name, whole in zip(pack, wholes, strict=True)}
    found, rank = {name: found[name] for name in tensors}, get_world_info()[0]
    if not differ:
        return found if rank == 0 else {}
    names = agree.everybody_says(list(found))
    home = {name: other for other in reversed(range(len(names))) for name in names[other]}
    brought: list[Any] = [{}] * len(names)
    dist.gather_object({name: found[name] for name in home if home[name] == rank}, brought if rank == 0 else None)
    return {name: tensor for named in brought for name, tensor in named.items()}


def whole_everywhere(tensor: DTensor) -> Tensor:
    """Return the whole tensor on every rank of its mesh, on the shards' device and without its graph.

    Collective over that mesh.
    """
    if not _has_offsets(tensor):
        return tensor.full_tensor().detach()
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if _is_first_replica(tensor):
        for piece in first_copies(tensor):
            whole[piece.slices] = piece.local
    mesh = tensor.device_mesh
    for axis in range(mesh.ndim if not tensor.is_meta else 0):
        dist.all_reduce(whole, group=mesh.get_group(axis))
    return whole


def _has_offsets(tensor: DTensor) -> bool:
    """Return whether all placements are such that offsets in the whole can be computed from them."""
    return all(isinstance(placement, (*SHARDS, Replicate)) for placement in tensor.placements)


def _packs(tensors: Mapping[str, DTensor]) -> Iterator[dict[str, DTensor]]:
    """Group tensors of one dtype into packs of about PACK_ELEMENTS elements."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
        pack: dict[str, DTensor] = {}
        for name, tensor in tensors.items():
            if tensor.dtype == dtype:
                pack[name] = tensor
                if sum(t.numel() for t in pack.values()) >= PACK_ELEMENTS:
                    yield pack
                    pack = {}
        if pack:
            yield pack


def _is_first_replica(tensor: DTensor) -> bool:
    where = tensor.device_mesh.get_coordinate() or ()
    return all(
        isinstance(placement, SHARDS) or not index for placement, index in zip(tensor.placements, where, strict=True)
    )


# --- gather whole tensors of all stages by name, copy them back into shards, and swap shards with a copy


class IncompatibleKeys(NamedTuple):
    """Names that a state dict lacks, and names that the model does not know."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def gathered(
    tensors: Sequence[tuple[str, Tensor]], stages: Sequence[dist.ProcessGroup], *, keep: bool
) -> dict[str, Tensor]:
    """Return whole copies on the CPU, of all pipeline stages (collective: one tensor after the other).

    Args:
        stages: the process group of the pipeline axis, if there is one.
        keep: on every rank; else on rank 0 alone.
    """
    is_kept, found = keep or get_world_info()[0] == 0, dict[str, Tensor]()
    own = dict(reversed(tensors))  # the first of two equal copies
    brought: list[Any] = [{name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()}]
    if stages:
        here, brought = brought[0], [None] * dist.get_world_size(stages[0])
        dist.all_gather_object(brought, here, group=stages[0])
    for name in sorted({name for stage in brought for name in stage}):
        first = next(rank for rank, stage in enumerate(brought) if name in stage)
        owner, like = first if stages else None, brought[first][name]
        if name in own and owner in (None, *(dist.get_rank(group) for group in stages)):
            tensor = own[name]
            whole = (whole_everywhere(tensor) if isinstance(tensor, DTensor) else tensor).detach()
        else:
            whole = torch.empty(like[0], dtype=like[1], device=next(iter(own.values())).device)
        if owner is not None:
            whole = whole.contiguous()
            dist.broadcast(whole, group=stages[0], group_src=owner)
        if is_kept:
            found[name] = whole.to("cpu", copy=True)
    return found


def scatter(
    tensors: Sequence[tuple[str, Tensor]],
    state: Mapping[str, Any],
    names: Mapping[str, tuple[str, ...]],
    *,
    strict: bool,
) -> IncompatibleKeys:
    """Copy whole tensors into shards, after all ranks have seen that names and shapes fit; else raise ConfigError."""
    known = {alias for name, aliases in names.items() for alias in (name, *aliases)}
    keys = IncompatibleKeys(
        [name for name, aliases in names.items() if not {name, *aliases} & set(state)],
        [name for name in state if name not in known],
    )
    given = {name: state[one] for name, more in names.items() for one in (*more, name) if one in state}

    def check() -> None:
        missing, unexpected = keys if strict else ([], [])
        if missing or unexpected:
            lacks = f"lacks {', '.join(missing[:3])} ({len(missing)} names)" if missing else ""
            several = f"{', '.join(unexpected[:3])} ({len(unexpected)} names)"
            knows = f"has {several}, unknown to the model" if unexpected else ""
            raise ConfigError(
                f"the state dict {' and '.join(filter(None, (lacks, knows)))}: each rank gives all whole tensors under"
                f" global names, or strict=False"
            )
        for name, tensor in tensors:
            whole = given.get(name)
            if whole is not None and (not isinstance(whole, Tensor) or isinstance(whole, DTensor)):
                raise ConfigError(f"the state dict's {name} is a {type(whole).__name__}; it must be a whole tensor")
            if whole is not None and tuple(whole.shape) != tuple(tensor.shape):
                raise ConfigError(
                    f"the state dict's {name} has shape {tuple(whole.shape)}, the model's {tuple(tensor.shape)}"
                )

    agree.together(check)
    for name, tensor in tensors:
        for piece in pieces(tensor) if name in given else ():
            piece.local.copy_(given[name][piece.slices])
    return keys


def swap(tensors: Sequence[tuple[str, Tensor]], copies: Mapping[str, Tensor | None]) -> None:
    """Exchange the values of shards and of a copy of them, in place and without messages."""
    first: dict[str, Tensor] = {}
    for name, tensor in tensors:
        mine, copied = local_part(tensor.detach()), copies[name]
        assert copied is not None
        if name in first:  # the second stage's copy of a shared parameter
            mine.copy_(first[name])
            continue
        other = local_part(copied.detach())
        held, first[name] = mine.clone(), mine
        mine.copy_(other)
        other.copy_(held)
