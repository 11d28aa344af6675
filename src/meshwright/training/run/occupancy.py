"""Allow one job at a time in a run's folder: two would overwrite each other's files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshwright.checkpoint.folder import CheckpointFolder, Claim, checkpoints_of, job_in
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.store import LocalStore, RemoteStore, Store, absolute, place_of, probe
from meshwright.core.errors import ConfigError, IntegrityError, MeshwrightError

NAME = "running.lock"
_PATIENCE_SEC = 5.0
"""A job that was just killed may need a moment to release its lock."""


@contextlib.contextmanager
def occupied(folder: Path, key: str = "run") -> Iterator[Claim]:
    """Lock ``folder`` for the time of the block. The system releases the lock when this process dies, however it dies.

    If files cannot be locked (some network file systems), there is no lock, and a later job takes the claim over.

    Args:
        key: the key of the config that names the folder.

    Yields:
        The claim to the folder.

    Raises:
        ConfigError: another job holds the lock; the message names its process and host.
    """
    words = json.dumps(_this_job())
    held = _take(folder / NAME, key, words)
    try:
        yield Claim(folder, NAME, words)
    finally:
        if held is not None:
            (folder / NAME).unlink(missing_ok=True)  # before the lock is released: who waits sees that it is gone
            os.close(held)


def is_occupied(folder: Path) -> bool:
    """Return whether a job holds ``folder`` now. Changes nothing.

    If files cannot be locked (some network file systems), the folder counts as held as long as the file is there.
    """
    try:
        file = os.open(folder / NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def held_by(folder: Path) -> str:
    """Return the job that holds ``folder`` now, in words; "" where none does."""
    if is_occupied(folder):
        with contextlib.suppress(OSError):
            return job_in((folder / NAME).read_bytes()[:1000].decode())
    return ""


def nobody_saves(checkpoints: CheckpointFolder) -> bool:
    """Return whether it is known that no job saves to a run's checkpoints now. Of a bucket, a job that died says so
    never.

    Raises:
        ConfigError: a job on this host, or one that locks files on the same file system, holds them.
    """
    store, said = checkpoints.store, _said(checkpoints.store)
    if isinstance(store, RemoteStore):
        return bool(said) and "job" not in said
    root = store.root.absolute()
    for folder in (root, root.parent):  # checkpoint.folder, the run's
        if who := held_by(folder):
            raise ConfigError(f"{folder} is being trained by {who}, which may be saving: wait for its end")
    return bool(said) or (root.parent / "config.toml").is_file()


# --- one run for checkpoints that lie outside its folder

OWNER = "run.json"
"""File beside checkpoints outside a run's folder, with the path of the run whose they are."""


def other_owner(checkpoints: CheckpointFolder, run: Path | Literal[""]) -> Path | None:
    """Return the run, another than ``run``, whose checkpoints are here; None: they are its own, or nobody's so far.

    A run whose folder is gone, with its machine, goes on as one of the same name. A folder that is moved takes its
    checkpoints with it; of one that is copied the first keeps them.

    Args:
        run: its folder; "": one that is still to be made.
    """
    store = checkpoints.store
    named = _owner(store)
    owner = named or Path(str(store)).parent
    is_there = _saves_to(owner, checkpoints)
    if not named and not is_there:
        return None
    goes_on = run and (run.name == owner.name or _saves_to(run, checkpoints)) and not is_there
    if goes_on or (run and run.resolve() == owner.resolve()):
        return None
    # on disk a lock tells of one that has no checkpoint yet
    return owner if isinstance(store, RemoteStore) or checkpoints.steps() else None


