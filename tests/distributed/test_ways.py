"""The array: every two switches that the rules allow meet in some way.

Each way is laid out once, and asked every question.

The ways are in tests/ways.txt. Run one alone: pytest
"tests/distributed/test_ways.py::test_a_way_keeps_every_promise[dp=fsdp tp=2 …]".
"""

from __future__ import annotations

import pytest
from support.asked import answers
from support.ways import FACTORS, Way, of_make_test, ways

WAYS = ways()


@pytest.mark.parametrize("way", of_make_test(WAYS, lambda way: way.meetings), ids=str)
def test_a_way_keeps_every_promise(pool, reference, tmp_path, measured, way):
    """Equal to one process; sends and holds what the plan says.

    Goes on from a checkpoint bit by bit; torch reads the same weights.
    """
    found = answers(way, pool, reference(way.problem), tmp_path)
    assert not found.faults, found.text()
    measured(str(way), "ways", found.worst)


def test_every_value_of_every_factor_is_in_some_way():
    for factor, values in FACTORS.items():
        assert {getattr(way, factor) for way in WAYS} == set(values), factor


def test_a_way_is_read_back_from_its_text():
    assert [Way.of(str(way)) for way in WAYS] == WAYS and len(set(WAYS)) == len(WAYS)
