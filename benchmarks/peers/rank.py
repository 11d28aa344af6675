"""One process of a question: train, measure, and write what was found as JSON."""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path

STEPS = 4
"""After which losses are compared."""


def python_calls(step, parts) -> int:
    """Count the Python functions that a step enters in this thread."""
    count = 0

    def seen(_frame, event, _argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        step(parts)
    finally:
        sys.setprofile(None)
    return count


def main(question: str, file: str) -> None:
    import torch
    import torch.distributed as dist

    from benchmarks.peers.problem import Question, truth

    asked = json.loads(question)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = "cuda" if torch.cuda.device_count() >= world else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    problem = Question(asked["layout"], asked["shape"], tuple(asked["options"]), rank, world, device)
    system = importlib.import_module(f"benchmarks.peers.{asked['system']}")
    try:
        step = system.build(problem)
    except NotImplementedError as refused:
        Path(file).write_text(json.dumps({"said": str(refused)}))
        return
    whole = problem.cut(problem.share(False))
    losses = [step(whole)]
    found = {"start_s": time.process_time()}
    if not asked["pairs"]:
        step(whole)
        found["peak_mib"] = (
            torch.cuda.max_memory_allocated() / 2**20
            if device == "cuda"
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        )
        Path(file).write_text(json.dumps(found))
        dist.destroy_process_group()
        return
    losses += [step(whole) for _ in range(STEPS - 1)]
    found["equal"] = abs(losses[-1] - truth(problem, False, STEPS))
    uneven_step, uneven = system.build(problem), problem.cut(problem.share(True))
    found["uneven"] = abs([uneven_step(uneven) for _ in range(STEPS)][-1] - truth(problem, True, STEPS))
    found["calls"] = python_calls(step, whole)
    seconds: dict[str, list[tuple[float, float]]] = {
        "system": [],
        "bare": [],
    }  # CPU, clock
    try:
        loops = {"system": step, "bare": importlib.import_module("benchmarks.peers.bare").build(problem)}
        loops["bare"](whole)
        found["bare_calls"] = python_calls(loops["bare"], whole)
        loops["bare"](whole)
        for number in range(asked["pairs"]):
            for name in seconds if number % 2 else reversed(seconds):
                dist.barrier()
                begun = time.process_time(), time.perf_counter()
                loops[name](whole)
                seconds[name].append((time.process_time() - begun[0], time.perf_counter() - begun[1]))
        found |= seconds
    except NotImplementedError:
        pass
    Path(file).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
