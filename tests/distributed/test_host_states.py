"""Optimizer state alone in host memory: the very steps of state that stays on the device, and only a portion of it
there at a time.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.ranks import ranks
from support.states import BATCHES, BF16, DENSE, LAYOUTS, Held, adamw, held, laid_out, train, uncompiled
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from meshwright import Layout, ParallelModel, load, parallelize, save
from meshwright.core.errors import UnsupportedError
from meshwright.distributed.memory.account import MemoryAccount
from meshwright.distributed.optimizer import low_bit
from meshwright.distributed.setup import init_distributed
from meshwright.distributed.weights import shards
from meshwright.planning.build import plan as make_plan
from meshwright.planning.explain import table
from meshwright.planning.memory import MemoryUse as Kind
from meshwright.planning.memory import plan_memory
from meshwright.planning.optimizer import KINDS
from meshwright.training.memory import MemoryShares, memory_table
from meshwright.training.optimizer import make_optimizer

OFFLOADED = {"cpu_offload": "optimizer"}
SMALL = 1 << 17
"""Bytes of state on the device at a time: several portions of each group."""


def of_word(model: ParallelModel) -> torch.optim.Optimizer:
    """The plan's optimizer, with groups of several rates."""
    groups = model.make_parameter_groups(weight_decay=0.1, overrides=[("norm", {"lr_scale": 0.5})])
    plan, named = model.plan.optimizer, model.named_parameters()
    return make_optimizer(groups, lr=1e-2, plan=plan, named_parameters=named).optimizer


def trained(layout: str, techniques: dict[str, Any], folder: str, kind: str = "adamw") -> Held:
    """Four steps, saved, loaded into another model and continued after the second."""
    with uncompiled(), patch.object(low_bit, "step", partial(low_bit.step, room=SMALL)):
        losses: list[float] = []
        for half, seed in ((range(2), 3), (range(2, 4), 99)):
            model = laid_out(layout, {"optimizer": kind} | techniques, seed=seed)
            optimizer = adamw(model) if kind == "adamw" else of_word(model)
            if half.start:
                load(model, folder, optimizer=optimizer)
            losses += train(model, optimizer, half, max_norm=1e-3)
            save(model, folder, optimizer=optimizer)
        return held(model, optimizer, losses)


CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    **{layout: (layout, {}, "adamw") for layout in LAYOUTS},
    "8bit": ("FSDP2", {"optimizer_state": "8bit"}, "adamw"),
    "4bit, DDP": ("DDP", {"optimizer_state": "4bit"}, "adamw"),
    "8bit, rounded stochastically, HSDP": (
        "HSDP",
        BF16 | {"optimizer_state": "8bit", "stochastic_rounding": True},
        "adamw",
    ),
    "float16": ("FSDP2", {"precision": {"compute": "float16", "loss_scale": 1024.0}}, "adamw"),
    "ZeRO-2, accumulated": ("HSDP", {"zero_stage": 2}, "adamw"),
    "partly frozen, recomputed": (
        "FSDP2",
        {"freeze": ("embedding", r"layers\.0"), "activation_checkpointing": "full"},
        "adamw",
    ),
    **{f"{kind}, {layout}": (layout, {}, kind) for kind in ("adam", "lion", "sgd") for layout in ("PP, tied", "EP")},
    **{f"{kind}, FSDP2 + TP": ("FSDP2 + TP", {}, kind) for kind in ("adam", "lion", "sgd")},
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_state_that_stays(spmd, tmp_path, case):
    layout, techniques, kind = CASES[case]
    world = LAYOUTS[layout][0]
    stays = spmd(world, trained, layout, techniques, str(tmp_path / "stays"), kind)
    moves = spmd(world, trained, layout, techniques | OFFLOADED, str(tmp_path / "moves"), kind)
    for one, other in zip(stays, moves, strict=True):
        assert other.losses == one.losses
        assert other.differs_from(one) == []


