"""Turn text into ids and back, as the tokenizer's own call does.

The byte tokenizer needs no file; all others are read from a local tokenizer.json. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from meshwright.core.errors import ConfigError, MissingExtraError, nearest
from meshwright.core.files import inside, read_json, refuse_pointer

from .formats import digest_of_bytes

# --- read the files beside a tokenizer.json

SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
WITH_TOKENS = (SETTINGS, "special_tokens_map.json")
"""Files that name special tokens by their texts, in order of precedence."""
WITH_IDS = ("generation_config.json", "config.json")
"""Files of a model that name special tokens by their ids."""
EOS, EOS_ID = "eos_token", "eos_token_id"
CLASS, PLAIN_CLASS = "tokenizer_class", "PreTrainedTokenizerFast"
"""The key of the class that reads a tokenizer, and the one that reads a tokenizer.json as it is."""
COPIED = "_from_model_config"
"""The mark of a ``generation_config.json`` that transformers derived from ``config.json``."""


def read_settings(folder: Path, name: str = SETTINGS) -> dict[str, Any]:
    """Return the JSON object in a file beside a tokenizer; an empty dict if the file does not exist.

    Raises:
        ConfigError: the file is not a JSON object, a pointer of Git LFS, or a link out of the folder.
    """
    file = inside(folder, name)
    return read_json(file) if file.is_file() else {}


def special_tokens(folder: Path, name: str = SETTINGS) -> dict[str, str]:
    """Return the texts of bos_token, eos_token and the like; the file has a text, or a dict with its content."""
    found = {key: value for key, value in read_settings(folder, name).items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in found.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def template_of(folder: Path) -> str | None:
    """Return the chat template of a tokenizer, or None; of several templates, the one named "default".

    Raises:
        ConfigError: the template is not text.
    """
    file = inside(folder, TEMPLATE)
    if file.is_file():
        refuse_pointer(file)
        try:
            return file.read_text(encoding="utf-8")
        except ValueError as error:
            raise ConfigError(f"data.tokenizer: {file} is not UTF-8 text ({error})") from None
    found = read_settings(folder).get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next(
            (row.get("template") for row in found if isinstance(row, dict) and row.get("name") == "default"), None
        )
    if found is not None and not isinstance(found, str):
        raise ConfigError(
            f"data.tokenizer: {folder / SETTINGS} has a chat_template that is a {type(found).__name__}; it must be text"
        )
    return found


def stated_end(folder: Path, id_of: Callable[[str], int | None], token_of: Callable[[int], str | None]) -> str | None:
    """Return the token that ends a text, as the files beside a tokenizer.json name it; None if they name none.

    A model may stop at several tokens: of these the tokenizer's own end, else the first. An answer that is learnt with
    another end would not end. What ``generation_config.json`` only copied from ``config.json`` counts where the
    tokenizer names no end: it may be the default of the model's class.

    Raises:
        ConfigError: they name a token that the tokenizer lacks.
    """
    own = None
    for name in WITH_TOKENS:
        if (own := special_tokens(folder, name).get(EOS)) is not None:
            if id_of(own) is None:
                raise ConfigError(
                    f"data.tokenizer: {folder / name} has {EOS} = {own!r}, which tokenizer.json lacks: correct one of"
                    f" the two"
                )
            break
    chosen = WITH_IDS[0]
    if not read_settings(folder, chosen).get(COPIED) and (stops := _ends_of_model(folder, chosen, token_of)):
        return own if own in stops else stops[0]
    if own is not None:
        return own
    return next((stops[0] for name in WITH_IDS if (stops := _ends_of_model(folder, name, token_of))), None)


def _ends_of_model(folder: Path, name: str, token_of: Callable[[int], str | None]) -> list[str]:
    """Return the tokens at which a model stops, by one of its files."""
    settings = read_settings(folder, name)
    inner = settings.get("text_config")  # a model of several kinds of input
    found = settings.get(EOS_ID, inner.get(EOS_ID) if isinstance(inner, dict) else None)
    ids = [number for number in (found if isinstance(found, list) else [found]) if type(number) is int]
    tokens = [token_of(number) if 0 <= number < 2**32 else None for number in ids]
    if tokens and tokens[0] is None:
        raise ConfigError(
            f"data.tokenizer: {folder / name} has {EOS_ID} = {ids[0]}, and tokenizer.json has no such id: correct one"
            f" of the two"
        )
    return [token for token in tokens if token is not None]


# --- read a tokenizer as transformers reads it, so that ids are those of its own call

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
        ConfigError: the file is no tokenizer; or a file beside it is no JSON, a pointer of Git LFS, or a link
            out of the folder.
    """
    try:
        import tokenizers
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise MissingExtraError(f"the tokenizer {path}", error.name or "tokenizers", "hf") from error
    why = ""
    if path.name == FILE:
        for name in _READ:
            file = inside(path.parent, name)
            if file.is_file() and name != FILE:
                read_json(file) if name.endswith(".json") else refuse_pointer(file)
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


