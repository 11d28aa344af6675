"""Try in small what a run does: two processes exchange data, and each axis trains a tiny decoder beside one process."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.core.devices import gpu_count
from meshwright.core.errors import IntegrityError

RANKS = 2
EXCHANGE = "exchange"
AXES = {"dp_shard": "dp_shard=2", "tp": "tp=2,dp_shard=1", "pp": "pp=2,dp_shard=1"}
"""Axis -> the layout that is compared with one process."""
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")
NOWHERE = "CUDA_VISIBLE_DEVICES"


def exchange() -> dict[str, Any]:
    """Let two processes exchange tensors, on the CPU and between two GPUs where there are.

    Raises:
        IntegrityError: a number that arrived is another than was sent.
    """
    with _pool() as pool:
        from meshwright.distributed.setup import exchanged

        return {"messages": pool.run(exchanged)[0]}


def axis(name: str) -> dict[str, Any]:
    """Compare two steps of a tiny decoder over an axis of two ranks with one process, in float64.

    Raises:
        IntegrityError: the first place where they differ.
    """
    with _pool() as pool:
        from meshwright.models.decoder_config import DecoderConfig
        from meshwright.planning.layout import Layout
        from meshwright.verification.verify import verify

        model = DecoderConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64, max_seq_len=64)
        report = verify(model, Layout.parse(AXES[name]), steps=2, dtypes=("float64",), pool=pool)
    if not report:
        raise IntegrityError(f"differs from one process: {report.comparisons[0].lines()[0].strip()}")
    return {"worst": max(d.error for c in report.comparisons for d in c.differences)}


TRIALS: Mapping[str, Callable[[], dict[str, Any]]] = {
    EXCHANGE: exchange,
    **{name: functools.partial(axis, name) for name in AXES},
}


def _pool():
    """Return two workers forked from this process, which compute on GPUs if there are two, outside any launcher."""
    from meshwright.distributed.process.workers import WorkerPool
    from meshwright.distributed.process.world import refuse_without_distributed

    refuse_without_distributed()  # before other imports fail over it
    for variable in LAUNCHERS:
        os.environ.pop(variable, None)
    if gpu_count() < RANKS:
        os.environ[NOWHERE] = ""
    return WorkerPool(RANKS, method="fork")
