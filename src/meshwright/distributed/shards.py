"""Which part of a parameter is here, and seeds that do not depend on where."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .world import get_world_info


def seed_of(*parts: object) -> int:
    """A 63-bit seed from any values (blake2b; equal on every machine)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a parameter, and the global index of its first element."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.dim()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    local = parameter.to_local()
    if local.numel() == 0:
        return local, (0,) * parameter.dim()
    assert tuple(local.shape) == tuple(shape)
    return local, tuple(offset)


def whole_on_first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the whole tensors on the CPU of rank 0, nothing elsewhere. Collective: every rank brings the same names."""
    found = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if get_world_info()[0] == 0:
            found[name] = whole.detach().to("cpu", copy=True)
    return found
