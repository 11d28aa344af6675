"""Shapes of public models, by the names under which measurements are published.

Written from memory of the models' own config files and of arXiv 2104.04473 (table 1, GPT of Megatron-LM); not checked
against them again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from meshwright.simulation.job import Architecture, AttentionShape, BlockShape, ExpertsShape, Product


def decoder_block(
    hidden: int,
    heads: int,
    kv_heads: int,
    width: int,
    *,
    head_dim: int = 0,
    gated: bool = True,
    window: int = 0,
    experts: ExpertsShape | None = None,
    dropout: bool = False,
) -> BlockShape:
    """Return a block of attention and a feed-forward layer, the latter replaced by ``experts`` where given."""
    size = head_dim or hidden // heads
    products = [
        Product(hidden, (heads + 2 * kv_heads) * size, attends=True),
        Product(heads * size, hidden, "row", attends=True),
    ]
    if experts is None:
        products += [Product(hidden, width * (2 if gated else 1)), Product(width, hidden, "row")]
    return BlockShape(
        hidden,
        tuple(products),
        AttentionShape(heads, kv_heads, size, size, window),
        0 if experts else width,
        gated,
        experts,
        other=2 * hidden,
        dropout=dropout,
    )


def latent_block(
    hidden: int,
    heads: int,
    *,
    query_rank: int,
    key_rank: int,
    rotary: int,
    key_dim: int,
    value_dim: int,
    width: int,
    experts: ExpertsShape | None = None,
) -> BlockShape:
    """Return a block whose attention projects through low-rank latents (MLA, arXiv 2405.04434)."""
    products = [
        Product(hidden, query_rank, "none", attends=True),
        Product(query_rank, heads * (key_dim + rotary), attends=True),
        Product(hidden, key_rank + rotary, "none", attends=True),
        Product(key_rank, heads * (key_dim + value_dim), attends=True),
        Product(heads * value_dim, hidden, "row", attends=True),
    ]
    if experts is None:
        products += [Product(hidden, 2 * width), Product(width, hidden, "row")]
    attention = AttentionShape(heads, heads, key_dim + rotary, value_dim)
    return BlockShape(hidden, tuple(products), attention, 0 if experts else width, True, experts, other=2 * hidden)


def gated_experts(hidden: int, number: int, top_k: int, width: int, *, shared_width: int = 0) -> ExpertsShape:
    """Return SwiGLU experts, with shared ones of ``shared_width`` features together."""
    shared = (Product(hidden, 2 * shared_width), Product(shared_width, hidden, "row")) if shared_width else ()
    return ExpertsShape(number, top_k, width, (Product(hidden, 2 * width), Product(width, hidden, "row")), shared)


def dense(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    *,
    head_dim: int = 0,
    gated: bool = True,
    tied: bool = False,
    positions: int = 0,
    dropout: bool = False,
) -> Architecture:
    """Return a decoder of equal blocks."""
    block = decoder_block(hidden, heads, kv_heads, ffn, head_dim=head_dim, gated=gated, dropout=dropout)
    return Architecture("dense", (block,) * layers, vocab, tied, positions)


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, positions: int = 2048) -> Architecture:
    """Return a GPT with feed-forward layers four times as wide, learned positions and dropout."""
    return dense(
        layers, hidden, heads, heads, 4 * hidden, vocab, gated=False, tied=True, positions=positions, dropout=True
    )


def mixture(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    number: int,
    top_k: int,
    width: int,
    vocab: int,
    *,
    head_dim: int = 0,
    shared: int = 0,
    window: int = 0,
    biased: bool = False,
) -> Architecture:
    """Return a decoder whose blocks all have experts; with ``window``, every other block attends to so many keys."""
    experts = replace(gated_experts(hidden, number, top_k, width, shared_width=shared), biased=biased, clamped=biased)
    make = partial(decoder_block, hidden, heads, kv_heads, width, head_dim=head_dim, experts=experts)
    blocks = [make(window=window if n % 2 == 0 else 0) for n in range(layers)]
    return Architecture("mixture", tuple(blocks), vocab)


def latent(
    dense_layers: int,
    layers: int,
    heads: int,
    number: int,
    shared: int,
    vocab: int,
    *,
    hidden: int = 7168,
    query_rank: int = 1536,
    ffn: int = 18432,
    width: int = 2048,
    top_k: int = 8,
    extra: int = 0,
) -> Architecture:
    """Return a model of DeepSeek's kind: latent attention, some dense blocks, then mixtures; ``extra`` heads."""
    make: Callable[..., BlockShape] = partial(
        latent_block, hidden, heads, query_rank=query_rank, key_rank=512, rotary=64, key_dim=128, value_dim=128
    )
    experts = gated_experts(hidden, number, top_k, width, shared_width=shared * width)
    blocks = [make(width=ffn)] * dense_layers + [make(width=width, experts=experts)] * (layers - dense_layers + extra)
    return Architecture("latent", tuple(blocks), vocab, extra_heads=extra)


