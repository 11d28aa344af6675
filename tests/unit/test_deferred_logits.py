"""What a model does to its logits, done to pieces of them: equal to the whole, or an obstacle with the line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.tails import CARRIED, OVER_THE_VOCABULARY, REFUSED, ROWS, SEQ, Tailed
from support.users import VOCABULARY

from meshwright import UnsupportedError
from meshwright.introspection.deferred_logits import begin
from meshwright.introspection.logits_tape import within

EXACT = 1e-12
TOKENS = ROWS * SEQ


def tailed(name):
    torch.manual_seed(0)
    return Tailed(name).double(), torch.randn(ROWS, SEQ, VOCABULARY, dtype=torch.float64)


def whole(name):
    model, base = tailed(name)
    base.requires_grad_()
    logits = model.treatment(model, base.clone())
    logits.square().mean().backward()
    return logits.detach(), base.grad


def recorded(name, *, cut):
    model, base = tailed(name)
    tape, begun = begin(base, VOCABULARY)
    return tape, tape.finish(model.treatment(model, begun), cut=cut), base


@pytest.mark.parametrize("name", [*CARRIED, *OVER_THE_VOCABULARY])
def test_some_tokens_at_a_time(name):
    expected, slope = whole(name)
    tape, logits, base = recorded(name, cut=False)
    rows = base.flatten(0, 1).requires_grad_()
    pieces = [tape.replay(logits, rows[at : at + 7].clone(), start=at) for at in range(0, TOKENS, 7)]
    found = torch.cat(pieces).view(expected.shape)
    assert found.dtype == expected.dtype and (found - expected).abs().max() <= EXACT * expected.abs().max()
    (found.square().mean()).backward()
    assert (rows.grad.view(slope.shape) - slope).norm() <= EXACT * slope.norm()


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", CARRIED)
def test_some_ids_at_a_time(name, ranks):
    expected, _ = whole(name)
    tape, logits, base = recorded(name, cut=True)
    found, share = [], -(-VOCABULARY // ranks)
    for first in range(0, VOCABULARY, share):
        piece = base.flatten(0, 1)[:, first : first + share].clone()
        found.append(tape.replay(logits, piece, first=first))
        assert found[-1].shape[1] == len(within(logits.columns, range(first, min(first + share, VOCABULARY))))
    assert (torch.cat(found, 1).view(expected.shape) - expected).abs().max() <= EXACT * expected.abs().max()


@pytest.mark.parametrize("name", OVER_THE_VOCABULARY)
def test_ids_that_are_needed_together_are_named_with_the_line(name):
    with pytest.raises(UnsupportedError, match=r"\w+ over the vocabulary at tails.py:\d+, '"):
        recorded(name, cut=True)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_done_to_all_tokens_is_named_with_the_line(name):
    with pytest.raises(UnsupportedError, match=r"at tails.py:\d+, '|Doubled, a function with a derivative of its own"):
        recorded(name, cut=False)


def test_nothing_is_carried_behind_the_forward():
    tape, begun = begin(torch.zeros(2, 3, 5), 5, "Do otherwise.")
    logits = tape.finish(begun * 2)
    with pytest.raises(UnsupportedError, match=r"used behind the model's forward at .*\. Do otherwise\."):
        logits + 1


def test_what_the_result_does_not_need_is_not_computed():
    tape, begun = begin(torch.zeros(1, 2, 5), 5)
    begun.logsumexp(-1), begun.mean()
    logits = tape.finish(begun * 2, cut=True)
    assert tape.shown(logits) == ("mul(2)",)
    assert torch.equal(tape.replay(logits, torch.ones(2, 5)), torch.full((2, 5), 2.0))


def test_the_gradient_of_a_mask_that_is_not_known_is_that_of_torch():
    x = torch.randn(3, 5, requires_grad=True)
    tape, begun = begin(x, 5)
    y = begun.clone()
    y[y > 0] = 1.0
    found = tape.replay(tape.finish(y), x.clone())
    expected = torch.where(x > 0, 1.0, x)
    for value in (found, expected):
        (slope,) = torch.autograd.grad(F.softplus(value).sum(), x)
        torch.testing.assert_close(slope, torch.where(x > 0, 0.0, x.sigmoid()).detach())
