"""``MeshwrightStrategy``: lay out what Lightning Fabric's ``setup`` is given; the loop stays Fabric's.

A strategy's hooks are Fabric's own names.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint import load, save
from meshwright.checkpoint.saving import finish_saves
from meshwright.core.axes import Axis
from meshwright.core.errors import ConfigError, MissingExtraError, UnsupportedError
from meshwright.distributed import order
from meshwright.distributed.doors import lay_out_module
from meshwright.distributed.mesh import axis_size, build_mesh, data_position, groups_of, plan_sizes, tensor_position
from meshwright.distributed.optimizer.grad_clip import clip_gradients_
from meshwright.distributed.optimizer.parameter_groups import OptimizerSwap
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import ranks_per_node
from meshwright.distributed.recompute.kept import streams
from meshwright.distributed.setup import single_process_mesh
from meshwright.distributed.step.part import ModelPart
from meshwright.integrations.rows import RowsOfRank
from meshwright.introspection.facts import model_facts
from meshwright.planning.build import plan_for_mesh_sizes
from meshwright.planning.layout import Layout
from meshwright.planning.techniques import Techniques, as_techniques

try:
    from lightning_fabric.plugins.precision import Precision
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
    from lightning_fabric.strategies.parallel import ParallelStrategy
    from lightning_fabric.strategies.strategy import _BackwardSyncControl
except ImportError as missing:
    raise MissingExtraError("meshwright.integrations.fabric", "lightning-fabric", "fabric") from missing

__all__ = ["MeshwrightStrategy"]

DOOR = "MeshwrightStrategy"


class MeshwrightStrategy(ModelParallelStrategy):
    """Lays out what ``fabric.setup`` is given: ``Fabric(strategy=MeshwrightStrategy(Layout(dp_shard=2, tp=2)))``.

    The loop stays: ``model(...)``, ``fabric.backward(loss)``, ``fabric.clip_gradients``, ``optimizer.step()``. A
    rank's loss is a mean over its own rows, and gradients are their mean over data ranks (dp_replicate × dp_shard),
    as with Fabric's own strategies; those that ranks of ``tp`` share are complete when backward ends. Loaders deal
    rows to data ranks; ranks of ``tp`` read the same ones. The norm of ``clip_gradients`` is that of all ranks'
    shards. ``fabric.save`` writes a folder of meshwright (``meshwright.load`` reads it in any layout), with what else
    the state holds as JSON. It returns while that is copied and written; the next save, a load, ``teardown`` and the
    end of the process wait for it, and what fails is logged.

    Args:
        layout: sizes of the mesh; by default all processes shard the model. ``pp`` and ``cp`` are refused.
        techniques: precision, recomputation, compilation …, typed or a plain dict. Fabric's ``precision`` stays
            "32-true": the plan decides dtypes.
        seed: seeds the weights of a module that is on meta.
        asynchronous: False: ``fabric.save`` returns when the folder is whole.

    Raises:
        ConfigError: a precision of Fabric beside the plan's, a layout that does not fit the processes.
        UnsupportedError: a layout that gives ranks parts of the forward.
    """

    def __init__(
        self,
        layout: Layout | None = None,
        techniques: Techniques | dict | None = None,
        seed: int = 0,
        *,
        asynchronous: bool = True,
    ):
        self.layout, self.techniques, self.seed = layout or Layout(), as_techniques(techniques), seed
        self.asynchronous = asynchronous
        self.rows, self._laid_out = RowsOfRank(), []
        super().__init__(lambda module, mesh: module)
        self._backward_sync_control = _Accumulation(self)

    @property
    def precision(self) -> Precision:
        return Precision()

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        if precision is not None and type(precision) is not Precision:
            raise ConfigError(
                f"Fabric(precision={precision.precision!r}) would cast beside the plan, which decides dtypes: leave it"
                f" out, and set MeshwrightStrategy(techniques={{'precision': {{'compute': 'bfloat16'}}}})"
            )

    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        layout = self.layout.resolve(self.world_size, ranks_per_node=ranks_per_node() or None)
        if self.world_size > 1:
            self._device_mesh = build_mesh(layout, self.root_device.type)
        self.rows = RowsOfRank.of(self._device_mesh)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.rows.ranks, "rank": self.rows.rank}

    # --- setup

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Lay a module out in place (collective), and return what is to be called."""
        made = lay_out_averaged(module, self._device_mesh, self.root_device.type, self.techniques, self.seed)
        if tensor_position(self._device_mesh)[1] > 1:
            compare_streams_once(made.module, self._device_mesh)
        self._laid_out.append(made)
        return made.module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        swaps = [OptimizerSwap(module, optimizer) for optimizer in optimizers]
        made = self.setup_module(module)
        for swap in swaps:
            swap.apply(made)
        return made, optimizers, scheduler

    def parallel(self, module: nn.Module) -> ParallelModel:
        """Return the laid-out model of a module that ``fabric.setup`` was given, or of what it returned.

        Raises:
            ConfigError: the module was not set up.
        """
        inner = getattr(module, "_forward_module", module)
        found = next((made for made in self._laid_out if inner in (made.module, made.parts[0])), None)
        if found is None:
            raise ConfigError(f"this {type(module).__name__} was not set up: model = fabric.setup(model)")
        return found

    # --- gradients

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients of the optimizer's parameters by their 2-norm over all ranks, and return it."""
        if norm_type != 2.0:
            raise UnsupportedError(
                f"{DOOR}: clip_gradients(norm_type={norm_type}): the norm over shards is the 2-norm: leave it out"
            )
        self.parallel(module)
        laid_out = {id(parameter) for made in self._laid_out for parameter in made.parameters()}
        clipped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if unknown := sum(id(parameter) not in laid_out for parameter in clipped):
            raise ConfigError(
                f"{DOOR}: {unknown} of the {len(clipped)} parameters of this {type(optimizer).__name__} belong to no"
                f" module that was set up: model, optimizer = fabric.setup(model, optimizer), or make the optimizer"
                f" from the parameters of what fabric.setup_module returned"
            )
        norm = clip_gradients_(clipped, float(max_norm))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the gradients' norm is {float(norm)}; clip_gradients(error_if_nonfinite=False) goes on"
            )
        return norm

    # --- files

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write model, optimizer and the rest of the state, as JSON, to the folder ``path`` (collective)."""
        if storage_options is not None or filter is not None:
            raise ConfigError(f"{DOOR}: fabric.save takes neither storage_options nor filter: leave them out")
        model, optimizer, rest = self._sorted(state)
        kept = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in rest.items()}
        folder = Path(self.broadcast(path))
        save(model, folder, optimizer=optimizer, extra=kept, asynchronous=self.asynchronous)

    def teardown(self) -> None:
        """Wait for the save under way, and end as Fabric does."""
        finish_saves()
        with suppress(NotImplementedError):  # last of all it asks for a plugin that strategies over meshes do not have
            super().teardown()

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a folder that any layout wrote into the state; return what the state does not name.

        Of ``fabric.load_raw`` the path is a file of ``torch.save(module.state_dict(), path)``, and the state a module.
        """
        if isinstance(state, nn.Module):  # fabric.load_raw: a file of whole tensors
            whole = torch.load(self.broadcast(path), map_location="cpu", mmap=True, weights_only=weights_only)
            self.parallel(state).load_state_dict(whole, strict)
            return {}
        if not isinstance(state, dict):
            raise ConfigError(
                f"{DOOR}: fabric.load(path, {{'model': model, 'optimizer': optimizer}}) reads a folder of fabric.save,"
                f" and fabric.load_raw(path, model) a file of whole weights; neither reads an optimizer alone"
            )
        model, optimizer, rest = self._sorted(state)
        found = load(model, Path(self.broadcast(path)), optimizer=optimizer)
        if strict and (lacking := sorted(set(rest) - set(found))):
            raise ConfigError(
                f"{path} holds no {lacking[0]!r}, but {sorted(found)}: leave it out, or give strict=False"
            )
        for key in rest.keys() & found.keys():
            if hasattr(rest[key], "load_state_dict"):
                rest[key].load_state_dict(found.pop(key))
            else:
                state[key] = found.pop(key)
        return found

    def _sorted(self, state: dict[str, Any]) -> tuple[ParallelModel, Optimizer | None, dict[str, Any]]:
        models = [value for value in state.values() if isinstance(value, nn.Module)]
        optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
        if len(models) != 1 or len(optimizers) > 1:
            raise ConfigError(
                f"{DOOR}: a checkpoint is of one model and at most one optimizer; the state holds {len(models)} and"
                f" {len(optimizers)}: call fabric.save for each"
            )
        rest = {key: value for key, value in state.items() if not isinstance(value, (nn.Module, Optimizer))}
        return self.parallel(models[0]), next(iter(optimizers), None), rest

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        return self.parallel(module).state_dict()


