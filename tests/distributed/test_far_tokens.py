"""Tokens that meet far apart outside attention, and what begins at a length or a place: as one process, or refused."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.cut_rows import EXACT, errors
from support.users import DIM, Block, User
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError

LENGTH = 96
SIZES = {"tp": {"tp": 2, "dp_shard": 1}, "cp": {"cp": 2, "dp_shard": 1}}


class Dilated(nn.Module):
    """Each token takes from one that lies ``distance`` before it."""

    def __init__(self, distance: int):
        super().__init__()
        self.filter = nn.Conv1d(DIM, DIM, 2, groups=DIM, padding=distance, dilation=distance)

    def forward(self, x: Tensor) -> Tensor:
        return self.filter(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class Convolved(Block):
    def __init__(self, distance: int):
        super().__init__()
        self.far = Dilated(distance)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.far(x))


class Shifted(Block):
    """The tokens meet in a function, between the norm and the layers that are cut."""

    def __init__(self, distance: int):
        super().__init__()
        self.norm_2 = nn.Sequential(self.norm_2, Shift(distance))


class Shift(nn.Module):
    def __init__(self, distance: int):
        super().__init__()
        self.distance = distance

    def forward(self, x: Tensor) -> Tensor:
        return x + F.pad(x, (0, 0, self.distance, 0))[:, : x.shape[1]]


class ScaledIfLong(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (1 + math.log(x.shape[1] / 20)) if x.shape[1] > 20 else y


class Placed(Block):
    """Tokens from the fortieth on are computed otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.where((torch.arange(x.shape[1]) >= 40)[:, None], 2 * x, x))


BLOCKS = {f"{kind.__name__} {n}": partial(kind, n) for kind in (Convolved, Shifted) for n in (16, 40, 80)}
BLOCKS |= {"scaled if long": ScaledIfLong, "placed": Placed}
REFUSED = {"tp": ("Shifted 16", "Shifted 40", "Shifted 80", "scaled if long", "placed"), "cp": ("scaled if long",)}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return User(BLOCKS[name]).double()


def outcome(name: str, axis: str, techniques: dict[str, bool]) -> str | float:
    """The largest error, or the words of a refusal."""
    try:
        return max(errors(partial(built, name), SIZES[axis], techniques, LENGTH).values())
    except UnsupportedError as error:
        return str(error)


@pytest.mark.first("tp-Convolved 16", "tp-Convolved 40", "tp-scaled if long", "cp-Convolved 40", "cp-scaled if long")
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("axis", SIZES)
def test_far_tokens_compute_what_one_process_does_or_are_refused(axis, name, spmd):
    for found in spmd(2, outcome, name, axis, {}):
        if name in REFUSED[axis]:
            assert isinstance(found, str) and "rehearsed on a small copy" in found and "is wrong" in found, found
        else:
            assert isinstance(found, float) and found <= EXACT, found


@pytest.mark.parametrize("name", ["Shifted 40", "scaled if long", "placed"])
def test_whole_sequences_compute_far_tokens_as_one_process_does(name, spmd):
    assert all(found <= EXACT for found in spmd(2, outcome, name, "tp", {"sequence_parallel": False}))
