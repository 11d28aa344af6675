"""Present tensors to torch's distributed checkpoint as the boxes of the whole that a rank holds.

torch asks a tensor what to write, what to read and where. A DTensor answers for its placements, and torch's answer
knows neither shares of several runs nor copies; this module answers from ``distributed.weights.shards``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import LoadPlan, WriteItem
from torch.distributed.tensor import DTensor

from meshwright.core.errors import IntegrityError
from meshwright.distributed.torch_private import local_part
from meshwright.distributed.weights.parts_tensor import chunk_of, write_item
from meshwright.distributed.weights.shards import pieces, with_local


def in_pieces(tensor: Tensor) -> Tensor:
    """Share a tensor's memory in a form that torch's checkpoint can write or read."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    shared: Any = with_local(tensor, local_part(tensor).detach())
    here = {piece.offset: piece for piece in pieces(shared)}
    shared.__create_write_items__ = lambda name, _: [write_item(name, shared, piece) for piece in here.values()]
    shared.__create_chunk_list__ = lambda: [chunk_of(piece) for piece in here.values()]
    shared.__get_tensor_shard__ = lambda index: here[tuple(index.offset)].local
    return shared


class Writer(HuggingFaceStorageWriter):
    """A safetensors writer of a rank's shards; a file holds a name once, so second pieces go to a second file."""

    def __init__(self, path: str):
        super().__init__(path=path, save_distributed=True)

    def _split_by_storage_plan(
        self, storage_plan: dict[str, int] | None, items: list[WriteItem]
    ) -> dict[int, list[WriteItem]]:
        files: dict[int, list[WriteItem]] = {}
        seen: dict[str, int] = {}
        for item in items:
            number = seen[item.index.fqn] = seen.get(item.index.fqn, 0) + 1
            files.setdefault(number, []).append(item)
        return files


class WholePlanner(DefaultLoadPlanner):
    """A planner that refuses what torch's passes over: elements that no file holds, or holds in another dtype.

    Args:
        tensors: the tensors to read, by key.
    """

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__()
        self.tensors = tensors

    def create_local_plan(self) -> LoadPlan:
        """Plan this rank's reads; IntegrityError where they leave a part of a tensor unread."""
        stored: dict[str, Any] = self.metadata.state_dict_metadata if self.metadata else {}
        if lacking := [key for key in self.tensors if key not in stored]:
            raise IntegrityError(f"its files hold nothing of {lacking[0]} ({len(lacking)} in all)")
        plan = super().create_local_plan()
        found: dict[tuple[str, tuple[int, ...]], list[tuple[tuple[int, int], ...]]] = {}
        for item in plan.items:
            box = tuple((begin, begin + size) for begin, size in zip(item.dest_offsets, item.lengths, strict=True))
            found.setdefault((item.dest_index.fqn, tuple(item.dest_index.offset or ())), []).append(box)
        for key, tensor in self.tensors.items():
            if (dtype := stored[key].properties.dtype) != tensor.dtype:
                raise IntegrityError(f"its files hold {key} in {dtype}, and its manifest says {tensor.dtype}")
            for piece in pieces(tensor):
                if not covers(found.get((key, tuple(piece.offset)), ()), tuple(piece.local.shape)):
                    raise IntegrityError(f"its files hold only a part of {key} of shape {list(tensor.shape)}")
        return plan


def covers(boxes: Iterable[tuple[tuple[int, int], ...]], shape: tuple[int, ...]) -> bool:
    """Return whether boxes, (begin, end) for every dim, hold every element of a tensor of that shape."""
    boxes = list(boxes)
    cuts = [sorted({0, size, *(edge for box in boxes for edge in box[dim])}) for dim, size in enumerate(shape)]
    held = np.zeros([len(edges) - 1 for edges in cuts], dtype=bool)
    for box in boxes:
        held[
            tuple(slice(edges.index(begin), edges.index(end)) for edges, (begin, end) in zip(cuts, box, strict=True))
        ] = True
    return bool(held.all())
