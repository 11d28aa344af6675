"""Counting what a computation leaves in memory, below our code: every storage that torch's operators make, and which are still there."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """``with LiveStorages() as live: …`` then ``live.bytes()``: of the storages made inside, those that somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and (address := _storage(leaf)) not in given:
                storage = leaf.untyped_storage()
                self._made[address] = StorageWeakRef(storage), storage.nbytes()
        return made

    def bytes(self) -> int:
        return sum(size for storage, size in self._made.values() if not storage.expired())


def _storage(tensor: torch.Tensor) -> int:
    """While it is there, nothing else has the same number."""
    return tensor.untyped_storage()._cdata
