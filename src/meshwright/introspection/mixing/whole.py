"""Find modules in which tokens meet otherwise than in attention, and compute their masks of whole rows.

Masks, and biases that depend on distances (ALiBi, arXiv 2108.12409), cannot be put together from what ranks make of
their own tokens. The model's own code makes them of whole rows, on a copy whose weights have no values.

Attention is kept out: each call gives a token its own value. Then one token of a row is changed, and the outputs of
modules are watched, innermost first. Where other tokens' outputs move, the module mixes tokens, and is given back
their former values, so that what follows is judged by itself.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, is_within
from meshwright.core.record import remember, without_values
from meshwright.core.torch_private import EagerDispatchMode, tensors_by_path, tree_leaves, tree_map, tree_map_with_path
from meshwright.introspection.calls import SeenEnough, watching
from meshwright.introspection.constructor import written
from meshwright.introspection.signature import Signature
from meshwright.introspection.small.copies import meta_copy_of
from meshwright.introspection.structure.experts import find_stacks

from .interception import AttentionCall, Handled, Handler, SdpaCalls, handling
from .values import Mixer, MixerInput

# --- watch the outputs of a model's modules while one token of a row changes

MOVED = 1e-5
"""Relative change of an output that is no rounding, for models that compute in fp32 inside too."""


@dataclass
class WatchedCall:
    """One call of a module: copies of what it was given and returned."""

    args: tuple
    kwargs: dict[str, Any]
    output: Any = None

    @property
    def given(self) -> dict[str, Tensor]:
        """The tensors among the arguments, by their paths."""
        return tensors_by_path((self.args, self.kwargs))


@dataclass
class OneTokenWatch:
    """Hooks on all modules of a model, and what they see in two forwards that differ in one token.

    Attributes:
        token: the place of the token that is changed in the second forward.
        calls: of each module in the first forward.
        mixing: modules whose inputs of other tokens were as before, and whose outputs were not, with the places that
            moved, in the order in which they returned.
        followed: of each module, the arguments that changed with the token.
        cut: outputs of mixers, of which ranks have their own tokens along ``dim_of_output``, and all that is beside.
    """

    batch: dict[str, Tensor]
    token: int
    calls: dict[str, list[WatchedCall]] = field(default_factory=dict)
    mixing: dict[str, Tensor] = field(default_factory=dict)
    followed: dict[str, set[str]] = field(default_factory=dict)
    cut: list[Tensor] = field(default_factory=list)
    _begun: list[tuple[WatchedCall | None, bool]] = field(default_factory=list)
    _seen: dict[str, int] | None = None

    @property
    def rows(self) -> int:
        return len(self.batch["tokens"])

    @property
    def length(self) -> int:
        return self.batch["tokens"].shape[1]

    def change(self) -> None:
        """Compare the next forward with the one before."""
        self._seen = {}

    def begin(self, path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._seen is None:
            call = WatchedCall(*tree_map(_copied, (args, kwargs)))
            self.calls.setdefault(path, []).append(call)
            self._begun.append((call, True))
            return
        number = self._seen[path] = self._seen.get(path, -1) + 1
        calls = self.calls.get(path, [])
        before, given = calls[number] if number < len(calls) else None, tensors_by_path((args, kwargs))
        is_judged = before is not None and not bool((self._moved(given, before.given) > MOVED).any())
        self._begun.append((before, is_judged))
        if before is not None:
            was = before.given
            self.followed.setdefault(path, set()).update(
                key for key, leaf in given.items() if key in was and not torch.equal(leaf, was[key])
            )

    def end(self, path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Note a call's output; of a mixer, return the output with the former values of the other tokens."""
        before, is_judged = self._begun.pop()
        if self._seen is None and before is not None:
            before.output = tree_map(_copied, output)
        if self._seen is None or before is None or not is_judged:
            return None
        found, old = tensors_by_path(output), tensors_by_path(before.output)
        moved = self._moved(found, old)
        if not bool((moved > MOVED).any()):
            return None
        self.mixing.setdefault(path, moved)
        keys = iter(found)

        def restored(leaf: Any) -> Any:
            was = old.get(next(keys)) if isinstance(leaf, Tensor) else None
            if was is None or (dim := self.token_dim(leaf)) is None or leaf.shape != was.shape:
                return leaf
            is_changed = torch.arange(self.length) == self.token
            return torch.where(is_changed.view(-1, *[1] * (leaf.dim() - dim - 1)), leaf, was)

        return tree_map(restored, output)

    def token_dim(self, tensor: Tensor) -> int | None:
        """Return the dim of the tokens of (rows or 1, …, tokens, …); None of a tensor without one."""
        if tensor.dim() < 2 or tensor.shape[0] not in (1, self.rows):
            return None
        return next((dim for dim, size in enumerate(tensor.shape) if dim and size == self.length), None)

    def dim_of_output(self, tensor: Tensor) -> int | None:
        """Return the same for outputs, which may be a table of (tokens, features) for all rows."""
        return 0 if tensor.dim() == 2 and len(tensor) == self.length else self.token_dim(tensor)

    def _moved(self, found: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
        """Return how far each token but the changed one moved, (length,), relative to the largest number."""
        moved = torch.zeros(self.length, dtype=torch.float64)
        for key, leaf in found.items():
            old, dim = before.get(key), self.token_dim(leaf)
            if old is None or dim is None or leaf.shape != old.shape or not leaf.numel():
                continue
            wide, was = leaf.double(), old.double()
            apart = (wide - was).abs().movedim(dim, 0).flatten(1).amax(1) / was.abs().amax().clamp(min=1e-300)
            moved = moved.maximum(apart.nan_to_num(0.0))
        moved[self.token] = 0
        return moved


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


# --- compute what modules are given for pairs of tokens, of whole rows

META = torch.device("meta")


class WithoutWeights(EagerDispatchMode):
    """Computes an operator with values where all its tensors have some, on one device; else without."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        named: dict[str, Any] = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        lacking = sum(tensor.is_meta for tensor in tensors)
        if not lacking and named.get("device") is not None:  # of a tensor without values
            named["device"] = self.device
        if 0 < lacking < len(tensors):
            if any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in written(func, args, named)):
                raise UnsupportedError(f"{func} writes what depends on weights to a tensor that did not")
            args, named = tree_map(lambda leaf: leaf.to(META) if isinstance(leaf, Tensor) else leaf, (args, named))
        return func(*args, **named)


def copy_without_values(model: nn.Module) -> nn.Module:
    """Copy a model to meta, where stacks of experts compute nothing."""
    made = meta_copy_of(model)
    for path in find_stacks(made):
        made.get_submodule(path).forward = lambda x, *args, **kwargs: torch.zeros_like(x)
    return made


def whole_arguments(
    model: nn.Module,
    buffers: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    wanted: Mapping[str, Iterable[str]],
    device: torch.device,
) -> dict[str, dict[str, Any]]:
    """Run a model without values, and return what its modules are given, in their first calls.

    An argument that depends on weights is on meta; code that looks at their values raises.

    Args:
        model: made by ``copy_without_values``.
        buffers: their values, as far as they are known.
        batch: of whole rows; which tokens it has does not matter, but for their number.
        wanted: by module, arguments by their paths, such as "[1]['attention_mask']".
        device: where values are; meta: there are none.
    """
    found: dict[str, dict[str, Any]] = {}

    def note(path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if path not in found:
            found[path] = given = {}
            tree_map_with_path(given.__setitem__, (args, kwargs))
            found[path] = {key: given[key] for key in wanted[path] if key in given}
        if len(found) == len(wanted):
            raise SeenEnough

    watched = [(path, module) for path, module in model.named_modules() if clean(path) in wanted]
    tokens = torch.zeros_like(batch["tokens"])
    inputs = Signature.of(model).inputs({**batch, "tokens": tokens}, device)
    with contextlib.suppress(SeenEnough), torch.no_grad(), watching(watched, note), WithoutWeights(device):
        functional_call(model, dict(buffers), (), inputs)
    return found


# --- find the modules in which tokens meet by another way than a call of attention

FAR = 100_003
"""Places that a position is moved on by, to see whether other tokens' outputs depend on how far the row goes."""


class OwnTokens(Handler):
    """A handler of attention by which a token sees itself alone."""

    def attend(self, call: AttentionCall) -> Tensor:
        if call.query.shape[2] != call.value.shape[2]:
            return call.as_given()
        return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)


