"""The one user-facing config tree.

Every key is a TOML key and a flag; the text below a field is its help. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from meshwright.core.config import from_dict, is_unset, load_toml, to_dict, unset
from meshwright.core.config.ranges import (
    ABOVE_0,
    BELOW_1,
    FROM_0,
    FROM_1,
    NOT_EMPTY,
    PATTERN,
    SEED,
    SHARE,
    Range,
    check_ranges,
)
from meshwright.core.devices import DEFAULT_BACKEND
from meshwright.core.errors import ConfigError, nearest
from meshwright.data.options import CurriculumStage, MixturePart, SourceOptions
from meshwright.introspection.adapter_request import Adapters
from meshwright.models.decoder_config import SIZES, MoEConfig, RopeScaling
from meshwright.planning.layout import Layout
from meshwright.planning.optimizer import KINDS, kind_of
from meshwright.planning.techniques import RunTechniques, Techniques

__all__ = ["Config", "check"]

NAME = Range(
    "letters, digits, '.', '_' and '-', beginning with a letter or digit",
    lambda value: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) is not None,
)


@dataclass(frozen=True)
class ModelConfig:
    """The model: a size by name and what differs from it, or a model of Hugging Face."""

    hf: str = ""
    """Folder of a Hugging Face model, or its config.json: instead of a size. Weights that lie there are read; nothing
    is downloaded."""
    adapter: str = ""
    """Folder of adapters that peft or convert wrote, to be trained on beside model.hf, or beside the base that it names
    itself; rank, targets and the like are its own. Such a folder may be given as model.hf too."""
    trust_remote_code: bool = False
    """Run model code that lies in that folder."""
    size: str = "demo"
    """Name of a built-in size; the keys below override single values of it."""
    vocab_size: Annotated[int | None, FROM_1] = None
    """Tokens in the vocabulary; none: the size's own, or the tokenizer's where that is larger."""
    dim: Annotated[int | None, FROM_1] = None
    """Width of the residual stream."""
    n_layers: Annotated[int | None, FROM_1] = None
    """Number of blocks."""
    n_heads: Annotated[int | None, FROM_1] = None
    """Query heads."""
    n_kv_heads: Annotated[int | None, FROM_1] = None
    """Key and value heads; a divisor of n_heads."""
    hidden_dim: Annotated[int | None, FROM_1] = None
    """Width inside the feed-forward block."""
    max_seq_len: Annotated[int | None, FROM_1] = None
    """Longest sequence, in tokens."""
    rope_theta: Annotated[float | None, ABOVE_0] = None
    """Base of the rotary frequencies."""
    qk_norm: bool | None = None
    """Normalise queries and keys per head."""
    tied_embeddings: bool | None = None
    """One weight serves as embedding and output head."""
    rope_scaling: RopeScaling | None = None
    moe: MoEConfig | None = None


@dataclass(frozen=True)
class DataConfig(SourceOptions):
    """The text to train on: one source, or a mixture of several."""

    mixture: tuple[MixturePart, ...] = ()
    """Tables of sources, each with the keys of a source of its own, a name and a weight; then data.source and its
    like are not given."""
    curriculum: tuple[CurriculumStage, ...] = ()
    """Tables of other weights of the mixture from some step on."""
    tokenizer: Annotated[str, NOT_EMPTY] = "auto"
    """"auto" (the one that lies beside the model model.hf, else bytes); "bytes" (one token per byte); a
    tokenizer.json, or a folder that holds one; "bpe:8000" (trained on the spot, of that size); or "ids:50257:50256"
    (vocabulary, end-of-document id; for token ids without their tokenizer)."""
    seq_len: Annotated[int, FROM_1] = unset(128)
    """Tokens per row; unset beside weights from files: 2048, or the model's maximum where that is shorter, or less
    where the data would make few steps."""
    validation_fraction: Annotated[float, BELOW_1] = 0.05
    """Part of the bytes (of records: of the rows) that is held out for validation; 0: none."""
    cache: str = ""
    """Folder that keeps tokenized text; empty: meshwright's folder in the user's cache."""
    workers: Annotated[int, FROM_0] = 1
    """Threads per rank that read rows ahead of the step; 0: they are read when asked for."""


@dataclass(frozen=True)
class BatchConfig:
    """How many rows an optimizer step sees, and in what portions."""

    global_batch: Annotated[int, FROM_1] = unset(32)
    """Rows per optimizer step, over all ranks; unset beside weights from files: fewer where the data would make few
    steps."""
    microbatch: Annotated[int, FROM_0] = unset(0)
    """Rows per forward on one rank; 0: the rank's whole share at once."""


