"""The array's ways on a pretend accelerator: every promise kept, and nothing done that a GPU would not forgive.

Each way is laid out as ``test_ways`` does, on a device that is not the CPU, and its last step is watched: no race
between streams, no memory freed too early, no copy of pageable memory that is meant to be asynchronous, nothing left on
the CPU, the host waits as often as the plan says, and collectives in an order that NCCL can run.
"""

from __future__ import annotations

import pytest
from support.asked import answers
from support.order import order_faults
from support.pretend import DEVICE, watched_record
from support.ways import FACTORS, Record, Way, ways

OURS = ("meshwright/distributed", "meshwright/core", "meshwright/introspection", "torch/")
"""Whose waits a plan lists: what models read is their own affair."""
# torch's compiler traces no device that is written in Python
WAYS = [way for way in ways() if way.compile == "no"]


def device_faults(way: Way, ranks: list[Record]) -> dict[str, list[str]]:
    """Ask what only a device can be asked."""
    return {
        "device": [f"rank {n}: computed on {rank.device}" for n, rank in enumerate(ranks) if rank.device != DEVICE]
        + [f"rank {n}: {name}" for n, rank in enumerate(ranks) for name in rank.strangers],
        "streams": [
            f"rank {n}: {fault}" for n, rank in enumerate(ranks) for fault in dict.fromkeys(rank.seen.faults())
        ],
        "waits": [line for n, rank in enumerate(ranks) for line in _waits(n, rank)],
        "order": order_faults([rank.seen.messages for rank in ranks]),
    }


def _waits(number: int, rank: Record) -> list[str]:
    reads = [read for read in rank.seen.host_reads if not read.line.file or any(own in read.line.file for own in OURS)]
    if len(reads) == rank.waits:
        return []
    where = sorted({str(read) for read in reads})
    return [f"rank {number}: the host waits {len(reads)} times for the device, {rank.waits} planned: {where}"]


def covered(way: Way) -> list[str]:
    return [f"device {name}={getattr(way, name)}" for name in FACTORS]


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.covers(*covered(way))) for way in WAYS], ids=str)
def test_a_way_keeps_every_promise_on_a_device(device_pool, reference, tmp_path, way):
    found = answers(way, device_pool, reference(way.problem), tmp_path, job=watched_record, more=device_faults)
    assert not found.faults, found.text()
