"""What the tests do with a cluster: submit, look, wait."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e_runs import Ended, finish, start

NODES = ["-N2", "-n4", "--overcommit"]


def flags_of(config: Mapping[str, object]) -> list[str]:
    return [f"--{key}={value}" for key, value in config.items()]


def wait_until(happens: Callable[[], object], seconds: float, what: Callable[[], object] = str):
    """Its value once it is true; a file that is not there yet, or is being written, counts as false."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
            if value := happens():
                return value
        time.sleep(0.1)
    raise AssertionError(f"did not happen within {seconds} s: {what()}")


@dataclass
class Cluster:
    environment: Mapping[str, str]

    def run(self, words: list[str], cwd: Path) -> Ended:
        return finish(start(words, self.environment, cwd), timeout=120)

    def submit(self, cwd: Path, *lines: str) -> str:
        """A batch script of those lines, on all nodes. Its output goes to ``job.out``. Returns the job's number."""
        script = cwd / "job.sh"
        script.write_text(
            "\n".join(["#!/bin/bash", f"#SBATCH {' '.join(NODES)} -o job.out --open-mode=append --requeue", *lines, ""])
        )
        done = self.run(["sbatch", "--parsable", str(script)], cwd)
        assert done.status == 0, done
        return done.out.strip()

    def facts(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, Restarts, ExitCode, ..."""
        said = subprocess.run(
            ["scontrol", "show", "job", job], env=dict(self.environment), capture_output=True, text=True
        ).stdout
        return dict(re.findall(r"(\w+)=(\S*)", said))

    def wait_for(self, job: str, state: str, seconds: float = 90.0) -> dict[str, str]:
        """Its facts once its state is that one."""
        wait_until(lambda: self.facts(job)["JobState"] == state, seconds, lambda: self.facts(job))
        return self.facts(job)

    def send(self, job: str, *words: str) -> None:
        subprocess.run(["scancel", *words, job], env=dict(self.environment), check=True)
