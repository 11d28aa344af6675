"""Ids are those of the tokenizer's own call, and what is learnt is what was written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.record_table import TOOLS, answers_of, ended, own, own_pair, published
from support.tokenizers_made import BEGUN, CHATML, ENDLESS, INSIDE, MARKED, WAYS, save_way

from meshwright.core.errors import ConfigError
from meshwright.data.cache import open_corpus, prepare
from meshwright.data.images import NO_IMAGES
from meshwright.data.options import SourceOptions
from meshwright.data.tokenizers import FileTokenizer, encode_prompt
from meshwright.data.turns import load_template
from meshwright.training.model_source import keep_tokenizer, kept_tokenizer, question_ids

TALK = [
    {"role": "system", "content": "Be brief"},
    {"role": "user", "content": "Two and two? é"},
    {"role": "assistant", "content": "Four, I say"},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Five\U0001f642 "},
    {"role": "user", "content": "Thanks"},
]
ALPACA = {"instruction": "Be brief", "input": "", "output": "Five. "}


@pytest.fixture(params=list(WAYS))
def way(request, tmp_path) -> Path:
    return save_way(request.param, tmp_path / "tokenizer")


def documents(
    tmp_path: Path, folder: Path, rows: list[dict], **options
) -> tuple[list[list[int]], list[list[bool]], list]:
    """The ids of each document, which of them are learnt, and the notes."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceOptions((str(tmp_path / "a.jsonl"),), **options)
    prepared = prepare(source, FileTokenizer(folder), 0, tmp_path / "cache")
    split = open_corpus(prepared.folder).training
    edges = split.offsets[1:-1]
    ids = [part.tolist() for part in np.split(np.asarray(split.tokens), edges)]
    learnt = np.asarray(getattr(split, "is_learnt", np.ones(len(split.tokens)))).astype(bool)
    return ids, [part.tolist() for part in np.split(learnt, edges)], prepared.meta.notes


def said(notes: list[str]) -> list[str]:
    """The notes but those on what the vocabulary cannot spell, tasks that use no template, and turns left out."""
    others = ("cannot spell", "data.template = own", "behind the last answer")
    return [note for note in notes if not any(words in note for words in others)]


@pytest.mark.first
def test_a_text_has_the_ids_of_the_own_call_and_one_end(way, tmp_path):
    texts = ["Two and two? é\U0001f642", " Four,  I say\n", "brief <think> user"]
    found, _, notes = documents(tmp_path, way, [{"text": text} for text in texts])
    assert found == [ended(own(way), own(way)(text)["input_ids"]) for text in texts] and said(notes) == []


@pytest.mark.first
@pytest.mark.parametrize("task", ["completion", "alpaca", "preference"])
def test_a_prompt_and_its_answer_have_the_ids_of_the_own_call_of_both(way, tmp_path, task):
    prompt, answers = "Two and two?", [" Four, I say"]
    row = {"prompt": prompt, "completion": answers[0]}
    if task == "alpaca":
        row = ALPACA
        prompt, answer = published(row)
        answers = [answer]
    if task == "preference":
        answers.append(" Five")
        row = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
    tokenizer, (found, learnt, notes) = own(way), documents(tmp_path, way, [row])
    assert list(zip(found, learnt, strict=True)) == [own_pair(tokenizer, prompt, answer) for answer in answers]
    assert said(notes) == []
    asked = tokenizer(prompt)["input_ids"]
    asked = asked[:-1] if asked[-1] == tokenizer.eos_token_id else asked
    for ids, mask in zip(found, learnt, strict=True):
        assert ids[: len(asked)] != asked or mask.index(True) == len(asked), "what does not merge is the prompt's"


@pytest.mark.first
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_conversation_has_the_ids_and_the_mask_of_its_chat_template(way, tmp_path, tools):
    row = {"messages": TALK} | ({"tools": tools} if tools else {})
    if tools and "tools" not in own(way).chat_template:
        with pytest.raises(ConfigError, match="the record has tools, and the chat template writes none"):
            documents(tmp_path, way, [row])
        return
    (found,), (learnt,), notes = documents(tmp_path, way, [row])
    tokenizer, others = own(way), {"tools": tools} if tools else {}
    whole = tokenizer.apply_chat_template(TALK[:5], return_dict=True, return_assistant_tokens_mask=True, **others)
    assert found == whole["input_ids"]
    expected = list(map(bool, whole["assistant_masks"]))
    assert learnt == (expected if any(expected) else answers_of(tokenizer, TALK[:5], **others))
    assert bool(said(notes)) == (tokenizer.chat_template in (ENDLESS, INSIDE) or tokenizer.split_special_tokens)


