"""Read the states that hosts keep in memory as one folder of checkpoints, whichever hosts are left. Collective."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import torch.distributed as dist
from fsspec.spec import AbstractFileSystem

from meshwright.core.errors import IntegrityError
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import is_rank_zero

from .folder import CheckpointFolder, step_of
from .host_memory import Contents, HostMemory, Place, name_of, receive_into, served
from .loading import load_newest
from .manifest import NAME, DamagedCheckpoint
from .store import Buffer, LocalStore, Location

Result = TypeVar("Result")

ADDRESS = "hosts://memory"
"""Address of the checkpoints that the hosts have together."""


@dataclass
class _Gathered:
    """What all hosts have: name of a file -> its bytes, and the places that have it whole."""

    files: dict[str, tuple[int, list[Place]]] = field(default_factory=dict)
    token: str = ""
    here: Path = Path()
    own: Place | None = None


_gathered = _Gathered()


class HostsFiles(AbstractFileSystem):
    """The files of ``_gathered``, for fsspec."""

    protocol, cachable = "hosts", False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix(ADDRESS).strip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List the files and folders in a folder."""
        above = f"{path.strip('/')}/".lstrip("/")
        rows: dict[str, dict[str, Any]] = {}
        for name, (size, _places) in _gathered.files.items():
            first, is_deeper, _rest = name.removeprefix(above).partition("/")
            if name.startswith(above):
                kind = {"size": 0, "type": "directory"} if is_deeper else {"size": size, "type": "file"}
                rows[first] = {"name": above + first, **kind}
        return list(rows.values()) if detail else [row["name"] for row in rows.values()]

    def size(self, path: str) -> int:
        """Return the bytes of a file."""
        return self._found(path)[0]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Return a range of a file, from the first host that sends it."""
        begin, size = start or 0, self.size(path)
        self.fill_from(path, begin, buffer := bytearray((size if end is None else min(end, size)) - begin))
        return bytes(buffer)

    def fill_from(self, path: str, begin: int, buffer: Buffer) -> None:
        """Fill a buffer with a file's bytes from a place on, from the first host that sends them."""
        name, problem = path.strip("/"), None
        for place in self._found(path)[1]:
            try:
                if place != _gathered.own:
                    return receive_into(buffer, place, _gathered.token, name, begin)
                with LocalStore(_gathered.here).opened(name) as read_into:
                    return read_into(begin, buffer)
            except OSError as error:
                problem = error
        raise OSError(f"no host sends {name}: {problem}")

    def _found(self, path: str) -> tuple[int, list[Place]]:
        if path.strip("/") not in _gathered.files:
            raise FileNotFoundError(path)
        return _gathered.files[path.strip("/")]


fsspec.register_implementation("hosts", HostsFiles, clobber=True)


def open_host_memory(run: Path, root: str) -> HostMemory:
    """Make a run's folder in the memory of each host, below ``root``, whose variables are those of the host.

    Ranks are on one host if its name and the folder are the same.

    Raises:
        ConfigError: a host cannot make it (raised on every rank).
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    above = Path(os.path.expandvars(root)).expanduser() / f"meshwright-{os.getuid()}"
    token, name = agree.decided_once(lambda: (secrets.token_hex(16), name_of(run, above)))
    folder = above / name
    hosts: dict[tuple[str, str], list[int]] = {}
    for number, host in enumerate(agree.everybody_says((socket.gethostname(), str(folder)))):
        hosts.setdefault(host, []).append(number)
    groups = list(hosts.values())
    (own,) = (number for number, ranks in enumerate(groups) if rank in ranks)
    here, fetched = groups[own], groups[own - 1] if len(groups) > 1 else []
    memory = HostMemory(folder, token, tuple(fetched[here.index(rank) :: len(here)]), tuple(here), rank)
    agree.together(lambda: memory.make(run), here=memory.is_first)
    return memory


def load_from_hosts(
    memory: HostMemory, newer_than: int, use: Callable[[Location], Result], say: Callable[[str], object]
) -> Result | None:
    """Use the newest state after a step that the hosts have whole together; None if there is none. Collective.

    A part that turns out to be damaged is read from another host.

    Args:
        use: as ``load_newest`` takes it.
        say: told, on the first rank, what cannot be used.
    """

    def read(at: Location) -> Result:
        try:
            return use(at)
        except DamagedCheckpoint:
            for name, (size, places) in _gathered.files.items():
                _gathered.files[name] = size, places[1:] + places[:1]
            return use(at)

    with ExitStack() as held:
        place = held.enter_context(served(memory.folder, memory.token)) if memory.is_first else None
        said: list[Contents | None] = agree.everybody_says(memory.contents(place) if place else None)
        own = said[memory.here[0]]
        assert own is not None
        _gathered.files = united([host for host in said if host is not None], own.place, newer_than)
        _gathered.token, _gathered.here, _gathered.own = memory.token, memory.folder, own.place
        try:
            found = load_newest(CheckpointFolder(ADDRESS), read, say)
            return found[1] if found else None
        except IntegrityError as error:
            if is_rank_zero():
                say(f"{error}: the newest checkpoint is read instead")
            return None
        finally:
            agree.everybody_says(None)  # nobody reads any more
            _gathered.files = {}


def united(hosts: Sequence[Contents], own: Place, newer_than: int) -> dict[str, tuple[int, list[Place]]]:
    """Return the files of whole checkpoints, and where they are, this host first. All ranks find the same checkpoints.

    One is whole if each pack that its manifest names is on some host, in the size that it says.
    """
    found: dict[str, tuple[int, list[Place]]] = {}
    for host in hosts:
        for folder, packs in host.copies.items():
            places = {
                name: [there.place for there in hosts if there.files.get(name) == size] for name, size in packs.items()
            }
            if step_of(folder) > newer_than and f"{folder}/{NAME}" not in found and all(places.values()):
                found[f"{folder}/{NAME}"] = host.files[f"{folder}/{NAME}"], [host.place]
                for name, size in packs.items():
                    found[name] = size, sorted(places[name], key=lambda place: place != own)
    return found
