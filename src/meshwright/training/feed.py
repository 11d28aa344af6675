"""Prepare a run's sources once per node, open them on every rank, mix their rows and distribute them to the ranks."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.core.dtypes import epochs_text
from meshwright.core.errors import ConfigError, MeshwrightError, UnsupportedError
from meshwright.core.files import read_object
from meshwright.data import (
    Corpus,
    Interleave,
    Loader,
    Prepared,
    Samples,
    SourceOptions,
    Split,
    Stage,
    Tokenizer,
    prepare,
)
from meshwright.data.building import TokenisingRecipe
from meshwright.data.cache import open_parts
from meshwright.data.images import PixelReader, Vision, vision_of
from meshwright.data.loader import StreamedSamples
from meshwright.data.options import MixturePart
from meshwright.data.packing import RowEnds, Whole
from meshwright.data.scan import TOKEN_FORMATS, list_sources
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import get_world_info

from .config import Config, DataConfig
from .model_source import FOLDER
from .optim.fine_tuning import TEXT, few_steps, with_length
from .run.request import IDENTITY
from .tokenizer import in_chat_template
from .views.data_description import describe, notes_on

if TYPE_CHECKING:
    from .views.progress import Progress


class UnreadSamples(MeshwrightError):
    """Raised on all ranks, before a step has begun, if one of them cannot read its samples."""


@dataclass(frozen=True)
class HeldOut:
    """The validation text of one source."""

    name: str
    split: Split
    samples: int
    """The largest number of its rows that a validation reads."""


@dataclass
class Feed:
    """The samples of a run on this rank."""

    samples: Samples | StreamedSamples
    loader: Loader
    held_out: tuple[HeldOut, ...]
    """Validation text of the sources that hold out at least one row."""
    identity: dict[str, Any]
    """The settings that determine the sample at each index."""
    description: str
    notes: tuple[str, ...]
    """Notes for the user before the first step."""
    config: Config
    """The run's config, with what follows from the data: its steps, where epochs say how long it is."""
    tasks: tuple[str, ...] = ()
    """Tasks of the sources."""
    pixels: PixelReader | None = None
    """Opens the images of a batch's rows; None where the sources have none."""
    ends: RowEnds | None = None
    """Where rows end; None: all have data.seq_len tokens."""
    other_data: str = ""
    """How the data differs from that which the run began with."""
    left_out: dict[int, str] | None = None
    """Validation rows of this rank that could not be read, with the error; None: they end the run."""

    def next_batch(self) -> Any:
        """Return this rank's part of the next global batch, or its read error; ``forward_backward`` accepts either."""
        try:
            return next(self.loader)
        except Exception as error:  # noqa: BLE001 (the other ranks must learn of any error that a reader raises)
            first = self.loader.state
            last = first + self.loader.global_batch - 1
            ways = "" if isinstance(self.samples, StreamedSamples) else ", or leave them out: data.on_bad_row = 'skip'"
            advice = "" if isinstance(error, MeshwrightError) else f". Make the files readable again{ways}"
            return UnreadSamples(
                f"rank {get_world_info()[0]} cannot read its part of the step's samples, {first} to {last} of the run:"
                f" {type(error).__name__}: {error}{advice}"
            )

    def row_lengths(self) -> np.ndarray:
        """Return the number of tokens before its padding of each row of the last step, over all ranks.

        They follow from the indexes of the samples, so no rank asks another.
        """
        of_step = self.loader.state - self.loader.global_batch + np.arange(self.loader.global_batch)
        return self.samples.row_lengths(of_step)

    def asked(self, tokenizer: Tokenizer, message: str) -> str | None:
        """Write a user's message out as the data's conversations are; None without a chat template."""
        text = in_chat_template(self.config, tokenizer, message)
        return self.pixels.processor.begun(text) if text is not None and self.pixels else text

    def unreadable(self) -> list[str]:
        """List the samples that any rank left out because they could not be read. Collective."""
        mine = [
            f"sample {index} (rank {get_world_info()[0]}): {why}"
            for index, why in sorted(self.loader.unreadable.items())
        ]
        mine += [f"row {index} that is held out: {why}" for index, why in sorted((self.left_out or {}).items())]
        return [line for rank in agree.everybody_says(mine) for line in rank]


