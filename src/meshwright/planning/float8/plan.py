"""Decide which linear layers multiply in float8, and by which recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from meshwright.core.devices import CUDA
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import is_within, matching, pattern
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.roles import linears_of_blocks, routers_among
from meshwright.introspection.structure.experts import find_stacks
from meshwright.planning.techniques import Techniques
from meshwright.planning.tensor.plan import TensorPlan

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""The recipes, by torchao's names."""
MULTIPLE = 16
"""The kernels of a GPU take matrices whose dims are multiples of this number."""


@dataclass(frozen=True)
class Float8Plan:
    """Linear layers whose products have operands in float8 (arXiv 2209.05433), scaled anew at every call.

    Attributes:
        recipe: the granularity of scales: ``tensorwise`` one per operand, ``rowwise`` one per row of an operand; in
            ``rowwise_with_gw_hp`` the product that gives the weight's gradient stays in high precision.
        modules: paths of those layers.
        emulated: operands are rounded to float8 and multiplied in float32, as on a CPU.
        all_gather: FSDP gathers their weights in float8, with one scale for each.
    """

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
    modules: tuple[str, ...]
    emulated: bool
    all_gather: bool = False

    @property
    def gathered(self) -> frozenset[str]:
        """Names of the weights that FSDP gathers in float8."""
        return frozenset(f"{path}.weight" for path in self.modules) if self.all_gather else frozenset()

    def only(self, blocks: tuple[str, ...]) -> Float8Plan:
        """Restrict the plan to some blocks."""
        return replace(
            self, modules=tuple(path for path in self.modules if any(is_within(path, block) for block in blocks))
        )


def make_float8_plan(
    facts: ModelFacts, requested: Techniques, device: str
) -> tuple[Float8Plan | None, tuple[str, ...]]:
    """Resolve the requested float8 into a plan, with notes about layers that are left out.

    Raises:
        ConfigError: a pattern of the filter matches no linear layer, or no layer is left.
        UnsupportedError: only facts about the model are available, not its module.
    """
    if (applied := facts.applied_plan(Float8Plan)) is not None:
        if requested.float8 != "none":
            raise ConfigError(
                f"techniques.float8 = {requested.float8}: layers of this {facts.kind} multiply in float8 already, by"
                f" {applied.recipe}. Leave it out, or give a model to which apply_float8 was not applied."
            )
        return applied, ()
    if requested.float8 == "none":
        return None, ()
    if facts.module is None:
        raise UnsupportedError(
            f"techniques.float8 = {requested.float8}: the model itself ({facts.kind}) is not at hand"
        )
    linears = linears_of_blocks(facts.module, facts.blocks)
    filtered = matching(
        requested.float8_filter, list(linears), "techniques.float8_filter", "linear layer of its blocks"
    )
    routers = set(routers_among(facts.module, linears))
    reasons = {
        path: "by techniques.float8_filter"
        if path in filtered
        else "a router"
        if path in routers
        else _obstacle(linear)
        for path, linear in linears.items()
    }
    chosen = tuple(path for path, reason in reasons.items() if not reason)
    if not chosen:
        words = "; ".join(_left_out(reasons)) or "it has none"
        raise ConfigError(
            f"techniques.float8 = {requested.float8}: no linear layer in the blocks of {facts.kind} can be converted:"
            f" {words}"
        )
    stacks = dict.fromkeys(pattern(path) for path in find_stacks(facts.module))
    experts = (f"the experts of {path} stay in high precision: they are no linear layers" for path in stacks)
    notes = (*_left_out(reasons), *experts, "the head, embeddings and norms stay in high precision")
    return Float8Plan(requested.float8, chosen, device != CUDA, requested.float8_all_gather), tuple(
        f"float8: {text}" for text in notes
    )


def check_parts(plan: Float8Plan | None, tensor: TensorPlan | None, facts: ModelFacts) -> None:
    """Check that the dims of a rank's part of each converted layer divide by ``MULTIPLE``.

    Raises:
        ConfigError: some do not; the message names the layers and the filter that leaves them out.
    """
    if plan is None or tensor is None:
        return
    shapes = {name: p.shape for p in facts.parameters for name in (p.name, *p.aliases)}
    parts = {path: tensor.local_shape(f"{path}.weight", shapes[f"{path}.weight"]) for path in plan.modules}
    odd = {pattern(path): shape for path, shape in parts.items() if any(size % MULTIPLE for size in shape)}
    if odd:
        layers = ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in odd.items())
        request = ", ".join(f'"{name.rpartition(".")[2]}"' for name in odd)
        raise ConfigError(
            f"techniques.float8 = {plan.recipe}: of some layers a rank of layout.tp = {tensor.ranks} has a part that"
            f" does not divide by"
            f" {MULTIPLE}: {layers}. Leave them out (techniques.float8_filter = [{request}]), or lower layout.tp."
        )


def _obstacle(linear: nn.Linear) -> str:
    """Return the reason why a layer cannot be converted; "" if it can."""
    if type(linear) is not nn.Linear:
        return f"its class {type(linear).__name__} may compute more than a linear layer does"
    rows, columns = linear.weight.shape
    if rows % MULTIPLE or columns % MULTIPLE:
        return f"{rows}×{columns} does not divide by {MULTIPLE}"
    return ""


def _left_out(reasons: dict[str, str]) -> Iterator[str]:
    """Yield a note for each group of layers that are left out, by their name in all blocks, with their number."""
    for (name, reason), count in Counter((pattern(path), reason) for path, reason in reasons.items() if reason).items():
        yield f"{name} stays in high precision ({count} of them): {reason}"
