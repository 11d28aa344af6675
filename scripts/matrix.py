#!/usr/bin/env python3
"""Judge every cell of the matrix of layouts, and write docs/matrix.md. Run by ``make matrix ARGS="..."``.

    --cold        judge every cell, also those that were judged before (.cache/matrix)
    --only TEXT   rows whose name contains TEXT, such as "dp_shard=4" or "compile"; the page is not written

Exit status: 0; 1 where a cell differs; 2 where no row is called that; 130 after Ctrl-C (what was judged by then is remembered).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from meshwright.distributed.local import WorkerPool
from meshwright.verification.matrix import WORLDS, Cell, Judged, cells
from meshwright.verification.matrix_cache import Cache, fingerprint, judge_all
from meshwright.verification.matrix_page import page, summary

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="make matrix", description="judge every layout, in every way, against one process")
    parser.add_argument("--cold", action="store_true", help="judge every cell, also those that were judged before")
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose name contains TEXT; docs/matrix.md is not written")
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
        (root / "docs" / "matrix.md").write_text(page(found), encoding="utf-8")
    print(f"{summary(found.values())}; {time.monotonic() - begun:.0f} s")
    return 1 if any(judged.state == "DIFFERS" for judged in found.values()) else 0


def tell(cell: Cell, judged: Judged) -> None:
    reason = f": {judged.reason}" if judged.reason else ""
    print(f"{judged.seconds:6.1f} s  {cell.name}: {judged.state}{reason}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
