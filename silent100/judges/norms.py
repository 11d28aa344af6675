"""Judge by the norm of all gradients, as every optimizer finds them at its step."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from forks import finish, serve
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

PLACE = "SILENT100_NORMS"
BOUND = 1e-4
"""Relative difference of norms from which they are called different."""
Step = list[tuple[int, float]]
"""Elements and the sum of squares of each parameter's gradient on a rank."""


def note(optimizer: Optimizer, *_: object) -> None:
    """Write a line for the step that begins, on this rank."""
    if PLACE in os.environ:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        local = [getattr(each, "_local_tensor", each).detach() for each in gradients]
        line = [(each.numel(), float(each.double().abs().square().sum())) for each in local if not each.is_sparse]
        with open(os.path.join(os.environ[PLACE], os.environ.get("RANK", "0")), "a") as file:
            file.write(json.dumps(line) + "\n")


@functools.cache
def steps(command: str, keep: str) -> list[list[Step]]:
    """Run a command; return each rank's steps."""
    folder = tempfile.mkdtemp(dir=keep)
    os.environ[PLACE] = folder
    finish(command, folder, os.devnull)
    return [[*map(json.loads, file.read_text().splitlines())] for file in sorted(Path(folder).iterdir())]


def norm(ranks: list[Step], one: Step) -> float | None:
    """Return the square of the norm over ranks: replicas count once, and parts add up; None if it cannot be told."""
    if all(len(rank) == len(one) for rank in ranks):
        found = 0.0
        for (elements, _), *every in zip(one, *ranks, strict=True):
            is_whole = every[0][0] == elements
            found += every[0][1] if is_whole else sum(square for _, square in every)
        return found
    whole, held = (sum(elements for elements, _ in step) for step in (one, [row for rank in ranks for row in rank]))
    return sum(square for rank in ranks for _, square in rank) if whole <= held < 1.1 * whole else None


def asked(one: str, many: str, keep: str) -> dict[str, Any]:
    """Answer with the first step whose norms differ."""
    theirs, mine = steps(one, keep), steps(many, keep)
    if len(theirs) != 1 or not mine:
        return {"error": "no optimizer of torch steps"}
    for number, (alone, *ranks) in enumerate(zip(theirs[0], *mine, strict=False), 1):
        found = norm(ranks, alone)
        if found is None:
            return {"error": "ranks hold parameters of which neither replicas nor parts are known"}
        if not abs(found**0.5 - (known := sum(square for _, square in alone) ** 0.5)) <= BOUND * known:
            return {"verdict": "fault", "place": ".+", "step": number}
    return {"verdict": "sound"}


if __name__ == "__main__":
    register_optimizer_step_pre_hook(note)
    serve(asked)
