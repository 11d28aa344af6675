"""Folders of peft's adapters as a run's model: trained on, evaluated and sampled beside their base, or refused by name.

The oracle is peft beside transformers, in one process.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from e2e_runs import Job, losses
from safetensors.torch import load_file, save_file
from support.families import save_tokenizer, saved, some_tokens

from meshwright.cli.arguments import open_model
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.introspection.adapter_request import AdapterFolder

ROWS, SEQ = 8, 32


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """As many tokens as one step has, so that every step learns the same rows, in another order."""
    path = tmp_path_factory.mktemp("rows") / "a.txt"
    path.write_text("".join(chr(97 + i * i % 23) for i in range(ROWS * SEQ)))
    return path


@pytest.fixture(scope="module")
def base(rows, cache) -> dict:
    return {
        "data.source": [str(rows)],
        "data.cache": str(cache),
        "data.seq_len": SEQ,
        "data.validation_fraction": 0.0,
        "batch.global_batch": ROWS,
        "steps": 2,
        "optimizer.lr": 0.5,
        "optimizer.kind": "sgd",
        "optimizer.beta1": 0.0,
        "schedule.kind": "constant",
        "schedule.warmup_steps": 0,
        "sample.tokens": 0,
        "validation.every": 0,
        "logging.tensorboard": "off",
    }


@pytest.fixture(scope="module")
def whole(pool, base, model, tmp_path_factory) -> Path:
    """A run of four steps; its adapters are also written as they were after two."""
    run = tmp_path_factory.mktemp("whole") / "run"
    shape = {"model.hf": str(model), "adapters.rank": 4, "adapters.modules_to_save": ["lm_head"], "checkpoint.every": 2}
    answer = pool.run(Job(base | shape | {"run": str(run), "steps": 4}), world=2, timeout=60)[0]
    assert answer.status == 0, answer.error
    return run


@pytest.fixture
def adapter(whole, tmp_path, ask) -> Path:
    assert ask("convert", whole, "--step", 2, "--to", "adapter", tmp_path / "adapter")[0] == 0
    return tmp_path / "adapter"


def by_peft(base: Path, folder: Path, **options) -> Path:
    """Write adapters with numbers of their own beside a model, by peft."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 6, "init_lora_weights": False, "target_modules": ["q_proj"]} | options,
        task_type="CAUSAL_LM",
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    described = json.loads((folder / "adapter_config.json").read_text()) | {"init_lora_weights": True}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=some_tokens()).logits


def beside(base: Path, adapter: Path) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return logits_of(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))


def evaluated(ask, base: dict, *words: object) -> float:
    said = ask("evaluate", *words, "--data", base["data.source"][0], f"--data.seq_len={SEQ}", "--json")[1]
    return json.loads(said)["loss"]


@pytest.mark.all
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"target_modules": "all-linear", "use_rslora": True}),
        ("llama", {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1], "use_dora": True}),
        ("llama", {"target_modules": r".*\.0\..*(k|v)_proj", "modules_to_save": ["lm_head"]}),
        ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}),
    ],
)
def test_logits_beside_the_base_are_those_of_peft(family, options, tmp_path):
    saved(tmp_path / "base", family)
    save_tokenizer(tmp_path / "base")
    folder = by_peft(tmp_path / "base", tmp_path / "adapter", **options)
    opened = open_model(str(folder))
    found = logits_of(opened.model().module)
    assert (found - beside(tmp_path / "base", folder)).abs().max() < 1e-5
    from transformers import AutoModelForCausalLM

    plain = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    assert (found - plain).abs().max() > 1e-3, "the adapters change something"


@pytest.mark.all
@pytest.mark.parametrize("layout", [{}, {"layout.tp": 2, "layout.dp_shard": 1}, {"layout.pp": 2, "layout.dp_shard": 1}])
def test_a_run_from_a_folder_goes_on_as_the_run_that_made_it(pool, base, model, whole, adapter, layout, tmp_path):
    run = tmp_path / "run"
    told = pool.run(Job(base | layout | {"model.hf": str(adapter), "run": str(run)}), world=2, timeout=60)[0]
    assert told.status == 0, told.error
    assert f"read from {model}; adapters read from {adapter}" in told.out
    assert losses(run) == pytest.approx(losses(whole)[2:], rel=1e-5)
    assert abs(losses(whole)[2] - losses(whole)[0]) > 1e-3, "two steps change the loss"


