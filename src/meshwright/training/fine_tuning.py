"""Choose what nobody set where a run begins from weights in files: rate, weight decay, rows, batch, length, prompt.

Torch-free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.checkpoint.mirror import model_folder
from meshwright.checkpoint.store import is_remote
from meshwright.core.config import is_unset, to_dict, unset
from meshwright.core.dtypes import canonical_dtype, epochs_text
from meshwright.core.errors import ConfigError
from meshwright.core.names import LENGTHS, WIDTH
from meshwright.introspection.adapter_request import CONFIG, AdapterFolder, holds_adapters
from meshwright.planning.optimizer import kind_of
from meshwright.training.run.occupancy import Begun, latest_checkpoint

if TYPE_CHECKING:
    from meshwright.training.config import Config, ModelConfig

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
LONGEST_ROW = 2048
SHORT_ROW, SHORT_TEXT = 64, 512
"""Tokens below which rows of whole documents, and those of text, are not shortened to make more steps."""
FEW_STEPS, ENOUGH_STEPS = 30, 60
"""Steps below which a run is told that they are few, and those that the choice of a batch is to make."""
CHANGED = 0.02
"""Relative change of a loss that is told at the end."""
LEARNT = 0.05
"""Loss in nats per token below which no longer run is advised."""
PREFERENCE, TEXT = "preference", "text"
"""Tasks of data whose length and rate differ from those of conversations and answers."""
GREETING = "Hello"
OTHER_PROMPT = "The"


class Rates(NamedTuple):
    """Peak learning rates of AdamW for adapters, and for a whole model."""

    adapters: float
    whole: float


RATES = Rates(2e-4, 1e-5)
"""Of QLoRA (arXiv 2305.14314) for adapters, and as instruction tuning of whole models commonly has it."""
USUAL_WIDTH, HIGHEST_RATE = 4096, 3e-3
"""The rates are those of models of this width, and fall with it (arXiv 2203.03466; QLoRA's 65B has half its 7B's rate);
no narrow model gets a higher one than this."""
PREFERENCE_RATES = Rates(5e-5, 1e-6)
"""On pairs smaller ones, since beta holds the model to its first weights: the default of trl for whole models."""
RATE_FACTORS = {"adamw": 1.0, "adam": 1.0, "schedule_free_adamw": 1.0, "muon": 1.0, "adafactor": 1.0, "lion": 0.2}
"""By optimizer; those that are not listed (sgd) keep their default, since their steps have another scale."""
EPOCHS = {PREFERENCE: (1.0, 3.0), TEXT: (1.0, 3.0)}
OTHER_EPOCHS = (3.0, 10.0)
"""Epochs of a task, and the most where these make few steps."""


class Counted(NamedTuple):
    """What is known of a run's data once it is read, to choose how long the run is and how large its steps.

    Attributes:
        rows: number of rows of all sources together, once each, by their length in tokens.
        shortest: least length of rows that cuts no document.
        ranks: data ranks, which a step's rows are dealt to; of pairs of rows, twice as many.
        accepts: returns whether a layout carries a config's batch; None: the batch stays as it is.
        begun: where the run goes on.
    """

    rows: Callable[[int], int]
    shortest: int = LONGEST_ROW
    ranks: int = 1
    accepts: Callable[[Config], bool] | None = None
    begun: Begun = Begun()


class WeightsElsewhere(str):
    """A ``model.hf`` in a forecast: its weights need not lie here."""

    __slots__ = ()


def is_fine_tuning(config: Config) -> bool:
    """Return whether weights lie in the folder that a config names as its model, or elsewhere."""
    hf = config.model.hf
    return isinstance(hf, WeightsElsewhere) or (bool(hf) and has_weights(hf))


def has_weights(hf: str) -> bool:
    return any((Path(hf).expanduser() / name).is_file() for name in WEIGHTS)


def length_follows(config: Config) -> bool:
    """Return whether a run's steps are known only once its data has been counted."""
    return config.epochs is not None or (is_unset(config.steps) and is_fine_tuning(config))


def fetched(hf: str) -> str:
    """Return ``model.hf``, of an address the folder that stands for it."""
    return str(model_folder(hf)) if is_remote(hf) else hf


def before_data(config: Config) -> Config:
    """Return a config with rows, rate and weight decay chosen where they are unset; they stay marked as unset.

    A model at an address becomes the folder that stands for it (``model_folder``), a folder of adapters their base,
    with the request for such adapters (``with_base``).

    Where no weights in files are trained, only rows change that are longer than the model knows. Training, forecasts,
    rehearsals and evaluation all ask here, so they take the same values. Adapters are always trained beside weights,
    although in a forecast these may lie elsewhere.
    """
    config = with_base(replace(config, model=replace(config.model, hf=fetched(config.model.hf))))
    longest = _longest(config.model)
    if not (is_fine_tuning(config) or (config.model.hf and config.adapters is not None)):
        rows = min(int(config.data.seq_len), longest)
        is_shorter = is_unset(config.data.seq_len) and rows < config.data.seq_len
        return replace(config, data=replace(config.data, seq_len=unset(rows))) if is_shorter else config
    return _beside_weights(config, longest)


