"""Models whose code beside the blocks depends on a condition, cut into stages: equal to one process, or refused before
the start with the line of the condition.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from support.conditions import (
    CARRIED,
    RARE,
    Among,
    AmongWithoutReading,
    ByAttribute,
    ReadsEarlier,
    ReadsEarlierWhileTraining,
)

from meshwright import Layout, UnsupportedError, parallelize, plan
from meshwright.distributed.pipeline import split
from meshwright.introspection import stages
from meshwright.introspection.facts import model_facts

PP2 = Layout(pp=2, dp_shard=1)
EXACT = 1e-12


def named(kind):
    return kind.__name__


def made(kind):
    torch.manual_seed(0)
    model = kind().double()
    model.doubles = issubclass(kind, ByAttribute)
    return model


def batches(kind):
    """Rows without, with and full of the rare token; a mask of padding and positions where the forward takes them."""
    tokens = torch.randint(4, 48, (4, 9), generator=torch.Generator().manual_seed(1))
    mixed = torch.where(torch.rand(tokens.shape, generator=torch.Generator().manual_seed(2)) < 0.2, RARE, tokens)
    mixed[:2] = tokens[:2]  # microbatches differ
    for ids in (tokens, mixed, torch.full_like(tokens, RARE)):
        batch = {"tokens": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}
        if kind.__name__ == "ByMask":
            batch["attention_mask"] = (torch.arange(8) < torch.tensor([[8], [8], [5], [7]])).long()
        if kind.__name__ == "ByPositions":
            batch["positions"] = (torch.arange(8) % 5).expand(4, 8).clone()
        yield batch


def errors(kind):
    """The relative errors of the loss, and of all gradients together on this rank, for each batch."""
    found = []
    for batch in batches(kind):
        plain = made(kind)
        taken = {key: value for key, value in batch.items() if key != "labels"}
        expected = F.cross_entropy(plain(**taken).flatten(0, 1), batch["labels"].flatten())
        expected.backward()
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        precision = {"master": "float64", "compute": "float64", "reduce": "float64"}
        model = parallelize(made(kind), PP2, techniques={"precision": precision})
        loss = float(model.forward_backward(dict(batch)))
        own = dict(model.named_parameters())
        off = sum(float((p.grad - gradients[name]).norm()) for name, p in own.items())
        found += [abs(loss - float(expected)) / float(expected), off / sum(float(p.grad.norm()) for p in own.values())]
    return found


@pytest.mark.parametrize("kind", CARRIED, ids=named)
def test_a_condition_beside_the_blocks_is_carried_through_stages(kind, spmd):
    assert max(max(of_rank) for of_rank in spmd(2, errors, kind)) <= EXACT


def refusal(kind):
    facts = model_facts(made(kind))
    with pytest.raises(UnsupportedError) as caught:
        split.prove(facts, plan(facts, PP2).pipeline, 1)
    return str(caught.value)


def test_a_branch_that_reads_an_earlier_tensor_is_refused_with_its_line():
    words = refusal(ReadsEarlier)
    assert "reads a tensor made before the first block, first at conditions.py:" in words
    assert "'x = torch.where((tokens == RARE)[..., None], x + self.kept, x)'" in words


def test_a_branch_of_training_that_reads_an_earlier_tensor_is_refused():
    words = refusal(ReadsEarlierWhileTraining)
    assert "in training mode, on rows of many ids, the loss is wrong" in words
    assert "'return x + self.kept if self.training else x'" in words


@pytest.mark.parametrize("kind", [Among, AmongWithoutReading], ids=named)
def test_code_between_blocks_that_concerns_rare_tokens_is_refused(kind):
    """The stages before and behind a cut would both run that code."""
    assert "Set layout.pp = 1" in refusal(kind)


@pytest.mark.kills("stages", mutant="conditions are played as they are")
def test_a_cut_that_is_rehearsed_without_its_branches_is_caught():
    def first_alone(sample):
        return [stages.Branch(sample.inputs[0])]

    with patch.object(stages, "branches_of", first_alone), patch.object(split, "branches_of", first_alone):
        for kind in (ReadsEarlier, ReadsEarlierWhileTraining):
            with pytest.raises(pytest.fail.Exception):
                refusal(kind)
        facts = model_facts(made(CARRIED[0]))
        assert not plan(facts, PP2).pipeline.counts_tokens_behind, "what crashes without the branches"
