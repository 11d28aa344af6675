"""Keep a run's newest state in the memory of its hosts, each rank's part on another host too. Torch-free.

A host's memory is a folder on a file system in RAM: it outlives processes, but not the host. So the writer of a rank
also fetches the packs of a rank on the host before, and a lost host's part is found on the next one (copies outside a
failure domain: https://arxiv.org/abs/2509.16293). Hosts send each other ranges of files over TCP.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import shutil
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.dtypes import bytes_text
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.core.files import inside, replace_text

from .folder import CheckpointFolder, step_folders
from .manifest import Manifest, locate
from .store import Buffer, LocalStore

TOKEN = "memory_id"
"""File of a run's folder with the name of its folder in memory: a run that begins anew finds nothing of an old one."""
OWNER = "run"
"""File of the folder in memory with the path of the run's folder."""
CHUNK = 1 << 22
"""Bytes of a file that are held at a time."""
TIMEOUT_SEC = 60.0
"""Time without a byte after which another host counts as gone."""

Place = tuple[str, int]
"""Address and port at which a host sends files."""


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: str, folder: Path, token: str):
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.folder, self.token = folder, token
        super().__init__((address, 0), _Answer)


class _Answer(socketserver.StreamRequestHandler):
    server: _Server  # type: ignore[assignment]

    def handle(self) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError, ConfigError):  # who asks sees the line end
            asked = json.loads(self.rfile.readline(1 << 16))
            if not hmac.compare_digest(asked["token"], self.server.token):
                return
            with open(inside(self.server.folder, asked["name"]), "rb") as source:
                left = os.fstat(source.fileno()).st_size - asked["begin"]
                size = left if asked["size"] < 0 else min(left, asked["size"])
                self.wfile.write(size.to_bytes(8, "little"))
                if size:
                    self.connection.sendfile(source, asked["begin"], size)


@contextmanager
def served(folder: Path, token: str) -> Iterator[Place]:
    """Send a folder's files to whoever knows the token; yield where."""
    server = _Server(reachable_address(), folder, token)
    threading.Thread(target=server.serve_forever, args=(0.05,), name="meshwright memory", daemon=True).start()
    try:
        yield (str(server.server_address[0]), int(server.server_address[1]))
    finally:
        server.shutdown()
        server.server_close()


