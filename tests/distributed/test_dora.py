"""Adapters of the kind dora: equal to peft in one process on every layout that takes them, begun from the rows of the
weights beside which they stand, wherever these come from, or refused by name.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import families
from support.laid_out import own_rows
from test_tensor_parallel import Way, assert_all_estimated, batch_of, one_warm_step
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.checkpoint import load, pretrained, save
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.weights import constructed
from meshwright.introspection.constructor import built
from meshwright.introspection.source import with_adapters
from meshwright.models.decoder_config import SIZES
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.planning.techniques import as_techniques

pytestmark = pytest.mark.all

DORA: dict[str, Any] = {"kind": "dora", "rank": 4, "alpha": 6.0}
EXACT = {"precision": {"master": "float64", "compute": "float64", "reduce": "float64"}}
DATA2, TP2, PP2 = Layout(dp_shard=2), Layout(dp_shard=1, tp=2), Layout(dp_shard=1, pp=2)
STEPS, ROWS, SEQ, RATE = 2, 4, 8, 0.1
LAYOUTS = {
    "DDP": ("llama", Layout(dp_replicate=2, dp_shard=1), DORA),
    "FSDP 2": ("llama", DATA2, DORA),
    "HSDP": ("llama", Layout(dp_replicate=2, dp_shard=2), DORA),
    "pp 2": ("llama", PP2, DORA),
    "cp 2": ("llama", Layout(dp_shard=1, cp=2), DORA),
    "Conv1D, biases, FSDP 2": ("gpt2", DATA2, DORA),
    "embedding and head, FSDP 2": ("llama", DATA2, DORA | {"targets": ["embed_tokens", "lm_head", "q_proj"]}),
    "embedding and head, pp 2": ("llama", PP2, DORA | {"targets": ["embed_tokens", "lm_head", "q_proj"]}),
    "attention whole, tp 2": ("llama", TP2, DORA | {"targets": ["self_attn.*"]}),
    "dropout, FSDP 2": ("llama", DATA2, DORA | {"dropout": 0.5}),
    "attention, ep 2": ("qwen3_moe", Layout(dp_shard=2, ep=2), DORA | {"targets": ["self_attn.*"]}),
}


def config_of(family: str) -> Any:
    """Dropout off: the two would draw other masks. Experts one by one: grouped kernels know no fp64."""
    config = families.config_of(family, use_cache=False, **(NO_DROPOUT if family == "gpt2" else {}))
    config._experts_implementation = "eager"
    return config


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def every_other_feature(self: nn.Dropout, x: Tensor) -> Tensor:
    """Dropout's place, where everybody zeroes the same features: peft computes DoRA otherwise beside dropout."""
    return x * (torch.arange(x.shape[-1]) % 2 * 2).to(x)


def batch(step: int) -> dict[str, Tensor]:
    return batch_of(ROWS, SEQ, families.VOCABULARY, step)


def moved_away(parameters: Any) -> None:
    """Move adapters from where they begin: second matrices from zero, magnitudes from the rows' lengths."""
    with torch.no_grad():
        for name, parameter in parameters:
            if "lora_B" in name or "lora_embedding_A" in name:
                parameter.add_(0.05)
            elif "magnitude" in name:
                parameter.mul_(1.25)


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def of_layout(config: Any, layout: Layout, techniques: dict[str, Any], folder: str) -> dict[str, Any]:
    model = parallelize(config, layout, techniques=EXACT | techniques, seed=3, weights=pretrained(folder))
    found: dict[str, Any] = {"begin": {name: whole(p) for name, p in model.named_parameters()}, "losses": []}
    moved_away(model.named_parameters())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for step in range(STEPS):
        with mock.patch.object(nn.Dropout, "forward", every_other_feature):
            found["losses"].append(float(model.forward_backward(own_rows(model, batch(step))).loss))
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        found.setdefault("gradients", {name: whole(p.grad) for name, p in trained})
        model.optimizer_step(optimizer)
        optimizer.zero_grad()
    return found | {"end": {name: whole(p) for name, p in model.named_parameters()}}


