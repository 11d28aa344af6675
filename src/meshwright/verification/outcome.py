"""Compute the outcomes of a problem, by one process with plain torch and by a layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.comparison.sketch import Observed, TokensOfRank, observing
from meshwright.core.names import clean
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import is_rank_zero
from meshwright.distributed.weights.constructed import Destinations
from meshwright.distributed.weights.shards import in_dtype, sketches, whole_on_first
from meshwright.introspection.roles import hidden_matrices
from meshwright.introspection.structure.experts import stack_paths
from meshwright.planning.layout import Layout
from meshwright.verification.routes import (
    Products,
    Routes,
    counting,
    noting,
    numbers_of_experts,
    put_together,
    together,
)

from .laid_out import OneProcess, build, lay_out
from .problem import Parallelize, Problem, share

Named = dict[str, Tensor]


@dataclass
class Seen:
    """One rank's observations of a run, small enough to be sent."""

    place: tuple[int, int] = (0, 1)
    """(rank, size) among the ranks that hold different rows."""
    stage: int = 0
    """Rank on the pipeline axis."""
    tensor_rank: int = 0
    """Rank on the tensor axis."""
    forward: dict[int, Named] = field(default_factory=dict)
    """By observed step, sketches by module: (rows of this rank, width)."""
    backward: dict[int, Named] = field(default_factory=dict)
    recomputed: dict[int, dict[str, float]] = field(default_factory=dict)
    """By step, the relative error of recomputed outputs, by module."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    compiled: tuple[str, ...] = ()
    """Modules that ran compiled: nothing inside them was observed."""
    summed: tuple[str, ...] = ()
    """Modules whose outputs differ from one process's: see ``LaidOut.summed_elsewhere``."""
    unlike: tuple[str, ...] = ()
    """Modules whose insides differ from one process's: see ``LaidOut.inside_unlike``."""
    graphless: dict[int, dict[str, bool]] = field(default_factory=dict)
    """By step, modules whose outputs had no graph in some microbatch, of a model of images: beside frozen weights,
    gradients may come back in microbatches with images alone."""
    products: Products = field(default_factory=dict)
    """Multiplications in float8, in the first step."""
    sketches: dict[tuple[str, int], Named] = field(default_factory=dict)
    """Sketches by stage and step.

    They are of the initial state, and in float64 of every step's gradients, parameters, buffers and optimizer
    state."""

    def observe(
        self, step: int, observed: Observed, backward_share: float = 1.0, *, takes_images: bool = False
    ) -> None:
        forward, backward = observed.rows()
        self.forward[step] = forward
        self.backward[step] = {name: rows * backward_share for name, rows in backward.items()}
        self.recomputed[step] = observed.recomputed
        self.graphless[step] = dict.fromkeys(observed.graphless() if takes_images else (), True)
        self.shapes = self.shapes or observed.shapes
        self.compiled = tuple(observed.compiled)

    def join(self, other: Seen) -> None:
        """Merge what another pipeline stage saw of the same rows."""
        for mine, theirs in (
            (self.forward, other.forward),
            (self.backward, other.backward),
            (self.recomputed, other.recomputed),
            (self.graphless, other.graphless),
        ):
            for step, named in theirs.items():
                mine[step] = {**named, **mine.get(step, {})}  # type: ignore[assignment]
        for key, named in other.sketches.items():
            self.sketches[key] = {**named, **self.sketches.get(key, {})}
        self.shapes = {**other.shapes, **self.shapes}
        self.compiled = tuple(dict.fromkeys((*self.compiled, *other.compiled)))

    def __getstate__(self) -> dict[str, Any]:
        return {
            key: _mapped(value, lambda leaf: leaf.numpy() if isinstance(leaf, Tensor) else leaf)
            for key, value in vars(self).items()
        }

    def __setstate__(self, state: dict[str, Any]) -> None:  # arrays, since thousands of small tensors unpickle slowly
        for key, value in state.items():
            setattr(
                self, key, _mapped(value, lambda leaf: torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf)
            )

    def sketch(self, stage: str, step: int, tensors: Mapping[str, Any]) -> None:
        """Sketch the tensors of a stage in float64, summed up where ranks hold partial sums. Collective."""
        wide: Named = {}
        for name, tensor in tensors.items():
            if any(place.is_partial() for place in getattr(tensor, "placements", ())):
                tensor = tensor.full_tensor()
            tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
            wide[name] = tensor if tensor.dtype == torch.float64 else in_dtype(tensor, torch.float64)
        self.sketches[stage, step] = sketches(wide)


