"""Train a byte-level byte-pair tokenizer on the run's own text (Sennrich et al. 2016; Radford et al. 2019)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from meshwright.core.errors import ConfigError, MissingExtraError
from meshwright.data.corpus.building import texts_of
from meshwright.data.corpus.cache import default_cache_dir, only_one
from meshwright.data.options import SourceOptions
from meshwright.data.sources.scan import TOKEN_FORMATS, Scan, scan_sources

from .tokenizers import ByteTokenizer, FileTokenizer

PREFIX = "bpe:"
END = "<|endoftext|>"
MAX_CHARACTERS = 200_000_000
"""Number of characters that a tokenizer is trained on; more text changes little."""


def vocabulary_of(name: str) -> int:
    """Return the size in ``bpe:SIZE``.

    Raises ConfigError for an invalid size; the smallest has the 256 bytes, the end of a document and one more token.
    """
    words = name.removeprefix(PREFIX)
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
        template = Path(options.template).expanduser().read_text(encoding="utf-8") if options.template else ""
        files = [[file.name, file.digest] for file in scan.files]
        made_of.append([scan.format, options.task, options.column, template, files])
    path = root / f"bpe-{hashlib.blake2b(json.dumps(made_of).encode(), digest_size=16).hexdigest()}" / "tokenizer.json"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with only_one(path.with_name("lock"), say, "tokenizer"):
                if not path.is_file():
                    say(f"training a tokenizer of {size} tokens into {path}")
                    _train(size, _texts(sources, scans), path)
    except OSError as error:
        raise ConfigError(
            f"data.cache: cannot store the tokenizer under {root}: {error}. Set data.cache to a folder that can be"
            f" written"
        ) from error
    return FileTokenizer(path, END)


def _texts(sources: Sequence[SourceOptions], scans: Sequence[Scan]) -> Iterator[str]:
    left = MAX_CHARACTERS
    for options, scan in zip(sources, scans, strict=True):
        for text in texts_of(scan, options, ByteTokenizer()):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                return


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
