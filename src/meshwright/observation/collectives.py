"""Have the collectives of torch.distributed tell the recorder their kind, group and size, whoever calls them.

Like the recorder, this file is loaded by its path into whatever environment the script has, so it imports torch alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.observation.sketches import local_of

KINDS = {
    "all_reduce": ("allreduce_", "allreduce_coalesced_"),
    "reduce": ("reduce_",),
    "reduce_scatter": ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    "all_gather": ("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    "gather": ("gather_",),
    "scatter": ("scatter_",),
    "broadcast": ("broadcast_",),
    "all_to_all": ("alltoall_", "alltoall_base_"),
    "send": ("send",),
    "receive": ("recv_", "recv_any_source_"),
}
"""Kind -> the operators that DDP's reducer, FSDP, DTensor and torch.distributed's functions call."""
MOST_COLLECTIVES = 1024
"""Recorded of a step."""
MOST_NUMBERS = 64
"""Of a message, whose numbers are recorded."""
LIBRARIES: list[torch.library.Library] = []
"""A library without references takes its kernels back."""


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in an argument of an operator."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def storage(tensor: Any) -> StorageWeakRef | None:
    """Return what tells a tensor's storage from all others, later ones at the same address, too."""
    is_there = tensor.layout == torch.strided and not tensor.is_meta
    return StorageWeakRef(local_of(tensor).untyped_storage()) if is_there else None


def ranks_in(group: Any) -> list[int]:
    """List the ranks of a group; none of one that torch.distributed does not know."""
    try:
        return sorted(dist.get_process_group_ranks(group))
    except KeyError:
        return []


def settle(event: dict[str, Any], homes: dict[Any, list[str]]) -> None:
    """Replace a described collective's storage by the parameters that are there, and its numbers by Python's."""
    event["of"] = homes.get(event.pop("at"), [])
    event["values"] = [float(value) for value in event["values"].flatten()]


def describe(kind: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """Describe a collective: its kind, the group's ranks, its largest tensor, where its first is stored, and that one's
    numbers where they are few.
    """
    group = next(dist.ProcessGroup.unbox(value) for value in args if isinstance(value, torch.ScriptObject))
    tensors = [tensor for value in args for tensor in tensors_in(value)]
    first = tensors[0] if tensors else torch.empty(0)
    is_short = first.numel() <= MOST_NUMBERS and not first.is_meta and not first.is_complex()
    return {
        "kind": kind,
        "ranks": ranks_in(group),
        "bytes": max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0),
        "at": storage(first),
        "values": local_of(first.detach()).clone() if is_short else torch.empty(0),
    }


def note_collectives(note: Any) -> None:
    """Have each collective told to ``note`` before it is called.

    The kernels stand where an operator selects its backend, which no caller skips, and go on to those of the backend.
    """
    LIBRARIES.append(library := torch.library.Library("c10d", "IMPL"))
    rest = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(kind: str, operator: Any) -> Any:
        def noted(keys: Any, *args: Any) -> Any:
            note(kind, args)
            return operator.redispatch(keys & rest, *args)

        return noted

    for kind, names in KINDS.items():
        for name in names:
            if (operator := getattr(torch.ops.c10d, name, None)) is not None:
                library.impl(name, kernel(kind, operator.default), "BackendSelect", with_keyset=True)