@pytest.mark.all
@pytest.mark.parametrize("layout", ["FSDP2", "FSDP2 + TP", "PP + FSDP2"])
@pytest.mark.parametrize("kind", ["adafactor", "adam", "lion", "schedule_free_adamw", "sgd"])
def test_parameters_in_host_memory_are_stepped_alike(spmd, tmp_path, kind, layout):
    world = LAYOUTS[layout][0]
    one, other = (
        spmd(world, trained, layout, {"cpu_offload": offloads}, str(tmp_path / str(offloads)), kind)
        for offloads in (False, True)
    )
    for here, there in zip(one, other, strict=True):
        assert there.losses == here.losses and there.differs_from(here) == []


STEPPED = {("adafactor", True), ("schedule_free_adamw", True)} | {
    (kind, offload) for kind in ("adam", "adamw", "lion", "sgd") for offload in (True, "optimizer")
}
"""Optimizers and offloads that the tests above step."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offload", [True, "optimizer"])
def test_an_optimizer_is_offloaded_or_refused_before_the_start(kind, offload):
    asked = {"optimizer": kind, "cpu_offload": offload}
    if (kind, offload) in STEPPED:
        assert make_plan(DENSE, Layout(dp_shard=2), techniques=asked).optimizer.kind == kind
        return
    with pytest.raises(UnsupportedError, match=f"cpu_offload = {str(offload).lower()} and the optimizer {kind}:"):
        make_plan(DENSE, Layout(dp_shard=2), techniques=asked)


# --- what moves


class Watched:
    """Notes copies to the device, the most bytes of them at a time, and copies back into memory that rests."""

    def __init__(self) -> None:
        self.come = self.left = self.made = self.most = 0
        self._here: list[weakref.ref[Tensor]] = []
        self._copied, self._to_host, self._put_back = (low_bit._copied, low_bit._to_host, low_bit._put_back)

    def copied(self, plain: Tensor, device: torch.device) -> Tensor:
        here = self._copied(plain, device)
        self.come += here.nbytes
        self._here = [one for one in self._here if one() is not None] + [weakref.ref(here)]
        self.most = max(self.most, sum(one().nbytes for one in self._here if one() is not None))  # type: ignore[union-attr]
        return here

    def to_host(self, plain: Tensor, *, pinned: bool) -> Tensor:
        self.made += plain.nbytes
        return self._to_host(plain, pinned=pinned)

    def put_back(self, state: dict, rested: dict, device: torch.device) -> None:
        self.left += sum(plain.nbytes for value in rested.values() for plain in low_bit.memory_of(value))
        self._put_back(state, rested, device)


def moves(layout: str, word: str) -> tuple[Watched, Watched, int, int, bool]:
    """What the first step moves, and the second.

    The plan's bytes of state, those that move at a time, whether state stays where it was.
    """
    first, second = Watched(), Watched()
    with uncompiled():
        model = laid_out(layout, OFFLOADED | {"optimizer_state": word})
        optimizer = adamw(model)
        places: list[list[int]] = []
        for number, watched in enumerate((first, second)):
            with (
                patch.object(low_bit, "_copied", watched.copied),
                patch.object(low_bit, "_to_host", watched.to_host),
                patch.object(low_bit, "_put_back", watched.put_back),
                patch.object(low_bit, "step", partial(low_bit.step, room=SMALL)),
            ):
                train(model, optimizer, range(number, number + 1))
            gc.collect()
            places.append([plain.data_ptr() for tensors in _moments(optimizer) for plain in low_bit.memory_of(tensors)])
            watched._here = []
        for watched in (first, second):
            del watched._copied, watched._to_host, watched._put_back
        planned = plan_memory(model.plan)
        return first, second, planned.optimizer, planned.moving, places[0] == places[1]


def _moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if value.dim()]


@pytest.mark.parametrize("word", ["full", "8bit"])
@pytest.mark.parametrize("layout", ["FSDP2", "DDP", "FSDP2 + TP"])
def test_a_step_moves_the_state_there_and_back_by_portions(spmd, layout, word):
    for first, second, state, moving, rests in spmd(LAYOUTS[layout][0], moves, layout, word):
        assert first.come == first.left == 0 and first.made == pytest.approx(state, rel=0.01), (
            "new state is made on the device"
        )
        assert second.come == second.left == first.made and second.made == 0 and rests, "and rests where it was put"
        assert 0 < second.most <= SMALL < state or word == "8bit"
        assert second.most < state and moving == min(state, low_bit.ROOM)


def test_portions_fit_and_leave_nothing_out():
    weights = [torch.nn.Parameter(torch.zeros(n)) for n in (10, 10, 10, 1000, 10, 5)]
    found = [[len(p) for p in portion] for portion in low_bit.portions(weights, room=8 * 25)]
    assert found == [[10, 10], [10], [1000], [10, 5]]
    assert list(low_bit.portions([], room=1)) == []


# --- said and refused


@ranks(2)
def test_the_plan_and_the_account_say_where_it_is():
    layout = "FSDP2"
    model = laid_out(layout, OFFLOADED)
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    account = MemoryAccount(model.parts, [256])
    account.add_optimizer(optimizer)
    found = {Kind.OPTIMIZER: account.most[Kind.OPTIMIZER]}
    assert found[Kind.OPTIMIZER] == pytest.approx(plan_memory(model.plan).optimizer, rel=0.01)
    account, plan = memory_table(found, model.plan, MemoryShares(4, 1)), table(model.plan)
    assert "optimizer, in host memory" in account
    assert "optimizer (AdamW), in host memory" in plan and "of it on the device, during the step" in plan
    assert "  optimizer       state in host memory" in plan


class Theirs(torch.optim.AdamW):
    """Somebody's own, which may look at all parameters together."""


