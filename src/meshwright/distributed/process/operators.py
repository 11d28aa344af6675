"""Record every operator and message of this process, in order."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.core.torch_private import tree_leaves

from .wire import WireCounter, ranks_in

Operator = tuple[str, tuple[tuple[tuple[int, ...], str], ...]]
"""An operator's name, and (shape, dtype) of the tensors that it was given and those that it made."""
Message = tuple[str, tuple[int, ...], int, float]
"""A message's operation, the ranks that take part, the bytes of its larger side, and those that this rank sends."""


class OperatorRecorder(WireCounter):
    """A recorder: ``with OperatorRecorder() as seen``; then ``seen.operators`` and ``seen.messages``, in order.

    Operators on a DTensor are recorded as those on this rank's part. What compiled code does is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Operator] = []
        self.messages: list[Message] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as such while it is recorded; torch would run it uncompiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "prim":  # queries such as prim.device
            return func(*args, **(kwargs or {}))
        given = _described((args, kwargs))  # before an operator may resize them
        made = super().__torch_dispatch__(func, types, args, kwargs)
        self.recorded.append((str(func), given + _described(made)))
        return made

    def _note(self, name: str, args: tuple) -> None:
        before = len(self.sent)
        super()._note(name, args)
        ranks = ranks_in(args)
        self.messages.extend((sent.op, ranks, sent.tensor_bytes, sent.bytes) for sent in self.sent[before:])


def _described(value: Any) -> tuple[tuple[tuple[int, ...], str], ...]:
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return tuple((tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors)
