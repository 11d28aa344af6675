"""``meshwright checkpoint ls|verify|gc|copy RUN``: tell, prove, clear and copy a run's checkpoints.

ls lists them, with the bytes that each wrote and those of older ones that it refers to. verify reads every byte and
compares it with its hash. gc removes files that no checkpoint names, such as an interrupted save's. copy RUN NEW writes
one checkpoint, with all that it refers to, into a new folder or address. RUN is a run's folder, the folder or address
of its checkpoints, or (verify, copy) one checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.checkpoint.copying import clear, copy, listed, verify
from meshwright.checkpoint.folder import CheckpointFolder, checkpoints_of
from meshwright.checkpoint.manifest import NAME
from meshwright.checkpoint.store import OWN_MEMORY, Location, is_remote, path_of, store_of
from meshwright.core.config import take_flags
from meshwright.core.dtypes import bytes_text
from meshwright.core.errors import ConfigError
from meshwright.training.run.occupancy import nobody_saves

from .arguments import refuse_rest

ACTIONS = ("ls", "verify", "gc", "copy")


@dataclass(frozen=True)
class CheckpointOptions:
    step: int | None = None
    """A checkpoint other than the newest (copy), or the one alone (verify)."""
    format: Literal["1", "2"] = "2"
    """Of a copy; 1: as the releases before content addresses read it."""


def run(argv: list[str]) -> int:
    """Act, and print what was found; 1 where something is damaged."""
    options, argv = take_flags(CheckpointOptions, argv)
    flags = [word for word in argv if word.startswith("-")]
    wanted = 3 if argv[:1] == ["copy"] else 2
    refuse_rest(flags or argv[wanted:], "meshwright checkpoint", CheckpointOptions)
    if len(argv) < wanted or argv[0] not in ACTIONS:
        raise ConfigError(
            "meshwright checkpoint needs one of ls, verify, gc, copy and the folder of a run; copy, a new folder too"
        )
    action, place = argv[0], argv[1]
    for flag, users in {"step": ("verify", "copy"), "format": ("copy",)}.items():
        if getattr(options, flag) != getattr(CheckpointOptions(), flag) and action not in users:
            raise ConfigError(f"--{flag} is for {' and '.join(users)}, and {action} has no use for it: leave it out")
    if action == "copy" and argv[2].startswith(OWN_MEMORY):
        raise ConfigError(
            f"{argv[2]} would be gone with this command: give a folder, or an address like s3://bucket/run"
        )
    at: Location = place if is_remote(place) else path_of(place)
    is_one = NAME in store_of(at).files()
    folder = checkpoints_of(at) if isinstance(at, Path) and (at / "config.toml").is_file() else CheckpointFolder(at)
    steps = [] if is_one else folder.steps()
    if not is_one and not steps and action != "gc":
        raise ConfigError(f"{place} holds no checkpoint: give the folder of a run, of its checkpoints, or of one")
    if is_one and action in ("ls", "gc"):
        raise ConfigError(f"{place} is one checkpoint, and {action} is about those of a run: give the folder above")
    if options.step is not None and options.step not in steps:
        raise ConfigError(f"--step {options.step}: {place} has steps {', '.join(map(str, steps)) or 'none'}")
    if action == "copy":
        chosen = at if is_one else folder.latest() if options.step is None else folder.of_step(options.step)
        assert chosen is not None
        target = argv[2] if is_remote(argv[2]) else path_of(argv[2])
        files = copy(chosen, target, int(options.format)).files
        print(f"copied {chosen} to {argv[2]} ({bytes_text(sum(entry.bytes for entry in files.values()))}, proven)")
        return 0
    if action == "verify":
        damaged = 0
        wanted_steps = steps if options.step is None else [options.step]
        for one in [at] if is_one else map(folder.of_step, wanted_steps):
            problems = verify(one)
            damaged += bool(problems)
            print(f"{one}: {'; '.join(problems) or 'whole, every byte as it was written'}")
        return int(damaged > 0)
    if action == "ls":
        rows = listed(folder)
        newest = next((row for row in reversed(rows) if not row.problem), None)
        for row in rows:
            mark = "  (newest)" if row is newest else ""
            size = f"{bytes_text(row.own)}, refers to files of {bytes_text(row.referred)}" if row.referred else ""
            print(f"{row.location}: {row.problem or size or bytes_text(row.own)}{mark}")
        return int(any(row.problem for row in rows))
    gone, left = clear(folder, lambda: nobody_saves(folder))
    print(f"removed {len(gone)} files ({bytes_text(sum(gone.values()))}) that no checkpoint of {folder.path} names")
    if left:
        print(f"{len(left)} more stay, such as {left[0]}: a job may be writing them, and a later checkpoint frees them")
    return 0
