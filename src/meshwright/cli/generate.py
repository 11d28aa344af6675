"""``meshwright generate RUN|FOLDER --prompt "def "``: continue a text with a trained model, in one process.

It prints the prompt and its continuation, as the model writes it. FOLDER holds the files of a model of
transformers, or adapters of peft.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from meshwright.core.config import take_flags
from meshwright.core.config.ranges import FROM_0, FROM_1, SEED, Range
from meshwright.core.errors import ConfigError

from .arguments import open_model, refuse_rest

if TYPE_CHECKING:
    from meshwright.data.turns import ChatTemplate
    from meshwright.training.run.opened import Sampler


@dataclass(frozen=True)
class GenerateOptions:
    prompt: str | None = None
    """The text to continue (default: the run's sample.prompt)."""
    chat: bool | None = None
    """Put the prompt into the chat template of the model's tokenizer, and print the answer (default: the run's
    sample.chat); without --prompt, a conversation: a line is a question, /exit or Ctrl-D ends it."""
    template: str | None = None
    """File with a Jinja chat template, instead of the tokenizer's."""
    tokens: Annotated[int | None, FROM_0] = None
    """Tokens to write (default: the run's sample.tokens)."""
    temperature: Annotated[float | None, FROM_0] = None
    """0: always the likeliest token (default: the run's sample.temperature)."""
    top_k: Annotated[int, Range("0 (all tokens) or more", lambda value: value >= 0)] = 0
    """Sample among the so many likeliest tokens."""
    top_p: Annotated[float, Range("above 0, and at most 1 (all tokens)", lambda value: 0 < value <= 1)] = 1.0
    """Sample among the likeliest tokens whose probabilities reach this sum."""
    seed: Annotated[int | None, SEED] = None
    """Of sampling (default: the run's)."""
    step: int | None = None
    """A checkpoint other than the run's latest."""
    base: Path | None = None
    """Folder of the model beside which adapters were trained: a run's, or those of a FOLDER whose base is elsewhere."""
    tokenizer: str | None = None
    """Of a FOLDER that holds none: bytes, or a folder with a tokenizer.json."""
    dtype: str | None = None
    """Of a FOLDER (default: as its weights are stored)."""
    threads: Annotated[int | None, FROM_1] = None
    """Of torch on a CPU (default: by the model's size; OMP_NUM_THREADS counts too)."""
    trust: bool = False
    """Run the model code that the folder keeps."""


def run(argv: list[str]) -> int:
    """Print prompt and continuation."""
    options, argv = take_flags(GenerateOptions, argv)
    refuse_rest([word for word in argv if word.startswith("-")], "meshwright generate", GenerateOptions)
    if not argv:
        raise ConfigError(
            "meshwright generate needs the folder of a run, or of a model of transformers, like: meshwright generate"
            " runs/demo-… --prompt 'def '"
        )
    refuse_rest(argv[1:], "meshwright generate", GenerateOptions)
    names = ("step", "base", "tokenizer", "dtype")
    opened = open_model(argv[0], trusted=options.trust, **{name: getattr(options, name) for name in names})
    from meshwright.data.tokenizers import template_of
    from meshwright.training.model_source import template_folder
    from meshwright.training.run.occupancy import held_by
    from meshwright.training.run.opened import Sampler

    s, chat = opened.config.sample, None
    talks = bool(s.chat) if options.chat is None else options.chat
    if options.template is not None and not talks:
        raise ConfigError("--template is for --chat: add --chat, or leave it out")
    if talks:
        from meshwright.training.run.opened import template_for

        chat = template_for(opened, options.template)
    sampler = Sampler.of(
        opened,
        options.threads,
        temperature=s.temperature if options.temperature is None else options.temperature,
        seed=opened.config.seed if options.seed is None else options.seed,
        top_k=options.top_k,
        top_p=options.top_p,
    )
    length = s.tokens if options.tokens is None else options.tokens
    if opened.checkpoint is not None and held_by(opened.path):
        print(f"meshwright: {opened.words}; the run is still being trained", file=sys.stderr)
    try:
        if chat is not None:
            if options.chat is None:
                print("meshwright: in the chat template, as in training (--chat=false: as plain text)", file=sys.stderr)
            _converse(sampler, chat, options.prompt if options.chat else options.prompt or s.prompt, length)
        else:
            folder = template_folder(opened.path, opened.tokenizer)
            if options.chat is None and folder and template_of(folder) is not None:
                why = "" if opened.checkpoint is None else ", like the run's samples"
                print(f"meshwright: as plain text{why} (--chat: in the chat template)", file=sys.stderr)
            sampler.continue_text(s.prompt if options.prompt is None else options.prompt, length, _write)
            _write("\n")
    except KeyboardInterrupt:
        _write("\n")
        raise
    if reason := sampler.model.recomputes_text:
        print(f"meshwright: each token was computed from the whole text, since {reason}", file=sys.stderr)
    return 0


def _write(part: str) -> None:
    sys.stdout.write(part)
    sys.stdout.flush()


def _converse(sampler: Sampler, template: ChatTemplate, prompt: str | None, tokens: int) -> None:
    """Answer the prompt, or each line of standard input."""
    from meshwright.training.run.opened import Conversation

    conversation = Conversation(sampler, template)
    if prompt is not None:
        conversation.ask(prompt, tokens, _write)
        _write("\n")
        return
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"{conversation.sampler.opened.words}. A line is a question; /exit or Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                _write("\n")
            return
        if line.strip() == "/exit":
            return
        if line.strip():
            conversation.ask(line, tokens, _write)
            _write("\n")
