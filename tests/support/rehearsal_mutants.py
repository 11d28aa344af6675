"""Rehearsals of something else than the run, each a few lines, as a context manager around a rehearsal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from meshwright.distributed import experts, parallel_model
from meshwright.distributed.pipeline.run import Mail
from meshwright.planning.techniques import Techniques
from meshwright.training import build, rehearsal


def another_rank() -> AbstractContextManager:
    """The rank of another stage is rehearsed."""
    whole = rehearsal.absent_peers
    return patch.object(rehearsal, "absent_peers", lambda rank, world, *rest: whole((rank + world // 2) % world, world))


def nothing_sent() -> AbstractContextManager:
    """A stage keeps what it should send."""
    return patch.object(Mail, "send", lambda self, message, peer, tensor: None)


def never_clipped() -> AbstractContextManager:
    """Gradients are left as long as they are."""
    return patch.object(parallel_model, "scale_gradients", lambda tensors, factor: None)


def rows_of_all() -> AbstractContextManager:
    """Each rank reads the rows of all."""
    return patch.object(build, "data_position", lambda mesh: (0, 1))


def selfish_peers() -> AbstractContextManager:
    """Peers send nothing to this rank's experts."""

    def counts(mine: torch.Tensor, group: Any) -> torch.Tensor:
        theirs = torch.zeros_like(mine).view(group.size(), -1)
        theirs[group.rank()] = mine.view(group.size(), -1)[group.rank()]
        return theirs.flatten()

    return patch.object(experts, "_counts_of_all", counts)


def nothing_recomputed() -> AbstractContextManager:
    """All activations are saved."""
    return _other_techniques(lambda t: replace(t, activation_checkpointing="none"))


def in_full_precision() -> AbstractContextManager:
    """Nothing is computed in bf16."""
    return _other_techniques(lambda t: replace(t, precision=replace(t.precision, compute="float32")))


def _other_techniques(change: Callable[[Techniques], Techniques]) -> AbstractContextManager:
    whole = build.plan_run

    def plan_run(config, *others):
        return whole(replace(config, techniques=change(config.techniques)), *others)

    return patch.object(build, "plan_run", plan_run)
