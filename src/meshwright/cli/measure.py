"""``meshwright measure FILE [--ranks N]``: measure the speeds of this machine, for the forecasts of plan.

It takes a minute, and writes a profile: products, attention, memory, the host's time for operators, optimizers,
and messages. 'meshwright plan CONFIG --gpus N --profile FILE' forecasts with it.

Under torchrun or srun all ranks take part, and rank 0 writes. More: docs/rent.md.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from meshwright.core.config import take_flags
from meshwright.core.config.ranges import FROM_1
from meshwright.core.errors import ConfigError

from .arguments import check_file, write_file


@dataclass(frozen=True)
class MeasureOptions:
    ranks: Annotated[int | None, FROM_1] = None
    """Processes to start on this host, to measure their messages too."""


def run(argv: list[str]) -> int:
    """Measure with one process, with several, or with those of a launcher, and write the profile."""
    options, argv = take_flags(MeasureOptions, argv)
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError(
            f"meshwright measure takes one file to write and --ranks N, not {' '.join(argv) or 'nothing'}"
        )
    path = Path(argv[0])
    check_file(path, "")
    from meshwright.distributed.process.world import get_world_info
    from meshwright.distributed.setup import destroy_distributed
    from meshwright.simulation.measured import to_json
    from meshwright.training.machine import measure, measure_here

    rank, _, world = get_world_info()
    if options.ranks is not None and world > 1:
        raise ConfigError(f"--ranks {options.ranks}: a launcher has started {world} ranks already. Leave --ranks out.")
    began = time.monotonic()
    try:
        profile = measure_here(options.ranks) if options.ranks not in (None, 1) else measure()
    finally:
        destroy_distributed()
    if rank == 0:
        write_file(path, to_json(profile), "")
        ranks = f"{profile.ranks} rank{'s' * (profile.ranks > 1)}"
        print(f"{profile.name} ({profile.device}), {ranks}, torch {profile.torch}\n")
        for dtype in sorted({key.split()[0] for key in profile.products}):
            fastest = ", ".join(f"{way} {profile.grid(dtype, way).fastest / 1e9:,.0f}" for way in ("nt", "nn", "tn"))
            print(f"  products in {dtype:<12} {fastest} GFLOP/s")
        for kind in ("pointwise", "function", "strided"):
            size, seconds = profile.traffic[kind][-1]
            print(f"  {kind + ' operators':<24} {size / seconds / 1e9:.1f} GB/s")
        print(f"  small operator           {profile.host['elementwise'] * 1e6:.1f} µs")
        for key, points in profile.messages.items():
            title, (size, seconds), least = " of ".join(key.split()), points[-1], points[0][1]
            print(f"  {title:<24} {size / seconds / 1e9:.2f} GB/s, least {least * 1e6:.0f} µs")
        if min(profile.crowding) < 1:
            print("  a rank's speed while 1, 2, … compute: " + ", ".join(f"{speed:.2f}" for speed in profile.crowding))
        print(f"wrote {path} after {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0
