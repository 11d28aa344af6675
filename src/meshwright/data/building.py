"""Tokenise the files of a scan into the documents of a corpus, some of them held out for validation."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.core.errors import ConfigError

from .corpus import (
    MOST_FILES,
    TRAINING,
    VALIDATION,
    VERSION,
    Encoded,
    changed_images,
    find_damage,
    read_meta,
    write_corpus,
)
from .formats import RECORD_FORMATS, BadRow, Record, digest_of, digest_of_bytes, first_record, kind_of, kinds_listed
from .images import NO_IMAGES, Vision, places_of_images
from .options import SourceOptions
from .scan import Scan, SourceFile
from .tasks import Task, choose_task
from .tokenizers import AligningTokenizer, Tokenizer, encode_batch, ids_before, template_of
from .turns import Example, ends_of_turn, load_template

_KEY = b"meshwright held-out documents"


def check_fraction(fraction: float) -> None:
    """Raise ConfigError unless 0 <= ``fraction`` < 1."""
    if not 0 <= fraction < 1:
        raise ConfigError(
            f"data.validation_fraction = {fraction}: the fraction of the bytes to hold out must be at least 0 (none)"
            f" and below 1, like 0.01"
        )


def hold_out(names: Sequence[str], sizes: Sequence[int], fraction: float) -> np.ndarray:
    """Choose documents whose sizes, in bytes, add up to about ``fraction`` of the total: bool (documents,).

    In the order of a keyed hash of their names, each document that still fits into this size is held out. If none
    fits, the smallest is held out, so that two or more documents always leave both parts non-empty. A single document
    is not chosen: see ``cut_point``. Raises ConfigError for a fraction outside [0, 1).
    """
    check_fraction(fraction)
    chosen = np.zeros(len(names), dtype=bool)
    if fraction == 0 or len(names) < 2:
        return chosen
    wanted, held = fraction * sum(sizes), 0
    # surrogateescape: a file name on disk need not be UTF-8
    encoded = [name.encode("utf-8", "surrogateescape") for name in names]
    ranks = [hashlib.blake2b(name, digest_size=16, key=_KEY).digest() for name in encoded]
    for i in sorted(range(len(names)), key=lambda i: (ranks[i], i)):
        if held + sizes[i] <= wanted:
            chosen[i] = True
            held += sizes[i]
    if not held:
        chosen[int(np.argmin(sizes))] = True
    return chosen


def hold_out_rows(digests: Sequence[str], counts: Sequence[int], fraction: float) -> list[np.ndarray]:
    """Choose ``fraction`` of all rows of all files (at least one of two or more rows), by the smallest keyed hashes of
    the files' digests: bool (rows,) for each file, never all True. Raises ConfigError for a fraction outside [0, 1).
    """
    check_fraction(fraction)
    total = sum(counts)
    if fraction == 0 or total < 2:
        return [np.zeros(count, dtype=bool) for count in counts]
    wanted = min(max(1, round(fraction * total)), total - 1)
    hashes = [hashlib.blake2b(digest.encode(), digest_size=16, key=_KEY).digest() for digest in digests]
    draws = [np.random.Philox(key=int.from_bytes(one, "little")) for one in hashes]
    ranks = np.concatenate([draw.random_raw(count) for draw, count in zip(draws, counts, strict=True)])
    chosen = np.zeros(total, dtype=bool)
    chosen[np.argpartition(ranks, wanted - 1)[:wanted]] = True
    return np.split(chosen, np.cumsum(counts)[:-1])


def cut_point(n_characters: int, fraction: float) -> int:
    """Return the index of the first held-out character of a corpus of one document.

    At least one of two or more characters is held out, and at least one is not.
    """
    check_fraction(fraction)
    if fraction == 0 or n_characters < 2:
        return n_characters
    return min(max(1, round(n_characters * (1 - fraction))), n_characters - 1)


# --- turn examples into ids and a mask of the ids that are learnt, and count where a text and its tokens differ

_BATCH_CHARACTERS = 1 << 20
"""Characters passed to the tokenizer per call: enough to keep all processors busy, few enough to fit in memory."""

_IDS_NAMED = 6
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
        self._lost = self._begun = self._answers = self._endless = self._unmarked = 0

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
                    continue
                before = part_of(getattr(example, "ids_before", ()), ids)
                images = [(b + len(before), e + len(before), file) for b, e, file in places_of_images(example, ends)]
                ids, learnt = np.concatenate([before, ids]), np.concatenate([np.zeros(len(before), bool), learnt])
                edges = np.flatnonzero(np.diff(learnt, prepend=False, append=False))
                runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
                endless = [end for begin, end in runs if self._last(ids[begin:end]) not in self._special]
                unmarked = [end for end in endless if end < len(ids) and int(ids[end]) in self._ends_of_turn]
                self._answers += len(runs)
                self._endless += len(endless)
                self._unmarked += len(unmarked)
                if self.ends_answers and endless:
                    learnt[unmarked] = True
                    endless = [end for end in endless if end not in unmarked]
                    moved = [[i + int(np.searchsorted(endless, i, "right")) for i in place] for *place, _ in images]
                    images = [(b, e, file) for (b, e), (_, _, file) in zip(moved, images, strict=True)]
                    ids, learnt = np.insert(ids, endless, self._end), np.insert(learnt, endless, True)
                yield split, ids, learnt, images

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

    @cached_property
    def _ends_of_turn(self) -> set[int]:
        return ends_of_turn(self.task.turns.template, self.tokenizer) if self.task.turns else self.ends

    def notes(self) -> list[str]:
        """Return a sentence for each difference between the texts so far and their tokens, with its count."""
        notes = [note] if (note := getattr(self.tokenizer, "note", "")) else []
        if self._spelt:
            named = [f"{self._name(i)} {n:,}" for i, n in self._spelt.most_common(_IDS_NAMED)]
            more = ["…"] if len(self._spelt) > _IDS_NAMED else []
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
            does = [f"learns the one that it writes behind {self._unmarked:,}, unmarked"] * bool(self._unmarked)
            put = f"puts {self._name(self.tokenizer.end_of_document)} behind {'the others' if does else 'each'}"
            does += [put] * (self._endless > self._unmarked)
            marks = ", as its marks have it," if self._unmarked else ","
            notes.append(
                f"{self._endless:,} of {self._answers:,} answers have no special token at their end, by the chat"
                f" template{marks} so no end is learnt of them: data.end_of_answer = true {', and '.join(does)}"
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


# --- tokenise the files of a scan into the documents of a corpus, in batches over all processors

_NAMED = 3
"""Number of unusable rows per file that are reported one by one; the rest are only counted."""

_KINDS, MOST_KINDS = 10, 50
"""Number of kinds of problems that a refusal names, and that ``meshwright inspect`` does."""
MOST_LISTED = 10_000
"""Number of rows behind the first unusable one that a refusal looks at, and of records that are inspected."""

Say = Callable[[str], None]
Split = str


class TokenisingRecipe:
    """The recipe for a corpus of text or records.

    Raises:
        ConfigError: the records or the tokenizer do not support the task.
    """

    def __init__(
        self, scan: Scan, options: SourceOptions, tokenizer: Tokenizer, fraction: float, vision: Vision = NO_IMAGES
    ):
        self.scan, self.options, self.tokenizer, self.fraction = scan, options, tokenizer, fraction
        if scan.format != "text":
            sample = first_record([file.path for file in scan.files], scan.format)
            self.task = choose_task(options, tokenizer, sample, vision)
        elif options.task in ("auto", "text"):
            self.task = choose_task(SourceOptions(task="text"), tokenizer, {})
        else:
            raise ConfigError(
                f"data.task = '{options.task}' needs records (jsonl, parquet or a saved dataset), and these files are"
                f" text"
            )
        self.unread: Counter[str] = Counter()
        """Columns that the task does not read, and the number of records that have them."""
        self.ignored: set[str] = set()
        """Columns that are left out on purpose, and that a record has."""
        self.seq_len = 0
        """Tokens above which a refusal names a document as too long; 0: it names none."""
        self.nulls = 0
        """Nulls in arguments of calls of tools, which Arrow cannot tell from keys that a record has not."""
        self.repeated = 0
        """Answers of text that begin with their whole prompt."""
        if self.task.is_whole and not isinstance(tokenizer, AligningTokenizer):
            raise ConfigError(
                f"the task '{self.task.name}' must know which text each id stands for, and {tokenizer!r} has no"
                f" encode_aligned (see meshwright.data.tokenizers.AligningTokenizer); 'bytes' and tokenizer.json"
                f" files have it"
            )

    @property
    def key(self) -> str:
        """A digest of everything that determines the documents and their ids.

        Whether unusable rows are left out is no part of it: where none was refused, the documents are the same.
        """
        made_of: dict[str, Any] = {
            "version": VERSION,
            "tokenizer": [self.tokenizer.fingerprint, self.tokenizer.vocab_size, self.tokenizer.end_of_document],
            "validation_fraction": float(self.fraction),
            "ends": sorted(self.encoder().ends),
            "documents": [[file.name, file.n_bytes, file.digest] for file in self.scan.files],
        }
        if self.scan.format != "text":
            own = self.options
            made_of["records"] = [self.scan.format, self.task.name, self.task.fingerprint, own.end_of_answer]
            made_of["left_out"] = list(own.ignore)
        return digest_of_bytes(json.dumps(made_of).encode())

    read_meta = staticmethod(read_meta)

    @property
    def folder_name(self) -> str:
        return f"corpus-{self.key}{'-skip' if self.options.on_bad_row == 'skip' else ''}"

    def find_damage(self, folder: Path) -> str:
        """Describe the damage in ``folder``; a corpus with another key counts as damaged."""
        if trouble := find_damage(folder, contents=True):
            return trouble
        meta = read_meta(folder)
        if meta.key != self.key:
            return f"it was made of something else, with the tokenizer {meta.tokenizer}"
        changed = changed_images(folder, image_folders(self.scan)) if meta.pictures else []
        return f"the image {changed[0].path} is not what it was" if changed else ""

    def build(self, folder: Path, target: Path, say: Say, progress: Callable[[int, int], None]) -> None:
        """Tokenise the documents and write them to ``folder``.

        Raises:
            ConfigError: a record is unusable and such records are not skipped, or no token is left to train on.
            IntegrityError: a file changed since the scan.
        """
        n = len(self.scan.files)
        what = f"{n} document{'s' * (n > 1)}"
        if self.scan.format != "text":
            what = f"{n} {self.scan.format} file{'s' * (n > 1)} (task: {self.task.name})"
        say(f"tokenising {what} with {self.tokenizer!r} into {target}")
        skipped: dict[str, int] = {}
        notes: list[str] = []
        facts = {
            "key": self.key,
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "end_of_document": self.tokenizer.end_of_document,
            "task": self.task.name,
            "is_whole": self.task.is_whole,
            "has_turns": self.task.is_whole and not self.task.ends,
            "validation_fraction": float(self.fraction),
            "n_source_bytes": self.scan.n_bytes,
            "skipped": skipped,
            "notes": notes,
            "files": files_of(self.scan) if len(self.scan.files) <= MOST_FILES else [],
        }
        examples = self.texts(progress) if self.scan.format == "text" else self._records(skipped, say, progress)
        folders = image_folders(self.scan) if self.task.pictured else None

        def encoded() -> Iterator[Encoded]:
            encoder = self.encoder()
            yield from encoder.encode(examples)
            notes.extend([*encoder.notes(), *self.notes()])

        meta = write_corpus(folder, encoded(), facts, folders)
        if not meta.training.n_learnt:
            why = f"{meta.validation.n_documents} held out (data.validation_fraction = {self.fraction})"
            n = meta.training.n_documents
            raise ConfigError(
                f"data.source = {list(self.options.source)} holds nothing to learn: {n} documents to train on, {why}"
            )
        say(f"tokenised {meta.training.n_documents + meta.validation.n_documents:,} documents")

    def notes(self) -> list[str]:
        """Name the columns not read or not there, and count the nulls left out, in a sentence each."""
        named = ", ".join(f"{name} (in {n})" for name, n in self.unread.most_common())
        read = f"the task '{self.task.name}' reads {', '.join(self.task.columns)}"
        nulls = (
            f"{self.nulls:,} nulls in arguments of calls of tools are left out, since Arrow and Parquet give each call"
            f" the keys of all others as null: where a null is meant, write the column of messages as JSON text"
        )
        folder = getattr(self.tokenizer, "folder", None)
        written = self.task.is_whole and self.task.ends and folder is not None and template_of(folder)
        own = (
            f"the task '{self.task.name}' of text writes prompts and answers as they are, not by the tokenizer's chat"
            f" template: for that, set data.template = own"
        )
        unread = self.task.turns.unread if self.task.turns else []
        behind = (
            f"{sum(unread):,} turn{'s' * (sum(unread) > 1)} at the end of {len(unread):,} conversation"
            f"{'s' * (len(unread) > 1)}, behind the last answer that is learnt, left out: nothing is learnt from them"
        )
        again = (
            f"answers that begin with their whole prompt, which is learnt there once more: {self.repeated:,}; where the"
            f" data repeat it, cut it off the answers"
        )
        absent = [name for name in self.task.ignore if name not in self.ignored]
        nowhere = f"data.ignore names {absent}, which no record has"
        return [
            *([f"{read}; columns not read: {named}"] if named else []),
            *([nowhere] if absent else []),
            *([own] if written else []),
            *([nulls] if self.nulls else []),
            *([behind] if unread else []),
            *([again] if self.repeated else []),
        ]

    def encoder(self) -> Encoder:
        """Return the rules by which the documents become ids."""
        return Encoder(self.task, self.tokenizer, ends_answers=self.options.end_of_answer)

    def unsplit(self, say: Say = lambda line: None) -> Iterator[tuple[Split, Example]]:
        """Yield every document in order, all for training, without checking the files against the scan.

        Raises ConfigError for an unusable row, unless such rows are skipped.
        """
        for file in self.scan.files:
            if self.scan.format == "text":
                yield TRAINING, ((file.text(), True),)
                continue
            for _, examples in self._rows(file, {}, say):
                yield from ((TRAINING, example) for example in examples)

    def texts(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Iterator[tuple[Split, Example]]:
        """Yield the text of every file, or of a single file two parts, with the split of each."""
        files = self.scan.files
        if len(files) == 1:
            text = files[0].read()
            cut = cut_point(len(text), self.fraction)
            yield from (
                (split, ((part, True),)) for split, part in ((TRAINING, text[:cut]), (VALIDATION, text[cut:])) if part
            )
            return
        held = hold_out([file.name for file in files], [file.n_bytes for file in files], self.fraction)
        done = 0
        for file, is_held in zip(files, held, strict=True):
            yield VALIDATION if is_held else TRAINING, ((file.read(), True),)
            done += file.n_bytes
            progress(done, self.scan.n_bytes)

    def _records(
        self, skipped: dict[str, int], say: Say, progress: Callable[[int, int], None]
    ) -> Iterator[tuple[Split, Example]]:
        files = self.scan.files
        held = self.held_rows()
        done, total = 0, sum(file.n_records for file in files)
        for file, is_held in zip(files, held, strict=True):
            for place, examples in self._rows(file, skipped, say):
                if place >= file.n_records:
                    raise file.changed(file.path.stat().st_size)
                yield from ((VALIDATION if is_held[place] else TRAINING, example) for example in examples)
                if place % 1000 == 0:
                    progress(done + place, total)
            if digest_of(file.path) != file.digest:
                raise file.changed(file.n_bytes)
            done += file.n_records
            progress(done, total)
            if skipped.get(file.name, 0) > _NAMED:
                say(f"skipped: {skipped[file.name]} of the {file.n_records} rows of {file.path}, in all")

    def held_rows(self) -> list[np.ndarray]:
        """Return whether each row of each file is held out."""
        files = self.scan.files
        return hold_out_rows([file.digest for file in files], [file.n_records for file in files], self.fraction)

    def examples_of(self, file: SourceFile, number: int, record: Record | BadRow) -> list[Example]:
        """Return the examples of a record, whose row counts from 1, and note the columns that are not read.

        Raises BadRow where the record cannot be used.
        """
        if isinstance(record, BadRow):
            raise record
        read, where = {*self.task.columns, *self.task.ignore}, f"{file.path}, row {number}"
        self.unread.update(name for name, value in record.items() if value is not None and name not in read)
        self.ignored.update(name for name in self.task.ignore if name in record)
        self.nulls += getattr(record, "nulls", 0)
        examples = self.task.examples_in(record, where, folder_of(file))
        for example in examples:
            asked = example[0][0].strip() if self.task.ends else ""
            self.repeated += bool(asked) and any(text.startswith(asked) for text, _ in example[1:])
            for text, _ in example:
                try:
                    text.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise BadRow(
                        f"{where}: the text holds half a character ({text[error.start]!r} at character {error.start})"
                    ) from None
        return examples

    def _rows(self, file: SourceFile, skipped: dict[str, int], say: Say) -> Iterator[tuple[int, list[Example]]]:
        """Yield the examples of each usable row of a file, with the row's index among all rows, from 0."""
        records = enumerate(RECORD_FORMATS[self.scan.format].records(file.path))
        for place, (number, record) in records:
            try:
                yield place, self.examples_of(file, number, record)
            except BadRow as bad:
                if self.options.on_bad_row == "refuse":
                    others = ((number, record) for _, (number, record) in islice(records, MOST_LISTED))
                    raise ConfigError(self._problems(file, number, bad, others)) from None
                skipped[file.name] = skipped.get(file.name, 0) + 1
                if skipped[file.name] <= _NAMED:
                    say(f"skipped: {bad}")

    def _problems(
        self, file: SourceFile, number: int, first: BadRow, behind: Iterable[tuple[int, Record | BadRow]]
    ) -> str:
        """Describe each kind of problem of a file's rows once, with the rows that have it, by the file's order."""
        bad = [(number, str(first))]
        for row, record in behind:
            try:
                self.examples_of(file, row, record)
            except BadRow as error:
                bad.append((row, str(error)))
        way = "To leave such rows out, set data.on_bad_row = 'skip'"
        numbers: list[int] = []
        found: list[tuple[Split, Example]] = []
        every = RECORD_FORMATS[self.scan.format].records(file.path) if self.seq_len and self.task.is_whole else ()
        for row, record in islice(every, MOST_LISTED):
            with suppress(BadRow):
                examples = self.examples_of(file, row, record)
                numbers += [row] * len(examples)
                found += [(TRAINING, example) for example in examples]
        lengths = (len(ids) for _, ids, _, _ in self.encoder().encode(iter(found)))
        long = [row for row, length in zip(numbers, lengths, strict=True) if length > self.seq_len]
        if long:
            what = f"longer than data.seq_len = {self.seq_len}"
            bad += [(row, f"{file.path}, row {row}: {what}") for row in dict.fromkeys(long)]
            way += " and data.too_long = 'skip'"
        way += f"; meshwright inspect lists up to {MOST_KINDS} kinds, of the first {MOST_LISTED:,} records"
        listed = kinds_listed(bad, _KINDS)
        if len(listed) == 1:
            return f"{listed[0]}. {way}"
        listed = [text.replace(f"{file.path}, ", "", 1) for text in listed]
        head = f"{len(bad)} rows of {file.path} cannot be used, for {len({kind_of(text) for _, text in bad})} reasons:"
        return "\n- ".join([head, *listed]) + f"\n{way}"


def files_of(scan: Scan) -> list[list[Any]]:
    """Return name, bytes, digest and records of each file of a scan."""
    return [[file.name, file.n_bytes, file.digest, file.n_records] for file in scan.files]


def folder_of(file: SourceFile) -> Path:
    """Return the folder that the paths in a file's records are relative to."""
    return file.path if file.path.is_dir() else file.path.parent


def image_folders(scan: Scan) -> list[Path]:
    """Return the folders of a scan's files, each once, in the order of the files."""
    return list(dict.fromkeys(map(folder_of, scan.files)))


def texts_of(scan: Scan, options: SourceOptions, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of every document of a scan, in order; skip unusable rows."""
    recipe = TokenisingRecipe(scan, replace(options, on_bad_row="skip"), tokenizer, 0.0)
    yield from ("".join(text for text, _ in example) for _, example in recipe.unsplit())
