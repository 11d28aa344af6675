"""A step costs the host the same for each block, at any depth."""

from __future__ import annotations

import pytest
from support.host_time import AXES, laid_out, own_calls

pytestmark = pytest.mark.all


def calls_of(axis, blocks):
    return own_calls(laid_out(axis, blocks))


@pytest.mark.parametrize("axis", AXES)
def test_calls_of_a_step_are_linear_in_blocks(axis, spmd):
    for few, more, most in zip(*(spmd(2, calls_of, axis, blocks) for blocks in (4, 8, 12)), strict=True):
        beyond = {name: most[name] - 2 * more[name] + few[name] for name in most}
        assert {name: count for name, count in beyond.items() if count > 0} == {}
