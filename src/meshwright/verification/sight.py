"""Measure which tokens see which, and check the random numbers of a forward.

All other comparisons run with dropout switched off; these run with dropout. Ranks that hold different rows must draw
different numbers, ranks that hold the same rows the same, each step new ones, and the recomputation of activation
checkpointing must draw what the forward drew.

One token after another is exchanged for another one, in all rows at once. Where a block's output changes, the token
there sees the exchanged one. Ranks put their parts of rows together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from meshwright.comparison.equality import ROUNDED, Difference, relative_error, worst
from meshwright.comparison.sketch import Observed, TokensOfRank, observing
from meshwright.core.errors import IntegrityError
from meshwright.core.names import clean
from meshwright.distributed.process import agree
from meshwright.distributed.process.workers import WorkerPool
from meshwright.introspection.calls import watching
from meshwright.introspection.facts import model_facts
from meshwright.introspection.signature import Signature
from meshwright.planning.layout import Layout
from meshwright.verification.laid_out import Ours, build, lay_out
from meshwright.verification.outcome import Seen, whole_ranks
from meshwright.verification.problem import Batch, Parallelize, Problem, share

# --- check random numbers in a forward

HALF = 0.5
"""The largest share of rows that may come out equal on two ranks that draw different numbers."""
ROOT = ""

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Nature:
    """The random numbers that a model draws in training mode.

    Attributes:
        drawn: the first module whose output random numbers change; None: the model draws none.
        undrawn: the same with dropout layers switched off: another module draws there, so that one process and a
            layout can be compared in evaluation mode only.
        is_rare: some rows are not changed by random numbers, so that ranks which draw alike do not show.
        shapes: shape of each module's output, without its rows.
    """

    drawn: str | None = None
    undrawn: str | None = None
    is_rare: bool = False
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Describe the consequences for a comparison."""
        found = []
        if self.undrawn is not None:
            found.append(
                f"compared in evaluation mode: with all dropout layers switched off, the output of"
                f" {self.undrawn or 'the whole model'} still changes from forward to forward in training mode"
            )
        if self.is_rare:
            found.append(
                "random numbers change only some of the rows: whether ranks draw different ones was not compared"
            )
        return found


def nature(problem: Problem) -> Nature:
    """Feed one process the same rows twice, and compare; raise IntegrityError if they differ in evaluation mode too."""
    one, other = _two_forwards(problem, dropout=True)
    drawn = _first_change(one, other)
    if drawn is None:
        return Nature()
    undrawn = _first_change(*_two_forwards(problem))
    if undrawn is not None:
        always = _first_change(*_two_forwards(replace(problem, evaluating=True)))
        if always is not None:
            raise IntegrityError(
                f"two forwards of the same rows in one process differ, in evaluation mode too (first: the output of"
                f" {always or 'the whole model'}), so nothing can be compared: the model draws random numbers in every"
                " forward. Draw them only where self.training is true, or from a torch.Generator that is seeded in the"
                " forward"
            )
    is_rare = _equal_rows(one.rows()[0].get(ROOT), other.rows()[0].get(ROOT)) > 0
    return Nature(drawn, undrawn, is_rare, one.shapes)


def _two_forwards(problem: Problem, *, dropout: bool = False) -> tuple[Observed, Observed]:
    """Run forwards of two models with equal weights, at different places in the stream of random numbers."""

    def tensors(model: nn.Module) -> list[Tensor]:
        return [*model.parameters(), *model.buffers()]

    def forward(model: nn.Module, seed: int) -> Observed:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), observing(model) as observed:
            torch.manual_seed(seed)
            model(**Signature.of(model).inputs(problem.batch(0), torch.device("cpu")))
        return observed

    one, other = (build(problem, dropout=dropout) for _ in range(2))
    if [tensor.shape for tensor in tensors(one)] != [tensor.shape for tensor in tensors(other)]:
        other = one  # a factory that makes another model each time is another fault, reported later
    with torch.no_grad():
        for here, there in zip(tensors(one), tensors(other), strict=True):
            there.copy_(here)
    return forward(one, 1), forward(other, 2)


def _first_change(one: Observed, other: Observed) -> str | None:
    """Return the first module whose outputs in the two forwards differ."""
    (here, _), (there, _) = one.rows(), other.rows()
    return next((name for name in {**here, **there} if _equal_rows(here.get(name), there.get(name)) < 1), None)


