"""Lay out a problem's model, by meshwright or by another library, and step it as its users do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comparison.observe import TokensOfRank
from meshwright.core.names import clean
from meshwright.distributed.mesh import data_position, get_pp_rank, get_pp_size, tensor_position
from meshwright.distributed.optimizer.grad_clip import clip_grad_norm_
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.process import agree
from meshwright.distributed.setup import init_distributed
from meshwright.introspection.facts import model_facts
from meshwright.introspection.roles.hidden import hidden_matrices
from meshwright.introspection.signature import Signature
from meshwright.introspection.source import as_module
from meshwright.planning.layout import Layout

from .one_process import build, row_losses
from .problem import Batch, Parallelize, Problem, count, without_dropout


class LaidOut:
    """A module laid out over a mesh.

    Attributes:
        models: the local modules, wrappers included.
        place: (rank, size) among the ranks that hold different rows.
        stage: rank on the pipeline axis; ranks of other stages have other modules.
        is_staged: whether there are several pipeline stages.
    """

    def __init__(self, models: Sequence[nn.Module], mesh: Any, problem: Problem):
        self.models, self.problem = models, problem
        self.place, self.stage = data_position(mesh), get_pp_rank(mesh)
        self._part = tensor_position(mesh)
        self.tensor_rank = self._part[0]
        self.is_staged = get_pp_size(mesh) > 1
        for model in models if problem.evaluating else ():
            model.eval()

    def parameters(self) -> dict[str, nn.Parameter]:
        return {clean(name): parameter for model in self.models for name, parameter in model.named_parameters()}

    def optimizer(self) -> torch.optim.Optimizer:
        """Build the optimizer of the parameters that the module's users are given."""
        named = [pair for model in self.models for pair in model.named_parameters()]
        return self.problem.make_optimizer(named, set().union(*map(hidden_matrices, self.models)))

    def buffers(self) -> dict[str, Tensor]:
        """Return all buffers, also those that no checkpoint holds."""
        return {clean(name): buffer for model in self.models for name, buffer in model.named_buffers()}

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, gradient) for name, p in self.parameters().items() if (gradient := p.grad) is not None)

    def forward_backward(self, rows: Batch) -> float:
        """Compute this rank's share of a step, and return the loss of the whole step."""
        raise NotImplementedError

    def step(self, optimizer: torch.optim.Optimizer) -> float:
        """Clip the gradients, step and clear them; return the norm before clipping."""
        raise NotImplementedError

    def tokens(self, rows: Batch) -> TokensOfRank:
        """Return which tokens of this rank's rows lie on it between blocks."""
        return TokensOfRank.run(*self._part, rows["tokens"].shape[1])

    def summed_elsewhere(self) -> tuple[str, ...]:
        """Name modules whose output is another's in one process: sums of several layers are reduced at once."""
        return ()

    def of_images(self) -> tuple[str, ...]:
        """Name modules that compute images, which have no dim of rows."""
        return model_facts(as_module(self.problem.source())).measurements.image_modules()

    def inside_unlike(self) -> tuple[str, ...]:
        """Name modules that compute other tokens or heads inside than one process does, and return the same."""
        return ()

    def backward_share(self, rows: Batch, batch: Batch) -> float:
        """Return the ratio of the gradients in this rank's backward to those of the mean over the whole batch."""
        return 1.0


class Ours(LaidOut):
    """A module laid out by meshwright."""

    def __init__(self, parallel: ParallelModel, problem: Problem):
        super().__init__(parallel.parts, parallel.mesh, problem)
        self.parallel = parallel

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.parallel.named_parameters())

    def optimizer(self) -> torch.optim.Optimizer:
        return self.problem.make_optimizer(self.parallel.named_parameters(), self.parallel.plan.optimizer.matrices)

    def tokens(self, rows: Batch) -> TokensOfRank:
        return self.parallel.own_tokens(rows)

    def summed_elsewhere(self) -> tuple[str, ...]:
        tensor = self.parallel.plan.tensor
        return () if tensor is None else tuple(path for kind in tensor.kinds for path in kind.summed_outputs())

    def of_images(self) -> tuple[str, ...]:
        return self.parallel.facts.measurements.image_modules()

    def inside_unlike(self) -> tuple[str, ...]:
        context = self.parallel.plan.context
        return () if context is None else context.whole_row_modules

    def forward_backward(self, rows: Batch) -> float:
        return float(self.parallel.forward_backward(rows))

    def step(self, optimizer: torch.optim.Optimizer) -> float:
        return self.parallel.optimizer_step(optimizer, self.problem.max_norm).grad_norm


class Theirs(LaidOut):
    """A module laid out by another library.

    Its users take the mean over a rank's tokens, and leave averaging over ranks to the wrapper."""

    def __init__(self, model: nn.Module, mesh: Any, problem: Problem):
        super().__init__([model], mesh, problem)
        self.model = model
        self._signature = Signature.of(getattr(model, "module", model))

    def forward_backward(self, rows: Batch) -> float:
        loss = row_losses(self.model, self._signature, rows).sum() / count(rows)
        loss.backward()
        losses = agree.everybody_says(loss.item())
        return sum(losses) / len(losses)

    def step(self, optimizer: torch.optim.Optimizer) -> float:
        for parameter in self.model.parameters():
            _sum_up(parameter)
        norm = float(clip_grad_norm_(self.model, self.problem.max_norm or float("inf")))
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def backward_share(self, rows: Batch, batch: Batch) -> float:
        return 1 / self.place[1]


def _sum_up(parameter: Any) -> None:
    """Sum partial gradients, which autograd may leave tensor-parallel ranks of parameters that they have whole."""
    if any(place.is_partial() for place in getattr(parameter.grad, "placements", ())):
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def lay_out(
    problem: Problem, layout: Layout, parallelize_fn: Parallelize | None = None, *, dropout: bool = False
) -> LaidOut:
    """Lay out the model of a problem. Collective.

    Args:
        dropout: leave dropout layers as they are.
    """
    if parallelize_fn is not None:
        module = build(problem, dropout=dropout)
        mesh = init_distributed(layout, problem.seed)
        return Theirs(parallelize_fn(module, mesh), mesh, problem)
    if problem.techniques.get("compile"):
        # earlier compilations of this process count towards the limit beyond which torch runs uncompiled
        torch.compiler.reset()
    module = as_module(problem.source())
    module = module if dropout else without_dropout(module)
    made = parallelize(
        module, layout, techniques=problem.requested, seed=problem.seed, microbatch_rows=problem.microbatch_rows
    )
    return Ours(made, problem)
