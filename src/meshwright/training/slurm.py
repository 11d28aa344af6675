"""Submit runs as Slurm jobs. Torch-free; submitit is imported where it is used."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from meshwright.core.config import to_toml
from meshwright.core.config.ranges import FROM_0, FROM_1, Range, check_ranges
from meshwright.core.devices import CPU, CUDA
from meshwright.core.errors import ConfigError, MissingExtraError
from meshwright.core.files import replace_text
from meshwright.training.config import Config
from meshwright.training.run.request import FLAG as TRUST
from meshwright.training.run.request import code_in

# --- define the settings of a run's Slurm job, and refuse contradictory ones

OWN_FLAGS = {
    "nodes": "slurm.nodes",
    "ntasks": "slurm.nodes and slurm.tasks_per_node",
    "ntasks-per-node": "slurm.tasks_per_node",
    "gpus-per-node": "slurm.gpus_per_node",
    "cpus-per-task": "slurm.cpus_per_task",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "time": "slurm.time",
    "signal": "slurm.signal_sec",
    "requeue": "slurm.requeue",
    "no-requeue": "slurm.requeue",
    "job-name": "name",
    "output": "run (logs lie in its folder)",
    "error": "run (logs lie in its folder)",
    "array": "one 'meshwright launch' for each run",
}
"""Flags of sbatch that slurm.extra may not set, and the keys that set them."""


_WORD = Range("letters, digits, '.', '_', ',' and '-'", lambda value: re.fullmatch(r"[\w.,-]*", value) is not None)
_TIME = re.compile(
    r"(?:(?P<d>\d+)-(?P<h>\d+)(?::(?P<m>\d+)(?::(?P<s>\d+))?)?)|(?:(?:(?P<h2>\d+):)?(?P<m2>\d+):(?P<s2>\d+))|(?P<m3>\d+)"
)
_DURATION = Range(
    "minutes, minutes:seconds, hours:minutes:seconds, or days-hours[:minutes[:seconds]]",
    lambda value: not value or _TIME.fullmatch(value) is not None,
)
_LINE = Range("one line", lambda value: "\n" not in value)
_FLAG = Range(
    "a flag of sbatch without its dashes, like mem=64G or exclusive",
    lambda value: re.fullmatch(r"[a-z][a-z0-9-]+(=[^\n]+)?", value) is not None,
)


@dataclass(frozen=True)
class SlurmConfig:
    """The job that ``meshwright launch`` submits; the other verbs pass it over."""

    nodes: Annotated[int, FROM_1] = 1
    """Nodes of the job."""
    tasks_per_node: Annotated[int, FROM_0] = 0
    """Processes on each node; 0: one per GPU, or a single one where no GPUs are asked for."""
    gpus_per_node: Annotated[int, FROM_0] = 0
    """GPUs of each node; 0: train on the CPUs."""
    cpus_per_task: Annotated[int, FROM_0] = 0
    """CPU cores of each process; 0: what the cluster gives."""
    partition: Annotated[str, _WORD] = ""
    """Partition; empty: the cluster's default, as for account and qos."""
    account: Annotated[str, _WORD] = ""
    """Account that the job is charged to."""
    qos: Annotated[str, _WORD] = ""
    """Quality of service."""
    time: Annotated[str, _DURATION] = ""
    """Time limit in sbatch's words, like "90" (minutes), "12:00:00" or "2-12"; empty: the partition's."""
    signal_sec: Annotated[int, Range("from 1 to 65535", lambda value: 1 <= value <= 65_535)] = 120
    """Seconds before the time limit at which all ranks save and stop; Slurm may send the signal up to a minute
    earlier."""
    requeue: bool = True
    """After a stop for the time limit or a preemption the job goes back into the queue, until the run is complete."""
    setup: tuple[Annotated[str, _LINE], ...] = ()
    """Lines of shell before the run, like "module load cuda"."""
    extra: tuple[Annotated[str, _FLAG], ...] = ()
    """More flags of sbatch without their dashes, like "mem=64G" or "exclusive"."""

    @property
    def tasks(self) -> int:
        """Processes on each node."""
        return self.tasks_per_node or self.gpus_per_node or 1

    @property
    def device(self) -> str:
        asks = ("gpus", "gres=gpu")
        return CUDA if self.gpus_per_node or any(flag.startswith(asks) for flag in self.extra) else CPU


