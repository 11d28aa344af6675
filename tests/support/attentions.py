"""Attention as people write it by hand: the ways to make heads of features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.users import DIM, HEAD, HEADS, Block, User


class Spelled(nn.Module):
    """Queries, keys and values in one layer, as nanoGPT has it."""

    fused, bias = True, True
    kv_heads = HEADS

    def __init__(self):
        super().__init__()
        self.n_head, self.n_embd, self.head_dim, self.n_kv = HEADS, DIM, HEAD, self.kv_heads
        if self.fused:
            self.c_attn = nn.Linear(DIM, DIM + 2 * self.kv_heads * HEAD, bias=self.bias)
        else:
            self.q = nn.Linear(DIM, DIM, bias=self.bias)
            self.k, self.v = (nn.Linear(DIM, self.kv_heads * HEAD, bias=self.bias) for _ in range(2))
        self.c_proj = nn.Linear(DIM, DIM, bias=self.bias)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def joined(self, y: Tensor, x: Tensor) -> Tensor:
        return y.transpose(1, 2).contiguous().view(*x.shape[:2], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.c_proj(self.joined(F.scaled_dot_product_attention(q, k, v, is_causal=True), x))


class NanoGPT(Spelled):
    def heads(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        return tuple(part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in (q, k, v))

    def joined(self, y, x):
        B, T, C = x.size()
        return y.transpose(1, 2).contiguous().view(B, T, C)


class MinGPT(NanoGPT):
    """Masked by hand."""

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.heads(x)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        return self.c_proj((scores @ v).transpose(1, 2).contiguous().view(B, T, C))


class Packed(Spelled):
    """``view(b, t, 3, h, d // h)``."""

    def heads(self, x):
        b, t, d = x.shape
        return tuple(self.c_attn(x).view(b, t, 3, self.n_head, d // self.n_head).permute(2, 0, 3, 1, 4))


class PackedByHead(Spelled):
    def heads(self, x):
        b, t, _ = x.shape
        return tuple(self.c_attn(x).view(b, t, self.n_head, 3, self.head_dim).permute(3, 0, 2, 1, 4))


class Chunked(Spelled):
    def heads(self, x):
        parts = self.c_attn(x).chunk(3, dim=-1)
        return tuple(part.view(*x.shape[:2], self.n_head, -1).transpose(1, 2) for part in parts)


class Unflattened(Spelled):
    fused = False

    def heads(self, x):
        return tuple(layer(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))


class UnflattenedByDim(Spelled):
    fused = False

    def heads(self, x):
        layers = (self.q, self.k, self.v)
        return tuple(layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in layers)


class Reshaped(Spelled):
    fused, bias = False, False

    def heads(self, x):
        b, t, _ = x.shape
        layers = (self.q, self.k, self.v)
        return tuple(layer(x).reshape(b, t, -1, self.head_dim).transpose(1, 2) for layer in layers)


class ViewedInFull(Spelled):
    """Every number written out."""

    fused = False

    def heads(self, x):
        b, t, _ = x.shape
        layers = (self.q, self.k, self.v)
        return tuple(layer(x).view(b, t, self.n_head, self.head_dim).transpose(1, 2) for layer in layers)

    def joined(self, y, x):
        return y.transpose(1, 2).reshape(*x.shape[:2], self.n_head * self.head_dim)


class FromWidth(Spelled):
    """The width of the module, not of its input."""

    fused = False

    def heads(self, x):
        b, t, _ = x.shape
        shape = (b, t, self.n_head, self.n_embd // self.n_head)
        return tuple(layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))

    def joined(self, y, x):
        return y.transpose(1, 2).reshape(*x.shape[:2], self.n_embd)


class Einsum(Spelled):
    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.c_attn(x).view(b, t, 3, self.n_head, c // self.n_head).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / (c // self.n_head) ** 0.5
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        return self.c_proj(torch.einsum("bhqk,bkhd->bqhd", scores, v).reshape(b, t, c))


class GroupedByRepeat(Spelled):
    fused, kv_heads = False, 2

    def heads(self, x):
        b, t, c = x.shape
        q = self.q(x).view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        k, v = (layer(x).view(b, t, self.n_kv, self.head_dim).transpose(1, 2) for layer in (self.k, self.v))
        times = self.n_head // self.n_kv
        return q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


class GroupedByExpand(Spelled):
    fused, kv_heads = False, 2

    def heads(self, x):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.n_head, self.head_dim).transpose(1, 2)
        k, v = (layer(x).view(b, t, self.n_kv, 1, self.head_dim) for layer in (self.k, self.v))
        times = self.n_head // self.n_kv
        k, v = (part.expand(-1, -1, -1, times, -1).reshape(b, t, -1, self.head_dim).transpose(1, 2) for part in (k, v))
        return q, k, v


class MultiQuery(Spelled):
    fused, kv_heads = False, 1

    def heads(self, x):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.n_head, self.head_dim).transpose(1, 2)
        k, v = (layer(x).view(b, t, 1, self.head_dim).transpose(1, 2) for layer in (self.k, self.v))
        return q, k.expand_as(q), v.expand_as(q)


class FusedGrouped(Spelled):
    kv_heads = 2

    def heads(self, x):
        b, t, _ = x.shape
        sizes = [self.n_head * self.head_dim, self.n_kv * self.head_dim, self.n_kv * self.head_dim]
        q, k, v = (part.view(b, t, -1, self.head_dim).transpose(1, 2) for part in self.c_attn(x).split(sizes, dim=-1))
        times = self.n_head // self.n_kv
        return q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


KINDS = [kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, Spelled)]
SPELLINGS = {kind.__name__: kind for kind in KINDS if kind is not Spelled}


class SpelledBlock(Block):
    def __init__(self, name: str):
        super().__init__()
        self.attention = SPELLINGS[name]()


def spelled(name: str) -> User:
    torch.manual_seed(0)
    model = User(lambda: SpelledBlock(name))
    model.config.attention = name  # what equal models are known by
    return model
