"""Which mutants are applied to ways, and in which ways they die (tests/mutants.txt)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import mutants
from .ways import Way

FILE = Path(__file__).resolve().parents[1] / "mutants.txt"
HEAD = (
    "# Written by scripts/mutants.py: mutant | questions that catch it | way."
    " The first of each is what make test runs.\n"
)
HELPERS = {"unaudited"}
DISTURBED = {"context_not_restored", "stale_after_evaluation", "skip_not_agreed", "never_skips", "bf16_reduction"}
"""They show where something else happens in a step, or in bfloat16: test_mutants says where."""


@dataclass(frozen=True)
class Kill:
    """A way in which a mutant dies, and the questions that catch it."""

    way: Way
    questions: tuple[str, ...]

    @property
    def by(self) -> str:
        return ", ".join(self.questions)


def gallery() -> list[str]:
    """Every mutant of support/mutants."""
    defined = [name for name, value in vars(mutants).items() if getattr(value, "__module__", "") == mutants.__name__]
    return [name for name in defined if name not in HELPERS]


def on_ways() -> list[str]:
    """The mutants that show in a way."""
    return [name for name in gallery() if name not in DISTURBED]


def read_kills() -> dict[str, list[Kill]]:
    found: dict[str, list[Kill]] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else ():
        if line and line[0] != "#":
            mutant, by, way = line.split(" | ")
            found.setdefault(mutant, []).append(Kill(Way.of(way), tuple(by.split(", "))))
    return found


def lines_of(kills: Mapping[str, list[Kill]]) -> str:
    return "".join(f"{mutant} | {kill.by} | {kill.way}\n" for mutant, found in kills.items() for kill in found)
