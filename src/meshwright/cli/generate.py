"""``meshwright generate RUN --prompt "def "``: continue a text with a trained run, in one process."""

from __future__ import annotations

import math
from pathlib import Path

from meshwright.core.errors import ConfigError

from .arguments import open_run, refuse_rest, take_option, take_trust


def run(argv: list[str]) -> int:
    """Print prompt and continuation.

    Flags: ``--prompt``, ``--tokens``, ``--temperature``, ``--seed`` (each by default as the run's config says) and
    ``--step`` (a checkpoint other than the latest); ``--base``, the model beside which the run trained adapters;
    ``--trust`` runs the model code that the run keeps.
    """
    if "--help" in argv or "-h" in argv:
        print(f"{__doc__}\n\n{run.__doc__}")
        return 0
    prompt, argv = take_option(argv, "--prompt", str)
    tokens, argv = take_option(argv, "--tokens", int)
    temperature, argv = take_option(argv, "--temperature", float)
    seed, argv = take_option(argv, "--seed", int)
    step, argv = take_option(argv, "--step", int)
    base, argv = take_option(argv, "--base", Path)
    trusted, argv = take_trust(argv)
    _check(tokens, temperature, seed)
    if not argv:
        raise ConfigError(
            "meshwright generate needs the folder of a run, like: meshwright generate runs/demo-… --prompt 'def '"
        )
    folder, config = open_run(argv[0], trusted=trusted)
    refuse_rest(argv[1:], "meshwright generate", "--prompt, --tokens, --temperature, --seed, --step, --base, --trust")
    from meshwright.training.run.sampling import Sampler

    sampler = Sampler(folder, config, step, base)
    s = config.sample
    text = sampler.continue_text(
        s.prompt if prompt is None else prompt,
        s.tokens if tokens is None else tokens,
        temperature=s.temperature if temperature is None else temperature,
        seed=config.seed if seed is None else seed,
    )
    print(text)
    return 0


def _check(tokens: int | None, temperature: float | None, seed: int | None) -> None:
    """Raise ConfigError for a flag out of the range that the config has for it."""
    for flag, value, is_legal, words in (
        ("--tokens", tokens, lambda value: value >= 0, "0 or more"),
        ("--temperature", temperature, lambda value: 0 <= value < math.inf, "a finite number, 0 or more"),
        ("--seed", seed, lambda value: 0 <= value < 2**63, "from 0 to 2**63 - 1"),
    ):
        if value is not None and not is_legal(value):
            raise ConfigError(f"{flag} = {value} is out of range: it must be {words}")
