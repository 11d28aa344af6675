"""Hints come before measurement: what they name is taken, what they name wrongly is refused, and no copy of a model
loses them.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
from support.hinted import REMIXED, UNROLLED, Remixed, Unrolled

from meshwright import ConfigError, Hints, Layout, UnsupportedError, plan
from meshwright.introspection.blocks import built_with, hints_of
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module

TP = Layout(dp_shard=1, tp=2)


def test_named_blocks_are_the_blocks():
    assert model_facts(Unrolled()).blocks == ()
    module = as_module(Unrolled, hints=UNROLLED)
    assert model_facts(module).blocks == tuple(f"layer_{number}" for number in range(4))
    assert hints_of(copy.deepcopy(module)) == UNROLLED


def test_what_was_measured_before_hints_came_is_measured_again():
    module = Unrolled()
    before = model_facts(module).measurements
    assert model_facts(module).measurements is before
    assert model_facts(as_module(module, hints=UNROLLED)).measurements is not before


@pytest.mark.parametrize("residual", ["stream", 1])
def test_the_residual_stream_is_named_or_counted(residual):
    facts = model_facts(as_module(Remixed, hints=Hints(residual=residual)))
    assert facts.measurements.structure(1).structure.kinds[0].hidden == 1
    other = model_facts(as_module(Remixed))
    assert other.measurements.structure(1).structure.kinds[0].hidden == 0


@pytest.mark.first
@pytest.mark.parametrize("layout", [TP, Layout(dp_shard=1, pp=2)], ids=str)
def test_without_hints_both_models_are_refused(layout):
    with pytest.raises(ConfigError, match=r"none was found in Unrolled: .* hints=meshwright\.Hints\(blocks="):
        plan(Unrolled, layout)


def test_modules_that_stay_whole():
    made = plan(as_module(Unrolled, hints=Hints(blocks=("layer_*",), whole=("layer_*.attention", "head"))), TP)
    assert made.tensor is not None and [r.region.kind for r in made.tensor.kinds[0].regions] == ["feed_forward"]
    assert made.tensor.head == "" and made.tensor.embedding == "embedding"
    assert any("layer_0.attention stays whole: hints say so" in note for note in made.notes)


def test_regions_are_a_tensor_plan_that_the_users_own_replaces():
    regions = {"layer_*.feed_forward.up": "colwise", "layer_*.feed_forward.down": "rowwise"}
    module = as_module(Unrolled, hints=Hints(blocks=("layer_*",), regions=regions))
    attention = [
        {"pattern": f"layer_*.attention.{name}", "style": "rowwise" if name == "o" else "colwise"} for name in "qkvo"
    ]
    hinted, given = plan(module, TP).tensor, plan(module, TP, techniques={"tensor_plan": attention}).tensor
    assert (
        hinted is not None
        and hinted.source == "given"
        and [r.region.kind for r in hinted.kinds[0].regions] == ["feed_forward"]
    )
    assert given is not None and [r.region.kind for r in given.kinds[0].regions] == ["attention"]


WRONG = {
    "hints: blocks: 'layers.*' names no module of this Unrolled. Did you mean 'layer_": {"blocks": ("layers.*",)},
    "hints: whole: 'attention' names no module of this Unrolled": {"blocks": ("layer_*",), "whole": ("attention",)},
    "hints: blocks: layer_0.attention lies inside another block": {"blocks": ("layer_*", "layer_*.attention")},
    "hints: blocks = 'layer_*': it is a tuple of patterns": {"blocks": "layer_*"},
}


@pytest.mark.parametrize("words", WRONG)
def test_hints_that_name_nothing_are_refused(words):
    with pytest.raises(ConfigError) as caught:
        as_module(Unrolled, hints=Hints(**WRONG[words]))
    assert str(caught.value).startswith(words)


def test_an_argument_that_blocks_do_not_take_is_refused():
    with pytest.raises(
        ConfigError, match=r"^hints: residual = 'x': the blocks \(Conditioned\) .* their forward takes places, stream"
    ):
        plan(Remixed, Layout(dp_shard=1, pp=2), hints=Hints(residual="x"))


def test_wrong_hints_do_not_pass_the_rehearsal():
    from meshwright.distributed.pipeline.split import prove

    facts = model_facts(as_module(Remixed, hints=Hints(residual="places")))
    made = plan(facts, Layout(dp_shard=1, pp=2)).pipeline
    assert made is not None
    with pytest.raises(UnsupportedError, match="was rehearsed on a small copy of it, and"):
        prove(facts, made, 1)


def test_a_hinted_function_travels():
    made = pickle.loads(pickle.dumps(partial(built_with, REMIXED, partial(Remixed))))()
    assert hints_of(made) == REMIXED
