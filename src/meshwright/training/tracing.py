"""Compare a run's first steps with a trace of one process, in the run's own layout and precision."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.comparison.equality import Comparison, Difference, traced_bound
from meshwright.comparison.sketch import Observed, observing
from meshwright.comparison.trace import Sketches, TracedStep, TraceFile, fingerprints
from meshwright.core.axes import Axis
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.core.files import replace_text
from meshwright.distributed.mesh import data_position, get_pp_rank, groups_of
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import is_rank_zero
from meshwright.distributed.step.part import StepLoss, StepResult
from meshwright.distributed.weights.shards import sketches
from meshwright.introspection.structure.experts import stack_paths
from meshwright.planning.layout import SAMPLES, TOKENS
from meshwright.training.build import Run, build_schedule, refuse_untraced
from meshwright.training.config import Config
from meshwright.training.run.folder import changes
from meshwright.training.views.telling import in_words

GUARDS = ("max_skipped_steps", "max_loss_deviation", "loss_window")
"""Keys of the optimizer's section that change no step which is taken."""
SAME_WEIGHTS = 1e-5
"""Bound for sketches of bit-identical initial weights: sharding changes the order of float32 sums."""


def traced_facts(config: Config, identity: Mapping[str, Any], master: str, steps: int) -> dict[str, Any]:
    """Return the facts that a run must share with a trace of its first steps, as JSON values.

    Args:
        identity: the run's identity (model, data, tokenizer, seed).
        master: dtype of its master weights.
    """
    refuse_untraced(config)
    schedule = build_schedule(config)
    optimizer = {key: value for key, value in asdict(config.optimizer).items() if key not in GUARDS}
    facts = {
        **identity,
        "batch.global_batch": config.batch.global_batch,
        "optimizer": optimizer,
        "learning_rates": [schedule(step) for step in range(min(steps, config.steps))],
        "techniques.freeze": list(config.techniques.freeze),
        "precision.master": master,
    }
    return json.loads(json.dumps(facts))


