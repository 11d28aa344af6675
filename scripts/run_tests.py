"""Run the tests: `make test` and `make test-all`.

    python scripts/run_tests.py [pytest arguments]
        what make test has; without arguments the checks of the code too
    python scripts/run_tests.py --all [--piece K/N]
        every test, or one of N pieces; writes tests/costs.txt when all are green
    python scripts/run_tests.py --measure FILE...
        every test of new or changed files; writes their lines of tests/costs.txt when all are green
    python scripts/run_tests.py --touched [--minutes M]
        what make test leaves out and the changes since the last whole run touch

Two pytest processes share the tests out, each with a pool of workers of its own; the checks of the code run beside
them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from datetime import date
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.suite import Cost, files_with, lines_of  # noqa: E402

COSTS, TOUCHED = ROOT / ".cache" / "costs.txt", ROOT / ".cache" / "touched.txt"
PIECES = 3
"""Of make test-all; each ends within an hour on two cores."""
CI_MINUTES = 5.0
"""For what is touched."""
MOST_PROCESSES = 8
BIN = Path(sys.executable).parent
CHECKS = {
    "lint": [BIN / "ruff", "check", "."],
    "format": [BIN / "ruff", "format", "--check", "."],
    "import contract": [BIN / "lint-imports"],
    "types": [BIN / "pyright", "--pythonpath", sys.executable],
    "wheel": [sys.executable, "scripts/check_wheel.py"],
}


class Checks(threading.Thread):
    """The checks of the code, one after the other; what fails is printed whole."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.failed: list[str] = []

    def run(self) -> None:
        for name, command in CHECKS.items():
            begin = time.monotonic()
            done = subprocess.run(
                list(map(str, command)), cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
            text = f"\n{done.stdout}{done.stderr}" if done.returncode else ""
            print(
                f"\ncheck: {name}: {'FAILED' if done.returncode else 'well'}, {time.monotonic() - begin:.0f} s{text}",
                flush=True,
            )
            self.failed += [name] * (done.returncode != 0)


def pytest(*arguments: str) -> int:
    """Run the tests in as many processes as the machine has cores, two at least; pytest's exit status."""
    processes = max(2, min(os.cpu_count() or 1, MOST_PROCESSES))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        str(processes),
        "--dist",
        "worksteal",
        *ignored(),
        *arguments,
    ]
    if not any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        words = [after for before, after in pairwise(arguments) if before == "-k"]
        command += (files_with(words[0]) if len(words) == 1 else []) or ["tests"]
    return subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode


def ignored() -> list[str]:
    return ["--ignore=tests/slurm", *([] if has_gpu() else ["--ignore=tests/gpu"])]


def environment() -> dict[str, str]:
    """One thread for each process.

    And what is compiled to bytecode is kept, or hundreds of processes would compile the package anew.
    """
    return {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | {
        "OMP_NUM_THREADS": "1"
    }


def has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


def test(arguments: list[str]) -> int:
    if arguments:
        return pytest("--tier=test", *arguments)
    checks = Checks()
    checks.start()
    status = pytest("--tier=test")
    checks.join()
    if checks.failed:
        print(f"checks that failed: {', '.join(checks.failed)}")
    return status or bool(checks.failed)


def test_all(piece: str, arguments: list[str]) -> int:
    """All pieces, or one; behind all of them the files are compared that were computed once (the ways, and what kills
    which mutant), and costs are kept.
    """
    wanted = [piece] if piece else [f"{number}/{PIECES}" for number in range(1, PIECES + 1)]
    COSTS.parent.mkdir(exist_ok=True)
    COSTS.unlink(missing_ok=True)
    failed = []
    for one in wanted:
        begin = time.monotonic()
        status = pytest(f"--piece={one}", f"--costs={COSTS}", *arguments)
        print(
            f"piece {one}: {'failed' if status else 'passed'}, {(time.monotonic() - begin) / 60:.0f} minutes",
            flush=True,
        )
        failed += [f"piece {one}"] * (status != 0)
    if not piece:
        for script in ("ways.py", "mutants.py"):
            done = subprocess.run([sys.executable, str(ROOT / "scripts" / script), "--check"], cwd=ROOT, check=False)
            failed += [script] * (done.returncode != 0)
        if not failed and not arguments:
            keep_costs()
            # what another test had computed before is paid by whoever comes first: so those of make test are measured
            # by themselves too
            if pytest("--tier=test", f"--costs={COSTS}") == 0:
                keep_costs()
            else:
                failed.append("the tests of make test by themselves")
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


def keep_costs() -> None:
    """Write tests/costs.txt: what each test costs, and which tests make test has."""
    from touched import BASE, FILE

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    head = [
        "# Written by make test-all: CPU seconds; which has it, make test or make test-all; the test.",
        f"{BASE}{commit}, on {date.today()}",
    ]
    FILE.write_text("\n".join([*head, *lines_of(found_costs())]) + "\n", encoding="utf-8")


def measure(files: list[str]) -> int:
    """Run every test of some files, and replace their lines of tests/costs.txt."""
    from touched import FILE

    COSTS.parent.mkdir(exist_ok=True)
    COSTS.unlink(missing_ok=True)
    status = pytest("--tier=all", f"--costs={COSTS}", *files)
    if status == 0:
        others = [
            line
            for line in FILE.read_text(encoding="utf-8").splitlines()
            if not line.split("::")[0].endswith(tuple(files))
        ]
        head = [line for line in others if line.startswith("#")]
        lines = [*others[len(head) :], *lines_of(found_costs())]
        FILE.write_text(
            "\n".join([*head, *sorted(lines, key=lambda line: line.split(" ", 2)[2])]) + "\n", encoding="utf-8"
        )
    return status


def found_costs() -> list[Cost]:
    """The costs of the tests that ran, of those that ran twice the larger."""
    found = [json.loads(line) for line in COSTS.read_text(encoding="utf-8").splitlines()]
    costs: dict[str, Cost] = {}
    for cost in (Cost(**one | {"covers": tuple(one["covers"])}) for one in found):
        if cost.test not in costs or cost.seconds > costs[cost.test].seconds:
            costs[cost.test] = cost
    return list(costs.values())


def test_touched(minutes: float) -> int:
    """What make test leaves to make test-all, as far as it is touched by changes and fits into the time."""
    from touched import FILE, touched

    if not FILE.exists():
        print("make test-all has recorded no whole run yet (tests/costs.txt): nothing tells what changed since")
        return 0
    command = [sys.executable, "-m", "pytest", "tests", "--tier=rest", "--collect-only", "-q", *ignored()]
    listed = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True).stdout
    chosen, left = touched([line for line in listed.splitlines() if "::" in line], 60 * minutes * 2)
    print(
        f"{len(chosen)} tests of make test-all are touched by what changed since it was last green; {left} more do"
        f" not fit into the time"
    )
    if not chosen:
        return 0
    TOUCHED.parent.mkdir(exist_ok=True)
    TOUCHED.write_text("\n".join(chosen), encoding="utf-8")
    return pytest("--tier=rest", f"--only={TOUCHED}")


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--piece", default="")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--touched", action="store_true")
    parser.add_argument("--minutes", type=float, default=CI_MINUTES)
    options, arguments = parser.parse_known_args()
    if options.touched:
        return test_touched(options.minutes)
    if options.measure:
        return measure(arguments)
    return test_all(options.piece, arguments) if options.all else test(arguments)


if __name__ == "__main__":
    sys.exit(main())
