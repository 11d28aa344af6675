"""What is measured of a model: regions, their parts, what runs over all heads, how one rank runs them.

Nothing is known by name.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import users
from support.cutting import cut, family, measured, user
from support.releases import TRANSFORMERS
from support.written_out import GPT, GPTConfig
from torch import Tensor, nn
from torch.nn import functional

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.introspection.blocks import repeated_blocks
from meshwright.introspection.calls import Call
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.signature import Signature
from meshwright.introspection.small.configs import small_configs
from meshwright.introspection.small.sample import LONG, longest_row
from meshwright.introspection.structure.local_search import LocalArgument, LocalNumber
from meshwright.introspection.structure.probe import Probe
from meshwright.introspection.structure.regions import Region
from meshwright.introspection.structure.structure import BlockKind, Structure


def structure(facts: ModelFacts) -> Structure:
    return measured(facts).structure


def kind(facts: ModelFacts) -> BlockKind:
    return structure(facts).kinds[0]


def region(facts: ModelFacts, what: str = "attention") -> Region:
    (found,) = (r for r in kind(facts).regions if r.kind == what)
    return found


def parts(region: Region, name: str) -> str:
    """ "size/groups + …, dim" of a tensor."""
    found = region.cut_of(name)
    assert found is not None, [cut.name for cut in region.cuts]
    return " + ".join(f"{part.size}/{part.groups}" for part in found.parts) + f", {found.dim}"


# --- regions

SPLIT = ("q_proj", "k_proj", "v_proj")
REGIONS = {
    "llama": ("self_attn", SPLIT, "o_proj", 4, "mlp", ("gate_proj", "up_proj"), "down_proj", 64),
    "arcee": ("self_attn", SPLIT, "o_proj", 4, "mlp", ("up_proj",), "down_proj", 64),
    "biogpt": ("self_attn", SPLIT, "out_proj", 4, "", ("fc1",), "fc2", 64),
    "bloom": ("self_attention", ("query_key_value",), "dense", 4, "mlp", ("dense_h_to_4h",), "dense_4h_to_h", 128),
    "exaone4": ("self_attn", SPLIT, "o_proj", 4, "mlp", ("gate_proj", "up_proj"), "down_proj", 64),
    "gpt2": ("attn", ("c_attn",), "c_proj", 4, "mlp", ("c_fc",), "c_proj", 128),
    "gpt_bigcode": ("attn", ("c_attn",), "c_proj", 4, "mlp", ("c_fc",), "c_proj", 128),
    "gpt_neo": ("attn.attention", SPLIT, "out_proj", 4, "mlp", ("c_fc",), "c_proj", 64),
    "gpt_neox": ("attention", ("query_key_value",), "dense", 4, "mlp", ("dense_h_to_4h",), "dense_4h_to_h", 64),
    "gptj": ("attn", SPLIT, "out_proj", 4, "mlp", ("fc_in",), "fc_out", 128),
    "helium": ("self_attn", SPLIT, "o_proj", 4, "mlp", ("gate_proj", "up_proj"), "down_proj", 64),
    "mpt": ("attn", ("Wqkv",), "out_proj", 4, "ffn", ("up_proj",), "down_proj", 128),
    "nemotron": ("self_attn", SPLIT, "o_proj", 4, "mlp", ("up_proj",), "down_proj", 64),
    "opt": ("self_attn", SPLIT, "out_proj", 4, "", ("fc1",), "fc2", 64),
    "persimmon": ("self_attn", ("query_key_value",), "dense", 4, "mlp", ("dense_h_to_4h",), "dense_4h_to_h", 64),
    "phi3": ("self_attn", ("qkv_proj",), "o_proj", 4, "mlp", ("gate_up_proj",), "down_proj", 64),
    "starcoder2": ("self_attn", SPLIT, "o_proj", 4, "mlp", ("c_fc",), "c_proj", 64),
}
"""Family -> (container, producers, consumer, groups) of its attention and of its feed-forward."""


@pytest.mark.first
@pytest.mark.parametrize("name", REGIONS)
def test_attention_and_feed_forward_are_found(name):
    found = kind(family(name)).regions
    told = [(r.container, r.producers, r.consumer, r.groups) for r in found]
    inside = [lambda path, c=c: f"{c}.{path}" if c else path for c in (REGIONS[name][0], REGIONS[name][4])]
    expected = [
        (c, tuple(map(full, producers)), full(consumer), groups)
        for full, (c, producers, consumer, groups) in zip(inside, (REGIONS[name][:4], REGIONS[name][4:]), strict=True)
    ]
    assert told == expected and [r.kind for r in found] == ["attention", "feed_forward"]


@pytest.mark.first
@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("gpt2", "attn.c_attn.weight", "32/4 + 32/4 + 32/4, 1"),  # stored (in, out)
        ("gpt2", "attn.c_attn.bias", "32/4 + 32/4 + 32/4, 0"),
        ("gpt2", "attn.c_proj.weight", "32/4, 0"),
        ("gpt_neox", "attention.query_key_value.weight", "96/4, 0"),  # interleaved by head
        ("persimmon", "self_attn.query_key_value.bias", "96/4, 0"),
        ("bloom", "self_attention.query_key_value.weight", "96/4, 0"),
        ("phi3", "self_attn.qkv_proj.weight", "32/4 + 16/2 + 16/2, 0"),
        ("mpt", "attn.Wqkv.weight", "32/4 + 32/4 + 32/4, 0"),
        # multi-query: one group of keys and values
        (
            "falcon",
            "self_attention.query_key_value.weight",
            "32/4 + 16/1, 0",
        ),
        ("gpt_bigcode", "attn.c_attn.bias", "32/4 + 16/1, 0"),
        ("falcon_grouped", "self_attention.query_key_value.weight", "64/2, 0"),
        ("falcon_alibi", "self_attention.query_key_value.weight", "96/4, 0"),
        ("llama", "self_attn.q_proj.weight", "32/4, 0"),
        ("llama", "self_attn.k_proj.weight", "16/2, 0"),
        ("llama", "self_attn.o_proj.weight", "32/4, 1"),
        ("qwen2", "self_attn.v_proj.bias", "16/2, 0"),
        ("cohere_qk", "self_attn.q_norm.weight", "4/4, 0"),  # a weight of its own for each head
        ("cohere_qk", "self_attn.k_norm.weight", "2/2, 0"),
        ("gpt_oss", "self_attn.sinks", "4/4, 0"),
    ],
)
def test_a_tensor_falls_into_parts(name, tensor, expected):
    assert parts(region(family(name)), tensor) == expected


@pytest.mark.first
@pytest.mark.parametrize(("name", "expected"), [("phi3", "64/64 + 64/64, 0"), ("glm4", "64/64 + 64/64, 0")])
def test_gate_and_up_in_one_weight_are_two_parts(name, expected):
    assert parts(region(family(name), "feed_forward"), "mlp.gate_up_proj.weight") == expected


@pytest.mark.first
@pytest.mark.parametrize("name", ["olmo2", "olmo3"])
def test_norms_over_all_heads_are_found(name):
    found = region(family(name))
    assert found.spanning == ("self_attn.q_norm", "self_attn.k_norm") and found.shared == ()
    assert parts(found, "self_attn.q_norm.weight") == "32/4, 0" and parts(found, "self_attn.k_norm.weight") == "16/2, 0"


@pytest.mark.first
@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("qwen3", ("q_norm.weight", "k_norm.weight")),
        ("gemma3_text", ("q_norm.weight", "k_norm.weight")),
        ("persimmon", ("q_layernorm.weight", "q_layernorm.bias", "k_layernorm.weight", "k_layernorm.bias")),
        ("llama", ()),
        ("cohere_qk", ()),
    ],
)
def test_parameters_that_all_heads_share_are_found(name, shared):
    assert region(family(name)).shared == tuple(f"self_attn.{path}" for path in shared)


@pytest.mark.first
@pytest.mark.parametrize("name", ["cohere", "phi", "gptj", "gpt_neox", "falcon", "falcon_grouped", "stablelm_parallel"])
def test_parallel_branches_are_reduced_together(name):
    attention, feed_forward = kind(family(name)).regions
    assert set(kind(family(name)).summed) == {attention.consumer, feed_forward.consumer}


@pytest.mark.parametrize("name", ["cohere", "phi", "gptj", "falcon", "stablelm_parallel"])
def test_parallel_branches_share_one_gathered_input(name):
    attention, feed_forward = kind(family(name)).regions
    assert kind(family(name)).gathers == (attention.producers + feed_forward.producers,)


@pytest.mark.parametrize(
    ("facts", "norms"),
    [
        (lambda: family("gpt_neox"), ("input_layernorm", "post_attention_layernorm")),
        (lambda: family("falcon_grouped"), ("ln_attn", "ln_mlp")),
        (lambda: user("two norms"), ("norm_1", "norm_2")),
    ],
    ids=["gpt_neox", "falcon_grouped", "two norms"],
)
def test_parallel_branches_with_norms_of_their_own_share_what_those_norm(facts, norms):
    assert len(kind(facts()).gathers) == 2 and kind(facts()).norms == norms


@pytest.mark.parametrize("name", ["two norms, one read", "two norms, one draws", "plain", "parallel, normed"])
def test_norms_that_somebody_else_reads_or_that_draw_or_of_several_inputs_do_not(name):
    assert kind(user(name)).norms == ()


@pytest.mark.first
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "olmo2", "bloom", "stablelm", "falcon_alibi"])
def test_branches_one_after_the_other_are_reduced_apart(name):
    assert kind(family(name)).summed == () and len(kind(family(name)).gathers) == 2


@pytest.mark.first
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_stay_whole_and_mix_no_tokens(name):
    assert [r.kind for r in kind(family(name)).regions] == ["attention"]
    assert not kind(family(name)).mixes_outside


# --- how one rank runs them


def form(name: str, ranks: int):
    found = measured(family(name), ranks)
    return found.forms[found.structure.kinds[0].blocks[0], region(family(name)).consumer]


@pytest.mark.first
@pytest.mark.parametrize(
    ("name", "ranks", "numbers", "arguments"),
    [
        ("llama", 2, (), ()),
        ("llama", 4, (("self_attn", "num_key_value_groups", 2, 1),), ()),
        ("opt", 2, (("self_attn", "num_heads", 4, 2),), ()),
        ("gpt2", 4, (("attn", "split_size", 32, 8),), ()),
        ("bloom", 2, (("self_attention", "num_heads", 4, 2),), (("alibi", 0, True),)),
        ("bloom", 4, (("self_attention", "num_heads", 4, 1),), (("alibi", 0, True),)),
        ("mpt", 2, (("attn", "n_heads", 4, 2),), (("position_bias", 0, False),)),
        (
            "phi3",
            2,
            (("self_attn", "num_key_value_heads", 2, 1), ("self_attn", "config.num_attention_heads", 4, 2)),
            (),
        ),
        (
            "falcon_alibi",
            2,
            (("self_attention", "num_heads", 4, 2), ("self_attention", "num_kv_heads", 4, 2)),
            (("attention_mask", 1, False),),
        ),
        ("gpt_bigcode", 2, (("attn", "embed_dim", 32, 16), ("attn", "num_key_value_groups", 4, 2)), ()),
    ],
)
def test_numbers_and_arguments_that_one_rank_changes(name, ranks, numbers, arguments):
    found = form(name, ranks)
    assert set(found.numbers) == {LocalNumber(*number) for number in numbers}
    assert found.arguments == tuple(LocalArgument(*argument) for argument in arguments)
    assert found.hidden


BEFORE_HEADS = {
    "deepseek_v2": {
        "producers": ("q_b_proj", "kv_b_proj"),
        "latent": ("q_a_proj", "kv_a_proj_with_mqa"),
        "fed": ("q_b_proj", "kv_b_proj"),
        "norms": ("q_a_layernorm", "kv_a_layernorm"),
    },
    "latent": {"producers": ("wq", "to_heads"), "latent": ("squeezed",), "fed": ("to_heads",), "norms": ("norm",)},
}
"""Attention whose heads are made from a few features."""


@pytest.mark.first("latent")
@pytest.mark.parametrize("name", BEFORE_HEADS)
def test_what_all_heads_come_from_stays_whole_and_is_shared(name):
    facts = user(name) if name == "latent" else family(name)
    found, expected = region(facts), BEFORE_HEADS[name]
    where = f"{found.container}."
    for what in ("producers", "latent", "fed"):
        assert set(getattr(found, what)) == {where + path for path in expected[what]}
    assert {path.rpartition(".")[0] for path in found.shared} == {
        where + path for path in (*expected["latent"], *expected["norms"])
    }
    assert found.groups == found.joint == 4
    assert set(kind(facts).gathers[0]) == set(found.begins) == {*found.latent, *found.producers} - {*found.fed}
    assert measured(facts).forms[structure(facts).blocks[0], found.consumer]


def test_few_features_that_are_not_all_that_heads_are_made_from_leave_attention_whole():
    assert [found.kind for found in kind(user("latent, gated by its input")).regions] == ["feed_forward"]


def test_latent_attention_beside_a_norm_of_its_own_gathers_what_norms_give():
    found = kind(user("latent, two norms"))
    assert (
        found.norms == ()
        and {r.kind for r in found.regions} == {"attention", "feed_forward"}
        and found.regions[0].latent
    )


@pytest.mark.all
def test_a_group_that_does_not_divide_has_no_form():
    assert region(family("falcon_grouped")).groups == 2 and form("falcon_grouped", 4) is None


# --- before and behind the blocks


@pytest.mark.first
@pytest.mark.parametrize(
    ("name", "embedding", "is_hidden", "before"),
    [
        ("llama", "model.embed_tokens", True, ("model.embed_tokens.weight",)),
        ("gemma2", "model.embed_tokens", True, ("model.embed_tokens.weight",)),
        ("granite", "model.embed_tokens", False, ("model.embed_tokens.weight",)),
        ("gpt2", "transformer.wte", False, ("transformer.wte.weight", "transformer.wpe.weight")),
        (
            "opt",
            "model.decoder.embed_tokens",
            False,
            ("model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"),
        ),
        ("biogpt", "biogpt.embed_tokens", False, ("biogpt.embed_tokens.weight", "biogpt.embed_positions.weight")),
        (
            "bloom",
            "transformer.word_embeddings",
            False,
            tuple(f"transformer.word_embeddings{end}" for end in (".weight", "_layernorm.weight", "_layernorm.bias")),
        ),
    ],
)
def test_what_lies_before_the_blocks(name, embedding, is_hidden, before):
    found = structure(family(name))
    assert (found.embedding, found.embedding_is_hidden, found.before) == (embedding, is_hidden, before)


@pytest.mark.parametrize(
    ("name", "head", "steps"),
    [
        ("llama", "lm_head", []),
        ("biogpt", "output_projection", []),
        ("gemma2", "lm_head", ["div(30.0)", "tanh", "mul(30.0)"]),
        ("cohere", "lm_head", ["mul(0.0625)"]),
        ("granite", "lm_head", ["div(1.0)"]),
    ],
)
def test_the_head_and_what_is_done_to_logits(name, head, steps):
    found = structure(family(name))
    assert found.head == head and [str(step) for step in found.tail.steps] == steps and not found.tail.obstacle


@pytest.mark.parametrize(
    ("name", "counts"),
    [("gpt2", True), ("gptj", TRANSFORMERS < (5, 24)), ("gpt_neo", True), ("llama", False), ("bloom", False)],
)
def test_models_that_count_tokens_behind_their_blocks(name, counts):
    assert structure(family(name)).counts_tokens_behind == counts


# --- models of users

WHOLE = "every rank holds the whole sequence between blocks: "


def test_attention_without_a_module_declines_to_cut_sequences_and_says_so():
    plan, notes = cut(user("no module of its own"))
    assert not plan.sequence_parallel
    assert notes == (WHOLE + "the attention of layers.* has no module of its own that is given the gathered sequence",)
    assert [(p.region.kind, p.region.producers, p.region.consumer) for p in plan.kinds[0].regions] == [
        ("attention", ("wq", "wk", "wv"), "wo"),
        ("feed_forward", ("feed_forward.up",), "feed_forward.down"),
    ]


def test_interleaved_queries_keys_and_values_are_one_part():
    assert parts(region(user("interleaved")), "attention.qkv.weight") == "48/4, 0"


def test_norms_of_a_user_over_all_heads_are_found():
    assert region(user("norms over all heads")).spanning == ("attention.norm_q", "attention.norm_k")


@pytest.mark.parametrize("name", ["convolved", "talking heads"])
def test_tokens_that_meet_outside_the_regions_keep_sequences_whole(name):
    plan, notes = cut(user(name))
    assert kind(user(name)).mixes_outside and not plan.sequence_parallel
    assert WHOLE + "tokens meet in layers.* outside the layers that are cut" in notes


@pytest.mark.parametrize("distance", [1, 16, 40, 170, 400])
def test_tokens_that_meet_far_apart_are_seen(distance):
    class Far(users.Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + functional.pad(x, (0, 0, distance, 0))[:, : x.shape[1]])

    assert kind(model_facts(users.User(Far))).mixes_outside


def test_long_rows_end_where_tables_do_and_are_shorter_where_code_loops_over_tokens():
    def longest(at_most: int, calls: int) -> int:
        def run(length: int) -> None:
            assert length <= at_most
            for _ in range(calls * length):
                torch.ones(1) + 1

        return longest_row(torch.nn.Linear(4, 4), run)

    assert (longest(1000, 0), longest(64, 0), longest(6, 0)) == (LONG, 64, 6)
    assert 60 < longest(1000, 4) < 260


def test_a_bias_of_each_head_is_cut_though_most_of_its_distances_do_not_occur():
    assert parts(region(user("relative bias")), "attention.bias") == "4/4, 1"


def test_a_region_that_has_no_local_form_stays_whole_and_says_so():
    plan, notes = cut(user("fixed slopes"))
    assert [p.region.kind for p in plan.kinds[0].regions] == ["feed_forward"] and not plan.sequence_parallel
    said = "layers.*.attention: its heads could not be computed apart, so every rank computes this attention whole"
    assert notes[0].startswith(said)


@pytest.mark.first
@pytest.mark.parametrize(
    ("name", "producers", "consumer"),
    [
        ("three linears", ("feed_forward.one",), "feed_forward.two"),
        ("low rank", ("feed_forward.b", "feed_forward.up"), "feed_forward.down"),
    ],
)
def test_no_layer_begins_one_region_and_ends_another(name, producers, consumer):
    found = region(user(name), "feed_forward")
    assert (tuple(sorted(found.producers)), found.consumer) == (producers, consumer)


@pytest.mark.first
@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [("gated by head", "attention.gate.bias", "4/4, 0"), ("sinks", "attention.sinks", "4/4, 0")],
)
def test_what_belongs_to_single_heads_is_cut_with_them(name, tensor, expected):
    assert parts(region(user(name)), tensor) == expected


def test_branches_that_are_normed_before_they_are_added_are_not_summed_first():
    assert kind(user("parallel")).summed and not kind(user("parallel, normed")).summed


@pytest.mark.parametrize(
    ("name", "obstacle"),
    [
        ("learnt scale", r"mul with a tensor that is trained at users.py:\d+, 'return super\(\).*self.scale'"),
        ("centred", r"mean over the vocabulary at users.py:\d+, 'return logits - logits.mean\(-1, keepdim=True\)'"),
    ],
)
def test_what_cannot_be_done_to_a_piece_of_the_logits_is_named(name, obstacle):
    assert re.fullmatch(obstacle, structure(user(name)).tail.obstacle_if_cut)
    with pytest.raises(
        UnsupportedError, match=rf"loss_chunks = 3: .* piece by piece \({obstacle}\). Set techniques.loss_chunks = 1"
    ):
        cut(user(name), loss_chunks=3)


def test_without_repeated_blocks_nothing_can_be_cut():
    with pytest.raises(ConfigError, match="layout.tp = 2 acts on repeated blocks, and none was found in OneBlock"):
        cut(user("one block"))


def test_blocks_that_compute_twice_are_refused():
    with pytest.raises(UnsupportedError, match="no layers of this model were found that could be cut"):
        cut(user("repeated"))


@pytest.mark.first("<lambda>-3-layers.*.attention has 4 heads, which 3 ranks cannot share. Legal: 1, 2, 4.")
@pytest.mark.parametrize(
    ("facts", "ranks", "words"),
    [
        (
            lambda: family("llama"),
            8,
            "has 4 heads (and 2 of keys and values), which 8 ranks cannot share. Legal: 1, 2, 4.",
        ),
        (lambda: user("plain"), 3, "layers.*.attention has 4 heads, which 3 ranks cannot share. Legal: 1, 2, 4."),
    ],
)
def test_ranks_that_cannot_share_heads_are_refused_with_those_that_can(facts, ranks, words):
    with pytest.raises(ConfigError) as refused:
        cut(facts(), ranks)
    assert words in str(refused.value)


# --- how it is measured


def test_features_that_are_pushed_together_move_what_each_moves_alone():
    probe = measured(family("llama")).probes["model.layers.0"][0]
    linears = list(probe.linears)
    together, alone = probe.influence(linears, linears), replace(probe, wide=None).influence(linears, linears)
    assert together.keys() == alone.keys() and len(together) > 5
    assert all(
        torch.equal(together[key].places, reach.places) and torch.equal(together[key].later, reach.later)
        for key, reach in alone.items()
    )


def test_rows_that_depend_on_each_other_are_pushed_one_by_one():
    class OverRows(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            return self.down(x * x.square().mean(0))

    block = OverRows().double()
    calls: dict[str, list[Call]] = {}

    def note(path: str):
        def keep(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
            calls.setdefault(path, [Call.of(args, kwargs, output)])

        return keep

    handles = [module.register_forward_hook(note(path), with_kwargs=True) for path, module in block.named_modules()]
    block(torch.randn(8, 6, 4, dtype=torch.float64))
    for handle in handles:
        handle.remove()
    reach = Probe(block, calls).influence(["up"], ["up", "down"])["up", "down"]
    assert torch.equal(reach.places, torch.eye(6, dtype=torch.bool))


def test_a_small_config_has_an_entry_for_each_of_its_layers_whatever_the_list_is_called():
    config = SimpleNamespace(
        num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, others=[1, 2, 3], mamba_chunk_size=256
    )
    (small,) = small_configs(config, blocks=2, ranks=2)
    assert (small.build().num_hidden_layers, small.build().layers_block_type, small.build().others) == (
        2,
        ["mamba", "hybrid"],
        [1, 2, 3],
    )
    assert small.build().mamba_chunk_size == 8 and config.mamba_chunk_size == 256


def test_a_container_of_containers_only_names_what_it_holds():
    assert repeated_blocks(GPT(GPTConfig())) == ("transformer.h.0", "transformer.h.1")


def test_a_cache_is_switched_off_for_forwards_that_take_it_by_keyword_alone():
    class Takes(nn.Module):
        def __init__(self, **config):
            super().__init__()
            self.config = SimpleNamespace(**config)

        def forward(self, input_ids: Tensor, **kwargs):
            raise NotImplementedError

    batch = {"tokens": torch.zeros((1, 2), dtype=torch.int64)}
    assert Signature.of(Takes(use_cache=True)).inputs(batch, torch.device("cpu"))["use_cache"] is False
    assert Signature.of(Takes()).inputs(batch, torch.device("cpu")).keys() == {"input_ids"}


def big_bird() -> nn.Module:
    from transformers import BigBirdConfig, BigBirdForCausalLM

    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    return BigBirdForCausalLM(BigBirdConfig(**sizes, is_decoder=True))


def with_a_tower() -> nn.Module:
    """Its three patches in a row cannot be put together two by two, so its code fails for images of its own size."""
    from transformers import AyaVisionConfig, AyaVisionForConditionalGeneration

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    kinds = ["sliding_attention", "full_attention"]
    text = sizes | {"model_type": "cohere2", "vocab_size": 96, "num_key_value_heads": 2, "layer_types": kinds}
    tower = sizes | {"model_type": "siglip_vision_model", "image_size": 42, "patch_size": 14}
    return AyaVisionForConditionalGeneration(
        AyaVisionConfig(text_config=text | {"eos_token_id": 2}, vision_config=tower, image_token_id=90)
    )


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            big_bird,
            r"replaces modules in its forward: bert\.encoder\.layer\.0\.attention\.self was"
            r" BigBirdBlockSparseAttention",
        ),
        (
            with_a_tower,
            r"AyaVisionForConditionalGeneration takes images in a way that is not known here.*model\.vision_tower",
        ),
    ],
)
def test_what_cannot_be_measured_is_said(build, words):
    with pytest.raises(UnsupportedError, match=words):
        measured(model_facts(build()))
