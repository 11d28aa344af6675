"""Read traces, and place what each rank had in what one process had."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.core.errors import ConfigError

FORMAT = "meshwright trace 2"
CLOSE = 1e-4
"""Largest relative error of a marginal's value that is found in another marginal, before the first step."""


@dataclass
class Run:
    """All ranks' traces of one run."""

    folder: Path
    ranks: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: str | Path) -> Run:
        """Read the traces in a folder.

        Raises:
            ConfigError: there is none, or one of another format, or ranks are missing.
        """
        files = sorted(Path(folder).glob("rank-*.pt"))
        if not files:
            raise ConfigError(
                f"{folder} holds no trace: no process of that run stepped an optimizer of torch.optim. Write one with:"
                f" meshwright observe {folder} -- python train.py"
            )
        found = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
        if any(trace.get("format") != FORMAT for trace in found):
            raise ConfigError(f"{folder} holds traces of another version of meshwright; observe the run anew")
        found.sort(key=lambda trace: trace["rank"])
        world = max(trace["world"] for trace in found)
        if world != len(found):
            raise ConfigError(f"{folder} holds traces of {len(found)} of {world} ranks; the others never stepped")
        return cls(Path(folder), found)

    @property
    def n_steps(self) -> int:
        return min(len(trace["steps"]) for trace in self.ranks)

    def step(self, rank: int, step: int) -> dict[str, Any]:
        return self.ranks[rank]["steps"][step]


@dataclass(frozen=True)
class Place:
    """Where a rank's tensor lies in one process's: the whole tensor, the elements ``index`` along ``dim``, or a block.

    Attributes:
        name: the parameter of one process.
        dim, index: the dim that is cut, and the elements there; None for the whole.
        offset: the offset of a block that is cut along several dims.
    """

    name: str
    dim: int | None = None
    index: Tensor | None = field(default=None, compare=False)
    offset: tuple[int, ...] | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return self.dim, None if self.index is None else tuple(self.index.tolist()), self.offset


def relative(found: Tensor, reference: Tensor, least: float = 0.0) -> float:
    """Return ‖found − reference‖ / ‖reference‖; infinite for other shapes or numbers that are not finite."""
    if found.shape != reference.shape:
        return float("inf")
    below = max(float(reference.double().norm()), least, 1e-300)
    error = float((found.double() - reference.double()).norm()) / below
    return error if error == error else float("inf")


def vector(entry: dict[str, Any]) -> Tensor:
    return torch.cat(entry["m"])


def cut_of(own: dict[str, Any], whole: dict[str, Any]) -> tuple[int, Tensor] | None:
    """Find the dim along which a shard is cut, and its elements there, by the values of marginals."""
    if len(own["shape"]) != len(whole["shape"]):
        return None
    dims = [d for d, (a, b) in enumerate(zip(own["shape"], whole["shape"], strict=True)) if a != b]
    if len(dims) != 1 or own["shape"][dims[0]] > whole["shape"][dims[0]]:
        return None
    dim = dims[0]
    mine, all_ = own["m"][dim].double(), whole["m"][dim].double()
    scale = float(all_.abs().max())
    if scale == 0 or float(all_.std()) < 1e-6 * scale:
        return None
    for start in (i for i in range(len(all_) - len(mine) + 1) if abs(float(all_[i] - mine[0])) <= CLOSE * scale):
        if float((all_[start : start + len(mine)] - mine).abs().max()) <= CLOSE * scale:
            return dim, torch.arange(start, start + len(mine))
    index = (mine[:, None] - all_[None]).abs().argmin(1)
    if float((all_[index] - mine).abs().max()) <= CLOSE * scale and len(index.unique()) == len(index):
        return dim, index
    return None


def places_of(one: dict[str, Any], own: dict[str, Any]) -> dict[str, Place]:
    """Place each parameter of a rank among those of one process, by name and by the values before the first step.

    A parameter that no value tells apart (norms of ones, biases of zeros) follows its module's other parameters.
    """
    whole, mine = one["steps"][0]["before"], own["steps"][0]["before"]
    found: dict[str, Place] = {}
    open_: list[str] = []
    for name, entry in mine.items():
        if (place := _place(name, entry, whole)) is not None:
            found[name] = place
        else:
            open_.append(name)
    prefixes = {
        name.rpartition(".")[0]: place.name.rpartition(".")[0]
        for name, place in found.items()
        if name.rpartition(".")[2] == place.name.rpartition(".")[2]
    }
    blocks: dict[str, str] = {}
    for theirs, ours in prefixes.items():  # what a stage calls its blocks
        a, b = theirs.split("."), ours.split(".")
        while a and b and a[-1] == b[-1]:
            a, b = a[:-1], b[:-1]
        blocks[".".join(a)] = ".".join(b)
    for name in open_:
        entry, (module, _, leaf) = mine[name], name.rpartition(".")
        guess = f"{prefixes[module]}.{leaf}" if module in prefixes else ""
        if guess not in whole:
            parts = name.split(".")
            for n in range(len(parts), -1, -1):
                head = ".".join(parts[:n])
                if head in blocks:
                    guess = ".".join(filter(None, (blocks[head], *parts[n:])))
                    break
        if guess not in whole:
            guess = name
        if guess not in whole:
            continue
        if entry["shape"] == whole[guess]["shape"]:
            found[name] = Place(guess)
            continue
        beside = [p for n, p in found.items() if n.rpartition(".")[0] == module and p.dim == 0 and p.index is not None]
        if beside and len(beside[0].index) == entry["shape"][0]:  # type: ignore[arg-type, index]
            found[name] = Place(guess, 0, beside[0].index)
    return found


