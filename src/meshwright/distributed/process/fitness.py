"""Refuse, in a sentence, a torch or a host on which no ranks can meet; warn of what is known to cause trouble."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from meshwright.core.errors import UnsupportedError
from meshwright.core.host import shared_memory
from meshwright.core.host.versions import DOCTOR, newer_than_tested

log = logging.getLogger("meshwright")


def refuse_without_distributed() -> None:
    """Refuse a torch that was built without its distributed package.

    Raises:
        UnsupportedError: which torch this is, and what to install.
    """
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

    from .world import is_rank_zero

    if dist.get_rank() == 0 if dist.is_initialized() else is_rank_zero():
        for sentence in newer_than_tested():
            log.warning("%s", sentence)


def warn_of_small_shared_memory(local_ranks: int) -> None:
    """Warn that NCCL may fail to start: ranks of one host exchange through shared memory."""
    size = shared_memory.shared_memory()
    if local_ranks > 1 and size is not None and size < shared_memory.WANTED:
        log.warning(
            "%s has %d MiB, and NCCL's ranks on one host exchange through it: if they fail to start, type %s",
            shared_memory.FOLDER,
            size // 2**20,
            shared_memory.REPAIR,
        )
