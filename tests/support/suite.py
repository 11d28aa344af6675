"""Which tests run, and what they cost: a pytest plugin (tests/README.md)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from .covering import cheapest_cover

FILE = Path(__file__).resolve().parents[1] / "costs.txt"
"""Of each test that takes ``LISTED_SEC`` or more: CPU seconds, whether `make test` has it, and its name.

Written by `make test-all`.
"""
LISTED_SEC, CHEAP_SEC = 0.2, 0.02
SHARE_SEC, ALONE_SEC = 0.5, 1.5
"""CPU seconds that the cases of one test function may take in `make test`.

And the first of them, where it alone takes more.
"""
NAMES = FILE.parents[1] / ".cache" / "names.json"
"""The names of all tests by file, as they were when all were collected.

Scripts/run_tests.py chooses files for ``-k`` by them.
"""
SLOWEST = 10
KILLS, COVERS, EVERY_CASE = "kills", "covers", "every_case"
IN_TEST, IN_ALL = "test", "all"


@dataclass(frozen=True)
class Cost:
    """What a test costs (``Meter``).

    What it covers: a mutant, or what its marker says; and whether `make test` has every case of its function.
    """

    test: str
    seconds: float
    covers: tuple[str, ...] = ()
    is_kept: bool = False


def left_to_all(costs: Iterable[Cost]) -> set[str]:
    """The tests that `make test` leaves to `make test-all`.

    `make test` keeps the cheapest cases of each test function, as far as ``SHARE_SEC`` reaches, one at least if that
    takes no more than ``ALONE_SEC``; every case where the function asks for that; of the others a cheapest cover of
    what is covered by any test; and tests that have no recorded cost.
    """
    left: dict[str, Cost] = {}
    functions: dict[str, list[Cost]] = defaultdict(list)
    for cost in costs:
        functions[cost.test.partition("[")[0]].append(cost)
    for cases in functions.values():
        spent = 0.0
        for number, cost in enumerate(sorted(cases, key=_price)):
            fits = spent + cost.seconds <= SHARE_SEC or (number == 0 and cost.seconds <= ALONE_SEC)
            spent += cost.seconds
            if not fits and not cost.is_kept:
                left[cost.test] = cost
    there = {thing for cases in functions.values() for cost in cases if cost.test not in left for thing in cost.covers}
    for cost in cheapest_cover(
        sorted(left.values(), key=_price), lambda cost: cost.seconds, lambda cost: cost.covers, there
    ):
        del left[cost.test]
    return set(left)


def _price(cost: Cost) -> tuple[float, str]:
    return cost.seconds, cost.test


def read_costs(path: Path = FILE) -> dict[str, tuple[float, str]]:
    """Test -> CPU seconds, and ``IN_TEST`` or ``IN_ALL``."""
    if not path.exists():
        return {}
    lines = [line.split(" ", 2) for line in path.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    return {test: (float(seconds), tier) for seconds, tier, test in lines}


def lines_of(costs: Iterable[Cost]) -> list[str]:
    """Of the file, to two digits."""
    every = {cost.test: cost for cost in costs}
    left = left_to_all(every.values())
    listed = sorted((c.test, c.seconds) for c in every.values() if c.seconds >= LISTED_SEC or c.test in left)
    return [f"{seconds:.2g} {IN_ALL if test in left else IN_TEST} {test}" for test, seconds in listed]


def pieces(tests: Iterable[str], number: int, costs: Mapping[str, tuple[float, str]]) -> list[set[str]]:
    """The tests in so many pieces of about equal cost; those of a file stay together as far as that goes."""
    found: list[set[str]] = [set() for _ in range(number)]
    every = [(test, costs.get(test, (CHEAP_SEC, IN_TEST))[0]) for test in sorted(tests)]
    share, spent = sum(cost for _, cost in every) / number, 0.0
    for test, cost in every:
        found[min(int(spent / share), number - 1)].add(test)
        spent += cost
    return found


def is_chosen(config: pytest.Config, items: list[pytest.Item]) -> set[str]:
    """Of the tests that were collected, those that the options ask for."""
    left = {test for test, (_, tier) in read_costs().items() if tier == IN_ALL}
    names = {item.nodeid for item in items}
    tier = config.getoption("tier")
    names = names - left if tier == "test" else names & left if tier == "rest" else names
    if piece := config.getoption("piece"):
        number, of = map(int, piece.split("/"))
        names = pieces(names, of, read_costs())[number - 1]
    if only := config.getoption("only"):
        names &= set(Path(only).read_text(encoding="utf-8").splitlines())
    return names


def keep_names(items: Iterable[pytest.Item]) -> None:
    """Write ``NAMES``: all tests, and of which sources they are."""
    files: dict[str, list[str]] = defaultdict(list)
    for item in items:
        file, _, name = item.nodeid.partition("::")
        files[file].append(name)
    NAMES.parent.mkdir(exist_ok=True)
    written = NAMES.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps({"tests": digest_of_tests(), "files": files}), encoding="utf-8")
    written.replace(NAMES)


def files_with(expression: str) -> list[str]:
    """The test files in which ``-k`` may find something.

    None where that is not known, since tests changed or nothing was collected.
    """
    try:
        known = json.loads(NAMES.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    words = {word.lower() for word in re.findall(r"\w+", expression)}
    if known["tests"] != digest_of_tests() or "not" in words:
        return []
    words -= {"and", "or"}
    return [
        file
        for file, names in known["files"].items()
        if any(word in name.lower() for name in (file, *names) for word in words)
    ]


def digest_of_tests() -> str:
    """Of all Python files of the tests: names of other sources may be other names."""
    found = hashlib.sha256()
    for path in sorted(FILE.parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


class Suite:
    """Chooses tests, and closes a run with the mutants that died, the slowest tests, the sum of every folder, and how
    busy the cores were.

    Args:
        costs: a file to which each test adds its ``Cost``, as a line of JSON; None: costs are not measured.
    """

    def __init__(self, costs: Path | None = None) -> None:
        self.meter = Meter(costs) if costs is not None else None
        self.seconds: dict[str, float] = defaultdict(float)
        self.killers: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.begin = psutil.cpu_times()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if (
            config.args == ["tests"]
            and not config.getoption("keyword")
            and getattr(config, "workerinput", {}).get("workerid") in (None, "gw0")
        ):
            keep_names(items)
        chosen = is_chosen(config, items)
        left_out = [item for item in items if item.nodeid not in chosen]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.nodeid in chosen]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        if (marker := item.get_closest_marker(KILLS)) is not None:
            item.user_properties.append((KILLS, (marker.args[0], mutant_of(item, marker))))
        if self.meter is None:
            return (yield)
        with self.meter.measuring(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Any:
        if self.meter is None or fixturedef.scope == "function":
            return (yield)
        with self.meter.setting_up(fixturedef, request.node.nodeid):
            return (yield)

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
        terminalreporter.write_line(
            f"{busy(self.begin, psutil.cpu_times()):7.0%}    of {psutil.cpu_count()} cores were busy"
        )


class Meter:
    """Adds to a file what each test costs: its CPU seconds, or half of its duration where that is more (a test holds
    one of two processes, and CPU of children that were killed is in nobody's account). A module's fixtures count for
    every test that asks for them, a session's for none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fixtures: dict[tuple[str, str], float] = {}
        """(file, fixture) -> the cost of setting it up."""
        self._elsewhere = (0.0, 0.0)
        """CPU and wall seconds of the present test that went into fixtures."""

    @contextmanager
    def measuring(self, item: pytest.Item) -> Iterator[None]:
        self._elsewhere, begin = (0.0, 0.0), _spent()
        yield
        cpu, wall = (end - start - other for end, start, other in zip(_spent(), begin, self._elsewhere, strict=True))
        file, names = item.nodeid.partition("::")[0], getattr(item, "fixturenames", ())
        seconds = max(cpu, wall / 2) + sum(self._fixtures.get((file, name), 0.0) for name in names)
        cost = Cost(item.nodeid, round(seconds, 2), covered_by(item), item.get_closest_marker(EVERY_CASE) is not None)
        with self.path.open("a", encoding="utf-8") as written:
            written.write(json.dumps(asdict(cost)) + "\n")

    @contextmanager
    def setting_up(self, fixture: pytest.FixtureDef, node: str) -> Iterator[None]:
        begin = _spent()
        yield
        cpu, wall = (end - start for end, start in zip(_spent(), begin, strict=True))
        self._elsewhere = self._elsewhere[0] + cpu, self._elsewhere[1] + wall
        if fixture.scope != "session":
            self._fixtures[node.partition("::")[0], fixture.argname] = max(cpu, wall / 2)


def _spent() -> tuple[float, float]:
    """CPU seconds of this process and those below, and wall seconds."""
    return cpu_seconds(), time.monotonic()


def covered_by(item: pytest.Item) -> tuple[str, ...]:
    """The mutant that a test kills, and what its marker says that it covers."""
    mutants = [f"{marker.args[0]}: {mutant_of(item, marker)}" for marker in item.iter_markers(KILLS)]
    return (*mutants, *(str(thing) for marker in item.iter_markers(COVERS) for thing in marker.args))


def mutant_of(item: pytest.Item, marker: pytest.Mark) -> str:
    """The mutant's name: said by the marker, or the value of the parameter that it names."""
    if "mutant" in marker.kwargs:
        return str(marker.kwargs["mutant"])
    value = item.callspec.params[marker.args[1]]  # type: ignore[attr-defined]
    name = getattr(value, "__name__", str(value))
    return item.callspec.id if name == "<lambda>" else name  # type: ignore[attr-defined]


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