def _place(name: str, entry: dict[str, Any], whole: dict[str, Any]) -> Place | None:
    if entry["whole"] and entry["offset"] is not None and name in whole and entry["whole"] == whole[name]["shape"]:
        dims = [d for d, (a, b) in enumerate(zip(entry["shape"], entry["whole"], strict=True)) if a != b]
        if not dims:
            return Place(name)
        if len(dims) == 1:
            start = entry["offset"][dims[0]]
            return Place(name, dims[0], torch.arange(start, start + entry["shape"][dims[0]]))
        return Place(name, offset=tuple(entry["offset"]))
    constant = float(entry["m"][0].std()) < 1e-6 * (float(entry["m"][0].abs().max()) + 1e-300) if entry["m"] else True
    order = [name, *(other for other in whole if other != name)] if name in whole else list(whole)
    for other in order:
        if entry["shape"] == whole[other]["shape"]:
            if relative(vector(entry), vector(whole[other])) <= CLOSE and (other == name or not constant):
                return Place(other)
        elif (cut := cut_of(entry, whole[other])) is not None:
            return Place(other, *cut)
    return None


def part(whole: dict[str, Any], place: Place) -> Tensor:
    """Return the numbers of one process that a rank's tensor at ``place`` must equal."""
    if place.dim is None:
        return vector(whole)
    return whole["m"][place.dim][place.index]


def own_part(entry: dict[str, Any], place: Place) -> Tensor:
    return vector(entry) if place.dim is None else entry["m"][place.dim]


# --- rows


@dataclass(frozen=True)
class Row:
    """One row of an output: its numbers by token and by feature, and the gradient that came back."""

    key: str
    rank: int
    tokens: Tensor
    features: Tensor
    order: int
    dtype: str
    back_tokens: Tensor | None = None
    back_features: Tensor | None = None
    back_order: int = -1
    at: Tensor | None = None
    """The places of its tokens in the whole row; None for the whole."""


def row_keys(step: dict[str, Any]) -> dict[int, list[str] | None]:
    """Name the rows of each outermost call by the hash of its integer input; a call without one follows the last."""
    found, last = {}, None
    for number, call in enumerate(step["calls"], 1):
        ids = [given for given in call["inputs"].values() if given["ids"] is not None]
        if ids:
            last = ids[0]["rows"]
        found[number] = last
    return found


def rows_of(
    step: dict[str, Any], rank: int, names: dict[str, str], lengths: dict[str, tuple[str, Tensor]]
) -> dict[tuple[str, int], list[Row]]:
    """List the rows of every output, by module and number of the call within the outermost call.

    Args:
        names: what one process calls the rank's modules.
        lengths: hash of a rank's row -> one process's row that contains it, and the places of its tokens there.
    """
    keys, found = row_keys(step), defaultdict(list)
    counted: dict[tuple[str, int], int] = defaultdict(int)
    for order, event in enumerate(step["forward"]):
        if not event["known"]:
            continue
        name = str(names.get(event["name"], event["name"]))
        counted[name, event["call"]] += 1
        tokens, features = event["out"]["t"], event["out"]["f"]
        back: dict[str, Tensor] | None = event["back"]
        rows = keys.get(event["call"])
        if rows is None or len(rows) == 0 or len(tokens) % len(rows):
            rows = [f"#{number} of {len(tokens)}" for number in range(len(tokens))]  # such as a table of positions
        elif len(tokens) != len(rows):  # (rows · tokens, features)
            each = len(tokens) // len(rows)
            tokens, features = tokens.view(len(rows), each), features.view(len(rows), -1)
            if back is not None and back["t"].numel() == tokens.numel():
                back = {"t": back["t"].view(len(rows), each), "f": back["f"].view(len(rows), -1)}
            else:
                back = None
        for number, key in enumerate(rows):
            known = lengths.get(key)
            returned = back if back is not None and len(back["t"]) == len(rows) else None
            found[name, counted[name, event["call"]]].append(
                Row(
                    known[0] if known else key,
                    rank,
                    tokens[number],
                    features[number],
                    order,
                    event["out"]["dtype"],
                    returned["t"][number] if returned else None,
                    returned["f"][number] if returned else None,
                    event["order"],
                    known[1] if known else None,
                )
            )
    return found


def parts_of_rows(one: dict[str, Any], own: dict[str, Any]) -> dict[str, tuple[str, Tensor]]:
    """Find the rows of one process that contain a rank's rows, which are runs of their tokens."""
    whole = {
        key: ids
        for call in one["calls"]
        for given in call["inputs"].values()
        if given["ids"] is not None
        for key, ids in zip(given["rows"], given["ids"], strict=True)
    }
    found = {}
    for call in own["calls"]:
        for given in call["inputs"].values():
            for key, ids in zip(given["rows"], given["ids"] or [], strict=False):
                if key in whole or key in found:
                    continue
                for other, row in whole.items():
                    if (at := _runs(ids, row)) is not None:
                        found[key] = other, at
                        break
    return found


def _runs(ids: list[int], row: list[int]) -> Tensor | None:
    """Find ids in a row as one run, or as two of equal length."""
    n = len(ids)
    if n >= len(row) or n == 0:
        return None
    for size in (n, n // 2):
        if size < 2 or n % size:
            continue
        starts = []
        for begin in range(0, n, size):
            run = ids[begin : begin + size]
            at = [i for i in range(len(row) - size + 1) if row[i : i + size] == run]
            if not at:
                break
            starts.append(at[0])
        if len(starts) * size == n:
            return torch.cat([torch.arange(start, start + size) for start in starts])
    return None
