"""Derive regions from measured influence: the parts of a block in groups that do not touch each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import is_within, owner
from meshwright.core.parts import FusedPart
from meshwright.introspection.calls import watching

from .probe import Adapted, Influence, Probe, Reach

# --- define a region of a block, and the cuts of its tensors


@dataclass(frozen=True)
class Cut:
    """The division of a tensor into groups.

    Attributes:
        name: parameter or buffer, by its path within the block.
        dim: the dim that is cut.
        parts: the parts along it, in order (queries, keys and values that are blocked in one weight are three).
    """

    name: str
    dim: int
    parts: tuple[FusedPart, ...]


@dataclass(frozen=True)
class Region:
    """Column-parallel layers, the modules between, and the row-parallel layer that ends the region.

    Attributes:
        kind: "attention" mixes tokens, a "feed_forward" does not.
        container: path of the smallest module around the region ("" is the block itself).
        producers: linear layers that are cut by their output features.
        consumer: the linear layer that ends the region.
        groups: number of groups of the consumer's input features (query heads; hidden features).
        cuts: cuts of the producers' weights and biases, the consumer's weight, and other tensors of single groups.
        shared: other parameters inside, which all groups use.
        spanning: norms between a producer and the rest that run over all its features.
        roles: (linear layer, role) of each: query, key, value, gate, up, several joined by +, and output or down.
        adapted: linear layers with adapters. Before the region's end, an adapter's first layer is whole, its second
            cut as its host; at the end, the first is cut, the second whole, and one partial sum has the bias.
        latent: linear layers before producers that every rank computes whole, since all groups use their outputs:
            the compressed queries, keys and values of multi-head latent attention (arXiv 2405.04434).
        fed: producers whose inputs derive from latent layers alone, not from outside.
    """

    kind: Literal["attention", "feed_forward"]
    container: str
    producers: tuple[str, ...]
    consumer: str
    groups: int
    cuts: tuple[Cut, ...]
    shared: tuple[str, ...] = ()
    spanning: tuple[str, ...] = ()
    roles: tuple[tuple[str, str], ...] = ()
    adapted: tuple[Adapted, ...] = ()
    latent: tuple[str, ...] = ()
    fed: tuple[str, ...] = ()

    @property
    def begins(self) -> tuple[str, ...]:
        """Linear layers that take input from outside the region."""
        return (*(path for path in self.producers if path not in self.fed), *self.latent)

    @property
    def linears(self) -> tuple[str, ...]:
        """All linear layers of the region but those of adapters."""
        return (*self.latent, *self.producers, self.consumer)

    def adapters_of(self, host: str) -> Adapted | None:
        return next((found for found in self.adapted if found.host == host), None)

    def place_of(self, host: str) -> str:
        """Return the module that stands where the linear layer would without adapters."""
        found = self.adapters_of(host)
        return host if found is None else found.around

    def linears_of(self, host: str) -> tuple[str, ...]:
        """Return a linear layer and those of its adapters."""
        found = self.adapters_of(host)
        return (host, *found.linears) if found is not None else (host,)

    @property
    def joint(self) -> int:
        """The number of groups of the part with the fewest; up to as many ranks hold no copies."""
        return min(part.groups for cut in self.cuts for part in cut.parts)

    def fits(self, ranks: int) -> bool:
        """Return whether ``ranks`` ranks can share the region."""
        return self.groups % ranks == 0 and all(part.fits(ranks) for cut in self.cuts for part in cut.parts)

    def cut_of(self, name: str) -> Cut | None:
        return next((cut for cut in self.cuts if cut.name == name), None)


def shapes_of(block: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a block's parameters and buffers."""
    return {name: tensor.shape for name, tensor in (*block.named_parameters(), *block.named_buffers())}


