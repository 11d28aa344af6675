"""Write a conversation as the text that a model sees, by its tokenizer's Jinja template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.core.errors import ConfigError, MissingExtraError

from .tokenizer_settings import special_tokens, template_of

Message = dict[str, Any]


class ChatTemplate:
    """A template and the special tokens that it may name.

    Args:
        text: Jinja, as ``tokenizer_config.json`` or ``chat_template.jinja`` holds it.
        special_tokens: names such as ``bos_token``, and their texts.

    Raises:
        MissingExtraError: the package ``transformers``, whose renderer is used, is not installed.
    """

    def __init__(self, text: str, special_tokens: dict[str, str]):
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise MissingExtraError("a chat template", "transformers", "hf") from error
        self.text, self.special_tokens, self._render = text, special_tokens, render_jinja_template

    def render(self, messages: list[Message], *, prompts_answer: bool = False, **others: Any) -> str:
        """Return the text of ``messages``; with ``prompts_answer`` up to where the assistant is to go on.

        Raises:
            ValueError: the template refuses these messages, in its own words.
        """
        try:
            rendered = self._render(
                [messages],
                chat_template=self.text,
                add_generation_prompt=prompts_answer,
                **self.special_tokens,
                **others,
            )
        except Exception as error:
            raise ValueError(f"the chat template refuses it ({type(error).__name__}: {error})") from error
        return (rendered[0] if isinstance(rendered, tuple) else rendered)[0]


def load_template(path: str, folder: Path | None) -> ChatTemplate:
    """Return the template in the file ``path``, or, where that is empty, the one that lies with the tokenizer in
    ``folder``.

    Raises:
        ConfigError: there is none.
    """
    tokens = special_tokens(folder) if folder else {}
    if path:
        file = Path(path).expanduser()
        if not file.is_file():
            raise ConfigError(f"data.template = {path!r} does not exist; it is a file that holds a Jinja template")
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), tokens)
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.template = {path!r} is no text ({error})") from None
    text = template_of(folder) if folder else None
    if text is None:
        where = f"the tokenizer in {folder} has" if folder else "this tokenizer has"
        raise ConfigError(
            f"{where} no chat template (looked for chat_template.jinja, and chat_template in tokenizer_config.json),"
            f" so conversations"
            f" cannot be written out. Save one with the tokenizer, name a file with data.template, or choose a"
            f" tokenizer made for chat"
        )
    return ChatTemplate(text, tokens)