@pytest.mark.all
def test_a_run_from_a_folder_goes_on_without_it_and_is_written_and_read_again(
    pool, base, model, adapter, tmp_path, ask
):
    run, others = tmp_path / "run", {"model.hf": str(adapter), "run": str(tmp_path / "run")}
    assert pool.run(Job(base | others), world=1, timeout=60)[0].status == 0
    first = losses(run)
    again = shutil.copytree(adapter, tmp_path / "again")
    changed = load_file(again / "adapter_model.safetensors")
    save_file({name: tensor + 1 for name, tensor in changed.items()}, again / "adapter_model.safetensors")
    told = pool.run(Job({"model.adapter": str(again), "steps": 4}, str(run)), world=1, timeout=60)[0]
    assert "model.first_adapters" in str(told.error), "another folder would be left out without a word"
    shutil.rmtree(adapter)
    on = pool.run(Job({"steps": 4}, str(run)), world=2, timeout=60)[0]
    assert on.status == 0 and "adapters of the run's checkpoint" in on.out, on.error
    assert losses(run)[:2] == first and losses(run)[3] < losses(run)[2] < first[1]
    assert ask("convert", run, "--to", "adapter", tmp_path / "made")[0] == 0
    assert ask("convert", run, "--to", "merged", tmp_path / "merged", "--base", model)[0] == 0
    assert AdapterFolder.read(tmp_path / "made").base == str(model)
    from transformers import AutoModelForCausalLM

    merged = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (logits_of(open_model(str(tmp_path / "made")).model().module) - merged).abs().max() < 1e-5
    figures = [
        evaluated(ask, base, *words) for words in ((tmp_path / "made",), (tmp_path / "merged",), (run, "--base", model))
    ]
    assert figures[1:] == pytest.approx(figures[:1] * 2, rel=1e-6)
    texts = {
        ask("generate", *words, "--prompt", "ab", "--tokens", 5, "--temperature", 0)[1]
        for words in ((tmp_path / "made",), (tmp_path / "merged",), (run, "--base", model))
    }
    assert len(texts) == 1


@pytest.mark.follows("--techniques.quantize_frozen", "techniques.quantize_frozen")
@pytest.mark.all
def test_adapters_beside_a_base_in_4_bits_are_evaluated_and_trained_on_beside_it(pool, base, model, tmp_path, ask):
    run, folder = tmp_path / "run", tmp_path / "adapter"
    bits = {"techniques.quantize_frozen": "nf4", "adapters.rank": 4, "adapters.targets": ["q_proj"]}
    assert pool.run(Job(base | bits | {"model.hf": str(model), "run": str(run)}), world=1, timeout=60)[0].status == 0
    assert ask("convert", run, "--to", "adapter", folder)[0] == 0
    plain = shutil.copytree(folder, tmp_path / "plain")
    save_file(load_file(folder / "adapter_model.safetensors"), plain / "adapter_model.safetensors")
    found = [evaluated(ask, base, *words) for words in ((run, "--base", model), (folder,), (plain,))]
    assert found[0] == pytest.approx(found[1], rel=1e-6) and abs(found[0] - found[2]) > 1e-5
    status, _, said = ask("train", f"--model.hf={folder}", "--process.count=1", f"--run={tmp_path / 'x'}")
    assert status == 2 and said.rstrip().endswith("something else. Add --techniques.quantize_frozen=nf4")
    on = {"model.hf": str(folder), "run": str(tmp_path / "on"), "techniques.quantize_frozen": "nf4", "steps": 1}
    assert pool.run(Job(base | on), world=1, timeout=60)[0].status == 0
    assert losses(tmp_path / "on")[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.all
def test_pairs_are_held_to_the_adapters_that_a_run_begins_from(pool, base, adapter, tmp_path):
    pairs = [{"prompt": f"{i}", "chosen": f"yes{i}", "rejected": f"no{i}"} for i in range(ROWS // 2)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    run = tmp_path / "run"
    changes = {"model.hf": str(adapter), "run": str(run), "data.source": [str(tmp_path / "a.jsonl")], "steps": 3}
    told = pool.run(Job(base | changes), world=1, timeout=60)[0]
    assert told.status == 0 and f"the adapters of {adapter} were trained before" in told.out, told.error
    assert losses(run)[0] == pytest.approx(math.log(2), abs=1e-6) and losses(run)[2] < losses(run)[0]


def changed(adapter: Path, **keys) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern = {'q_proj': 8}"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type = 'SEQ_CLS'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices = [1]"),
        ({"use_dora": True, "use_rslora": True}, "use_dora beside use_rslora"),
        ({"a_key_of_tomorrow": 1}, "a_key_of_tomorrow = 1"),
    ],
)
def test_adapters_that_a_request_cannot_say_are_refused_by_their_key(adapter, keys, words):
    changed(adapter, **keys)
    with pytest.raises(UnsupportedError, match=r"merge_and_unload") as refused:
        AdapterFolder.read(adapter)
    assert words in str(refused.value)


