"""Compute the oracle, one process with plain torch, and lay out a problem's model to step it as its users do."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comparison.sketch import Observed, TokensOfRank, observing
from meshwright.core.names import clean
from meshwright.distributed.experts import count_routed, routed_tokens, routers_of
from meshwright.distributed.mesh import data_position, get_pp_rank, get_pp_size, tensor_position
from meshwright.distributed.optimizer.grad_clip import clip_grad_norm_
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.process import agree
from meshwright.distributed.setup import init_distributed
from meshwright.distributed.weights.constructed import Weights, materialise
from meshwright.introspection.constructor import STREAM_ELEMENTS, built
from meshwright.introspection.facts import model_facts
from meshwright.introspection.images import rows_of
from meshwright.introspection.roles import hidden_matrices
from meshwright.introspection.signature import Signature
from meshwright.introspection.small.copies import narrows
from meshwright.introspection.source import as_module, builder_of
from meshwright.introspection.structure.experts import RouterLogits, stack_paths
from meshwright.models.layers import Router
from meshwright.planning.layout import Layout
from meshwright.verification.routes import Replay, Routes, noting, rounded

from .problem import Batch, Parallelize, Problem, count, divisors, labels_of, without_dropout

# --- compute the oracle


@dataclass(frozen=True)
class OneStep:
    """The results of a forward and backward of the global batch, besides the gradients."""

    losses: Tensor
    """(rows,) each row's share of the loss; their sum is the mean over the real tokens of the batch."""
    observed: Observed
    routes: Routes
    """The experts of the tokens, concatenated."""


