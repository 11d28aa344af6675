"""A run's checkpoints: step folders, the pointer to the latest, and how many are kept. No collectives here: rank 0 calls it."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import IntegrityError

from .save import PARTIAL, sync_folder

LATEST = "latest"


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder ``path`` with ``step-00000100`` … inside, and ``latest``, a text file that names one of them."""

    path: Path

    def of_step(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps whose folders have their final names, ascending."""
        found = [re.fullmatch(r"step-(\d{8,})", entry.name) for entry in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(int(match.group(1)) for match in found if match)

    def latest(self) -> Path | None:
        """The checkpoint to continue from; None where there is none yet.

        Raises:
            IntegrityError: the pointer names a folder that is gone.
        """
        pointer = self.path / LATEST
        if not pointer.is_file():
            return None
        target = self.path / pointer.read_text().strip()
        if not target.is_dir():
            others = ", ".join(f"step-{s:08d}" for s in self.steps()) or "none"
            raise IntegrityError(f"{pointer} names {target.name}, which is gone. Checkpoints that are there: {others}; write one of these into {pointer}.")
        return target

    def half_written(self) -> list[Path]:
        """What an interrupted save left behind; never read, removed by the next save of that step."""
        return sorted(entry for entry in self.path.iterdir() if entry.name.endswith(PARTIAL)) if self.path.is_dir() else []

    def point_to(self, step: int) -> None:
        """Move ``latest``, atomically."""
        temporary = self.path / (LATEST + ".new")
        with open(temporary, "w") as file:
            file.write(self.of_step(step).name + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / LATEST)
        sync_folder(self.path)

    def keep_last(self, count: int) -> None:
        """Remove all but the newest ``count`` steps (0: keep all); the one that ``latest`` names always stays."""
        pointed = self.latest()
        for step in self.steps()[:-count] if count else []:
            if self.of_step(step) != pointed:
                shutil.rmtree(self.of_step(step), ignore_errors=True)
