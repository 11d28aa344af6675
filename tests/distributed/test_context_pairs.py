"""Attention that is given masks and biases of pairs of tokens, with rows cut over ranks: equal to one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.cut_rows import EXACT, FP64, WAYS, batch, errors
from support.pairs import (
    CARRIED,
    Annealed,
    Beginning,
    Distances,
    Documents,
    Learnt,
    OfKinds,
    OfTokens,
    TriangleInFloat32,
    WithPadding,
    paired,
)
from support.ranks import ranks, refusal
from torch.distributed.tensor import DTensor

from meshwright import Layout, parallelize, plan
from meshwright.core.errors import UnsupportedError
from meshwright.distributed.context import rows as pairs
from meshwright.distributed.context.proof import prove
from meshwright.distributed.context.rows import cut_rows
from meshwright.introspection.facts import model_facts
from meshwright.introspection.mixing.whole import copy_without_values

pytestmark = pytest.mark.all


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CARRIED, ids=lambda kind: kind.__name__)
def test_pairs_of_whole_rows(way, kind, spmd):
    world, sizes, techniques = WAYS[way]
    for found in spmd(world, errors, partial(paired, kind), sizes, techniques, 19):
        assert {n: e for n, e in found.items() if not e <= EXACT} == {}


def documents(rows, length):
    ends = torch.tensor([[3, 11], [7, 8], [1, 18], [5, 12]])[:rows]
    found = (torch.arange(length)[None, :, None] >= ends[:, None, :]).sum(-1)
    places = torch.arange(length) - torch.stack([torch.searchsorted(row, row) for row in found])
    return {"document_ids": found, "positions": places}


def padding(rows, length):
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[1, -4:] = mask[3, -1:] = 0
    return {"attention_mask": mask}


@pytest.mark.parametrize(("kind", "more"), [(Documents, documents), (WithPadding, padding)])
def test_pairs_that_follow_from_the_batch(kind, more, spmd):
    """The padding's labels count here as all others: what pads sees is the model's own affair."""
    for way in ("cp", "dp_shard and cp"):
        world, sizes, techniques = WAYS[way]
        for found in spmd(world, errors, partial(paired, kind), sizes, techniques, 19, more(4, 19)):
            assert {n: e for n, e in found.items() if not e <= EXACT} == {}


@ranks(2)
def test_each_step_has_its_own_pairs():
    other = padding(4, 19)["attention_mask"].flip(0)
    kinds = [(19, None), (19, padding(4, 19)["attention_mask"]), (19, other), (12, None), (19, None)]
    model = parallelize(paired(WithPadding), Layout(dp_shard=1, cp=2))
    reference = paired(WithPadding)
    found = []
    for length, mask in kinds:
        given = batch(length) | ({} if mask is None else {"attention_mask": mask})
        logits = reference(given["tokens"], mask)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), given["labels"].flatten())
        found.append(float((model.forward_backward(given).loss - expected).abs()))
    assert max(found) < 1e-6 and len(found) == 5


@ranks(2)
def test_attributes_and_buffers_may_change_between_steps():
    model, reference = paired(Annealed), paired(Annealed)
    laid = parallelize(model, Layout(dp_shard=1, cp=2), techniques=FP64)
    found = []
    for step in range(4):
        for each in (model, reference):
            each.slope, each.config.width = 0.1 * step, 4 + step
            each.factor.fill_(1.0 + step // 2)
        given = batch(19)
        expected = torch.nn.functional.cross_entropy(
            reference(given["tokens"]).flatten(0, 1), given["labels"].flatten()
        )
        found.append(float((laid.forward_backward(given).loss - expected).abs()))
    assert max(found) <= EXACT


@ranks(4)
def test_microbatches_of_a_pipeline_have_their_own_pairs():
    model = parallelize(
        paired(WithPadding),
        Layout(dp_shard=1, cp=2, pp=2),
        techniques=FP64 | {"activation_checkpointing": "full"},
        microbatch_rows=1,
    )
    reference, given = paired(WithPadding), batch(19) | padding(4, 19)
    logits = reference(given["tokens"], given["attention_mask"])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), given["labels"].flatten())
    loss.backward()
    expected = dict(reference.named_parameters())
    found = [float((model.forward_backward(given).loss - loss).abs())]
    for name, p in model.named_parameters():
        wanted = expected[name].grad
        whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        found.append(float((whole - wanted).norm() / wanted.norm()))
    assert max(found) <= EXACT


@pytest.mark.first
def test_draws_of_the_copy_are_none_of_the_runs(monkeypatch):
    model = paired(Distances)
    of = pairs.PairArguments(copy_without_values(model), plan(model, Layout(dp_shard=1, cp=2)).context)
    monkeypatch.setattr(pairs, "whole_arguments", lambda *given: {"drawn": torch.rand(3)})
    before = torch.get_rng_state()
    of.enter(model, cut_rows(batch(8), 2, 0), torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)


def test_heads_are_shared_out_where_they_were_measured_apart():
    for kind in (Beginning, Distances):
        made = plan(paired(kind), Layout(dp_shard=1, cp=2)).context
        assert (
            made is not None and {m.kind for m in made.mixers} == {"heads"} and all(m.mixer.pairs for m in made.mixers)
        )


@pytest.mark.first
def test_a_mask_in_float32_does_not_make_a_rehearsal_wrong():
    """torch's attention reads such a mask wrongly beside queries in float64, in which small copies are rehearsed."""
    facts = model_facts(TriangleInFloat32())
    prove(facts, plan(facts, Layout(dp_shard=1, cp=2)).context)


@ranks(2)
def test_other_tensors_that_pairs_may_follow_from_are_refused():
    model = parallelize(paired(OfKinds), Layout(dp_shard=1, cp=2))
    found = refusal(
        lambda: model.forward_backward(batch(12) | {"kinds": torch.arange(12).expand(4, -1) % 2}), UnsupportedError
    )
    assert "made of positions, documents and padding alone, while the batch has 'kinds' too" in found


REFUSED = {
    Learnt: "mixes or counts tokens by a way that is not intercepted|has no other module in which tokens meet",
    OfTokens: "mixes or counts tokens by a way that is not intercepted|has no other module in which tokens meet",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_pairs_that_follow_from_weights_or_tokens_are_refused(kind):
    with pytest.raises(UnsupportedError, match=REFUSED[kind]):
        facts = model_facts(paired(kind))
        prove(facts, plan(facts, Layout(dp_shard=1, cp=2)).context)


def own_pairs(monkeypatch):
    monkeypatch.setattr(pairs.PairArguments, "given", lambda self, path, key, instead: instead)


@pytest.mark.kills("context", mutant="broken")
@pytest.mark.parametrize("broken", [own_pairs], ids=lambda broken: broken.__name__)
def test_the_rehearsal_finds(broken, monkeypatch):
    broken(monkeypatch)
    facts = model_facts(paired(Distances))
    with pytest.raises(UnsupportedError, match="the forward or backward fails|is wrong"):
        prove(facts, plan(facts, Layout(dp_shard=1, cp=2)).context)
