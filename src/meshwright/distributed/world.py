"""Who am I among the processes: torchrun's variables, else Slurm's, else alone. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from meshwright.core.errors import ConfigError


def get_world_info() -> tuple[int, int, int]:
    """(rank, local_rank, world_size) of this process.

    Reads RANK / LOCAL_RANK / WORLD_SIZE, else SLURM_PROCID / SLURM_LOCALID / SLURM_NTASKS, else (0, 0, 1). Under srun it also
    sets the torch names, MASTER_ADDR (the first host of the job) and a MASTER_PORT derived from the job id, where unset.

    Raises:
        ConfigError: a variable of a started family is missing, or is not a whole number in range.
    """
    env = os.environ
    if "RANK" in env or "WORLD_SIZE" in env:
        rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        local = _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else rank
    elif "SLURM_PROCID" in env and "SLURM_NTASKS" in env:
        rank, local, world = (_number(env, name) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"))
        _export_torch_names(rank, local, world)
    else:
        return 0, 0, 1
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} is outside a world of {world} processes: check RANK and WORLD_SIZE in the environment")
    return rank, local, world


def is_rank_zero() -> bool:
    """Whether this process is the one that speaks."""
    return get_world_info()[0] == 0


def ranks_per_node() -> int:
    """Processes on this host as the launcher says; 0 where it does not."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name)
    if text is None:
        raise ConfigError(
            f"the environment variable {name} is missing, although others of its launcher are set; start with torchrun or srun"
        )
    if not text.isdigit():
        raise ConfigError(f"the environment variable {name} = '{text}' is not a whole number")
    return int(text)


def _export_torch_names(rank: int, local: int, world: int) -> None:
    job = int(os.environ.get("SLURM_JOB_ID", "0") or 0)
    hosts = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    values = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": world,
        "MASTER_ADDR": first_host(hosts),
        "MASTER_PORT": 20_000 + job % 20_000,
    }
    for name, value in values.items():
        os.environ.setdefault(name, str(value))


def first_host(nodelist: str) -> str:
    """First name of Slurm's compressed host list: ``"n[03-05,9],login1"`` gives ``"n03"``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodelist)
    if not match:
        raise ConfigError(f"cannot read the host list '{nodelist}' of Slurm")
    stem, first, rest = match.groups()
    return stem + (first or "") + (rest or "")
