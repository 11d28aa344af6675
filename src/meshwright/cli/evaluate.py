"""``meshwright evaluate RUN|FOLDER``: loss and perplexity of a trained model on text, or its figures on tasks of
lm-eval, on any layout.

RUN is a run's folder; FOLDER holds the files of a model of transformers, or adapters of peft.

The layout is written as in meshwright train, --layout.tp=2; its processes are started here, or by torchrun or srun.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.core.config import parse_flags, take_flags
from meshwright.core.config.flags import flag_of
from meshwright.core.config.ranges import FROM_0, FROM_1
from meshwright.core.errors import ConfigError
from meshwright.data.options import BUILT_IN, SourceOptions
from meshwright.data.scan import absent, is_source
from meshwright.distributed.process.world import is_rank_zero
from meshwright.training.evaluation import DataOptions, EvaluationOptions, on_ranks, resolved_layout

from .arguments import open_model, refuse_rest

if TYPE_CHECKING:
    from meshwright.training.evaluation import ModelOnRanks

SECTIONS = ("--layout.", "--process.", "--data.")
OF_TASKS = ("tasks_path", "shots", "limit")
OF_LOSSES = ("data", "rows")


@dataclass(frozen=True)
class EvaluateOptions:
    data: str | None = None
    """Text, records or token ids, as data.source takes them (default: the run's own validation part); --data.format,
    --data.column and the like say how they are read, --data.seq_len how long rows are."""
    rows: Annotated[int | None, FROM_1] = None
    """At most so many rows, spread evenly (default: all; the run's own validation reads validation.samples)."""
    tasks: str | None = None
    """Tasks of lm-eval, such as A,B, which the extra eval installs, instead of a loss."""
    tasks_path: str | None = None
    """Folder with tasks of your own."""
    shots: Annotated[int | None, FROM_0] = None
    """Examples before each question (default: as the task says)."""
    limit: Annotated[int | None, FROM_1] = None
    """Questions of each task (default: all)."""
    batch: Annotated[int, FROM_1] = 8
    """Rows per forward of a data rank (default: 8)."""
    step: int | None = None
    """A checkpoint other than the run's latest."""
    base: Path | None = None
    """Folder of the model beside which adapters were trained: a run's, or those of a FOLDER whose base is elsewhere."""
    tokenizer: str | None = None
    """Of a FOLDER that holds none: bytes, or a folder with a tokenizer.json."""
    dtype: str | None = None
    """Of a FOLDER (default: as its weights are stored)."""
    json: bool = False
    """All figures as one JSON object."""
    trust: bool = False
    """Run the model code that the folder keeps."""


def run(argv: list[str]) -> int:
    """Evaluate, and print figures on rank 0."""
    options, argv = take_flags(EvaluateOptions, argv)
    words = [word for word in argv if word.startswith(SECTIONS)]
    argv = [word for word in argv if word not in words]
    flags = [word.partition("=")[0] for word in words]
    of_source = [flag for flag in flags if flag.startswith("--data.")]
    if other := next((flag for flag in flags if flag.endswith(".source")), ""):
        raise ConfigError(f"{other} is a key of train: here a source is named with --data PATH")
    if options.tasks is None:
        wrong = [flag_of(name) for name in OF_TASKS if getattr(options, name) is not None]
        what = "--tasks, which is not given"
    else:
        wrong = [flag_of(name) for name in OF_LOSSES if getattr(options, name) is not None] + of_source
        what = "a loss on text, and --tasks asks for lm-eval's figures"
    if wrong:
        raise ConfigError(f"{wrong[0]} is for {what}: leave one of the two out")
    of_source = [flag for flag in of_source if flag != "--data.cache"]
    if options.data is None and of_source:
        raise ConfigError(f"{of_source[0]} says how a source is read: name the source with --data PATH")
    if not argv or argv[0].startswith("-"):
        refuse_rest(argv[:1], "meshwright evaluate", EvaluateOptions)
        raise ConfigError(
            "meshwright evaluate needs the folder of a run, or of a model of transformers, like: meshwright evaluate"
            " runs/demo-…"
        )
    refuse_rest(argv[1:], "meshwright evaluate", EvaluateOptions)
    sections = parse_flags(EvaluationOptions, words, prog="meshwright evaluate")
    is_open = not any(word.startswith(("--layout.dp_shard", "--layout.dp-shard")) for word in words)
    layout, count = resolved_layout(sections.layout, sections.process, is_open=is_open)
    if options.tasks is not None:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # before anything imports what reads them
            os.environ.setdefault(name, "1")
    names = ("step", "base", "tokenizer", "dtype")
    opened = open_model(argv[0], trusted=options.trust, **{name: getattr(options, name) for name in names})
    from meshwright.training.evaluation import ModelOnRanks

    placed = ModelOnRanks(opened, layout, sections.process)
    return _loss(placed, options, sections.data, count) if options.tasks is None else _tasks(placed, options, count)


def _loss(placed: ModelOnRanks, options: EvaluateOptions, data: DataOptions, count: int) -> int:
    from meshwright.training.evaluation import TextRequest, evaluate_loss

    opened, path = placed.opened, options.data
    if path is None and opened.checkpoint is None:
        raise ConfigError(f"{opened.path} is a model without a run, so it has no validation part: give --data PATH")
    if path is not None and not is_source(path):
        raise ConfigError(f"--data: {absent(path)} Give a file, a folder, or {' or '.join(BUILT_IN)}")
    source = None
    if path is not None:
        own = {field.name: getattr(data, field.name) for field in fields(SourceOptions)}
        source = SourceOptions(**{**own, "source": (path,)})
    request = TextRequest(placed, source, data.seq_len, data.cache, options.rows, options.batch)
    found = on_ranks(evaluate_loss, request, count, insists=bool(placed.process.count))
    if is_rank_zero():
        on = path or "the run's validation part"
        names = ("loss", "perplexity", "bits_per_byte", "tokens", "rows")
        figures = {name: getattr(found, name) for name in names}
        if options.json:
            print(json.dumps({**_about(placed), "data": on, **figures}))
        else:
            print(f"{opened.words}, {opened.dtype}, {placed.layout}, on {on}")
            for name, value in figures.items():
                if value is not None:
                    print(f"  {name:<14}{value:,.6g}" if isinstance(value, float) else f"  {name:<14}{value:,}")
    return 0


def _about(placed: ModelOnRanks) -> dict[str, Any]:
    opened = placed.opened
    return {
        "model": str(opened.path),
        "step": opened.step,
        "dtype": opened.dtype,
        "layout": {axis: size for axis, size in vars(placed.layout).items() if size > 1},
    }


def _tasks(placed: ModelOnRanks, options: EvaluateOptions, count: int) -> int:
    from meshwright.integrations.lm_eval import TaskRequest, evaluate_tasks

    names = tuple(name.strip() for name in (options.tasks or "").split(",") if name.strip())
    request = TaskRequest(placed, names, options.tasks_path, options.shots, options.limit, options.batch)
    found = on_ranks(evaluate_tasks, request, count, insists=bool(placed.process.count))
    if is_rank_zero():
        if options.json:
            print(json.dumps({**_about(placed), "tasks": found}))
        else:
            print(f"{placed.opened.words}, {placed.opened.dtype}, {placed.layout}")
            for task, figures in found.items():
                print(f"  {task}")
                for name, value in figures.items():
                    print(f"    {name:<30}{value:.6g}" if isinstance(value, float) else f"    {name:<30}{value}")
    return 0
