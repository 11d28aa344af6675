"""Prepare a run's sources once per node, open them on every rank, mix their rows and distribute them to the ranks."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.core.config import is_unset, unset
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
from meshwright.data.cache import open_parts, sizes_text
from meshwright.data.corpus import Pictured
from meshwright.data.images import PixelReader, Vision, vision_of
from meshwright.data.loader import StreamedSamples
from meshwright.data.options import MixturePart
from meshwright.data.packing import Joined, RowEnds, Stream, Whole, are_longer
from meshwright.data.scan import TOKEN_FORMATS, list_sources
from meshwright.data.turns import OWN, load_template
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import get_world_info
from meshwright.training.config import Config, DataConfig
from meshwright.training.fine_tuning import SHORT_ROW, SHORT_TEXT, TEXT, Counted, after_data, few_steps, why_chosen
from meshwright.training.model_source import FOLDER, question_ids, template_file
from meshwright.training.run.occupancy import Begun, begun_by
from meshwright.training.run.request import IDENTITY, RESOLVED, read_request

if TYPE_CHECKING:
    from meshwright.training.views.progress import Progress


MOST_HELD_OUT = 0.5
"""Largest data.validation_fraction that is advised."""


class UnreadSamples(MeshwrightError):
    """Raised on all ranks, before a step has begun, if one of them cannot read its samples."""


@dataclass(frozen=True)
class HeldOut:
    """Rows of one source that are evaluated.

    Attributes:
        name: name of the source.
        samples: the largest number of its rows that are read.
        source_bytes: size of the text, where all of it is read and nothing but text stands in its files.
        pixels: opens the images of a batch's rows, in an evaluation; None where they have none.
    """

    name: str
    split: Split
    samples: int
    source_bytes: int | None = None
    pixels: PixelReader | None = None


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
    config: Config,
    tokenizer: Tokenizer,
    rank: int,
    ranks: int,
    progress: Progress,
    ends: RowEnds | None = None,
    accepts: Callable[[Config], bool] | None = None,
) -> Feed:
    """Prepare, open and mix the sources (collective).

    Args:
        ends: where rows end; None: at data.seq_len.
        accepts: returns whether a layout carries a config's batch, where small data may make it smaller; None: it may
            not.

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
    begun = agree.decided_once(lambda: begun_by(config.run, config.checkpoint.folder))
    given = config, parts, prepared, tokenizer, (rank, ranks), vision, ends, accepts, begun
    opened = agree.together(lambda: _opened(*given))
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
    tokenizer: Tokenizer,
    place: tuple[int, int],
    vision: Vision,
    ends: RowEnds | None,
    accepts: Callable[[Config], bool] | None,
    begun: Begun,
) -> Feed:
    corpora, pixels = open_parts(prepared, parts, vision)
    if accepts is not None:
        config = short_enough(config, corpora)
    tasks = tuple(str(getattr(corpus.meta, "task", TEXT)) for corpus in corpora)
    counted = Counted(
        lambda seq_len: sum(corpus.training.n_samples(seq_len) for corpus in corpora),
        shortest_rows(corpora, config.data.seq_len),
        place[1] * max(corpus.training.rows_together for corpus in corpora),
        accepts,
        begun,
    )
    counted.rows(config.data.seq_len)  # refused at the length that was asked for, not at one that is chosen

    has_turns = "chat" in tasks or any(getattr(corpus.meta, "has_turns", False) for corpus in corpora)
    talks = _talks(config, tokenizer, vision, has_turns)
    asked_for, config = config, after_data(config, counted, tasks, talks=talks)
    data, names, stages = config.data, [part.name for part in parts], stages_of(config, parts)
    samples = Samples.of([corpus.training for corpus in corpora], data.seq_len, config.seed, names, Interleave(stages))
    rows = begun.rows_at(config.steps, config.batch.global_batch)
    epochs, weights = samples.epochs(rows), last_weights(stages, rows)
    for part, times in zip(parts, epochs.values(), strict=True):
        if part.max_epochs and times > part.max_epochs:
            often = epochs_text(times).partition(" ")[0]
            other = begun.rows != begun.steps * config.batch.global_batch
            so_far = f", the first {begun.steps} of {begun.rows} in all," * other
            raise ConfigError(
                f"steps = {config.steps} of batch.global_batch = {config.batch.global_batch} samples{so_far} would read"
                f" {_source(part, data)} {often} times, more than its max_epochs = {part.max_epochs:g}: lower steps"
                f" or its weight, or raise max_epochs"
            )
    if len(parts) == 1:
        too_long = {"too_long": parts[0].too_long} if getattr(prepared[0].meta, "is_whole", False) else {}
        identity = {"data": prepared[0].key} | too_long
    else:
        own = {part.name: {"data": p.key, "too_long": part.too_long} for part, p in zip(parts, prepared, strict=True)}
        identity = {"data": own, "mixture": [asdict(stage) for stage in stages]}
    skips = any(p.on_bad_row == "skip" for p in parts)
    held_out = tuple(held_out_of(config, parts, corpora, stages, rows))
    is_amiss = bool(config.validation.every) and not held_out
    return Feed(
        samples,
        Loader(
            samples,
            config.batch.global_batch,
            *place,
            data.workers,
            finish=pixels,
            skip_unreadable=skips,
            ends=ends if ends is None or pixels is None else replace(ends, microbatch=0),  # a step's pixels are joined
        ),
        held_out,
        identity,
        describe(parts, corpora, epochs, config, weights),
        (
            *filter(
                None,
                (*(p.note for p in prepared), why_chosen(asked_for, config, counted), few_steps(config, counted)),
            ),
            *notes_on(parts, corpora, asked_for.data.seq_len, data.seq_len),
            *([no_validation(config, prepared, corpora, weights)] if is_amiss else []),
        ),
        config,
        pixels,
        ends,
        "; ".join(filter(None, (*(p.other for p in prepared), moved_by_batch(config, stages)))),
        {} if skips else None,
    )