@dataclass
class Outcome:
    """The results of a run; tensors on rank 0 only."""

    losses: list[float] = field(default_factory=list)
    """Mean over the real tokens of the global batch, per step."""
    norms: list[float] = field(default_factory=list)
    """Global gradient norm before clipping, per step."""
    initial: Named = field(default_factory=dict)
    """Parameters before the first step."""
    gradients: Named = field(default_factory=dict)
    """Gradients of the first step, by parameter."""
    parameters: dict[int, Named] = field(default_factory=dict)
    """Parameters after the first and after the last step."""
    seen: list[Seen] = field(default_factory=list)
    """Observations, by rank."""
    routes: list[Routes] = field(default_factory=list)
    """The experts of the tokens of each step's batch."""
    products: Products = field(default_factory=dict)
    """Multiplications in float8, in the first step, on all ranks together."""


@dataclass
class Reference(Outcome):
    """An outcome of one process, with what bounds how far rounding may move a sum."""

    buffers: Named = field(default_factory=dict)
    """Buffers before the first step."""
    loss_parts: list[Tensor] = field(default_factory=list)
    """Per step (rows,): each row's share of the loss."""
    norm_parts: list[Tensor] = field(default_factory=list)
    """Per step: the squared norm of each parameter's gradient."""
    max_norm: float | None = None
    """Norm that gradients were clipped to."""
    lacks: dict[tuple[int, str], float] = field(default_factory=dict)
    """With given routes, by step and stack: the shortfall of their scores against this process's own choices."""
    scores: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """With given routes, by step and stack: the scores that this process would have chosen by."""
    narrows: bool = False
    """Whether the model computes in a narrower dtype somewhere; measured where a layout adds up in another order."""


def whole_ranks(seen: Sequence[Seen]) -> list[Seen]:
    """Join what the ranks of a pipeline saw into what ranks with whole models would have seen."""
    first = [one for one in seen if one.stage == 0]
    for stage in sorted({one.stage for one in seen} - {0}):
        for one, other in zip(first, (one for one in seen if one.stage == stage), strict=True):
            one.join(other)
    return first


def watches(problem: Problem, step: int) -> bool:
    """Return whether to observe modules in a step (1 the first).

    Later steps count only where rounding cannot be taken for a fault."""
    return step == 1 or problem.dtype == "float64"


