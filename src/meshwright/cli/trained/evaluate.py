"""``meshwright evaluate RUN|FOLDER``: loss and perplexity of a trained model on text, or its figures on tasks of
lm-eval, on any layout.

RUN is a run's folder; FOLDER holds the files of a model of transformers, or adapters of peft.

--data PATH           text, records or token ids, as data.source takes them (default: the run's own validation part);
                      --data.format, --data.column and the like say how they are read, --data.seq_len how long rows are
--rows N              at most N rows, spread evenly (default: all; the run's own validation reads validation.samples)
--tasks A,B           tasks of lm-eval, which the extra eval installs, instead of a loss
--tasks_path FOLDER   a folder with tasks of your own
--shots N             examples before each question (default: as the task says)
--limit N             questions of each task (default: all)
--batch N             rows per forward of a data rank (default 8)
--layout.tp=2 …       the layout, as in meshwright train; its processes are started here, or by torchrun or srun
--step N              a checkpoint other than the run's latest
--base FOLDER         the model beside which the run trained adapters, or where that of a folder of adapters is
--tokenizer NAME      of a FOLDER that holds none: bytes, or a folder with a tokenizer.json
--dtype NAME          of a FOLDER (default: as its weights are stored)
--json                all figures as one JSON object
--trust               run the model code that the folder keeps
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.arguments import (
    open_model,
    refuse_rest,
    take_flag,
    take_option,
    take_trust,
)
from meshwright.core.config import parse_flags
from meshwright.core.errors import ConfigError
from meshwright.data.options import BUILT_IN
from meshwright.distributed.process.world import is_rank_zero
from meshwright.training.evaluation import DataOptions, EvaluationOptions, on_ranks, resolved_layout

if TYPE_CHECKING:
    from meshwright.data.options import SourceOptions
    from meshwright.training.evaluation import Evaluation, ModelOnRanks

FLAGS = (
    "--data, --rows, --tasks, --tasks_path, --shots, --limit, --batch, --step, --base, --tokenizer, --dtype, --json,"
    " --trust, --layout.*, --process.*, --data.*"
)
SECTIONS = ("--layout.", "--process.", "--data.")
OF_TASKS = ("--tasks_path", "--shots", "--limit")
OF_LOSSES = ("--data", "--rows")
KINDS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("--data", "--tasks", "--tasks_path", "--tokenizer", "--dtype"), str),
    **dict.fromkeys(("--rows", "--shots", "--limit", "--batch", "--step"), int),
    "--base": Path,
}
SMALLEST = {"--rows": 1, "--shots": 0, "--limit": 1, "--batch": 1}


def run(argv: list[str]) -> int:
    """Evaluate, and print figures on rank 0."""
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0 if argv else 2
    given: dict[str, Any] = {}
    for name, kind in KINDS.items():
        given[name], argv = take_option(argv, name, kind)
    as_json, argv = take_flag(argv, "--json")
    trusted, argv = take_trust(argv)
    sections = [word for word in argv if word.startswith(SECTIONS)]
    argv = [word for word in argv if word not in sections]
    _check(given, [word.partition("=")[0] for word in sections])
    if not argv or argv[0].startswith("-"):
        refuse_rest(argv[:1], "meshwright evaluate", FLAGS)
        raise ConfigError(
            "meshwright evaluate needs the folder of a run, or of a model of transformers, like: meshwright evaluate"
            " runs/demo-…"
        )
    refuse_rest(argv[1:], "meshwright evaluate", FLAGS)
    options = parse_flags(EvaluationOptions, sections, prog="meshwright evaluate", description=__doc__ or "")
    is_open = not any(word.startswith(("--layout.dp_shard", "--layout.dp-shard")) for word in sections)
    layout, count = resolved_layout(options.layout, options.process, is_open=is_open)
    if given["--tasks"] is not None:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # before anything imports what reads them
            os.environ.setdefault(name, "1")
    names = ("step", "base", "tokenizer", "dtype")
    opened = open_model(argv[0], trusted=trusted, **{name: given[f"--{name}"] for name in names})
    from meshwright.training.evaluation import ModelOnRanks

    placed = ModelOnRanks(opened, layout, options.process)
    if given["--tasks"] is not None:
        return _tasks(placed, given, count, as_json=as_json)
    return _loss(placed, given, options.data, count, as_json=as_json)


def _check(given: dict[str, Any], sections: list[str]) -> None:
    """Raise ConfigError for a value out of range, or a flag that goes with another one that is missing."""
    for name, least in SMALLEST.items():
        if given[name] is not None and given[name] < least:
            raise ConfigError(f"{name} = {given[name]} is out of range: it must be {least} or more")
    if given["--tasks"] is None:
        wrong = [name for name in OF_TASKS if given[name] is not None]
        what = "--tasks, which is not given"
    else:
        wrong = [name for name in OF_LOSSES if given[name] is not None]
        wrong += [name for name in sections if name.startswith("--data.")]
        what = "a loss on text, and --tasks asks for lm-eval's figures"
    if wrong:
        raise ConfigError(f"{wrong[0]} is for {what}: leave one of the two out")
    of_source = [name for name in sections if name.startswith("--data.") and name not in ("--data.cache",)]
    if given["--data"] is None and of_source:
        raise ConfigError(f"{of_source[0]} says how a source is read: name the source with --data PATH")


def _source(path: str | None, options: DataOptions) -> SourceOptions | None:
    from meshwright.data.options import SourceOptions

    if path is None:
        return None
    own = {field.name: getattr(options, field.name) for field in fields(SourceOptions)}
    return SourceOptions(**{**own, "source": (path,)})


def _loss(placed: ModelOnRanks, given: dict[str, Any], data: DataOptions, count: int, *, as_json: bool) -> int:
    from meshwright.training.evaluation import ROWS, TextRequest, evaluate_loss

    opened, path = placed.opened, given["--data"]
    if path is None and opened.checkpoint is None:
        raise ConfigError(f"{opened.path} is a model without a run, so it has no validation part: give --data PATH")
    if path is not None and path not in BUILT_IN and not Path(path).expanduser().exists() and "://" not in path:
        raise ConfigError(f"--data {path} does not exist: give a file, a folder, or {' or '.join(BUILT_IN)}")
    request = TextRequest(
        placed, _source(path, data), data.seq_len, data.cache, given["--rows"], given["--batch"] or ROWS
    )
    found = on_ranks(evaluate_loss, request, count, insists=bool(placed.process.count))
    if is_rank_zero():
        on = path or "the run's validation part"
        if as_json:
            print(json.dumps({**_about(placed), "data": on, **_figures(found)}))
        else:
            print(f"{opened.words}, {opened.dtype}, {placed.layout}, on {on}")
            for name, value in _figures(found).items():
                if value is not None:
                    print(f"  {name:<14}{value:,.6g}" if isinstance(value, float) else f"  {name:<14}{value:,}")
    return 0


def _figures(found: Evaluation) -> dict[str, Any]:
    return {
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "tokens": found.tokens,
        "rows": found.rows,
    }


def _about(placed: ModelOnRanks) -> dict[str, Any]:
    opened = placed.opened
    return {
        "model": str(opened.path),
        "step": opened.step,
        "dtype": opened.dtype,
        "layout": {axis: size for axis, size in vars(placed.layout).items() if size > 1},
    }


def _tasks(placed: ModelOnRanks, given: dict[str, Any], count: int, *, as_json: bool) -> int:
    from meshwright.integrations.lm_eval import TaskRequest, evaluate_tasks

    names = tuple(name.strip() for name in given["--tasks"].split(",") if name.strip())
    request = TaskRequest(
        placed, names, given["--tasks_path"], given["--shots"], given["--limit"], given["--batch"] or 8
    )
    found = on_ranks(evaluate_tasks, request, count, insists=bool(placed.process.count))
    if is_rank_zero():
        if as_json:
            print(json.dumps({**_about(placed), "tasks": found}))
        else:
            print(f"{placed.opened.words}, {placed.opened.dtype}, {placed.layout}")
            for task, figures in found.items():
                print(f"  {task}")
                for name, value in figures.items():
                    print(f"    {name:<30}{value:.6g}" if isinstance(value, float) else f"    {name:<30}{value}")
    return 0
