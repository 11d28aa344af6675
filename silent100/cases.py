"""Read cases, and write each one's script under neutral names."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

EDGES = ("step", "data", "checkpoint", "resume", "optimizer", "precision", "engine", "elasticity")
AXES = ("data", "sharded data", "tensor", "sequence", "pipeline", "expert", "context", "several")
KINDS = (
    *("missing reduction", "double reduction", "wrong group", "wrong scale", "stale value", "wrong rows"),
    *("wrong order", "mask", "position", "rounding/dtype", "not updated", "not saved", "not restored", "dead path"),
    *("tie broken", "seed"),
)
SOUND = "sound program"


class CaseError(Exception):
    """A case that cannot be used, in words for its author."""


@dataclass(frozen=True)
class Answer:
    """What a judge should say of a fault.

    Attributes:
        place: regular expression over names of modules or parameters; ``.+`` where the fault touches all.
        step: first optimizer step in which a value differs, 1 the first.
        ranks: where the fault arises.
        kind: one of ``KINDS``.
    """

    place: str
    step: int
    ranks: tuple[int, ...]
    kind: str


@dataclass(frozen=True)
class Case:
    """One script, run as one process, as its sound twin and, unless it is a sound program, with its fault."""

    folder: Path
    id: str
    title: str
    edge: str
    axis: str
    processes: int
    tier: int
    answer: Answer | None

    @property
    def script(self) -> Path:
        return self.folder / "case.py"


def read(folder: Path) -> Case:
    """Read a case's folder.

    Raises:
        CaseError: a file is missing, or a value is none of those that the README lists.
    """
    file = folder / "case.toml"
    try:
        told = tomllib.loads(file.read_text(encoding="utf-8"))
        answer = None if told.get("sound") else told["answer"]
        case = Case(
            folder,
            str(told.get("id", folder.name)),
            str(told.get("title", "")),
            told["edge"],
            told["axis"],
            int(told["processes"]),
            int(told.get("tier", 1)),
            answer
            and Answer(str(answer["place"]), int(answer["step"]), tuple(sorted(answer["ranks"])), str(answer["kind"])),
        )
        re.compile(case.answer.place if case.answer else "")
    except (OSError, KeyError, ValueError, TypeError, AttributeError, re.error) as error:
        raise CaseError(f"{file}: {type(error).__name__}: {error}") from None
    if not case.script.is_file():
        raise CaseError(f"{folder} has no case.py")
    allowed: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("edge", case.edge, EDGES),
        ("axis", case.axis, AXES),
        ("tier", case.tier, (1, 2)),
    ]
    if case.answer is not None:
        allowed.append(("kind", case.answer.kind, KINDS))
    for key, value, known in allowed:
        if value not in known:
            raise CaseError(f"{file}: {key} = {value!r} is none of {', '.join(map(str, known))}")
    return case


def read_all(root: Path, pattern: str = "*") -> list[Case]:
    """Read every case below a folder whose name or id matches a pattern, sorted by folder.

    Raises:
        CaseError: there is none, or one cannot be used.
    """
    cases = [read(file.parent) for file in sorted(root.rglob("case.toml"))]
    cases = [case for case in cases if fnmatch(case.folder.name, pattern) or fnmatch(case.id, pattern)]
    if not cases:
        raise CaseError(f"{root} holds no case named {pattern}: a case is a folder with case.py and case.toml")
    return cases


def neutral(script: str, faulty: bool) -> str:
    """Return a script's text in which nothing is called faulty, with the flag given to itself if it is to be.

    So the command lines of a sound twin and of a faulty run are the same, and neither has the word.
    """
    text = re.sub(r"(?i)faulty", "option_k", script)
    tree = ast.parse(text)
    first = next(
        (
            node.lineno
            for number, node in enumerate(tree.body)
            if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
            and not (number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        ),
        len(text.splitlines()) + 1,
    )
    lines = text.splitlines(keepends=True)
    words = ["--option_k"] if faulty else []
    lines.insert(first - 1, f"import sys as sys_; sys_.argv += {words}\n")
    return "".join(lines)


def write_scripts(case: Case, folder: Path) -> dict[str, list[str]]:
    """Write a case's scripts; return the command lines by "one", "sound" and, where there is one, "fault"."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.processes)]
    text = case.script.read_text(encoding="utf-8")
    commands = {}
    for number, name in enumerate(order(case)):
        # Both lie in folders of their own, under one name
        path = folder / f"many{number}" / "train.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(neutral(text, name == "fault"), encoding="utf-8")
        commands[name] = [*launch, str(path)]
    one = folder / "one" / "train.py"
    one.parent.mkdir(parents=True, exist_ok=True)
    one.write_text(neutral(text, False), encoding="utf-8")
    return {"one": [sys.executable, str(one), "--one"], **commands}


def order(case: Case) -> tuple[str, ...]:
    """Return the questions about a case in an order that its id draws, so that none is always the first."""
    if case.answer is None:
        return ("sound",)
    return ("sound", "fault") if sum(case.id.encode()) % 2 else ("fault", "sound")
