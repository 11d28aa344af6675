"""Describe how NVIDIA's benchmarks ran mixtures, by the recipes that Megatron-Bridge publishes.

Read from ``scripts/performance/configs`` and ``src/megatron/bridge/perf_recipes`` of NVIDIA-NeMo/Megatron-Bridge, in
versions that are near its releases: which modules are recomputed, what CUDA graphs launch, which dispatcher sends
tokens, and whether its messages run behind another microbatch. A row's model, card, dtype, release and layout say which
recipe is its own. Not every version was at hand: for a release without one, the version before it stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.simulation.cards import Device
from meshwright.simulation.job import Execution, MixtureRun

DISPATCHERS = 32
"""Multiprocessors that dispatch and combine take from the work that they run behind (``moe_hybridep_num_sms``)."""
RACKS = ("GB200", "GB300")
"""Cards whose NVLink joins a rack."""


@dataclass(frozen=True)
class Recipe:
    """A way in which a mixture was run.

    Attributes:
        recompute: what is computed again: nothing, norms and activations (modules), up-projections (latents).
        graphs: what CUDA graphs launch: nothing, attention and router (partial), the whole step (full).
        dispatch: whether copies of a token travel, or the token (DeepEP, HybridEP).
        overlaps: whether messages run behind another microbatch (``moe_a2a_overlap``).
    """

    recompute: Literal["none", "modules", "latents"] = "none"
    graphs: Literal["none", "partial", "full"] = "none"
    dispatch: Literal["copies", "tokens"] = "copies"
    overlaps: bool = False


@dataclass(frozen=True)
class Benchmark:
    """What decides the recipe of a row.

    Attributes:
        model: in lower case.
        release: of the container, as year and month: 26.02; 0 where a row names none.
        rows: sequences of a microbatch.
        loops: whether a pipeline rank has several stages.
    """

    model: str
    release: float
    card: str
    dtype: str
    rows: float
    loops: bool

    @property
    def rack(self) -> bool:
        return self.card in RACKS

    @property
    def one_graph(self) -> bool:
        """Whether a graph launches the whole step (``cuda_graph_impl="full_iteration"``)."""
        return self.release >= 26.06 and self.dtype in ("mxfp8", "nvfp4") and (self.rack or self.card == "B300")


def with_recipe(run: Execution, row: Mapping[str, str], device: Device, microbatch: float) -> Execution:
    """Return the execution of a mixture's row as its recipe describes it.

    Gradients are kept and reduced in bfloat16 (``grad_reduce_in_fp32=False``); models with latents have both moments in
    bfloat16 (``use_precision_aware_optimizer``). Capacities instead of numbers of rows ("tokendrop") need no wait.
    YaRN's factor of GPT OSS is none that the kernel of rotary positions knows.
    """
    model = row["model"].lower()
    found = re.search(r"(\d\d\.\d\d)(\.\d+)? NeMo", row["where"])
    release = float(found[1]) if found else 0.0
    one = Benchmark(model, release, device.name, run.products, microbatch, run.stages_per_rank > 1)
    recipe = _gpt_oss(one) if "gpt" in model else _qwen(one) if "qwen" in model else _latent(one)
    dropless = "tokendrop" not in model
    fused = recipe.graphs == "full" and dropless  # use_transformer_engine_op_fuser, moe_paged_stash
    return replace(
        run,
        recompute=recipe.recompute,
        graphs=recipe.graphs,
        fused_rotary="gpt" not in model,
        hides_experts=1 - DISPATCHERS / device.multiprocessors if recipe.overlaps else 0.0,
        mixture=MixtureRun(recipe.dispatch, dropless, fused, weighs_inside=True, stashes=fused),
        gradient_bytes=2.0,
        reduce_bytes=2.0,
        optimizer_bytes=8.0 if "gpt" in model or "qwen" in model else 4.0,
    )


def _gpt_oss(one: Benchmark) -> Recipe:
    if one.one_graph and one.rack:
        return Recipe("none", "full", "tokens", overlaps=True)
    if one.card in ("GB300", "B300"):
        return Recipe("none", "partial", "tokens" if one.card == "B300" and one.release >= 26.06 else "copies")
    return Recipe("modules", "none", "copies", overlaps=one.card == "GB200" and one.release >= 26.06)


def _qwen(one: Benchmark) -> Recipe:
    small, release, card = "30b" in one.model, one.release, one.card
    if release < 25.1:  # set_cuda_graph_overrides
        return Recipe("none", "full" if one.rack or (small and card == "B200") else "none")
    if one.one_graph and (one.rack or small):
        return Recipe("none", "full", "tokens", overlaps=one.dtype == "mxfp8")
    if small:
        sends_tokens = release >= 26.04 or (release >= 26 and card != "B200")
        overlaps = release < 26 and card == "H100"
        return Recipe("none", "none" if card == "H100" else "partial", "tokens" if sends_tokens else "copies", overlaps)
    if one.rack:
        return Recipe("none", "partial", "tokens")
    overlaps = one.loops and (card == "H100" or (release < 26.04 and card == ("B200" if release < 26 else "B300")))
    return Recipe(dispatch="tokens" if card == "B300" and release >= 26.06 else "copies", overlaps=overlaps)


def _latent(one: Benchmark) -> Recipe:
    if one.card == "H100":
        return Recipe("latents", "none", "tokens", overlaps=one.release < 26)
    if one.release < 25.1:
        return Recipe("latents", "full" if one.rack else "none")
    if one.one_graph and one.rows == 1:
        return Recipe("none" if one.card == "GB300" else "latents", "full", "tokens", overlaps=one.dtype == "mxfp8")
    if one.card == "B200" and one.loops and one.release >= 26.04:
        return Recipe("latents", "partial", "tokens", overlaps=True)
    graphs = "partial" if one.rows == 1 and (one.rack or (one.card == "B300" and one.loops)) else "none"
    return Recipe("none" if one.card == "GB300" and one.release < 26 else "latents", graphs, "tokens")