def of_peft(base: Any, **options: Any) -> dict[str, Any]:
    """One process, as peft's documentation says it."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: Any = get_peft_model(copy.deepcopy(base), LoraConfig(**options))
    drawn = {name: p.detach().clone() for name, p in model.named_parameters()}
    model = get_peft_model(copy.deepcopy(base).double(), LoraConfig(**options), autocast_adapter_dtype=False).train()
    with torch.no_grad():  # matrices are drawn in float32
        for name, p in model.named_parameters():
            p.copy_(p if "magnitude" in name else drawn[name])
    named = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters()}
    found: dict[str, Any] = {"begin": {name: p.detach().clone() for name, p in named.items()}, "losses": []}
    moved_away(named.items())
    trained = {name: p for name, p in named.items() if p.requires_grad}
    for step in range(STEPS):
        given = batch(step)
        with mock.patch.object(nn.Dropout, "forward", every_other_feature):
            logits = model(input_ids=given["tokens"]).logits.flatten(0, 1)
        labels = given["labels"].masked_fill(~given["loss_mask"].bool(), -100).flatten()
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        found["losses"].append(float(loss.detach()))
        found.setdefault("gradients", {name: p.grad.clone() for name, p in trained.items()})
        with torch.no_grad():
            for p in trained.values():
                p.sub_(RATE * p.grad)
                p.grad = None
    return found | {"end": {name: p.detach().clone() for name, p in named.items()}}


def farthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The law's error of the worst tensor."""
    scale = 1e-6 * sum(float(p.norm()) ** 2 for p in theirs.values()) ** 0.5
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - p).norm()) / max(float(p.norm()), scale) for name, p in theirs.items())


def compared(spmd: Any, folder: Path, config: Any, layout: Layout, techniques: dict[str, Any], options: Any) -> Any:
    """Assert that a layout computes what peft computes in one process, and return what the layout did.

    Args:
        options: names of adapted layers -> peft's.
    """
    base: Any = families.on_cpu(config, seed=7)
    base.save_pretrained(folder)
    ranks = spmd(layout.world, of_layout, config, layout, techniques, str(folder))
    ours: dict[str, Any] = {"losses": ranks[0]["losses"]}
    for part in ("begin", "gradients", "end"):
        ours[part] = {key: tensor for found in ranks for key, tensor in found[part].items()}
    targets = sorted({key.rpartition(".base_layer")[0] for key in ours["begin"] if ".base_layer" in key})
    reference = of_peft(base, **options(targets))
    assert ours["begin"].keys() == reference["begin"].keys()
    for key, tensor in reference["begin"].items():
        assert torch.equal(ours["begin"][key], tensor), key
    assert ours["losses"] == pytest.approx(reference["losses"], rel=1e-10)
    assert farthest(ours["gradients"], reference["gradients"]) <= 1e-10
    assert farthest(ours["end"], reference["end"]) <= 1e-10
    return ours


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_computes_what_peft_computes_in_one_process(spmd, tmp_path, name):
    family, layout, adapters = LAYOUTS[name]

    def options(targets: list[str]) -> dict[str, Any]:
        asked = {"lora_dropout": adapters.get("dropout", 0.0), "fan_in_fan_out": family == "gpt2"}
        return {"use_dora": True, "r": 4, "lora_alpha": 6, "target_modules": targets} | asked

    ours = compared(spmd, tmp_path, config_of(family), layout, {"adapters": adapters}, options)
    assert sum("magnitude" in key for key in ours["begin"]) > 2


def test_the_plan_estimates_every_byte(spmd):
    """Magnitudes are begun by messages of their own, which no step has."""
    counted = spmd(2, one_warm_step, config_of("llama"), Way(DATA2, (("adapters", DORA),)), families.VOCABULARY)
    assert_all_estimated(counted, 1)