SHAPES: tuple[tuple[str, Callable[[], Architecture]], ...] = (
    (r"deepseek.?v3.*w/o", lambda: latent(3, 61, 128, 256, 1, 129280)),
    (r"deepseek.?(v3|r1)", lambda: latent(3, 61, 128, 256, 1, 129280, extra=1)),
    (r"kimi.?k2", lambda: latent(1, 61, 64, 384, 1, 163840)),
    (
        r"deepseek.?v2.?lite",
        lambda: latent(1, 27, 16, 64, 2, 102400, hidden=2048, query_rank=1, ffn=10944, width=1408, top_k=6),
    ),
    (r"deepseek.?v2", lambda: latent(1, 60, 128, 160, 2, 102400, hidden=5120, ffn=12288, width=1536, top_k=6)),
    (r"qwen3.?235b", lambda: mixture(94, 4096, 64, 4, 128, 8, 1536, 151936, head_dim=128)),
    (r"qwen3.?30b", lambda: mixture(48, 2048, 32, 4, 128, 8, 768, 151936, head_dim=128)),
    (r"gpt.?oss.?120b", lambda: mixture(36, 2880, 64, 8, 128, 4, 2880, 201088, head_dim=64, window=128, biased=True)),
    (r"gpt.?oss.?20b", lambda: mixture(24, 2880, 64, 8, 32, 4, 2880, 201088, head_dim=64, window=128, biased=True)),
    (r"mixtral.?8x22b", lambda: mixture(56, 6144, 48, 8, 8, 2, 16384, 32768)),
    (r"mixtral.?(8x7b)?", lambda: mixture(32, 4096, 32, 8, 8, 2, 14336, 32000)),
    (r"qwen(2|1\.5).?57b", lambda: mixture(28, 3584, 28, 4, 64, 8, 2560, 151936, shared=20480)),
    (r"olmoe", lambda: mixture(16, 2048, 16, 16, 64, 8, 1024, 50304)),
    (r"llama.?4.?scout", lambda: mixture(48, 5120, 40, 8, 16, 1, 8192, 202048, shared=8192)),
    (r"llama.?3\.?[123]?[ _-]?405b", lambda: dense(126, 16384, 128, 8, 53248, 128256)),
    (r"llama.?3\.?[123]?[ _-]?70b", lambda: dense(80, 8192, 64, 8, 28672, 128256)),
    (r"llama.?3\.?[123]?[ _-]?8b", lambda: dense(32, 4096, 32, 8, 14336, 128256)),
    (r"llama.?3\.?2[ _-]?3b", lambda: dense(28, 3072, 24, 8, 8192, 128256, head_dim=128, tied=True)),
    (r"llama.?3\.?2[ _-]?1b", lambda: dense(16, 2048, 32, 8, 8192, 128256, tied=True)),
    (r"(code)?llama.?2?[ _-]?(34|33)b", lambda: dense(48, 8192, 64, 8, 22016, 32000)),
    (r"llama.?1?[ _-]?65b", lambda: dense(80, 8192, 64, 64, 22016, 32000)),
    (r"llama.?2?[ _-]*70 ?b", lambda: dense(80, 8192, 64, 8, 28672, 32000)),
    (r"llama.?1?[ _-]?30b", lambda: dense(60, 6656, 52, 52, 17920, 32000)),
    (r"llama.?2?[ _-]*13 ?b", lambda: dense(40, 5120, 40, 40, 13824, 32000)),
    (r"llama.?2?[ _-]*7 ?b", lambda: dense(32, 4096, 32, 32, 11008, 32000)),
    (r"kempner moe e=8", lambda: mixture(24, 2048, 16, 4, 8, 2, 7168, 128256)),
    (r"kempner moe e=16", lambda: mixture(24, 2048, 16, 4, 16, 2, 7168, 128256)),
    (r"kempner moe e=64", lambda: mixture(24, 2048, 16, 4, 64, 2, 7168, 128256)),
    (r"tinyllama", lambda: dense(22, 2048, 32, 4, 5632, 32000)),
    (r"mistral", lambda: dense(32, 4096, 32, 8, 14336, 32000)),
    (r"qwen2?\.?5?[ _-]?72b", lambda: dense(80, 8192, 64, 8, 29568, 152064)),
    (r"qwen(2\.5|3)?[ _-]?32b", lambda: dense(64, 5120, 40, 8, 27648, 152064)),
    (r"qwen2\.5[ _-]?14b", lambda: dense(48, 5120, 40, 8, 13824, 152064)),
    (r"qwen3[ _-]?14b", lambda: dense(40, 5120, 40, 8, 17408, 151936)),
    (r"qwen3[ _-]?8b", lambda: dense(36, 4096, 32, 8, 12288, 151936)),
    (r"qwen2?(\.5)?[ _-]?7b", lambda: dense(28, 3584, 28, 4, 18944, 152064)),
    (r"nemotron.?4?.?340b", lambda: dense(96, 18432, 96, 8, 73728, 256000, gated=False)),
    (r"nemotron.?4?.?15b", lambda: dense(32, 6144, 48, 8, 24576, 256000, gated=False)),
    (r"nemotron.?3?.?8b", lambda: dense(32, 4096, 32, 32, 16384, 256000, gated=False)),
    (r"gemma.?2?.?9b", lambda: dense(42, 3584, 16, 8, 14336, 256000, head_dim=256, tied=True)),
    (r"gemma.?2?.?27b", lambda: dense(46, 4608, 32, 16, 36864, 256000, head_dim=128, tied=True)),
    (r"gemma.?7b", lambda: dense(28, 3072, 16, 16, 24576, 256000, head_dim=256, tied=True)),
    (r"gemma.?2b", lambda: dense(18, 2048, 8, 1, 16384, 256000, head_dim=256, tied=True)),
    (r"internlm.?20b", lambda: dense(60, 5120, 40, 40, 13824, 103168)),
    (r"internlm.?7b", lambda: dense(32, 4096, 32, 32, 11008, 103168)),
    (r"falcon.?40", lambda: dense(60, 8192, 128, 8, 32768, 65024, gated=False)),
    (r"falcon.?7", lambda: dense(32, 4544, 71, 1, 18176, 65024, gated=False, tied=True)),
    (r"falcon.?180", lambda: dense(80, 14848, 232, 8, 59392, 65024, gated=False)),
    (r"stablelm.*3", lambda: dense(16, 4096, 32, 32, 16384, 50688, gated=False)),
    (r"phi-?1\.5", lambda: dense(24, 2048, 32, 32, 8192, 51200, gated=False)),
    (r"phi.?2", lambda: dense(32, 2560, 32, 32, 10240, 51200, gated=False)),
    (r"phi.?3.?mini", lambda: dense(32, 3072, 32, 32, 8192, 32064)),
    (r"bloom", lambda: gpt(70, 14336, 112, 250880)),
    (r"opt.?175|opt175", lambda: gpt(96, 12288, 96, 50272)),
    (r"gpt.?2.?xl|gpt2.?1\.5b", lambda: gpt(48, 1600, 25, 50257, 1024)),
    (r"gpt.?1008b|gpt.?1t\b|\b1t\b", lambda: gpt(128, 25600, 160)),
    (r"gpt.?530b|\b53[05]b", lambda: gpt(105, 20480, 128)),
    (r"gpt.?310b", lambda: gpt(96, 16384, 128)),
    (r"gpt.?3?.?175b|\b175b", lambda: gpt(96, 12288, 96)),
    (r"gpt.?145b", lambda: gpt(80, 12288, 96)),
    (r"gpt.?116b", lambda: gpt(144, 8192, 64, positions=1024)),
    (r"gpt.?7[68]b", lambda: gpt(96, 8192, 64, positions=1024)),
    (r"gpt.?65b", lambda: gpt(80, 8192, 64, positions=1024)),
    (r"gpt.?52b", lambda: gpt(64, 8192, 64, positions=1024)),
    (r"gpt.?39(\.1)?b", lambda: gpt(48, 8192, 64, positions=1024)),
    (r"gpt.?24b", lambda: gpt(30, 8192, 64, positions=1024)),
    (r"gpt.?22b", lambda: gpt(48, 6144, 64)),
    (r"gpt.?20b", lambda: gpt(44, 6144, 48)),
    (r"gpt.?18(\.4)?b", lambda: gpt(40, 6144, 48, positions=1024)),
    (r"gpt.?7\.5b", lambda: gpt(36, 4096, 32, positions=1024)),
    (r"gpt.?3\.6b", lambda: gpt(30, 3072, 32)),
    (r"gpt.?5b", lambda: gpt(24, 4096, 32)),
    (r"gpt.?1\.7b", lambda: gpt(24, 2304, 24)),
)


@cache
def public_shape(name: str) -> Architecture | None:
    """Return the shape of the first public model whose pattern a name holds; None if none does."""
    for pattern, make in SHAPES:
        if re.search(pattern, name.lower()):
            return make()
    return None