@ranks(1)
def test_optimizers_that_cannot_step_by_portions_are_refused():
    model = parallelize(replace(DENSE, n_layers=1), Layout(dp_shard=1), techniques=OFFLOADED)
    said = {}
    hooked = torch.optim.AdamW(model.parameters(), lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)
    for name, optimizer in {
        "theirs": Theirs(model.parameters(), lr=0.1),
        "LBFGS": torch.optim.LBFGS(model.parameters()),
        "hooked": hooked,
    }.items():
        model.forward_backward(BATCHES(0))
        with pytest.raises(UnsupportedError) as caught:
            model.optimizer_step(optimizer)
        said[name] = str(caught.value)
    assert "known to be sound of torch's own optimizers" in said["theirs"] and "Theirs" in said["theirs"]
    assert "LBFGS" in said["LBFGS"]
    assert "hooks that are registered on this optimizer's step" in said["hooked"]


# --- memory that is not where the mesh is


@ranks(2)
def test_host_memory_of_a_parameter_on_another_device_is_not_copied_there():
    """Else a checkpoint would be read into a copy, and a gradient in host memory clipped in one."""
    mesh = init_distributed(Layout(dp_replicate=2, dp_shard=1), 0)
    assert mesh is not None
    mesh = mesh["dp_replicate"]
    like = DTensor.from_local(torch.zeros(4), mesh, [Shard(0)])
    known = mesh._device_type
    mesh._device_type = "meta"
    local = torch.zeros(4)
    torchs = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride())
    mesh._device_type = known
    found = shards.with_local(like, local)._local_tensor.data_ptr() == local.data_ptr(), torchs._local_tensor.is_meta
    assert found == (True, True)


# --- a mutant


def forgets() -> list[str]:
    """What differs where what is stepped never goes back into host memory."""

    def kept_old(state: dict, rested: dict, device: torch.device) -> None:
        if rested:
            state.update(rested)
        else:
            put_back(state, rested, device)

    put_back = low_bit._put_back
    model, other = (laid_out("one", techniques) for techniques in (OFFLOADED, {}))
    mine, theirs = adamw(model), adamw(other)
    with patch.object(low_bit, "_put_back", kept_old):
        found = held(model, mine, train(model, mine, range(3)))
    return found.differs_from(held(other, theirs, train(other, theirs, range(3))))


def test_state_that_is_not_put_back_shows(spmd):
    assert spmd(1, forgets)[0]