def draws(problem: Problem, layout: Layout, parallelize_fn: Parallelize | None = None) -> list[Seen]:
    """Compute the same rows twice in training mode on every rank, with dropout; return steps 1 and 2. Collective.

    The first one's backward is included: activation checkpointing recomputes in it.
    """
    laid_out = lay_out(problem, layout, parallelize_fn, dropout=True)
    rows, seen = share(problem.batch(0), 0, laid_out.place[1]), Seen(laid_out.place, laid_out.stage)
    for step in (1, 2):
        with observing(*laid_out.models, unobserved=laid_out.of_images()) as observed:
            laid_out.forward_backward(rows)
        seen.observe(step, observed)
    return whole_ranks(agree.everybody_says(seen))


def random_differences(drawn: list[Seen], known: Nature) -> list[Difference]:
    """Compare what ranks drew with each other, and what they recomputed with what they had computed."""
    found: list[Difference] = []
    rows = [rank.forward[1] for rank in drawn]
    for name in rows[0]:
        errors = [rank.recomputed[1].get(name, 0.0) for rank in drawn]
        if any(name in rank.recomputed[1] for rank in drawn):
            found.append(worst("recomputed", name, errors, ROUNDED))
    if not known.is_rare:
        name = known.drawn if known.drawn is not None and all(known.drawn in named for named in rows) else ROOT
        # ranks that hold different rows, each with its counterpart among the others
        counts: dict[tuple[int, int], int] = {}
        counterparts: dict[int, list[int]] = {}
        for rank, one in enumerate(drawn):
            counts[one.place] = number = counts.get(one.place, -1) + 1
            counterparts.setdefault(number, []).append(rank)
        shares, alike = [], set()
        for pair in (pair for ranks in counterparts.values() for pair in itertools.combinations(ranks, 2)):
            shares.append(_equal_rows(*(rows[rank].get(name) for rank in pair)))
            alike |= set(pair) if shares[-1] > HALF else set()
        if shares:
            found.append(Difference("random", name, max(shares), HALF, ranks=tuple(sorted(alike))))
        # each rank's draws in two steps; nothing was learnt between them
        again = [_equal_rows(rank.forward[1].get(name), rank.forward[2].get(name)) for rank in drawn]
        found.append(worst("repeated", name, again, HALF))
    # the model's output on ranks with the same rows; a difference names the first whole output at fault
    for place in dict.fromkeys(one.place for one in drawn):
        first, *others = (rank for rank, one in enumerate(drawn) if one.place == place)
        if not others:
            continue
        apart: dict[str, float] = {}
        for name, own in rows[first].items():
            if drawn[first].shapes[name] == known.shapes.get(name):
                theirs = [rows[rank][name] for rank in others if name in rows[rank]]
                comparable = [other for other in theirs if other.shape == own.shape]
                apart[name] = max((relative_error(other, own) for other in comparable), default=0.0)
        error = apart.get(ROOT, 0.0)
        name = next(name for name, error in apart.items() if error > ROUNDED) if error > ROUNDED else ROOT
        ranks = (first, *others) if error > ROUNDED else ()
        found.append(Difference("alike", name, error, ROUNDED, ranks=ranks))
    return found


def _equal_rows(one: Tensor | None, other: Tensor | None) -> float:
    """Return the share of rows that are equal."""
    if one is None or other is None or one.shape != other.shape:
        return 0.0
    off = (one.nan_to_num() - other.nan_to_num()).norm(dim=1)
    return (off <= ROUNDED * one.nan_to_num().norm(dim=1)).double().mean().item()


# --- measure which tokens see which, block by block, on a layout and in one process, to give a fault words

Sight = dict[str, Tensor]
"""By block, (rows, tokens that see, tokens that are seen) bool."""
CHANGED = 1e-9
"""Relative to the largest number of a block's output, in fp64."""
LIMIT_SEC = 300.0
LONGEST = 64
"""Tokens of the rows of which all are exchanged, one forward for each."""


def explain(pool: WorkerPool, problem: Problem, layout: Layout) -> str:
    """Say which tokens see others on a layout that cuts rows than in one process; "" if they see the same."""
    batch = problem.batch(0)
    if layout.cp == 1 or layout.pp > 1 or problem.dtype != "float64" or batch["tokens"].shape[1] > LONGEST:
        return ""
    expected = pool.run(sight_alone, problem, world=1, timeout=LIMIT_SEC)[0]
    found = pool.run(sight_laid_out, problem, layout, world=layout.world, timeout=LIMIT_SEC)[0]
    return words(found, expected, batch)


def sight_alone(problem: Problem) -> Sight:
    """Measure in one process which tokens see which, in the first batch."""
    model, batch = build(problem).eval(), problem.batch(0)
    facts, signature = model_facts(model), Signature.of(model)

    def run(rows: Batch) -> object:
        with torch.no_grad():
            return model(**signature.inputs(rows, torch.device("cpu")))

    return measure([model], facts.blocks, batch, facts.vocab_size or 2, run)


