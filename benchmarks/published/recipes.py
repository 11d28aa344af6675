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

from meshwright.simulation.hardware.device import Device
from meshwright.simulation.workload.execution import Execution, MixtureRun

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


def with_recipe(run: Execution, row: Mapping[str, str], device: Device) -> Execution:
    """Return the execution of a mixture's row as its recipe describes it.

    Gradients are kept and reduced in bfloat16 (``grad_reduce_in_fp32=False``); models with latents have both moments in
    bfloat16 (``use_precision_aware_optimizer``). Capacities instead of numbers of rows ("tokendrop") need no wait.
    """
    model, dropless = row["model"].lower(), "tokendrop" not in row["model"]
    find = _gpt_oss if "gpt" in model else _qwen if "qwen" in model else _latent
    recipe = find(row, device.name, run.products)
    fused = recipe.graphs == "full" and dropless  # use_transformer_engine_op_fuser, moe_paged_stash
    return replace(
        run,
        recompute=recipe.recompute,
        graphs=recipe.graphs,
        hides_experts=1 - DISPATCHERS / device.multiprocessors if recipe.overlaps else 0.0,
        mixture=MixtureRun(recipe.dispatch, dropless, fused, weighs_inside=True, stashes=fused),
        gradient_bytes=2.0,
        reduce_bytes=2.0,
        optimizer_bytes=4.0 if find is _latent else 8.0,
    )


def _release(row: Mapping[str, str]) -> float:
    """Return the container's release as year and month, such as 26.02."""
    found = re.search(r"(\d\d\.\d\d)(\.\d+)? NeMo", row["where"])
    return float(found[1]) if found else 0.0


def _whole_step(row: Mapping[str, str], card: str, dtype: str) -> bool:
    """Whether one graph launches a step (``cuda_graph_impl="full_iteration"``)."""
    return _release(row) >= 26.06 and dtype in ("mxfp8", "nvfp4") and card in (*RACKS, "B300")


def _loops(row: Mapping[str, str]) -> bool:
    return int(row["vpp"] or 1) > 1


def _gpt_oss(row: Mapping[str, str], card: str, dtype: str) -> Recipe:
    release = _release(row)
    if _whole_step(row, card, dtype) and card in RACKS:
        return Recipe("none", "full", "tokens", overlaps=True)
    if card in ("GB300", "B300"):
        return Recipe("none", "partial", "tokens" if card == "B300" and release >= 26.06 else "copies")
    return Recipe("modules", "none", "copies", overlaps=card == "GB200" and release >= 26.06)


def _qwen(row: Mapping[str, str], card: str, dtype: str) -> Recipe:
    release, small, rack = _release(row), "30b" in row["model"].lower(), card in RACKS
    if release < 25.1:  # set_cuda_graph_overrides
        return Recipe("none", "full" if rack or (small and card == "B200") else "none")
    if _whole_step(row, card, dtype) and (rack or small):
        return Recipe("none", "full", "tokens", overlaps=dtype == "mxfp8")
    if small:
        sends_tokens = release >= 26.04 or (release >= 26 and card != "B200")
        overlaps = release < 26 and card == "H100"
        return Recipe("none", "none" if card == "H100" else "partial", "tokens" if sends_tokens else "copies", overlaps)
    if rack:
        return Recipe("none", "partial", "tokens")
    overlaps = _loops(row) and (card == "H100" or (release < 26.04 and card == ("B200" if release < 26 else "B300")))
    return Recipe(dispatch="tokens" if card == "B300" and release >= 26.06 else "copies", overlaps=overlaps)


def _latent(row: Mapping[str, str], card: str, dtype: str) -> Recipe:
    release, rack, rows = _release(row), card in RACKS, int(row["mbs"])
    if card == "H100":
        return Recipe("latents", "none", "tokens", overlaps=release < 26)
    if release < 25.1:
        return Recipe("latents", "full" if rack else "none")
    if _whole_step(row, card, dtype) and rows == 1:
        return Recipe("none" if card == "GB300" else "latents", "full", "tokens", overlaps=dtype == "mxfp8")
    if card == "B200" and _loops(row) and release >= 26.04:
        return Recipe("latents", "partial", "tokens", overlaps=True)
    graphs = "partial" if rows == 1 and (rack or (card == "B300" and _loops(row))) else "none"
    recompute = "none" if card == "GB300" and release < 26 else "latents"
    return Recipe(recompute, graphs, "tokens")
