"""Read how much memory this host lets its processes have."""

from __future__ import annotations

from pathlib import Path

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
                found += [_number(group / name) for group in groups if group.is_relative_to(here)]
    return min((limit for limit in found if limit is not None), default=None)


def _number(file: Path) -> int | None:
    """Return the number in a file; None for "max", or where there is no such file, as in a group seen from inside."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
