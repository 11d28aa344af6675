"""Hugging Face models: their configs are read without a network, their weights checked before they are taken."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import MORE, OWN, config_of, on_cpu, saved, some_tokens
from torch import nn

import meshwright
from meshwright import ConfigError, IntegrityError, Layout, MissingExtraError, UnsupportedError, parallelize, pretrained
from meshwright.checkpoint.tensor_files import INDEX, SINGLE, TensorFiles, holds_weights
from meshwright.introspection.constructor import built
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import CausalLM, as_module, read_causal_lm
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.training.config import Config
from meshwright.verification.counterpart import of_decoder, prove
from meshwright.verification.problem import shrunk

ONE = Layout(dp_shard=1)


# --- configs


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A folder with a config and weights; nobody writes into it."""
    folder = tmp_path_factory.mktemp("plain")
    saved(folder)
    return folder


@pytest.fixture
def folder(plain, tmp_path) -> Path:
    return shutil.copytree(plain, tmp_path / "model")


@pytest.mark.all
def test_a_folder_its_file_and_its_config_are_the_same_model(plain):
    of_folder, of_file = read_causal_lm(plain), read_causal_lm(plain / "config.json")
    assert (
        model_facts(as_module(of_folder)) == model_facts(as_module(of_file)) == model_facts(as_module(of_folder.config))
    )
    assert all(p.is_meta for p in as_module(of_folder.config).parameters())


@pytest.mark.all
def test_what_a_model_is_does_not_change_with_the_version_that_reads_it(plain):
    said = json.loads((plain / "config.json").read_text())
    assert (
        read_causal_lm(plain).facts.items() <= said.items()
        and "transformers_version" not in read_causal_lm(plain).facts
    )


def test_sizes_are_found_in_the_part_of_a_config_that_is_about_text():
    from transformers import Gemma3Config

    text = config_of("gemma3_text").to_dict()
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    facts = model_facts(as_module(Gemma3Config(text_config=text, vision_config=vision)))
    assert (facts.vocab_size, facts.max_seq_len) == (96, 64)


@pytest.mark.all
def test_parameters_are_float32_whatever_the_config_stores(folder):
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"dtype": "bfloat16"}))
    assert {p.dtype for p in as_module(read_causal_lm(folder)).parameters()} == {torch.float32}
    assert {p.dtype for p in as_module(read_causal_lm(folder, dtype="bfloat16")).parameters()} == {torch.bfloat16}


@pytest.mark.all
@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"model_type": "lama"}, ConfigError, "has model_type 'lama', which transformers"),
        ({"model_type": "lama"}, ConfigError, "Did you mean 'llama'?"),
        ({"model_type": None}, ConfigError, "has no model_type, so it is not the config of a Hugging Face model"),
        ({"model_type": "new", "auto_map": {"AutoConfig": "code.New"}}, ConfigError, "model.trust_remote_code = true"),
        ({"model_type": "new", "auto_map": {"AutoConfig": "code.New"}}, ConfigError, "auto_map: code.New"),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedError, "its weights are quantized"),
        ({"hidden_size": "wide"}, ConfigError, "is no config that transformers reads"),
    ],
)
def test_configs_that_are_none(folder, changes, error, says):
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | changes))
    with pytest.raises(error) as caught:
        read_causal_lm(folder)
    assert says in str(caught.value)


@pytest.mark.first("[1]-holds a list, and an object with keys was expected")
@pytest.mark.parametrize(
    ("text", "says"), [("{", "is no JSON"), ("[1]", "holds a list, and an object with keys was expected")]
)
def test_files_that_are_no_config(folder, text, says):
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_causal_lm(folder)


@pytest.mark.all
def test_names_that_are_no_files_are_refused_without_a_network(folder, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *args: pytest.fail("went to the network"))
    with pytest.raises(
        ConfigError, match="Models are not downloaded: fetch this one with 'hf download some/model --local-dir FOLDER'"
    ):
        read_causal_lm("some/model")
    with pytest.raises(ConfigError, match="Did you mean 'model'?"):
        read_causal_lm(folder.with_name("modl"))
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"the folder holds no config\.json"):
        read_causal_lm(folder)


@pytest.mark.all
def test_without_transformers_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*transformers"):
        read_causal_lm(folder)