def reachable_address() -> str:
    """Return the address of this host on the way to the ranks' meeting point: other ranks see it there."""
    with suppress(OSError, ValueError):
        where = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", ""))
        family, kind, _, _, address = socket.getaddrinfo(*where, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as line:
            line.connect(address)  # sends nothing
            return line.getsockname()[0]
    return "127.0.0.1"


@contextmanager
def _asked(place: Place, token: str, name: str, begin: int, size: int) -> Iterator[tuple[socket.socket, int]]:
    """Ask another host for a range of a file; yield the line on which it comes, and its bytes (-1: nothing comes)."""
    with socket.create_connection(place, TIMEOUT_SEC) as line:
        line.sendall(json.dumps({"token": token, "name": name, "begin": begin, "size": size}).encode() + b"\n")
        yield line, int.from_bytes(head, "little") if _filled(line, head := bytearray(8)) else -1


def _filled(line: socket.socket, buffer: Buffer) -> bool:
    view = memoryview(buffer)
    while len(view) and (got := line.recv_into(view)):
        view = view[got:]
    return not len(view)


def received(place: Place, token: str, name: str) -> Iterator[Buffer]:
    """Yield a file that another host sends, piece by piece.

    Raises:
        OSError: it is not there, or the line breaks.
    """
    with _asked(place, token, name, 0, -1) as (line, left):
        while left > 0 and _filled(line, part := bytearray(min(left, CHUNK))):
            left -= len(part)
            yield part
    if left:
        raise OSError(f"{place[0]} did not send {name} whole")


def receive_into(buffer: Buffer, place: Place, token: str, name: str, begin: int) -> None:
    """Fill a buffer with a range of a file that another host sends. Raises OSError, as ``received`` does."""
    with _asked(place, token, name, begin, len(buffer)) as (line, size):
        if size != len(buffer) or not _filled(line, buffer):
            raise OSError(f"{place[0]} did not send {name} whole")


@dataclass(frozen=True)
class Contents:
    """What a host has.

    Attributes:
        files: name -> bytes.
        copies: a step's folder whose manifest is here -> the packs that it names, with their bytes.
    """

    place: Place
    files: dict[str, int]
    copies: dict[str, dict[str, int]]


@dataclass(frozen=True)
class HostMemory:
    """The folder in a host's memory with the newest state of a run.

    Attributes:
        folder: on a file system in RAM.
        token: without which no rank sends anything.
        before: ranks of the host before whose packs this rank fetches; none where there is one host.
        here: ranks of this host; the first of them writes the manifest.
    """

    folder: Path
    token: str
    before: tuple[int, ...]
    here: tuple[int, ...]
    rank: int

    @property
    def is_first(self) -> bool:
        """Whether this rank acts for its host."""
        return self.rank == self.here[0]

    def of_step(self, step: int) -> Path:
        """Return the folder of a step."""
        return Path(CheckpointFolder(self.folder).of_step(step))

    def make(self, run: Path) -> None:
        """Make the folder, which its user alone can read, and remove those of runs that are gone.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            replace_text(self.folder / OWNER, str(run.absolute()))
        except OSError as error:
            raise ConfigError(
                f"checkpoint.memory_folder: {self.folder} cannot be made ({error}). Give a file system in each host's"
                f" memory, or set checkpoint.memory_every = 0 and leave the folder out"
            ) from None
        if (run / TOKEN).is_file():  # else this host does not see the folders of runs, nor which of them are gone
            for other in self.folder.parent.iterdir():
                with suppress(OSError):
                    known = Path((other / OWNER).read_text()) / TOKEN
                    if not known.is_file() or known.read_text() != other.name:
                        shutil.rmtree(other)

    def contents(self, place: Place) -> Contents:
        """List what is here; a damaged manifest counts as absent."""
        store, files, copies = LocalStore(self.folder), dict[str, int](), dict[str, dict[str, int]]()
        for folder in step_folders(store):
            files |= store.files(folder)
            with suppress(IntegrityError, ConfigError, OSError):
                manifest = Manifest.read(store.location(folder))
                copies[folder] = {locate(folder, name): row.bytes for name, row in manifest.files.items()}
        return Contents(place, files, copies)

    def forget(self, but: str = "") -> None:
        """Remove the state of all steps but that of a folder; without one, everything."""
        if not but:
            shutil.rmtree(self.folder, ignore_errors=True)
        for folder in step_folders(LocalStore(self.folder)):
            if folder != but:
                shutil.rmtree(self.folder / folder, ignore_errors=True)

    def refuse_too_little(self, share: int) -> None:
        """Refuse a state of ``share`` bytes a rank that has no room here, twice since the older one goes last.

        Raises:
            ConfigError: the file system, or the memory, has too little left.
        """
        import psutil  # not where pieces are written

        needed = 2 * share * len(self.here) * (2 if self.before else 1)
        left = min(shutil.disk_usage(self.folder).free, psutil.virtual_memory().available)
        if needed > left:
            raise ConfigError(
                f"checkpoint.memory_every: {self.folder} has {bytes_text(left)} left, and two states of this host's"
                f" {len(self.here)} ranks{' and of another host' if self.before else ''} take {bytes_text(needed)}: no"
                f" state is kept in memory"
            )


def name_of(run: Path, above: Path) -> str:
    """Return the name of a run's folder in memory, which the run's folder has; a copy of another run draws its own."""
    place = run / TOKEN
    name = place.read_text() if place.is_file() else ""
    with suppress(OSError):
        owner = Path((above / name / OWNER).read_text()) / TOKEN
        name = "" if owner.read_text() == name and not owner.samefile(place) else name
    if not name:
        replace_text(place, name := secrets.token_hex(8))
    return name
