"""Find linear layers with adapters: pairs of consecutive linear layers, whose output is added to that of a host.

The computation identifies them: a module takes one tensor and returns the host's output plus multiples of the pairs'
outputs for the same tensor. So the module is itself linear, and is measured in the host's place: its output, not that
of one of its layers, is held and pushed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.core.names import is_within, owner
from meshwright.introspection.adapted_model import host_of_magnitude
from meshwright.introspection.calls import Call

TOLERANCE = 1e-8
"""Relative tolerance, in fp64, between a module's output and the sum of its layers' outputs."""

SCALED = "lengths of whole rows are trained there (DoRA: adapters.kind = dora); lora and rslora are cut"
"""Why layers are not cut beside which lengths of rows are trained."""


@dataclass(frozen=True)
class Adapted:
    """A linear layer with adapters, by paths within the block.

    Attributes:
        host: the linear layer.
        around: the module that adds the adapters' outputs to the host's.
        pairs: (first, second) linear layer of each active adapter.
        idle: modules with parameters inside that were not called: adapters that are switched off.
    """

    host: str
    around: str
    pairs: tuple[tuple[str, str], ...]
    idle: tuple[str, ...] = ()

    @property
    def linears(self) -> tuple[str, ...]:
        return tuple(path for pair in self.pairs for path in pair)


def find_adapted(block: nn.Module, calls: dict[str, list[Call]], linears: dict[str, bool]) -> tuple[Adapted, ...]:
    """Find adapted linear layers in a block, or outside the blocks.

    Args:
        calls: calls of the modules inside, by path.
        linears: linear layers; path -> whether the weight is stored (in, out).
    """
    found: list[Adapted] = []
    for around in calls:
        inside = [path for path in linears if path != around and is_within(path, around)]
        if not around or len(inside) < 3 or len(inside) % 2 == 0 or len(calls[around]) != 1:
            continue
        one = _adapted(block, calls, around, inside)
        if one is not None and not any(
            is_within(other.around, around) or is_within(around, other.around) for other in found
        ):
            found.append(one)
    return tuple(found)


def _adapted(block: nn.Module, calls: dict[str, list[Call]], around: str, inside: list[str]) -> Adapted | None:
    call = calls[around][0]
    taken, given = call.entered, call.left
    if taken is None or given is None or not isinstance(call.output, Tensor):
        return None
    takes = [path for path in inside if _equal(calls[path][0].entered, taken)]
    pairs = [
        (a, b)
        for a in takes
        for b in inside
        if b not in takes and next(iter(calls[b][0].tensors.values()), None) is calls[a][0].output
    ]
    hosts = [path for path in takes if path not in {a for a, _ in pairs}]
    if len(hosts) != 1 or sorted((*hosts, *(path for pair in pairs for path in pair))) != sorted(inside):
        return None
    (host,) = hosts
    if any(block.get_submodule(path)._parameters.get("bias") is not None for pair in pairs for path in pair):
        return None
    module = block.get_submodule(around)
    idle = {owner(name) for name, _ in module.named_parameters(around)} - set(inside)
    if any(path in calls or path == around for path in idle):
        return None
    # the module's output is the host's plus a nonzero multiple of each of the others
    outputs = [calls[path][0].left for path in (host, *(b for _, b in pairs))]
    whole = [output for output in outputs if output is not None and output.shape == given.shape]
    if len(whole) < len(outputs):
        return None
    rest, *columns = ((given - whole[0]).reshape(-1, 1), *(output.reshape(-1, 1) for output in whole[1:]))
    added = torch.cat(columns, dim=1)
    times = torch.linalg.lstsq(added, rest).solution
    if not (added @ times - rest).norm() <= TOLERANCE * given.norm() or not bool((times != 0).all()):
        return None
    return Adapted(host, around, tuple(pairs), tuple(sorted(idle)))


def _equal(tensor: Tensor | None, other: Tensor) -> bool:
    return tensor is not None and tensor.shape == other.shape and torch.equal(tensor, other)


def find_others(block: nn.Module, calls: dict[str, list[Call]], linears: list[str]) -> Iterator[str]:
    """Describe the modules that wrap a linear layer, own other parameters, change its output, and are not adapters.

    Args:
        linears: linear layers without adapters.
    """
    scaled: list[str] = []
    for host in linears:
        around = owner(host)
        if not around or len(calls.get(around, ())) != 1 or len(calls[around][0].tensors) != 1:
            continue
        taken, given, entered = calls[around][0].entered, calls[around][0].left, calls[host][0].entered
        if taken is None or given is None or not _equal(entered, taken) or calls[host][0].output.shape != given.shape:
            continue
        beside = [
            name
            for name, _ in block.get_submodule(around).named_parameters()
            if not is_within(f"{around}.{name}", host)
        ]
        if any(host_of_magnitude(f"{around}.{name}") for name in beside):
            scaled.append(around)
            continue
        try:
            with torch.no_grad():
                last = block.get_submodule(around)(taken[..., -1:, :]) if beside else None
        except Exception:  # noqa: BLE001  (whatever the model's code raises when it is given one token, and that alone)
            continue
        if isinstance(last, Tensor) and torch.allclose(last, given[..., -1:, :], rtol=1e-5, atol=1e-8):
            yield (
                f"{around} has {', '.join(beside)} beside {host.removeprefix(around + '.')}, and what it gives is not"
                f" that layer's output and multiples of what pairs of linear layers without bias give"
            )
    if scaled:
        yield f"{', '.join(scaled)} {'stay' if len(scaled) > 1 else 'stays'} whole: {SCALED}"
