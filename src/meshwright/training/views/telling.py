"""Print and write a run's reports: its header, samples of its data, the figures of each step, the closing report."""

from __future__ import annotations

import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

import numpy as np

from meshwright.checkpoint.store import OWN_MEMORY
from meshwright.core.config import to_dict
from meshwright.core.dtypes import count_text, duration_text
from meshwright.core.errors import MeshwrightError, command, from_here
from meshwright.data import default_cache_dir, scan_sources
from meshwright.data.building import TokenisingRecipe
from meshwright.data.cache import account_of
from meshwright.data.corpus import TRAINING
from meshwright.data.mapped import IndexingRecipe
from meshwright.data.options import FARMYARD
from meshwright.data.scan import TOKEN_FORMATS
from meshwright.distributed.experts import LayerLoad
from meshwright.distributed.loss.preference import ACCURACIES, MARGINS
from meshwright.distributed.optimizer.parameter_groups import trained_names
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import is_rank_zero
from meshwright.distributed.step.part import StepLoss, StepResult
from meshwright.planning.plan import Plan
from meshwright.training.build import Run, build_schedule, device_name, most_tokens
from meshwright.training.config import Config
from meshwright.training.feed import parts_of, vision_for
from meshwright.training.fine_tuning import chosen, is_fine_tuning, more_or_fewer
from meshwright.training.memory import read_memory
from meshwright.training.metrics import Trackers, open_trackers
from meshwright.training.model_source import run_tokenizer, where_weights_come_from
from meshwright.training.preference import where_reference_comes_from
from meshwright.training.run.checkpointing import Checkpointing, Position
from meshwright.training.run.folder import RunFolder
from meshwright.training.throughput import Throughput, mfu, peak_flops, training_flops_per_token
from meshwright.training.views.page import ABSENT, BEGIN, SAMPLE, change, config_rows, printable
from meshwright.training.views.progress import PlainProgress, Progress, StepReport

if TYPE_CHECKING:
    from rich.console import Console

# --- choose how a run shows its progress


def build_progress(*, is_main: bool, stream: TextIO | None = None) -> Progress:
    """Return the progress for the output: silent on ranks that are not ``is_main``, live on a terminal, plain lines
    elsewhere.

    A terminal that cannot place a cursor (``TERM=dumb``) or show the bars (not UTF-8) gets plain lines too.

    Args:
        is_main: whether this rank prints for the run.
        stream: where to write; standard output by default.
    """
    if not is_main:
        return Progress()
    if not (stream or sys.stdout).isatty():
        return PlainProgress(stream)
    from rich.console import Console  # imported for terminals only: batch jobs save 0.1 s

    from meshwright.training.views.live import LiveProgress

    console = Console(file=stream)
    if console.is_dumb_terminal or not console.encoding.lower().startswith("utf"):
        return PlainProgress(stream)
    return LiveProgress(console)


# --- show the first samples of a run's data, and which of their tokens are trained on

_SHOWN = 2000
"""Tokens of a document that are shown."""


