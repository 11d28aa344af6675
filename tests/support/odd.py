"""A small model of everything that is awkward to shard, its batches, and its state as whole tensors."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright import Layout, ParallelModel, parallelize
from meshwright.checkpoint.manifest import Manifest, locate

VOCAB, SEQ, ROWS = 257, 6, 8
LAYOUTS = {
    "one": (1, Layout(dp_shard=1)),
    "ddp2": (2, Layout(dp_replicate=2, dp_shard=1)),
    "fsdp2": (2, Layout(dp_shard=2)),
    "fsdp4": (4, Layout(dp_shard=4)),
    "hsdp2x2": (4, Layout(dp_replicate=2, dp_shard=2)),
}
"""Name -> (world, layout)."""


class Mix(nn.Module):
    """A block with a vector shorter than most worlds, a vector of one, and a matrix of an odd number of rows."""

    def __init__(self, dim: int, dtype: torch.dtype):
        super().__init__()
        self.inner = nn.Linear(dim, 7, bias=False, dtype=dtype)
        self.outer = nn.Linear(7, dim, dtype=dtype)
        self.gain = Gain(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain(self.outer(torch.tanh(self.inner(x))))


class Gain(nn.Module):
    """Two awkward parameters, and buffers of a float, a whole number without dims, and one that no checkpoint holds."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.one = nn.Parameter(torch.empty(1, dtype=dtype))
        self.three = nn.Parameter(torch.empty(3, dtype=dtype))
        self.register_buffer("offset", torch.empty(2, dtype=dtype))
        self.register_buffer("seen", torch.empty((), dtype=torch.int64))
        self.register_buffer("scratch", torch.empty(2), persistent=False)
        if not self.one.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.one.fill_(1.0).add_(torch.randn(1).to(self.one), alpha=0.1)
            self.three.normal_()
            self.offset.zero_()
            self.seen.zero_()
            self.scratch.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.one + F.pad(self.three, (0, x.shape[-1] - 3)) + self.offset.sum()


class Odd(nn.Module):
    """Token ids to logits; the head is tied to the embedding."""

    def __init__(self, vocab: int = VOCAB, blocks: int = 2, dtype: torch.dtype = torch.float64, dim: int = 8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, dtype=dtype)
        self.blocks = nn.ModuleList(Mix(dim, dtype) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim, dtype=dtype)
        self.head = nn.Linear(dim, vocab, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.head.weight)


def odd(layout: str, *, seed: int = 0, freeze: tuple[str, ...] = (), **shape) -> ParallelModel:
    """The model on a layout, from its own initialiser."""
    return parallelize(
        lambda: Odd(**shape), LAYOUTS[layout][1], seed=seed, techniques={"freeze": freeze} if freeze else None
    )


def own_rows(model: ParallelModel, step: int) -> dict[str, Tensor]:
    """This rank's rows of a step's batch; the step's whole batch is the same on every layout.

    Some labels are ignored.
    """
    from meshwright.distributed.mesh import data_position

    rank, ranks = data_position(model.mesh)
    generator = torch.Generator().manual_seed(1000 + step)
    words = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator)
    labels = words[:, 1:].clone()
    labels[0, : SEQ // 2] = -100
    share = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    return {"tokens": words[share, :-1], "labels": labels[share]}


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, copied."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(model: ParallelModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers, whole, by global name."""
    return {name: whole(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}


def moments(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer state, whole, as "parameter/state"."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {f"{names[p]}/{key}": whole(value) for p, state in optimizer.state.items() for key, value in state.items()}


def train(model: ParallelModel, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses of some steps."""
    losses = []
    for step in steps:
        losses.append(float(model.forward_backward(own_rows(model, step))))
        model.optimizer_step(optimizer, max_norm=1.0)
    return losses


def written(folder: Path) -> dict:
    """Key -> the whole tensor that a checkpoint holds, by its manifest."""
    manifest, found = Manifest.read(folder), {}
    for key, entry in manifest.tensors.items():
        whole = found[key] = torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
        for piece in entry.pieces:
            content = (folder.parent / locate(folder.name, piece.pack)).read_bytes()[piece.begin : piece.end]
            box = tuple(slice(low, low + size) for low, size in zip(piece.offset, piece.shape, strict=True))
            whole[box] = torch.frombuffer(bytearray(content), dtype=whole.dtype).view(piece.shape)
    return found
