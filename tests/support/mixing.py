"""Small models whose tokens see each other in many ways."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LONGEST = 61, 16, 2, 64


class Attention(nn.Module):
    """Attention by ``attend(q, k, v, document_ids)``."""

    def __init__(self, attend: Callable[..., Tensor]):
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v, documents).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Embedded tokens and positions, two blocks of attention and a layer per token, a head."""

    def __init__(
        self, attend: Callable[..., Tensor], between: Callable[[Tensor], Tensor] = lambda x: x, longest: int = LONGEST
    ):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(longest, WIDTH)
        self.attentions = nn.ModuleList([Attention(attend) for _ in range(2)])
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head, self.between = nn.Linear(WIDTH, VOCABULARY), between

    def forward(self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1]) if positions is None else positions
        x = self.tokens(tokens) + self.places(positions)
        for attention, layer in zip(self.attentions, self.layers, strict=True):
            x = x + attention(self.between(x), document_ids)
            x = x + torch.tanh(layer(x))
        return self.head(x)


def places(q: Tensor) -> Tensor:
    """Distances between queries and keys: (seq, seq)."""
    place = torch.arange(q.shape[2])
    return place[:, None] - place[None, :]


def in_documents(mask: Tensor, documents: Tensor | None) -> Tensor:
    if documents is None:
        return mask
    return (mask & (documents[:, :, None] == documents[:, None, :])).unsqueeze(1)


def far_window(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, length: int = 70) -> Tensor:
    """A window that no measured row reaches."""
    distance = places(q)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < length))


def causal(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def full(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def packed(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=in_documents(places(q) >= 0, documents))


def windowed(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    apart = places(q)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=in_documents((apart >= 0) & (apart < 5), documents))


def added(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """A causal mask of numbers that are added to scores."""
    mask = torch.zeros(q.shape[2], q.shape[2], dtype=q.dtype).masked_fill(places(q) < 0, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def biased(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """ALiBi."""
    bias = (-0.5 * places(q).to(q.dtype)).masked_fill(places(q) < 0, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def by_hand(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(places(q) < 0, -torch.inf).softmax(-1) @ v


def every_other(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    apart = places(q)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(apart >= 0) & (apart % 2 == 0))


def shifted(x: Tensor) -> Tensor:
    """A token shift: half of the features are the token's before."""
    old = F.pad(x, (0, 0, 1, 0))[:, :-1]
    return torch.cat((x[..., : WIDTH // 2], old[..., WIDTH // 2 :]), dim=-1)


class FromTheEnd(Model):
    """Counts its own positions, from the end of a row."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, torch.arange(tokens.shape[1]).flip(0).expand(tokens.shape))


class WithoutAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.tokens(tokens))
