"""Write the batch script of a run's Slurm job, and submit it.

Torch-free; submitit is imported where it is used.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from meshwright.core.config import to_toml
from meshwright.core.errors import ConfigError, MissingExtraError
from meshwright.core.files import replace_text
from meshwright.training.run.trust import FLAG as TRUST
from meshwright.training.run.trust import code_in

from .config import LaunchConfig
from .job_folder import FOLDER


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
            f"sbatch did not take the job: {str(error).strip()}. Add --dry-run to see the script."
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
        teardown=_teardown(job.requeue),
        # Since Slurm 22.05 srun does not inherit this from sbatch.
        srun_args=[f"--cpus-per-task={job.cpus_per_task}"] if job.cpus_per_task else None,
        additional_parameters={
            "signal": f"USR1@{job.signal_sec}",
            "requeue" if job.requeue else "no-requeue": True,
            **extra,
        },
    )
    return executor


def _teardown(requeue: bool) -> list[str]:
    """Return the script's lines after srun. ``scancel`` ends the script too, so a cancelled job never reaches them."""
    stopped = "|".join(str(128 + number) for number in (signal.SIGUSR1, signal.SIGTERM))
    again = [f'case "$status" in {stopped}) scontrol requeue "$SLURM_JOB_ID" ;; esac'] if requeue else []
    return [
        "status=$?",
        "# told to stop for the time limit (USR1) or a preemption (TERM): the run is not complete",
        *again,
        'exit "$status"',
    ]
