"""Apply context parallelism, rehearsed on a small copy: each rank computes a part of every row's tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.losses import IGNORED
from meshwright.core.names import clean
from meshwright.core.record import recall, remember
from meshwright.core.torch_private import call_behind_backward, tree_leaves, uncompiled
from meshwright.distributed.exchange.ranks import ProcessGroupRanks, RankGroup
from meshwright.distributed.exchange.threads import on_threads
from meshwright.distributed.process import agree
from meshwright.distributed.recompute.kept import drawn_number, restore_streams, streams
from meshwright.distributed.step.batch import fingerprint
from meshwright.distributed.weights.shards import seed_of
from meshwright.introspection.constructor.recording import seeded
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.logits.tape import shown
from meshwright.introspection.mixing.arithmetic import computing_flex
from meshwright.introspection.mixing.measure import LENGTHS, batches, refuse_other_masks
from meshwright.introspection.mixing.values import COUNTS
from meshwright.introspection.premises.playing import FixedDraws
from meshwright.introspection.signature import KEEPING, SPELLINGS, Signature, layers_of_wrapping, logits_of
from meshwright.introspection.small.copies import copy_of, widened
from meshwright.introspection.small.sample import ids_of
from meshwright.models.moe import Router
from meshwright.planning.context.plan import ContextPlan
from meshwright.planning.plan import Plan

from . import runtime as parts
from .positions import refuse_other_rows
from .rows import MASK, PLACES, CutBatch, CutRows, on_host, select
from .runtime import Checks, ContextRuntime, wrap_modules

# --- rehearse context parallelism on a small copy of a model before its first use, with threads for ranks

ALWAYS = ("plain", "packed")
"""Kinds of batches that any run may have."""
PADDED = {"padded behind": slice(-3, None), "padded before": slice(0, 3)}
WITHOUT_POSITIONS = "without positions"
INSTEAD = {WITHOUT_POSITIONS: "Give batches positions", **dict.fromkeys(PADDED, "Leave attention_mask out")}
"""By kind of batch, what else can be done than to leave rows whole."""
OTHERS = 6
"""Batches of other tokens."""
LARGEST_ERROR = 1e-6
"""In fp64, relative; models that compute in fp32 inside reach about 1e-7."""


def prove(facts: ModelFacts, plan: ContextPlan) -> dict[str, str]:
    """Rehearse the plan on a small copy of the model, unless it was before. No communication.

    Returns:
        By kind of batch that only some runs have, why it is refused, or "".

    Raises:
        UnsupportedError: the plan does not give what one process gives; the text names the module.
    """
    known = facts.measurements.refused
    if plan not in known and facts.module is not None:
        model, plan_of_copy = small_and_plan(facts, plan)
        found: dict[str, str] = {}
        for kind, batch in rehearsed(model).items():
            for training in (True, False) if kind == "plain" else (True,):
                found[kind] = found.get(kind) or _why_wrong(facts, plan_of_copy, model.train(training), kind, batch)
            if kind == "plain" and facts.measurements.premises().conditional:
                found[kind] = found[kind] or _why_wrong_for_others(facts, plan_of_copy, model.train(), kind, batch)
            if kind in ALWAYS and (why := found.pop(kind)):
                raise UnsupportedError(why)
        known[plan] = found
    return known.get(plan, {})


def small_and_plan(facts: ModelFacts, plan: ContextPlan) -> tuple[nn.Module, ContextPlan]:
    """Return a small copy with heads for all ranks, and the plan for the copy."""
    assert facts.module is not None
    sample = facts.measurements.sample(plan.ranks if plan.mixers else 1)
    return copy_of(sample.model), plan.for_sample(sample, facts.module)


def refuse(facts: ModelFacts, plan: ContextPlan, *kinds: str) -> None:
    """Raise UnsupportedError where the rehearsal of batches of some kind differed from one process."""
    found = prove(facts, plan)
    for kind in kinds:
        if why := found.get(kind):
            raise UnsupportedError(why)


def keep_for_batches(facts: ModelFacts, plan: ContextPlan, refused: dict[str, str]) -> None:
    """Keep another rank's verdicts, and copies that batches may need: a small one if masks are tensors, one on meta if
    modules are given masks of whole rows.
    """
    facts.measurements.refused[plan] = refused
    if any(caller.is_dense for caller in plan.mixing.callers):
        facts.measurements.sample()  # a model that is laid out cannot be copied any more
    if plan.has_pairs:
        facts.measurements.without_values()


def refuse_length(facts: ModelFacts, plan: ContextPlan, length: int) -> None:
    """Compare masks with their rules in rows of this length, unless they were before; raises UnsupportedError."""
    if (plan, length) in facts.measurements.proven or facts.module is None:
        return
    if any(caller.is_dense for caller in plan.mixing.callers):
        refuse_other_masks(copy_of(facts.measurements.sample().model), plan.mixing.callers, length)
    facts.measurements.proven.add((plan, length))


def _why_wrong_for_others(
    facts: ModelFacts, plan: ContextPlan, model: nn.Module, kind: str, batch: dict[str, Tensor]
) -> str:
    """Rehearse batches of other tokens, of a model that decides by its tokens what it computes."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(OTHERS):
        tokens = torch.randint(0, ids_of(model), batch["tokens"].shape, generator=generator)
        if why := _why_wrong(facts, plan, model, kind, batch | {"tokens": tokens}):
            return why
    return ""


