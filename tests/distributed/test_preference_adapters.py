"""Pairs on a model with adapters: the reference is the model without them, in each step and on every layout, equal to
the one that was computed before the first step; or it must be brought, for a reason that is said.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import families
from support.laid_out import own_rows
from support.oracle import relative_errors
from support.ranks import refusal
from support.train import gradients
from torch.distributed.tensor import DTensor

from meshwright import ConfigError, Layout, PreferenceLoss, parallelize
from meshwright.distributed.loss import peft_private
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process.world import get_world_info

pytestmark = pytest.mark.all

EXACT, BETA, RATE = 1e-10, 0.3, 20.0
LORA = {"rank": 4, "alpha": 6.0}
ONE = Layout(dp_shard=1)
WAYS = {
    "one": (ONE, "llama", LORA),
    "FSDP 2": (Layout(dp_shard=2), "llama", LORA),
    "DDP 2": (Layout(dp_replicate=2, dp_shard=1), "llama", LORA),
    "FSDP 2 x tp 2": (Layout(dp_shard=2, tp=2), "llama", LORA),
    "pp 2": (Layout(dp_shard=1, pp=2), "llama", LORA),
    "cp 2": (Layout(dp_shard=1, cp=2), "llama", LORA),
    "cp 2 x pp 2": (Layout(dp_shard=1, cp=2, pp=2), "llama", LORA),
    "ep 2": (Layout(dp_shard=2, ep=2), "qwen3_moe", LORA | {"targets": ["self_attn.*"]}),
    "stacks of experts, FSDP 2": (Layout(dp_shard=2), "qwen3_moe", LORA | {"targets": ["experts.gate_up_proj"]}),
}


def rows() -> dict[str, torch.Tensor]:
    """Four pairs; in each row the first three labels are a prompt's."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, families.VOCABULARY, size=(8, 12)))
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    labels[:, :3] = -100
    return {"tokens": tokens, "labels": labels}


def model_of(layout: Layout, family: str, adapters: dict[str, Any], **techniques: Any) -> ParallelModel:
    config = families.config_of(family, use_cache=False)
    requested = {"adapters": adapters, "precision": {"master": "float64", "reduce": "float64"}, **techniques}
    if family == "qwen3_moe":
        config._experts_implementation = "eager"  # transformers' grouped kernels take no float64
    return parallelize(config, layout, techniques=requested, seed=3, loss_fn=PreferenceLoss(BETA))


def steps(layout: Layout, family: str, computed_before: bool, adapters: Any = LORA):
    """Losses, figures and gradients of three steps, from adapters that the first two moved away from zero."""
    model = model_of(layout, family, adapters)
    batch = own_rows(model, rows())
    if computed_before:
        batch["reference_log_probs"] = model.row_log_probs(batch)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
    told = []
    for _ in range(2):
        told.append(model.forward_backward(batch))
        model.optimizer_step(optimizer)
    told += [model.forward_backward(batch), model.evaluate(batch)]
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and not isinstance(p, DTensor)}
    return [{"loss": float(t)} | {k: float(v) for k, v in t.figures.items()} for t in told], own | gradients(model)


def all_of(results: list) -> dict[str, torch.Tensor]:
    return {name: value for _, found in results for name, value in found.items()}


@pytest.mark.first("stacks of experts, FSDP 2")
@pytest.mark.parametrize("name", WAYS)
def test_the_reference_without_adapters_is_the_one_computed_before(spmd, name):
    layout, family, adapters = WAYS[name]
    switched, before = (spmd(layout.world, steps, layout, family, is_before, adapters) for is_before in (False, True))
    for ours, theirs in zip(switched[0][0], before[0][0], strict=True):
        assert ours == pytest.approx(theirs, rel=EXACT, abs=EXACT)
    assert switched[0][0][0]["loss"] == pytest.approx(np.log(2), rel=EXACT)
    assert abs(switched[0][0][2]["loss"] - np.log(2)) > 1e-3  # the adapters have left their beginning
    trained = all_of(switched)
    assert trained and all("lora_" in name for name in trained)
    errors = relative_errors(trained, all_of(before))
    assert max(errors.values()) <= EXACT, errors


def test_the_first_weights_are_those_of_transformers_without_peft():
    """The reference that a step uses is what plain torch computes from the base alone."""
    from transformers import AutoModelForCausalLM

    model = model_of(ONE, "llama", LORA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    base = AutoModelForCausalLM.from_config(families.config_of("llama", use_cache=False)).double()
    state = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items() if "lora" not in name}
    base.load_state_dict(state)
    batch = rows()
    with torch.no_grad():
        chosen = base(input_ids=batch["tokens"]).logits.log_softmax(-1)
    picked = chosen.gather(2, batch["labels"].clamp(min=0)[..., None])[..., 0]
    expected = (picked * (batch["labels"] != -100)).sum(1)
    margin = model.row_log_probs(batch) - expected
    loss = -F.logsigmoid(BETA * (margin[::2] - margin[1::2])).mean()
    assert float(model.forward_backward(batch)) == pytest.approx(float(loss), rel=1e-6)  # fp32 inside its norms


def test_adapters_that_stay_on_are_caught(monkeypatch):
    from contextlib import nullcontext

    from meshwright.distributed.loss import preference

    right = steps(ONE, "llama", True)[0]
    monkeypatch.setattr(preference, "switched_off", lambda layers: nullcontext())
    assert abs(steps(ONE, "llama", False)[0][2]["loss"] - right[2]["loss"]) > 1e-3


def test_switching_leaves_no_trace():
    model = model_of(ONE, "llama", LORA)
    layers = peft_private.adapted_layers(list(model.parts))
    before = [(name, p.requires_grad) for name, p in model.named_parameters()]
    with pytest.raises(KeyError), peft_private.switched_off(layers):
        raise KeyError
    assert layers and not any(layer._disable_adapters for layer in layers)
    assert before == [(name, p.requires_grad) for name, p in model.named_parameters()]


@pytest.mark.parametrize(
    ("adapters", "techniques", "reason"),
    [
        (LORA | {"modules_to_save": ["lm_head"]}, {}, "lm_head.modules_to_save.default.weight is trained beside"),
        (LORA | {"kind": "dora"}, {}, "DoRA's magnitudes are rounded"),
        (LORA, {"compile": True}, "techniques.compile fixes"),
    ],
)
def test_where_the_first_weights_are_gone_the_reference_must_be_brought(adapters, techniques, reason):
    model = model_of(ONE, "llama", adapters, **techniques)
    assert reason in model.reference_refusal
    with pytest.raises(ConfigError, match="has no 'reference_log_probs'"):
        model.forward_backward(rows())


def some_bring() -> str:
    model = model_of(Layout(dp_shard=2), "llama", LORA)
    batch = own_rows(model, rows())
    if get_world_info()[0]:
        batch["reference_log_probs"] = torch.zeros(4)
    return refusal(lambda: model.forward_backward(batch), ConfigError)


def test_ranks_and_microbatches_bring_a_reference_alike(spmd):
    for said in spmd(2, some_bring):
        assert "1 of 2 data ranks bring no batch['reference_log_probs']: all bring it, or none" in said
    batch = rows()
    half = {key: value[:4] for key, value in batch.items()}
    with pytest.raises(ConfigError, match="1 of 2 microbatches have no 'reference_log_probs'"):
        model_of(ONE, "llama", LORA).forward_backward([half, {**half, "reference_log_probs": torch.zeros(4)}])
