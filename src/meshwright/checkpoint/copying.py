"""Prove, list, clear and copy checkpoints, block by block. Torch-free, no collectives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace

import numpy as np

from meshwright.core.errors import ConfigError, IntegrityError

from .folder import LEFTOVER, PARTIAL, CheckpointFolder, step_folders, step_of
from .manifest import (
    NAME,
    Manifest,
    checksum,
    commit,
    describe_file,
    lacking,
    locate,
    pack_name,
    read_header,
    with_pieces,
)
from .pieces import BYTES, WORDS, Buffer, PieceEntry, hash_of, write_pieces
from .store import Location, Store, place_of, probe


@dataclass(frozen=True)
class StoredPiece(PieceEntry):
    """A block of a checkpoint, read and proven when its bytes are asked for."""

    store: Store
    name: str
    dtype: str

    @property
    def data(self) -> Buffer:
        """The bytes. Raises IntegrityError where they are not those that were written."""
        found = self.store.read(self.name, self.begin, self.end - self.begin)
        if self.hash and hash_of(found) != self.hash:
            raise IntegrityError(
                f"{self.store.where(self.name)} has the right size, but its content changed since it was written (hash"
                f" of {self.key})"
            )
        return found


def stored_pieces(store: Store, folder: str, manifest: Manifest) -> list[StoredPiece]:
    """Return the blocks of a checkpoint, in the order of the files."""
    rows = [
        StoredPiece(**vars(piece), store=store, name=locate(folder, piece.pack), dtype=entry.dtype)
        for entry in manifest.tensors.values()
        for piece in entry.pieces
    ]
    return sorted(rows, key=lambda row: (row.name, row.begin))


def verify(location: Location) -> list[str]:
    """Read every byte of a checkpoint, and say what is not as it was written; [] where all is."""
    store, folder = place_of(location)
    try:
        manifest = Manifest.read(location)
        found = lacking(store, folder, manifest)
        if found:
            return found
        for name, entry in manifest.files.items():
            read_header(store, locate(folder, name))
            if entry.crc32 is not None and describe_file(store, locate(folder, name)) != entry:
                found.append(
                    f"{store.where(locate(folder, name))}: its content changed since it was written (checksum)"
                )
        manifest = with_pieces(store, folder, manifest)
    except (IntegrityError, ConfigError) as error:
        return [str(error)]
    proven: set[tuple[str, int]] = set()
    for piece in stored_pieces(store, folder, manifest):
        if (place := (piece.name, piece.begin)) not in proven and piece.hash:
            proven.add(place)
            try:
                piece.data  # noqa: B018  (reading proves it)
            except (IntegrityError, OSError) as error:
                found.append(str(error))
    return found


@dataclass(frozen=True)
class Listed:
    """A row of ``listed``: bytes of the checkpoint's own files, and of those of others that it needs."""

    location: Location
    own: int
    referred: int
    problem: str


def listed(folder: CheckpointFolder) -> list[Listed]:
    """List a run's checkpoints."""
    rows = []
    for step in folder.steps():
        own, referred, problem = 0, 0, ""
        try:
            if not (problem := folder.problem(step)):
                for name, entry in Manifest.read(folder.of_step(step)).files.items():
                    own, referred = own + entry.bytes * ("/" not in name), referred + entry.bytes * ("/" in name)
        except IntegrityError as error:
            problem = str(error)
        rows.append(Listed(folder.of_step(step), own, referred, problem))
    return rows