@pytest.mark.all
def test_a_config_without_a_causal_language_model_is_refused():
    from transformers import CLIPConfig

    with pytest.raises(ConfigError, match="cannot build a causal language model of CLIPConfig") as refused:
        as_module(CLIPConfig())
    assert "LlamaConfig" not in str(refused.value)


@pytest.mark.all
def test_no_family_is_known_by_name():
    """Everything is done by facts: no string and no name in the code is a model type or a class of transformers, but
    for the types that our own decoder is written as (``convert --like``).
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as families

    known = {*families, *families.values()}
    for path in Path(meshwright.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())) if path.name != "counterpart.py" else ():
            words = [getattr(node, key, None) for key in ("id", "attr", "name", "arg", "value")]
            assert not known & {word for word in words if isinstance(word, str)}, f"{path}: {ast.dump(node)[:100]}"


# --- construction


@pytest.mark.first
@pytest.mark.parametrize("family", OWN)
def test_tables_and_forward_are_those_of_a_model_built_on_the_cpu(family):
    config = config_of(family)
    made = parallelize(config, ONE).parts[0].eval()
    cpu = on_cpu(made.config)
    assert [name for name, value in cpu.named_buffers() if not torch.equal(made.get_buffer(name), value)] == []
    assert _ties(made) == _ties(cpu)
    with torch.no_grad():
        for mine, theirs in zip(made.parameters(), cpu.parameters(), strict=True):
            mine.copy_(theirs)
    tokens = some_tokens()
    assert torch.equal(made(input_ids=tokens).logits, cpu(input_ids=tokens).logits)


def _ties(model: nn.Module) -> set[frozenset[str]]:
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {frozenset(found) for found in names.values() if len(found) > 1}


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen3_moe", "apertus"])
def test_initial_weights_are_spread_as_the_model_itself_spreads_them(family):
    from transformers import AutoModelForCausalLM

    made, plain = parallelize(config_of(family), ONE).parts[0], AutoModelForCausalLM.from_config(config_of(family))
    for (name, mine), theirs in zip(made.named_parameters(), plain.parameters(), strict=True):
        if theirs.std(correction=0) == 0 or theirs.numel() == 1:
            assert torch.equal(mine, theirs), name
        else:
            assert 0.7 < (mine.detach().std() / theirs.detach().std()).item() < 1.4, name


class Odd(nn.Module):
    """Like a pretrained model: initialised from outside, with a plain tensor, a table, and a parameter that only its
    constructor knows.
    """

    def __init__(self, config: object):
        super().__init__()
        self.config = config
        self.plain = torch.arange(3.0)
        self.register_buffer("table", torch.linspace(0, 1, 4), persistent=False)
        self.gain = nn.Parameter(torch.full((2,), 0.25))
        self.proj = nn.Linear(2000, 600, bias=False)

    @classmethod
    def _from_config(cls, config: object) -> nn.Module:
        return cls(config)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 3.0)


class FromWeights(Odd):
    def __init__(self, config: object):
        super().__init__(config)
        self.register_buffer("norms", self.proj.weight.norm(dim=0))


@pytest.mark.parametrize("kind", [Odd, FromWeights])
def test_what_only_a_constructor_knows_is_taken_from_it(kind):
    made = parallelize(lambda: kind(None), ONE, seed=3).parts[0]
    wanted = built(lambda: kind(None), 3)
    assert torch.equal(made.plain, torch.arange(3.0))
    assert all(torch.equal(made.get_parameter(name), value) for name, value in wanted.named_parameters())
    assert all(torch.equal(made.get_buffer(name), value) for name, value in wanted.named_buffers())


@pytest.mark.first
@pytest.mark.parametrize("family", [*OWN, *MORE])
def test_a_family_begins_as_transformers_makes_it(family):
    """To the last bit, under the same seed; buffers too, and what no state dict holds."""
    config = config_of(family)
    made, wanted = parallelize(config, ONE, seed=3).parts[0], built(CausalLM(config), 3)
    for name, value in (*wanted.named_parameters(), *wanted.named_buffers()):
        there = made.get_buffer(name) if name in dict(made.named_buffers()) else made.get_parameter(name)
        assert torch.equal(there, value), name


def test_a_module_put_in_behind_the_constructor_is_refused():
    with torch.device("meta"):
        model = Odd(None)
        model.adapter = nn.Linear(3, 3)
    with pytest.raises(UnsupportedError, match="adapter was put into Odd behind its constructor, as adapters are"):
        parallelize(model, ONE)


# --- weights


def loaded(folder: Path, config=None) -> nn.Module:
    return parallelize(config or read_causal_lm(folder), ONE, weights=pretrained(folder)).parts[0].eval()


@pytest.mark.first
@pytest.mark.parametrize("family", OWN)
def test_what_transformers_saves_is_loaded(family, tmp_path):
    """Renamed keys, experts stored one by one, ties that the file leaves out."""
    model = saved(tmp_path, family)
    made = loaded(tmp_path)
    assert [name for name, value in model.named_parameters() if not torch.equal(value, made.get_parameter(name))] == []
    assert [name for name, value in model.named_buffers() if not torch.equal(value, made.get_buffer(name))] == []


def test_several_files_and_other_dtypes(tmp_path):
    model = saved(tmp_path, file_size="40KB")
    assert (tmp_path / INDEX).is_file() and not (tmp_path / SINGLE).is_file()
    for file in tmp_path.glob("*.safetensors"):
        save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    made = loaded(tmp_path)
    for name, value in model.named_parameters():
        assert torch.equal(made.get_parameter(name), value.bfloat16().float()), name


def rewritten(folder: Path, change) -> None:
    save_file(change(load_file(folder / SINGLE)), folder / SINGLE, {"format": "pt"})


@pytest.mark.all
def test_files_of_the_base_model_alone_and_old_tables_are_understood(folder):
    """The head's own weight stays; a rotary table of each layer, as older files hold them, is left to the model."""
    table = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewritten(folder, lambda tensors: {name.removeprefix("model."): value for name, value in tensors.items()} | table)
    assert torch.equal(loaded(folder).get_parameter("model.norm.weight"), load_file(folder / SINGLE)["norm.weight"])


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_a_tied_weight_may_have_either_name_or_both(tmp_path, kept):
    saved(tmp_path, tie_word_embeddings=True)
    first = load_file(tmp_path / SINGLE)["model.embed_tokens.weight"]
    names = ["model.embed_tokens.weight", "lm_head.weight"] if kept == "both" else [kept]

    def change(tensors):
        del tensors["model.embed_tokens.weight"]
        return tensors | {name: first.clone() for name in names}

    rewritten(tmp_path, change)
    made = loaded(tmp_path)
    assert torch.equal(made.get_parameter("lm_head.weight"), first)
    assert made.get_parameter("lm_head.weight") is made.get_parameter("model.embed_tokens.weight")


