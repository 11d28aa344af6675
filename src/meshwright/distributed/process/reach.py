"""Let ranks reach each other: the back ends of this torch, and first messages over them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.core.devices import CPU, CUDA, DEFAULT_BACKEND, current_device
from meshwright.core.errors import IntegrityError
from meshwright.distributed.setup import choose_backend, init_distributed
from meshwright.planning.layout import Layout

from .world import get_world_info


def back_ends() -> dict[str, str]:
    """Return the back ends of torch.distributed in this build, and NCCL's version."""
    found = {name: "" for name in ("gloo", "nccl", "mpi", "xccl") if dist.is_backend_available(name)}
    if "nccl" in found:
        found["nccl"] = ".".join(map(str, torch.get_device_module(CUDA).nccl.version()))
    return found


def exchanged() -> list[str]:
    """Exchange numbers among the ranks of a world: a sum over all, and a message from each to the next. Collective.

    Returns:
        A word for each back end that carried them, like "gloo (cpu)".

    Raises:
        IntegrityError: a number that arrived is another than was sent.
    """
    rank, _, world = get_world_info()
    backend, device_type = choose_backend(DEFAULT_BACKEND)
    init_distributed(Layout(dp_shard=world))
    carried = []
    for kind in dict.fromkeys((CPU, device_type)):
        own = torch.full((1024,), float(rank + 1), device=current_device(kind))
        total, heard = own.clone(), torch.empty_like(own)
        dist.all_reduce(total)
        sent = dist.isend(own, (rank + 1) % world)
        dist.recv(heard, (rank - 1) % world)
        if sent is not None:
            sent.wait()
        expected = world * (world + 1) / 2, float((rank - 1) % world + 1)
        arrived = total.unique().tolist(), heard.unique().tolist()
        if arrived != ([expected[0]], [expected[1]]):
            raise IntegrityError(f"rank {rank} expected {expected} on {kind}, and {arrived} arrived")
        pairs = dict(part.split(":") for part in backend.split(",") if ":" in part)
        carried.append(f"{pairs.get(kind, backend)} on {kind}")
    return carried
