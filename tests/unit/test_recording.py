"""Recordings of a few steps: which steps, what a trace is named by, what a device cannot give.

And that they leave nothing behind.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meshwright.cli.main import main
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed.process.flight import Issued
from meshwright.training.config import Config, read_window
from meshwright.training.recording import Profile, check_recordings, name_ranges, open_recordings


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x", "names no steps: write first:end, like 10:13"),
        ("10", "names no steps"),
        ("-1:3", "names no steps"),
        ("1:٣", "names no steps"),
        ("1:2:3", "names no steps"),
        ("13:10", "perhaps 10:13"),
        ("5:5", "the second number is the first step that is left out; perhaps 5:6"),
        ("0:3", "steps are counted from 1; write 1:3"),
        ("10:22", "reaches to step 21, and the run has steps = 20: end with 21 or lower"),
    ],
)
@pytest.mark.parametrize("key", ["profile", "memory_snapshot"])
def test_words_that_name_no_steps_of_the_run_are_refused(key, text, says):
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"steps": 20, "logging": {key: text}})
    assert f"logging.{key} = {text!r}" in str(caught.value) and says in str(caught.value)


def test_a_window_is_counted_as_steps_are():
    assert (
        list(read_window("k", "10:13", 12)) == [10, 11, 12]
        and list(read_window("k", "1:2", 1)) == [1]
        and not read_window("k", "", 1)
    )


def test_the_short_flag_is_the_key(capsys):
    assert main(["train", "--profile", "13:10"]) == 2
    assert "logging.profile = '13:10'" in capsys.readouterr().err


def logging(**values):
    return Config.from_dict({"logging": values}).logging


def test_a_memory_snapshot_of_a_cpu_is_refused_by_name():
    with pytest.raises(
        UnsupportedError, match=r"logging.memory_snapshot = '2:3': torch keeps a history of CUDA memory only, .* on cpu"
    ):
        check_recordings(logging(memory_snapshot="2:3"), "cpu")
    check_recordings(logging(memory_snapshot="2:3"), "cuda")
    check_recordings(logging(profile="2:3"), "cpu")


def test_a_memory_snapshot_records_its_steps_and_writes_one_file(tmp_path, monkeypatch):
    told = []
    fake = SimpleNamespace(
        _record_memory_history=lambda enabled="all", **given: told.append((enabled, given)),
        _dump_snapshot=lambda path: (told.append("dump"), Path(path).write_bytes(b"x")),
    )
    monkeypatch.setattr(torch.cuda, "memory", fake)
    recordings = open_recordings(
        logging(memory_snapshot="2:4"), 9, tmp_path, 3, lambda path: pytest.fail("no profile was asked for")
    )
    for step in range(1, 6):
        recordings.before(step)
        told.append(step)
        if recordings.ends_after(step):
            recordings.after(step)
    assert told == [1, ("all", {"max_entries": 200_000}), 2, 3, "dump", (None, {}), 4, 5]
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")] == [Path("memory/rank3.pickle")]


def test_torch_has_what_a_memory_snapshot_calls():
    import inspect

    assert {"enabled", "max_entries"} <= set(inspect.signature(torch.cuda.memory._record_memory_history).parameters)
    assert callable(torch.cuda.memory._dump_snapshot)


class Noted:
    def __init__(self, path):
        self.path, self.told = path, []

    def start(self):
        self.told.append("start")

    def stop(self):
        self.told.append("stop")


def test_a_run_that_goes_on_inside_or_behind_a_window_records_what_is_left_of_it(tmp_path):
    def taken(steps, existing=False):
        noted = Noted(tmp_path / "x.json")
        if existing:
            noted.path.write_text("{}")
        recordings = open_recordings(logging(profile="10:13"), 20, tmp_path, 0, lambda path: noted)
        said = []
        recordings.announce(steps[0] - 1, said.append)
        for step in steps:
            recordings.before(step)
            noted.told.append(step)
            if recordings.ends_after(step):
                recordings.after(step)
        recordings.close()
        return noted.told, said

    assert taken(range(9, 15)) == ([9, "start", 10, 11, 12, "stop", 13, 14], [])
    assert taken(range(12, 15)) == (["start", 12, "stop", 13, 14], [])
    assert taken(range(9, 12)) == ([9, "start", 10, 11, "stop"], [])
    told, said = taken(range(13, 15))
    assert told == [13, 14] and said == [
        "logging.profile = 10:13 lies behind step 12, from which the run goes on: nothing is recorded"
    ]
    assert taken(range(13, 15), existing=True) == ([13, 14], [])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        return self.second(self.first(x)).sum()


def spans(trace, prefix):
    found = [
        (e["name"].removeprefix(prefix), e["ts"], e["ts"] + e["dur"])
        for e in trace["traceEvents"]
        if e["name"].startswith(prefix)
    ]
    return {name: (begin, end) for name, begin, end in found}


def test_a_profile_names_forward_and_backward_by_module_and_leaves_no_hook(tmp_path):
    model = Net()
    before = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    profile = Profile(tmp_path / "profile" / "rank0.json", [model], torch.device("cpu"), "world")
    model(torch.randn(4, 8)).backward()  # not recorded
    profile.start()
    model(torch.randn(4, 8)).backward()
    profile.stop()
    profile.stop()
    assert {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()} == before
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank0.json"]
    trace = json.loads((tmp_path / "profile" / "rank0.json").read_text())
    forward, backward = spans(trace, "forward "), spans(trace, "backward ")
    assert set(forward) == set(backward) == {"model", "first", "second", "second.0", "second.1"}
    assert sum(e["name"] == "forward first" for e in trace["traceEvents"]) == 1
    for outer, inner in (("model", "first"), ("model", "second"), ("second", "second.0"), ("second", "second.1")):
        for named in (forward, backward):
            assert named[outer][0] <= named[inner][0] and named[inner][1] <= named[outer][1]
    assert (
        forward["first"][1] <= forward["second"][0]
        and backward["second.1"][1] <= backward["second.0"][0] <= backward["first"][0]
    )


def event(name, ts, dur, tid=1, **args):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def test_collectives_are_named_by_kind_and_axis():
    nccl = {"Collective name": "_allgather_base", "Process Group Description": "mesh_dp_shard"}
    trace = {
        "baseTimeNanoseconds": 1_000_000_000,
        "traceEvents": [
            event("c10d::_reduce_scatter_base_", 1000, 100),
            event("gloo:all_reduce", 1050, 500, tid=2),
            event("c10d::allreduce_", 2000, 100),
            event("gloo:all_reduce", 2050, 500, tid=3),
            event("record_param_comms", 3000, 10, **nccl),
            event("ncclDevKernel_AllGather_RING_LL", 3100, 10, tid=9, **nccl),
            event("c10d::broadcast_", 9000, 10),  # the recorder has forgotten it
            {"ph": "M", "name": "process_name"},
        ],
    }
    seen = [Issued("dp_shard", 1_001_020_000), Issued("world", 1_002_050_000)]
    name_ranges(trace, seen, "dp_replicate")
    assert [e["name"] for e in trace["traceEvents"]] == [
        "reduce_scatter dp_shard",
        "reduce_scatter dp_shard (gloo)",
        "all_reduce dp_replicate",
        "all_reduce dp_replicate (gloo)",
        "all_gather dp_shard",
        "all_gather dp_shard",
        "c10d::broadcast_",
        "process_name",
    ]
    assert trace["traceEvents"][5]["args"]["torch's name"] == "ncclDevKernel_AllGather_RING_LL"


def test_backward_of_a_module_that_is_entered_twice_and_nodes_of_no_module():
    node = "autograd::engine::evaluate_function: X"
    trace = {
        "traceEvents": [
            event("forward a", 0, 10),
            event("mul", 1, 2, **{"Sequence number": 5}),
            event("forward a", 20, 10),
            event("mul", 21, 2, **{"Sequence number": 7}),
            event("loss", 40, 2, **{"Sequence number": 8}),
            event(node, 100, 5, **{"Sequence number": 8, "Fwd thread id": 1}),
            event(node, 110, 5, **{"Sequence number": 7, "Fwd thread id": 1}),
            event(node, 117, 2),  # a gradient is added up: no operation made it
            event(node, 120, 5, **{"Sequence number": 6, "Fwd thread id": 1}),
            event(node, 130, 5, **{"Sequence number": 5, "Fwd thread id": 1}),
        ]
    }
    name_ranges(trace, [], "world")
    made = [(e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["name"].startswith("backward ")]
    assert made == [("backward a", 110, 5), ("backward a", 130, 5)]