def resized(region: Region, before: dict[str, torch.Size], after: dict[str, torch.Size], heads: Fraction) -> Region:
    """Transfer a region to a block of the same structure with the shapes ``after`` in place of ``before``.

    ``heads``: ratio of the other block's number of heads to this one's.
    """
    cuts, growths = [], list[tuple[Cut, Fraction]]()
    for cut in region.cuts:
        old, new = before[cut.name][cut.dim], after[cut.name][cut.dim]
        parts = []
        for part in cut.parts:
            size = Fraction(part.size * new, old)
            groups = part.groups * heads if region.kind == "attention" else size * part.groups / part.size
            if size.denominator > 1 or groups.denominator > 1 or size % groups:
                raise UnsupportedError(
                    f"{cut.name} has {new} slices where a model of the same structure has {old}, of which {part.size}"
                    f" fall into {part.groups} groups: how it is cut does not follow from that"
                )
            parts.append(FusedPart(int(size), int(groups)))
            # how many times as many slices a group has
            growths.append((cut, Fraction(size, groups) / Fraction(part.size, part.groups)))
        cuts.append(replace(cut, parts=tuple(parts)))
    growth = next(growth for cut, growth in growths if cut.name == f"{region.consumer}.weight")
    for cut, found in growths:
        # a tensor with a few numbers for each head does not grow with the size of heads
        if found not in ((growth, 1) if len(cut.parts) == 1 else (growth,)):
            raise UnsupportedError(
                f"{cut.name} in the layers of {region.container} has {float(found):g} times as many slices in a group"
                f" as in a small model of the same structure, and the layer behind it {float(growth):g} times: how it"
                f" is cut does not follow"
            )
    end = next(cut for cut in cuts if cut.name == f"{region.consumer}.weight")
    return replace(region, cuts=tuple(cuts), groups=end.parts[0].groups)


def labels_of(groups: list[list[int]], size: int) -> list[int | None]:
    """Return the number of each column's group; None for columns in no group."""
    labels: list[int | None] = [None] * size
    for number, group in enumerate(groups):
        for column in group:
            labels[column] = number
    return labels


def parts_of(labels: Sequence[int | None], groups: int) -> tuple[FusedPart, ...] | None:
    """Return the parts of a sequence of group numbers, each 0 … 0 1 … 1 2 … in equal shares; None for any other."""
    parts: list[FusedPart] = []
    start = 0
    while start < len(labels):
        width = next((i for i, label in enumerate(labels[start:]) if label != 0), len(labels) - start)
        part = [number for number in range(groups) for _ in range(width)]
        if not width or list(labels[start : start + len(part)]) != part:
            return None
        parts.append(FusedPart(len(part), groups))
        start += len(part)
    return tuple(parts)


# --- derive regions from measured influence

SAMPLED = 8
"""Number of a layer's features that are tested for their role."""


def find_regions(probe: Probe) -> tuple[Region, ...]:
    """Find the regions of a block, in the order of their consumers."""
    linears = list(probe.linears)
    influence = probe.influence(linears, linears)
    found = []
    for consumer in linears:
        producers = _producers(influence, consumer)
        if not producers:
            continue
        region = (
            _region(probe, influence, producers, consumer)
            or _with_norms(probe, producers, consumer)
            or _with_latent(probe, influence, producers, consumer)
        )
        if region is not None:
            found.append(region)

    def rank(region: Region) -> tuple[bool, int]:
        paths = (*region.producers, region.consumer)
        return region.kind != "attention", -sum(probe.module(path).get_parameter("weight").numel() for path in paths)

    # none begins with another's last layer: attention first, then those with more weights
    kept: list[Region] = []
    for region in sorted(found, key=rank):
        if not any(other.consumer in region.producers or region.consumer in other.producers for other in kept):
            kept.append(region)
    return tuple(region for region in found if region in kept)


def _producers(influence: Influence, consumer: str) -> list[str]:
    return [producer for producer, other in influence if other == consumer]


def _with_norms(probe: Probe, producers: list[str], consumer: str) -> Region | None:
    """Find a region with norms over all features of a producer held, since they hide its groups."""
    norms = []  # modules with own parameters that take the very output of a producer, and preserve its shape
    for path, (call, *more) in probe.calls.items():
        if path == "" or path in probe.linears or more or call.left is None or call.entered is None:
            continue
        if probe.module(path)._parameters and isinstance(call.output, Tensor) and call.left.shape == call.entered.shape:
            taken = next(iter(call.tensors.values()))
            if any(taken is probe.calls[producer][0].output for producer in producers):
                norms.append(path)
    if not norms:
        return None
    held = [*probe.linears, *norms]
    influence = probe.influence([*producers, *norms], held)
    begins = _producers(influence, consumer)
    through = {norm: _producers(influence, norm) for norm in norms if norm in begins}
    if any(len(sources) != 1 for sources in through.values()):
        return None
    return _region(probe, influence, begins, consumer, {norm: sources[0] for norm, sources in through.items()}, held)


