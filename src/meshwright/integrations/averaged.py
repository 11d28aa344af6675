"""Lay a model out for a loop that calls it and its losses' backward: gradients are averaged over data ranks."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from torch import nn

from meshwright.core.axes import Axis
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed import order
from meshwright.distributed.doors import lay_out_module
from meshwright.distributed.mesh import axis_size, data_position, groups_of, plan_sizes
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process import agree
from meshwright.distributed.recompute.kept import streams
from meshwright.distributed.step.part import ModelPart
from meshwright.introspection.facts import model_facts
from meshwright.planning.build import plan_for_mesh_sizes
from meshwright.planning.techniques import Techniques


def lay_out_averaged(
    module: nn.Module, mesh: Any, device: str, techniques: Techniques, *, door: str, seed: int = 0
) -> ParallelModel:
    """Lay a module out by the whole order, in place, with torch's averaging of gradients.

    The loop calls ``result.module``. A rank's loss is the mean over its own rows; each gradient is complete when
    backward ends: the mean over data ranks of the gradients of their losses, as DDP and FSDP have it.

    Args:
        mesh: None in one process.
        door: name of the public call, which begins each line of the log.

    Returns:
        The model, for names and checkpoints; its ``forward_backward`` is not for this loop.

    Raises:
        UnsupportedError: stages, or parts of rows, which a loop of whole batches does not know.
        ConfigError: a loss that must be scaled, adapters, or what the rules refuse.
    """
    for axis, instead in ((Axis.PP, "parallelize(...)"), (Axis.CP, "context_parallel_rows in a loop of torch")):
        if (size := axis_size(mesh, axis)) > 1:
            raise UnsupportedError(
                f"{door}: layout.{axis.value} = {size} gives each rank a part of the model's"
                f" forward, and this loop calls it whole: use {instead}, or set layout.{axis.value} = 1"
            )
    if techniques.adapters is not None:
        raise ConfigError(f"{door}: techniques.adapters is for parallelize: put adapters beside the layers by peft")
    facts = model_facts(module)
    precision = techniques.precision
    if precision.compute == "auto":  # as the tool does: in the model's dtype, also on an accelerator
        own = max(facts.floating, key=facts.floating.__getitem__) if precision.master == "auto" else precision.master
        techniques = replace(techniques, precision=replace(precision, compute=own))
    plan = plan_for_mesh_sizes(facts, plan_sizes(mesh), device, techniques, "mean")
    if plan.precision.loss_scale:
        raise ConfigError(
            f"{door}: techniques.precision.compute = float16 needs a loss that is scaled, and this loop scales none:"
            f" set bfloat16, or use parallelize(...)"
        )
    made = lay_out_module(module, facts, plan, mesh, order.NAMES, door=door, seed=seed)
    return ParallelModel([ModelPart(made, plan, facts)], plan, facts, mesh)


def compare_streams_once(module: nn.Module, mesh: Any, door: str) -> None:
    """Compare the random streams of tp peers before the module's first forward in training (collective).

    Dropout of what these ranks hold alike, such as embeddings, draws from them: other numbers would make the copies
    drift apart.

    Raises:
        ConfigError: raised by that forward on every rank, where some tp peers were seeded differently.
    """

    def compare(called: nn.Module, inputs: Any) -> None:
        if not called.training:
            return
        hook.remove()
        digest = hashlib.blake2b(digest_size=7)
        for _, state in sorted(streams().items()):
            digest.update(state.cpu().numpy().tobytes())
        word = int.from_bytes(digest.digest(), "big")
        if agree.any_rank(not agree.is_equal(word, groups_of(mesh, Axis.TP))):
            rank, ranks = data_position(mesh)
            raise ConfigError(
                f"{door}: ranks of layout.tp have different random streams, and dropout would make the parameters that"
                f" they hold alike drift apart: seed by data rank, the same on tp peers, such as torch.manual_seed("
                f"seed + fabric.strategy.rows.rank) ({rank} of {ranks} here)"
            )

    hook = module.register_forward_pre_hook(compare)
