"""verify: a layout against one process."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from meshwright.comparison.equality import relative_errors
from meshwright.comparison.findings import Comparison
from meshwright.core.errors import ConfigError, IntegrityError, MeshwrightError
from meshwright.distributed.local import WorkerDied, WorkerFailed, WorkerPool
from meshwright.distributed.step_batch import Signature
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.planning.layout import Layout

from .compare import differences
from .outcome import Reference, candidate, references
from .problem import GAP, BatchFactory, Parallelize, Problem, RandomBatches
from .report import Report

LIMIT_SEC = 600.0
DEPENDENT = 1e-3
"""Rounding never moves gradients of the first step that far."""

_REFERENCES: WeakKeyDictionary[WorkerPool, list[tuple[Problem, tuple[Reference, Reference]]]] = WeakKeyDictionary()


def verify(
    model_factory: Any,
    layout: Layout,
    batch_factory: BatchFactory | None = None,
    *,
    steps: int = 3,
    parallelize_fn: Parallelize | None = None,
    dtypes: Sequence[str] = ("float64", "float32"),
    techniques: dict[str, Any] | None = None,
    seed: int = 0,
    max_norm: float | None = 1.0,
    microbatch_rows: int = 0,
    pool: WorkerPool | None = None,
) -> Report:
    """Train a model for a few steps in one process with plain torch, and on a layout over local gloo processes, and compare.

    Both start from the same weights and see the same global batches. Losses, gradient norms, the first step's activations and
    gradients, and the parameters after the last step are compared, each in the relative 2-norm, against what rounding alone does: in
    float64 1e-10, in float32 four times the difference of two one-process runs that order their sums differently, in bfloat16 twice the
    difference of one process in bfloat16 from one in float32.

    Args:
        model_factory: a model config, "package.module:factory", or a function or class, importable by name, that makes a module.
        layout: its world is the number of local processes.
        batch_factory: step → global batch; by default random tokens with padding, documents and masked labels.
        steps: optimizer steps.
        parallelize_fn: (module, DeviceMesh) → a module, laid out by somebody else; it is stepped as its users do, with the mean loss
            of each rank. By default meshwright lays the model out.
        dtypes: float64, float32, bfloat16 (forward and backward, from float32 weights). In all but float64 the optimizer is SGD: AdamW
            amplifies rounding without bound.
        techniques: what else the layout applies, such as {"activation_checkpointing": "full"}.
        pool: worker processes to use; by default new ones.

    Returns:
        A Report; true where the layout is equal within rounding.

    Raises:
        ConfigError: rows that the layout's ranks do not divide, a model that is not importable, a reference that is not finite.
        IntegrityError: two one-process runs begin with different weights.
    """
    begun = time.monotonic()
    world = layout.world
    batches = batch_factory or default_batches(model_factory, world)
    own = pool is None
    pool = pool or WorkerPool(world)
    try:
        comparisons = []
        for dtype in dtypes:
            optimizer = "adamw" if dtype == "float64" else "sgd"
            problem = Problem(model_factory, batches, steps, seed, dtype, optimizer, max_norm, techniques or {}, microbatch_rows)
            _check_rows(problem, world)
            comparisons.append(_compare(pool, problem, layout, world, parallelize_fn))
    except (WorkerFailed, WorkerDied) as trouble:
        error = getattr(trouble, "error", None)
        raise error if isinstance(error, MeshwrightError) else trouble from None
    finally:
        if own:
            pool.close()
    return Report(layout, tuple(comparisons), time.monotonic() - begun)


def default_batches(model: Any, world: int) -> RandomBatches:
    """Random batches that fit a model: its vocabulary, its longest sequence, documents where it takes them; two rows for each rank.

    Raises:
        ConfigError: the model does not say how many token ids it takes.
    """
    module = as_module(Problem(model, RandomBatches(1)).source())
    facts = model_facts(module)
    if facts.vocab_size is None:
        raise ConfigError(f"{facts.kind} says nowhere how many token ids it takes (vocab_size): give a batch_factory")
    takes = Signature.of(module).takes
    room = 16 if facts.max_seq_len is None else min(16, facts.max_seq_len - GAP - 3)
    return RandomBatches(facts.vocab_size, 2 * world, max(room, 1), tuple(key for key in ("positions", "document_ids") if takes[key]))


def _check_rows(problem: Problem, world: int) -> None:
    rows = len(problem.batch(0)["tokens"])
    if rows % world:
        raise ConfigError(
            f"the batch has {rows} rows, which {world} ranks cannot share: give a multiple of {world}, like {rows + -rows % world}"
        )


def _compare(pool: WorkerPool, problem: Problem, layout: Layout, world: int, parallelize_fn: Parallelize | None) -> Comparison:
    """One process twice (its sums in two orders), then the layout."""
    one, floor = _known(pool, problem)
    found = pool.run(candidate, problem, layout, parallelize_fn, world=world, timeout=LIMIT_SEC)[0]
    return Comparison(problem.dtype, tuple(differences(found, one, floor, problem.dtype)))


def _known(pool: WorkerPool, problem: Problem) -> tuple[Reference, Reference]:
    """The problem's references, computed once for a pool: several layouts have the same."""
    known = _REFERENCES.setdefault(pool, [])
    for other, outcomes in known:
        if other == problem:
            return outcomes
    one, floor = pool.run(references, problem, world=1, timeout=LIMIT_SEC)[0]
    _check_reference(one, floor, problem.dtype)
    known[:] = [(problem, (one, floor)), *known[:3]]
    return one, floor


def _check_reference(one: Reference, other: Reference, dtype: str) -> None:
    for name, weight in one.initial.items():
        if name not in other.initial or not weight.equal(other.initial[name]):
            raise IntegrityError(
                f"two one-process runs begin with different weights (first: {name}), so nothing can be compared: the model factory draws"
                f" random numbers that the seed does not govern. Seed it inside the factory"
            )
    for what, values in (("loss", one.losses), ("gradient norm", one.norms)):
        for step, value in enumerate(values, 1):
            if not math.isfinite(value):
                raise ConfigError(
                    f"the {what} of step {step} is {value} in one process already: nothing can be compared. Look at model and batch"
                )
    if dtype == "bfloat16":  # the other computes in float32, and may be further off than rows that know of each other
        return
    apart = max(relative_errors(other.gradients, one.gradients).values(), default=0.0)
    if apart > DEPENDENT:
        raise ConfigError(
            f"the model's rows depend on each other, as a batch norm makes them: fed row by row, one process gets gradients that are"
            f" {apart:.1e} (relative) apart from those of the whole batch. Then no layout that shares out rows can equal one process"
        )
