"""Tensors as the boxes of the whole that a rank holds, for torch's distributed checkpoint.

Torch asks a tensor what to write, what to read and where; a DTensor answers for its placements, and torch's answer knows neither shares of
several runs nor copies. Here the answer comes from ``distributed.shards``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from meshwright.distributed.parts_tensor import chunk_of, write_item
from meshwright.distributed.shards import pieces, with_local


def in_pieces(tensor: Tensor) -> Tensor:
    """The same memory, for torch's checkpoint to write or read."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    shared: Any = with_local(tensor, tensor._local_tensor.detach())
    here = {piece.offset: piece for piece in pieces(shared)}
    shared.__create_write_items__ = lambda name, _: [write_item(name, shared, piece) for piece in here.values()]
    shared.__create_chunk_list__ = lambda: [chunk_of(piece) for piece in here.values()]
    shared.__get_tensor_shard__ = lambda index: here[tuple(index.offset)].local
    return shared


class Writer(HuggingFaceStorageWriter):
    """Each rank's shards as safetensors; the second piece of a tensor goes to a second file, since a file knows a name once."""

    def __init__(self, path: str):
        super().__init__(path=path, save_distributed=True)

    def _split_by_storage_plan(self, storage_plan: dict[str, int] | None, items: list[WriteItem]) -> dict[int, list[WriteItem]]:
        files: dict[int, list[WriteItem]] = {}
        seen: dict[str, int] = {}
        for item in items:
            number = seen[item.index.fqn] = seen.get(item.index.fqn, 0) + 1
            files.setdefault(number, []).append(item)
        return files
