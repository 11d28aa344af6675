"""Small files of a model that were left as pointers or cut short: each is refused by its name, with a way on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.families import save_tokenizer, saved

from meshwright.checkpoint.huggingface import pretrained
from meshwright.checkpoint.tensor_files import INDEX
from meshwright.cli.main import main
from meshwright.core.errors import MeshwrightError
from meshwright.data import load_tokenizer
from meshwright.data.turns import load_template
from meshwright.introspection.adapter_request import CONFIG, WEIGHTS, AdapterFolder
from meshwright.introspection.source import as_module, read_causal_lm

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"
SHORT = '{"model_type": "llama", "hidd'
READERS = {
    "config.json": read_causal_lm,
    INDEX: lambda folder: pretrained(folder).check(as_module(read_causal_lm(folder))),
    **dict.fromkeys(("tokenizer_config.json", "generation_config.json", "special_tokens_map.json"), load_tokenizer),
    "added_tokens.json": load_tokenizer,
    "chat_template.jinja": lambda folder: load_template("", folder),
    CONFIG: AdapterFolder.read,
    WEIGHTS: AdapterFolder.read,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    saved(folder, "llama", file_size="20KB")
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / CONFIG).write_text('{"peft_type": "LORA"}')
    return folder


@pytest.mark.parametrize(
    ("name", "text"),
    [(name, text) for name in READERS for text in (POINTER, SHORT) if text == POINTER or not name.endswith("jinja")],
)
def test_a_pointer_and_a_file_that_is_cut_short_are_refused_by_name(whole, tmp_path, name, text):
    folder = shutil.copytree(whole, tmp_path / "model")
    (folder / name).write_text(text)
    with pytest.raises(MeshwrightError) as refused:
        READERS[name](str(folder) if READERS[name] is load_tokenizer else folder)
    way = "is a pointer of Git LFS, and not the file itself" if text == POINTER else "opy it again"
    said = str(refused.value)
    assert str(folder / name) in said and way in said and ("git lfs pull" in said) == (text == POINTER)
    assert "\n" not in said


@pytest.mark.parametrize("name", ["config.json", INDEX, "tokenizer_config.json", "generation_config.json"])
def test_a_run_is_refused_before_it_has_a_folder(whole, tmp_path, name, capsys):
    folder = shutil.copytree(whole, tmp_path / "model")
    (folder / CONFIG).unlink()
    (folder / name).write_text(POINTER)
    flags = [f"--model.hf={folder}", f"--run={tmp_path / 'run'}", "--process.count=1", "--data.seq_len=8"]
    assert main(["train", *flags]) == 2
    said = capsys.readouterr().err
    assert f"{folder / name} is a pointer of Git LFS" in said and not (tmp_path / "run").exists()
    assert main(["evaluate", str(folder), "--data", "farmyard"]) == 2
    assert f"{folder / name} is a pointer of Git LFS" in capsys.readouterr().err
