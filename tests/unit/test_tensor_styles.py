"""A plan in words, beside what was measured: what it cuts, what stays whole and is said, and what does not fit."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

import pytest
import torch
from support.families import config_of
from torch import Tensor, nn

from meshwright import ConfigError, Layout, Plan, Techniques, UnsupportedError, plan
from meshwright.distributed.tensor.parallel import prove
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.module_kinds import own_tensor_plan
from meshwright.planning.techniques import TensorStyleRequest
from meshwright.planning.tensor.styles import given_styles

TP2 = Layout(dp_shard=1, tp=2)
Words = dict[str, str]


def family(name: str, **changes) -> ModelFacts:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return model_facts(AutoModelForCausalLM.from_config(config_of(name, **changes)))


@pytest.fixture(scope="module")
def llama() -> ModelFacts:
    return family("llama")


def planned(facts: ModelFacts, words: Words, layout: Layout = TP2) -> Plan:
    rows = tuple(TensorStyleRequest(pattern, style) for pattern, style in words.items())
    return plan(facts, layout, techniques=Techniques(tensor_plan=rows))


def cut(made: Plan) -> set[str]:
    """Patterns of the parameters that are cut."""
    return {p.pattern for p in made.parameters if "Shard" in dict(p.placements)["tp"]}


BLOCK = "model.layers.*."
ATTENTION = {f"{BLOCK}self_attn.{name}_proj": "colwise" for name in "qkv"} | {f"{BLOCK}self_attn.o_proj": "rowwise"}
FEED_FORWARD = {f"{BLOCK}mlp.{name}_proj": "colwise" for name in ("gate", "up")} | {f"{BLOCK}mlp.down_proj": "rowwise"}
ENDS = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}


@pytest.mark.all
def test_a_plan_that_names_everything_cuts_as_measured(llama):
    given, measured = planned(llama, ATTENTION | FEED_FORWARD | ENDS), plan(llama, TP2)
    assert given.parameters == measured.parameters and given.collectives == measured.collectives
    assert given.tensor and given.tensor.source == "given" and given.tensor.sequence_parallel and not given.notes
    assert measured.tensor and measured.tensor.source == "the model's own plan, as measured"
    assert Plan.from_json(given.to_json()) == given
    assert json.loads(given.to_json())["tensor"]["source"] == "given"


@pytest.mark.first
@pytest.mark.parametrize(
    ("words", "is_cut_along_sequence"),
    [
        (ATTENTION, True),
        (ATTENTION | {"lm_head": "colwise"}, True),
        (FEED_FORWARD, False),
        (FEED_FORWARD | ENDS, False),
    ],
)
def test_what_is_not_named_stays_whole_and_is_said(llama, words, is_cut_along_sequence):
    made = planned(llama, words)
    assert cut(made) == {f"{path}.weight" for path in words}
    assert made.tensor and made.tensor.sequence_parallel is is_cut_along_sequence
    said = "\n".join(made.notes)
    sizes = {"self_attn": "24 KiB", "mlp": "48 KiB", "lm_head": "12 KiB", "embed_tokens": "12 KiB"}
    for name, size in sizes.items():
        line = f"{name} stays whole: the plan does not cut it; {size} on every rank"
        assert (line in said) is not any(name in path for path in words), said
    prove(llama, made.tensor)


def test_replicate_is_as_not_named(llama):
    whole = dict.fromkeys(FEED_FORWARD, "replicate") | {"model.norm": "sequence_parallel", f"{BLOCK}mlp": "local"}
    assert planned(llama, ATTENTION | whole) == planned(llama, ATTENTION)


@pytest.mark.all
def test_a_tied_weight_is_cut_at_both_ends_or_at_none():
    facts = family("llama", tie_word_embeddings=True)
    made = planned(facts, ATTENTION | FEED_FORWARD | {"lm_head": "colwise"})
    assert made.tensor and (made.tensor.embedding, made.tensor.head) == ("model.embed_tokens", "lm_head")
    prove(facts, made.tensor)
    with pytest.raises(
        ConfigError, match="one tied weight, and the plan has lm_head: colwise, model.embed_tokens: replicate"
    ):
        planned(facts, ATTENTION | {"lm_head": "colwise", "model.embed_tokens": "replicate"})


@pytest.mark.all
@pytest.mark.parametrize("at_once", [False, True])
def test_the_rehearsal_sums_as_it_will_be_applied(at_once):
    """A tied weight has two names, and the plan must know both: found wrong in either way."""
    facts = family("llama", tie_word_embeddings=True)
    tensor = planned(facts, ATTENTION, Layout(dp_shard=1, tp=4)).tensor
    assert tensor is not None and {"lm_head.weight", "model.norm.weight"} == set(tensor.alike_behind)
    prove(facts, tensor, sums_at_once=at_once)
    with pytest.raises(UnsupportedError, match="the gradient of model.* is wrong"):
        prove(
            facts,
            replace(tensor, alike_behind=("lm_head.weight",) if not at_once else ("model.norm.weight",)),
            sums_at_once=at_once,
        )


@pytest.mark.all
def test_heads_that_ranks_cannot_share_may_stay_whole():
    facts = family("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24)
    with pytest.raises(ConfigError, match="has 3 heads, which 2 ranks cannot share"):
        planned(facts, ATTENTION | FEED_FORWARD)
    made = planned(facts, FEED_FORWARD)
    assert made.tensor and cut(made) == {f"{path}.weight" for path in FEED_FORWARD}
    prove(facts, made.tensor)


REFUSED: list[tuple[Words, type[Exception], str]] = [
    (
        {f"{BLOCK}mlp.upp_proj": "colwise"},
        ConfigError,
        "names no module of the model. Did you mean 'model.layers.*.mlp.up_proj'?",
    ),
    ({"layers.*.mlp": "replicate"}, ConfigError, "A pattern is a module's whole path"),
    (
        {f"{BLOCK}mlp.up_proj": "colwise", "model.layers.1.mlp.*": "replicate"},
        ConfigError,
        "the patterns 'model.layers.*.mlp.up_proj' and 'model.layers.1.mlp.*' both name model.layers.1.mlp.up_proj",
    ),
    ({"model.norm": "colwise"}, ConfigError, "this is a norm. Legal here: replicate, replicated_with_grad_allreduce,"),
    (
        {f"{BLOCK}mlp": "rowwise"},
        ConfigError,
        "for model.layers.0.mlp (pattern 'model.layers.*.mlp'): this is a container. Legal here",
    ),
    (
        {f"{BLOCK}mlp.up_proj": "embedding_rowwise"},
        ConfigError,
        "this is a linear layer. Legal here: colwise, rowwise,",
    ),
    (
        {f"{BLOCK}mlp.up_proj": "colwize"},
        ConfigError,
        "techniques.tensor_plan[0].style = 'colwize' is no style. Did you mean 'colwise'?",
    ),
    (
        ATTENTION | {f"{BLOCK}self_attn.k_proj": "replicate"},
        ConfigError,
        "the plan has model.layers.0.self_attn.q_proj: colwise, model.layers.0.self_attn.k_proj: replicate, ",
    ),
    (
        ATTENTION | {f"{BLOCK}self_attn.o_proj": "colwise"},
        ConfigError,
        "self_attn.o_proj (rowwise) can only be cut together",
    ),
    (
        ATTENTION | {"lm_head": "rowwise"},
        ConfigError,
        "lm_head gives the logits, and rowwise (pattern 'lm_head') does not fit it.",
    ),
    ({"lm_head": "colwise"}, UnsupportedError, "the given plan cuts no layers of the blocks"),
    (FEED_FORWARD | {f"{BLOCK}mlp": "all_reduce"}, UnsupportedError, "sums by itself. Leave it out."),
    (FEED_FORWARD | {f"{BLOCK}mlp": "moe_tp_experts"}, UnsupportedError, "experts and single parameters cannot be cut"),
    (
        {key.replace("*", "0"): style for key, style in FEED_FORWARD.items()},
        UnsupportedError,
        "blocks that are made alike are cut alike. Write model.layers.*.mlp.down_proj.",
    ),
]


@pytest.mark.parametrize(("words", "kind", "text"), REFUSED, ids=[text[:40] for *_, text in REFUSED])
def test_a_plan_that_does_not_fit_is_refused(llama, words, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        planned(llama, words)


@pytest.mark.all
@pytest.mark.parametrize("style", ["colwise", "rowwise"])
def test_what_all_heads_are_made_from_is_not_cut(style):
    latent = family("deepseek_v3")
    whole = {f"{BLOCK}self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj", f"{BLOCK}self_attn.o_proj": "rowwise"}
    whole |= {f"{BLOCK}self_attn.{name}": "colwise" for name in ("q_b_proj", "kv_b_proj")}
    assert planned(latent, whole).tensor is not None
    with pytest.raises(
        ConfigError, match=rf"q_a_proj \({style}, pattern .*computes it whole. Legal here: mla_kv_a_proj, replicate"
    ):
        planned(latent, whole | {f"{BLOCK}self_attn.q_a_proj": style})


def test_names_alone_need_no_model():
    kinds = {"a.0.up": "linear layer", "a.1.up": "linear layer", "a.1.up.deep": "linear layer", "norm": "norm"}
    given = given_styles([TensorStyleRequest("a.*.up", "colwise"), TensorStyleRequest("norm", "replicate")], kinds)  # type: ignore[arg-type]
    assert {path: named.word for path, named in given.named.items()} == {
        "a.0.up": "colwise",
        "a.1.up": "colwise",
        "norm": "replicate",
    }


@pytest.mark.all
def test_where_a_models_own_plan_names_less_or_more_it_is_said():
    facts = family("gpt_neox")
    assert plan(facts, TP2).notes == (
        "the model's own plan leaves gpt_neox.embed_in whole; it was measured that it can be cut, and it is",
    )
    experts = "\n".join(plan(family("qwen3_moe"), TP2).notes)
    assert (
        "the model's own plan cuts model.layers.*.mlp.experts (moe_tp_experts); what was measured does not" in experts
    )
    without = plan(family("gpt2"), TP2)
    assert without.tensor and without.tensor.source == "measured"


def test_patterns_of_other_shapes_of_a_family_are_left_out():
    facts = family("qwen3_moe")
    assert facts.module is not None
    own = own_tensor_plan(facts.module)
    assert "model.layers.*.mlp.experts.down_proj" in own and "model.layers.*.mlp.up_proj" not in own


# --- layers that no measurement groups


class Twice(nn.Module):
    """Its last layer is called twice, which no measurement takes for a linear layer."""

    def __init__(self, dim: int, mixes: bool):
        super().__init__()
        self.norm, self.up, self.down, self.mixes = (
            nn.LayerNorm(dim),
            nn.Linear(dim, 16),
            nn.Linear(16, dim, bias=False),
            mixes,
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        if self.mixes:
            hidden = hidden.softmax(dim=-1)
        return x + self.down(torch.tanh(hidden)) + self.down(hidden**2)


class Plain(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, 24), nn.Linear(24, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.relu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dim: int, mixes: bool):
        super().__init__()
        self.plain, self.twice = Plain(dim), Twice(dim, mixes)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.plain(x))


@dataclass
class Sizes:
    vocab_size: int = 20
    mixes: bool = False


class Stack(nn.Module):
    def __init__(self, config: Sizes):
        super().__init__()
        self.config = config
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.blocks = nn.ModuleList(Block(8, config.mixes) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BY_NAME = {"blocks.*.twice.up": "colwise", "blocks.*.twice.down": "rowwise"}


def test_layers_that_no_measurement_groups_are_cut_by_name():
    facts = model_facts(Stack(Sizes()))
    assert "blocks.*.twice.up.weight" not in cut(plan(facts, TP2))
    made = planned(
        facts, BY_NAME | {"blocks.*.plain.fc1": "colwise", "blocks.*.plain.fc2": "rowwise", "head": "colwise"}
    )
    assert {
        "blocks.*.twice.up.weight",
        "blocks.*.twice.up.bias",
        "blocks.*.twice.down.weight",
        "blocks.*.plain.fc1.weight",
    } <= cut(made)
    assert made.tensor is not None
    prove(facts, made.tensor)


def test_a_plan_by_name_that_is_wrong_is_refuted():
    facts = model_facts(Stack(Sizes(mixes=True)))
    made = planned(facts, BY_NAME)
    assert made.tensor is not None
    with pytest.raises(UnsupportedError, match=r"\(given\) was rehearsed on a small copy of it, .* is wrong"):
        prove(facts, made.tensor)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"blocks.*.twice.down": "rowwise"}, "no layer beside it is colwise. Name the layers before it too."),
        ({"blocks.*.twice.up": "colwise"}, "no layer behind it is rowwise. Name that too, or leave both out."),
    ],
)
def test_half_of_a_region_is_refused(words, text):
    with pytest.raises(ConfigError, match=text):
        planned(model_facts(Stack(Sizes())), words)


def test_features_that_ranks_cannot_share_are_refused():
    with pytest.raises(ConfigError, match="has 16 features, which layout.tp = 3 ranks cannot share"):
        planned(model_facts(Stack(Sizes())), BY_NAME, Layout(dp_shard=1, tp=3))
