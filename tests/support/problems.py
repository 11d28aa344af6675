"""What is computed (a Problem: model, dtype, data, optimizer) and how (a Way: layout, techniques, microbatches)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright import Layout
from meshwright.models.decoder_config import DecoderConfig

SEED = 11

# Nothing divides: 257 tokens, 10 features, 7 hidden ones; heads of 2 features, so that the q/k norms and the one kv
# head
# have fewer rows than four ranks. Three layers: a first, a middle and a last block are treated differently.
UNTIED = DecoderConfig(257, 10, 3, n_heads=5, n_kv_heads=1, hidden_dim=7, max_seq_len=16, qk_norm=True)
TIED = replace(UNTIED, tied_embeddings=True)
PARTLY_FROZEN = ("embedding", r"layers\.0")

ONE = Layout(dp_shard=1)
DDP2, DDP4 = Layout(dp_replicate=2, dp_shard=1), Layout(dp_replicate=4, dp_shard=1)
FSDP2, FSDP4 = Layout(dp_shard=2), Layout(dp_shard=4)
HSDP = Layout(dp_replicate=2, dp_shard=2)
LAYOUTS = {"ddp2": DDP2, "ddp4": DDP4, "fsdp2": FSDP2, "fsdp4": FSDP4, "hsdp2x2": HSDP}


@dataclass(frozen=True)
class Data:
    """The global batches of a run: every row has its own documents, positions, and share of tokens without a loss.

    ``arguments``: (key of the batch, name of the model's argument) of what is given beside the tokens.
    """

    rows: int = 12
    seq: int = 11
    vocab: int = 257
    arguments: tuple[tuple[str, str], ...] = (("positions", "positions"), ("document_ids", "document_ids"))
    seed: int = 5

    def steps(self, number: int) -> list[dict[str, torch.Tensor]]:
        return [self.step(n) for n in range(number)]

    def step(self, number: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed * 1000 + number)
        shape = (self.rows, self.seq)
        tokens = torch.randint(0, self.vocab, shape, generator=g)
        labels = tokens.roll(-1, dims=1)
        labels[:, -1] = -100
        for row in range(self.rows):  # from nearly all tokens to very few, so that no mean of means is the mean
            labels[row, : (row * 5 + number) % (self.seq - 1)] = -100
        labels[
            self.rows // 2
        ] = -100  # and one row with none at all: as a microbatch of its own it has nothing to average
        loss_mask = torch.rand(shape, generator=g) < 0.8
        starts = (torch.rand(shape, generator=g) < 0.25).long()
        document_ids = starts.cumsum(1)
        begin = torch.where(starts.bool(), torch.arange(self.seq), 0).cummax(1).values
        place = torch.arange(self.seq) - begin
        # a gap, or rotary ones would not matter
        positions = place + 3 * (place > 1) + torch.randint(0, 3, (self.rows, 1), generator=g)
        whole = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "positions": positions,
            "document_ids": document_ids,
        }
        return {
            key: value
            for key, value in whole.items()
            if key in ("tokens", "labels", "loss_mask", *dict(self.arguments))
        }


@dataclass(frozen=True)
class Problem:
    """Some steps of training, whoever computes them.

    ``model``: a config, or a function that returns a module. ``dtype``: of all parameters; empty: as it has them.
    """

    model: Any = UNTIED
    dtype: str = "float64"
    freeze: tuple[str, ...] = ()
    optimizer: str = "adamw"
    max_norm: float | None = 0.3
    steps: int = 3
    data: Data = field(default_factory=Data)


@dataclass(frozen=True)
class Way:
    """How a problem is computed.

    ``techniques``: (name, value) pairs beside dtype and freezing, which belong to the problem.

    ``microbatches``: "one" forward per step; a "list" of uneven ones; or one dict that is cut by "rows".
    """

    layout: Layout = FSDP2
    techniques: tuple[tuple[str, Any], ...] = ()
    microbatches: str = "one"

    @property
    def microbatch_rows(self) -> int:
        return {2: 2, 4: 1, 1: 4}[self.layout.world] if self.microbatches == "rows" else 0


def share(batch: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, torch.Tensor]:
    """This rank's rows of a global batch."""
    rows = len(batch["tokens"]) // world
    return {key: value[rank * rows : (rank + 1) * rows] for key, value in batch.items()}


def pieces(batch: dict[str, torch.Tensor], ends: Iterable[int]) -> list[dict[str, torch.Tensor]]:
    """A batch cut before the given rows."""
    edges = [0, *ends, len(batch["tokens"])]
    return [{key: value[a:b] for key, value in batch.items()} for a, b in zip(edges, edges[1:], strict=False)]


def as_brought(batch: dict[str, torch.Tensor], way: Way) -> Any:
    """A rank's share of a step in the form in which the way brings it: three unequal microbatches, or one dict."""
    rows = len(batch["tokens"])
    return pieces(batch, (1, rows // 2 if rows > 3 else 2)) if way.microbatches == "list" else batch


def everybodys(batch: dict[str, torch.Tensor], way: Way) -> list[dict[str, torch.Tensor]]:
    """The microbatches of all ranks in a way, in rank order."""
    found = []
    for rank in range(way.layout.world):
        mine = as_brought(share(batch, rank, way.layout.world), way)
        if isinstance(mine, dict):
            mine = pieces(
                mine,
                range(way.microbatch_rows, len(mine["tokens"]), way.microbatch_rows) if way.microbatch_rows else (),
            )
        found += mine
    return found


def frozen(name: str, patterns: tuple[str, ...]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def make_optimizer(kind: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    chosen = [p for p in parameters if p.requires_grad]
    if kind == "adamw":
        return torch.optim.AdamW(chosen, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    return torch.optim.SGD(chosen, lr=0.3, momentum=0.9)
