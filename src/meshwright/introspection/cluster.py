"""Describe the cluster: number of ranks, ranks per node, device, and which GPUs it would have."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.devices import CPU, CUDA
from meshwright.core.errors import ConfigError


@dataclass(frozen=True)
class Cluster:
    """The facts about the machines that a plan needs.

    Attributes:
        world: number of ranks.
        ranks_per_node: ranks that share a host (0: unknown, all on one; with ``gpu``: as in the card's usual machine).
        device: type of the devices that compute; by default CUDA with ``gpu``, else the CPU.
        gpu: name of a public card such as "h100", which need not be here: layouts are then judged by what they need
            of its memory and how fast they are on it.
        link: adapter of each GPU between nodes, such as "ib400" (Gb/s); by default that of the card's usual machine.
        profile: file of ``meshwright measure``, in place of ``gpu``: machines like the measured one; or the name of one
            that comes along.

    Raises:
        ConfigError: no such cluster can be.
    """

    world: int = 1
    ranks_per_node: int = 0
    device: str = ""
    gpu: str = ""
    link: str = ""
    profile: str = ""

    def __post_init__(self) -> None:
        if self.world < 1 or self.ranks_per_node < 0:
            raise ConfigError(
                f"a cluster of {self.world} ranks with {self.ranks_per_node} on a node cannot be: it has 1 rank or"
                f" more, and as many on a node (0: as the card has, else all on one)"
            )
        if self.gpu and self.device not in ("", CUDA):
            raise ConfigError(
                f"a cluster of {self.gpu} computes on {CUDA}, not on {self.device}: leave out Cluster.device or"
                f" Cluster.gpu"
            )
        if self.profile and (self.gpu or self.link):
            raise ConfigError(
                f"Cluster.profile = {self.profile!r} has the measured device and messages: leave out Cluster.gpu and"
                f" Cluster.link"
            )
        if self.link and not self.gpu:
            raise ConfigError(f'Cluster.link = {self.link!r} is between GPUs: name the card too, such as gpu="h100"')
        if not self.device:
            object.__setattr__(self, "device", CUDA if self.gpu else CPU)
