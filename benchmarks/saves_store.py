"""Figures of what a save writes and a load reads, against the disk's own speed: python benchmarks/saves_store.py [MB].

Interleaved, the best of nine of each: a save against write and fsync of as many bytes, a load (proven by its hashes)
against a read of as many into memory that is there, nothing of either in the page cache. Then the bytes that
a save writes of what has not changed, of a step of adapters, and that a load reads, against those of the tensors.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from meshwright.checkpoint import loading
from meshwright.checkpoint.manifest import Manifest, TensorEntry, blocks_in, commit, pack_name
from meshwright.checkpoint.pieces import write_pieces
from meshwright.checkpoint.store import LocalStore

ROUNDS = 9
TENSORS = 16


def timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def bytes_of(tensor: torch.Tensor):
    return tensor.view(-1).view(torch.uint8).numpy()


def saved(store: LocalStore, tensors: dict[str, torch.Tensor], step: int, after: int = 0) -> int:
    """Save, and return the bytes written."""
    folder = f"step-{step:08d}"
    earlier = blocks_in(store, f"step-{after:08d}", folder) if after else ({}, {})
    pieces = [
        SimpleNamespace(key=key, offset=(0,) * t.dim(), shape=tuple(t.shape), dtype="float32", data=bytes_of(t))
        for key, t in tensors.items()
    ]
    entries = write_pieces(store, folder, pack_name(f"{step:08x}", 0), pieces, *earlier)
    rows = {
        key: TensorEntry(tuple(t.shape), "float32", tuple(e for e in entries if e.key == key))
        for key, t in tensors.items()
    }
    commit(store, folder, Manifest(rows, {}))
    return sum(store.files(folder).values())


def raw_write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with open(path, "wb", buffering=0) as file:
        for tensor in tensors.values():
            file.write(tensor.view(-1).numpy().view(np.uint8))
        os.fsync(file.fileno())


def raw_read(path: Path, into: dict[str, torch.Tensor]) -> None:
    with open(path, "rb", buffering=0) as file:
        for tensor in into.values():
            file.readinto(tensor.view(-1).numpy().view(np.uint8))


def forget(place: Path) -> None:
    """Take files out of the page cache."""
    for path in filter(Path.is_file, place.rglob("*")):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def counted(counts: list[int]):
    """Count the bytes of every read."""
    opened = LocalStore.opened

    @contextmanager
    def counting(self, name):
        with opened(self, name) as read_into:

            def count(begin, buffer):
                counts.append(len(memoryview(buffer)))
                read_into(begin, buffer)

            yield count

    LocalStore.opened = counting
    try:
        yield
    finally:
        LocalStore.opened = opened


def main() -> None:
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    rows = size * 2**20 // TENSORS // 4096
    tensors = {f"model.{i}": torch.randn(rows, 1024) for i in range(TENSORS)}
    total = sum(tensor.nbytes for tensor in tensors.values())
    place = Path(tempfile.mkdtemp(dir="."))
    try:
        store, raw = LocalStore(place), place / "raw"
        path = store.location("step-00000001")
        times: dict[str, list[float]] = {"raw write": [], "save": [], "raw read": [], "load": []}
        into = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
        for turn in range(1, ROUNDS + 1):
            shutil.rmtree(place / "step-00000001", ignore_errors=True)
            raw.unlink(missing_ok=True)
            ways = [
                ("raw write", lambda: raw_write(raw, tensors)),
                ("save", lambda: saved(store, tensors, 1)),
            ]
            for name, action in ways if turn % 2 else ways[::-1]:
                times[name].append(timed(action))
            ways = [
                ("raw read", lambda: raw_read(raw, into)),
                ("load", lambda: loading.read_tensors(into, path, Manifest.read(path), fresh=into)),
            ]
            for name, action in ways if turn % 2 else ways[::-1]:
                forget(place)
                times[name].append(timed(action))
        best = {name: min(found) for name, found in times.items()}
        for name, seconds in best.items():
            print(f"{name:<10} {seconds:.3f} s, {total / seconds / 1e9:.2f} GB/s")
        print(f"save / raw write: {best['raw write'] / best['save']:.2f} x the speed")
        print(f"load / raw read:  {best['raw read'] / best['load']:.2f} x the speed")
        again = saved(store, tensors, 2, after=1)
        manifest = (place / "step-00000002/manifest.json").stat().st_size
        print(f"written again though unchanged: {again - manifest:,} bytes (and a manifest of {manifest:,})")
        trained = {f"model.lora.{i}": torch.randn(512, 1024) for i in range(8)}
        saved(store, tensors | trained, 3, after=2)
        trained = {key: tensor + 1 for key, tensor in trained.items()}
        step = saved(store, tensors | trained, 4, after=3)
        manifest = (place / "step-00000004/manifest.json").stat().st_size
        own = sum(tensor.nbytes for tensor in trained.values())
        print(f"a step of adapters: {(step - manifest) / own:.4f} x those trained (with its manifest {step / own:.4f})")
        counts: list[int] = []
        with counted(counts):
            part = {"model.0": into["model.0"]}
            loading.read_tensors(part, path, Manifest.read(path), fresh=part)
        print(f"bytes read / own share: {sum(counts) / into['model.0'].nbytes:.4f}")
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
