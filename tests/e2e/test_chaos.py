"""A short spell of the weather that benchmarks/chaos.py makes at length."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from chaos import Event, Weather  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.all


def test_killed_signalled_and_out_of_disk_it_is_the_run_that_nothing_happened_to(tmp_path):
    weather = Weather(tmp_path / "weather", seed=3)
    weather.happen(
        [
            Event("kill", "data", rank=1),
            Event("kill", "save", rank=2),
            Event("SIGINT", "validation", rank=0),
            Event("disk", change=30, rank=0),
        ]
    )
    figures = weather.end()
    assert [figures.events[kind] for kind in ("kill", "signal", "disk")] == [2, 1, 1] and figures.steps > 10
    assert len(figures.recovery) == 2 and max(figures.recovery) < 10
    assert not list((tmp_path / "weather" / "tmp").glob("meshwright-*"))
