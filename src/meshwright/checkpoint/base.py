"""Know the weights that a checkpoint left out again, by a run of numbers of each parameter."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.distributed.mesh import is_first_of_stage
from meshwright.distributed.nf4 import pack
from meshwright.distributed.process import agree
from meshwright.distributed.weights.shards import pieces
from meshwright.planning.values import NF4_BLOCK, NF4_BLOCK_BYTES

LENGTH = 256
"""Numbers of a parameter that are compared, at most."""


def runs_of(
    tensors: Mapping[str, Tensor], mesh: DeviceMesh | None, in_4_bits: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Map names to a run of each tensor's numbers: where it begins, its length, dtype and checksum. Collective.

    Args:
        in_4_bits: names of weights in 4 bits, and the dtypes in which they were rounded.
    """
    mine, rounded = {}, in_4_bits or {}
    if tensors and (mesh is None or is_first_of_stage(mesh)):
        mine = {name: run for name, tensor in tensors.items() if (run := run_of(tensor, rounded.get(name))) is not None}
    return {name: run for theirs in agree.everybody_says(mine) for name, run in theirs.items()} if tensors else {}


def run_of(tensor: Tensor, rounded_in: str | None = None) -> dict[str, Any] | None:
    """Describe the first numbers that this rank holds; None if it holds none, or something other than numbers.

    Args:
        rounded_in: dtype in which the numbers were rounded to the bytes of 4 bits that the tensor holds.
    """
    here = next(iter(pieces(tensor)), None)
    if here is not None and rounded_in is not None:
        row, column = here.offset
        blocks = min(LENGTH // NF4_BLOCK, here.local.shape[1] // NF4_BLOCK_BYTES)
        at, crc32 = [row, column // NF4_BLOCK_BYTES * NF4_BLOCK], _checksum(here.local[0, : blocks * NF4_BLOCK_BYTES])
        return {"at": at, "length": blocks * NF4_BLOCK, "dtype": rounded_in, "crc32": crc32, "in_4_bits": True}
    if here is None or not here.local.is_floating_point() or hasattr(here.local, "__tensor_flatten__"):
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
        numbers = row.to(getattr(torch, run["dtype"]))
        if _checksum(pack(numbers[None]) if run.get("in_4_bits") else numbers) != run["crc32"]:
            found.append(name)
    return found


def _checksum(numbers: Tensor) -> int:
    return zlib.crc32(numbers.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