def _why_wrong(facts: ModelFacts, plan: ContextPlan, model: nn.Module, kind: str, batch: dict[str, Tensor]) -> str:
    """Rehearse one batch, and say how it differs from one process; "" if it does not."""
    mode = "" if model.training else ", in evaluation mode"
    start = (
        f"layout.cp = {plan.ranks}: rows of {facts.kind} cut over ranks were rehearsed on a small copy, {kind}{mode},"
        f" and"
    )
    end = f"{INSTEAD[kind]}, or set layout.cp = 1." if kind in INSTEAD else "Set layout.cp = 1."
    try:
        with seeded(0):  # a model in training mode draws from torch's own stream
            errors = rehearse(model, plan, batch)
            if not all(error <= LARGEST_ERROR for error in errors.values()):  # the model's code may round to float32
                errors = rehearse(widened(model), plan, batch)
    except Exception as error:  # noqa: BLE001  (whatever a model's code raises on a part of its rows)
        return f"{start} the forward or backward fails: {type(error).__name__}: {error}. {end}"
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    if errors[worst] <= LARGEST_ERROR:
        return ""
    what = "the loss" if worst == "loss" else f"the gradient of {worst}"
    where = first_apart(model, plan, batch)
    mixes = f" {where} mixes or counts tokens by a way that is not intercepted." if where else ""
    lines = dict.fromkeys(shown(use.file, use.line) for use in plan.mixing.lengths if use.kind not in COUNTS)
    mixes += f" The model computes with the number of a row's tokens at {'; '.join(list(lines)[:3])}." if lines else ""
    return f"{start} {what} is wrong (relative error {errors[worst]:.1e}).{mixes} {end}"


def rehearsed(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Make the rehearsed batches: plain rows, packed documents and padding, as far as the model takes them."""
    made: dict[str, dict[str, Tensor]] = dict(zip(("plain", "packed"), batches(model, LENGTHS[1:]), strict=False))
    signature, tokens = Signature.of(model), made["plain"]["tokens"]
    if signature.takes["positions"] is not None:
        made[WITHOUT_POSITIONS] = {"tokens": tokens}
    if MASK in signature.arguments:
        for kind, where in PADDED.items():
            mask = torch.ones_like(tokens)
            mask[1, where] = 0
            made[kind] = {"tokens": tokens, MASK: mask}
    return made


def rehearse(model: nn.Module, plan: ContextPlan, batch: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative error of the loss ("loss") and of each parameter's gradient, against one process.

    Random draws of a model in training mode are fixed: ranks draw others than one process.
    """
    reference, draws = copy_of(model), FixedDraws()
    with draws, computing_flex():
        loss, labels = _loss_of(reference, batch)
        loss.backward()
    batch = batch | {"labels": labels}
    found = on_threads(plan.ranks, lambda group: _on_rank(copy_of(model), plan, batch, group, draws.seen))
    errors = {"loss": abs(sum(part for part, _ in found) - loss.item()) / abs(loss.item())}
    expected = {clean(name): p.grad for name, p in reference.named_parameters() if p.grad is not None}
    scale = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        total = torch.stack([gradients[name] for _, gradients in found]).sum(0)
        errors[name] = float((total - gradient).norm() / gradient.norm().clamp(min=1e-6 * float(scale)))
    return errors


def _loss_of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return one process's loss, and the labels (rows, length)."""
    logits = logits_of(model(**Signature.of(model).inputs(batch, torch.device("cpu"))))
    if logits.shape[:2] != batch["tokens"].shape:
        raise ValueError(
            f"its logits are {tuple(logits.shape)} for tokens {tuple(batch['tokens'].shape)}, not one for each token"
        )
    labels = (torch.arange(batch["tokens"].numel()) * 7 % logits.shape[-1]).view(batch["tokens"].shape)
    labels = labels.masked_fill(batch.get(MASK, torch.ones(())) == 0, IGNORED)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED), labels