def test_a_base_that_is_not_here_is_asked_for_by_the_flag_that_takes_it(base, model, adapter, tmp_path, ask):
    changed(adapter, base_model_name_or_path="some/model", revision="abc")
    told = ask("train", f"--model.hf={adapter}", "--process.count=1")[2]
    assert f"--model.hf=BASE --model.adapter={adapter} (to fetch it: hf download some/model --revision abc" in told
    run = tmp_path / "run"
    flags = [f"--{key}={value}" for key, value in (base | {"run": run, "steps": 1, "process.count": 1}).items()]
    assert ask("train", f"--model.hf={model}", f"--model.adapter={adapter}", *flags)[0] == 0
    assert "give it with --base BASE" in ask("evaluate", adapter, "--data", base["data.source"][0])[2]
    assert ask("evaluate", adapter, "--data", base["data.source"][0], "--base", model)[0] == 0
    assert ask("generate", adapter, "--base", model, "--tokens", 1, "--prompt", "a")[0] == 0


def test_what_does_not_fit_is_refused_before_anything_is_built(model, adapter, tmp_path, ask):
    def train(*flags) -> str:
        status, _, said = ask("train", f"--run={tmp_path / 'run'}", "--process.count=1", *flags)
        assert status == 2 and not (tmp_path / "run").exists()
        return said

    other = tmp_path / "other"
    saved(other, "llama", hidden_size=64)
    save_tokenizer(other)
    assert "adapters.rank = 8 (there 4)" in train(f"--model.hf={adapter}", "--adapters.rank=8")
    assert "names adapters too: leave one out" in train(f"--model.hf={adapter}", f"--model.adapter={adapter}")
    assert "there is no folder with the adapters of peft" in train(f"--model.hf={model}", f"--model.adapter={other}")
    assert "are not those that stand beside LlamaForCausalLM" in train(
        f"--model.hf={other}", f"--model.adapter={adapter}"
    )
    assert "leave --step out" in ask("generate", adapter, "--step", 3)[2]
    shutil.copyfile(model / "model.safetensors", adapter / "model.safetensors")
    assert "holds a whole model (model.safetensors) and adapters" in train(f"--model.hf={adapter}")
    (adapter / "model.safetensors").unlink()
    weights = load_file(adapter / "adapter_model.safetensors")
    extra = {"base_model.model.model.embed_tokens.weight": torch.zeros(96, 32)}
    save_file(weights | extra, adapter / "adapter_model.safetensors")
    with pytest.raises(UnsupportedError, match=r"holds model.embed_tokens.weight with other numbers than its base"):
        open_model(str(adapter)).model()
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"and no adapter_model.safetensors"):
        open_model(str(adapter))