def refusal(folder: Path) -> str:
    """What refuses the weights of a folder, after seeing that nothing was written."""
    model = as_module(read_causal_lm(folder)).to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    with pytest.raises(ConfigError) as caught:
        pretrained(folder)(model)
    assert all(bool((parameter == 7.0).all()) for parameter in model.parameters())
    return str(caught.value)


def test_a_tied_weight_of_two_values_is_refused(tmp_path):
    saved(tmp_path, tie_word_embeddings=True)
    rewritten(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    said = refusal(tmp_path)
    assert "hold model.embed_tokens.weight and lm_head.weight with different values, and the model ties them" in said


def _without(*names):
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


@pytest.mark.all
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without("model.norm.weight"), ["they lack model.norm.weight"]),
        (lambda t: t | {"model.extra": torch.ones(2)}, ["they hold model.extra, which the model lacks"]),
        (
            lambda t: t | {"model.norm.weight": torch.ones(31)},
            ["model.norm.weight is [31] there and [32] in the model"],
        ),
        (
            lambda t: t | {"model.norm.weight": torch.ones(32, dtype=torch.int64)},
            ["model.norm.weight is int64 there and float32"],
        ),
        (
            lambda t: {f"x{i}": torch.ones(1) for i in range(9)},
            ["they lack model.embed_tokens.weight", "(and 26 more)"],
        ),
        (
            lambda t: _without("model.norm.weight")(t) | {"norms": torch.ones(2), "lm_head.weight": torch.ones(2, 2)},
            ["they lack model.norm.weight", "they hold norms", "lm_head.weight is [2, 2] there"],
        ),
    ],
)
def test_weights_of_another_model_are_refused_and_all_is_told(folder, change, says):
    rewritten(folder, change)
    said = refusal(folder)
    assert all(text in said for text in [*says, "Nothing was loaded"])


