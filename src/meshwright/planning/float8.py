"""Decide which linear layers multiply in float8, list the messages for their scales, and check that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import nn

from meshwright.core.axes import Axis
from meshwright.core.devices import CUDA
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import matching, pattern
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.roles import linears_of_blocks, routers_among
from meshwright.introspection.structure.experts import find_stacks
from meshwright.planning.techniques import Techniques
from meshwright.planning.tensor.plan import TensorPlan
from meshwright.planning.values import Case, Collective, Found, no_blocks

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

    @cached_property
    def gathered(self) -> frozenset[str]:
        """Names of the weights that FSDP gathers in float8."""
        return frozenset(f"{path}.weight" for path in self.modules) if self.all_gather else frozenset()


def make_float8_plan(
    facts: ModelFacts, requested: Techniques, device: str
) -> tuple[Float8Plan | None, tuple[str, ...]]:
    """Resolve the requested float8 into a plan, with notes about layers that are left out.

    Raises:
        ConfigError: a pattern of the filter matches no linear layer, or no layer is left.
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
    linears = linears_of_blocks(facts.module, facts.blocks)
    filtered = matching(
        requested.float8_filter, list(linears), "techniques.float8_filter", "linear layer of its blocks"
    )
    routers = set(routers_among(facts.module, linears))
    reasons: dict[str, str] = {}
    for path, linear in linears.items():
        rows, columns = linear.weight.shape
        if path in filtered:
            reasons[path] = "by techniques.float8_filter"
        elif path in routers:
            reasons[path] = "a router"
        elif type(linear) is not nn.Linear:
            reasons[path] = f"its class {type(linear).__name__} may compute more than a linear layer does"
        elif rows % MULTIPLE or columns % MULTIPLE:
            reasons[path] = f"{rows}×{columns} does not divide by {MULTIPLE}"
        else:
            reasons[path] = ""
    chosen = tuple(path for path, reason in reasons.items() if not reason)
    left_out = notes_on(reasons, "stays in high precision")
    if not chosen:
        words = "; ".join(left_out) or "it has none"
        raise ConfigError(
            f"techniques.float8 = {requested.float8}: no linear layer in the blocks of {facts.kind} can be converted:"
            f" {words}"
        )
    stacks = dict.fromkeys(pattern(path) for path in find_stacks(facts.module))
    experts = (f"the experts of {path} stay in high precision: they are no linear layers" for path in stacks)
    notes = (*left_out, *experts, "the head, embeddings and norms stay in high precision")
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


def notes_on(reasons: dict[str, str], stays: str) -> tuple[str, ...]:
    """Note each group of layers that are left out for a reason, by their name in all blocks, with their number."""
    groups = Counter((pattern(path), reason) for path, reason in reasons.items() if reason)
    return tuple(f"{name} {stays} ({count} of them): {reason}" for (name, reason), count in groups.items())


def scales_of_gathered(float8: Float8Plan | None, tensor: TensorPlan | None, shards: int) -> Iterator[Collective]:
    """List the all-reduces for the scales of weights gathered in float8.

    They run once in each forward, over the ranks that shard and over those that cut the weights.
    """
    if float8 is None or not float8.gathered or shards == 1:
        return
    cut = [] if tensor is None else [path for path in float8.modules if tensor.parts_of(path).weight]
    for axis, ranks, weights in (
        (Axis.DP_SHARD, shards, float8.modules),
        (Axis.TP, tensor.ranks if tensor else 1, cut),
    ):
        if weights:
            yield Collective(
                "all_reduce", axis.value, ranks, "float8 scales of weights", len(weights), "float32", "microbatch"
            )


# --- check float8

AROUND = ("float32", "bfloat16", "float16")
"""Dtypes allowed for the computation outside the products."""


def float8_requested(case: Case) -> Found:
    """Require that the float8 settings fit together, and fit the model."""
    t = case.techniques
    if t.float8 not in RECIPES:
        if t.float8_filter:
            yield ConfigError(
                "techniques.float8_filter leaves layers out of float8, but techniques.float8 = none: leave it out, or"
                " set that"
            )
        if t.float8_all_gather:
            yield ConfigError(
                "techniques.float8_all_gather = true gathers the weights of layers in float8, but techniques.float8 ="
                " none. Set techniques.float8 = tensorwise, or techniques.float8_all_gather = false."
            )
        return
    if case.precision.compute not in AROUND:
        yield ConfigError(
            f"techniques.float8 = {t.float8} rounds the operands of products, so the rest need not be"
            f" {case.precision.compute}."
            f" Set techniques.precision.compute = bfloat16 (or float32, float16), or techniques.float8 = none."
        )
    if not case.facts.blocks:
        yield ConfigError(no_blocks(f"techniques.float8 = {t.float8}", case.facts))


def float8_companions(case: Case) -> Found:
    """Refuse techniques that do not combine with float8."""
    t, done = case.techniques, case.facts.applied_plan(Float8Plan)
    if t.async_tensor_parallel and (t.float8 in RECIPES or done is not None):
        request = f"techniques.float8 = {t.float8}" if done is None else "apply_float8"
        yield UnsupportedError(
            f"{request} does not go with techniques.async_tensor_parallel = true, whose products are in"
            f" {case.precision.compute}. Set techniques.async_tensor_parallel = false, or leave float8 out."
        )


def float8_gathering(case: Case) -> Found:
    """Require sharding that can gather weights in float8."""
    t, shards, done = case.techniques, case.layout.dp_shard, case.facts.applied_plan(Float8Plan)
    wanted = t.float8 in RECIPES and t.float8_all_gather
    if wanted and t.float8 != "tensorwise":
        yield UnsupportedError(
            f"techniques.float8_all_gather = true gathers a weight with one scale, and techniques.float8 = {t.float8}"
            f" has one for each row, another in forward than in backward. Set techniques.float8 = tensorwise, or"
            f" techniques.float8_all_gather = false."
        )
    if t.float8_all_gather and (case.technique != "fully_shard" or shards == 1):
        yield ConfigError(
            f"techniques.float8_all_gather = true is about weights that FSDP gathers, and here none are:"
            f" layout.dp_shard = {shards},"
            f" {case.technique}. Set techniques.float8_all_gather = false, or layout.dp_shard = 2 or more."
        )
    if (wanted or (done is not None and done.all_gather)) and not isinstance(t.reshard_after_forward, bool | str):
        asked = "techniques.float8_all_gather" if wanted else "enable_fsdp_float8_all_gather"
        yield UnsupportedError(
            f"{asked} = true does not go with techniques.reshard_after_forward = {t.reshard_after_forward}: torch"
            f" does not shard what was"
            f" gathered in float8 over fewer ranks. Set techniques.reshard_after_forward = true or false."
        )
