"""Apply context parallelism: each rank computes a part of every row's tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.record import recall, remember
from meshwright.core.torch_private import call_behind_backward, tree_leaves, uncompiled
from meshwright.distributed.exchange import ProcessGroupRanks, RankGroup
from meshwright.distributed.process import agree
from meshwright.distributed.step.batch import fingerprint
from meshwright.distributed.weights.shards import own_streams
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.signature import KEEPING, SPELLINGS, Signature, layers_of_wrapping
from meshwright.models.layers import Router
from meshwright.planning.plan import Plan

from . import runtime as parts
from .modules import refuse_other_rows
from .proof import PADDED, WITHOUT_POSITIONS, refuse, refuse_length
from .rows import PLACES, CutBatch, CutRows, on_host
from .runtime import Checks, ContextRuntime, wrap_modules


def apply(model: nn.Module, plan: Plan, mesh: DeviceMesh, facts: ModelFacts) -> nn.Module:
    """Intercept the calls of attention that the plan names, for rows cut over a mesh axis."""
    assert plan.context is not None
    ranks, context = ProcessGroupRanks(mesh.get_group()), plan.context
    checks = Checks(
        padding=partial(refuse, facts, context, *PADDED),
        positions=partial(refuse, facts, context, WITHOUT_POSITIONS),
        length=partial(refuse_length, facts, context),
        rows=partial(refuse_other_rows, context.mixing),
    )
    copy = facts.measurements.without_values() if context.has_pairs else None
    if copy is not None and plan.precision.casts:
        copy = copy.to(torch_dtype(plan.precision.compute))
    wrap_modules(model, context, ranks, checks, copy)
    separate_streams(model, ranks.rank)
    count_whole_rows(model, ranks)
    remember(model, context)
    return model


def count_whole_rows(model: nn.Module, ranks: RankGroup) -> None:
    """Let routers' losses per sequence count the tokens of all ranks, beside those of other parts on a tensor axis."""
    for module in model.modules():
        if isinstance(module, Router) and module.config.sequence_loss:
            module.across = _OverRows(ranks, module.across)


class _OverRows:
    """Sums counts over ranks with other tokens of the same rows.

    This is not a function with the ranks bound to it: code compiled around its call would hold their group forever.
    """

    def __init__(self, ranks: RankGroup, before: Callable[[Tensor], Tensor] | None):
        self._ranks, self._before = ranks, before

    @uncompiled
    def __call__(self, counted: Tensor) -> Tensor:
        return self._ranks.sum(counted if self._before is None else self._before(counted))


def separate_streams(model: nn.Module, rank: int) -> None:
    """Give each rank a random stream of its own while a forward in training mode runs: it has other tokens."""
    own_streams(model, model, lambda: model.training, ("context rank", rank))


def runtime_of(model: nn.Module) -> ContextRuntime | None:
    """Return what context parallelism keeps on a model; None without it."""
    return recall(model, ContextRuntime)


# --- cut the rows of a microbatch over the context axis in a training loop of the user's own

log = logging.getLogger("meshwright")

CACHE = "use_cache"