def _on_rank(
    model: nn.Module, plan: ContextPlan, batch: dict[str, Tensor], group: RankGroup, draws: bool
) -> tuple[float, dict[str, Tensor]]:
    signature = Signature.of(model)
    runtime = wrap_modules(model, plan, group)
    own = runtime.cut(batch, signature)
    runtime.enter(own)
    with FixedDraws() if draws else nullcontext():
        logits = logits_of(model(**signature.inputs(own, torch.device("cpu"))))
        labels = own["labels"]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        loss = loss / (batch["labels"] != IGNORED).sum()
        loss.backward()
    return loss.item(), {
        clean(name): torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()
    }


def first_apart(model: nn.Module, plan: ContextPlan, batch: dict[str, Tensor]) -> str:
    """Name the first module whose inputs are those of one process, and whose output is not; "" if none is found."""
    signature = Signature.of(model)
    whole = _seen(copy_of(model), lambda made: made(**signature.inputs(batch, torch.device("cpu"))))

    def on_rank(group: RankGroup) -> tuple[dict[str, Seen], CutRows]:
        made = copy_of(model)
        runtime = wrap_modules(made, plan, group)
        own = runtime.cut(batch, signature)
        runtime.enter(own)
        return _seen(made, lambda made: made(**signature.inputs(own, torch.device("cpu")))), own.rows

    try:
        with torch.no_grad():
            found = on_threads(plan.ranks, on_rank)
    except Exception:  # noqa: BLE001  (the refusal is the same without the place)
        return ""
    for path in found[0][0]:
        if path and path in whole:
            pairs = [(seen[path], rows) for seen, rows in found if path in seen]
            same = all(_alike(seen[0], whole[path][0], rows) for seen, rows in pairs)
            if same and not all(_alike(seen[1], whole[path][1], rows) for seen, rows in pairs):
                return f"{path} ({type(model.get_submodule(path)).__name__})"
    return ""


Seen = tuple[list[Tensor], list[Tensor]]
"""Tensors that a module was given, and those that it returned."""


def _seen(model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, Seen]:
    """Note inputs and outputs of the first call of every module, in the order in which modules return."""
    found: dict[str, Seen] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            found.setdefault(path, (_tensors((args, kwargs)), _tensors(output)))

        return hook

    for path, module in model.named_modules():
        module.register_forward_hook(note(clean(path)), with_kwargs=True)
    with FixedDraws(), computing_flex():
        run(model)
    return found


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _alike(own: list[Tensor], whole: list[Tensor], rows: CutRows) -> bool:
    """Compare this rank's tokens of tensors (rows, tokens, …) with those of one process; others are not compared."""
    for mine, full in zip(own, whole, strict=False):
        if full.dim() > 1 and full.shape[1] == rows.length and mine.shape[1] == rows.counts[rows.rank]:
            expected = select(full, rows.own, 1)
            if mine.shape == expected.shape and not torch.allclose(mine, expected, rtol=1e-6, atol=1e-9):
                return False
    return True


# --- apply context parallelism


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
    wrap_modules(model, context, ranks, checks, _without_values(facts, plan) if context.has_pairs else None)
    separate_streams(model, ranks.rank)
    _count_whole_rows(model, ranks)
    remember(model, context)
    return model


