"""Manage a run's checkpoints: step folders, the pointer to the latest, old ones. Rank 0 calls it: no collectives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import IntegrityError
from meshwright.core.files import replace_text

from .replacing import PARTIAL, is_there, remove

LATEST = "latest"
STEP = r"step-(\d{8,})"


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder ``path`` with ``step-00000100`` … inside, and ``latest``, a text file that names one of them."""

    path: Path

    @property
    def pointer(self) -> Path:
        return self.path / LATEST

    def of_step(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """List the steps whose folders have their final names, ascending."""
        found = [re.fullmatch(STEP, entry.name) for entry in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(int(match.group(1)) for match in found if match)

    def latest(self) -> Path | None:
        """Return the checkpoint to continue from; None where there is none yet.

        Raises:
            IntegrityError: the pointer names a folder that is gone, or none.
        """
        pointer = self.pointer
        if not pointer.is_file():
            return None
        name = pointer.read_text().strip()
        target = self.path / name
        if not re.fullmatch(STEP, name) or not is_there(target):
            others = ", ".join(f"step-{s:08d}" for s in self.steps()) or "none"
            what = (
                f"names {name}, which is gone"
                if re.fullmatch(STEP, name)
                else f"is damaged: it holds {name!r}, no checkpoint's name"
            )
            raise IntegrityError(
                f"{pointer} {what}. Checkpoints that are there: {others}; write one of these into {pointer}."
            )
        return target

    def half_written(self) -> list[Path]:
        """List folders that interrupted saves left: never read, and removed by the next save of their step."""
        return (
            sorted(entry for entry in self.path.iterdir() if entry.name.endswith(PARTIAL)) if self.path.is_dir() else []
        )

    def point_to(self, step: int) -> None:
        """Point ``latest`` to a step, atomically."""
        replace_text(self.pointer, self.of_step(step).name + "\n")

    def keep_last(self, count: int) -> None:
        """Remove all but the newest ``count`` steps (0: keep all); the one that ``latest`` names always stays."""
        pointed = self.latest()
        for step in self.steps()[:-count] if count else []:
            if self.of_step(step) != pointed:
                remove(self.of_step(step))
