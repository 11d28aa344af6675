"""Score judges of distributed training on cases of silent faults.

python -m silent100 [--cases FOLDER] [--only PATTERN] [--jobs N] [--json FILE] JUDGE…
python -m silent100 --prove [--cases FOLDER] [--only PATTERN]

A judge is one of losses-1e-2, losses-1e-4, norms, checksums, meshwright, traincheck, spmd-types, or any command in
quotes. For those of other packages, TRAINCHECK_PYTHON and SPMD_TYPES_PYTHON name a Python that has the package.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from .cases import CaseError, read_all
from .scorer import ask_all, plain, table

HERE = Path(__file__).parent
BESIDE = {
    "losses-1e-2": ["losses", "--bound", "1e-2", "--serve"],
    "losses-1e-4": ["losses", "--bound", "1e-4", "--serve"],
    "norms": ["norms", "--serve"],
    "checksums": ["checksums", "--serve"],
    "meshwright": ["observed", "--serve"],
    "traincheck": ["traincheck"],
    "spmd-types": ["spmd_types"],
}
"""Name of a judge that comes along -> its file in judges/ and its flags."""


def main(argv: list[str] | None = None) -> int:
    """Print each judge's table, or prove the cases; return 0 unless a case is not proven."""
    parser = argparse.ArgumentParser("python -m silent100", description="Score judges on cases of silent faults.")
    parser.add_argument("judges", nargs="*", metavar="JUDGE", help=f"{', '.join(BESIDE)}, or a command in quotes")
    parser.add_argument("--cases", type=Path, default=HERE / "cases", help="folder of cases")
    parser.add_argument("--only", default="*", help="pattern of the cases' names")
    parser.add_argument("--jobs", type=int, default=1, help="questions at a time")
    parser.add_argument("--json", type=Path, help="file for every answer")
    parser.add_argument("--prove", action="store_true", help="have each case prove itself instead")
    given = parser.parse_args(argv)
    if not given.prove and not given.judges:
        parser.error(f"name a judge: {', '.join(BESIDE)}, or a command in quotes")
    try:
        cases = read_all(given.cases, given.only)
    except CaseError as error:
        parser.error(str(error))
    if given.prove:
        from .prove import prove

        rows = [prove(case.folder) for case in cases]
        print(*map(json.dumps, rows), sep="\n", flush=True)
        return 0 if all(row["proven"] for row in rows) else 1
    answers = {}
    for judge in given.judges:
        file, *flags = BESIDE.get(judge, [""])
        command = shlex.join([sys.executable, str(HERE / "judges" / f"{file}.py"), *flags]) if file else judge
        every = []
        for asked in ask_all(cases, command, max(1, given.jobs)):
            every.append(asked)
            wrong = [mark for mark, right in asked.marks.items() if right == (mark == "false alarm")]
            marks = ", ".join(["false alarm" if mark == "false alarm" else f"not {mark}" for mark in wrong])
            print(f"{asked.case.folder.name}: {'; '.join([marks or 'right', *asked.errors])}", flush=True)
        print("\n" + table(judge, every) + "\n", flush=True)
        answers[judge] = [plain(asked) for asked in every]
    if given.json:
        given.json.write_text(json.dumps(answers, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
