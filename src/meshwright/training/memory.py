"""Read this process's memory and the host's, and compare a step's with the plan's estimate."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.checkpoint.store import OWN_MEMORY
from meshwright.core.devices import is_accelerator
from meshwright.core.dtypes import bytes_text
from meshwright.core.errors import ConfigError
from meshwright.planning.memory import MemoryUse, plan_memory
from meshwright.planning.optimizer import ROOM
from meshwright.planning.plan import Plan
from meshwright.training.config import CheckpointConfig

if TYPE_CHECKING:
    import torch


# --- read how much memory this host lets its processes have

CONTROL_GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
LIMITS = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""File of the limit, by the controller's name in a line of ``MEMBERSHIP``: "" in version 2, memory in version 1."""


def host_memory() -> int:
    """Return the bytes that processes of this host can hold together: RAM, or less where a control group (a container,
    a Slurm job) allows less, and all swap."""
    import psutil

    limits = (psutil.virtual_memory().total, control_group_limit())
    return min(limit for limit in limits if limit is not None) + psutil.swap_memory().total


def refuse_large_copies(gib: float, ranks: int) -> None:
    """Refuse a ``checkpoint.host_memory`` that this host cannot give to each of its ranks. Raises ConfigError."""
    if gib * 2**30 * ranks > (there := host_memory()):
        raise ConfigError(
            f"checkpoint.host_memory = {gib:g} (GiB) on each of {ranks} ranks is more than the {bytes_text(there)} of"
            f" this host: set at most {there / ranks / 2**30:.1f}, or 0 for what is needed"
        )


def refuse_copies_on_hosts(config: CheckpointConfig) -> None:
    """Refuse a ``checkpoint.memory_every`` without saves beside training, or without a folder, and keys that do nothing
    as the others are. Raises ConfigError.
    """
    idle = {} if config.asynchronous else dict.fromkeys(("when_busy", "host_memory"), "asynchronous = false")
    idle |= {} if config.memory_every else {"memory_folder": "memory_every = 0"}
    for key, why in idle.items():
        if (value := getattr(config, key)) != getattr(type(config)(), key):
            raise ConfigError(f"checkpoint.{key} = {value} does nothing with checkpoint.{why}: leave one of them out")
    if not config.memory_every:
        return
    if not config.asynchronous or config.folder.startswith(OWN_MEMORY):
        raise ConfigError(
            "checkpoint.memory_every keeps states while training goes on: set checkpoint.asynchronous = true, and a"
            " checkpoint.folder outside this process"
        )
    folder = Path(os.path.expandvars(config.memory_folder)).expanduser()
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"checkpoint.memory_folder = {config.memory_folder}: {folder} is no folder that can be written. Give a file"
            f" system in each host's memory, or set checkpoint.memory_every = 0 and leave the folder out"
        )


