"""Show the first samples of a run's data, and which of their tokens are trained on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from meshwright.data import SourceOptions, Tokenizer, default_cache_dir, scan_sources
from meshwright.data.corpus.building import TokenisingRecipe, learnt_tokens
from meshwright.data.corpus.mapped import IndexingRecipe
from meshwright.data.sources.listing import TOKEN_FORMATS
from meshwright.data.sources.scan import Scan
from meshwright.data.text.tokenizers import AligningTokenizer
from meshwright.training.config import Config
from meshwright.training.feed import parts_of
from meshwright.training.tokenizer import run_tokenizer

_SHOWN = 2000
"""Tokens of a document that are shown."""

Run = tuple[bool, np.ndarray]
"""Whether a run of token ids is trained on, and the ids."""


def show_data(config: Config, documents: int, console: Console) -> None:
    """Print each source's format, task and first documents: tokens that are not trained on are grey on a terminal, and
    in [[ ]] elsewhere.

    Raises:
        ConfigError: as training would, if one of these documents is the cause.
    """
    tokenizer = run_tokenizer(config, console.print)
    memory = Path(config.data.cache).expanduser() if config.data.cache else default_cache_dir()
    for part in parts_of(config.data):
        scan = scan_sources(part.source, part.format, memory=memory)
        title = f"{part.name} · " if config.data.mixture else ""
        console.print(Text(f"{title}{', '.join(part.source)}", style="bold"))
        console.print(f"  format     {scan.format}, {scan}", markup=False, highlight=False)
        task, shown = _documents(scan, part, tokenizer)
        console.print(f"  task       {task}", markup=False, highlight=False)
        console.print(f"  tokenizer  {tokenizer!r}, vocabulary {tokenizer.vocab_size:,}", markup=False, highlight=False)
        for number, runs in enumerate(islice(shown, documents), 1):
            _show(number, list(runs), tokenizer, console)


def _show(number: int, runs: list[Run], tokenizer: Tokenizer, console: Console) -> None:
    total, learnt = (sum(len(ids) for is_learnt, ids in runs if is_learnt or every) for every in (True, False))
    console.print(f"\n  document {number}: {total} tokens, {learnt} of them learnt", markup=False, highlight=False)
    text, left = Text(), _SHOWN
    spelt = getattr(tokenizer, "spell_out", tokenizer.decode)
    for is_learnt, ids in runs:
        piece = spelt(ids[:left])
        if is_learnt:
            text.append(piece)
        elif console.is_terminal:
            text.append(piece, style="bright_black")
        else:
            text.append(f"[[{piece}]]")
        left = max(left - len(ids), 0)
    text.append(" …" if total > _SHOWN else "")
    console.print(text)


def _documents(scan: Scan, options: SourceOptions, tokenizer: Tokenizer) -> tuple[str, Iterator[list[Run]]]:
    """Return the task, and the documents in order."""
    if scan.format in TOKEN_FORMATS:
        return "text, as token ids", _mapped(IndexingRecipe(scan, options, tokenizer, 0.0))
    recipe = TokenisingRecipe(scan, options, tokenizer, 0.0)
    return recipe.task.name, _tokenised(recipe, tokenizer)


def _mapped(recipe: IndexingRecipe) -> Iterator[list[Run]]:
    for file in recipe.files:
        ids = file.open()[: 1 << 20]
        recipe.check(file, 0, ids)
        yield from ([(True, document)] for document in recipe.documents(file, ids))


def _tokenised(recipe: TokenisingRecipe, tokenizer: Tokenizer) -> Iterator[list[Run]]:
    end = (True, np.array([tokenizer.end_of_document]))
    for _, example in recipe.unsplit():
        text = "".join(piece for piece, _ in example)
        if not recipe.task.is_whole or not isinstance(tokenizer, AligningTokenizer):
            yield [(True, tokenizer.encode(text)), end]
            continue
        ids, ends = tokenizer.encode_aligned([text], special=recipe.task.special)[0]
        learnt = learnt_tokens(example, ends)
        edges = np.flatnonzero(np.diff(learnt, prepend=~learnt[:1]))
        runs = [(bool(learnt[a]), ids[a:b]) for a, b in zip(edges, [*edges[1:], len(ids)], strict=True)]
        yield [*runs, end] if recipe.task.ends else runs
