"""Measure the ways in which a model's tokens see each other: on a small copy, carried over to the model itself."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, is_within, pattern
from meshwright.core.record import remember
from meshwright.core.torch_private import tensors_by_path
from meshwright.introspection.calls import tracking, watching
from meshwright.introspection.mixing.values import Caller, Mixing, Sizes, find_length_uses
from meshwright.introspection.signature import Signature, logits_of
from meshwright.introspection.small.copies import copy_of
from meshwright.introspection.small.sample import ids_of, longest_row, samples_of

from .arithmetic import FlexCalls, PlaceMask, allowed_of, arithmetic_of, computing_flex, far_rules
from .interception import (
    AttentionCall,
    Handled,
    Handler,
    computing_modules,
    handling,
    intercept_transformers,
    sdpa_call,
)
from .masks import MaskFunction, MaskRule, TokenMask, dense, in_segments, rule_of, segments_of
from .whole import WithoutWeights, copy_without_values, find_mixers

# --- find the calls of attention in a model, on a small copy, and the rule of each call's mask

CPU = torch.device("cpu")
ROWS = 2
LENGTHS = (48, 26, 13, 7, 4)
"""Tokens of the rows on which masks are read: the first number that the model takes. Rehearsals begin at the second: no
multiple of a number of ranks. Where tokens meet far apart, and what begins at a length, is seen on long rows.
"""


class Recorder(Handler):
    """A handler that computes every call as the model would, and notes the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, AttentionCall]] = []
        self.masks: list[MaskFunction] = []
        self.running = [""]

    def mask(self, function: MaskFunction, padding: Tensor | None, plain: Callable[[], Any]) -> Any:
        self.masks.append(function)
        return plain()

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls.append((self.running[-1], call))
        return call.as_given()


def small_copy(model: nn.Module) -> nn.Module:
    """Return the smallest copy of a model that computes; UnsupportedError where none does."""
    return next(iter(samples_of(model, 1))).model


def record(model: nn.Module, inputs: dict[str, Any], recorder: Recorder | None = None) -> Recorder:
    """Run a forward, and note its calls of attention with the innermost module that makes each."""
    recorder = recorder or Recorder()
    for module in model.modules():
        remember(module, Handled(recorder))
    following = tracking(model.named_modules(), recorder.running)
    with torch.no_grad(), following, handling(recorder), FlexCalls(recorder):
        model(**inputs)
    return recorder


def batches(model: nn.Module, lengths: tuple[int, ...] = LENGTHS) -> Iterator[dict[str, Tensor]]:
    """Yield batches: plain rows, and rows of several documents where the model takes such.

    Args:
        lengths: tokens of a row; the first with which a forward runs.

    Raises:
        UnsupportedError: a forward fails with all of them.
    """
    signature, last, length = Signature.of(model), None, 0
    plain: dict[str, Tensor] = {}
    for length in lengths:
        plain = plain_rows(model, length)
        try:
            with torch.no_grad(), computing_flex():
                model(**signature.inputs(plain, CPU))
            break
        except UnsupportedError:
            raise
        except Exception as error:  # noqa: BLE001  (a shorter row may do)
            last = error
    else:
        raise _failed(model, last) from last
    yield plain
    if any(signature.takes[key] for key in ("positions", "document_ids")):
        documents = torch.stack([documents_of(length, shift) for shift in range(ROWS)])
        starts = torch.stack([torch.searchsorted(row, row) for row in documents])
        yield plain | {"positions": plain["positions"] - starts, "document_ids": documents}


def plain_rows(model: nn.Module, length: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, ids_of(model), (ROWS, length), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "positions": torch.arange(length).expand(ROWS, -1).contiguous()}


def long_row(model: nn.Module) -> int:
    """Return the tokens of the longest rows that a small copy takes, a number that none of its weights has."""
    signature = Signature.of(model)
    with computing_flex():
        longest = longest_row(model, lambda length: model(**signature.inputs(plain_rows(model, length), CPU)))
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    return next(length for length in range(longest, 0, -1) if length not in sizes)


def _failed(model: nn.Module, error: Exception | None) -> UnsupportedError:
    return UnsupportedError(
        f"the attention of {type(model).__name__} cannot be measured: a small copy fails with {type(error).__name__}:"
        f" {error}"
    )


