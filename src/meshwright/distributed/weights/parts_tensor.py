"""Define a DTensor whose shards are several runs of the whole (fused weights, copied key heads), and its operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshwright.core.parts import FusedPart, take
from meshwright.core.torch_private import schema_of, tree_leaves, tree_map
from meshwright.distributed.exchange import linear_map
from meshwright.distributed.torch_private import DTensorSpec, TensorMeta, let_fsdp_make, local_part, spec_of

from .shards import PartsShard, Piece, pieces, whole_everywhere, with_local
from .torch_2_11 import PASSES_OVER_SUBCLASSES, PassedOver

if TYPE_CHECKING:  # a twentieth of a second, and most runs never ask torch for a checkpoint
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

aten = torch.ops.aten

KEEPS = {
    aten.alias.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.fill_.Scalar,
    aten.full_like.default,
    aten.lift_fresh.default,
    aten.ones_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
    aten._to_copy.default,
}
"""Elementwise operators that torch does not tag as pointwise."""

WHOLE_LISTS = ("norm", "max")
"""Endings of the names of list operators that are not elementwise."""


class PartsTensor(*((PassedOver, DTensor) if PASSES_OVER_SUBCLASSES else (DTensor,))):  # type: ignore[misc]
    """A DTensor in parts: a rank's shard is not one run of the whole, or another rank holds it too.

    Elementwise operators compute on the ranks' shards, without messages. All others receive the whole tensor,
    replicated: correct, at the price of a message. torch.distributed.checkpoint receives the boxes of the whole that
    this rank holds.
    """

    __slots__: list[str] = []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = schema_of(func).name.removeprefix("aten::")
        if name.startswith(("_foreach_", "_fused_")) and not name.endswith(WHOLE_LISTS):
            return _on_lists(func, args, kwargs)
        if func in KEEPS or torch.Tag.pointwise in func.tags:
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            like = next(leaf for leaf in leaves if isinstance(leaf, PartsTensor))
            if all(like._is_shared_by(leaf) for leaf in leaves):
                return _on_shares(func, args, kwargs, like)
        return _on_wholes(func, args, kwargs)

    def _is_shared_by(self, tensor: Tensor) -> bool:
        """Return whether an operator on shards takes a tensor too: one number, or a DTensor that is sharded alike."""
        if not isinstance(tensor, DTensor):
            return tensor.dim() == 0
        replicated = all(place.is_replicate() for place in tensor.placements)
        if tensor.dim() == 0:
            return replicated
        is_alike = tensor.shape == self.shape and tensor.device_mesh == self.device_mesh
        return is_alike and (replicated or tensor.placements == self.placements)

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> Any:
        plain = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        return PartsTensor(local_part(plain), spec_of(plain), requires_grad=plain.requires_grad)  # type: ignore[call-arg]

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        if not torch.is_grad_enabled():
            return local_part(self)
        like = with_local(self, local_part(self).detach())  # whose placements the gradient gets
        share = lambda tensor: local_part(tensor).view_as(local_part(tensor))  # noqa: E731
        return linear_map(self, share, lambda gradient: with_local(like, gradient.contiguous()))

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        if placements is not None and tuple(placements) == self.placements and device_mesh in (None, self.device_mesh):
            return self
        like = with_local(self, local_part(self).detach())
        whole: Any = linear_map(self, _replicated, lambda gradient: _share_of(gradient, like))
        return whole.redistribute(device_mesh, placements, **options)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(piece.offset)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk_of(piece), TensorProperties.create_from_tensor(piece.local), self.shape
                ),
            )
            for piece in pieces(self)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk_of(piece) for piece in pieces(self)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(
            piece.local for piece in pieces(self) if index.offset is None or piece.offset == tuple(index.offset)
        )


def placed(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return a PartsTensor if the placements have parts, else a DTensor: no other DTensor ever has parts."""
    kind: Any = DTensor
    for place in spec.placements:
        if type(place) is PartsShard:  # isinstance is a call of Python for torch's placements
            kind = PartsTensor
    return kind(local, spec, requires_grad=local.requires_grad)


