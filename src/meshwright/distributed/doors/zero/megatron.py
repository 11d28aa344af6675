"""Use megatron-fsdp (once nvFSDP) as a backend of ``nvfsdp_strategy_parallelize``: CUDA only, not run so far.

Its arguments come, go and change names, so each is bound by the installed version's signature, or refused by name.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.axes import Axis
from meshwright.core.devices import CUDA, local_device
from meshwright.core.errors import UnsupportedError
from meshwright.distributed.mesh import axis_sizes
from meshwright.distributed.torch_private import flattened

from .options import ZeroOptions

HAVE_NVFSDP = importlib.util.find_spec("megatron_fsdp") is not None and local_device() == CUDA
"""Whether megatron-fsdp (once nvFSDP) can be used: it is installed, and there is a CUDA device."""

SPELLINGS = {
    "data_parallel_sharding_strategy": ("zero_dp_strategy", "data_parallel_sharding_strategy"),
    "init_nvfsdp_with_meta_device": ("init_model_with_meta_device", "init_nvfsdp_with_meta_device"),
    "nvfsdp_unit_modules": ("fsdp_unit_modules",),
    "check_for_nan_in_grad": ("check_for_nan_in_grad", "report_nan_in_param_grad"),
    "keep_fp8_transpose_cache_when_using_custom_fsdp": (
        "keep_fp8_transpose_cache",
        "keep_fp8_transpose_cache_when_using_custom_fsdp",
    ),
}
"""meshwright's argument -> its names in versions; the other arguments have the same names."""
POLICY, POLICY_MEMBERS = "mixed_precision_policy", ("grad_reduce_in_fp32", "preserve_fp32_weights")
"""Since version 0.5 one object has these two fields."""


def lay_out(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device_mesh: DeviceMesh,
    options: ZeroOptions,
    units: list[type],
    package: Any = None,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Pass model and optimizer to megatron-fsdp's ``fully_shard`` (without an optimizer: ``fully_shard_model``).

    Args:
        units: classes of the modules that travel together.
        package: replacement of megatron_fsdp (tests).

    Raises:
        UnsupportedError: the installed version has no name for a requested option.
    """
    package = package or import_module("megatron_fsdp")
    function: Callable[..., Any] = package.fully_shard_model if optimizer is None else package.fully_shard
    wanted = {"module": model, **places(device_mesh), **arguments_of(options, units)}
    if optimizer is not None:
        wanted["optimizer"] = optimizer
    arguments = bind(function, wanted, package)
    if optimizer is None:
        return function(**arguments), None
    return function(**arguments)


def arguments_of(options: ZeroOptions, units: list[type]) -> dict[str, Any]:
    """Return the options, with the strategy by its current name."""
    found = {key: getattr(options, key) for key in options.__dataclass_fields__}
    return {**found, "data_parallel_sharding_strategy": options.strategy, "nvfsdp_unit_modules": units}


def places(device_mesh: DeviceMesh) -> dict[str, Any]:
    """Return the axes over which the model is sharded, replicated and cut, by meshwright's names."""
    sizes = axis_sizes(device_mesh)
    found: dict[str, Any] = {"device_mesh": device_mesh, "dp_shard_dim": Axis.DP_SHARD.value}
    if sizes.get(Axis.TP.value, 1) > 1:
        found["tp_dim"] = Axis.TP.value
    if sizes.get(Axis.DP_REPLICATE.value, 1) > 1:
        found["dp_outer_dim"] = Axis.DP_REPLICATE.value
        found["hybrid_fsdp_group"] = flattened(
            device_mesh[Axis.DP_REPLICATE.value, Axis.DP_SHARD.value], "dp"
        ).get_group()
    return found


def bind(function: Callable[..., Any], wanted: dict[str, Any], package: Any) -> dict[str, Any]:
    """Name the arguments by a function's signature; a missing one is left out if it is False.

    Raises:
        UnsupportedError: the function lacks another argument.
    """
    known = inspect.signature(function).parameters
    found: dict[str, Any] = {}
    if POLICY in known and not set(POLICY_MEMBERS) <= set(known):
        wanted = dict(wanted)
        reduces_in_fp32, preserves = (wanted.pop(key) for key in POLICY_MEMBERS)
        wide = torch.float32 if reduces_in_fp32 else None
        found[POLICY] = package.MixedPrecisionPolicy(
            main_params_dtype=torch.float32 if preserves else None, main_grads_dtype=wide, grad_comm_dtype=wide
        )
    for key, value in wanted.items():
        name = next((spelling for spelling in SPELLINGS.get(key, (key,)) if spelling in known), None)
        if name is not None:
            found[name] = value
        elif value is not False:
            version = getattr(package, "__version__", "that is installed")
            raise UnsupportedError(
                f"{key} = {value!r}: megatron-fsdp {version} has no such argument ({', '.join(known)}). Leave it out,"
                f" or use fsdp2_strategy_parallelize."
            )
    return found
