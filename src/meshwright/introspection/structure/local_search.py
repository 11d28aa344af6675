"""Find the counts and arguments of a region that change when a rank holds only some of its groups.

The search tries changes: the region's modules run as on one of several ranks, on slices of the recorded tensors, and
the input of the layer that ends the region must be that rank's slice of the recorded one. Numbers that matter are
changed, fewest first, until it is.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.names import is_within
from meshwright.core.parts import take
from meshwright.core.record import with_arguments
from meshwright.introspection.calls import Call
from meshwright.introspection.logits_tape import line_that_raised
from meshwright.introspection.small.copies import copy_of

from .probe import Probe
from .regions import Region

# --- describe how a region runs on one of several ranks that share its groups


@dataclass(frozen=True)
class LocalNumber:
    """An attribute of a module that counts something sharded: ``whole`` in all, ``local`` on a rank.

    ``name`` may have two parts, such as config.n_heads: an attribute of an object that the module holds.
    """

    module: str
    name: str
    whole: int
    local: int

    def of(self, whole: int) -> int:
        """Return a rank's count in a model that counts ``whole`` (the measured one may be a small copy)."""
        return whole * self.local // self.whole


@dataclass(frozen=True)
class LocalArgument:
    """A tensor argument of the container of which a rank takes its share of a dim.

    ``by_row``: the rows of the batch lie along that dim too, outermost.
    """

    key: int | str
    dim: int
    by_row: bool


@dataclass(frozen=True)
class LocalForm:
    """The changes with which a region runs on one of several ranks.

    Attributes:
        hidden: arguments of the container that its producers take unchanged and no other module reads; else none.
        numbers, arguments: the numbers and arguments that change while the region runs.
        narrow: what stands in for ``hidden`` has a rank's share of the features: the region divides their number by
            its heads (``C // self.n_head``).
        behind: arguments with the shape of ``hidden`` that are read behind the last layer alone, such as what a module
            adds to its output.
    """

    hidden: tuple[int | str, ...] = ()
    numbers: tuple[LocalNumber, ...] = ()
    arguments: tuple[LocalArgument, ...] = ()
    narrow: bool = False
    behind: tuple[int | str, ...] = ()


@contextmanager
def counting_locally(numbers: list[tuple[nn.Module, LocalNumber]]) -> Iterator[None]:
    """Give modules their sizes on this rank inside; outside, they keep the model's.

    A config object is replaced by a changed copy, and never written to.
    """
    kept: list[tuple[nn.Module, str, Any]] = []
    try:
        for module, number in numbers:
            name, _, rest = number.name.partition(".")
            before = getattr(module, name)
            kept.append((module, name, before))
            value: Any = before
            if rest:
                value = copy.copy(before)
                # configs of transformers guard attributes that differ by layer
                held = vars(before)[rest] if rest in vars(before) else getattr(before, rest)
                setattr(value, rest, number.of(held))
            else:
                value = number.of(before)
            setattr(module, name, value)
        yield
    finally:
        for module, name, before in reversed(kept):
            setattr(module, name, before)


def share_of(tensor: Tensor, argument: LocalArgument, rows: int, rank: int, ranks: int) -> Tensor:
    """Return one rank's share of a tensor argument along its dim."""
    if not argument.by_row:
        return tensor.chunk(ranks, dim=argument.dim)[rank]
    split = tensor.unflatten(argument.dim, (rows, -1))
    return split.chunk(ranks, dim=argument.dim + 1)[rank].flatten(argument.dim, argument.dim + 1)


# --- find the counts and arguments of a region that change when a rank holds only some of its groups

TOLERANCE = 1e-5
"""Relative; models that compute norms or softmax in fp32 whatever their dtype are not exact in fp64."""
MOST_CHANGES = 4
MOST_CHANGES_OF_BLOCKS = 2
"""Where a region lies in the block's own forward, all numbers of the block are tried."""


