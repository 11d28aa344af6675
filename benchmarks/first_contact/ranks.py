"""Several ranks on one device, their messages by gloo: NCCL refuses two ranks on one GPU, gloo copies through the host.

Which collectives gloo carries for tensors on the device is tried first, each in processes of its own; a layout that
needs one that it does not is recorded as "not carried by gloo".
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .child import Outcome as Said
from .machine import SkippedError, machine
from .problem import Problem, laid_out, limits
from .results import PASSED

FIRST_START = 60.0
"""Seconds in which ranks find each other and answer; CUDA starts in each of them."""


def _all_reduce(rank: int, own: Callable[[int, int], Tensor]) -> bool:
    x = own(rank, 4)
    dist.all_reduce(x)
    return bool((x == own(0, 4) + own(1, 4)).all())


def _broadcast(rank: int, own: Callable[[int, int], Tensor]) -> bool:
    x = own(rank, 4)
    dist.broadcast(x, 0)
    return bool((x == own(0, 4)).all())


def _all_gather(rank: int, own: Callable[[int, int], Tensor]) -> bool:
    whole = torch.empty_like(own(0, 8))
    dist.all_gather_into_tensor(whole, own(rank, 4))
    return bool((whole == torch.cat([own(0, 4), own(1, 4)])).all())


def _reduce_scatter(rank: int, own: Callable[[int, int], Tensor]) -> bool:
    part = torch.empty_like(own(0, 4))
    dist.reduce_scatter_tensor(part, own(rank, 8))
    return bool((part == (own(0, 8) + own(1, 8)).chunk(2)[rank]).all())


def _all_to_all(rank: int, own: Callable[[int, int], Tensor]) -> bool:
    taken = torch.empty_like(own(0, 4))
    dist.all_to_all_single(taken, own(rank, 4))
    return bool((taken == torch.cat([own(0, 4).chunk(2)[rank], own(1, 4).chunk(2)[rank]])).all())


def _send(rank: int, own: Callable[[int, int], Tensor]) -> bool:
    x = own(rank, 4)
    if rank == 0:
        dist.send(x, 1)
        return True
    dist.recv(x, 0)
    return bool((x == own(0, 4)).all())


def _scatter(rank: int, own: Callable[[int, int], Tensor]) -> bool:
    x = torch.empty_like(own(0, 4))
    dist.scatter(x, [own(0, 4), own(1, 4)] if rank == 0 else None, src=0)
    return bool((x == own(rank, 4)).all())


COLLECTIVES = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
    "scatter": _scatter,
}


def _begin() -> int:
    """Bring up a process group whose ranks share the device, and return this rank."""
    from meshwright.distributed.process.world import STORE

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here = machine()
    store = dist.FileStore(os.environ[STORE], world)
    limit = timedelta(seconds=here.patience(FIRST_START))
    dist.init_process_group(here.backend, rank=rank, world_size=world, store=store, timeout=limit)
    return rank


def job_collective(name: str) -> bool:
    rank, device = _begin(), machine().device

    def own(of: int, elements: int) -> Tensor:
        return torch.arange(elements, device=device, dtype=torch.float32) + 100 * of

    return COLLECTIVES[name](rank, own)


def collective(name: str) -> Said:
    """Try one collective over two ranks on the device.

    A skipped step is one that gloo does not carry: it says so, or the processes die or hang.
    """
    from meshwright.distributed.process.workers import WorkerDied, WorkerFailed, WorkerPool, WorkerTimeout

    with WorkerPool(2, threads=1) as pool:
        try:
            right = pool.run(job_collective, name, timeout=machine().patience(FIRST_START))
        except (WorkerFailed, WorkerDied, WorkerTimeout) as trouble:
            if machine().is_dry:
                raise
            said = str(getattr(trouble, "error", None) or trouble).strip().splitlines()
            raise SkippedError(f"not carried by gloo: {said[-1] if said else type(trouble).__name__}") from trouble
    assert all(right), f"wrong values on ranks {[rank for rank, fine in enumerate(right) if not fine]}"
    return {"carried": True}, []


LAYOUTS: dict[str, dict[str, Any]] = {
    "fully_shard 2": {"layout": {"dp_shard": 2}},
    "replicas 2": {"layout": {"dp_replicate": 2, "dp_shard": 1}},
    "zero 1 2": {"layout": {"dp_shard": 2}, "techniques": {"zero_stage": 1}},
    "tp 2": {"layout": {"tp": 2, "dp_shard": 1}, "techniques": {"sequence_parallel": False}},
    "tp sequence 2": {"layout": {"tp": 2, "dp_shard": 1}},
    "cp all_gather 2": {"layout": {"cp": 2, "dp_shard": 1}, "techniques": {"context_parallel_method": "all_gather"}},
    "cp ulysses 2": {
        "layout": {"cp": 2, "dp_shard": 1},
        "techniques": {"context_parallel_method": "ulysses"},
        "needs": ["all_to_all"],
    },
    "cp ring 2": {
        "layout": {"cp": 2, "dp_shard": 1},
        "techniques": {"context_parallel_method": "ring"},
        "needs": ["send"],
    },
    "pp 2": {"layout": {"pp": 2, "dp_shard": 1}, "needs": ["send"]},
    "ep 2": {"layout": {"dp_shard": 2, "ep": 2}, "experts": True, "needs": ["all_to_all"]},
    "hybrid 4": {"layout": {"dp_replicate": 2, "dp_shard": 2}},
    "fully_shard and tp 4": {"layout": {"dp_shard": 2, "tp": 2}},
    "pp and tp 4": {"layout": {"pp": 2, "tp": 2, "dp_shard": 1}, "needs": ["send"]},
}
"""By name: sizes of axes, techniques, and the collectives beyond reductions and gathers that it sends."""


def job_layout(problem: Problem, sizes: dict[str, int]) -> Any:
    from meshwright.distributed import DistributedConfig

    _begin()
    return laid_out(problem, DistributedConfig(backend=machine().backend, **sizes))


def job_oracle(problem: Problem) -> Any:
    return limits(problem)


def refused_by_gloo(results: str) -> list[str]:
    """Return the collectives that an earlier step found that gloo does not carry on the device."""
    path = Path(results)
    steps = json.loads(path.read_text(encoding="utf-8"))["steps"] if path.exists() else {}
    return [name for name in COLLECTIVES if steps.get(f"gloo/{name}", {"status": PASSED})["status"] != PASSED]


def layout(name: str, results: str) -> Said:
    """Compare one layout over ranks on one device with plain torch.

    Args:
        results: the file of the steps before.
    """
    from meshwright.distributed.process.workers import WorkerPool

    from .parity import judge

    row = LAYOUTS[name]
    needs = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", *row.get("needs", [])]
    if missing := [need for need in refused_by_gloo(results) if need in needs]:
        raise SkippedError(f"not carried by gloo: {', '.join(missing)}")
    problem = Problem(experts=row.get("experts", False), techniques=row.get("techniques", {}))
    world = 4 if name.endswith("4") else 2
    with WorkerPool(world, threads=1) as pool:
        reference, bounds = pool.run(job_oracle, problem, world=1, timeout=machine().patience(90))[0]
        found = pool.run(job_layout, problem, row["layout"], timeout=machine().patience(200))[0]
    return judge(found, reference, bounds)
