"""A run from its command to its folder, and the same run on other layouts."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys

import pytest
from e2e_runs import Job, assert_equal_checkpoints, finish, free_port, losses, metrics, only_run, start

from meshwright import __version__
from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.cli.main import main
from meshwright.core.config import to_toml
from meshwright.core.errors import MeshwrightError
from meshwright.planning.plan import Plan
from meshwright.training.config import Config
from meshwright.training.views.page import read_history

pytestmark = pytest.mark.all

ONE = {"layout.dp_shard": 1}
DDP2 = {"layout.dp_replicate": 2, "layout.dp_shard": 1}
DDP4 = {"layout.dp_replicate": 4, "layout.dp_shard": 1}
HSDP = {"layout.dp_replicate": 2, "layout.dp_shard": 2}
FSDP: dict = {}


@pytest.mark.fast
def test_the_default_run_on_four_processes_leaves_all_that_it_promises(
    meshwright, flags, corpus, cache, tmp_path, capsys, train, spmd
):
    here = tmp_path / "a folder with spaces"
    here.mkdir()
    relative = os.path.relpath(corpus, here)
    wanted = flags(
        {
            "out": "my runs",
            "data.source": [relative],
            "checkpoint.every": 2,
            "validation.every": 3,
            "logging.tensorboard": "auto",
            "sample.tokens": 40,
            "process.count": 4,
        }
    )
    done = meshwright("train", *wanted, cwd=here)
    assert (done.status, done.err) == (0, "")
    run = only_run(here / "my runs")
    assert done.out.splitlines()[0] == f"meshwright {__version__} · demo · 4 processes · my runs/demo-…"

    rows = metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.2 and rows[0]["loss"] == pytest.approx(math.log(257), rel=0.05)
    for row in rows:
        assert {
            "time",
            "loss",
            "grad_norm",
            "learning_rate",
            "tokens_per_second",
            "memory_bytes",
            "tokens",
            "skipped",
        } <= set(row)
        assert 0.98 * row["step"] * 8 * 32 < row["tokens"] <= row["step"] * 8 * 32
    assert [row["step"] for row in rows if "validation_loss" in row] == [3, 6]
    assert rows[5]["validation_loss"] < rows[2]["validation_loss"] < rows[0]["loss"]
    startup = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert startup["event"] == "startup" and {"launch", "process group", "data", "model", "first step"} <= set(startup)

    resolved = Config.from_toml(run / "config.toml")
    assert (resolved.model.vocab_size, resolved.model.dim, resolved.schedule.warmup_steps, resolved.run) == (
        257,
        64,
        0,
        "",
    )
    assert resolved.data.source == (str((here / relative).absolute()),)
    assert (run / "config.toml").read_text() == to_toml(resolved)
    asked = Config.from_toml(run / "request.toml")
    assert (asked.steps, asked.model.dim, asked.data.source) == (6, None, (relative,))

    assert main(["plan", str(run / "config.toml"), "--world", "4", "--json"]) == 0
    planned, written = capsys.readouterr().out, (run / "plan.json").read_text()
    assert (
        Plan.from_json(planned) == Plan.from_json(written)
        and Plan.from_json(written).diff(Plan.from_json(planned)) == []
    )
    assert Plan.from_json(written).world == 4

    assert CheckpointFolder(run / "checkpoints").steps() == [4, 6]
    assert "\nsample\n  The " in done.out and f"meshwright generate 'my runs/{run.name}' --prompt 'The '\n" in done.out
    assert "done: 6 steps" in done.out and f"validation loss {rows[5]['validation_loss']:.4f}" in done.out
    sample = read_history(run / "metrics.jsonl").sample
    assert sample is not None and sample.step == 6 and sample.text.startswith(sample.prompt == "The " and "The ")
    events = list((run / "tensorboard").glob("events.out.tfevents.*")) if (run / "tensorboard").is_dir() else []
    assert len(events) == (1 if importlib.util.find_spec("tensorboard") else 0)

    again = train(4, job=Job({"out": str(tmp_path / "again")}, str(run / "config.toml")))
    assert again[0].status == 0 and losses(again[0].folder) == losses(run)
    spmd(1, assert_equal_checkpoints, run / "checkpoints/step-00000006", again[0].folder / "checkpoints/step-00000006")
    assert main(["compare", str(run), str(again[0].folder), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert [one["loss"] for one in compared["runs"]] == [rows[-1]["loss"]] * 2
    assert set(compared["differences"]) == {"out"}


@pytest.fixture
def both(train):
    """{dtype: metrics} of the tiny run with ``changes``, in float64 and in float32."""

    def run(world, changes):
        found = {}
        for dtype in ("float64", "float32"):
            ranks = train(
                world, changes | {"techniques.precision.master": dtype, "validation.every": 6, "validation.samples": 13}
            )
            assert [rank.status for rank in ranks] == [0] * world
            found[dtype] = metrics(ranks[0].folder)
        return found

    return run


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        pytest.param(2, DDP2, id="ddp2"),
        pytest.param(2, FSDP, id="fsdp2"),
        pytest.param(4, DDP4, id="ddp4"),
        pytest.param(4, FSDP, id="fsdp4"),
        pytest.param(1, {"batch.microbatch": 3, "data.workers": 0}, id="one-microbatches-of-3"),
        pytest.param(4, HSDP | {"batch.microbatch": 1, "data.workers": 2}, id="hsdp2x2-microbatches-of-1"),
        pytest.param(4, {"layout.pp": 2, "layout.dp_shard": 2}, id="pp2-fsdp2"),
    ],
)
def test_every_layout_takes_the_steps_of_one_process(both, known, world, changes):
    one = known.get("one") or known.setdefault("one", both(1, ONE))
    other = both(world, changes)
    for row, reference in zip(other["float64"], one["float64"], strict=True):
        assert row["loss"] == pytest.approx(reference["loss"], rel=1e-10)
        assert row["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-10)
        assert (row["step"], row["tokens"], row["learning_rate"]) == (
            reference["step"],
            reference["tokens"],
            reference["learning_rate"],
        )
    ours, theirs = other["float32"], one["float32"]
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-6)
    assert ours[-1]["validation_loss"] == pytest.approx(theirs[-1]["validation_loss"], rel=1e-6)


def test_three_processes_over_nine_rows(flags, tmp_path):
    assert main(["train", *flags({"process.count": 3, "batch.global_batch": 9, "steps": 2})]) == 0
    run = only_run(tmp_path / "runs")
    assert len(losses(run)) == 2 and Plan.from_json((run / "plan.json").read_text()).world == 3


PLAIN_SCRIPT = """
import sys
from meshwright import Trainer

