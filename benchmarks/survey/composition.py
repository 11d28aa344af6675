"""What goes with what: every switch on every axis, in pairs, and in random combinations.

By the rules, and by what came of computing it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

from benchmarks.survey.matrix import (
    BATCHES,
    COMPILED,
    CUTTABLE,
    DEEP,
    FURTHER_MODES,
    IN_FLOAT8,
    ROUNDED,
    SIGMOID,
    UNTIED,
    first_sentence,
)
from meshwright.core.errors import MeshwrightError
from meshwright.distributed.process.workers import WorkerPool
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.verification.problem import Problem
from meshwright.verification.routes import refuse_unseen
from meshwright.verification.verify import verify


@dataclass(frozen=True)
class MeshChoice:
    """A mesh, and the techniques that it stands for."""

    layout: Layout
    techniques: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return str(self.layout)


AXES = {
    "FSDP2": MeshChoice(Layout(dp_shard=2)),
    "HSDP": MeshChoice(Layout(dp_replicate=2, dp_shard=2)),
    "TP + SP": MeshChoice(Layout(dp_shard=2, tp=2)),
    "PP, 1f1b": MeshChoice(Layout(pp=2, dp_shard=2)),
    "PP, zbv": MeshChoice(Layout(pp=2, dp_shard=2), (("pipeline_schedule", "zbv_zero_bubble"),)),
    "EP": MeshChoice(Layout(dp_shard=2, ep=2)),
}
DTYPES = ("bfloat16", "float16", "float32", "float64")
"""What switches compute in; of several the first."""
DRAWN = 60
MOST_AT_ONCE = 4


@dataclass(frozen=True)
class Switch:
    """Techniques that are asked for together, under one name.

    Attributes:
        dtype: what is computed in.
        about: of those that are about the same, one can be said at a time.
    """

    name: str
    techniques: tuple[tuple[str, Any], ...] = ()
    dtype: str = "float64"
    about: str = ""


SWITCHES = (
    Switch("bfloat16", dtype="bfloat16", about="dtype"),
    Switch("float16", dtype="float16", about="dtype"),
    *(Switch(name, techniques, dtype="float32", about="float8") for name, techniques in IN_FLOAT8),
    *(Switch(f"zero_stage = {stage}", (("zero_stage", stage),), about="zero") for stage in (1, 2, 3)),
    Switch("sync_grad_accum", (("sync_grad_accum", True),), about="zero"),
    Switch("cpu_offload", (("cpu_offload", True),), about="offload"),
    Switch("cpu_offload = optimizer", (("cpu_offload", "optimizer"),), about="offload"),
    *(
        Switch(f"checkpointing: {mode}", (("activation_checkpointing", mode),), about="checkpointing")
        for mode in ("full", "selective")
    ),
    *(
        Switch(f"checkpointing: {mode}", (("activation_checkpointing", mode), *more), about="checkpointing")
        for mode, more in FURTHER_MODES
    ),
    Switch("compile", COMPILED),
    Switch("loss_chunks", (("loss_chunks", 3),)),
    Switch("freeze", (("freeze", ("embedding", r"layers\.0")),)),
)


@dataclass(frozen=True)
class Together:
    """Some switches on an axis."""

    axis: str
    switches: tuple[Switch, ...]

    @property
    def name(self) -> str:
        return f"{self.axis}: {' + '.join(switch.name for switch in self.switches)}"

    def problem(self) -> Problem:
        """What is computed: microbatches of one row where gradients accumulate."""
        axis = AXES[self.axis]
        techniques = dict(axis.techniques)
        for switch in self.switches:
            techniques |= dict(switch.techniques)
        dtype = min((switch.dtype for switch in self.switches), key=DTYPES.index)
        rows = 1 if any(switch.about == "zero" for switch in self.switches) else 0
        return Problem(
            _model(axis.layout, "float8" in techniques),
            BATCHES,
            steps=2,
            dtype=dtype,
            techniques=techniques,
            microbatch_rows=rows,
        )


def _model(layout: Layout, rounds: bool) -> DecoderConfig:
    cut = ROUNDED if rounds else CUTTABLE if layout.tp > 1 else {}
    sizes = cut | (DEEP if layout.pp > 1 else {})
    return replace(UNTIED, **sizes, moe=SIGMOID if layout.ep > 1 else None)


@cache
def _facts(model: DecoderConfig) -> ModelFacts:
    return model_facts(as_module(model))


def singles() -> list[Together]:
    """Every switch on every axis."""
    return [Together(axis, (switch,)) for switch in SWITCHES for axis in AXES]


def pairs() -> list[Together]:
    """Every two switches that do not say the same thing differently, on sharded data ranks."""
    return [Together("FSDP2", two) for two in combinations(SWITCHES, 2) if not _contradict(two)]


def drawn(seed: int = 0) -> list[Together]:
    """Random combinations of two to four switches on random axes, each once."""
    draw = random.Random(seed)
    found: dict[str, Together] = {}
    while len(found) < DRAWN:
        some = tuple(draw.sample(SWITCHES, draw.randint(2, MOST_AT_ONCE)))
        if not _contradict(some):
            one = Together(draw.choice([*AXES]), some)
            found.setdefault(one.name, one)
    return list(found.values())


def _contradict(switches: tuple[Switch, ...]) -> bool:
    about = [switch.about for switch in switches if switch.about]
    return len(about) != len(set(about))


def refusal(together: Together) -> str:
    """What the rules say against it, in one sentence; empty where they allow it."""
    problem = together.problem()
    layout = AXES[together.axis].layout
    try:
        plan(_facts(problem.model), layout, cluster=Cluster(layout.world), techniques=problem.requested)
        refuse_unseen(problem)
    except MeshwrightError as error:
        return first_sentence(str(error))
    return ""


def judge(together: Together, pool: WorkerPool) -> str:
    """Empty where it equals one process, else the refusal, or "DIFFERS: " and where."""
    if said := refusal(together):
        return said
    p, layout = together.problem(), AXES[together.axis].layout
    options: dict[str, Any] = {
        "techniques": p.techniques,
        "microbatch_rows": p.microbatch_rows,
        "steps": p.steps,
        "dtypes": (p.dtype,),
    }
    try:
        report = verify(p.model, layout, p.batches, pool=pool, **options)
    except MeshwrightError as trouble:
        return f"DIFFERS: {first_sentence(str(trouble))}"
    firsts = [comparison.first.place for comparison in report.comparisons if comparison.first is not None]
    return f"DIFFERS: first at {firsts[0]}." if firsts else ""


HEAD = """# What goes with what

