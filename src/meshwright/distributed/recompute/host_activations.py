"""Keep activations in host memory (as in arXiv 2104.07857), and fetch them one block ahead of their use.

On CUDA copies run on a stream of their own, from and to pinned memory: a block's leave while the next one computes,
and the one before is fetched while this one's backward runs. On the CPU the same is done by plain copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.core.record import wrap
from meshwright.core.torch_private import FakeTensor, address_of, version_of
from meshwright.distributed.memory.live import addresses, storage_of, tensors_in

OFFLOADED = "activations in host memory"
"""The change that is noted on a module."""
LEAST_BYTES = 1024
"""Smaller tensors stay where they are."""

PLAIN = (Tensor, FakeTensor)
"""Kinds of tensors that can leave; the second have no memory, where a step is foreseen."""

Key = tuple[Any, ...]


class Copies:
    """Copies to host memory and back: on CUDA beside the computation, else at once."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def leave(self, tensor: Tensor) -> Tensor:
        """Return a copy in host memory, complete behind ``mark``."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        with self._beside(tensor):
            host.copy_(tensor, non_blocking=True)
        return host

    def come(self, host: Tensor, device: torch.device) -> Tensor:
        """Return a copy on the device, complete behind ``mark``."""
        back = torch.empty_like(host, device=device)
        with self._beside(back):
            back.copy_(host, non_blocking=True)
        if self._stream is not None:
            back.record_stream(self._stream)  # it may be dropped before it is used
        return back

    def mark(self) -> torch.cuda.Event | None:
        """Record an event behind all copies begun so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    @staticmethod
    def wait(event: torch.cuda.Event | None) -> None:
        """Let later computation see the copies before ``event``, and overwrite their sources."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def _beside(self, tensor: Tensor) -> AbstractContextManager[Any]:
        if not tensor.is_cuda:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)


@dataclass
class Slot:
    """A tensor that was saved: in host memory, and where it was computed for as long as it is needed there."""

    host: Tensor
    place: torch.device
    version: int
    here: Tensor | None


@dataclass(eq=False)
class BlockForward:
    """One forward of one block: what it saved.

    Attributes:
        number: of the block.
        before: the passage of the block before, of the same forward.
        left, came: behind the copies to host memory, and back.
    """

    number: int
    before: BlockForward | None
    copies: Copies
    slots: dict[Key, Slot] = field(default_factory=dict)
    left: torch.cuda.Event | None = None
    came: torch.cuda.Event | None = None
    is_here: bool = True

    def keep(self, tensor: Tensor) -> Key:
        """Copy the tensor to its slot and return the slot's key; the same tensor has one slot."""
        version = version_of(tensor)
        key = (
            address_of(storage_of(tensor)),
            version,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if key not in self.slots:  # a slot holds its tensor until the block has ended: nothing else gets its address
            self.slots[key] = Slot(self.copies.leave(tensor), tensor.device, version, tensor)
        return key

    def release(self) -> None:
        """The block has ended, and so has the next one: its tensors need not be here any more."""
        Copies.wait(self.left)
        for slot in self.slots.values():
            slot.here = None
        self.is_here = False

    def fetch(self) -> None:
        """Begin to bring them back."""
        if not self.is_here:
            self.is_here = True
            for slot in self.slots.values():
                self._bring(slot)
            self.came = self.copies.mark()

    def _bring(self, slot: Slot) -> None:
        slot.here = self.copies.come(slot.host, slot.place)
        slot.version = version_of(slot.here)

    def take(self, key: Key) -> Tensor:
        """Return a tensor, for the block's backward; those of the block before are on their way then."""
        self.fetch()
        Copies.wait(self.came)
        if self.before is not None:
            self.before.fetch()
            self.before = None
        slot = self.slots[key]
        assert slot.here is not None
        if version_of(slot.here) != slot.version:  # somebody has written into it since
            self._bring(slot)
            Copies.wait(self.copies.mark())
        return slot.here


class HostActivations:
    """The host memory of one model part; its blocks are numbered in the order of their forwards."""

    def __init__(self) -> None:
        self._copies = Copies()
        self._last: weakref.ref[BlockForward] | None = None

    def begin(self, number: int) -> BlockForward:
        last = self._last and self._last()
        before = last if last is not None and last.number == number - 1 else None
        return BlockForward(number, before, self._copies)

    def end(self, passage: BlockForward) -> None:
        """A block's forward has ended: what the one before it saved is in host memory alone from now on."""
        passage.left = self._copies.mark()
        if (last := self._last and self._last()) is not None:
            last.release()
        self._last = weakref.ref(passage)


def offload(module: nn.Module, number: int, store: HostActivations) -> None:
    """Let one block keep in host memory what it saves for backward.

    What lies elsewhere anyway stays: parameters and views of them, buffers, arguments that take no gradient (masks,
    tables). So do small tensors, and those of other kinds than plain ones.
    """

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def offloaded_forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            given = addresses(t for t in tensors_in((args, kwargs)) if not t.requires_grad)
            passage = store.begin(number)

            def pack(tensor: Tensor) -> Tensor | tuple[BlockForward, Key]:
                stays = type(tensor) not in PLAIN or tensor.numel() * tensor.element_size() < LEAST_BYTES
                if stays or (address := address_of(storage_of(tensor))) in given or address in _lying_elsewhere(module):
                    return tensor
                return passage, passage.keep(tensor.detach())

            with saved_tensors_hooks(pack, _unpack):
                output = forward(*args, **kwargs)
            store.end(passage)
            return output

        return offloaded_forward

    wrap(module, make, OFFLOADED)


def _unpack(saved: Tensor | tuple[BlockForward, Key]) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved[0].take(saved[1])


def _lying_elsewhere(module: nn.Module) -> set[int]:
    """Addresses of parameters, those that a sharded unit inside has gathered just now among them, and of buffers."""
    return addresses(chain(module.parameters(), module.buffers()))
