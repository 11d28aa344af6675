"""Attention as people write it by hand is cut over tensor ranks, and proven; or named with what was found."""

from __future__ import annotations

import importlib
import re
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from support.attentions import SPELLINGS, Spelled, spelled
from support.users import DIM, HEADS, FeedForward, User
from torch import nn

from meshwright import Layout, parallelize, plan
from meshwright.distributed.tensor import parallel
from meshwright.introspection.facts import model_facts

parallelize_module = importlib.import_module("meshwright.distributed.parallelize")


class Literal(Spelled):
    """The number of heads stands in the code."""

    fused = False

    def heads(self, x):
        b, t, _ = x.shape
        return tuple(layer(x).view(b, t, 4, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))


def literal():
    model = spelled("NanoGPT")
    model.config.attention = "Literal"
    for layer in model.layers:
        layer.attention = Literal()
    return model


def test_what_is_left_whole_comes_first_with_its_line_and_the_change(caplog):
    note = plan(literal(), Layout(dp_shard=1, tp=2)).notes[0]
    assert "layers.*.attention: its heads could not be computed apart" in note
    assert re.search(r"at test_attention_spellings.py:\d+, 'return tuple\(layer\(x\).view\(b, t, 4, 4\)", note)
    assert "view(b, t, -1, head_dim)" in note


def warned():
    with patch.object(parallelize_module.log, "warning") as warning:
        parallelize(literal(), Layout(dp_shard=1, tp=2), audit=False)
    return [str(call.args) for call in warning.call_args_list]


def test_it_is_said_at_the_start_by_one_rank(spmd):
    first, second = spmd(2, warned)
    assert len(first) == 1 and "layers.*.attention" in first[0] and not second


@pytest.mark.parametrize("is_cut_along_sequence", [True, False])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_cut_and_proven(name, is_cut_along_sequence):
    facts = model_facts(spelled(name).double())
    made = plan(facts, Layout(dp_shard=1, tp=2), techniques={"sequence_parallel": is_cut_along_sequence}).tensor
    assert made is not None and made.sequence_parallel == is_cut_along_sequence
    assert [planned.region.kind for kind in made.kinds for planned in kind.regions] == ["attention", "feed_forward"]
    parallel.prove(facts, made)


# --- attention that stands in the block's own forward


class Inline(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_head = HEADS
        self.norm, self.c_attn, self.c_proj = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.norm_2, self.feed_forward = nn.LayerNorm(DIM), FeedForward()

    def heads(self, x, b, t, c):
        return self.c_attn(x).view(b, t, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        q, k, v = self.heads(self.norm(x), *x.shape)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm_2(x))


class InlineByWidth(Inline):
    def heads(self, x, b, t, c):
        return (part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for part in self.c_attn(x).split(c, 2))


def inline(kind):
    torch.manual_seed(0)
    model = User(kind)
    model.config.attention = kind.__name__
    return model_facts(model.double())


class InlineCountedTwice(Inline):
    """The number of heads that a rank holds would be wrong for the other branch."""

    def forward(self, x):
        return super().forward(x) + x / self.n_head


def test_what_a_block_counts_itself_is_cut():
    facts = inline(Inline)
    found = plan(facts, Layout(dp_shard=1, tp=2))
    assert [p.region.kind for kind in found.tensor.kinds for p in kind.regions] == ["attention", "feed_forward"]
    parallel.prove(facts, found.tensor)


@pytest.mark.parametrize("kind", [InlineByWidth, InlineCountedTwice])
def test_what_a_block_counts_for_more_than_its_attention_is_left_whole_with_its_line(kind):
    facts = inline(kind)
    found = plan(facts, Layout(dp_shard=1, tp=2))
    assert [planned.region.kind for kind in found.tensor.kinds for planned in kind.regions] == ["feed_forward"]
    assert found.notes[0].startswith("layers.*: its heads could not be computed apart")
    assert kind is InlineCountedTwice or re.search(r"test_attention_spellings.py:\d+, '.*self.n_head", found.notes[0])
    parallel.prove(facts, found.tensor)
