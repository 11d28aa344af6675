"""Routing is compared first: what rounding sends elsewhere is no difference, and a wrong choice is one."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch
from support import families
from support.routed import VOCABULARY, called_twice, capped_near_ties, clear_choices, near_ties, saturated

from meshwright.comparison.sketch import TokensOfRank
from meshwright.models.layers import Router
from meshwright.planning.layout import Layout
from meshwright.verification import verify as verifying
from meshwright.verification.outcome import candidate
from meshwright.verification.problem import RandomBatches
from meshwright.verification.routes import Replay, flips, noting, numbers_of_experts, put_together
from meshwright.verification.verify import verify

BATCHES = RandomBatches(VOCABULARY, rows=8, seq_len=9)
LAYOUTS = [Layout(dp_shard=2, tp=2, ep=4), Layout(pp=2, dp_shard=1, tp=2, ep=2)]


@pytest.mark.all
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tokens_that_rounding_sends_elsewhere_make_no_difference(pool, layout):
    report = verify(near_ties, layout, BATCHES, steps=2, dtypes=("float32",), max_norm=None, pool=pool)
    assert report, report
    said = [note for note in report.comparisons[0].notes if note.startswith("rounding alone sent tokens")]
    assert len(said) == 1 and "of layers.0.feed_forward.experts in step 1" in said[0]


@pytest.mark.kills("verify", mutant="routes are not computed again")
def test_without_computing_again_they_would(pool, monkeypatch):
    monkeypatch.setattr(verifying, "_rerouted", lambda *_: (None, ""))
    assert not verify(near_ties, LAYOUTS[0], BATCHES, steps=2, dtypes=("float32",), max_norm=None, pool=pool)


CHOOSE = Router._choose


def without_the_best(self, scores):
    return CHOOSE(self, scores.masked_fill(scores == scores.amax(-1, keepdim=True), -1.0))


def the_best_twice(self, scores):
    index = CHOOSE(self, scores)
    return torch.cat([index[..., :-1], index[..., :1]], dim=-1)


def choosing(wrongly, *args):
    with patch.object(Router, "_choose", wrongly):
        return candidate(*args)


@pytest.mark.all
@pytest.mark.parametrize("wrongly", [without_the_best, the_best_twice], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("model", [clear_choices, saturated], ids=lambda model: model.__name__)
def test_a_wrong_choice_is_a_difference(pool, monkeypatch, wrongly, model):
    monkeypatch.setattr(verifying, "candidate", partial(choosing, wrongly))
    report = verify(model, Layout(dp_shard=2, ep=2), BATCHES, steps=1, dtypes=("float32",), pool=pool)
    (comparison,) = report.comparisons
    assert not report and any(
        "tokens went to other experts than in one process, worse by" in note for note in comparison.notes
    )
    assert comparison.first is not None and comparison.first.place.startswith("the output of layers.0.feed_forward")


@pytest.mark.all
@pytest.mark.parametrize("model", [capped_near_ties, called_twice], ids=lambda model: model.__name__)
def test_what_cannot_be_replayed_is_compared_as_it_is(pool, model):
    """Choices that a capacity dropped, and stacks that a forward meets twice."""
    batches = RandomBatches(VOCABULARY, rows=8, seq_len=9, keys=())
    report = verify(model, Layout(dp_shard=2), batches, steps=1, dtypes=("float64",), pool=pool)
    assert report, report


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "qwen3_moe", *sorted(set(families.SPARSE) - {"phimoe"})])
def test_a_family_takes_the_routing_that_it_is_given(name):
    """Of another model of its shape: so most tokens would have gone elsewhere."""
    from transformers import AutoModelForCausalLM

    def made(seed: int):
        torch.manual_seed(seed)
        config = families.config_of(name, use_cache=False)
        with torch.device("cpu"):
            model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter.data, std=0.5)
        return model.eval()

    tokens = torch.randint(0, families.VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(0))

    def routes(model, replay=None):
        with noting([model]) as noted, torch.no_grad():
            for first in (0, 2):
                with replay.at(first, 2) if replay else torch.no_grad():
                    model(tokens[first : first + 2])
        return put_together([((0, 1), TokensOfRank(), noted)], 4, 7, numbers_of_experts([model]))

    model, other = made(1), routes(made(2))
    own = routes(model)
    assert own.keys() == other.keys() and len(own) >= 1 and flips(own, other)
    replay = Replay(model, other)
    assert flips(routes(model, replay), other) == {}
    assert max(replay.lacks.values()) > 0


def test_the_ranks_rows_and_tokens_are_put_together():
    whole = torch.arange(4 * 5 * 2, dtype=torch.int32).view(4, 5, 2)
    filled = torch.cat([whole, torch.full((4, 1, 2), -1, dtype=torch.int32)], dim=1)  # five tokens for two ranks
    parts = [
        (
            (rank, 2),
            TokensOfRank.run(part, 2, 5),
            {"experts": filled[2 * rank : 2 * rank + 2, 3 * part : 3 * part + 3].flatten(0, 1)},
        )
        for part in (1, 0)
        for rank in (1, 0)
    ]
    nowhere = {"experts": 99}
    assert torch.equal(put_together(parts, 4, 5, nowhere)["experts"], whole)
    alike = [
        ((rank, 2), TokensOfRank.run(part, 2, 5), {"experts": whole[2 * rank : 2 * rank + 2].flatten(0, 1)})
        for part in (0, 1)
        for rank in (0, 1)
    ]
    assert torch.equal(put_together(alike, 4, 5, nowhere)["experts"], whole)
    assert put_together(parts[:2], 4, 5, nowhere) == {}, "of some tokens nothing was said"
    assert put_together(parts, 4, 5, {"experts": 3}) == {}, "one of two choices came to nothing"
    doubled = [(place, part, {"experts": torch.cat([own["experts"]] * 2)}) for place, part, own in alike]
    assert put_together(doubled, 4, 5, nowhere) == {}, "every token was there twice"
    swapped = whole.clone()
    swapped[0, 0] = swapped[0, 0].flip(0)
    assert flips({"experts": swapped}, {"experts": whole}) == {}
    swapped[1, 2, 0] = 0
    assert flips({"experts": swapped}, {"experts": whole}) == {"experts": 1}
