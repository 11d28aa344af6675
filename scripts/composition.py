#!/usr/bin/env python3
"""Compute what goes with what, and write docs/composition.md. Run by ``make composition``. Exit status 1 where something differs."""

from __future__ import annotations

import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

from meshwright.distributed.local import WorkerPool
from meshwright.verification.composition import Together, drawn, judge, page, singles

ROOT = Path(__file__).resolve().parent.parent


def main(root: Path = ROOT) -> int:
    pool = WorkerPool(4, threads=1)
    found: dict[Together, str] = {}
    try:
        for one in (*singles(), *drawn()):
            found[one] = judge(one, pool)
            print(f"{one.name}: {found[one] or 'equal'}", flush=True)
    finally:
        pool.close()
    text = page(found, date.today().isoformat(), version("torch").split("+")[0])
    (root / "docs" / "composition.md").write_text(text, encoding="utf-8")
    return 1 if any(said.startswith("DIFFERS") for said in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
