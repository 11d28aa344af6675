"""``meshwright compare RUN RUN… [--by steps|tokens|seconds] [--html FILE] [--json]``: lay 2 to 8 runs side by side.

It prints each run's losses, tokens, seconds, speed and layout, and the keys in which their configs differ. A run
that is being trained is read as it stands.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.core.config import take_flags
from meshwright.core.errors import ConfigError

from .arguments import check_file, open_run, refuse_rest, write_file

ABOVE = ("state", "steps", "layout")
"""Figures that stand above the table, where a long one has room."""


@dataclass(frozen=True)
class CompareOptions:
    by: Literal["steps", "tokens", "seconds"] = "steps"
    """Over which the runs are compared: the x axis of curves, and where losses are compared (default: steps)."""
    html: Path | None = None
    """Draw one page: curves over each other, figures, and what differs."""
    json: bool = False
    """The figures for programs, in nats, tokens, seconds and bytes."""


def run(argv: list[str]) -> int:
    """Compare runs: print a table or JSON, and write the page."""
    options, argv = take_flags(CompareOptions, argv)
    refuse_rest([word for word in argv if word.startswith("-")], "meshwright compare", CompareOptions)
    from meshwright.training.views.compared import (
        FEWEST,
        MOST,
        ComparedRun,
        comparison_page,
        differences,
        labels_of,
        letter_of,
        narrowed,
        rows,
        to_dict,
    )

    by, html, as_json = options.by, options.html, options.json
    if html is not None:
        check_file(html)
    if not FEWEST <= len(argv) <= MOST:
        raise ConfigError(
            f"meshwright compare takes {FEWEST} to {MOST} folders of runs, not {len(argv)}: meshwright compare"
            " runs/demo-… runs/demo-…"
        )
    folders = [Path(name).expanduser() for name in argv]
    places = [folder.resolve() for folder in folders]
    for name, place in zip(argv, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"{name} is named twice: a run is compared with others")
    opened = [open_run(str(folder)) for folder in folders]
    runs = [ComparedRun.read(*each, label) for each, label in zip(opened, labels_of(folders), strict=True)]
    if not any(one.history.series for one in runs):
        raise ConfigError("none of these runs has figures yet: each writes its first line after its first step")
    if as_json:
        print(json.dumps(to_dict(runs, by), indent=1, allow_nan=False))
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console(highlight=False, soft_wrap=True)
        letters = [letter_of(number) for number in range(len(runs))]
        for letter, one in zip(letters, runs, strict=True):
            note = "" if one.history.series else " (no step was taken yet)"
            console.print(Text(f"{letter}  {one.folder}: {one.state}{note}, {one.layout}"))
        figures = [row for row in rows(runs, by) if row[0] not in ABOVE]
        for title, found in (("figure", narrowed(figures)), ("key", differences(runs))):
            if not found:
                console.print(Text("\ntheir configs are the same"))
                continue
            shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for head in (title, *letters):
                shown.add_column(Text(head), overflow="fold")
            for figure, texts in found:
                shown.add_row(Text(figure), *map(Text, texts))
            console.print()
            console.print(shown, soft_wrap=False)
    if html is not None:
        print(write_file(html, comparison_page(runs, by)), file=sys.stderr if as_json else sys.stdout)
    return 0
