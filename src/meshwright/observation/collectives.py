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
HELD: list[torch.library.Library] = []
"""What unregisters its kernels when nobody holds it."""


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in an argument of an operator."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def storage(tensor: Any) -> StorageWeakRef | None:
    """Return what tells a tensor's storage from all others, later ones at the same address, too."""
    tensor = local_of(tensor)
    return None if tensor.is_meta or tensor.layout != torch.strided else StorageWeakRef(tensor.untyped_storage())


def describe(kind: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """Describe a collective: its kind, the group's ranks, its largest tensor, where its first is stored, and that one's
    number where it has one alone.
    """
    group = next(dist.ProcessGroup.unbox(value) for value in args if isinstance(value, torch.ScriptObject))
    tensors = [tensor for value in args for tensor in tensors_in(value)]
    return {
        "kind": kind,
        "ranks": sorted(dist.get_process_group_ranks(group)),
        "numel": max(tensor.numel() for tensor in tensors),
        "bytes": max(tensor.numel() * tensor.element_size() for tensor in tensors),
        "dtype": str(tensors[0].dtype)[6:],
        "at": storage(tensors[0]),
        "value": float(tensors[0]) if tensors[0].numel() == 1 and not tensors[0].is_meta else None,
    }


def note_collectives(note: Any) -> None:
    """Have each collective told to ``note`` before it is called.

    The kernels stand where an operator selects its backend, which no caller skips, and go on to those of the backend.
    """
    HELD.append(library := torch.library.Library("c10d", "IMPL"))
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