def show_data(config: Config, documents: int, console: Console) -> None:
    """Print each source's format and task, what becomes of its records, and its first documents: tokens that are not
    trained on are grey on a terminal, and in [[ ]] elsewhere.
    """
    from rich.text import Text

    def show(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    tokenizer = run_tokenizer(config, console.print)
    memory = Path(config.data.cache).expanduser() if config.data.cache else default_cache_dir()
    for part in parts_of(config.data):
        scan = scan_sources(part.source, part.format, memory=memory)
        title = f"{part.name} · " if config.data.mixture else ""
        console.print(Text(f"{title}{', '.join(part.source)}", style="bold"))
        show(f"  format     {scan.format}, {scan}")
        vision, fraction = vision_for(config), config.data.validation_fraction
        if scan.format in TOKEN_FORMATS:
            task, lines, shown = "text, as token ids", (), _mapped(IndexingRecipe(scan, part, tokenizer, 0.0))
        else:
            recipe = read = TokenisingRecipe(scan, part, tokenizer, fraction, vision)
            task = recipe.task.name
            if scan.format != "text":
                why = "data.task" if part.task != "auto" else "by the columns of the first record"
                task += f" ({why}), which reads {', '.join(recipe.task.columns)}"
                read = TokenisingRecipe(scan, replace(part, on_bad_row="skip"), tokenizer, 0.0, vision)
            lines, shown = account_of(recipe).lines(config.data.seq_len), _tokenised(read)
        named = f"{tokenizer!r}, vocabulary {tokenizer.vocab_size:,}"
        mark = "grey" if console.is_terminal else "[[ ]]"
        for title, line in (("task", task), ("tokenizer", named), *lines, (mark, "is read, and not learnt")):
            show(f"  {title:<10} {line}")
        for number, document in enumerate(islice(shown, documents), 1):
            runs = list(document)
            total, learnt = (sum(len(ids) for is_learnt, ids, _ in runs if is_learnt or n) for n in (True, False))
            images = sum(bool(image) for *_, image in runs)
            pictured = f", {images} image{'s' * (images != 1)}" if images else ""
            show(f"\n  document {number}: {total} tokens, {learnt} of them learnt{pictured}")
            text, left = Text(), _SHOWN
            spelt = getattr(tokenizer, "spell_out", tokenizer.decode)
            for is_learnt, ids, image in runs:
                piece = f"<{image}: {len(ids)} tokens>" if image and left else spelt(ids[:left])
                is_grey = not is_learnt and console.is_terminal
                text.append(piece if is_learnt or is_grey else f"[[{piece}]]", "bright_black" if is_grey else None)
                left = max(left - len(ids), 0)
            text.append(" …" if total > _SHOWN else "")
            console.print(text)


Document = Iterable[tuple[bool, np.ndarray, str]]
"""Runs of token ids: whether they are trained on, the ids, and the name and size of their image, if they are one's."""


def _mapped(recipe: IndexingRecipe) -> Iterator[Document]:
    for file in recipe.files:
        ids = file.open()[: 1 << 20]
        recipe.check(file, 0, ids)
        yield from ([(True, document, "")] for document in recipe.documents(file, ids))


def _tokenised(recipe: TokenisingRecipe) -> Iterator[Document]:
    encoder = recipe.encoder()
    for _, example in recipe.unsplit():
        ((_, ids, learnt, images),) = encoder.encode(iter([(TRAINING, example)]))
        if learnt is None:
            yield [(True, ids, "")]
            continue
        named = {begin: f"{file.name} {file.width} x {file.height}" for begin, _, file in images}
        turns = np.flatnonzero(np.diff(learnt, prepend=~learnt[:1])).tolist()
        edges = sorted({*turns, *named, *(last for _, last, _ in images)} - {len(ids)})
        yield [(bool(learnt[a]), ids[a:b], named.get(a, "")) for a, b in pairwise([*edges, len(ids)])]


# --- print a run's results, and where everything is


@dataclass(frozen=True)
class ClosingReport:
    """The facts of a finished (or stopped) run; :meth:`text` is what is printed."""

    run_folder: Path
    step: int
    """Finished optimizer steps."""
    total_steps: int
    loss: float | None
    """Training loss of the last step."""
    first_loss: float | None = None
    """Of the first step that this process took."""
    validation_loss: float | None = None
    first_validation: float | None = None
    """Before the first step."""
    validated_pairs: tuple[float, float] | None = None
    """On preference pairs: mean margin and accuracy of the last validation."""
    tokens: int | None = None
    """Tokens trained on, all ranks together."""
    seconds: float | None = None
    """Wall-clock seconds from the process's start to here."""
    skipped: int = 0
    """Steps skipped for gradients that were not finite."""
    checkpoint: Path | str | None = None
    config: Path | None = None
    places: Sequence[tuple[str, str]] = ()
    """(tracker, where its figures are or why there are none)."""
    sample: str | None = None
    """Text generated by the trained model."""
    untrained: str | None = None
    """The same by the model before its first step."""

    def text(self, width: int = 100) -> str:
        """Format the outcome, the places (those inside the run folder relative to it), and the sample, folded at
        ``width``.
        """
        begun, before = (
            f"{loss:.4f} → " if loss is not None and self.step > 1 else ""
            # losses of two steps are of other rows: where the held-out rows tell, they tell alone
            for loss in (self.first_loss if self.first_validation is None else None, self.first_validation)
        )
        parts = [
            f"done: {self.step:,} step{'s' * (self.step > 1)}"
            if self.step >= self.total_steps
            else f"stopped at step {self.step:,} of {self.total_steps:,}",
            f"{count_text(self.tokens)} tokens" if self.tokens is not None else "",
            duration_text(self.seconds) if self.seconds is not None else "",
            "" if self.loss is None else f"loss {begun}{self.loss:.4f}",
            f"validation loss {before}{self.validation_loss:.4f}" if self.validation_loss is not None else "",
            "validation margin {:.4f}, accuracy {:.0%}".format(*pairs) if (pairs := self.validated_pairs) else "",
            f"{self.skipped} steps skipped" if self.skipped else "",
        ]
        checkpoint, config = (
            str(path or "").removeprefix(f"{self.run_folder}/") for path in (self.checkpoint, self.config)
        )
        rows = [("run folder", str(self.run_folder)), ("checkpoint", checkpoint or "none was saved")]
        rows += [*([("config", config)] if config else []), *self.places]
        column = max(len(name) for name, _ in rows)
        lines = [" · ".join(filter(None, parts)), *(f"  {name:<{column}}  {text}" for name, text in rows)]
        if self.sample is not None:
            if self.untrained is not None:
                lines += ["", "sample before training", *_folded(self.untrained, width)]
            title = "sample" if self.untrained is None else "sample after training"
            lines += ["", title, *_folded(self.sample, width)]
        return "\n".join(lines)


def _folded(text: str, width: int) -> list[str]:
    """Fold a text into indented lines of at most ``width`` characters, with the text's own line breaks."""
    wide = max(width - 2, 20)
    lines = (textwrap.wrap(line, wide, replace_whitespace=False) or [""] for line in printable(text).split("\n"))
    return [f"  {line}".rstrip() for folded in lines for line in folded]


# --- print commands to go on with at the end of a run

FORECAST = ("--gpus", 8, "--gpu", "h100", "--model.size=8B", "--data.seq_len=4096")


def is_demo(config: Config) -> bool:
    """Return whether a run trains a model of random weights on the demo's text."""
    return config.data.source == (FARMYARD,) and not config.data.mixture and not config.model.hf


def next_steps(folder: Path, config: Config, plan: Plan) -> str:
    """Return the command that writes another text, and behind the demo some more to try."""
    prompt = config.sample.prompt
    words = ["--prompt", prompt] if prompt.isprintable() else []
    base = ["--base", from_here(config.model.hf)] if config.adapters is not None else []
    lines = [f"sample again with: {command('generate', folder, *words, *base)}"]
    if config.model.hf:
        form = "hf" if config.adapters is None else "merged"
        lines.append(f"write it for transformers with: {command('convert', folder, '--to', form, 'FOLDER', *base)}")
    if is_demo(config):
        axis = "pp" if dict(plan.mesh).get("tp", 1) > 1 else "tp"
        layout = [("another layout, the same losses", command("train", f"--layout.{axis}=2"))]
        tries = [
            ("the sentence about another animal", command("generate", folder, "--prompt", "My sleepy owl")),
            *(layout if plan.world % 2 == 0 else []),
            ("layouts of a large model on GPUs that need not be here", command("plan", *FORECAST)),
        ]
        lines += ["", "try next", *(line for why, words in tries for line in (f"  {why}:", f"    {words}"))]
    return "\n".join(lines)


# --- print and write a run's reports

Result = TypeVar("Result")
JUMP = 0.05
"""Relative change of the rate that is told when a run is continued."""


@dataclass
class Validated:
    """The losses of a validation: summed over tokens (or pairs of answers), by source."""

    sums: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    of_pairs: dict[str, float] = field(default_factory=dict)
    """Figures of pairs of answers, summed over the pairs of all sources."""

    def add(self, source: str, loss: float, weight: float, figures: Mapping[str, float] | None = None) -> None:
        """Count a batch, whose mean loss is ``loss``, over tokens (or pairs) of this weight."""
        for name, mean in (figures or {}).items():
            self.of_pairs[name] = self.of_pairs.get(name, 0.0) + mean * weight
        self.sums[source] = self.sums.get(source, 0.0) + loss * weight
        self.weights[source] = self.weights.get(source, 0.0) + weight

    @property
    def loss(self) -> float:
        """Mean over all tokens, or pairs."""
        return sum(self.sums.values()) / (sum(self.weights.values()) or 1.0)

    def figures(self) -> dict[str, float]:
        """Return the validation figures; each source's own where there are several."""
        own = {f"validation_loss/{name}": self.sums[name] / (self.weights[name] or 1.0) for name in self.sums}
        total = sum(self.weights.values()) or 1.0
        pairs = {f"validation_{name}": value / total for name, value in self.of_pairs.items()}
        return {"validation_loss": self.loss, **(own if len(own) > 1 else {}), **pairs}


OF_RATE = ("steps", "optimizer.lr", "schedule.")
"""Beginnings of the keys that a learning rate follows from."""


def mesh_words(plan: Plan) -> str:
    """Return a plan's mesh in words, as ``dp_shard=2 × tp=2``; axes of one rank are left out."""
    axes = [*plan.mesh, *([("ep", plan.experts.ranks)] if plan.experts is not None else [])]
    return " × ".join(f"{axis}={n}" for axis, n in axes if n > 1) or "one process"


class Teller:
    """Reports a run on the first rank; silent on the others, with the same methods. Construction is collective.

    Attributes:
        trouble: the error while writing figures, on the rank that writes them; the loop shares it with all ranks.
    """

    def __init__(self, run: Run, folder: RunFolder, at: Position, progress: Progress):
        self.r, self.folder, self.at, self.progress = run, folder, at, progress
        self.config = run.config
        self.throughput = Throughput()
        self.trouble: OSError | None = None
        self.begun: tuple[dict[str, str], int] | None = None
        self.losses: list[float] = []
        self.validations: dict[int, float] = {}
        self.validated_pairs: tuple[float, float] | None = None
        self.expert_figures: dict[str, float] = {}
        self.pair_figures: dict[str, float] = {}
        facts = to_dict(self.config)
        wanted = (folder.path, self.config.logging, self.config.name, facts, self.say)
        opening = in_words(lambda: open_trackers(*wanted), f"cannot write in {folder.path}")
        self.trackers = agree.together(opening, here=is_rank_zero()) or Trackers()
        trained = set(trained_names(run.model.facts, run.plan))
        self.learnt = sum(fact.numel for fact in run.model.facts.parameters if fact.name in trained)
        self.frozen = max(0, run.shape.matmul_parameters - self.learnt)
        self.peak = peak_flops(device_name(run.model), run.plan.precision.compute)

    def say(self, text: str) -> None:
        """Print a message that stays."""
        self.progress.say(text)

    def header(self) -> None:
        """Print the run's model, layout, data and optimizer."""
        c, plan = self.r.shape, self.r.plan
        size = f"{count_text(c.parameters)} parameters, {c.n_layers} blocks, dim {c.dim}, vocabulary {c.vocab_size:,}"
        default, reference = chosen(self.r.request), where_reference_comes_from(self.config, self.r.feed, self.r.model)
        whole, most = self.config.schedule.tokens or 0, most_tokens(self.config)
        early = f" (the run ends before, at token {most:,} at the latest)" if whole > most else ""
        less = ", 4 for each of N that is frozen," if self.frozen else ""
        counted = f"(6N + 12·L·d·s) FLOPs per token that is no padding{less}"
        lines = [
            f"meshwright · {self.config.name}",
            f"model: {size}",
            *([f"weights: {where_weights_come_from(self.r.request)}"] if self.config.model.hf else []),
            *([f"trained: {count_text(self.learnt)} of the parameters"] if self.frozen else []),
            f"data: {self.r.feed.description}",
            *(f"note: {note}" for note in self.r.feed.notes),
            *([f"default: {default}, as usual in fine-tuning"] if default else []),
            f"layout: {mesh_words(plan)} · {plan.data.technique} · {plan.precision.compute} on {plan.device}",
            *([f"note: reference of the pairs: {reference}"] if reference else []),
            f"rate: {self.r.schedule.describe()}{early} · {self.r.optimizer.implementation} {plan.optimizer.row.title}",
            *([f"MFU: {counted} over {self.peak / 1e12:,.0f} TFLOP/s (PaLM, appendix B)"] if self.peak else []),
            f"folder: {self.folder.path}",
        ]
        self.progress.start(lines)

    def begin(self, before: Config) -> None:
        """Record that the run begins or is continued: its layout, and the keys that differ from ``before``.

        A learning rate that jumps because of them is said.
        """
        shown = {key: value for key, value, _ in config_rows(before)}
        now = {key: value for key, value, _ in config_rows(self.config)}
        changed = {key: change(shown.get(key, ABSENT), value) for key, value in now.items() if shown.get(key) != value}
        changed |= {key: change(value, ABSENT) for key, value in shown.items() if key not in now}
        facts = {"layout": mesh_words(self.r.plan), **changed}, self.at.step
        self.begun = None if self.trackers.has_past else facts
        if self.trackers.has_past:
            self.event(BEGIN, *facts)
        of_rate = [f"{key} {text}" for key, text in changed.items() if key.startswith(OF_RATE)]
        old, new, step = build_schedule(before), self.r.schedule, self.at.step
        if old.kind == "inverse_sqrt":  # its rates do not follow from its end
            old = replace(old, total_steps=max(old.total_steps, new.total_steps))
        was, rate = (each(each.place(step, self.at.tokens + 1)) for each in (old, new))
        if not (step and of_rate) or abs(rate - was) <= JUMP * max(rate, was):
            return
        advice = f"leave {', '.join(text.partition(' ')[0] for text in of_rate)} as before"
        if was and rate:
            peak = new.peak * was / rate
            advice = f"to go on at that rate, set optimizer.lr = {peak:.6g}"
            if new.kind != "constant":
                flat = replace(new, kind="constant")  # within its warm-up this is below its peak too
                flat_peak = new.peak * was / flat(flat.place(step, self.at.tokens + 1))
                advice += (
                    f" (it ends at {new(new.total_steps - 1) * was / rate:.2e}), or schedule.kind = constant beside"
                )
                advice += f" optimizer.lr = {flat_peak:.6g}"
        self.say(
            f"note: the learning rate jumps: step {step + 1} has {rate:.2e}, where the schedule before had {was:.2e}"
            f" ({', '.join(of_rate)}); {advice}"
        )

    def untrained(self, validated: Validated) -> None:
        """Print and write the validation before the first step."""
        self.validations[0] = validated.loss
        self.say(f"before the first step · val loss {validated.loss:.4f}")
        self.event("untrained", validated.figures(), 0)

    def started(self, seconds: Mapping[str, float]) -> None:
        """Write how long the parts of the start took: the first line of a new run's metrics."""
        self.event("startup", seconds)
        if self.begun is not None:
            self.event(BEGIN, *self.begun)

    def measured(
        self, rate: float, loss: StepLoss, result: StepResult, seconds: float, loads: Sequence[LayerLoad]
    ) -> StepReport:
        """Return the figures of the step that was just taken; ``loads`` are its experts' loads, if reported."""
        self.expert_figures = figures_of_experts(loads)
        self.losses.append(float(loss))
        self.pair_figures = {name: float(value) for name, value in loss.figures.items()}
        self.throughput.add(self.r.feed.row_lengths().tolist(), seconds)
        c = self.r.shape
        flops = training_flops_per_token(
            c.matmul_parameters - self.frozen,
            n_layers=c.n_layers,
            dim_attention=c.dim_attention,
            seq_len=self.throughput.row_length,
            frozen_matmul_parameters=self.frozen,
        )
        memory = read_memory(self.r.model.device)
        speed = self.throughput.tokens_per_second
        return StepReport(
            step=self.at.step,
            total_steps=self.config.steps,
            loss=self.losses[-1],
            grad_norm=result.grad_norm,
            learning_rate=rate,
            tokens_per_second=speed,
            memory_bytes=memory.peak,
            memory_label=memory.label,
            mfu=mfu(speed, flops, self.peak, self.r.plan.world),
            skipped=self.at.skipped,
            busiest_expert=self.expert_figures.get("experts.max_over_mean"),
            pairs=(self.pair_figures[MARGINS], self.pair_figures[ACCURACIES]) if self.pair_figures else None,
            eta_seconds=self.throughput.eta_seconds(self.config.steps - self.at.step),
        )

    def step(self, report: StepReport, validated: Validated | None) -> None:
        """Show a step, and write its line of metrics where one is due."""
        if validated is not None:
            self.validations[self.at.step] = validated.loss
            report = replace(report, validation_loss=validated.loss)
        self.progress.update(report)
        if self.at.step % self.config.logging.every == 0 or validated is not None or self.at.step == self.config.steps:
            values = {
                "loss": report.loss,
                "grad_norm": report.grad_norm,
                "learning_rate": report.learning_rate,
                "tokens_per_second": report.tokens_per_second,
                "memory_bytes": report.memory_bytes,
                "tokens": self.at.tokens,
                "samples": self.r.feed.loader.state,
                "skipped": self.at.skipped,
            }
            found = validated.figures() if validated else {}
            if validated and validated.of_pairs:
                self.validated_pairs = found[f"validation_{MARGINS}"], found[f"validation_{ACCURACIES}"]
            known = {} if report.mfu is None else {"mfu": report.mfu}
            known |= {} if self.r.model.loss_scale is None else {"loss_scale": self.r.model.loss_scale.value}
            figures = values | self.pair_figures | self.expert_figures | found | known
            self.note(lambda: self.trackers.log(self.at.step, figures))

    def event(self, name: str, values: Mapping[str, object], step: int | None = None) -> None:
        """Write an event that happens once."""
        self.note(lambda: self.trackers.event(name, values, step))

    def note(self, write: Callable[[], None]) -> None:
        """Write figures, and store a disk error for the loop: it occurs on one rank, and all must stop together."""
        try:
            write()
        except OSError as error:
            self.trouble = self.trouble or error

    def left_out(self, samples: list[str]) -> None:
        """Report the samples that could not be read, a few of them by name."""
        if samples:
            more = f"; and {len(samples) - 3} more" if len(samples) > 3 else ""
            why = "could not be read and were left out (data.on_bad_row = 'skip')"
            self.say(f"{len(samples)} samples {why}: {'; '.join(samples[:3])}{more}")

    def raise_trouble(self) -> None:
        """Raise MeshwrightError where figures could not be written."""
        if self.trouble is not None:
            run = self.folder.path
            repair = (
                "Make room" if run.is_dir() else f"{run} was moved or removed: move it back, or put a link to it there"
            )
            raise MeshwrightError(
                f"cannot write {run / 'metrics.jsonl'}: {self.trouble}. {repair}, then continue with:"
                f" {command('train', run)}"
            )

    def close(
        self,
        stopped: int,
        seconds: float,
        checkpoints: Checkpointing,
        sample: str | None,
        untrained: str | None = None,
    ) -> None:
        """Print the closing report, and the command to continue or to sample.

        ``untrained``: what the model wrote in place of ``sample`` before its first step, if it was asked.
        """
        report = ClosingReport(
            run_folder=self.folder.path,
            step=self.at.step,
            total_steps=self.config.steps,
            loss=self.losses[-1] if self.losses else None,
            first_loss=self.losses[0] if self.losses else None,
            validation_loss=next(reversed(self.validations.values()), None),
            first_validation=self.validations.get(0),
            validated_pairs=self.validated_pairs,
            tokens=self.at.tokens,
            seconds=seconds,
            skipped=self.at.skipped,
            checkpoint=checkpoints.latest,
            config=self.folder.config,
            places=self.trackers.places,
            sample=sample,
            untrained=untrained,
        )
        if sample is not None:
            self.event(SAMPLE, {"prompt": str(self.config.sample.prompt), "text": sample}, self.at.step)
        self.trackers.close()
        self.progress.close()
        self.say("\n" + report.text())
        if not (lasts := not self.config.checkpoint.folder.startswith(OWN_MEMORY)):
            self.say("\nits checkpoints are in the memory of this process, and end with it")
        if stopped:
            again = f". Continue with: {command('train', self.folder.path)}" if lasts else ""
            self.say(f"\nstopped by {signal.Signals(stopped).name}, saved{again}")
        elif lasts:
            asked = self.r.request
            are_pairs = bool(self.pair_figures)
            outlook = more_or_fewer(asked, self.losses, self.validations, is_of_pairs=are_pairs)
            if is_fine_tuning(asked) and outlook:
                self.say(f"\n{outlook}")
            self.say("\n" + next_steps(self.folder.path, self.config, self.r.plan))


def figures_of_experts(loads: Sequence[LayerLoad]) -> dict[str, float]:
    """Return metrics of the distribution of tokens over experts: for the worst layer, and for each."""
    if not loads:
        return {}
    worst = {
        "experts.max_over_mean": max(load.max_over_mean for load in loads),
        "experts.entropy": min(load.entropy for load in loads),
        "experts.dropped": float(sum(load.dropped for load in loads)),
    }
    sizes = {load.path: load.router_z for load in loads if load.router_z is not None}
    if sizes:
        worst["experts.router_z"] = max(sizes.values())
    by_layer = {
        f"experts.{load.path}.{key}": getattr(load, key)
        for load in loads
        for key in ("max_over_mean", "entropy", "dropped")
    }
    return worst | by_layer | {f"experts.{path}.router_z": size for path, size in sizes.items()}


def in_words(action: Callable[[], Result], what: str) -> Callable[[], Result]:
    """Wrap an action so that a disk error becomes a MeshwrightError that begins with ``what``."""

    def worded() -> Result:
        try:
            return action()
        except OSError as error:
            raise MeshwrightError(f"{what}: {error}. Nothing that was saved is lost.") from error

    return worded
