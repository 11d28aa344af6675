"""Which tests `make test` has, and which mutants died: a pytest plugin (tests/README.md)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

FAST, FIRST, ALL = TIERS = ("fast", "first", "all")
"""Markers: `make test` has every case, the first case (or that which the marker names), or none."""
KILLS = "kills"


def tier_of(item: pytest.Item) -> str:
    """Return the nearest marker, a case's own before its function's and its file's; without one, ``FAST`` in
    tests/unit, and ``FIRST`` where tests start processes. A case that ``FIRST`` names is ``FAST``, its neighbours are
    ``ALL``.
    """
    call = getattr(item, "callspec", None)
    marks = [mark for mark in (*getattr(call, "marks", ()), *item.iter_markers()) if mark.name in TIERS]
    if not marks:
        return FAST if item.nodeid.startswith("tests/unit/") else FIRST
    return (FAST if call.id in marks[0].args else ALL) if call and marks[0].args else marks[0].name


def in_make_test(items: Iterable[pytest.Item]) -> set[str]:
    """Return the names of the tests that `make test` has. A function that applies mutants keeps the first case of each,
    whatever its markers.
    """
    found: set[str] = set()
    begun: set[tuple[str, ...]] = set()
    for item in items:
        tier, mutant = tier_of(item), killed_by(item)
        group = (item.nodeid.partition("[")[0], *mutant)
        if tier == FAST or (group not in begun and (tier == FIRST or mutant)):
            found.add(item.nodeid)
            begun.add(group)
    return found


def is_chosen(items: list[pytest.Item], tier: str, piece: str) -> list[bool]:
    """Return which of the collected tests the options ask for."""
    fast = in_make_test(items)
    number, of = map(int, (piece or "1/1").split("/"))
    return [
        (tier == "all" or (item.nodeid in fast) == (tier == "test")) and position % of == number - 1
        for position, item in enumerate(items)
    ]


def killed_by(item: pytest.Item) -> tuple[str, str] | tuple[()]:
    """Return gallery and name of the mutant that a test applies: given by the marker, or the value of the parameter
    that the marker names.
    """
    marker = item.get_closest_marker(KILLS)
    if marker is None:
        return ()
    if "mutant" in marker.kwargs:
        return marker.args[0], str(marker.kwargs["mutant"])
    value = item.callspec.params[marker.args[1]]  # type: ignore[attr-defined]
    name = getattr(value, "__name__", str(value))
    return marker.args[0], item.callspec.id if name == "<lambda>" else name  # type: ignore[attr-defined]


class Suite:
    """Chooses tests, and closes a run with the mutants that died.

    Args:
        minutes: tests that begin later are skipped; None: no limit.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self.minutes = minutes
        self.end = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
        self.killers: dict[tuple[str, str], list[str]] = defaultdict(list)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = is_chosen(items, config.getoption("tier"), config.getoption("piece"))
        if not all(chosen):
            config.hook.pytest_deselected(items=[item for item, is_in in zip(items, chosen, strict=True) if not is_in])
            items[:] = [item for item, is_in in zip(items, chosen, strict=True) if is_in]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self.end:
            pytest.skip(f"the {self.minutes:g} minutes of this run are over")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        if mutant := killed_by(item):
            item.user_properties.append((KILLS, mutant))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "call" and report.passed else ():
            if name == KILLS:
                self.killers[tuple(value)].append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.killers:
            terminalreporter.section("mutants that died, and the tests that they died in")
            for (gallery, mutant), tests in sorted(self.killers.items()):
                terminalreporter.write_line(f"{gallery:8} {mutant:52} {', '.join(tests)}")
