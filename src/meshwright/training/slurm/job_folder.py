"""Make the folder of a Slurm job's run once, and find it again when the job is requeued.

Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from meshwright.core.config import to_toml
from meshwright.core.files import replace_text
from meshwright.training.config import Config

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