def clear(folder: CheckpointFolder, is_free: Callable[[], bool]) -> tuple[dict[str, int], list[str]]:
    """Remove the files that no manifest of a run names; return their sizes, and the names of those that stay.

    A save in progress has written such files, all of later steps than the newest whole checkpoint, and refers to no
    others than that one does. So where somebody may save, what lies from there on stays.

    Args:
        is_free: whether nobody saves there. It is asked when the files are listed: a later save's have new names.

    Raises:
        IntegrityError: a manifest cannot be read, so that what it needs is not known.
    """
    store, steps = folder.store, step_folders(folder.store)
    homes = [*steps, *(name for name in store.folders() if name.endswith(PARTIAL))]
    sizes = {name: size for home in homes for name, size in store.files(home).items()}
    free, newest, named = is_free(), -1, set[str]()
    for step in folder.steps():
        home = place_of(folder.of_step(step))[1]
        try:
            manifest = Manifest.read(folder.of_step(step))
        except IntegrityError:
            if f"{home}/{NAME}" in store.files(home):
                raise
            continue  # a job has retired it meanwhile
        named |= {locate(home, pack) for pack in manifest.files}
        newest = newest if lacking(store, home, manifest) else step
    settled = homes if free else [home for home in steps if step_of(home) < newest]
    left = [
        name
        for name in sizes
        if name.partition("/")[0] not in steps or (name not in named and LEFTOVER.fullmatch(name.rpartition("/")[2]))
    ]
    gone = {name: sizes[name] for name in left if name.partition("/")[0] in settled}
    store.remove(gone)
    return gone, [store.where(name) for name in left if name not in gone]


def copy(location: Location, target: Location, version: int = 2) -> Manifest:
    """Write a checkpoint, with all that it refers to, into a new folder; every block is proven on the way.

    Args:
        version: 1 for releases that read no other.

    Raises:
        ConfigError: the target is not empty.
        IntegrityError: the checkpoint is damaged; the target then has no manifest.
    """
    (store, folder), (other, name) = place_of(location), place_of(target)
    if other.files(name):
        raise ConfigError(f"{other.where(name)} is not empty: give a new folder")
    probe(other)
    manifest = Manifest.read(location)
    if found := lacking(store, folder, manifest):
        raise IntegrityError(f"{store.where(folder)} is not whole: {'; '.join(found)}")
    manifest = with_pieces(store, folder, manifest)
    rows = stored_pieces(store, folder, manifest)
    if version != 1:
        placed: dict[str, list[PieceEntry]] = {}
        for entry in write_pieces(other, name, pack_name("00000000", 0), rows):
            placed.setdefault(entry.key, []).append(entry)
        tensors = {key: replace(row, pieces=tuple(placed.get(key, ()))) for key, row in manifest.tensors.items()}
        return commit(other, name, replace(manifest, tensors=tensors), new=True)
    # whole tensors in one file, and a manifest that the releases before version 2 read
    file = "shard-00001-model-00001-of-00001.safetensors"
    header: dict[str, object] = {"__metadata__": {"format": "pt", "DCP_VERSION": "1.0"}}
    end, shards = 0, {}
    in_order = sorted(manifest.tensors.items(), key=lambda row: -BYTES[row[1].dtype])
    for key, entry in in_order:
        begin, end = end, end + int(np.prod(entry.shape, dtype=np.int64)) * BYTES[entry.dtype]
        header[key] = {"dtype": WORDS[entry.dtype], "shape": entry.shape, "data_offsets": (begin, end)}
        shards[key] = {"saved_offsets": [0] * len(entry.shape)}
    header["__metadata__"] = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(shards)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    by_key: dict[str, list[StoredPiece]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row)

    def content() -> Iterator[Buffer]:
        yield len(encoded).to_bytes(8, "little") + encoded
        for key, entry in in_order:
            whole = np.zeros(entry.shape, f"V{BYTES[entry.dtype]}")
            for row in by_key.get(key, ()):
                box = tuple(slice(low, low + size) for low, size in zip(row.offset, row.shape, strict=True))
                whole[box] = np.frombuffer(row.data, whole.dtype).reshape(row.shape)
            yield whole.tobytes()

    other.write(f"{name}/{file}", content())
    rest = {own.name: getattr(manifest, own.name) for own in fields(manifest)[2:]}
    kinds = {key: {"shape": entry.shape, "dtype": entry.dtype} for key, entry in manifest.tensors.items()}
    files = {file: asdict(describe_file(other, f"{name}/{file}"))}
    said = json.loads(json.dumps({"version": 1, "tensors": kinds, "files": files, **rest}))
    other.put(f"{name}/{NAME}", json.dumps({**said, "crc32": checksum(said)}).encode())
    return Manifest.read(other.location(name))
