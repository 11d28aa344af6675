"""Bound how many processes a command starts on this host."""

from __future__ import annotations

import os

from meshwright.core.errors import ConfigError

PER_CORE, ON_FEW_CORES, ALWAYS = 8, 16, 4
"""Processes that a core serves; how many are served by few cores; how many are never refused."""
MIB = 300
"""Memory of a process that has imported torch and trains a small model."""


def refuse_too_many(count: int) -> None:
    """Refuse more processes than the cores serve or the free memory holds: they would end other people's programs.

    Raises:
        ConfigError: the text says what was probably meant, and which key insists.
    """
    import psutil  # which the first line of a run does not wait for

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = psutil.virtual_memory().available
    for_cores, for_memory = max(ON_FEW_CORES, PER_CORE * cores), free // (MIB << 20)
    if count <= max(ALWAYS, min(for_cores, for_memory)):
        return
    raise ConfigError(
        f"{count:,} processes on this host: its {cores} cores serve {for_cores}, and its free memory of"
        f" {free / 2**30:.1f} GiB holds {for_memory}, at {MIB} MiB each. If that layout is for a cluster, see what it"
        f" would do with 'meshwright plan' or 'meshwright rehearse', which start none of them, and start it there"
        f" (torchrun, or 'meshwright launch' for Slurm). To train over them here all the same: process.count = {count}"
    )
