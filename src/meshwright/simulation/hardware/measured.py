"""Price operators and messages by the measured curves of a profile."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwright.core.errors import ConfigError

from .curves import ProductGrid, SecondsCurve
from .device import Device
from .links import Group, Link, Machines
from .profile import MachineProfile


@dataclass(frozen=True, eq=False)
class MeasuredDevice(Device):
    """A device whose operators cost what a profile says, while all ranks of its host compute in ``dtype``."""

    profile: MachineProfile | None = None
    dtype: str = "float32"

    @cached_property
    def curves(self) -> ProfileCurves:
        assert self.profile is not None
        return ProfileCurves(self.profile)

    @property
    def _shared(self) -> float:
        """Factor of a rank's seconds where all ranks of a host compute."""
        assert self.profile is not None
        return 1 / self.profile.crowding[-1]

    def product_s(
        self, rows: float, columns: float, depth: float, dtype: str, element_bytes: float = 2.0, number: float = 1
    ) -> float:
        """Return the seconds of ``number`` products, one after the other, at the speed of the three layouts' mean."""
        ways = ("nt", "nn", "tn")
        seconds = [self.curves.product_s(rows, columns, depth, dtype, way) for way in ways]
        return number * self._shared * math.fsum(seconds) / len(ways)

    def traffic_s(self, moved: float) -> float:
        """Return the seconds in which elementwise operators read and write ``moved`` bytes."""
        size, seconds = self.curves.traffic["pointwise"].points[-1]
        return self._shared * moved * seconds / size

    def attention_s(self, flops: float, kernel: str, *, backward: bool, head_dim: int) -> float:
        """Return the seconds of fused attention, at the speed that the longest measured rows have."""
        direction = "backward" if backward else "forward"
        seq, seconds = self.curves.attention(self.dtype, direction, head_dim).points[-1]
        measured = (2.5 if backward else 1.0) * 2.0 * seq * seq * head_dim
        return self._shared * flops * seconds / measured


class ProfileCurves:
    """The curves of a profile, ready to be asked."""

    def __init__(self, profile: MachineProfile):
        self.profile = profile
        self.traffic = {kind: SecondsCurve(points) for kind, points in profile.traffic.items()}
        self._optimizer = {way: SecondsCurve(points) for way, points in profile.optimizer.items()}
        self._grids: dict[tuple[str, str], ProductGrid] = {}
        self._messages: dict[tuple[str, int], SecondsCurve] = {}
        for key, points in profile.messages.items():
            kind, ranks = key.split()
            self._messages[kind, int(ranks)] = SecondsCurve(points)

    def product_s(self, rows: float, columns: float, depth: float, dtype: str, layout: str) -> float:
        """Return the seconds of one product whose operands lie as ``layout`` says."""
        grid = self._grids.get((dtype, layout))
        if grid is None:
            grid = self._grids[dtype, layout] = self.profile.grid(dtype, layout)
        return grid.product_s(rows, columns, depth)

    def attention(self, dtype: str, direction: str, head_dim: int) -> SecondsCurve:
        """Return the seconds of one head and row by tokens, for the nearest head dim that was measured."""
        wide = [int(key.split()[2]) for key in self.profile.attention if key.startswith(f"{dtype} {direction} ")]
        if not wide:
            raise ConfigError(f"the profile of {self.profile.name} has no attention in {dtype}")
        nearest = min(wide, key=lambda dim: abs(math.log(dim / head_dim)))
        points = self.profile.attention[f"{dtype} {direction} {nearest}"]
        scale = head_dim / nearest
        return SecondsCurve(tuple((size, seconds * scale) for size, seconds in points), power=2.0)

    def optimizer_s(self, way: str, elements: float) -> float:
        """Return AdamW's seconds for a parameter."""
        return self._optimizer[way].seconds(elements)

    def message_s(self, kind: str, moved: float, ranks: int) -> float:
        """Return the seconds of a message with ``moved`` bytes on its larger side.

        Between sizes of groups that were measured, and beyond the largest, the law of a ring holds: each of its steps
        has the same latency, and a link carries (1 - 1/ranks) of the bytes.

        Raises:
            ConfigError: the profile has no messages, since one rank alone was measured.
        """
        if ranks < 2:
            return 0.0
        sizes = sorted(size for one, size in self._messages if one == kind)
        if not sizes:
            raise ConfigError(
                f"the profile of {self.profile.name} was measured on {self.profile.ranks} rank, without messages:"
                f" measure with --ranks 2 or more, or ask about one GPU"
            )
        nearest = min(sizes, key=lambda size: (abs(math.log(size / ranks)), size))
        curve = self._messages[kind, nearest]
        if nearest == ranks or kind == "send":
            return curve.seconds(moved)
        steps, share = (ranks - 1) / (nearest - 1), (1 - 1 / ranks) / (1 - 1 / nearest)
        least = min(curve.least, curve.seconds(moved))
        return steps * least + share * (curve.seconds(moved) - least)


