"""Small models that have every kind of mask, and an array of ways to cut their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.planning.context.plan import KINDS
from meshwright.planning.layout import Layout

from . import families
from .mixing import in_documents, places

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS = 61, 16, 4, 29, 4
DOCUMENTS = ((1, 2, 3, 5, 7, 11), (29,), (19, 3, 1, 1, 2, 3), (2, 2, 23, 2))
"""Tokens of each row's documents: of one, two, ranks less one, primes, and long ones before and behind others."""

Mask = Callable[[Tensor, Tensor], Tensor]
"""(distance between query and key, places) -> whether the query attends to the key, (seq, seq)."""


class Attention(nn.Module):
    """Attention with heads of their own sizes, by a mask of places, within documents where asked."""

    def __init__(self, mask: Mask | None, key_heads: int = HEADS, values: int = 4, documents: bool = False):
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, HEADS * 4), nn.Linear(WIDTH, key_heads * 4)
        self.v, self.out = nn.Linear(WIDTH, key_heads * values), nn.Linear(HEADS * values, WIDTH)
        self.mask, self.key_heads, self.documents = mask, key_heads, documents

    def forward(self, x: Tensor, document_ids: Tensor | None) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        k, v = (layer(x).unflatten(-1, (self.key_heads, -1)).transpose(1, 2) for layer in (self.k, self.v))
        options: dict[str, Any] = {"is_causal": True}
        if self.mask is not None:
            allowed = self.mask(places(q), torch.arange(q.shape[2]))
            options = {"attn_mask": in_documents(allowed, document_ids if self.documents else None)}
        found = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.key_heads != HEADS, **options)
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention: Attention):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), attention
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor, document_ids: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm(x), document_ids)
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Embedded tokens and positions, blocks with an attention each, a head."""

    def __init__(self, *attentions: Callable[[], Attention]):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH + 30, WIDTH)
        self.blocks = nn.ModuleList([Block(made()) for made in attentions])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1]) if positions is None else positions
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, document_ids)
        return self.head(x)


def causal(distance: Tensor, place: Tensor) -> Tensor:
    return distance >= 0


def everything(distance: Tensor, place: Tensor) -> Tensor:
    return distance == distance


def window(distance: Tensor, place: Tensor) -> Tensor:
    return (distance >= 0) & (distance < 5)


def chunks(distance: Tensor, place: Tensor) -> Tensor:
    return (distance >= 0) & (place[:, None] // 7 == place // 7)


def of_family(name: str, **changes: Any) -> nn.Module:
    config = families.config_of(name, use_cache=False, vocab_size=VOCABULARY, **changes)
    config._experts_implementation = "eager"
    config._attn_implementation = "eager" if name in UPCASTS.values() else "sdpa"
    return families.on_cpu(config)


UPCASTS = {"cap": "gemma2", "sinks": "gpt_oss"}
"""Masks' models that compute in float32 inside."""
WINDOWS = {"sliding_window": 6}
own = partial(partial, Attention)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "causal": lambda: Model(own(None), own(causal)),
    "full": lambda: Model(own(everything), own(everything)),
    "window": lambda: Model(own(window), own(window)),
    "chunks": lambda: Model(own(chunks), own(chunks)),
    "mixed": lambda: Model(own(window), own(None), own(everything, documents=True)),
    "documents": lambda: Model(own(causal, documents=True), own(causal, documents=True)),
    "windows of documents": lambda: Model(own(window, documents=True), own(causal, documents=True)),
    "one key head": lambda: Model(own(causal, 1, documents=True), own(None, 1)),
    "other values": lambda: Model(own(causal, HEADS, 6, documents=True), own(window, 2, 6)),
    "padding before": partial(of_family, "llama"),
    "padding behind": partial(of_family, "mistral", **WINDOWS),
    "documents by position": partial(of_family, "qwen3"),
    "cap": partial(of_family, "gemma2", **WINDOWS),
    "sinks": partial(of_family, "gpt_oss", **WINDOWS),
}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "-": ({}, {}),
    "fsdp": ({"dp_shard": 2}, {}),
    "hsdp": ({"dp_replicate": 2}, {"sync_grad_accum": "shard"}),
    "zero2": ({"dp_shard": 2}, {"zero_stage": 2}),
    "tp": ({"tp": 2}, {}),
}


@dataclass(frozen=True)
class Case:
    """A way to cut the rows of a model with one kind of mask."""

    mask: str = "causal"
    method: str = "auto"
    cp: int = 2
    mesh: str = "-"
    recompute: str = "none"
    rows: str = "at once"
    loss: str = "whole"

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items() if value != getattr(Case, name))

    @property
    def is_legal(self) -> bool:
        """At most four ranks; families meet the tensor axis in ways, and heads of other values are not cut over it."""
        own = not isinstance(MODELS[self.mask], partial) and self.mask != "other values"
        fits = self.mesh == "-" or self.cp == 2
        return fits and (own or self.mesh != "tp") and (self.method != "ulysses_ring" or self.cp == 4)

    @property
    def layout(self) -> Layout:
        return Layout(**({"dp_shard": 1} | MESHES[self.mesh][0]), cp=self.cp)

    @property
    def techniques(self) -> dict[str, Any]:
        found = {"precision": {"master": "float64"}, "context_parallel_method": self.method, **MESHES[self.mesh][1]}
        if self.recompute != "none":
            found["activation_checkpointing"] = self.recompute
        return found | ({"loss_chunks": 3} if self.loss == "chunks" else {})


FACTORS: dict[str, tuple[Any, ...]] = {
    "mask": tuple(MODELS),
    "method": ("auto", *KINDS),
    "cp": (2, 4),
    "mesh": tuple(MESHES),
    "recompute": ("none", "full", "selective", "selective_op"),
    "rows": ("at once", "one by one"),
    "loss": ("whole", "chunks"),
}


def pairs_of(case: Case) -> set[Any]:
    """Return the pairs of values of different factors that a case has."""
    return set(combinations(asdict(case).items(), 2))


def cases() -> Iterator[Case]:
    """Yield cases in which every two values of different factors meet, as far as they are legal: greedily."""
    legal = [case for values in product(*FACTORS.values()) if (case := Case(*values)).is_legal]
    numbers: dict[Any, int] = {}
    bits = [sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs_of(case)) for case in legal]
    missing = (1 << len(numbers)) - 1
    while missing:
        best = max(range(len(legal)), key=lambda number: (bits[number] & missing).bit_count())
        missing &= ~bits[best]
        yield legal[best]


def batch_of(mask: str) -> dict[str, Tensor]:
    """Return whole rows: documents where some attention keeps them apart, padding where the mask is of that."""
    generator = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2))
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(d)), torch.tensor(d)) for d in DOCUMENTS])
    positions = torch.arange(LENGTH) - torch.stack([torch.searchsorted(row, row) for row in documents])
    labels[0, 3:17], labels[2, -9:] = -100, -100
    batch = {"tokens": tokens, "labels": labels}
    if mask.startswith("padding"):
        kept = torch.ones_like(tokens)
        for row, count in ((1, 4), (2, 9)):
            kept[row, -count:] = 0
        batch["attention_mask"] = kept.flip(1) if mask == "padding before" else kept
        labels.masked_fill_(batch["attention_mask"] == 0, -100)
    elif mask in ("documents by position", "cap", "sinks"):
        batch["positions"] = positions
    elif mask not in ("causal", "full"):
        batch |= {"positions": positions, "document_ids": documents}
    return batch
