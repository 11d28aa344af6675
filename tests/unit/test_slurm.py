"""The job of a run: its keys, its script, and the folder that a requeued job finds again. tests/slurm asks a real
Slurm.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli import main as cli
from meshwright.cli.arguments import read_config, read_launch
from meshwright.core.config import field_doc, public_keys
from meshwright.core.errors import ConfigError, MissingExtraError
from meshwright.training.config import Config
from meshwright.training.run.folder import RunFolder, changes
from meshwright.training.slurm import LaunchConfig, SlurmConfig, batch_script, folder_of, seconds_of, submit

KEYS = (
    "nodes tasks_per_node gpus_per_node cpus_per_task partition account qos time signal_sec requeue setup extra".split()
)


def read(*argv: str) -> LaunchConfig:
    return read_launch(list(argv))


def script(*argv: str) -> list[str]:
    return batch_script(read(*argv), Path("/shared/runs/one")).splitlines()


def test_the_keys_are_these_and_each_has_its_doc():
    assert public_keys(SlurmConfig) == KEYS
    assert public_keys(LaunchConfig) == [*public_keys(Config), *(f"slurm.{key}" for key in KEYS)]
    assert all(field_doc(SlurmConfig, key) for key in KEYS)


@pytest.mark.first
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--slurm.nodes=0"], "slurm.nodes = 0 is out of range: it must be 1 or more"),
        (["--slurm.tasks_per_node=-1"], "slurm.tasks_per_node = -1 is out of range"),
        (["--slurm.gpus_per_node=-1"], "slurm.gpus_per_node = -1 is out of range"),
        (["--slurm.cpus_per_task=-1"], "slurm.cpus_per_task = -1 is out of range"),
        (["--slurm.signal_sec=0"], "slurm.signal_sec = 0 is out of range: it must be from 1 to 65535"),
        (["--slurm.partition=a b"], "slurm.partition = 'a b' is out of range"),
        (["--slurm.time=soon"], "slurm.time = 'soon' is out of range: it must be minutes,"),
        (
            ["--slurm.time=2"],
            "slurm.time = '2' is 120 s, and slurm.signal_sec = 120: the job would be told to stop as it starts",
        ),
        (["--slurm.setup=a\nb"], "slurm.setup[0] = 'a\\nb' is out of range: it must be one line"),
        (
            ["--slurm.extra=a\nb"],
            "slurm.extra[0] = 'a\\nb' is out of range: it must be a flag of sbatch without its dashes",
        ),
        (["--slurm.extra", "mem=4G", "nodes=3"], "slurm.extra: 'nodes' has a place of its own: slurm.nodes."),
        (
            ["--slurm.gpus_per_node=4", "--slurm.tasks_per_node=2"],
            "each process drives one GPU. Set slurm.tasks_per_node = 4",
        ),
        (["--slurm.nods=2"], "unknown key 'slurm.nods'. Did you mean 'slurm.nodes'?"),
        (["--partition=main"], "It belongs elsewhere: slurm.partition"),
    ],
)
def test_a_job_that_could_not_run_is_refused(flags, says):
    with pytest.raises(ConfigError) as caught:
        read(*flags)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5_400), ("1:30", 90), ("12:00:00", 43_200), ("2-12", 216_000), ("1-00:01", 86_460), ("1-02:03:04", 93_784)],
)
def test_time_limits_are_read_as_sbatch_reads_them(time, seconds):
    assert seconds_of(time) == seconds


def test_the_job_stands_in_the_file_or_in_flags_and_other_verbs_pass_it_over(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('steps = 5\n[slurm]\nnodes = 2\npartition = "main"\n')
    for words in ([str(path), "--slurm.nodes=3"], ["--slurm.nodes=3", str(path)]):
        config = read(*words)
        assert (config.steps, config.slurm) == (5, SlurmConfig(nodes=3, partition="main"))
    assert type(read_config([str(path)], prog="p")) is Config
    with pytest.raises(ConfigError, match=r"--slurm\.nodes: unknown key 'slurm'"):
        read_config([str(path), "--slurm.nodes=3"], prog="p")
    path.write_text("[slurm]\nnods = 2\n")
    with pytest.raises(ConfigError, match=r"run\.toml:2: unknown key 'slurm\.nods'"):
        read_config([str(path)], prog="p")


def test_a_run_that_was_launched_is_launched_again_with_its_job(tmp_path):
    (tmp_path / "slurm").mkdir()
    (tmp_path / "config.toml").write_text("steps = 5\n")
    assert (read(str(tmp_path)).run, read(str(tmp_path)).slurm) == (str(tmp_path), SlurmConfig())
    (tmp_path / "slurm/config.toml").write_text("steps = 9\n[slurm]\nnodes = 2\n")
    config = read(str(tmp_path), "--steps=7")
    assert (config.steps, config.run, config.slurm.nodes) == (7, str(tmp_path), 2)


def test_the_script_says_what_was_asked_for_and_nothing_else():
    flags = (
        "--slurm.nodes=2 --slurm.gpus_per_node=4 --slurm.cpus_per_task=8 --slurm.time=2-12 --slurm.account=lab"
        " --slurm.qos=high"
    )
    lines = script(
        *flags.split(), "--name=big", "--slurm.setup", "module load cuda", "--slurm.extra", "mem=64G", "exclusive"
    )
    assert {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH") and "log" not in line} == {
        *(
            "nodes=2",
            "gpus-per-node=4",
            "ntasks-per-node=4",
            "cpus-per-task=8",
            "time=2-12",
            "account=lab",
            "qos=high",
            "job-name=big",
        ),
        *("signal=USR1@120", "requeue", "open-mode=append", "mem=64G", "exclusive"),
    }
    (srun,) = [line for line in lines if line.startswith("srun ")]
    assert lines.index("module load cuda") < lines.index(srun)
    assert "--output /shared/runs/one/slurm/%j_%t_log.out" in srun and "--cpus-per-task=8" in srun
    assert srun.endswith("-m meshwright train /shared/runs/one/slurm/config.toml --run=/shared/runs/one")
    assert [line.partition("=")[0].removeprefix("#SBATCH --") for line in script() if line.startswith("#SBATCH")] == [
        *("error", "job-name", "nodes", "ntasks-per-node", "open-mode", "output", "requeue", "signal"),
    ]


@pytest.mark.parametrize(
    ("requeue", "status", "again"), [(True, 138, True), (True, 143, True), (True, 1, False), (False, 138, False)]
)
def test_the_end_of_the_script_requeues_what_was_told_to_stop(tmp_path, requeue, status, again):
    lines = script(f"--slurm.requeue={str(requeue).lower()}", "--slurm.extra=comment=x")
    at = next(i for i, line in enumerate(lines) if line.startswith("srun "))
    lines[at] = f"(exit {status})"
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "scontrol").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    done = subprocess.run(["bash", "-c", "\n".join(lines)], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "requeue 17\n" if again else "")


def test_without_sbatch_the_way_to_see_the_script_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"sbatch is not on PATH.*add --dry-run"):
        submit(read(f"--out={tmp_path}/runs"), tmp_path / "runs/one")
    assert not (tmp_path / "runs").exists()
    assert cli.main(["launch", f"--out={tmp_path}/runs", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash") and not (tmp_path / "runs").exists()


def test_a_layout_that_does_not_fit_the_nodes_is_refused_before_the_queue(capsys):
    assert (
        cli.main(["launch", "--slurm.nodes=2", "--slurm.tasks_per_node=2", "--layout.dp_replicate=3", "--dry-run"]) == 2
    )
    assert "dp_replicate = 3 does not divide the world size 4" in capsys.readouterr().err


def test_without_submitit_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*submitit"):
        script()


def test_the_folder_is_the_one_that_is_named_or_a_new_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert folder_of(read("--run=here")) == tmp_path / "here"
    first = folder_of(read())
    assert first.parent == tmp_path / "runs" and first.name.startswith("demo-") and not first.exists()
    with pytest.raises(ConfigError, match="Slurm reads '%'"):
        folder_of(read("--run=a%j"))


# --- the folder of a job that names none


@pytest.fixture
def job(monkeypatch):
    """``job("17", restarts=1, step=2)``: this process belongs to that job."""

    def set_job(number: str, restarts: int = 0, step: int = 0) -> None:
        values = {"SLURM_JOB_ID": number, "SLURM_RESTART_COUNT": str(restarts or ""), "SLURM_STEP_ID": str(step)}
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_job


def test_a_requeued_job_finds_its_run_and_no_other(job, tmp_path):
    config = Config(out=str(tmp_path))
    other = replace(config, steps=7)
    job("17")
    first, second = (RunFolder.open(one, {}).path for one in (config, other))
    assert (first.name, second.name) == ("demo-slurm17", "demo-slurm17-1")

    job("17", restarts=1)
    assert [RunFolder.open(one, {}).path for one in (other, config)] == [second, first]
    assert RunFolder.open(replace(config, steps=9), {}).path.name == "demo-slurm17-2", "this job had not come so far"
    job("170", restarts=1)
    assert RunFolder.open(config, {}).path.name == "demo-slurm170"


def test_steps_of_a_job_are_runs_of_their_own(job, tmp_path):
    config = Config(out=str(tmp_path))
    for restarts in (0, 1):
        for step, name in (
            (0, "demo-slurm17"),
            (2, "demo-slurm17.2"),
            (0xFFFF_FFFA, "demo-slurm17" if restarts else "demo-slurm17-1"),
        ):
            job("17", restarts, step)
            assert RunFolder.open(config, {}).path.name == name


def test_a_requeued_job_does_not_continue_what_became_another_run(job, tmp_path):
    config = Config(out=str(tmp_path))
    job("17")
    (RunFolder.open(config, {"data": "a"}).path / "identity.json").write_text('{"data": "a"}')
    job("17", restarts=1)
    with pytest.raises(ConfigError, match="holds another run: data was a and is now b"):
        RunFolder.open(config, {"data": "b"})


@pytest.mark.parametrize(
    ("there", "now", "said"),
    [
        ([{"at": 0}, {"at": 12}, 3], [{"at": 0}, {"at": 6}, 4], ["a[1].at was 12 and is now 6"]),
        ([1], [1, 2], ["a[1] was None and is now 2"]),
        ("x" * 40 + "y", "x" * 40 + "z", [f"a was …{'x' * 12}y and is now …{'x' * 12}z"]),
        ("1", 1, ["a was 1 and is now 1"]),
        ([1, {"b": 2}], [1, {"b": 2}], []),
    ],
)
def test_what_changed_is_said_from_where_it_differs(there, now, said):
    assert list(changes({"a": there}, {"a": now})) == said


def test_none_of_it_needs_torch_or_submitit():
    imported = "import sys, meshwright.training.slurm, meshwright.training.slurm"
    code = f"{imported}; print({{'torch', 'submitit', 'json'}} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
        == "{'json'}"
    )
