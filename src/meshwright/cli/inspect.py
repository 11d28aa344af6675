"""``meshwright inspect RUN|MODEL|DATA``: show what a run folder holds, what a model is made of, or what data looks like
to a model.

MODEL is a built-in size, the folder of a Hugging Face model or its config.json, or "package.module:factory" for a
function or class that returns your own nn.Module. DATA is a file or folder, or a config file whose data is meant; keys
of meshwright train may follow, such as --data.tokenizer. Text that is only read, and not learnt, is grey, or stands in
[[ ]].

Sizes: debug, demo, 125M, 1B, 8B, 70B.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from meshwright.core.config import take_flags
from meshwright.core.config.ranges import FROM_1, Range
from meshwright.core.errors import ConfigError, import_object
from meshwright.data.scan import absent, is_source
from meshwright.introspection.adapter_request import holds_adapters
from meshwright.models.decoder_config import SIZES

from .arguments import open_run, read_config, refuse_rest, write_file

LIVE_SECONDS = 5
"""Between two pages of a run that is being trained."""


@dataclass(frozen=True)
class PageOptions:
    """Of a run."""

    html: bool | Path = False
    """Draw the curves into a page: RUN/report.html, or another file."""
    live: Annotated[bool | int, Range("at least 1 second between two pages", lambda value: value >= 1)] = False
    """Rewrite the page every so many seconds (default: 5) until the run ends; a browser that has it open reads it again
    by itself."""


@dataclass(frozen=True)
class ModelOptions:
    """Of the folder of a model."""

    trust: bool = False
    """Run code that lies in the folder."""


@dataclass(frozen=True)
class DataOptions:
    """Of data."""

    documents: Annotated[int, FROM_1] = 3
    """Documents that are shown (default: 3)."""
    trust: bool = False
    """Run code that the config names."""


@dataclass(frozen=True)
class ScheduleOptions:
    """Of a pipeline's schedule, by which its ranks work, and when."""

    schedule: str = ""
    """Name of a schedule, a .csv file of one, or a run, whose last step is shown as it was measured."""
    pp: Annotated[int, FROM_1] = 4
    """Ranks (default: 4)."""
    microbatches: Annotated[int, FROM_1] = 8
    """Microbatches (default: 8)."""
    stages_per_rank: Annotated[int | None, FROM_1] = None
    """Stages on each rank (default: by the schedule)."""
    svg: Path | None = None
    """Draw it into a file."""


def run(argv: list[str]) -> int:
    """Print what a run, model, data or schedule is made of."""
    if not argv:
        raise ConfigError(
            "meshwright inspect needs the folder of a run, a model or data: meshwright inspect runs/demo-…; more with"
            " --help"
        )
    if argv[0].startswith("--schedule"):
        return _schedule(argv)
    name = argv[0]
    path = Path(name).expanduser()
    if any((path / file).is_file() for file in ("config.toml", "identity.json", "plan.json")):
        options, words = take_flags(PageOptions, argv[1:])
        refuse_rest(words, "meshwright inspect RUN", PageOptions)
        target = options.html if isinstance(options.html, Path) else path / "report.html"
        if options.live and options.html is False:
            raise ConfigError("--live rewrites a page: give --html FILE too")
        if options.live:
            return _live_page(name, target, LIVE_SECONDS if options.live is True else options.live)
        if options.html:
            return _page(name, target)
        from meshwright.training.run.folder import describe_run

        print(describe_run(*open_run(name)))
        return 0
    if (path / "config.json").is_file() or path.name == "config.json":
        model, words = take_flags(ModelOptions, argv[1:])
        refuse_rest(words, "meshwright inspect MODEL", ModelOptions)
        from meshwright.training.run.folder import describe_hugging_face

        print(describe_hugging_face(path, trusted=model.trust))
        return 0
    if path.is_dir() and holds_adapters(path):
        raise ConfigError(
            f"{name} holds adapters of peft: meshwright evaluate {name} and meshwright generate {name} compute with"
            f" them, and meshwright inspect BASE shows the model beside which they stand"
        )
    if path.exists() or is_source(name):
        data, words = take_flags(DataOptions, argv[1:])
        is_config = path.suffix == ".toml"
        words = [name, *words] if is_config else words
        config = read_config(words, prog="meshwright inspect", trusted=data.trust)
        if not is_config:
            config = replace(config, data=replace(config.data, source=(name,)))
        from rich.console import Console

        from meshwright.training.views.telling import show_data

        show_data(config, data.documents, Console(soft_wrap=True))
        return 0
    if name not in SIZES and ":" not in name:
        raise ConfigError(
            f"{absent(name, SIZES)} Give the folder of a run, a file or folder of data, or a model: a size"
            f" ({', '.join(SIZES)}), or package.module:factory."
        )
    refuse_rest(argv[1:], "meshwright inspect")
    from meshwright.introspection.facts import describe_model, describe_premises, describe_structure, model_facts
    from meshwright.introspection.source import as_module

    facts = model_facts(as_module(import_object(name) if ":" in name else SIZES[name]))
    print(f"{describe_model(facts)}\n{describe_structure(facts)}\n{describe_premises(facts)}")
    return 0


def _schedule(argv: list[str]) -> int:
    from meshwright.training.views.watching import TIMES, drawn, drawn_run, schedule_of

    options, words = take_flags(ScheduleOptions, argv)
    refuse_rest(words, "meshwright inspect --schedule", ScheduleOptions)
    folder, target = Path(options.schedule).expanduser(), options.svg
    if folder.is_dir() or (folder / TIMES).is_file():
        text, picture = drawn_run(folder)
    else:
        text, picture = drawn(schedule_of(options.schedule, options.pp, options.microbatches, options.stages_per_rank))
    print(text)
    if target is not None:
        print(write_file(target, picture, "--svg = "))
    return 0


def _page(name: str, target: Path) -> int:
    from meshwright.training.views.page import page

    print(write_file(target, page(*open_run(name))))
    return 0


def _live_page(name: str, target: Path, every: int) -> int:
    """Rewrite a page until the run's folder is no longer held by a job; the last one is not read again."""
    from meshwright.training.run.occupancy import is_occupied
    from meshwright.training.views.page import page

    folder, config = open_run(name)
    if not is_occupied(folder):
        print(f"{name} is not being trained: its page is written once")
        return _page(name, target)
    print(f"{write_file(target, page(folder, config, refresh=every))}; it is rewritten every {every} s", flush=True)
    try:
        while is_occupied(folder):
            time.sleep(every)
            write_file(target, page(folder, config, refresh=every))
    finally:
        write_file(target, page(folder, config))
    print(f"the run has ended, and {target} is complete")
    return 0
