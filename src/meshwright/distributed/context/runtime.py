"""Compute the intercepted attention calls of one model over the ranks of the context axis."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comparison.sketch import TokensOfRank
from meshwright.core.devices import is_accelerator, to_device
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import clean, pattern
from meshwright.core.record import remember, wrap
from meshwright.core.torch_private import by_values, has_no_values, tensors_by_path, uncompiled, version_of
from meshwright.distributed.exchange import RankGroup
from meshwright.distributed.process import agree
from meshwright.distributed.process.agree import Verdicts
from meshwright.introspection.mixing.arithmetic import FlexCalls, PlaceMask, allowed_of
from meshwright.introspection.mixing.interception import (
    AttentionCall,
    Handled,
    Handler,
    SdpaCalls,
    handling,
    intercept_calls,
    intercept_transformers,
    sdpa_call,
)
from meshwright.introspection.mixing.masks import MaskFunction, MaskRule, RowMask, TokenMask, dense, segments_of
from meshwright.introspection.mixing.values import COUNTS, Caller
from meshwright.introspection.mixing.whole import META, copy_without_values
from meshwright.introspection.signature import Signature
from meshwright.planning.context.plan import ContextPlan

from .methods import Context, attend, attend_to_whole_rows
from .modules import wrap_counting, wrap_mixer
from .rows import (
    FILLER,
    MASK,
    PLACES,
    Apart,
    CutBatch,
    CutRows,
    PairArguments,
    Reaches,
    cut_batch,
    cut_rows,
    kept_on,
    of_whole_rows,
    on_host,
    place,
    refuse_other_shapes,
    select,
)


@dataclass(frozen=True)
class Checks:
    """Checks that are made when a batch first needs them; each raises UnsupportedError.

    Attributes:
        padding: the model can be given a padding mask in parts.
        positions: the model's positions are 0, 1, 2 … where it is given none.
        length: masks follow the measured rules in rows of so many tokens.
        rows: parts of these rows are no other case to the model than whole ones.
    """

    padding: Callable[[], None] = lambda: None
    positions: Callable[[], None] = lambda: None
    length: Callable[[int], None] = lambda length: None
    rows: Callable[[CutRows], None] = lambda rows: None


class ContextRuntime:
    """The state that a model's intercepted modules share.

    Attributes:
        group: the ranks of the context axis.
        rows: where the tokens of the microbatch lie that is computed now; None: every rank has whole rows.
        in_backward: the same, where a backward behind the block of a user's own loop set it.
        pairs: the arguments of whole rows that modules are given for pairs of tokens; None where there are none.
        verdicts: whether masks are what they were taken for; an accelerator says so later.
    """

    def __init__(self, group: RankGroup, plan: ContextPlan, checks: Checks, pairs: PairArguments | None):
        self.group, self.plan, self.mixing, self.checks = group, plan, plan.mixing, checks
        self.rows: CutRows | None = None
        self.in_backward: CutRows | None = None
        self.pairs = pairs
        self._reaches = Reaches(group)
        self.verdicts = Verdicts()
        self._masks_made = 0
        self._compared: dict[Any, bool] = {}

    def enter(self, batch: Mapping[str, Tensor]) -> None:
        """Compute the tokens of this batch from now on: those that ``cut`` chose, or whole rows of any other batch."""
        self.verdicts.raise_known()
        self.rows = batch.rows if isinstance(batch, CutBatch) else None

    def begin_forward(self, model: nn.Module, given: Any) -> None:
        """Count masks anew: which of them keep documents apart is known by their order. Make those of whole rows."""
        self._masks_made = 0
        if self.pairs is not None and self.rows is not None:
            tensors = tensors_by_path(given).values()
            devices = (META if has_no_values(each) else each.device for each in tensors)
            self.pairs.enter(model, self.rows, next(devices, torch.device("cpu")))

    def cut(
        self, batch: Mapping[str, Tensor], signature: Signature, values: Mapping[str, Tensor] | None = None
    ) -> CutBatch:
        """Return this rank's tokens of a microbatch of whole rows; ``values``: those that ``on_host`` read before."""
        self.check(batch, signature, batch["tokens"].shape[1])
        rows = self._cut_rows(batch if values is None else values)
        self.checks.rows(rows)
        whole = _completed(batch, self.plan, signature)
        return cut_batch(whole, rows, whole_mask=bool(self.mixing.implementation))

    def check(self, batch: Mapping[str, Tensor], signature: Signature, length: int) -> None:
        """Raise UnsupportedError for keys that this model cannot be given in parts, or rows of this length.

        Raises:
            ConfigError: a tensor has another shape than the batch's tokens.
        """
        refuse_other_shapes(batch)
        if self.pairs is not None:
            self.pairs.refuse_other_keys(batch, signature)
        if MASK in batch:
            self.checks.padding()
        if signature.takes["positions"] is not None and "positions" not in batch:
            self.checks.positions()
        self.checks.length(length)

    def tokens_of(self, batch: Mapping[str, Tensor], rank: int, ranks: int) -> TokensOfRank:
        """Return which tokens of a batch's whole rows one of ``ranks`` that cut this rank's tokens further has."""
        places = self._cut_rows(batch).own
        share = -(-places.shape[1] // ranks)
        mine = slice(rank * share, (rank + 1) * share)

        def now() -> Tensor:
            assert self.rows is not None
            return self.rows.own[:, mine]

        return TokensOfRank(places[:, mine], share, batch["tokens"].shape[1], now)

    def _cut_rows(self, batch: Mapping[str, Tensor]) -> CutRows:
        apart: Apart = "" if not self.plan.cuts_documents else "positions" if self.mixing.implementation else "ids"
        group, by_positions = self.group, bool(self.mixing.implementation)
        return cut_rows(batch, group.size, group.rank, cut=self.plan.cut, by_positions=by_positions, apart=apart)

    def mask(self, function: MaskFunction, padding: Tensor | None, plain: Callable[[], Any]) -> Any:
        rows = self.rows
        if rows is None:
            return plain()
        number, self._masks_made = self._masks_made, self._masks_made + 1
        if padding is not None and rows.padding is not None and is_accelerator(padding.device):
            # it is taken to be the batch's, which the host has, and compared there
            words = f"the model hands a padding mask of {list(padding.shape)} to attention that is not the batch's"
            error, whole = UnsupportedError(f"{words} '{MASK}'"), rows.memo.get("padding")
            if whole is None:
                whole = rows.memo["padding"] = rows.padding.bool()
            if whole.shape != padding.shape:
                raise error
            self.verdicts.expect((padding == kept_on(whole, padding.device)).all(), error)
            padding = whole
        mask = RowMask(function, padding=padding)
        if rows.padding is None:  # transformers looks for documents in a row only where no mask is given
            mask = RowMask(function)
            if rows.segments is not None and rows.positions is not None and self.mixing.packed[number]:
                mask = RowMask(function, rows.positions, rows.segments)
        return TokenMask(function, mask, lambda **given: self.attend(sdpa_call(given), None))

    @uncompiled  # rows change with each microbatch, and a graph would hold on to those of the first
    def attend(self, call: AttentionCall, caller: Caller | None) -> Tensor:
        rows = self.rows
        if rows is None:
            return call.as_given()
        own = rows.counts[rows.rank]
        path = "" if caller is None else caller.path
        where = f"the attention of {path}" if path else "attention"
        if call.query.dim() != 4 or call.query.shape[2] != own or call.key.shape[2] != own:
            raise UnsupportedError(
                f"{where} is called with queries {tuple(call.query.shape)} and keys {tuple(call.key.shape)}, where this"
                f" rank has {own} tokens of a row: they must be (rows, heads, tokens, features)"
            )
        if isinstance(call.mask, TokenMask):
            mask = call.mask.rows
        elif isinstance(call.mask, PlaceMask):
            mask = of_whole_rows(call.mask.function, rows, self.verdicts.expect)
        elif call.interface or caller is None or caller.rule is None:
            mask = self._by_rule(MaskRule(causal=call.is_causal), rows)
        else:
            self._refuse_other_mask(call, caller, caller.rule, rows)
            mask = self._by_rule(caller.rule, rows)
        arithmetic = None if caller is None or call.dropout else caller.arithmetic
        reach = None if arithmetic is None else self._reaches.of(mask, rows, len(call.query), call.query.device)
        method = None if caller is None else self.plan.method_of[caller.path]
        if method is not None and arithmetic is not None and reach is not None:
            return attend(call, Context(self.group, rows, reach), arithmetic, method)
        if method is not None and method.asked and method.kind != "all_gather":
            raise UnsupportedError(
                f"techniques.context_parallel_method = {method.kind}: {path} has a mask in which a query's keys"
                f" are not one run of tokens, or dropout, and goes by all_gather alone"
            )
        return attend_to_whole_rows(call, mask, rows, self.group)

    def _by_rule(self, rule: MaskRule, rows: CutRows) -> RowMask:
        if rule not in rows.memo:
            segments = rows.documents if rule.documents else None
            rows.memo[rule] = RowMask(rule.places, segments=segments, is_known=True)
        return rows.memo[rule]

    @by_values
    def _refuse_other_mask(self, call: AttentionCall, caller: Caller, rule: MaskRule, rows: CutRows) -> None:
        """Compare the mask that the model made, of this rank's tokens alone, with the measured rule."""
        if has_no_values(call.mask):
            return
        own = call.query.shape[2]
        if isinstance(call.mask, Tensor):  # it may depend on the tokens: once where several layers are given it
            given, version = rows.memo.get(("compared", rule), (lambda: None, 0))
            rows.memo["compared", rule] = weakref.ref(call.mask), version_of(call.mask)
            is_compared = given() is call.mask and version == version_of(call.mask)
        else:
            seen = self._compared if rows.documents is None else rows.memo
            key = ("without a mask", rule, call.is_causal, own)
            is_compared, seen[key] = key in seen, True
        if is_compared:
            return
        device = call.mask.device if isinstance(call.mask, Tensor) else torch.device("cpu")
        documents = None if rows.documents is None else to_device(rows.take(rows.documents), device)
        expected = dense(rule.function(documents), torch.arange(own, device=device)[None], own, len(call.query))
        words = f"{caller.path} masks {own} tokens by another rule than the one that was measured ({rule})"
        allowed = allowed_of(call, device, self.verdicts.expect)
        follows = (allowed == expected).all()
        if self.mixing.counts_positions:  # the model may have made it of the places of its tokens
            whole = dense(rule.function(rows.documents), rows.own, rows.length, len(call.query))
            by_places = select(whole, rows.own, 3)
            follows = follows | (allowed == kept_on(by_places, device)).all()
        self.verdicts.expect(follows, UnsupportedError(words))


class OfCaller(Handler):
    """The handler of one module's calls."""

    def __init__(self, runtime: ContextRuntime, caller: Caller):
        self._runtime, self._caller = runtime, caller

    def mask(self, function: MaskFunction, padding: Tensor | None, plain: Callable[[], Any]) -> Any:
        return self._runtime.mask(function, padding, plain)

    def attend(self, call: AttentionCall) -> Tensor:
        return self._runtime.attend(call, self._caller)


def wrap_modules(
    model: nn.Module,
    plan: ContextPlan,
    group: RankGroup,
    checks: Checks = Checks(),
    without_values: nn.Module | None = None,
) -> ContextRuntime:
    """Intercept a model's calls of attention in place, and return the state that they share.

    ``without_values``: a copy, on meta, of the model as it was before anything was changed; None: nothing was yet.
    """
    pairs = PairArguments(without_values or copy_without_values(model), plan) if plan.has_pairs else None
    runtime = ContextRuntime(group, plan, checks, pairs)
    change = f"keys and values of cp {group.size}"
    modules = {clean(path): module for path, module in model.named_modules()}
    if plan.mixing.implementation:
        intercept_transformers(model)
    for caller in plan.mixing.callers:
        if (module := modules.get(caller.path)) is None:
            continue  # on another pipeline stage
        if caller.interface:
            remember(module, Handled(OfCaller(runtime, caller)))
        else:
            intercepting = partial(FlexCalls if caller.flex else SdpaCalls, OfCaller(runtime, caller))
            intercept_calls(module, intercepting, change)

    for planned in plan.mixers:
        if planned.mixer.path in modules:
            wrap_mixer(model, planned, runtime)
    counting = [use for use in plan.mixing.lengths if use.kind in COUNTS]
    for path, module in modules.items() if counting else ():
        if here := [use for use in counting if use.module == pattern(path)]:
            wrap_counting(module, here, runtime)

    forward = model.forward

    def context_forward(*args: Any, **kwargs: Any) -> Any:
        runtime.begin_forward(model, (args, kwargs))
        with handling(runtime):  # type: ignore[arg-type]  (it makes masks alone)
            return forward(*args, **kwargs)

    wrap(model, context_forward, f"rows cut over cp {group.size}")
    remember(model, runtime)
    return runtime


def first_tokens(batch: Mapping[str, Tensor], plan: ContextPlan, signature: Signature, rank: int = 0) -> CutBatch:
    """Return a rank's tokens of a microbatch of whole rows of one document each, for a dry run."""
    tokens = batch["tokens"]
    rows = cut_rows({"tokens": tokens}, plan.ranks, rank, cut=plan.cut)
    return cut_batch(_completed(batch, plan, signature), rows, whole_mask=bool(plan.mixing.implementation))


def _completed(batch: Mapping[str, Tensor], plan: ContextPlan, signature: Signature) -> dict[str, Tensor]:
    """Add what a model would make of whole rows by itself: positions, and for transformers a mask.

    A mask of whole rows tells transformers their length, and that positions are not to be searched for breaks.
    """
    whole = dict(batch)
    tokens = batch["tokens"]
    if signature.takes["positions"] is not None and "positions" not in whole and plan.mixing.counts_from_zero:
        whole["positions"] = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    if plan.mixing.implementation and MASK in signature.arguments and MASK not in whole:
        whole[MASK] = torch.ones(tokens.shape, dtype=torch.int64, device=tokens.device)
    return whole


# --- take batches of which each rank of the context axis brings its own tokens, with their places in whole rows

ROWS_OF = ("positions", "document_ids", MASK)
"""Keys whose whole rows every rank needs, for masks."""

Batch = Mapping[str, Tensor]


def other_rows(ranks: int) -> ConfigError:
    """Return the error of ranks that should have brought the same rows."""
    return ConfigError(
        f"the {ranks} ranks of the cp axis brought different rows: they share the tokens of the same rows. Give a"
        f" loader the rank and size of the data axes (dp_replicate × dp_shard) alone, or give each rank its own tokens"
        f" with their places (batch['{PLACES}'])"
    )


def are_parts(pieces: Sequence[Batch], *, cuts_rows: bool) -> bool:
    """Return whether a rank's microbatches hold its own tokens alone; refuse mixtures and places out of order."""
    bring = [PLACES in piece for piece in pieces]
    if not any(bring):
        return False
    if not cuts_rows:
        raise ConfigError(
            f"batch['{PLACES}'] says that a rank has a part of each row, and layout.cp = 1: give whole rows without it"
        )
    if not all(bring):
        raise ConfigError(
            f"{sum(bring)} of {len(bring)} microbatches bring '{PLACES}': give it with all of them, or whole rows alone"
        )
    for piece in pieces:
        places, tokens = piece[PLACES], piece.get("tokens")
        if not isinstance(places, Tensor) or places.dtype != torch.int64:
            kind = places.dtype if isinstance(places, Tensor) else type(places).__name__
            raise ConfigError(f"batch['{PLACES}'] holds {kind}; it must hold torch.int64, a tensor like tokens")
        if isinstance(tokens, Tensor) and places.shape != tokens.shape:
            shapes = f"{tuple(places.shape)}, but tokens have {tuple(tokens.shape)}"
            raise ConfigError(f"batch['{PLACES}'] has shape {shapes}: it says each token's place in its row")
        if bool((places.diff(dim=-1) <= 0).any()) or bool((places < 0).any()):
            raise ConfigError(
                f"batch['{PLACES}'] must ascend from 0 in each row: bring tokens in the order that they have in whole"
                f" rows"
            )
    return True


def without_places(piece: Batch) -> Batch:
    """Return a microbatch with its other keys alone."""
    return {key: value for key, value in piece.items() if key != PLACES}


def refuse_some(parts: int, ranks: int) -> None:
    """Raise ConfigError if some of the ranks bring their own tokens and others whole rows."""
    if 0 < parts < ranks:
        raise ConfigError(
            f"{parts} of {ranks} ranks bring batch['{PLACES}'], each token's place in its row, and the others do not:"
            f" all ranks bring their own tokens with places, or all bring whole rows"
        )


def join(piece: Batch, runtime: ContextRuntime, signature: Signature, longest: int | None = None) -> CutBatch:
    """Find where the other ranks' tokens lie, and return the microbatch as if its rows had been cut here.

    Collective over the context axis: two messages. Errors are raised on all of its ranks.
    """
    counts, gathered = _exchange(on_host(piece), runtime.group)
    places, length = gathered.pop(PLACES), sum(counts)
    index = torch.where(places == FILLER, length, places).transpose(0, 1).flatten(1)
    # each place from 0 to length - 1 must be on one rank
    numbers = torch.zeros((len(index), length + 1), dtype=torch.int64, device=index.device)
    numbers.scatter_add_(1, index.clamp(max=length), torch.ones_like(index))
    if not bool((numbers[:, :length] == 1).all()):
        row = int((numbers[:, :length] != 1).any(1).nonzero()[0])
        twice, gap = (numbers[row, :length] > 1).nonzero(), (numbers[row, :length] == 0).nonzero()
        sizes = f"row {row} has {length} tokens on all ranks of the cp axis together"
        if len(twice):
            one = int(twice[0])
            on = [rank for rank in range(len(places)) if bool((places[rank, row] == one).any())]
            raise ConfigError(f"batch['{PLACES}'] overlaps: {sizes}, and place {one} is on the ranks {on}")
        raise ConfigError(
            f"batch['{PLACES}'] leaves a gap: {sizes}, and none has place {int(gap[0])}, while places go up to"
            f" {int(places[:, row].max())}"
        )
    if longest and length > longest:
        raise ConfigError(
            f"the batch has sequences of {length} tokens on all ranks of the cp axis together, more than the model's"
            f" maximum of {longest}: shorten them"
        )
    # put the parts together by their places: (rows, length)
    whole: dict[str, Tensor] = {}
    for key, parts in gathered.items():
        row = parts.new_zeros((len(index), length + 1))
        place(row, index, 1, parts.transpose(0, 1).flatten(1))
        whole[key] = row[:, :length].contiguous()
    runtime.check(piece, signature, length)
    positions, documents = whole.get("positions"), whole.get("document_ids")
    segments = segments_of(positions) if runtime.mixing.implementation and positions is not None else None
    alike = places[:, :1] if bool((places == places[:, :1]).all()) else places
    has_documents = (segments if runtime.mixing.implementation else documents) is not None
    where = (runtime.group.rank, length, alike, counts, positions, segments, documents, whole.get(MASK))
    made = CutBatch(without_places(piece))
    made.rows = CutRows(*where, has_documents and runtime.plan.cuts_documents, count=len(piece["tokens"]))
    runtime.checks.rows(made.rows)
    if signature.takes["positions"] is not None and "positions" not in made and runtime.mixing.counts_from_zero:
        made["positions"] = piece[PLACES]
    if not runtime.mixing.implementation:
        return made
    if MASK in piece:
        made[MASK] = to_device(whole[MASK].to(piece[MASK].dtype), piece[MASK].device)
    elif MASK in signature.arguments:
        made[MASK] = torch.ones((len(piece["tokens"]), length), dtype=torch.int64, device=piece["tokens"].device)
    return made


def _exchange(piece: Batch, group: RankGroup) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """Return tokens of a row on each rank, and (ranks, rows, most) of places and what else masks need, filled up.

    Both messages, and what they bring, stay on the host where it has a backend.
    """
    device = agree.word_device()
    rows, own = piece["tokens"].shape
    here = [key in piece for key in ROWS_OF]
    head = torch.tensor([own, rows, *here], dtype=torch.int64, device=device)
    heads = group.gather_features(head).tolist()
    if any(other[1:] != heads[0][1:] for other in heads):
        words = "; ".join(
            f"rank {rank}: {other[1]} rows of {other[0]} tokens with"
            f" {', '.join([PLACES, *(key for key, is_there in zip(ROWS_OF, other[2:], strict=True) if is_there)])}"
            for rank, other in enumerate(heads)
        )
        raise ConfigError(f"the ranks of the cp axis bring parts of other rows, or other keys ({words})")
    counts = tuple(other[0] for other in heads)
    keys = [PLACES, *(key for key, is_there in zip(ROWS_OF, here, strict=True) if is_there)]
    filled = torch.full((len(keys), rows, max(counts)), FILLER, dtype=torch.int64)
    for number, key in enumerate(keys):
        filled[number, :, :own] = piece[key]
    parts = group.gather_features(filled.to(device)).cpu()
    return counts, {key: parts[:, number] for number, key in enumerate(keys)}