def distribute(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Return a full parameter as a DTensor over the one axis of ``mesh``, with a copy of this rank's shard.

    No communication. The shard is on the mesh's device; a parameter on meta stays on meta.
    """
    rank, size = mesh.get_local_rank(), mesh.size()
    local = parameter.detach()
    if isinstance(placement, (Shard, PartsShard)):
        whole = FusedPart(local.shape[placement.dim], local.shape[placement.dim])
        local = take(local, placement.dim, getattr(placement, "parts", (whole,)), rank, size)
    if local.is_meta:
        local = local.contiguous()
    else:
        local = local.to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
    if isinstance(placement, PartsShard):
        let_fsdp_make(placed)
    meta = TensorMeta(parameter.shape, torch.empty(parameter.shape, device="meta").stride(), local.dtype)
    made = placed(local, DTensorSpec(mesh, (placement,), tensor_meta=meta))
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


def _on_shares(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], like: PartsTensor) -> Any:
    shares: dict[int, Tensor] = {}
    given: dict[int, Tensor] = {}

    def share(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        is_share = leaf.dim() == 0 or leaf.placements == like.placements
        made = local_part(leaf if is_share else _share_of(leaf, like))
        given[id(made)] = leaf
        return shares.setdefault(id(leaf), made)

    def placed_as_like(leaf: Any) -> Any:  # arguments that an operator returns become the originals
        return given[id(leaf)] if id(leaf) in given else with_local(like, leaf) if isinstance(leaf, Tensor) else leaf

    return tree_map(placed_as_like, func(*tree_map(share, args), **tree_map(share, kwargs)))


def _on_lists(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an elementwise operator on lists of tensors: on the shards of tensors in parts, on others as torch does."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)) and value]
    length = max(map(len, lists))
    likes = [
        next((value[i] for value in lists if len(value) == length and isinstance(value[i], PartsTensor)), None)
        for i in range(length)
    ]
    results: list[Any] = [None] * length

    def only(numbers: list[int], value: Any) -> Any:
        return [value[i] for i in numbers] if isinstance(value, (list, tuple)) and len(value) == length else value

    def call(numbers: list[int], change: Callable[[Any], Any]) -> Any:
        chosen = tree_map(change, [only(numbers, value) for value in args])
        return func(*chosen, **{key: tree_map(change, only(numbers, value)) for key, value in kwargs.items()})

    others = [i for i in range(length) if likes[i] is None]
    if others:
        for i, made in zip(others, call(others, lambda leaf: leaf) or (), strict=False):
            results[i] = made
    for i, like in enumerate(likes):
        if like is not None:

            def share(leaf: Any, like: PartsTensor = like) -> Any:
                return (
                    local_part(_share_of(leaf, like)) if isinstance(leaf, DTensor) and leaf.dim() else local_part(leaf)
                )

            made = call([i], share)
            results[i] = with_local(like, made[0]) if made else None
    return None if all(result is None for result in results) else results


def _on_wholes(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operator on whole tensors, and copy the elements that it wrote back into the shards."""
    wholes: dict[int, tuple[PartsTensor, DTensor]] = {}

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, PartsTensor):
            return wholes.setdefault(id(leaf), (leaf, _replicated(leaf)))[1]
        return leaf

    result = func(*tree_map(whole, args), **tree_map(whole, kwargs))
    if schema_of(func).is_mutable:
        for tensor, changed in wholes.values():
            local_part(tensor).copy_(local_part(_share_of(changed, tensor)))
    back = {id(changed): tensor for tensor, changed in wholes.values()}
    return tree_map(lambda leaf: back.get(id(leaf), leaf) if schema_of(func).is_mutable else leaf, result)


def _replicated(tensor: Any) -> DTensor:
    """Return the whole tensor, replicated on its mesh. Collective over the axes that shard it."""
    mesh = tensor.device_mesh
    whole = whole_everywhere(tensor)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return DTensor(whole, DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta), requires_grad=False)


def _share_of(tensor: Tensor, like: DTensor) -> DTensor:
    """Return a tensor of the same shape with the placements of ``like``; a plain tensor counts as the whole."""
    if isinstance(tensor, DTensor) and tensor.placements == like.placements:
        return with_local(like, local_part(tensor))
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    local = torch.empty_like(local_part(like), dtype=whole.dtype)
    made = with_local(like, local)
    for piece in pieces(made):
        piece.local.copy_(whole[piece.slices])
    return made


def chunk_of(piece: Piece) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(piece.offset), piece.local.shape)
