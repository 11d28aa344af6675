"""Count what becomes of a source's records: read, left out, learnt, longer than a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from meshwright.core.errors import ConfigError
from meshwright.data.sources.formats import RECORD_FORMATS, BadRow
from meshwright.data.text.turns import Example

from .building import TokenisingRecipe
from .corpus import TRAINING
from .packing import Whole

MOST = 10_000
"""Records that are counted of a source."""
_NAMED = 3
"""Records that cannot be used and are named with the reason."""


@dataclass(frozen=True)
class Account:
    """What becomes of the first records of a source.

    Attributes:
        records: those that were read.
        all_records: those that there are.
        unusable: the reason of each that cannot be used.
        split: the documents of those that can; None where documents are cut into rows, and all is learnt.
        tokens, learnt: of all documents.
        notes: columns that are not read, and where texts and tokens differ.
    """

    records: int
    all_records: int
    unusable: list[str]
    split: Whole | None
    tokens: int
    learnt: int
    notes: list[str]

    def lines(self, seq_len: int) -> Iterator[tuple[str, str]]:
        """Yield a title and a sentence for each fact."""
        among = "" if self.records == self.all_records else f", the first of {self.all_records:,}"
        bad = f"; {len(self.unusable):,} of them cannot be used:" if self.unusable else ", all of which can be used"
        yield "records", f"{self.records:,}{among}{bad}"
        yield from (("", reason) for reason in self.unusable[:_NAMED])
        if (more := len(self.unusable) - _NAMED) > 0:
            yield "", f"and {more:,} more"
        tokens, learnt = self.tokens, self.learnt
        if self.split is not None and self.split.too_long != "refuse":
            tokens, learnt = self.split.n_kept(seq_len)
        yield "learnt", f"{learnt:,} of {tokens:,} tokens"
        if self.split is not None and (n := self.split.n_too_long(seq_len)):
            cut = replace(self.split, too_long="truncate").n_unlearnt(seq_len)
            fate = {"refuse": "refused", "skip": "left out"}.get(
                self.split.too_long, f"cut short, {cut:,} of them left out, since nothing to learn is left"
            )
            yield (
                "rows",
                f"{n:,} of {self.split.n_documents:,} documents are longer than data.seq_len = {seq_len}: {fate}",
            )
        yield from (("note", note) for note in self.notes)


def account_of(recipe: TokenisingRecipe) -> Account:
    """Read up to MOST records, also where one of them cannot be used, and count what becomes of them.

    Raises:
        ConfigError: none of them can be used.
    """
    found: list[Example] = []
    bad: list[str] = []
    every = ((file, row) for file in recipe.scan.files for row in RECORD_FORMATS[recipe.scan.format].records(file.path))
    n = 0
    for file, (number, record) in islice(every, MOST):
        n += 1
        try:
            found += recipe.examples_of(file, number, record)
        except BadRow as error:
            bad.append(str(error))
    if bad and not found:
        raise ConfigError(f"none of {n:,} records can be used. The first: {bad[0]}")
    encoder = recipe.encoder()
    encoded = list(encoder.encode((TRAINING, example) for example in found))
    ids = [each for _, each, _, _ in encoded]
    total = sum(map(len, ids))
    masks = [mask for _, _, mask, _ in encoded if mask is not None]
    split = None
    if recipe.task.is_whole and ids:
        offsets = np.cumsum([0, *map(len, ids)])
        is_learnt = np.concatenate(masks).astype(np.uint8)
        split = Whole(TRAINING, np.concatenate(ids), offsets, is_learnt, recipe.options.too_long)
    learnt = total if split is None else int(split.is_learnt.sum())
    notes = [*encoder.notes(), *recipe.notes()]
    return Account(n, sum(file.n_records for file in recipe.scan.files), bad, split, total, learnt, notes)
