"""Point an optimizer that was made before the layout to the laid out parameters."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.core.errors import ConfigError
from meshwright.core.names import clean


class OptimizerSwap:
    """A record of an optimizer's parameters, made before the layout; ``apply`` it afterwards.

    Raises:
        ConfigError: the optimizer has state already, or holds a parameter that is not the model's.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        if optimizer.state and all(float(state.get("step", 1)) == 0 for state in optimizer.state.values()):
            raise ConfigError(
                f"optimizer: {type(optimizer).__name__} creates its state in its constructor, for whole parameters."
                f" Leave optimizer out, and make it from the parameters of the model that is returned."
            )
        if optimizer.state:
            raise ConfigError(
                f"optimizer: this {type(optimizer).__name__} has the state of {len(optimizer.state)} parameters"
                f" already, which are whole and would have to be cut. Lay the model out before the first step, or load"
                f" the state afterwards (meshwright.load)."
            )
        names = {parameter: clean(name) for name, parameter in model.named_parameters()}
        self.optimizer = optimizer
        self.names: list[list[str]] = []
        for number, group in enumerate(optimizer.param_groups):
            if any(parameter not in names for parameter in group["params"]):
                raise ConfigError(
                    f"optimizer: its group {number} holds a parameter that is not one of this {type(model).__name__}'s."
                    f" Make it from model.parameters(), of the model that is given."
                )
            self.names.append([names[parameter] for parameter in group["params"]])

    def apply(self, model: nn.Module) -> None:
        """Point every group to the model's parameters of the same names; its options stay."""
        parameters = {clean(name): parameter for name, parameter in model.named_parameters()}
        for group, names in zip(self.optimizer.param_groups, self.names, strict=True):
            group["params"] = [parameters[name] for name in names]