def _with_latent(probe: Probe, influence: Influence, producers: list[str], consumer: str) -> Region | None:
    """Find a region after whole layers, where these take the block's input and reach no other layers."""
    latent = tuple(dict.fromkeys(path for path, other in influence if other in producers))
    begin = not any(other in latent for _, other in influence)
    stay = all(other in (*producers, consumer) for path, other in influence if path in latent)
    if not latent or not begin or not stay or any(probe.linears[path] or path in probe.adapted for path in latent):
        return None
    cut = [path for path in producers if path not in latent]
    fed = tuple(path for path in cut if any((other, path) in influence for other in latent))
    region = _region(probe, influence, cut, consumer, latent=latent, fed=fed) if cut else None
    if region is None or region.kind != "attention" or region.adapted or not region.container:
        return None
    # while the outputs of the layers that begin it are held, inputs of the others ignore the block's
    entered: dict[str, Tensor] = {}

    def note(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        entered[path] = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)).clone()

    generator = torch.Generator().manual_seed(0)
    held = probe.giving({path: probe.output_of(path) for path in region.begins})
    with torch.no_grad(), watching([(path, probe.module(path)) for path in fed], note), held:
        probe.rerun(lambda x: x + torch.randn(x.shape, dtype=x.dtype, generator=generator))
    before = {path: probe.calls[path][0].entered for path in fed}
    follow = all(
        kept is not None and torch.allclose(entered[path], kept, rtol=1e-9, atol=1e-12) for path, kept in before.items()
    )
    return region if follow else None


