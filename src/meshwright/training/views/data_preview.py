"""Show the first samples of a run's data, and which of their tokens are trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from meshwright.data import SourceOptions, Tokenizer, default_cache_dir, scan_sources
from meshwright.data.corpus.account import account_of
from meshwright.data.corpus.building import TokenisingRecipe
from meshwright.data.corpus.corpus import TRAINING
from meshwright.data.corpus.mapped import IndexingRecipe
from meshwright.data.images.source import Vision
from meshwright.data.sources.listing import TOKEN_FORMATS
from meshwright.data.sources.scan import Scan
from meshwright.training.config import Config
from meshwright.training.feed import parts_of, vision_for
from meshwright.training.tokenizer import run_tokenizer

_SHOWN = 2000
"""Tokens of a document that are shown."""


class ShownRun(NamedTuple):
    """A run of token ids that are trained on or are not, or those of one image."""

    is_learnt: bool
    ids: np.ndarray
    image: str = ""
    """Name and size of the image."""


def show_data(config: Config, documents: int, console: Console) -> None:
    """Print each source's format and task, what becomes of its records, and its first documents: tokens that are not
    trained on are grey on a terminal, and in [[ ]] elsewhere.
    """
    tokenizer = run_tokenizer(config, console.print)
    memory = Path(config.data.cache).expanduser() if config.data.cache else default_cache_dir()
    for part in parts_of(config.data):
        scan = scan_sources(part.source, part.format, memory=memory)
        title = f"{part.name} · " if config.data.mixture else ""
        console.print(Text(f"{title}{', '.join(part.source)}", style="bold"))
        console.print(f"  format     {scan.format}, {scan}", markup=False, highlight=False)
        task, lines, shown = _documents(scan, part, tokenizer, vision_for(config), config.data.seq_len)
        named = f"{tokenizer!r}, vocabulary {tokenizer.vocab_size:,}"
        for title, line in (("task", task), ("tokenizer", named), *lines):
            console.print(f"  {title:<10} {line}", markup=False, highlight=False)
        for number, runs in enumerate(islice(shown, documents), 1):
            _show(number, list(runs), tokenizer, console)


def _show(number: int, runs: list[ShownRun], tokenizer: Tokenizer, console: Console) -> None:
    total, learnt = (sum(len(run.ids) for run in runs if run.is_learnt or every) for every in (True, False))
    images = sum(bool(run.image) for run in runs)
    pictured = f", {images} image{'s' * (images != 1)}" if images else ""
    line = f"\n  document {number}: {total} tokens, {learnt} of them learnt{pictured}"
    console.print(line, markup=False, highlight=False)
    text, left = Text(), _SHOWN
    spelt = getattr(tokenizer, "spell_out", tokenizer.decode)
    for is_learnt, ids, image in runs:
        piece = f"<{image}: {len(ids)} tokens>" if image and left else spelt(ids[:left])
        if is_learnt:
            text.append(piece)
        elif console.is_terminal:
            text.append(piece, style="bright_black")
        else:
            text.append(f"[[{piece}]]")
        left = max(left - len(ids), 0)
    text.append(" …" if total > _SHOWN else "")
    console.print(text)


def _documents(
    scan: Scan, options: SourceOptions, tokenizer: Tokenizer, vision: Vision, seq_len: int
) -> tuple[str, Iterable[tuple[str, str]], Iterator[list[ShownRun]]]:
    """Return the task, what becomes of the records, and the documents in order."""
    if scan.format in TOKEN_FORMATS:
        return "text, as token ids", (), _mapped(IndexingRecipe(scan, options, tokenizer, 0.0))
    recipe = TokenisingRecipe(scan, options, tokenizer, 0.0, vision)
    if scan.format == "text":
        return recipe.task.name, (), _tokenised(recipe)
    why = "data.task" if options.task != "auto" else "by the columns of the first record"
    task = f"{recipe.task.name} ({why}), which reads {', '.join(recipe.task.columns)}"
    shown = _tokenised(TokenisingRecipe(scan, replace(options, on_bad_row="skip"), tokenizer, 0.0, vision))
    return task, account_of(recipe).lines(seq_len), shown


def _mapped(recipe: IndexingRecipe) -> Iterator[list[ShownRun]]:
    for file in recipe.files:
        ids = file.open()[: 1 << 20]
        recipe.check(file, 0, ids)
        yield from ([ShownRun(True, document)] for document in recipe.documents(file, ids))


def _tokenised(recipe: TokenisingRecipe) -> Iterator[list[ShownRun]]:
    encoder = recipe.encoder()
    for _, example in recipe.unsplit():
        ((_, ids, learnt, images),) = encoder.encode(iter([(TRAINING, example)]))
        if learnt is None:
            yield [ShownRun(True, ids)]
            continue
        named = {begin: f"{file.name} {file.width} x {file.height}" for begin, _, file in images}
        turns = np.flatnonzero(np.diff(learnt, prepend=~learnt[:1])).tolist()
        edges = sorted({*turns, *named, *(last for _, last, _ in images)} - {len(ids)})
        yield [ShownRun(bool(learnt[a]), ids[a:b], named.get(a, "")) for a, b in pairwise([*edges, len(ids)])]
