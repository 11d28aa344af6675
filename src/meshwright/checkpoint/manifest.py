"""Define the manifest of a checkpoint: a JSON file, written last, that says where every piece of it lies. Torch-free.

Version 1, which older releases wrote, lists files with their checksums; the headers of these say what they hold.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

from meshwright.core.errors import IntegrityError

from .pieces import BYTES, WORDS, Known, PieceEntry
from .store import Location, Store, place_of

NAME = "manifest.json"
VERSION = 2
CHUNK = 1 << 22
STEP = r"step-(\d{8,})"
PACK = re.compile(rf"({STEP}/)?[\w.-]+\.safetensors")
"""Name of a pack in a manifest: of a file beside it, or of one in the folder of another checkpoint of the run."""
LARGEST_HEADER = 100_000_000
"""Limit in bytes, as in the safetensors library."""


class NewerManifest(IntegrityError):
    """A manifest that this release cannot read."""


class DamagedCheckpoint(IntegrityError):
    """A checkpoint that is not as it was written: an older one may be whole."""


@dataclass(frozen=True)
class TensorEntry:
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[PieceEntry, ...] = ()


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    crc32: int | None = None
    """Of the whole file, in version 1."""


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint.

    Attributes:
        tensors: key -> global shape and dtype, and where its pieces lie.
        files: name of a pack -> its size.
        optimizer: class of the optimizer, "" where none was saved.
        groups: the optimizer's groups: names of their parameters, and their options.
        extra: JSON values that the caller gave to ``save``.
        loss_scale: state of the float16 loss scale, empty where the loss was not scaled.
        plan: the plan of the layout that wrote the checkpoint, as JSON text; for people, never needed to read the
            rest.
        left_out: names of frozen parameters that were not saved.
        model: what the model is (``ModelOrigin``), as JSON values; empty in older checkpoints.
        base: name of a parameter that was left out -> a run of its numbers (``save.run_of``).
        in_4_bits: name of a frozen weight that the model held in 4 bits -> dtype in which it was rounded.
    """

    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    optimizer: str = ""
    groups: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    plan: str = ""
    loss_scale: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    in_4_bits: dict[str, str] = field(default_factory=dict)

    @property
    def pieces(self) -> Iterator[PieceEntry]:
        """Every piece of every tensor."""
        return (piece for entry in self.tensors.values() for piece in entry.pieces)

    def write(self, location: Location, *, new: bool = False) -> None:
        """Write the manifest with a checksum of its own, atomically, and flush it to disk.

        Raises:
            IntegrityError: it is to be ``new``, and in an object store another job was first.
        """
        store, folder = place_of(location)
        name = f"{folder}/{NAME}"
        rows = {
            key: {
                "shape": entry.shape,
                "dtype": entry.dtype,
                "pieces": [[p.offset, p.shape, p.pack, p.begin, p.end, p.hash] for p in entry.pieces],
            }
            for key, entry in self.tensors.items()
        }
        files = {name: entry.bytes for name, entry in self.files.items()}
        rest = {own.name: getattr(self, own.name) for own in fields(self)[2:]}
        content = json.loads(json.dumps({"version": VERSION, "tensors": rows, "files": files, **rest}))
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        text = "{" + ",\n ".join([*lines, f'"crc32": {checksum(content)}']) + "}\n"
        try:
            store.put(name, text.encode(), new=new)
        except FileExistsError:
            raise IntegrityError(f"{store.where(name)} was written by another job in the meantime") from None

    @classmethod
    def read(cls, location: Location) -> Manifest:
        """Read the manifest of a checkpoint folder.

        Raises:
            IntegrityError: there is none (the folder was never finished), or it is not what ``write`` wrote.
            ConfigError: the manifest is a link to a place outside the folder.
        """
        store, folder = place_of(location)
        path = store.where(f"{folder}/{NAME}")
        try:
            text = store.read(f"{folder}/{NAME}")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            unfinished = (
                "is no checkpoint: it has no manifest, which is written last, so its writing was never finished"
            )
            is_there = folder in store.folders()
            raise DamagedCheckpoint(f"{store.where(folder)} {unfinished if is_there else 'does not exist'}") from None
        except OSError as error:
            raise IntegrityError(f"{path} could not be read: {error}") from error
        try:
            content = json.loads(text)
            if content["version"] not in (1, VERSION):
                raise NewerManifest(
                    f"{path} has format version {content['version']}; this meshwright reads versions 1 and {VERSION}:"
                    f" install a newer one"
                )
            if content.pop("crc32") != checksum(content):
                raise ValueError("its content changed since it was written (checksum)")
            is_old = content["version"] == 1
            files = {
                name: FileEntry(**entry) if is_old else FileEntry(entry) for name, entry in content["files"].items()
            }
            if alien := [name for name in files if not PACK.fullmatch(name)]:
                raise ValueError(f"it names {alien[0]!r}, which is no file of this checkpoint or its run")
            content["files"] = files
            content["tensors"] = {key: _tensor(key, entry, files) for key, entry in content["tensors"].items()}
            if not all(type(n) is int and n >= 0 for entry in files.values() for n in (entry.bytes, entry.crc32 or 0)):
                raise TypeError("a size is no whole number")
            for record in content["groups"]:
                if not (
                    all(isinstance(name, str) for name in record["params"]) and isinstance(record["options"], dict)
                ):
                    raise TypeError("a group of the optimizer is none")
            if not (
                isinstance(content["extra"], dict)
                and isinstance(content["optimizer"], str)
                and isinstance(content["plan"], str)
                and all(isinstance(name, str) for name in content.get("left_out", []))
                and isinstance(content.get("model", {}), dict)
                and isinstance(content.get("base", {}), dict)
                and isinstance(in_4_bits := content.get("in_4_bits", {}), dict)
                and all(isinstance(dtype, str) for dtype in in_4_bits.values())
            ):
                raise TypeError("extra, optimizer, plan, left_out, model, base or in_4_bits is of another type")
            return cls(**{own.name: content[own.name] for own in fields(cls) if own.name in content})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(
                f"{path} is damaged ({type(error).__name__}: {error}); this checkpoint cannot be trusted"
            ) from error


