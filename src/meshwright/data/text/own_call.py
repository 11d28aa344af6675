"""Read a tokenizer as transformers reads it, so that ids are those of its own call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.core.errors import ConfigError, MissingExtraError
from meshwright.core.files import inside

from .tokenizer_settings import TEMPLATE, WITH_IDS, WITH_TOKENS

FILE = "tokenizer.json"
_READ = (FILE, *WITH_TOKENS, *WITH_IDS, TEMPLATE, "added_tokens.json", "additional_chat_templates")
"""Names that transformers opens beside a tokenizer."""
_PROBES = ("a", "0", "the", "\N{LATIN SMALL LETTER E WITH ACUTE}")


def read_tokenizer(path: Path) -> tuple[Any, str]:
    """Return the tokenizer of transformers in ``path``, and a note where the files beside it are not used.

    A file named tokenizer.json is read with the files beside it, as ``AutoTokenizer.from_pretrained(folder)`` does:
    they may name a class with rules of its own, further tokens, or flags of tokens. Any other file is read alone. Code
    in the folder is not run, and nothing is downloaded.

    Raises:
        MissingExtraError: tokenizers or transformers is not installed.
        ConfigError: the file is no tokenizer, or a file beside it is a link out of the folder.
    """
    try:
        import tokenizers
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise MissingExtraError(f"the tokenizer {path}", error.name or "tokenizers", "hf") from error
    why = ""
    if path.name == FILE:
        for name in _READ:
            inside(path.parent, name)
        try:
            found = AutoTokenizer.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
            if getattr(found, "backend_tokenizer", None) is not None:
                return found, ""
            why = f"{type(found).__name__} does not use it"
        except Exception as error:  # noqa: BLE001 (any class of transformers may read the files; the note says why)
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    try:
        alone = PreTrainedTokenizerFast(tokenizer_file=str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is not an Exception
        raise ConfigError(
            f"data.tokenizer: {path} is not a tokenizer.json that tokenizers {tokenizers.__version__} reads: {error}"
        ) from error
    return alone, f"ids are those of {path} alone, since AutoTokenizer cannot read its folder ({why})" if why else ""


def unknown_in(content: dict[str, Any]) -> str | None:
    """Return the token that a tokenizer.json has for what its vocabulary cannot spell; None without one."""
    model = content["model"]
    number = model.get("unk_id")
    return model.get("unk_token") if number is None else model["vocab"][number][0]


def tokens_in(content: dict[str, Any]) -> set[str]:
    """Return the tokens in a tokenizer.json; transformers may add more, such as the default tokens of a class."""
    vocabulary = content["model"]["vocab"]
    words = vocabulary if isinstance(vocabulary, dict) else (word for word, _ in vocabulary)
    return {*words, *(token["content"] for token in content["added_tokens"])}


def written_around(backend: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a tokenizer's own call puts before the ids of a text, and behind them."""
    for probe in _probes(backend):
        bare = backend.encode(probe, add_special_tokens=False).ids
        if bare:
            whole = backend.encode(probe, add_special_tokens=True).ids
            at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
            return tuple(whole[:at]), tuple(whole[at + len(bare) :])
    return (), ()


def _probes(backend: Any) -> Iterator[str]:
    yield from _PROBES
    yield from backend.get_vocab(with_added_tokens=False)
