"""Step by optimizers that torch lacks: Muon for hidden matrices, Lion by the sign of a moving mean.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with the decoupled weight decay and the scale of arXiv
2502.16982, by which one learning rate and one weight decay serve both kinds of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from meshwright.core.errors import ConfigError
from meshwright.distributed.averaging import ScheduleFreeAdamW
from meshwright.distributed.torch_private import local_part
from meshwright.distributed.weights.shards import local_gradient, with_local
from meshwright.planning.optimizer.kinds import OptimizerKind

from .adafactor import Adafactor
from .grad_clip import foreach_add_, foreach_between, foreach_between_, foreach_multiply_, foreach_sign_
from .owners import MatrixOwners

# --- step hidden matrices by the orthogonalised mean of their gradients, and all else by AdamW

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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped: list[tuple[Tensor, Tensor, dict[str, Any]]] = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params and group["use_muon"]:
                stepped += [(*one, group) for one in zip(params, self._directions(params, group), strict=True)]
            elif params:
                self._step_others(params, group)
        self._orthogonalise(stepped)
        for param, direction, group in stepped:
            local, rate = local_part(param), float(group["lr"])
            local.mul_(1 - rate * group["weight_decay"])
            local.add_(local_part(direction), alpha=-rate * RMS * math.sqrt(max(param.shape[-2:])))
        return loss

    def _directions(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Move the means of gradients, and return new tensors to orthogonalise, placed as the parameters."""
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        gradients, means = (
            [local_gradient(p) for p in params],
            [local_part(self.state[p]["momentum_buffer"]) for p in params],
        )
        decay = group["momentum"]
        foreach_between_(means, gradients, 1 - decay)
        found = foreach_between(gradients, means, decay) if group["nesterov"] else [mean.clone() for mean in means]
        return [with_local(p, new) if isinstance(p, DTensor) else new for p, new in zip(params, found, strict=True)]

    def _orthogonalise(self, stepped: list[tuple[Tensor, Tensor, dict[str, Any]]]) -> None:
        together: dict[tuple[DeviceMesh | None, torch.dtype], list[tuple[Tensor, int]]] = {}
        for param, direction, group in stepped:
            mesh = next(iter(self._owners)) if self._mesh_is_known else getattr(param, "device_mesh", None)
            together.setdefault((mesh, direction.dtype), []).append((direction, group["ns_steps"]))
        for (mesh, _), directions in together.items():
            if mesh not in self._owners:
                self._owners[mesh] = MatrixOwners(mesh)
            functions = [partial(orthogonalised, steps=steps) for _, steps in directions]
            self._owners[mesh].compute([direction for direction, _ in directions], functions)

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


# --- step parameters by the sign of a moving mean of their gradients


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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            gradients, means = [p.grad for p in params], [self.state[p]["exp_avg"] for p in params]
            if group["foreach"] and params:
                _step_all(params, gradients, means, group)
            else:
                for one in zip(params, gradients, means, strict=True):
                    _step_one(*one, group)
        return loss


def _step_one(param: Tensor, gradient: Tensor, mean: Tensor, group: dict[str, Any]) -> None:
    rate, (ahead, behind) = float(group["lr"]), group["betas"]
    param.mul_(1 - rate * group["weight_decay"])
    param.add_(mean.lerp(gradient, 1 - ahead).sign_(), alpha=-rate)
    mean.lerp_(gradient, 1 - behind)


def _step_all(params: list[Tensor], gradients: list[Tensor], means: list[Tensor], group: dict[str, Any]) -> None:
    rate, (ahead, behind) = float(group["lr"]), group["betas"]
    foreach_multiply_(params, 1 - rate * group["weight_decay"])
    directions = foreach_between(means, gradients, 1 - ahead)
    foreach_sign_(directions)
    foreach_add_(params, directions, -rate)
    foreach_between_(means, gradients, 1 - behind)


# --- find the class of an optimizer's row

OURS: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind for kind in (Adafactor, Lion, Muon, ScheduleFreeAdamW)
}


def optimizer_class(row: OptimizerKind) -> Callable[..., torch.optim.Optimizer]:
    """Return the class that a row names."""
    return OURS.get(row.title) or getattr(torch.optim, row.title)
