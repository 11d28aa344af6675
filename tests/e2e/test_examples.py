"""Every config in examples/ is one, and trains when it is shrunk; adapters end in a model that transformers reads."""

from __future__ import annotations

import json
import random
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from e2e_runs import Job, losses
from support.families import save_tokenizer, saved, some_tokens
from support.vision_models import asks, draw_image, model_folder, write_rows

from meshwright.cli.main import main
from meshwright.core.config import to_dict
from meshwright.training.config import Config

EXAMPLES = Path(__file__).parents[2] / "examples"
SHRUNK = {
    "steps": 2,
    "data.seq_len": 32,
    "batch.global_batch": 8,
    "batch.microbatch": 2,
    "layout.dp_shard": 2,
    "sample.tokens": 0,
    "validation.every": 0,
    "logging.tensorboard": "off",
    "checkpoint.every": 0,
}
OF_OURS = {"model.n_layers": 2, "model.dim": 32, "model.n_heads": 2, "model.n_kv_heads": 2, "model.hidden_dim": 48}
OF_OURS |= {"model.vocab_size": 300, "data.tokenizer": "bytes", "schedule.warmup_steps": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A model's folder, and the data that the examples name."""
    folder = tmp_path_factory.mktemp("example")
    (folder / "model").mkdir()
    saved(folder / "model", "llama")
    save_tokenizer(folder / "model")
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    (folder / "model" / "chat_template.jinja").write_text(template)
    asked = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "cba"}]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': asked})}\n" * 40)
    pair = {"prompt": "abc", "chosen": "cba", "rejected": "abc"}
    (folder / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 40)
    (folder / "corpus.txt").write_text("a short text to learn from\n" * 200)
    pictured = folder / "pictured"
    model_folder("llava", pictured / "model", weights=True)
    draw_image(pictured / "cat.png", 30, 20)
    write_rows(pictured / "chats.jsonl", [asks("cat.png")] * 40)
    return folder


def shrunk(name: str, files: Path, **changes: object) -> dict:
    """The example with the keys of a small run, as nested tables."""
    written = tomllib.loads((EXAMPLES / f"{name}.toml").read_text())
    of_hugging_face = "hf" in written["model"]
    small = SHRUNK | ({} if of_hugging_face else OF_OURS) | changes
    if of_hugging_face:
        files = files / "pictured" if name.startswith("vision") else files
        small |= {"model.hf": str(files / "model"), "data.source": [str(files / written["data"]["source"][0])]}
    else:
        small["data.source"] = [str(files / "corpus.txt")]
    for path, value in small.items():
        section, _, key = path.rpartition(".")
        (written.setdefault(section, {}) if section else written)[key] = value
    return written | {"out": str(files / "runs" / name)}


CHANGES = {
    "pretrain_8b": {"layout.dp_shard": 1, "layout.tp": 2, "techniques.compile": False},
    "moe": {
        "layout.ep": 2,
        "model.moe": {"n_experts": 4, "top_k": 2, "hidden_dim": 16, "router": "sigmoid", "bias_rate": 0.001},
    },
}
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_a_config_of_few_lines(name):
    text = (EXAMPLES / f"{name}.toml").read_text()
    assert len(text.splitlines()) <= 15 and text.startswith("# ")
    assert to_dict(Config.from_dict(tomllib.loads(text)))["name"] == name.replace("_", "-")


@pytest.mark.all
@pytest.mark.parametrize("name", NAMES)
def test_every_example_trains_when_it_is_shrunk(pool, files, name):
    ran = pool.run(Job(shrunk(name, files, **CHANGES.get(name, {}))), world=2, timeout=90)[0]
    assert ran.status == 0, ran.error or ran.out
    assert "step 2/2" in ran.out
    if name == "dpo":  # adapters: nothing was computed beforehand
        assert "reference of the pairs: the model without its adapters" in ran.out and "accuracy" in ran.out
        assert not (ran.folder / "reference").exists()


@pytest.mark.all
def test_a_folder_and_conversations_become_a_merged_model(pool, files, tmp_path, capsys):
    """The fine-tuner's way: train, merge, and read the result."""
    from transformers import AutoModelForCausalLM

    changes = {"optimizer.lr": 0.05, "schedule.warmup_steps": 1, "steps": 4}
    ran = pool.run(Job(shrunk("lora", files, **changes)), world=2, timeout=90)[0]
    assert ran.status == 0, ran.error
    words = ["convert", ran.folder, "--to", "merged", tmp_path / "tuned", "--base", files / "model"]
    assert main([str(word) for word in words]) == 0
    read, said = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", output_loading_info=True)
    assert not any(said.values())
    base = AutoModelForCausalLM.from_pretrained(files / "model")
    with torch.no_grad():
        moved = (read(input_ids=some_tokens()).logits - base(input_ids=some_tokens()).logits).abs().max()
    assert moved > 1e-3 and "from_pretrained" in capsys.readouterr().out


