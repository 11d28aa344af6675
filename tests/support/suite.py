"""Which tests run, and what they cost: a pytest plugin (tests/README.md)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

FILE = Path(__file__).resolve().parents[1] / "costs.txt"
"""CPU seconds of each test that takes ``LISTED_SEC`` or more: pieces of about equal cost are made by them."""
LISTED_SEC, CHEAP_SEC = 0.5, 0.02
SLOWEST = 10
KILLS = "kills"


def read_costs(path: Path = FILE) -> dict[str, float]:
    if not path.exists():
        return {}
    lines = [line.split(" ", 1) for line in path.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    return {test: float(seconds) for seconds, test in lines}


def pieces(tests: Iterable[str], number: int, costs: Mapping[str, float]) -> list[set[str]]:
    """The tests in so many pieces of about equal cost; those of a file stay together as far as that goes."""
    found: list[set[str]] = [set() for _ in range(number)]
    every = [(test, costs.get(test, CHEAP_SEC)) for test in sorted(tests)]
    share, spent = sum(cost for _, cost in every) / number, 0.0
    for test, cost in every:
        found[min(int(spent / share), number - 1)].add(test)
        spent += cost
    return found


def is_chosen(config: pytest.Config, items: list[pytest.Item]) -> set[str]:
    """Of the tests that were collected, those that the options ask for."""
    thorough = {item.nodeid for item in items if item.get_closest_marker("thorough")}
    names = {item.nodeid for item in items}
    tier = config.getoption("tier")
    names = names - thorough if tier == "test" else names & thorough if tier == "thorough" else names
    if piece := config.getoption("piece"):
        number, of = map(int, piece.split("/"))
        names = pieces(names, of, read_costs())[number - 1]
    if only := config.getoption("only"):
        names &= set(Path(only).read_text(encoding="utf-8").splitlines())
    return names


class Suite:
    """Chooses tests, and closes a run with the mutants that died, the slowest tests, the sum of every folder, and how busy the cores were.

    Args:
        costs: a file to which the CPU seconds of every test are added; None: they are not measured.
    """

    def __init__(self, costs: Path | None = None) -> None:
        self.costs = costs
        self.seconds: dict[str, float] = defaultdict(float)
        self.killers: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.begin = psutil.cpu_times()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = is_chosen(config, items)
        left_out = [item for item in items if item.nodeid not in chosen]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.nodeid in chosen]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        if (marker := item.get_closest_marker(KILLS)) is not None:
            item.user_properties.append((KILLS, [marker.args[0], mutant_of(item, marker)]))
        before = cpu_seconds() if self.costs else 0.0
        result = yield
        if self.costs:
            with self.costs.open("a", encoding="utf-8") as file:
                file.write(f"{cpu_seconds() - before:.2f} {item.nodeid}\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        for name, value in report.user_properties if report.when == "call" and report.passed else ():
            if name == KILLS:
                self.killers[tuple(value)].append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self.seconds) <= SLOWEST:
            return
        if self.killers:
            terminalreporter.section("mutants that died, and the tests that they died in")
            for (gallery, mutant), tests in sorted(self.killers.items()):
                terminalreporter.write_line(f"{gallery:8} {mutant:52} {', '.join(tests)}")
        terminalreporter.section("time")
        for test, seconds in sorted(self.seconds.items(), key=lambda item: -item[1])[:SLOWEST]:
            terminalreporter.write_line(f"{seconds:7.1f} s  {test}")
        folders: dict[str, list[float]] = defaultdict(list)
        for test, seconds in self.seconds.items():
            folders[test.partition("::")[0].rpartition("/")[0]].append(seconds)
        for folder, spent in sorted(folders.items()):
            terminalreporter.write_line(f"{sum(spent):7.1f} s  {folder}, {len(spent)} tests")
        terminalreporter.write_line(f"{busy(self.begin, psutil.cpu_times()):7.0%}    of {psutil.cpu_count()} cores were busy")


def mutant_of(item: pytest.Item, marker: pytest.Mark) -> str:
    """The mutant's name: said by the marker, or the value of the parameter that it names."""
    if "mutant" in marker.kwargs:
        return str(marker.kwargs["mutant"])
    return str(item.callspec.params[marker.args[1]])  # type: ignore[attr-defined]


def busy(begin: Any, end: Any) -> float:
    """The share of the machine's time in which its cores worked, whoever for."""
    spent = {name: getattr(end, name) - getattr(begin, name) for name in ("user", "nice", "system", "idle", "iowait")}
    return 1 - (spent["idle"] + spent["iowait"]) / max(sum(spent.values()), 1e-9)


def cpu_seconds() -> float:
    """CPU seconds of this process and of all below it, those that ended among them."""
    total, me = 0.0, psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
