"""Let one process be any rank of a world in which no other rank answers.

Collectives return at once, with this rank's own values in its peers' places (torch's "fake" backend), so that the very
code of a run can be executed for one rank: on a device (a rehearsal), or on tensors without memory (a dry run).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from meshwright.core.errors import ConfigError
from meshwright.distributed.torch_private import forget_meshes, other_groups, silent_store

BACKEND = "fake"
"""torch's name of the backend."""


@contextmanager
def absent_peers(rank: int, world: int) -> Iterator[None]:
    """Make this process rank ``rank`` of ``world`` for the time of the context; existing groups are set aside.

    Raises:
        ConfigError: there is no such rank.
    """
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} of {world} ranks: legal are 0 to {world - 1}")
    with other_groups():
        forget_meshes()  # torch's caches know meshes by their ranks' numbers: those of a run are equal
        dist.init_process_group(BACKEND, store=silent_store(), rank=rank, world_size=world)
        try:
            yield
        finally:
            forget_meshes()


def peers_are_absent() -> bool:
    """Return whether this process runs inside ``absent_peers``."""
    return dist.is_initialized() and dist.get_backend() == BACKEND
