"""Group parameters for an optimizer by name: those that decay, and those with options of their own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import ConfigError, nearest
from meshwright.core.names import clean
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.plan import Plan


def make_parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    weight_decay: float = 0.1,
    overrides: Sequence[tuple[str, dict[str, Any]]] = (),
    decayed_dims: int = 2,
    elsewhere: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Group parameters for an optimizer: matrices decay, vectors and scalars (norms, biases) do not; overrides win.

    Args:
        named_parameters: (name, parameter) pairs; frozen ones are left out, wrapper prefixes ignored.
        overrides: (regular expression on names, options of the group); the first that matches a parameter wins.
        decayed_dims: least number of dims of a parameter that decays.
        elsewhere: names of trained parameters of the whole model, of which a pipeline's rank has some.

    Returns:
        Dicts {"params", "weight_decay", ...}, empty groups left out; each parameter stands in exactly one.

    Raises:
        ConfigError: an override matches nothing, or is no regular expression.
    """
    groups: dict[Any, dict[str, Any]] = {}
    named_parameters = list(named_parameters)
    own = [clean(name) for name, parameter in named_parameters if parameter.requires_grad]
    refuse_unused([text for text, _ in overrides], [*own, *elsewhere])
    for raw, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        name = clean(raw)
        # those of stacked experts are matrices
        key: Any = parameter.dim() >= decayed_dims and not name.endswith("bias")
        options: dict[str, Any] = {"weight_decay": weight_decay if key else 0.0}
        for number, (text, chosen) in enumerate(overrides):
            if _matches(text, name):
                key, options = (key, number), {**options, **chosen}
                break
        groups.setdefault(key, {"params": [], **options})["params"].append(parameter)
    return list(groups.values())


def refuse_unused(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise ConfigError if a pattern of ``optimizer.overrides`` is the first match of no trained parameter."""
    found = {next((text for text in patterns if _matches(text, name)), None) for name in names}
    for text in patterns:
        if text in found:
            continue
        if any(_matches(text, name) for name in names):
            raise ConfigError(
                f"optimizer.overrides: '{text}' matches no trainable parameter that an earlier pattern has left over"
                f" (the first match counts). Put it first, or leave it out."
            )
        like = f" The names are like {names[0]}." if names else ""
        raise ConfigError(f"optimizer.overrides: '{text}' matches no trainable parameter.{nearest(text, names)}{like}")


def trained_names(facts: ModelFacts, plan: Plan) -> list[str]:
    """List the names of the trained parameters of a whole model."""
    return [fact.name for fact in facts.parameters if fact.trainable and fact.name not in plan.frozen]


def split_by_role(
    groups: Iterable[Mapping[str, Any]], named_parameters: Iterable[tuple[str, nn.Parameter]], matrices: Iterable[str]
) -> list[dict[str, Any]]:
    """Split groups into those of hidden ``matrices`` and those of other parameters, with the key ``use_muon``."""
    chosen, names = set(matrices), {parameter: clean(name) for name, parameter in named_parameters}
    if not chosen:
        raise ConfigError(
            "Muon: no hidden matrices are named. Plan for it, parallelize(…, techniques={'optimizer': 'muon'}), and"
            " give plan=model.plan.optimizer."
        )
    found: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        sides: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for parameter in group["params"]:
            if parameter not in names:
                raise ConfigError(
                    f"Muon: group {number} holds a parameter of shape {tuple(parameter.shape)} without a name, by which"
                    f" hidden matrices are known. Give named_parameters=model.named_parameters()."
                )
            sides[names[parameter] in chosen].append(parameter)
        found += [{**group, "params": params, "use_muon": side} for side, params in sides.items() if params]
    return found


def _matches(text: str, name: str) -> bool:
    try:
        return re.search(text, name) is not None
    except re.error as error:
        raise ConfigError(f"optimizer.overrides: '{text}' is not a regular expression ({error})") from None


class OptimizerSwap:
    """A record of an optimizer's parameters, made before the layout and any state; ``apply`` it afterwards."""

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
