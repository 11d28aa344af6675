"""Adapters beside stacks of experts, requested by the stack's parameters: equal to peft in one process on the layouts
that carry them, read by peft and transformers, or refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import families
from support.laid_out import own_rows
from test_dora import compared, moved_away, whole
from test_tensor_parallel import Way, assert_all_estimated, batch_of, one_warm_step
from torch import Tensor

from meshwright.checkpoint import load, pretrained, save
from meshwright.checkpoint.export import export_adapter, export_merged
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed.parallelize import parallelize
from meshwright.introspection.source import CausalLM, as_module, with_adapters
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.planning.techniques import as_techniques

STACKS = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
"""The last two are parameters (experts, out, in), of gpt_oss (experts, in, out)."""
LORA: dict[str, Any] = {"rank": 2, "alpha": 6.0, "targets": STACKS}
ONE, DATA2, PP2 = Layout(dp_shard=1), Layout(dp_shard=2), Layout(dp_shard=1, pp=2)
WAYS = {
    "qwen3_moe, FSDP 2": ("qwen3_moe", DATA2, {}),
    "qwen3_moe, DDP": ("qwen3_moe", Layout(dp_replicate=2, dp_shard=1), {}),
    "qwen3_moe, pp 2": ("qwen3_moe", PP2, {}),
    "qwen3_moe, cp 2": ("qwen3_moe", Layout(dp_shard=1, cp=2), {}),
    "qwen3_moe, FSDP 2, recomputed": ("qwen3_moe", DATA2, {"activation_checkpointing": "full"}),
    "mixtral, HSDP": ("mixtral", Layout(dp_replicate=2, dp_shard=2), {}),
    "gpt_oss, FSDP 2": ("gpt_oss", DATA2, {}),
    "gpt_oss, pp 2": ("gpt_oss", PP2, {}),
}
ROWS, SEQ, RATE = 4, 8, 0.1


def config_of(family: str) -> Any:
    config = families.config_of(family, use_cache=False, tie_word_embeddings=False)
    config._experts_implementation = "eager"  # grouped kernels know no fp64
    return config


@pytest.mark.first("qwen3_moe, DDP")
@pytest.mark.parametrize("name", WAYS)
def test_a_layout_computes_what_peft_computes_in_one_process(spmd, tmp_path, name):
    family, layout, more = WAYS[name]
    asked = {"r": 2, "lora_alpha": 6, "target_modules": STACKS[:1], "target_parameters": STACKS[1:]}
    ours = compared(spmd, tmp_path, config_of(family), layout, more | {"adapters": LORA}, lambda targets: asked)
    assert sum("experts.base_layer.lora_A" in key for key in ours["begin"]) == 2
    assert all(tensor.norm() for key, tensor in ours["gradients"].items() if "experts" in key)


@pytest.mark.all
@pytest.mark.parametrize("layout", [DATA2, PP2], ids=["FSDP 2", "pp 2"])
def test_the_plan_estimates_every_byte(spmd, layout):
    counted = spmd(2, one_warm_step, config_of("qwen3_moe"), Way(layout, (("adapters", LORA),)), families.VOCABULARY)
    assert_all_estimated(counted, 1)


# --- checkpoints and exports


def saved_run(family: str, layout: Layout, adapters: dict[str, Any], base: str, folder: str) -> dict[str, Tensor]:
    model = parallelize(config_of(family), layout, techniques={"adapters": adapters}, seed=3, weights=pretrained(base))
    moved_away(model.named_parameters())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for step in range(2):
        model.forward_backward(own_rows(model, batch_of(ROWS, SEQ, families.VOCABULARY, step)))
        model.optimizer_step(optimizer)
    save(model, folder, only_trained=True)
    return {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}


def loaded(family: str, layout: Layout, adapters: dict[str, Any], folder: str) -> dict[str, Tensor]:
    model = parallelize(config_of(family), layout, techniques={"adapters": adapters}, seed=4)
    load(model, folder)
    return {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=families.some_tokens()).logits


ALL: dict[str, Any] = {"rank": 2, "targets": ["all-linear"]}
EXPORTED = {
    "stacks of qwen3_moe": ("qwen3_moe", LORA),
    "stacks of gpt_oss": ("gpt_oss", LORA),
    "linear layers that peft takes for stacks": ("glm4_moe", ALL),
    "embedding and head": ("llama", ALL | {"targets": ["embed_tokens", "lm_head", "q_proj"]}),
    "embedding and head, dora": ("llama", ALL | {"targets": ["embed_tokens", "lm_head", "q_proj"], "kind": "dora"}),
    "Conv1D and Linear": ("gpt2", ALL | {"targets": ["c_attn", "lm_head"]}),
}


@pytest.mark.all
@pytest.mark.parametrize("name", EXPORTED)
def test_what_is_written_computes_the_same_elsewhere(spmd, tmp_path, name):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    family, adapters = EXPORTED[name]
    base, checkpoint, merged, adapter = (tmp_path / part for part in ("base", "checkpoint", "merged", "adapter"))
    families.on_cpu(config_of(family), seed=7).save_pretrained(base)  # type: ignore[operator]
    written = spmd(2, saved_run, family, DATA2, adapters, str(base), str(checkpoint))[0]
    read = {k: p for found in spmd(2, loaded, family, PP2, adapters, str(checkpoint)) for k, p in found.items()}
    assert written.keys() == read.keys() and all(torch.equal(written[key], read[key]) for key in written)
    source = CausalLM(config_of(family))
    adapted, plain = as_module(with_adapters(source, as_techniques({"adapters": adapters}).adapters)), as_module(source)
    for folder in (merged, adapter):
        folder.mkdir()
    export_adapter(checkpoint, adapter, adapted, str(base))
    export_merged(checkpoint, merged, adapted, plain, pretrained(base))
    config_of(family).save_pretrained(merged)
    before = logits(AutoModelForCausalLM.from_pretrained(base))
    beside = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))
    one = logits(AutoModelForCausalLM.from_pretrained(merged))
    assert (one - beside).abs().max() < 1e-6 < 1e-3 < (one - before).abs().max()


@pytest.mark.all
def test_layers_that_peft_takes_for_stacks_have_no_dora_in_its_words(tmp_path, spmd):
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint"
    families.on_cpu(config_of("glm4_moe"), seed=7).save_pretrained(base)  # type: ignore[operator]
    adapters = ALL | {"kind": "dora"}
    spmd(1, saved_run, "glm4_moe", ONE, adapters, str(base), str(checkpoint))
    adapted = as_module(with_adapters(config_of("glm4_moe"), as_techniques({"adapters": adapters}).adapters))
    with pytest.raises(UnsupportedError, match=r"gate_proj.*it cannot read these adapters\. Use --to merged"):
        export_adapter(checkpoint, tmp_path, adapted, str(base))


# --- what is selected, and what is refused


@pytest.mark.parametrize("family", ["gpt2", "opt", "phi", "gemma2", "mixtral", "qwen2_moe", "glm4_moe", "deepseek_v3"])
def test_all_linear_is_every_linear_layer_of_the_blocks_and_nothing_else(family):
    """Of glm4_moe and deepseek_v3, peft takes dense layers for stacks of experts."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    model = families.on_cpu(config_of(family))
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and n != "lm_head"]
    with_adapters(model, as_techniques({"adapters": {"rank": 2}}).adapters)
    found = {n.partition(".lora_A")[0] for n, p in model.named_parameters() if p.requires_grad and "lora_A" in n}
    assert found == set(linears) and len(found) > 5
    assert all("lora_" in n for n, p in model.named_parameters() if p.requires_grad)


