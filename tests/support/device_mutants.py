"""Meshwright with faults that a CPU forgives and a GPU does not: each a few lines, as a context manager."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest.mock import patch

from torch import Tensor, nn

from meshwright.distributed import exchange
from meshwright.distributed.experts import _Journey
from meshwright.distributed.optimizer import low_bit
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.recompute.recompute import BlockForward, Copies
from meshwright.introspection import signature


def copies_not_waited_for() -> AbstractContextManager:
    """Activations come back on a stream of their own, and backward does not wait for them."""
    return patch.object(Copies, "wait", lambda self, event: None)


def activations_freed_in_flight() -> AbstractContextManager:
    """A block's activations are freed while they are still being copied to the host."""

    def release(self):
        for slot in self.slots.values():
            slot.here = None
        self.is_here = False

    return patch.object(BlockForward, "release", release)


def messages_not_waited_for() -> AbstractContextManager:
    """What other ranks send is used as soon as it was asked for."""
    return patch.object(exchange, "_waiting", lambda received, sent, *works: lambda: received)


def rows_of_experts_not_waited_for() -> AbstractContextManager:
    """Experts compute rows that are still under way."""

    def end(self):
        found, self._under_way, self._found = self._found, None, None
        return found

    return patch.object(_Journey, "end", end)


def norm_read_in_a_hook() -> AbstractContextManager:
    """A hook reads a number of a block's output, and the queue of kernels runs dry in mid-forward."""
    whole = ParallelModel.forward_backward

    def forward_backward(self, batch):
        handles = [block.register_forward_hook(_read) for block in self.parts[0].layers.values()]
        try:
            return whole(self, batch)
        finally:
            for handle in handles:
                handle.remove()

    return patch.object(ParallelModel, "forward_backward", forward_backward)


def _read(module: nn.Module, given: object, output: Tensor) -> None:
    output.norm().item()


def batch_left_on_the_host() -> AbstractContextManager:
    """The tokens stay in host memory."""
    return patch.object(signature, "to_device", lambda tensor, device: tensor)


def pageable_batch() -> AbstractContextManager:
    """The batch is copied from memory that is not pinned, as if that could be done without waiting."""
    return patch.object(signature, "to_device", lambda tensor, device: tensor.to(device, non_blocking=True))


def pageable_state() -> AbstractContextManager:
    """The optimizer's state rests in memory that is not pinned."""
    whole = low_bit._to_host
    return patch.object(low_bit, "_to_host", lambda plain, *, pinned: whole(plain, pinned=False))
