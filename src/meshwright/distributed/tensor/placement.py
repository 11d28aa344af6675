"""The placement of a tensor of which a rank holds several runs of slices, or the same ones as another rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from meshwright.core.parts import Part, is_plain, take
from meshwright.distributed.shards import gradient_of
from meshwright.planning.tensor_plan import words_of_cut


class PartsShard(Shard):
    """Sharded along ``dim``, each of its ``parts`` by itself: a rank holds its shares of all of them, side by side.

    For torch it is a Shard, and the global shape is the tensor's own. What a rank holds is no single run of it, though, so torch's own way
    back to the whole (``full_tensor``) would put it together in another order: use ``distributed.wholes``. It travels with parameters,
    gradients and optimizer states through FSDP2.
    """

    def __new__(cls, dim: int, parts: tuple[Part, ...]) -> PartsShard:
        return super().__new__(cls, dim)

    def __init__(self, dim: int, parts: tuple[Part, ...]):
        super().__init__(dim)
        self.parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return PartsShard, (self.dim, self.parts)

    def __eq__(self, other: object) -> bool:
        """As torch sees it, a Shard: its sharding rules ask in this way, and its caches, which do not all compare hashes first, must not
        now and then tell it from one. So what an operation returns is placed as whichever came first: see ``shards.pieces``."""
        return isinstance(other, Shard) and self.dim == other.dim

    def __hash__(self) -> int:
        return hash(Shard(self.dim))

    def __repr__(self) -> str:
        return words_of_cut(self.dim, self.parts)

    def __str__(self) -> str:
        return words_of_cut(self.dim, self.parts)


def placement_of_cut(dim: int, parts: tuple[Part, ...], ranks: int) -> Placement:
    """torch's own Shard where a rank's share is one run that torch would give it too."""
    return Shard(dim) if is_plain(parts, ranks) else PartsShard(dim, parts)


def distribute(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """The parameter as a DTensor over the one axis of ``mesh``; this rank keeps its part only. No communication; meta stays meta."""
    rank, size = mesh.get_local_rank(), mesh.size()
    local = parameter.detach()
    if isinstance(placement, Shard):
        parts = placement.parts if isinstance(placement, PartsShard) else (Part(local.shape[placement.dim], local.shape[placement.dim]),)
        local = take(local, placement.dim, parts, rank, size)
    local = local.contiguous() if local.is_meta else local.clone(memory_format=torch.contiguous_format)
    made = DTensor.from_local(local, mesh, [placement], run_check=False, shape=parameter.shape, stride=_stride(parameter.shape))
    whole = nn.Parameter(made, requires_grad=parameter.requires_grad)
    place(whole, mesh, placement)
    return whole


def place(parameter: Any, axis: DeviceMesh, placement: Placement) -> None:
    """Say once more where a DTensor, and its gradients to come, lie on an axis of its mesh: whoever makes a parameter of a tensor copies
    it, and torch placed what came out. See ``PartsShard.__eq__``."""
    mesh, name = parameter.device_mesh, (axis.mesh_dim_names or ("",))[0]
    number = (mesh.mesh_dim_names or ("",)).index(name)
    before = parameter.placements[number]
    if type(before) is not type(placement) or getattr(before, "parts", None) != getattr(placement, "parts", None):
        placements = (*parameter.placements[:number], placement, *parameter.placements[number + 1 :])
        parameter._spec = DTensorSpec(mesh, placements, tensor_meta=parameter._spec.tensor_meta)
    if parameter.requires_grad and not parameter._post_accumulate_grad_hooks and not isinstance(placement, Replicate):
        parameter.register_post_accumulate_grad_hook(_place_gradient)


def _place_gradient(parameter: Tensor) -> None:
    """autograd copied or added up the gradient, and torch placed what came out: see ``PartsShard.__eq__``."""
    parameter.grad = gradient_of(parameter)


def _stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
