"""Batches of which each rank brings its own tokens, with their places in whole rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.own_loops import batch_of, step, whole_gradients, worst
from support.ranks import ranks, refusal
from test_context_doors import DECODER, decoder, fsdp2, llama

from meshwright import Layout, parallelize
from meshwright.core.errors import MeshwrightError
from meshwright.distributed import DistributedConfig, context_parallel_rows, init_distributed
from meshwright.distributed.context import runtime
from meshwright.distributed.process.workers import WorkerFailed
from meshwright.distributed.process.world import get_world_info

Batch = dict[str, torch.Tensor]
DOCUMENTS = (9, 4, 11)


def packed(batch: Batch, key: str = "positions") -> Batch:
    """With documents: their numbers, and positions that begin anew."""
    rows = len(batch["labels"])
    ids = torch.cat([torch.full((size,), number) for number, size in enumerate(DOCUMENTS)]).expand(rows, -1)
    positions = torch.cat([torch.arange(size) for size in DOCUMENTS]).expand(rows, -1)
    return batch | {key: positions} | ({"document_ids": ids} if key == "positions" else {})


def drawn(batch: Batch, rank: int, ranks: int, *, alike: bool = False) -> Batch:
    """This rank's tokens by chance, as many in every row: fewer on the first rank than on the others."""
    rows, length = batch["labels"].shape
    generator = torch.Generator().manual_seed(1)
    orders = torch.stack([torch.randperm(length, generator=generator) for _ in range(rows)])
    orders = orders[:1].expand(rows, -1) if alike else orders
    ends = [0, *(length // ranks - 1 + (length - length // ranks + 1) * n // (ranks - 1) for n in range(ranks))]
    places = orders[:, ends[rank] : ends[rank + 1]].sort(1).values
    return {key: value.gather(1, places) for key, value in batch.items()} | {runtime.PLACES: places}


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Batch], dict]] = {
    "plain": (decoder, lambda: batch_of(61), {}),
    "alike in all rows": (decoder, lambda: batch_of(61), {"alike": True}),
    "documents": (decoder, lambda: packed(batch_of(61)), {}),
    "llama": (llama, lambda: batch_of(61, key="input_ids"), {}),
    "llama, documents": (llama, lambda: packed(batch_of(61, key="input_ids"), "position_ids"), {}),
}


@pytest.mark.first("2-documents")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [2, 3])
@ranks(lambda ranks: ranks)
def test_a_loop_with_parts_gives_the_gradients_of_one_process(name, ranks):
    mesh = init_distributed(DistributedConfig(dp_shard=1, cp=get_world_info()[2]))
    build, batch, options = CASES[name]
    model = build()
    whole = batch()
    expected = whole_gradients(copy.deepcopy(model), whole)
    step(fsdp2(model, mesh), mesh, drawn(whole, *get_world_info()[::2], **options), inside=False)
    assert worst(model, expected) < (1e-6 if "llama" in name else 1e-10)


def laid_out(layout: Layout, method: str) -> tuple[float, float]:
    """Error of the gradients of a step over two microbatches, and how far evaluation is off."""
    model = decoder()
    whole = packed(batch_of(61))
    expected = whole_gradients(copy.deepcopy(model), whole)
    made = parallelize(
        model, layout, techniques={"context_parallel_method": method, "zero_stage": 0}, microbatch_rows=1
    )
    mesh: Any = made.mesh
    data = mesh["dp_replicate"].get_local_rank()
    share = 4 // mesh["dp_replicate"].size()
    rows = {key: value[data * share : (data + 1) * share] for key, value in whole.items()}
    mine = drawn(rows, mesh["cp"].get_local_rank(), mesh["cp"].size())
    loss = made.forward_backward(mine)
    return worst(made.parts[0], expected), abs(float(made.evaluate(mine)) - float(loss))


@pytest.mark.parametrize("method", ["auto", "ring", "ulysses", "halo"])
def test_a_step_with_parts_gives_the_gradients_of_one_process(spmd, method):
    for error, evaluated in spmd(2, laid_out, Layout(dp_shard=1, cp=2), method):
        assert error < 1e-10 and evaluated < 1e-12


@pytest.mark.all
@pytest.mark.parametrize("layout", [Layout(dp_replicate=2, dp_shard=1, cp=2), Layout(dp_shard=1, cp=2, tp=2)], ids=str)
def test_parts_go_with_other_axes(spmd, layout):
    for error, evaluated in spmd(4, laid_out, layout, "auto"):
        assert error < 1e-10 and evaluated < 1e-12


# --- what is refused, on all ranks


