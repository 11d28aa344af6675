"""Layouts: what is open is filled so that the product is the world, and what does not fit is refused with its
numbers.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshwright import ConfigError, Layout
from meshwright.core.axes import WORLD_AXES, Axis

SIZES = st.integers(1, 6)
FIXED = st.builds(Layout, pp=SIZES, dp_replicate=SIZES, dp_shard=SIZES, cp=SIZES, tp=SIZES)


def product(layout: Layout) -> int:
    return math.prod(layout.size(axis) for axis in WORLD_AXES)


@given(FIXED)
def test_a_layout_without_open_sizes_is_its_own_resolution(layout):
    assert layout.resolve(product(layout)) == layout
    assert layout.is_resolved and layout.world == product(layout)


@given(FIXED, st.sampled_from(WORLD_AXES), st.integers(1, 9))
def test_one_open_size_takes_what_is_left(layout, axis, left):
    wanted = replace(layout, **{axis.value: -1})
    resolved = wanted.resolve(product(replace(layout, **{axis.value: 1})) * left)
    assert resolved == replace(layout, **{axis.value: left})


@given(FIXED, st.integers(1, 12), st.one_of(st.none(), st.integers(1, 16)))
def test_hybrid_sharding_stays_inside_a_node(layout, left, per_node):
    wanted = replace(layout, dp_replicate=-1, dp_shard=-1)
    inner = layout.cp * layout.tp
    resolved = wanted.resolve(layout.pp * inner * left, ranks_per_node=per_node)
    assert resolved.dp_replicate * resolved.dp_shard == left
    assert replace(resolved, dp_replicate=-1, dp_shard=-1) == wanted, "the sizes that were given stay"
    if per_node is None:
        assert resolved.dp_replicate == 1, "all ranks count as one node"
    elif per_node >= inner and per_node % inner == 0:
        assert resolved.dp_shard * inner <= per_node
        if left % (per_node // inner) == 0:
            assert resolved.dp_shard * inner == per_node, "a node is used whole where that divides"


@example(Layout(dp_shard=2), 4, False)
@example(Layout(tp=2, dp_shard=2), 2, True)
@example(Layout(tp=2, dp_shard=2), 3, True)
@given(FIXED, st.integers(1, 200), st.booleans())
def test_what_does_not_fit_is_refused_with_its_numbers(layout, world, is_open):
    wanted = replace(layout, dp_shard=-1) if is_open else layout
    fixed = product(replace(layout, dp_shard=1)) if is_open else product(layout)
    if world % fixed == 0 and (is_open or world == fixed):
        assert wanted.resolve(world).world == world
        return
    with pytest.raises(ConfigError) as caught:
        wanted.resolve(world)
    relation = "does not divide" if world % fixed else "is not"
    start = f"Start {'a multiple of ' * is_open}{fixed} processes"
    assert f"= {fixed} {relation} the world size {world}. {start}" in str(caught.value)
    for axis in WORLD_AXES:
        told = re.search(rf"{axis} ?= ?{layout.size(axis)} ", str(caught.value)) is not None
        assert told == (wanted.size(axis) > 1)


@pytest.mark.parametrize("axis", (*WORLD_AXES, Axis.EP))
@pytest.mark.parametrize("size", [0, -2, -100])
def test_a_size_below_one_is_refused_by_name(axis, size):
    with pytest.raises(
        ConfigError, match=rf"layout\.{axis} = {size}: a mesh axis has size 1 or more, or -1 for what is left"
    ):
        replace(Layout(dp_shard=1), **{axis.value: size}).resolve(4)


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Layout(tp=-1, dp_shard=-1), "dp_shard, tp"),
        (Layout(pp=-1, dp_replicate=-1, dp_shard=-1), "pp, dp_replicate, dp_shard"),
    ],
)
def test_several_open_sizes_are_refused_by_name(layout, names):
    with pytest.raises(ConfigError, match=rf"the sizes of {names} are all open \(-1\); at most one may be"):
        layout.resolve(8)


def test_experts_do_not_fill_the_world_and_never_multiply_it():
    with pytest.raises(ConfigError, match=r"layout\.ep = -1: expert parallelism does not fill the world"):
        Layout(ep=-1).resolve(4)
    assert Layout(ep=2).resolve(4) == Layout(dp_shard=4, ep=2)
    assert Layout(dp_shard=4, ep=2).world == 4
    with pytest.raises(
        ConfigError, match=r"dp_shard = 4 and ep = 2 for 8 processes: ep never multiplies .* Set layout\.dp_shard = 8\."
    ):
        Layout(dp_shard=4, ep=2).resolve(8)


def test_no_world_is_no_world():
    with pytest.raises(ConfigError, match="a world of 0 processes cannot be laid out"):
        Layout().resolve(0)


def test_the_world_of_an_open_layout_is_refused():
    with pytest.raises(ConfigError, match=r"layout dp_shard=-1, tp=2 has an open size \(-1\)"):
        _ = Layout(tp=2).world


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("", Layout()),
        ("dp_shard=2,dp_replicate=2", Layout(dp_shard=2, dp_replicate=2)),
        (" tp = 4 , pp=2,", Layout(tp=4, pp=2)),
        ("dp_shard=-1", Layout()),
    ],
)
def test_layouts_as_text(text, layout):
    assert Layout.parse(text) == layout


@given(FIXED)
def test_text_is_read_back(layout):
    if layout.world > 1:
        assert Layout.parse(f"dp_shard=1,{layout}" if layout.dp_shard == 1 else str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp", "'tp' is not 'axis=size' with a whole number, like dp_shard=2"),
        ("tp=two", "'tp=two' is not 'axis=size' with a whole number"),
        ("tp=2.0", "'tp=2.0' is not 'axis=size' with a whole number"),
        ("dp_shards=2", "layout: unknown key 'dp_shards'. Did you mean 'dp_shard'?"),
        ("tp=2,dp_shard=1,tp=4", "'tp' is given twice"),
    ],
)
def test_text_that_is_no_layout_is_refused(text, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        Layout.parse(text)
