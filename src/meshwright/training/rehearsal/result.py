"""Define the result of a rehearsal: the figures of one rank, for people and for other programs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

from meshwright.core.config import from_dict
from meshwright.core.errors import ConfigError
from meshwright.core.units import bytes_text, duration_text
from meshwright.planning.explain import columns
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch
from meshwright.training.metrics.memory_table import KINDS

FORMAT = 1
"""Version of the JSON; another meaning of a field gets another number."""


@dataclass(frozen=True)
class MessageRow:
    """The messages of one kind in a step.

    Attributes:
        bytes: those that the rank sends.
        seconds: foreseen seconds of all of them; 0 where messages took none.
    """

    op: str
    axis: str
    ranks: int
    calls: int
    bytes: float
    seconds: float = 0.0


@dataclass(frozen=True)
class Rehearsal:
    """One rank's steps, taken alone.

    Attributes:
        rank, world: the rank, and the number of ranks of the run.
        coordinates: axis of the mesh -> the rank's place on it.
        alike: number of ranks with the same work, this one included; 0: not counted.
        work: what tells these ranks from others, in words.
        device: name of the device.
        build_seconds: seconds to build the run: plan, data, weights, layout.
        first_step_seconds: seconds of the first step, compilation included.
        step_seconds: seconds of each later step that was timed; with ``links`` messages take time in them.
        memory: kind of memory -> the most bytes at one time in forward and backward of the first step, and the
            optimizer's state behind it.
        peak_bytes: the most bytes at one time in all steps, by the device's allocator; on a CPU of the whole process.
        peak_label: name of that quantity.
        operators: operator -> number of its calls in a step.
        messages: the messages of a step.
        links: the devices and links whose messages' seconds were foreseen; empty: messages took no time.
        plan: digest of the plan and the batch (``digest``).
        refused: why the rank could not go on; empty where it could.
        exit_status: the exit status that this error has.
    """

    rank: int
    world: int
    coordinates: dict[str, int] = field(default_factory=dict)
    alike: int = 0
    work: str = ""
    device: str = ""
    build_seconds: float = 0.0
    first_step_seconds: float = 0.0
    step_seconds: tuple[float, ...] = ()
    is_compiled: bool = False
    memory: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    peak_label: str = ""
    operators: dict[str, int] = field(default_factory=dict)
    messages: tuple[MessageRow, ...] = ()
    links: str = ""
    plan: str = ""
    refused: str = ""
    exit_status: int = 0

    @property
    def seconds(self) -> float:
        """Typical seconds of a step: the median; NaN-free 0 where none was timed."""
        return median(self.step_seconds) if self.step_seconds else 0.0

    @property
    def compile_seconds(self) -> float:
        """Seconds by which compilation made the first step longer than a later one; 0 where nothing is compiled."""
        return max(0.0, self.first_step_seconds - self.seconds) if self.is_compiled and self.step_seconds else 0.0

    def to_json(self) -> str:
        return to_json([self])

    @classmethod
    def from_json(cls, text: str) -> Rehearsal:
        """Read the first rehearsal of a text; raises ConfigError as the function ``from_json`` does."""
        return from_json(text)[0]

    def of_kind(self, alike: int, work: str) -> Rehearsal:
        """Return the same figures as those of one of ``alike`` ranks with the same work."""
        return replace(self, alike=alike, work=work)

    def __str__(self) -> str:
        return _page(self)


def digest(plan: Plan, batch: Batch) -> str:
    """Return a text that tells plans and batches apart, but not their notes, and is the same in all processes."""
    return hashlib.sha256(f"{replace(plan, notes=()).to_json()} {batch}".encode()).hexdigest()


def to_json(rehearsals: Sequence[Rehearsal]) -> str:
    """Write rehearsals as one JSON object, with the version of its format."""
    return json.dumps({"format": FORMAT, "rehearsals": [asdict(one) for one in rehearsals]}, indent=1)


def from_json(text: str, where: str = "this text") -> list[Rehearsal]:
    """Read what ``to_json`` wrote; at least one rehearsal.

    Raises:
        ConfigError: damaged, or of another version.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is no rehearsal: it is not JSON ({error})") from None
    if not isinstance(values, Mapping) or "format" not in values or not values.get("rehearsals"):
        raise ConfigError(f"{where} is no rehearsal: write one with meshwright rehearse CONFIG --json=FILE")
    if values["format"] != FORMAT:
        raise ConfigError(
            f"{where} is a rehearsal in format {values['format']}, and this meshwright reads format {FORMAT}: rehearse"
            f" again"
        )
    rows = values["rehearsals"]
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"{where} is a damaged rehearsal: 'rehearsals' is not a list of objects. Rehearse again")
    try:
        return [from_dict(Rehearsal, row, where=f"rehearsals[{place}]") for place, row in enumerate(rows)]
    except ConfigError as error:
        raise ConfigError(f"{where} is a damaged rehearsal ({str(error).splitlines()[0]}). Rehearse again") from None


def read(path: Path) -> list[Rehearsal]:
    """Read a file that ``meshwright rehearse --json=FILE`` wrote; ConfigError where it cannot be read."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return from_json(text, str(path))


def _page(r: Rehearsal) -> str:
    place = ", ".join(f"{axis} {number}" for axis, number in r.coordinates.items())
    head = f"rank {r.rank} of {r.world}" + (f" ({place})" if place else "") + (f" on {r.device}" if r.device else "")
    if r.alike:
        head += f"; {r.alike} rank{'s' * (r.alike > 1)} like it: {r.work}"
    if r.refused:
        return f"{head}\n  refused: {r.refused}"
    parts = [head, f"{_memory(r)}\n  {r.peak_label} {bytes_text(r.peak_bytes)}", _times(r)]
    if r.messages:
        heads = "message", "axis", "ranks", "calls", "bytes per step"
        rows = [(m.op, m.axis, str(m.ranks), str(m.calls), bytes_text(m.bytes)) for m in r.messages]
        if r.links:
            heads = (*heads, "foreseen")
            rows = [(*row, _short(m.seconds)) for row, m in zip(rows, r.messages, strict=True)]
        parts.append(columns(rows, heads))
    return "\n\n".join(parts)


def _memory(r: Rehearsal) -> str:
    rows = [(text, bytes_text(r.memory[kind])) for kind, text in KINDS.items() if kind in r.memory]
    seen = " (compiled blocks: what they keep is not seen)" if r.is_compiled else ""
    return columns(rows, (f"the most at a time of{seen}", "bytes"))


def _times(r: Rehearsal) -> str:
    rows = [("building the run", duration_text(r.build_seconds)), ("first step", _short(r.first_step_seconds))]
    if r.is_compiled:
        rows.append(("compilation, in the first step", _short(r.compile_seconds)))
    rows.append((f"step, median of {len(r.step_seconds)}", _short(r.seconds)))
    rows.append(("operators of a step", f"{sum(r.operators.values()):,}"))
    return columns(rows, (f"with messages of {r.links}" if r.links else "without messages", "time"))


def _short(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else duration_text(seconds)
