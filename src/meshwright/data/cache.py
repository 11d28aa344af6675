"""Cache corpora on disk.

A corpus is keyed by a digest of its inputs and built once per node. It is renamed to its final name only once it is
complete.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from meshwright.core.errors import ConfigError, MissingExtraError
from meshwright.core.files import sync_folder
from meshwright.core.host import default_cache_dir

from .building import MOST_KINDS, MOST_LISTED, TokenisingRecipe, check_fraction, files_of, image_folders, texts_of
from .corpus import (
    TRAINING,
    VALIDATION,
    Meta,
    Pictured,
    TooLong,
    beside_images,
    changed_images,
    find_damage,
    has_documents_of,
    open_tokenised,
    read_meta,
)
from .formats import RECORD_FORMATS, BadRow, digest_of_bytes, kinds_listed
from .images import NO_IMAGES, PixelReader, Vision
from .mapped import PREFIX, Index, IndexingRecipe, open_index
from .options import MixturePart, SourceOptions
from .packing import Corpus, Split, Stream, Whole, are_longer
from .scan import TOKEN_FORMATS, Scan, scan_sources
from .tokenizers import ByteTokenizer, FileTokenizer, Tokenizer
from .turns import OWN, Example

Recipe = TokenisingRecipe | IndexingRecipe
"""The steps that build a folder of the cache, named by all that decides its contents, and check that it is whole."""
Say = Callable[[str], None]
Progress = Callable[[int, int], None]
"""Callback that receives the amount done and the total."""


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A corpus that is ready to open: pass ``folder`` to ``open_corpus``."""

    folder: Path
    key: str
    """Digest that is equal wherever documents, images, tokenizer and fraction are equal; nodes can compare it."""
    scan: Scan
    meta: Meta | Index
    was_built: bool
    """False if the corpus was already in the cache."""
    note: str = ""
    """What can no longer be read of the data that a run began with, and what becomes of it."""
    other: str = ""
    """How the data differs from that which a run began with."""


def prepare(
    source: SourceOptions | str | Sequence[str],
    tokenizer: Tokenizer,
    validation_fraction: float = 0.0,
    cache_dir: str | Path | None = None,
    say: Say = _log.info,
    progress: Progress = lambda done, total: None,
    vision: Vision = NO_IMAGES,
    begun: str = "",
    seq_len: int = 0,
) -> Prepared:
    """Build the corpus of ``source`` in the cache, unless it is there already.

    Files of token ids are not copied: they are read once, checked, indexed, and used in place. Call this in one
    process per node and let the others open ``folder`` afterwards. Concurrent calls are safe too: one builds, the
    others wait.

    Args:
        source: files and folders, or a source with all its options.
        validation_fraction: fraction of the bytes (for records, of the rows) to hold out, in [0, 1). Whole documents
            are held out; for a single text, its end; for token ids, the last documents.
        cache_dir: cache folder; None or an empty string means ``default_cache_dir()``.
        say: callback that receives one line at a time: what was found, built, waited for, or found damaged.
        vision: how records with images are read; by default they are refused.
        begun: ``key`` of the data that a run to be continued began with. As long as its corpus is in the cache, images
            that changed since are left to the one who reads rows, and rows that became unusable stay as they were
            tokenised, where ``on_bad_row`` is skip; else ``other`` says what changed.

        seq_len: tokens of a row: a refusal of unusable records names those that are longer too, unless ``too_long``
            says what becomes of these; 0: it does not.

    Raises:
        ConfigError: an unusable source or fraction (see ``scan_sources``); an unusable record or id (with its
            location); a cache folder that cannot be written.
        IntegrityError: a file changed while it was being tokenised.
    """
    check_fraction(validation_fraction)
    options = (
        source
        if isinstance(source, SourceOptions)
        else SourceOptions((source,) if isinstance(source, str) else tuple(source))
    )
    root = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
    scan = scan_sources(options.source, options.format, memory=root)
    say(f"sources: {scan}")
    made_of = (scan, options, tokenizer, validation_fraction)
    of_ids = scan.format in TOKEN_FORMATS
    recipe = IndexingRecipe(*made_of) if of_ids else TokenisingRecipe(*made_of, vision=vision)
    if isinstance(recipe, TokenisingRecipe) and options.too_long == "refuse":
        recipe.seq_len = seq_len
    first, name = None, f"corpus-{begun.partition('-')[0]}"
    for folder in (root / name, root / f"{name}-skip") if begun and not of_ids else ():
        if not find_damage(folder, contents=True) and (meta := read_meta(folder)).identity == begun:
            first = Prepared(folder, begun, scan, meta, False)
            break
    if first is not None and isinstance(recipe, TokenisingRecipe) and first.meta.key == recipe.key:
        assert isinstance(first.meta, Meta)
        changed = changed_images(first.folder, image_folders(scan)) if first.meta.pictures else []
        if not changed:
            return first
        is_or_are = "is" if len(changed) == 1 else "are"
        named = f"{_few([str(image.path) for image in changed])} {is_or_are} not as at the start of the run"
        if options.on_bad_row == "skip":
            return replace(first, note=f"{named}: rows that have it are left out (data.on_bad_row = 'skip')")
        advice = "Put that back, or leave out the rows that have it: data.on_bad_row = 'skip'"
        return replace(first, key=f"changed-{first.key}", other=f"{named}. {advice}")
    folder, was_built = root / recipe.folder_name, False
    try:
        if recipe.find_damage(folder):  # a whole one needs no lock: the cache may be read-only
            root.mkdir(parents=True, exist_ok=True)
            with only_one(folder.with_name(f"{folder.name}.lock"), say) as alone:
                was_built = _build_unless_whole(folder, alone, recipe, say, progress)
    except OSError as error:
        raise ConfigError(
            f"data.cache: cannot keep the corpus under {root}: {error}. It takes up to about four times the bytes of"
            f" the sources; set data.cache to a folder that has room and can be written"
        ) from error
    meta = recipe.read_meta(folder)
    made = Prepared(folder, getattr(meta, "identity", meta.key), scan, meta, was_built)
    return made if first is None else _since(made, first)