def reference(
    problem: Problem,
    rows: int = 0,
    *,
    noise: float = 0.0,
    seed: int = 0,
    always_clips: bool = False,
    routes: Sequence[Routes] = (),
) -> Reference:
    """Compute the oracle.

    Args:
        rows: rows per forward; cut batches round differently. 0: all.
        noise: relative size of random changes, drawn by ``seed``, to every module's output.
        always_clips: see ``references``.
        routes: routing to give the tokens of each step's batch.
    """
    model = build(problem)
    one = OneProcess(
        model, compute=getattr(torch, problem.dtype), rows=rows, noise=noise, seed=seed, scale=problem.loss_scale
    )
    optimizer = problem.make_optimizer(model.named_parameters(), hidden_matrices(model))
    trained = [p for p in model.parameters() if p.requires_grad]
    named, buffers = _cleaned(model.named_parameters()), _cleaned(model.named_buffers())
    outcome, seen = Reference(initial=_copies(named), buffers=_copies(buffers)), Seen()
    seen.sketch("initial weight", 1, named)
    seen.sketch("initial buffer", 1, buffers)
    nowhere = numbers_of_experts([model])
    for step in range(1, problem.steps + 1):
        batch = problem.batch(step - 1)
        replay = one.replay(routes[step - 1]) if routes else None
        with counting(seen.products, problem, step):
            options = {"microbatches": problem.microbatches, "means": problem.means}
            computed = one.forward_backward(batch, observe=watches(problem, step), replay=replay, **options)
        outcome.routes.append(
            put_together([((0, 1), TokensOfRank(), computed.routes)], *batch["tokens"].shape, nowhere=nowhere)
        )
        if replay is not None:
            outcome.lacks |= {(step, what): lack for what, lack in replay.lacks.items()}
            outcome.scores |= {(step, what): torch.cat(scores) for what, scores in replay.scores.items()}
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
        if watches(problem, step):
            seen.observe(step, computed.observed, 1 / problem.loss_scale)
        if step == 1:
            outcome.gradients = _copies(gradients)
        if problem.dtype == "float64":
            seen.sketch("buffer", step, buffers)
            seen.sketch("gradient", step, gradients)
        outcome.loss_parts.append(computed.losses)
        outcome.losses.append(computed.losses.sum().item())
        outcome.norm_parts.append(torch.stack([p.grad.double().square().sum() for p in trained if p.grad is not None]))
        if step == 1:
            norm = outcome.norm_parts[0].sum().sqrt().item()
            clips = always_clips and problem.max_norm and 0 < norm <= problem.max_norm
            outcome.max_norm = norm / 2 if clips else problem.max_norm
        outcome.norms.append(torch.nn.utils.clip_grad_norm_(trained, outcome.max_norm or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
        one.end_step()
        if problem.dtype == "float64":
            seen.sketch("parameter", step, named)
            seen.sketch("optimizer", step, dict(_state(named, optimizer)))
        if step in (1, problem.steps):
            outcome.parameters[step] = _copies(named)
    outcome.seen, outcome.products = [seen], seen.products
    return outcome


def candidate(problem: Problem, layout: Layout, parallelize_fn: Parallelize | None = None) -> Outcome:
    """Compute the outcome on a layout. Collective."""
    laid_out = lay_out(problem, layout, parallelize_fn)
    optimizer = laid_out.optimizer()
    named, destinations = laid_out.parameters(), Destinations(*laid_out.models)
    outcome = Outcome(initial=whole_on_first(destinations.values(named), differ=laid_out.is_staged))
    seen = Seen(laid_out.place, laid_out.stage, laid_out.tensor_rank)
    seen.summed, seen.unlike = laid_out.summed_elsewhere(), laid_out.inside_unlike()
    seen.sketch("initial weight", 1, destinations.values(named))
    seen.sketch("initial buffer", 1, laid_out.buffers())
    stacks = stack_paths(*laid_out.models)
    opaque, of_images = (*stacks, *seen.unlike), laid_out.of_images()
    noted: list[Routes] = []
    tokens: list[TokensOfRank] = []
    for step in range(1, problem.steps + 1):
        batch = problem.batch(step - 1)
        mine = share(batch, *laid_out.place)
        tokens.append(laid_out.tokens(mine))
        watched = (
            observing(*laid_out.models, opaque=opaque, tokens=tokens[-1], unobserved=of_images)
            if watches(problem, step)
            else nullcontext(Observed())
        )
        noted_routes = noting(laid_out.models if stacks and not problem.techniques.get("compile") else ())
        with watched as observed, noted_routes as routes, counting(seen.products, problem, step):
            outcome.losses.append(laid_out.forward_backward(mine))
        noted.append(routes)
        # a sharded parameter's gradient only if every rank has one, or gathering it would wait for ever
        own_gradients = dict(laid_out.gradients())
        names = agree.everybody_says((laid_out.stage, list(own_gradients)))
        everywhere = set.intersection(*(set(theirs) for stage, theirs in names if stage == laid_out.stage))
        gradients = {
            name: g for name, g in own_gradients.items() if name in everywhere or not hasattr(g, "full_tensor")
        }
        if watches(problem, step):
            factor = laid_out.backward_share(mine, batch) / problem.loss_scale
            seen.observe(step, observed, factor, takes_images=bool(of_images))
        if step == 1:
            outcome.gradients = whole_on_first(gradients, differ=laid_out.is_staged)
        if problem.dtype == "float64":
            seen.sketch("buffer", step, laid_out.buffers())
            seen.sketch("gradient", step, gradients)
        outcome.norms.append(laid_out.step(optimizer))
        values = destinations.values(named)
        if problem.dtype == "float64":
            seen.sketch("parameter", step, values)
            seen.sketch("optimizer", step, dict(_state(named, optimizer)))
        if step in (1, problem.steps):
            outcome.parameters[step] = whole_on_first(values, differ=laid_out.is_staged)
    nowhere = dict[str, int]()
    for numbers in agree.everybody_says(numbers_of_experts(laid_out.models)):
        nowhere |= numbers
    if nowhere:
        own = [(laid_out.place, its.of_step(), one) for its, one in zip(tokens, noted, strict=True)]
        for step, by_rank in enumerate(zip(*agree.everybody_says(own), strict=True)):
            outcome.routes.append(put_together(by_rank, *problem.batch(step)["tokens"].shape, nowhere=nowhere))
    by_rank = agree.everybody_says(seen)
    outcome.products = together([seen.products for seen in by_rank])
    outcome.seen = whole_ranks(by_rank) if is_rank_zero() else []
    return outcome


def _state(named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{key} of {name}", value


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    return {key: _mapped(item, change) for key, item in value.items()} if isinstance(value, dict) else change(value)


def _cleaned(tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {clean(name): tensor for name, tensor in tensors}


def _copies(tensors: Mapping[str, Tensor]) -> Named:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
