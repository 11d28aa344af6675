"""Scripts of other tools and the same scripts over meshwright: the same 20 losses; the pages print what differs."""

from __future__ import annotations

from support.from_pages import furthest
from support.tools import with_accelerate, with_its_fsdp

CLOSE = 1e-6
STEPS = 20


def test_trainer_trains_as_with_its_own_fsdp(spmd):
    theirs = spmd(2, with_its_fsdp, "trainer_before")
    ours = spmd(2, with_accelerate, "trainer_after")
    assert len(ours[0]) == STEPS and ours[0] == ours[1]
    assert furthest(ours[0], theirs[0]) <= CLOSE
    assert ours[0][-1] < ours[0][0]


def test_sft_trainer_trains_as_with_its_own_fsdp(spmd):
    theirs = spmd(2, with_its_fsdp, "sft_before")
    ours = spmd(2, with_accelerate, "sft_after")
    assert len(ours[0]) == STEPS and ours[0] == ours[1]
    assert furthest(ours[0], theirs[0]) <= CLOSE