@dataclass(frozen=True)
class GroupOverride:
    """Other optimizer values for the parameters whose names match."""

    pattern: Annotated[str, PATTERN]
    """Regular expression, searched in the global parameter name."""
    lr_scale: Annotated[float, ABOVE_0] = 1.0
    """Factor on the learning rate."""
    weight_decay: Annotated[float | None, FROM_0] = None
    """Weight decay of these parameters; none: as for the others."""


@dataclass(frozen=True)
class PreferenceConfig:
    """Direct preference optimisation (arXiv 2305.18290): the loss where the data holds pairs of answers."""

    beta: Annotated[float, ABOVE_0] = unset(0.1)
    """How strongly the model is held to its first weights."""
    label_smoothing: Annotated[float, Range("0 or more and below 0.5", lambda value: 0 <= value < 0.5)] = unset(0.0)
    """Share of pairs that are taken to be the wrong way round; below 0.5."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, its values, and the guards around it."""

    kind: str = "adamw"
    """The optimizer: adamw, adam, lion, schedule_free_adamw, muon (hidden matrices by Muon, the rest by AdamW), sgd, or
    adafactor."""
    lr: Annotated[float, ABOVE_0] = unset(3e-3)
    """Peak learning rate; unset beside weights from files: 2e-4 for adapters, 1e-5 for a whole model, and on
    preference pairs 5e-5 and 1e-6, for models of width 4,096, and more for narrower ones."""
    beta1: Annotated[float, BELOW_1] = 0.9
    """Decay of the mean of gradients; the momentum of sgd and muon (whose paper has 0.95)."""
    beta2: Annotated[float, BELOW_1] = 0.95
    """Decay of the mean of squared gradients."""
    eps: Annotated[float, ABOVE_0] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, FROM_0] = unset(0.1)
    """Decoupled weight decay of matrices; vectors (norms, biases) get none. Unset beside weights from files: 0."""
    max_norm: Annotated[float, FROM_0] = 1.0
    """Global gradient norm above which gradients are scaled down; 0: no clipping."""
    max_skipped_steps: Annotated[int, FROM_0] = 10
    """The run stops with an error after so many steps in a row that were skipped, for a gradient that is not finite or
    a loss that is too high; 0: after the first.
    """
    max_loss_deviation: Annotated[float, FROM_0] = 0.0
    """Skip a step whose loss is more than so many deviations above the median of the last losses; 0: never."""
    loss_window: Annotated[int, Range("4 or more", lambda value: value >= 4)] = 100
    """max_loss_deviation: number of last losses, without those of skipped steps, that a loss is compared with."""
    overrides: tuple[GroupOverride, ...] = ()
    """Tables of values for parameters whose names match a pattern; the first match counts."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the steps, or over the tokens."""

    kind: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = "cosine"
    """Shape after the warmup; wsd: constant, then a linear decay at the end; inverse_sqrt: as the inverse root of the
    step."""
    warmup_steps: Annotated[int | None, FROM_0] = None
    """Steps of linear rise to the peak; none: a twentieth of the run, at most 100."""
    tokens: Annotated[int | None, FROM_1] = None
    """Length of the schedule in trained tokens (those that have a loss, of all ranks); none: the run's steps, which end
    the run in any case."""
    warmup_tokens: Annotated[int | None, FROM_0] = None
    """With schedule.tokens: tokens of linear rise to the peak; none: a twentieth of them."""
    final_ratio: Annotated[float, SHARE] = 0.1
    """Last learning rate / peak."""
    decay_fraction: Annotated[float, SHARE] = 0.2
    """wsd: share of all steps, or tokens, over which the rate decays."""


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on text that is not trained on."""

    every: Annotated[int, FROM_0] = 100
    """Steps between two validations; 0: never."""
    samples: Annotated[int, FROM_1] = 64
    """Rows of each validation; the same ones every time."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept to continue from."""

    every: Annotated[int, FROM_0] = 200
    """Steps between two checkpoints; 0: only the last step's."""
    keep_last: Annotated[int, FROM_0] = 2
    """Newest checkpoints that are kept; 0: all."""
    asynchronous: bool = True
    """Whether training goes on while a checkpoint is copied and written; the last step's is waited for either way."""
    host_memory: Annotated[float, FROM_0] = 0.0
    """GiB that a copy may take on each rank; 0: all it needs. With less, the next step waits for a part of it."""
    when_busy: Literal["wait", "skip", "replace"] = "wait"
    """What a checkpoint does that is due while another is written."""
    folder: str = ""
    """Where checkpoints go, such as s3://bucket/run (credentials: the environment's); empty: into the run's folder."""
    memory_every: Annotated[int, FROM_0] = 0
    """Steps between two states that are kept in hosts' memory, each rank's on another host as well; 0: none."""
    memory_folder: str = "/dev/shm"
    """File system in each host's memory; $VARIABLES are those of the host."""


