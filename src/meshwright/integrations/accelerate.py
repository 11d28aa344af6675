"""Let a loop that uses accelerate step a laid-out model: its loaders, trackers and gathers stay accelerate's."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from meshwright.checkpoint.saving import finish_saves
from meshwright.core.devices import CPU, DEFAULT_BACKEND
from meshwright.core.errors import ConfigError, MissingExtraError
from meshwright.core.losses import IGNORED, Loss
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.setup import DistributedConfig, init_distributed
from meshwright.integrations.rows import RowsOfRank, step_batch
from meshwright.planning.layout import Layout
from meshwright.planning.techniques import Techniques

try:
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import gather_object, recursively_apply
except ImportError as missing:
    raise MissingExtraError("meshwright.integrations.accelerate", "accelerate", "hf") from missing

__all__ = ["lay_out", "step_batch"]

SHARDING = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")


def lay_out(
    accelerator: Any,
    model: nn.Module | Callable[[], nn.Module] | Any,
    *loaders: Any,
    layout: Layout | Any | None = None,
    techniques: Techniques | dict | None = None,
    loss_fn: Callable[[Tensor, Tensor], Tensor] | Loss | Mapping[str, Loss] | None = None,
    weights: Any = None,
    seed: int = 0,
) -> Any:
    """Lay a model out by ``parallelize``, and prepare loaders so that each data rank reads its own rows (collective).

    The loop then calls ``model.forward_backward(step_batch(batch))`` and ``model.optimizer_step(optimizer)``; a step
    of several microbatches is a list of them. Afterwards ``accelerator.prepare`` deals rows of other loaders in the
    same way, and ``gather_for_metrics`` gathers one process of each data rank.

    Args:
        accelerator: an ``accelerate.Accelerator`` that shards nothing itself.
        loaders: ``DataLoader`` objects, not yet prepared.

    Returns:
        The ParallelModel; with loaders, a tuple of it and them.

    Raises:
        ConfigError: accelerate is configured to shard, cast or accumulate itself.
    """
    refuse_other_sharding(accelerator)
    if accelerator.mixed_precision not in (None, "no"):
        raise ConfigError(
            f"Accelerator(mixed_precision={accelerator.mixed_precision!r}) would be ignored here: leave it out, and set"
            f" techniques={{'precision': {{'compute': 'bfloat16'}}}}"
        )
    if accelerator.gradient_accumulation_steps > 1:
        raise ConfigError(
            f"Accelerator(gradient_accumulation_steps={accelerator.gradient_accumulation_steps}) would be ignored here:"
            f" leave it out, and give forward_backward the step's microbatches as a list"
        )
    mesh = mesh_of(layout, seed, accelerator.device.type)
    made = parallelize(model, mesh, loss_fn=loss_fn, techniques=techniques, weights=weights, seed=seed)
    deal_rows(accelerator, RowsOfRank.of(made.mesh), seed)
    _refuse_its_steps(accelerator, made)
    return (made, *(accelerator.prepare(loader) for loader in loaders)) if loaders else made


def mesh_of(layout: Layout | Any | None, seed: int, device: str) -> Layout | Any | None:
    """Return a given mesh, or that of a layout over the processes that are there, and seed the random streams.

    Args:
        device: type of the tool's device, such as "cpu" where its arguments say so on a machine with GPUs.
    """
    if layout is not None and not isinstance(layout, Layout):
        return layout
    wanted = layout
    if not isinstance(wanted, DistributedConfig):
        backend = "gloo" if device == CPU else DEFAULT_BACKEND
        wanted = DistributedConfig(**vars(layout or Layout()), backend=backend)
    return init_distributed(wanted, seed) or wanted


def refuse_other_sharding(accelerator: Any) -> None:
    """Raise ConfigError where accelerate itself would shard or wrap the model."""
    found = next((name for name in SHARDING if os.environ.get(name, "false").lower() in ("1", "true", "yes")), None)
    if found is None and accelerator.distributed_type.value not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        found = f"its distributed type {accelerator.distributed_type.value}"
    if found is None and getattr(accelerator, "parallelism_config", None) is not None:
        found = "its parallelism_config"
    if found is not None:
        raise ConfigError(
            f"accelerate is configured to shard the model itself ({found}), which is laid out here already: start with"
            f" torchrun, or with an accelerate config of distributed_type MULTI_GPU or MULTI_CPU"
        )


def deal_rows(accelerator: Any, rows: RowsOfRank, seed: int, *, by_tokens: bool = True) -> None:
    """Let an Accelerator deal rows to data ranks instead of all processes, and gather metrics from one of each.

    Args:
        by_tokens: the loss leaves out tokens by their labels. Rows that repeat others, by which the last batches of
            ranks become even, then have none.
    """
    prepared: list[Any] = []

    def prepare(data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None) -> Any:
        if any(data_loader is loader for loader in prepared):
            return data_loader
        chosen = accelerator.dataloader_config.data_seed
        prepared.append(
            prepare_data_loader(
                data_loader,
                accelerator.device,
                num_processes=rows.ranks,
                process_index=rows.rank,
                split_batches=accelerator.split_batches,
                put_on_device=accelerator.device_placement if device_placement is None else device_placement,
                rng_types=accelerator.rng_types.copy(),
                dispatch_batches=False,
                even_batches=accelerator.even_batches,
                use_seedable_sampler=accelerator.use_seedable_sampler,
                data_seed=seed if chosen is None else chosen,  # else each rank's own stream would order the rows
                non_blocking=accelerator.non_blocking,
                use_stateful_dataloader=accelerator.use_stateful_dataloader,
            )
        )
        if by_tokens and rows.ranks > 1 and hasattr(prepared[-1], "remainder"):
            # accelerate's loaders say that they are of torch's class, by a property of this name
            vars(object)["__class__"].__set__(prepared[-1], _even_tails(type(prepared[-1]), rows))
        return prepared[-1]

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        state, gathers_objects, found = accelerator.gradient_state, use_gather_object, None
        try:
            recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
        except TypeError:  # not of tensors alone
            gathers_objects = True
        if not gathers_objects:
            found = recursively_apply(rows.once, accelerator.gather(input_data))
        elif rows.world == 1:
            found = input_data
        else:
            brought = gather_object([input_data])
            found = [item for process in rows.first for item in brought[process]]
        if not state.end_of_dataloader or state.remainder <= 0:
            return found
        if gathers_objects:
            return found[: state.remainder]
        return recursively_apply(lambda tensor: tensor[: state.remainder], found)

    accelerator.prepare_data_loader = prepare
    accelerator.gather_for_metrics = gather_for_metrics


def _even_tails(kind: type, rows: RowsOfRank) -> type:
    """Return a class of loaders whose last batch has no labels in the rows that repeat others."""

    def iterate(self: Any) -> Iterator[Any]:
        batch: Any
        for batch in kind.__iter__(self):
            is_last = self.end_of_dataloader and self.remainder > 0
            for name in ("labels", "shift_labels") if is_last and isinstance(batch, Mapping) else ():
                first, labels = self.remainder - rows.rank * (self.total_batch_size // rows.ranks), batch.get(name)
                if isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point():
                    batch = copy.copy(batch)
                    batch[name] = labels.clone()
                    batch[name][max(first, 0) :] = IGNORED
            yield batch

    return type(kind.__name__, (kind,), {"__iter__": iterate})


def _refuse_its_steps(accelerator: Any, made: ParallelModel) -> None:
    """Let an Accelerator refuse the calls that would wrap, step or store the laid-out model otherwise, and let it wait
    for saves before it ends the process group.
    """
    prepare_model, end_training = accelerator.prepare_model, accelerator.end_training

    def end() -> None:
        finish_saves()
        end_training()

    def prepare(model: nn.Module, *args: Any, **options: Any) -> Any:
        if model is made or any(model is part for part in (made.module, *made.parts)):
            raise ConfigError(
                "accelerator.prepare would wrap a model that is laid out and on its device already: leave it out of the"
                " call, which takes loaders and schedulers"
            )
        return prepare_model(model, *args, **options)

    def refusing(call: str, instead: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise ConfigError(f"accelerator.{call} does not know the laid-out model: call {instead}")

        return refuse

    accelerator.prepare_model, accelerator.end_training = prepare, end
    accelerator.backward = refusing(
        "backward",
        "model.forward_backward(step_batch(batch)), which runs backward too; for another model loss.backward()",
    )
    accelerator.save_state = refusing(
        "save_state", "meshwright.save(model, folder, optimizer=optimizer, asynchronous=True)"
    )
    accelerator.load_state = refusing("load_state", "meshwright.load(model, folder, optimizer=optimizer)")