def parts_of(data: DataConfig) -> tuple[MixturePart, ...]:
    """Return the sources of a config: the parts of its mixture, or its one source as a single part. Reads no data.

    Raises:
        ConfigError: a source and a mixture are both given, two parts share a name, the curriculum does not fit the
            parts, or max_epochs is given for a stream.
        UnsupportedError: a stream in a mixture.
    """
    if any(part.streaming for part in data.mixture):
        raise UnsupportedError(
            "data.mixture has a part with streaming = true: only a source alone can be streamed. Leave streaming out"
        )
    if data.streaming and data.max_epochs:
        raise ConfigError(
            "data.max_epochs and data.streaming are both given, but the length of a stream's epoch is unknown until its"
            " end. Leave data.max_epochs out"
        )
    own = {field.name: getattr(data, field.name) for field in fields(SourceOptions)}
    if not data.mixture:
        if data.curriculum:
            raise ConfigError("data.curriculum gives weights to the parts of data.mixture, and there is no mixture")
        return (MixturePart(**own, name="training"),)
    changed = [name for name, value in own.items() if value != getattr(SourceOptions(), name)]
    if changed:
        raise ConfigError(
            f"data.{changed[0]} and data.mixture are both given: in a mixture each part has its own {changed[0]}"
        )
    parts = tuple(replace(part, name=part.name or Path(part.source[0]).stem) for part in data.mixture)
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"data.mixture has two parts named '{name}': give each a name of its own")
    for i, stage in enumerate(data.curriculum):
        if len(stage.weights) != len(parts):
            raise ConfigError(
                f"data.curriculum[{i}].weights has {len(stage.weights)} values, and the mixture {len(parts)} parts:"
                f" {', '.join(names)}"
            )
    return parts


def build_feed(
    config: Config, tokenizer: Tokenizer, rank: int, ranks: int, progress: Progress, ends: RowEnds | None = None
) -> Feed:
    """Prepare, open and mix the sources (collective); ``ends``: where rows end, None: at data.seq_len.

    Raises:
        ConfigError: a source cannot be used, the nodes see different data, or a source would be read more often than
            its max_epochs.
    """
    data = config.data
    parts = parts_of(data)
    if any(part.streaming for part in parts):
        return _streamed(config, parts, tokenizer, (rank, ranks), progress, ends)
    vision = vision_for(config)
    prepared = [prepare_once_per_node(config, part, tokenizer, progress, vision) for part in parts]
    opened = agree.together(lambda: _opened(config, parts, prepared, rank, ranks, vision, ends))
    assert opened is not None
    return opened


def vision_for(config: Config) -> Vision:
    """Return how a run's data is read where records have images: by the processor beside its model, if it has one."""
    place, kept = Path(config.model.hf).expanduser(), Path(config.run) / FOLDER
    is_gone = config.model.hf and config.run and not place.exists() and kept.is_dir()
    return vision_of(str(kept) if is_gone else config.model.hf, trust_remote_code=config.model.trust_remote_code)


def _opened(
    config: Config,
    parts: tuple[MixturePart, ...],
    prepared: list[Prepared],
    rank: int,
    ranks: int,
    vision: Vision,
    ends: RowEnds | None,
) -> Feed:
    data = config.data
    corpora, pixels = open_parts(prepared, parts, vision)
    names = [part.name for part in parts]
    stages = stages_of(config, parts)
    samples = Samples.of([corpus.training for corpus in corpora], data.seq_len, config.seed, names, Interleave(stages))
    tasks = tuple(str(getattr(corpus.meta, "task", TEXT)) for corpus in corpora)
    config = with_length(config, sum(corpus.training.n_samples(data.seq_len) for corpus in corpora), tasks)
    epochs = samples.epochs(config.steps * config.batch.global_batch)
    for part, times in zip(parts, epochs.values(), strict=True):
        if part.max_epochs and times > part.max_epochs:
            often = epochs_text(times).partition(" ")[0]
            raise ConfigError(
                f"steps = {config.steps} of batch.global_batch = {config.batch.global_batch} samples would read"
                f" {_source(part, data)} {often} times, more than its max_epochs = {part.max_epochs:g}: lower steps"
                f" or its weight, or raise max_epochs"
            )
    skips = any(p.on_bad_row == "skip" for p in parts)
    return Feed(
        samples,
        Loader(
            samples,
            config.batch.global_batch,
            rank,
            ranks,
            data.workers,
            finish=pixels,
            skip_unreadable=skips,
            ends=ends if ends is None or pixels is None else replace(ends, microbatch=0),  # a step's pixels are joined
        ),
        tuple(held_out_of(config, parts, corpora, stages)),
        _identity(parts, prepared, stages),
        describe(parts, corpora, epochs, config, stages[-1].weights),
        (
            *filter(None, (*(p.note for p in prepared), few_steps(config, ranks))),
            *notes_on(parts, corpora, data.seq_len),
        ),
        config,
        tasks,
        pixels,
        ends,
        "; ".join(filter(None, (p.other for p in prepared))),
        {} if skips else None,
    )


def _streamed(
    config: Config,
    parts: tuple[MixturePart, ...],
    tokenizer: Tokenizer,
    place: tuple[int, int],
    progress: Progress,
    ends: RowEnds | None,
) -> Feed:
    part, data = parts[0], config.data
    scan = agree.together(lambda: list_sources(part.source, part.format))
    assert scan is not None
    if scan.format in TOKEN_FORMATS:
        raise ConfigError(
            f"data.streaming: {scan.format} files hold token ids, which are read in place: leave streaming out"
        )
    recipe = agree.together(lambda: TokenisingRecipe(scan, part, tokenizer, 0.0, vision_for(config)))
    assert recipe is not None
    if len(set(agree.everybody_says(recipe.key))) > 1:
        raise ConfigError(
            f"the ranks see different files under {_source(part, data)}: copy the same files to each, or use a shared"
            f" folder"
        )
    samples = StreamedSamples(recipe, data.seq_len, progress.say)
    return Feed(
        samples,
        # several threads would read out of order, which restarts the stream
        Loader(samples, config.batch.global_batch, *place, min(data.workers, 1), ends=ends),
        (),
        {"data": recipe.key, "too_long": part.too_long, "streaming": True},
        f"{scan}, streamed (task: {recipe.task.name}) · {data.seq_len} per row · {config.batch.global_batch} rows per"
        f" step",
        (
            "a stream holds nothing out, is not shuffled, and is read again from its beginning when the run is"
            " continued",
        ),
        with_length(config, 0, (recipe.task.name,)),
        (recipe.task.name,),
        ends=ends,
    )


