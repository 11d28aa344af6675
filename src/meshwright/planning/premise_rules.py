"""Check models whose forward is more than a function of weights and rows; rows of the table in ``rules``."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import is_within, pattern
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.premises.premises import GRADIENT, hooks_of
from meshwright.planning.recompute import checkpointed_modules
from meshwright.planning.values import Case, Found


def calls_differ(case: Case) -> bool:
    """Return whether ranks have other rows, other parameters or other calls of the forward than one process."""
    layout, requested = case.layout, case.techniques
    return (
        layout.world > 1
        or case.technique == "fully_shard"
        or requested.activation_checkpointing not in ("none", "offload")
    )


def rows_stand_alone(case: Case) -> Found:
    if not calls_differ(case):
        return
    where = case.facts.measurements.premises().mixes_rows
    if case.layout.tp > 1 and where.startswith(GRADIENT):
        yield UnsupportedError(
            f"{where} is no sum over tokens (scale_grad_by_freq divides it by how often an id stands in the batch),"
            f" which a cut table does not know. Leave it out, or set layout.tp = 1."
        )
    elif case.batch_ranks * case.layout.pp > 1 and where:
        yield UnsupportedError(
            f"rows of a batch depend on each other in {case.facts.kind}: {where}. {_others(case)}, so the result would"
            f" be another one than that of one process. Compute over the features or the tokens of one row (such as"
            f" LayerNorm, RMSNorm, GroupNorm), or set {_axes(case)}."
        )


def decisions_are_of_a_row(case: Case) -> Found:
    """Refuse a decision by the values of a whole batch where ranks or microbatches have other rows.

    Where ranks have parts of the same rows, the rehearsal of context parallelism finds what they decide otherwise.
    """
    where = case.facts.measurements.premises().decides_by_batch
    if where and case.data_ranks * case.layout.pp > 1:
        yield UnsupportedError(
            f"{case.facts.kind} decides by the values of all rows of a batch, in {where}. {_others(case)}, and may"
            f" decide otherwise than one process. Decide row by row or token by token (torch.where), or set"
            f" {_axes(case)}."
        )


def _others(case: Case) -> str:
    if case.data_ranks > 1:
        return f"The {case.data_ranks} data ranks have other rows each"
    return (
        "A pipeline cuts the batch into microbatches"
        if case.layout.pp > 1
        else f"The {case.layout.cp} ranks of layout.cp have other tokens of each row"
    )


def _axes(case: Case) -> str:
    """Write the layout in which no batch is cut: the axes that cut it, each set to 1."""
    sizes = {axis: getattr(case.layout, axis) for axis in ("dp_replicate", "dp_shard", "cp", "pp")}
    return " and ".join(f"layout.{axis} = 1" for axis, size in sizes.items() if size > 1)


def state_stays(case: Case) -> Found:
    """Refuse a forward that writes buffers, remembers its batches or counts its calls."""
    if not calls_differ(case):
        return
    seen, kind = case.facts.measurements.premises(), case.facts.kind
    written = _some(w.name for w in seen.buffers)
    by_data = _some(w.name for w in seen.buffers if w.by_data) or (
        "what an earlier batch was" if seen.remembers else ""
    )
    state = written or by_data or (f"the call's number ({_some(seen.changes)})" if seen.changes else "")
    if case.batch_ranks > 1 and by_data:
        yield UnsupportedError(
            f"a forward of {kind} keeps state that depends on its rows: {by_data}. {_others(case)}, so their models"
            f" would drift apart. Compute it outside forward, from values that all ranks have, or set {_axes(case)}."
        )
    counts = _some([*(w.name for w in seen.buffers if w.by_number), *seen.counts_rows])
    in_blocks = any(w.by_number and is_within(w.name, block) for w in seen.buffers for block in case.facts.blocks)
    cut = case.layout.cp > 1 or (case.layout.tp > 1 and case.techniques.sequence_parallel and in_blocks)
    if counts and not by_data and (case.batch_ranks > 1 or cut):
        yield UnsupportedError(
            f"a forward of {kind} counts its rows or tokens: {counts}. Each rank has a part of them, and would count"
            f" these alone. Count calls, or count outside forward, from what all ranks have (StepLoss.tokens)."
        )
    if case.layout.pp > 1 and state:
        yield UnsupportedError(
            f"a forward of {kind} keeps state: {state}. A pipeline calls its parts once per microbatch and for rows"
            f" that only fill up, and each stage keeps its own. Set layout.pp = 1."
        )
    if case.layout.tp > 1 and by_data:
        yield UnsupportedError(
            f"a forward of {kind} keeps state that depends on its rows: {by_data}. Ranks of the tensor axis have parts"
            f" of them. Set layout.tp = 1."
        )
    if case.layout.tp > 1 and case.techniques.sequence_parallel and seen.changes:
        yield UnsupportedError(
            f"{kind} computes otherwise as the number of its calls grows ({_some(seen.changes)}), and what it does then"
            f" could not be rehearsed with cut sequences. Set techniques.sequence_parallel = false."
        )
    if case.layout.cp > 1 and seen.changes:
        yield UnsupportedError(
            f"{kind} computes otherwise as the number of its calls grows ({_some(seen.changes)}), and what it does then"
            f" could not be rehearsed with rows cut over ranks. Set layout.cp = 1."
        )
    mode = case.techniques.activation_checkpointing
    recomputes = mode not in ("none", "offload")
    paths = checkpointed_modules(case.facts, case.techniques) if recomputes else ()
    paths = ("",) if mode == "memory_budget" else paths  # the compiler chooses
    twice = [w.name for w in seen.buffers if any(is_within(w.name, path) for path in paths)]
    drawing = [one for one in seen.generators if any(is_within(pattern(one), pattern(path)) for path in paths)]
    twice += [f"the torch.Generator that {one or kind} draws from" for one in drawing]
    again = _some(twice) or (state if recomputes and not written else "")
    if again:
        yield UnsupportedError(
            f"techniques.activation_checkpointing = {mode} calls forwards of {kind} a second time, and they keep"
            f" state: {again}, which"
            f" would be written twice. Set it to none, or to a mode that leaves those modules out (modules)."
        )


def weights_are_read_only(case: Case) -> Found:
    if case.layout.world == 1 and case.technique != "fully_shard":
        return
    written = case.facts.measurements.premises().parameters
    if case.technique == "ddp":  # whole on each rank, written by each
        written = tuple(w for w in written if w.by_data)
    if written:
        yield UnsupportedError(
            f"a forward of {case.facts.kind} writes its parameters: {_some(w.name for w in written)}. Where parameters"
            f" are cut, a forward writes a copy that is thrown away, and replicas write different values, by their"
            f" rows. Write them behind the optimizer's step, on the local tensors (Embedding: leave max_norm out)."
        )


def parameters_are_reached(case: Case) -> Found:
    """Refuse parameters that some rows use and others do not."""
    layout = case.layout
    if layout.world == 1:
        return
    trained = {p.name for p in case.facts.parameters if p.trainable}
    conditional = [name for name in case.facts.measurements.premises().conditional if name in trained]
    if not conditional:
        return
    if layout.ep > 1:
        yield UnsupportedError(
            f"only some rows use {_some(conditional)} of {case.facts.kind}, by a condition on the data, which nobody"
            f" tried beside experts that are shared out. Set layout.ep = 1."
        )
    if layout.pp > 1:
        yield UnsupportedError(
            f"only some rows use {_some(conditional)} of {case.facts.kind}, by a condition on the data, and stages of a"
            f" pipeline are cut by what a batch without it computes. Set layout.pp = 1."
        )
    if layout.tp > 1 and case.techniques.sequence_parallel:
        yield UnsupportedError(
            f"only some rows use {_some(conditional)} of {case.facts.kind}, by a condition on the data, which ranks of"
            f" the tensor axis would see on parts of the sequence. Set techniques.sequence_parallel = false."
        )


def gradients_are_dense(case: Case) -> Found:
    if calls_differ(case) and (names := case.facts.measurements.premises().sparse):
        yield UnsupportedError(
            f"the gradient of {_some(names)} is a sparse tensor (Embedding(sparse=True)), which no layout can reduce or"
            f" clip. Leave sparse out: the values are the same."
        )


def hooks_are_called(case: Case) -> Found:
    """Refuse hooks on parameters that a layout replaces, or whose gradient is partial on a rank."""
    if case.layout.world == 1 and case.technique != "fully_shard":
        return
    keeps = case.technique in ("ddp", "none") and case.layout.tp == 1  # the module's own parameters
    for hook in hooks_of(case.facts.module):
        if hook.kind == "accumulated" and (case.batch_ranks * case.layout.pp * case.layout.tp > 1 or not keeps):
            yield UnsupportedError(
                f"{hook.parameter} has a hook that is called once its gradient is there"
                f" (register_post_accumulate_grad_hook): each rank would call it with a partial gradient, or never. Do"
                f" it between the backward and the optimizer's step."
            )
        elif hook.kind == "gradient" and not (keeps and hook.adds_up):
            why = (
                "it does not add up over ranks"
                if keeps
                else "the parameters of this layout are others, and would lose it"
            )
            yield UnsupportedError(
                f"{hook.parameter} has a hook on its gradient (register_hook), and {why}. Change the gradient between"
                f" the backward and the optimizer's step, or in forward (such as weight * mask)."
            )


def _some(names: Iterable[str]) -> str:
    known = list(dict.fromkeys(names))
    more = f" and {len(known) - 3} more" if len(known) > 3 else ""
    return ", ".join(known[:3]) + more


def may_be_idle(facts: ModelFacts) -> set[str]:
    """Return the parameters that may get no gradient: those seen on the small copy, and in blocks that it lacks."""
    idle = facts.measurements.premises().idle
    if not idle:
        return set()
    try:
        has_all = len(facts.measurements.sample().blocks) >= len(facts.token_blocks)
    except UnsupportedError:
        has_all = True
    alike = set() if has_all else {pattern(n) for n in idle if any(is_within(n, block) for block in facts.blocks)}
    return {p.name for p in facts.parameters if p.name in idle or pattern(p.name) in alike}


def refuse_other_losses(facts: ModelFacts) -> None:
    """Raise UnsupportedError if a model has losses beside its logits, for steps that train a loss of logits alone."""
    if losses := facts.measurements.premises().losses:
        raise UnsupportedError(
            f"the output of {facts.kind} has a loss of its own beside the logits ({', '.join(losses)}), and a step"
            f" would train a loss of the logits alone. Return the logits only; or declare the loss of the model:"
            f" loss_fn=meshwright.Loss(reduction='mean'); or give a function as loss_fn=, which says that logits and"
            f" labels are all of it."
        )
