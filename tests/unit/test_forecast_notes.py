"""A forecast counts experts and attention wherever a model keeps them, and says what it leaves out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright import Batch, Cluster, Layout, foresee
from meshwright.cli.plan import run
from meshwright.introspection.facts import facts_with
from meshwright.models.decoder_config import SIZES
from meshwright.planning.techniques import Techniques
from meshwright.simulation.from_model import architecture_of, left_out


def facts_of(make):
    with torch.device("meta"):
        model = make()
    return facts_with(model, None, None)


def dbrx():
    import transformers

    sizes: dict[str, Any] = {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 300, "max_seq_len": 64}
    experts: dict[str, Any] = {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2}
    config = transformers.DbrxConfig(**sizes, ffn_config=experts, attn_config={"kv_n_heads": 2, "rope_theta": 1e4})
    return transformers.AutoModelForCausalLM.from_config(config)


def aria():
    import transformers

    config = transformers.AriaTextConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=300
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def mamba():
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300, "state_size": 16}
    config = transformers.Mamba2Config(**sizes, num_heads=4, head_dim=32, expand=2, n_groups=1)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("make", "products"), [(dbrx, 3), (aria, 2)])
def test_experts_that_no_stack_holds_are_no_dense_layers(make, products):
    facts = facts_of(make)
    (block, *_), _ = (architecture := architecture_of(facts)).kinds
    assert block.experts is not None and block.experts.number == 8 and block.experts.top_k == 2
    assert len(block.experts.products) == products and block.experts.width == 96
    held = sum(p.numel for p in facts.of_unit(facts.blocks[0]) if "expert" in p.name and "shared" not in p.name)
    assert block.experts.elements == held
    assert architecture.elements == pytest.approx(sum(p.numel for p in facts.parameters), rel=0.01)
    assert not list(left_out(facts, architecture, Techniques()))


class Experts(nn.Module):
    def __init__(self, number, dim=64):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(dim), nn.Linear(dim, number, bias=False)
        each = (nn.Sequential(nn.Linear(dim, 128), nn.ReLU(), nn.Linear(128, dim)) for _ in range(number))
        self.attention, self.experts = nn.MultiheadAttention(dim, 4, batch_first=True), nn.ModuleList(each)

    def forward(self, x):
        x = x + self.attention(y := self.norm(x), y, y, need_weights=False)[0]
        weights = self.router(x).softmax(-1)
        return x + sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Attending(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.qkv, self.down = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).unbind(2)
        return x + self.down(F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v))).flatten(2))


def of_blocks(block, config=None):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = config
            self.embedding, self.head = nn.Embedding(300, 64), nn.Linear(64, 300, bias=False)
            self.layers = nn.ModuleList(block() for _ in range(4))

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    return Model


def test_a_list_of_experts_is_a_mixture():
    from types import SimpleNamespace

    facts = facts_of(of_blocks(lambda: Experts(8), SimpleNamespace(num_experts=8, num_experts_per_tok=2)))
    (block, *_), _ = architecture_of(facts).kinds
    assert block.experts is not None and block.experts.elements == 8 * 2 * 64 * 128
    assert block.elements == pytest.approx(sum(p.numel for p in facts.of_unit("layers.0")), rel=0.02)


def test_experts_that_are_stated_and_not_found_are_named():
    from types import SimpleNamespace

    facts = facts_of(of_blocks(lambda: nn.TransformerEncoderLayer(64, 4, 128), SimpleNamespace(num_experts=8)))
    (note,) = left_out(facts, architecture_of(facts), Techniques())
    assert note.startswith("the config states 8 experts, and none were found")


def test_heads_of_torchs_attention_are_counted():
    facts = facts_of(of_blocks(lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)))
    (block, *_), _ = architecture_of(facts).kinds
    assert block.attention is not None and (block.attention.heads, block.attention.key_dim) == (4, 16)
    assert block.attention.flops(2, 32) == 4 * 2 * 32 * 32 * 64


@pytest.mark.parametrize("make", [of_blocks(Attending), mamba])
def test_work_across_tokens_that_is_not_counted_is_named(make):
    facts = facts_of(make)
    (note,) = left_out(facts, architecture := architecture_of(facts), Techniques())
    number = len(architecture.blocks)
    assert note.startswith(f"{number} of {number} blocks (first: {facts.blocks[0]}) have no attention whose heads")


def test_heads_that_a_config_states_are_counted():
    from types import SimpleNamespace

    facts = facts_of(of_blocks(lambda: Experts(8), SimpleNamespace(num_attention_heads=8)))
    (block, *_), _ = architecture_of(facts).kinds
    assert block.attention is not None and block.attention.heads == 8


def test_offloads_leave_the_card_and_their_seconds_are_named():
    asked = {"batch": Batch(16, 256, 1), "cluster": Cluster(8, gpu="h100")}
    plain, *others = (
        foresee(SIZES["debug"], Layout(dp_shard=8), techniques=one, **asked)
        for one in ({}, {"cpu_offload": True}, {"cpu_offload": "optimizer"}, {"activation_checkpointing": "offload"})
    )
    assert plain.notes == ()
    for answer in others:
        assert answer.candidates[0].mem_gb < plain.candidates[0].mem_gb
        (note,) = answer.notes
        assert "the seconds leave out" in note and note in str(answer) and answer.to_dict()["notes"] == [note]
    parts = others[0].candidates[0].figures["mem_parts_gb"]
    assert not {"parameters", "gradients", "optimizer"} & set(parts)


@pytest.mark.parametrize(
    ("batch", "techniques", "remedy"),
    [
        (Batch(64, 4096), {}, {"batch.microbatch": "1"}),
        (Batch(64, 4096, 8), {}, {"techniques.activation_checkpointing": "full"}),
        (Batch(64, 4096, 16), {"activation_checkpointing": "none"}, None),
    ],
)
def test_a_stated_layout_that_does_not_fit_says_what_would_make_it_fit(batch, techniques, remedy):
    def asked(batch: Batch, **changes: Any):
        return foresee(SIZES["8B"], Layout(tp=2), batch=batch, cluster=CLUSTER, techniques={**techniques, **changes})

    answer = asked(batch)
    assert answer.chosen is None
    if remedy is None:
        assert answer.notes[0].startswith("No change of a switch that is not stated makes it fit")
        return
    values = dict(re.findall(r"([a-z_.]+) = (\w+)", answer.notes[0]))
    assert values == remedy
    rows = values.pop("batch.microbatch", batch.microbatch_rows)
    changes = {key.rpartition(".")[2]: value for key, value in values.items()}
    assert asked(replace(batch, microbatch_rows=int(rows)), **changes).chosen is not None


@pytest.mark.parametrize(
    ("size", "batch", "cluster", "techniques", "remedy"),
    [
        ("8B", Batch(16, 4096), Cluster(8, gpu="a100-40gb"), {}, {"activation_checkpointing": "full"}),
        (
            "70B",
            Batch(512, 8192, 1),
            Cluster(256, gpu="h100"),
            {"activation_checkpointing": "full"},
            {"sync_grad_accum": True},  # gradients of several microbatches wait whole
        ),
    ],
)
def test_one_switch_is_enough_where_one_is(size, batch, cluster, techniques, remedy):
    def asked(**changes: Any):
        layout = Layout(dp_shard=cluster.world)
        return foresee(SIZES[size], layout, batch=batch, cluster=cluster, techniques={**techniques, **changes})

    ((key, value),) = remedy.items()
    assert asked().notes[0].startswith(f"Set techniques.{key} = {str(value).lower()}: it fits then")
    assert asked(**remedy).chosen is not None


CLUSTER = Cluster(8, gpu="h100")


def test_a_config_alone_is_planned_as_a_fine_tune(tmp_path, capsys):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(text | {"max_position_embeddings": 512}))
    assert run([f"--model.hf={tmp_path}", "--gpus=2", "--gpu=h100", "--price=2"]) == 0
    said = capsys.readouterr().out
    assert f"beside the model's weights, which are not in {tmp_path}: optimizer.lr" in said and "512 tokens" in said
    assert run([f"--model.hf={tmp_path}", "--world=2"]) == 0  # what training does here
    assert "from random weights, since none lie in" in capsys.readouterr().out