def _since(made: Prepared, first: Prepared) -> Prepared:
    """Return the corpus that a run began with if rows that became unusable are all that changed, else the new one."""
    assert isinstance(made.meta, Meta) and isinstance(first.meta, Meta)
    then = {name: values for name, *values in first.meta.files}
    now = {name: values for name, *values in files_of(made.scan)}
    has_as_many = then.keys() == now.keys() and all(then[name][-1] == now[name][-1] for name in now)
    if has_as_many and made.meta.skipped and has_documents_of(first.folder, made.folder):
        n, files = sum(made.meta.skipped.values()), _few(list(made.meta.skipped))
        return replace(first, note=f"unusable rows of {files}, {n} in all, stay as they were when the run began")
    changed = [f"{name} is gone" for name in then if name not in now]
    changed += [f"{name} is new" for name in now if name not in then]
    for name in then.keys() & now.keys():
        if then[name][:2] != now[name][:2]:
            sizes = f"has {now[name][0]:,} bytes, and had {then[name][0]:,}"
            changed.append(f"{name} {'has other bytes' if then[name][0] == now[name][0] else sizes}")
    return replace(made, other=f"{_few(sorted(changed))}. Put that back to continue" if changed and then else "")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _build_unless_whole(folder: Path, alone: bool, recipe: Recipe, say: Say, progress: Progress) -> bool:
    """Build the corpus; return False if another process has already built it."""
    trouble = recipe.find_damage(folder)
    if not trouble:
        return False
    if folder.exists():
        say(f"the cached corpus {folder} is damaged ({trouble}): it is made anew")
    host = socket.gethostname()
    if alone:  # no live process of this host is building, so its temporary folders were left by one that was killed
        for left in folder.parent.glob(f"{folder.name}.tmp-*"):
            if left.name.removeprefix(f"{folder.name}.tmp-").partition("-")[2] == host:
                shutil.rmtree(left, ignore_errors=True)
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}-{host}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        recipe.build(temporary, folder, say, progress)
        while True:
            try:
                os.rename(temporary, folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                if not recipe.find_damage(folder):  # another was first, which happens where files cannot be locked
                    return False
                damaged = folder.with_name(f"{folder.name}.tmp-damaged-{host}")
                os.rename(folder, damaged)  # removed in place, half of it would be visible to a reader
                shutil.rmtree(damaged, ignore_errors=True)
                continue
            sync_folder(folder.parent)
            return True
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def open_corpus(folder: str | Path, too_long: TooLong = "refuse", scan: Scan | None = None) -> Corpus:
    """Map a corpus (``Prepared.folder``) into memory, read-only.

    Args:
        too_long: how to handle conversations longer than a sample; see SourceOptions.
        scan: ``Prepared.scan``, of which a corpus with images needs the folders.

    Raises:
        IntegrityError: ``folder`` holds no complete corpus.
    """
    folder = Path(folder)
    if folder.name.startswith(PREFIX):
        return open_index(folder)
    return open_tokenised(folder, too_long, image_folders(scan) if scan else ())


@contextlib.contextmanager
def only_one(path: Path, say: Say, what: str = "corpus") -> Iterator[bool]:
    """Hold a lock on the file ``path``, and yield whether the lock is held.

    The operating system releases the lock when its holder dies, so it is never stale.
    """
    import fcntl

    with open(path, "a") as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another process that makes the same {what} ({path})")
                fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            say(
                f"{path.parent} cannot lock files ({error.strerror}): processes that start together each make the"
                f" {what}, and one is kept"
            )
            alone = False
        yield alone


def open_parts(
    prepared: Sequence[Prepared], parts: Sequence[MixturePart], vision: Vision
) -> tuple[list[Corpus], PixelReader | None]:
    """Open the parts of a mixture; return them, and the reader of their images if one has any.

    Raises:
        UnsupportedError: one part has images, and another is plain text.
    """
    corpora = [open_corpus(p.folder, part.too_long, p.scan) for p, part in zip(prepared, parts, strict=True)]
    corpora = beside_images(corpora, [part.name for part in parts])
    return corpora, PixelReader(vision.processor) if isinstance(corpora[0].training, Pictured) else None


@dataclass(frozen=True)
class Account:
    """What becomes of the first records of a source, or of its texts.

    Attributes:
        records: those that were read; None: texts.
        all_records: those that there are.
        unusable: number and reason of each that cannot be used.
        splits: the documents of those that can, to train on and held out.
        notes: columns that are not read, and where texts and tokens differ.
    """

    records: int | None
    all_records: int
    unusable: list[tuple[int, str]]
    splits: tuple[Split, Split]
    notes: list[str]

    def lines(self, seq_len: int) -> Iterator[tuple[str, str]]:
        """Yield a title and a sentence for each fact."""
        if self.records is not None:
            among = "" if self.records == self.all_records else f", the first of {self.all_records:,}"
            bad = f"; {len(self.unusable):,} of them cannot be used:" if self.unusable else ", all of which can be used"
            yield "records", f"{self.records:,}{among}{bad}"
        yield from (("", line) for line in kinds_listed(self.unusable, MOST_KINDS))
        if self.unusable:
            yield "", "training leaves them out with --data.on_bad_row=skip"
        whole = [split for split in self.splits if isinstance(split, Whole)]
        if n := sum(split.n_too_long(seq_len) for split in whole):
            cut = sum(replace(split, too_long="truncate", _kept_lengths={}).n_unlearnt(seq_len) for split in whole)
            fate = {"refuse": "refused", "skip": "left out"}.get(
                whole[0].too_long, f"cut short, {cut:,} of them left out, since nothing to learn is left"
            )
            yield (
                "too long",
                f"{n:,} of {sum(split.n_documents for split in whole):,} documents {are_longer(n, seq_len)}: {fate}"
                + "; --data.too_long=skip leaves them out, truncate cuts their ends off" * (fate == "refused"),
            )
        kept = [
            replace(split, too_long="skip", _kept_lengths={})
            if isinstance(split, Whole) and split.too_long == "refuse"
            else split
            for split in self.splits
        ]
        yield "data", sizes_text([(kept[0], kept[1])], seq_len)
        yield from (("note", note) for note in self.notes)


def sizes_text(splits: Iterable[tuple[Split, Split]], seq_len: int) -> str:
    """Count what of sources is trained on in rows of a length, and what is held out: documents and tokens that fit."""

    def counted(of: Iterable[Split]) -> tuple[int, int, int]:
        tokens, learnt, documents = 0, 0, 0
        for split in of:
            fits = isinstance(split, Whole)
            whole, some = split.n_kept(seq_len) if fits else (split.n_tokens, split.n_tokens)
            tokens, learnt = tokens + whole, learnt + some
            documents += int((split.kept_lengths(seq_len) > 0).sum()) if fits else split.n_documents
        return tokens, learnt, documents

    def words(tokens: int, documents: int) -> str:
        return f"{tokens:,} tokens of {documents:,} document{'s' * (documents != 1)}"

    pairs = list(splits)
    tokens, learnt, documents = counted(training for training, _ in pairs)
    some = f", {learnt:,} of them learnt" if learnt != tokens else ""
    held, _, others = counted(validation for _, validation in pairs)
    return f"{words(tokens, documents)} to train on{some}" + (f"; {words(held, others)} held out" if others else "")


def account_of(recipe: TokenisingRecipe) -> Account:
    """Read up to MOST_LISTED records, also where one of them is bad, or all texts, and count what becomes of them.

    Raises:
        ConfigError: none of them can be used.
    """
    found: list[tuple[str, Example]] = []
    bad: list[tuple[int, str]] = []
    n, files = 0, recipe.scan.files
    if recipe.scan.format == "text":
        found = list(recipe.texts())
    else:
        every = (
            (file, is_held[min(place, len(is_held) - 1)], row)
            for file, is_held in zip(files, recipe.held_rows(), strict=True)
            for place, row in enumerate(RECORD_FORMATS[recipe.scan.format].records(file.path))
        )
        for file, is_held, (number, record) in islice(every, MOST_LISTED):
            n += 1
            try:
                examples = recipe.examples_of(file, number, record)
            except BadRow as error:
                bad.append((number, str(error)))
                continue
            found += [(VALIDATION if is_held else TRAINING, example) for example in examples]
    if bad and not found:
        raise ConfigError("\n- ".join([f"none of {n:,} records can be used:", *kinds_listed(bad, MOST_KINDS)]))
    encoder = recipe.encoder()
    encoded = list(encoder.encode(iter(found)))

    def split(name: str) -> Split:
        own = [(ids, mask) for of, ids, mask, _ in encoded if of == name]
        offsets = np.cumsum([0, *(len(ids) for ids, _ in own)])
        ids = np.concatenate([np.empty(0, np.uint32), *(ids for ids, _ in own)])
        if not recipe.task.is_whole:
            return Stream(name, ids, offsets)
        masks = [np.empty(0, bool), *(mask for _, mask in own if mask is not None)]
        return Whole(name, ids, offsets, np.concatenate(masks).astype(np.uint8), recipe.options.too_long)

    notes = [*encoder.notes(), *recipe.notes()]
    if repeats := len(found) - len({(example, getattr(example, "images", ())) for _, example in found}):
        are = "documents are exact copies" if repeats > 1 else "document is an exact copy"
        notes.append(f"{repeats:,} {are} of others, and read as often as they stand there")
    records = None if recipe.scan.format == "text" else n
    return Account(records, sum(file.n_records for file in files), bad, (split(TRAINING), split(VALIDATION)), notes)


BPE = "bpe:"
END = "<|endoftext|>"
MAX_CHARACTERS = 200_000_000
"""Number of characters that a tokenizer is trained on; more text changes little."""


def vocabulary_of(name: str) -> int:
    """Return the size in ``bpe:SIZE``.

    Raises ConfigError for an invalid size; the smallest has the 256 bytes, the end of a document and one more token.
    """
    words = name.removeprefix(BPE)
    if not words.isdecimal() or int(words) < 258:
        raise ConfigError(
            f"data.tokenizer = {name!r} must be bpe:SIZE, with a vocabulary of 258 or more, like bpe:8000"
        )
    return int(words)


def trained_bpe(
    name: str, sources: Sequence[SourceOptions], cache_dir: str | Path | None, say: Callable[[str], None]
) -> FileTokenizer:
    """Return the tokenizer ``bpe:SIZE`` of the sources' text, including held-out text.

    It is read from the cache, or trained and cached. Safe in concurrent processes: one trains, the others wait.

    Raises:
        ConfigError: the size is invalid, or a source holds token ids instead of text.
        MissingExtraError: the package ``tokenizers`` is not installed.
    """
    size = vocabulary_of(name)

    def texts() -> Iterator[str]:
        left = MAX_CHARACTERS
        for options, scan in zip(sources, scans, strict=True):
            for text in texts_of(scan, options, ByteTokenizer()):
                yield text[:left]
                left -= len(text)
                if left <= 0:
                    return

    root = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
    scans = [scan_sources(options.source, options.format, memory=root) for options in sources]
    for scan in scans:
        if scan.format in TOKEN_FORMATS:
            raise ConfigError(
                f"data.tokenizer = {name!r} is trained on text, and {scan.files[0].path} holds token ids: name the"
                f" tokenizer that made them"
            )
    made_of: list[object] = [2, size, MAX_CHARACTERS]
    for options, scan in zip(sources, scans, strict=True):
        template = "" if options.template in ("", OWN) else Path(options.template).expanduser().read_text("utf-8")
        files = [[file.name, file.digest] for file in scan.files]
        made_of.append([scan.format, options.task, options.column, template, files])
    path = root / f"bpe-{digest_of_bytes(json.dumps(made_of).encode())}" / "tokenizer.json"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with only_one(path.with_name("lock"), say, "tokenizer"):
                if not path.is_file():
                    say(f"training a tokenizer of {size} tokens into {path}")
                    _train(size, texts(), path)
    except OSError as error:
        raise ConfigError(
            f"data.cache: cannot store the tokenizer under {root}: {error}. Set data.cache to a folder that can be"
            f" written"
        ) from error
    return FileTokenizer(path, END)


def _train(size: int, texts: Iterator[str], path: Path) -> None:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("training a tokenizer", "tokenizers", "hf") from error
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    trained.save(str(temporary))
    os.replace(temporary, path)
