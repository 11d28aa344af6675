"""Text that comes id by id: whole characters alone, and together what the tokenizer makes of all ids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.tokenizers import ByteTokenizer, FileTokenizer, Unfolding
from meshwright.training.run.opened import PARAMETERS_PER_THREAD, threads_for


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A byte-level BPE whose tokens end within characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the mesh né 漢字 😀😀 loss"] * 3, trainer)
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return FileTokenizer(folder)


def pieces(tokenizer, ids, first):
    text = Unfolding(tokenizer)
    return [text.more(*ids[:first]), *(text.more(i) for i in ids[first:]), text.rest()]


@settings(max_examples=60)
@given(st.text("aé漢😀 \n", max_size=150), st.integers(0, 9))
def test_only_whole_characters_come_and_all_of_them(trained, text, first):
    for tokenizer in (ByteTokenizer(), trained):
        ids = tokenizer.encode(text).tolist()
        parts = pieces(tokenizer, ids, first)
        assert "".join(parts) == tokenizer.decode(ids) and not any("\N{REPLACEMENT CHARACTER}" in one for one in parts)
        assert len(text) < 20 or sum(map(bool, parts)) > 1


@settings(max_examples=60)
@given(st.lists(st.integers(0, 256), max_size=300), st.integers(0, 9))
def test_bytes_that_are_no_text_come_as_the_tokenizer_writes_them(ids, first):
    assert "".join(pieces(ByteTokenizer(), ids, first)) == ByteTokenizer().decode(ids)


def test_a_small_model_writes_with_one_thread_and_a_large_one_with_no_more_than_there_are_cores(monkeypatch):
    monkeypatch.setattr("meshwright.training.run.opened.physical_cores", lambda: 4)
    assert [threads_for(n * PARAMETERS_PER_THREAD) for n in (0, 1, 3, 100)] == [1, 1, 3, 4]
    monkeypatch.setattr("meshwright.training.run.opened.physical_cores", lambda: 2)
    assert threads_for(100 * PARAMETERS_PER_THREAD) == 2