class OneProcess:
    """A process that computes steps with plain torch, the loss by ``F.cross_entropy``.

    Args:
        model: the model with its weights; its gradients come in its own dtype.
        compute: dtype of parameters in forward and backward, where it differs from the model's (mixed precision:
            weights are rounded for the step, gradients of each forward and backward are added up in the model's
            dtype).
        rows: rows per forward; 0: the whole batch. Fewer rows add the same gradients in another order.
        noise: relative size of random changes to every module's output, as rounding in other kernels makes them.
        seed: seed of the noise.
        scale: factor on losses for the backward; gradients come divided by it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        compute: torch.dtype | None = None,
        rows: int = 0,
        noise: float = 0.0,
        seed: int = 0,
        scale: float = 1.0,
    ):
        self.model, self.rows, self.scale = model, rows, scale
        self._signature = Signature.of(model)
        self._device = next(model.parameters()).device
        dtype = next(model.parameters()).dtype
        self._computing = model if compute in (None, dtype) else copy.deepcopy(model)
        self._compute = compute or dtype
        self._routers = routers_of([self._computing])
        if noise:
            generator = torch.Generator(self._device).manual_seed(seed)

            def shaken(module: nn.Module, args: tuple, output: Any) -> Any:
                if not isinstance(output, Tensor) or not output.is_floating_point():
                    return output
                drawn = torch.rand(output.shape, generator=generator, device=output.device, dtype=torch.float32)
                return output * (1 + noise * (2 * drawn - 1)).to(output.dtype)

            for module in self._computing.modules():
                module.register_forward_hook(shaken)
        measurements = model_facts(model).measurements
        self._router_loss, self._of_images = measurements.router_loss(), measurements.image_modules()
        if self._router_loss is not None:
            self._logits = RouterLogits(self._computing, self._router_loss)

    def replay(self, routes: Routes) -> Replay:
        """Make a replay of a batch's routing, for one step."""
        return Replay(self._computing, routes)

    def forward_backward(
        self,
        batch: Batch,
        *,
        observe: bool = True,
        replay: Replay | None = None,
        microbatches: Sequence[int] = (),
        means: int = 0,
    ) -> OneStep:
        """Add the gradients of the mean loss over the real tokens of ``batch`` to the parameters' ``grad``.

        Args:
            replay: a replay of the experts that tokens go to.
            microbatches: for each row, the microbatch whose tokens a router's loss counts; empty: all rows are one.
            means: number of ranks the mean of whose mean losses is the loss instead; 0: off.
        """
        if self._computing is not self.model:
            for mine, theirs in zip(self._computing.parameters(), self.model.parameters(), strict=True):
                mine.data = theirs.detach().to(self._compute)
        tokens, routed = divisors(batch, means).to(self._device), max(count_routed([batch]), 1)
        losses: list[Tensor] = []
        needs_loads = self._router_loss is not None or any(r.config.batch_loss for r in self._routers)
        loads, shares = self._loads(batch, replay, microbatches) if needs_loads else ({}, torch.zeros(0))
        watched = (
            observing(self._computing, opaque=stack_paths(self._computing), unobserved=self._of_images)
            if observe
            else nullcontext(Observed())
        )
        with watched as observed, noting([self._computing]) as routes:
            for first in range(0, len(batch["tokens"]), self.rows or len(batch["tokens"])):
                piece = rows_of(batch, first, first + (self.rows or len(batch["tokens"])))
                rows = len(piece["tokens"])
                for router, load in loads.items():
                    router.everywhere = lambda counted, known=load[first : first + rows]: known
                with replay.at(first, rows) if replay is not None else nullcontext():
                    if self._router_loss is not None:
                        self._logits.begin()
                    loss = row_losses(self._computing, self._signature, piece, self._device)
                    loss = loss / tokens[first : first + rows].to(loss.dtype)
                auxiliary = [router.auxiliary / routed for router in self._routers if router.auxiliary is not None]
                if (its := self._router_loss) is not None:
                    # E · Σₑ Fₑ pₑ, the mean of all layers, summed over the tokens; F is of each row's microbatch
                    shape = (*piece["tokens"].shape, -1)
                    layers = torch.stack([layer.softmax(-1).double().view(shape) for layer in self._logits.take()])
                    chances = (layers.mean(0) * _real(piece, shares.device).unsqueeze(-1)).sum(1)
                    balance = (shares[first : first + rows] * chances).sum()
                    auxiliary.append(its.coefficient * its.experts * balance / routed)
                (sum(auxiliary, loss.sum()) * self.scale).backward()
                losses.append(loss.detach())
                if self._computing is not self.model:
                    for mine, theirs in zip(self._computing.parameters(), self.model.parameters(), strict=True):
                        if mine.grad is not None:
                            added = mine.grad.to(theirs.dtype) / self.scale
                            theirs.grad = added if theirs.grad is None else theirs.grad + added
                            mine.grad = None
        return OneStep(torch.cat(losses).double().cpu(), observed, routes)

    @torch.no_grad()
    def _loads(
        self, batch: Batch, replay: Replay | None, microbatches: Sequence[int]
    ) -> tuple[dict[Router, Tensor], Tensor]:
        """Count for each row what all rows of its microbatch count together, in a separate forward.

        Returns:
            By router of ours, (rows, experts + 1) counts; and for a model of transformers the choices' shares of all
            layers, (rows, experts).
        """
        noted: dict[Router, Tensor] = {}
        before = [(router, router.counts, router.z) for router in self._routers]
        for router in self._routers:
            router.everywhere = lambda counted, router=router: noted.setdefault(router, counted)
        rows = len(batch["tokens"])
        with replay.at(0, rows) if replay is not None else nullcontext():
            if self._router_loss is not None:
                self._logits.begin()
            self._computing(**self._signature.inputs(batch, self._device))
        for router, counts, z in before:
            router.counts, router.z, router.auxiliary = counts, z, None
        numbers = torch.tensor(microbatches or [0] * rows, device=self._device)
        same = (numbers.unsqueeze(0) == numbers.unsqueeze(1)).double()
        shares = torch.zeros(rows, 0, dtype=torch.float64)
        if (its := self._router_loss) is not None:
            # by row, each expert's choices and all choices; a replay's routes win
            layers = [layer.view(*batch["tokens"].shape, -1) for layer in self._logits.take()]
            picked = [layer.softmax(-1).topk(its.top_k).indices for layer in layers]
            if replay is not None and len(replay.routes) == len(layers):
                picked = [routes.to(layers[0].device, torch.int64) for routes in replay.routes.values()]
            real = _real(batch, layers[0].device)
            counts = [(F.one_hot(index, its.experts).sum(2) * real.unsqueeze(-1)).sum(1) for index in picked]
            chosen, tokens = torch.stack(counts).sum(0), real.sum(1, keepdim=True) * len(layers)
            shares = (same @ chosen) / (same @ tokens).clamp(min=1)
        return {router: same.to(counted.dtype) @ counted for router, counted in noted.items()}, shares

    def end_step(self) -> None:
        """Move the biases of routers by the loads of their experts since the last step."""
        for router, kept in zip(self._routers, routers_of([self.model]), strict=True):
            if router.counts is not None:
                router.balance(router.counts)
            if router.bias is not None and kept.bias is not None:
                kept.bias.copy_(router.bias)