def refuse_contradictions(config: Config) -> None:
    """Refuse a data section that contradicts itself, before any data is read.

    Raises:
        ConfigError, UnsupportedError: as ``parts_of``; also for invalid mixture weights.
    """
    if config.epochs is not None and config.data.streaming:
        raise ConfigError(
            f"epochs = {config.epochs:g} and data.streaming are both given, but the length of a stream's epoch is"
            f" unknown until its end. Give steps instead"
        )
    Interleave(stages_of(config, parts_of(config.data)))


def stages_of(config: Config, parts: tuple[MixturePart, ...]) -> list[Stage]:
    """Return the mixture's weights over the run, as stages that begin at a sample.

    Raises:
        ConfigError: the curriculum's steps are out of order.
    """
    steps = [0, *(stage.from_step for stage in config.data.curriculum)]
    weights = [tuple(part.weight for part in parts), *(stage.weights for stage in config.data.curriculum)]
    if steps[1:2] == [0]:
        steps, weights = steps[1:], weights[1:]
    return [Stage(step * config.batch.global_batch, each) for step, each in zip(steps, weights, strict=True)]


def prepare_once_per_node(
    config: Config, part: MixturePart, tokenizer: Tokenizer, progress: Progress, vision: Vision
) -> Prepared:
    """Prepare a part: one process of each node reads its sources, and the others use the result."""
    first = get_world_info()[1] == 0
    d = config.data
    prefix = f"{part.name}: " if d.mixture else ""

    def prepared() -> Prepared:
        def say(line: str) -> None:
            progress.say(prefix + line)

        def tell(done: int, total: int) -> None:
            progress.portion(f"{prefix}reading", done, total)

        begun = _begun(config, part)
        return prepare(part, tokenizer, d.validation_fraction, d.cache or None, say, tell, vision, begun)

    mine = agree.together(prepared, here=first)
    reported = [(host, p) for host, p in agree.everybody_says((socket.gethostname(), mine)) if p is not None]
    if len({p.key for _, p in reported}) > 1:
        raise ConfigError(
            f"the nodes see different data under {_source(part, d)}: copy the same files to each, or use a shared"
            f" folder"
        )
    # for files that are read in place, each node has its own index
    own = [p for host, p in reported if host == socket.gethostname()]
    return mine or next((p for p in own or [p for _, p in reported] if p.folder.is_dir()), reported[0][1])


def _begun(config: Config, part: MixturePart) -> str:
    """Return the digest of a part's data with which the run that is continued began; "" of a new run."""
    kept = Path(config.run).expanduser() / IDENTITY
    data = read_object(kept).get("data") if config.run and kept.is_file() else ""
    if isinstance(data, dict):
        data = (data.get(part.name) or {}).get("data")
    return data if isinstance(data, str) else ""


def _source(part: MixturePart, data: DataConfig) -> str:
    return f"the part '{part.name}' of data.mixture" if data.mixture else f"data.source = {list(part.source)}"


def held_out_of(
    config: Config, parts: tuple[MixturePart, ...], corpora: list[Corpus], stages: list[Stage]
) -> Iterator[HeldOut]:
    """Yield each source's validation rows, in proportion to its last weight, so that the loss is the mixture's."""
    weights = stages[-1].weights
    for part, corpus, weight in zip(parts, corpora, weights, strict=True):
        if weight and corpus.validation.n_documents and _has_a_row(corpus.validation, config.data.seq_len):
            yield HeldOut(
                part.name, corpus.validation, max(1, round(config.validation.samples * weight / sum(weights)))
            )


def _has_a_row(split: Split, seq_len: int) -> bool:
    """Return whether a split has at least one row of ``seq_len`` tokens.

    Raises ConfigError if a conversation is too long for a row.
    """
    try:
        return split.n_samples(seq_len) > 0
    except ConfigError:
        if isinstance(split, Whole):
            raise
        return False


def _identity(parts: tuple[MixturePart, ...], prepared: list[Prepared], stages: list[Stage]) -> dict[str, Any]:
    if len(parts) == 1:
        return {"data": prepared[0].key} | (
            {"too_long": parts[0].too_long} if getattr(prepared[0].meta, "is_whole", False) else {}
        )
    rows = {part.name: {"data": p.key, "too_long": part.too_long} for part, p in zip(parts, prepared, strict=True)}
    return {"data": rows, "mixture": [asdict(stage) for stage in stages]}
