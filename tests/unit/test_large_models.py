"""A large model is cut as a small one of the same structure shows, without its weights; its sizes are its own."""

from __future__ import annotations

import pytest
import torch
from support.families import config_of
from torch import nn

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed.tensor.parallel import prove
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import CausalLM, as_module
from meshwright.models.decoder_config import SIZES
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout

pytestmark = pytest.mark.all

FAMILIES = {
    "llama": {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "head_dim": 128,
    },
    "gpt2": {"n_embd": 1600, "hidden_size": 1600, "n_head": 25, "num_attention_heads": 25},
    "gptj": {"n_embd": 4096, "hidden_size": 4096, "n_head": 16, "num_attention_heads": 16, "rotary_dim": 64},
    "phi3": {
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "intermediate_size": 17920,
        "head_dim": 128,
    },
    "bloom": {"hidden_size": 4096, "n_head": 32, "num_attention_heads": 32},
}


def large(family: str, **changes) -> nn.Module:
    return as_module(CausalLM(config_of(family, vocab_size=50_000, **FAMILIES.get(family, {}) | changes)))


def parts_of(model, ranks: int) -> dict[str, list[tuple[int, int]]]:
    facts = model_facts(as_module(model))
    made = plan(facts, Layout(dp_shard=1, tp=ranks)).tensor
    assert made is not None
    prove(facts, made)
    return {cut.name: [(part.size, part.groups) for part in cut.parts] for kind in made.kinds for cut in kind.cuts()}


@pytest.mark.parametrize(("size", "ranks"), [("8B", 8), ("70B", 16), ("1B", 4), ("125M", 3)])
def test_our_sizes(size, ranks):
    c = SIZES[size]
    found = parts_of(c, ranks)
    assert found["attention.wq.weight"] == found["attention.wo.weight"] == [(c.dim, c.n_heads)]
    assert found["attention.wk.weight"] == [(c.n_kv_heads * c.head_dim, c.n_kv_heads)]
    assert found["feed_forward.w_down.weight"] == [(c.hidden_dim, c.hidden_dim)]


@pytest.mark.first("phi3-2-self_attn.qkv_proj.weight-parts3")
@pytest.mark.parametrize(
    ("family", "ranks", "name", "parts"),
    [
        ("llama", 16, "self_attn.k_proj.weight", [(1024, 8)]),
        ("gpt2", 5, "attn.c_attn.weight", [(1600, 25)] * 3),
        ("gptj", 4, "attn.q_proj.weight", [(4096, 16)]),
        ("phi3", 2, "self_attn.qkv_proj.weight", [(5120, 40), (1280, 10), (1280, 10)]),
        ("bloom", 4, "self_attention.query_key_value.weight", [(12288, 32)]),
    ],
)
def test_families(family, ranks, name, parts):
    assert parts_of(large(family), ranks)[name] == parts


def test_one_key_head_stays_one_where_the_config_counts_more():
    """Its proportions are not those of a smaller one: that is seen, and a larger copy is measured."""
    model = large("falcon", hidden_size=4096, num_attention_heads=64)
    assert parts_of(model, 4)["self_attention.query_key_value.weight"] == [(4096, 64), (128, 1)]


def test_a_degree_that_does_not_divide_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match=r"has 25 heads, which 4 ranks cannot share\. Legal: 1, 5, 25\."):
        plan(large("gpt2"), Layout(dp_shard=1, tp=4))


class Wide(nn.Module):
    """A user's model that keeps no config."""

    def __init__(self):
        super().__init__()
        self.vocab_size = 10
        self.embedding = nn.Embedding(10, 2000)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2000, 4000), nn.Linear(4000, 2000)) for _ in range(2))
        self.config = type("Sizes", (), {"vocab_size": 10})()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.fast
def test_a_large_model_without_a_config_is_refused():
    facts = model_facts(as_module(Wide))
    with pytest.raises(
        UnsupportedError, match=r"has 32,\d+,\d+ parameters; .* Wide\(config\) failed .*takes 1 positional argument"
    ):
        facts.measurements.structure(2)


