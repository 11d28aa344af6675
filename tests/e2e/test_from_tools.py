"""Scripts of other tools and the same scripts over meshwright: the same 20 losses; the pages print what differs."""

from __future__ import annotations

import pytest
from support.from_pages import changed_lines, furthest, losses_of, page_diffs, script_diff
from support.tools import with_accelerate, with_its_fsdp

from meshwright import Layout

pytestmark = pytest.mark.all

CLOSE = 1e-6
STEPS = 20


def test_trainer_trains_as_with_its_own_fsdp(spmd, measured):
    theirs = spmd(2, with_its_fsdp, "trainer_before")
    ours = spmd(2, with_accelerate, "trainer_after")
    assert len(ours[0]) == STEPS and ours[0] == ours[1]
    worst = furthest(ours[0], theirs[0])
    measured("Trainer, FSDP 2", "20 losses", {"difference": worst})
    assert worst <= CLOSE
    assert ours[0][-1] < ours[0][0]


def test_sft_trainer_trains_as_with_its_own_fsdp(spmd, measured):
    theirs = spmd(2, with_its_fsdp, "sft_before")
    ours = spmd(2, with_accelerate, "sft_after")
    assert len(ours[0]) == STEPS and ours[0] == ours[1]
    worst = furthest(ours[0], theirs[0])
    measured("SFTTrainer, FSDP 2", "20 losses", {"difference": worst})
    assert worst <= CLOSE


def test_fabric_trains_as_with_its_own_fsdp(spmd, measured):
    theirs = spmd(2, losses_of, "fabric_before")
    ours = spmd(2, losses_of, "fabric_after")
    assert len(ours[0]) == STEPS and ours[0] == ours[1]
    worst = furthest(ours[0], theirs[0])
    measured("Fabric, FSDP 2", "20 losses", {"difference": worst})
    assert worst <= CLOSE


def test_fabric_with_a_tensor_axis_beside_trains_alike(spmd, measured):
    """FSDP 2 × tp 2, which Fabric's strategy leaves to its users; and the mean of rank means of two data ranks."""
    theirs = spmd(2, losses_of, "fabric_before")
    ours = spmd(4, losses_of, "fabric_after", {"layout": Layout(dp_shard=2, tp=2)})
    worst = max(furthest(found, theirs[0]) for found in ours)
    measured("Fabric, FSDP 2 × tp 2", "20 losses", {"difference": worst})
    assert worst <= CLOSE


def test_accelerate_trains_as_with_its_own_fsdp(spmd, measured):
    theirs = spmd(2, with_its_fsdp, "accelerate_before", None, False)
    ours = spmd(2, with_accelerate, "accelerate_after")
    assert len(ours[0]) == STEPS and ours[0] == ours[1]
    worst = furthest(ours[0], theirs[0])
    measured("accelerate, FSDP 2", "20 losses", {"difference": worst})
    assert worst <= CLOSE


def test_accelerate_with_a_pipeline_trains_as_one_process(spmd, measured):
    """pp 2 × dp_shard 2, as theirs on two data ranks."""
    theirs = spmd(2, with_accelerate, "accelerate_before")
    ours = spmd(4, with_accelerate, "accelerate_after", {"layout": Layout(pp=2, dp_shard=2)})
    worst = max(furthest(found, theirs[0]) for found in ours)
    measured("accelerate, FSDP 2 × pp 2", "20 losses", {"difference": worst})
    assert worst <= CLOSE


BEYOND = {"FSDP 2, tp 2": Layout(dp_shard=2, tp=2), "pp 2": Layout(pp=2, dp_shard=1)}
"""Layouts that the tools' own strategies do not have."""


@pytest.mark.parametrize("layout", BEYOND)
@pytest.mark.parametrize("pair", ["trainer", "sft"])
def test_other_layouts_train_as_one_process(spmd, measured, pair, layout):
    """The tool alone on one process, with as many rows in a step."""
    wanted = BEYOND[layout]
    alone = {"per_device_train_batch_size": 4, "fsdp": None, "fsdp_config": None}
    expected = spmd(1, with_accelerate, f"{pair}_before", alone)[0]
    rows = {"per_device_train_batch_size": 4 // wanted.dp_shard}
    ours = spmd(wanted.world, with_accelerate, f"{pair}_after", {"layout": wanted, **rows})
    assert len(expected) == STEPS
    worst = max(furthest(found, expected) for found in ours)
    measured(f"{pair}, {layout}", "20 losses", {"difference": worst})
    assert worst <= CLOSE


PAGES_OF = {"trainer": ["trainer", "sft"], "accelerate": ["accelerate"], "fabric": ["fabric"]}


@pytest.mark.first
@pytest.mark.parametrize("page", PAGES_OF)
def test_a_page_prints_what_differs_between_its_scripts(page):
    assert page_diffs(page) == [script_diff(pair) for pair in PAGES_OF[page]]


@pytest.mark.first
@pytest.mark.parametrize(("pair", "added"), [("trainer", 3), ("sft", 3), ("fabric", 3), ("accelerate", 6)])
def test_a_script_changes_in_few_lines(pair, added):
    """Beside imports; one of them is the argument by which the tests choose the layout."""
    assert changed_lines(pair)[1] == added


def test_packed_rows_are_trained_as_theirs(spmd, measured):
    """Documents side by side in a row, kept apart by positions."""
    packed = {"packing": True, "max_length": 24, "max_steps": 4, "per_device_train_batch_size": 1}
    theirs = spmd(2, with_accelerate, "sft_before", packed)[0]
    worst = furthest(spmd(2, with_accelerate, "sft_after", packed)[0], theirs)
    measured("SFTTrainer, packed", "4 losses", {"difference": worst})
    assert worst <= CLOSE