def _talks(config: Config, tokenizer: Tokenizer, vision: Vision, has_turns: bool) -> bool:
    """Return whether the prompt of samples goes into the chat template: as set, else where that writes the data.

    Raises:
        ConfigError: it is to, and there is no template, or the template refuses it.
    """
    wanted = config.sample.chat
    if wanted is False or not (wanted or has_turns):
        return False
    try:
        template = load_template(template_file(config), getattr(tokenizer, "folder", None))
        question_ids([{"role": "user", "content": config.sample.prompt}], template, tokenizer, vision)
    except (ConfigError, ValueError) as error:
        if wanted:
            raise ConfigError(f"sample.chat = true: {error}") from error
        return False
    return True


def short_enough(config: Config, corpora: Sequence[Corpus]) -> Config:
    """Return a config whose rows, if nobody set their length, are no longer than the shortest text."""
    fewest = min((c.training.n_tokens for c in corpora if not isinstance(c.training, Whole)), default=1 << 62)
    length = int(config.data.seq_len)
    while fewest < length and length > SHORT_ROW:
        length //= 2
    if length == config.data.seq_len or not is_unset(config.data.seq_len):
        return config
    return replace(config, data=replace(config.data, seq_len=unset(length)))


def shortest_rows(corpora: Sequence[Corpus], seq_len: int) -> int:
    """Return the least length of rows that cuts no document which rows of ``seq_len`` keep whole."""
    wholes = [split for c in corpora for split in (c.training, c.validation) if isinstance(split, Whole)]
    longest = [int(split.kept_lengths(seq_len).max()) for split in wholes if split.n_documents]
    texts = [SHORT_TEXT] * any(not isinstance(corpus.training, Whole) for corpus in corpora)
    return max([SHORT_ROW, *longest, *texts])


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
    vision = vision_for(config)
    recipe = agree.together(lambda: TokenisingRecipe(scan, part, tokenizer, 0.0, vision))
    assert recipe is not None
    task = recipe.task
    talks = _talks(config, tokenizer, vision, task.is_whole and not task.ends)
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
        f"{scan}, streamed (task: {recipe.task.name}) · {data.seq_len} tokens per row ·"
        f" {config.batch.global_batch} rows per step",
        (
            "a stream holds nothing out, is not shuffled, and is read again from its beginning when the run is"
            " continued",
        ),
        after_data(config, None, (task.name,), talks=talks),
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


def moved_by_batch(config: Config, stages: Sequence[Stage]) -> str:
    """Return how another batch moves the stages of the run that a config continues; "" where it does not."""
    kept = read_request(Path(config.run).expanduser(), RESOLVED) if config.run and len(stages) > 1 else None
    before, now = (one.batch.global_batch for one in (kept or config, config))
    begin = "stages of data.curriculum begin at sample from_step × batch.global_batch"
    return f"batch.global_batch was {before} and is now {now}, and {begin}" if before != now else ""


def last_weights(stages: Sequence[Stage], rows: int) -> tuple[float, ...]:
    """Return the mixture's weights at the end of a run of so many rows, which may not reach all stages."""
    return [stage.weights for stage in stages if stage.first < rows][-1]


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

        # the digest of the part's data with which a run that is continued began
        kept = Path(config.run).expanduser() / IDENTITY
        begun = read_object(kept).get("data") if config.run and kept.is_file() else ""
        if isinstance(begun, dict):
            begun = (begun.get(part.name) or {}).get("data")
        begun = begun if isinstance(begun, str) else ""
        return prepare(part, tokenizer, d.validation_fraction, d.cache or None, say, tell, vision, begun, d.seq_len)

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


def _source(part: MixturePart, data: DataConfig) -> str:
    return f"the part '{part.name}' of data.mixture" if data.mixture else f"data.source = {list(part.source)}"


def held_out_of(
    config: Config, parts: tuple[MixturePart, ...], corpora: list[Corpus], stages: list[Stage], rows: int
) -> Iterator[HeldOut]:
    """Yield each source's validation rows, in proportion to its last weight, so that the loss is the mixture's.

    Raises ConfigError if a conversation is too long for a row.
    """
    weights = last_weights(stages, rows)
    for part, corpus, weight in zip(parts, corpora, weights, strict=True):
        if not (weight and corpus.validation.n_documents):
            continue
        try:
            has_a_row = corpus.validation.n_samples(config.data.seq_len) > 0
        except ConfigError:
            if isinstance(corpus.validation, Whole):
                raise
            continue  # fewer tokens than a row
        if has_a_row:
            samples = max(1, round(config.validation.samples * weight / sum(weights)))
            yield HeldOut(part.name, corpus.validation, samples)


