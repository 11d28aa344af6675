"""Step by optimizers that torch lacks: Muon for hidden matrices, Lion by signs, Adafactor on cut parameters.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with the decoupled weight decay and the scale of arXiv
2502.16982, by which one learning rate and one weight decay serve both kinds of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from meshwright.core.errors import ConfigError
from meshwright.distributed.averaging import ScheduleFreeAdamW
from meshwright.distributed.optimizer.grad_clip import (
    foreach_add_,
    foreach_between,
    foreach_between_,
    foreach_multiply_,
    foreach_sign_,
    loss_of,
)
from meshwright.distributed.optimizer.owners import MatrixOwners
from meshwright.distributed.torch_private import local_part
from meshwright.distributed.weights.shards import (
    Piece,
    groups_that_cut,
    local_gradient,
    pieces,
    placed_gradient,
    whole_everywhere,
    with_local,
)
from meshwright.planning.optimizer import OptimizerKind
from meshwright.planning.optimizer_collectives import size_of_sums

RMS = 0.2
"""Root mean square of an update's elements at a learning rate of 1, as of AdamW's (arXiv 2502.16982, section 2.2)."""
COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Those of the quintic iteration, chosen to be steep at zero: singular values end near 1, not at it."""
SMALLEST_NORM = 1e-7
"""Norm from which on a matrix is divided by its own, so that one of zeros stays so."""


class Muon(torch.optim.Optimizer):
    """Muon, on parameters that lie on one rank or on many.

    With gradient g and mean m, which is zero at first, a step of an (A, B) matrix w is: m = momentum * m +
    (1 - momentum) * g; w decays by ``lr * weight_decay`` of itself; w = w - lr * 0.2 * sqrt(max(A, B)) * O, where O is
    m, or with ``nesterov`` momentum * m + (1 - momentum) * g, orthogonalised by Newton–Schulz in at least fp32. A
    parameter of 3 dims is a stack of matrices. A fused weight (queries, keys and values in one) is one matrix.

    Each matrix is orthogonalised by one of the ranks that hold parts or copies of it. ``ParallelModel.optimizer_step``
    shares the matrices out over the model's mesh. In other loops, call ``share_out`` with the mesh; without it,
    DTensors are shared out over their own meshes, and copies are each computed. All ranks step together. The state is
    ``momentum_buffer``, or AdamW's for other parameters, placed as the parameter.

    Args:
        params: groups of tensors or DTensors with the key ``use_muon``: whether the group is of matrices. Planning
            tells which are (``plan.optimizer.matrices``); embeddings, heads, routers, norms and biases are not.
        lr: rate of both kinds.
        momentum: decay of the mean of gradients of matrices.
        betas, eps: AdamW's.
        weight_decay: decoupled weight decay of both kinds.
        nesterov: whether the step looks one gradient ahead.
        ns_steps: number of iterations of Newton–Schulz.
        foreach: whether torch steps all parameters of a group in one call of each operator.

    Raises:
        ConfigError: a group without ``use_muon``, or with a vector in it; a value out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        nesterov: bool = True,
        ns_steps: int = 5,
        foreach: bool = False,
    ):
        if lr < 0 or weight_decay < 0 or eps < 0:
            raise ConfigError(f"Muon: lr = {lr}, weight_decay = {weight_decay} and eps = {eps} are 0 or more")
        if not all(0 <= decay < 1 for decay in (momentum, *betas)):
            raise ConfigError(f"Muon: momentum = {momentum} and betas = {betas} are in [0, 1)")
        if ns_steps < 1:
            raise ConfigError(f"Muon: ns_steps = {ns_steps} is 1 or more")
        options = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._mesh_is_known = False
        self._owners: dict[DeviceMesh | None, MatrixOwners] = {}
        super().__init__(params, {**options, "nesterov": nesterov, "ns_steps": ns_steps, "foreach": foreach})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; raise ConfigError as the constructor does."""
        if "use_muon" not in param_group:
            raise ConfigError(
                "Muon: a group of parameters has no use_muon. Make groups {'params': …, 'use_muon': True} of the"
                " matrices of linear layers and experts, and False of all else; or let"
                " meshwright.training.optimizer.make_optimizer(groups, lr=…, plan=model.plan.optimizer,"
                " named_parameters=model.named_parameters()).optimizer make it."
            )
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"] if param_group["use_muon"] else ():
            if parameter.dim() not in (2, 3):
                raise ConfigError(
                    f"Muon: a group with use_muon holds a parameter of shape {tuple(parameter.shape)}, which is no"
                    f" (rows, columns) matrix and no (experts, rows, columns) stack. Put it in a group without."
                )

    def share_out(self, mesh: DeviceMesh | None) -> None:
        """Share the matrices out over the ranks of a mesh, all but its pipeline axis; None: this process alone."""
        if not self._mesh_is_known or mesh not in self._owners:
            self._mesh_is_known, self._owners = True, {mesh: MatrixOwners(mesh)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of all parameters that have gradients; return what the closure returns. Collective."""
        loss = loss_of(closure)
        stepped: list[tuple[Tensor, Tensor, dict[str, Any]]] = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params and group["use_muon"]:
                for p in params:
                    if "momentum_buffer" not in self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                means, decay = [local_part(self.state[p]["momentum_buffer"]) for p in params], group["momentum"]
                gradients = [local_gradient(p) for p in params]
                foreach_between_(means, gradients, 1 - decay)
                found = foreach_between(gradients, means, decay) if group["nesterov"] else [m.clone() for m in means]
                for p, new in zip(params, found, strict=True):
                    stepped.append((p, with_local(p, new) if isinstance(p, DTensor) else new, group))
            elif params:
                self._step_others(params, group)
        together: dict[tuple[DeviceMesh | None, torch.dtype], list[tuple[Tensor, int]]] = {}
        for param, direction, group in stepped:
            mesh = next(iter(self._owners)) if self._mesh_is_known else getattr(param, "device_mesh", None)
            together.setdefault((mesh, direction.dtype), []).append((direction, group["ns_steps"]))
        for (mesh, _), directions in together.items():
            if mesh not in self._owners:
                self._owners[mesh] = MatrixOwners(mesh)
            functions = [partial(orthogonalised, steps=steps) for _, steps in directions]
            self._owners[mesh].compute([direction for direction, _ in directions], functions)
        for param, direction, group in stepped:
            local, rate = local_part(param), float(group["lr"])
            local.mul_(1 - rate * group["weight_decay"])
            local.add_(local_part(direction), alpha=-rate * RMS * math.sqrt(max(param.shape[-2:])))
        return loss

    def _step_others(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
                }
        states = [self.state[p] for p in params]
        adamw(
            [local_part(p) for p in params],
            [local_gradient(p) for p in params],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """Return a (rows, columns) matrix with its singular values moved to about 1, in its dtype.

    All products are computed in at least fp32, and in fp64 for an fp64 matrix; torch.optim.Muon's are in bfloat16.
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    stands = x.shape[0] > x.shape[1]
    x = x.T if stands else x  # (short, long), so that the Gram matrix is the smaller one
    x = x / torch.linalg.vector_norm(x).clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if stands else x).to(matrix.dtype)


