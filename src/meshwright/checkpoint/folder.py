"""Manage a run's checkpoints: which step is the newest whole one, and what is removed. Torch-free, no collectives."""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import ConfigError, IntegrityError

from .manifest import NAME, STEP, DamagedCheckpoint, Manifest, lacking, locate
from .store import LocalStore, Location, Store, place_of, probe, store_of

PARTIAL = ".partial"
"""Suffix of a folder that is being written; it is never read."""
LEFTOVER = re.compile(
    r"(pieces-[0-9a-f]{8}-\d{5}|shard-\d{5}-model-\d{5}-of-\d{5})\.safetensors|manifest\.json\.(new-\d+|damaged)"
)
"""Name of a file that a save may leave in a checkpoint's folder, besides the manifest; of older releases too."""


def beside(place: Path, ending: str) -> Path:
    return place.with_name(place.name + ending)


def step_folders(store: Store) -> list[str]:
    """List the folders of a run's steps, finished or not, ascending."""
    return sorted((name for name in store.folders() if re.fullmatch(STEP, name)), key=step_of)


def step_of(folder: Location) -> int:
    """Return the step of a checkpoint's folder, from its name."""
    return int(str(folder).rpartition("step-")[2])


def unreferenced(store: Store, folders: Iterable[str], among: Collection[str]) -> list[str]:
    """List the files in some folders that saves wrote and no manifest of the folders ``among`` names.

    Where one of these manifests cannot be read, nothing is listed.
    """
    left = {name for folder in folders for name in store.files(folder) if LEFTOVER.fullmatch(name.rpartition("/")[2])}
    try:
        for folder in among if left else ():
            if f"{folder}/{NAME}" in store.files(folder):
                left -= {locate(folder, pack) for pack in Manifest.read(store.location(folder)).files}
    except (IntegrityError, ConfigError):
        return []
    return sorted(left)


class TakenOver(ConfigError):
    """A folder in which another job saves by now."""


@dataclass(frozen=True)
class Claim:
    """A job's right to save in a folder: it ends when a later job replaces the words of a file there.

    It needs no clock, and a job that died holds nobody up.

    Attributes:
        before: the job whose words it replaced, which may still run on another host; "" where none may.
    """

    folder: Location
    name: str
    words: str
    before: str = ""

    def check(self) -> None:
        """Refuse to save where another job does, or where the folder no longer is.

        Raises:
            TakenOver: another job has begun there.
            IntegrityError: the folder was moved or removed.
            OSError: the store fails.
        """
        store = store_of(self.folder)
        try:
            found = store.read(self.name).decode()
        except FileNotFoundError:
            if isinstance(store, LocalStore) and not store.files():
                raise IntegrityError(
                    f"{store} was moved or removed while its run goes on: move it back, or put a link to it there"
                ) from None
            return
        if found != self.words:
            raise TakenOver(
                f"{store} was taken over by {job_in(found)}: two jobs would remove each other's checkpoints, so this"
                f" one, which saves nothing more, ends. If that was a mistake, stop the other and continue this run"
            )


