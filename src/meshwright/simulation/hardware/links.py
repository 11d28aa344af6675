"""Price collectives on a cluster by algorithm and topology."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from .device import Device


@dataclass(frozen=True)
class Link:
    """How one device sends to another.

    Attributes:
        name: name by which users ask for the link.
        bandwidth: bytes per second and device in each direction, by the data sheet or measured.
        latency_s: seconds of an empty message, of one step of a ring.
        efficiency: fraction of the bandwidth that large collectives reach.
        source: where the figures are from.
    """

    name: str
    bandwidth: float
    latency_s: float
    efficiency: float = 0.8
    source: str = ""

    @property
    def speed(self) -> float:
        return self.bandwidth * self.efficiency


@dataclass(frozen=True)
class Machines:
    """A cluster as the forecast sees it: equal devices in equal nodes.

    Attributes:
        device: what computes.
        gpus: number of devices.
        per_node: devices that ``inside`` connects.
        inside: link within a node.
        across: link between nodes, for each device.
        launch_s: seconds between the call of a collective and its first byte.
    """

    device: Device
    gpus: int
    per_node: int
    inside: Link
    across: Link
    launch_s: float = 8e-6

    @property
    def words(self) -> str:
        """The devices and their links, in words."""
        nodes = f", {self.across.name} between nodes of {self.per_node}" * (self.gpus > self.per_node)
        return f"{self.gpus} {self.device.name}, {self.inside.name}{nodes}"

    def gather_s(self, moved: float, group: Group) -> float:
        """Return the seconds of an all-gather to ``moved`` bytes on each rank, or of a reduce-scatter of as many."""
        return _ring_s(moved, group, self)

    def reduce_s(self, moved: float, group: Group) -> float:
        """Return the seconds of an all-reduce of ``moved`` bytes: a reduce-scatter and an all-gather."""
        return 2 * _ring_s(moved, group, self) - (self.launch_s if group.size > 1 and moved > 0 else 0.0)

    def send_s(self, moved: float, stride: int) -> float:
        """Return the seconds of a message of ``moved`` bytes to the rank ``stride`` further on."""
        link = self.inside if stride < self.per_node else self.across
        return moved / link.speed + link.latency_s + self.launch_s


@dataclass(frozen=True)
class Group:
    """Ranks of one mesh axis: ``size`` ranks, ``stride`` apart in the numbering of ranks."""

    size: int
    stride: int = 1

    def in_node(self, machines: Machines) -> int:
        """Return the number of these ranks on one node."""
        return max(1, min(self.size, machines.per_node // self.stride))


def _steps(ranks: int, inside: int, machines: Machines) -> float:
    """Return the seconds of latency of one pass: a ring within nodes, a tree between many nodes."""
    nodes = -(-ranks // inside)
    ring = (ranks - nodes) * machines.inside.latency_s / max(1, nodes)
    return ring + min(nodes - 1, 4 * math.log2(max(nodes, 1)) if nodes > 1 else 0) * machines.across.latency_s


@lru_cache(maxsize=100_000)
def _ring_s(moved: float, group: Group, machines: Machines) -> float:
    """Price rings, as many as a node has adapters for the group: each link carries (1 - 1/ranks) of its ring's bytes
    (Thakur, Rabenseifner, Gropp 2005; the bus bandwidth of nccl-tests).
    """
    ranks = group.size
    if ranks <= 1 or moved <= 0:
        return 0.0
    inside = group.in_node(machines)
    speed = machines.inside.speed if inside > 1 else math.inf
    if ranks > inside:
        speed = min(speed, machines.across.speed * inside)
    return moved * (ranks - 1) / ranks / speed + _steps(ranks, inside, machines) + machines.launch_s


def gather_s(moved: float, group: Group, machines: Machines) -> float:
    """Return the seconds of an all-gather to ``moved`` bytes on each rank, or of a reduce-scatter of as many."""
    return machines.gather_s(moved, group)


def reduce_s(moved: float, group: Group, machines: Machines) -> float:
    """Return the seconds of an all-reduce of ``moved`` bytes."""
    return machines.reduce_s(moved, group)


def send_s(moved: float, stride: int, machines: Machines) -> float:
    """Return the seconds of a message of ``moved`` bytes to the rank ``stride`` further on."""
    return machines.send_s(moved, stride)
