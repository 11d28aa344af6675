"""Open a run's checkpoint, or a folder of transformers' files, on any layout, and write text with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import meshwright.checkpoint as checkpoint
from meshwright.checkpoint.folder import step_of
from meshwright.checkpoint.huggingface import pretrained
from meshwright.checkpoint.loading import load_newest
from meshwright.checkpoint.store import Location, place_of
from meshwright.checkpoint.tensor_files import holds_weights
from meshwright.core.dtypes import canonical_dtype
from meshwright.core.errors import ConfigError
from meshwright.core.host import physical_cores
from meshwright.data import Tokenizer, load_tokenizer
from meshwright.data.tokenizers import TEMPLATE, Unfolding, encode_prompt
from meshwright.data.turns import ChatTemplate, Message, ends_of_turn, load_template
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.weights.constructed import Weights
from meshwright.introspection.source import CONFIG, as_module, with_adapters
from meshwright.planning.layout import Layout
from meshwright.planning.techniques import Precision, Techniques
from meshwright.training.config import Config
from meshwright.training.feed import vision_for
from meshwright.training.model_source import (
    ModelSource,
    causal_lm,
    model_source,
    own_tokenizer,
    question_ids,
    template_file,
    template_folder,
    with_kept_model,
)
from meshwright.training.run.convert import weights_beside_adapters
from meshwright.training.run.folder import RunFolder
from meshwright.training.run.occupancy import held_by

# --- open a run's checkpoint, or a folder of transformers' files, on any layout


@dataclass
class Opened:
    """A model that was trained, and its tokenizer. Ranks get equal ones, and each builds its part of the model.

    Attributes:
        path: the folder that was opened.
        config: the run's config; of a folder of transformers' files, one that names it.
        checkpoint: folder of the run's checkpoint; None: the weights are transformers' files.
        is_newest: whether an older checkpoint is read where that one is damaged.
        base: folder of the weights beside which the run's adapters stand.
        named_tokenizer: tokenizer of a folder of transformers' files.
    """

    path: Path
    config: Config
    checkpoint: Location | None = None
    base: Path | None = None
    named_tokenizer: str = ""
    is_newest: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to worker processes, and back, without what was read."""
        return type(self), tuple(getattr(self, own.name) for own in fields(self))

    @classmethod
    def of_run(cls, folder: Path, config: Config, step: int | None = None, base: Path | None = None) -> Opened:
        """Open a run's latest checkpoint, or that of ``step``.

        Raises:
            ConfigError: the run has no checkpoint yet, or none of that step; or ``base`` is not of its adapters.
        """
        found = checkpoint_of(folder, config, step)
        weights_beside_adapters(folder, config, base)
        return cls(folder, with_kept_model(config, folder), found, base, is_newest=step is None)

    @classmethod
    def of_folder(cls, folder: Path, config: Config, tokenizer: str = "") -> Opened:
        """Open a folder with the ``config.json``, weights and tokenizer of a model of transformers, or with adapters.

        Args:
            config: a config whose ``model.hf`` is that folder, or the base of its adapters, in the dtype to compute in
                ("auto": as stored).

        Raises:
            ConfigError: it holds no weights, or no tokenizer and none is named.
        """
        model = Path(config.model.hf).expanduser()
        if not holds_weights(model):
            raise ConfigError(f"{model} has a {CONFIG} and no weights (model.safetensors): give the folder with both")
        found = next((place for place in (folder, model) if (place / "tokenizer.json").is_file()), None)
        if not tokenizer and found is None:
            raise ConfigError(
                f"{folder} holds no tokenizer.json: name the tokenizer that the model was trained with, like"
                f" --tokenizer bytes, or --tokenizer and a folder"
            )
        return cls(folder, config, named_tokenizer=tokenizer or str(found))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with."""
        if self.checkpoint is None:
            return load_tokenizer(self.named_tokenizer)
        return own_tokenizer(self.config, self.path)

    @cached_property
    def source(self) -> ModelSource:
        """The model, before any weight exists."""
        if self.checkpoint is None:
            return with_adapters(replace(causal_lm(self.config), dtype=self.dtype), self.config.adapters)
        return model_source(self.config, self.tokenizer)

    @cached_property
    def dtype(self) -> str:
        """The dtype of weights and computation, by name."""
        master = self.config.techniques.precision.master
        if master != "auto":
            return canonical_dtype(master, where="--dtype")
        if self.checkpoint is not None:
            return "float32"
        keys = causal_lm(self.config).stored or {}
        places = keys, keys.get("text_config") or {}
        named = (place.get(key) for place in places for key in ("dtype", "torch_dtype"))
        return canonical_dtype(next((name for name in named if name), "float32"), where=f"{CONFIG}: dtype")

    @property
    def words(self) -> str:
        """The model in words: which step of which run."""
        beside = f" beside {self.config.model.hf}" if self.config.model.adapter else ""
        return f"{self.path}{beside}" if self.checkpoint is None else f"{self.path}, step {self.step}"

    @property
    def step(self) -> int | None:
        """The step of the run's checkpoint."""
        return None if self.checkpoint is None else step_of(self.checkpoint)

    def model(self, layout: Layout | None = None) -> ParallelModel:
        """Lay the model out, and read its weights (collective; under a launcher it brings the ranks up).

        Weights, and what is computed from them, have the master dtype. The default layout is one process.

        Raises:
            ConfigError, UnsupportedError: the layout does not fit the model.
            IntegrityError: the checkpoint is damaged.
        """
        asked, module = self.config.techniques, as_module(self.source)
        techniques = Techniques(
            precision=Precision(self.dtype, self.dtype, self.dtype),
            freeze=asked.freeze,
            quantize_frozen=asked.quantize_frozen,
        )
        if self.checkpoint is None:
            weights: Weights | None = pretrained(self.config.model.hf, self.config.model.adapter)
        else:
            weights = weights_beside_adapters(self.path, self.config, self.base)
            weights = checkpoint.to_be_loaded if weights is None and self.config.model.hf else weights
        model = parallelize(
            module, layout or Layout(dp_shard=1), techniques=techniques, seed=self.config.seed, weights=weights
        )
        if self.is_newest:
            found = load_newest(RunFolder(self.path).checkpoints, lambda at: checkpoint.load(model, at))
            self.checkpoint = found and found[0]
        elif self.checkpoint is not None:
            checkpoint.load(model, self.checkpoint)
        return model


