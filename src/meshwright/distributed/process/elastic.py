"""Store short texts across elastic restarts, in torchrun's agent, which stays up while workers come and go."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist


def remember(key: str, text: str) -> None:
    """Store a text for the next attempts of this job; do nothing without torchrun."""
    store = _agent_store()
    if store is not None:
        store.set(key, text)


def recall(key: str) -> str:
    """Return a text that an earlier attempt of this job stored, or ""."""
    store = _agent_store()
    return store.get(key).decode() if store is not None and store.check([key]) else ""


def _agent_store() -> dist.Store | None:
    """Open the agent's store without the attempt's prefix, under the job's name: jobs may share a rendezvous."""
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=30))
    return dist.PrefixStore(f"meshwright/{env.get('TORCHELASTIC_RUN_ID', '')}", store)
