"""Measure the memory that processes of a host share, through which NCCL's ranks exchange."""

from __future__ import annotations

import shutil
from pathlib import Path

FOLDER = Path("/dev/shm")
WANTED = 2**30
"""Bytes that NCCL's manual asks containers for (``--shm-size=1g``); the default of Docker is 64 MiB."""
REPAIR = f"mount -o remount,size=8g {FOLDER}   (Docker: --shm-size=8g)"


def shared_memory() -> int | None:
    """Return the bytes of shared memory; None where the system has none of Linux's kind."""
    return shutil.disk_usage(FOLDER).total if FOLDER.is_dir() else None
