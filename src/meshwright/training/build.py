"""From a config to everything that a run needs: tokenizer, plan, model, optimizer, data. Refusals come before process groups."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.core.errors import ConfigError
from meshwright.data import Loader, Order, Prepared, load_tokenizer, open_corpus, prepare
from meshwright.data.packing import Split
from meshwright.data.sources import STDLIB
from meshwright.data.tokenizers import BYTES, Tokenizer
from meshwright.distributed import agree
from meshwright.distributed.mesh import data_position
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.parallelize import parallelize, single_process_mesh
from meshwright.distributed.setup import DistributedConfig, choose_backend, init_distributed
from meshwright.distributed.world import get_world_info, ranks_per_node
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import SIZES, DecoderConfig
from meshwright.planning.batch import Batch
from meshwright.planning.build import plan as make_plan
from meshwright.planning.plan import Plan

from .config import Config, DataConfig
from .monitoring.timeline import Timeline
from .optim.build import BuiltOptimizer, build_adamw
from .optim.schedules import Schedule
from .stopping import StopRequest


@dataclass
class Run:
    """All parts of a run on one rank."""

    config: Config
    model_config: DecoderConfig
    tokenizer: Tokenizer
    plan: Plan
    model: ParallelModel
    optimizer: BuiltOptimizer
    schedule: Schedule
    prepared: Prepared
    loader: Loader
    validation: Split
    identity: dict[str, Any]


def build_run(config: Config, timeline: Timeline, say, stop: StopRequest) -> Run:
    """Build a run on every rank, in the order: refuse, meet, read data, lay out the model.

    Raises:
        ConfigError, UnsupportedError: refused; before any process group exists where the config alone tells.
    """
    schedule = build_schedule(config)
    tokenizer = load_tokenizer(config.data.tokenizer)
    model_config = decoder_config(config, tokenizer)
    world, device = get_world_info()[2], choose_backend(config.process.backend)[1]
    plan = plan_run(config, model_config, Cluster(world, ranks_per_node(), device), batch_of(config, tokenizer))
    with timeline.phase("process group"), stop.released():
        mesh = init_distributed(_distributed_config(config), config.seed)
    with timeline.phase("data"):
        prepared = _prepare_once_per_node(config, tokenizer, say)
        corpus = open_corpus(prepared.folder)
    with timeline.phase("model"):
        if mesh is None and plan.data.technique == "fully_shard":
            mesh = single_process_mesh(plan.device)
        model = parallelize(model_config, mesh, plan=plan, seed=config.seed, microbatch_rows=config.batch.microbatch)
        optimizer = build_optimizer(config, model)
    rank, ranks = data_position(mesh)
    order = Order(corpus.training.n_samples(config.data.seq_len), config.seed)
    loader = Loader(corpus.training, order, config.data.seq_len, config.batch.global_batch, rank, ranks, config.data.workers)
    identity = run_identity(config, model_config, tokenizer, prepared)
    return Run(
        resolved(config, model_config, plan),
        model_config,
        tokenizer,
        plan,
        model,
        optimizer,
        schedule,
        prepared,
        loader,
        corpus.validation,
        identity,
    )


def plan_run(config: Config, model_config: DecoderConfig, cluster: Cluster, batch: Batch | None = None) -> Plan:
    """The plan of a config on a cluster, checked against a batch where one is given. No process group, no GPU."""
    return make_plan(model_facts(as_module(model_config)), config.layout, batch=batch, cluster=cluster, techniques=config.techniques)


def batch_of(config: Config, tokenizer: Tokenizer) -> Batch:
    return Batch(config.batch.global_batch, config.data.seq_len, config.batch.microbatch, tokenizer.vocab_size)


def decoder_config(config: Config, tokenizer: Tokenizer) -> DecoderConfig:
    """The named size with the config's overrides; an open vocabulary grows to the tokenizer's.

    Raises:
        ConfigError: sizes that do not fit together.
    """
    chosen = {key: value for key, value in vars(config.model).items() if key != "size" and value is not None}
    try:
        size = SIZES[config.model.size]
        return replace(size, **{"vocab_size": max(size.vocab_size, tokenizer.vocab_size), **chosen})
    except ValueError as error:
        raise ConfigError(str(error)) from None


def build_optimizer(config: Config, model: ParallelModel) -> BuiltOptimizer:
    o = config.optimizer
    overrides = []
    for row in o.overrides:
        options: dict[str, Any] = {"lr_scale": row.lr_scale}
        if row.weight_decay is not None:
            options["weight_decay"] = row.weight_decay
        overrides.append((row.pattern, options))
    groups = model.make_parameter_groups(weight_decay=o.weight_decay, overrides=overrides)
    return build_adamw(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay)


def build_schedule(config: Config) -> Schedule:
    s = config.schedule
    warmup = min(100, config.steps // 20) if s.warmup_steps is None else s.warmup_steps
    return Schedule(config.optimizer.lr, config.steps, s.kind, warmup, s.final_ratio, s.decay_fraction)


def run_identity(config: Config, model_config: DecoderConfig, tokenizer: Tokenizer, prepared: Prepared) -> dict[str, Any]:
    """What must stay the same for a run to be continued. Layout, batch, workers, logging and steps may change."""
    return {
        "model": dataclasses.asdict(model_config),
        "data": prepared.key,
        "seq_len": config.data.seq_len,
        "tokenizer": tokenizer.fingerprint,
        "seed": config.seed,
    }


def resolved(config: Config, model_config: DecoderConfig, plan: Plan) -> Config:
    """The config with everything filled in that was left open about the model and its dtypes, and readable from any folder."""
    known = {f.name for f in dataclasses.fields(config.model)}
    model = replace(config.model, **{key: value for key, value in vars(model_config).items() if key in known})
    p = plan.precision
    precision = replace(config.techniques.precision, master=p.master, compute=p.compute, reduce=p.reduce)
    warmup = build_schedule(config).warmup_steps
    return replace(
        config,
        run="",
        model=model,
        data=replace(config.data, **_absolute(config.data)),
        techniques=replace(config.techniques, precision=precision),
        schedule=replace(config.schedule, warmup_steps=warmup),
    )


def _absolute(data: DataConfig) -> dict[str, Any]:
    """The paths of the data section, whatever folder a run is continued from."""

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute())

    return {
        "source": tuple(source if source == STDLIB else absolute(source) for source in data.source),
        "tokenizer": data.tokenizer if data.tokenizer == BYTES else absolute(data.tokenizer),
        "cache": absolute(data.cache) if data.cache else "",
    }


def _distributed_config(config: Config) -> DistributedConfig:
    p = config.process
    return DistributedConfig(**vars(config.layout), backend=p.backend, startup_timeout_sec=p.startup_timeout_sec)


def _prepare_once_per_node(config: Config, tokenizer: Tokenizer, say) -> Prepared:
    """One process of each node reads the sources; the others take its word."""
    first = get_world_info()[1] == 0
    d = config.data
    mine = agree.together(lambda: prepare(d.source, tokenizer, d.validation_fraction, d.cache or None, say), here=first)
    said = [p for p in agree.everybody_says(mine) if p is not None]
    if len({p.key for p in said}) > 1:
        raise ConfigError("the nodes see different data under data.source: copy the same files to each, or use a shared folder")
    return mine or next((p for p in said if Path(p.folder).is_dir()), said[0])


def device_name(model: ParallelModel) -> str:
    return torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"