# --- describe the data in a line, and note what of it is left out


def describe(
    parts: tuple[MixturePart, ...], corpora: list[Corpus], epochs: dict[str, float], config: Config, weights: Any
) -> str:
    """Return a line with the sizes of a run's data; ``weights`` are those of the parts at the end of the run."""
    splits = [(corpus.training, corpus.validation) for corpus in corpora]
    seq_len = config.data.seq_len
    text = f"{sizes_text(splits, seq_len)} · {seq_len} tokens per row"
    if n_images := sum(split.n_images(seq_len) for both in splits for split in both if isinstance(split, Pictured)):
        text += f" · {n_images:,} images"
    text += f" · {(rows := config.batch.global_batch)} row{'s' * (rows > 1)} per step"
    if len(parts) == 1:
        return f"{text} · {epochs_text(epochs[parts[0].name])}"
    rows = [
        f"{part.name} {weight / sum(weights):.1%}, {epochs_text(epochs[part.name])}"
        for part, weight in zip(parts, weights, strict=True)
    ]
    return f"{text} · {len(parts)} sources: {'; '.join(rows)}"


def no_validation(config: Config, prepared: Sequence[Prepared], corpora: Sequence[Corpus], weights: Sequence) -> str:
    """Say that no source with a weight holds out a row of text, and which value of which key would make one do so.

    Documents are held out whole, in a drawn order, while they fit into the fraction: what is held out is smaller than
    the fraction by less than the longest document.
    """
    seq_len, fraction = config.data.seq_len, config.data.validation_fraction
    text = f"no validation: no source{'' if all(weights) else ' that the run ends with'} holds out a row of"
    text += f" data.seq_len = {seq_len} tokens (data.validation_fraction = {fraction})"
    texts = [
        (p, train, held)
        for p, c, weight in zip(prepared, corpora, weights, strict=True)
        if weight and isinstance(train := c.training, Stream) and isinstance(held := c.validation, Stream)
    ]
    if not (fraction and texts):
        return text
    source, train, held = max(texts, key=lambda text: text[1].n_tokens)
    longest = max(int(np.diff(split.offsets).max(initial=0)) for split in (train, held))
    if source.scan.format == "text" and len(source.scan.files) == 1:
        longest = 0  # a document that is alone is cut
    needed = 1.1 * (seq_len + longest) / (train.n_tokens + held.n_tokens)
    if needed <= MOST_HELD_OUT:
        return f"{text}: set data.validation_fraction = {math.ceil(100 * needed) / 100:g} to hold one out"
    return f"{text}: set data.seq_len = {held.n_tokens}, as long as what is held out" if held.n_tokens else text


def notes_on(parts: tuple[MixturePart, ...], corpora: list[Corpus], seq_len: int, used: int) -> Iterator[str]:
    """Yield notes on what of each part is left out or cut in rows as long as was asked for, and as they are used."""
    if len(named := dict.fromkeys(part.template for part in parts if part.template not in ("", OWN))) > 1:
        yield f"of the chat templates {', '.join(named)}, the run's folder and what is exported from it keep the first"
    for part, corpus in zip(parts, corpora, strict=True):
        wholes = [split for split in (corpus.training, corpus.validation) if isinstance(split, Whole)]
        if n := sum(split.n_too_long(seq_len) for split in wholes):
            left_out = n if part.too_long == "skip" else sum(split.n_unlearnt(seq_len) for split in wholes)
            why = ", since nothing to learn is left of them" * (part.too_long != "skip")
            among = sum(split.n_documents for split in wholes)
            fates = [f"{n - left_out} cut short"] * (n > left_out) + [f"{left_out} left out{why}"] * (left_out > 0)
            yield f"{n} of {among} documents {are_longer(n, seq_len)}: {' and '.join(fates)}"
        yield from (f"{', '.join(part.source)}: {note}" for note in getattr(corpus.meta, "notes", ()))
        if isinstance(train := corpus.training, Joined) and (files := len(train.parts)) > 1:
            left, short = train.n_tokens - train.n_samples(used) * used, sum(one.n_tokens < used for one in train.parts)
            if short or left > train.n_tokens / 100:
                yield (
                    f"{left:,} of the {train.n_tokens:,} tokens to train on of {', '.join(part.source)} are in no row"
                    f" of data.seq_len = {used} tokens, since no row goes on into another file ({short} of {files}"
                    f" files are shorter than a row): join the files into one, or lower data.seq_len"
                )
        skipped = sum(getattr(corpus.meta, "skipped", {}).values())
        if skipped:
            yield (
                f"{skipped} row{'s' * (skipped > 1)} of {', '.join(part.source)} could not be used and"
                f" {'are' if skipped > 1 else 'is'} left out (data.on_bad_row = 'skip')"
            )
