"""Train a model in a loop without parallelism of its own: every layout takes the same step."""

from __future__ import annotations

import shutil
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import meshwright.checkpoint as checkpoint
from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.core.errors import ConfigError, MeshwrightError
from meshwright.core.names import clean
from meshwright.data import validation_batches
from meshwright.data.tokenizers import encode_prompt
from meshwright.data.turns import ends_of_turn, load_template
from meshwright.distributed.mesh import data_position
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import get_world_info, is_rank_zero, store_for_restarts, stored_by_earlier
from meshwright.distributed.recompute.recompute import graph_breaks_text
from meshwright.distributed.setup import begin_steps, choose_backend, destroy_distributed
from meshwright.training.build import Run, build_run
from meshwright.training.config import Config, check
from meshwright.training.feed import vision_for
from meshwright.training.fine_tuning import is_fine_tuning
from meshwright.training.health.heartbeat import Heartbeat
from meshwright.training.health.loss_guard import LossGuard
from meshwright.training.health.peers import Peers, announce, early_folder, sweep
from meshwright.training.metrics import check_trackers
from meshwright.training.model_source import question_ids, template_folder
from meshwright.training.preference import give_references
from meshwright.training.recording import Profile, check_recordings, open_recordings
from meshwright.training.run.checkpointing import Checkpointing, Position
from meshwright.training.run.folder import RunFolder
from meshwright.training.run.occupancy import checkpoints_of_one_run, claimed, occupied
from meshwright.training.run.request import RESOLVED, keep_request, read_request, words_of_complete
from meshwright.training.slurm import run_of_requeued_job
from meshwright.training.stopping import Interrupted, StopRequest
from meshwright.training.throughput import StartupTimeline
from meshwright.training.tracing import TraceCheck
from meshwright.training.views.progress import Progress, StepReport
from meshwright.training.views.telling import Teller, Validated, build_progress, in_words, is_demo
from meshwright.training.views.watching import MemoryWatch, keep_times

TROUBLE = 1 << 16
"""The value that a rank reports when it cannot continue; above every signal's number."""
UNTRAINED_TOKENS = 60
"""Of the text that the demo's model writes before its first step; noise needs no more."""