def memory_left(ranks: int) -> int:
    """Return the bytes that each of this host's ranks can still take, if all take as many."""
    import psutil

    left, limit = psutil.virtual_memory().available, control_group_limit()
    if limit is not None:
        left = min(left, limit - ranks * psutil.Process().memory_info().rss)
    return max(0, left // ranks)


def control_group_limit(root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Return the least limit of this process's control group and those around it, in bytes; None without any.

    Args:
        root: where the file system of control groups is mounted.
        membership: file that names this process's group, in lines ``number:controllers:/path``.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller, name in LIMITS.items():
            if controller in controllers.split(","):
                here = root / controller
                groups = [here / path.lstrip("/"), *(here / path.lstrip("/")).parents]
                for group in groups:
                    with suppress(OSError):  # there is no such file in a group seen from inside
                        if group.is_relative_to(here) and (text := (group / name).read_text().strip()).isdigit():
                            found.append(int(text))  # else "max"
    return min(found, default=None)


# --- read this process's memory


class MemoryReading(NamedTuple):
    """Memory of this process at one moment."""

    current: int
    """Bytes held now."""
    peak: int
    """Bytes at the highest point: on an accelerator since the last reset, on a CPU since the process began."""
    label: str
    """Name of the quantity in ``peak``, short enough for a progress line."""


def read_memory(device: torch.device) -> MemoryReading:
    """Read the memory that this process holds for ``device``.

    On an accelerator: bytes that torch's allocator gave to tensors, without its cache, the driver's context, and the
    buffers of messages.
    Elsewhere: the resident set of the whole process, which is weights, but also the interpreter and its libraries,
    shared ones included. If the system records no peak (Linux does), the label says that the current value is shown.
    """
    if is_accelerator(device):
        import torch

        module = torch.get_device_module(device)
        return MemoryReading(module.memory_allocated(device), module.max_memory_allocated(device), "device peak")
    import psutil

    current, status = psutil.Process().memory_info().rss, ""
    with suppress(OSError):
        status = Path("/proc/self/status").read_text()
    # Not getrusage's ru_maxrss: a child inherits that from the launcher that forked it. VmHWM begins with the program.
    peak = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    if peak is None:
        return MemoryReading(current, current, "RSS")
    return MemoryReading(current, max(current, int(peak.group(1)) * 1024), "RSS peak")


def reset_peak(device: torch.device) -> None:
    """Start a new peak on an accelerator, so that it covers the steps and not the start.

    A process's resident peak cannot be reset.
    """
    if is_accelerator(device):
        import torch

        torch.get_device_module(device).reset_peak_memory_stats(device)


# --- compare a step's memory with the plan's estimate, and name the switches that save most

KINDS = {
    MemoryUse.PARAMETERS: "parameters, gathered ones too",
    MemoryUse.GRADIENTS: "gradients",
    MemoryUse.OPTIMIZER: "optimizer",
    MemoryUse.ACTIVATIONS: "activations",
    MemoryUse.LOGITS: "logits",
    MemoryUse.COMMUNICATION: "messages",
    MemoryUse.BUFFERS: "buffers",
}
SUGGESTED = 2
NOTHING: Mapping[MemoryUse, int] = {}


class MemoryShares(NamedTuple):
    """The cut of a rank's step into microbatches.

    Attributes:
        rows: rows of a microbatch.
        microbatches: microbatches of a step.
        together: rows that stay in one microbatch: 2 of pairs, whose loss is not computed in chunks.
    """

    rows: int
    microbatches: int
    together: int = 1


def estimated(plan: Plan, shares: MemoryShares, kept: Mapping[MemoryUse, int] = NOTHING) -> dict[MemoryUse, int]:
    """Return bytes at peak by kind, for the kinds that a plan estimates.

    Args:
        kept: the most bytes of each kind by a dry run (``RankMemory.most``); without them the model states alone.
    """
    m = plan_memory(plan, microbatches=shares.microbatches)
    return {
        MemoryUse.PARAMETERS: m.parameters + m.gathered,
        MemoryUse.GRADIENTS: m.gradients_at_peak,
        MemoryUse.OPTIMIZER: m.optimizer,
        **kept,
    }


def memory_words(
    found: Mapping[MemoryUse, int], plan: Plan, shares: MemoryShares, kept: Mapping[MemoryUse, int] = NOTHING
) -> str:
    """Format the measured peak of each kind in a line, with the plan's estimate where that is another."""
    planned = estimated(plan, shares, kept)
    parts = []
    for kind, text in KINDS.items():
        here, there = (bytes_text(sizes[kind]) if kind in sizes else "-" for sizes in (found, planned))
        if found.get(kind) or planned.get(kind):
            parts.append(f"{text.partition(',')[0]} {here}" + f" (plan {there})" * (here != there != "-"))
    return ", ".join(parts)


def memory_table(
    found: Mapping[MemoryUse, int], plan: Plan, shares: MemoryShares, kept: Mapping[MemoryUse, int] = NOTHING
) -> str:
    """Format one line for each kind: the measured peak, and the plan's estimate if it has one."""
    planned = estimated(plan, shares, kept)
    is_offloaded = plan.optimizer.in_host_memory or plan.data.cpu_offload
    rows = [
        (
            text + (", in host memory" if kind is MemoryUse.OPTIMIZER and is_offloaded else ""),
            bytes_text(found[kind]) if kind in found else "-",
            bytes_text(planned[kind]) if kind in planned else "-",
        )
        for kind, text in KINDS.items()
        if kind in found or kind in planned
    ]
    head = ("the most at a time of", "found", "plan")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(3)]
    return "\n".join(
        f"  {what:<{widths[0]}}  {here:>{widths[1]}}  {there:>{widths[2]}}" for what, here, there in (head, *rows)
    )


def suggestions(
    found: Mapping[MemoryUse, int], plan: Plan, shares: MemoryShares, kept: Mapping[MemoryUse, int] = NOTHING
) -> list[str]:
    """Return the switches that would save most on this rank, best first, with the approximate bytes.

    A failed step has measured less than its peak: then the estimate counts.
    """
    planned = estimated(plan, shares, kept)
    known = {kind: max(found.get(kind, 0), planned.get(kind, 0)) for kind in (*found, *planned)}
    best = sorted(_savings(known, plan, shares), reverse=True)
    return [f"{switch} saves about {bytes_text(saved)}" for saved, switch in best[:SUGGESTED] if saved > 0]


def _savings(held: Mapping[MemoryUse, int], plan: Plan, shares: MemoryShares) -> Iterator[tuple[int, str]]:
    activations, logits = held.get(MemoryUse.ACTIVATIONS, 0), held.get(MemoryUse.LOGITS, 0)
    states = sum(held[kind] for kind in (MemoryUse.PARAMETERS, MemoryUse.GRADIENTS, MemoryUse.OPTIMIZER))
    data, ranks = plan.data, plan.data_ranks
    if fewer := shares.rows // 2 // shares.together * shares.together:
        yield (activations + logits) * (shares.rows - fewer) // shares.rows, f"batch.microbatch = {fewer}"
    if plan.activation_checkpointing == "none" and plan.units[1:]:
        blocks = sum(len(unit.blocks) for unit in plan.units)
        yield activations - activations // max(blocks, 1), 'techniques.activation_checkpointing = "full"'
    if plan.loss is None and shares.together == 1:
        yield logits - logits // 8, "techniques.loss_chunks = 8"
    if data.technique != "fully_shard" and ranks > 1:
        yield states - states // ranks, f"layout.dp_shard = {ranks} with layout.dp_replicate = 1"
    elif data.gathers_per_step:
        whole = held[MemoryUse.PARAMETERS]
        yield whole - whole // max(plan.size("dp_shard"), 1), "techniques.zero_stage = 3"
    splits = plan.pipeline is not None and plan.pipeline.splits_backward
    if (
        data.technique == "fully_shard"
        and shares.microbatches > 1
        and not (data.sync_grad_accum or splits)
        and plan.size("dp_shard") > 1
    ):
        whole = held[MemoryUse.GRADIENTS]
        switch = "techniques.zero_stage = 2" if data.gathers_per_step else "techniques.sync_grad_accum = true"
        yield whole - whole // plan.size("dp_shard"), switch
    if is_accelerator(plan.device) and not data.cpu_offload:
        m = plan_memory(plan, microbatches=shares.microbatches)
        if not plan.optimizer.in_host_memory:
            yield m.parameters + m.optimizer + m.gradients, "techniques.cpu_offload = true"
            yield m.optimizer - min(m.optimizer, ROOM), 'techniques.cpu_offload = "optimizer"'


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation by torch, on a GPU or the host."""
    import torch

    words = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")
    is_torchs = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return is_torchs or (isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words))


def out_of_memory(
    error: BaseException,
    found: Mapping[MemoryUse, int],
    plan: Plan,
    shares: MemoryShares,
    kept: Mapping[MemoryUse, int] = NOTHING,
) -> str:
    """Return the error text for a step that ran out of memory."""
    what = str(error).splitlines()[0] if str(error) else type(error).__name__
    better = suggestions(found, plan, shares, kept)
    ways = (
        f"What would save most here: {'; '.join(better)}." if better else "Give the model more ranks, or shorter rows."
    )
    return f"out of memory: {what}\n{memory_table(found, plan, shares, kept)}\n{ways}"
