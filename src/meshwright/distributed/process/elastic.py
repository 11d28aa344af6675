"""Keep a few values over an elastic restart, in the store of torchrun's agent."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist


def remember(key: str, text: str) -> None:
    """Keep a text for the next attempts of this job. Does nothing without torchrun."""
    store = _agent_store()
    if store is not None:
        store.set(key, text)


def recall(key: str) -> str:
    """Return what an earlier attempt of this job remembered, "" where there is nothing."""
    store = _agent_store()
    return store.get(key).decode() if store is not None and store.check([key]) else ""


def _agent_store() -> dist.Store | None:
    """Return the agent's store without the prefix of one attempt, under the name of the job: several may share a
    rendezvous.
    """
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=30))
    return dist.PrefixStore(f"meshwright/{env.get('TORCHELASTIC_RUN_ID', '')}", store)