def _tensor(key: str, entry: dict[str, Any], files: dict[str, FileEntry]) -> TensorEntry:
    """Return a row of a manifest that may have been written by anyone. Raises ValueError, TypeError, KeyError."""
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    pieces = tuple(
        PieceEntry(key, tuple(offset), tuple(sizes), pack, begin, end, digest)
        for offset, sizes, pack, begin, end, digest in entry.get("pieces", ())
    )
    numbers = [*shape, *(n for p in pieces for n in (*p.offset, *p.shape, p.begin, p.end))]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("a size is no whole number")
    if dtype not in BYTES:
        raise ValueError(f"{dtype} is no dtype")
    for piece in pieces:
        is_inside = len(piece.offset) == len(piece.shape) == len(shape) and all(
            low + size <= whole for low, size, whole in zip(piece.offset, piece.shape, shape, strict=True)
        )
        size = math.prod(piece.shape) * BYTES[dtype]
        if not is_inside or piece.end - piece.begin != size or piece.end > files[piece.pack].bytes:
            raise ValueError(f"a piece of {key} fits neither the tensor nor its file")
    return TensorEntry(shape, dtype, pieces)


def checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


# --- commit: pieces first, manifest last


def locate(folder: str, pack: str) -> str:
    """Return a pack's name in the store, from its name in the manifest of ``folder``."""
    return pack if "/" in pack else f"{folder}/{pack}"


def pack_name(token: str, rank: int) -> str:
    """Return the name of a rank's new pack; ``token`` (eight hexadecimal digits) is new at every save."""
    return f"pieces-{token}-{rank:05d}.safetensors"


def blocks_in(store: Store, here: str, folder: str) -> tuple[Known, dict[str, int]]:
    """Return the blocks of the checkpoint ``here``, for one in ``folder`` to refer to, and the bytes of their packs; of
    a damaged one none.
    """
    try:
        manifest = Manifest.read(store.location(here))
    except IntegrityError:
        return {}, {}
    names = {pack: locate(here, pack).removeprefix(f"{folder}/") for pack in manifest.files}
    known = {(piece.hash, piece.end - piece.begin): piece for piece in manifest.pieces if piece.hash}
    sizes = {names[pack]: entry.bytes for pack, entry in manifest.files.items()}
    return {key: replace(piece, pack=names[piece.pack]) for key, piece in known.items()}, sizes


def sizes_of(store: Store, folder: str, packs: Iterable[str]) -> dict[str, int | None]:
    """Map each pack that a manifest of ``folder`` names to its size; None: it is not there."""
    places = {pack: locate(folder, pack) for pack in packs}
    there: dict[str, int] = {}
    for home in {place.rpartition("/")[0] for place in places.values()}:
        there |= store.files(home)
    return {pack: there[place] if place in there else store.size(place) for pack, place in places.items()}


