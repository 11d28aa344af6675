"""Find the modules in which tokens meet by another way than a call of attention.

Attention is kept out: each call gives a token its own value. Then one token of a row is changed, and the outputs of
modules are watched, innermost first. Where other tokens' outputs move, the module mixes tokens, and is given back
their former values, so that what follows is judged by itself: one forward finds recurrences, convolutions over
tokens, shifts and products by hand. Modules that count tokens, or read how far the row goes, are found by calling
them with a part of a row's tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.calls import without_values
from meshwright.core.names import clean, is_within
from meshwright.core.record import remember
from meshwright.core.torch_private import tensors_by_path, tree_map
from meshwright.introspection.signature import Signature

from .interception import AttentionCall, Handled, SdpaCalls, handling
from .masks import MaskFunction
from .values import Mixer, MixerInput
from .watch import MOVED, OneTokenWatch, WatchedCall
from .whole import copy_without_values, whole_arguments

FAR = 100_003
"""Places that a position is moved on by, to see whether other tokens' outputs depend on how far the row goes."""


class OwnTokens:
    """A handler of attention by which a token sees itself alone."""

    def mask(self, function: MaskFunction, padding: Tensor | None, plain: Callable[[], Any]) -> Any:
        return plain()

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
    watches = [_watched(model, batch) for batch in batches]
    why = dict(others)
    for watch in watches:
        outer = [*watch.mixing, *others]
        mixing = [path for path in watch.mixing if path and not any(_is_inside(path, other) for other in outer)]
        for path in mixing:
            if not any(is_within(caller, path) for caller in callers):
                later = bool((watch.mixing[path][: watch.token] > MOVED).any())
                why.setdefault(path, f"its tokens see {'later' if later else 'earlier'} ones")
        for path, reason in _of_whole_rows(model, watch, [*mixing, *callers, *others]):
            why.setdefault(path, reason)
    for path, reason in why.items():
        masks = of_masks.get(path, ()) if path in others else None
        of_batches = [_mixer(model, watch, path, reason, masks) for watch in watches if path in watch.calls]
        if of_batches and None not in of_batches:  # an early exit may pass over a module in all of them
            for watch in watches:
                watch.cut += tensors_by_path(watch.calls[path][0].output).values() if path in watch.calls else ()
            yield functools.reduce(Mixer.joined, of_batches)  # type: ignore[arg-type]


def _is_inside(path: str, outer: str) -> bool:
    return bool(outer) and path != outer and is_within(path, outer)


