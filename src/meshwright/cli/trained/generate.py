"""``meshwright generate RUN|FOLDER --prompt "def "``: continue a text with a trained model, in one process."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.arguments import open_model, refuse_rest, take_flag, take_option, take_trust
from meshwright.core.errors import ConfigError

if TYPE_CHECKING:
    from meshwright.data.text.turns import ChatTemplate
    from meshwright.training.run.opened import Sampler

FLAGS = (
    "--prompt, --chat, --template, --tokens, --temperature, --top_k, --top_p, --seed, --step, --base, --tokenizer,"
    " --dtype, --threads, --trust"
)


def run(argv: list[str]) -> int:
    """Print prompt and continuation, as the model writes it. FOLDER holds a model of transformers, or adapters of peft.

    --prompt TEXT          the text to continue (default: the run's sample.prompt)
    --chat                 put the prompt into the chat template of the model's tokenizer, and print the answer; without
                           --prompt, a conversation: a line is a question, /exit or Ctrl-D ends it
    --template FILE        a Jinja chat template, instead of the tokenizer's
    --tokens N             tokens to write (default: the run's sample.tokens)
    --temperature X        0: always the likeliest token (default: the run's sample.temperature)
    --top_k N, --top_p X   sample among the N likeliest tokens, or among those whose probabilities reach X
    --seed N               default: the run's
    --step N               a checkpoint other than the run's latest
    --base FOLDER          the model beside which the run trained adapters, or where that of a folder of adapters is
    --tokenizer NAME       of a FOLDER that holds none: bytes, or a folder with a tokenizer.json
    --dtype NAME           of a FOLDER (default: as its weights are stored)
    --threads N            of torch on a CPU (default: by the model's size; OMP_NUM_THREADS counts too)
    --trust                run the model code that the folder keeps
    """
    prompt, argv = take_option(argv, "--prompt", str)
    is_chat, argv = take_flag(argv, "--chat")
    template, argv = take_option(argv, "--template", str)
    tokens, argv = take_option(argv, "--tokens", int)
    temperature, argv = take_option(argv, "--temperature", float)
    top_k, argv = take_option(argv, "--top_k", int)
    top_p, argv = take_option(argv, "--top_p", float)
    seed, argv = take_option(argv, "--seed", int)
    step, argv = take_option(argv, "--step", int)
    base, argv = take_option(argv, "--base", Path)
    tokenizer, argv = take_option(argv, "--tokenizer", str)
    dtype, argv = take_option(argv, "--dtype", str)
    threads, argv = take_option(argv, "--threads", int)
    trusted, argv = take_trust(argv)
    _check(tokens, temperature, seed, top_k, top_p, threads)
    if not argv:
        raise ConfigError(
            "meshwright generate needs the folder of a run, or of a model of transformers, like: meshwright generate"
            " runs/demo-… --prompt 'def '"
        )
    refuse_rest(argv[1:], "meshwright generate", FLAGS)
    if template is not None and not is_chat:
        raise ConfigError("--template is for --chat: add --chat, or leave it out")
    opened = open_model(argv[0], step=step, base=base, tokenizer=tokenizer, dtype=dtype, trusted=trusted)
    from meshwright.training.run.opened import Sampler

    s = opened.config.sample
    chat = None
    if is_chat:
        from meshwright.training.run.opened import template_for

        chat = template_for(opened, template)
    sampler = Sampler.of(
        opened,
        threads,
        temperature=s.temperature if temperature is None else temperature,
        seed=opened.config.seed if seed is None else seed,
        top_k=top_k or 0,
        top_p=1.0 if top_p is None else top_p,
    )
    length = s.tokens if tokens is None else tokens
    if opened.is_being_trained:
        print(f"meshwright: {opened.words}; the run is still being trained", file=sys.stderr)
    try:
        if chat is not None:
            _converse(sampler, chat, prompt, length)
        else:
            sampler.continue_text(s.prompt if prompt is None else prompt, length, _write)
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
    while (line := _line(is_terminal)) is not None:
        if line.strip():
            conversation.ask(line, tokens, _write)
            _write("\n")


def _line(is_terminal: bool) -> str | None:
    """Read a question; None at the end of the conversation."""
    try:
        line = input("> " if is_terminal else "")
    except EOFError:
        if is_terminal:
            _write("\n")
        return None
    return None if line.strip() == "/exit" else line


def _check(
    tokens: int | None,
    temperature: float | None,
    seed: int | None,
    top_k: int | None,
    top_p: float | None,
    threads: int | None,
) -> None:
    """Raise ConfigError for a flag out of the range that the config has for it."""
    for flag, value, is_legal, words in (
        ("--tokens", tokens, lambda value: value >= 0, "0 or more"),
        ("--temperature", temperature, lambda value: 0 <= value < math.inf, "a finite number, 0 or more"),
        ("--seed", seed, lambda value: 0 <= value < 2**63, "from 0 to 2**63 - 1"),
        ("--top_k", top_k, lambda value: value >= 0, "0 (all tokens) or more"),
        ("--top_p", top_p, lambda value: 0 < value <= 1, "above 0, and at most 1 (all tokens)"),
        ("--threads", threads, lambda value: value >= 1, "1 or more"),
    ):
        if value is not None and not is_legal(value):
            raise ConfigError(f"{flag} = {value} is out of range: it must be {words}")