@dataclass(frozen=True)
class LoggingConfig:
    """What is told while training."""

    every: Annotated[int, FROM_1] = 1
    """Steps between two lines of metrics."""
    tensorboard: Literal["auto", "on", "off"] = "auto"
    """Metrics for TensorBoard; auto: where it is installed."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Metrics for Weights & Biases; offline: into files that ``wandb sync`` sends."""
    wandb_project: str = ""
    """Project of Weights & Biases; empty: the run's name."""
    profile: str = ""
    """Steps to profile, like 10:13 for 10, 11 and 12: a trace of each rank in profile/ of the run folder."""
    memory_snapshot: str = ""
    """Steps whose CUDA allocations are recorded, like 10:13: a snapshot of each rank in memory/ of the run folder."""


@dataclass(frozen=True)
class ProcessConfig:
    """The processes on this host; under torchrun or Slurm they exist already and count is theirs."""

    count: Annotated[int, FROM_0] = 0
    """Processes to start here, however many; 0: as many as the layout has ranks, if this host carries them, else one
    per GPU, or on a host without one per core, at most 4."""
    backend: Annotated[str, NOT_EMPTY] = DEFAULT_BACKEND
    """Back ends of torch.distributed per device type; one that this build of torch lacks is dropped and said."""
    startup_timeout_sec: Annotated[int, FROM_1] = 300
    """Seconds for all processes to meet."""
    step_timeout_sec: Annotated[int, FROM_1] = 300
    """Seconds that a collective may wait before the run is ended as hung."""
    audit: bool = True
    """Check at the start that the model is what the plan says, and equal where ranks hold copies of it."""
    check_memory: bool = True
    """Refuse a run that surely does not fit the memory of its devices or host, before it starts."""
    max_restarts: Annotated[int, FROM_0] = 0
    """How often new processes continue the run after one was lost; under torchrun its own --max-restarts counts."""


