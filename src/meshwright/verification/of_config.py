"""Write a trace: a config's first steps in one process, and how far rounding to each dtype moves their values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from meshwright.comparison.equality import farthest, relative_errors, sum_floor
from meshwright.comparison.trace import Sketches, Trace, TracedStep, fingerprints
from meshwright.core.config import to_dict
from meshwright.core.dtypes import bytes_text, torch_dtype
from meshwright.core.errors import ConfigError, UnsupportedError, command
from meshwright.core.names import clean
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.setup import choose_backend
from meshwright.distributed.weights.shards import sketches
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.layout import shares_of
from meshwright.planning.rules import resolve_precision
from meshwright.training.build import build_optimizer, build_schedule, refuse_untraced, run_identity
from meshwright.training.config import Config
from meshwright.training.feed import Feed, build_feed, refuse_contradictions
from meshwright.training.model_source import (
    ModelSource,
    causal_lm,
    decoder_config,
    file_weights,
    model_source,
    planned_tokenizer,
    run_tokenizer,
)
from meshwright.training.preference import loss_of
from meshwright.training.tracing import traced_facts
from meshwright.training.views.progress import Progress
from meshwright.verification.laid_out import OneProcess, build
from meshwright.verification.problem import GAP, Problem, RandomBatches, shrunk
from meshwright.verification.verify import default_batches

COMPUTED = {"float32": ("float32", "bfloat16"), "float64": ("float64",)}
"""dtype of weights → dtypes in which a run may compute."""

DRAWS = 3
"""Perturbed runs per dtype."""

TRACE_BYTES = 24
"""Bytes per parameter in float32: weight, gradient, two moments; a bfloat16 copy with its gradient, and a reserve."""


def write_trace(config: Config, path: Path, steps: int, progress: Progress) -> Trace:
    """Train ``steps`` steps of a config in one process with plain torch, on its own data, and write the trace.

    Weights are drawn on the CPU; a GPU computes if there is one. For each dtype in which a run may compute, three
    further runs compute in that dtype, with random changes to every module's output as large as its rounding, and
    with other numbers of rows at once, which reorders sums. The farthest of their values bound what rounding may do:
    AdamW moves small gradients' parameters by chance, and a single run would not show how far.

    Raises:
        ConfigError: a config that cannot be trained, a model too large for this machine, more steps than the run has,
            or a loss that is not finite.
        UnsupportedError: weights stored in less than float32, a loss that depends on microbatches, float8.
    """
    if get_world_info()[2] > 1:
        raise ConfigError("a trace is written by one process: call verify --write-trace without torchrun or srun")
    if steps > config.steps:
        raise ConfigError(f"--trace-steps = {steps}: the run has steps = {config.steps}")
    refuse_contradictions(config)
    refuse_untraced(config)
    device = choose_backend(config.process.backend)[1]
    master = resolve_precision(config.techniques, {"float32": 1}, device).master
    if master not in COMPUTED:
        raise UnsupportedError(
            f"techniques.precision.master = {master}: a trace is written for weights in {' or '.join(COMPUTED)}"
        )
    if config.techniques.float8 != "none":
        raise UnsupportedError(
            f"techniques.float8 = {config.techniques.float8}: a trace is of products in high precision. Set it to none."
        )
    tokenizer = run_tokenizer(config, progress.say)
    model = model_source(config, tokenizer)
    if model_facts(as_module(model)).balances_microbatches:
        raise UnsupportedError(
            "model.moe.batch_loss depends on how a layout cuts batches into microbatches, and so does"
            " output_router_logits of a model of transformers: a trace does not know that. Compare the layout by"
            " meshwright verify --layout, or write and check it without."
        )
    check_size(model, TRACE_BYTES, f"{steps} steps in one process")
    feed = build_feed(config, tokenizer, 0, 1, progress)
    if loss_of(config, feed) is not None:
        raise UnsupportedError(
            "a trace is of the cross entropy, and data.source holds pairs of answers: name other data"
        )
    try:
        recorder = _TraceRecorder(config, model, feed, steps, master, torch.device(device), progress)
        reference = recorder.record(master)
        for number, row in enumerate(reference, 1):
            for what, value in (("loss", row.step.loss), ("gradient norm", row.step.norm)):
                if not math.isfinite(value):
                    raise ConfigError(
                        f"the {what} of step {number} is {value} in one process already: there is nothing to compare a"
                        f" run with"
                    )
        facts = traced_facts(config, run_identity(config, model, tokenizer, feed), master, steps)
        trace = Trace(facts, "cpu", recorder.initial, [recorded.step for recorded in reference], recorder.shapes)
        for dtype in COMPUTED[master]:
            draws = []  # the distance between two runs, by step, stage and name
            for draw in range(1, DRAWS + 1):
                draws.append([])
                for mine, theirs in zip(recorder.record(dtype, draw), reference, strict=True):
                    here: dict[str, dict[str, float]] = {}
                    for stage, rows in theirs.step.sketches.items():
                        here[stage] = relative_errors(mine.step.sketches[stage].by_name(), rows.by_name())
                    here["loss"] = {"": sum_floor(mine.loss_parts, theirs.loss_parts)}
                    here["norm"] = {"": sum_floor(mine.norm_parts, theirs.norm_parts)}
                    draws[-1].append(here)
            floors = [farthest(same_step) for same_step in zip(*draws, strict=True)]
            # one element of every parameter may have gone the other way: AdamW's update of an element is about the
            # learning rate whatever its gradient's size, and where that is smaller than what the dtype rounds away,
            # its sign is chance, which one perturbed run does not show of a small parameter
            for here, recorded in zip(floors, reference, strict=True) if dtype != master else ():
                for name, error in here["parameter"].items():
                    here["parameter"][name] = max(error, recorded.turns.get(name, 0.0))
            trace.floors[dtype] = floors
    finally:
        feed.loader.close()
    trace.write(path)
    return trace


@dataclass
class _Recorded:
    """A step, and what bounds how far rounding may move its sums."""

    step: TracedStep
    loss_parts: Tensor
    norm_parts: Tensor
    turns: dict[str, float]
    """By parameter, relative to its norm: the shift by one element whose update has reversed since the first step."""


@dataclass
class _TraceRecorder:
    """A recorder that trains a config's first steps in one process."""

    config: Config
    model: ModelSource
    feed: Feed
    steps: int
    master: str
    device: torch.device
    progress: Progress

    def __post_init__(self) -> None:
        self.initial = Sketches([], torch.zeros(0))
        self.shapes: dict[str, tuple[int, ...]] = {}

    def record(self, dtype: str, draw: int = 0) -> list[_Recorded]:
        """Compute the steps in a dtype; ``draw`` is the number of a perturbed run, or 0 without perturbation."""
        c = self.config
        problem = Problem(
            self.model, self._batch, dtype=self.master, seed=c.seed, techniques={"freeze": c.techniques.freeze}
        )
        model = build(problem, weights=file_weights(c)).to(self.device)
        noise = torch.finfo(torch_dtype(dtype)).eps * (draw > 0) * (1.0 if dtype == self.master else 0.5)
        # how many rows matters in bfloat16, in which an embedding's gradient adds up the tokens of a forward
        ranks = shares_of(c.layout).data_ranks if c.layout.is_resolved else 1
        rows = 1 if draw == 1 else c.batch.microbatch or max(1, c.batch.global_batch // ranks)
        one = OneProcess(model, compute=torch_dtype(dtype), rows=rows, noise=noise, seed=draw)
        optimizer, schedule = build_optimizer(c, model.named_parameters()).optimizer, build_schedule(c)
        named = {clean(name): p for name, p in model.named_parameters()}
        self.initial = Sketches.of(sketches(named))
        recorded, moved = [], 0.0
        for step in range(self.steps):
            self.progress.portion(f"{dtype}, perturbed ({draw} of {DRAWS})" if draw else dtype, step, self.steps)
            rate = schedule.apply(optimizer, step)
            batch = self._batch(step)
            computed = one.forward_backward(batch)
            self.shapes = self.shapes or computed.observed.shapes
            gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
            norms = torch.stack([gradient.double().square().sum() for gradient in gradients.values()]).cpu()
            found = {"gradient": Sketches.of(sketches(gradients))}
            for stage, rows_of_modules in zip(("forward", "backward"), computed.observed.rows(), strict=True):
                # modules that see every row, in the weights' dtype
                whole = {name: x for name, x in rows_of_modules.items() if len(x) == c.batch.global_batch}
                stacked = Sketches.of(whole)
                found[stage] = Sketches(stacked.names, stacked.values.to("cpu", torch_dtype(self.master)))
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), c.optimizer.max_norm or math.inf).item()
            optimizer.step()
            optimizer.zero_grad()
            one.end_step()
            found["parameter"] = Sketches.of(sketches(named))
            moved += rate
            turns = {
                name: 2 * moved / max(p.detach().norm().item(), 1e-300) for name, p in named.items() if p.requires_grad
            }
            loss = computed.losses.sum().item()
            recorded.append(
                _Recorded(TracedStep(fingerprints(batch), loss, norm, found), computed.losses, norms, turns)
            )
        return recorded

    def _batch(self, step: int) -> dict[str, Tensor]:
        self.feed.loader.seek(step * self.config.batch.global_batch)
        batch = self.feed.next_batch()
        if isinstance(batch, Exception):
            raise batch
        return batch