def job_in(words: str) -> str:
    """Return the job of a claim, for people."""
    try:
        holder = json.loads(words)
        holder = holder.get("job", holder)
        return f"another job (process {holder['pid']} on {holder['host']}, since {holder['since']})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "another job"


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder ``path`` with ``step-00000100`` … inside; one is a checkpoint once it has a manifest."""

    path: Location

    @property
    def store(self) -> Store:
        return store_of(self.path)

    def of_step(self, step: int) -> Location:
        return self.store.location(f"step-{step:08d}")

    def steps(self) -> list[int]:
        """List the steps whose folders have a manifest, ascending."""
        store = self.store
        return [step_of(name) for name in step_folders(store) if f"{name}/{NAME}" in store.files(name)]

    def problem(self, step: int) -> str:
        """Say why a step cannot be continued from, as far as its manifest and the sizes of its files tell; "" if not.

        Raises:
            IntegrityError: a newer release wrote it, or it cannot be read.
        """
        store, folder = place_of(self.of_step(step))
        try:
            found = lacking(store, folder, Manifest.read(self.of_step(step)))
        except (DamagedCheckpoint, ConfigError) as error:
            return str(error)
        return f"{found[0]} ({len(found)} files in all)" if len(found) > 1 else "".join(found)

    def newest(self, damaged: Mapping[int, str] | None = None) -> tuple[Location | None, list[str]]:
        """Return the newest whole checkpoint, and why newer ones are not used; None where there is none at all.

        It follows from what is there: no file says it, so none can say it wrongly.

        Args:
            damaged: steps whose contents were found to be damaged, and how.

        Raises:
            IntegrityError: there are checkpoints, and none is whole, or a newer release wrote the newest.
        """
        problems: list[str] = []
        for step in reversed(self.steps()):
            if not (problem := (damaged or {}).get(step) or self.problem(step)):
                return self.of_step(step), problems
            problems.append(problem)
        if problems:
            raise IntegrityError(
                f"no checkpoint in {self.path} is whole: {'; '.join(problems)}. Copy the run again; to begin anew,"
                f" remove them"
            )
        return None, []

    def latest(self) -> Location | None:
        """Return the checkpoint to continue from, as ``newest`` does."""
        return self.newest()[0]

    def set_aside(self, step: int) -> None:
        """Take a damaged checkpoint's manifest out of use, so that nothing is counted on or refers to it.

        The next save of that step removes what is left.
        """
        store, name = place_of(self.of_step(step))
        store.put(f"{name}/{NAME}.damaged", store.read(f"{name}/{NAME}"))
        store.remove([f"{name}/{NAME}"])

    def half_written(self) -> list[Location]:
        """List folders that interrupted saves left: never read, and cleared by the next save of their step.

        The folder of an earlier step without a manifest may hold files that a later one refers to.
        """
        store, left, last = self.store, [], max(self.steps(), default=-1)
        for name in store.folders():
            files = store.files(name) if re.fullmatch(STEP, name) else {}
            if name.endswith(PARTIAL) or (files and f"{name}/{NAME}" not in files and step_of(name) > last):
                left.append(store.location(name))
        return left

    def keep_last(self, count: int) -> list[str]:
        """Remove all but the newest ``count`` whole checkpoints (0: keep all), and return the files removed.

        A manifest goes first, then the files that no other manifest names, up to the oldest checkpoint that stays.
        """
        store = self.store
        kept = [step for step in self.steps() if not self.problem(step)][-count:] if count else []
        if not kept:
            return []
        doomed = [name for name in step_folders(store) if step_of(name) < kept[0]]
        gone = [f"{name}/{NAME}" for name in doomed if f"{name}/{NAME}" in store.files(name)]
        store.remove(gone)
        left = unreferenced(store, doomed, step_folders(store))
        store.remove(left)
        return gone + left

    def refuse_others(self, identity: object) -> None:
        """Refuse a folder that cannot be written, or that has the checkpoints of a run of another identity.

        Raises:
            ConfigError: it is such a folder.
        """
        probe(self.store)
        latest = self.latest()
        there = Manifest.read(latest).extra.get("identity") if latest is not None else None
        if there is not None and there != json.loads(json.dumps(identity)):
            raise ConfigError(
                f"checkpoint.folder = {self.path} holds the checkpoints of another run (model, data, tokenizer or seed"
                f" differ). Give another folder"
            )


def checkpoints_of(folder: Path) -> CheckpointFolder:
    """Return where a run's checkpoints are: in its folder, or where its config says (checkpoint.folder)."""
    elsewhere = ""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a damaged config is refused by who reads it
        elsewhere = tomllib.loads((folder / "config.toml").read_text()).get("checkpoint", {}).get("folder", "")
    return CheckpointFolder(elsewhere or folder / "checkpoints")
