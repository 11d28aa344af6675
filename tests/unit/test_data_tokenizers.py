"""Tokenizers: text survives, documents are neither cut nor ended by what they say, refusals name the way out."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.errors import ConfigError, MissingExtraError
from meshwright.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer


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
    assert isinstance(FileTokenizer(save_tokenizer(tmp_path / "t.json", "</s>")), Tokenizer)


def test_a_document_is_not_cut_padded_or_ended_by_the_file_or_by_its_own_words(tmp_path):
    tokenizer = FileTokenizer(save_tokenizer(tmp_path / "tokenizer.json", "</s>", truncate=True))
    ids = tokenizer.encode("a b a b </s> a")
    assert ids.tolist() == [0, 1, 0, 1, 2, 0] and tokenizer.end_of_document not in ids
    assert tokenizer.vocab_size == 4 and tokenizer.end_of_document == 3
    assert tokenizer.decode([0, 1, 3]) == "a b"


def test_the_end_of_a_document_is_preferred_to_the_end_of_a_turn(tmp_path):
    path = save_tokenizer(tmp_path / "tokenizer.json", "<|im_end|>", "</s>", "<|endoftext|>")
    assert FileTokenizer(path).end_of_document == 5
    assert FileTokenizer(path, end_of_document="<|im_end|>").end_of_document == 3


def test_no_token_that_ends_a_document_is_refused_with_those_there_are(tmp_path):
    path = save_tokenizer(tmp_path / "tokenizer.json", "<pad>")
    with pytest.raises(ConfigError, match=r"no special token that ends a document .*its special tokens: <pad>.*end_of_document='...'"):
        FileTokenizer(path)
    with pytest.raises(ConfigError, match=r"no special token '<pat>'\. Did you mean '<pad>'"):
        FileTokenizer(path, end_of_document="<pat>")


def test_the_fingerprint_is_of_contents(tmp_path):
    (tmp_path / "other").mkdir()
    one = FileTokenizer(save_tokenizer(tmp_path / "tokenizer.json", "</s>"))
    same = load_tokenizer(str(save_tokenizer(tmp_path / "other" / "tokenizer.json", "</s>").parent))
    different = FileTokenizer(save_tokenizer(tmp_path / "t.json", "</s>", "<x>"))
    assert one.fingerprint == same.fingerprint != different.fingerprint


def test_load_tokenizer_knows_bytes_and_paths_and_downloads_nothing(tmp_path):
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
    with pytest.raises(ConfigError, match=r"'gpt2' is not 'bytes' and no file or folder.*from_pretrained\('gpt2'\).save_pretrained"):
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
    with pytest.raises(MissingExtraError, match=r"pip install 'meshwright\[hf\]'"):
        FileTokenizer(path)
