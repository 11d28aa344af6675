"""Render a conversation as the text that a model reads, with its tokenizer's Jinja template."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from meshwright.core.errors import ConfigError, MissingExtraError

from .tokenizer_settings import special_tokens, template_of
from .tokenizers import Tokenizer

Message = dict[str, Any]

ANSWER = "\N{OBJECT REPLACEMENT CHARACTER}"
"""An answer that is found again in a rendered conversation."""
_MARK = re.compile(r"{%-?\s*generation\s*-?%}")


class ChatTemplate:
    """A chat template with the special tokens that it may use.

    Args:
        text: Jinja source, from ``tokenizer_config.json`` or ``chat_template.jinja``.
        special_tokens: names such as ``bos_token``, and their texts.

    Raises:
        MissingExtraError: the package ``transformers``, which has the renderer, is not installed.
    """

    def __init__(self, text: str, special_tokens: dict[str, str]):
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise MissingExtraError("a chat template", "transformers", "hf") from error
        self.text, self.special_tokens, self._render = text, special_tokens, render_jinja_template
        self.has_marks = bool(_MARK.search(text))
        """Whether the template marks what the assistant writes ({% generation %})."""

    def render(self, messages: list[Message], *, prompts_answer: bool = False, **others: Any) -> str:
        """Return the text of ``messages``; with ``prompts_answer`` followed by the start of an assistant's turn.

        Raises:
            ValueError: the template fails on these messages; the text includes its error.
        """
        return self._rendered(messages, add_generation_prompt=prompts_answer, **others)[0][0]

    def render_marked(self, messages: list[Message], **others: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of ``messages``, and where each part that the template marks as written by the assistant
        begins and ends.

        Raises:
            ValueError: as ``render``.
        """
        texts, spans = self._rendered(messages, return_assistant_tokens_mask=True, **others)
        return texts[0], [(begin, end) for begin, end in spans[0] if begin < end]

    def _rendered(self, messages: list[Message], **options: Any) -> tuple[list[str], list[Any]]:
        try:
            texts, spans = self._render([messages], chat_template=self.text, **self.special_tokens, **options)
        except Exception as error:
            raise ValueError(f"the chat template refuses it ({type(error).__name__}: {error})") from error
        return list(texts), list(spans)


def load_template(path: str, folder: Path | None) -> ChatTemplate:
    """Return the template in the file ``path``, or if that is empty, that of the tokenizer in ``folder``.

    Raises:
        ConfigError: the template does not exist or is not text.
    """
    tokens = special_tokens(folder) if folder else {}
    if path:
        file = Path(path).expanduser()
        if not file.is_file():
            raise ConfigError(f"data.template = {path!r} does not exist; it is a file that holds a Jinja template")
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), tokens)
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.template = {path!r} is not UTF-8 text ({error})") from None
    text = template_of(folder) if folder else None
    if text is None:
        where = f"the tokenizer in {folder} has" if folder else "this tokenizer has"
        raise ConfigError(
            f"{where} no chat template (looked for chat_template.jinja, and chat_template in tokenizer_config.json),"
            f" so conversations cannot be written out. Save one with the tokenizer, name a file with data.template, or"
            f" choose a tokenizer made for chat"
        )
    return ChatTemplate(text, tokens)


def ends_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> set[int]:
    """Return the id that a template puts behind an assistant's answer, if it is a special token."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        _, found, behind = template.render(messages).rpartition(ANSWER)
    except ValueError:
        return set()
    ids = tokenizer.encode(behind)[:1].tolist() if found and behind.strip() else []
    return {i for i in ids if not tokenizer.decode([i])}
