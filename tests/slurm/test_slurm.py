"""Runs under a real Slurm, over two virtual nodes: who is who, and what survives its signals."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import pytest
from cluster_jobs import NODES, flags_of, wait_until
from e2e_runs import losses, metrics, only_run

from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.checkpoint.manifest import Manifest
from meshwright.planning.plan import Plan

ENDLESS = {"steps": 1_000_000}
AGAIN = ["status=$?", 'case "$status" in 138|143) scontrol requeue "$SLURM_JOB_ID" ;; esac', 'exit "$status"']
TELL = """
import os
from meshwright.distributed.process.world import get_world_info, ranks_per_node
who = [*get_world_info(), ranks_per_node()]
print(*who, *(os.environ[name] for name in ("SLURMD_NODENAME", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID")))
"""


def saved_step(run: Path) -> int:
    """The step of the last checkpoint; every step up to it stands in the metrics, once."""
    latest = CheckpointFolder(run / "checkpoints").latest()
    assert latest is not None
    step = Manifest.read(latest).extra["state"]["step"]
    assert [row["step"] for row in metrics(run)] == list(range(1, step + 1))
    return step


def steps_taken(run: Path, more_than: int = 3) -> int:
    """Wait until the run has taken some steps."""
    return wait_until(lambda: (taken := len(metrics(run))) > more_than and taken, 60, lambda: run)


@pytest.fixture
def no_longer(cluster):
    """``no_longer(job)``: the job ends with the test, whatever becomes of it."""
    jobs = []
    yield jobs.append
    for job in jobs:
        cluster.send(job)
        wait_until(lambda: cluster.facts(job)["JobState"] in ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT"), 60)  # noqa: B023


def test_tasks_know_their_places_and_meet_at_the_first_node(cluster, tmp_path):
    done = cluster.run(["srun", *NODES, "python", "-c", TELL], tmp_path)
    rows = sorted(line.split() for line in done.out.splitlines())
    port = str(20_000 + int(rows[0][-1]) % 12_000)
    assert [row[:-1] for row in rows] == [
        ["0", "0", "4", "2", "n1", "n1", port],
        ["1", "1", "4", "2", "n1", "n1", port],
        ["2", "0", "4", "2", "n2", "n1", port],
        ["3", "1", "4", "2", "n2", "n1", port],
    ], done


def test_a_batch_script_is_one_process_and_may_not_leave_nodes_idle(cluster, tmp_path):
    code = "from meshwright.distributed import get_world_info; print('world', *get_world_info())"
    job = cluster.submit(
        tmp_path, "env | grep ^SLURM_PROCID", f"python -c {shlex.quote(code)}", "meshwright train; echo status $?"
    )
    cluster.wait_for(job, "COMPLETED")
    said = (tmp_path / "job.out").read_text()
    assert "SLURM_PROCID=0" in said, "the trap that this is about is gone"
    assert "world 0 0 1" in said
    assert "this job has 2 nodes" in said and "srun meshwright train" in said and "status 2" in said
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def undisturbed(cluster, config, tmp_path_factory):
    """A run by srun to its end, and what its ranks said."""
    place = tmp_path_factory.mktemp("undisturbed")
    done = cluster.run(["srun", *NODES, "--label", "meshwright", "train", *flags_of(config)], place)
    assert done.status == 0, done
    return only_run(place / "runs"), done


def test_hybrid_sharding_by_node_trains_as_on_one_host_and_one_rank_speaks(undisturbed, on_one_host):
    run, done = undisturbed
    plan = Plan.from_json((run / "plan.json").read_text())
    assert {axis: size for axis, size in plan.mesh if size > 1} == {"dp_replicate": 2, "dp_shard": 2}
    assert losses(run) == pytest.approx(losses(on_one_host), rel=1e-7)
    assert {line.partition(":")[0] for line in done.out.splitlines()} == {"0"} and done.out.count("done: 60 steps") == 1


def test_told_to_stop_and_requeued_a_job_continues_its_own_run(cluster, config, undisturbed, tmp_path, no_longer):
    """The script names no run folder: the number of the job does."""
    job = cluster.submit(tmp_path, shlex.join(["srun", "meshwright", "train", *flags_of(config)]), *AGAIN)
    no_longer(job)
    run = tmp_path / f"runs/demo-slurm{job}"
    steps_taken(run)
    cluster.send(job, "--signal=USR1")
    cluster.wait_for(job, "PENDING")
    stopped_at = saved_step(run)
    assert 0 < stopped_at < 60

    facts = cluster.wait_for(job, "COMPLETED")
    said = (tmp_path / "job.out").read_text()
    assert facts["Restarts"] == "1" and only_run(tmp_path / "runs") == run
    assert (
        "stopped by SIGUSR1, saved" in said
        and f"(step {stopped_at}, sample {8 * stopped_at})" in said
        and "done: 60 steps" in said
    )
    assert saved_step(run) == 60
    assert losses(run) == pytest.approx(losses(undisturbed[0]), rel=1e-7)


def test_a_preempted_job_saves_and_comes_back_and_a_cancelled_one_saves_and_stays_away(
    cluster, config, tmp_path, no_longer
):
    job = cluster.submit(
        tmp_path, shlex.join(["srun", "meshwright", "train", *flags_of({**config, **ENDLESS})]), *AGAIN
    )
    no_longer(job)
    run = tmp_path / f"runs/demo-slurm{job}"
    steps_taken(run)
    more_urgent = cluster.run(["srun", "-p", "urgent", "-N2", "sleep", "1"], tmp_path)
    assert more_urgent.status == 0, more_urgent
    preempted_at = saved_step(run)

    steps_taken(run, preempted_at + 3)
    cluster.send(job)
    # KillWait is 30 s
    wait_until(lambda: (tmp_path / "job.out").read_text().count("stopped by SIGTERM, saved. Continue with") == 2, 30)
    facts = cluster.wait_for(job, "CANCELLED")
    assert (facts["ExitCode"], facts["Restarts"]) == (f"0:{signal.SIGTERM}", "1") and only_run(tmp_path / "runs") == run
    assert (
        saved_step(run) > preempted_at
        and f"(step {preempted_at}, sample {8 * preempted_at})" in (tmp_path / "job.out").read_text()
    )


def test_launch_submits_and_requeues_at_the_time_limit_until_the_run_is_complete(cluster, config, tmp_path, no_longer):
    (tmp_path / "job.toml").write_text('[slurm]\nnodes = 2\ntasks_per_node = 2\ntime = "2"\nextra = ["overcommit"]\n')
    words = ["meshwright", "launch", "job.toml", "--trust", "--slurm.signal_sec=70", *flags_of({**config, **ENDLESS})]
    done = cluster.run(words, tmp_path)
    assert done.status == 0 and done.err == "", done
    run = only_run(tmp_path / "runs")
    job = done.out.partition("submitted job ")[2].partition(":")[0]
    no_longer(job)
    assert f"submitted job {job}: 2 nodes of 2, 4 processes in all" in done.out and str(run) in done.out

    # Slurm looks at time limits every 30 s, so the signal strikes 50 to 80 s after the start: on a busy machine ranks
    # take 30 s to start.
    # Ranks that are struck while they start die, and the job is requeued as well.
    def requeued() -> bool:
        return bool(list(run.glob("checkpoints/*/manifest.json"))) and cluster.facts(job)["JobState"] == "PENDING"

    wait_until(requeued, 240, lambda: cluster.facts(job))
    stopped_at = saved_step(run)
    submitted = run / "slurm/config.toml"
    submitted.write_text(submitted.read_text().replace("steps = 1000000", f"steps = {stopped_at + 5}"))

    # a signal behind the last step has the job requeued once more
    assert int(cluster.wait_for(job, "COMPLETED", 240)["Restarts"]) >= 1
    assert saved_step(run) == stopped_at + 5
    said = {rank: (run / f"slurm/{job}_{rank}_log.out").read_text() for rank in range(4)}
    assert "stopped by SIGUSR1, saved" in said[0] and f"done: {stopped_at + 5:,} steps" in said[0]
    assert [said[rank] for rank in (1, 2, 3)] == [""] * 3
    assert AGAIN[1] in (run / f"slurm/{job}_submission.sh").read_text()


def test_what_sbatch_refuses_is_told_and_leaves_no_folder(cluster, tmp_path):
    done = cluster.run(["meshwright", "launch", "--slurm.partition=nowhere"], tmp_path)
    assert done.status == 2 and "sbatch did not take the job: " in done.err and "invalid partition" in done.err, done
    assert len(done.err.splitlines()) <= 2 and not list(tmp_path.glob("runs/*"))