class Trainer:
    """A run, from a config to a trained checkpoint. Every rank makes one and calls ``run``.

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
        self.heartbeat = Heartbeat()
        self.peers = Peers(self.heartbeat, self.config.process.startup_timeout_sec)
        self.timeline = StartupTimeline(self.heartbeat.enter)

    def run(self) -> int:
        """Train to the end, or until a signal, and return the exit status.

        The status is 0 when done, 128 + n after a clean stop by signal n.

        Raises:
            MeshwrightError: a refusal before the start, too many skipped steps in a row, or the loss of another rank.
        """
        self.timeline.record("launch", time.time() - self.started)
        check_trackers(self.config.logging)
        check_recordings(self.config.logging, choose_backend(self.config.process.backend)[1])
        early = early_folder()
        with StopRequest() as stop, build_progress(is_main=is_rank_zero()) as progress, self.heartbeat:
            self.heartbeat.settle(early)
            try:
                return self._run(stop, progress)
            except Exception as error:
                explained = self.peers.explain(error)
                if not agree.is_agreed(error) and not agree.alone():
                    self.heartbeat.fail(explained)
                if explained is error:
                    raise
                raise explained from error
            finally:
                destroy_distributed()
                sweep(early)

    def _run(self, stop: StopRequest, progress: Progress) -> int:
        try:
            run = build_run(self.config, self.timeline, stop.breaks(progress), stop)
            stopped = agree.largest(stop.signal)
        except Interrupted as interrupted:
            run, stopped = None, interrupted.number
        if run is None or stopped:
            progress.say(f"stopped by {signal.Signals(stopped).name} before the first step; nothing was written")
            return 128 + stopped
        modules = ((clean(name), module) for part in run.model.parts for name, module in part.named_modules())
        pipeline, mesh = run.plan.pipeline, run.model.mesh
        self.heartbeat.know(modules, pipeline.part_of(mesh.get_local_rank("pp")) if pipeline and mesh else "")
        trace = TraceCheck.of(run)
        with ExitStack() as held:
            loop = _Loop(run, open_folder(run, self.config, held), self, stop, progress, trace)
            held.push(loop.checkpoints.close)
            return loop.train()


def open_folder(run: Run, config: Config, held: ExitStack) -> RunFolder:
    """Open the run's folder and lock it for the lifetime of ``held``.

    A new folder gets the run's facts at once, so that a restart finds it.
    """

    def opened() -> RunFolder:
        before = "" if config.run else stored_by_earlier("run")
        if before and not Path(before).is_dir():
            raise ConfigError(
                f"out: this run began in {before}, which {socket.gethostname()} does not see; put it on a shared file"
                f" system"
            )
        asked = replace(config, run=config.run or before)
        elsewhere = CheckpointFolder(place) if (place := run.config.checkpoint.folder) else None
        if elsewhere is not None:
            own = asked.run or run_of_requeued_job(asked)
            held.enter_context(checkpoints_of_one_run(elsewhere, own and Path(own).expanduser(), run.identity))
        folder = RunFolder.open(asked, run.identity, run.feed.other_data)
        claim = held.enter_context(occupied(folder.path))
        if elsewhere is not None:
            claim = held.enter_context(claimed(elsewhere, folder.path))
        if folder.is_new:
            folder.write_facts(run.config, run.identity, run.plan.to_json(), run.tokenizer)
            keep_request(folder.path, config)
        store_for_restarts("run", str(folder.path.absolute()))
        announce(folder.path)
        return replace(folder, claim=claim)

    return agree.from_rank_zero(agree.together(in_words(opened, "cannot set up the run's folder"), here=is_rank_zero()))


class _Loop:
    """The training loop and its state."""

    def __init__(
        self,
        run: Run,
        folder: RunFolder,
        trainer: Trainer,
        stop: StopRequest,
        progress: Progress,
        trace: TraceCheck | None,
    ):
        self.r, self.folder, self.stop = run, folder, stop
        self.config, self.started = run.config, trainer.started
        self.timeline, self.heartbeat, self.peers = trainer.timeline, trainer.heartbeat, trainer.peers
        self.at = Position()
        self.checkpoints = Checkpointing(run, folder, self.at, progress.say, stop)
        self.teller = Teller(run, folder, self.at, progress)
        self.trace = trace
        whole = [axis for axis, size in run.plan.mesh if size == run.plan.world > 1]
        profiled = run.model.parts, run.model.device, whole[0] if whole else "world"
        wanted = self.config.logging, self.config.steps, folder.path, get_world_info()[0]
        self.recordings = open_recordings(*wanted, lambda path: Profile(path, *profiled))
        self.memory = MemoryWatch(run)
        self.guard: LossGuard | None = None
        self.untrained: str | None = None
        self.rank, self.ranks = data_position(run.model.mesh)

    def train(self) -> int:
        if not self.checkpoints.resume(self.timeline) and self.teller.trackers.has_past:
            self.teller.say(f"{self.folder.path} has no checkpoint to continue from: it begins again at step 0")
        if self.at.step >= self.config.steps:
            self.r.feed.loader.close()
            self.teller.trackers.close()
            self.teller.say(words_of_complete(self.folder.path, self.at.step, self.config.steps))
            return 0
        self.r.model.learn_documents()
        self.teller.header()

        def begin() -> None:
            before = read_request(self.folder.path, RESOLVED)
            self.folder.write_facts(self.config, self.r.identity, self.r.plan.to_json(), self.r.tokenizer)
            if self.at.step or self.teller.trackers.has_past:  # metrics of steps that will be repeated are abandoned
                self.teller.trackers.resumed(self.at.step)
            self.teller.begin(before or self.config)
            shutil.rmtree(self.folder.heartbeats, ignore_errors=True)  # from an attempt that was killed

        agree.together(in_words(begin, f"cannot write in {self.folder.path}"), here=is_rank_zero())
        self.heartbeat.settle(self.folder.heartbeats)
        tokens = min(self.config.sample.tokens, UNTRAINED_TOKENS)
        if is_demo(self.config) and tokens and not self.at.step and not self.r.plan.compiled:
            self.untrained = self._continue_prompt(tokens)
        if (guards := self.config.optimizer).max_loss_deviation:
            self.guard = LossGuard(guards.max_loss_deviation, guards.loss_window, self.at.losses)
        validates = self.config.validation.every > 0 and bool(self.r.feed.held_out)
        self.heartbeat.enter("reference")
        ranks, has_begun = (self.rank, self.ranks), self.at.step > 0
        stopped = give_references(
            *(self.config, self.r.feed, self.r.model, self.folder.path, ranks),
            has_begun=has_begun,
            stopped=self._agree_to_stop,
        )
        if validates and is_fine_tuning(self.r.request) and not has_begun and not stopped:
            validation, stopped = self._validate()
            if validation is not None:
                self.teller.untrained(validation)
        self.recordings.announce(self.at.step, self.teller.say)
        if self.trace is not None and not self.trace.begins(self.at.step, self.folder.trace_check, self.teller.say):
            self.trace = None
        while self.at.step < self.config.steps and not stopped:
            with self.checkpoints.saved_if_unread():
                report = self._one_step()
            stopped, validation = self._agree_to_stop(), None
            if validates and self._is_due(self.config.validation.every) and not stopped:
                validation, stopped = self._validate()
            self.teller.step(report, validation)
            self._refuse_to_skip_on()
            self.checkpoints.look()
            if stopped or self._is_due(self.config.checkpoint.every):
                self.heartbeat.enter("save", self.at.step)
                self.checkpoints.save(is_last=bool(stopped) or self.at.step == self.config.steps)
                stopped = self._agree_to_stop() or stopped
            else:
                self.checkpoints.keep()
        return self._close(stopped)

    def _is_due(self, every: int) -> bool:
        return (bool(every) and self.at.step % every == 0) or self.at.step == self.config.steps

    def _agree_to_stop(self) -> int:
        """Return a signal that any rank has received, else 0.

        Raises:
            MeshwrightError: a rank cannot continue; raised on every rank.
        """
        agreed = agree.largest(TROUBLE if self.teller.trouble else self.stop.signal)
        if agreed == TROUBLE:
            agree.together(self.teller.raise_trouble)
        return agreed

    def _one_step(self) -> StepReport:
        self.recordings.before(self.at.step + 1)
        begun = time.perf_counter()
        self.heartbeat.enter("data", self.at.step + 1)
        batch = self.r.feed.next_batch()
        self.heartbeat.enter("forward")
        with self.trace.watching(batch) if self.trace is not None else nullcontext(), self.memory.computing():
            loss = self.r.model.forward_backward(batch)
        self.heartbeat.enter("step")
        schedule, optimizer = self.r.schedule, self.r.optimizer.optimizer
        rate = schedule.apply(optimizer, schedule.place(self.at.step, self.at.tokens + loss.tokens))
        spike = self.guard.spike(float(loss)) if self.guard is not None else ""
        with self.memory.stepping():
            skip = bool(spike) if self.guard is not None else None
            result = self.r.model.optimizer_step(optimizer, self.config.optimizer.max_norm, skip=skip)
        self.at.step += 1
        if self.guard is not None and not result.skipped:
            self.guard.keep(float(loss))
            self.at.losses = self.guard.losses
        if spike and result.skipped:
            self.teller.say(f"step {self.at.step} was skipped on all ranks: {spike} steps")
            self.teller.event("spike", {"why": spike}, self.at.step)
        self.at.tokens += loss.tokens
        self.at.skipped += result.skipped
        self.at.skipped_in_a_row = self.at.skipped_in_a_row + 1 if result.skipped else 0
        seconds = time.perf_counter() - begun
        if self.trace is not None and self.trace.ended(loss, result, self.folder.trace_check, self.teller.say):
            self.trace = None
        if self.recordings.ends_after(self.at.step):
            self.teller.note(lambda: self.recordings.after(self.at.step))
        loads = self.r.model.expert_load() if self._is_due(self.config.logging.every) else []
        report = self.teller.measured(rate, loss, result, seconds, loads)
        if "first step" not in self.timeline.seconds:
            self.timeline.record("first step", seconds)
            self.peers.begin_steps(self.config.process.step_timeout_sec)
            begin_steps(self.r.model.mesh, self.config.process.step_timeout_sec)
            self.teller.say(f"start-up: {self.timeline.line()}")
            self.teller.started(self.timeline.seconds)
            if self.r.plan.compiled and (breaks := graph_breaks_text()):
                self.teller.say(breaks)
            if message := self.memory.first_step_report():
                self.teller.say(message)
                kinds = {held.value: size for held, size in self.memory.found.items()}
                self.teller.event("memory", kinds, self.at.step)
        return report

    def _refuse_to_skip_on(self) -> None:
        limit, skipped = self.config.optimizer.max_skipped_steps, self.at.skipped_in_a_row
        if skipped >= max(limit, 1):
            self.checkpoints.finish()
            highest = self.config.optimizer.max_loss_deviation
            too_high = f", or a loss that is too high (optimizer.max_loss_deviation = {highest:g})" if highest else ""
            where = self.checkpoints.latest or "none was written yet"
            first = self.r.feed.loader.state - skipped * self.config.batch.global_batch
            raise MeshwrightError(
                f"{skipped} steps in a row (the last is step {self.at.step}) had a loss or gradient that is not finite"
                f"{too_high}, and were skipped on all ranks (optimizer.max_skipped_steps = {limit}). The weights are"
                f" those before them. Lower optimizer.lr, lengthen schedule.warmup_steps, or look at the data from"
                f" sample {first} on. Last checkpoint: {where}."
            )

    def _validate(self) -> tuple[Validated | None, int]:
        """Validate, and return (losses, 0), or (None, signal) if the ranks agreed to stop meanwhile."""
        self.heartbeat.enter("validation", self.at.step)
        c = self.config
        rows = c.batch.microbatch or max(1, c.batch.global_batch // self.ranks)
        validated = Validated()
        with self.r.model.averaged():  # once, not for every batch
            for held in self.r.feed.held_out:
                place = (self.rank, self.ranks, self.r.feed.pixels, self.r.feed.ends, self.r.feed.left_out)
                for batch in validation_batches(held.split, c.data.seq_len, held.samples, rows, *place):
                    loss = self.r.model.evaluate(batch)
                    figures = {name: float(value) for name, value in loss.figures.items()}
                    validated.add(held.name, float(loss), loss.weight, figures)
                    if stopped := self._agree_to_stop():
                        return None, stopped
        return validated, 0

    def _close(self, stopped: int) -> int:
        self.heartbeat.enter("end", self.at.step)
        self.checkpoints.finish()
        self.teller.note(self.recordings.close)  # where the run ends within their window
        self._agree_to_stop()
        keep_times(self.r.model, self.folder.path)
        self.r.feed.loader.close()
        self.teller.left_out(self.r.feed.unreadable())
        saved, tokens, sample = self.checkpoints.latest, self.config.sample.tokens, None
        if saved is not None and tokens and not stopped:
            checkpoint.load(self.r.model, saved)  # from the disk, which shows that it can be read back
            sample = self._continue_prompt(tokens)
        self.teller.close(stopped, time.time() - self.started, self.checkpoints, sample, self.untrained)
        return 128 + stopped if stopped else 0

    def _continue_prompt(self, tokens: int) -> str:
        s, tokenizer = self.config.sample, self.r.tokenizer
        stop = {tokenizer.end_of_document}
        if s.chat:
            template, asked = load_template("", template_folder(self.folder.path, tokenizer)), {"role": "user"}
            prompt = question_ids([asked | {"content": s.prompt}], template, tokenizer, vision_for(self.config))
            stop |= ends_of_turn(template, tokenizer)
        else:
            prompt = encode_prompt(tokenizer, s.prompt).tolist()
        ids = self.r.model.generate(prompt, tokens, temperature=s.temperature, seed=self.config.seed, stop=stop)
        return tokenizer.decode([*prompt, *ids])
