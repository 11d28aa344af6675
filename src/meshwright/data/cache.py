"""The cache of corpora: each is keyed by what it was made of, made once per node, and whole as soon as it has its name."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.core.errors import ConfigError
from meshwright.core.files import sync_folder
from meshwright.data.corpus import VERSION, Meta, find_damage, read_meta, write_corpus
from meshwright.data.holdout import check_fraction, cut_point, hold_out
from meshwright.data.sources import Scan, scan_sources
from meshwright.data.tokenizers import Tokenizer

Say = Callable[[str], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A corpus that lies ready: give ``folder`` to ``open_corpus``."""

    folder: Path
    key: str
    """Equal wherever the documents, the tokenizer and the fraction are equal: nodes can compare it."""
    scan: Scan
    meta: Meta
    was_built: bool
    """False when the cache had it already."""


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/meshwright``, or ``~/.cache/meshwright`` where that is unset (or relative, which the XDG rules say to ignore)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "meshwright"


def prepare(
    sources: str | Sequence[str],
    tokenizer: Tokenizer,
    validation_fraction: float = 0.0,
    cache_dir: str | Path | None = None,
    say: Say = _log.info,
) -> Prepared:
    """See that the corpus of ``sources`` lies in the cache, tokenising it when it does not.

    Reads every file of the sources, because the key is made of their contents. Call it in one process per node and let the
    others open ``folder`` afterwards; called in several at once it is safe too: one builds, the others wait for it.

    Args:
        sources: see ``scan_sources``.
        validation_fraction: part of the bytes to hold out, by whole documents (of a single document, its end); in [0, 1).
        cache_dir: None (or an empty text) means ``default_cache_dir()``.
        say: is told, a line at a time, what was found, what is built, waited for or found damaged.

    Raises:
        ConfigError: sources or fraction that cannot be used (see ``scan_sources``), or a cache folder that cannot be written.
        IntegrityError: a file changed while it was being tokenised.
    """
    check_fraction(validation_fraction)
    scan = scan_sources(sources)
    say(f"sources: {scan}")
    key = _key(scan, tokenizer, validation_fraction)
    root = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
    folder = root / f"corpus-{key}"
    was_built = False
    try:
        if find_damage(folder, contents=True):  # a whole one needs no lock: the cache may be read-only
            root.mkdir(parents=True, exist_ok=True)
            with _only_one(root / f"corpus-{key}.lock", say) as alone:
                was_built = _build_unless_whole(folder, alone, _Recipe(scan, tokenizer, validation_fraction, key), say)
    except OSError as error:
        raise ConfigError(
            f"data.cache: cannot keep the corpus under {root}: {error}. It takes up to about {4 * scan.n_bytes} bytes;"
            f" set data.cache to a folder that has room and can be written"
        ) from error
    return Prepared(folder, key, scan, read_meta(folder), was_built)


@dataclass(frozen=True)
class _Recipe:
    scan: Scan
    tokenizer: Tokenizer
    fraction: float
    key: str


def _key(scan: Scan, tokenizer: Tokenizer, fraction: float) -> str:
    made_of = {
        "version": VERSION,
        "tokenizer": [tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.end_of_document],
        "validation_fraction": float(fraction),
        "documents": [[document.name, document.n_bytes, document.digest] for document in scan.documents],
    }
    return hashlib.blake2b(json.dumps(made_of).encode(), digest_size=16).hexdigest()


def _build_unless_whole(folder: Path, alone: bool, recipe: _Recipe, say: Say) -> bool:
    """True when this process built it; False when another had done so."""
    trouble = find_damage(folder, contents=True)
    if not trouble:
        return False
    if folder.exists():
        say(f"the cached corpus {folder} is damaged ({trouble}): it is made anew")
    host = socket.gethostname()
    if alone:  # so no living process of this host is at it: what lies there was left by one that was killed
        for left in folder.parent.glob(f"{folder.name}.tmp-*"):
            if left.name.removeprefix(f"{folder.name}.tmp-").partition("-")[2] == host:
                shutil.rmtree(left, ignore_errors=True)
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}-{host}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        say(f"tokenising {len(recipe.scan.documents)} documents with {recipe.tokenizer!r} into {folder}")
        meta = write_corpus(temporary, *_documents(recipe))
        say(f"{meta.n_training_tokens} tokens to train on, {meta.n_tokens - meta.n_training_tokens} held out")
        return _give_name(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _documents(recipe: _Recipe) -> tuple[Iterator[np.ndarray], dict]:
    """The ids of each document, training first, and what is known of the corpus before they are read."""
    documents, tokenizer = recipe.scan.documents, recipe.tokenizer
    held = hold_out([document.name for document in documents], [document.n_bytes for document in documents], recipe.fraction)
    ordered = [documents[i] for i in np.argsort(held, kind="stable")]  # False before True

    def texts() -> Iterator[str]:
        if len(ordered) > 1:
            yield from (document.read() for document in ordered)
            return
        text = ordered[0].read()
        cut = cut_point(len(text), recipe.fraction)
        yield from filter(None, (text[:cut], text[cut:]))

    facts = {
        "key": recipe.key,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "validation_fraction": float(recipe.fraction),
        "n_source_bytes": recipe.scan.n_bytes,
        "n_training_documents": len(documents) - int(held.sum()),
    }
    return (tokenizer.encode(text) for text in texts()), facts


def _give_name(temporary: Path, folder: Path) -> bool:
    """Rename a whole corpus to its name. False when another process was first (only where files cannot be locked)."""
    while True:
        try:
            os.rename(temporary, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if not find_damage(folder, contents=True):
                return False
            damaged = folder.with_name(f"{folder.name}.tmp-damaged-{socket.gethostname()}")
            os.rename(folder, damaged)  # not removed in place: a reader would see half of it
            shutil.rmtree(damaged, ignore_errors=True)
            continue
        sync_folder(folder.parent)
        return True


@contextlib.contextmanager
def _only_one(path: Path, say: Say) -> Iterator[bool]:
    """Hold the lock file ``path``. The system frees it when its holder dies, so it is never stale. Yields whether it is held."""
    import fcntl

    with open(path, "a") as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another process that makes the same corpus ({path})")
                fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            say(f"{path.parent} cannot lock files ({error.strerror}): processes that start together each make the corpus, and one is kept")
            alone = False
        yield alone
