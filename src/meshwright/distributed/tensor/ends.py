"""Wrap the modules at which the cut of a model begins and ends: embedding, first and last block, head."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.losses import cross_entropy_sum
from meshwright.core.record import argument, note, show_computed, with_arguments, without_values, wrap
from meshwright.distributed.products import PLAIN
from meshwright.distributed.torch_private import as_no_view
from meshwright.introspection.deferred_logits import begin
from meshwright.introspection.logits_tape import DeferredLogits, within
from meshwright.introspection.signature import KEEPING, logits_of, with_logits

from . import functions
from .functions import Branch
from .layers import LossRequest, LossSite, Runtime, weight_and_bias
from .loss import VocabularyShard, head_loss_sum, vocabulary_parallel_cross_entropy_sum

PLAIN_LAYER = (Branch((PLAIN,)),)


def first_block(module: nn.Module, hidden: int | str, runtime: Runtime) -> None:
    """Cut activations along the sequence at the first block.

    The work is done in a hook, so that a recomputed forward is given the part and not the whole.
    """

    def enter(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        x = argument(args, kwargs, hidden)
        sequence = runtime.sequence
        sequence.begin(*x.shape[:2])
        if sequence.cut:
            part = runtime.arriving if runtime.arriving is not None else functions.own_part(x, sequence)
            args, kwargs = with_arguments(args, kwargs, {hidden: part})
        runtime.arriving = None
        return args, kwargs

    module.register_forward_pre_hook(enter, with_kwargs=True)
    note(module, f"sequence cut here, tp {runtime.group.size}")


def last_block(module: nn.Module, runtime: Runtime, *, alike: bool) -> None:
    """Gather the sequence after the last block, for models that count tokens there or whose head is whole."""
    gathered = functions.gathered_alike if alike else functions.gathered

    def leave(_: nn.Module, args: tuple, output: Any) -> Any:
        if not runtime.sequence.cut:
            return output
        if isinstance(output, Tensor):
            return gathered(output, runtime.sequence)
        return type(output)((gathered(output[0], runtime.sequence), *output[1:]))

    module.register_forward_hook(leave)
    note(module, f"sequence gathered behind, tp {runtime.group.size}")


def vocabulary_embedding(module: nn.Module, runtime: Runtime, rows: int, *, is_hidden: bool) -> None:
    """Make an embedding of ``rows`` vocabulary-parallel: each rank has the rows of some token ids.

    ``is_hidden``: the first block takes the output unchanged, so that the ranks can scatter it instead of summing.
    """
    group = runtime.group
    shard = VocabularyShard.of(rows, group)
    first, size = shard.first, shard.size

    forward = module.forward

    def embedding_forward(tokens: Tensor) -> Tensor:
        elsewhere = (tokens < first) | (tokens >= first + size)
        padding = module.__dict__.get("padding_idx")
        if padding is not None:
            module.__dict__["padding_idx"] = padding - first if first <= padding < first + size else None
        try:
            if size:
                found = forward((tokens - first).masked_fill(elsewhere, 0))
            else:
                weight, _ = weight_and_bias(module)
                found = weight.sum() * weight.new_zeros((*tokens.shape, weight.shape[1]))
        finally:
            if padding is not None:
                module.__dict__["padding_idx"] = padding
        nowhere = (tokens < 0) | (tokens >= rows)  # no rank has such an id: a vector of zeros would be silent
        fill = found.new_zeros(tokens.shape).masked_fill_(nowhere, torch.nan)
        summand = torch.where(elsewhere.unsqueeze(-1), fill.unsqueeze(-1), found)
        sequence = runtime.sequence
        if not (is_hidden and sequence.cut):
            return functions.summed(summand, group)
        sequence.begin(*tokens.shape)
        runtime.arriving = functions.summed_part(summand, sequence)
        return without_values(summand, summand.shape)

    wrap(module, embedding_forward, f"vocabulary-parallel tp {runtime.group.size}")


def vocabulary_head(module: nn.Module, runtime: Runtime, rows: int, *, takes_whole: bool) -> None:
    """Make the layer that computes the logits vocabulary-parallel: each rank computes those of its token ids."""
    group = runtime.group

    def head_forward(x: Tensor) -> Tensor:
        if runtime.request is not None:
            whole = x if takes_whole else functions.gathered(x, runtime.sequence)
            return _loss_deferred(runtime, runtime.request, module, whole, VocabularyShard.of(rows, group))
        weight, bias = weight_and_bias(module)
        if takes_whole:
            own = nn.functional.linear(x, weight, bias)
        else:
            (own,) = functions.column_parallel(x, PLAIN_LAYER, [weight, bias], runtime.sequence)
        if runtime.logits == "whole":
            return functions.whole_vocabulary(own, rows, group)
        # deferred logits in place of this rank's, to which the model then does its part of what it does to all
        shard = VocabularyShard.of(rows, group)
        tape, begun = begin(
            own,
            shard.whole,
            "Give a loss of whole logits: loss_fn=lambda logits, labels: torch.nn.functional.cross_entropy("
            "logits.flatten(0, 1).float(), labels.flatten(), reduction='sum').",
        )
        show_computed(begun, own)

        def answer(logits: Tensor) -> Tensor:
            made = tape.finish(logits, cut=True)
            runtime.shard = _part_of(made, shard)
            piece = tape.replay(made, own.flatten(0, -2), first=shard.first)
            # nobody else has the piece: to autograd its new shape is no view, of which FSDP2 would warn
            return as_no_view(piece, (*made.shape[:-1], runtime.shard.size))

        runtime.answer = answer
        return begun

    wrap(module, head_forward, f"vocabulary-parallel tp {runtime.group.size}")


def kept_logits(model: nn.Module, runtime: Runtime) -> None:
    """Let a model that is asked for the logits of some tokens compute all, and keep these of the output.

    transformers' models choose the tokens before the head (``logits_to_keep``), where a rank has a part of the
    sequence.
    """
    name = next((name for name in KEEPING if name in inspect.signature(model.forward).parameters), None)
    if name is None:
        return

    forward = model.forward

    def keeping_forward(*args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.get(name, 0)
        if not runtime.sequence.cut or (isinstance(wanted, int) and not wanted):
            return forward(*args, **kwargs)
        output = forward(*args, **{**kwargs, name: 0})
        return with_logits(output, logits_of(output)[:, slice(-wanted, None) if isinstance(wanted, int) else wanted])

    wrap(model, keeping_forward, f"chooses logits behind the head, tp {runtime.group.size}")


def loss_computing_head(module: nn.Module, runtime: LossSite) -> None:
    """Let a whole head compute the loss in chunks when one is requested."""
    forward = module.forward

    def loss_forward(x: Tensor) -> Tensor:
        return forward(x) if runtime.request is None else _loss_deferred(runtime, runtime.request, module, x, None)

    wrap(module, loss_forward, "loss in chunks")


def answer_behind(model: nn.Module, runtime: LossSite) -> None:
    """Let a model do to the logits of some tokens or ids, or before a requested loss, what its code does to all.

    The work is done in a hook, behind the model's own hooks.
    """

    def leave(_: nn.Module, args: tuple, output: Any) -> Any:
        answer, runtime.answer = runtime.answer, None
        if answer is None or output is None:  # None: the forward failed
            return output
        return with_logits(output, answer(logits_of(output)))

    model.register_forward_hook(leave, always_call=True)
    note(model, "logits in parts")


def _loss_deferred(
    runtime: LossSite, request: LossRequest, head: nn.Module, x: Tensor, shard: VocabularyShard | None
) -> Tensor:
    """Return deferred logits; the requested loss is computed once it is known what the model does to them."""
    weight, bias = weight_and_bias(head)
    rows = weight.shape[0] if shard is None else shard.whole
    tape, begun = begin(x, rows, "Set techniques.loss_chunks = 1.")
    show_computed(begun, x.new_empty((x.shape[0], 0, rows)))
    labels = request.labels.flatten()
    weights = None if request.weights is None else request.weights.flatten()

    def answer(logits: Tensor) -> Tensor:
        made = tape.finish(logits, cut=shard is not None)
        first, part = (0, None) if shard is None else (shard.first, _part_of(made, shard))

        def loss(piece: Tensor, tokens: slice) -> Tensor:
            found = tape.replay(made, piece.clone() if tape.writes else piece, start=tokens.start, first=first)
            own = None if weights is None else weights[tokens]
            if part is None:
                return cross_entropy_sum(found, labels[tokens], own)
            return vocabulary_parallel_cross_entropy_sum(found, labels[tokens], part, weights=own)

        request.result = head_loss_sum(x, weight, loss, bias=bias, chunks=request.chunks)
        # DDP finds what a step does not use from the output
        return request.result * x.new_empty((x.shape[0], 0, made.shape[-1]))

    runtime.answer = answer
    return begun


def _part_of(logits: DeferredLogits, shard: VocabularyShard) -> VocabularyShard:
    """Return this rank's part of the ids that a model kept of its vocabulary."""
    columns = logits.columns
    assert columns is not None
    mine = within(columns, range(shard.first, shard.first + shard.size))
    return VocabularyShard(mine.start - columns.start, len(mine), len(columns), shard.group)
