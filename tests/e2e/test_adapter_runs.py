"""Runs that train adapters: from a folder with weights to an adapter and a merged model, and on from a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from e2e_runs import Job, OfPeak, losses, metrics
from safetensors.torch import load_file
from support.families import save_tokenizer, saved, some_tokens

from meshwright import ConfigError
from meshwright.checkpoint.manifest import Manifest
from meshwright.training.config import Config
from meshwright.training.run.folder import RunFolder

pytestmark = pytest.mark.all


@pytest.fixture(scope="module")
def base(tiny, model) -> dict:
    adapters = {"model.hf": str(model), "adapters.rank": 4, "adapters.modules_to_save": ["lm_head"]}
    return tiny | adapters | {"steps": 4, "optimizer.lr": 1e-2, "checkpoint.every": 2}


@pytest.fixture(scope="module")
def told(pool, base, tmp_path_factory):
    """A run on two ranks, as rank 0 told it."""
    return pool.run(Job(base | {"out": str(tmp_path_factory.mktemp("out"))}), world=2, timeout=60)[0]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=some_tokens()).logits


def by_transformers(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_checkpoints_hold_the_adapters_alone(told):
    assert told.status == 0 and "adapters drawn from seed 0" in told.out
    manifest = Manifest.read(RunFolder(told.folder).checkpoint())
    held = {key for key in manifest.tensors if key.startswith("model.")}
    parameters = {key for key in held if "inv_freq" not in key}
    assert parameters and all("lora_" in key or "modules_to_save" in key for key in parameters)
    assert "model.embed_tokens.weight" in manifest.left_out


@pytest.mark.first
def test_a_frozen_parameter_counts_four_flops_of_six(pool, base, tmp_path):
    per_token = []
    whole = {key: value for key, value in base.items() if not key.startswith("adapters")}
    for name, changes in (("adapters", whole | {"adapters.rank": 1}), ("whole", whole)):
        job = OfPeak(changes | {"out": str(tmp_path / name), "steps": 2, "layout.dp_shard": 1})
        result = pool.run(job, world=1, timeout=60)[0][0]
        assert ("4 for each of N that is frozen" in result.out) == (name == "adapters")
        per_token.append([row["mfu"] * 1e12 / row["tokens_per_second"] for row in metrics(result.folder)][-1])
    assert per_token[0] < 0.9 * per_token[1]


def test_the_merged_model_and_the_adapter_compute_the_same_elsewhere(told, model, tmp_path, ask):
    from peft import PeftModel

    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    status, said, _ = ask("convert", told.folder, "--to", "merged", merged, "--base", model)
    assert status == 0 and f"from_pretrained('{merged}')" in said
    assert ask("convert", told.folder, "--to", "adapter", adapter)[0] == 0
    beside = PeftModel.from_pretrained(by_transformers(model), adapter)
    one, other, before = logits(by_transformers(merged)), logits(beside), logits(by_transformers(model))
    assert (one - other).abs().max() < 1e-5 < 1e-2 < (one - before).abs().max()
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["base_model_name_or_path"] == str(model)
    assert set(config["target_modules"]) >= {"q_proj", "down_proj"} and config["modules_to_save"] == ["lm_head"]
    names = load_file(adapter / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert (merged / "tokenizer.json").is_file() and (adapter / "tokenizer.json").is_file()


def test_adapters_of_a_base_in_4_bits_are_read_beside_it_by_the_code_that_is_printed(pool, base, model, tmp_path, ask):
    import transformers
    from peft import PeftModel

    from meshwright.distributed.nf4 import pack, unpack

    bits = {"techniques.quantize_frozen": "nf4", "adapters.modules_to_save": [], "adapters.targets": ["q_proj"]}
    ran = pool.run(Job(base | bits | {"out": str(tmp_path / "out")}), world=1, timeout=60)[0]
    other = shutil.copytree(model, tmp_path / "llama")
    for name in ("merged", "adapter"):
        status, said, err = ask("convert", ran.folder, "--to", name, tmp_path / name, "--base", other)
        assert status == 0, err
    code = said[said.index("import peft") :]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(other) and f"beside {other}, held in 4 bits" in said
    made = {"torch": torch, "transformers": transformers}
    exec(code[code.index("bits = ") : code.index("model = ")], made)
    bits = made["bits"]
    assert (bits.load_in_4bit, bits.bnb_4bit_quant_type, bits.bnb_4bit_use_double_quant) == (True, "nf4", False)
    assert f"from_pretrained('{other}', dtype=torch.float32, quantization_config=bits)" in code
    rounded = by_transformers(model)  # as bitsandbytes does: every linear layer that is not to be skipped
    for path, module in rounded.named_modules():
        if isinstance(module, torch.nn.Linear) and path not in bits.llm_int8_skip_modules:
            module.weight.data = unpack(pack(module.weight.data), torch.float32)
    one, two = (
        logits(PeftModel.from_pretrained(rounded, tmp_path / "adapter")),
        logits(by_transformers(tmp_path / "merged")),
    )
    plain = logits(PeftModel.from_pretrained(by_transformers(model), tmp_path / "adapter"))
    assert (one - two).abs().max() < 1e-5 < 1e-3 < (one - plain).abs().max()


def test_lengths_of_rows_are_trained_resumed_and_merged(pool, base, model, tmp_path, ask):
    """kind = dora, begun on data ranks, gone on with on a pipeline."""
    from peft import PeftModel

    run, merged, adapter = tmp_path / "run", tmp_path / "merged", tmp_path / "adapter"
    options = base | {"run": str(run), "adapters.kind": "dora"}
    assert pool.run(Job(options | {"steps": 4}), world=2, timeout=60)[0].status == 0
    whole = losses(run)
    shutil.rmtree(RunFolder(run).checkpoint(4))
    on = pool.run(Job(options | {"layout.pp": 2, "layout.dp_shard": 1}), world=2, timeout=60)[0]
    assert on.status == 0 and "continuing from" in on.out
    assert losses(run)[-2:] == pytest.approx(whole[-2:], rel=1e-4)
    assert ask("convert", run, "--to", "merged", merged, "--base", model)[0] == 0
    assert ask("convert", run, "--to", "adapter", adapter)[0] == 0
    assert json.loads((adapter / "adapter_config.json").read_text())["use_dora"] is True
    beside = PeftModel.from_pretrained(by_transformers(model), adapter)
    one, other, before = logits(by_transformers(merged)), logits(beside), logits(by_transformers(model))
    assert (one - other).abs().max() < 1e-5 < 1e-2 < (one - before).abs().max()


def test_a_run_goes_on_on_another_layout_from_its_adapters(pool, told, base, tmp_path):
    whole = losses(told.folder)
    run = shutil.copytree(told.folder, tmp_path / "run")
    shutil.rmtree(RunFolder(run).checkpoint(4))
    on = pool.run(Job(base | {"run": str(run), "layout.tp": 2, "layout.dp_shard": 1}), world=2, timeout=60)[0]
    assert on.status == 0 and "continuing from" in on.out
    assert losses(run)[-2:] == pytest.approx(whole[-2:], rel=1e-4)


def test_a_run_of_adapters_is_not_continued_without_them(pool, told, base, tmp_path):
    run = shutil.copytree(told.folder, tmp_path / "run")
    plain = {key: value for key, value in base.items() if not key.startswith("adapters.")}
    answer = pool.run(Job(plain | {"run": str(run), "steps": 6}), world=2, timeout=60)[0]
    assert answer.status == 2 and "tensors of adapters, and the model here has no adapters" in str(answer.error)


def test_a_text_is_continued_beside_the_base_alone(told, model, tmp_path, ask):
    status, said, _ = ask("generate", told.folder, "--prompt", "a", "--tokens", "3", "--base", model)
    assert status == 0 and said.startswith("a")
    status, _, complaint = ask("generate", told.folder, "--tokens", "3")
    assert status == 2 and "--base" in complaint and str(model) in complaint
    other = tmp_path / "other"
    saved(other, "llama", seed=5)
    status, _, complaint = ask("generate", told.folder, "--tokens", "3", "--base", other)
    assert status == 2 and "not the weights beside which" in complaint


def test_an_adapter_is_not_trained_on_beside_another_base(pool, told, base, tmp_path):
    other, run = tmp_path / "other", shutil.copytree(told.folder, tmp_path / "run")
    saved(other, "llama", seed=5)
    save_tokenizer(other)
    answer = pool.run(Job(base | {"run": str(run), "model.hf": str(other)}), world=2, timeout=60)[0]
    assert answer.status == 2 and "holds another run: model.base" in str(answer.error)


def test_other_forms_are_refused_by_name(told, model, tmp_path, ask):
    for words, said in (
        (("--to", "hf", tmp_path / "x"), "--to merged writes the model"),
        (("--to", "merged", tmp_path / "x"), "--base"),
        (("--to", "adapter", tmp_path / "x", "--base", tmp_path), "holds no weights"),
        (("--to", "merged", tmp_path / "x", "--base", tmp_path), "holds no weights"),
    ):
        status, _, complaint = ask("convert", told.folder, *words)
        assert status == 2 and said in complaint, complaint
    assert not (tmp_path / "x").exists()


@pytest.mark.first
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adapters": {"rank": 0}}, "adapters.rank = 0 is out of range: it must be 1 or more"),
        ({"adapters": {"dropout": 1.0}}, "adapters.dropout = 1.0"),
        ({"adapters": {"targets": []}}, "adapters.targets"),
        ({"adapters": {"targets": [""]}}, "adapters.targets"),
        ({"adapters": {"rnak": 8}}, "Did you mean 'adapters.rank'"),
        ({"techniques": {"adapters": {"rank": 8}}}, "unknown key 'techniques.adapters'"),
    ],
)
def test_values_out_of_range_are_refused_by_name(changes, words):
    with pytest.raises(ConfigError) as refused:
        Config.from_dict({"model": {"hf": "somewhere"}} | changes)
    assert words in str(refused.value)


@pytest.mark.first
def test_adapters_need_a_model_with_weights(tmp_path, base, pool):
    with pytest.raises(ConfigError, match=r"set model\.hf"):
        Config.from_dict({"adapters": {"rank": 8}})
    saved(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    answer = pool.run(Job(base | {"model.hf": str(tmp_path), "out": str(tmp_path / "o")}), world=2, timeout=60)[0]
    assert answer.status == 2 and "no weights lie there" in str(answer.error)
