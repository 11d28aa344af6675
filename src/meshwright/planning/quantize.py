"""Decide which frozen linear layers hold their weights in 4 bits, and check that."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import pattern
from meshwright.core.parts import is_plain
from meshwright.introspection.adapted_model import host_of_magnitude, is_adapter
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.roles import linears_of_blocks, routers_among
from meshwright.introspection.structure.experts import find_stacks
from meshwright.planning.float8 import Float8Plan, check_parts, make_float8_plan, notes_on
from meshwright.planning.techniques import Techniques
from meshwright.planning.tensor.plan import TensorPlan
from meshwright.planning.values import NF4_BLOCK, Case, Found, no_blocks


@dataclass(frozen=True)
class QuantizePlan:
    """Frozen linear layers whose weights rest, and are gathered, in NF4 (QLoRA, arXiv 2305.14314).

    Attributes:
        modules: paths of those layers.
    """

    modules: tuple[str, ...]

    @cached_property
    def weights(self) -> frozenset[str]:
        """Names of the weights in 4 bits."""
        return frozenset(f"{path}.weight" for path in self.modules)


def rounded_weights(
    facts: ModelFacts, requested: Techniques, device: str, tensor: TensorPlan | None
) -> tuple[Float8Plan | None, QuantizePlan | None, tuple[str, ...]]:
    """Decide which layers multiply in float8 and which hold their weights in 4 bits, with notes on both.

    Raises:
        ConfigError, UnsupportedError: as ``make_float8_plan``, ``make_quantize_plan`` and the checks of their cuts do.
    """
    float8, about_float8 = make_float8_plan(facts, requested, device)
    check_parts(float8, tensor, facts)
    quantize, about_quantize = make_quantize_plan(facts, requested)
    check_cuts(quantize, tensor, facts)
    return float8, quantize, (*about_float8, *about_quantize)


def make_quantize_plan(facts: ModelFacts, requested: Techniques) -> tuple[QuantizePlan | None, tuple[str, ...]]:
    """Resolve the requested quantization into a plan, with notes about layers that are left out.

    Args:
        facts: the model's, with what is frozen.

    Raises:
        ConfigError: no linear layer of the blocks is frozen, or none of those divides into blocks of weights.
    """
    if requested.quantize_frozen == "none":
        return None, ()
    asked = f"techniques.quantize_frozen = {requested.quantize_frozen}"
    if facts.applied_plan(QuantizePlan) is not None:
        raise ConfigError(
            f"{asked}: layers of this {facts.kind} hold their weights in 4 bits already: leave it out, or give a model"
            f" that was not laid out"
        )
    known = {name: p for p in facts.parameters for name in (p.name, *p.aliases)}
    linears = linears_of_blocks(facts.module, facts.blocks)
    routers, readers = set(routers_among(facts.module, linears)), facts.measurements.weight_readers()
    reasons: dict[str, str] = {}  # of each frozen layer the reason to leave it out, "" without one
    for path, module in linears.items():
        weight = known.get(f"{path}.weight")
        if weight is None or weight.trainable or is_adapter(weight.name):
            continue
        reasons[path] = ""
        if path in routers:
            reasons[path] = "a router"
        elif type(module) is not nn.Linear:
            reasons[path] = f"its class {type(module).__name__} may compute more than a linear layer does"
        elif reader := readers.get(pattern(path)):
            reasons[path] = f"{reader} reads its weight"
        elif weight.aliases:
            others = ", ".join(name for name in weight.aliases if name != weight.name)
            reasons[path] = f"its weight is tied to {others}"
        elif weight.shape[1] % NF4_BLOCK:
            reasons[path] = f"its {weight.shape[1]} columns are no multiple of {NF4_BLOCK}"
    chosen = tuple(path for path, reason in reasons.items() if not reason)
    left_out = notes_on(reasons, "stays as it is")
    if not reasons:
        raise ConfigError(
            f"{asked} holds frozen weights in 4 bits, and no nn.Linear in the blocks of {facts.kind} is frozen"
            f" (transformers' Conv1D is none). Ask for adapters (a table [adapters]), freeze layers"
            f" (techniques.freeze), or set techniques.quantize_frozen = none."
        )
    if not chosen:
        raise ConfigError(f"{asked}: no frozen linear layer of {facts.kind} can rest in 4 bits: {'; '.join(left_out)}")
    stacks = dict.fromkeys(pattern(path) for path in find_stacks(facts.module))
    experts = (f"the experts of {path} stay as they are: they are no linear layers" for path in stacks)
    return QuantizePlan(chosen), tuple(f"quantize: {text}" for text in (*left_out, *experts))


def check_cuts(plan: QuantizePlan | None, tensor: TensorPlan | None, facts: ModelFacts) -> None:
    """Check that the tensor axis leaves blocks of weights whole.

    Raises:
        ConfigError: a rank's part of some layers ends inside a block; names the layers and their sizes.
    """
    if plan is None or tensor is None:
        return
    shapes = {name: p.shape for p in facts.parameters for name in (p.name, *p.aliases)}
    odd: dict[str, int] = {}
    for name in plan.weights:
        cut = tensor.cut_of(name, shapes[name])
        if cut is None or cut[0] == 0:
            continue
        columns = tensor.local_shape(name, shapes[name])[1]
        if not is_plain(cut[1], tensor.ranks) or columns % NF4_BLOCK or columns * tensor.ranks != shapes[name][1]:
            odd[pattern(name)] = shapes[name][1]
    if odd:
        layers = ", ".join(f"{name} ({columns} columns)" for name, columns in sorted(odd.items()))
        raise ConfigError(
            f"techniques.quantize_frozen = nf4 gives a scale to {NF4_BLOCK} weights of a row, and layout.tp ="
            f" {tensor.ranks} would cut inside them: {layers}. Columns must be a multiple of {NF4_BLOCK} ×"
            f" tp = {NF4_BLOCK * tensor.ranks}: lower layout.tp, or set techniques.quantize_frozen = none."
        )


# --- check weights in 4 bits


def quantize_companions(case: Case) -> Found:
    """Require blocks, and refuse techniques that do not combine with weights in 4 bits."""
    t = case.techniques
    if t.quantize_frozen == "none":
        return
    asked = f"techniques.quantize_frozen = {t.quantize_frozen}"
    if not case.facts.blocks:
        yield ConfigError(no_blocks(asked, case.facts))
    if t.float8 != "none":
        yield UnsupportedError(
            f"{asked} does not go with techniques.float8 = {t.float8}, which rounds the weights of the same layers."
            f" Set one of them to none."
        )
    if t.async_tensor_parallel:
        yield UnsupportedError(
            f"{asked} does not go with techniques.async_tensor_parallel = true, whose fused products take plain"
            f" weights. Set techniques.async_tensor_parallel = false."
        )
    if any(host_of_magnitude(p.name) for p in case.facts.parameters):
        yield UnsupportedError(
            f"{asked} does not go with adapters.kind = dora, which takes the lengths of a plain weight's rows. Set"
            f" adapters.kind = lora, or techniques.quantize_frozen = none."
        )