def _beside_weights(config: Config, longest: int) -> Config:
    data, optimizer = config.data, _with_rate(config, RATES)
    if is_unset(data.seq_len):
        data = replace(data, seq_len=unset(min(LONGEST_ROW, longest)))
    if is_unset(optimizer.weight_decay) and "weight_decay" in kind_of(config.optimizer.kind).keys:
        optimizer = replace(optimizer, weight_decay=unset(0.0))
    return replace(config, data=data, optimizer=optimizer)


def batch_follows(config: Config) -> bool:
    """Return whether a run's rows per step are known only once its data has been counted."""
    return is_unset(config.batch.global_batch) and is_fine_tuning(config)


def after_data(config: Config, data: Counted | None, tasks: Sequence[str], *, talks: bool) -> Config:
    """Return a config with batch, steps, the rate of preference pairs, and the prompt of samples chosen where they are
    unset.

    Steps are whole and no fewer than the epochs need, so ``epochs`` becomes the number that they make.

    Args:
        data: the rows of all sources; None: not counted.
        tasks: tasks of the sources.
        talks: whether the prompt of samples goes into the chat template.
    """
    sample = replace(config.sample, chat=talks or config.sample.chat)
    if is_unset(sample.prompt) and (talks or is_fine_tuning(config)):
        sample = replace(sample, prompt=unset(GREETING if talks else OTHER_PROMPT))
    config = replace(config, sample=sample)
    usual, longest = max((EPOCHS.get(task, OTHER_EPOCHS) for task in tasks), default=OTHER_EPOCHS)
    epochs, most = config.epochs, config.epochs
    if is_fine_tuning(config):
        if PREFERENCE in tasks:
            config = replace(config, optimizer=_with_rate(config, PREFERENCE_RATES))
        if epochs is None and is_unset(config.steps):
            epochs, most = usual, usual if config.data.mixture or config.data.max_epochs else longest
    if data is not None and batch_follows(config):  # further epochs are further steps
        config = with_enough_steps(config, data, min(epochs or usual, usual))
    if epochs is None or data is None:
        return config
    rows, batch = data.rows(config.data.seq_len), config.batch.global_batch
    if most is not None and most > epochs and is_fine_tuning(config):
        epochs = min(most, max(epochs, ENOUGH_STEPS * batch / rows))
    steps = max(1, data.begun.steps + math.ceil((epochs * rows - data.begun.rows) / batch - 1e-9))
    return replace(config, epochs=data.begun.rows_at(steps, batch) / rows, steps=unset(steps))


def with_enough_steps(config: Config, data: Counted, epochs: float) -> Config:
    """Return a config whose data makes enough steps: of fewer rows, and if these are not enough, of shorter ones."""
    if data.accepts is None:
        return config
    wanted = ENOUGH_STEPS if is_unset(config.steps) else min(config.steps, ENOUGH_STEPS)
    usual, length = int(config.batch.global_batch), int(config.data.seq_len)
    sizes = [size for power in range(usual.bit_length()) if (size := usual >> power) % data.ranks == 0] or [usual]
    ladder = [(size, length) for size in sizes]
    while is_unset(config.data.seq_len) and length // 2 >= data.shortest and data.rows(length // 2) > data.rows(length):
        length //= 2
        ladder.append((sizes[-1], length))
    enough = (n for n, (size, row) in enumerate(ladder) if epochs * data.rows(row) / size > wanted - 1)
    for size, row in reversed(ladder[: next(enough, len(ladder) - 1) + 1]):
        made = replace(config, batch=replace(config.batch, global_batch=unset(size)))
        if row != config.data.seq_len:
            made = replace(made, data=replace(config.data, seq_len=unset(row)))
        if (size, row) == ladder[0] or data.accepts(made):
            return made
    return config


def chosen(config: Config) -> str:
    """Name the values that were chosen because nobody set them, by their keys; "" where there are none."""
    return of_unset(config) if is_fine_tuning(config) else ""


def why_chosen(before: Config, after: Config, data: Counted) -> str:
    """Return why the rows of a step, or the epochs, are not the usual ones; "" where they are."""
    usual, made = before.batch.global_batch, after.batch.global_batch
    if not is_fine_tuning(after) or (made == usual and before.data.seq_len == after.data.seq_len):
        return ""
    rows = data.rows(before.data.seq_len)
    shorter = f" of {after.data.seq_len} tokens" * (before.data.seq_len != after.data.seq_len)
    of_ranks = f", a multiple of {data.ranks} for the data ranks" * (data.ranks > 1)
    return (
        f"the data is small: its {rows} row{'s' * (rows != 1)} of {before.data.seq_len} tokens would make few steps of"
        f" {usual} rows, so a step has {made}{shorter}{of_ranks} (what you set of batch.global_batch, data.seq_len and"
        f" epochs is kept)"
    )