# --- turn text into ids and back

BYTES = "bytes"
"""The name of the tokenizer that needs no file."""


@runtime_checkable
class Tokenizer(Protocol):
    """The five members that a corpus needs of a tokenizer; any object that has them can be used."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, including ``end_of_document``."""
        ...

    @property
    def end_of_document(self) -> int:
        """The id that the corpus puts after each document."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash of everything that determines the ids: equal fingerprints mean equal ids for every text."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of ``text``: 1-D, of an integer dtype, without the tokens that begin and end a document."""
        ...

    def decode(self, ids) -> str:
        """Return the text of ``ids`` (any sequence of integers), without special tokens."""
        ...


@runtime_checkable
class AligningTokenizer(Tokenizer, Protocol):
    """A tokenizer that also reports which text each id stands for, as conversations need."""

    def encode_aligned(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return two 1-D arrays for each text: its ids, and the index of the last character that each id stands for."""
        ...


def encode_prompt(tokenizer: Tokenizer, text: str, *, is_rendered: bool = False) -> np.ndarray:
    """Return the ids of a prompt, with the tokens that the tokenizer's own call puts before a text.

    Args:
        is_rendered: a chat template wrote the text, with all the tokens that it wants.

    Raises:
        ConfigError: the text holds bytes that are not UTF-8, which Python keeps as lone surrogates.
    """
    wrong = next((place for place, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), None)
    if wrong is not None:
        raise ConfigError(f"the text to continue is not UTF-8 behind {text[max(0, wrong - 20) : wrong]!r}: write it so")
    ids = tokenizer.encode(text)
    return ids if is_rendered else np.concatenate([np.array(ids_before(tokenizer, ids), dtype=ids.dtype), ids])


def ids_before(tokenizer: Tokenizer, ids: np.ndarray) -> tuple[int, ...]:
    """Return the ids that go before those of a text: the tokenizer's, or none where the text spells them out itself."""
    own: tuple[int, ...] = getattr(tokenizer, "before", ())
    return () if tuple(ids[: len(own)].tolist()) == own else own


def encode_batch(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Return the ids of each text, by the tokenizer's own ``encode_batch`` if it has one."""
    several = getattr(tokenizer, "encode_batch", None)
    return several(texts) if several else [tokenizer.encode(text) for text in texts]


class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 for the end of a document: a vocabulary of 257."""

    vocab_size = 257
    end_of_document = 256
    fingerprint = "bytes-257-end-256"

    def encode(self, text: str) -> np.ndarray:
        """Return the UTF-8 bytes of ``text``; uint16 of shape (bytes,)."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def encode_aligned(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """See AligningTokenizer."""
        aligned = []
        for text in texts:
            ids = self.encode(text)
            aligned.append((ids, np.cumsum((ids & 0xC0) != 0x80) - 1))  # a byte 10xxxxxx continues a character
        return aligned

    def decode(self, ids) -> str:
        """Return the text of ``ids`` below 256; bytes that are not UTF-8 become the replacement character."""
        ids = np.asarray(ids).reshape(-1)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def __repr__(self) -> str:
        return "ByteTokenizer()"


class FileTokenizer:
    """A ``tokenizer.json`` of Hugging Face's ``tokenizers``, read from disk with the files beside it by transformers.

    Ids are those of the tokenizer's own call, in which a special token spelt out in the text is a token (unless
    ``split_special_tokens`` says otherwise). Truncation and padding are switched off: the file could cut a document.

    Args:
        path: the file, or a folder that holds a ``tokenizer.json``.
        end_of_document: special token that ends a document; by default the one that the files beside it name (the
            model's ``eos_token_id`` and the tokenizer's ``eos_token``; see ``stated_end``).

    Attributes:
        before, behind: ids that the tokenizer's own call puts before a text and behind it, such as those of ``<s>``.
        unknown: the id of what the vocabulary cannot spell; None without one.
        of_transformers: the tokenizer as transformers has it.
        note: a difference from the tokenizer's own call, as a sentence; "" where there is none.

    Raises:
        MissingExtraError: the package ``tokenizers`` or ``transformers`` is not installed.
        ConfigError: the file does not exist or is not a tokenizer; it lacks the token that is to end a document, or no
            file names one.
    """

    def __init__(self, path: str | Path, end_of_document: str | None = None):
        self.path = Path(path).expanduser()
        if self.path.is_dir():
            self.path = inside(self.path, FILE)
        if not self.path.is_file():
            raise ConfigError(
                f"data.tokenizer: {self.path} does not exist; name a tokenizer.json, a folder that holds one, or"
                f" '{BYTES}'"
            )
        refuse_pointer(self.path)
        self.of_transformers, self.note = read_tokenizer(self.path)
        self._tokenizer = self.of_transformers.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        content = self.path.read_bytes()
        written = json.loads(content)
        model, vocabulary = written["model"], written["model"]["vocab"]
        words = vocabulary if isinstance(vocabulary, dict) else [word for word, _ in vocabulary]
        # transformers may add more, such as the default tokens of a class
        in_file = {*words, *(token["content"] for token in written["added_tokens"])}
        number = model.get("unk_id")
        unknown = model.get("unk_token") if number is None else vocabulary[number][0]
        self.end_of_document: int = self._find_end(end_of_document, in_file)
        self.before, self.behind = written_around(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self.vocab_size: int = max(map(self._tokenizer.token_to_id, in_file), default=-1) + 1
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.unknown: int | None = self._tokenizer.token_to_id(unknown) if unknown else None
        self._strips_behind = np.array([i for i, token in added.items() if token.rstrip], dtype=np.int64)
        rules = json.loads(self._tokenizer.to_str())
        rules["model"] = {key: value for key, value in rules["model"].items() if key not in ("vocab", "merges")}
        kept = [rules[name] for name in ("normalizer", "pre_tokenizer", "added_tokens", "model")]
        kept += [self.before, self.behind, self._tokenizer.encode_special_tokens]
        digest = digest_of_bytes(content + json.dumps(kept, sort_keys=True).encode())
        self.fingerprint = f"file-{digest}-end-{self.end_of_document}"

    def _find_end(self, wanted: str | None, in_file: set[str]) -> int:
        special = self._special()
        if wanted is None:
            id_of = self._tokenizer.token_to_id
            # a token that transformers added has no row in a model's embedding
            wanted = stated_end(
                self.folder, lambda text: id_of(text) if text in in_file else None, self._tokenizer.id_to_token
            )
            if wanted is not None and wanted not in special:
                self._tokenizer.add_special_tokens([wanted])  # as transformers does with an eos_token
                special = self._special()
        if wanted in special:
            return special[wanted]
        held = ", ".join(sorted(special)) or "none"
        if wanted is not None:
            raise ConfigError(
                f"{self.path} has no special token '{wanted}'.{nearest(wanted, special)} Its special tokens: {held}"
            )
        raise ConfigError(
            f"data.tokenizer: no file beside {self.path} says which token ends a text ({EOS} in"
            f" {' or '.join(WITH_TOKENS)}, {EOS_ID} in {' or '.join(WITH_IDS)}). Its special tokens: {held}. Write"
            f' the one that the model was trained with to {self.folder / SETTINGS}, like {{"{EOS}": "</s>"}}'
        )

    def _special(self) -> dict[str, int]:
        return {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of ``text`` without ``before`` and ``behind``; uint32 of shape (tokens,)."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, computed on all processors."""
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in found]

    def encode_aligned(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """See AligningTokenizer; blanks that a token strips behind itself are not its characters."""
        aligned = []
        for text, encoding in zip(texts, self._tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
            ids = np.array(encoding.ids, dtype=np.uint32)
            last = np.array([max(end - 1, begin) for begin, end in encoding.offsets], dtype=np.int64)
            for i in np.flatnonzero(np.isin(ids, self._strips_behind)).tolist():
                begin, end = encoding.offsets[i]
                last[i] = begin + max(len(text[begin:end].rstrip()) - 1, 0)
            aligned.append((ids, last))
        return aligned

    @property
    def end_token(self) -> str:
        """The text of ``end_of_document``."""
        return self._tokenizer.id_to_token(self.end_of_document) or ""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings beside a copy of the tokenizer.json that make it this tokenizer, whatever model lies there.

        Its end may be that of its model, and its class that of the model's type.
        """
        settings = read_settings(self.folder)
        if special_tokens(self.folder).get(EOS) != self.end_token:
            settings[EOS] = self.end_token
        kind = type(self.of_transformers).__name__.replace("TokenizersBackend", PLAIN_CLASS)
        if not self.note and str(settings.get(CLASS)).removesuffix("Fast") != kind.removesuffix("Fast"):
            settings[CLASS] = kind
        return settings

    @property
    def folder(self) -> Path:
        """Folder of the tokenizer's other files, such as its chat template."""
        return self.path.parent

    def decode(self, ids) -> str:
        return self._tokenizer.decode(np.asarray(ids).reshape(-1).tolist(), skip_special_tokens=True)

    def spell_out(self, ids) -> str:
        """Return the text of ``ids``, including special tokens."""
        return self._tokenizer.decode(np.asarray(ids).reshape(-1).tolist(), skip_special_tokens=False)

    def __repr__(self) -> str:
        return f"FileTokenizer({str(self.path)!r})"


class IdTokenizer:
    """A tokenizer of written-out ids, for corpora whose own tokenizer is not available.

    Args:
        vocab_size: one more than the largest id.
        end_of_document: the id that ends a document.
    """

    def __init__(self, vocab_size: int, end_of_document: int):
        self.vocab_size, self.end_of_document = vocab_size, end_of_document
        self.fingerprint = f"ids-{vocab_size}-end-{end_of_document}"

    def encode(self, text: str) -> np.ndarray:
        """Parse ids separated by spaces, like "5 17 2"."""
        try:
            return np.array([int(word) for word in text.split()], dtype=np.uint32)
        except ValueError:
            raise ConfigError(
                f"data.tokenizer = 'ids:...' cannot encode words: write ids, like '5 17 2', not {text[:40]!r}"
            ) from None

    def decode(self, ids) -> str:
        return " ".join(str(int(i)) for i in np.asarray(ids).reshape(-1))

    def __repr__(self) -> str:
        return f"IdTokenizer({self.vocab_size}, {self.end_of_document})"


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name_or_path: ``bytes``, the path of a ``tokenizer.json`` or of a folder that holds one, or
            ``ids:VOCABULARY:END`` (see IdTokenizer).

    Raises:
        ConfigError: none of these. Names of models on a hub are not looked up: nothing is downloaded.
    """
    if name_or_path == BYTES:
        return ByteTokenizer()
    if name_or_path.startswith("ids:"):
        words = name_or_path.split(":")[1:]
        if not all(word.isdecimal() for word in words) or len(words) != 2 or not int(words[1]) < int(words[0]):
            raise ConfigError(
                f"data.tokenizer = {name_or_path!r} must be ids:VOCABULARY:END, the number of ids and the id (below it)"
                f" that ends a document, like ids:50257:50256"
            )
        return IdTokenizer(int(words[0]), int(words[1]))
    if name_or_path.strip() and Path(name_or_path).expanduser().exists():
        return FileTokenizer(name_or_path)
    raise ConfigError(
        f"data.tokenizer = {name_or_path!r} is not '{BYTES}' and no file or folder.{nearest(name_or_path, [BYTES])}"
        f" Nothing is downloaded here: for a model's tokenizer, save it first with"
        f" transformers.AutoTokenizer.from_pretrained({name_or_path!r}).save_pretrained('folder') and set"
        f" data.tokenizer = 'folder'"
    )


# --- turn ids into text as they come, without ever giving half a character

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
FAR = 64
"""Ids that are decoded again with each new one, at most twice so many: characters before them stay as they are."""


class Unfolding:
    """A text that grows by ids; all its parts together are what its tokenizer makes of all ids at once.

    A part is held back while it ends in bytes that are no character yet.

    Args:
        before: ids before the text, which decide how it is spelt: a space may go before a word, and not before a text.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer, self._ids = tokenizer, [int(i) for i in before]
        self._given = self._tokenizer.decode(self._ids)

    def more(self, *new: int) -> str:
        """Return the text that the next ids add, "" where they end within a character."""
        self._ids += map(int, new)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(UNKNOWN) or not text.startswith(self._given):
            return ""
        part, self._given = text[len(self._given) :], text
        if len(self._ids) >= 2 * FAR:  # the text is whole here, so what comes does not depend on far ids
            self._ids = self._ids[-FAR:]
            self._given = self._tokenizer.decode(self._ids)
        return part

    def rest(self) -> str:
        """Return what was held back, at the end of the text."""
        text = self._tokenizer.decode(self._ids)
        common = next((i for i, (a, b) in enumerate(zip(text, self._given, strict=False)) if a != b), None)
        return text[len(self._given) if common is None else common :]
