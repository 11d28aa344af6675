"""Rehearse rows cut over ranks on a small copy of a model before their first use, with threads for ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.losses import IGNORED
from meshwright.core.names import clean
from meshwright.core.torch_private import tree_leaves
from meshwright.distributed.exchange import RankGroup, on_threads
from meshwright.distributed.rehearsal import Errors, errors_of, labels_of, why_wrong, wrong
from meshwright.introspection.calls import watching
from meshwright.introspection.constructor import seeded
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.logits_tape import shown
from meshwright.introspection.mixing.arithmetic import computing_flex
from meshwright.introspection.mixing.measure import LENGTHS, batches, long_row, plain_rows, refuse_other_masks
from meshwright.introspection.mixing.values import COUNTS
from meshwright.introspection.premises.playing import Decisions, FixedDraws, Line, Values, decides, watched
from meshwright.introspection.signature import Signature, logits_of
from meshwright.introspection.small.copies import copy_of
from meshwright.introspection.small.sample import ids_of
from meshwright.planning.context.plan import ContextPlan

from .modules import part_of_another_case
from .rows import MASK, CutRows, cut_rows, select
from .runtime import wrap_modules

ALWAYS = ("plain", "packed")
"""Kinds of batches that any run may have."""
PADDED = {"padded behind": slice(-3, None), "padded before": slice(0, 3)}
WITHOUT_POSITIONS = "without positions"
INSTEAD = {WITHOUT_POSITIONS: "Give batches positions", **dict.fromkeys(PADDED, "Leave attention_mask out")}
"""By kind of batch, what else can be done than to leave rows whole."""
OTHERS = (2, 3, 5, 8, 13, 21)
"""Shorter rows of other tokens: each less than twice as long as the one before."""
TOKEN_BY_TOKEN = "Decide token by token (torch.where), or set layout.cp = 1."


def prove(facts: ModelFacts, plan: ContextPlan) -> dict[str, str]:
    """Rehearse the plan on a small copy of the model, unless it was before; raise where it differs from one process.

    Returns, by kind of batch that only some runs have, why it is refused, or "". No communication.
    """
    known = facts.measurements.refused
    if plan not in known:
        model, plan_of_copy = small_and_plan(facts, plan)
        found: dict[str, str] = {}
        for kind, batch in rehearsed(model).items():
            found[kind] = _why_wrong(facts, plan_of_copy, model.train(), kind, batch)
            if kind == "plain" and not found[kind]:
                found[kind] = _why_wrong(facts, plan_of_copy, model.eval(), kind, long_row_of(model, plan, batch))
            if kind == "plain" and not found[kind]:
                found[kind] = _why_wrong_for_others(facts, plan_of_copy, model.train(), kind, batch)
            if kind in ALWAYS and (why := found.pop(kind)):
                raise UnsupportedError(why)
        known[plan] = found
    return known[plan]


def small_and_plan(facts: ModelFacts, plan: ContextPlan) -> tuple[nn.Module, ContextPlan]:
    """Return a small copy with heads for all ranks, and the plan for the copy."""
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
    if (plan, length) in facts.measurements.proven:
        return
    if any(caller.is_dense for caller in plan.mixing.callers):
        refuse_other_masks(copy_of(facts.measurements.sample().model), plan.mixing.callers, length)
    facts.measurements.proven.add((plan, length))


def _why_wrong_for_others(
    facts: ModelFacts, plan: ContextPlan, model: nn.Module, kind: str, batch: dict[str, Tensor]
) -> str:
    """Rehearse rows of other tokens, of a model that decides by its tokens what it computes.

    A part of a row is on another side of a number than the whole in some of the lengths. Lines that were on one side
    in all of them are told the other one on one rank.
    """
    apart, premises = [mixer.path for mixer in plan.mixing.mixers], facts.measurements.premises()
    if not premises.conditional and not decides(model, batch, apart):
        return ""
    generator, longest = torch.Generator().manual_seed(0), batch["tokens"].shape[1]
    varied, never = set[Line](), dict[Line, None]()
    for length in (*(length for length in OTHERS if plan.ranks <= length < longest), longest, longest):
        tokens = torch.randint(0, ids_of(model), (len(batch["tokens"]), length), generator=generator)
        other, reads = {key: value[:, :length] for key, value in batch.items()} | {"tokens": tokens}, Reads()
        try:
            decides(model, other, apart)
        except Exception:  # noqa: BLE001  (a model may not take rows that are so short)
            continue
        if why := _why_wrong(facts, plan, model, kind, other, reads):
            return why
        varied.update(reads.apart())
        never |= dict.fromkeys(line for line, values in reads.whole.items() if isinstance(values[0], bool))
    for line in (line for line in never if line not in varied):
        try:
            is_wrong = wrong(rehearse(model, plan, batch, Reads(inverted=line)))
        except Exception:  # noqa: BLE001  (a line that checks what the model is given)
            continue
        if is_wrong:
            return (
                f"layout.cp = {plan.ranks}: {facts.kind} decides by the values of a row's tokens at {shown(*line)}, and"
                f" a rank, which has a part of them, may decide otherwise. {TOKEN_BY_TOKEN}"
            )
    return ""


def _why_wrong(
    facts: ModelFacts,
    plan: ContextPlan,
    model: nn.Module,
    kind: str,
    batch: dict[str, Tensor],
    reads: Reads | None = None,
) -> str:
    """Rehearse one batch, and say how it differs from one process; "" if it does not."""
    mode = "" if model.training else f", in evaluation mode, in rows of {batch['tokens'].shape[1]} tokens"
    start = (
        f"layout.cp = {plan.ranks}: rows of {facts.kind} cut over ranks were rehearsed on a small copy, {kind}{mode},"
        f" and"
    )
    end = f"{INSTEAD[kind]}, or set layout.cp = 1." if kind in INSTEAD else "Set layout.cp = 1."
    try:
        with seeded(0):  # a model in training mode draws from torch's own stream
            what = why_wrong(model, lambda made: rehearse(made, plan, batch, reads if made is model else None))
    except Exception as error:  # noqa: BLE001  (whatever a model's code raises on a part of its rows)
        return f"{start} the forward or backward fails: {type(error).__name__}: {error}. {end}"
    if not what:
        return ""
    where = first_apart(model, plan, batch)
    mixes = f" {where} mixes or counts tokens by a way that is not intercepted." if where else ""
    lines = dict.fromkeys(shown(use.file, use.line) for use in plan.mixing.lengths if use.kind not in COUNTS)
    mixes += f" The model computes with the number of a row's tokens at {'; '.join(list(lines)[:3])}." if lines else ""
    reads = reads or Reads()
    rehearse(model, plan, batch, reads)
    if decided := [shown(*line) for line in reads.apart()]:
        end = f"The model decides by the values of a row's tokens at {'; '.join(decided[:3])}. {TOKEN_BY_TOKEN}"
    return f"{start} {what}.{mixes} {end}"


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


def long_row_of(model: nn.Module, plan: ContextPlan, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a row as long as the model takes, if its parts are no other case to it; else ``batch``, of plain rows."""
    conditions = [use for use in plan.mixing.lengths if use.kind == "condition"]
    for length in range(long_row(model), batch["tokens"].shape[1], -1):
        rows = plain_rows(model, length)
        counts = cut_rows(rows, plan.ranks, 0, cut=plan.cut).counts
        if all(part_of_another_case(use, length, counts) is None for use in conditions):
            return {key: value[:1] for key, value in rows.items()}
    return batch