class Lion(torch.optim.Optimizer):
    """Lion, algorithm 2 of the paper, element by element, so that parameters may be cut in any way.

    With gradient g and mean m, which is zero at first, a step is: w decays by ``lr * weight_decay`` of itself;
    w = w - lr * sign(beta1 * m + (1 - beta1) * g); m = beta2 * m + (1 - beta2) * g. Each trained parameter has one
    state, ``exp_avg``, in its dtype. The paper advises a rate 3 to 10 times smaller than AdamW's, and a weight decay as
    many times larger.

    A step is as large where a gradient is rounding alone as anywhere: of parameters without a gradient in exact
    arithmetic (biases of attention's keys), layouts differ by the size of a step.

    Args:
        params: tensors or DTensors, or groups of them.
        lr: rate; every element moves by so much.
        betas: weight of the mean in the step's direction, and decay of the mean.
        weight_decay: decoupled weight decay.
        foreach: whether torch steps all parameters of a group in one call of each operator.

    Raises:
        ConfigError: a rate or a weight decay below zero, or a beta outside [0, 1).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        foreach: bool = False,
    ):
        if lr < 0 or weight_decay < 0:
            raise ConfigError(f"Lion: lr = {lr} and weight_decay = {weight_decay} are 0 or more")
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"Lion: betas = {betas} are in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "foreach": foreach})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of all parameters that have gradients; return what the closure returns."""
        loss = loss_of(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            gradients, means = [p.grad for p in params], [self.state[p]["exp_avg"] for p in params]
            rate, (ahead, behind) = float(group["lr"]), group["betas"]
            if group["foreach"] and params:
                foreach_multiply_(params, 1 - rate * group["weight_decay"])
                directions = foreach_between(means, gradients, 1 - ahead)
                foreach_sign_(directions)
                foreach_add_(params, directions, -rate)
                foreach_between_(means, gradients, 1 - behind)
                continue
            for param, gradient, mean in zip(params, gradients, means, strict=True):
                param.mul_(1 - rate * group["weight_decay"])
                param.add_(mean.lerp(gradient, 1 - ahead).sign_(), alpha=-rate)
                mean.lerp_(gradient, 1 - behind)
        return loss


# --- step parameters by factored means of squared gradients (Shazeer and Stern 2018)

Groups = tuple[dist.ProcessGroup, ...]


class Adafactor(torch.optim.Optimizer):
    """Adafactor (arXiv 1804.04235) with the arithmetic of torch.optim.Adafactor, which cannot step cut parameters.

    The means of a matrix's squared gradients over its rows and columns, its norm and that of its update are sums over
    the ranks that have parts of it. Those of all parameters that the same axes cut travel together: two all-reduces
    for each of these axes in a step. ``row_var`` and ``col_var`` are whole on every rank; ``variance`` of vectors is
    placed as the parameter.

    Args:
        params: tensors or DTensors, or groups of them.
        lr: largest relative rate; see torch's class for the other arguments.
        beta2_decay: the mean's weight of a new gradient in step t is t to this power.
        eps: (least variance, by default the dtype's epsilon; least root mean square of a parameter).
        d: largest root mean square of an update at a rate of 1.
        weight_decay: decoupled weight decay.

    Raises:
        ConfigError: a value out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ):
        if lr < 0 or weight_decay < 0 or min(eps[0] or 0.0, eps[1]) < 0:
            raise ConfigError(f"Adafactor: lr = {lr}, weight_decay = {weight_decay} and eps = {eps} are 0 or more")
        if beta2_decay > 0 or d < 1:
            raise ConfigError(f"Adafactor: beta2_decay = {beta2_decay} is 0 or less, and d = {d} is 1 or more")
        super().__init__(
            params, {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of all parameters that have gradients; return what the closure returns. Collective."""
        loss = loss_of(closure)
        stepped = [
            _Stepped.of(p, self.state[p], group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        _sum_together(stepped, [one.first_sums() for one in stepped])
        _sum_together(stepped, [one.update() for one in stepped])
        for one in stepped:
            one.apply()
        return loss


@dataclass
class _Stepped:
    """A parameter in a step.

    Attributes:
        groups: groups over which parts of the parameter are disjoint.
        here: this rank's boxes of the parameter, and of its gradient.
        sums: what ``first_sums`` or ``update`` returned last, summed over all parts.
        updates: updates of the boxes, before their norm is known.
    """

    parameter: Tensor
    state: dict[str, Tensor]
    group: dict[str, Any]
    groups: Groups
    here: list[tuple[Piece, Piece]]
    sums: Tensor
    norm: Tensor
    updates: list[Tensor]

    @classmethod
    def of(cls, parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> _Stepped:
        if not state:
            state["step"] = torch.tensor(0.0)
            if parameter.dim() > 1:
                *lead, rows, columns = parameter.shape
                options: dict[str, Any] = {"dtype": parameter.dtype, "device": parameter.device}
                state["row_var"] = torch.zeros((*lead, rows, 1), **options)
                state["col_var"] = torch.zeros((*lead, 1, columns), **options)
            else:
                state["variance"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        for key in ("row_var", "col_var"):  # a checkpoint's, of the parameter's shape, lies as the parameter
            if isinstance(kept := state.get(key), DTensor):
                state[key] = whole_everywhere(kept)
        here = list(zip(pieces(parameter), pieces(placed_gradient(parameter)), strict=True))
        empty = torch.empty(0, device=parameter.device)
        return cls(parameter, state, group, groups_that_cut(parameter), here, empty, empty, [])

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.parameter.dtype, torch.float32)

    def first_sums(self) -> Tensor:
        """Sum squares: of the parameter, and of the gradient's rows and columns, of this rank's first copies."""
        sums = torch.zeros(size_of_sums(self.parameter.shape), dtype=self.wide, device=self.parameter.device)
        rows, columns = self._factors(sums)
        for own, gradient in self.here:
            if own.copy:
                continue
            sums[0] += own.local.to(self.wide).square().sum()
            if self.parameter.dim() > 1:
                squares = gradient.local.to(self.wide).square()
                (*lead, top, left) = own.slices
                rows[(*lead, top, slice(None))] += squares.sum(-1, keepdim=True)
                columns[(*lead, slice(None), left)] += squares.sum(-2, keepdim=True)
        return sums

    def _factors(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows' and the columns' parts of the sums, as views; of a vector, none."""
        if self.parameter.dim() < 2:
            return sums[1:], sums[1:]
        *lead, rows, columns = self.parameter.shape
        of_rows = math.prod(lead) * rows
        return sums[1 : 1 + of_rows].view(*lead, rows, 1), sums[1 + of_rows :].view(*lead, 1, columns)

    def update(self) -> Tensor:
        """Move the means, compute updates, and return the sum of squares of those of this rank's first copies."""
        state, parameter = self.state, self.parameter
        state["step"] += 1
        weight = float(state["step"]) ** self.group["beta2_decay"]
        least = self.group["eps"][0]
        least = torch.finfo(parameter.dtype).eps if least is None else least
        self.norm = self.sums[0].sqrt()
        if parameter.dim() > 1:
            rows, columns = self._factors(self.sums)
            state["row_var"].lerp_((rows / parameter.shape[-1]).to(parameter.dtype), weight)
            state["col_var"].lerp_((columns / parameter.shape[-2]).to(parameter.dtype), weight)
            mean = state["row_var"].mean(dim=-2, keepdim=True).clamp_(min=least)
            for own, gradient in self.here:
                (*lead, top, left) = own.slices
                of_rows, of_columns = state["row_var"][(*lead, top)], state["col_var"][(*lead, slice(None), left)]
                estimate = (of_rows * of_columns).div_(mean[tuple(lead)])
                self.updates.append(estimate.clamp_(min=least * least).rsqrt_().mul_(gradient.local))
        else:
            kept = pieces(state["variance"])
            for (_, gradient), variance in zip(self.here, kept, strict=True):
                variance.local.lerp_(gradient.local.square(), weight)
                estimate = variance.local.clamp(min=least * least)
                self.updates.append(estimate.rsqrt_().mul_(gradient.local))
        total = torch.zeros(1, dtype=self.wide, device=parameter.device)
        for (own, _), update in zip(self.here, self.updates, strict=True):
            if not own.copy:
                total += update.to(self.wide).square().sum()
        return total

    def apply(self) -> None:
        """Decay the parameter, and add the update, shortened where its root mean square is too large."""
        group, elements = self.group, self.parameter.numel()
        rate = float(group["lr"])
        relative = (self.norm / math.sqrt(elements)).clamp(min=group["eps"][1])
        rho = min(rate, 1 / math.sqrt(float(self.state["step"])))
        length = (self.sums[0].sqrt() / (math.sqrt(elements) * group["d"])).clamp(min=1.0)
        scale = relative * rho / length
        for (own, _), update in zip(self.here, self.updates, strict=True):
            own.local.mul_(1 - rate * group["weight_decay"])
            own.local.sub_(update.mul_(scale.to(update.dtype)))


def _sum_together(stepped: Sequence[_Stepped], parts: Sequence[Tensor]) -> None:
    """Sum each parameter's numbers over the groups that cut it; those of the same groups and dtype in one message."""
    packs: dict[tuple[Groups, torch.dtype], list[int]] = {}
    for number, (one, part) in enumerate(zip(stepped, parts, strict=True)):
        one.sums = part
        if one.groups:
            packs.setdefault((one.groups, part.dtype), []).append(number)
    for (groups, _), numbers in packs.items():
        packed = torch.cat([parts[number] for number in numbers])
        for group in groups:
            dist.all_reduce(packed, group=group)
        sums = packed.split([len(parts[number]) for number in numbers])
        for number, summed in zip(numbers, sums, strict=True):
            stepped[number].sums = summed


OURS: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind for kind in (Adafactor, Lion, Muon, ScheduleFreeAdamW)
}


def optimizer_class(row: OptimizerKind) -> Callable[..., torch.optim.Optimizer]:
    """Return the class that a row names."""
    return OURS.get(row.title) or getattr(torch.optim, row.title)
