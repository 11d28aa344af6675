"""What the memory of a step is held for: every storage that its operators make, told apart by who holds it and by what made it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .fully_sharded import parameter_groups

LOOKS_EVERY = 8
"""Operators between two looks at what is there; messages and what FSDP2 does around them are further occasions."""


class Held(StrEnum):
    """What bytes are held for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    COMMUNICATION = "communication"


class MemoryAccount(TorchDispatchMode):
    """``with MemoryAccount(models, vocabulary) as account: forward and backward``, then ``account.most``.

    Attributes:
        most: of each kind the most bytes that were held at a time. Parameters that are gathered, or on their way, are parameters; gradients
            of gathered ones are gradients.
        most_together: the most of all kinds at a time, the optimizer's left out.

    Args:
        models: local modules.
        vocabulary: last dims by which logits are known. One that is a width of the model too tells nothing: logits are activations then.
    """

    def __init__(self, models: Sequence[nn.Module], vocabulary: Iterable[int]):
        super().__init__()
        self.most: Counter[Held] = Counter()
        self.most_together = 0
        self._parameters = [p for model in models for p in model.parameters()]
        self._groups = [group for model in models for group in parameter_groups(model)]
        widths = {p.shape[-1] for p in self._parameters if p.dim()}
        self._vocabulary = set(vocabulary) - widths
        self._made: dict[int, tuple[StorageWeakRef, Held]] = {}
        self._operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        sends = func.namespace.lstrip("_").startswith("c10d")
        made = func(*args, **(kwargs or {}))
        if sends:
            for tensor in _tensors((args, kwargs, made)):
                self._note(tensor, Held.COMMUNICATION)
        else:
            for tensor in _tensors(made):
                if _storage(tensor)._cdata not in self._made:
                    is_logits = tensor.dim() > 1 and tensor.shape[-1] in self._vocabulary
                    self._note(tensor, Held.LOGITS if is_logits else Held.ACTIVATIONS)
        self._operators += 1
        if sends or func.namespace == "fsdp" or self._operators % LOOKS_EVERY == 0:
            self.look()
        return made

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.look()

    def _note(self, tensor: Tensor, held: Held) -> None:
        storage = _storage(tensor)
        self._made[storage._cdata] = StorageWeakRef(storage), held

    def look(self) -> None:
        """Count what is there now."""
        now: Counter[Held] = Counter()
        owned: set[int] = set()
        for held, tensors in ((Held.PARAMETERS, self._of_parameters()), (Held.GRADIENTS, self._of_gradients())):
            for tensor in tensors:
                storage = _storage(tensor)
                if storage._cdata not in owned:
                    owned.add(storage._cdata)
                    now[held] += storage.nbytes()
        for address, (reference, held) in list(self._made.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._made[address]
            elif address not in owned:
                now[held] += storage.nbytes()
        self.most |= now
        self.most_together = max(self.most_together, now.total())

    def _of_parameters(self) -> Iterator[Tensor]:
        yield from self._parameters
        arriving = [getattr(group, "_all_gather_result", None) for group in self._groups if not group.is_unsharded]
        yield from (result.all_gather_output for result in arriving if result is not None)
        for parameter in self._gathered():
            yield from parameter.all_gather_outputs
            if hasattr(parameter, "_unsharded_param"):
                yield parameter._unsharded_param

    def _of_gradients(self) -> Iterator[Tensor]:
        yield from (p.grad for p in self._parameters if p.grad is not None)
        for parameter in self._gathered():
            whole = parameter._unsharded_param.grad if hasattr(parameter, "_unsharded_param") else None
            yield from (gradient for gradient in (parameter.unsharded_accumulated_grad, whole) if gradient is not None)

    def _gathered(self) -> Iterator[Any]:
        return (parameter for group in self._groups for parameter in group.fsdp_params)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the state of an optimizer that has taken a step."""
        storages = {_storage(t)._cdata: _storage(t).nbytes() for state in optimizer.state.values() for t in _tensors(state)}
        self.most[Held.OPTIMIZER] = sum(storages.values())


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()