def checkpoint_of(folder: Path, config: Config, step: int | None) -> Location:
    """Return the newest complete checkpoint of a run, or that of a step, which a job may be training on.

    Raises:
        ConfigError: there is none; the text says what the run is about.
    """
    run, every, why = RunFolder(folder), config.checkpoint.every, ""
    try:
        return run.checkpoint(step)
    except ConfigError as error:
        if who := held_by(run.path):
            saves = f"saves every {every} steps and at the end" if every else "saves at its end"
            why = f". The run is being trained by {who} and {saves}: wait for that"
        elif left := run.checkpoints.half_written():
            why = f". {place_of(left[-1])[1]} is what an interrupted save left, and is never read"
        raise ConfigError(f"{error}{why}") from None


# --- write text with an opened model, in one process, as it comes

PARAMETERS_PER_THREAD = 32_000_000
"""Below so many, the threads of a product of one token wait for each other longer than they compute."""

Write = Callable[[str], object]


def use_threads(threads: int | None, parameters: int) -> None:
    """Set torch's number of threads for products of one token.

    Args:
        threads: number that the user asks for; None: by the model's size, at most one for each physical core that
            this process may use, or as ``OMP_NUM_THREADS`` says.
    """
    if threads is None and os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        return
    torch.set_num_threads(threads if threads is not None else threads_for(parameters))


def threads_for(parameters: int) -> int:
    """Return the number of threads that write with a model of so many parameters."""
    return max(1, min(physical_cores(), parameters // PARAMETERS_PER_THREAD))


@dataclass
class Sampler:
    """A model that continues texts.

    Attributes:
        sampling: fields of ``Sampling``.
    """

    opened: Opened
    model: ParallelModel
    sampling: dict[str, Any]

    @classmethod
    def of(cls, opened: Opened, threads: int | None = None, **sampling: Any) -> Sampler:
        """Read an opened model onto this machine's device."""
        use_threads(threads, 0)
        model = opened.model()
        use_threads(threads, model.facts.numel)
        return cls(opened, model, sampling)

    def continue_text(self, prompt: str, tokens: int, write: Write) -> None:
        """Write the prompt and at most ``tokens`` more tokens, up to the end of the document.

        Args:
            write: called with each part of the text as soon as it is known.
        """
        ids = encode_prompt(self.opened.tokenizer, prompt).tolist()
        self.follow(ids, Unfolding(self.opened.tokenizer), tokens, write, shown=ids)

    def follow(
        self,
        ids: Sequence[int],
        text: Unfolding,
        tokens: int,
        write: Write,
        *,
        shown: Sequence[int] = (),
        stop: Collection[int] = (),
    ) -> list[int]:
        """Write the text that follows ``ids``, and return its ids.

        Args:
            shown: those of ``ids`` that are written too.
            stop: ids that end the text, besides the end of a document.
        """

        def give(part: str) -> None:
            if part:
                write(part)

        if len(ids):
            give(text.more(*shown))
        stops = {self.opened.tokenizer.end_of_document, *stop}
        found = self.model.generate(ids, tokens, stop=stops, heard=lambda new: give(text.more(new)), **self.sampling)
        give(text.rest())
        return found


# --- hold a conversation with an opened model, in its chat template


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
        opened = self.sampler.opened
        try:
            return question_ids(self.messages, self.template, opened.tokenizer, vision_for(opened.config))
        except ValueError as error:
            raise ConfigError(f"--chat: {error}") from None

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
