"""Define the options of ``nvfsdp_strategy_parallelize``, and which of them work without megatron-fsdp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from meshwright.core.errors import ConfigError, UnsupportedError, nearest

STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""Strategy -> ZeRO stage (arXiv 1910.02054)."""
ALIASES = {"params": "optim_grads_params", "grads_params": "optim_grads_params"}
"""Older spellings: where parameters are sharded, so are their gradients and optimizer state."""
ELSEWHERE = ("keep_fp8_transpose_cache_when_using_custom_fsdp", "nccl_ub", "fsdp_double_buffer")
"""Switches that act on megatron-fsdp's own buffers."""


@dataclass(frozen=True)
class ZeroOptions:
    """The keyword arguments of the call, under their own names."""

    nvfsdp_unit_modules: Sequence[str | type] | None
    data_parallel_sharding_strategy: str
    init_nvfsdp_with_meta_device: bool
    grad_reduce_in_fp32: bool
    preserve_fp32_weights: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    check_for_nan_in_grad: bool
    average_in_collective: bool
    disable_bucketing: bool
    calculate_per_token_loss: bool
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool
    nccl_ub: bool
    fsdp_double_buffer: bool

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> ZeroOptions:
        """Pick the options out of a call's arguments by name."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    @property
    def strategy(self) -> str:
        """One of the four strategies; raises ConfigError for another name."""
        name = ALIASES.get(self.data_parallel_sharding_strategy, self.data_parallel_sharding_strategy)
        if name not in STRATEGIES:
            legal = [*STRATEGIES, *ALIASES]
            raise ConfigError(
                f"data_parallel_sharding_strategy = {name!r}: legal are {', '.join(legal)}.{nearest(str(name), legal)}"
            )
        return name

    @property
    def stage(self) -> int:
        return STRATEGIES[self.strategy]

    def check(self) -> None:
        """Raise ConfigError for an unknown strategy, and for options that contradict each other."""
        _ = self.strategy
        if self.calculate_per_token_loss and self.average_in_collective:
            raise ConfigError(
                "calculate_per_token_loss = True sums gradients over data ranks, and average_in_collective = True"
                " averages them. Leave one of them out."
            )
        if self.disable_bucketing and self.nvfsdp_unit_modules is not None:
            raise ConfigError(
                "disable_bucketing = True makes every module with parameters a unit, and nvfsdp_unit_modules names"
                " others. Leave one of them out."
            )
        for key in ELSEWHERE:
            if getattr(self, key):
                raise UnsupportedError(
                    f"{key} = True is about buffers of megatron-fsdp, and this function lays models out by FSDP2. Leave"
                    f" it out."
                )
