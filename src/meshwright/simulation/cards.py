"""Describe cards and the links between them, and the seconds of their messages."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from typing import Any

from meshwright.core.devices import CUDA
from meshwright.core.errors import ConfigError, nearest

# --- price operators on one device

TILES = ((256, 128, 1.0), (128, 128, 0.96), (128, 64, 0.86), (64, 64, 0.7))
"""Tiles (rows, columns) of a matrix product's kernels, with their speed relative to the largest: smaller tiles load
more operands per product. The effect is described in NVIDIA's Matrix Multiplication Background User's Guide; the
fractions are assumed."""
RAMP = 0.63
"""Depth k, over the FLOPs that a device computes for each byte that it moves, at which the begin and end of a product's
tile (first operands in, result out) take as long as its products: 96 on an A100, where it was assumed; twice as deep
where products are twice as fast."""

ALIGNED = ((64, 1.0), (32, 0.97), (16, 0.88), (8, 0.72))
"""Speed of products by the power of two that divides their dims: rows of operands that begin within a line of memory
are loaded in smaller pieces (the same guide; the fractions are assumed)."""


def aligned(dim: float) -> float:
    """Return the relative speed of products with this dim."""
    return next((speed for power, speed in ALIGNED if dim % power == 0), 0.5)


@dataclass(frozen=True)
class AttentionSpeed:
    """Fractions of the peak of half-precision products that an attention kernel reaches with heads of 128."""

    forward: float
    backward: float


@dataclass(frozen=True, eq=False)
class Device:
    """One device's speeds.

    Attributes:
        name: name by which users ask for the device.
        kind: device type of torch.
        memory_bytes: memory that the allocator can use.
        sold_gb: memory in the vendor's words; 0: of no known card.
        flops: dense products per second by dtype, in FLOP/s, by the data sheet or measured.
        efficiency: fraction of ``flops`` that large products reach, by dtype.
        bandwidth: bytes per second of device memory.
        bandwidth_efficiency: fraction of it that memory-bound kernels reach.
        multiprocessors: units that tiles of a product are distributed to; 0: products of any shape are equally fast.
        kernel_s: seconds from a kernel's end to the next one's begin.
        host_operator_s: seconds of the host per operator that it launches.
        context_bytes: memory that the driver takes in each process.
        attention: speeds of attention kernels by name.
    """

    name: str
    kind: str
    memory_bytes: float
    flops: Mapping[str, float]
    bandwidth: float
    efficiency: Mapping[str, float] = field(default_factory=dict)
    bandwidth_efficiency: float = 0.85
    multiprocessors: int = 0
    kernel_s: float = 2e-6
    host_operator_s: float = 5e-6
    context_bytes: float = 0.0
    sold_gb: int = 0
    attention: Mapping[str, AttentionSpeed] = field(default_factory=dict)

    def speed(self, dtype: str) -> float:
        """Return the FLOP/s of large products in ``dtype``.

        Raises:
            ConfigError: the device has no products in this dtype.
        """
        if dtype not in self.flops:
            legal = ", ".join(self.flops)
            raise ConfigError(f"{self.name} has no figure for products in {dtype}. Legal are {legal}.")
        return self.flops[dtype] * self.efficiency.get(dtype, self.efficiency.get("default", 0.75))

    @cached_property
    def half(self) -> str:
        """The dtype of half-precision products: bfloat16 where the device has it."""
        return next((dtype for dtype in ("bfloat16", "float16") if dtype in self.flops), next(iter(self.flops)))

    def product_s(
        self, rows: float, columns: float, depth: float, dtype: str, element_bytes: float = 2.0, number: float = 1
    ) -> float:
        """Return the seconds of ``number`` products (rows, depth) x (depth, columns), launched as one group.

        The tiles of a group share the multiprocessors (CUTLASS' grouped GEMM), so that only the group's last wave is
        not full.
        """
        return _product_s(self, rows, columns, depth, dtype, element_bytes, number)

    def utilization(self, rows: float, columns: float, depth: float, dtype: str, number: float) -> float:
        """Return the fraction of large products' speed that ``number`` products of this shape reach."""
        ramp = depth / (depth + RAMP * self.flops[dtype] / self.bandwidth) * min(aligned(columns), aligned(depth))
        if not self.multiprocessors:
            return ramp
        filled = 0.0  # fraction of the multiprocessors' time that computes elements of the result
        for height, width, speed in TILES:
            tiles = math.ceil(number * math.ceil(rows / height) * math.ceil(columns / width))
            waves = math.ceil(tiles / self.multiprocessors)
            filled = max(filled, speed * number * rows * columns / (waves * self.multiprocessors * height * width))
        return ramp * filled

    def traffic_s(self, moved: float) -> float:
        """Return the seconds in which ``moved`` bytes are read or written."""
        return moved / (self.bandwidth * self.bandwidth_efficiency)

    def attention_s(self, flops: float, kernel: str, *, backward: bool, head_dim: int) -> float:
        """Return the seconds of a fused attention kernel for ``flops`` products, the masked ones left out.

        Heads narrower than 128 fill the units less: at 64, FlashAttention-2 (arXiv 2307.08691, figures 4 to 6) reaches
        about 0.87 of its speed at 128.
        """
        speed = self.attention.get(kernel, AttentionSpeed(0.5, 0.4))
        fraction = speed.backward if backward else speed.forward
        narrow = 1.0 if head_dim >= 128 else 0.74 + 0.26 * head_dim / 128
        return flops / (self.flops[self.half] * fraction * narrow) + self.kernel_s


@lru_cache(maxsize=100_000)
def _product_s(
    on: Device, rows: float, columns: float, depth: float, dtype: str, element_bytes: float, number: float
) -> float:
    if min(rows, columns, depth) <= 0:
        return 0.0
    flops = 2.0 * number * rows * columns * depth
    compute = flops / (on.speed(dtype) * on.utilization(rows, columns, depth, dtype, number))
    moved = number * ((rows * depth + depth * columns) * element_bytes + rows * columns * 2.0)
    return max(compute, on.traffic_s(moved)) + on.kernel_s


# --- price collectives on a cluster by algorithm and topology


@dataclass(frozen=True)
class Link:
    """How one device sends to another.

    Attributes:
        name: name by which users ask for the link.
        bandwidth: bytes per second and device in each direction, by the data sheet or measured.
        latency_s: seconds of an empty message, of one step of a ring.
        efficiency: fraction of the bandwidth that large collectives reach.
    """

    name: str
    bandwidth: float
    latency_s: float
    efficiency: float = 0.8

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
        paired: devices of a node that are joined two by two, so that a group has only the links between its own; 0: a
            switch joins them.
    """

    device: Device
    gpus: int
    per_node: int
    inside: Link
    across: Link
    launch_s: float = 8e-6
    paired: int = 0

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


@lru_cache(maxsize=100_000)
def _ring_s(moved: float, group: Group, machines: Machines) -> float:
    """Price rings, as many as a node has adapters for the group: each link carries (1 - 1/ranks) of its ring's bytes
    (Thakur, Rabenseifner, Gropp 2005; the bus bandwidth of nccl-tests).
    """
    ranks = group.size
    if ranks <= 1 or moved <= 0:
        return 0.0
    inside = group.in_node(machines)
    links = (inside - 1) / (machines.paired - 1) if machines.paired else 1.0  # of a device to the group's others
    speed = machines.inside.speed * links if inside > 1 else math.inf
    if ranks > inside:
        speed = min(speed, machines.across.speed * inside)
    # the latency of one pass: a ring within nodes, a tree between many nodes
    nodes = -(-ranks // inside)
    steps = (ranks - nodes) * machines.inside.latency_s / max(1, nodes)
    steps += min(nodes - 1, 4 * math.log2(max(nodes, 1)) if nodes > 1 else 0) * machines.across.latency_s
    return moved * (ranks - 1) / ranks / speed + steps + machines.launch_s


# --- price one message by its operation, its ranks and its bytes


def message_s(op: str, ranks: tuple[int, ...], tensor_bytes: float, machines: Machines) -> float:
    """Return the seconds of a message from its call to its last byte, with nothing else on its links.

    An all-to-all of equal parts moves as many bytes over each link as an all-gather to the same bytes does; so does a
    broadcast or a scatter in a ring.

    Args:
        op: all_gather, reduce_scatter, all_reduce, all_to_all, send, or torch's name of another operation.
        ranks: ranks of the process group, in order, with equal distances.
        tensor_bytes: bytes of the message's larger side.
    """
    if len(ranks) < 2:
        return 0.0
    stride = abs(ranks[1] - ranks[0])
    if op == "send":
        return machines.send_s(tensor_bytes, stride)
    group = Group(len(ranks), stride)
    return machines.reduce_s(tensor_bytes, group) if op == "all_reduce" else machines.gather_s(tensor_bytes, group)


# --- look up devices and links by name

BITS = {"ib": "infiniband", "roce": "roce", "eth": "ethernet", "opa": "omnipath"}
"""Prefixes by which users ask for a link between nodes; the number behind is its Gb/s for each device: ib400."""


@cache
def sheets() -> Mapping[str, Any]:
    """Return the data sheets that come along, by card."""
    return tomllib.loads(files("meshwright.simulation").joinpath("cards.toml").read_text())


def card_names() -> list[str]:
    """List the names of the cards that are known."""
    return [name for name in sheets() if name not in ("links", "peaks")]


def _sheet(name: str) -> tuple[str, Mapping[str, Any]]:
    wanted = _plain(name)
    for card in card_names():
        if wanted in map(_plain, (card, *sheets()[card]["aliases"])):
            return card, sheets()[card]
    raise ConfigError(
        f"gpu = {name!r}: no card of that name is known.{nearest(name, card_names())} Known are"
        f" {', '.join(card_names())}."
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def half_peak(device_name: str, dtype: str) -> float | None:
    """Return the data sheet's FLOP/s in half precision of the device that torch names so; None if none is known."""
    further = sheets()["peaks"]
    peaks = [*further["half"].items(), *(further["float16"].items() if dtype == "float16" else ())]
    cards = [sheets()[name] for name in card_names()]
    peaks += [(card["torch"], card["flops"].get(dtype)) for card in cards if "torch" in card]
    found = [(match[0], flops) for name, flops in peaks if (match := re.search(name, device_name, re.IGNORECASE))]
    return max(found, key=lambda pair: len(pair[0]))[1] if found else None


@cache
def device(name: str) -> Device:
    """Return a card by its name or an alias, whatever its case.

    Raises:
        ConfigError: unknown; names the nearest.
    """
    card, sheet = _sheet(name)
    return Device(
        name=card,
        kind=CUDA,
        memory_bytes=sheet["memory"],
        sold_gb=sheet["sold"],
        flops=sheet["flops"],
        efficiency=sheet["efficiency"],
        bandwidth=sheet["bandwidth"],
        multiprocessors=sheet["multiprocessors"],
        host_operator_s=sheet.get("host_operator_s", Device.host_operator_s),
        context_bytes=sheet["context"],
        attention={kernel: AttentionSpeed(*speeds) for kernel, speeds in sheet["attention"].items()},
    )


def link(kind: str, bandwidth: float) -> Link:
    """Return a link of a kind that is known, such as infiniband, with this many bytes per second and direction."""
    row = sheets()["links"][kind]
    return Link(kind, bandwidth, row["latency_s"], row["efficiency"])


def link_across(text: str) -> Link:
    """Return the link between nodes that a user asks for: ib400, roce100, eth25, opa100 (Gb/s for each device).

    Raises:
        ConfigError: the text names none.
    """
    found = re.fullmatch(r"([a-z]+)(\d+)", text.lower())
    if found is None or found[1] not in BITS or not int(found[2]):
        words = ", ".join(f"{prefix}N" for prefix in BITS)
        raise ConfigError(
            f"link = {text!r}: legal are {words}, where N is the Gb/s of each GPU's adapter, such as ib400"
        )
    return link(BITS[found[1]], int(found[2]) / 8 * 1e9)


def machines(gpu: str, gpus: int, *, per_node: int = 0, across: str = "") -> Machines:
    """Return a cluster of ``gpus`` public cards in their usual machine, unless ``per_node`` and ``across`` differ.

    Raises:
        ConfigError: an unknown card or link, or a cluster that cannot be.
    """
    card, sheet = _sheet(gpu)
    # racks of more than 8 GPUs are rented in parts
    fills_nodes = per_node != 0 or sheet["domain"] <= 8
    per_node = per_node or sheet["domain"]
    if gpus < 1 or per_node < 1:
        raise ConfigError(f"{gpus} GPUs, {per_node} on a node: there is at least 1 of each")
    if fills_nodes and gpus > per_node and gpus % per_node:
        raise ConfigError(
            f"{gpus} GPUs do not fill nodes of {per_node}. Ask for a multiple of {per_node}"
            f" ({gpus // per_node * per_node} or {-(-gpus // per_node) * per_node}), or for other nodes (--per-node,"
            f" Cluster.ranks_per_node)."
        )
    inside = link("nvlink" if sheet["nvlink"] >= 100e9 else "pcie", sheet["nvlink"])
    between = link_across(across) if across else link("infiniband", sheet["network"])
    return Machines(device(card), gpus, min(per_node, gpus), inside, between, paired=paired(card, per_node))


def paired(card: str, per_node: int) -> int:
    """Return the devices of such a node if they are joined two by two, else 0: boards of four have no switch."""
    sheet = sheets()[card]
    boards = sheet["nvlink"] >= 100e9 and per_node == 4 and sheet["domain"] == 8
    return per_node if boards or not sheet.get("switched", True) else 0