def documents_of(length: int, shift: int) -> Tensor:
    """Return the documents of a row, (length,) int64: of one, two, three … tokens, and a long one last."""
    sizes = torch.tensor([1, 2, 3 + shift, 5, 7], dtype=torch.int64)
    sizes = sizes[sizes.cumsum(0) < length]
    return torch.repeat_interleave(torch.arange(len(sizes) + 1), torch.cat((sizes, length - sizes.sum()[None])))


LONGEST_MEASURED = 8192
"""Tokens of the longest rows in which masks that are tensors are compared with their rules."""


def refuse_other_masks(model: nn.Module, callers: Sequence[Caller], length: int) -> None:
    """Raise UnsupportedError where a model's mask, in rows of this length, may differ from the measured rule."""
    rules = {caller.path: caller.rule for caller in callers if caller.is_dense}
    if not rules or length <= LENGTHS[0]:
        return
    path = next(iter(rules))
    where = f"{path} is given a mask of queries and keys as a tensor, and whether that follows the measured rule"
    if length > LONGEST_MEASURED:
        raise UnsupportedError(
            f"{where} ({rules[path]}) in rows of {length} tokens cannot be seen: up to {LONGEST_MEASURED} are compared."
            f' State the rule on the module (mask_rule = "{rules[path]}"), or set layout.cp = 1'
        )
    try:
        every = [Signature.of(model).inputs(batch, CPU) for batch in batches(model, (length,))]
        found = [(path, call, inputs) for inputs in every for path, call in record(model, inputs).calls]
    except Exception as error:
        raise UnsupportedError(
            f"{where} ({rules[path]}) in rows of {length} tokens cannot be seen: a small copy fails with"
            f" {type(error).__name__}: {error}. Set layout.cp = 1"
        ) from error
    for path, call, inputs in found:
        rule = rules.get(path)
        if rule is not None and not _follows(rule, call, inputs):
            raise UnsupportedError(
                f"{path} masks rows of {length} tokens by another rule than the one that was measured ({rule}) on"
                f" shorter ones. Set layout.cp = 1"
            )


def caller_of(path: str, calls: list[tuple[AttentionCall, dict[str, Any]]], stated: str) -> Caller:
    call, _ = calls[0]
    if any(other.query.dim() != 4 for other, _ in calls):
        raise UnsupportedError(
            f"{path} calls attention on tensors of {call.query.dim()} dims, and which of them is heads cannot be seen:"
            f" give it (rows, heads, tokens, features)"
        )
    sizes, arithmetic = Sizes.of(call), arithmetic_of([each for each, _ in calls])
    if any(other.query.shape[0] != ROWS for other, _ in calls):
        raise UnsupportedError(
            f"{path} calls attention on {call.query.shape[0]} rows for a batch of {ROWS}: give heads a dim of their own"
            f" (rows, heads, tokens, features)"
        )
    pairs = [key for key, x in call.extras.items() if isinstance(x, Tensor) and x.shape.count(call.query.shape[2]) > 1]
    if pairs and call.query.shape[2] == call.key.shape[2]:
        raise UnsupportedError(f"{path} adds numbers of its own to the scores of pairs of tokens ({pairs[0]})")
    if call.interface:
        return Caller(path, sizes, interface=True, rule=None, arithmetic=arithmetic)
    if any(other.key.shape[2] != other.query.shape[2] for other, _ in calls):
        raise UnsupportedError(f"{path} attends from tokens to others than its own row's")
    is_flex = isinstance(call.mask, PlaceMask)
    rules = far_rules(call) if is_flex else []
    allowed = allowed_of(call)
    window = int(allowed[..., -1, :].sum(-1).max())
    first_again = (~allowed[..., 0]).flatten(0, -2).any(0).to(torch.int64)
    chunk = int(first_again.argmax())  # of queries that do not see the first key, the first
    reaches = [{}, {"window": window}, *([{"chunk": chunk}] if chunk else [])]
    for reach, is_causal, documents in itertools.product(reaches, (True, False), (False, True)):
        rules.append(MaskRule(is_causal, documents=documents, **reach))
    rule = next((rule for rule in rules if all(_follows(rule, *each) for each in calls)), None)
    if is_flex:
        return Caller(path, sizes, interface=False, rule=rule, arithmetic=arithmetic, flex=True)
    if rule is None:
        raise UnsupportedError(f"the mask of {path} follows no rule of places and documents that is known")
    is_dense = any(isinstance(each.mask, Tensor) for each, _ in calls) and stated != str(rule)
    return Caller(path, sizes, interface=False, rule=rule, is_dense=is_dense, arithmetic=arithmetic)


