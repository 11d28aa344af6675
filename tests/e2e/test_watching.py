"""A run that is watched: its profile speaks of modules and mesh axes, a slow rank is named and a healthy one is not,
W&B goes on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from collections import Counter
from dataclasses import dataclass

import pytest
from e2e_runs import Job, metrics

from meshwright.data.loader import Loader
from meshwright.models.decoder import Decoder
from meshwright.training.health import stragglers
from meshwright.training.metrics.metrics import read_metrics

HSDP = {"layout.dp_replicate": 2, "layout.dp_shard": 2}
DDP = {"layout.dp_replicate": 4, "layout.dp_shard": 1}


@dataclass
class Slowed(Job):
    """A run in which rank 3 sleeps in one place, and windows are short."""

    place: str = ""

    def __call__(self):
        owner, name = {"data": (Loader, "__next__"), "forward": (Decoder, "forward")}.get(
            self.place, (Loader, "__next__")
        )
        was, bounds = getattr(owner, name), stragglers.WINDOW_STEPS

        def slow(module, *args, **named):
            time.sleep(0.15 if self.place and os.environ["RANK"] == "3" else 0)
            return was(module, *args, **named)

        slow.__wrapped__ = was  # type: ignore[attr-defined]  (its signature is asked for)
        setattr(owner, name, slow)
        stragglers.WINDOW_STEPS = (3, 3)
        try:
            return super().__call__()
        finally:
            setattr(owner, name, was)
            stragglers.WINDOW_STEPS = bounds


@pytest.mark.parametrize(("place", "layout"), [("data", HSDP), ("forward", {}), ("forward", DDP)])
def test_a_slow_rank_is_named_with_the_place_where_it_is_slow(train, small, place, layout):
    told = train(4, job=Slowed(small({"steps": 10, **layout}), place=place))
    assert [result.status for result in told] == [0] * 4
    where = "reading its data" if place == "data" else "computing, not reading its data"
    sentence = (
        rf"rank 3 \(host \S+\) takes (\S+) s of its own per step, the median of the others (\S+) s:"
        rf" .*difference {where}\."
    )
    found = re.search(sentence, told[0].out)
    assert found is not None and 0.08 < float(found[1]) - float(found[2]) < 0.5, told[0].out
    lines = read_metrics(told[0].folder / "metrics.jsonl")
    assert [(line["step"], line["slowest_rank"]) for line in lines if line.get("event") == "straggler"] == [(9, 3)]
    windows = [line for line in metrics(told[0].folder) if "own_time_max" in line]
    assert [line["step"] for line in windows] == [3, 6, 9] and all(line["slowest_rank"] == 3 for line in windows)
    assert all(line["own_time_mean"] < line["own_time_max"] for line in windows)


def test_a_profile_of_a_healthy_run_speaks_of_modules_and_axes_and_nobody_is_named(train, small):
    told = train(4, job=Slowed(small({"steps": 10, "logging.profile": "2:4", **HSDP})))
    assert "of its own per step" not in told[0].out
    folder = told[0].folder / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [f"rank{rank}.json" for rank in range(4)]
    for path in folder.iterdir():
        events = json.loads(path.read_text())["traceEvents"]
        names = Counter(event["name"] for event in events if event.get("ph") == "X")
        assert {
            names[f"{way} {module}"]
            for way in ("forward", "backward")
            for module in ("model", "layers.0", "layers.1.attention.wq")
        } == {2}
        # of each step: the blocks are gathered in forward, and again in backward unless they are kept; reduced once,
        # then over replicas
        assert (
            names["reduce_scatter dp_shard"] == 2 * 3
            and names["all_reduce dp_replicate"] >= 2 * 3
            and names["all_gather dp_shard"] >= 2 * 3
        )
        assert names["all_gather dp_shard (gloo)"] == names["all_gather dp_shard"]
        assert not [name for name in names if name.startswith("c10d::")]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the extra 'track'")
def test_a_continued_run_goes_on_in_its_wandb_run(train):
    first = train(2, {"logging.wandb": "offline", "steps": 2})[0]
    known = json.loads((first.folder / "wandb.json").read_text())
    assert known["furthest"] == 2 and f"wandb sync --id {known['id']}" in first.out
    again = train(2, {"steps": 3}, folder=first.folder)[0]
    assert again.status == 0 and json.loads((first.folder / "wandb.json").read_text()) == {
        "id": known["id"],
        "furthest": 3,
    }
    runs = [path.name for path in (first.folder / "wandb").glob("offline-run-*")]
    assert len(runs) == 2 and all(known["id"] in name for name in runs)
