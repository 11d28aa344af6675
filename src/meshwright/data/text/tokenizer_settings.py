"""Read the files beside a tokenizer.json: special tokens, the chat template, the end-of-text token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.core.errors import ConfigError
from meshwright.core.files import inside, refuse_pointer

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
        ConfigError: the file is not a JSON object, or is a link out of the folder.
    """
    file = inside(folder, name)
    if file.is_file():
        refuse_pointer(file)
    try:
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"data.tokenizer: {file} is no JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigError(
            f"data.tokenizer: {file} holds a {type(settings).__name__}, and settings by name were expected"
        )
    return settings


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
    own = _end_of_tokenizer(folder, id_of)
    chosen = WITH_IDS[0]
    if not read_settings(folder, chosen).get(COPIED) and (stops := _ends_of_model(folder, chosen, token_of)):
        return own if own in stops else stops[0]
    if own is not None:
        return own
    return next((stops[0] for name in WITH_IDS if (stops := _ends_of_model(folder, name, token_of))), None)


def _end_of_tokenizer(folder: Path, id_of: Callable[[str], int | None]) -> str | None:
    for name in WITH_TOKENS:
        if (text := special_tokens(folder, name).get(EOS)) is not None:
            if id_of(text) is None:
                raise ConfigError(
                    f"data.tokenizer: {folder / name} has {EOS} = {text!r}, which tokenizer.json lacks: correct one"
                    f" of the two"
                )
            return text
    return None


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