@pytest.mark.all
def test_a_fine_tuning_says_what_it_chose_and_goes_on_with_it(pool, files, tmp_path):
    """Rate, rows, length and prompt are a fine-tuner's, printed, and in the run's config, which a flag overrides."""
    written = shrunk("lora", files) | {"out": str(tmp_path)}
    del written["steps"], written["data"]["seq_len"]
    ran = pool.run(Job(written), world=2, timeout=90)[0]
    assert ran.status == 0, ran.error
    line = next(line for line in ran.out.splitlines() if line.strip().startswith("default "))
    config = tomllib.loads((ran.folder / "config.toml").read_text())
    steps = config["steps"]
    assert f"steps = {steps} (" in line and "optimizer.lr = 0.003, optimizer.weight_decay = 0," in line
    assert "data.seq_len = 64" in line and config["data"]["seq_len"] == 64  # the most that this model knows
    assert config["optimizer"]["lr"] == 3e-3 and config["optimizer"]["weight_decay"] == 0 and "epochs" not in config
    assert config["sample"]["prompt"] == "Hello" and config["sample"]["chat"] is True
    on = pool.run(Job(config | {"run": str(ran.folder), "steps": steps + 1}), world=2, timeout=90)[0]
    assert on.status == 0 and f"step {steps + 1}/{steps + 1}" in on.out and "fine-tuning" not in on.out
    assert tomllib.loads((ran.folder / "config.toml").read_text()) == config | {"steps": steps + 1}


@pytest.fixture(scope="module")
def speaker(files, tmp_path_factory) -> Path:
    """A model that has learnt to answer in letters, and 200 short chats with one answer that it does not know."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder, draw = tmp_path_factory.mktemp("speaker"), random.Random(0)
    shutil.copytree(files / "model", folder / "model", ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def word(n: int) -> str:
        return "".join(draw.choices("abcdefgh", k=n))

    def chat(answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": word(4)}, {"role": "assistant", "content": answer}]

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        ids = [tokenizer.apply_chat_template(chat(word(12)), return_dict=True)["input_ids"] for _ in range(16)]
        model(input_ids=(rows := torch.tensor(ids)), labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "model")
    answer = word(12)
    text = "".join(json.dumps({"messages": chat(answer), "id": n}) + "\n" for n in range(200))
    (folder / "chats.jsonl").write_text(text)
    return folder


@pytest.mark.first(1)
@pytest.mark.parametrize("adapters", [True, False], ids=["adapters", "whole"])
def test_two_hundred_short_chats_are_learnt_by_default(pool, tmp_path, speaker, adapters):
    """Nothing but model and data is set."""
    written = {"out": str(tmp_path), "model": {"hf": str(speaker / "model")}, "sample": {"tokens": 0}}
    written |= {"data": {"source": [str(speaker / "chats.jsonl")]}} | ({"adapters": {"rank": 16}} if adapters else {})
    ran = pool.run(Job(written), world=2, timeout=90)[0]
    assert ran.status == 0, ran.error
    found = losses(ran.folder)
    assert 50 <= len(found) <= 120 and found[-1] < found[0] / 2
    assert "the data is small: " in ran.out and "change a model little" not in ran.out


@pytest.mark.all
def test_a_run_with_a_base_in_4_bits_is_sampled_by_the_model_that_it_trained(pool, files, tmp_path):
    """The merged folder has it too: adapters beside the rounded weights."""
    from transformers import AutoModelForCausalLM

    from meshwright.cli.arguments import open_run
    from meshwright.training.run.opened import Opened

    ran = pool.run(Job(shrunk("qlora", files, **{"optimizer.lr": 0.05, "steps": 3})), world=2, timeout=90)[0]
    assert ran.status == 0, ran.error
    words = ["convert", ran.folder, "--to", "merged", tmp_path / "tuned", "--base", files / "model"]
    assert main([str(word) for word in words]) == 0
    merged, base = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "tuned", files / "model"))
    sampled = Opened.of_run(*open_run(str(ran.folder)), base=files / "model").model()
    with torch.no_grad():
        logits = [model(input_ids=some_tokens()).logits for model in (merged, base, sampled)]
    assert (logits[0] - logits[1]).abs().max() > 1e-2 and (logits[0] - logits[2]).abs().max() < 1e-5
