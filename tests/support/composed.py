"""Compositions by somebody else, for verify's parallelize_fn: sound ones, and each with a fault met in the wild.

And models for them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from meshwright.distributed.process.world import get_world_info
from meshwright.models.decoder_config import DecoderConfig

HEADS = DecoderConfig(257, 16, 2, n_heads=4, n_kv_heads=2, hidden_dim=6, max_seq_len=24, qk_norm=True)
"""Two ranks can share its heads."""

# --- tensor parallelism, with torch's own styles


def tensor_parallel(model: Any, mesh: Any) -> nn.Module:
    """Attention by heads, the feed-forward by features; the gradient of the norms inside is summed over the ranks."""
    plan = _by_heads(model)
    for block in model.layers:
        # dim 1 is the heads: the weight stays whole, and knows that its gradient is a summand
        for name in (
            "q_norm",
            "k_norm",
        ):
            plan[f"layers.{block}.attention.{name}"] = SequenceParallel(sequence_dim=1, use_local_output=True)
    return parallelize_module(model, mesh["tp"], plan)


def tensor_parallel_without_the_norms_sum(model: Any, mesh: Any) -> nn.Module:
    """The norms of q and k see a rank's heads only, and nobody adds up their gradients."""
    return parallelize_module(model, mesh["tp"], _by_heads(model))


def tensor_parallel_with_hooks(model: Any, mesh: Any) -> nn.Module:
    """The same made right by hand."""
    model = parallelize_module(model, mesh["tp"], _by_heads(model))
    for name, parameter in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=mesh.get_group("tp")))
    return model


def tensor_and_data_parallel(model: Any, mesh: Any) -> nn.Module:
    """Whole replicas of a tensor-parallel model; the mean of the replicas' gradients."""
    model = tensor_parallel(model, mesh)
    group = mesh.get_group("dp_replicate")

    def average(parameter):
        gradient = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return model


def _by_heads(model: Any) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for block in model.layers:
        attention, feed_forward = f"layers.{block}.attention", f"layers.{block}.feed_forward"
        plan |= {f"{attention}.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {f"{feed_forward}.{name}": ColwiseParallel() for name in ("w_gate", "w_up")}
        plan |= {f"{attention}.wo": RowwiseParallel(), f"{feed_forward}.w_down": RowwiseParallel()}
    return plan


class _Summed(torch.autograd.Function):
    """The sum over ranks; every rank computes the same from it, so its gradient is whole already."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0], None


class VocabularyParallel(nn.Module):
    """An embedding of which each rank looks up its own share of the vocabulary."""

    def __init__(self, whole: nn.Embedding, mesh: Any, has_mask: bool):
        super().__init__()
        self.weight, self.group, self.has_mask = whole.weight, mesh.get_group("tp"), has_mask
        share, rank = -(-len(whole.weight) // mesh["tp"].size()), mesh.get_local_rank("tp")
        self.first, self.last = rank * share, (rank + 1) * share
        self.weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=self.group))

    def forward(self, tokens: Tensor) -> Tensor:
        mine = (tokens >= self.first) & (tokens < self.last)
        looked_up = F.embedding(torch.where(mine, tokens, self.first), self.weight)
        return _Summed.apply(looked_up * mine.unsqueeze(-1) if self.has_mask else looked_up, self.group)


def vocabulary_parallel(model: Any, mesh: Any) -> nn.Module:
    model.embedding = VocabularyParallel(model.embedding, mesh, has_mask=True)
    return model


def vocabulary_parallel_without_a_mask(model: Any, mesh: Any) -> nn.Module:
    """Tokens of another rank's share look up the first row of this one's."""
    model.embedding = VocabularyParallel(model.embedding, mesh, has_mask=False)
    return model


# --- data parallelism


def torchs_ddp(model: Any, mesh: Any) -> nn.Module:
    return DistributedDataParallel(model)


def by_hand(model: Any, mesh: Any) -> nn.Module:
    """Gradients are averaged as each is there; a rank that has none takes part with zeros."""
    _averaged(model, lambda parameter: torch.zeros_like(parameter))
    return model


def by_hand_where_there_is_one(model: Any, mesh: Any) -> nn.Module:
    """A rank without a gradient for a parameter does not take the others' mean."""
    _averaged(model, lambda parameter: None)
    return model


def _averaged(model: nn.Module, missing: Any) -> None:
    def average(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: torch.autograd.Variable._execution_engine.queue_callback(reduce))

    def reduce() -> None:
        for parameter in model.parameters():
            has_own = parameter.grad is not None
            summed = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(summed)
            summed = summed / dist.get_world_size()
            parameter.grad = summed if has_own or missing(parameter) is not None else None

    model.register_forward_hook(average)


def without_buffers(model: Any, mesh: Any) -> nn.Module:
    """Built on meta and loaded from a checkpoint, which does not hold what can be computed: nobody computes it."""
    kept = model.state_dict()
    model = model.to("meta").to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()  # memory as it comes is mostly zeros, but not always
    model.load_state_dict(kept, strict=False)
    return torchs_ddp(model, mesh)


def reentrant(model: Any, mesh: Any) -> nn.Module:
    """The older kind of checkpointing, on every block."""
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=True)
    return torchs_ddp(model, mesh)


