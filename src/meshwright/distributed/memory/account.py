"""Account for every storage that a step's operators allocate, by its owner and by the operator."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from meshwright.core.record import recall
from meshwright.core.torch_private import TorchDispatchMode
from meshwright.distributed.data.fully_sharded import parameter_groups
from meshwright.distributed.data.replicated import GradientBuckets
from meshwright.distributed.torch_private import arriving, gathered
from meshwright.distributed.weights.shards import memory_of
from meshwright.introspection.logits_tape import DeferredLogits
from meshwright.planning.memory import MemoryUse

from .live import Storages, addresses, newly_made, storage_of, tensors_in


@contextmanager
def noting_resizes(note: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call a function with each storage that Python code resizes, until dispatch modes see it."""
    resize = torch.UntypedStorage.resize_

    def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        note(storage)
        return result

    torch.UntypedStorage.resize_ = resize_and_note  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


UNSEEN = 0.01
"""Fraction of its maximum by which a kind of memory may grow before its storages' owners are looked up again."""


class MemoryAccount(TorchDispatchMode):
    """``with MemoryAccount(models, vocabulary) as account: forward and backward``, then ``account.most``.

    Every storage is followed from the operator that allocates it until it is freed, so ``peak`` is exact between two
    operators; temporary buffers inside an operator are not seen. Which storages are gradients or gathered parameters is
    looked up when a kind may have a new maximum.

    Attributes:
        most: for each kind the largest number of bytes that were live at one time. Gathered parameters, and buffers of
            a running all-gather, count as parameters; gradients of gathered parameters count as gradients; send and
            receive buffers count as communication.
        peak: bytes of each kind at the time at which all kinds together were largest.

    Args:
        models: local modules.
        vocabulary: last dims that identify logits. A dim that is also a width of the model is ignored; such logits
            then count as activations.
        optimizer: the optimizer, whose state counts from its first step on.
        in_host: kinds that rest in host memory, of parameters, sharded gradients and optimizer state; they count as
            ``MemoryUse.HOST`` and not in ``peak``.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        vocabulary: Iterable[int],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        in_host: Collection[MemoryUse] = (),
    ):
        super().__init__()
        self.most: Counter[MemoryUse] = Counter()
        self.peak: Counter[MemoryUse] = Counter()
        self._optimizer, self._in_host = optimizer, in_host
        self._parameters = [p for model in models for p in model.parameters()]
        self._buffers = [buffer for model in models for buffer in model.buffers()]
        self._groups = [group for model in models for group in parameter_groups(model)]
        self._sharded = [parameter for group in self._groups for parameter in group.fsdp_params]
        self._gradient_buckets = [
            buckets for model in models if (buckets := recall(model, GradientBuckets)) is not None
        ]
        self._shards = addresses(parameter.sharded_param for parameter in self._sharded)
        widths = {p.shape[-1] for p in self._parameters if p.dim()}
        self._vocabulary = set(vocabulary) - widths
        self._storages: Storages[MemoryUse] = Storages()
        self._patches = ExitStack()
        self._resting: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        """By address; a storage that takes a freed one's address does not rest."""
        self._gathered: set[int] = set()
        self._highest = 0

    def __enter__(self) -> Self:
        self._follow_at_rest()
        self.look()
        self._patches.enter_context(noting_resizes(self._storages.keep_size))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()
        self._follow_at_rest()
        self.look()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "prim":  # queries such as prim.device
            return func(*args, **(kwargs or {}))
        given = tensors_in((args, kwargs))
        made = func(*args, **(kwargs or {}))
        # an operator that reads FSDP's shards casts or concatenates them for an all-gather
        copies_shards = bool(self._shards) and not self._shards.isdisjoint(addresses(given))
        if func.namespace == "fsdp" or func.namespace.lstrip("_").startswith("c10d") or copies_shards:
            for tensor in (*given, *tensors_in(made)):  # send or receive buffers
                if id(storage_of(tensor)) not in self._resting:
                    self._note(tensor, MemoryUse.COMMUNICATION)
            self.look()
        elif new := newly_made(addresses(given), made):
            for tensor in new:
                is_logits = tensor.dim() > 1 and tensor.shape[-1] in self._vocabulary
                self._note(tensor, MemoryUse.LOGITS if is_logits else MemoryUse.ACTIVATIONS)
            self._take_peak()
            held = self._storages.bytes
            if any(held[kind] > (1 + UNSEEN) * self.most[kind] for kind in held):  # its owners may have changed
                self.look()
        return made

    def note_host(self, tensor: Tensor) -> None:
        """Count a tensor as one in host memory."""
        self._note(tensor, MemoryUse.HOST)

    def _note(self, tensor: Tensor, held: MemoryUse) -> None:
        if tensor.device.type != "meta" and not isinstance(tensor, DeferredLogits):  # which take no memory
            self._storages.follow(storage_of(tensor), held)

    def _take_peak(self, *, also_equal: bool = False) -> None:
        held = self._storages.bytes
        together = held.total() - held[MemoryUse.HOST]
        if together > self._highest or (also_equal and together == self._highest):
            self._highest, self.peak = together, +held
            del self.peak[MemoryUse.HOST]

    def look(self) -> None:
        """Look up which live storages are gradients and gathered parameters, and compare each kind with its maximum."""
        tensors: list[Tensor] = []  # gathered parameters, and the buffers of running all-gathers
        for group in self._groups:
            if not group.is_unsharded and (buffer := arriving(group)) is not None:
                tensors.append(buffer)
            if any(storage_of(output).nbytes() for output in group.fsdp_params[0].all_gather_outputs):
                for parameter in group.fsdp_params:
                    tensors += parameter.all_gather_outputs
                    if (whole := gathered(parameter)) is not None:
                        tensors.append(whole)
        storages = [storage_of(tensor) for tensor in tensors]
        owned = {id(storage) for storage in storages}
        for address in self._gathered - owned:  # a gathered buffer that has been read, and waits to be freed
            self._storages.change(address, MemoryUse.PARAMETERS, MemoryUse.COMMUNICATION)
        self._gathered = owned
        place = self._place(MemoryUse.GRADIENTS)
        gradients = [(storage_of(p.grad), place) for p in self._parameters if p.grad is not None]
        for parameter in self._sharded:
            whole = gathered(parameter)
            found = parameter.unsharded_accumulated_grad, None if whole is None else whole.grad
            gradients += [(storage_of(gradient), MemoryUse.GRADIENTS) for gradient in found if gradient is not None]
        for storage, held in gradients:
            if id(storage) not in owned:
                self._storages.follow(storage, held)
        for storage in storages:
            self._storages.follow(storage, MemoryUse.PARAMETERS)
        self.most |= self._storages.bytes
        self._take_peak(also_equal=True)

    def _follow_at_rest(self) -> None:
        """Follow parameters, buffers and optimizer state, which stay what they are."""
        state = [] if self._optimizer is None else tensors_in([*self._optimizer.state.values()])
        plain = [memory for tensor in state for memory in memory_of(tensor)]
        for held, tensors in (
            (MemoryUse.BUFFERS, self._buffers),
            (MemoryUse.PARAMETERS, self._parameters),
            (MemoryUse.OPTIMIZER, plain),
        ):
            for tensor in tensors:
                self._note(tensor, self._place(held))
                self._resting[id(storage_of(tensor))] = storage_of(tensor)
        for buckets in self._gradient_buckets:
            for storage in buckets.storages():
                self._storages.follow(storage, MemoryUse.GRADIENTS)
                self._resting[id(storage)] = storage

    def _place(self, held: MemoryUse) -> MemoryUse:
        return MemoryUse.HOST if held in self._in_host else held

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the state of an optimizer that has taken a step."""
        self._optimizer = optimizer
        self._follow_at_rest()
        self.look()


def dims_of_logits(vocabulary: int, ranks: int) -> set[int]:
    """Return the last dims that identify logits: the vocabulary, and a rank's shard of it on the tensor axis."""
    share = -(-vocabulary // ranks)
    return {vocabulary, share, vocabulary - share * (ranks - 1)}