def test_generate_begins_as_the_own_call_and_leaves_its_end_out(way):
    tokenizer, whole = FileTokenizer(way), own(way)("Two and two?")["input_ids"]
    ids = encode_prompt(tokenizer, "Two and two?").tolist()
    assert [*ids, *tokenizer.behind] == whole and encode_prompt(tokenizer, "").tolist() == list(tokenizer.before)


def test_a_kept_tokenizer_is_the_same_tokenizer(way, tmp_path):
    (tmp_path / "run").mkdir()
    keep_tokenizer(FileTokenizer(way), tmp_path / "run")
    kept = kept_tokenizer(tmp_path / "run")
    assert kept and kept.fingerprint == FileTokenizer(way).fingerprint
    assert own(kept.folder)("Two <|im_end|> é")["input_ids"] == own(way)("Two <|im_end|> é")["input_ids"]


@pytest.mark.parametrize(("before", "after"), [("llama", ""), ("", "llama"), ("llama", "gemma")])
def test_a_kept_tokenizer_is_the_same_beside_another_model(tmp_path, before, after):
    folder = save_way("bytes", tmp_path / "model")
    if before:
        (folder / "config.json").write_text(json.dumps({"model_type": before}))
    tokenizer = FileTokenizer(folder)
    (tmp_path / "run").mkdir()
    keep_tokenizer(tokenizer, tmp_path / "run")
    kept = kept_tokenizer(tmp_path / "run")
    assert kept and kept.fingerprint == tokenizer.fingerprint
    expected = own(folder)("Two é")["input_ids"]
    if after:
        (kept.folder / "config.json").write_text(json.dumps({"model_type": after}))
    assert [*kept.before, *kept.encode("Two é").tolist()] == own(kept.folder)("Two é")["input_ids"] == expected


@pytest.mark.parametrize("tail", ["", "\n"])
@pytest.mark.parametrize("name", ["neither", "begins"])
def test_a_text_that_a_template_wrote_is_parsed_and_gets_no_second_end(tmp_path, name, tail):
    folder = save_way(name, tmp_path / "tokenizer")
    tokenizer, prompt = own(folder), "<|im_start|>user\nTwo<|im_end|>\n<|im_start|>assistant\n"
    row = {"prompt": prompt, "completion": "Four<|im_end|>" + tail}
    (found,), (learnt,), notes = documents(tmp_path, folder, [row])
    assert found == tokenizer(row["prompt"] + row["completion"])["input_ids"]
    assert found[: learnt.index(True)] == tokenizer(prompt)["input_ids"] and all(learnt[learnt.index(True) :])
    assert (
        len(said(notes)) == 1
        and "4 special tokens are spelt out" in notes[0]
        and "<|im_start|> 2, <|im_end|> 2" in notes[0]
    )


def test_a_first_token_that_a_text_spells_out_stands_once(tmp_path):
    folder = save_way("begins", tmp_path / "tokenizer")
    (found,), _, notes = documents(tmp_path, folder, [{"text": "<s>Two</s>"}])
    assert found == own(folder)("Two")["input_ids"] + [own(folder).eos_token_id]
    assert [note for note in notes if "1 texts spell out the token that begins a text" in note]
    assert encode_prompt(FileTokenizer(folder), "<s>Two").tolist() == own(folder)("Two")["input_ids"]


def test_a_blank_that_the_prompts_last_token_strips_does_not_make_it_an_answer(tmp_path):
    folder = save_way("strips", tmp_path / "tokenizer")
    row = {"prompt": "Two<|im_end|>", "completion": " Four"}
    (found,), (learnt,), _ = documents(tmp_path, folder, [row])
    tokenizer = own(folder)
    assert found == [*tokenizer("Two<|im_end|> Four")["input_ids"], tokenizer.eos_token_id]
    assert found[: learnt.index(True)] == tokenizer("Two<|im_end|>")["input_ids"]


