"""Verify one case in this process's copy of the library, and print what came of it as one line of JSON.

python benchmarks/faults/judge.py fault|sound|composition NUMBER
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import compositions
import library

from meshwright import Layout, MeshwrightError, verify
from meshwright.distributed.process.workers import WorkerDied, WorkerFailed
from meshwright.verification.problem import RandomBatches

ROWS, TOKENS = 4, 10


def batches(layout: Layout, vocabulary: int = 257) -> RandomBatches:
    """Rows with padding, documents and tokens without a loss, the same number for each data rank."""
    return RandomBatches(
        vocabulary, ROWS * layout.dp_replicate * layout.dp_shard, TOKENS, ("positions", "document_ids")
    )


def fault(number: int) -> Any:
    f = library.FAULTS[number]
    options: dict[str, Any] = {
        "techniques": dict(f.techniques),
        "microbatch_rows": f.microbatch_rows,
        "max_norm": f.max_norm,
    }
    return verify(f.model, f.layout, batches(f.layout), steps=2, dtypes=("float64",), **options)


def sound(number: int) -> Any:
    model, layout, techniques = library.SOUND[number]
    return verify(model, layout, batches(layout), steps=2, dtypes=("float64",), techniques=techniques)


def composition(number: int) -> Any:
    c = compositions.CASES[number]
    return verify(
        c.model,
        c.layout,
        batches(c.layout) if c.packs else None,
        steps=2,
        dtypes=("float64",),
        parallelize_fn=c.lay_out,
    )


def judge(kind: str, number: int) -> dict[str, Any]:
    """``equal``, and where it is not, the first ``place`` that differs with its error, or the ``refused`` sentence."""
    begun = time.monotonic()
    try:
        report = {"fault": fault, "sound": sound, "composition": composition}[kind](number)
    except (WorkerFailed, WorkerDied) as error:
        return {"equal": False, "crashed": str(error).strip().splitlines()[-1], "seconds": time.monotonic() - begun}
    except MeshwrightError as error:
        return {"equal": False, "refused": str(error), "seconds": time.monotonic() - begun}
    first = report.comparisons[0].first
    found = {} if first is None else {"place": first.place, "error": first.error}
    return {"equal": bool(report), **found, "seconds": time.monotonic() - begun}


if __name__ == "__main__":
    print(json.dumps(judge(sys.argv[1], int(sys.argv[2]))))
