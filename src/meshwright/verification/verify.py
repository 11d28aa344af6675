"""Verify a layout against one process."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from meshwright.comparison.equality import HALVES, Comparison, relative_errors
from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import ConfigError, IntegrityError, MeshwrightError, UnsupportedError
from meshwright.distributed.process.workers import WorkerDied, WorkerFailed, WorkerPool
from meshwright.introspection.blocks import Hints
from meshwright.introspection.facts import model_facts
from meshwright.introspection.signature import Signature
from meshwright.introspection.small.configs import text_config
from meshwright.introspection.source import as_module
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout, shares_of
from meshwright.planning.optimizer import OptimizerPlan, kind_of
from meshwright.verification.compare import Floors, differences, notes, references
from meshwright.verification.outcome import Outcome, Reference, candidate, reference
from meshwright.verification.problem import (
    GAP,
    BatchFactory,
    Parallelize,
    Problem,
    RandomBatches,
    count,
    digests,
    share,
    with_images,
)
from meshwright.verification.routes import flips, refuse_unseen
from meshwright.verification.sight import draws, explain, nature, random_differences

Answer = TypeVar("Answer")

LIMIT_SEC = 600.0
ROUNDED = 4.0
"""Factor on the farthest that rounding moved experts' scores: a token may go to an expert that is worse by that."""
TINY = 1e-300
DEPENDENT = 1e-3
"""Relative distance by which rounding never moves gradients of the first step."""

_ANSWERS: WeakKeyDictionary[WorkerPool, list[tuple[Any, Any]]] = WeakKeyDictionary()
KEPT = 8
"""Number of answers that a pool remembers: several layouts and techniques ask for the same."""


