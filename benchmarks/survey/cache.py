"""What was judged before: a file for each cell, good as long as nothing changes that the cell depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

import meshwright
from benchmarks.survey.matrix import Cell, Judged, judge
from meshwright.core.files import replace_text
from meshwright.distributed.process.workers import WorkerPool

HOUSE = Path(meshwright.__file__).parent
MATRIX = Path(__file__).with_name("matrix.py")
FOLDERS = ("core", "models", "introspection", "comparison", "planning", "distributed", "verification")
"""What a cell depends on, beside its own definition.

Data, checkpoints, training and the command line have no part in it.
"""


def fingerprint(house: Path = HOUSE) -> str:
    """A digest of the sources that cells depend on, and of the versions of Python and torch."""
    digest = hashlib.sha256(f"python {platform.python_version()} torch {version('torch')}".encode())
    digest.update(MATRIX.read_bytes())
    for folder in FOLDERS:
        for path in sorted((house / folder).rglob("*.py")):
            digest.update(f"\0{path.relative_to(house).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


class Cache:
    """A folder with a JSON file for each cell that was judged and does not differ.

    Args:
        sources: ``fingerprint()``; a cell that was judged with another one is not known.
    """

    def __init__(self, folder: Path, sources: str):
        self.folder, self._sources = folder, sources

    def known(self, cell: Cell) -> Judged | None:
        """What came of the cell; None where it must be judged."""
        try:
            said = json.loads(self._file(cell).read_text(encoding="utf-8"))
            if said.pop("key") != self._key(cell):
                return None
            return Judged(**said | {"errors": tuple(said["errors"])})
        except (OSError, ValueError, TypeError, KeyError):  # not there, or not written by this version
            return None

    def all_known(self, cells: Iterable[Cell]) -> dict[Cell, Judged]:
        """Those of the cells that are known, with what came of them."""
        found = {cell: self.known(cell) for cell in cells}
        return {cell: judged for cell, judged in found.items() if judged is not None}

    def keep(self, cell: Cell, judged: Judged) -> None:
        """Remember what came of a cell. A cell that differs is forgotten: it is judged again until it does not."""
        if judged.state == "DIFFERS":
            self._file(cell).unlink(missing_ok=True)
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_text(self._file(cell), json.dumps({"key": self._key(cell)} | dataclasses.asdict(judged), indent=1))

    def _key(self, cell: Cell) -> str:
        return hashlib.sha256(f"{self._sources}\0{cell!r}".encode()).hexdigest()

    def _file(self, cell: Cell) -> Path:
        return self.folder / f"{re.sub('[^a-z0-9_=]+', '-', cell.name)}.json"


def judge_all(
    cells: Iterable[Cell],
    known: Mapping[Cell, Judged],
    cache: Cache,
    pool: WorkerPool,
    told: Callable[[Cell, Judged], None],
) -> dict[Cell, Judged]:
    """What came of each cell, in their order.

    Args:
        known: what came of some of them before; those are not judged.
        told: called with every cell that is judged, once it is kept.
    """
    found = {}
    for cell in cells:
        found[cell] = known.get(cell) or judge(cell, pool)
        if cell not in known:
            cache.keep(cell, found[cell])
            told(cell, found[cell])
    return found