@dataclass(frozen=True)
class SampleConfig:
    """Text that the model writes at the end of the run."""

    prompt: Annotated[str, NOT_EMPTY] = unset("The ")
    """The text to continue, or the question to answer."""
    chat: bool | None = None
    """Whether the prompt goes into the chat template; unset: where that writes the data."""
    tokens: Annotated[int, FROM_0] = 200
    """Tokens to write; 0: none."""
    temperature: Annotated[float, FROM_0] = 0.8
    """0: always the likeliest token; higher: more varied."""


@dataclass(frozen=True)
class Config:
    """A training run, whole."""

    name: Annotated[str, NAME] = "demo"
    """Begins the name of the run's folder."""
    out: Annotated[str, NOT_EMPTY] = "runs"
    """Parent of the run folders."""
    run: str = ""
    """The run's own folder, instead of a new one in out; continued where it holds a checkpoint."""
    seed: Annotated[int, SEED] = 0
    """Of initial weights, order of samples, dropout and sampling."""
    steps: Annotated[int, FROM_1] = unset(200)
    """Optimizer steps of the whole run; unset beside weights from files: as many as epochs takes."""
    epochs: Annotated[float | None, ABOVE_0] = None
    """Passes over the data, instead of steps; unset beside weights from files, where steps is too: 3 on conversations
    and answers, 1 on text and preference pairs, and more on little data."""
    check_trace: str = ""
    """Trace of ``meshwright verify --write-trace``, to compare the first steps with; the run ends where they differ."""
    model: ModelConfig = field(default_factory=ModelConfig)
    adapters: Adapters | None = None
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    layout: Layout = field(default_factory=Layout)
    techniques: RunTechniques = field(default_factory=RunTechniques)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dpo: PreferenceConfig = field(default_factory=PreferenceConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    @property
    def requested(self) -> Techniques:
        """The techniques, and the optimizer that plans count."""
        return Techniques(**{**vars(self.techniques), "optimizer": self.optimizer.kind})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Config:
        """Return a checked config from nested dicts.

        Raises ConfigError for an unknown key, a wrong type or a value out of range.
        """
        check(config := from_dict(cls, data))
        return config

    @classmethod
    def from_toml(cls, path: str | Path) -> Config:
        """Return a checked config from a TOML file.

        Raises ConfigError as ``from_dict`` does, with file and line where known.
        """
        check(config := load_toml(cls, path))
        return config


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a config as ``to_dict`` returns it."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def check(config: Config) -> None:
    """Check that every value of a config is legal, independent of the model and the mesh.

    Has no side effects.

    Raises:
        ConfigError: a value of the wrong type or out of its range; names the dotted key, the value and the legal range.
    """
    typed = from_dict(type(config), to_dict(config))
    check_ranges(typed)
    if config.epochs is not None and not is_unset(config.steps):
        raise ConfigError(
            f"steps = {config.steps} and epochs = {config.epochs:g} are both given: either says how long the run is, so"
            f" leave one out"
        )
    for sentence in _contradictions(typed):
        raise ConfigError(sentence)
    is_counted = is_unset(config.steps) and (config.model.hf or config.model.adapter)  # the data says how many steps
    for key in ("profile", "memory_snapshot") if config.epochs is None and not is_counted else ():
        read_window(f"logging.{key}", getattr(typed.logging, key), typed.steps)
    if typed != config:
        raise ConfigError(
            "a section of this config is a plain dict, or one of its tuples is a list; build it with"
            " Config.from_dict(...)"
        )


def _contradictions(config: Config) -> Iterator[str]:
    """Yield a sentence for each value that others forbid."""
    model, optimizer, schedule = config.model, config.optimizer, config.schedule
    named, default = ("hf", "adapter", "trust_remote_code"), ModelConfig()
    other = [key for key, value in vars(model).items() if key not in named and value != getattr(default, key)]
    if other and (model.hf or model.adapter):
        keys = ", ".join(f"model.{key}" for key in other)
        yield (
            f"{keys} and model.hf are both given: the sizes of a Hugging Face model are read from its"
            f" config.json. Leave out {keys}, or change a copy of that file and give it as model.hf"
        )
    if model.trust_remote_code and not (model.hf or model.adapter):
        yield (
            "model.trust_remote_code = true, and model.hf names no model whose code could be run: set model.hf, or"
            " leave it out"
        )
    if model.size not in SIZES:
        yield (
            f"model.size = {model.size!r} is not a built-in size.{nearest(model.size, SIZES)} Sizes:"
            f" {', '.join(SIZES)}."
        )
    scaling = model.rope_scaling
    if scaling is not None and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield (
            f"model.rope_scaling.high_freq_factor = {scaling.high_freq_factor} is out of range: it must be above"
            f" model.rope_scaling.low_freq_factor = {scaling.low_freq_factor}."
        )
    if config.adapters is not None and not (model.hf or model.adapter):
        yield (
            f"[adapters] are trained beside a model that has been trained before, and model.size = {model.size}"
            f" begins with random weights: set model.hf to the folder of a model, or leave [adapters] out"
        )
    row, usual = kind_of(optimizer.kind), OptimizerConfig()
    for key in dict.fromkeys(key for other in KINDS.values() for key in other.keys):
        if key not in row.keys and getattr(optimizer, key) != getattr(usual, key):
            yield (
                f"optimizer.{key} = {getattr(optimizer, key)} and optimizer.kind = {optimizer.kind}, which does not use"
                f" it: it takes {', '.join(('lr', *row.keys))}. Leave optimizer.{key} out, or choose another optimizer."
            )
    if row.averages and schedule.kind != "constant":
        yield (
            f"schedule.kind = {schedule.kind} and optimizer.kind = {optimizer.kind}: its average of all steps takes"
            f" the place of a falling rate. Set schedule.kind = constant (schedule.warmup_steps stays), or"
            f" optimizer.kind = adamw."
        )
    if row.averages and not optimizer.beta1:
        yield (
            f"optimizer.beta1 = {optimizer.beta1} and optimizer.kind = {optimizer.kind}: beta1 is the weight of the"
            f" average in the point of training, above 0 and below 1. Set optimizer.beta1 = 0.9."
        )
    if schedule.tokens is not None and schedule.warmup_steps is not None:
        yield (
            f"schedule.tokens = {schedule.tokens} and schedule.warmup_steps = {schedule.warmup_steps}: the rate follows"
            f" tokens, and so does its warm-up. Set schedule.warmup_tokens instead."
        )
    if schedule.tokens is None and schedule.warmup_tokens is not None:
        yield (
            f"schedule.warmup_tokens = {schedule.warmup_tokens}, and the rate follows steps. Set schedule.tokens to the"
            f" tokens of the whole schedule, or schedule.warmup_steps instead."
        )


def read_window(key: str, text: str, steps: int) -> range:
    """Return the steps that ``text`` names, counted from 1: "10:13" for 10, 11 and 12. Empty for an empty text.

    Args:
        key: config key of the text, for the error.
        steps: number of steps of the whole run.

    Raises:
        ConfigError: the text is not "a:b", names no step, or names steps that the run does not take.
    """
    if not text:
        return range(0)
    found = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
    if found is None:
        raise ConfigError(f"{key} = {text!r} names no steps: write first:end, like 10:13 for the steps 10, 11 and 12")
    first, end = int(found.group(1)), int(found.group(2))
    if first < 1:
        raise ConfigError(f"{key} = {text!r}: steps are counted from 1; write 1:{max(end, 2)}")
    if end <= first:
        swapped = f"{end}:{first}" if 0 < end < first else f"{first}:{first + 1}"
        raise ConfigError(
            f"{key} = {text!r} names no step: the second number is the first step that is left out; perhaps {swapped}"
        )
    if end - 1 > steps:
        raise ConfigError(
            f"{key} = {text!r} reaches to step {end - 1}, and the run has steps = {steps}: end with {steps + 1} or"
            f" lower"
        )
    return range(first, end)