def local_form(probes: list[Probe], region: Region, ranks: int) -> LocalForm | None:
    """Find how ``region`` runs on one of ``ranks``, in all of one block's ``probes``; None if no way is found."""
    with torch.no_grad():
        rehearsals = [_Rehearsal(probe, region, ranks) for probe in probes]
        numbers: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for rehearsal in rehearsals:
            numbers |= rehearsal.numbers_that_matter()
        # a block's own arguments are not those of one region alone
        choices = [(), *((argument,) for argument in rehearsals[0].arguments())] if region.container else [()]
        for arguments in choices:
            for changes in _changes(numbers, MOST_CHANGES if region.container else MOST_CHANGES_OF_BLOCKS):
                if all(rehearsal.succeeds(changes, arguments) for rehearsal in rehearsals):
                    alone = region.container and all(
                        rehearsal.succeeds(changes, arguments, features=1) for rehearsal in rehearsals
                    )
                    if not alone:
                        return LocalForm((), changes, arguments)
                    behind = tuple(
                        key
                        for key in rehearsals[0].like_hidden()
                        if all(
                            rehearsal.succeeds(changes, arguments, features=1, unread=key) for rehearsal in rehearsals
                        )
                    )
                    return LocalForm(rehearsals[0].hidden, changes, arguments, behind=behind)
        for changes in _changes(numbers) if region.container else ():
            if all(rehearsal.succeeds(changes, (), features=ranks) for rehearsal in rehearsals):
                return LocalForm(rehearsals[0].hidden, changes, narrow=True)
    return None


def line_that_stops(probe: Probe, region: Region, ranks: int) -> str:
    """Return the model's line that does not compute on one rank's slices as it stands; "" if none stops.

    Where other tensors than expected come out, no line stops.
    """
    rehearsal = _Rehearsal(probe, region, ranks)
    with torch.no_grad():
        rehearsal.succeeds((), ())
    return rehearsal.stopped


def _changes(
    numbers: dict[tuple[str, str], list[tuple[int, int]]], most: int = MOST_CHANGES
) -> Iterator[tuple[LocalNumber, ...]]:
    """Yield every way to change some of the numbers, up to so many, fewest first."""
    for count in range(min(len(numbers), most) + 1):
        for chosen in itertools.combinations(numbers, count):
            for values in itertools.product(*(numbers[key] for key in chosen)):
                yield tuple(LocalNumber(*key, *value) for key, value in zip(chosen, values, strict=True))


