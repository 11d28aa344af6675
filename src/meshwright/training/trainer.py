"""The loop. It knows no parallelism: every layout takes the same step."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import meshwright.checkpoint as checkpoint
from meshwright.checkpoint.manifest import NAME as MANIFEST
from meshwright.core.errors import MeshwrightError
from meshwright.core.units import bytes_text, count_text, duration_text
from meshwright.data import validation_batches
from meshwright.distributed import agree
from meshwright.distributed.mesh import data_position
from meshwright.distributed.setup import begin_steps, destroy_distributed
from meshwright.distributed.world import is_rank_zero
from meshwright.models.decoder_config import parameter_count

from .build import Run, build_run, device_name
from .config import Config, check
from .monitoring.flops import mfu, peak_flops, training_flops_per_token
from .monitoring.memory import read_memory
from .monitoring.metrics import MetricsWriter, SilentMetrics, check_tensorboard
from .monitoring.progress import Progress, StepReport, build_progress
from .monitoring.report import ClosingReport
from .monitoring.throughput import Throughput
from .monitoring.timeline import Timeline
from .run_folder import RunFolder
from .stopping import StopRequest


class Trainer:
    """One run, from a config to a trained checkpoint. Every rank makes one and calls ``run``.

    Args:
        config: the typed config, or a plain dict of it.
        started: ``time.time()`` of the command that started the run, for the start-up timeline.

    Raises:
        ConfigError: a value of the config is out of its range.
    """

    def __init__(self, config: Config | Mapping[str, Any], *, started: float | None = None):
        self.config = config if isinstance(config, Config) else Config.from_dict(config)
        check(self.config)
        self.started = started or time.time()
        self.timeline = Timeline()

    def run(self) -> int:
        """Train to the end, or until a signal; returns the exit status: 0 done, 128 + n after a clean stop by signal n.

        Raises:
            MeshwrightError: refused before the start, or too many steps in a row were skipped.
        """
        self.timeline.record("launch", time.time() - self.started)
        check_tensorboard(self.config.logging.tensorboard)
        with StopRequest() as stop, build_progress(is_main=is_rank_zero()) as progress:
            try:
                run = build_run(self.config, self.timeline, progress.say, stop)
                if stopped := agree.largest(stop.signal):
                    progress.say(f"stopped by {signal.Signals(stopped).name} before the first step; nothing was written")
                    return 128 + stopped
                folder = _open_folder(run, self.config)
                return _Loop(run, folder, self, stop, progress).train()
            finally:
                destroy_distributed()


def _open_folder(run: Run, config: Config) -> RunFolder:
    opened = agree.together(lambda: RunFolder.open(config, run.identity), here=is_rank_zero())
    return agree.from_rank_zero(opened)


class _Loop:
    """The state of the loop: how far it is, what it has seen, and where it tells of it."""

    def __init__(self, run: Run, folder: RunFolder, trainer: Trainer, stop: StopRequest, progress: Progress):
        self.r, self.folder, self.stop, self.progress = run, folder, stop, progress
        self.config, self.timeline, self.started = run.config, trainer.timeline, trainer.started
        self.step = self.skipped_in_a_row = self.skipped = 0
        self.tokens = 0
        self.last_loss: float | None = None
        self.last_validation: float | None = None
        self.saved: Path | None = None
        self.throughput = Throughput()
        opened = agree.together(lambda: MetricsWriter(folder.path, self.config.logging.tensorboard), here=is_rank_zero())
        self.metrics: MetricsWriter | SilentMetrics = opened or SilentMetrics()
        self.rank, self.ranks = data_position(run.model.mesh)
        c = run.model_config
        embedding = 0 if c.tied_embeddings else c.vocab_size * c.dim
        self.flops = training_flops_per_token(
            parameter_count(c) - embedding, n_layers=c.n_layers, dim_attention=c.n_heads * c.head_dim, seq_len=self.config.data.seq_len
        )
        self.peak = peak_flops(device_name(run.model), run.plan.precision.compute)

    def train(self) -> int:
        self._resume()
        self.progress.start(self._header())
        if self.step >= self.config.steps:
            self.progress.say(f"this run is complete: step {self.step} of {self.config.steps}. Raise steps to train it further.")
            return self._close(0)
        self._begin()
        stopped, validates = 0, self._validates()
        while self.step < self.config.steps and not stopped:
            report = self._one_step()
            stopped = agree.largest(self.stop.signal)
            due = validates and self._is_due(self.config.validation.every) and not stopped
            if due:
                self.last_validation = self._validate()
            self._tell(report, self.last_validation if due else None)
            self._refuse_to_skip_on()
            if stopped or self._is_due(self.config.checkpoint.every):
                self._save()
        return self._close(stopped)

    def _begin(self) -> None:
        """Write down what the run is made of; what its metrics say of steps that will be taken again belongs to an abandoned past."""
        write = self.folder.write_facts
        agree.together(lambda: write(self.config, self.r.identity, self.r.plan.to_json()), here=is_rank_zero())
        if self.step or self.metrics.has_past:
            self.metrics.resumed(self.step)

    def _validates(self) -> bool:
        """Whether there will be validations; where they are wanted and cannot be, that is said."""
        if not self.config.validation.every:
            return False
        held_out, seq_len = self.r.validation.n_tokens, self.config.data.seq_len
        if held_out < seq_len:
            said = f"no validation: the held-out text has {held_out} tokens, less than a row of data.seq_len = {seq_len}"
            self.progress.say(f"{said} (data.validation_fraction = {self.config.data.validation_fraction})")
        return held_out >= seq_len

    def _is_due(self, every: int) -> bool:
        return (bool(every) and self.step % every == 0) or self.step == self.config.steps

    def _one_step(self) -> StepReport:
        begun = time.perf_counter()
        rate = self.r.schedule.apply(self.r.optimizer.optimizer, self.step)
        loss = self.r.model.forward_backward(next(self.r.loader))
        result = self.r.model.optimizer_step(self.r.optimizer.optimizer, self.config.optimizer.max_norm)
        self.step += 1
        self.tokens += loss.tokens
        self.last_loss = float(loss)
        seconds = time.perf_counter() - begun
        self.throughput.add(loss.tokens, seconds)
        if "first step" not in self.timeline.seconds:
            self._after_first_step(seconds)
        self.skipped += result.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        memory = read_memory(self.r.model.device)
        speed = self.throughput.tokens_per_second
        return StepReport(
            step=self.step,
            total_steps=self.config.steps,
            loss=self.last_loss,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            tokens_per_second=speed,
            memory_bytes=memory.peak,
            memory_label=memory.label,
            mfu=mfu(speed, self.flops, self.peak, self.r.plan.world),
            skipped=self.skipped,
            eta_seconds=self.throughput.eta_seconds(self.config.steps - self.step),
        )

    def _after_first_step(self, seconds: float) -> None:
        self.timeline.record("first step", seconds)
        begin_steps(self.r.model.mesh, self.config.process.step_timeout_sec)
        self.progress.say(f"start-up: {self.timeline.line()}")
        phases: dict[str, Any] = dict(self.timeline.seconds)
        self.metrics.event("startup", **phases)

    def _refuse_to_skip_on(self) -> None:
        limit = self.config.optimizer.max_skipped_steps
        if self.skipped_in_a_row >= max(limit, 1):
            where = self.saved or "none was written yet"
            first = self.r.loader.state - self.skipped_in_a_row * self.config.batch.global_batch
            raise MeshwrightError(
                f"{self.skipped_in_a_row} steps in a row (the last is step {self.step}) had a loss or gradient that is not finite, and were"
                f" skipped on all ranks (optimizer.max_skipped_steps = {limit}). The weights are those before them. Lower optimizer.lr,"
                f" lengthen schedule.warmup_steps, or look at the data from sample {first} on. Last checkpoint: {where}."
            )

    def _tell(self, report: StepReport, validation: float | None) -> None:
        report = StepReport(**{**vars(report), "validation_loss": validation})
        self.progress.update(report)
        if self.step % self.config.logging.every == 0 or validation is not None or self.step == self.config.steps:
            values = {
                "loss": report.loss,
                "grad_norm": report.grad_norm,
                "learning_rate": report.learning_rate,
                "tokens_per_second": report.tokens_per_second,
                "memory_bytes": report.memory_bytes,
                "tokens": self.tokens,
                "skipped": self.skipped,
            }
            optional = {"mfu": report.mfu, "validation_loss": validation}
            self.metrics.log(self.step, values | {key: value for key, value in optional.items() if value is not None})

    def _validate(self) -> float:
        c = self.config
        rows = c.batch.microbatch or max(1, c.batch.global_batch // self.ranks)
        batches = validation_batches(self.r.validation, c.data.seq_len, c.validation.samples, rows, self.rank, self.ranks)
        losses = [self.r.model.evaluate(batch) for batch in batches]
        return sum(float(loss) * loss.tokens for loss in losses) / max(1, sum(loss.tokens for loss in losses))

    # --- checkpoints

    def _save(self) -> None:
        begun = time.perf_counter()
        folder = self.folder.checkpoints
        self.saved = folder.of_step(self.step)
        state = {"step": self.step, "consumed": self.r.loader.state, "tokens": self.tokens, "skipped": self.skipped}
        checkpoint.save(self.r.model, self.saved, optimizer=self.r.optimizer.optimizer, extra={"state": state, "identity": self.r.identity})
        agree.together(self._point, here=is_rank_zero())
        size = sum(file.stat().st_size for file in self.saved.iterdir())
        self.progress.say(f"saved {self.saved} ({bytes_text(size)}, {duration_text(time.perf_counter() - begun)})")

    def _point(self) -> None:
        self.folder.checkpoints.point_to(self.step)
        self.folder.checkpoints.keep_last(self.config.checkpoint.keep_last)

    def _resume(self) -> None:
        folder = self.folder.checkpoints
        for leftover in folder.half_written():
            self.progress.say(f"{leftover} was never finished (an interrupted save); it is not used")
        latest = agree.from_rank_zero(agree.together(folder.latest, here=is_rank_zero()))
        for path in map(folder.of_step, folder.steps()):
            if not (path / MANIFEST).is_file():
                self.progress.say(f"{path} has no {MANIFEST}: it is not used, and a save of that step would be refused; remove it")
        if latest is None:
            if self.metrics.has_past:
                self.progress.say(f"{self.folder.path} has no checkpoint to continue from: it begins again at step 0")
            return
        with self.timeline.phase("checkpoint"):
            extra = checkpoint.load(self.r.model, latest, optimizer=self.r.optimizer.optimizer, restore_options=False)
        state = extra["state"]
        self.step, self.tokens, self.skipped = state["step"], state["tokens"], state["skipped"]
        self.r.loader.seek(state["consumed"])
        self.saved = latest
        self.progress.say(f"continuing from {latest} (step {self.step}, sample {state['consumed']:,})")

    # --- words

    def _header(self) -> list[str]:
        c, plan = self.r.model_config, self.r.plan
        size = f"{count_text(parameter_count(c))} parameters, {c.n_layers} blocks, dim {c.dim}, vocabulary {c.vocab_size:,}"
        mesh = " × ".join(f"{axis}={n}" for axis, n in plan.mesh if n > 1) or "one process"
        meta = self.r.prepared.meta
        return [
            f"meshwright · {self.config.name}",
            f"model: {size}",
            f"layout: {mesh} · {plan.data.technique} · {plan.precision.compute} on {plan.device}",
            f"data: {count_text(meta.n_tokens)} tokens of {meta.n_documents:,} documents · {self.config.data.seq_len} per row"
            f" · {self.config.batch.global_batch} rows per step",
            f"rate: {self.r.schedule.describe()} · {self.r.optimizer.implementation} AdamW",
            *([f"MFU: (6N + 12·L·d·s) FLOPs per token over {self.peak / 1e12:,.0f} TFLOP/s (PaLM, appendix B)"] if self.peak else []),
            f"folder: {self.folder.path}",
        ]

    def _close(self, stopped: int) -> int:
        self.r.loader.close()
        sample = None if stopped or self.saved is None else self._sample(self.saved)
        report = ClosingReport(
            run_folder=self.folder.path,
            step=self.step,
            total_steps=self.config.steps,
            loss=self.last_loss,
            validation_loss=self.last_validation,
            tokens=self.tokens,
            seconds=time.time() - self.started,
            skipped=self.skipped,
            checkpoint=self.saved,
            config=self.folder.config,
            metrics=self.folder.path / "metrics.jsonl",
            tensorboard=getattr(self.metrics, "tensorboard_folder", None),
            tensorboard_note=getattr(self.metrics, "note", ""),
            sample=sample,
        )
        self.metrics.close()
        self.progress.close()
        self.progress.say("\n" + report.text())
        if stopped:
            self.progress.say(f"\nstopped by {signal.Signals(stopped).name}, saved. Continue with: meshwright train {self.folder.path}")
        else:
            self.progress.say(f'\nsample again with: meshwright generate {self.folder.path} --prompt "{self.config.sample.prompt}"')
        return 128 + stopped if stopped else 0

    def _sample(self, saved: Path) -> str | None:
        """Text from the checkpoint as it lies on disk, which shows that it can be read back."""
        s = self.config.sample
        if not s.tokens:
            return None
        checkpoint.load(self.r.model, saved)
        prompt = self.r.tokenizer.encode(s.prompt)
        options: dict[str, Any] = {"temperature": s.temperature, "seed": self.config.seed, "stop": self.r.tokenizer.end_of_document}
        ids = self.r.model.generate([int(i) for i in prompt], s.tokens, **options)
        return self.r.tokenizer.decode([*prompt, *ids])
