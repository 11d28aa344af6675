"""Replace a folder so that, whenever the machine stops, the old or the new one is there. No collectives."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from meshwright.core.files import sync_folder

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
