"""Find the calls of attention in a model, on a small copy, and the rule of each call's mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean
from meshwright.core.record import remember
from meshwright.introspection.signature import Signature
from meshwright.introspection.small.sample import ids_of, samples_of

from .arithmetic import allowed_of, arithmetic_of
from .flex import FlexCalls, PlaceMask, computing_flex, far_rules
from .interception import (
    AttentionCall,
    Handled,
    handling,
)
from .masks import MaskFunction, dense
from .values import Caller, MaskRule, Sizes

ROWS = 2
LENGTHS = (48, 26, 13, 7, 4)
"""Tokens of the rows on which masks are read: the first number that the model takes. Rehearsals begin at the second: no
multiple of a number of ranks.
"""


class Recorder:
    """A handler that computes every call as the model would, and notes the calls."""

    def __init__(self, *, computes: bool = True):
        self.calls: list[tuple[str, AttentionCall]] = []
        self.masks: list[MaskFunction] = []
        self.path, self.computes = "", computes

    def mask(self, function: MaskFunction, padding: Tensor | None, plain: Callable[[], Any]) -> Any:
        self.masks.append(function)
        return plain()

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls.append((self.path, call))
        if not self.computes:
            return call.query.new_zeros((*call.query.shape[:-1], call.value.shape[-1]))
        return call.as_given()


@contextmanager
def recording(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Note the calls of attention of a small copy's forward, with the innermost module that makes each."""
    stack: list[str] = []

    def enter(path: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            stack.append(path)
            recorder.path = path

        return note

    def leave(*_: Any) -> None:
        stack.pop()
        recorder.path = stack[-1] if stack else ""

    hooks = []
    for path, module in model.named_modules():
        hooks += [module.register_forward_pre_hook(enter(clean(path))), module.register_forward_hook(leave)]
    try:
        with handling(recorder), FlexCalls(recorder):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def small_copy(model: nn.Module) -> nn.Module:
    """Return the smallest copy of a model that computes; UnsupportedError where none does."""
    return next(iter(samples_of(model, Signature.of(model).takes, 1))).model


def record(model: nn.Module, inputs: dict[str, Any], recorder: Recorder | None = None) -> Recorder:
    """Run a forward and return its calls of attention with the modules that make them."""
    recorder = recorder or Recorder()
    for module in model.modules():
        remember(module, Handled(recorder))
    with torch.no_grad(), recording(model, recorder):
        model(**inputs)
    return recorder


def batches(model: nn.Module, lengths: tuple[int, ...] = LENGTHS) -> Iterator[dict[str, Tensor]]:
    """Yield batches: plain rows, and rows of several documents where the model takes such.

    Args:
        lengths: tokens of a row; the first with which a forward runs.
    """
    signature = Signature.of(model)
    plain = _longest(model, lengths)
    yield plain
    length = plain["tokens"].shape[1]
    if any(signature.takes[key] for key in ("positions", "document_ids")):
        documents = torch.stack([documents_of(length, shift) for shift in range(ROWS)])
        starts = torch.stack([torch.searchsorted(row, row) for row in documents])
        yield plain | {"positions": plain["positions"] - starts, "document_ids": documents}


def _longest(model: nn.Module, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    last: Exception | None = None
    for length in lengths:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, ids_of(model), (ROWS, length), generator=generator)
        plain = {"tokens": tokens, "positions": torch.arange(length).expand(ROWS, -1).contiguous()}
        try:
            with torch.no_grad(), computing_flex():
                model(**Signature.of(model).inputs(plain, torch.device("cpu")))
            return plain
        except UnsupportedError:
            raise
        except Exception as error:  # noqa: BLE001  (a shorter row may do)
            last = error
    raise UnsupportedError(
        f"the attention of {type(model).__name__} cannot be measured: a small copy fails with {type(last).__name__}:"
        f" {last}"
    ) from last


def documents_of(length: int, shift: int) -> Tensor:
    """Return the documents of a row, (length,) int64: of one, two, three … tokens, and a long one last."""
    sizes = torch.tensor([1, 2, 3 + shift, 5, 7], dtype=torch.int64)
    sizes = sizes[sizes.cumsum(0) < length]
    return torch.repeat_interleave(torch.arange(len(sizes) + 1), torch.cat((sizes, length - sizes.sum()[None])))


LONGEST_MEASURED = 8192
"""Tokens of the longest rows in which masks that are tensors are compared with their rules."""


def stated_rule(model: nn.Module, path: str) -> str:
    """Return the rule of masks that a module states; "" for most."""
    return next((getattr(m, "mask_rule", "") for name, m in model.named_modules() if clean(name) == path), "")


def refuse_other_masks(model: nn.Module, callers: Sequence[Caller], length: int) -> None:
    """Compare the masks that a model makes as tensors with the measured rules, in rows of this length.

    Raises:
        UnsupportedError: a mask follows another rule, or rows are too long for that to be seen.
    """
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
        found = [
            (path, call, inputs)
            for batch in batches(model, (length,))
            for inputs in (Signature.of(model).inputs(batch, torch.device("cpu")),)
            for path, call in record(model, inputs).calls
        ]
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
    if isinstance(call.mask, PlaceMask):
        rules = [*far_rules(call), *_candidates(calls)]
        rule = next((rule for rule in rules if all(_follows(rule, *each) for each in calls)), None)
        return Caller(path, sizes, interface=False, rule=rule, arithmetic=arithmetic, flex=True)
    rules = _candidates(calls)
    rule = next((rule for rule in rules if all(_follows(rule, *each) for each in calls)), None)
    if rule is None:
        raise UnsupportedError(f"the mask of {path} follows no rule of places and documents that is known")
    is_dense = any(isinstance(each.mask, Tensor) for each, _ in calls) and stated != str(rule)
    return Caller(path, sizes, interface=False, rule=rule, is_dense=is_dense, arithmetic=arithmetic)


def _candidates(calls: list[tuple[AttentionCall, dict[str, Any]]]) -> Iterator[MaskRule]:
    allowed = allowed_of(calls[0][0])
    window = int(allowed[..., -1, :].sum(-1).max())
    first_again = (~allowed[..., 0]).flatten(0, -2).any(0).to(torch.int64)
    chunk = int(first_again.argmax())  # of queries that do not see the first key, the first
    reaches = [{}, {"window": window}, *([{"chunk": chunk}] if chunk else [])]
    for reach in reaches:
        for is_causal in (True, False):
            for documents in (False, True):
                yield MaskRule(is_causal, documents=documents, **reach)


def _follows(rule: MaskRule, call: AttentionCall, inputs: dict[str, Any]) -> bool:
    allowed = allowed_of(call)
    length = allowed.shape[-1]
    expected = dense(rule.function(inputs.get("document_ids")), torch.arange(length)[None], length, len(call.query))
    return bool((allowed == expected).all())