def _cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.all
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: _cut(path, path.stat().st_size - 5), "its header describes"),
        (lambda path: _cut(path, 300), "its first eight bytes say that its header has"),
        (lambda path: _cut(path, 3), "is no whole safetensors file"),
        (lambda path: path.write_bytes(b"\xff" * 2000), "is no whole safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"F32", b"F16", 1)), "of shape"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F8A"', 1)), "is stored as F8A"),
        (lambda path: path.write_bytes(path.read_bytes() + b"more"), "its header describes"),
    ],
)
def test_damaged_files_are_refused(folder, damage, says):
    damage(folder / SINGLE)
    with pytest.raises((IntegrityError, UnsupportedError), match=says):
        pretrained(folder).check(as_module(read_causal_lm(folder)))


def test_an_index_must_be_true(tmp_path):
    saved(tmp_path, file_size="40KB")
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    (tmp_path / files[1]).rename(tmp_path / "away")
    with pytest.raises(IntegrityError, match=f"names {files[1]}, and .* has no such file"):
        TensorFiles(tmp_path)
    (tmp_path / "away").rename(tmp_path / files[1])
    other = next(name for name, file in index["weight_map"].items() if file != files[0])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {other: files[0]}}))
    with pytest.raises(IntegrityError, match=f"lacks {other}"):
        TensorFiles(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(IntegrityError, match="is damaged"):
        TensorFiles(tmp_path)


@pytest.mark.all
def test_pickled_weights_are_not_taken_for_none(folder):
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"has weights in pytorch_model\.bin.*pickled weights are not read"):
        holds_weights(folder)
    (folder / "pytorch_model.bin").unlink()
    assert not holds_weights(folder)
    with pytest.raises(ConfigError, match="holds no weights"):
        TensorFiles(folder)


@pytest.mark.follows("save_original_format=")
def test_a_conversion_that_slices_cannot_do_is_done_by_transformers(tmp_path):
    """The hub's folders of this family have each expert's weights the other way round than the model."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 48}
    vision = {"depth": 1, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4, "deepstack_visual_indexes": [0]}
    text = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96}
    text |= {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = Qwen3VLMoeConfig(text_config=sizes | text, vision_config=sizes | vision | {"num_position_embeddings": 16})
    model = Qwen3VLMoeForConditionalGeneration(config)

    def differing(folder: Path) -> list[str]:
        made = loaded(folder)
        return [name for name, value in model.named_parameters() if not torch.equal(value, made.get_parameter(name))]

    model.save_pretrained(tmp_path)
    assert differing(tmp_path) == []
    stored = {
        name: value.mT.contiguous() if ".experts." in name else value
        for name, value in load_file(tmp_path / SINGLE).items()
    }
    save_file(stored, tmp_path / SINGLE, {"format": "pt"})
    with pytest.raises(
        UnsupportedError, match=r"experts.down_proj is made of .* by Transpose, which cannot be done on sl"
    ):
        loaded(tmp_path)
    own = type(model).from_pretrained(tmp_path)
    own.save_pretrained(tmp_path / "own", save_original_format=False)
    assert differing(tmp_path / "own") == []


@pytest.mark.all
def test_weights_are_not_written_over_a_model_that_has_some(folder):
    with pytest.raises(ConfigError, match="the model has weights"):
        parallelize(on_cpu(config_of("llama")), ONE, weights=pretrained(folder))


def test_experts_in_float64_are_computed_one_by_one():
    assert CausalLM(config_of("qwen3_moe"), "float64")().config._experts_implementation == "eager"


@pytest.mark.all
def test_weights_that_are_not_all_are_refused(folder):
    with pytest.raises(
        ConfigError, match=r"weights= wrote no model\.embed_tokens\.weight, .* \(21 parameters in all\)"
    ):
        parallelize(read_causal_lm(folder), ONE, weights=lambda model: set())


CODE = """
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class OwnConfig(PretrainedConfig):
    model_type = "own"
    def __init__(self, width=8, **more):
        self.width = width
        super().__init__(**more)

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed, self.head = nn.Embedding(96, config.width), nn.Linear(config.width, 96)
        self.post_init()
    def forward(self, input_ids):
        return CausalLMOutput(logits=self.head(self.embed(input_ids)))