def find_mixers(
    model: nn.Module,
    batches: Collection[dict[str, Tensor]],
    callers: Collection[str],
    others: Mapping[str, str],
    of_masks: Mapping[str, Collection[str]],
) -> Iterator[Mixer]:
    """Find the mixers of a small copy whose attention is intercepted.

    Args:
        batches: of rows with a number of tokens that no other dim has.
        callers: modules that call attention.
        others: modules that call attention in ways that parts of a row cannot be given, and why.
        of_masks: of modules that compute with masks, the arguments by which they are given them.
    """
    watches = [OneTokenWatch(batch, batch["tokens"].shape[1] // 3) for batch in batches]
    for watch in watches:  # two forwards whose rows differ in one token
        own = OwnTokens()
        for module in model.modules():
            remember(module, Handled(own))
        changed = watch.batch["tokens"].clone()
        changed[:, watch.token] = torch.where(changed[:, watch.token] == 0, 1, changed[:, watch.token] - 1)
        hooks = watching(model.named_modules(), watch.begin, watch.end)
        with torch.no_grad(), hooks, handling(own), SdpaCalls(own):
            for tokens in (watch.batch["tokens"], changed):
                model(**Signature.of(model).inputs(watch.batch | {"tokens": tokens}, torch.device("cpu")))
                watch.change()
    why = dict(others)
    for watch in watches:
        outer = [*watch.mixing, *others]
        mixing = [
            path
            for path in watch.mixing
            if path and not any(other and path != other and is_within(path, other) for other in outer)
        ]
        for path in mixing:
            if not any(is_within(caller, path) for caller in callers):
                later = bool((watch.mixing[path][: watch.token] > MOVED).any())
                why.setdefault(path, f"its tokens see {'later' if later else 'earlier'} ones")
        # modules that give a part of a row's tokens other outputs than the whole row's; not inside or around others
        known = [*mixing, *callers, *others]
        part = torch.cat((torch.arange(2, watch.length // 2), torch.arange(watch.length - 4, watch.length - 1)))
        for path, calls in watch.calls.items():
            if not path or any(is_within(path, other) or is_within(other, path) for other in known):
                continue
            counts = _gives_other(model.get_submodule(path), calls[0], watch, part, far=False)
            if counts or _gives_other(model.get_submodule(path), calls[0], watch, part, far=True):
                known.append(path)
                why.setdefault(path, f"it {'counts the tokens of a row' if counts else 'reads how far positions go'}")
    for path, reason in why.items():
        masks = of_masks.get(path, ()) if path in others else None
        of_batches = [_mixer(model, watch, path, reason, masks) for watch in watches if path in watch.calls]
        if of_batches and None not in of_batches:  # an early exit may pass over a module in all of them
            for watch in watches:
                watch.cut += tensors_by_path(watch.calls[path][0].output).values() if path in watch.calls else ()
            yield functools.reduce(Mixer.joined, of_batches)  # type: ignore[arg-type]


def _gives_other(module: nn.Module, call: WatchedCall, watch: OneTokenWatch, part: Tensor, *, far: bool) -> bool:
    """Compare the outputs for some tokens with those of all; ``far``: with the last token's integers moved far on."""
    given, moved = (call.args, call.kwargs), list[Tensor]()

    def moved_far(leaf: Any) -> Any:
        is_integer = isinstance(leaf, Tensor) and leaf.dtype is torch.int64
        if not is_integer or watch.token_dim(leaf) != leaf.dim() - 1:
            return leaf
        moved.append(leaf.clone())
        moved[-1][..., -1] += FAR
        return moved[-1]

    def taken(leaf: Any) -> Any:
        for dim, size in enumerate(leaf.shape if isinstance(leaf, Tensor) else ()):
            leaf = leaf.index_select(dim, part) if size == watch.length else leaf
        return leaf

    if far:
        given = tree_map(moved_far, given)
        if not moved:
            return False
    args, kwargs = tree_map(taken, given)
    try:
        with torch.no_grad():
            whole = module.forward(*given[0], **given[1]) if far else call.output
            found = tensors_by_path(module.forward(*args, **kwargs))
    except Exception:  # noqa: BLE001  (whatever a module raises that is called with other sizes or numbers)
        return False
    for key, leaf in tensors_by_path(whole).items():
        if watch.dim_of_output(leaf) is None or not leaf.is_floating_point():
            continue
        expected, other = taken(leaf), found.get(key)
        if other is None or other.shape != expected.shape:
            return True
        if not torch.allclose(other, expected, rtol=MOVED, atol=MOVED * float(expected.abs().amax()), equal_nan=True):
            return True
    return False


def _mixer(model: nn.Module, watch: OneTokenWatch, path: str, why: str, masks: Collection[str] | None) -> Mixer | None:
    """Describe a mixer by its first call; None where no tensor that it is given has the row's tokens, or one that is
    about pairs of tokens cannot be made of whole rows.

    Args:
        masks: of a module that calls attention, arguments that transformers' mask interface makes, which may be None;
            None of other modules.
    """
    module, call = model.get_submodule(path), watch.calls[path][0]
    others = [key for key, leaf in call.given.items() if watch.length in leaf.shape and watch.token_dim(leaf) is None]
    others += [
        key
        for key, leaf in call.given.items()
        if leaf.shape.count(watch.length) > 1
        and key not in others
        and not any((leaf.shape, leaf.dtype) == (cut.shape, cut.dtype) and torch.equal(leaf, cut) for cut in watch.cut)
    ]

    def is_read(key: str) -> bool:
        """Return whether the values of a tensor among the arguments count, and not its shape alone."""
        if masks is not None:
            return True  # attention was kept out
        keys = iter(call.given)

        def other(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or next(keys) != key:
                return leaf
            if leaf.is_floating_point():
                return without_values(leaf, leaf.shape)
            return ~leaf if leaf.dtype is torch.bool else leaf + 1

        args, kwargs = tree_map(other, (call.args, call.kwargs))
        try:
            with torch.no_grad():
                found, expected = tensors_by_path(module.forward(*args, **kwargs)), tensors_by_path(call.output)
        except Exception:  # noqa: BLE001  (a module that looks at the values)
            return True
        return any(key not in expected or not torch.equal(leaf, expected[key]) for key, leaf in found.items())

    pairs = tuple(dict.fromkeys([*filter(is_read, others), *(masks or ())]))
    if pairs:  # which follow from the length of rows, their positions and buffers, in each call alike, or are not known
        buffers = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
        try:
            made = whole_arguments(copy_without_values(model), buffers, watch.batch, {path: pairs}, torch.device("cpu"))
        except Exception:  # noqa: BLE001  (whatever the model's code raises without values)
            return None
        for each, key in itertools.product(watch.calls[path], pairs):
            leaf, given = made[path].get(key), each.given.get(key)
            if leaf is None and given is None:
                continue
            if not isinstance(leaf, Tensor) or leaf.is_meta or given is None or not torch.equal(leaf, given):
                return None
    inputs = tuple(
        MixerInput(
            key,
            dim,
            is_read=not leaf.is_floating_point() or is_read(key),
            is_integer=not leaf.is_floating_point(),
            follows=key in watch.followed.get(path, ()),
        )
        for key, leaf in call.given.items()
        if key not in others and (dim := watch.token_dim(leaf)) is not None
    )
    found = tensors_by_path(call.output).items()
    outputs = tuple(MixerInput(key, dim) for key, leaf in found if (dim := watch.dim_of_output(leaf)) is not None)
    return Mixer(path, why, inputs, outputs, pairs, masks is not None) if inputs and outputs else None
