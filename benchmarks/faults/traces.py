"""Faults in a copy of the library that trains, compared with a trace of one process that the library as it is wrote."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library import GRADIENT

PLAIN = {"dp_shard": 2}
SOUND = (
    PLAIN,
    {"dp_replicate": 2, "dp_shard": 1},
    {"dp_shard": 1, "tp": 2},
    {"dp_shard": 1, "pp": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "pp": 2},
    {"dp_replicate": 2, "dp_shard": 2},
)
DDP, TP, PP, HSDP = SOUND[1], SOUND[2], SOUND[3], SOUND[6]


@dataclass(frozen=True)
class Fault:
    """See ``library.Fault``."""

    what: str
    file: str
    old: str
    new: str
    layout: dict[str, int]
    where: str


FAULTS = [
    Fault(
        "AdamW divides by another epsilon",
        "training/optimizer.py",
        "return BuiltOptimizer(kind(kept, lr=lr, **options, **flags), implementation, note)",
        "return BuiltOptimizer(kind(kept, lr=lr, **{**options, 'eps': 1e-4}, **flags), implementation, note)",
        PLAIN,
        r"parameter [\w.]+ after step 1",
    ),
    Fault(
        "norms are decayed too",
        "distributed/optimizer/parameter_groups.py",
        '{"weight_decay": weight_decay if key else 0.0}',
        '{"weight_decay": 100 * weight_decay}',
        PLAIN,
        r"parameter [\w.]+ after step 1",
    ),
    Fault(
        "the rate is the next step's",
        "training/optimizer.py",
        "        rate = self(step)\n",
        "        rate = self(step + 1)\n",
        PLAIN,
        r"parameter [\w.]+ after step 1",
    ),
    Fault(
        "gradients are clipped to a tenth less",
        "distributed/parallel_model.py",
        "max_norm / (norm + EPSILON))",
        "0.9 * max_norm / (norm + EPSILON))",
        HSDP,
        r"parameter [\w.]+ after step [12]",
    ),
    Fault(
        "data ranks read the same rows",
        "data/loader.py",
        "_BatchReader(samples, rank * rows, ",
        "_BatchReader(samples, 0 * rows, ",
        PLAIN,
        "batch",
    ),
    Fault(
        "a norm is each stage's own",
        "distributed/optimizer/grad_clip.py",
        "    if not over:\n        return norm\n",
        "    return norm\n",
        PP,
        "gradient norm of step 1",
    ),
    Fault(
        "gradients of whole norms are a rank's summands",
        "distributed/tensor/layers.py",
        "    _sum(places, group)\n    for parameter, earlier",
        "    for parameter, earlier",
        TP,
        rf"{GRADIENT}[\w.]*norm\.weight",
    ),
    Fault(
        "sequences are gathered in another order of ranks",
        "distributed/exchange/ranks.py",
        "parts.transpose(0, 1).reshape(",
        "parts.flip(0).transpose(0, 1).reshape(",
        TP,
        r"output of layers\.0\.attention(\.wo)? \(forward\)",
    ),
    Fault(
        "replicas' gradients are halved",
        "distributed/data/replicated.py",
        "future.value()[0])",
        "future.value()[0] / group.size())",
        DDP,
        GRADIENT,
    ),
    Fault(
        "the gradient that comes from the next stage is halved",
        "distributed/pipeline/run.py",
        "self._scaled(kept.left) if gradient is None else gradient)",
        "self._scaled(kept.left) if gradient is None else gradient * 0.5)",
        PP,
        r"gradient of layers\.\d's output \(backward\)",
    ),
]


class Runs:
    """Short runs of one config.

    Args:
        copy: whose sources they run.
        folder: for data, runs and the trace.
    """

    def __init__(self, copy: Any, folder: Path):
        self.copy, self.folder, self._n = copy, folder, 0
        draw, data = random.Random(0), folder / "text.txt"
        data.write_text("\n".join(" ".join(f"w{draw.randint(0, 99)}" for _ in range(60)) for _ in range(200)))
        self.config = {
            "steps": 6,
            "model.size": "debug",
            "model.n-layers": 4,
            "data.source": data,
            "data.cache": folder / "cache",
            "data.seq-len": 32,
            "batch.global-batch": 8,
            "optimizer.max-norm": 0.3,
            "schedule.warmup-steps": 2,
            "validation.every": 0,
            "checkpoint.every": 0,
            "logging.tensorboard": "off",
            "sample.tokens": 0,
        }
        self.trace = folder / "reference.trace"
        done = copy.python("-m", "meshwright", "verify", *self._flags({}), "--write-trace", self.trace)
        if done.returncode:
            raise SystemExit(f"no trace was written: {done.stderr}")

    def _flags(self, changes: dict[str, Any]) -> list[str]:
        self._n += 1
        return [
            f"--{key}={value}"
            for key, value in (self.config | changes | {"out": self.folder / f"runs-{self._n}"}).items()
        ]

    def check(self, layout: dict[str, int], copy: Any = None) -> dict[str, Any]:
        """A run on the layout (of another copy), compared with the trace; see ``judge.judge``."""
        world = 1
        for size in layout.values():
            world *= size
        changes = {f"layout.{axis.replace('_', '-')}": size for axis, size in layout.items()} | {"process.count": world}
        done = (copy or self.copy).python(
            "-m", "meshwright", "train", *self._flags(changes), "--check-trace", self.trace
        )
        said = done.stdout + done.stderr
        if "equal within rounding" in said and done.returncode == 0:
            return {"equal": True}
        if found := re.search(r"first differs at (.*?): error", said):
            return {"equal": False, "place": found[1]}
        if done.returncode in (2, 3):
            return {"equal": False, "refused": done.stderr.strip()}
        return {"crashed": (said.strip().splitlines() or ["said nothing"])[-1]}