class TraceCheck:
    """Compares a run's first steps with those of a trace. Every method is collective.

    Raises:
        ConfigError: the trace is of another run, or has no bounds for the run's dtype.
    """

    def __init__(self, run: Run, trace: TraceFile):
        self.r, self.trace, self.dtype, steps = run, trace, run.plan.precision.compute, run.config.steps
        facts = traced_facts(run.config, run.identity, run.plan.precision.master, trace.n_steps)
        if changed := list(changes(trace.facts, facts)):
            raise ConfigError(
                f"check_trace = {trace.path} is the trace of another run: {', '.join(changed)}. Layout, devices,"
                f" microbatches and compute precision may differ, all else must be the same. Write a trace of this"
                f" config with verify --write-trace"
            )
        if self.dtype not in trace.dtypes:
            raise ConfigError(
                f"check_trace = {trace.path} has no bounds for rounding in {self.dtype}"
                f" (techniques.precision.compute); it has bounds for {', '.join(trace.dtypes)}"
            )
        if steps < trace.n_steps:
            raise ConfigError(f"steps = {steps}: the trace {trace.path} has {trace.n_steps}; train as many or more")
        rank, ranks = data_position(run.model.mesh)
        share = run.config.batch.global_batch // ranks
        self._rows, self._groups = slice(rank * share, (rank + 1) * share), groups_of(run.model.mesh, *SAMPLES)
        self._stages, self._tensor = groups_of(run.model.mesh, Axis.PP), groups_of(run.model.mesh, Axis.TP)
        self._parts_of_rows = groups_of(run.model.mesh, *TOKENS)
        self._owned = set(dict(run.model.named_parameters()))
        self._found: list[Difference] = []
        self._unobserved: set[str] = set()
        self._parts: set[str] = set()
        self._step = 0
        self._batch: Any = None
        self._observed = Observed()
        self._gradients: dict[str, Tensor] = {}

    @classmethod
    def of(cls, run: Run) -> TraceCheck | None:
        """Return the trace check of a run; None if the run names no trace. Collective."""
        trace = run.trace
        return agree.together(lambda: cls(run, trace)) if trace is not None else None

    def begins(self, step: int, kept: Path, say: Callable[[str], None]) -> bool:
        """Return whether the first steps are still to be compared, in a run that goes on from ``step``.

        Args:
            kept: file of the run with the result of the comparison.

        Raises:
            ConfigError: the run is past these steps, and has not compared them.
        """
        if step and not agree.from_rank_zero(kept.is_file()):
            raise ConfigError(
                f"check_trace = {self.trace.path}: a trace begins at step 0, and this run goes on from step {step};"
                f" leave check_trace out"
            )
        if step:
            say(f"its first steps were compared with a trace already: {kept}")
        return not step

    @contextmanager
    def watching(self, batch: Any) -> Iterator[None]:
        """Observe the forward and backward of a step on this rank's ``batch``."""
        if self._step == 0:
            self._of_tensors("initial weight", self._parameters(), self.trace.initial, {})
        self._step, self._batch = self._step + 1, batch
        tokens = self.r.model.own_tokens(batch)
        model = self.r.model
        context = model.plan.context
        opaque = (*stack_paths(*model.parts), *(() if context is None else context.whole_row_modules))
        of_images = model.facts.measurements.image_modules()
        with observing(*model.parts, opaque=opaque, tokens=tokens, unobserved=of_images) as self._observed:
            yield
        self._gradients = sketches(
            {name: g for name, p in self.r.model.named_parameters() if (g := p.grad) is not None}
        )

    def ended(self, loss: StepLoss, result: StepResult, kept: Path, say: Callable[[str], None]) -> bool:
        """Compare the step that was just taken, and return whether it was the trace's last.

        Raises:
            IntegrityError: on all ranks, if the run differs from its trace.
        """
        if (found := self.compared(loss, result)) is None:
            return False
        text = json.dumps({"trace": str(self.trace.path), **found.plain()}, indent=1)
        writing = in_words(partial(replace_text, kept, text), f"cannot write in {kept.parent}")
        agree.together(writing, here=is_rank_zero())

        def differs() -> None:
            raise IntegrityError(
                f"the run does not compute what one process computed.\n{self.text(found)}\nIt ends here, after step"
                f" {self._step}, and saves nothing. To train all the same, leave check_trace out."
            )

        if not found.is_equal:
            agree.together(differs)
        say(self.text(found))
        return True

    def compared(self, loss: StepLoss, result: StepResult) -> Comparison | None:
        """Compare the step that was just taken.

        Returns the comparison after the trace's last step or at the first difference, else None.
        """
        there = self.trace.step(self._step, self._rows)
        floors = self.trace.floors(self.dtype, self._step)
        mine = fingerprints(self._batch)
        wrong = (mine != there.batch).sum() if mine.shape == there.batch.shape else torch.tensor(len(mine))
        rows = agree.total(torch.stack([wrong.double(), torch.tensor(float(len(mine)))]), self._groups)
        self._found.append(Difference("batch", "", (rows[0] / rows[1]).item(), 0.0, step=self._step))
        # modules whose output is cut along features or behind heads, or is whole on no rank
        shapes, seen, tensor = self.trace.shapes, self._observed.shapes, self.r.plan.tensor
        is_part = [seen.get(name) == () for name in shapes]
        if self._tensor or self._parts_of_rows:
            is_part = [shape != seen.get(name, shape) for name, shape in shapes.items()]
        flags = agree.largest_each(torch.tensor(is_part, dtype=torch.float64)).tolist()
        self._parts |= {name for name, flag in zip(shapes, flags, strict=True) if flag}
        self._parts |= set() if tensor is None else {path for kind in tensor.kinds for path in kind.summed_outputs()}
        forward, backward = self._observed.rows()
        self._of_rows("forward", forward, there, floors)
        self._of_number("loss", float(loss), there.loss, floors)
        self._of_rows("backward", backward, there, floors)
        self._of_tensors("gradient", self._gradients, there.sketches["gradient"], floors)
        self._of_number("norm", result.grad_norm, there.norm, floors)
        self._of_tensors("parameter", self._parameters(), there.sketches["parameter"], floors)
        self._observed, self._gradients = Observed(), {}
        comparison = Comparison(self.dtype, tuple(self._found))
        return comparison if self._step == self.trace.n_steps or not comparison.is_equal else None

    def text(self, comparison: Comparison) -> str:
        """Describe a comparison in text."""
        verdict = "equal within rounding" if comparison.is_equal else "DIFFERS"
        left_out = f"; {len(self._unobserved)} modules inside compiled blocks were not seen" if self._unobserved else ""
        left_out += (
            f"; of {len(self._parts)} modules ranks have some {'features' if self._tensor else 'tokens'} each: only"
            f" what comes of those was seen"
            if self._parts
            else ""
        )
        steps = f"{self._step} of {self.trace.n_steps} steps"
        return "\n".join([f"trace {self.trace.path}: {verdict} ({steps}{left_out})", *comparison.lines()])

    # --- comparing

    def _parameters(self) -> dict[str, Tensor]:
        return sketches(dict(self.r.model.named_parameters()))

    def _of_rows(
        self, stage: str, found: dict[str, Tensor], there: TracedStep, floors: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Compare this rank's rows of the modules in its part of the model; only sums of squares are communicated.

        Tensor-parallel ranks may each compute a partial sum of a module's output, or some tokens of each row, and
        context-parallel ranks do: then their sketches add up. Outputs whose features are sharded are not compared.
        """
        names, values = there.sketches[stage]
        fits = [name in found and found[name].shape == values.shape[1:] for name in names]
        absent = torch.full(values.shape[1:], math.nan, dtype=torch.float64, device=self.r.model.device)
        mine = torch.stack([found[name] if fit else absent for name, fit in zip(names, fits, strict=True)]).cpu()
        seen = torch.tensor([name in found for name in names])
        if self._stages:  # a module that several pipeline ranks compute counts on the first of them
            here = get_pp_rank(self.r.model.mesh)
            seen &= -agree.largest_each(torch.where(seen, -float(here), -math.inf)) == here
        whole = [mine]
        for groups in filter(None, (self._tensor, self._parts_of_rows)):
            whole += [agree.total(part.clone(), groups) for part in whole]
        of_wholes, of_ranks = [], []
        for part in whole:  # each module's relative error over all rows, and the number of ranks that have rows of it
            off, size = ((tensor.double() ** 2).flatten(1).sum(1) for tensor in (part - values, values))
            words = torch.stack([off.nan_to_num(math.inf) * seen, size * seen, seen.double()]).nan_to_num(0.0)
            off, size, ranks = agree.total(words, [*self._groups, *self._stages])
            of_wholes.append((off / size.clamp(min=max(1e-12 * size.sum().item(), 1e-300))).sqrt())
            of_ranks.append(ranks)
        errors, ranks = of_wholes[0], of_ranks[0]
        if len(whole) > 1:
            errors = agree.largest_each(torch.stack(of_wholes)).amin(0)
        for name, error, n in zip(names, errors.tolist(), ranks.tolist(), strict=True):
            if name in self._parts:
                continue
            if not n:
                self._unobserved.add(name)
            else:
                self._add(stage, name, error if n == self.r.plan.data_ranks else math.inf, floors.get(stage, {}))

    def _of_tensors(
        self, stage: str, found: Mapping[str, Tensor], sketches: Sketches, floors: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Compare sketches of the tensors in this rank's part of the model; the largest error of all ranks counts."""
        reference = sketches.by_name()
        more = sorted(
            {name for names in agree.everybody_says([n for n in found if n not in reference]) for name in names}
        )
        names = [*reference, *more]
        whole = math.sqrt(sum(sketch.square().sum().item() for sketch in reference.values()))
        here = [name for name in names if name in found or name in self._owned]
        floor = max(1e-6 * whole, 1e-300)
        errors = dict.fromkeys(here, math.inf)
        ratios = dict.fromkeys(here, -math.inf)  # the projection on the reference, as a multiple of it
        for name in here:
            if name in found and name in reference:
                error = (found[name] - reference[name]).norm().item() / max(reference[name].norm().item(), floor)
                errors[name] = error if math.isfinite(error) else math.inf
                size, common = reference[name].square().sum().item(), (found[name] * reference[name]).sum().item()
                ratios[name] = common / size if size and math.isfinite(common / size) else -math.inf
        mine = [[values.get(name, -math.inf) for name in names] for values in (errors, ratios)]
        for name, error, along in zip(
            names, *agree.largest_each(torch.tensor(mine, dtype=torch.float64)).tolist(), strict=True
        ):
            along = along if stage == "gradient" and math.isfinite(along) else None
            self._add(stage, name, error if error >= 0 else math.inf, floors.get(stage, {}), along)

    def _of_number(self, stage: str, found: float, reference: float, floors: Mapping[str, Mapping[str, float]]) -> None:
        error = abs(found - reference) / max(abs(reference), 1e-300)
        self._add(stage, "", error if math.isfinite(error) else math.inf, floors[stage])

    def _add(
        self, stage: str, name: str, error: float, floors: Mapping[str, float], along: float | None = None
    ) -> None:
        bound = SAME_WEIGHTS if stage == "initial weight" else traced_bound(self.dtype, floors.get(name, 0.0))
        self._found.append(Difference(stage, name, error, bound, along, max(self._step, 1)))