@dataclass
class Reads:
    """What lines read off tokens in one process and on each rank; on the last, ``inverted`` reads the other truth."""

    whole: Values = field(default_factory=dict)
    parts: dict[int, Values] = field(default_factory=dict)
    inverted: Line | None = None

    def apart(self) -> list[Line]:
        """List the lines that read something else on some rank."""
        return [line for line in self.whole if any(part.get(line) != self.whole[line] for part in self.parts.values())]


def rehearse(model: nn.Module, plan: ContextPlan, batch: dict[str, Tensor], reads: Reads | None = None) -> Errors:
    """Compare ranks with one process, and note in ``reads`` what lines read off the values of tokens.

    Random draws of a model in training mode are fixed: ranks draw others than one process.
    """
    reference, draws, apart = copy_of(model), FixedDraws(), [mixer.path for mixer in plan.mixing.mixers]
    signature, tokens, cpu = Signature.of(model), batch["tokens"], torch.device("cpu")
    decisions = None if reads is None else Decisions(watched(batch), reference, apart)
    with draws, computing_flex(), decisions or nullcontext():
        logits = logits_of(reference(**signature.inputs(batch, cpu)))
        if logits.shape[:2] != tokens.shape:
            raise ValueError(
                f"its logits are {tuple(logits.shape)} for tokens {tuple(tokens.shape)}, not one for each token"
            )
        labels = labels_of(logits.shape).view(tokens.shape)
        labels = labels.masked_fill(batch.get(MASK, torch.ones(())) == 0, IGNORED)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        loss.backward()
    if reads is not None and decisions is not None:
        reads.whole = decisions.seen

    def on_rank(group: RankGroup) -> tuple[float, dict[str, Tensor]]:
        mine = copy_of(model)
        runtime = wrap_modules(mine, plan, group)
        own = runtime.cut(batch | {"labels": labels}, signature)
        runtime.enter(own)
        decisions: Decisions | None = None
        if reads is not None:
            decisions = Decisions(watched(own), mine, apart, reads.inverted if group.rank == plan.ranks - 1 else None)
            reads.parts[group.rank] = decisions.seen
        with FixedDraws() if draws.seen else nullcontext(), decisions or nullcontext():
            logits = logits_of(mine(**signature.inputs(own, cpu)))
            part = (logits.flatten(0, 1), own["labels"].flatten())
            loss = F.cross_entropy(*part, ignore_index=IGNORED, reduction="sum") / (labels != IGNORED).sum()
            loss.backward()
        return loss.item(), {
            clean(name): torch.zeros_like(p) if p.grad is None else p.grad for name, p in mine.named_parameters()
        }

    found = on_threads(plan.ranks, on_rank)

    def sums(name: str, gradient: Tensor) -> list[Tensor]:
        return [torch.stack([gradients[name] for _, gradients in found]).sum(0)]

    return errors_of([sum(part for part, _ in found)], loss.item(), reference, sums)


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

    def note(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found.setdefault(path, (_tensors((args, kwargs)), _tensors(output)))

    with watching(model.named_modules(), after=note), FixedDraws(), computing_flex():
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