def sight_laid_out(problem: Problem, layout: Layout) -> Sight:
    """Measure the same on a layout. Collective; whole on each rank."""
    laid_out = lay_out(problem, layout)
    assert isinstance(laid_out, Ours)
    parallel, mine = laid_out.parallel, share(problem.batch(0), *laid_out.place)
    facts = parallel.facts
    own = measure(laid_out.models, facts.blocks, mine, facts.vocab_size or 2, parallel.evaluate)
    return put_together(agree.everybody_says((laid_out.place, laid_out.tokens(mine).of_step(), own)))


def measure(
    models: Sequence[nn.Module], blocks: Sequence[str], batch: Batch, vocabulary: int, run: Callable[[Batch], object]
) -> Sight:
    """Return who sees whom among a process's own tokens: (rows, own tokens, tokens) for each block.

    Args:
        models: the local modules.
        blocks: paths of the blocks.
        batch: this process's rows, whole.
        vocabulary: number of token ids.
        run: runs a forward of a batch.
    """
    tokens = batch["tokens"]
    outputs: dict[str, list[Tensor]] = {}  # of blocks, (rows, tokens, …) of each microbatch

    def keep(path: str, module: nn.Module, args: object, kwargs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        tensor = output if isinstance(output, Tensor) else output[0]
        outputs.setdefault(path, []).append(tensor.detach().clone())

    modules = [(path, module) for model in models for path, module in model.named_modules() if clean(path) in blocks]
    with watching(modules, after=keep):
        run(batch)
        first = {name: torch.cat(found) for name, found in outputs.items()}
        seen: dict[str, list[Tensor]] = {name: [] for name in first}
        for place in range(tokens.shape[1]):
            other = tokens.clone()
            other[:, place] = (other[:, place] + 1) % vocabulary
            outputs.clear()
            run({**batch, "tokens": other})
            for name, before in first.items():
                change = (torch.cat(outputs[name]) - before).abs().flatten(2).amax(-1)
                seen[name].append(change > CHANGED * before.abs().amax())
    return {name: torch.stack(found, dim=-1) for name, found in seen.items()}


def put_together(of_ranks: Sequence[tuple[tuple[int, int], TokensOfRank, Sight]]) -> Sight:
    """Join the sights of ranks: for each, its place among ranks with other rows, its tokens of them, and its sight."""
    whole: Sight = {}
    for name in of_ranks[0][2]:
        rows: dict[int, Tensor] = {}
        for (rank, _), tokens, sight in of_ranks:
            part = sight[name]
            if part.shape[1] == part.shape[2]:
                rows[rank] = part
                continue
            joined = rows.setdefault(rank, part.new_zeros((part.shape[0], part.shape[2], part.shape[2])))
            index = tokens.places.expand(part.shape[0], -1)[:, :, None].expand_as(part)
            joined.scatter_(1, index, part)
        whole[name] = torch.cat([rows[rank] for rank in sorted(rows)])
    return whole


def words(found: Sight, expected: Sight, batch: Mapping[str, Tensor]) -> str:
    """Say in which block sights first differ, and how; "" if they do not."""
    for name, one in expected.items():
        other = found.get(name)
        if other is None or other.shape != one.shape or torch.equal(one, other):
            continue
        row = int((one != other).flatten(1).any(1).nonzero()[0])
        more, less = (other & ~one)[row], (one & ~other)[row]
        sentences = [*_runs(more, "see"), *_runs(less, "do not see")]
        if (documents := batch.get("document_ids")) is not None:
            ids = documents[row]
            if len(across := (more & (ids[:, None] != ids[None, :])).nonzero()):
                first, other = (int(ids[place]) for place in across[0])
                sentences.insert(0, f"document {first} sees document {other}")
        return f"in {name}, row {row}: {'; '.join(sentences[:2])}"
    return ""


def _runs(wrong: Tensor, verb: str) -> Iterator[str]:
    """Name the tokens that wrongly see, or do not see, and the range of those seen."""
    if wrong.any():
        seeing, seen = wrong.any(1).nonzero()[:, 0], wrong.any(0).nonzero()[:, 0]
        what = "which one process does not" if verb == "see" else "which one process does"
        yield f"tokens {_range(seeing)} {verb} tokens {_range(seen)}, {what}"


def _range(places: Tensor) -> str:
    first, last = int(places[0]), int(places[-1])
    return str(first) if first == last else f"{first}–{last}"
