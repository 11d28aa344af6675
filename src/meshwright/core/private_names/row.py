"""Describe a name that another library keeps private, and that code of this package reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.core.host import TESTED, Range, installed, numbers

EVERYTHING = "everything"
"""``needed_by`` of the names without which ``meshwright.distributed`` cannot be imported."""


@dataclass(frozen=True)
class PrivateName:
    """One private name.

    Attributes:
        path: dotted path from the library's import name; its last part may be an attribute that a method sets.
        needed_by: what stops working without the name, in a user's words.
        until: the public way that would replace it.
        seen: oldest and newest release of the library in which the name was found.
        documented: the library's documentation names it.
        cuda_only: builds of torch without CUDA lack it.
    """

    path: str
    needed_by: str
    until: str
    seen: Range = TESTED["torch"]
    documented: bool = False
    cuda_only: bool = False

    @property
    def package(self) -> str:
        """The library's import name, under which its metadata is found too."""
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    def is_expected(self) -> bool:
        """Return whether the installed release should have the name: neither older nor known to have dropped it."""
        here = installed(self.package)
        if here is None or self.seen.is_older(here):
            return False
        tested = TESTED.get(self.package)
        was_dropped = tested is not None and numbers(self.seen.newest) < numbers(tested.newest)
        return not (was_dropped and self.seen.is_newer(here))


def names_in(owner: str, *rows: tuple[str, str, str], **common: Any) -> tuple[PrivateName, ...]:
    """Return rows of one module or class from (name, needed_by, until) each."""
    return tuple(PrivateName(f"{owner}.{name}", needed_by, until, **common) for name, needed_by, until in rows)
