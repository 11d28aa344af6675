"""Measure which tokens see which, block by block, on a layout and in one process, to give a fault words.

One token after another is exchanged for another one, in all rows at once. Where a block's output changes, the token
there sees the exchanged one. Ranks put their parts of rows together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshwright.comparison.observe import TokensOfRank
from meshwright.core.names import clean
from meshwright.distributed.process import agree
from meshwright.distributed.process.workers import WorkerPool
from meshwright.introspection.facts import model_facts
from meshwright.introspection.signature import Signature
from meshwright.planning.layout import Layout
from meshwright.verification.laid_out import Ours, lay_out
from meshwright.verification.one_process import build
from meshwright.verification.problem import Batch, Problem, share

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
    with _outputs(models, blocks) as outputs:
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


@contextmanager
def _outputs(models: Sequence[nn.Module], blocks: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Keep the outputs of blocks, (rows, tokens, …) of each microbatch."""
    found: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            tensor = output if isinstance(output, Tensor) else output[0]
            found.setdefault(name, []).append(tensor.detach().clone())

        return hook

    modules = [(clean(raw), module) for model in models for raw, module in model.named_modules()]
    hooks = [module.register_forward_hook(keep(name)) for name, module in modules if name in blocks]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


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
        sentences = [*_across(more, batch.get("document_ids"), row), *_runs(more, "see"), *_runs(less, "do not see")]
        return f"in {name}, row {row}: {'; '.join(sentences[:2])}"
    return ""


def _across(more: Tensor, documents: Tensor | None, row: int) -> Iterator[str]:
    """Name the first document that sees another one."""
    if documents is not None:
        ids = documents[row]
        across = (more & (ids[:, None] != ids[None, :])).nonzero()
        if len(across):
            yield f"document {int(ids[across[0, 0]])} sees document {int(ids[across[0, 1]])}"


def _runs(wrong: Tensor, verb: str) -> Iterator[str]:
    """Name the tokens that wrongly see, or do not see, and the range of those seen."""
    if wrong.any():
        seeing, seen = wrong.any(1).nonzero()[:, 0], wrong.any(0).nonzero()[:, 0]
        what = "which one process does not" if verb == "see" else "which one process does"
        yield f"tokens {_range(seeing)} {verb} tokens {_range(seen)}, {what}"


def _range(places: Tensor) -> str:
    first, last = int(places[0]), int(places[-1])
    return str(first) if first == last else f"{first}–{last}"
