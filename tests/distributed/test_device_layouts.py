"""Layouts on an accelerator: the array's ways on the pretend device, equal to one process on the CPU, and watched."""

from __future__ import annotations

import pytest
from support.asked import answers
from support.pretend import with_device
from support.ways import Way


class OnDevice:
    """A pool whose ranks have the pretend device."""

    def __init__(self, pool):
        self._pool = pool

    def run(self, function, *args, **options):
        return self._pool.run(with_device, function, *args, **options)


@pytest.mark.parametrize(
    "way",
    [
        "dp=fsdp",
        "dp=ddp",
        "tp=2 sequence=cut",
        "pp=2 schedule=1f1b",
        "dp=fsdp ep=2 model=softmax",
        "cp=2 method=auto",
        "dp=fsdp recompute=offload",
        "dp=fsdp memory=optimizer",
        "dp=fsdp memory=offload",
        "dp=hsdp clip=no",
        "dp=fsdp tp=2 sequence=cut recompute=full",
        "dp=fsdp loss=chunks",
    ],
)
def test_a_way_on_the_device(device_pool, reference, tmp_path, way):
    found = answers(Way.of(way), OnDevice(device_pool), reference(Way.of(way).problem), tmp_path)
    assert not found.faults, found.text()