def few_steps(config: Config, data: Counted) -> str:
    """Return what to tell of a run that takes few steps; "" of any other run."""
    steps, rows = int(config.steps), int(config.batch.global_batch)
    if not is_fine_tuning(config) or steps >= FEW_STEPS:
        return ""
    ways = [] if is_unset(config.steps) else [f"steps = {ENOUGH_STEPS}"]
    if is_unset(config.steps) and rows > data.ranks:
        ways += [f"batch.global_batch = {max(1, steps * rows // ENOUGH_STEPS // data.ranks) * data.ranks}"]
    if config.epochs is not None and is_unset(config.steps):
        ways += [f"epochs = {math.ceil(config.epochs * ENOUGH_STEPS / steps)}"]
    return (
        f"{steps} step{'s' * (steps > 1)} of {rows} row{'s' * (rows > 1)} change{'s' * (steps == 1)} a model little:"
        f" {' or '.join(ways)} make{'s' * (len(ways) == 1)} more of them"
    )


def more_or_fewer(
    config: Config, losses: Sequence[float], validations: Mapping[int, float], *, is_of_pairs: bool = False
) -> str:
    """Return advice on the rate or length of a run that has ended; "" where its losses suggest no other.

    Args:
        losses: of each step that this process took.
        validations: validation losses by step; 0: before the first.
        is_of_pairs: whether the losses are those of preference pairs, of which less is not always better.
    """
    best = min(validations, key=lambda step: validations[step], default=0)
    last = max(validations, default=0)
    is_worse = 0 in validations and validations[last] > (1 + CHANGED) * validations[0]
    if is_worse and (best == 0 or is_of_pairs):
        return (
            f"the model got worse: the validation loss was {validations[0]:.4f} before the first step and is"
            f" {validations[last]:.4f} now. A lower rate (optimizer.lr = {config.optimizer.lr / 10:.3g}) changes less"
        )
    if is_of_pairs:
        return ""
    if 0 < best < last and validations[last] > (1 + CHANGED) * validations[best]:
        return (
            f"the validation loss was lowest at step {best}, {validations[best]:.4f}, and is {validations[last]:.4f}"
            f" now: with fewer steps (steps = {best}) the model repeats its data less"
        )
    if (n := len(losses) // 5) < 2 or (last and best < last):
        return ""
    before, now = (sum(part) / n for part in (losses[-2 * n : -n], losses[-n:]))
    if now > (1 - CHANGED) * before or now < LEARNT:
        return ""
    key, value = ("epochs", config.epochs) if config.epochs and is_unset(config.steps) else ("steps", config.steps)
    return (
        f"the loss was still falling (mean of the last {n} steps {now:.4f}, of the {n} before {before:.4f}): a run with"
        f" {key} = {math.ceil(2 * value)} may learn more"
    )


def of_forecast(config: Config) -> str:
    """Return a line with the values that a forecast takes because nobody set them; "" where all are set."""
    config = replace(config, steps=int(config.steps), sample=replace(config.sample, tokens=0))
    values = of_unset(config)
    if not (config.model.hf and values):
        return ""
    if is_fine_tuning(config) or config.adapters is not None:
        elsewhere = "" if has_weights(config.model.hf) else f", which are not in {config.model.hf}"
        return f"not set, and taken as in training beside the model's weights{elsewhere}: {values}"
    other = of_unset(_beside_weights(config, _longest(config.model)))
    return (
        f"not set, and taken as in training from random weights, since none lie in {config.model.hf}: {values}; beside"
        f" weights training takes {other}"
    )


def of_unset(config: Config) -> str:
    """Name the values that nobody set, by their keys."""
    o, parts = config.optimizer, []
    rows = [("optimizer.lr", o.lr), ("optimizer.weight_decay", o.weight_decay), ("data.seq_len", config.data.seq_len)]
    parts = [f"{key} = {value:g}" for key, value in rows if is_unset(value)]
    if batch_follows(config):
        parts.append(f"batch.global_batch = {config.batch.global_batch}")
    if is_unset(config.steps):
        of_all = " of all sources together" if config.data.mixture else ""
        passes = f" ({epochs_text(config.epochs)}{of_all})" if config.epochs is not None else ""
        parts.append(f"steps = {config.steps}{passes}")
    if is_unset(config.sample.prompt) and config.sample.tokens:
        parts.append(f'sample.prompt = "{config.sample.prompt}"{" in the chat template" * bool(config.sample.chat)}')
    return ", ".join(parts)


def _with_rate(config: Config, rates: Rates) -> Any:
    factor = RATE_FACTORS.get(config.optimizer.kind)
    if not is_unset(config.optimizer.lr) or factor is None:
        return config.optimizer
    rate = rates.whole if config.adapters is None else rates.adapters
    narrower = USUAL_WIDTH / _stated(config.model, WIDTH, USUAL_WIDTH)
    return replace(config.optimizer, lr=unset(float(f"{min(rate * narrower, HIGHEST_RATE) * factor:.2g}")))


def _longest(model: ModelConfig) -> int:
    """Return the longest sequence of a model in tokens; as long as any where its config does not state one."""
    if not model.hf:
        return model.max_seq_len or LONGEST_ROW
    return _stated(model, LENGTHS, LONGEST_ROW)


def _stated(model: ModelConfig, names: Sequence[str], default: int) -> int:
    """Return the size that the config of a model of transformers states under one of several keys."""
    place = Path(model.hf).expanduser()
    try:
        keys = json.loads((place / "config.json" if place.is_dir() else place).read_text(encoding="utf-8"))
        inner = keys.get("text_config")
        found = [values.get(key) for values in (keys, inner or {}) for key in names]
    except (OSError, ValueError, AttributeError, RecursionError):  # refused, with the reason, where the model is read
        return default
    return next((int(value) for value in found if isinstance(value, int) and value > 0), default)


# --- begin from a folder of adapters: its base becomes the model, its shape the request


def with_base(config: Config, flag: str = "") -> Config:
    """Return a config whose model is the base of the adapters that it names; any other config as it is.

    A run with a checkpoint goes on without the folder that it began from.

    Args:
        flag: words that name the base on the command line, for errors; by default those of ``train``.

    Raises:
        ConfigError: the base is not on this machine, [adapters] ask for other ones, or the adapters were trained beside
            a base in 4 bits and this one is not.
        IntegrityError, UnsupportedError: as ``AdapterFolder.read`` does.
    """
    m = config.model
    is_base = not m.hf or not holds_adapters(Path(m.hf).expanduser())
    if m.adapter and not is_base:
        raise ConfigError(
            f"model.hf = {m.hf} holds adapters, and model.adapter = {m.adapter} names adapters too: leave one out, or"
            f" give their base as model.hf"
        )
    named, key = (m.adapter, "model.adapter") if is_base else (m.hf, "model.hf")
    if not named:
        return config
    place = Path(named).expanduser()
    if not place.exists() and config.run and latest_checkpoint(Path(config.run).expanduser()):
        return config
    if not place.is_dir() or not holds_adapters(place):
        raise ConfigError(f"{key} = {named}: there is no folder with the adapters of peft ({CONFIG})")
    found = AdapterFolder.read(place)
    base = m.hf if m.hf and is_base else found.base
    flag = flag or f"--model.hf=BASE --model.adapter={named}"
    if not base:
        raise ConfigError(f"{place} holds adapters, and {CONFIG} names no base: give its folder with {flag}")
    if not Path(base).expanduser().is_dir():
        get = f" (to fetch it: hf download {base} --local-dir BASE)"
        if found.revision:
            get = f" (to fetch it: hf download {base} --revision {found.revision} --local-dir BASE)"
        raise ConfigError(
            f"{place} holds adapters, and the base {base} that they stand beside is no folder on this machine: give it"
            f" with {flag}{get if base == found.base and base.count('/') == 1 else ''}"
        )
    if config.adapters not in (None, found.adapters):
        others = to_dict(found.adapters)
        keys = [
            f"adapters.{name} = {value} (there {others[name]})"
            for name, value in to_dict(config.adapters).items()
            if value != others[name]
        ]
        raise ConfigError(
            f"{key} = {named} holds adapters of a shape of their own, and the config asks for another:"
            f" {', '.join(keys)}. Leave [adapters] out"
        )
    t, rounded = config.techniques, found.rounded_in
    master = t.precision.master
    master = "float32" if master == "auto" else canonical_dtype(master, where="precision.master")
    if rounded and (t.quantize_frozen != "nf4" or master != rounded):
        other = f" --techniques.precision.master={rounded}" if master != rounded else ""
        raise ConfigError(
            f"{key} = {found.folder}: these adapters were trained beside a base in 4 bits (nf4, rounded in {rounded}),"
            f" and beside another one they compute something else. Add --techniques.quantize_frozen=nf4{other}"
        )
    tokenizer = config.data.tokenizer
    if tokenizer == "auto" and (place / "tokenizer.json").is_file():
        tokenizer = named
    return replace(
        config,
        model=replace(m, hf=base, adapter=named),
        adapters=found.adapters,
        data=replace(config.data, tokenizer=tokenizer),
    )
