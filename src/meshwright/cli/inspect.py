"""``meshwright inspect RUN|MODEL|DATA``: show what a run folder holds, what a model is made of, or what data looks like
to a model.

  RUN --html [FILE]      draw a run's curves into a page, RUN/report.html or FILE
  RUN --html FILE --live [SECONDS]
                         rewrite the page every so many seconds (default 5) until the run ends; a browser that has it
                         open reads it again by itself
  MODEL [--trust]        a built-in size, the folder of a Hugging Face model or its config.json, or
                         "package.module:factory" for a function or class that returns your own nn.Module; --trust runs
                         code that lies in the folder
  DATA [--documents N]   a file or folder, or a config file whose data is meant, and how many documents of it are shown
                         (default 3); keys of meshwright train may follow, such as --data.tokenizer. Text that is only
                         read, and not learnt, is grey, or stands in [[ ]].
  --schedule NAME|FILE.csv|RUN
                         what the ranks of a pipeline do, and when; with --pp N (default 4), --microbatches N (default
                         8), --stages-per-rank N and --svg FILE; of a run, its last step as it was measured

Sizes: debug, demo, 125M, 1B, 8B, 70B.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.core.errors import ConfigError, import_object, nearest
from meshwright.data.options import BUILT_IN
from meshwright.models.decoder_config import SIZES

from .arguments import open_run, read_config, refuse_rest, take_option, take_trust
from .views.pages import write_page

LIVE_SECONDS = 5
"""Between two pages of a run that is being trained."""


def run(argv: list[str]) -> int:
    """Print what a run, model, data or schedule is made of."""
    if not argv:
        raise ConfigError(
            "meshwright inspect needs the folder of a run, a model or data: meshwright inspect runs/demo-…; more with"
            " --help"
        )
    if argv[0] == "--schedule":
        return _schedule(argv)
    name = argv[0]
    path = Path(name).expanduser()
    if any((path / file).is_file() for file in ("config.toml", "identity.json", "plan.json")):
        every, words = _take_live(argv[1:])
        words = [*words, str(path / "report.html")] if words[-1:] == ["--html"] else words
        target, words = take_option(words, "--html", Path)
        refuse_rest(words, "meshwright inspect RUN", "--html [FILE], --live [SECONDS]")
        if target is None and every:
            raise ConfigError("--live rewrites a page: give --html FILE too")
        if target is not None:
            return _live_page(name, target, every) if every else _page(name, target)
        from meshwright.training.run.inspection import describe_run

        print(describe_run(*open_run(name)))
        return 0
    if (path / "config.json").is_file() or path.name == "config.json":
        trusted, words = take_trust(argv[1:])
        refuse_rest(words, "meshwright inspect MODEL", "--trust")
        from meshwright.training.run.inspection import describe_hugging_face

        print(describe_hugging_face(path, trusted=trusted))
        return 0
    if path.exists() or name in BUILT_IN:
        return _data(name, argv[1:])
    refuse_rest(argv[1:], "meshwright inspect", "none")
    if name not in SIZES and ":" not in name:
        raise ConfigError(
            f"'{name}' is neither the folder of a run, nor a file or folder of data, nor a model"
            f" size.{nearest(name, SIZES)} Sizes: {', '.join(SIZES)}; a model of your own is package.module:factory."
        )
    from meshwright.introspection.source import as_module

    _model(as_module(import_object(name) if ":" in name else SIZES[name]))
    return 0


def _schedule(argv: list[str]) -> int:
    from meshwright.core.files import replace_text
    from meshwright.training.views.watching import TIMES, drawn, drawn_run, schedule_of

    numbers: dict[str, int | None] = {}
    name, words = take_option(argv, "--schedule", str)
    target, words = take_option(words, "--svg", Path)
    for flag in ("--pp", "--microbatches", "--stages-per-rank"):
        numbers[flag], words = take_option(words, flag, int)
    refuse_rest(words, "meshwright inspect --schedule", "--pp N, --microbatches N, --stages-per-rank N, --svg FILE")
    folder = Path(str(name)).expanduser()
    if folder.is_dir() or (folder / TIMES).is_file():
        text, picture = drawn_run(folder)
    else:
        made = schedule_of(
            str(name), numbers["--pp"] or 4, numbers["--microbatches"] or 8, numbers["--stages-per-rank"]
        )
        text, picture = drawn(made)
    print(text)
    if target is not None:
        replace_text(target.expanduser(), picture)
        print(f"wrote {target}: open it in a browser")
    return 0


def _model(model: Any) -> None:
    from meshwright.introspection.facts import describe_model, describe_premises, describe_structure, model_facts

    facts = model_facts(model)
    print(describe_model(facts))
    print(describe_structure(facts))
    print(describe_premises(facts))


def _page(name: str, target: Path) -> int:
    from meshwright.training.views.page.document import page

    print(write_page(target, page(*open_run(name))))
    return 0


def _take_live(argv: list[str]) -> tuple[int, list[str]]:
    """Split off ``--live``, ``--live N`` or ``--live=N``: return the seconds (0 without it), and the other words."""
    if "--live" in argv:
        place = argv.index("--live")
        if not argv[place + 1 : place + 2] or not argv[place + 1].isdigit():
            argv = [*argv[:place], f"--live={LIVE_SECONDS}", *argv[place + 1 :]]
    every, rest = take_option(argv, "--live", int)
    if every is not None and every < 1:
        raise ConfigError(f"--live = {every}: at least 1 second lies between two pages")
    return every or 0, rest


def _live_page(name: str, target: Path, every: int) -> int:
    """Rewrite a page until the run's folder is no longer held by a job; the last one is not read again."""
    from meshwright.training.run.occupancy import is_occupied
    from meshwright.training.views.page.document import page

    folder, config = open_run(name)
    if not is_occupied(folder):
        print(f"{name} is not being trained: its page is written once")
        return _page(name, target)
    print(f"{write_page(target, page(folder, config, refresh=every))}; it is rewritten every {every} s", flush=True)
    try:
        while is_occupied(folder):
            time.sleep(every)
            write_page(target, page(folder, config, refresh=every))
    finally:
        write_page(target, page(folder, config))
    print(f"the run has ended, and {target} is complete")
    return 0


def _data(name: str, argv: list[str]) -> int:
    documents, argv = take_option(argv, "--documents", int)
    if documents is not None and documents < 1:
        raise ConfigError(f"--documents = {documents}: at least 1 is shown")
    is_config = Path(name).suffix == ".toml"
    config = read_config([name, *argv] if is_config else argv, prog="meshwright inspect", description=__doc__ or "")
    if not is_config:
        config = replace(config, data=replace(config.data, source=(name,)))
    from rich.console import Console

    from meshwright.training.views.telling import show_data

    show_data(config, documents or 3, Console(soft_wrap=True))
    return 0
