"""Write a snapshot's pieces from shared memory, in a process of its own without torch or messages between ranks.

The process is spawned once for each rank, ends when the rank does, and writes nothing that nobody asked for.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .folder import CheckpointFolder, Claim
from .host_memory import received, served
from .manifest import FileEntry, Manifest, TensorEntry, blocks_in, commit
from .pieces import PieceEntry, write_pieces
from .store import LocalStore, Store, place_of

NICE = 10
"""How much the writer gives way to training on a busy machine."""
LENGTH = struct.Struct("<Q")


def send(line: socket.socket, message: dict[str, Any], files: Iterable[int] = ()) -> None:
    """Send JSON values, and open files, to the other end of a pair of sockets."""
    body = json.dumps(message).encode()
    socket.send_fds(line, [LENGTH.pack(len(body))], list(files))
    line.sendall(body)


def receive(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its files. Raises EOFError where the other end is gone."""
    head, files, *_ = socket.recv_fds(line, LENGTH.size, 4)
    head += _exactly(line, LENGTH.size - len(head)) if head else b""
    if not head:
        raise EOFError
    return json.loads(_exactly(line, LENGTH.unpack(head)[0])), files


def _exactly(line: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = line.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


class GivenUpError(Exception):
    """The rank wants this save no more."""


@dataclass(frozen=True)
class SharedPiece:
    """A piece in shared memory (``pieces.Piece``)."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int
    writer: Writer

    @property
    def data(self) -> memoryview:
        self.writer.look()
        return self.writer.memory[self.begin : self.end]


class Writer:
    """The writing end of a line to a rank."""

    def __init__(self, line: socket.socket):
        self.line, self.memory = line, memoryview(b"")
        self.held, self.at = ExitStack(), None

    def serve(self) -> None:
        """Answer requests until the rank is gone."""
        with suppress(EOFError, ConnectionError):
            while True:
                request, files = receive(self.line)
                number = request.pop("number")
                try:
                    answer = getattr(self, f"on_{request.pop('do')}")(files, **request) or {}
                except (EOFError, ConnectionError):
                    raise
                except Exception as error:  # noqa: BLE001  (the rank says what it means for the run)
                    answer = {"problem": f"{type(error).__name__}: {error}"}
                send(self.line, {"number": number, **answer})

    def look(self) -> None:
        """Raise GivenUpError if the rank asks for something else already, and EOFError if it is gone."""
        if select.select([self.line], [], [], 0)[0]:
            if not self.line.recv(1, socket.MSG_PEEK):
                raise EOFError
            raise GivenUpError("another request came first")

    def on_map(self, files: list[int], size: int) -> None:
        """Take the shared memory; what was taken before is let go."""
        self.memory = memoryview(mmap.mmap(files[0], size, prot=mmap.PROT_READ))
        os.close(files[0])

    def on_stop(self, files: list[int]) -> None:
        """Do nothing: the request has stopped what was being done."""

    def on_write(self, files: list[int], place: dict[str, Any], pack: str, boxes: list[list[Any]]) -> dict[str, Any]:
        """Write boxes of shared memory as one pack; return their entries."""
        store, folder = allowed(place)
        wanted = [
            SharedPiece(key, tuple(offset), tuple(shape), dtype, begin, end, self)
            for key, offset, shape, dtype, begin, end in boxes
        ]
        in_run = CheckpointFolder(store.location("")).latest() if place["in_run"] else None
        there = place_of(in_run)[1] if in_run is not None else folder
        entries = write_pieces(store, folder, pack, wanted, *blocks_in(store, there, folder))
        return {"entries": [list(vars(entry).values()) for entry in entries]}

    def on_clear(self, files: list[int], place: dict[str, Any], packs: list[str]) -> None:
        """Remove what was written of a save that failed, once no rank writes any more: their folder goes with it."""
        store, folder = place_of(place["location"])
        store.remove(f"{folder}/{pack}" for pack in packs)

    def on_commit(
        self,
        files: list[int],
        place: dict[str, Any],
        tensors: dict[str, list[Any]],
        entries: list[list[Any]],
        rest: dict[str, Any],
    ) -> dict[str, Any]:
        """Write the manifest of what all ranks wrote; return the checkpoint's size in bytes."""
        self.look()
        store, folder = allowed(place)
        whole = commit(store, folder, manifest(tensors, entries, rest), new=place["new"], alone=not place["in_run"])
        return {"bytes": sum(file.bytes for file in whole.files.values())}

    def on_send(self, files: list[int], folder: str, token: str) -> dict[str, Any]:
        """Send a folder's files to other hosts from now on; return where."""
        if self.at is None:
            self.at = self.held.enter_context(served(Path(folder), token))
        return {"at": self.at}

    def on_fetch(self, files: list[int], folder: str, token: str, at: list[Any], names: list[str]) -> None:
        """Fetch files of another host into a folder."""
        for name in names:
            LocalStore(Path(folder)).write(name, received((at[0], at[1]), token, name))

    def on_keep(
        self,
        files: list[int],
        location: str,
        tensors: dict[str, list[Any]],
        entries: list[list[Any]],
        rest: dict[str, Any],
    ) -> None:
        """Write the manifest of packs that several hosts have."""
        whole = manifest(tensors, entries, rest)
        ends: dict[str, int] = {}
        for piece in whole.pieces:
            ends[piece.pack] = max(piece.end, ends.get(piece.pack, 0))
        replace(whole, files={pack: FileEntry(end) for pack, end in ends.items()}).write(Path(location))


def allowed(place: dict[str, Any]) -> tuple[Store, str]:
    """Return the store and the folder of a checkpoint, where its job may still save."""
    if place["claim"]:
        Claim(*place["claim"]).check()
    return place_of(place["location"])


def manifest(tensors: dict[str, list[Any]], entries: list[list[Any]], rest: dict[str, Any]) -> Manifest:
    """Make a manifest of what the ranks said, as JSON values."""
    by_key: dict[str, list[PieceEntry]] = {key: [] for key in tensors}
    for key, offset, shape, *where in entries:
        by_key[key].append(PieceEntry(key, tuple(offset), tuple(shape), *where))
    rows = {key: TensorEntry(tuple(shape), dtype, tuple(by_key[key])) for key, (shape, dtype) in tensors.items()}
    return Manifest(rows, {}, **rest)


def main(file: int) -> None:
    """Serve the rank at the other end of a socket; only its end, or its death, ends this process."""
    with suppress(OSError):
        os.nice(NICE)
    Writer(socket.socket(fileno=file)).serve()


def command(file: int) -> list[str]:
    """Return the command that runs ``main`` with this interpreter's path, which the environment may not have."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as w; w.main({file})"]
