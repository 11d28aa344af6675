"""Track every storage that torch's operators allocate until it is freed."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from meshwright.core.torch_private import TorchDispatchMode
from meshwright.distributed.torch_private import local_part

Purpose = TypeVar("Purpose")


class Storages(Generic[Purpose]):
    """Tracked storages, each with its purpose; a freed one leaves at once.

    Attributes:
        bytes: bytes of the live storages, by purpose.
    """

    def __init__(self) -> None:
        self.bytes: Counter[Purpose] = Counter()
        self._followed: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, Purpose]] = {}

    def follow(self, storage: torch.UntypedStorage, purpose: Purpose) -> None:
        """Track a storage; ``purpose`` replaces an earlier one."""
        address = id(storage)
        if (known := self._followed.get(address)) is None:
            reference, size = weakref.ref(storage, lambda _: self._forget(address)), storage.nbytes()
        elif known[2] == purpose:
            return
        else:
            reference, size, before = known
            self.bytes[before] -= size
        self.bytes[purpose] += size
        self._followed[address] = reference, size, purpose

    def change(self, address: int, before: Purpose, purpose: Purpose) -> None:
        """Change the purpose of the storage at an address, if it is tracked with the purpose ``before``."""
        known = self._followed.get(address)
        if known is not None and known[2] == before:
            reference, size, _ = known
            self.bytes[before] -= size
            self.bytes[purpose] += size
            self._followed[address] = reference, size, purpose

    def live(self) -> list[torch.UntypedStorage]:
        """List the tracked storages."""
        return [storage for reference, _, _ in self._followed.values() if (storage := reference()) is not None]

    def keep_size(self, storage: torch.UntypedStorage) -> None:
        """Note the size of a storage that was resized, if it is tracked."""
        if (known := self._followed.get(id(storage))) is not None:
            reference, before, purpose = known
            self.bytes[purpose] += storage.nbytes() - before
            self._followed[id(storage)] = reference, storage.nbytes(), purpose

    def _forget(self, address: int) -> None:
        _, size, purpose = self._followed.pop(address)
        self.bytes[purpose] -= size


class LiveStorages(TorchDispatchMode):
    """``with LiveStorages() as live: …``, then ``live.bytes()``: bytes of the storages made inside that still live."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: Storages[None] = Storages()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = addresses(tensors_in((args, kwargs)))
        made = func(*args, **(kwargs or {}))
        for tensor in newly_made(given, made):
            self._storages.follow(storage_of(tensor), None)
        return made

    def storages(self) -> list[torch.UntypedStorage]:
        """List the storages made inside that still live."""
        return self._storages.live()

    def bytes(self) -> int:
        return self._storages.bytes.total()


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


def newly_made(given: set[int], made: Any) -> list[Tensor]:
    """Return the tensors in ``made`` that are not views of the storages at the addresses ``given``."""
    return [tensor for tensor in tensors_in(made) if id(storage_of(tensor)) not in given]


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of storages; while a storage lives, no other has its address."""
    return {id(storage_of(tensor)) for tensor in tensors}


def stored(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the address and bytes of each storage of these tensors."""
    return {id(storage): storage.nbytes() for storage in map(storage_of, tensors)}


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor; for a DTensor, that of its local tensor."""
    return local_part(tensor).untyped_storage()