# --- how magnitudes begin


def test_beside_drawn_weights_magnitudes_are_those_of_the_constructor_and_peft(spmd, monkeypatch):
    """Also where the model is so large that each parameter has a stream of its own."""
    adapters = as_techniques({"adapters": DORA}).adapters
    reference = dict(built(with_adapters(config_of("llama"), adapters), 3).named_parameters())
    for begun in spmd(2, drawn, "llama", DATA2)[:1] + [drawn("llama", Layout(dp_shard=1))]:
        assert all(torch.equal(begun[key], tensor) for key, tensor in reference.items())
    monkeypatch.setattr(constructed, "STREAM_ELEMENTS", 0)
    assert_magnitudes_are_lengths(drawn("llama", Layout(dp_shard=1)))


def test_beside_weights_by_a_law_magnitudes_are_the_lengths_of_their_rows(spmd):
    for begun in spmd(2, drawn, None, DATA2):
        assert_magnitudes_are_lengths(begun)


def drawn(family: str | None, layout: Layout) -> dict[str, Tensor]:
    source = config_of(family) if family else SIZES["debug"]
    model = parallelize(source, layout, techniques={"adapters": DORA}, seed=3)
    return {name: whole(p) for name, p in model.named_parameters()}


def assert_magnitudes_are_lengths(begun: dict[str, Tensor]) -> None:
    magnitudes = {key: tensor for key, tensor in begun.items() if "magnitude" in key}
    assert len(magnitudes) > 4
    for key, magnitude in magnitudes.items():
        rows = begun[key.replace("lora_magnitude_vector.default", "base_layer")]
        assert torch.equal(magnitude, torch.linalg.norm(rows, dim=1)), key


# --- checkpoints


def trained_and_saved(layout: Layout, folder: str) -> dict[str, Tensor]:
    model = parallelize(config_of("llama"), layout, techniques={"adapters": DORA}, seed=3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        model.forward_backward(own_rows(model, batch(step)))
        model.optimizer_step(optimizer, 1.0)
    save(model, folder, optimizer=optimizer, only_trained=True)
    return {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}


def loaded(layout: Layout, folder: str) -> dict[str, Tensor]:
    model = parallelize(config_of("llama"), layout, techniques={"adapters": DORA}, seed=3)
    load(model, folder)
    return {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}


def test_a_checkpoint_is_read_by_another_layout(spmd, tmp_path):
    folder = str(tmp_path / "checkpoint")
    written = spmd(2, trained_and_saved, DATA2, folder)[0]
    read = {key: tensor for found in spmd(2, loaded, PP2, folder) for key, tensor in found.items()}
    assert written.keys() == read.keys() and any("magnitude" in key for key in read)
    assert all(torch.equal(written[key], read[key]) for key in written)


# --- refusals


def test_tensor_parallelism_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"set layout\.tp = 1, adapters\.kind = lora, or adapters\.targets"):
        plan(config_of("llama"), TP2, techniques={"adapters": DORA})


@pytest.mark.first
def test_tables_that_are_cut_take_no_lengths_of_whole_rows():
    with pytest.raises(UnsupportedError, match=r"layout\.tp = 2 cuts lm_head, and adapters\.kind = dora"):
        plan(config_of("llama"), TP2, techniques={"adapters": DORA | {"targets": ["lm_head"]}})


def test_weights_in_4_bits_have_no_dora_beside_them():
    wide = families.config_of("llama", use_cache=False, hidden_size=64)
    with pytest.raises(UnsupportedError, match=r"quantize_frozen = nf4 does not go with adapters\.kind = dora"):
        plan(wide, DATA2, techniques={"adapters": DORA, "quantize_frozen": "nf4"})


@pytest.mark.first
def test_a_kind_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"Did you mean 'dora'"):
        plan(config_of("llama"), DATA2, techniques={"adapters": {"kind": "dorra"}})