def _follows(rule: MaskRule, call: AttentionCall, inputs: dict[str, Any]) -> bool:
    allowed = allowed_of(call)
    length = allowed.shape[-1]
    expected = dense(rule.function(inputs.get("document_ids")), torch.arange(length)[None], length, len(call.query))
    return bool((allowed == expected).all())


# --- measure the ways in which a model's tokens see each other


def measure_mixing(model: nn.Module) -> Mixing:
    """Find on a small copy the calls of attention of a model, and the modules in which tokens meet otherwise."""
    original, small = model, small_copy(model)
    model = copy_of(small)
    base = intercept_transformers(model)
    seen: dict[str, list[tuple[AttentionCall, dict[str, Any]]]] = {}
    masks: list[list[MaskFunction]] = []
    given = list(batches(model))
    for batch in given:
        inputs = Signature.of(model).inputs(batch, CPU)
        try:
            recorder = record(model, inputs)
        except UnsupportedError:
            raise
        except Exception as error:
            raise _failed(model, error) from error
        masks.append(recorder.masks)
        for path, call in recorder.calls:
            seen.setdefault(path, []).append((call, inputs))
    computing = computing_modules(model, Signature.of(model).inputs(given[0], CPU)) if base else {}
    # the modules whose calls of attention can be given parts of a row, and why others cannot
    callers: list[Caller] = []
    refused: dict[str, UnsupportedError] = {}
    for path, calls in seen.items():
        try:
            if path in computing:
                raise UnsupportedError(f"{path} computes with the attention mask itself")
            stated = (getattr(m, "mask_rule", "") for name, m in model.named_modules() if clean(name) == path)
            callers.append(caller_of(path, calls, next(stated, "")))
        except UnsupportedError as error:
            if any(isinstance(call.mask, PlaceMask) for call, _ in calls):
                raise  # flex_attention of whole rows has no backward on a CPU, and could not be rehearsed
            refused[path] = error
    reasons = {path: str(error) for path, error in refused.items()}
    rows = [*batches(model, LENGTHS[1:]), plain_rows(model, long_row(model))]
    mixers = list(find_mixers(model, rows, [c.path for c in callers], reasons, computing))
    if stays := next((path for path in refused if path not in {mixer.path for mixer in mixers}), None):
        raise refused[stays]
    if not seen and not mixers:
        raise UnsupportedError(
            f"{type(original).__name__} calls attention neither through transformers' interface nor by"
            f" F.scaled_dot_product_attention, and has no other module in which tokens meet that whole rows could be"
            f" given to"
        )
    real = _Real.of(original, [mixer.path for mixer in mixers], has_mask=True)
    if not real.is_whole:
        real = _Real.of(original, [mixer.path for mixer in mixers], has_mask=False)
    # of the model itself, modules of the same class at the same place
    alike = {(pattern(clean(mixer.path)), type(model.get_submodule(mixer.path))): mixer for mixer in mixers}
    known, found = {mixer.path: mixer for mixer in mixers}, []
    for raw, module in original.named_modules():
        path, kind = clean(raw), (pattern(clean(raw)), type(module))
        if kind in alike:
            mixer, sizes = known.get(path, alike[kind]), real.features.get(kind, {})
            its = (replace(each, features=sizes.get(each.key, int(each.is_integer))) for each in mixer.inputs)
            found.append(replace(mixer, path=path, inputs=tuple(its)))
    counts_from_zero = _counts_from_zero(copy_of(small), given[0])
    inside = tuple(mixer.path for mixer in found)
    lengths = find_length_uses(original, copy_of(small), inside, makes_positions=not counts_from_zero)
    packed = _packed(masks, given[-1]) if len(given) > 1 else ()
    every = tuple(_callers_of(original, callers, real, inside))
    return Mixing(every, base, packed, tuple(found), lengths, counts_from_zero)


