"""Build all parts of a run from a config, which is validated before any weights exist."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.checkpoint.huggingface import Pretrained
from meshwright.checkpoint.store import absolute
from meshwright.comparison.trace import TraceFile
from meshwright.core.config import all_set
from meshwright.core.devices import CPU, is_accelerator
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.data import Tokenizer
from meshwright.data.packing import RowEnds
from meshwright.distributed.float8 import refuse_absent
from meshwright.distributed.memory.dry_run import estimate_memory
from meshwright.distributed.mesh import data_position
from meshwright.distributed.optimizer import low_bit
from meshwright.distributed.optimizer.parameter_groups import make_parameter_groups, refuse_unused, trained_names
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import get_world_info, ranks_per_node
from meshwright.distributed.setup import DistributedConfig, choose_backend, init_distributed
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.source import as_module
from meshwright.planning.build import plan as make_plan
from meshwright.planning.memory import MemoryEstimate
from meshwright.planning.optimizer import OptimizerPlan
from meshwright.planning.plan import Plan
from meshwright.planning.premise_rules import refuse_other_losses
from meshwright.planning.values import Batch
from meshwright.training import fine_tuning
from meshwright.training.capacity import refuse_too_large
from meshwright.training.config import Config
from meshwright.training.feed import Feed, build_feed, refuse_contradictions
from meshwright.training.memory import refuse_copies_on_hosts, refuse_large_copies
from meshwright.training.model_source import (
    ModelSource,
    Shape,
    first_weights,
    identity_of,
    model_source,
    resolved_model,
    run_tokenizer,
    shape_of,
    tokenizer_name,
)
from meshwright.training.optimizer import BuiltOptimizer, LearningRateSchedule, make_optimizer
from meshwright.training.preference import expects_pairs, loss_of
from meshwright.training.run.folder import absolute_paths
from meshwright.training.stopping import StopRequest
from meshwright.training.throughput import StartupTimeline
from meshwright.training.views.progress import Progress


@dataclass
class Run:
    """All parts of a run on one rank.

    Attributes:
        request: the config as it was asked for, with what nobody set chosen; ``config`` is the one that is written, in
            which nothing is left open.
        trace: the trace that the first steps are compared with.
        batch: a step's rows, as they were planned.
    """

    request: Config
    config: Config
    source: ModelSource
    tokenizer: Tokenizer
    model: ParallelModel
    optimizer: BuiltOptimizer
    feed: Feed
    batch: Batch
    identity: dict[str, Any]
    trace: TraceFile | None

    @property
    def plan(self) -> Plan:
        return self.model.plan

    @cached_property
    def shape(self) -> Shape:
        return shape_of(self.source, self.model.facts)

    @cached_property
    def schedule(self) -> LearningRateSchedule:
        return build_schedule(self.config)

    def estimate_memory(self) -> MemoryEstimate:
        """Estimate the memory of a step by a dry run, in seconds; of a model of its own, since this one is laid out."""
        return estimated_memory(self.request, facts_of(self.source), self.plan, self.batch)


def build_run(
    config: Config, timeline: StartupTimeline, progress: Progress, stop: StopRequest, *, longest_rows: bool = False
) -> Run:
    """Build a run on every rank: validate, create process groups, read data, lay out the model.

    Args:
        longest_rows: each step has rows as long as the longest of the data, to see what these need.

    Raises:
        ConfigError, UnsupportedError: the config is refused, on every rank.
    """
    config = fine_tuning.before_data(config)
    refuse_early(config)
    tokenizer = run_tokenizer(config, progress.say)
    source = model_source(config, tokenizer)
    weights = first_weights(config)
    world, device = get_world_info()[2], choose_backend(config.process.backend)[1]
    batch = batch_of(config, tokenizer)
    # one module for plan and layout: measurements of a model are cached with it
    module = as_module(source, config.seed)
    facts = model_facts(module)
    cluster = Cluster(world, ranks_per_node(), device)
    refuse_large_copies(config.checkpoint.host_memory, ranks_per_node() or 1)
    refuse_copies_on_hosts(config.checkpoint)
    trace = TraceFile(Path(config.check_trace).expanduser()) if config.check_trace else None
    chooses_batch = fine_tuning.batch_follows(config) and trace is None and not longest_rows

    limit = config.process.startup_timeout_sec
    with timeline.phase("process group"), stop.released():
        setup = {"backend": config.process.backend, "startup_timeout_sec": limit, "nccl_timeout_sec": limit}
        mesh = init_distributed(DistributedConfig(**vars(config.layout), **setup), config.seed)

    def checked_plan(checks_memory: bool) -> Plan:
        made = plan_run(config, facts, cluster, batch)
        if checks_memory and config.process.check_memory:
            refuse_too_large(
                config, facts, made, batch, cluster, lambda one, plan, rows: estimated_memory(one, facts, plan, rows)
            )
        return made

    def refuse_here() -> None:
        refuse_absent(plan)
        low_bit.refuse_absent(plan.optimizer)
        if isinstance(weights, Pretrained):
            weights.check(module)

    with timeline.phase("plan"):
        plan = agree.decided_once(lambda: checked_plan(not chooses_batch))
        agree.together(refuse_here)
    with timeline.phase("data"):
        ends = None if trace else RowEnds.of(plan, config.batch.microbatch, is_fixed=longest_rows)
        accepts = (lambda one: is_carried(one, facts, cluster, batch_of(one, tokenizer))) if chooses_batch else None
        feed = build_feed(config, tokenizer, *data_position(mesh), progress, ends, accepts)
    config = feed.config
    if chooses_batch:
        batch = batch_of(config, tokenizer)
        plan = agree.decided_once(lambda: checked_plan(True))
    build_schedule(config)
    with timeline.phase("model"):
        options: dict[str, Any] = {"draw_on": trace.drawn_on if trace else None, "loss_fn": loss_of(config, feed)}
        options |= {"weights": weights, "microbatch_rows": config.batch.microbatch}
        model = parallelize(module, mesh, plan=plan, seed=config.seed, audit=False, **options)
        optimizer = build_optimizer(config, model.named_parameters(), plan.optimizer, trained_names(facts, plan))
        if config.process.audit:
            model.audit(optimizer.optimizer)
    identity = run_identity(config, source, tokenizer, feed)
    made = resolved(config, source, plan)
    return Run(config, made, source, tokenizer, model, optimizer, feed, batch, identity, trace)


def refuse_untraced(config: Config) -> None:
    """Raise UnsupportedError if the rates of a run are not those of its steps."""
    if config.schedule.tokens is not None:
        raise UnsupportedError(
            f"schedule.tokens = {config.schedule.tokens}: a trace holds the rates of steps, not of tokens. Trace and"
            f" check the run with schedule.warmup_steps instead."
        )


def refuse_early(config: Config) -> None:
    """Refuse what contradicts the rest of a config, before a model is read.

    Raises:
        ConfigError: the schedule or the data section.
        UnsupportedError: a trace of steps that multiply in float8, round their optimizer state or updated weights, or
            have rates of tokens.
    """
    if not fine_tuning.length_follows(config):
        build_schedule(config)
    refuse_contradictions(config)
    if config.check_trace:
        t = config.techniques
        rounds = f"techniques.float8 = {t.float8}" if t.float8 != "none" else ""
        if t.optimizer_state != "full" or t.stochastic_rounding:
            rounds = OptimizerPlan(t.optimizer_state, t.stochastic_rounding).request
        if rounds:
            raise UnsupportedError(
                f"{rounds} rounds further than a trace (check_trace) allows. Check the run without it."
            )
        refuse_untraced(config)


def refuse_unfit(config: Config, facts: ModelFacts, plan: Plan) -> None:
    """Refuse what a config asks of a model that has been planned: overrides that match nothing, losses of its own."""
    refuse_unused([row.pattern for row in config.optimizer.overrides], trained_names(facts, plan))
    refuse_other_losses(facts)


def plan_run(config: Config, facts: ModelFacts, cluster: Cluster, batch: Batch | None = None) -> Plan:
    """Return the plan of a config on a cluster, checked against a batch where one is given.

    Needs neither a process group nor a GPU. All verbs that plan a run ask here, so they refuse what ``train`` refuses.
    """
    refuse_early(config)
    made = make_plan(facts, config.layout, batch=batch, cluster=cluster, techniques=config.requested)
    refuse_unfit(config, facts, made)
    return made


def is_carried(config: Config, facts: ModelFacts, cluster: Cluster, batch: Batch) -> bool:
    """Return whether a layout carries a batch."""
    try:
        return bool(plan_run(config, facts, cluster, batch))
    except (ConfigError, UnsupportedError):
        return False


def facts_of(source: ModelSource) -> ModelFacts:
    """Return facts about the model before a plan is applied to it."""
    return model_facts(as_module(source))


def batch_of(config: Config, tokenizer: Tokenizer) -> Batch:
    b, pairs = config.batch, expects_pairs(config)
    return Batch(b.global_batch, config.data.seq_len, b.microbatch, tokenizer.vocab_size, pairs)


def build_optimizer(
    config: Config,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    plan: OptimizerPlan | None = None,
    elsewhere: Iterable[str] = (),
) -> BuiltOptimizer:
    """Make the optimizer of a config over a model's parameters; without a plan, in full precision.

    ``elsewhere``: names of the trained parameters of the whole model, of which a pipeline's rank has some.
    """
    o, named = config.optimizer, list(named_parameters)
    plan = plan or OptimizerPlan(kind=config.optimizer.kind)
    overrides: list[tuple[str, dict[str, Any]]] = []
    for row in o.overrides:
        decay = {} if row.weight_decay is None else {"weight_decay": row.weight_decay}
        overrides.append((row.pattern, {"lr_scale": row.lr_scale, **decay}))
    groups = make_parameter_groups(
        named,
        weight_decay=o.weight_decay,
        overrides=overrides,
        decayed_dims=plan.row.decayed_dims,
        elsewhere=elsewhere,
    )
    return make_optimizer(groups, lr=o.lr, plan=plan, named_parameters=named, seed=config.seed, **plan.row.takes(o))


def estimated_memory(config: Config, facts: ModelFacts, plan: Plan, batch: Batch) -> MemoryEstimate:
    """Estimate the memory of a run's step by a dry run, with the optimizer that the run builds."""

    def build(model: ParallelModel) -> torch.optim.Optimizer:
        return build_optimizer(config, model.named_parameters(), plan.optimizer, trained_names(facts, plan)).optimizer

    estimate = estimate_memory(facts, plan, batch, build_optimizer=None if plan.optimizer.needs_torchao else build)
    # a block keeps at least its input of each token for the backward, and keys and values are at most twice as wide
    if estimate.ranks and (least := 2 * config.sample.tokens) > (batch.microbatch_rows or 1) * batch.seq_len:
        note = f"a sample of sample.tokens = {least // 2} may need more: its keys and values are not counted"
        return replace(estimate, notes=(*estimate.notes, note))
    return estimate


