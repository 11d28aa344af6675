"""Describe a rank's step as the operators that it runs and the messages that it begins and awaits, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum


class OperatorKind(StrEnum):
    """A group of operators that cost alike for each byte or FLOP."""

    PRODUCT = "product"
    ATTENTION = "attention"
    POINTWISE = "pointwise"
    INPLACE = "inplace"
    FUNCTION = "function"
    SOFTMAX = "softmax"
    STRIDED = "strided"
    REDUCTION = "reduction"
    COLUMNS = "columns"
    GATHER = "gather"
    SCATTER = "scatter"
    SORT = "sort"
    CAST = "cast"
    OPTIMIZER = "optimizer"
    VIEW = "view"
    EMPTY = "empty"
    DTENSOR = "dtensor"
    """The host's work for an operator on a DTensor, beside the operator on its local tensor."""


class Phase(StrEnum):
    """The part of a step that runs an operator: a recorded module, autograd's engine, or neither."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True)
class OperatorWork:
    """One operator on this rank.

    Attributes:
        name: torch's name, such as "aten.mm".
        moved: bytes read and written; views are neither.
        dtype: dtype of a product or of attention.
        layout: of a product: "nt", "nn" or "tn", by its transposed operand; of attention: "forward" or "backward".
        dims: of a product: rows, columns, depth, and how many products; of attention: queries, keys, head dim, and
            how many heads and rows.
        causal: whether attention leaves masked keys out.
        tensors: tensors that the operator works on one after the other.
    """

    name: str
    kind: OperatorKind
    phase: Phase
    moved: float = 0.0
    dtype: str = ""
    layout: str = ""
    dims: tuple[int, int, int, int] = (0, 0, 0, 0)
    causal: bool = False
    tensors: int = 1

    @property
    def flops(self) -> float:
        """The products' FLOPs, the masked ones left out."""
        rows, columns, depth, number = self.dims
        if self.kind is OperatorKind.PRODUCT:
            return 2.0 * rows * columns * depth * number
        passes = 5 if self.layout == "backward" else 2
        return 2.0 * passes * rows * columns * depth * number / (2 if self.causal else 1)


@dataclass(frozen=True)
class MessageBegin:
    """A message that this rank begins; its peers match it by ranks, kind, tag and order.

    Attributes:
        number: the message's number on this rank.
        kind: "all_gather", …; a message from one rank to another is "send" here and "receive" there.
        ranks: all ranks that take part, ascending; of a send or receive: source, target.
        moved: bytes of the larger side.
        tag: tells messages from one rank to another apart.
    """

    number: int
    kind: str
    ranks: tuple[int, ...]
    moved: float
    tag: int = 0

    @property
    def is_between_two(self) -> bool:
        """Whether one rank sends to another."""
        return self.kind in ("send", "receive")


@dataclass(frozen=True)
class MessageWait:
    """The place where this rank cannot go on before a message has ended."""

    number: int


Event = OperatorWork | MessageBegin | MessageWait


@dataclass(frozen=True)
class StepOfRank:
    """The events of a rank's step, in order."""

    rank: int
    events: tuple[Event, ...]

    @property
    def groups(self) -> set[tuple[int, ...]]:
        """The ranks of its messages."""
        return {event.ranks for event in self.events if isinstance(event, MessageBegin)}

    def moved_to(self, rank: int, place_of: Callable[[tuple[int, ...]], tuple[int, ...]]) -> StepOfRank:
        """Return the same step on another rank of the same kind.

        Args:
            place_of: ranks of a message here -> those of the same message there.
        """

        def moved(event: Event) -> Event:
            if not isinstance(event, MessageBegin):
                return event
            ranks = place_of(event.ranks)
            return replace(event, ranks=ranks if event.is_between_two else tuple(sorted(ranks)))

        return StepOfRank(rank, tuple(map(moved, self.events)))
