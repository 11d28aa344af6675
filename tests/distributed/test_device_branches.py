"""Code that asks whether there is an accelerator: each place is taken here, or docs/gpu.md says why none can."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import test_context_on_device
import torch
from support.branches import branches, spying
from support.pretend import DEVICE, a_group, watched_record
from support.ways import Way
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed.measuring import SHORTEST
from meshwright.training.machine import measure

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
LAID_OUT = (
    "dp=fsdp recompute=offload",
    "dp=fsdp memory=optimizer",
    "dp=fsdp ep=2 model=softmax memory=offload",
    "cp=2 method=all_gather",
    "tp=2 sequence=cut",
    "cp=2 method=halo model=gpt_neox",
)
SETTINGS = {
    "steps": 4,
    "model": {"size": "debug"},
    "batch": {"global_batch": 8},
    "validation": {"every": 2},
    "checkpoint": {"every": 2},
    "logging": {"profile": "2:3"},
    "sample": {"tokens": 4},
}


def job_way(way, folder):
    with spying() as taken:
        record = watched_record(way, folder)
    return taken, record.seen.faults()


def job_run(folder):
    """Train, save, and go on in the same folder; with a profile, a memory table and a sample."""
    from meshwright.training.config import Config
    from meshwright.training.trainer import Trainer

    text = Path(folder) / "text.txt"
    text.write_text("".join(f"line {i} of a text that nobody reads, {i * i}\n" for i in range(2000)))
    data = {"source": [str(text)], "seq_len": 32, "cache": str(Path(folder) / "cache")}
    settings = SETTINGS | {"run": str(Path(folder) / "run"), "data": data}
    with spying() as taken:
        status = [Trainer(Config.from_dict(settings)).run(), Trainer(Config.from_dict(settings | {"steps": 6})).run()]
    metrics = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    return taken, status, metrics


def job_door(overlaps):
    """Take a step through the door that reduces gradients without overlap."""
    from meshwright.distributed.parallelizer import nvfsdp_strategy_parallelize

    with spying() as taken, a_group():
        mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("dp_shard",))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model = nvfsdp_strategy_parallelize(model, mesh, overlap_grad_reduce=overlaps, nvfsdp_unit_modules=[nn.Linear])
        model(torch.ones(2, 8, device=DEVICE)).sum().backward()
    return taken


def job_spied(job, *args):
    with spying() as taken:
        job(*args)
    return taken


def job_plans():
    """Plan for an accelerator, print it, and advise on its memory."""
    from meshwright import Layout, plan
    from meshwright.distributed.memory.dry_run import estimate_memory
    from meshwright.introspection.cluster import Cluster
    from meshwright.introspection.facts import model_facts
    from meshwright.introspection.source import as_module
    from meshwright.models.decoder_config import SIZES
    from meshwright.planning.memory import MemoryUse, assumptions
    from meshwright.planning.values import Batch
    from meshwright.training.capacity import Capacity, Fit, judge
    from meshwright.training.memory import MemoryShares, _savings, reset_peak

    with spying() as taken:
        techniques = {"activation_checkpointing": "offload"}
        made = plan(
            SIZES["debug"], Layout(), batch=Batch(4, 16), cluster=Cluster(2, device=DEVICE), techniques=techniques
        )
        text = str(made)
        frozen = {"freeze": ("embedding", r"layers\.0")}
        str(plan(SIZES["debug"], Layout(), cluster=Cluster(2, device=DEVICE), techniques=frozen))
        assert "on top" in "".join(assumptions(made))
        offloaded = plan(SIZES["debug"], Layout(), cluster=Cluster(2, device=DEVICE), techniques={"cpu_offload": True})
        facts, here = model_facts(as_module(SIZES["debug"])), Capacity(DEVICE, 1 << 16, 1 << 40, 2)
        rows = Batch(4, 16)
        found = judge(facts, offloaded, rows, here, lambda: estimate_memory(facts, offloaded, rows), fully=True)
        assert found.verdict is Fit.TOO_LARGE and found.least.where == f"this {DEVICE} device"
        reset_peak(torch.device(DEVICE))
        held = dict.fromkeys(MemoryUse, 1 << 30)
        assert any("cpu_offload" in switch for _, switch in _savings(held, made, MemoryShares(1, 1)))
    return taken, text


def job_losses():
    """Step by a loss of one's own and by one of pairs, and look for the device as ``doctor`` does."""
    from meshwright import Layout, Loss, PreferenceLoss, parallelize
    from meshwright.models.decoder_config import SIZES
    from meshwright.verification.doctor.inside import devices

    with spying() as taken:
        tokens = torch.randint(0, 100, (4, 9), generator=torch.Generator().manual_seed(0))
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        own = Loss(
            lambda logits, batch: F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), reduction="mean"
        )
        exact = {"precision": {"compute": "float32"}}
        assert parallelize(SIZES["debug"], Layout(), loss_fn=own, techniques=exact).forward_backward(batch).loss > 0
        model = parallelize(SIZES["debug"], Layout(), loss_fn=PreferenceLoss())
        assert model.forward_backward(batch | {"reference_log_probs": model.row_log_probs(batch)}).loss > 0
        found = devices()
    return taken, found["kind"]