def _watched(model: nn.Module, batch: dict[str, Tensor]) -> OneTokenWatch:
    """Run two forwards whose rows differ in one token."""
    watch, own = OneTokenWatch(batch, batch["tokens"].shape[1] // 3), OwnTokens()
    for module in model.modules():
        remember(module, Handled(own))
    hooks = []
    for path, module in model.named_modules():
        begin, end = (functools.partial(step, clean(path)) for step in (watch.begin, watch.end))
        hooks += [
            module.register_forward_pre_hook(begin, with_kwargs=True),
            module.register_forward_hook(end, with_kwargs=True),
        ]
    changed = batch["tokens"].clone()
    changed[:, watch.token] = torch.where(changed[:, watch.token] == 0, 1, changed[:, watch.token] - 1)
    try:
        with torch.no_grad(), handling(own), SdpaCalls(own):
            for tokens in (batch["tokens"], changed):
                model(**Signature.of(model).inputs(batch | {"tokens": tokens}, torch.device("cpu")))
                watch.change()
    finally:
        for hook in hooks:
            hook.remove()
    return watch


def _of_whole_rows(model: nn.Module, watch: OneTokenWatch, others: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield modules that give a part of a row's tokens other outputs than the whole row's, innermost first.

    Args:
        others: modules that mix tokens; those inside or around them are not judged.
    """
    known = list(others)
    part = torch.cat((torch.arange(2, watch.length // 2), torch.arange(watch.length - 4, watch.length - 1)))
    for path, calls in watch.calls.items():
        if not path or any(is_within(path, other) or is_within(other, path) for other in known):
            continue
        module, call = model.get_submodule(path), calls[0]
        if _gives_other(module, call, watch, part, far=False):
            why = "it counts the tokens of a row"
        elif _gives_other(module, call, watch, part, far=True):
            why = "it reads how far positions go"
        else:
            continue
        known.append(path)
        yield path, why


def _gives_other(module: nn.Module, call: WatchedCall, watch: OneTokenWatch, part: Tensor, *, far: bool) -> bool:
    """Compare the outputs for a part of the tokens with that part of the outputs for all.

    Args:
        far: the last token's integers, which may be positions, are moved far on.
    """
    given = (call.args, call.kwargs)
    if far:
        if not any(_is_positions(leaf, watch) for leaf in call.given.values()):
            return False
        given = tree_map(lambda leaf: _far(leaf, watch), given)
    taken = tree_map(lambda leaf: _taken(leaf, part, watch), given)
    try:
        with torch.no_grad():
            whole = module.forward(*given[0], **given[1]) if far else call.output
            found = tensors_by_path(module.forward(*taken[0], **taken[1]))
    except Exception:  # noqa: BLE001  (whatever a module raises that is called with other sizes or numbers)
        return False
    for key, leaf in tensors_by_path(whole).items():
        if watch.dim_of_output(leaf) is None or not leaf.is_floating_point():
            continue
        expected = _taken(leaf, part, watch)
        other = found.get(key)
        if other is None or other.shape != expected.shape:
            return True
        if not torch.allclose(other, expected, rtol=MOVED, atol=MOVED * float(expected.abs().amax()), equal_nan=True):
            return True
    return False


def _taken(leaf: Any, part: Tensor, watch: OneTokenWatch) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    for dim, size in enumerate(leaf.shape):
        leaf = leaf.index_select(dim, part) if size == watch.length else leaf
    return leaf


def _is_positions(leaf: Any, watch: OneTokenWatch) -> bool:
    if not isinstance(leaf, Tensor) or leaf.dtype is not torch.int64:
        return False
    return watch.token_dim(leaf) == leaf.dim() - 1


def _far(leaf: Any, watch: OneTokenWatch) -> Any:
    if not _is_positions(leaf, watch):
        return leaf
    leaf = leaf.clone()
    leaf[..., -1] += FAR
    return leaf


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
        if leaf.shape.count(watch.length) > 1 and key not in others and not any(_same(leaf, cut) for cut in watch.cut)
    ]

    def is_read(key: str) -> bool:
        return masks is not None or not _is_unread(module, call, key)  # attention was kept out

    pairs = tuple(dict.fromkeys([*filter(is_read, others), *(masks or ())]))
    if pairs and not _is_known(model, watch, path, pairs):
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


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _is_known(model: nn.Module, watch: OneTokenWatch, path: str, keys: tuple[str, ...]) -> bool:
    """Return whether arguments follow from the length of rows, their positions and buffers, in each call alike."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    try:
        made = whole_arguments(copy_without_values(model), buffers, watch.batch, {path: keys}, torch.device("cpu"))
    except Exception:  # noqa: BLE001  (whatever the model's code raises without values)
        return False
    for call, key in itertools.product(watch.calls[path], keys):
        leaf, given = made[path].get(key), call.given.get(key)
        if leaf is None and given is None:
            continue
        if not isinstance(leaf, Tensor) or leaf.is_meta or given is None or not torch.equal(leaf, given):
            return False
    return True


def _is_unread(module: nn.Module, call: WatchedCall, key: str) -> bool:
    """Return whether the values of a tensor among the arguments do not count; its shape may."""
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
        return False
    return all(key in expected and torch.equal(leaf, expected[key]) for key, leaf in found.items())
