"""Tries the documented contracts of KempnerForge, NeMo AutoModel and Optimus-DL on this library, and prints what holds.

    OMP_NUM_THREADS=1 python benchmarks/contracts [--only K9,N3] [--failed]

Every item makes the calls as those systems' documents print them, on one process or on two to four gloo ranks, with
tiny models, and is compared with one plain torch process. An item ends as

    Y           the promise holds; the evidence is the largest relative error of a gradient, or what was seen
    deliberate  this library differs on purpose, as docs/coming-from.md says, and the documented behaviour was seen
    untested    needs CUDA, and there is none
    FAIL        anything else: another result, a raw error of torch or Python, a hang

The exit status is 1 where an item is FAIL.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tried

from meshwright import MeshwrightError
from meshwright.distributed.process.workers import WorkerFailed, WorkerPool

DOCUMENTS = (
    "kempner_setup",
    "kempner_functions",
    "kempner_schedules",
    "kempner_pipeline",
    "kempner_tensor",
    "automodel",
    "automodel_nvfsdp",
    "optimus",
    "optimus_shard",
)
JOB_SEC = 150.0
Outcome = tuple[str, str, float]
"""(mark, evidence, seconds)."""


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--only", default="", help="numbers of items, by commas")
    asked.add_argument("--failed", action="store_true", help="print those that are not Y alone")
    given = asked.parse_args()
    warnings.filterwarnings("ignore")
    begin, outcomes, items = time.perf_counter(), {}, {}
    with WorkerPool(4, threads=1) as pool:
        for document in DOCUMENTS:
            of = importlib.import_module(document).ITEMS.found
            items |= of
            chosen = [item for item in of.values() if not given.only or item.number in given.only.split(",")]
            by_world = defaultdict(list)
            for item in chosen:
                by_world[item.world].append(item.number)
            for world, numbers in by_world.items():
                outcomes |= outcomes_of(pool, document, world, numbers, of)
    for number in sorted(outcomes, key=lambda n: (n[0] not in "K", n[0], int(n[1:]))):
        mark, evidence, seconds = outcomes[number]
        if not given.failed or mark != "Y":
            print(f"{number:>4}  {mark:10}  {items[number].contract:86.86}  {evidence}  ({seconds:.1f} s)")
    counts = Counter(mark for mark, _, _ in outcomes.values())
    said = ", ".join(f"{counts[mark]} {mark}" for mark in ("Y", "deliberate", "untested", "FAIL"))
    print(f"{len(outcomes)} items: {said}; {time.perf_counter() - begin:.0f} s")
    return 1 if counts["FAIL"] else 0


def outcomes_of(
    pool: WorkerPool, document: str, world: int, numbers: list[str], items: dict[str, tried.Item]
) -> dict[str, Outcome]:
    """Of all these items, which share ranks; those behind one that failed are tried in a job of their own."""
    found: dict[str, Outcome] = {}
    while left := [number for number in numbers if number not in found]:
        try:
            ranks = pool.run(tried.attempt, document, left, world=world, timeout=JOB_SEC)
        except WorkerFailed as failed:
            if not isinstance(error := failed.error, tried.ItemFailed):
                found |= {number: ("FAIL", " ".join(str(failed).split())[-400:], 0.0) for number in left}
                continue
            found[error.number] = ("FAIL", f"rank {failed.rank}: {error.text}", 0.0)
            ranks = [error.before]
        except MeshwrightError as error:
            if len(left) == 1:
                found[left[0]] = ("FAIL", str(error), 0.0)
            else:
                for number in left:
                    found |= outcomes_of(pool, document, world, [number], items)
            continue
        for each in zip(*ranks, strict=True):
            found[each[0][0]] = _joined(items[each[0][0]], [evidence for _, evidence, _ in each], each[0][2])
    return found


def _joined(item: tried.Item, evidence: list[object], seconds: float) -> Outcome:
    errors = [value for value in evidence if isinstance(value, float)]
    text = f"gradients within {max(errors):.1g}" if errors else str(evidence[0])
    return ("deliberate", f"{item.reason}: {text}", seconds) if item.reason else ("Y", text, seconds)


if __name__ == "__main__":
    sys.exit(main())
