"""Models whose code does what other models' does not: parents that read their children's weights, containers of
containers, caches that nobody asked for, outputs that are no tensor. Each is equal to one process, in float64, loss
and every gradient.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from support.families import VOCABULARY
from support.written_out import GPT, GPTConfig
from torch.distributed.tensor import DTensor

from meshwright import Layout, UnsupportedError, parallelize
from meshwright.distributed.mesh import data_position
from meshwright.introspection.signature import logits_of

DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
SPACE = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
CONVOLVED = {
    "lfm2": SIZES | {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": SIZES | DELTA | {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "granitemoehybrid": SIZES
    | SPACE
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "bert": SIZES,
}
"""Blocks that read the weight of a convolution inside, forwards that take ``use_cache`` by keyword alone, a head
whose bias is tied.
"""


def family(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name).__class__(
        **CONVOLVED[name], vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager")


def gpt(returns="tensor"):
    torch.manual_seed(0)
    return GPT(GPTConfig(returns=returns))


def random(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    return model.double().eval()


def batch():
    drawn = torch.randint(3, 48, (4, 10), generator=torch.Generator().manual_seed(1))
    return {"tokens": drawn[:, :-1].clone(), "labels": drawn[:, 1:].clone()}


def errors(make, sizes, options):
    """Of the loss and of each gradient, by one name of each tensor; of what this rank holds."""
    plain = random(make())
    logits = logits_of(plain(batch()["tokens"]))
    expected = F.cross_entropy(logits.flatten(0, 1), batch()["labels"].flatten())
    expected.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False)}
    norm = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
    techniques = {"precision": {"master": "float64", "compute": "float64", "reduce": "float64"}, **options}
    model = parallelize(random(make()), Layout(**sizes), techniques=techniques)
    rank, ranks = data_position(model.mesh)
    loss = float(model.forward_backward({key: value.chunk(ranks)[rank] for key, value in batch().items()}))
    found = {"loss": abs(loss - float(expected)) / float(expected)}
    for name, parameter in model.named_parameters():
        whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        found[name] = float((whole - gradients[name]).norm() / max(gradients[name].norm(), 1e-6 * norm))
    return found


def assert_equal(runs, bound=1e-10):
    assert [(name, error) for found in runs for name, error in found.items() if not error <= bound] == []


TENSOR, SHARDED = {"tp": 2, "dp_shard": 1}, {"tp": 2, "dp_shard": 2}
FULL = {"activation_checkpointing": "full"}


@pytest.mark.all
@pytest.mark.parametrize(
    ("sizes", "options"), [(TENSOR, {}), (SHARDED, {}), (SHARDED, FULL)], ids=["tp", "fsdp and tp", "recomputed"]
)
@pytest.mark.parametrize("name", CONVOLVED)
def test_modules_read_the_weights_of_others(name, sizes, options, spmd):
    found = spmd(sizes["tp"] * sizes["dp_shard"], errors, functools.partial(family, name), sizes, options)
    assert_equal(found, 1e-10 if name in ("lfm2", "bert") else 1e-6)  # the others compute in float32 inside


@pytest.mark.first("pp")
@pytest.mark.parametrize(
    "sizes", [{"dp_shard": 2}, TENSOR, {"pp": 2, "dp_shard": 1}, SHARDED], ids=["fsdp", "tp", "pp", "fsdp and tp"]
)
def test_a_model_in_a_module_dict_is_equal_to_one_process(sizes, spmd):
    world = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes["dp_shard"]
    assert_equal(spmd(world, errors, gpt, sizes, FULL))


@pytest.mark.first("tp-dict")
@pytest.mark.parametrize("returns", ["tuple", "dict"])
@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, TENSOR, {"pp": 2, "dp_shard": 1}], ids=["fsdp", "tp", "pp"])
def test_logits_are_found_in_what_a_forward_returns(sizes, returns, spmd):
    assert_equal(spmd(2, errors, functools.partial(gpt, returns), sizes, {}))


def test_an_output_in_which_the_logits_cannot_be_told_is_refused():
    with pytest.raises(
        UnsupportedError, match=r"a tuple of \(4, 9, 32\), \(4, 9, 48\), in which 2 tensors could be the logits"
    ):
        logits_of(gpt("two")(batch()["tokens"]))
