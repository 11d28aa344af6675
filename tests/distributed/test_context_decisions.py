"""Models that decide by the values of a row's tokens, with rows cut over ranks: equal to one process, or refused."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

import pytest
from support.cut_rows import EXACT, batch, errors
from support.deciding import BY_TENSORS, CARRIED, REFUSED, Masked, OfCount, OfLargest
from support.ranks import ranks

from meshwright import Layout, plan
from meshwright.core.errors import UnsupportedError
from meshwright.distributed.context import proof
from meshwright.distributed.context.proof import Reads, prove
from meshwright.introspection.facts import model_facts

pytestmark = pytest.mark.all

CUT = {"cp": 2, "dp_shard": 1}
LINES = Path(__file__).parents[1] / "support" / "deciding.py"


def named(kind):
    return kind.__name__


def refusals(kind):
    """The refusal of any batch ("plain"), and those of batches that only some runs have."""
    facts = model_facts(kind().double())
    try:
        return prove(facts, plan(facts, Layout(**CUT)).context)
    except UnsupportedError as error:
        return {"plain": str(error)}


def line_of(words):
    """The line of the model's code that a refusal names."""
    found = re.search(r"decides by the values of a row's tokens at deciding\.py:(\d+), '", words)
    assert found is not None, words
    return LINES.read_text(encoding="utf-8").splitlines()[int(found[1]) - 1]


@pytest.mark.parametrize("kind", REFUSED, ids=named)
def test_a_decision_by_the_tokens_of_a_part_is_refused_with_its_line(kind):
    words = refusals(kind)["plain"]
    assert "Decide token by token (torch.where), or set layout.cp = 1." in words
    assert re.search(r"\.(max|min|any|all|sum|mean|norm|unique)\(|torch\.(any|equal)\(", line_of(words)), words


def test_tensors_of_all_tokens_are_refused():
    assert "set layout.cp = 1" in refusals(BY_TENSORS)["plain"].lower()


def test_a_decision_by_padding_is_refused_for_padded_batches_alone():
    found = {kind: why for kind, why in refusals(Masked).items() if why}
    assert found.keys() == {"padded behind", "padded before"}
    assert all("attention_mask == 0" in line_of(why) for why in found.values())


def one_expert_left_out():
    """A batch in which some ranks have no token of some experts."""
    tokens = batch(19)["tokens"].clone()
    tokens[:, 5:14] = tokens[:, 5:14] // 4 * 4
    return {"tokens": tokens}


@pytest.mark.parametrize("kind", CARRIED, ids=named)
@ranks(2)
def test_decisions_that_concern_their_own_tokens_are_those_of_one_process(kind):
    assert max(errors(lambda: kind().double(), CUT, {}, 19, one_expert_left_out()).values()) <= EXACT


def never_inverted():
    """Lines that read one truth in all rows are not told the other."""
    rehearse = proof.rehearse
    return patch.object(proof, "rehearse", lambda model, made, batch, reads=None: rehearse(model, made, batch, Reads()))


def short_rows():
    """Short rows alone are rehearsed."""
    return patch.object(proof, "OTHERS", (2,))


@pytest.mark.kills("context", "fault")
@pytest.mark.parametrize("fault", [never_inverted, short_rows], ids=named)
def test_a_rehearsal_that_sees_less_is_seen(fault):
    with fault():
        assert not refusals(OfLargest if fault is never_inverted else OfCount).get("plain")