@dataclass(frozen=True, eq=False)
class MeasuredMachines(Machines):
    """Equal hosts like the one that was measured."""

    curves: ProfileCurves = field(kw_only=True)

    def gather_s(self, moved: float, group: Group) -> float:
        """Return the mean of an all-gather and a reduce-scatter, whose sum is what a step spends."""
        kinds = ("all_gather", "reduce_scatter")
        return sum(self.curves.message_s(kind, moved, group.size) for kind in kinds) / len(kinds) if moved > 0 else 0.0

    def reduce_s(self, moved: float, group: Group) -> float:
        return self.curves.message_s("all_reduce", moved, group.size) if moved > 0 else 0.0

    def send_s(self, moved: float, stride: int) -> float:
        return self.curves.message_s("send", moved, 2)


def computing_in(machines: Machines, dtype: str) -> Machines:
    """Return the same machines with attention in this dtype, where they were measured."""
    device = machines.device
    return replace(machines, device=replace(device, dtype=dtype)) if isinstance(device, MeasuredDevice) else machines


def measured_machines(profile: MachineProfile, gpus: int, per_node: int = 0) -> MeasuredMachines:
    """Return ``gpus`` devices like those of a profile, so many on a host as were measured.

    Raises:
        ConfigError: a cluster that cannot be, or several devices where no message was measured.
    """
    per_node = per_node or profile.per_node
    if gpus < 1 or per_node < 1:
        raise ConfigError(f"--gpus {gpus} --per-node {per_node}: there is at least 1 of each")
    curves = ProfileCurves(profile)
    if gpus > 1:
        curves.message_s("all_gather", 1.0, gpus)
    dtypes = dict.fromkeys(key.split()[0] for key in profile.products)
    size, seconds = profile.traffic["pointwise"][-1]
    device = MeasuredDevice(
        name=profile.name,
        kind=profile.device,
        memory_bytes=profile.memory_bytes,
        flops={dtype: max(profile.grid(dtype, way).fastest for way in ("nt", "nn", "tn")) for dtype in dtypes},
        efficiency={"default": 1.0},
        bandwidth=size / seconds,
        bandwidth_efficiency=1.0,
        kernel_s=0.0,
        host_operator_s=profile.host["elementwise"] + profile.host["autograd"],
        source=f"measured on {profile.date} with torch {profile.torch}",
        profile=profile,
    )
    link = _link(curves, gpus)
    return MeasuredMachines(device, gpus, min(per_node, gpus), link, link, launch_s=0.0, curves=curves)


def _link(curves: ProfileCurves, gpus: int) -> Link:
    """Return what an all-to-all says of the way between two ranks."""
    if gpus < 2:
        return Link("none", 1e12, 0.0, 1.0, "one device sends nothing")
    large, ranks = 2.0**24, curves.profile.group_sizes[0]
    latency = curves.message_s("all_to_all", 1.0, ranks)
    seconds = max(curves.message_s("all_to_all", large, ranks) - latency, 1e-9)
    return Link("measured", large * (1 - 1 / ranks) / seconds, latency, 1.0, "measured")


def notes(profile: MachineProfile, gpus: int) -> list[str]:
    """Say in sentences what a forecast for so many devices takes that was not measured."""
    found = [
        f"Measured on {profile.date} on {profile.ranks} rank{'s' * (profile.ranks > 1)} of {profile.name}, torch"
        f" {profile.torch}."
    ]
    most = max(profile.group_sizes, default=1)
    if gpus > most:
        found.append(
            f"Messages were measured among {most} ranks at most; those among more are extrapolated by the law of a"
            f" ring."
        )
    if gpus > profile.per_node >= profile.ranks:
        found.append(
            f"No link between hosts was measured: hosts of {profile.per_node} ranks are taken to be connected as ranks"
            f" of one host are."
        )
    return found
