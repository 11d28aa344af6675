"""Judge layouts and techniques in all their combinations, and write the pages about them.

    python -m benchmarks.survey matrix [--cold] [--only TEXT]
        every layout in every way of computing it: docs/data/matrix.txt
    python -m benchmarks.survey composition                     every switch with every other: docs/data/composition.txt

Exit status: 0; 1 where a cell differs; 2 where no row is called TEXT; 130 after Ctrl-C (what was judged by then is
    remembered).
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

from benchmarks.survey import composition
from benchmarks.survey.cache import Cache, fingerprint, judge_all
from benchmarks.survey.matrix import WORLDS, Cell, Judged, cells
from benchmarks.survey.page import page, summary
from meshwright.distributed.process.workers import WorkerPool

ROOT = Path(__file__).resolve().parents[2]


def judge_matrix(argv: list[str], root: Path = ROOT) -> int:
    """Judge the cells that are not remembered, and write the page where no row was chosen."""
    parser = argparse.ArgumentParser(
        prog="make matrix", description="judge every layout, in every way, against one process"
    )
    parser.add_argument(
        "--cold", action="store_true", help="judge every cell, also those that were judged before (.cache/matrix)"
    )
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="rows whose name contains TEXT; docs/data/matrix.txt is not written"
    )
    args = parser.parse_args(argv)
    chosen = [cell for cell in cells() if args.only in cell.row.name]
    if not chosen:
        names = "\n  ".join(dict.fromkeys(cell.row.name for cell in cells()))
        print(f"no row has '{args.only}' in its name. There are\n  {names}", file=sys.stderr)
        return 2
    begun = time.monotonic()
    cache = Cache(root / ".cache" / "matrix", fingerprint())
    known = {} if args.cold else cache.all_known(chosen)
    print(f"{len(chosen)} cells, {len(known)} of them judged before", flush=True)
    pool = WorkerPool(max(WORLDS), threads=1)  # its processes start with the first cell that needs them
    try:
        found = judge_all(chosen, known, cache, pool, tell)
    except KeyboardInterrupt:
        print("stopped; what was judged is remembered", file=sys.stderr)
        return 130
    finally:
        pool.close()
    if not args.only:
        (root / "docs" / "data" / "matrix.txt").write_text(page(found), encoding="utf-8")
    print(f"{summary(found.values())}; {time.monotonic() - begun:.0f} s")
    return 1 if any(judged.state == "DIFFERS" for judged in found.values()) else 0


def tell(cell: Cell, judged: Judged) -> None:
    reason = f": {judged.reason}" if judged.reason else ""
    print(f"{judged.seconds:6.1f} s  {cell.name}: {judged.state}{reason}", flush=True)


def judge_composition(root: Path = ROOT) -> int:
    """Judge every pair of switches, and random combinations of more."""
    pool = WorkerPool(4, threads=1)
    found: dict[composition.Together, str] = {}
    try:
        for one in (*composition.singles(), *composition.drawn()):
            found[one] = composition.judge(one, pool)
            print(f"{one.name}: {found[one] or 'equal'}", flush=True)
    finally:
        pool.close()
    text = composition.page(found, date.today().isoformat(), version("torch").split("+")[0])
    (root / "docs" / "data" / "composition.txt").write_text(text, encoding="utf-8")
    return 1 if any(said.startswith("DIFFERS") for said in found.values()) else 0


if __name__ == "__main__":
    survey, *rest = sys.argv[1:] or [""]
    if survey == "matrix":
        sys.exit(judge_matrix(rest))
    if survey == "composition" and not rest:
        sys.exit(judge_composition())
    print(__doc__, file=sys.stderr)
    sys.exit(2)