def _real(batch: Batch, device: torch.device) -> Tensor:
    """Mark real tokens by 1 and padding by 0: (rows, seq) float64."""
    real = routed_tokens(batch)
    return (torch.ones_like(batch["tokens"]) if real is None else real).to(device, torch.float64)


def build(problem: Problem, *, dropout: bool = False, weights: Weights | None = None) -> nn.Module:
    """Build the model of a problem in one process, with its initial weights or, where it is on meta, ``weights``."""
    model = as_module(problem.source(), problem.seed)
    facts = model_facts(model)
    is_drawn_alike = facts.on_meta and weights is None and facts.numel <= STREAM_ELEMENTS
    build = builder_of(model) if is_drawn_alike and not hasattr(model, "weight_law") else None
    if build is not None:  # by plain torch: the code that gives a layout its weights is under test too
        model = built(build, problem.seed)
    model = model.to(getattr(torch, problem.master))
    model = model if dropout else without_dropout(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        ties = {alias: p.name for p in facts.parameters for alias in p.aliases}
        materialise(model, torch.device("cpu"), problem.seed, ties, weights=weights)
    frozen = [re.compile(pattern) for pattern in problem.techniques.get("freeze", ())]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not any(pattern.search(clean(name)) for pattern in frozen))
    model = rounded(model, problem)
    return model.eval() if problem.evaluating else model


def narrows_inside(problem: Problem) -> bool:
    """Return whether the model's forward computes in a narrower dtype somewhere."""
    model = build(problem)
    return narrows(lambda: model(**Signature.of(model).inputs(problem.batch(0), torch.device("cpu"))))


def row_losses(model: nn.Module, signature: Signature, batch: Batch, device: torch.device | None = None) -> Tensor:
    """Sum the losses of each row: (rows,), in at least float32."""
    output = model(**signature.inputs(batch, device or torch.device("cpu")))
    logits = output if isinstance(output, Tensor) else output.logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels_of(batch).to(logits.device)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return losses.view(labels.shape).sum(1)


# --- lay out a problem's model, by meshwright or by another library, and step it as its users do


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
        parameters: Any = self.model.parameters()
        for parameter in parameters:
            if any(place.is_partial() for place in getattr(parameter.grad, "placements", ())):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        norm = float(clip_grad_norm_(self.model, self.problem.max_norm or float("inf")))
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def backward_share(self, rows: Batch, batch: Batch) -> float:
        return 1 / self.place[1]


def lay_out(
    problem: Problem, layout: Layout, parallelize_fn: Parallelize | None = None, *, dropout: bool = False
) -> LaidOut:
    """Lay out the model of a problem, with ``dropout`` left on if requested. Collective."""
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
