"""Run the tests: `make test` and `make test-all`.

    python scripts/run_tests.py [pytest arguments]
        what make test has; without arguments the checks of the code too
    python scripts/run_tests.py --all [--piece K/N]
        every test, or one of N pieces
    python scripts/run_tests.py --touched COMMIT [--minutes M]
        what make test leaves out and the changes since a commit touch, as far as M minutes reach

Two pytest processes share the tests out, each with a pool of workers of its own; the checks of the code run beside
them.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIECES = 3
"""Of make test-all; each ends within an hour on two cores."""
CI_MINUTES = 5.0
"""For what is touched."""
MOST_PROCESSES = 8
NONE_CHOSEN = 5
"""Pytest's exit status."""
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
        "--durations=10",
        *ignored(),
        *arguments,
    ]
    if not any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        words = [after for before, after in pairwise(arguments) if before == "-k"]
        command += (files_with(words[0]) if len(words) == 1 else []) or ["tests"]
    return subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode


def files_with(expression: str) -> list[str]:
    """Return the test files in which ``-k`` may find something, by their names, their tests' names, and the text of
    their cases; none where that cannot be told.
    """
    words = {word.lower() for word in re.findall(r"\w+", expression)} - {"and", "or"}
    return (
        []
        if "not" in words
        else [file for file in test_files() if any(word in names_in(file, words) for word in words)]
    )


def names_in(file: str, words: set[str]) -> str:
    """Return a test file's name, its tests' names, and the text in its decorators and its module's constants."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if not any(word in text.lower() for word in words):
        return file.lower()
    nodes = ast.parse(text).body
    tests = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    said = [node for node in nodes if isinstance(node, (ast.Assign, ast.AnnAssign))]
    said += [decorator for node in tests for decorator in node.decorator_list]
    texts = [part.value for node in said for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return "\n".join([file, *(node.name for node in tests), *map(str, texts)]).lower()


def test_files() -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("*/test_*.py"))


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
    """Run all pieces, or one; behind all of them compare the files that were computed once (the ways, and what kills
    which mutant).
    """
    wanted = [piece] if piece else [f"{number}/{PIECES}" for number in range(1, PIECES + 1)]
    failed = []
    for one in wanted:
        begin = time.monotonic()
        status = pytest(f"--piece={one}", *arguments)
        minutes = (time.monotonic() - begin) / 60
        print(f"piece {one}: {'failed' if status else 'passed'}, {minutes:.0f} minutes", flush=True)
        failed += [f"piece {one}"] * (status != 0)
    for script in () if piece else ("ways.py", "mutants.py"):
        done = subprocess.run([sys.executable, str(ROOT / "scripts" / script), "--check"], cwd=ROOT, check=False)
        failed += [script] * (done.returncode != 0)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


def touched(base: str) -> list[str]:
    """Return the test files that changed since a commit, then those that import from a folder in which a source
    changed, or from a changed file of tests/support.
    """
    command = ["git", "diff", "--name-only", base, "--"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"no commit {base} is in this checkout, so nothing is known of what changed: {done.stderr.strip()}")
    changed = done.stdout.split()
    folders = {".".join(Path(file).parts[1:-1]) for file in changed if file.startswith("src/")}
    support = {Path(file).stem for file in changed if file.startswith("tests/support/")}
    names = "|".join(sorted(map(re.escape, folders))) or "-", "|".join(sorted(support)) or "-"
    imports = re.compile(rf"^from (?:(?:{names[0]})(?:\.\w+)? import|support\.(?:{names[1]}) import)", re.MULTILINE)
    own = [file for file in changed if re.fullmatch(r"tests/\w+/test_\w+\.py", file) and (ROOT / file).exists()]
    others = [file for file in test_files() if imports.search((ROOT / file).read_text(encoding="utf-8"))]
    return list(dict.fromkeys([*own, *others]))


def test_touched(base: str, minutes: float) -> int:
    files = [
        file for file in touched(base) if not file.startswith(("tests/slurm", *([] if has_gpu() else ["tests/gpu"])))
    ]
    print(f"{len(files)} test files are touched by what changed since {base}; what make test leaves out of them:")
    status = pytest("--tier=rest", f"--minutes={minutes}", *files) if files else 0
    return 0 if status == NONE_CHOSEN else status


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--piece", default="")
    parser.add_argument("--touched", metavar="COMMIT")
    parser.add_argument("--minutes", type=float, default=CI_MINUTES)
    options, arguments = parser.parse_known_args()
    if options.touched:
        return test_touched(options.touched, options.minutes)
    return test_all(options.piece, arguments) if options.all else test(arguments)


if __name__ == "__main__":
    sys.exit(main())