class _Accumulation(_BackwardSyncControl):
    """Delays the communication of gradients inside ``fabric.no_backward_sync``."""

    def __init__(self, strategy: MeshwrightStrategy):
        self.strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self.strategy.parallel(module).accumulation_context(is_last_microbatch=not enabled)


# --- lay a model out for a loop that calls it and its losses' backward


def lay_out_averaged(module: nn.Module, mesh: Any, device: str, techniques: Techniques, seed: int) -> ParallelModel:
    """Lay a module out by the whole order, in place, with torch's averaging of gradients.

    The loop calls ``result.module``. A rank's loss is the mean over its own rows; each gradient is complete when
    backward ends: the mean over data ranks of the gradients of their losses, as DDP and FSDP have it.

    Args:
        mesh: None in one process.

    Returns:
        The model, for names and checkpoints; its ``forward_backward`` is not for this loop.

    Raises:
        UnsupportedError: stages, or parts of rows, which a loop of whole batches does not know.
        ConfigError: a loss that must be scaled, adapters, or what the rules refuse.
    """
    for axis, instead in ((Axis.PP, "parallelize(...)"), (Axis.CP, "context_parallel_rows in a loop of torch")):
        if (size := axis_size(mesh, axis)) > 1:
            raise UnsupportedError(
                f"{DOOR}: layout.{axis.value} = {size} gives each rank a part of the model's"
                f" forward, and this loop calls it whole: use {instead}, or set layout.{axis.value} = 1"
            )
    if techniques.adapters is not None:
        raise ConfigError(f"{DOOR}: techniques.adapters is for parallelize: put adapters beside the layers by peft")
    facts = model_facts(module)
    precision = techniques.precision
    if precision.compute == "auto":  # as the tool does: in the model's dtype, also on an accelerator
        own = max(facts.floating, key=facts.floating.__getitem__) if precision.master == "auto" else precision.master
        techniques = replace(techniques, precision=replace(precision, compute=own))
    plan = plan_for_mesh_sizes(facts, plan_sizes(mesh), device, techniques, "mean")
    if plan.precision.loss_scale:
        raise ConfigError(
            f"{DOOR}: techniques.precision.compute = float16 needs a loss that is scaled, and this loop scales none:"
            f" set bfloat16, or use parallelize(...)"
        )
    if mesh is None and plan.data.technique == "fully_shard":  # in one process it casts
        mesh = single_process_mesh(device)
    made = lay_out_module(module, facts, plan, mesh, order.NAMES, door=DOOR, seed=seed)
    return ParallelModel([ModelPart(made, plan, facts)], plan, facts, mesh)


def compare_streams_once(module: nn.Module, mesh: Any) -> None:
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
                f"{DOOR}: ranks of layout.tp have different random streams, and dropout would make the parameters that"
                f" they hold alike drift apart: seed by data rank, the same on tp peers, such as torch.manual_seed("
                f"seed + fabric.strategy.rows.rank) ({rank} of {ranks} here)"
            )

    hook = module.register_forward_pre_hook(compare)