def verify(
    model_factory: Any,
    layout: Layout,
    batch_factory: BatchFactory | None = None,
    *,
    steps: int = 3,
    parallelize_fn: Parallelize | None = None,
    dtypes: Sequence[str] | None = None,
    techniques: dict[str, Any] | None = None,
    seed: int = 0,
    max_norm: float | None = 1.0,
    microbatch_rows: int = 0,
    pool: WorkerPool | None = None,
    hints: Hints | None = None,
) -> Report:
    """Train a model for a few steps in one process with plain torch and on a layout, and compare.

    The layout runs over local gloo processes. Both start from the same weights and see the same global batches.
    Losses, gradient norms, the first step's activations and gradients, and the parameters after the first and last
    step are compared, each in the relative 2-norm, against the effect of rounding alone: in float64 1e-10, in float32
    four times the difference of one process when it orders its sums in other ways, in bfloat16 and float8 twice the
    difference of runs of one process from one in float32; products in float8 are counted too. In float64 every step
    is compared in all of that, and in its buffers and optimizer state, on every rank. Dropout is switched off; if a
    model draws random numbers, a further forward and backward with dropout shows whether ranks draw what they should.

    Args:
        model_factory: a model config, "package.module:factory", or a function or class, importable by name, that
            makes a module.
        layout: a layout; its world size is the number of local processes.
        batch_factory: step → global batch; by default random tokens with padding, documents and masked labels.
        steps: number of optimizer steps.
        parallelize_fn: (module, DeviceMesh) → a module laid out by another library; it is stepped as its users do,
            with the mean loss of each rank, and compared with the mean of those means. Ranks along dp_replicate and
            dp_shard are given different rows, those along other axes (tp) the same. By default meshwright lays the
            model out.
        dtypes: float64, float32, bfloat16, float16 (the last two: forward and backward, from float32 weights); by
            default the first two, and with float8 among the techniques float32 around its products. In all but
            float64 the optimizer is SGD: AdamW amplifies rounding without bound.
        max_norm: norm that gradients are clipped to; where the first is not longer, half its norm, so that clipping
            is compared too. None: no clipping.
        techniques: further techniques of the layout, such as {"activation_checkpointing": "full"}.
        pool: worker processes to use; by default new ones.
        hints: facts about a model that measurement cannot read (``meshwright.Hints``).

    Returns:
        A Report; true where the layout is equal within rounding.

    Raises:
        ConfigError: rows that the layout's data ranks do not divide, a model that is not importable, a reference that
            is not finite.
        UnsupportedError: techniques that round the optimizer's state, or new weights at random.
        IntegrityError: two one-process runs begin with different weights, are given different batches, or compute
            different things.
        UnsupportedError: a layout that is refused, or float8 in which rounding reroutes tokens unseen (see
            ``routes.refuse_unseen``).
    """
    begun = time.monotonic()
    optimizer = (techniques or {}).get("optimizer", OptimizerPlan.kind)
    kind_of(optimizer)  # refuses an unknown one
    for key, plain in (("optimizer_state", "full"), ("stochastic_rounding", False)):
        if (value := (techniques or {}).get(key, plain)) != plain:
            raise UnsupportedError(
                f"techniques.{key} = {str(value).lower()}: verify compares steps in full precision, beside which such"
                f" rounding would hide every fault. Judge the layout with techniques.{key} = {str(plain).lower()}:"
                f" gradients do not depend on it."
            )
    world = layout.world
    batches = batch_factory or default_batches(model_factory, world)
    own = pool is None
    pool = pool or WorkerPool(world)
    try:
        problem = Problem(
            model_factory,
            batches,
            steps,
            seed,
            max_norm=max_norm,
            techniques=techniques or {},
            microbatch_rows=microbatch_rows,
            hints=hints,
        )
        refuse_unseen(problem)
        if parallelize_fn is not None:
            problem = replace(problem, means=shares_of(layout).data_ranks)
        elif (facts := model_facts(as_module(problem.source()))).balances_microbatches:
            # losses depend on each row's microbatch on the layout
            rows, ranks = len(problem.batch(0)["tokens"]), shares_of(layout).data_ranks
            each, made = rows // ranks, plan(facts, layout, techniques=problem.requested)
            size = made.pipeline.rows_per_microbatch(each) if made.pipeline is not None else each
            size = problem.microbatch_rows or size
            problem = replace(problem, microbatches=tuple(row % each // size for row in range(rows)))
        dtypes = dtypes or (("float32",) if problem.rounds_to == "float8" else ("float64", "float32"))
        problems = [
            replace(problem, dtype=dtype, optimizer=optimizer if dtype == "float64" else "sgd") for dtype in dtypes
        ]
        comparisons = list(_compared(pool, problems, layout, parallelize_fn))
    except (WorkerFailed, WorkerDied) as trouble:
        error = getattr(trouble, "error", None)
        raise error if isinstance(error, MeshwrightError) else trouble from None
    finally:
        if own:
            pool.close()
    return Report(layout, tuple(comparisons), time.monotonic() - begun, coverage_of(problem))


def default_batches(model: Any, world: int) -> RandomBatches:
    """Make random batches that fit a model, with two rows for each rank.

    They fit its vocabulary and its longest sequence, reach beyond its windows, and have documents or images where it
    takes them.

    Raises:
        ConfigError: the model does not state its number of token ids, or no images can be made for it.
    """
    module = as_module(Problem(model, RandomBatches(1)).source())
    facts = model_facts(module)
    if facts.vocab_size is None:
        raise ConfigError(f"{facts.kind} says nowhere how many token ids it takes (vocab_size): give a batch_factory")
    takes = Signature.of(module).takes
    # beyond windows and chunks, except too large ones
    beyond = (size + TOKENS // 2 for size in _reaches(module).values())
    wanted = max([TOKENS, *(size for size in beyond if size <= LARGEST)])
    room = wanted if facts.max_seq_len is None else min(wanted, facts.max_seq_len - GAP - 3)
    plain = RandomBatches(
        facts.vocab_size, 2 * world, max(room, 1), tuple(key for key in ("positions", "document_ids") if takes[key])
    )
    return with_images(plain, module, facts)


def _compared(
    pool: WorkerPool, problems: list[Problem], layout: Layout, parallelize_fn: Parallelize | None
) -> Iterator[Comparison]:
    """Compare one process, run several times (its sums in other orders), with the layout, in each dtype."""
    rows, ranks = len(problems[0].batch(0)["tokens"]), shares_of(layout).data_ranks
    if rows % ranks:
        raise ConfigError(
            f"the batch has {rows} rows, which {ranks} ranks cannot share: give a multiple of {ranks}, like"
            f" {rows + -rows % ranks}"
        )
    by_rank = pool.run(digests, problems[0], world=layout.world, timeout=LIMIT_SEC)
    for step, pairs in enumerate(zip(*by_rank, strict=True), 1):  # of each rank, at a first and at a second request
        repeats = [first == again for first, again in pairs]
        alike = [first == pairs[0][0] for first, _ in pairs]
        if all(repeats) and all(alike):
            continue
        where = f"on ranks 0 and {alike.index(False)}" if all(repeats) else "in two calls by one process"
        raise IntegrityError(
            f"the batch of step {step} is not the same {where}, so nothing can be compared: the batch factory must give"
            f" the same global batch for the same step, whoever asks and however often. Draw it from a torch.Generator"
            f" that is seeded by the step alone"
        )
    alone = problems[0].of_one_process()
    known = _answered(pool, ("nature", alone), lambda: pool.run(nature, alone, world=1, timeout=LIMIT_SEC)[0])
    for number, problem in enumerate(problems):
        problem = replace(problem, evaluating=known.undrawn is not None)
        asked = problem.of_one_process(), _are_features_cut(problem, layout)
        one, floors = _answered(pool, ("references", *asked), partial(_references, pool, *asked))
        problem = replace(problem, max_norm=one.max_norm)
        found = pool.run(candidate, problem, layout, parallelize_fn, world=layout.world, timeout=LIMIT_SEC)[0]
        again, rerouted_note = _rerouted(pool, problem, layout, found, one)
        one, floors = again or (one, floors)
        compared = differences(found, one, floors, problem.rounds_to, sees_products=problem.sees_products)
        if number == 0 and known.drawn is not None:
            problem = replace(problem, evaluating=False)
            drawn = pool.run(draws, problem, layout, parallelize_fn, world=layout.world, timeout=LIMIT_SEC)[0]
            compared += random_differences(drawn, known)
        is_wrong = number == 0 and any(difference.is_beyond for difference in compared)
        seen = explain(pool, problem, layout) if is_wrong and parallelize_fn is None else ""
        more_notes = filter(None, (rerouted_note, seen, means_note(problem)))
        yield Comparison(problem.rounds_to, tuple(compared), (*known.notes, *notes(found, one), *more_notes))


def _answered(pool: WorkerPool, asked: Any, answer: Callable[[], Answer]) -> Answer:
    """Answer a question about a problem once for a pool."""
    known = _ANSWERS.setdefault(pool, [])
    for other, found in known:
        if other == asked:
            return found
    found = answer()
    known[:] = [(asked, found), *known[: KEPT - 1]]
    return found


def _references(pool: WorkerPool, problem: Problem, are_features_cut: bool) -> tuple[Reference, Floors]:
    """Compute the references of a problem for one process."""
    ask = partial(references, are_features_cut=are_features_cut, always_clips=True)
    one, floors = pool.run(ask, problem, world=1, timeout=LIMIT_SEC)[0]
    for step, (loss, norm) in enumerate(zip(one.losses, one.norms, strict=True), 1):
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise ConfigError(
                    f"the {what} of step {step} is {value} in one process already: nothing can be compared. Look at"
                    f" model and batch"
                )
    apart = max(floors.whole["gradient", 1].values(), default=0.0)
    # in halves the other run computes in float32, and may be further off than rows that depend on each other
    if problem.rounds_to in HALVES or apart <= DEPENDENT:
        return one, floors
    again = pool.run(reference, problem, world=1, timeout=LIMIT_SEC)[0]
    for name, error in relative_errors(again.gradients, one.gradients).items():
        if error > DEPENDENT:
            raise IntegrityError(
                f"two one-process runs of the same batch give different gradients (first: {name}), so nothing can be"
                f" compared: the backward draws random numbers"
            )
    raise ConfigError(
        f"the model's rows depend on each other, as a batch norm makes them: fed row by row, one process gets gradients"
        f" that are {apart:.1e} (relative) apart from those of the whole batch. Then no layout that shares out rows can"
        f" equal one process"
    )


def _are_features_cut(problem: Problem, layout: Layout) -> bool:
    """Return whether the layout cuts features, or a chunked loss does.

    With chunks, products of the head's backward have other shapes, and add up in another order."""
    return layout.world > layout.pp * shares_of(layout).data_ranks or problem.techniques.get("loss_chunks", 1) > 1


def _rerouted(
    pool: WorkerPool, problem: Problem, layout: Layout, found: Outcome, one: Reference
) -> tuple[tuple[Reference, Floors] | None, str]:
    """Compute one process once more with the layout's routing, where rounding explains that tokens were rerouted.

    Returns:
        The new references, None where the old ones stand; and a note.
    """
    flipped = [flips(*pair) for pair in zip(found.routes, one.routes, strict=False)]
    words = ", ".join(
        f"{number} of {path} in step {step}" for step, named in enumerate(flipped, 1) for path, number in named.items()
    )
    if not words:
        return None, ""
    ask = partial(references, are_features_cut=_are_features_cut(problem, layout), routes=found.routes)
    again, floors = pool.run(ask, problem.of_one_process(), world=1, timeout=LIMIT_SEC)[0]
    if any(flips(*pair) for pair in zip(found.routes, again.routes, strict=True)):
        return None, f"tokens went to other experts than in one process, whose routers do not choose by topk: {words}"
    # how much worse an expert may be that a token goes to by rounding
    eps, limits = torch.finfo(torch_dtype(problem.dtype)).eps, dict[tuple[int, str], float]()
    for key, scores in again.scores.items():
        largest = scores[scores.isfinite()].abs().amax().item()
        limits[key] = ROUNDED * max(floors.scores.get(key, 0.0), largest * eps, TINY)
    worst = max(again.lacks, key=lambda key: again.lacks[key] / limits[key])
    lack, limit = again.lacks[worst], limits[worst]
    where = "tokens went to other experts than in one process"
    if not lack <= limit:
        return None, f"{where}, worse by {lack:.1e}, of which {limit:.1e} is rounding: {words}"
    rounded = f"worse by at most {lack:.1e}, of which {limit:.1e} is rounding"
    note = f"rounding alone sent tokens to other experts than in one process, which took them too ({rounded}): {words}"
    return (again, floors), note


# --- describe how far the batches of a verification reach into a model's structure

TOKENS = 16
"""Tokens of a row, where nothing asks for more."""
LARGEST = 256
"""The most tokens of a row that a window may ask for."""
REACHES = (
    "sliding_window",
    "attention_chunk_size",
    "window_size",
    "attention_window",
    "local_window_size",
    "chunk_size",
)
"""Config keys that hold the number of tokens beyond which a layer computes differently."""


def coverage_of(problem: Problem) -> str:
    """Describe what was tried, and what was not reached."""
    batch = problem.batch(0)
    rows, tokens = batch["tokens"].shape
    beside = sorted(set(batch) - {"tokens", "labels"})
    covered = f"covered: {problem.steps} steps of {rows} rows of {tokens} tokens" + (
        f", with {', '.join(beside)}" if beside else ""
    )
    beyond = [f"{key} = {size}" for key, size in _reaches(as_module(problem.source())).items() if size >= tokens]
    return covered + (f"; not reached: {', '.join(beyond)} (give a batch_factory with longer rows)" if beyond else "")


def means_note(problem: Problem) -> str:
    """Describe the loss that is compared, where it is not the mean over all tokens; "" otherwise."""
    batch = problem.batch(0)
    counts = [count(share(batch, rank, max(problem.means, 1))) for rank in range(problem.means)]
    if len(set(counts)) < 2:
        return ""
    uneven = (
        f"ranks had {min(counts)} to {max(counts)} tokens, so that is not the mean over all tokens, which"
        f" meshwright's own step takes"
    )
    return f"compared with the mean of the {len(counts)} ranks' mean losses, as wrappers average gradients; {uneven}"


def _reaches(model: nn.Module) -> dict[str, int]:
    config = text_config(model)
    found = {key: getattr(config, key, None) for key in REACHES}
    return {
        key: size for key, size in found.items() if isinstance(size, int) and not isinstance(size, bool) and size > 0
    }


# --- report what a verification found, for people and for machines


@dataclass(frozen=True)
class Report:
    """The verdict on a layout."""

    layout: Layout
    comparisons: tuple[Comparison, ...]
    seconds: float
    coverage: str = ""
    """A description of what was tried, and of the parts of the model's structure that this does not reach."""

    @property
    def is_equal(self) -> bool:
        return all(comparison.is_equal for comparison in self.comparisons)

    def __bool__(self) -> bool:
        return self.is_equal

    def __str__(self) -> str:
        lines = [f"{self.layout}: {'equal within rounding' if self.is_equal else 'DIFFERS'} ({self.seconds:.1f} s)"]
        for comparison in self.comparisons:
            lines += comparison.lines()
        lines += [f"  {self.coverage}"] if self.coverage else []
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        rows = [comparison.plain() for comparison in self.comparisons]
        return json.dumps(
            {
                "layout": asdict(self.layout),
                "equal": self.is_equal,
                "seconds": self.seconds,
                "comparisons": rows,
                "coverage": self.coverage,
            },
            indent=1,
        )
