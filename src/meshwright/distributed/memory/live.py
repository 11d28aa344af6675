"""Follow every storage that torch's operators make until nobody holds it."""

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
    """Storages that are followed, and what each is for."""

    def __init__(self) -> None:
        self._followed: dict[int, tuple[StorageWeakRef, What]] = {}

    def follow(self, tensor: Tensor, what: What) -> None:
        """Follow the tensor's storage for this purpose, in place of another."""
        storage = storage_of(tensor)
        self._followed[address_of(storage)] = StorageWeakRef(storage), what

    def there(self) -> Iterator[tuple[int, int, What]]:
        """Yield (address, bytes, what for) of those that somebody still holds; the others are followed no more."""
        for address, (reference, what) in list(self._followed.items()):
            storage = storage_at(reference.cdata)
            if storage is None:
                del self._followed[address]
            else:
                yield address, storage.nbytes(), what


class LiveStorages(TorchDispatchMode):
    """``with LiveStorages() as live: …`` then ``live.bytes()``: of the storages made inside, those that somebody
    still holds.
    """

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
    """Return what an operator gave that is no view of the storages (by address) that it was given."""
    return [tensor for tensor in tensors_in(made) if address_of(storage_of(tensor)) not in given]


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of storages; while a storage lives, no other has its address."""
    return {address_of(storage_of(tensor)) for tensor in tensors}


def stored(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of the storages that tensors lie in."""
    return {address_of(storage): storage.nbytes() for storage in map(storage_of, tensors)}


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor; of a DTensor, the local one's."""
    return local_part(tensor).untyped_storage()
