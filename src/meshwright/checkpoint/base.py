"""Know the weights that a checkpoint left out again, by a run of numbers of each parameter."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.torch_private import is_traceable_wrapper_subclass
from meshwright.distributed.mesh import is_first_of_stage
from meshwright.distributed.process import agree
from meshwright.distributed.weights.shards import pieces

LENGTH = 256
"""Numbers of a parameter that are compared, at most."""


def runs_of(tensors: Mapping[str, Tensor], mesh: DeviceMesh | None) -> dict[str, Any]:
    """Map names to a run of each tensor's numbers: where it begins, its length, dtype and checksum. Collective."""
    mine = {}
    if tensors and (mesh is None or is_first_of_stage(mesh)):
        mine = {name: run for name, tensor in tensors.items() if (run := run_of(tensor)) is not None}
    return {name: run for theirs in agree.everybody_says(mine) for name, run in theirs.items()} if tensors else {}


def run_of(tensor: Tensor) -> dict[str, Any] | None:
    """Describe the first numbers that this rank holds; None if it holds none, or something other than numbers."""
    here = next(iter(pieces(tensor)), None)
    if here is None or not here.local.is_floating_point() or is_traceable_wrapper_subclass(here.local):
        return None
    length = min(LENGTH, here.local.shape[-1]) if here.local.dim() else 1
    local = here.local[(0,) * (here.local.dim() - 1)][:length] if here.local.dim() else here.local.reshape(1)
    dtype = str(here.local.dtype).removeprefix("torch.")
    return {"at": list(here.offset), "length": length, "dtype": dtype, "crc32": _checksum(local)}


def differing(runs: Mapping[str, Any], read: Callable[[str], Tensor]) -> list[str]:
    """List the parameters whose numbers are others than when the checkpoint was written.

    Args:
        runs: what ``runs_of`` returned.
        read: returns a whole tensor by its name.
    """
    found = []
    for name, run in runs.items():
        tensor, at = read(name), run["at"]
        if tensor.dim() != len(at):
            found.append(name)
            continue
        row = tensor[tuple(at[:-1])][at[-1] : at[-1] + run["length"]] if at else tensor.reshape(1)
        if _checksum(row.to(getattr(torch, run["dtype"]))) != run["crc32"]:
            found.append(name)
    return found


def _checksum(numbers: Tensor) -> int:
    return zlib.crc32(numbers.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