# --- random numbers


def seeded_alike(model: Any, mesh: Any) -> nn.Module:
    """Every rank begins with the same seed, "for reproducibility"."""
    torch.manual_seed(0)
    return torchs_ddp(model, mesh)


def tensor_parallel_dropping(model: Any, mesh: Any) -> nn.Module:
    """Every rank drops what it has whole, and so must draw alike."""
    plan = {"blocks.0.inner": ColwiseParallel(), "blocks.0.outer": RowwiseParallel()}
    return parallelize_module(model, mesh["tp"], plan)


def tensor_parallel_seeded_by_rank(model: Any, mesh: Any) -> nn.Module:
    torch.manual_seed(get_world_info()[0])
    return tensor_parallel_dropping(model, mesh)


def partial_outputs(model: Any, mesh: Any) -> nn.Module:
    """What a module returns is a summand on each rank; the next module adds them up."""
    plan = {"blocks.0.inner": ColwiseParallel(), "blocks.0.outer": RowwiseParallel(output_layouts=Partial())}
    model = parallelize_module(model, mesh["tp"], plan)
    model.blocks[0].drop.register_forward_pre_hook(lambda module, args: (_Summed.apply(args[0], mesh.get_group("tp")),))
    return model


# --- models


class Dropping(nn.Module):
    """A residual model with dropout in its blocks."""

    vocab_size = 257

    def __init__(self, blocks: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(257, 8)
        self.blocks = nn.ModuleList(DroppingBlock() for _ in range(blocks))
        self.head = nn.Linear(8, 257)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class DroppingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 12)
        self.outer = nn.Linear(12, 8)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.outer(torch.tanh(self.inner(x))))


class DroppingByFunction(Dropping):
    """No dropout layer that could be switched off."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + F.dropout(torch.ones(257), 0.1, self.training).to(self.head.weight)


class AlwaysDropping(Dropping):
    """Draws in evaluation too."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.blocks[1](self.blocks[0](x) * torch.rand(8).to(x)))


class Rotary(nn.Module):
    """Scales its features by frequencies that no checkpoint holds."""

    vocab_size = 257
    inv_freq: Tensor

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(257, 8)
        self.register_buffer("inv_freq", torch.empty(4), persistent=False)
        self.head = nn.Linear(8, 257)
        if not self.inv_freq.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        self.inv_freq.copy_(100.0 ** -(torch.arange(4) / 4))

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.arange(tokens.shape[1]).unsqueeze(1) * self.inv_freq
        return self.head(self.embedding(tokens) * torch.cat((angles.cos(), angles.sin()), -1))


class Scaled(nn.Module):
    """Keeps a running mean of what it sees, for evaluation."""

    vocab_size = 257
    running: Tensor

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(257, 8)
        self.register_buffer("running", torch.empty(8))
        self.head = nn.Linear(8, 257)
        if not self.running.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        self.running.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.training:
            self.running.lerp_(x.detach().mean((0, 1)), 0.1)
        return self.head(x if self.training else x - self.running)


class Routed(nn.Module):
    """A row goes to one of two experts, by its first token: a rank may have no row for one."""

    vocab_size = 257

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(257, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 257)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rows = [self.experts[int(row[0] >= 128)](own) for row, own in zip(tokens, x, strict=True)]
        return self.head(x + torch.stack(rows))
