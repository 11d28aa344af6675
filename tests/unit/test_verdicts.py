"""The verdict of a fine-tune on rented GPUs, by the command line: it fits or what makes it fit, hours and money."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshwright.cli.main import main

SCREEN = 24
"""Lines of a terminal."""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
RENTED = {
    "QLoRA of 8B on 24 GB": ({}, ["--techniques.quantize_frozen=nf4", "--adapters.kind=lora"], 1, "rtx4090", 24),
    "8B whole on 8 x 80 GB": ({}, [], 8, "h100", 80),
    "LoRA of 70B on 8 x 80 GB": (LARGE, ["--adapters.kind=lora"], 8, "h100", 80),
}


@pytest.mark.all
@pytest.mark.parametrize("name", RENTED)
def test_the_first_screen_has_the_verdict_the_settings_hours_and_money(name, tmp_path: Path, capsys):
    changes, flags, gpus, card, sold = RENTED[name]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    model = [f"--model.hf={tmp_path}", "--data.seq_len=2048", *flags]
    assert main(["plan", *model, f"--gpus={gpus}", f"--gpu={card}", "--price=2.5"]) == 0
    printed = capsys.readouterr().out
    screen = printed[printed.index("LlamaForCausalLM on") :].splitlines()[:SCREEN]
    text = "\n".join(screen)
    assert f"(sold as {sold} GB)" in screen[0]
    rows = [line for line in screen if re.search(r"microbatch \d+, recompute \w+.* of \d+ GB ", line)]
    first = re.search(r" GB +(fits|tight) ", rows[0])
    assert first and not re.search("too much", text)
    if first[1] == "tight":  # the line below the question says what fits
        assert re.match(r"tight; it fits with .*microbatch \d+, recompute \w+.*, [\d.]+ of \d+ GB", screen[1])
    hours, days, money = re.search(r": ([\d.,]+) GPU hours, ([\d.,]+) days, ([\d.,]+) at 2.5", text).groups()
    assert float(money) == pytest.approx(2.5 * float(hours), abs=0.05 * 2.5 + 0.01)
    assert float(days) == pytest.approx(float(hours) / gpus / 24, abs=0.01)