def _said(store: Store) -> dict[str, Any]:
    """Return what OWNER says; {} where it is absent or damaged."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(store.read(OWNER))
        if isinstance(found, dict) and isinstance(found.get("run"), str):
            return found
    return {}


def _owner(store: Store) -> Path | None:
    return Path(run) if (run := _said(store).get("run")) else None


def _saves_to(run: Path, checkpoints: CheckpointFolder) -> bool:
    return (run / "config.toml").is_file() and absolute(checkpoints_of(run).path) == absolute(checkpoints.path)


@contextlib.contextmanager
def checkpoints_of_one_run(checkpoints: CheckpointFolder, run: Path | Literal[""], identity: object) -> Iterator[None]:
    """Keep other runs from a ``checkpoint.folder``, and on disk other jobs too, for the time of the block.

    Raises:
        ConfigError: it is another run's, or cannot be written.
    """
    probe(store := checkpoints.store)
    with occupied(store.root, "checkpoint.folder") if isinstance(store, LocalStore) else contextlib.nullcontext():
        if owner := other_owner(checkpoints, run):
            raise ConfigError(
                f"checkpoint.folder = {checkpoints.path} has the checkpoints of the run {owner}, and two runs would"
                f" take each other's: give this one a folder of its own, or continue that one with --run={owner}"
            )
        checkpoints.refuse_others(identity)
        yield


@contextlib.contextmanager
def claimed(checkpoints: CheckpointFolder, run: Path) -> Iterator[Claim]:
    """Claim a ``checkpoint.folder`` for a run, and for this job for the time of the block; an earlier job loses it."""
    store, owner, job = checkpoints.store, {"run": str(run.absolute())}, _this_job()
    earlier = _said(store)
    before = earlier.get("job")
    words = json.dumps({**owner, "job": job})
    store.put(OWNER, words.encode())
    is_elsewhere = before and (earlier["run"], before["host"]) != (owner["run"], job["host"])  # here a lock tells
    claim = Claim(checkpoints.path, OWNER, words, job_in(json.dumps(before)) if is_elsewhere else "")
    try:
        yield claim
    finally:
        with contextlib.suppress(OSError, MeshwrightError):  # the next job takes over what stays
            claim.check()
            store.put(OWNER, json.dumps(owner).encode())


def _this_job() -> dict[str, object]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": time.ctime(), "token": secrets.token_hex(8)}


def _take(path: Path, key: str, words: str) -> int | None:
    end = time.monotonic() + _PATIENCE_SEC
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                _write(file, words)
                os.close(file)
                return None
            who = job_in(os.pread(file, 1000, 0).decode())
            if key != "run" and (owner := _owner(LocalStore(path.parent))):
                who += f", for the run {owner}"
            os.close(file)
            if time.monotonic() < end:
                time.sleep(0.05)
                continue
            raise ConfigError(
                f"{key} = {path.parent} is {'being trained' if key == 'run' else 'in use'} by {who}: two jobs would"
                f" overwrite each other's checkpoints. Wait for it or stop it, or leave {key} empty for a new folder"
            ) from None
        with contextlib.suppress(FileNotFoundError):  # the file that was locked may no longer be the one of that name
            if os.path.samestat(os.fstat(file), path.stat()):
                _write(file, words)
                return file
        os.close(file)


def _write(file: int, words: str) -> None:
    os.truncate(file, 0)
    os.pwrite(file, words.encode(), 0)


def latest_checkpoint(folder: Path) -> str:
    """Return the name of the checkpoint that a run would continue from, "" without one that is whole."""
    try:
        latest = checkpoints_of(folder).latest()
    except IntegrityError:
        return ""
    return "" if latest is None else place_of(latest)[1]


class Begun(NamedTuple):
    """How far a run has come that is continued: the steps that it took, and the rows that these read."""

    steps: int = 0
    rows: int = 0

    def rows_at(self, steps: int, batch: int) -> int:
        """Return the number of rows that are read by the end of a step, where those to come have ``batch``."""
        return self.rows + max(0, steps - self.steps) * batch


def begun_by(run: str, elsewhere: str) -> Begun:
    """Return how far the newest whole checkpoint of a run is, in its folder or elsewhere; one that does not say it, and
    is refused by who loads it, counts as none. Raises IntegrityError where there are some, and none is whole.
    """
    checkpoints = CheckpointFolder(elsewhere) if elsewhere else checkpoints_of(Path(run).expanduser())
    if not run or (latest := checkpoints.latest()) is None:
        return Begun()
    try:
        state = Manifest.read(latest).extra["state"]
        return Begun(int(state["step"]), int(state["consumed"]))
    except (KeyError, TypeError, ValueError):
        return Begun()
