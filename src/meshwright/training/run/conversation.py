"""Hold a conversation with an opened model, in its chat template."""

from __future__ import annotations

from pathlib import Path

from meshwright.core.errors import ConfigError
from meshwright.data.text.chat import ChatTemplate, Message, ends_of_turn, load_template
from meshwright.data.text.tokenizer_settings import TEMPLATE
from meshwright.data.text.tokenizers import encode_prompt
from meshwright.data.text.unfolding import Unfolding
from meshwright.training.tokenizer import template_file, template_folder

from .opened import Opened
from .sampling import Sampler, Write


def template_for(opened: Opened, file: str | None) -> ChatTemplate:
    """Return the chat template in ``file``, or that of the model's tokenizer.

    A run's config may name a file outside its folder, which is not opened unasked.

    Raises:
        ConfigError: there is none.
    """
    named, folder = template_file(opened.config), template_folder(opened.path, opened.tokenizer)
    if file is None and named and not (folder and (folder / TEMPLATE).is_file()):
        raise ConfigError(
            f"{opened.path} trained with the chat template {named}, which is not its own file: give it with"
            f" --template {named}"
        )
    if file is not None and not Path(file).expanduser().is_file():
        raise ConfigError(f"--template {file} does not exist; it is a file that holds a Jinja template")
    try:
        return load_template(file or "", folder)
    except ConfigError as error:
        if file is not None:
            raise
        where = f"the tokenizer in {folder}" if folder else f"the tokenizer of {opened.path}"
        raise ConfigError(
            f"--chat: {where} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json):"
            f" give one with --template FILE, or leave --chat out to continue the prompt as plain text"
        ) from error


class Conversation:
    """A conversation that grows by a question and the model's answer."""

    def __init__(self, sampler: Sampler, template: ChatTemplate):
        self.sampler, self.template, self.messages = sampler, template, list[Message]()
        self._ends = ends_of_turn(template, sampler.opened.tokenizer)

    def prompt(self) -> list[int]:
        """Return the ids of the conversation so far, up to the answer."""
        try:
            text = self.template.render(self.messages, prompts_answer=True)
        except ValueError as error:
            raise ConfigError(f"--chat: {error}") from None
        return [int(i) for i in encode_prompt(self.sampler.opened.tokenizer, text, is_rendered=True)]

    def ask(self, question: str, tokens: int, write: Write) -> str:
        """Write the answer of at most ``tokens`` tokens as it comes, and return it; both join the conversation."""
        self.messages.append({"role": "user", "content": question})
        ids, tokenizer = self.prompt(), self.sampler.opened.tokenizer
        parts: list[str] = []

        def give(part: str) -> None:
            parts.append(part)
            write(part)

        self.sampler.follow(ids, Unfolding(tokenizer, ids), tokens, give, stop=self._ends)
        answer = "".join(parts)
        self.messages.append({"role": "assistant", "content": answer})
        return answer
