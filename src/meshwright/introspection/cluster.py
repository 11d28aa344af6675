"""Describe the cluster: number of ranks, ranks per node, device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """The facts about the machines that a plan needs.

    Attributes:
        world: number of ranks.
        ranks_per_node: ranks that share a host (0: unknown, all on one).
        device: "cuda" or "cpu".
    """

    world: int = 1
    ranks_per_node: int = 0
    device: str = "cpu"


def local_device() -> str:
    """Return "cuda" where torch sees a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
