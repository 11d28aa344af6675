"""Track every storage that torch's operators allocate until it is freed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.core.torch_private import TorchDispatchMode, address_of, storage_at, tree_leaves
from meshwright.distributed.torch_private import local_part

What = TypeVar("What")


class Storages(Generic[What]):
    """Tracked storages, each with its purpose."""

    def __init__(self) -> None:
        self._followed: dict[int, tuple[StorageWeakRef, What]] = {}

    def follow(self, tensor: Tensor, what: What) -> None:
        """Track the tensor's storage with the purpose ``what``, which replaces an earlier one."""
        storage = storage_of(tensor)
        self._followed[address_of(storage)] = StorageWeakRef(storage), what

    def there(self) -> Iterator[tuple[int, int, What]]:
        """Yield (address, bytes, purpose) of each live storage, and stop tracking the freed ones."""
        for address, (reference, what) in list(self._followed.items()):
            storage = storage_at(reference.cdata)
            if storage is None:
                del self._followed[address]
            else:
                yield address, storage.nbytes(), what


class LiveStorages(TorchDispatchMode):
    """``with LiveStorages() as live: …``, then ``live.bytes()``: bytes of the storages made inside that still live."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: Storages[None] = Storages()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = addresses(tensors_in((args, kwargs)))
        made = func(*args, **(kwargs or {}))
        for tensor in newly_made(given, made):
            self._storages.follow(tensor, None)
        return made

    def bytes(self) -> int:
        return sum(size for _, size, _ in self._storages.there())


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def newly_made(given: set[int], made: Any) -> list[Tensor]:
    """Return the tensors in ``made`` that are not views of the storages at the addresses ``given``."""
    return [tensor for tensor in tensors_in(made) if address_of(storage_of(tensor)) not in given]


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of storages; while a storage lives, no other has its address."""
    return {address_of(storage_of(tensor)) for tensor in tensors}


def stored(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the address and bytes of each storage of these tensors."""
    return {address_of(storage): storage.nbytes() for storage in map(storage_of, tensors)}


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor; for a DTensor, that of its local tensor."""
    return local_part(tensor).untyped_storage()