@contextmanager
def context_parallel_rows(model: nn.Module, batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Cut a microbatch of whole rows, and let ``model`` compute this rank's tokens of them inside the block.

    Every rank of the context axis brings the same rows, and gets the arguments of the model's forward for its own
    tokens of each row: what was given, positions where the model takes them, and for transformers a mask of whole
    rows. Attention reaches the other ranks' tokens. The backward may run inside the block or behind it, also with
    recomputation. Rows go to ranks by runs, so labels must be shifted before. Ranks have as many tokens of a row to
    within one: where rows divide and every token has a label, FSDP's mean of the ranks' mean losses is the mean over
    all tokens; else give it ``F.cross_entropy(..., reduction="sum") * ranks / labels on all ranks``, where ranks is
    dp_replicate × dp_shard × cp. Without context parallelism on the model the batch is returned as it is.

    Collective over the context axis: one small all-reduce.

    Args:
        model: a module laid out on a mesh with ``cp`` larger than 1, or a DDP wrapper of one.
        batch: token ids, (rows, tokens), and other tensors by the names of the model's arguments. Tensors of the same
            two dims are cut with them, whatever their names (labels, loss_mask); a padding mask stays whole for models
            of transformers. With ``places``, (rows, own tokens) int64, each rank brings its own tokens alone, and their
            places in the rows.

    Raises:
        ConfigError: rows that cannot be cut, or that differ between ranks of the axis; on all of these ranks.
        UnsupportedError: what this model cannot be given in parts; labels that the model would shift itself; a cache.
    """
    # the model whose attention is intercepted, inside the wrappers of DDP and the compiler
    found = ((layer, runtime_of(layer)) for layer in layers_of_wrapping(model))
    inner, runtime = next(((layer, runtime) for layer, runtime in found if runtime is not None), (model, None))
    if runtime is None:
        yield dict(batch)
        return
    signature, refusal, word, made = Signature.of(inner), None, 0, CutBatch()
    spellings = {key: (signature.takes[key] or key, *others) for key, others in SPELLINGS.items()}
    names = {key: name for key, known in spellings.items() for name in known if name in batch}
    given: dict[str, Tensor] = {}
    try:
        if "tokens" not in names:
            raise ConfigError(
                f"the batch has no token ids ('input_ids' or 'tokens'), (rows, tokens), whose rows could be cut, but"
                f" {sorted(batch)}"
            )
        tokens = batch[names["tokens"]]
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
            shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise ConfigError(f"batch['{names['tokens']}'] is {shape}; token ids are whole numbers, (rows, tokens)")
        # our keys where we have one, and the batch's own
        known = {name: key for key, name in names.items()}
        given = {known.get(name, name): value for name, value in batch.items() if isinstance(value, Tensor)}
        positions = given.get("positions")
        if positions is not None and positions.shape == (1, tokens.shape[1]):  # transformers spreads them over rows
            given["positions"] = positions.expand(tokens.shape)
        values = on_host(given)
        is_part = parts.are_parts([values], cuts_rows=True)
        word = -1 if is_part else fingerprint([values])  # a number of the rows
        made = made if is_part else runtime.cut(given, signature, values)
    except Exception as error:  # noqa: BLE001  (raised below, once the other ranks know)
        refusal = error
    # all ranks of the axis raise what one refuses, or that they brought other rows
    group = runtime.group
    assert isinstance(group, ProcessGroupRanks)
    words = torch.tensor([word, -word, refusal is not None], dtype=torch.int64, device=agree.word_device())
    high, low, refused = group.largest(words).tolist()
    if refused:
        agree.raise_first(refusal, [group.group])
    if -low == -1 != high:
        number = torch.tensor([word == -1], dtype=torch.int64, device=agree.word_device())
        parts.refuse_some(int(group.sum(number)), group.size)
    if high != -low:
        raise parts.other_rows(group.size)
    if high == -1:  # all bring their own tokens alone
        made = parts.join(given, runtime, signature)
    own: dict[str, Any] = {key: value for key, value in batch.items() if key not in (*names.values(), PLACES)}
    for key, value in made.items():
        own[names.get(key) or signature.takes.get(key) or key] = value
    backward = _Backward(runtime, made.rows)
    hooks = [
        inner.register_forward_pre_hook(without_cache, with_kwargs=True),
        inner.register_forward_hook(backward.watch),
    ]
    runtime.enter(made)
    runtime.in_backward = None  # one that raised may have left it
    try:
        yield own
    finally:
        runtime.rows = None
        for hook in hooks:
            hook.remove()


def warn_of_whole_rows(model: nn.Module) -> None:
    """Warn once where a loop trains a model with context parallelism on whole rows: right, and nothing is shared."""
    warned: list[bool] = []

    def look(module: nn.Module, args: Any) -> None:
        runtime = runtime_of(module)
        if runtime is not None and runtime.rows is None and torch.is_grad_enabled() and not warned:
            warned.append(True)
            log.warning(
                "rows are not cut: each of the %d ranks of the cp axis computes all tokens of every row. Put"
                " context_parallel_rows(model, batch) around the forward.",
                runtime.group.size,
            )

    model.register_forward_pre_hook(look)


def without_cache(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Leave out keys and values for generation, and refuse labels.

    With a cache, transformers does not look for documents in positions.
    """
    if kwargs.get("labels") is not None:
        raise UnsupportedError(
            f"{type(model).__name__} is given labels with a part of each row: a loss inside the model would shift them"
            f" across the ends of that part. Shift labels before rows are cut (labels[:, t] = tokens[:, t + 1], the"
            f" last -100), take them out of the arguments (own.pop('labels')), and compute the loss from logits"
        )
    kept = next((name for name in KEEPING if not isinstance(kwargs.get(name, 0), int) or kwargs.get(name, 0)), None)
    if kept is not None:
        raise UnsupportedError(
            f"{type(model).__name__} is given {kept} = {kwargs[kept]} with a part of each row, and would choose among"
            f" the tokens of that part: leave it out, and choose among the logits of whole rows"
        )
    if CACHE not in Signature.of(model).arguments:
        return args, kwargs
    if kwargs.get(CACHE):
        raise UnsupportedError(
            f"{type(model).__name__} is given {CACHE} = True, and keys and values of a part of each row continue"
            f" nothing: leave it out"
        )
    return args, kwargs | {CACHE: False}


class _Several:
    """Stands for the rows of several microbatches in one backward, in which nothing can be recomputed."""

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(
            "one backward runs through several microbatches with cut rows, and recomputes activations: call backward"
            " for the loss of each microbatch"
        )


class _Backward:
    """Sets where the tokens of one microbatch lie while its backward runs, in which forwards may be recomputed."""

    def __init__(self, runtime: ContextRuntime, rows: CutRows):
        self._runtime, self._rows = runtime, rows

    def watch(self, model: nn.Module, args: Any, output: Any) -> None:
        """Hook the tensors of a forward's output: their gradients come before everything inside the model."""
        leaves = [*tree_leaves(output), getattr(output, "logits", None)]
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        if not tensors:
            raise UnsupportedError(
                f"{type(model).__name__} returns a {type(output).__name__}, in which no tensor is found whose backward"
                f" could be followed. Return logits, or an object with .logits"
            )
        for tensor in tensors.values():
            if tensor.requires_grad:
                tensor.register_hook(self._enter)

    def _enter(self, gradient: Tensor) -> None:
        runtime: Any = self._runtime
        if runtime.rows is self._rows:
            return
        if runtime.in_backward is not None:
            runtime.rows = _Several()
            return
        before, runtime.rows, runtime.in_backward = runtime.rows, self._rows, self._rows

        def leave() -> None:
            runtime.rows, runtime.in_backward = before, None

        call_behind_backward(leave)
