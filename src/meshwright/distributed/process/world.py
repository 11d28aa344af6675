"""Find this process's rank from its launcher's variables, and refuse a host on which no ranks can meet."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.core import host
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.host import DOCTOR, newer_than_tested

if TYPE_CHECKING:
    import torch.distributed as dist


log = logging.getLogger("meshwright")


def refuse_without_distributed() -> None:
    """Raise UnsupportedError for a torch that was built without its distributed package."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise UnsupportedError(
            f"this torch ({torch.__version__} in {Path(torch.__file__).parent}) was built without torch.distributed"
            f" (USE_DISTRIBUTED=0): install a release from PyPI. {DOCTOR}"
        )


@functools.cache
def warn_of_newer_releases() -> None:
    """Warn of packages that are newer than the tested releases: once in a process, and on rank 0 alone."""
    import torch.distributed as dist

    if dist.get_rank() == 0 if dist.is_initialized() else is_rank_zero():
        for sentence in newer_than_tested():
            log.warning("%s", sentence)


def warn_of_small_shared_memory(local_ranks: int) -> None:
    """Warn that NCCL may fail to start: ranks of one host exchange through shared memory."""
    size = host.shared_memory()
    if local_ranks > 1 and size is not None and size < host.WANTED:
        log.warning(
            "%s has %d MiB, and NCCL's ranks on one host exchange through it: if they fail to start, type %s",
            host.FOLDER,
            size // 2**20,
            host.REPAIR,
        )


# --- find this process's rank from torchrun's variables, else Slurm's, else alone

FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""Slurm's lowest number of a step not from srun: batch script, shell of salloc, or the step that watches a node."""
STORE = "MESHWRIGHT_FILE_STORE"
"""Variable with the path of the file in which a job's workers on one host meet (set by the pool, read by setup)."""
FIRST_PORT, PORTS = 20_000, 12_000
"""MASTER_PORT lies below 32768, where Linux begins to take ports for outgoing connections."""


def get_world_info() -> tuple[int, int, int]:
    """Return (rank, local_rank, world_size) of this process.

    Reads RANK / LOCAL_RANK / WORLD_SIZE, else SLURM_PROCID / SLURM_LOCALID / SLURM_NTASKS, else (0, 0, 1). Under srun
    it also sets the torch names, MASTER_ADDR (the first host of the job) and a MASTER_PORT derived from the job id,
    where unset. A batch script and an interactive shell of Slurm are one process: only srun starts tasks.

    Raises:
        ConfigError: a variable of a started family is missing, or is not a whole number in range.
    """
    env = os.environ
    if "RANK" in env or "WORLD_SIZE" in env:
        rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        local = _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else rank
    elif "SLURM_PROCID" in env and "SLURM_NTASKS" in env and not _is_script_of_slurm(env):
        rank, local, world = (_number(env, name) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"))
    else:
        return 0, 0, 1
    if rank >= world:
        names = "RANK and WORLD_SIZE" if "RANK" in env else "SLURM_PROCID and SLURM_NTASKS"
        raise ConfigError(f"rank {rank} is outside a world of {world} processes: check {names} in the environment")
    if "RANK" not in env:
        job = _number(env, "SLURM_JOB_ID") if env.get("SLURM_JOB_ID") else 0
        hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
        port, address = FIRST_PORT + job % PORTS, env.get("MASTER_ADDR") or first_host(hosts)
        values = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": world, "MASTER_PORT": port, "MASTER_ADDR": address}
        for name, value in values.items():
            env.setdefault(name, str(value))
    return rank, local, world


def is_rank_zero() -> bool:
    """Return whether this process is rank 0, the one that reports."""
    return get_world_info()[0] == 0


def ranks_per_node() -> int:
    """Return the launcher's number of processes on each host; 0 if it gives none, or differs between hosts."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return _number(os.environ, "LOCAL_WORLD_SIZE")
    # "4", or "4(x2)" for two hosts
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        if found := re.fullmatch(r"(\d+)(?:\(x\d+\))?", os.environ.get(name, "")):
            return int(found.group(1))
    return 0


def check_nodes_in_use() -> None:
    """Raise ConfigError if this process, not started by srun, would leave nodes of a Slurm job idle."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if "RANK" not in os.environ and _is_script_of_slurm(os.environ) and nodes not in ("", "1"):
        raise ConfigError(
            f"this job has {nodes} nodes, and a batch script or shell runs on the first of them alone. Write: srun"
            f" meshwright train ... (to train on this node alone, ask for one: --nodes=1)"
        )


def _is_script_of_slurm(env: Mapping[str, str]) -> bool:
    """Return whether this is a batch script or a shell of ``salloc``: they see a rank and the number of tasks, too."""
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or ""
    if not step.isdigit():
        return env.get("ENVIRONMENT") == "BATCH"
    return int(step) >= FIRST_SPECIAL_STEP


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name)
    if text is None:
        raise ConfigError(
            f"the environment variable {name} is missing, although others of its launcher are set; start with"
            f" torchrun or srun"
        )
    if not re.fullmatch(r"[0-9]+", text):
        raise ConfigError(f"the environment variable {name} = '{text}' is not a whole number from 0 up")
    return int(text)


def first_host(nodelist: str) -> str:
    """Return the first name of Slurm's compressed host list: ``"n[03-05,9],login1"`` gives ``"n03"``."""
    first = re.match(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)", nodelist)  # up to the first comma outside brackets
    name = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group(1)) if first else ""
    if not re.fullmatch(r"[A-Za-z0-9._:-]+", name):
        raise ConfigError(
            f"cannot read the first host of Slurm's host list '{nodelist}'; set MASTER_ADDR to its address"
        )
    return name


# --- store short texts across elastic restarts, in torchrun's agent


def store_for_restarts(key: str, text: str) -> None:
    """Store a text for the next attempts of this job; do nothing without torchrun."""
    store = _agent_store()
    if store is not None:
        store.set(key, text)


def stored_by_earlier(key: str) -> str:
    """Return a text that an earlier attempt of this job stored, or ""."""
    store = _agent_store()
    return store.get(key).decode() if store is not None and store.check([key]) else ""


def _agent_store() -> dist.Store | None:
    """Open the agent's store without the attempt's prefix, under the job's name: jobs may share a rendezvous."""
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    import torch.distributed as dist

    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=30))
    return dist.PrefixStore(f"meshwright/{env.get('TORCHELASTIC_RUN_ID', '')}", store)
