"""Jobs about what an optimizer holds: a few steps on a layout, beside what torchao makes of the very same shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright import Layout, ParallelModel, parallelize
from meshwright.distributed.optimizer.low_bit import TorchaoAdamW, is_rounded
from meshwright.distributed.weights.shards import memory_of
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.training.optimizer import LearningRateSchedule, make_optimizer
from meshwright.verification.problem import RandomBatches

from .laid_out import own_rows

# On one rank all matrices have 4096 elements or more; on two some have less, on four most.
DENSE = DecoderConfig(256, 64, 2, 4, 2, 128, 64)
DEEP = replace(DENSE, n_layers=4)
SPARSE = replace(DENSE, moe=MoEConfig(n_experts=4, hidden_dim=64))
THREE = replace(DENSE, moe=MoEConfig(n_experts=3, hidden_dim=64))
BATCHES = RandomBatches(256, rows=8, seq_len=8)
LAYOUTS: dict[str, tuple[int, Layout, DecoderConfig]] = {
    "one": (1, Layout(dp_shard=1), DENSE),
    "DDP": (2, Layout(dp_replicate=2, dp_shard=1), DENSE),
    "FSDP2": (2, Layout(dp_shard=2), DENSE),
    "HSDP": (4, Layout(dp_replicate=2, dp_shard=2), DENSE),
    "TP": (2, Layout(dp_shard=1, tp=2), DENSE),
    "TP, copies of key heads": (4, Layout(dp_shard=1, tp=4), DENSE),
    "FSDP2 + TP": (4, Layout(dp_shard=2, tp=2), DENSE),
    "PP, tied": (2, Layout(pp=2, dp_shard=1), replace(DEEP, tied_embeddings=True)),
    "PP + FSDP2": (4, Layout(pp=2, dp_shard=2), DEEP),
    "EP": (2, Layout(dp_shard=2, ep=2), SPARSE),
    "experts cut inside": (2, Layout(dp_shard=2), THREE),
}
"""Name -> (world, layout, model)."""
BF16 = {"precision": {"master": "bfloat16", "compute": "bfloat16", "reduce": "float32"}}
STEPS = 3


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state on this rank, without step counts."""
    states = (value for state in optimizer.state.values() for value in state.values() if value.dim())
    return sum(plain.nbytes for value in states for plain in memory_of(value))


def bits(tensor: Tensor) -> list[Tensor]:
    """What a state lies in here, copied."""
    return [plain.detach().clone() for plain in memory_of(tensor)]


def laid_out(layout: str, techniques: dict[str, Any], seed: int = 3) -> ParallelModel:
    """With a ZeRO stage gradients accumulate, over microbatches of one row."""
    _, mesh, model = LAYOUTS[layout]
    return parallelize(
        model, mesh, techniques=techniques, seed=seed, microbatch_rows=1 if "zero_stage" in techniques else 0
    )


def adamw(model: ParallelModel, *, lr: float = 1e-2, seed: int = 0) -> torch.optim.Optimizer:
    groups = model.make_parameter_groups(weight_decay=0.1, overrides=[("norm", {"lr_scale": 0.5})])
    named = list(model.named_parameters())
    return make_optimizer(
        groups, lr=lr, eps=1e-5, plan=model.plan.optimizer, named_parameters=named, seed=seed
    ).optimizer


def train(model: ParallelModel, optimizer: torch.optim.Optimizer, steps: range, max_norm: float = 0.05) -> list[float]:
    """Losses; every step is clipped, and has a rate of its own."""
    schedule, losses = LearningRateSchedule(1e-2, 100, "linear", warmup_steps=4), []
    for step in steps:
        schedule.apply(optimizer, step)
        losses.append(float(model.forward_backward(own_rows(model, BATCHES(step)))))
        assert model.optimizer_step(optimizer, max_norm).grad_norm > max_norm
    return losses


@contextmanager
def uncompiled() -> Iterator[None]:
    """torchao's compiled step, ours and its own, runs as it is written: seconds less for each shape."""
    with torch.compiler.set_stance("force_eager"):
        yield


@dataclass
class Beside:
    """What came of a layout's steps, beside torchao's own optimizer on copies of the shards.

    Attributes:
        differ: names of weights and moments that are not the same to the last bit.
        rounded, whole: how many moments are in few bits, and how many are not.
    """

    differ: list[str]
    rounded: int
    whole: int


def beside_torchao(layout: str, word: str, master: str = "float32") -> Beside:
    with uncompiled():
        techniques = {"optimizer_state": word, "precision": {"master": master, "compute": master, "reduce": "float32"}}
        model = laid_out(layout, techniques)
        optimizer = adamw(model)
        assert isinstance(optimizer, TorchaoAdamW)
        shadow = _Shadow(optimizer, word)
        train(model, optimizer, range(STEPS))
        model.audit(optimizer)
        return shadow.compared({p: name for name, p in model.named_parameters()})


class _Shadow:
    """torchao's own optimizer, given the same local gradients and rates."""

    def __init__(self, optimizer: TorchaoAdamW, word: str):
        import torchao.optim

        self.ours = optimizer
        self.copies = {
            p: torch.nn.Parameter(local(p.detach()).clone())
            for group in optimizer.param_groups
            for p in group["params"]
        }
        groups = [
            {
                "params": [self.copies[p] for p in group["params"] if local(p).numel()],
                "weight_decay": group["weight_decay"],
            }
            for group in optimizer.param_groups
        ]
        kind = {"8bit": torchao.optim.AdamW8bit, "4bit": torchao.optim.AdamW4bit}[word]
        first = optimizer.param_groups[0]
        self.theirs = kind(groups, lr=0.0, betas=first["betas"], eps=first["eps"])
        optimizer.register_step_pre_hook(self.step)

    def step(self, *_: Any) -> None:
        for mine, theirs in zip(self.ours.param_groups, self.theirs.param_groups, strict=True):
            theirs["lr"].fill_(mine["lr"])
        for parameter, copy in self.copies.items():
            gradient = parameter.grad
            copy.grad = None if gradient is None else local(gradient).clone()
        self.theirs.step()

    def compared(self, names: dict[Tensor, str]) -> Beside:
        found = Beside([], 0, 0)
        for parameter, copy in self.copies.items():
            if not local(parameter).numel():
                continue
            if not torch.equal(local(parameter.detach()), copy.detach()):
                found.differ.append(names[parameter])
            for key in ("exp_avg", "exp_avg_sq"):
                mine, theirs = self.ours.state[parameter][key], self.theirs.state[copy][key]
                if not all(map(torch.equal, bits(mine), bits(theirs))):
                    found.differ.append(f"{names[parameter]}/{key}")
                found.rounded += is_rounded(mine)
                found.whole += not is_rounded(mine)
        return found


@dataclass
class Held:
    """Everything that a rank holds after some steps, as plain tensors, and what its steps said."""

    tensors: dict[str, list[Tensor]]
    losses: list[float]

    def differs_from(self, other: Held) -> list[str]:
        assert self.tensors.keys() == other.tensors.keys()
        return [name for name, mine in self.tensors.items() if not all(map(torch.equal, mine, other.tensors[name]))]


def held(model: ParallelModel, optimizer: torch.optim.Optimizer, losses: list[float]) -> Held:
    """This rank's weights and state.

    Of a moment in few bits what it stands for, whatever scale that is written with.
    """
    tensors = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        tensors[f"{number} {name}"] = bits(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{number} {name}/{key}"] = [local(value).dequantize()] if is_rounded(value) else bits(value)
    return Held(tensors, losses)
