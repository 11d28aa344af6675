"""Cache corpora on disk.

A corpus is keyed by a digest of its inputs and built once per node. It is renamed to its final name only once it is
complete.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from meshwright.core.errors import ConfigError
from meshwright.core.files import sync_folder
from meshwright.core.host import default_cache_dir
from meshwright.data.holdout import check_fraction
from meshwright.data.images.files import NO_IMAGES, Vision
from meshwright.data.options import SourceOptions
from meshwright.data.sources.scan import TOKEN_FORMATS, Scan, scan_sources
from meshwright.data.text.tokenizers import Tokenizer

from .arrays import changed_images
from .building import TokenisingRecipe, files_of, image_folders
from .corpus import Meta, TooLong, find_damage, has_documents_of, open_tokenised, read_meta
from .mapped import PREFIX, Index, IndexingRecipe, open_index
from .packing import Corpus

Say = Callable[[str], None]
Progress = Callable[[int, int], None]
"""Callback that receives the amount done and the total."""


class Recipe(Protocol):
    """The steps that build a folder of the cache and check that it is complete."""

    @property
    def folder_name(self) -> str:
        """A name that is a function of everything that determines the contents."""
        ...

    def build(self, folder: Path, target: Path, say: Say, progress: Progress) -> None:
        """Fill the empty ``folder``, which is later renamed to ``target``."""
        ...

    def find_damage(self, folder: Path) -> str:
        """Describe the damage in ``folder``; return an empty string if the folder is intact."""
        ...

    def read_meta(self, folder: Path) -> Any: ...


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
    recipe: Recipe = (
        IndexingRecipe(*made_of) if scan.format in TOKEN_FORMATS else TokenisingRecipe(*made_of, vision=vision)
    )
    first = _begun_with(root, begun, scan) if isinstance(recipe, TokenisingRecipe) else None
    if isinstance(recipe, TokenisingRecipe) and first is not None and first.meta.key == recipe.key:
        return _with_images(first, is_skipped=options.on_bad_row == "skip")
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


def _begun_with(root: Path, begun: str, scan: Scan) -> Prepared | None:
    """Return the whole corpus of the cache that has an identity; None without one."""
    name = f"corpus-{begun.partition('-')[0]}"
    for folder in (root / name, root / f"{name}-skip") if begun else ():
        if not find_damage(folder, contents=True) and (meta := read_meta(folder)).identity == begun:
            return Prepared(folder, begun, scan, meta, False)
    return None


def _with_images(first: Prepared, *, is_skipped: bool) -> Prepared:
    """Return the corpus that a run began with, with what became of its images."""
    assert isinstance(first.meta, Meta)
    changed = changed_images(first.folder, image_folders(first.scan)) if first.meta.pictures else []
    if not changed:
        return first
    named = f"{_few([str(image.path) for image in changed])} {'is' if len(changed) == 1 else 'are'} not as at the start"
    if is_skipped:
        return replace(first, note=f"{named} of the run: rows that have it are left out (data.on_bad_row = 'skip')")
    advice = "Put that back, or leave out the rows that have it: data.on_bad_row = 'skip'"
    return replace(first, key=f"changed-{first.key}", other=f"{named} of the run. {advice}")


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
        return _give_name(temporary, folder, recipe)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _give_name(temporary: Path, folder: Path, recipe: Recipe) -> bool:
    """Rename a complete corpus to its final name.

    Returns False if another process was first, which happens only where files cannot be locked.
    """
    while True:
        try:
            os.rename(temporary, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if not recipe.find_damage(folder):
                return False
            damaged = folder.with_name(f"{folder.name}.tmp-damaged-{socket.gethostname()}")
            os.rename(folder, damaged)  # removed in place, half of it would be visible to a reader
            shutil.rmtree(damaged, ignore_errors=True)
            continue
        sync_folder(folder.parent)
        return True


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