def summary(trace: Trace, path: Path) -> str:
    """Summarise what was written, and what to do with it."""
    first = trace.steps[0]
    modules = len(first.sketches["forward"].names)
    losses = ", ".join(f"{step.loss:.6g}" for step in trace.steps)
    kept = f"{len(trace.steps)} steps, {modules} modules, {len(trace.initial.names)} parameters"
    size = f"{path.stat().st_size / 2**20:.1f} MiB"
    return (
        f"wrote {path} ({size}): {kept}; loss {losses}\ncompare a run with it:"
        f" {command('train', 'CONFIG', '--check-trace', path)}"
    )


# --- build the subject of a verification from a config: its model, batches of its shape, its techniques

VERIFY_BYTES = 2 * 8 * 7
"""Bytes per parameter of one process and a layout in float64.

Each holds weight, gradient, two moments, and copies of gradient and weights (twice) to compare."""


@dataclass(frozen=True)
class Subject:
    """The inputs of ``verify``."""

    model: Any
    batches: RandomBatches
    techniques: dict[str, Any]


def subject_of(config: Config, factory: str | None, world: int, *, shrink: bool) -> Subject:
    """Take the model of a config (or "package.module:factory"), small if asked, and batches of its shape.

    ``world`` is the largest number of ranks.
    """
    batches = RandomBatches(1)
    techniques = to_dict(config.requested)
    del techniques["precision"], techniques["adapters"]
    if config.adapters is not None:
        techniques["adapters"] = to_dict(config.adapters)
    if factory is not None:
        if shrink:
            raise UnsupportedError(
                "--shrink makes the decoder of a config smaller, not your own model: let its factory build a small one"
            )
        model: Any = factory
        batches = default_batches(model, world)
    else:
        if config.model.hf and shrink:
            raise UnsupportedError(
                "--shrink makes the decoder of a config smaller, not a Hugging Face model: write a smaller config.json"
                " and give it as model.hf"
            )
        model = causal_lm(config) if config.model.hf else decoder_config(config, planned_tokenizer(config))
        if isinstance(model, DecoderConfig):
            model = shrunk(model) if shrink else model
            seq_len = min(config.data.seq_len, model.max_seq_len - GAP - 3, 32 if shrink else config.data.seq_len)
            batches = RandomBatches(model.vocab_size, config.batch.global_batch, max(seq_len, 1))
    check_size(model, VERIFY_BYTES, f"one process and a layout of {world} ranks in float64")
    if factory is None and config.model.hf:  # its weights are drawn, so only sizes count
        batches = replace(default_batches(model, world), rows=config.batch.global_batch)
    return Subject(model, batches, techniques)


def check_size(model: Any, bytes_per_parameter: int, what: str) -> None:
    """Refuse a model that this machine's free memory does not hold, by a ConfigError."""
    numel = model_facts(as_module(Problem(model, RandomBatches(1)).source())).numel
    needed, free = numel * bytes_per_parameter, psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"the model has {numel:,} parameters: {what} need about {bytes_text(needed)}, and {bytes_text(free)} are"
            f" free here. --shrink makes a small model of the same structure; for a trace, lower model.n_layers"
        )
