"""Describe how a region runs on one of several ranks that share its groups: counts and arguments that change."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class LocalNumber:
    """An attribute of a module that counts something sharded: ``whole`` in all, ``local`` on a rank.

    ``name`` may have two parts, such as config.n_heads: an attribute of an object that the module holds.
    """

    module: str
    name: str
    whole: int
    local: int

    def of(self, whole: int) -> int:
        """Return a rank's count in a model that counts ``whole`` (the measured one may be a small copy)."""
        return whole * self.local // self.whole


@dataclass(frozen=True)
class LocalArgument:
    """A tensor argument of the container of which a rank takes its share of a dim.

    ``by_row``: the rows of the batch lie along that dim too, outermost.
    """

    key: int | str
    dim: int
    by_row: bool


@dataclass(frozen=True)
class LocalForm:
    """The changes with which a region runs on one of several ranks.

    Attributes:
        hidden: arguments of the container that its producers take unchanged and no other module reads; else none.
        numbers, arguments: the numbers and arguments that change while the region runs.
        narrow: what stands in for ``hidden`` has a rank's share of the features: the region divides their number by
            its heads (``C // self.n_head``).
        behind: arguments with the shape of ``hidden`` that are read behind the last layer alone, such as what a module
            adds to its output.
    """

    hidden: tuple[int | str, ...] = ()
    numbers: tuple[LocalNumber, ...] = ()
    arguments: tuple[LocalArgument, ...] = ()
    narrow: bool = False
    behind: tuple[int | str, ...] = ()


@contextmanager
def counting_locally(numbers: list[tuple[nn.Module, LocalNumber]]) -> Iterator[None]:
    """Give modules their sizes on this rank inside; outside, they keep the model's.

    A config object is replaced by a changed copy, and never written to.
    """
    kept: list[tuple[nn.Module, str, Any]] = []
    try:
        for module, number in numbers:
            name, _, rest = number.name.partition(".")
            before = getattr(module, name)
            kept.append((module, name, before))
            value: Any = before
            if rest:
                value = copy.copy(before)
                # configs of transformers guard attributes that differ by layer
                held = vars(before)[rest] if rest in vars(before) else getattr(before, rest)
                setattr(value, rest, number.of(held))
            else:
                value = number.of(before)
            setattr(module, name, value)
        yield
    finally:
        for module, name, before in reversed(kept):
            setattr(module, name, before)


def share_of(tensor: Tensor, argument: LocalArgument, rows: int, rank: int, ranks: int) -> Tensor:
    """Return one rank's share of a tensor argument along its dim."""
    if not argument.by_row:
        return tensor.chunk(ranks, dim=argument.dim)[rank]
    split = tensor.unflatten(argument.dim, (rows, -1))
    return split.chunk(ranks, dim=argument.dim + 1)[rank].flatten(argument.dim, argument.dim + 1)
