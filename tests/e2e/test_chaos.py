"""A short spell of the weather that benchmarks/chaos.py makes at length."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from chaos import Event, Weather  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.all


@pytest.mark.parametrize("asynchronous", [False, True], ids=["waited-for", "beside"])
def test_killed_signalled_and_out_of_disk_it_is_the_run_that_nothing_happened_to(tmp_path, asynchronous):
    weather = Weather(tmp_path / "weather", seed=3, asynchronous=asynchronous)
    weather.happen(
        [
            Event("kill", "data", rank=1),
            *([Event("writer", "forward", rank=0)] if asynchronous else []),
            Event("kill", "save", rank=2),
            Event("SIGINT", "validation", rank=0),
            Event("launcher", "forward"),
            Event("disk", change=30, rank=0),
        ]
    )
    figures = weather.end()
    happened = [figures.events[kind] for kind in ("kill", "writer", "launcher", "signal", "disk")]
    assert happened == [2, int(asynchronous), 1, 1, 1] and figures.steps > 10
    assert len(figures.recovery) == 2 and max(figures.recovery) < 10
    assert not list((tmp_path / "weather" / "tmp").glob("meshwright-*"))