@dataclass(frozen=True)
class LaunchConfig(Config):
    """A training run and the job that trains it."""

    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    def without_job(self) -> Config:
        return Config(**{f.name: getattr(self, f.name) for f in fields(Config)})


def check_job(config: LaunchConfig) -> None:
    """Refuse a job that could not run.

    Raises:
        ConfigError: a value out of its range, or values that contradict each other.
    """
    check_ranges(config.slurm, "slurm")
    job = config.slurm
    if job.gpus_per_node and job.tasks != job.gpus_per_node:
        raise ConfigError(
            f"slurm.tasks_per_node = {job.tasks_per_node} with slurm.gpus_per_node = {job.gpus_per_node}: each process"
            f" drives one GPU. Set slurm.tasks_per_node = {job.gpus_per_node} (or 0), or slurm.gpus_per_node ="
            f" {job.tasks_per_node}."
        )
    if job.time and seconds_of(job.time) <= job.signal_sec:
        raise ConfigError(
            f"slurm.time = {job.time!r} is {seconds_of(job.time)} s, and slurm.signal_sec = {job.signal_sec}: the job"
            f" would be told to stop as it starts. Raise slurm.time, or lower slurm.signal_sec."
        )
    for flag in job.extra:
        name = flag.partition("=")[0]
        if name in OWN_FLAGS:
            raise ConfigError(f"slurm.extra: '{name}' has a place of its own: {OWN_FLAGS[name]}.")


def seconds_of(time: str) -> int:
    """Convert a time limit in sbatch's format to seconds."""
    found = _TIME.fullmatch(time)
    parts = {key: int(value) for key, value in (found.groupdict() if found else {}).items() if value}
    days, hours = parts.get("d", 0), parts.get("h", 0) + parts.get("h2", 0)
    minutes = parts.get("m", 0) + parts.get("m2", 0) + parts.get("m3", 0)
    return ((days * 24 + hours) * 60 + minutes) * 60 + parts.get("s", 0) + parts.get("s2", 0)


# --- make the folder of a Slurm job's run once, and find it again when the job is requeued

FOLDER = "slurm"
"""Subfolder of a run for Slurm: script, logs, and a record of the job that created the run."""


def job_number() -> str:
    """Return the number of the Slurm job that this process belongs to; empty without a job.

    In a job's steps after the first, the step's number is appended.
    """
    job, step = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID", "0")
    if not job.isdigit():
        return ""
    return f"{job}.{step}" if step.isdigit() and 0 < int(step) < 0xFFFF_FFF0 else job


def note_job(folder: Path, config: Config) -> None:
    """Record in a new run's folder the job that created it, and a digest of its config."""
    if job_number():
        (folder / FOLDER).mkdir(exist_ok=True)
        replace_text(folder / FOLDER / "job.json", json.dumps(_facts(config)))


def run_of_requeued_job(config: Config) -> str:
    """Return the folder of the run that this job began before it was requeued.

    Empty if this is the job's first start, or it began no such run.
    """
    if not job_number() or os.environ.get("SLURM_RESTART_COUNT", "0") in ("", "0"):
        return ""
    for note in sorted(Path(config.out).expanduser().glob(f"{config.name}-slurm{job_number()}*/{FOLDER}/job.json")):
        if json.loads(note.read_text()) == _facts(config):
            return str(note.parent.parent)
    return ""


def _facts(config: Config) -> dict[str, str]:
    """Identify a run by job and config, since a job may start several runs one after the other."""
    return {"job": job_number(), "asked": hashlib.sha256(to_toml(config).encode()).hexdigest()}


# --- write the batch script of a run's Slurm job, and submit it


