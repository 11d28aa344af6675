"""Account for every storage that a step's operators allocate, by its owner and by the operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.torch_private import TorchDispatchMode, name_of_operator, schema_of
from meshwright.distributed.data.fully_sharded import parameter_groups
from meshwright.distributed.torch_private import arriving, gathered
from meshwright.distributed.weights.shards import memory_of
from meshwright.planning.memory.step import MemoryUse

from .live import Storages, addresses, newly_made, storage_of, stored, tensors_in

LOOKS_EVERY = 8
"""Number of operators between two counts of the live storages. Messages, FSDP2's work around them, and a possible new
maximum also cause a count."""
UNSEEN = 0.01
"""Fraction of the maximum by which a kind of memory may grow without a new count."""


class MemoryAccount(TorchDispatchMode):
    """``with MemoryAccount(models, vocabulary) as account: forward and backward``, then ``account.most``.

    Attributes:
        most: for each kind the largest number of bytes that were live at one time, between two operators. Gathered
            parameters, and buffers of a running all-gather, count as parameters; gradients of gathered parameters
            count as gradients; send and receive buffers count as communication.
        most_together: largest number of bytes of all kinds at one time, without the optimizer state.

    Args:
        models: local modules.
        vocabulary: last dims that identify logits. A dim that is also a width of the model is ignored; such logits
            then count as activations.
        looks_every: operators between two counts; by default ``LOOKS_EVERY``.
    """

    def __init__(self, models: Sequence[nn.Module], vocabulary: Iterable[int], *, looks_every: int = 0):
        super().__init__()
        self.most: Counter[MemoryUse] = Counter()
        self.most_together = 0
        self._parameters = [p for model in models for p in model.parameters()]
        self._groups = [group for model in models for group in parameter_groups(model)]
        self._shards = addresses(parameter.sharded_param for parameter in self._gathered())
        widths = {p.shape[-1] for p in self._parameters if p.dim()}
        self._vocabulary = set(vocabulary) - widths
        self._storages: Storages[MemoryUse] = Storages()
        self._seen: Counter[MemoryUse] = Counter()
        self._since: Counter[MemoryUse] = Counter()
        self._looks_every = looks_every or LOOKS_EVERY
        self._operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "prim":  # queries such as prim.device
            return func(*args, **(kwargs or {}))
        given = tensors_in((args, kwargs))
        made = func(*args, **(kwargs or {}))
        new = newly_made(addresses(given), made)
        sends = func.namespace == "fsdp" or func.namespace.lstrip("_").startswith("c10d") or self._copies_shards(given)
        if sends:
            self.note_messages([*given, *tensors_in(made)])
        else:
            for tensor in new:
                self._note(tensor, MemoryUse.LOGITS if self._is_logits(tensor) else MemoryUse.ACTIVATIONS)
        self._operators += 1
        if sends or ((_writes(func) or (new and not _allocates(func))) and self._should_look()):
            self.look()
        return made

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.look()

    def note_messages(self, tensors: Iterable[Tensor]) -> None:
        """Count these tensors as send or receive buffers."""
        for tensor in tensors:
            self._note(tensor, MemoryUse.COMMUNICATION)

    def _copies_shards(self, given: Sequence[Tensor]) -> bool:
        """Return whether an operator reads FSDP's shards: it casts or concatenates them for an all-gather."""
        return bool(self._shards) and not self._shards.isdisjoint(addresses(given))

    def _is_logits(self, tensor: Tensor) -> bool:
        return tensor.dim() > 1 and tensor.shape[-1] in self._vocabulary

    def _note(self, tensor: Tensor, held: MemoryUse) -> None:
        if tensor.device.type == "meta":  # takes no memory
            return
        self._storages.follow(tensor, held)
        self._since[held] += storage_of(tensor).nbytes()

    def _should_look(self) -> bool:
        """Return whether to count live storages: at regular intervals, and if a kind may exceed its maximum.

        Callers do not ask after an operator that only makes views: a tensor may then be between two owners.
        """
        may_be_more = (self._seen[held] + more > (1 + UNSEEN) * self.most[held] for held, more in self._since.items())
        return self._operators % self._looks_every == 0 or any(may_be_more)

    def look(self) -> None:
        """Count the live storages."""
        now: Counter[MemoryUse] = Counter()
        owned: set[int] = set()
        for held, tensors in (
            (MemoryUse.PARAMETERS, self._of_parameters()),
            (MemoryUse.GRADIENTS, self._of_gradients()),
        ):
            for address, size in stored(tensors).items():
                if address not in owned:
                    owned.add(address)
                    now[held] += size
        for address, size, held in self._storages.there():
            if address not in owned:
                now[held] += size
        self.most |= now
        self.most_together = max(self.most_together, now.total())
        self._seen, self._since = now, Counter()

    def now(self) -> Counter[MemoryUse]:
        """Return the live bytes, by kind."""
        self.look()
        return self._seen

    def take(self) -> Counter[MemoryUse]:
        """Return the largest number of bytes live at one time since the last call, by kind."""
        self.look()
        most, self.most = self.most, Counter()
        return most

    def _of_parameters(self) -> Iterator[Tensor]:
        yield from self._parameters
        yield from (
            buffer for group in self._groups if not group.is_unsharded and (buffer := arriving(group)) is not None
        )
        for parameter in self._gathered():
            yield from parameter.all_gather_outputs
            if (whole := gathered(parameter)) is not None:
                yield whole

    def _of_gradients(self) -> Iterator[Tensor]:
        yield from (p.grad for p in self._parameters if p.grad is not None)
        for parameter in self._gathered():
            whole = gathered(parameter)
            found = parameter.unsharded_accumulated_grad, None if whole is None else whole.grad
            yield from (gradient for gradient in found if gradient is not None)

    def _gathered(self) -> Iterator[Any]:
        return (parameter for group in self._groups for parameter in group.fsdp_params)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the state of an optimizer that has taken a step."""
        plain = [memory for tensor in tensors_in([*optimizer.state.values()]) for memory in memory_of(tensor)]
        self.most[MemoryUse.OPTIMIZER] = sum(stored(plain).values())


def _allocates(func: Any) -> bool:
    """Return whether an operator only allocates: its purpose is known after the first write, so no count before."""
    return func.namespace == "aten" and "empty" in name_of_operator(func)


def _writes(func: Any) -> bool:
    """Return whether an operator writes into its arguments; True if it has no schema."""
    schema = schema_of(func)
    return schema is None or schema.is_mutable


def dims_of_logits(vocabulary: int, ranks: int) -> set[int]:
    """Return the last dims that identify logits: the vocabulary, and a rank's shard of it on the tensor axis."""
    share = -(-vocabulary // ranks)
    return {vocabulary, share, vocabulary - share * (ranks - 1)}
