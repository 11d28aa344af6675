"""Rows cut over ranks: random streams, masks that depend on tokens, and uneven labels."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from support.mixing import Model, causal

from meshwright import Layout, UnsupportedError, parallelize
from meshwright.distributed.context import context_parallel
from meshwright.introspection.mixing.measure import LENGTHS, batches

ROWS, LENGTH = 2, 24
EXACT = {"precision": {"master": "float64"}}
RARE = 6
"""A token that is in none of the rows on which masks are measured and rehearsed."""


def tokens_of() -> torch.Tensor:
    return torch.randint(0, 61, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


class Drops(Model):
    """Keeps what dropout leaves of ones."""

    def __init__(self):
        super().__init__(causal)
        self.left = []

    def forward(self, tokens, positions=None, document_ids=None):
        x = super().forward(tokens, positions, document_ids)
        left = F.dropout(torch.ones_like(x), 0.5, self.training)
        if self.training:
            self.left.append(left.detach())
        return x * left


def left_by_dropout(mutant: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What dropout leaves in two steps, and a number that all ranks draw behind them."""
    with patch.object(context_parallel, "separate_streams", lambda model, rank: None) if mutant else nullcontext():
        torch.manual_seed(0)
        model = parallelize(Drops(), Layout(dp_shard=1, cp=2))
    tokens = tokens_of()
    for _ in range(2):
        model.forward_backward({"tokens": tokens, "labels": tokens})
    return model.parts[0].left[-2:], torch.rand(3)


@pytest.mark.all
def test_ranks_draw_other_numbers_for_their_tokens_and_the_same_behind_them(spmd):
    (mine, behind), (others, too) = spmd(2, left_by_dropout, False)
    assert torch.equal(behind, too)
    drawn = [*mine, *others]
    for number, one in enumerate(drawn):
        for other in drawn[number + 1 :]:
            assert 0.3 < (one == other).double().mean() < 0.7


@pytest.mark.kills("context", "fault")
@pytest.mark.parametrize("fault", ["one_stream_for_all_ranks"])
def test_ranks_that_draw_alike_are_seen(spmd, fault):
    (mine, _), (others, _) = spmd(2, left_by_dropout, True)
    assert torch.equal(mine[0], others[0])


class Documents(Model):
    """Begins a document at every rare token, which the batch does not say."""

    def forward(self, tokens, positions=None, document_ids=None):
        place = torch.arange(tokens.shape[1])
        number = (tokens == RARE).cumsum(1)
        mask = (place[:, None] >= place) & (number[:, :, None] == number[:, None])
        self.attentions[0].attend = self.attentions[1].attend = lambda q, k, v, _: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask[:, None]
        )
        return super().forward(tokens, positions, document_ids)


def documents_in_a_later_batch() -> list[str]:
    torch.manual_seed(0)
    model = parallelize(Documents(causal), Layout(dp_shard=1, cp=2))
    said = []
    for first in (5, RARE):
        tokens = tokens_of().masked_fill(tokens_of() == RARE, 1)
        tokens[:, ::7] = first
        try:
            model.forward_backward({"tokens": tokens, "labels": tokens})
            said.append("")
        except UnsupportedError as error:
            said.append(str(error))
    return said


def test_a_mask_that_depends_on_tokens_is_refused_once_it_is_another(spmd):
    measured = [batch["tokens"] for lengths in (LENGTHS, LENGTHS[1:]) for batch in batches(Model(causal), lengths)]
    assert not any((tokens == RARE).any() for tokens in measured)
    for first, later in spmd(2, documents_in_a_later_batch):
        assert first == "" and "masks 12 tokens by another rule than the one that was measured (causal)" in later


def loss_and_gradients(cp: int, ignored: slice) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = parallelize(Model(causal).double(), Layout(dp_shard=1, cp=cp), techniques=EXACT)
    tokens = tokens_of()
    labels = tokens.roll(-1, 1)
    labels[:, ignored] = -100
    loss = model.forward_backward({"tokens": tokens, "labels": labels}).loss
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss), {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in found.items()}


@pytest.mark.parametrize("ignored", [slice(6, 18), slice(0, 23)], ids=["all of one rank", "all but one"])
def test_labels_may_be_ignored_on_a_whole_rank(spmd, ignored):
    """The second of two ranks has the places 6 to 17."""
    (loss, expected), *_ = spmd(1, loss_and_gradients, 1, ignored)
    for found, gradients in spmd(2, loss_and_gradients, 2, ignored):
        assert abs(found - loss) < 1e-12 * loss and gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.allclose(gradients[name], gradient, rtol=1e-9, atol=1e-13), name
