"""Describe a measured machine, and price operators and messages by its curves."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from importlib.resources import files
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from meshwright.core.config import from_dict
from meshwright.core.errors import ConfigError, command
from meshwright.introspection.cluster import Cluster
from meshwright.simulation.cards import Device, Group, Link, Machines, machines

# --- interpolate measured seconds


@dataclass(frozen=True)
class SecondsCurve:
    """Seconds by a size (bytes, elements, tokens), measured at ascending sizes.

    Below the first size the seconds are those of the first; beyond the last they grow with ``power`` of the size.
    """

    points: tuple[tuple[float, float], ...]
    power: float = 1.0

    def seconds(self, size: float) -> float:
        """Return the seconds at a size, between two measured ones on a logarithmic scale of both."""
        first, last = self.points[0], self.points[-1]
        if size <= first[0]:
            return first[1]
        if size >= last[0]:
            return last[1] * (size / last[0]) ** self.power
        above = bisect_right(self.points, size, key=lambda point: point[0])
        (low, before), (high, after) = self.points[above - 1], self.points[above]
        share = math.log(size / low) / math.log(high / low)
        return math.exp((1 - share) * math.log(before) + share * math.log(after))

    @property
    def least(self) -> float:
        """The seconds at the smallest size, which are those of the call itself."""
        return self.points[0][1]


@dataclass(frozen=True)
class ProductGrid:
    """Seconds of products (rows, depth) x (depth, columns) at all triples of some dims.

    Attributes:
        dims: ascending dims that each of rows, columns and depth has.
        seconds: by rows, then columns, then depth.
    """

    dims: tuple[int, ...]
    seconds: tuple[float, ...]

    @cached_property
    def _speeds(self) -> dict[tuple[int, int, int], float]:
        """FLOP/s at places on the grid."""
        every = range(len(self.dims))
        triples = product(every, every, every)
        return {
            (a, b, c): 2.0 * self.dims[a] * self.dims[b] * self.dims[c] / seconds
            for (a, b, c), seconds in zip(triples, self.seconds, strict=True)
        }

    @cached_property
    def fastest(self) -> float:
        """The most FLOP/s of all shapes."""
        return max(self._speeds.values())

    def product_s(self, rows: float, columns: float, depth: float) -> float:
        """Return the seconds of a product, at the FLOP/s between the shapes around it.

        Outside the grid a dim counts as the nearest one that was measured; a product is never faster than the smallest.
        """
        if min(rows, columns, depth) <= 0:
            return 0.0
        around = (self._around(dim) for dim in (rows, columns, depth))
        logarithm = sum(
            wa * wb * wc * math.log(self._speeds[a, b, c]) for (a, wa), (b, wb), (c, wc) in product(*around)
        )
        return max(2.0 * rows * columns * depth / math.exp(logarithm), self.seconds[0])

    def _around(self, dim: float) -> list[tuple[int, float]]:
        """Return the places around a dim, with their weights."""
        dims = self.dims
        if dim <= dims[0] or len(dims) == 1:
            return [(0, 1.0)]
        for place, (low, high) in enumerate(pairwise(dims)):
            if dim <= high:
                share = math.log(dim / low) / math.log(high / low)
                return [(place, 1 - share), (place + 1, share)]
        return [(len(dims) - 1, 1.0)]


# --- define what ``meshwright measure`` finds out about a machine, and write and read it as JSON

FORMAT = 3
"""Version of the JSON; another meaning of a field gets another number."""
Points = tuple[tuple[float, float], ...]
NEEDED = {"traffic": ("pointwise",), "host": ("view", "empty", "elementwise", "autograd"), "optimizer": ("fused",)}
"""Figures that every forecast reads."""
AGAIN = "Measure again with meshwright measure FILE"


@dataclass(frozen=True)
class MachineProfile:
    """The measured speeds of equal devices, each of which one rank computes on. Seconds and bytes.

    Attributes:
        date: day of the measurement.
        torch: version of torch.
        device: type of the device.
        name: name of the device.
        ranks: ranks that took part.
        per_node: ranks of a host.
        threads: threads of a rank on a CPU.
        slots: ranks of a host that have cores of their own.
        memory_bytes: memory of a rank's device; of a CPU its share of the host's.
        products: "dtype layout" -> seconds of products; layouts are "nt" (forward), "nn" (gradient of the input) and
            "tn" (gradient of the weight), by which operand is transposed.
        attention: "dtype direction head_dim" -> (tokens, seconds of one head and row), causal.
        traffic: kind of operator -> (bytes read and written, seconds).
        host: kind of work of the host -> its seconds.
        optimizer: "fused" or "foreach" -> (elements of a tensor, AdamW's seconds for it).
        messages: "kind ranks" -> (bytes of the larger side, seconds).
        crowding: speed of a rank while 1, 2, … of a host's ranks compute, over its speed with a core of its own.
    """

    date: str
    torch: str
    device: str
    name: str
    ranks: int
    per_node: int
    threads: int
    slots: int
    memory_bytes: float
    products: dict[str, ProductGrid]
    attention: dict[str, Points]
    traffic: dict[str, Points]
    host: dict[str, float]
    optimizer: dict[str, Points]
    messages: dict[str, Points]
    crowding: tuple[float, ...]

    def grid(self, dtype: str, layout: str) -> ProductGrid:
        """Return the products of a dtype and layout. Raises ConfigError for a dtype that was not measured."""
        found = self.products.get(f"{dtype} {layout}")
        if found is None:
            legal = ", ".join(sorted({key.split()[0] for key in self.products}))
            raise ConfigError(f"the profile of {self.name} has no products in {dtype}. Legal are {legal}.")
        return found

    def attention_curve(self, dtype: str, direction: str, head_dim: int) -> SecondsCurve:
        """Return the seconds of one head and row by tokens, for the nearest head dim that was measured."""
        wide = [int(key.split()[2]) for key in self.attention if key.startswith(f"{dtype} {direction} ")]
        if not wide:
            raise ConfigError(f"the profile of {self.name} has no attention in {dtype}")
        nearest = min(wide, key=lambda dim: abs(math.log(dim / head_dim)))
        scale = head_dim / nearest
        points = self.attention[f"{dtype} {direction} {nearest}"]
        return SecondsCurve(tuple((size, seconds * scale) for size, seconds in points), power=2.0)

    @cached_property
    def _message_curves(self) -> dict[tuple[str, int], SecondsCurve]:
        split = ((key.split(), points) for key, points in self.messages.items())
        return {(kind, int(ranks)): SecondsCurve(points) for (kind, ranks), points in split}

    @property
    def group_sizes(self) -> list[int]:
        """Sizes of groups whose messages were measured, ascending."""
        return sorted({ranks for _, ranks in self._message_curves})

    def message_s(self, kind: str, moved: float, ranks: int) -> float:
        """Return the seconds of a message with ``moved`` bytes on its larger side.

        Between sizes of groups that were measured, and beyond the largest, the law of a ring holds: each of its steps
        has the same latency, and a link carries (1 - 1/ranks) of the bytes.

        Raises:
            ConfigError: the profile has no messages, since one rank alone was measured.
        """
        if ranks < 2:
            return 0.0
        sizes = sorted(size for one, size in self._message_curves if one == kind)
        if not sizes:
            raise ConfigError(
                f"the profile of {self.name} was measured on {self.ranks} rank, without messages: measure with"
                f" --ranks 2 or more, or ask about one GPU"
            )
        nearest = min(sizes, key=lambda size: (abs(math.log(size / ranks)), size))
        curve = self._message_curves[kind, nearest]
        if nearest == ranks or kind == "send":
            return curve.seconds(moved)
        steps, share = (ranks - 1) / (nearest - 1), (1 - 1 / ranks) / (1 - 1 / nearest)
        least = min(curve.least, curve.seconds(moved))
        return steps * least + share * (curve.seconds(moved) - least)


def to_json(profile: MachineProfile) -> str:
    """Write a profile as one JSON object, with the version of its format."""
    return json.dumps({"format": FORMAT, **asdict(profile)}, indent=1)


def read_profile(path: Path) -> MachineProfile:
    """Read a profile that ``meshwright measure`` wrote.

    Raises:
        ConfigError: there is no such file, it is damaged, or its format is another one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"--profile {path}: there is no such file. Write one with {command('measure', path)}, or take"
            f" xeon-2-cores, which comes along"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--profile {path} cannot be read: {error}") from None
    return from_json(text, f"--profile {path}")


def from_json(text: str, where: str = "this text") -> MachineProfile:
    """Read what ``to_json`` wrote; raises ConfigError as ``read_profile`` does."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is no profile: it is not JSON ({error}). {AGAIN}") from None
    if not isinstance(values, dict) or "format" not in values:
        raise ConfigError(f"{where} is no profile of a machine: it has no format. {AGAIN}")
    if (found := values.pop("format")) != FORMAT:
        raise ConfigError(f"{where} is a profile in format {found}, and this meshwright reads format {FORMAT}. {AGAIN}")

    def damaged(how: str) -> ConfigError:
        return ConfigError(f"{where} is a damaged profile{how}. {AGAIN}")

    for own in fields(MachineProfile):
        if own.name not in values:
            raise damaged(f": '{own.name}' is missing")
    try:
        profile = from_dict(MachineProfile, values, where="profile")
    except ConfigError as error:
        raise damaged(f" ({str(error).splitlines()[0]})") from None
    for name, value in _numbers("", asdict(profile)):
        if not math.isfinite(value) or value < 0:
            raise damaged(f": {name} is {value}, and must be finite and positive")
    for one in ("products", "attention", "traffic", "host", "crowding"):
        if not getattr(profile, one):
            raise damaged(f": '{one}' is empty")
    for one, names in NEEDED.items():
        for name in names:
            if name not in getattr(profile, one):
                raise damaged(f": '{one}.{name}' is missing")
    for name, grid in profile.products.items():
        if len(grid.seconds) != len(grid.dims) ** 3 or list(grid.dims) != sorted(set(grid.dims)):
            raise damaged(f": products['{name}'] are not those of all its dims")
    for one in ("attention", "traffic", "optimizer", "messages"):
        for name, points in getattr(profile, one).items():
            sizes = [size for size, _ in points]
            if not sizes or sizes != sorted(set(sizes)) or min(seconds for _, seconds in points) <= 0 or sizes[0] <= 0:
                raise damaged(f": {one}['{name}'] has no ascending sizes with seconds")
    return profile


def _numbers(name: str, value: Any) -> list[tuple[str, float]]:
    """List the numbers in nested values, with their places."""
    if isinstance(value, Mapping):
        return [found for key, one in value.items() for found in _numbers(f"{name}.{key}".lstrip("."), one)]
    if isinstance(value, (list, tuple)):
        return [found for place, one in enumerate(value) for found in _numbers(f"{name}[{place}]", one)]
    return [(name, value)] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


# --- price operators and messages by the measured curves of a profile


@dataclass(frozen=True, eq=False)
class MeasuredDevice(Device):
    """A device whose operators cost what a profile says, while all ranks of its host compute in ``dtype``."""

    profile: MachineProfile = field(kw_only=True)
    dtype: str = "float32"

    @property
    def _shared(self) -> float:
        """Factor of a rank's seconds where all ranks of a host compute."""
        return 1 / self.profile.crowding[-1]

    def product_s(
        self, rows: float, columns: float, depth: float, dtype: str, element_bytes: float = 2.0, number: float = 1
    ) -> float:
        """Return the seconds of ``number`` products, one after the other, at the speed of the three layouts' mean."""
        ways = ("nt", "nn", "tn")
        seconds = [self.profile.grid(dtype, way).product_s(rows, columns, depth) for way in ways]
        return number * self._shared * math.fsum(seconds) / len(ways)

    def traffic_s(self, moved: float) -> float:
        """Return the seconds in which elementwise operators read and write ``moved`` bytes."""
        size, seconds = self.profile.traffic["pointwise"][-1]
        return self._shared * moved * seconds / size

    def attention_s(self, flops: float, kernel: str, *, backward: bool, head_dim: int) -> float:
        """Return the seconds of fused attention, at the speed that the longest measured rows have."""
        direction = "backward" if backward else "forward"
        seq, seconds = self.profile.attention_curve(self.dtype, direction, head_dim).points[-1]
        measured = (2.5 if backward else 1.0) * 2.0 * seq * seq * head_dim
        return self._shared * flops * seconds / measured


@dataclass(frozen=True, eq=False)
class MeasuredMachines(Machines):
    """Equal hosts like the one that was measured."""

    profile: MachineProfile = field(kw_only=True)

    def gather_s(self, moved: float, group: Group) -> float:
        """Return the mean of an all-gather and a reduce-scatter, whose sum is what a step spends."""
        kinds = ("all_gather", "reduce_scatter")
        return sum(self.profile.message_s(kind, moved, group.size) for kind in kinds) / len(kinds) if moved > 0 else 0.0

    def reduce_s(self, moved: float, group: Group) -> float:
        return self.profile.message_s("all_reduce", moved, group.size) if moved > 0 else 0.0

    def send_s(self, moved: float, stride: int) -> float:
        return self.profile.message_s("send", moved, 2)


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
    if gpus > 1:
        profile.message_s("all_gather", 1.0, gpus)
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
        profile=profile,
    )
    if gpus < 2:  # one device sends nothing
        link = Link("none", 1e12, 0.0, 1.0)
    else:  # what an all-to-all says of the way between two ranks
        large, ranks = 2.0**24, profile.group_sizes[0]
        latency = profile.message_s("all_to_all", 1.0, ranks)
        seconds = max(profile.message_s("all_to_all", large, ranks) - latency, 1e-9)
        link = Link("measured", large * (1 - 1 / ranks) / seconds, latency, 1.0)
    return MeasuredMachines(device, gpus, min(per_node, gpus), link, link, launch_s=0.0, profile=profile)


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


# --- find the machines of a cluster

COME_ALONG = {"xeon-2-cores": "xeon-2-cores.json"}
"""Profiles by the name under which ``--profile`` takes them: a virtual machine with two cores of an Intel Xeon,
measured with four ranks."""


def profile_of(text: str) -> MachineProfile:
    """Read a profile that comes along, by its name, or a file of ``meshwright measure``.

    Raises:
        ConfigError: there is no such file, it is damaged, or its format is another one.
    """
    if text in COME_ALONG and not Path(text).exists():
        package = files("meshwright.simulation")
        return from_json(package.joinpath(COME_ALONG[text]).read_text(encoding="utf-8"), f"--profile {text}")
    return read_profile(Path(text))


def machines_of(cluster: Cluster, gpus: int = 0) -> Machines:
    """Return the machines of a cluster that names a card or a profile.

    Args:
        gpus: number of devices; 0: the cluster's.

    Raises:
        ConfigError: an unknown card or link, a file that is no profile, or a cluster that cannot be.
    """
    gpus = gpus or cluster.world
    if cluster.profile:
        return measured_machines(profile_of(cluster.profile), gpus, cluster.ranks_per_node)
    return machines(cluster.gpu, gpus, per_node=cluster.ranks_per_node, across=cluster.link)
