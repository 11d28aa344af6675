"""A run that is watched: its profile speaks of modules and mesh axes, and W&B goes on."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter

import pytest
from e2e_runs import Job

HSDP = {"layout.dp_replicate": 2, "layout.dp_shard": 2}


@pytest.mark.all
def test_a_profile_of_a_run_speaks_of_modules_and_axes(train, small):
    told = train(4, job=Job(small({"steps": 10, "logging.profile": "2:4", **HSDP})))
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


@pytest.mark.all
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
