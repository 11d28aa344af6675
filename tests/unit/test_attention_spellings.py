"""Attention as people write it by hand is cut over tensor ranks, and proven; or named with what was found."""

from __future__ import annotations

import pytest
from support.attentions import SPELLINGS, spelled

from meshwright import Layout, plan
from meshwright.distributed.tensor import rehearsal
from meshwright.introspection.facts import model_facts


@pytest.mark.parametrize("is_cut_along_sequence", [True, False])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_cut_and_proven(name, is_cut_along_sequence):
    facts = model_facts(spelled(name).double())
    made = plan(facts, Layout(dp_shard=1, tp=2), techniques={"sequence_parallel": is_cut_along_sequence}).tensor
    assert made is not None and made.sequence_parallel == is_cut_along_sequence
    assert [planned.region.kind for kind in made.kinds for planned in kind.regions] == ["attention", "feed_forward"]
    rehearsal.prove(facts, made)