def _without_values(facts: ModelFacts, plan: Plan) -> nn.Module:
    """Return a copy of the model on meta that computes in the planned dtype."""
    made = facts.measurements.without_values()
    return made.to(torch_dtype(plan.precision.compute)) if plan.precision.casts else made


def _count_whole_rows(model: nn.Module, ranks: RankGroup) -> None:
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
    """Give each rank a random stream of its own while a forward in training mode runs: it has other tokens.

    Outside of forwards all ranks of the axis draw alike, since they bring the same rows. A rank's own stream is a
    function of a number that all draw and of its rank, so there is no state besides torch's to be saved or restored.
    """
    shared: list[dict[str, Tensor]] = []

    def enter(*_: Any) -> None:
        if model.training and not shared:
            number = drawn_number()
            shared.append(streams())
            torch.manual_seed(seed_of("context rank", number, rank))

    def leave(*_: Any) -> None:
        if shared:
            restore_streams(shared.pop())

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


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
    found = _cut_model(model)
    if found is None:
        yield dict(batch)
        return
    inner, runtime = found
    cut, own = _cut(inner, runtime, batch)
    backward = _Backward(runtime, cut.rows)
    hooks = [
        inner.register_forward_pre_hook(_without_cache, with_kwargs=True),
        inner.register_forward_hook(backward.watch),
    ]
    runtime.enter(cut)
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


def _cut_model(model: nn.Module) -> tuple[nn.Module, ContextRuntime] | None:
    """Find the model whose attention is intercepted, inside the wrappers of DDP and the compiler."""
    found = ((layer, runtime_of(layer)) for layer in layers_of_wrapping(model))
    return next(((layer, runtime) for layer, runtime in found if runtime is not None), None)


def _cut(model: nn.Module, runtime: ContextRuntime, batch: Mapping[str, Any]) -> tuple[CutBatch, dict[str, Any]]:
    """Return this rank's tokens by our keys, and by the names of the model's arguments."""
    signature, refusal, word, made = Signature.of(model), None, 0, CutBatch()
    spellings = {key: (signature.takes[key] or key, *others) for key, others in SPELLINGS.items()}
    names = {key: name for key, known in spellings.items() for name in known if name in batch}
    given: dict[str, Tensor] = {}
    try:
        given = _checked(batch, names)
        values = on_host(given)
        is_part = parts.are_parts([values], cuts_rows=True)
        word = -1 if is_part else fingerprint([values])
        made = made if is_part else runtime.cut(given, signature, values)
    except Exception as error:  # noqa: BLE001  (raised below, once the other ranks know)
        refusal = error
    if _agree(runtime, word, refusal):
        made = parts.join(given, runtime, signature)
    own: dict[str, Any] = {key: value for key, value in batch.items() if key not in (*names.values(), PLACES)}
    for key, value in made.items():
        own[names.get(key) or signature.takes.get(key) or key] = value
    return made, own


def _checked(batch: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the batch's tensors, with our keys where we have one."""
    if "tokens" not in names:
        raise ConfigError(
            f"the batch has no token ids ('input_ids' or 'tokens'), (rows, tokens), whose rows could be cut, but"
            f" {sorted(batch)}"
        )
    tokens = batch[names["tokens"]]
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
        shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ConfigError(f"batch['{names['tokens']}'] is {shape}; token ids are whole numbers, (rows, tokens)")
    given = {key: batch[name] for key, name in names.items() if isinstance(batch[name], Tensor)}
    positions = given.get("positions")
    if positions is not None and positions.shape == (1, tokens.shape[1]):  # transformers spreads them over rows
        given["positions"] = positions.expand(tokens.shape)
    others = {key: value for key, value in batch.items() if isinstance(value, Tensor) and key not in names.values()}
    return given | others


def _agree(runtime: ContextRuntime, word: int, refusal: Exception | None) -> bool:
    """Return whether all ranks bring their own tokens alone.

    Args:
        word: a number of the rows, or -1 where they are a part of each.

    Raises:
        Exception: on all ranks of the axis, what one refuses, or that they brought other rows.
    """
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
    return high == -1


def _without_cache(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
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
