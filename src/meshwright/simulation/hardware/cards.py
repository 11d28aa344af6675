"""Look up devices and links by name."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.core.devices import CUDA
from meshwright.core.errors import ConfigError, nearest

from .device import AttentionSpeed, Device
from .links import Link, Machines

BITS = {"ib": "infiniband", "roce": "roce", "eth": "ethernet", "opa": "omnipath"}
"""Prefixes by which users ask for a link between nodes; the number behind is its Gb/s for each device: ib400."""


@cache
def sheets() -> Mapping[str, Any]:
    """Return the data sheets that come along, by card."""
    return tomllib.loads(files("meshwright.simulation.hardware").joinpath("cards.toml").read_text())


def card_names() -> list[str]:
    """List the names of the cards that are known."""
    return [name for name in sheets() if name != "links"]


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
        flops=sheet["flops"],
        efficiency=sheet["efficiency"],
        bandwidth=sheet["bandwidth"],
        multiprocessors=sheet["multiprocessors"],
        host_operator_s=sheet.get("host_operator_s", Device.host_operator_s),
        context_bytes=sheet["context"],
        attention={kernel: AttentionSpeed(*speeds) for kernel, speeds in sheet["attention"].items()},
        source=sheet["source"],
    )


def link(kind: str, bandwidth: float) -> Link:
    """Return a link of a kind that is known, such as infiniband, with this many bytes per second and direction."""
    row = sheets()["links"][kind]
    return Link(kind, bandwidth, row["latency_s"], row["efficiency"], row["source"])


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
    return Machines(device(card), gpus, min(per_node, gpus), inside, between)


def with_efficiency(of: Device, dtype: str, efficiency: float) -> Device:
    """Return the device with another efficiency of products in ``dtype``."""
    return replace(of, efficiency={**of.efficiency, dtype: efficiency})