Written by `make composition` on {day} with torch {torch}: nothing here was written by hand. A small decoder was
computed by a layout and by one process with plain torch (docs/verify.md says what is compared); on the axis EP it has
experts.

- **equal**: within rounding in all that is compared.
- **planned**: the rules allow it; that pair was not computed.
- a number: refused by a rule, before any process starts, for the reason at the end.
- **DIFFERS**: a bug.
"""


def page(judged: Mapping[Together, str], day: str, torch: str) -> str:
    """The whole page.

    Args:
        judged: of every one of ``singles`` and ``drawn`` what ``judge`` said.
    """
    notes: dict[str, int] = {}

    def shown(said: str, otherwise: str = "equal") -> str:
        if said.startswith("DIFFERS"):
            return f"**{said}**"
        return str(notes.setdefault(said, len(notes) + 1)) if said else otherwise

    axes = [f"{axis} ({layout})" for axis, layout in AXES.items()]
    on_axes = [[switch.name, *(shown(judged[Together(axis, (switch,))]) for axis in AXES)] for switch in SWITCHES]
    by_pair = {one.switches: refusal(one) for one in pairs()}
    names = [switch.name for switch in SWITCHES]
    in_pairs = [
        [str(number), one.name, *(_pair(by_pair, one, other, shown) for other in SWITCHES[:-1])]
        for number, one in enumerate(SWITCHES, 1)
    ]
    at_random = [[one.axis, " + ".join(switch.name for switch in one.switches), shown(judged[one])] for one in drawn()]
    equal = sum(not judged[one] for one in drawn())
    parts = [
        HEAD.format(day=day, torch=torch),
        "## Each switch on each axis\n",
        _table(["", *axes], on_axes),
        "## Two switches, with FSDP2, by the rules\n",
        _table(["", "", *map(str, range(1, len(names)))], in_pairs),
        f"## {DRAWN} random combinations: {equal} equal, {DRAWN - equal} refused or different\n",
        _table(["axis", "switches", ""], at_random),
        "## Why refused\n",
        "".join(f"{number}. {reason}\n" for reason, number in notes.items()),
    ]
    return "\n".join(parts)


def _pair(known: Mapping[tuple[Switch, ...], str], one: Switch, other: Switch, shown: Callable[[str, str], str]) -> str:
    """Below the diagonal; empty where the two say the same thing differently."""
    said = known.get((other, one))
    return "" if said is None else shown(said, "planned")


def _table(heads: list[str], lines: Iterable[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in [heads, ["---"] * len(heads), *lines])