def build_schedule(config: Config) -> LearningRateSchedule:
    s = config.schedule
    if s.tokens is not None:
        warmup = s.tokens // 20 if s.warmup_tokens is None else s.warmup_tokens
        if warmup >= (most := most_tokens(config)):
            raise ConfigError(
                f"schedule.warmup_tokens = {warmup}, and the run has at most {most} tokens (steps × batch.global_batch"
                f" × data.seq_len): the rate would not reach its peak. Lower schedule.warmup_tokens, or raise steps."
            )
        shape = s.kind, warmup, s.final_ratio, s.decay_fraction
        return LearningRateSchedule(config.optimizer.lr, s.tokens, *shape, by_tokens=True)
    warmup = min(100, config.steps // 20) if s.warmup_steps is None else s.warmup_steps
    return LearningRateSchedule(config.optimizer.lr, config.steps, s.kind, warmup, s.final_ratio, s.decay_fraction)


def most_tokens(config: Config) -> int:
    """Return the number of tokens of a run in which each one has a loss."""
    return config.steps * config.batch.global_batch * config.data.seq_len


def run_identity(config: Config, source: ModelSource, tokenizer: Tokenizer, feed: Feed) -> dict[str, Any]:
    """Return the settings that must not change when a run is continued.

    Layout, batch, workers, logging and steps may change.
    """
    return {
        "model": identity_of(source, config),
        **feed.identity,
        "seq_len": config.data.seq_len,
        "tokenizer": tokenizer.fingerprint,
        "seed": config.seed,
    }


def resolved(config: Config, source: ModelSource, plan: Plan) -> Config:
    """Return the config with model, dtypes and warmup filled in, with absolute paths, and nothing left unset.

    [dpo] stays as it was given: a run on other data would be refused for it when it is continued.
    """
    p = plan.precision
    precision = replace(config.techniques.precision, master=p.master, compute=p.compute, reduce=p.reduce)
    schedule = build_schedule(config)
    warmup = {"warmup_tokens" if schedule.by_tokens else "warmup_steps": schedule.warmup_steps}
    made = all_set(
        replace(
            config,
            run="",
            epochs=None,
            check_trace="",
            model=resolved_model(config.model, source),
            data=replace(config.data, **absolute_paths(replace(config.data, tokenizer=tokenizer_name(config)))),
            techniques=replace(config.techniques, precision=precision),
            schedule=replace(config.schedule, **warmup),
            checkpoint=replace(config.checkpoint, folder=absolute(config.checkpoint.folder)),
        )
    )
    return replace(made, dpo=config.dpo)


def device_name(model: ParallelModel) -> str:
    device = model.device
    return torch.get_device_module(device).get_device_name(device) if is_accelerator(device) else CPU