def folder_of(config: LaunchConfig) -> Path:
    """Return the absolute path of the run's folder: the config's, or a new name. Creates nothing."""
    if config.run:
        folder = Path(config.run).expanduser().absolute()
    else:
        parent, stamp = Path(config.out).expanduser().absolute(), time.strftime("%Y%m%d-%H%M%S")
        names = (f"{config.name}-{stamp}" + (f"-{attempt}" if attempt else "") for attempt in itertools.count())
        folder = next(path for path in (parent / name for name in names) if not path.exists())
    if "%" in str(folder):
        raise ConfigError(
            f"run = {folder}: Slurm reads '%' in the names of its logs as a pattern; choose another folder"
        )
    return folder


def batch_script(config: LaunchConfig, run: Path) -> str:
    """Return the script for sbatch. Raises MissingExtraError without submitit."""
    return _executor(config, run)._make_submission_file_text(_command(config, run), "")


def submit(config: LaunchConfig, run: Path) -> str:
    """Write the run's config and script into its folder, submit the script, and return the job's number.

    Raises:
        ConfigError: sbatch is not installed here, or refuses the script.
        MissingExtraError: submitit is not installed.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "sbatch is not on PATH, so no job can be submitted from here: run this on a login node of the cluster, or"
            " add --dry-run to see the script without submitting it"
        )
    executor = _executor(config, run)
    made = not run.exists()
    try:
        (run / FOLDER).mkdir(parents=True, exist_ok=True)
        replace_text(run / FOLDER / "config.toml", to_toml(config))
    except OSError as error:
        raise ConfigError(f"{run}: cannot write the run's folder ({error})") from None
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):  # the exception has the same text
            return executor._submit_command(_command(config, run)).job_id
    except (FailedJobError, FailedSubmissionError) as error:
        if made:
            shutil.rmtree(run)
        raise ConfigError(
            f"sbatch did not take the job: {str(error).strip()}; add --dry-run to see the script without submitting it"
        ) from None


def _command(config: LaunchConfig, run: Path) -> str:
    words = [sys.executable, "-u", "-P", "-m", "meshwright", "train", str(run / FOLDER / "config.toml"), f"--run={run}"]
    return shlex.join([*words, TRUST] if code_in(config.without_job()) else words)


def _executor(config: LaunchConfig, run: Path) -> Any:
    """Return submitit's executor with the job's parameters.

    submitit's own way to continue (it calls a method of rank 0 in a signal handler) cannot save sharded state. So the
    executor submits a command instead of a pickled function, the ranks handle the signal themselves, and the last
    lines of the script requeue the job.
    """
    try:
        from submitit import SlurmExecutor
    except ImportError:
        raise MissingExtraError("meshwright launch", "submitit", "slurm") from None

    class Executor(SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 2  # a script can be written where there is no Slurm

    job = config.slurm
    extra = {name: value if equals else True for name, equals, value in (flag.partition("=") for flag in job.extra)}
    stopped = "|".join(str(128 + number) for number in (signal.SIGUSR1, signal.SIGTERM))
    executor = Executor(folder=run / FOLDER)
    executor.update_parameters(
        job_name=config.name,
        nodes=job.nodes,
        ntasks_per_node=job.tasks,
        gpus_per_node=job.gpus_per_node or None,
        cpus_per_task=job.cpus_per_task or None,
        partition=job.partition or None,
        account=job.account or None,
        qos=job.qos or None,
        time=job.time or None,
        wckey=None,
        setup=list(job.setup) or None,
        # after srun; ``scancel`` ends the script too, so a cancelled job never reaches these lines
        teardown=[
            "status=$?",
            "# told to stop for the time limit (USR1) or a preemption (TERM): the run is not complete",
            *([f'case "$status" in {stopped}) scontrol requeue "$SLURM_JOB_ID" ;; esac'] if job.requeue else []),
            'exit "$status"',
        ],
        # Since Slurm 22.05 srun does not inherit this from sbatch.
        srun_args=[f"--cpus-per-task={job.cpus_per_task}"] if job.cpus_per_task else None,
        additional_parameters={
            "signal": f"USR1@{job.signal_sec}",
            "requeue" if job.requeue else "no-requeue": True,
            **extra,
        },
    )
    return executor
