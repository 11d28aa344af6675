"""Define what ``meshwright measure`` finds out about a machine, and write and read it as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from meshwright.core.config import from_dict
from meshwright.core.errors import ConfigError, command

from .curves import ProductGrid, SecondsCurve

FORMAT = 3
"""Version of the JSON; another meaning of a field gets another number."""
Points = tuple[tuple[float, float], ...]
NEEDED = {"traffic": ("pointwise",), "host": ("view", "empty", "elementwise", "autograd"), "optimizer": ("fused",)}
"""Figures that every forecast reads."""
AGAIN = "Measure again with meshwright measure FILE"


@dataclass(frozen=True)
class GridPoints:
    """Dims of products, and their seconds by rows, then columns, then depth."""

    dims: tuple[int, ...]
    seconds: tuple[float, ...]


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
    products: dict[str, GridPoints]
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
        return ProductGrid(found.dims, found.seconds)

    @property
    def group_sizes(self) -> list[int]:
        """Sizes of groups whose messages were measured, ascending."""
        return sorted({int(key.split()[1]) for key in self.messages})


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
    for one in fields(MachineProfile):
        if one.name not in values:
            raise ConfigError(f"{where} is a damaged profile: '{one.name}' is missing. {AGAIN}")
    try:
        profile = from_dict(MachineProfile, values, where="profile")
    except ConfigError as error:
        raise ConfigError(f"{where} is a damaged profile ({str(error).splitlines()[0]}). {AGAIN}") from None
    _check(profile, where)
    return profile


def _check(profile: MachineProfile, where: str) -> None:
    for name, value in _numbers("", asdict(profile)):
        if not math.isfinite(value) or value < 0:
            raise ConfigError(
                f"{where} is a damaged profile: {name} is {value}, and must be finite and positive. {AGAIN}"
            )
    for one in ("products", "attention", "traffic", "host", "crowding"):
        if not getattr(profile, one):
            raise ConfigError(f"{where} is a damaged profile: '{one}' is empty. {AGAIN}")
    for one, names in NEEDED.items():
        for name in names:
            if name not in getattr(profile, one):
                raise ConfigError(f"{where} is a damaged profile: '{one}.{name}' is missing. {AGAIN}")
    for name, grid in profile.products.items():
        if len(grid.seconds) != len(grid.dims) ** 3 or list(grid.dims) != sorted(set(grid.dims)):
            raise ConfigError(
                f"{where} is a damaged profile: products['{name}'] are not those of all its dims. {AGAIN}"
            )
    for one in ("attention", "traffic", "optimizer", "messages"):
        for name, points in getattr(profile, one).items():
            sizes = [size for size, _ in points]
            if not sizes or sizes != sorted(set(sizes)) or min(seconds for _, seconds in points) <= 0 or sizes[0] <= 0:
                raise ConfigError(
                    f"{where} is a damaged profile: {one}['{name}'] has no ascending sizes with seconds. {AGAIN}"
                )


def _numbers(name: str, value: Any) -> list[tuple[str, float]]:
    """List the numbers in nested values, with their places."""
    if isinstance(value, Mapping):
        return [found for key, one in value.items() for found in _numbers(f"{name}.{key}".lstrip("."), one)]
    if isinstance(value, (list, tuple)):
        return [found for place, one in enumerate(value) for found in _numbers(f"{name}[{place}]", one)]
    return [(name, value)] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def curve_of(points: Points, power: float = 1.0) -> SecondsCurve:
    """Return the curve through measured points."""
    return SecondsCurve(points, power)