def commit(store: Store, folder: str, manifest: Manifest, *, new: bool = False, alone: bool = False) -> Manifest:
    """Write the manifest of a checkpoint whose packs are all there, and return it with their sizes.

    Until then the folder is no checkpoint, or the older one.

    Args:
        new: the folder has no manifest so far.
        alone: no checkpoint beside refers to the older one's files, which are removed.

    Raises:
        IntegrityError: a pack is gone or shorter than its pieces, or pieces do not add up to their tensor; the
            manifest was not written.
        OSError: the store fails.
    """
    for key, entry in manifest.tensors.items():
        found, wanted = sum(math.prod(piece.shape) for piece in entry.pieces), math.prod(entry.shape)
        if found != wanted:
            raise IntegrityError(
                f"{key} has {wanted:,} elements, and the ranks gave {found:,}: this layout saves wrong parts, which is"
                f" a fault of meshwright. Save in another layout, and report it"
            )
    ends: dict[str, int] = {}
    for piece in manifest.pieces:
        ends[piece.pack] = max(piece.end, ends.get(piece.pack, 0))
    sizes = sizes_of(store, folder, ends)
    for pack, end in ends.items():
        if (size := sizes[pack]) is None or size < end:
            found = "gone" if size is None else f"only {size:,} bytes long, and {end:,} were written"
            raise IntegrityError(
                f"{store.where(locate(folder, pack))} is {found}: does another job save there, or remove files?"
            )
    whole = replace(manifest, files={pack: FileEntry(sizes[pack] or 0) for pack in sorted(ends)})
    before: dict[str, FileEntry] = {}
    with suppress(IntegrityError):
        before = Manifest.read(store.location(folder)).files if alone and not new else {}
    whole.write(store.location(folder), new=new)
    # where this fails, the next save removes what no manifest names
    store.remove(locate(folder, name) for name in before if name not in whole.files)
    return whole


def lacking(store: Store, folder: str, manifest: Manifest) -> list[str]:
    """Say which files of a checkpoint are missing, or have another size; [] where it is whole. Reads no contents."""
    found = []
    for pack, size in sizes_of(store, folder, manifest.files).items():
        where, wanted = store.where(locate(folder, pack)), manifest.files[pack].bytes
        if size is None:
            found.append(f"{where} is missing")
        elif size != wanted:
            found.append(f"{where} has {size:,} bytes, but {wanted:,} were written")
    return found


# --- version 1: files whose headers say what they hold


def describe_file(store: Store, name: str) -> FileEntry:
    """Return size and CRC-32 of a file."""
    size, crc = store.files(name.rpartition("/")[0])[name], 0
    for begin in range(0, size, CHUNK):
        crc = zlib.crc32(store.read(name, begin, min(CHUNK, size - begin)), crc)
    return FileEntry(size, crc)


def with_pieces(store: Store, folder: str, manifest: Manifest) -> Manifest:
    """Return a manifest that says where the pieces lie, in version 1 by the headers of the files.

    Raises:
        IntegrityError: a header is damaged, or holds a tensor otherwise than the manifest says.
    """
    if any(manifest.pieces) or not manifest.files:
        return manifest
    found: dict[str, list[tuple[Any, ...]]] = {}
    try:
        for name in manifest.files:
            header, begin = read_header(store, locate(folder, name))
            shards = json.loads(header.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
            for key, row in header.items():
                if key not in manifest.tensors:
                    continue
                if row["dtype"] != WORDS[(entry := manifest.tensors[key]).dtype]:
                    raise IntegrityError(f"its files hold {key} as {row['dtype']}, and its manifest says {entry.dtype}")
                offset = shards[key]["saved_offsets"] if key in shards else [0] * len(row["shape"])
                low, high = row["data_offsets"]
                found.setdefault(key, []).append((offset, row["shape"], name, begin + low, begin + high, ""))
        tensors = {
            key: _tensor(key, {"shape": row.shape, "dtype": row.dtype, "pieces": found.get(key, ())}, manifest.files)
            for key, row in manifest.tensors.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"a header of its files is damaged ({type(error).__name__}: {error})") from error
    return replace(manifest, tensors=tensors)


def read_header(store: Store, name: str) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the place of its first tensor.

    Raises:
        IntegrityError: the file is damaged.
    """
    where, size = store.where(name), store.files(name.rpartition("/")[0]).get(name, 0)
    try:
        length = int.from_bytes(store.read(name, 0, 8), "little")
        if not 2 <= length <= min(size - 8, LARGEST_HEADER):
            raise ValueError(
                f"its first eight bytes say that its header has {length:,} bytes, and the file has {size:,}"
            )
        header = json.loads(store.read(name, 8, length))
        ends = [row["data_offsets"][1] for key, row in header.items() if key != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{where} is no whole safetensors file: {error}. Copy it again") from None
    if size != whole:
        raise IntegrityError(
            f"{where} has {size:,} bytes, and its header describes {whole:,}: it is cut short or damaged. Copy it again"
        )
    return header, 8 + length