def changed(change: str, rank: int) -> Any:
    """A rank's batch of 2 rows of 24 tokens, of which each rank has every second one; rank 1's or all are changed."""
    whole = batch_of(61, rows=2)
    places = torch.arange(rank % 2, 24, 2).expand(2, -1).clone()
    mine = {key: value.gather(1, places) for key, value in whole.items()} | {"places": places}
    if change == "only one rank" and rank == 1:
        return whole
    if change == "only one microbatch":
        return [mine, whole]
    if rank != 1:
        return mine
    if change == "overlap":
        mine["places"][1, 3] = 8
    elif change == "gap":
        mine["places"][1, -1] = 30
    elif change == "not ascending":
        mine["places"] = mine["places"].flip(1)
    elif change == "other shape":
        mine["places"] = mine["places"][:, :-1]
    elif change == "other dtype":
        mine["places"] = mine["places"].float()
    elif change == "other rows":
        mine = {key: value[:1] for key, value in mine.items()}
    elif change == "other keys":
        mine["document_ids"] = torch.zeros_like(places)
    elif change == "longer rows":
        mine = {key: value.repeat(1, 5) for key, value in mine.items()}
        mine["places"] = torch.arange(60).expand(2, -1) + 100
    return mine


REFUSED = {
    "only one rank": "bring batch['places'], each token's place in its row, and the others do not: all ranks bring",
    "only one microbatch": "1 of 2 microbatches bring 'places': give it with all of them",
    "overlap": "batch['places'] overlaps: row 1 has 24 tokens on all ranks of the cp axis together, and place 8 is on"
    " the ranks [0, 1]",
    "gap": "batch['places'] leaves a gap: row 1 has 24 tokens on all ranks of the cp axis together, and none has place"
    " 23, while places go up to 30",
    "not ascending": "batch['places'] must ascend from 0 in each row",
    "other shape": "batch['places'] has shape (2, 11), but tokens have (2, 12)",
    "other dtype": "batch['places'] holds torch.float32; it must hold torch.int64",
    "other rows": "the ranks of the cp axis bring parts of other rows, or other keys (rank 0: 2 rows of 12 tokens with"
    " places; rank 1: 1 rows of 12 tokens with places)",
    "other keys": "rank 1: 2 rows of 12 tokens with places, document_ids",
}


@pytest.mark.first("other shape")
@pytest.mark.parametrize("change", REFUSED)
@ranks(4)
def test_a_step_is_refused_on_all_ranks(change):
    """Also on those of the other rows, whose parts are in order."""
    layout = Layout(dp_replicate=2, dp_shard=1, cp=2)
    model = parallelize(DECODER, layout)
    assert REFUSED[change] in refusal(lambda: model.forward_backward(changed(change, get_world_info()[0])))


def loop_refused(change: str) -> str:
    mesh = init_distributed(DistributedConfig(dp_shard=1, cp=2))
    model = fsdp2(decoder(), mesh)
    try:
        with context_parallel_rows(model, changed(change, get_world_info()[0])):
            pass
    except MeshwrightError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("change", [change for change in REFUSED if change != "only one microbatch"])
def test_a_loop_is_refused_on_all_ranks(spmd, change):
    for said in spmd(2, loop_refused, change):
        assert REFUSED[change] in said


def test_places_without_a_context_axis_are_refused():
    model = parallelize(DECODER, Layout(dp_shard=1))
    with pytest.raises(MeshwrightError, match="says that a rank has a part of each row, and layout.cp = 1"):
        model.forward_backward(changed("", 0))


@pytest.mark.kills("context", "fault")
@pytest.mark.parametrize("fault", ["places of the next rank", "positions of a part", "documents of a part"])
def test_gradients_of_parts_or_an_error_show(spmd, fault):
    try:
        found = max(spmd(2, faulty, fault))
    except WorkerFailed as error:  # the model's own mask of its documents is another one
        assert fault != "positions of a part" and "by another rule than the one that was measured" in str(error)
        found = math.inf
    assert found > 1e-3


def faulty(fault: str) -> float:
    with pytest.MonkeyPatch.context() as patch:
        correct = runtime.join

        def join(piece: Any, *options: Any) -> Any:
            made = correct(piece, *options)
            if fault == "places of the next rank":
                object.__setattr__(made.rows, "places", made.rows.places.roll(1, 0))
                object.__setattr__(made.rows, "counts", made.rows.counts[::-1])
            elif fault == "positions of a part":
                made["positions"] = torch.arange(made["tokens"].shape[1]).expand(made["tokens"].shape)
            else:
                object.__setattr__(made.rows, "documents", made.rows.documents.roll(5, 1))
            return made

        patch.setattr(runtime, "join", join)
        model = decoder()
        whole = packed(batch_of(61, length=24))
        expected = whole_gradients(copy.deepcopy(model), whole)
        mesh = init_distributed(DistributedConfig(dp_shard=1, cp=2))
        rank = get_world_info()[0]
        places = torch.arange(rank, 24, 2).expand(4, -1)
        mine = {key: value.gather(1, places) for key, value in whole.items()} | {"places": places}
        step(fsdp2(model, mesh), mesh, mine)
        return worst(model, expected)
