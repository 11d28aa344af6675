"""What only a device can be asked of a way that was watched."""

from __future__ import annotations

from .order import order_faults
from .pretend import DEVICE
from .ways import Record, Way

MODELS = ("meshwright/models/", "/transformers/")
"""Code of models, whose waits no plan lists."""
OF_A_SAVE = "self._stream.synchronize()"
"""Of the thread that copies a snapshot, which waits for its own stream."""


def device_faults(way: Way, ranks: list[Record]) -> dict[str, list[str]]:
    """Ask what only a device can be asked."""
    return {
        "device": [f"rank {n}: computed on {rank.device}" for n, rank in enumerate(ranks) if rank.device != DEVICE]
        + [f"rank {n}: {name}" for n, rank in enumerate(ranks) for name in rank.strangers],
        "streams": [
            f"rank {n}: {fault}" for n, rank in enumerate(ranks) for fault in dict.fromkeys(rank.seen.faults())
        ],
        "waits": [line for n, rank in enumerate(ranks) for line in _waits(way, n, rank)],
        "order": order_faults([rank.seen.messages for rank in ranks]),
    }


def _waits(way: Way, number: int, rank: Record) -> list[str]:
    reads = [
        read
        for read in rank.seen.host_reads
        if not any(model in read.line.file for model in MODELS) and OF_A_SAVE not in str(read)
    ]
    # the plan does not know which recomputed layers no gradient reaches
    may_be_fewer = way.freeze == "start" and way.ep != "1" and way.recompute != "none"
    if len(reads) == rank.waits or (may_be_fewer and len(reads) < rank.waits):
        return []
    where = sorted({str(read) for read in reads})
    return [f"rank {number}: the host waits {len(reads)} times for the device, {rank.waits} planned: {where}"]
