"""Print and write a run's reports: its header, the figures of each step, the closing report."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from meshwright.core.config import to_dict
from meshwright.core.errors import MeshwrightError, command
from meshwright.core.units import count_text
from meshwright.distributed.experts.load import LayerLoad
from meshwright.distributed.loss.preference import ACCURACIES, MARGINS
from meshwright.distributed.optimizer.parameter_groups import trained_names
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import is_rank_zero
from meshwright.distributed.step.results import StepLoss, StepResult
from meshwright.planning.plan import Plan
from meshwright.training.build import Run, build_schedule, device_name, most_tokens
from meshwright.training.config import Config
from meshwright.training.metrics.flops import mfu, peak_flops, training_flops_per_token
from meshwright.training.metrics.memory import read_memory
from meshwright.training.metrics.throughput import Throughput
from meshwright.training.metrics.trackers import Trackers, open_trackers
from meshwright.training.preference import where_reference_comes_from
from meshwright.training.run.checkpointing import Checkpointing, Position
from meshwright.training.run.folder import RunFolder

from .next_steps import next_steps
from .page.document import config_rows
from .page.history import ABSENT, BEGIN, SAMPLE, change
from .progress import Progress, StepReport
from .report import ClosingReport

Result = TypeVar("Result")


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
        self.last_loss: float | None = None
        self.last_validation: float | None = None
        self.expert_figures: dict[str, float] = {}
        self.pair_figures: dict[str, float] = {}
        facts = to_dict(self.config)
        wanted = (folder.path, self.config.logging, self.config.name, facts, self.say)
        opening = in_words(lambda: open_trackers(*wanted), f"cannot write in {folder.path}")
        self.trackers = agree.together(opening, here=is_rank_zero()) or Trackers()
        trained = set(trained_names(run.model.facts, run.plan))
        learnt = sum(fact.numel for fact in run.model.facts.parameters if fact.name in trained)
        self.frozen = max(0, run.shape.matmul_parameters - learnt)
        self.peak = peak_flops(device_name(run.model), run.plan.precision.compute)

    def say(self, text: str) -> None:
        """Print a message that stays."""
        self.progress.say(text)

    def header(self) -> None:
        """Print the run's model, layout, data and optimizer."""
        c, plan = self.r.shape, self.r.plan
        size = f"{count_text(c.parameters)} parameters, {c.n_layers} blocks, dim {c.dim}, vocabulary {c.vocab_size:,}"
        reference = where_reference_comes_from(self.r.feed, self.r.model)
        whole, most = self.config.schedule.tokens or 0, most_tokens(self.config)
        early = f" (the run ends before, at token {most:,} at the latest)" if whole > most else ""
        less = ", 4 for each of N that is frozen," if self.frozen else ""
        counted = f"(6N + 12·L·d·s) FLOPs per token that is no padding{less}"
        lines = [
            f"meshwright · {self.config.name}",
            f"model: {size}",
            *([f"weights: {self.r.weights}"] if self.config.model.hf else []),
            *([f"default: {self.r.chosen}, as usual in fine-tuning"] if self.r.chosen else []),
            f"layout: {mesh_words(plan)} · {plan.data.technique} · {plan.precision.compute} on {plan.device}",
            f"data: {self.r.feed.description}",
            *(f"note: {note}" for note in self.r.feed.notes),
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
        if not (step and of_rate) or f"{was:.2e}" == f"{rate:.2e}":
            return
        advice = f"leave {', '.join(text.partition(' ')[0] for text in of_rate)} as before"
        if was and rate:
            peak = new.peak * was / rate
            advice = f"to go on at that rate, set optimizer.lr = {peak:.6g}"
            if new.kind != "constant":
                advice += (
                    f" (it ends at {new(new.total_steps - 1) * was / rate:.2e}), or schedule.kind = constant beside"
                )
                advice += f" optimizer.lr = {was:.6g}"
        self.say(
            f"note: the learning rate jumps: step {step + 1} has {rate:.2e}, where the schedule before had {was:.2e}"
            f" ({', '.join(of_rate)}); {advice}"
        )

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
        self.last_loss = float(loss)
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
            loss=self.last_loss,
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

    def step(self, report: StepReport, validated: Validated | None, more: Mapping[str, float]) -> None:
        """Show a step, and write its line of metrics where one is due; ``more`` is written in any case."""
        if validated is not None:
            self.last_validation = validated.loss
            report = replace(report, validation_loss=validated.loss)
        self.progress.update(report)
        if (
            self.at.step % self.config.logging.every == 0
            or validated is not None
            or more
            or self.at.step == self.config.steps
        ):
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
            known = {} if report.mfu is None else {"mfu": report.mfu}
            known |= {} if self.r.model.loss_scale is None else {"loss_scale": self.r.model.loss_scale.value}
            figures = values | self.pair_figures | self.expert_figures | dict(more) | found | known
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
            raise MeshwrightError(
                f"cannot write {self.folder.path / 'metrics.jsonl'}: {self.trouble}. Make room, then continue with:"
                f" {command('train', self.folder.path)}"
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
            loss=self.last_loss,
            validation_loss=self.last_validation,
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
        if stopped:
            again = command("train", self.folder.path)
            self.say(f"\nstopped by {signal.Signals(stopped).name}, saved. Continue with: {again}")
        else:
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
