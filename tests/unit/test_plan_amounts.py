"""``meshwright plan`` writes amounts with their units, and needs no file that its answer does not hang on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples/pretrain_8b.toml"
SMALL = ["plan", "--model.size=debug", "--gpus=1", "--gpu=h100", "--layout.dp_shard=1", "--batch.microbatch=1"]


@pytest.mark.parametrize(
    ("tokens", "number", "words"),
    [
        ("15T", 15e12, "15 trillion tokens"),
        ("15t", 15e12, "15 trillion tokens"),
        ("1.5e12", 1.5e12, "1.5 trillion tokens"),
        ("2.5B", 2.5e9, "2.5 billion tokens"),
        ("300m", 3e8, "300 million tokens"),
        ("5000", 5e3, "5,000 tokens"),
    ],
)
def test_tokens_are_read_and_written_in_words(tokens, number, words, capsys):
    assert main([*SMALL, f"--tokens={tokens}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["tokens"] == number
    assert main([*SMALL, f"--tokens={tokens}", "--price=2"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if " GPU hours, " in line and "tokens" in line)
    assert line.startswith(words) and " 0.0 " not in line and " 0.00 " not in line


def test_an_example_is_planned_without_its_tokenizer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", str(EXAMPLE), "--gpus=64", "--gpu=h100", "--json"]) == 0
    printed = capsys.readouterr()
    assert "tokens, as model.size = 8B has" in printed.err and json.loads(printed.out)["chosen"]


@pytest.mark.follows("--data.tokenizer")
def test_a_model_without_its_tokenizer_is_planned_with_bytes(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=300)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    asked = ["plan", "--model.hf=model", "--gpus=1", "--gpu=h100", "--layout.dp_shard=1", "--batch.microbatch=1"]
    assert main([*asked, "--data.tokenizer=missing.json"]) == 2
    assert "To plan without it, give --data.tokenizer=bytes" in capsys.readouterr().err
    assert main([*asked, "--data.tokenizer=bytes"]) == 0


def test_auto_leaves_a_size_open(tmp_path, capsys):
    asked = ["plan", "--model.size=debug", "--gpus=2", "--gpu=h100", "--json"]
    assert main(asked) == 0
    plain = capsys.readouterr().out
    assert main([*asked, "--layout.tp=auto", "--batch.microbatch=auto"]) == 0
    assert capsys.readouterr().out == plain
    (tmp_path / "open.toml").write_text('layout = { tp = "auto" }\nbatch = { microbatch = "auto" }\n')
    assert main([*asked[:1], str(tmp_path / "open.toml"), *asked[1:]]) == 0
    assert capsys.readouterr().out == plain
    assert main([*asked, "--model.dim=auto"]) == 2
    assert 'model.dim = "auto" is text; expected a whole number' in capsys.readouterr().err
