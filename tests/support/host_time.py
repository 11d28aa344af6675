"""The host's own work in a step: calls of this package's Python functions, and seconds inside them."""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import meshwright
from meshwright import Layout, parallelize
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig, MoEConfig

HOME = str(Path(meshwright.__file__).parent)
MODELS = str(Path(HOME) / "models")
AXES = {
    "dp_shard": {"dp_shard": 2},
    "tp": {"tp": 2, "dp_shard": 1},
    "pp": {"pp": 2, "dp_shard": 1},
    "cp": {"cp": 2, "dp_shard": 1},
    "ep": {"ep": 2, "dp_shard": 2},
}
CONFIG = DecoderConfig(
    vocab_size=64, dim=16, n_layers=2, n_heads=2, n_kv_heads=2, hidden_dim=16, max_seq_len=32, norm_eps=1e-5
)


def laid_out(axis: str, blocks: int) -> Callable[[], Any]:
    """Return a step (forward, backward, update) of a small decoder over two ranks, done twice already."""
    torch.manual_seed(0)
    moe = MoEConfig(n_experts=4, top_k=2) if axis == "ep" else None
    model = parallelize(Decoder(replace(CONFIG, n_layers=blocks, moe=moe)), Layout(**AXES[axis]), audit=False)
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-3)
    rank = model.data_rank
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(rank))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    def step() -> None:
        model.forward_backward(batch)
        model.optimizer_step(optimizer)  # unclipped: scaling is one pass more

    step()
    step()
    return step


def own_calls(step: Callable[[], Any]) -> Counter[str]:
    """Count a step's calls of functions of this package, but for those of its models."""
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(HOME) and not file.startswith(MODELS):
            calls[f"{file.removeprefix(HOME)}:{frame.f_code.co_firstlineno} {frame.f_code.co_name}"] += 1

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def own_seconds(step: Callable[[], Any], steps: int) -> float:
    """Return a step's seconds inside functions of this package, but for those of its models, as cProfile has them."""
    profile = cProfile.Profile(time.thread_time)
    profile.enable()
    for _ in range(steps):
        step()
    profile.disable()
    entries = pstats.Stats(profile).stats.items()  # pyright: ignore[reportAttributeAccessIssue]
    return sum(e[2] for (file, *_), e in entries if file.startswith(HOME) and not file.startswith(MODELS)) / steps
