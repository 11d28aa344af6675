"""Train at one point and evaluate at another: the average of an optimizer's steps, and copies of weights.

Defazio et al. 2024, "The Road Less Scheduled" (arXiv 2405.15682), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.core import readers
from meshwright.core.errors import ConfigError
from meshwright.distributed.data import fully_sharded
from meshwright.distributed.optimizer.grad_clip import (
    foreach_add_,
    foreach_between_,
    foreach_divided,
    foreach_move_mean_of_squares_,
    loss_of,
)
from meshwright.distributed.step.part import ModelPart
from meshwright.distributed.torch_private import local_part
from meshwright.distributed.weights import shards
from meshwright.distributed.weights.shards import local_gradient, with_local

TRAINED = "y"
"""Key of a parameter's state that holds the point of training while the parameter holds the average."""

_OPTIMIZERS = WeakTensorKeyDictionary()
"""Parameter -> weak reference to the last optimizer of this kind that was made over the parameter."""


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """Schedule-free AdamW, element by element, so that parameters may be cut in any way.

    Three points, equal at first: z steps, x is an average of z, and gradients are those at y. A step t from 1, with the
    mean v of squared gradients, is: r = ``lr * sqrt(1 - beta2 ** t)``; z = z - r * (g / (sqrt(v) + eps) +
    weight_decay * y); c = r ** 2 / (sum of r ** 2 so far); x = (1 - c) * x + c * z; y = (1 - beta1) * z + beta1 * x.
    The rate is constant, but for a warm-up, which is given by ``lr`` step by step.

    A parameter holds y, and its state z (``exp_avg_sq``: v); x follows from both. Inside ``averaged()``, and between
    ``eval()`` and ``train()``, the parameters hold x, and the state keeps y, so that training goes on with the very
    same bits. ``ParallelModel`` enters ``averaged()`` by itself to evaluate, generate, gather and save.

    Args:
        params: tensors or DTensors, or groups of them.
        lr: rate; the paper advises 1 to 10 times AdamW's.
        betas: weight of x in y, above 0; decay of the mean of squared gradients.
        eps: added to the denominator.
        weight_decay: decoupled weight decay, computed at y.
        foreach: whether torch steps all parameters of a group in one call of each operator.

    Raises:
        ConfigError: a value out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        foreach: bool = False,
    ):
        name = type(self).__name__
        if lr < 0 or weight_decay < 0 or eps < 0:
            raise ConfigError(f"{name}: lr = {lr}, weight_decay = {weight_decay} and eps = {eps} are 0 or more")
        if not (0 < betas[0] < 1 and 0 <= betas[1] < 1):
            raise ConfigError(f"{name}: betas = {betas} are in (0, 1) and [0, 1)")
        self._is_averaged = False
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "foreach": foreach}
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose average this optimizer has from now on."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            _OPTIMIZERS[parameter] = ref(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of all parameters that have gradients; return what the closure returns."""
        if self._is_averaged:
            raise ConfigError(
                "ScheduleFreeAdamW: the parameters hold the average of the steps, from which no step is taken. Call"
                " train() first, or step outside of averaged()."
            )
        loss = loss_of(closure)
        for group in self.param_groups:
            alike: dict[tuple[float, float], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    if not (state := self.state[p]):
                        state["step"] = torch.tensor(0.0)
                        state["weight_sum"] = torch.tensor(0.0, dtype=torch.float64)
                        state["z"] = p.detach().clone(memory_format=torch.preserve_format)
                        state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                    alike.setdefault((float(state["step"]), float(state["weight_sum"])), []).append(p)
            for (step, weight_sum), params in alike.items():  # that have taken equally many steps at equal rates
                step, (within, decay) = step + 1, group["betas"]
                rate = float(group["lr"]) * math.sqrt(1 - decay**step)
                weight_sum += rate**2
                share = rate**2 / weight_sum if weight_sum else 0.0
                states = [self.state[p] for p in params]
                for state in states:
                    state["step"].fill_(step)
                    state["weight_sum"].fill_(weight_sum)
                lists = [
                    [local_part(p.detach()) for p in params],
                    [local_gradient(p) for p in params],
                    [local_part(state["z"]) for state in states],
                    [local_part(state["exp_avg_sq"]) for state in states],
                ]
                for ys, gradients, zs, squares in (
                    [lists] if group["foreach"] else [[[one] for one in each] for each in zip(*lists, strict=True)]
                ):
                    foreach_move_mean_of_squares_(squares, gradients, decay)
                    updates = foreach_divided(gradients, squares, group["eps"])
                    if group["weight_decay"]:
                        foreach_add_(updates, ys, group["weight_decay"])
                    foreach_between_(ys, zs, share)
                    foreach_add_(ys, updates, -rate * (1 - within * (1 - share)))
                    foreach_add_(zs, updates, -rate)
        return loss

    # --- the average

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the parameters hold the average of the steps; afterwards they hold the point of training, bit by bit.

        Inside, each parameter that has stepped has a copy more. Nested calls change nothing.
        """
        if self._is_averaged:
            yield
            return
        self.eval()
        try:
            yield
        finally:
            self.train()

    @torch.no_grad()
    def eval(self) -> None:
        """Let the parameters hold the average of the steps, until ``train()``."""
        if self._is_averaged:
            return
        readers.finish_all()
        self._is_averaged = True
        for group in self.param_groups:
            for p in group["params"]:
                if (state := self.state.get(p)) and "z" in state:
                    local = local_part(p.detach())
                    kept = local.clone()
                    state[TRAINED] = with_local(p, kept) if isinstance(p, DTensor) else kept
                    local.lerp_(local_part(state["z"]), 1 - 1 / group["betas"][0])

    @torch.no_grad()
    def train(self) -> None:
        """Let the parameters hold the point of training again; read from a checkpoint, it lies in the state too."""
        readers.finish_all()
        self._is_averaged = False
        for p, state in self.state.items():
            if (kept := state.pop(TRAINED, None)) is not None:
                local_part(p.detach()).copy_(local_part(kept))

    def averages(self, parameter: Tensor) -> bool:
        """Return whether a parameter's average is to be computed: it holds the point of training, and has stepped."""
        return not self._is_averaged and "z" in self.state.get(parameter, {})

    def average_of(self, parameter: Tensor) -> Tensor:
        """Compute the average of a parameter that holds the point of training, as ``eval()`` would leave it."""
        state = self.state[parameter]
        decay = next(g["betas"][0] for g in self.param_groups if any(p is parameter for p in g["params"]))
        average = local_part(parameter.detach()).clone().lerp_(local_part(state["z"]), 1 - 1 / decay)
        return with_local(parameter, average) if isinstance(parameter, DTensor) else average

    def begin_anew(self) -> None:
        """Forget all steps: the parameters, as they are, are the first point of another training."""
        self.state.clear()


def optimizers_of(parameters: Iterable[Tensor]) -> list[ScheduleFreeAdamW]:
    """List the optimizers that have an average of some of the parameters."""
    found = {id(made): made for p in parameters if (last := _OPTIMIZERS.get(p)) and (made := last()) is not None}
    return list(found.values())


# --- let a model hold the averages that its optimizer has of its parameters, where it is evaluated


@contextmanager
def averaged(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Let the parameters of a model's local modules hold their averages inside; no messages are sent.

    Parameters without an average, those of all other optimizers, stay as they are.
    """
    found = optimizers_of(_parameters(parts))
    if not found:
        yield
        return
    _free_gathered(parts)
    with ExitStack() as held:
        for optimizer in found:
            held.enter_context(optimizer.averaged())
        try:
            yield
        finally:
            _free_gathered(parts)


@contextmanager
def evaluating(parts: Sequence[ModelPart]) -> Iterator[None]:
    """Evaluate the average without gradients; then restore each module's mode, and free gathered parameters."""
    models = [part.model for part in parts]
    modes = [(module, module.training) for part in parts for module in part.module.modules()]
    for part in parts:
        part.module.eval()
    try:
        with torch.inference_mode(False), torch.no_grad(), averaged(models):  # what FSDP gathers is trained with later
            yield
    finally:
        for module, training in modes:
            module.training = training
        _free_gathered(models)


def begin_anew(parts: Sequence[nn.Module]) -> None:
    """Let optimizers that have averages of a model begin anew, since other weights were loaded without their state."""
    for optimizer in optimizers_of(_parameters(parts)):
        optimizer.begin_anew()


def _parameters(parts: Sequence[nn.Module]) -> Iterable[Tensor]:
    return (parameter for part in parts for parameter in part.parameters())


def _free_gathered(parts: Sequence[nn.Module]) -> None:
    """Free gathered copies, which hold the other point."""
    for part in parts:
        fully_sharded.reshard(part)


class WeightCopy(nn.Module):
    """A copy of the weights of a laid-out model, in the same shards, such as an average of them.

    Calls go through the model, which is lent the copied weights meanwhile. ``lent()`` lends them to a block of code:
    inside, the model's ``evaluate``, ``generate`` and ``state_dict`` are those of the copy.
    """

    def __init__(self, model: Any):
        super().__init__()
        self._model = (model,)  # no child: the weights of this module are the copies
        for name, parameter in model.named_parameters():
            made = nn.Parameter(parameter.detach().clone(), requires_grad=False)
            self._parameters.setdefault(name, made)
        for name, buffer in model.named_buffers():
            self._buffers.setdefault(name, buffer.detach().clone())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs of this rank's rows by the copied weights, without gradients (collective)."""
        with self.lent(), torch.no_grad():
            return self._model[0](*args, **kwargs)

    @contextmanager
    def lent(self) -> Iterator[Any]:
        """Lend the copied weights to the model: inside, it evaluates, generates and is saved by them."""
        model = self._model[0]
        with model.averaged():  # so that an optimizer's average is not taken of the copy
            self._swap()
            model.is_lent = True
            try:
                yield model
            finally:
                model.is_lent = False
                self._swap()

    def state_dict(self, **options: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the whole copies under global names (collective; see ``ParallelModel.state_dict``)."""
        with self.lent() as model:
            return model.state_dict(**options)

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> shards.IncompatibleKeys:
        """Copy whole tensors into the copies (see ``ParallelModel.load_state_dict``)."""
        with self.lent() as model:
            return model.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *options: Any) -> None:  # type: ignore[override]
        """Load a part of the state dict of a module around this one, such as an ``AveragedModel``."""
        load_within(self, state_dict, prefix, *options)

    @torch.no_grad()
    def _swap(self) -> None:
        readers.finish_all()
        # a mean of codes is none of weights: those in 4 bits are frozen, and the model's own serve
        in_4_bits = lambda tensor: isinstance(tensor, nn.Parameter) and tensor.dtype == torch.uint8  # noqa: E731
        tensors = [(name, tensor) for name, tensor in self._model[0]._tensors() if not in_4_bits(tensor)]
        shards.swap(tensors, {**self._parameters, **self._buffers})


def load_within(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
    found = module.load_state_dict(own, strict=False)
    missing += [f"{prefix}{name}" for name in found.missing_keys if strict]
    unexpected += [f"{prefix}{name}" for name in found.unexpected_keys if strict]
