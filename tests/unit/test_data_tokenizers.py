"""Tokenizers: text survives, documents are neither cut nor ended by what they say, refusals name the way out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.errors import ConfigError, MissingExtraError
from meshwright.data.cache import open_corpus, prepare
from meshwright.data.options import SourceOptions
from meshwright.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, encode_prompt, load_tokenizer
from meshwright.training.model_source import keep_tokenizer, kept_tokenizer


def save_tokenizer(path: Path, *special: str, truncate: bool = False) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"a": 0, "b": 1, "[UNK]": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(special))
    if truncate:
        made.enable_truncation(2)
        made.enable_padding(length=4)
    made.save(str(path))
    return path


@given(st.text())
def test_bytes_survive_the_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and (ids < 256).all() and np.issubdtype(ids.dtype, np.integer)
    assert tokenizer.decode(ids) == tokenizer.decode([*ids.tolist(), tokenizer.end_of_document]) == text


def test_bytes_that_are_no_text_are_replaced_not_raised():
    assert ByteTokenizer().decode([0xC3, 256, 65]) == "\ufffdA"


def test_both_kinds_are_tokenizers(tmp_path):
    assert isinstance(ByteTokenizer(), Tokenizer)
    assert isinstance(FileTokenizer(save_tokenizer(tmp_path / "t.json", "</s>"), "</s>"), Tokenizer)


def test_a_document_is_not_cut_or_padded_by_the_file(tmp_path):
    tokenizer = FileTokenizer(save_tokenizer(tmp_path / "tokenizer.json", "</s>", truncate=True), "</s>")
    assert tokenizer.encode("a b a b <x> a").tolist() == [0, 1, 0, 1, 2, 0]
    assert tokenizer.vocab_size == 4 and tokenizer.end_of_document == 3
    assert tokenizer.decode([0, 1, 3]) == "a b"


CHAT = ("<|im_end|>", "</s>", "<|endoftext|>")


def test_special_tokens_that_a_text_spells_out_are_tokens(tmp_path):
    tokenizer = FileTokenizer(save_tokenizer(tmp_path / "t.json", "<|endoftext|>"), "<|endoftext|>")
    text = "a b <|endoftext|>"
    ends = [int(i) == tokenizer.end_of_document for i in encode_prompt(tokenizer, text)]
    assert ends[-1] and sum(ends) == 1 and tokenizer.encode(text).tolist() == encode_prompt(tokenizer, text).tolist()
    assert encode_prompt(load_tokenizer("ids:16:1"), "3 4").tolist() == [3, 4]


def test_no_end_is_guessed(tmp_path):
    path = save_tokenizer(tmp_path / "tokenizer.json", *CHAT)
    with pytest.raises(
        ConfigError,
        match=r"no file beside .*tokenizer.json says which token ends a text .*special tokens: </s>, <\|endoftext\|>,"
        r" <\|im_end\|>\. Write the one .* to .*tokenizer_config.json, like \{\"eos_token\"",
    ):
        FileTokenizer(path)
    assert FileTokenizer(path, end_of_document="<|im_end|>").end_of_document == 3


TEXT, DICT = {"eos_token": "<|im_end|>"}, {"eos_token": {"content": "<|im_end|>", "special": True}}


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"tokenizer_config.json": TEXT}, "<|im_end|>"),
        ({"tokenizer_config.json": DICT}, "<|im_end|>"),
        ({"special_tokens_map.json": DICT, "generation_config.json": {"eos_token_id": [4, 3]}}, "<|im_end|>"),
        ({"special_tokens_map.json": DICT, "generation_config.json": {"eos_token_id": [5, 4]}}, "<|endoftext|>"),
        ({"tokenizer_config.json": TEXT, "generation_config.json": {"temperature": 1}}, "<|im_end|>"),
        ({"config.json": {"text_config": {"eos_token_id": 4}}}, "</s>"),
        ({"tokenizer_config.json": {"eos_token": None}, "generation_config.json": {"eos_token_id": [4, 3]}}, "</s>"),
        ({"generation_config.json": {"eos_token_id": 3}, "config.json": {"eos_token_id": 4}}, "<|im_end|>"),
        ({"tokenizer_config.json": TEXT, "config.json": {"eos_token_id": 4}}, "<|im_end|>"),
        (
            {"tokenizer_config.json": TEXT, "generation_config.json": {"_from_model_config": True, "eos_token_id": 4}},
            "<|im_end|>",
        ),
        ({"generation_config.json": {"_from_model_config": True, "eos_token_id": 4}}, "</s>"),
        ({"config.json": {"eos_token_id": 4}}, "</s>"),
    ],
)
def test_a_document_ends_with_the_token_that_the_model_ends_with(files, end, tmp_path):
    save_tokenizer(tmp_path / "tokenizer.json", *CHAT)
    for name, said in files.items():
        (tmp_path / name).write_text(json.dumps(said))
    tokenizer = FileTokenizer(tmp_path)
    assert (tokenizer.end_token, tokenizer.end_of_document) == (end, 3 + CHAT.index(end))


def test_an_end_that_is_an_ordinary_word_becomes_special(tmp_path):
    save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    tokenizer = FileTokenizer(tmp_path)
    assert tokenizer.end_of_document == 1 and tokenizer.vocab_size == 3 and tokenizer.decode([0, 1]) == "a"


@pytest.mark.parametrize(
    ("name", "said"), [("tokenizer_config.json", {"eos_token": "<no>"}), ("config.json", {"eos_token_id": 99})]
)
def test_an_end_that_the_tokenizer_lacks_is_refused(name, said, tmp_path):
    save_tokenizer(tmp_path / "tokenizer.json", *CHAT)
    (tmp_path / name).write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=rf"{name} has eos_token.* = .*(lacks|no such id): correct one of the two"):
        FileTokenizer(tmp_path)


@pytest.mark.parametrize("said", [TEXT, {}])
def test_a_run_keeps_which_token_ends_a_text(said, tmp_path):
    save_tokenizer(tmp_path / "tokenizer.json", *CHAT)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 7, **said}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    (tmp_path / "run").mkdir()
    tokenizer = FileTokenizer(tmp_path)
    keep_tokenizer(tokenizer, tmp_path / "run")
    kept = kept_tokenizer(tmp_path / "run")
    assert kept and kept.fingerprint == tokenizer.fingerprint and kept.end_token == "<|im_end|>"
    assert json.loads((kept.folder / "tokenizer_config.json").read_text()) == {
        "model_max_length": 7,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **TEXT,
    }


def test_alpaca_rows_end_as_the_model_ends(tmp_path):
    save_tokenizer(tmp_path / "tokenizer.json", *CHAT)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(TEXT))
    (tmp_path / "a.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    prepared = prepare(SourceOptions((str(tmp_path / "a.jsonl"),)), FileTokenizer(tmp_path), 0, tmp_path / "cache")
    assert open_corpus(prepared.folder).training.tokens[-2:].tolist() == [1, 3]


def test_an_end_that_is_no_special_token_is_refused_with_those_there_are(tmp_path):
    path = save_tokenizer(tmp_path / "tokenizer.json", "<pad>")
    with pytest.raises(ConfigError, match=r"no special token '<pat>'\. Did you mean '<pad>'"):
        FileTokenizer(path, end_of_document="<pat>")


def test_the_fingerprint_is_of_contents(tmp_path):
    for folder, words in {"one": "</s>", "same": "</s>", "more": "</s> <x>"}.items():
        (tmp_path / folder).mkdir()
        save_tokenizer(tmp_path / folder / "tokenizer.json", *words.split())
        (tmp_path / folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    one, same, more = (load_tokenizer(str(tmp_path / folder)).fingerprint for folder in ("one", "same", "more"))
    assert one == same != more


def test_load_tokenizer_knows_bytes_and_paths_and_downloads_nothing(tmp_path):
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
    with pytest.raises(
        ConfigError, match=r"'gpt2' is not 'bytes' and no file or folder.*from_pretrained\('gpt2'\).save_pretrained"
    ):
        load_tokenizer("gpt2")
    with pytest.raises(ConfigError, match="Did you mean 'bytes'"):
        load_tokenizer("byte")
    with pytest.raises(ConfigError, match="is not 'bytes'"):
        load_tokenizer("")
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(str(tmp_path))


def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer\.json that tokenizers"):
        FileTokenizer(tmp_path)


def test_without_the_package_the_command_that_installs_it_is_given(tmp_path, monkeypatch):
    path = save_tokenizer(tmp_path / "tokenizer.json", "</s>")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*tokenizers"):
        FileTokenizer(path)