def _region(
    probe: Probe,
    influence: Influence,
    producers: list[str],
    consumer: str,
    through: dict[str, str] | None = None,
    held: list[str] | None = None,
    latent: tuple[str, ...] = (),
    fed: tuple[str, ...] = (),
) -> Region | None:
    """Return the region that a consumer ends, if its input features fall into groups; else None.

    Args:
        through: norm -> the linear layer before it, for producers that are norms.
        latent, fed: see ``Region``.
    """
    through, held = through or {}, held or list(probe.linears)
    if any(
        other != consumer and producer in producers for producer, other in influence if producer not in through.values()
    ):
        return None  # a producer that reaches other layers too
    reach = {producer: influence[producer, consumer] for producer in producers}
    size = reach[producers[0]].places.shape[1]
    joint = _components([r.places for r in reach.values()])
    fine = _components([r.places[~r.later] for r in reach.values()])  # acting at their own token only: queries
    share, rest = divmod(len(fine), len(joint)) if joint else (0, 1)
    runs = [sorted(itertools.chain(*fine[i * share : (i + 1) * share])) for i in range(len(joint))]
    rows = _all_rows(reach, joint, fine) if share > 1 and not rest and runs == joint else None  # runs of equally many
    if rows is None:
        fine, rows = joint, _all_rows(reach, joint, joint)
    columns = parts_of(labels_of(fine, size), len(fine))
    if rows is None or len(fine) < 2 or columns is None:
        return None
    cuts = [Cut(f"{consumer}.weight", 0 if probe.linears[consumer] else 1, columns)]
    for producer, parts in rows.items():
        for path in (producer, *([through[producer]] if producer in through else [])):
            for name, tensor in probe.module(path)._parameters.items():
                if tensor is not None:
                    dim = 1 if probe.linears.get(path) and tensor.dim() == 2 else 0
                    cuts.append(Cut(f"{path}.{name}", dim, parts))
    linears = [through.get(producer, producer) for producer in producers]
    adapted = tuple(probe.adapted[path] for path in (*linears, consumer) if path in probe.adapted)
    cuts += _cuts_of_adapters(probe, adapted, cuts, consumer)
    container = owner(consumer)  # the smallest module around all that is called itself, and not only its methods
    while not all(is_within(path, container) for path in (*latent, *linears)) or not probe.calls.get(
        container, not container
    ):
        container = owner(container)
    others, shared = _other_tensors(probe, container, {cut.name for cut in cuts}, (consumer, *fed), (fine, joint), held)
    kind = "attention" if any(r.later.any() for r in reach.values()) else "feed_forward"
    roles = []
    for path, r in reach.items():  # queries act at their own token only, keys and values at later ones, values linearly
        later = r.later.nonzero().flatten().tolist() if kind == "attention" else list(range(len(r.later)))
        sampled = later[:: max(1, len(later) // SAMPLED)]
        linear = {probe.is_linear(path, feature, consumer, held) for feature in sampled}
        names = {True: "value", False: "key"} if kind == "attention" else {True: "up", False: "gate"}
        of_query = ["query"] if kind == "attention" and not r.later.all() else []
        found = [*of_query, *(names[way] for way in (False, True) if way in linear)]
        roles.append((through.get(path, path), "+".join(found)))
    if kind == "feed_forward" and not any("up" in role for _, role in roles):  # nothing is gated
        roles = [(path, "up") for path, _ in roles]
    roles = [*((path, "latent") for path in latent), *roles, (consumer, "output" if kind == "attention" else "down")]
    shared += tuple(
        f"{path}.{name}" for path in latent for name, p in probe.module(path)._parameters.items() if p is not None
    )
    shared += tuple(f"{pair[path == consumer]}.weight" for path, pair in _pairs(adapted))
    if consumer in probe.adapted and probe.module(consumer)._parameters.get("bias") is not None:
        shared += (f"{consumer}.bias",)
    fine_cuts, more = (*cuts, *others), (tuple(through), tuple(roles), adapted, latent, fed)
    return Region(kind, container, tuple(linears), consumer, len(fine), fine_cuts, shared, *more)


def _components(influences: list[Tensor]) -> list[list[int]]:
    """Group columns that the rows of (rows, columns) tie together, by first column, without unreached columns."""
    influence = torch.cat(influences)
    parent = list(range(influence.shape[1]))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for row in influence:
        moved = row.nonzero().flatten().tolist()
        first = root(moved[0]) if moved[1:] else 0
        for other in moved[1:]:
            parent[root(other)] = first
    members: dict[int, list[int]] = {}
    for column in influence.any(0).nonzero().flatten().tolist():
        members.setdefault(root(column), []).append(column)
    return sorted(members.values())


def _all_rows(
    reach: dict[str, Reach], joint: list[list[int]], fine: list[list[int]]
) -> dict[str, tuple[FusedPart, ...]] | None:
    """Divide each producer's rows into parts: those that act at later tokens by joint groups, others by fine ones.

    None if some rows come in no order that ranks can share.
    """
    found: dict[str, tuple[FusedPart, ...]] = {}
    for producer, r in reach.items():
        size, start, later = r.places.shape[1], 0, r.later.tolist()
        firsts = [row.nonzero().flatten().tolist()[:1] for row in r.places]
        found[producer] = ()
        while start < len(later):
            ends = (i for i in range(start, len(later)) if fine is not joint and later[i] != later[start])
            end = next(ends, len(later))
            groups = joint if later[start] else fine
            labels = labels_of(groups, size)
            parts = parts_of([labels[first[0]] if first else None for first in firsts[start:end]], len(groups))
            if parts is None:
                return None
            found[producer] += parts
            start = end
    return found


def _pairs(adapted: tuple[Adapted, ...]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (host, (first, second)) of every adapter."""
    return ((found.host, pair) for found in adapted for pair in found.pairs)


def _cuts_of_adapters(probe: Probe, adapted: tuple[Adapted, ...], cuts: list[Cut], consumer: str) -> list[Cut]:
    """Cut an adapter's second layer as its host, whose features it adds to; its first one where a region ends."""
    of_host, found = {cut.name: cut.parts for cut in cuts}, []
    for host, pair in _pairs(adapted):
        path = pair[host != consumer]
        is_in_out = probe.beside[path]
        found.append(Cut(f"{path}.weight", int(is_in_out == (host != consumer)), of_host[f"{host}.weight"]))
    return found


def _other_tensors(
    probe: Probe,
    container: str,
    known: set[str],
    readers: tuple[str, ...],
    partitions: tuple[list[list[int]], ...],
    held: list[str],
) -> tuple[list[Cut], tuple[str, ...]]:
    """Cut other parameters and buffers in the container that belong to single groups, and name those that all use.

    Args:
        readers: the layer that ends the region, and those inside that take input derived from whole layers.
    """
    consumer, *fed = readers
    cuts: list[Cut] = []
    shared: list[str] = []
    module = probe.module(container)
    idle = [path for found in probe.adapted.values() for path in found.idle]
    for name, tensor in (*module.named_parameters(container), *module.named_buffers(container)):
        name = name.removeprefix(".")
        if name in known or not tensor.is_floating_point() or owner(name) in (*probe.linears, *probe.beside, *idle):
            continue
        along = probe.influence_of_tensor(name, tensor, held)
        inside = any((name, path) in influence for influence in along for path in fed)
        reached = [influence[name, consumer].places for influence in along if (name, consumer) in influence]
        if not reached and not inside:
            continue
        cut = None
        for columns in partitions if not inside else ():
            for dim, places in enumerate(reached if len(columns) > 1 and cut is None else ()):
                # along the first dim whose slices belong to single groups in order
                of_column = labels_of(columns, places.shape[1])
                groups = [{of_column[column] for column in row.nonzero().flatten().tolist()} for row in places]
                is_single = all(len(found) == 1 for found in groups)
                parts = parts_of([*itertools.chain(*groups)], len(columns)) if is_single else None
                cut = Cut(name, dim, parts) if parts is not None and cut is None else cut
        if cut is not None:
            cuts.append(cut)
        elif isinstance(tensor, torch.nn.Parameter):
            shared.append(name)
    return cuts, tuple(shared)
