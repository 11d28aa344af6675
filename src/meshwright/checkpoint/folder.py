"""Manage a run's checkpoints: step folders, the pointer to the latest, old ones. Rank 0 calls it: no collectives."""

from __future__ import annotations

import logging
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import IntegrityError
from meshwright.core.files import replace_text, sync_folder

# --- replace a folder so that, whenever the machine stops, the old or the new one is there. No collectives

log = logging.getLogger("meshwright")

PARTIAL = ".partial"
"""Suffix of a folder that is being written; it is never read."""
OLD = ".old"
"""Suffix of a folder that stepped aside for its successor."""


def beside(place: Path, ending: str) -> Path:
    return place.with_name(place.name + ending)


def put_in_place(new: Path, place: Path) -> None:
    """Rename ``new`` to ``place``, then remove what was there.

    There is no portable exchange of two folders: for the moment between the renames the old one is called ``place`` +
    ".old", and ``settle`` brings it back.

    Raises:
        OSError: the exchange failed; ``place`` is as before.
    """
    settle(place)
    old = beside(place, OLD)
    shutil.rmtree(old, ignore_errors=True)
    replaces = place.exists()
    if replaces:
        os.rename(place, old)
    try:
        os.rename(new, place)
        sync_folder(place.parent)
    except BaseException:
        with suppress(OSError):
            if place.exists():
                os.rename(place, new)
            if replaces:
                os.rename(old, place)
        raise
    shutil.rmtree(old, ignore_errors=True)


def settle(place: Path) -> None:
    """Finish what a crash in ``put_in_place`` left: where ``place`` is gone, the old folder takes it again."""
    old = beside(place, OLD)
    if old.is_dir() and not place.exists():
        os.rename(old, place)


def is_there(place: Path) -> bool:
    """Return whether the folder is in its place, or ``settle`` will bring it there."""
    return place.is_dir() or beside(place, OLD).is_dir()


def remove(place: Path) -> None:
    """Remove a folder, renamed first lest half of it keep its name; what cannot be removed stays, with a warning."""
    doomed = beside(place, PARTIAL)
    try:
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(place, doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        log.warning("%s could not be removed: %s", place, error)


# --- manage a run's checkpoints

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
