"""The watch over a device can fail: each fault of support/device_mutants is found, at its line."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from support import device_mutants, pretend_gpu
from support.asked import answers
from support.device_asked import device_faults
from support.order import order_faults
from support.pretend import DEVICE, watched_record
from support.pretend_gpu import CollectiveCall, Line
from support.ways import Way
from torch import nn

from meshwright.distributed.process.workers import WorkerFailed
from meshwright.distributed.recompute.recompute import HostActivations, offload

OFFLOADED, EXPERTS = "dp=fsdp recompute=offload", "dp=fsdp ep=2 model=softmax"
DIES = {
    "copies_not_waited_for": (OFFLOADED, "streams", "recompute.py"),
    "activations_freed_in_flight": (OFFLOADED, "streams", "recompute.py"),
    "messages_not_waited_for": ("cp=2 method=all_gather", "streams", "exchange.py"),
    "rows_of_experts_not_waited_for": (EXPERTS, "streams", "experts.py"),
    "norm_read_in_a_hook": ("dp=fsdp", "waits", "output.norm().item()"),
    "pageable_batch": ("dp=fsdp", "streams", "pageable memory"),
    "pageable_state": ("dp=fsdp memory=optimizer", "streams", "low_bit.py"),
}
"""Mutant -> the way that it is applied to, the question that finds it, and a part of the place that is named."""


def mutated_record(way, folder, mutant):
    with getattr(device_mutants, mutant)():
        return watched_record(way, folder)


@pytest.mark.fast
@pytest.mark.parametrize("name", DIES)
def test_a_fault_that_only_a_device_shows_is_found_at_its_line(device_pool, reference, tmp_path, name):
    text, question, place = DIES[name]
    way = Way.of(text)
    asked = {"mutant": name, "job": mutated_record, "more": device_faults}
    found = answers(way, device_pool, reference(way.problem), tmp_path, **asked).faults
    assert question in found and any(place in line for line in found[question]), found


def test_a_tensor_left_on_the_host_is_refused_where_it_is_used(device_pool, reference, tmp_path):
    way = Way.of("tp=2 sequence=cut")  # fully_shard would move it
    with pytest.raises(WorkerFailed, match=r"(?s)decoder\.py.*device"):
        answers(way, device_pool, reference(way.problem), tmp_path, "batch_left_on_the_host", mutated_record)


def test_every_device_mutant_is_tried():
    gallery = {name for name, made in vars(device_mutants).items() if getattr(made, "__module__", "") == made_in(made)}
    assert {name for name in gallery if not name.startswith("_")} == {*DIES, "batch_left_on_the_host"}


def made_in(made):
    return device_mutants.__name__ if callable(made) else None


def job_prefetched(is_recorded):
    """Use the backward of the last of two blocks alone: what was fetched for the first is dropped unused."""
    kept = nullcontext() if is_recorded else patch.object(torch.Tensor, "record_stream", lambda self, stream: None)
    with kept, pretend_gpu.watching() as seen:
        store, x = HostActivations(), torch.randn(64, 64, device=DEVICE)
        blocks = [nn.Sequential(nn.Linear(64, 64, device=DEVICE), nn.GELU()) for _ in range(2)]
        for number, block in enumerate(blocks):
            offload(block, number, store)
            x = block(x)
        torch.autograd.grad(x.sum(), blocks[1][0].weight)
        del x
        for _ in range(4):
            torch.zeros(64, 64, device=DEVICE)
    return [str(fault) for fault in seen.early_frees]


def test_what_a_copy_stream_still_writes_is_not_given_away(on_device):
    assert on_device(1, job_prefetched, True)[0] == []
    found = on_device(1, job_prefetched, False)[0]
    assert found and all("recompute.py" in fault for fault in found)


def call(operator, ranks, peer=None, batch=0):
    return CollectiveCall(operator, ranks, 4, 0, Line("", 0, operator), peer, batch)


BOTH, ROWS, COLUMNS = (0, 1, 2, 3), ((0, 1), (2, 3)), ((0, 2), (1, 3))


def test_collectives_in_one_order_are_sound():
    ranks = [
        [call("allreduce_", ROWS[r // 2]), call("allreduce_", COLUMNS[r % 2]), call("barrier", BOTH)] for r in BOTH
    ]
    assert order_faults(ranks) == []


def test_other_collectives_and_crossed_groups_are_found():
    short = [[call("allreduce_", BOTH)] * (1 + (r > 0)) for r in BOTH]
    assert "other collectives" in order_faults(short)[0]
    crossed = [[call("allreduce_", (0, 1)), call("barrier", (0, 1, 2))], [call("barrier", (0, 1, 2))], []]
    crossed[1].append(call("allreduce_", (0, 1)))
    crossed[2].append(call("barrier", (0, 1, 2)))
    assert any("no order" in fault for fault in order_faults(crossed))


def test_sends_that_wait_for_each_other_are_found():
    both = [[call("send", (0, 1), 1), call("recv_", (0, 1), 1)], [call("send", (0, 1), 0), call("recv_", (0, 1), 0)]]
    assert "does not fit" in order_faults(both)[0]
    in_a_batch = [[call(c.operator, c.ranks, c.peer, batch=7) for c in calls] for calls in both]
    mirrored = [both[0], both[1][::-1]]
    assert order_faults(in_a_batch) == order_faults(mirrored) == []