class Deep(nn.Module):
    """A user's model of a size that could be measured, with layers too wide for that."""

    def __init__(self):
        super().__init__()
        self.vocab_size = 10
        self.embedding = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 21_000), nn.GELU(), nn.Linear(21_000, 16)) for _ in range(2)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x @ self.embedding.weight.T


def test_what_would_take_minutes_to_measure_is_refused_with_the_layer_that_takes_long():
    facts = model_facts(as_module(Deep))
    with pytest.raises(
        UnsupportedError, match=r"21,016 features in 2 linear layers, 21,000 of them in 0: .* takes minutes"
    ):
        facts.measurements.structure(2)


@pytest.mark.fast
def test_blocks_that_hand_on_several_streams_are_refused_before_they_are_measured():
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "deepseek_v4", num_hidden_layers=2, hidden_size=32, vocab_size=99, num_attention_heads=4, q_lora_rank=16
    )
    for name, value in {"layer_types": 2, "mlp_layer_types": 2}.items():
        setattr(config, name, getattr(config, name)[-value:])
    config.n_routed_experts = config.moe_intermediate_size = 8
    config.head_dim, config.qk_rope_head_dim, config.o_lora_rank = 8, 8, 8
    facts = model_facts(as_module(CausalLM(config)))
    with pytest.raises(UnsupportedError, match=r"none of them \(rows, seq, features\)"):
        facts.measurements.structure(2)


def test_heads_of_linear_attention_of_full_size_are_shared_out():
    """Measured on few and small ones; numbers for each head (gates, decays) stay as many as heads.

    It computes in fp32 inside.
    """
    from transformers import AutoConfig

    few = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    found = parts_of(CausalLM(AutoConfig.for_model("kimi_linear", **few)), 4)
    assert found["self_attn.b_proj.weight"] == found["self_attn.forget_gate.A_log"] == [(32, 32)]
    assert found["self_attn.conv1d.weight"] == [(32 * 128, 32)] * 3 and found["self_attn.kv_b_proj.weight"] == [
        (32 * 256, 32)
    ]


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe", "glm4_moe", "mixtral", "olmoe", "qwen3_moe"])
def test_mixtures_of_experts_of_full_size_are_planned(family):
    """As transformers' own configs have them: hundreds of billions of parameters, many experts, heads in parts."""
    from transformers import AutoConfig

    made = plan(AutoConfig.for_model(family), Layout(dp_shard=4, tp=2, ep=8))
    assert (
        made.tensor is not None
        and made.tensor.sequence_parallel
        and made.experts is not None
        and made.experts.ranks == 8
    )
    regions = [planned.region for kind in made.tensor.kinds for planned in kind.regions]
    assert {region.kind for region in regions} >= {"attention"}
    assert not [note for note in made.notes if ".experts" in note], "every rank has its share of them"


def test_as_many_groups_of_experts_as_a_small_copy_would_have_experts():
    """Routers that add up the two best of a group need two."""
    from transformers import AutoConfig

    made = plan(
        AutoConfig.for_model("deepseek_v3", n_group=16, topk_group=4, num_hidden_layers=8), Layout(dp_shard=1, tp=2)
    )
    assert made.tensor is not None and made.tensor.sequence_parallel


def test_latent_attention_of_full_size_is_cut_by_its_heads():
    from transformers import AutoConfig

    model = as_module(CausalLM(AutoConfig.for_model("deepseek_v3")))
    found = parts_of(model, 16)
    cut = {"q_b_proj": 128 * 192, "kv_b_proj": 128 * 256, "o_proj": 128 * 128}
    assert {name: found[f"self_attn.{name}.weight"] for name in cut} == {
        name: [(size, 128)] for name, size in cut.items()
    }
    assert not any(name.startswith(("self_attn.q_a", "self_attn.kv_a")) for name in found)