def _counts_from_zero(model: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Return whether a model that is given no positions takes 0, 1, 2 …"""
    signature, cpu = Signature.of(model.eval()), CPU
    if signature.takes["positions"] is None:
        return True
    with torch.no_grad(), computing_flex():
        given = logits_of(model(**signature.inputs(batch, cpu)))
        try:
            return torch.allclose(logits_of(model(**signature.inputs({"tokens": batch["tokens"]}, cpu))), given)
        except Exception:  # noqa: BLE001  (whatever a model raises that wants positions)
            return True


def _packed(masks: list[list[MaskFunction]], batch: dict[str, Tensor]) -> tuple[bool, ...]:
    """Compare each mask of a packed batch with that of a plain one: does it keep runs of positions apart?"""
    positions = batch["positions"]
    segments = segments_of(positions)
    assert segments is not None
    rows, length = positions.shape
    places = torch.arange(length)[None]
    found = []
    for plain, packed in zip(*masks, strict=True):
        allowed = dense(packed, places, length, rows)
        apart = dense(in_segments(plain, positions, segments), places, length, rows)
        if not bool((allowed == apart).all() or (allowed == dense(plain, places, length, rows)).all()):
            raise UnsupportedError("a mask of packed documents follows no known rule")
        found.append(bool((allowed == apart).all()))
    return tuple(found)


class _AllTrue(TorchFunctionMode):
    """Conditions on tensors without values hold: a padding mask is all ones, a row is one document."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


class SizeRecorder(Recorder):
    """A recorder for models on meta: nothing is computed, and masks are functions of places."""

    def mask(self, function: MaskFunction, padding: Tensor | None, plain: Callable[[], Any]) -> Any:
        return TokenMask(function, padding, lambda **given: self.attend(sdpa_call(given)))

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls.append((self.running[-1], call))
        return call.query.new_zeros((*call.query.shape[:-1], call.value.shape[-1]))


def _callers_of(model: nn.Module, small: list[Caller], real: _Real, mixers: Collection[str]) -> Iterator[Caller]:
    """Carry the callers of a small copy, which may have fewer blocks and narrower ones, over to the model itself."""
    alike: dict[str, list[Caller]] = {}
    for caller in small:
        alike.setdefault(pattern(caller.path), []).append(caller)
    known = {caller.path: caller for caller in small}
    paths = (path for raw, _ in model.named_modules() if pattern(path := clean(raw)) in alike)
    for path in real.calls if real.is_whole else paths:
        if any(is_within(path, mixer) for mixer in mixers):
            continue
        others = alike.get(pattern(path), [])
        if path not in known and len({(c.rule, c.interface) for c in others}) != 1:
            raise UnsupportedError(f"the mask of {path} was not measured: layers beside it have several rules")
        found = known.get(path) or others[0]
        sizes, rule = real.calls.get(path, (found.sizes, found.rule))
        yield replace(found, path=path, sizes=sizes, rule=rule if found.interface else found.rule)


@dataclass
class _Real:
    """The record of a forward of the model itself, on meta, without experts.

    Attributes:
        calls: of attention, by module: sizes, and the rule of a mask that is a function of places.
        is_whole: the forward ran to its end; else there may be other calls.
        features: numbers of one token in each argument of a mixer, by its kind.
    """

    calls: dict[str, tuple[Sizes, MaskRule | None]]
    is_whole: bool
    features: dict[tuple[str, type], dict[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, mixers: list[str], *, has_mask: bool) -> _Real:
        """Run a forward of a row of two tokens, with or without a padding mask."""
        made = copy_without_values(model)
        intercept_transformers(made)
        signature, batch = Signature.of(made), {"tokens": torch.zeros((1, 2), dtype=torch.int64)}
        if signature.takes["positions"] is not None:
            batch["positions"] = torch.arange(2)[None]
        if signature.takes["document_ids"] is not None:
            batch["document_ids"] = batch["tokens"]
        if has_mask and "attention_mask" in signature.arguments:
            batch["attention_mask"] = torch.ones((1, 2), dtype=torch.int64)
        features: dict[tuple[str, type], dict[str, int]] = {}
        kinds = {pattern(path) for path in mixers}

        def note(path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            numbers = {key: leaf.numel() // 2 for key, leaf in tensors_by_path((args, kwargs)).items()}
            features.setdefault((pattern(path), type(module)), {}).update(numbers)

        recorder, is_whole = SizeRecorder(), False
        mixing = [(path, module) for path, module in made.named_modules() if pattern(clean(path)) in kinds]
        with contextlib.suppress(Exception):  # whatever a model's code raises on meta
            with watching(mixing, note), _AllTrue(), WithoutWeights(CPU):
                record(made, signature.inputs(batch, CPU), recorder)
            is_whole = True
        calls: dict[str, tuple[Sizes, MaskRule | None]] = {}
        for path, call in recorder.calls:
            if call.query.dim() == 4:
                is_by_places = isinstance(call.mask, TokenMask)
                rule = rule_of(call.mask.function) if is_by_places else MaskRule(causal=call.is_causal)
                calls[path] = Sizes.of(call), rule
        return cls(calls, is_whole, features)