def test_answers_without_an_end_are_counted_and_one_key_ends_them(tmp_path):
    folder = save_way("no end in the template", tmp_path / "tokenizer")
    (plain,), _, notes = documents(tmp_path, folder, [{"messages": TALK}])
    endless, behind = notes
    assert endless.startswith("2 of 2 answers have no special token at their end")
    assert "data.end_of_answer = true puts </s> behind each" in endless
    assert behind.startswith("1 turn at the end of 1 conversation, behind the last answer")
    (found,), (learnt,), notes = documents(tmp_path, folder, [{"messages": TALK}], end_of_answer=True)
    end = own(folder).eos_token_id
    assert [i for i in found if i != end] == plain and notes == [behind]
    runs = np.flatnonzero(np.diff(np.array([*learnt, False]).astype(int)) < 0)
    assert [found[i] for i in runs] == [end, end] and found.count(end) == 2


def test_an_end_behind_a_mark_is_learnt_by_the_same_key_and_not_written_twice(tmp_path):
    folder = save_way("marks inside tokens", tmp_path / "tokenizer")
    (tmp_path / "t.jinja").write_text(MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"))
    options = {"template": str(tmp_path / "t.jinja")}
    (plain,), (before,), notes = documents(tmp_path, folder, [{"messages": TALK}], **options)
    assert "as its marks have it" in notes[0] and "learns the one that it writes behind 2, unmarked" in notes[0]
    (found,), (learnt,), _ = documents(tmp_path, folder, [{"messages": TALK}], end_of_answer=True, **options)
    end = own(folder).convert_tokens_to_ids("<|im_end|>")
    assert found == plain and [found[i] for i in range(len(found)) if learnt[i] and not before[i]] == [end, end]


def test_documents_of_one_row_begin_and_end_as_the_own_call_has_it(way, tmp_path):
    texts = ["Two and", "Four", "Five"]
    found, _, _ = documents(tmp_path, way, [{"text": text} for text in texts])
    split = open_corpus(next((tmp_path / "cache").glob("corpus-*[0-9a-f]"))).training
    rows, flat = split.rows(np.array([0]), split.n_tokens), [i for ids in found for i in ids]
    assert rows["tokens"][0].tolist() == flat
    starts = np.flatnonzero(rows["positions"][0] == 0).tolist()
    assert starts == np.cumsum([0, *map(len, found[:-1])]).tolist()
    assert (rows["labels"][0][[start - 1 for start in starts]] == -100).all(), "no document predicts the next"


def test_a_question_has_the_ids_of_the_template_and_a_text_those_of_the_own_call(tmp_path):
    folder = save_way("begins", tmp_path / "tokenizer")
    asked, tokenizer = [{"role": "user", "content": "Hello"}], FileTokenizer(folder)
    rendered = own(folder).apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert question_ids(asked, load_template("", folder), tokenizer, NO_IMAGES) == rendered
    assert encode_prompt(tokenizer, "Hello").tolist() == own(folder)("Hello")["input_ids"]


def test_a_run_keeps_the_chat_template_that_it_trains_with(tmp_path):
    folder = save_way("neither", tmp_path / "tokenizer")
    (tmp_path / "mine.jinja").write_text(BEGUN)
    (tmp_path / "run").mkdir()
    keep_tokenizer(FileTokenizer(folder), tmp_path / "run", str(tmp_path / "mine.jinja"))
    assert own(tmp_path / "run" / "tokenizer").chat_template == BEGUN != own(folder).chat_template == CHATML


def test_other_rules_for_ids_have_another_place_in_the_cache(tmp_path):
    keys = set()
    for name in WAYS:
        save_way(name, tmp_path / name)
        (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
        for ends in (False, True):
            source = SourceOptions((str(tmp_path / "a.jsonl"),), end_of_answer=ends)
            keys.add(prepare(source, FileTokenizer(tmp_path / name), 0, tmp_path / "cache").key)
    assert len(keys) == 2 * len(WAYS)


def test_a_tokenizer_whose_class_is_code_of_its_own_is_read_without_it_and_says_so(tmp_path):
    folder = save_way("begins", tmp_path / "tokenizer")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    code = {"auto_map": {"AutoTokenizer": ["code.Mine", None]}, "tokenizer_class": "Mine"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | code))
    _, _, notes = documents(tmp_path, folder, [{"text": "Two"}])
    assert len(notes) == 1 and notes[0].startswith(f"ids are those of {folder / 'tokenizer.json'} alone, since")


def test_what_the_vocabulary_cannot_spell_is_counted(tmp_path):
    folder = save_way("unigram", tmp_path / "tokenizer")
    (found,), _, notes = documents(tmp_path, folder, [{"text": "Two \u4e00 and"}])
    assert own(folder).unk_token_id is None and found.count(0) == 1
    assert notes == ["1 pieces of the texts are <unk>, since the tokenizer's vocabulary cannot spell them"]