"""


def test_code_beside_a_config_runs_when_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own.py").write_text(CODE)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "width": 16, "auto_map": classes}))
    with pytest.raises(ConfigError, match=r"model\.trust_remote_code = true"):
        read_causal_lm(tmp_path)
    made = parallelize(read_causal_lm(tmp_path, trust_remote_code=True), ONE).parts[0]
    assert made(some_tokens()).logits.shape == (2, 12, 96) and made.get_parameter("embed.weight").shape == (96, 16)


# --- models of transformers that compute what our mixtures do

PLAIN = DecoderConfig(64, 32, 3, n_heads=4, n_kv_heads=2, hidden_dim=48, max_seq_len=64, moe=MoEConfig(hidden_dim=20))
NORMED = replace(PLAIN, qk_norm=True)
GROUPED = MoEConfig(
    8, 3, 20, n_shared=2, first_dense=1, router="sigmoid", n_groups=4, top_groups=2, scale=2.5, bias_rate=0.01
)


def with_moe(config: DecoderConfig, moe: MoEConfig | None = None, **changes) -> DecoderConfig:
    moe = moe or config.moe
    assert moe is not None
    return replace(config, moe=replace(moe, **changes))


LARGE = DecoderConfig(
    150_000,
    5120,
    92,
    n_heads=80,
    n_kv_heads=8,
    hidden_dim=12_288,
    max_seq_len=4096,
    moe=replace(GROUPED, n_experts=160),
)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (PLAIN, "mixtral"),
        (NORMED, "qwen3_moe"),
        (with_moe(NORMED, normalise=False, first_dense=1), "qwen3_moe"),
        (with_moe(PLAIN, GROUPED), "glm4_moe"),
        (with_moe(NORMED, GROUPED, normalise=False, n_groups=1, top_groups=1), "glm4_moe"),
        (with_moe(PLAIN, GROUPED, bias_rate=0.0, n_shared=0), "glm4_moe"),
        (shrunk(with_moe(LARGE, first_dense=3, hidden_dim=1536)), "glm4_moe"),
    ],
)
def test_a_mixture_has_a_counterpart_with_equal_logits(config, kind):
    assert 0 < prove(config, kind) < 1e-6


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 2},
        {"num_group": 1, "topk_group": 1},
        {"norm_topk_prob": False},
        {"routed_scaling_factor": 2.4},
        {"e_score_correction_bias": torch.zeros(8)},
    ],
)
def test_the_proof_sees_every_part_of_the_routing(monkeypatch, change):
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

    right = Glm4MoeTopkRouter.forward

    def wrong(self, x):
        for name, value in change.items():
            setattr(self, name, value)
        return right(self, x)

    monkeypatch.setattr(Glm4MoeTopkRouter, "forward", wrong)
    with pytest.raises(UnsupportedError, match="Glm4MoeForCausalLM does not compute what the run's model does"):
        prove(with_moe(PLAIN, GROUPED), "glm4_moe")


@pytest.mark.parametrize(
    ("config", "kind", "complaint"),
    [
        (
            with_moe(PLAIN, normalise=False),
            "mixtral",
            "its models have normalise = True, and the run.* = False. Of .* fit: none",
        ),
        (with_moe(PLAIN, first_dense=1), "mixtral", "and the run's model first_dense = 1"),
        (PLAIN, "llama", "have experts = False, .* Of llama, mistral, qwen3, .*, glm4_moe fit: mixtral$"),
        (PLAIN, "qwen3_moe", "and the run's model qk_norm = False. Of .* fit: mixtral$"),
        (
            replace(PLAIN, moe=None),
            "qwen3_moe",
            "the run's model qk_norm = False, experts = False. Of .* fit: llama, mistral$",
        ),
        (NORMED, "glm4_moe", "and the run's model router = softmax. Of .* fit: qwen3_moe$"),
        (with_moe(PLAIN, GROUPED, n_groups=8, top_groups=4), "glm4_moe", "cannot compute in the sizes of the run's"),
    ],
)
def test_what_computes_something_else_than_a_mixture_is_refused(config, kind, complaint):
    with pytest.raises(UnsupportedError, match=complaint) as refusal:
        prove(config, kind)
    assert len(str(refusal.value).splitlines()) == 1


def test_a_mixture_that_drops_tokens_has_no_counterpart(tmp_path):
    config = Config.from_dict({"model": {"size": "debug", "moe": {"capacity_factor": 1.5}}})
    with pytest.raises(UnsupportedError, match=r"its models have .*capacity_factor = 0\.0, .*capacity_factor = 1\.5"):
        of_decoder(tmp_path, config, "qwen3_moe")