def job_rehearse(folder):
    """Rehearse rank 0 of 2 on a device."""
    from meshwright.training.config import Config
    from meshwright.training.rehearsal import _computing_on, rehearse

    text = Path(folder) / "text.txt"
    text.write_text("".join(f"line {i} of a text that nobody reads, {i * i}\n" for i in range(2000)))
    data = {"source": [str(text)], "seq_len": 32, "cache": str(Path(folder) / "cache")}
    with spying() as taken:
        found = rehearse(_computing_on(Config.from_dict(SETTINGS | {"data": data}), DEVICE), 0, 2, steps=1)
    return taken, found


def job_measure(folder):
    """Measure devices, and forecast with their profile."""
    from meshwright import Batch, Cluster, Layout, foresee
    from meshwright.introspection.facts import model_facts
    from meshwright.introspection.source import as_module
    from meshwright.models.decoder_config import SIZES
    from meshwright.simulation.measured import to_json
    from meshwright.training.machine import measure_here

    with spying() as taken, suppress(UnsupportedError):
        with suppress(ConfigError):
            measure_here(64)
        profile = measure(SHORTEST)
        file = Path(folder) / "profile.json"
        file.write_text(to_json(profile))
        facts, batch = model_facts(as_module(SIZES["debug"])), Batch(4, 16, 0, 256)
        techniques, cluster = {"precision": {"compute": "float32"}}, Cluster(1, profile=str(file))
        found = foresee(facts, Layout(dp_shard=1), batch=batch, cluster=cluster, techniques=techniques)
        seconds = found.candidates[0].step_s
    return taken, profile.device, seconds


def job_stall(folder):
    """Diagnose a stall where a process uses an accelerator."""
    from meshwright.training.health.peers import Peers

    with spying() as taken, patch.object(Peers, "_diagnosis", lambda self: "rank 1 waits"):
        peers = object.__new__(Peers)
        heartbeat = SimpleNamespace(collective={"group": "g", "number": 1, "since": 0.0}, folder=Path(folder), rank=0)
        vars(peers).update(heartbeat=heartbeat, limit_sec=1.0, stall="", _seen=None)
        peers._watch()
    return taken


@pytest.mark.all
def test_a_run_trains_saves_and_resumes_on_a_device(on_device, tmp_path):
    _, status, metrics = on_device(1, job_run, str(tmp_path))[0]
    assert status == [0, 0]
    losses = [line["loss"] for line in metrics if "loss" in line]
    assert len(losses) == 6 and losses[-1] < losses[0]


def test_a_plan_for_a_device_says_where_the_host_waits(on_device):
    _, text = on_device(1, job_plans)[0]
    assert "the host waits for the device in a step\n  loss, gradient norm" in text


@pytest.mark.all
def test_each_branch_is_taken_or_listed(device_pool, on_device, tmp_path):
    taken: set[str] = set()
    for number, text in enumerate(LAID_OUT):
        way = Way.of(text)
        jobs = on_device(way.layout.world, job_way, way, str(tmp_path / str(number)))
        taken |= set().union(*(places for places, _ in jobs))
        assert not any(faults for _, faults in jobs), jobs
    taken |= on_device(1, job_run, str(tmp_path))[0][0] | on_device(2, job_door, False)[0]
    places, rehearsal = on_device(1, job_rehearse, str(tmp_path))[0]
    assert not rehearsal.refused and len(rehearsal.step_seconds) == 1, rehearsal.refused
    taken |= places
    places, device, seconds = on_device(1, job_measure, str(tmp_path))[0]
    assert device == DEVICE and seconds > 0
    taken |= places | on_device(2, job_spied, measure, SHORTEST)[0]
    places, kind = on_device(1, job_losses)[0]
    assert kind == DEVICE
    taken |= places | on_device(1, job_plans)[0][0] | on_device(1, job_stall, str(tmp_path))[0]
    for name in ("windows", "mixer", "all_gather"):
        case = test_context_on_device.CASES[name]
        taken |= on_device(case.ranks, job_spied, test_context_on_device.trained, case)[0]
    taken |= on_device(1, job_spied, test_context_on_device.documents_held)[0]
    taken |= on_device(1, job_spied, test_context_on_device.read_of, DEVICE)[0]
    listed = set(re.findall(r"^\| `([\w/]+\.py:[\w<>]+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    missing = sorted(branches() - taken - listed)
    assert not missing, "\n".join(missing)
    assert sorted(listed - branches()) == [], "no such branch any more"