for number in range(2):  # a notebook runs its cell again
    sys.exitcode = Trainer({
        "name": "script", "out": "runs", "steps": 1,
        "model": {"size": "debug"},
        "data": {"source": ["few words.txt"], "cache": "cache", "seq_len": 4, "workers": 0},
        "batch": {"global_batch": 2},
        "validation": {"every": 0}, "checkpoint": {"every": 0},
        "sample": {"tokens": 0}, "logging": {"tensorboard": "off"},
    }).run()
    print("status", sys.exitcode)
"""


def test_a_plain_script_trains_on_a_few_words_in_one_process(meshwright, tmp_path):
    (tmp_path / "few words.txt").write_text("a mesh of one rank\n")
    (tmp_path / "script.py").write_text(PLAIN_SCRIPT)
    done = meshwright(prefix=(sys.executable, "script.py"))
    assert (done.status, done.err) == (0, "") and done.out.count("status 0") == 2
    first, second = sorted((tmp_path / "runs").iterdir())
    assert losses(first) == losses(second) and len(losses(first)) == 1
    assert "validation_loss" not in metrics(first)[0] and "\nsample\n" not in done.out
    assert sorted(path.name for path in (first / "checkpoints").iterdir()) == ["step-00000001"]


def test_what_is_switched_off_does_not_happen_and_what_cannot_happen_is_said(train):
    off = train(2, {"steps": 2})[0]
    assert [("validation_loss" in row) for row in metrics(off.folder)] == [False, False]
    assert "no validation" not in off.out and "\nsample\n" not in off.out
    assert [path.name for path in sorted((off.folder / "checkpoints").iterdir())] == ["step-00000002"]

    wanted = {"steps": 1, "validation.every": 1}
    little = {"data.source": [str(off.folder / "metrics.jsonl")], "data.format": "text", "data.seq_len": 256}
    short = train(2, wanted | little | {"data.validation_fraction": 0.1})[0]
    assert (
        "no validation: no source holds out a row of data.seq_len = 256 tokens (data.validation_fraction = 0.1)"
        in short.out
    )
    assert "validation_loss" not in metrics(short.folder)[0]
    exactly = train(2, wanted | {"data.validation_fraction": 0.0})[0]
    assert "no validation: no source holds out a row" in exactly.out


def under_torchrun(environment, cwd, words):
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    return [finish(start([*launcher, "-m", "meshwright", *words], environment, cwd))]


def under_slurm(environment, cwd, words):
    """What srun does for two tasks on this host: the same command twice, with its variables."""
    job = {
        "SLURM_JOB_ID": str(free_port() - 20_000),
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "127.0.0.1",
    }
    tasks = [environment | job | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2)]
    return [
        finish(process)
        for process in [start([sys.executable, "-m", "meshwright", *words], mine, cwd) for mine in tasks]
    ]


@pytest.mark.parametrize("launcher", [under_torchrun, under_slurm])
def test_under_a_launcher_each_process_is_a_rank_and_one_speaks(launcher, environment, flags, tmp_path, train):
    ended = launcher(
        environment, tmp_path, ["train", *flags({"steps": 2, "layout.dp_replicate": 2, "layout.dp_shard": 1})]
    )
    assert [one.status for one in ended] == [0] * len(ended), ended
    assert sum(one.out.count("done: 2 steps") for one in ended) == 1
    run = only_run(tmp_path / "runs")
    assert Plan.from_json((run / "plan.json").read_text()).world == 2
    pool = train(2, DDP2 | {"steps": 2})[0]
    assert losses(run) == pytest.approx(losses(pool.folder), rel=1e-6)


@pytest.mark.follows("optimizer.lr")
@pytest.mark.parametrize(("limit", "taken"), [(3, 3), (0, 1)])
def test_a_run_that_diverges_skips_and_then_stops(train, limit, taken):
    hopeless = {
        "optimizer.lr": 1e38,
        "optimizer.max_norm": 0,
        "optimizer.max_skipped_steps": limit,
        "schedule.kind": "constant",
    }
    ranks = train(2, hopeless | {"steps": 20, "checkpoint.every": 1})
    problem = ranks[0].error
    assert isinstance(problem, MeshwrightError) and {str(rank.error) for rank in ranks} == {str(problem)}
    assert f"{taken} steps in a row" in str(problem) and f"optimizer.max_skipped_steps = {limit}" in str(problem)
    rows = metrics(ranks[0].folder)
    finite = [row for row in rows if math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])]
    assert 0 < len(finite) < 20 and [row["skipped"] for row in rows] == [0] * len(finite) + list(range(1, taken + 1))
    assert f"the last is step {len(rows)}" in str(problem) and f"from sample {8 * len(finite)} on" in str(problem)
    assert "The weights are those before them. Lower optimizer.lr, lengthen schedule.warmup_steps" in str(problem)
    assert train(2, hopeless | {"steps": len(rows), "optimizer.lr": 1e-3})[0].status == 0


@pytest.mark.first
def test_tensorboard_that_is_asked_for_and_missing_is_refused_before_a_folder_is_made(
    flags, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert main(["train", *flags({"logging.tensorboard": "on", "process.count": 1})]) == 2
    error = capsys.readouterr().err
    assert error.startswith("meshwright: logging.tensorboard = 'on' needs the package 'tensorboard'")
    assert "pip install 'tensorboard" in error
    assert not (tmp_path / "runs").exists()