@pytest.mark.all
@pytest.mark.parametrize(
    ("changes", "layout", "error", "words"),
    [
        ({"dropout": 0.1}, DATA2, UnsupportedError, "adapters.dropout = 0.1: beside stacked experts"),
        ({"kind": "dora"}, DATA2, UnsupportedError, "adapters.kind = dora: peft has no magnitudes beside stacked"),
        ({}, Layout(dp_shard=1, tp=2), UnsupportedError, "or set layout.tp = 1"),
        ({}, Layout(dp_shard=2, ep=2), UnsupportedError, "Leave the experts out of adapters.targets"),
        ({"targets": ["down_proj"]}, DATA2, ConfigError, "write 'experts.down_proj'"),
        ({"targets": ["experts.gate_proj"]}, DATA2, ConfigError, "'experts.gate_proj' matches no layer"),
        ({"targets": ["experts.gate_up_prj"]}, DATA2, ConfigError, "Did you mean 'experts.gate_up_proj'"),
        ({"targets": ["mlp.experts"]}, DATA2, ConfigError, "is a Qwen3MoeExperts, no linear layer"),
    ],
)
def test_what_stacks_do_not_take_is_refused_by_name(changes, layout, error, words):
    with pytest.raises(error) as refused:
        plan(config_of("qwen3_moe"), layout, techniques={"adapters": LORA | changes})
    assert words in str(refused.value), refused.value


def test_compiled_stacks_are_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"or set techniques\.compile = false"):
        plan(config_of("qwen3_moe"), DATA2, techniques={"adapters": LORA, "compile": True})


def test_what_peft_refuses_is_told_in_its_words():
    with pytest.raises(ConfigError, match=r"techniques\.adapters\.targets: peft refuses them:.*Mamba"):
        plan(families.config_of("mamba2"), ONE, techniques={"adapters": {"rank": 2}})
