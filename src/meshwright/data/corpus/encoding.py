"""Turn examples into ids and a mask of the ids that are learnt, and count where a text and its tokens differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from meshwright.core.errors import ConfigError
from meshwright.data.images.files import ImageFile
from meshwright.data.text.chat import ends_of_turn, load_template
from meshwright.data.text.tasks import Task
from meshwright.data.text.tokenizers import AligningTokenizer, Tokenizer, encode_batch, ids_before
from meshwright.data.text.turns import Example

from .corpus import Encoded

_BATCH_CHARACTERS = 1 << 20
"""Characters passed to the tokenizer per call: enough to keep all processors busy, few enough to fit in memory."""

_NAMED = 6
"""Number of special tokens that a note names; the rest are only counted."""

Examples = Iterator[tuple[str, Example]]
"""Examples, each with its split."""


class Encoder:
    """The rules by which the texts of a task become ids.

    A text gets what the tokenizer's own call puts before and behind it, and the token that ends a document unless it
    ends with that token already, or with the one that the tokenizer's chat template puts behind an answer. A text
    written by a chat template has all its tokens, as in ``apply_chat_template(…, tokenize=True)``.

    Args:
        ends_answers: whether answers of a chat that no special token ends get the token that ends a document.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, *, ends_answers: bool = False):
        self.task, self.tokenizer, self.ends_answers = task, tokenizer, ends_answers
        self._end = np.array([tokenizer.end_of_document], dtype=np.uint32)
        self._unknown: int = -1 if (unknown := getattr(tokenizer, "unknown", None)) is None else unknown
        special = {tokenizer.end_of_document, *getattr(tokenizer, "special_ids", ())} - {self._unknown}
        self._special = np.array(sorted(special), dtype=np.int64)
        self._spelt: Counter[int] = Counter()
        self._lost = self._begun = self._answers = self._endless = 0

    def encode(self, examples: Examples) -> Iterator[Encoded]:
        """Tokenise examples, and mark the tokens that are learnt."""
        for batch in _batches(examples):
            texts = ["".join(text for text, _ in example) for _, example in batch]
            if not self.task.is_whole:
                for (split, _), ids in zip(batch, encode_batch(self.tokenizer, texts), strict=True):
                    self._lost += int((ids == self._unknown).sum())
                    yield split, self._closed(ids, np.ones(len(ids), dtype=bool))[0], None, ()
                continue
            assert isinstance(self.tokenizer, AligningTokenizer)
            for (split, example), (ids, ends) in zip(batch, self.tokenizer.encode_aligned(texts), strict=True):
                learnt = learnt_tokens(example, ends, np.isin(ids, self._special))
                self._lost += int((ids == self._unknown).sum())
                if self.task.ends:
                    yield split, *self._closed(ids, learnt), ()
                else:
                    yield split, *self._rendered(example, ids, ends, learnt)

    def _closed(self, ids: np.ndarray, learnt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a text with what begins and ends a document, and their mask."""
        self._spelt.update(ids[np.isin(ids, self._special)].tolist())
        before, behind = ids_before(self.tokenizer, ids), getattr(self.tokenizer, "behind", ())
        self._begun += len(before) < len(getattr(self.tokenizer, "before", ()))
        last = behind[-1] if behind else self._last(ids)
        end = () if last in self.ends else self._end
        return (
            np.concatenate([part_of(before, ids), ids, part_of(behind, ids), part_of(end, ids)]),
            np.concatenate([np.zeros(len(before), bool), learnt, np.ones(len(behind) + len(end), bool)]),
        )

    def _rendered(
        self, example: Example, ids: np.ndarray, ends: np.ndarray, learnt: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Sequence[tuple[int, int, ImageFile]]]:
        """Return the ids of a text that a chat template wrote, their mask, and its images."""
        before = part_of(getattr(example, "ids_before", ()), ids)
        images = [(b + len(before), e + len(before), file) for b, e, file in places_of_images(example, ends)]
        ids, learnt = np.concatenate([before, ids]), np.concatenate([np.zeros(len(before), bool), learnt])
        edges = np.flatnonzero(np.diff(learnt, prepend=False, append=False))
        runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        endless = [end for begin, end in runs if self._last(ids[begin:end]) not in self._special]
        self._answers += len(runs)
        self._endless += len(endless)
        if self.ends_answers and endless:
            moved = [[i + int(np.searchsorted(endless, i, "right")) for i in edges] for *edges, _ in images]
            images = [(b, e, file) for (b, e), (_, _, file) in zip(moved, images, strict=True)]
            ids, learnt = np.insert(ids, endless, self._end), np.insert(learnt, endless, True)
        return ids, learnt, images

    def _last(self, ids: np.ndarray) -> int:
        """Return the last id that is more than blanks; -1 without one."""
        for i in reversed(ids.tolist()):
            if i in self._special or i == self._unknown or self.tokenizer.decode([i]).strip():
                return i
        return -1

    @cached_property
    def ends(self) -> set[int]:
        """The ids that end a text: one that ends with them gets no other end."""
        try:
            of_turn = ends_of_turn(load_template("", getattr(self.tokenizer, "folder", None)), self.tokenizer)
        except ConfigError:  # no template
            of_turn = set()
        return {self.tokenizer.end_of_document, *of_turn}

    def notes(self) -> list[str]:
        """Return a sentence for each difference between the texts so far and their tokens, with its count."""
        notes = [note] if (note := getattr(self.tokenizer, "note", "")) else []
        if self._spelt:
            named = [f"{self._name(i)} {n:,}" for i, n in self._spelt.most_common(_NAMED)]
            more = ["…"] if len(self._spelt) > _NAMED else []
            notes.append(
                f"{self._spelt.total():,} special tokens are spelt out in the texts, and are tokens, as in the"
                f" tokenizer's own call: {', '.join([*named, *more])}"
            )
        if self._lost:
            notes.append(
                f"{self._lost:,} pieces of the texts are {self._name(self._unknown)}, since the tokenizer's vocabulary"
                f" cannot spell them"
            )
        if self._begun:
            notes.append(
                f"{self._begun:,} texts spell out the token that begins a text, which the tokenizer's own call would"
                f" put before them once more: they have it once"
            )
        if self._endless and not self.ends_answers:
            notes.append(
                f"{self._endless:,} of {self._answers:,} answers have no special token at their end, by the chat"
                f" template, so no end is learnt of them: data.end_of_answer = true puts"
                f" {self._name(self.tokenizer.end_of_document)} behind each"
            )
        return notes

    def _name(self, i: int) -> str:
        spell_out = getattr(self.tokenizer, "spell_out", None)
        return spell_out([i]) if spell_out else f"the id {i}"


def part_of(more: Sequence[int] | np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return further ids in the dtype of ``ids``, or a wider one that holds them."""
    return np.array(more, dtype=np.result_type(ids.dtype, np.uint32))


def learnt_tokens(example: Example, ends: np.ndarray, is_special: np.ndarray) -> np.ndarray:
    """Mark the tokens that hold characters of a learnt piece, so that no part of an answer is left out.

    A learnt token may begin in a prompt: most tokenizers merge a prompt's last space with the answer's first word. It
    may end behind its piece, where a template's mark ends within it; but a special token that strips the blank at the
    end of an answer is none of the answer.

    Args:
        ends: the index of the last character of each token.
        is_special: whether each token is special.
    """
    bounds = np.cumsum([len(text) for text, _ in example])
    is_learnt = np.array([learnt for _, learnt in example] + [False])
    found = is_learnt[np.searchsorted(bounds, ends, side="right")]
    last = [bound - 1 for bound, (text, learnt) in zip(bounds, example, strict=True) if text and learnt]
    holds_last = np.searchsorted(ends, last)
    holds_last = holds_last[holds_last < len(ends)]
    found[holds_last] |= ~is_special[holds_last]
    return found


def places_of_images(example: Example, ends: np.ndarray) -> list[tuple[int, int, ImageFile]]:
    """Return the first token of each image of an example, the token behind its last, and its file.

    ``ends``: the index of the last character of each token.
    """
    images = getattr(example, "images", ())
    if not images:
        return []
    bounds = np.cumsum([0, *(len(text) for text, _ in example)])
    edges = [np.searchsorted(ends, bounds[[piece, piece + 1]]).tolist() for piece, _ in images]
    return [(begin, end, file) for (begin, end), (_, file) in zip(edges, images, strict=True)]


def _batches(examples: Examples) -> Iterator[list[tuple[str, Example]]]:
    """Group examples into lists of about _BATCH_CHARACTERS characters, and at most 10,000 examples."""
    batch: list[tuple[str, Example]] = []
    size = 0
    for example in examples:
        batch.append(example)
        size += sum(len(text) for text, _ in example[1])
        if size >= _BATCH_CHARACTERS or len(batch) >= 10_000:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
