"""The array's ways on a pretend accelerator: every promise kept, and nothing done that a GPU would not forgive.

Each way is laid out as ``test_ways`` does, on a device that is not the CPU, and its last step is watched: no race
between streams, no memory freed too early, no copy of pageable memory that is meant to be asynchronous, nothing left on
the CPU, the host waits as often as the plan says, and collectives in an order that NCCL can run.
"""

from __future__ import annotations

import pytest
from support.asked import answers
from support.device_asked import device_faults
from support.pretend import watched_record
from support.ways import of_make_test, ways

# torch's compiler traces no device that is written in Python
WAYS = [way for way in ways() if way.compile == "no"]
FOR_DEVICES = ("dp", "tp", "pp", "ep", "cp", "method", "shards", "recompute", "memory", "dtypes")
"""Factors whose values copy, send or wait in their own way: `make test` has each value."""


@pytest.mark.parametrize(
    "way", of_make_test(WAYS, lambda way: [f"{name}={getattr(way, name)}" for name in FOR_DEVICES]), ids=str
)
def test_a_way_keeps_every_promise_on_a_device(device_pool, reference, tmp_path, way):
    found = answers(way, device_pool, reference(way.problem), tmp_path, job=watched_record, more=device_faults)
    assert not found.faults, found.text()