class _NoEmptyAttention(TorchFunctionMode):
    """Refuse attention without heads: torch 2.11 divides by their number, which ends the process."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        if func is nn.functional.scaled_dot_product_attention and any(
            isinstance(value, Tensor) and not value.numel() for value in given
        ):
            raise ValueError("attention without heads")
        return func(*args, **(kwargs or {}))


class _Rehearsal:
    """A region's container, copied by rank: producers return slices of recorded outputs, latent layers the whole."""

    def __init__(self, probe: Probe, region: Region, ranks: int):
        self.probe, self.region, self.ranks = probe, region, ranks
        self.call = probe.calls[region.container][0]
        inputs = [next(iter(probe.calls[path][0].tensors.values())) for path in region.begins]
        given = self.call.tensors.items()
        self.hidden = tuple(key for key, value in given if all(value is taken for taken in inputs))
        self.entered: Tensor | None = None
        self.stopped = ""
        inside = f"{region.container}." if region.container else ""
        self.copies: list[nn.Module] = []
        for rank in range(ranks):
            made = copy_of(probe.module(region.container))
            stubs: dict[str, nn.Module] = {}
            for path in (*region.producers, *region.spanning):
                cut = region.cut_of(f"{path}.weight")
                assert cut is not None
                stubs[probe.place_of(path)] = _Gives(take(probe.output_of(path), -1, cut.parts, rank, ranks))
            stubs |= {path: _Gives(probe.output_of(path)) for path in region.latent}
            stubs[probe.place_of(region.consumer)] = _Takes(self, probe.output_of(region.consumer))
            for path, stub in stubs.items():
                parent, _, name = path.removeprefix(inside).rpartition(".")
                setattr(made.get_submodule(parent), name, stub)
            for cut in region.cuts:
                path, _, name = cut.name.rpartition(".")
                if not any(is_within(path, stub) for stub in stubs) and (path + ".").startswith(inside):
                    module = made.get_submodule(path.removeprefix(region.container).removeprefix("."))
                    held: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
                    held[name] = take(held[name].data, cut.dim, cut.parts, rank, ranks)
            self.copies.append(made)

    def succeeds(
        self,
        numbers: tuple[LocalNumber, ...],
        arguments: tuple[LocalArgument, ...],
        *,
        features: int = 0,
        unread: int | str | None = None,
    ) -> bool:
        """Return whether on every rank's copy the consumer's input is that rank's slice of the recorded one.

        Args:
            features: something without values stands in for the hidden argument, with one of so many parts of its
                features; 0: the argument itself.
            unread: another argument in whose place something without values stands, which may reach the output.
        """
        if features and not self.hidden:
            return False
        cut = self.region.cut_of(f"{self.region.consumer}.weight")
        assert cut is not None
        whole = self.probe.calls[self.region.consumer][0].entered
        assert whole is not None
        rows, before = self.probe.shape[0], self.call.left
        for rank, module in enumerate(self.copies):
            given: dict[int | str, Tensor] = {
                a.key: share_of(self.call.tensors[a.key], a, rows, rank, self.ranks) for a in arguments
            }
            for key in self.hidden if features else ():
                value = self.call.tensors[key]
                given[key] = value.new_full((*value.shape[:-1], value.shape[-1] // features), torch.nan)
            if unread is not None:
                given[unread] = torch.full_like(self.call.tensors[unread], torch.nan)
            args, kwargs = with_arguments(self.call.args, self.call.kwargs, given)
            self.entered = None
            with counting_locally(self._homes(module, numbers)), _NoEmptyAttention():
                try:
                    left = Call.of((), {}, module(*args, **kwargs)).left
                except Exception as error:  # noqa: BLE001  (whatever the model's code raises when its sizes do not fit)
                    self.stopped = line_that_raised(error)
                    return False
            if unread is None and left is not None:
                if features and left.isnan().any():  # the container adds its input to its output
                    return False
                if not features and before is not None and not _close(left, before):  # more changes
                    return False
            found: Any = self.entered  # which the stub in the consumer's place sets
            expected = take(whole, -1, cut.parts, rank, self.ranks)
            if found is None or found.shape != expected.shape or not _close(found, expected):
                return False
        return True

    def _homes(self, module: nn.Module, numbers: tuple[LocalNumber, ...]) -> list[tuple[nn.Module, LocalNumber]]:
        path = self.region.container
        return [(module.get_submodule(n.module.removeprefix(path).removeprefix(".")), n) for n in numbers]

    def like_hidden(self) -> list[int | str]:
        """List the other arguments with the shape of the hidden one."""
        like = self.call.tensors[self.hidden[0]]
        given = self.call.tensors.items()
        return [key for key, x in given if key not in self.hidden and (x.shape, x.dtype) == (like.shape, like.dtype)]

    def numbers_that_matter(self) -> dict[tuple[str, str], list[tuple[int, int]]]:
        """Map (module, attribute) to (whole, local) values to try, for numbers that change the computation.

        A rank counts its share of all groups, or of joint ones, or the ratio of both.
        """
        found: dict[tuple[str, str], list[tuple[int, int]]] = {}
        ranks, joint = self.ranks, min(self.region.joint, self.ranks)
        module, container = self.probe.module(self.region.container), self.region.container
        layers = [self.probe.place_of(path) for path in (*self.region.linears, *self.region.spanning)]

        def matters(number: LocalNumber) -> bool:
            with counting_locally(self._homes(module, (number,))):
                try:
                    output = Call.of((), {}, module(*self.call.args, **self.call.kwargs)).left
                except Exception:  # noqa: BLE001  (whatever a model's code raises when it counts less)
                    return True
            before = self.call.left
            return output is None or before is None or output.shape != before.shape or not torch.equal(output, before)

        for path, part in module.named_modules(prefix=container):
            if any(is_within(path, layer) for layer in layers):
                continue
            config = getattr(part, "config", None)
            held = [*vars(part).items(), *((f"config.{name}", n) for name, n in vars(config or nn.Identity()).items())]
            for name, value in held:
                if type(value) is not int or value < 2 or name.removeprefix("config.").startswith("_"):
                    continue
                shares = [
                    value * up // down for up, down in ((1, ranks), (1, joint), (joint, ranks)) if not value * up % down
                ]
                tried = [(value, local) for local in dict.fromkeys(shares) if local != value]
                if any(matters(LocalNumber(path, name, *pair)) for pair in tried):
                    found[path, name] = tried
        return found

    def arguments(self) -> Iterator[LocalArgument]:
        """Yield tensor arguments with a dim that the ranks could share."""
        rows = self.probe.shape[0]
        for key, value in self.call.tensors.items():
            if key in self.hidden:
                continue
            for dim, size in enumerate(value.shape):
                if size % self.ranks == 0 and size >= self.ranks:
                    yield LocalArgument(key, dim, False)
                if size % (self.ranks * rows) == 0 and size > rows:
                    yield LocalArgument(key, dim, True)


class _Gives(nn.Module):
    def __init__(self, output: Tensor):
        super().__init__()
        self.output = output
        self.in_features = self.out_features = output.shape[-1]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.output.clone()


class _Takes(nn.Module):
    def __init__(self, rehearsal: _Rehearsal, like: Tensor):
        super().__init__()
        self.__dict__["rehearsal"], self.like = rehearsal, like

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.__dict__["rehearsal"].entered = x.clone()
        return self.like.clone()


def _close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= TOLERANCE * expected.norm())
