"""``meshwright inspect RUN|MODEL|DATA``: what a run folder holds, what a model is made of, or what data looks like to
a model. ``meshwright inspect --schedule NAME|FILE.csv|RUN``: what the ranks of a pipeline do, and when.

RUN is the folder of a run. ``--html`` draws its curves into a page, RUN/report.html, or into the file that follows it.
MODEL is the name of a built-in size, the folder of a Hugging Face model (or its config.json; ``--trust`` runs code
that lies there), or "package.module:factory" for a function or class that returns your own nn.Module. DATA is a file
or folder, or a config file whose data is meant; any flag of ``meshwright train`` may follow it, such as
--data.tokenizer, and ``--documents N`` (default 3). Text that is only read, and not learnt, is grey, or stands in [[
]]. ``--schedule`` takes --pp N (default 4), --microbatches N (default 8), --stages-per-rank N and --svg FILE; with a
run it shows the run's last step as it was measured.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.core.errors import ConfigError, nearest
from meshwright.core.imports import import_object
from meshwright.models.decoder_config import SIZES

from .arguments import open_run, read_config, refuse_rest, take_option, take_trust
from .pages import write_page


def run(argv: list[str]) -> int:
    """Print what a run, model, data or schedule is made of."""
    if not argv or "--help" in argv or "-h" in argv:
        print(f"{__doc__}\n\nSizes: {', '.join(SIZES)}")
        return 0 if argv else 2
    if argv[0] == "--schedule":
        return _schedule(argv)
    name = argv[0]
    path = Path(name).expanduser()
    if any((path / file).is_file() for file in ("config.toml", "identity.json", "plan.json")):
        words = [*argv[1:], str(path / "report.html")] if argv[-1] == "--html" else argv[1:]
        target, words = take_option(words, "--html", Path)
        refuse_rest(words, "meshwright inspect RUN", "--html [FILE]")
        if target is not None:
            return _page(name, target)
        from meshwright.training.run.inspection import describe_run

        print(describe_run(*open_run(name)))
        return 0
    if (path / "config.json").is_file() or path.name == "config.json":
        trusted, words = take_trust(argv[1:])
        refuse_rest(words, "meshwright inspect MODEL", "--trust")
        from meshwright.training.run.inspection import describe_hugging_face

        print(describe_hugging_face(path, trusted=trusted))
        return 0
    if path.exists() or name == "stdlib":
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
    from meshwright.training.views.schedule_view import TIMES, drawn, drawn_run, schedule_of

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
    from meshwright.introspection.explain import describe_model, describe_premises, describe_structure
    from meshwright.introspection.facts import model_facts

    facts = model_facts(model)
    print(describe_model(facts))
    print(describe_structure(facts))
    print(describe_premises(facts))


def _page(name: str, target: Path) -> int:
    from meshwright.training.views.page.document import page

    print(write_page(target, page(*open_run(name))))
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

    from meshwright.training.views.data_preview import show_data

    show_data(config, documents or 3, Console(soft_wrap=True))
    return 0
