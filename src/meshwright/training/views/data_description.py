"""Describe a run's data in a line, and note what of it is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.core.dtypes import count_text, epochs_text
from meshwright.data import Corpus
from meshwright.data.corpus import Pictured
from meshwright.data.options import MixturePart
from meshwright.data.packing import Whole
from meshwright.training.config import Config


def describe(
    parts: tuple[MixturePart, ...],
    corpora: list[Corpus],
    epochs: dict[str, float],
    config: Config,
    weights: Sequence[float],
) -> str:
    """Return a line with the sizes of a run's data.

    Args:
        epochs: of each part, by its name.
        weights: of the parts at the end of the run.
    """
    splits = [split for corpus in corpora for split in (corpus.training, corpus.validation)]
    seq_len = config.data.seq_len
    tokens = sum(s.n_kept(seq_len)[0] if isinstance(s, Whole) else s.n_tokens for s in splits)
    documents = sum(int((s.kept_lengths(seq_len) > 0).sum()) if isinstance(s, Whole) else s.n_documents for s in splits)
    text = f"{count_text(tokens)} tokens of {documents:,} documents · {seq_len} per row"
    if n_images := sum(len(split.images.places) for split in splits if isinstance(split, Pictured)):
        text += f" · {n_images:,} images"
    text += f" · {config.batch.global_batch} rows per step"
    if len(parts) == 1:
        return f"{text} · {epochs_text(epochs[parts[0].name])}"
    rows = [
        f"{part.name} {weight / sum(weights):.1%}, {epochs_text(epochs[part.name])}"
        for part, weight in zip(parts, weights, strict=True)
    ]
    return f"{text} · {len(parts)} sources: {'; '.join(rows)}"


def notes_on(parts: tuple[MixturePart, ...], corpora: list[Corpus], seq_len: int) -> Iterator[str]:
    """Yield notes on each part: which conversations or rows are left out or cut, where texts and tokens differ."""
    if len(named := dict.fromkeys(part.template for part in parts if part.template)) > 1:
        yield f"of the chat templates {', '.join(named)}, the run's folder and what is exported from it keep the first"
    for part, corpus in zip(parts, corpora, strict=True):
        if isinstance(corpus.training, Whole) and (n := corpus.training.n_too_long(seq_len)):
            left_out = n if part.too_long == "skip" else corpus.training.n_unlearnt(seq_len)
            fates = (
                (f"{n - left_out} are cut short" if n > left_out else ""),
                (
                    f"{left_out} left out{', since nothing to learn is left of them' * (part.too_long != 'skip')}"
                    if left_out
                    else ""
                ),
            )
            yield (
                f"{n} of {corpus.training.n_documents} conversations are longer than data.seq_len = {seq_len}:"
                f" {' and '.join(filter(None, fates))}"
            )
        yield from (f"{', '.join(part.source)}: {note}" for note in getattr(corpus.meta, "notes", ()))
        skipped = sum(getattr(corpus.meta, "skipped", {}).values())
        if skipped:
            yield (
                f"{skipped} rows of {', '.join(part.source)} could not be used and are left out (data.on_bad_row ="
                f" 'skip')"
            )
