"""Load the tokenizer that the config names, and store it with the run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from meshwright.checkpoint.tensor_files import holds_weights
from meshwright.core.errors import ConfigError
from meshwright.core.files import inside, replace_text
from meshwright.data import Tokenizer, load_tokenizer
from meshwright.data.cache import BPE, trained_bpe, vocabulary_of
from meshwright.data.tokenizers import (
    BYTES,
    SETTINGS,
    TEMPLATE,
    FileTokenizer,
    IdTokenizer,
    encode_prompt,
    read_settings,
)
from meshwright.data.turns import ChatTemplate, load_template

from .config import Config
from .optim.fine_tuning import GREETING

FOLDER = "tokenizer"
"""Subfolder of a run with a copy of its tokenizer's files."""

AUTO = "auto"
_FILES = ("tokenizer.json", SETTINGS, TEMPLATE, "special_tokens_map.json", "added_tokens.json")


def tokenizer_name(config: Config) -> str:
    """Return ``data.tokenizer``, with "auto" resolved to the tokenizer beside a Hugging Face model, or to bytes.

    Raises:
        ConfigError: the model has weights, but its tokenizer is not beside it.
    """
    if config.data.tokenizer != AUTO:
        return config.data.tokenizer
    folder = Path(config.model.hf).expanduser() if config.model.hf else None
    if folder is None or not folder.is_dir():
        return BYTES
    if (folder / _FILES[0]).is_file():
        return str(folder)
    if holds_weights(folder):
        raise ConfigError(
            f"data.tokenizer: {folder} has weights and no {_FILES[0]}, so the meaning of their token ids is unknown:"
            f" name the tokenizer that they were trained with (or bytes)"
        )
    return BYTES


def run_tokenizer(config: Config, say: Callable[[str], None] = print) -> Tokenizer:
    """Return the tokenizer that ``data.tokenizer`` names.

    For an existing run: its stored copy, if the tokenizer was trained for the run or is gone.

    Raises:
        ConfigError: there is no such tokenizer.
    """
    name = tokenizer_name(config)
    kept = kept_tokenizer(Path(config.run)) if config.run else None
    if kept and (name.startswith(BPE) or not Path(name).expanduser().exists()):
        return kept
    if name.startswith(BPE):
        return trained_bpe(name, config.data.mixture or (config.data,), config.data.cache, say)
    return load_tokenizer(name)


def planned_tokenizer(config: Config) -> Tokenizer:
    """Return a tokenizer for planning: one that is yet to be trained has only a vocabulary size."""
    name = tokenizer_name(config)
    return IdTokenizer(vocabulary_of(name), 0) if name.startswith(BPE) else load_tokenizer(name)


def kept_tokenizer(run: Path) -> FileTokenizer | None:
    """Return the tokenizer stored in a run's folder; None without one (bytes and ids need no files)."""
    return FileTokenizer(run / FOLDER) if (run / FOLDER / _FILES[0]).is_file() else None


def own_tokenizer(config: Config, run: Path) -> Tokenizer:
    """Return a run's tokenizer without reading files outside its folder: its stored copy, bytes, or ids.

    Raises:
        ConfigError: the run has no copy; the path that its config names may hold any tokenizer.
    """
    name = tokenizer_name(config)
    if (kept := kept_tokenizer(run)) is not None:
        return kept
    if name == BYTES or name.startswith("ids:"):
        return load_tokenizer(name)
    raise ConfigError(
        f"{run} has no {FOLDER}/{_FILES[0]}, and the tokenizer that its config.toml names (data.tokenizer = {name})"
        f" is not its own: copy that tokenizer's files to {run / FOLDER}"
    )


def template_file(config: Config) -> str:
    """Return the file of the chat template that the config names, the first one of a mixture; "" without one."""
    return next((part.template for part in (config.data.mixture or (config.data,)) if part.template), "")


def in_chat_template(config: Config, tokenizer: Tokenizer, message: str) -> str | None:
    """Write a user's message out by the chat template of a run's data, up to the answer; None without a template."""
    try:
        return _asked(load_template(template_file(config), getattr(tokenizer, "folder", None)), message)
    except (ConfigError, ValueError):
        return None


def _asked(template: ChatTemplate, message: str) -> str:
    found = template.render([{"role": "user", "content": message}], prompts_answer=True)
    if message in found:
        return found
    parts = [{"type": "text", "text": message}]  # templates of models with images may know contents of parts alone
    return template.render([{"role": "user", "content": parts}], prompts_answer=True)


def template_folder(run: Path, tokenizer: Tokenizer) -> Path | None:
    """Return the folder with the chat template that a run trained with: its own, or the tokenizer's."""
    return run / FOLDER if (run / FOLDER / TEMPLATE).is_file() else getattr(tokenizer, "folder", None)


def prompt_ids(prompt: str, tokenizer: Tokenizer, run: Path) -> list[int]:
    """Return the ids of a text to continue: those of the tokenizer's own call, but the prompt that a run chose for
    itself by its chat template has the ids that the template gives it."""
    try:
        is_rendered = prompt == _asked(load_template("", template_folder(run, tokenizer)), GREETING)
    except (ConfigError, ValueError):
        is_rendered = False
    return [int(i) for i in encode_prompt(tokenizer, prompt, is_rendered=is_rendered)]


def keep_tokenizer(tokenizer: Tokenizer, run: Path, template: str = "") -> None:
    """Copy a tokenizer's files into the folder of a run, once.

    Args:
        template: file of the chat template that the run trains with; "": the tokenizer's own.
    """
    folder = run / FOLDER
    if template and not (folder / TEMPLATE).is_file():
        folder.mkdir(exist_ok=True)
        replace_text(folder / TEMPLATE, Path(template).expanduser().read_text(encoding="utf-8"))
    if not isinstance(tokenizer, FileTokenizer) or (folder / _FILES[0]).is_file():
        return
    folder.mkdir(exist_ok=True)
    for name in reversed(_FILES):  # tokenizer.json last: it marks the copy as complete
        file = tokenizer.path if name == _FILES[0] else inside(tokenizer.folder, name)
        if name == SETTINGS and (settings := tokenizer.settings) != read_settings(tokenizer.folder):
            replace_text(folder / name, json.dumps(settings, indent=2) + "\n")
        elif file.is_file() and not (name == TEMPLATE and template):
            shutil.copyfile(file, folder / f"{name}.new")
            (folder / f"{name}.new").replace(folder / name)
