"""Store a trace of one process's first steps, compact enough to keep and to compare a real run with.

The idea is that of TTrace (Jiang et al., "TTrace: Lightweight Error Checking and Diagnosis for Distributed
Training", arXiv 2506.09280): line up the tensors of a distributed run with those of a trusted one, and learn from a
perturbed run of the trusted one how far rounding may move each of them. A trace holds sketches, so that it takes some
megabytes for a large model, and ranks compare the rows and shards that they hold without moving them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.core.errors import ConfigError
from meshwright.core.files import replacing

FORMAT = "meshwright trace 2"

BY_ROW = ("forward", "backward")
"""Stages whose sketches have a row for each row of the batch."""


class Sketches(NamedTuple):
    """The sketches of one stage."""

    names: list[str]
    """Modules or parameters in the order in which they were computed."""
    values: Tensor
    """(names, rows, ROW_WIDTH) for modules, (names, TENSOR_WIDTH) for parameters and their gradients."""

    @classmethod
    def of(cls, named: Mapping[str, Tensor]) -> Sketches:
        return cls([*named], torch.stack([*named.values()]) if named else torch.zeros(0, 0))

    def by_name(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.values, strict=True))


@dataclass
class TracedStep:
    """A step of the trace."""

    batch: Tensor
    """(rows,) int64 fingerprints of the global batch's rows."""
    loss: float
    """Mean over the real tokens of the global batch."""
    norm: float
    """Global gradient norm before clipping."""
    sketches: dict[str, Sketches]
    """Sketches by stage: forward and backward of modules, gradient (before clipping), parameter (after the step)."""


@dataclass
class Trace:
    """A trace in memory, as it is written.

    Attributes:
        facts: the values that a run must share with the trace, by dotted key of the config; plain JSON values.
        drawn_on: device type on which the initial weights were drawn.
        initial: sketches of the initial weights.
        shapes: shape of each module's output, without its rows.
        floors: compute dtype → per step, stage and name ("" for loss and norm): the error by rounding to that dtype.
    """

    facts: dict[str, Any]
    drawn_on: str
    initial: Sketches
    steps: list[TracedStep]
    shapes: dict[str, tuple[int, ...]]
    floors: dict[str, list[dict[str, dict[str, float]]]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all; raises OSError."""
        tensors = {"0/parameter": self.initial.values}
        rows: list[dict[str, Any]] = [{"names": {"parameter": self.initial.names}}]
        for number, step in enumerate(self.steps, 1):
            tensors[f"{number}/batch"] = step.batch
            tensors |= {f"{number}/{stage}": sketches.values.contiguous() for stage, sketches in step.sketches.items()}
            names = {stage: sketches.names for stage, sketches in step.sketches.items()}
            rows.append({"loss": step.loss, "norm": step.norm, "names": names})
        kept = {"facts": self.facts, "drawn_on": self.drawn_on, "shapes": self.shapes, "floors": self.floors}
        header = {"format": FORMAT, "steps": rows, **kept}
        with replacing(path) as beside:
            save_file(tensors, beside, {"trace": json.dumps(header)})


class TraceFile:
    """A trace on disk: its facts, and the sketches that are requested.

    Attributes:
        facts, drawn_on, initial, shapes: as of ``Trace``.
        n_steps: number of steps.
        dtypes: the compute dtypes whose rounding errors the trace holds.

    Raises:
        ConfigError: the file cannot be read, or is no trace.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with self._opened() as file:
            header = (file.metadata() or {}).get("trace")
            self._header = found = json.loads(header) if header else {}
            if found.get("format") != FORMAT:
                raise ConfigError(
                    f"check_trace = {path}: the file is no trace that this version reads ('{FORMAT}'); write one anew"
                )
            self.facts: dict[str, Any] = found["facts"]
            self.drawn_on: str = found["drawn_on"]
            self.shapes: dict[str, tuple[int, ...]] = {name: tuple(shape) for name, shape in found["shapes"].items()}
            self.n_steps, self.dtypes = len(found["steps"]) - 1, tuple(found["floors"])
            self.initial = Sketches(found["steps"][0]["names"]["parameter"], file.get_tensor("0/parameter"))

    def floors(self, dtype: str, step: int) -> dict[str, dict[str, float]]:
        """Return the errors that rounding to ``dtype`` causes in a step (1 the first), by stage and name."""
        return self._header["floors"][dtype][step - 1]

    def step(self, step: int, rows: slice) -> TracedStep:
        """Read a step (1 the first), with the given rows of the global batch."""
        entry = self._header["steps"][step]
        with self._opened() as file:
            sketches = {}
            for stage, names in entry["names"].items():
                part = file.get_slice(f"{step}/{stage}")
                sketches[stage] = Sketches(names, part[:, rows] if stage in BY_ROW else part[:])
            return TracedStep(file.get_slice(f"{step}/batch")[rows], entry["loss"], entry["norm"], sketches)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            with safe_open(self.path, "pt") as file:
                yield file
        except (
            OSError,
            SafetensorError,
            json.JSONDecodeError,
            RecursionError,
            KeyError,
            TypeError,
            IndexError,
            AttributeError,
        ) as error:
            raise ConfigError(
                f"check_trace = {self.path}: no trace can be read from it ({type(error).__name__}: {error}). Write one"
                f" with: meshwright verify CONFIG --write-trace FILE"
            ) from None


def fingerprints(batch: dict[str, Tensor]) -> Tensor:
    """Fingerprint each row of a batch over all its tensors, (rows,) int64."""
    total = torch.zeros(len(batch["tokens"]), dtype=torch.int64)
    for number, key in enumerate(sorted(batch)):
        values = batch[key].cpu().to(torch.int64).flatten(1)
        places = (torch.arange(values.shape[1]) + 1) * 0x9E3779B97F4A7C1 + number * 0x632BE59BD9B4E
        total = total * 31 + ((values + 1) * (2 * places + 1)).sum(1)
    return total
