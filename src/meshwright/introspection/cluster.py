"""Describe the cluster: number of ranks, ranks per node, device."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.devices import CPU


@dataclass(frozen=True)
class Cluster:
    """The facts about the machines that a plan needs.

    Attributes:
        world: number of ranks.
        ranks_per_node: ranks that share a host (0: unknown, all on one).
        device: type of the devices that compute.
    """

    world: int = 1
    ranks_per_node: int = 0
    device: str = CPU
