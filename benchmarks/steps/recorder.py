"""Record operators, messages and waits as torch dispatches them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.core.torch_private import tree_leaves
from meshwright.distributed.memory.live import storage_of
from meshwright.distributed.process.absent_peers import WireCounter, name_of_operator, ranks_in

from .facts import work_of
from .operators import Event, MessageBegin, MessageWait, OperatorKind, OperatorWork, Phase

MADE_UP = 2.0
"""Number that is read of a tensor without values."""
MESSAGES = ("c10d", "_c10d_functional")


class StepRecorder(WireCounter):
    """A recorder: ``with StepRecorder() as seen``; then ``seen.events``.

    A number that the host reads of a tensor without values is made up.

    Attributes:
        phase: what runs operators that are not recorded by autograd.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.phase = Phase.STEP
        self._works: dict[int, tuple[Any, int]] = {}
        self._storages: dict[int, tuple[Any, int]] = {}
        self._patched: dict[type, Callable[..., Any]] = {}
        self._number = 0

    def __exit__(self, *error: Any) -> Any:
        for kind, wait in self._patched.items():
            kind.wait = wait  # type: ignore[attr-defined]
        self._patched.clear()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            title = f"dtensor.{name_of_operator(func)}"
            self.events.append(OperatorWork(title, OperatorKind.DTENSOR, self._phase))
            return NotImplemented
        if func.namespace in MESSAGES:
            return self._message(func, types, args, kwargs)
        if name_of_operator(func) == "_local_scalar_dense":
            self._operator(func, args, {}, None)
            return self._scalar(func, args, kwargs)
        made = super().__torch_dispatch__(func, types, args, kwargs)
        self._operator(func, args, kwargs or {}, made)
        return made

    def _operator(self, func: Any, args: tuple, kwargs: dict, made: Any) -> None:
        if (work := work_of(func, (*args, *kwargs.values()), made, self._phase)) is not None:
            self.events.append(work)

    @property
    def _phase(self) -> Phase:
        return Phase.FORWARD if torch.is_grad_enabled() else self.phase

    def _scalar(self, func: Any, args: tuple, kwargs: dict | None) -> Any:
        with suppress(Exception):  # a tensor without values; some are known by how they were made
            return func(*args, **(kwargs or {}))
        dtype = args[0].dtype
        return MADE_UP if dtype.is_floating_point else dtype != torch.bool and int(MADE_UP)

    # --- messages

    def _message(self, func: Any, types: Any, args: tuple, kwargs: dict | None) -> Any:
        name = name_of_operator(func)
        if name == "wait_tensor":
            self._await_storage(args[0])
            return func(*args, **(kwargs or {}))
        before = len(self.sent)
        made = super().__torch_dispatch__(func, types, args, kwargs)
        begun = [self.begin(*each) for each in self._begun(name, args, before)]
        for leaf in tree_leaves(made):
            if begun and isinstance(leaf, Tensor):
                self._storages[id(storage_of(leaf))] = storage_of(leaf), begun[-1]
            elif begun and isinstance(leaf, torch.ScriptObject):
                self._follow(leaf, begun)
        return made

    def _begun(self, name: str, args: tuple, before: int) -> list[tuple[str, tuple[int, ...], float, int]]:
        ranks, here = ranks_in(args), dist.get_rank()
        if name == "recv_":
            source, tag = ranks[args[2]], args[3]
            return [("receive", (source, here), float(_size(args[0])), tag)]
        if name == "send":
            return [("send", (here, ranks[args[2]]), float(_size(args[0])), args[3])]
        return [(sent.op, tuple(sorted(ranks)), float(sent.tensor_bytes), 0) for sent in self.sent[before:]]

    def begin(self, kind: str, ranks: tuple[int, ...], moved: float, tag: int = 0) -> int:
        """Note a message that begins here, and return its number."""
        self._number += 1
        self.events.append(MessageBegin(self._number, kind, ranks, moved, tag))
        return self._number

    def wait(self, number: int) -> None:
        """Note that a message is awaited here."""
        self.events.append(MessageWait(number))

    def _follow(self, boxed: torch.ScriptObject, numbers: list[int]) -> None:
        """Note the number of a work, and watch when Python waits for it."""
        with suppress(RuntimeError, TypeError):  # a script object of another kind
            work: Any = dist.Work.unbox(boxed)  # type: ignore[attr-defined]
            self._works[id(work)] = work, numbers[-1]
            self._watch(type(work))

    def _watch(self, kind: type) -> None:
        if kind in self._patched:
            return
        wait: Any = kind.wait  # type: ignore[attr-defined]
        self._patched[kind] = wait

        def noting(work: Any, *args: Any, **kwargs: Any) -> Any:
            held, number = self._works.get(id(work), (None, 0))
            if held is work:
                self.wait(number)
            return wait(work, *args, **kwargs)

        kind.wait = noting  # type: ignore[attr-defined]

    def _await_storage(self, tensor: Tensor) -> None:
        _, number = self._storages.get(id(storage_of(tensor)), (None, 0))
        if number:
            self.wait(number)


def _size(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
