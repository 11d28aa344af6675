"""Tasks: loss where it belongs, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from meshwright.core.errors import ConfigError
from meshwright.data.building import TokenisingRecipe
from meshwright.data.cache import open_corpus, prepare, trained_bpe
from meshwright.data.options import SourceOptions
from meshwright.data.packing import IGNORE_INDEX, Whole, best_fit
from meshwright.data.scan import list_sources
from meshwright.data.tokenizers import ByteTokenizer, FileTokenizer, template_of

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (  # writes what an answer thought only in the last turn
    "{% for m in messages %}<{{ m['role'] }}>{% if m['thought'] and loop.last %}({{ m['thought'] }}){% endif %}"
    "{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four, I say."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Five."},
    {"role": "user", "content": "Thanks"},
]


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory) -> Path:
    """A tokenizer trained on the spot, with a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "</turn>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([json.dumps(TALK)] * 3, trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHATML, "eos_token": {"content": "<|im_end|>"}})
    )
    return folder


def built(tmp_path: Path, rows: list[dict], tokenizer, **options) -> Whole:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = prepare(SourceOptions((str(tmp_path / "a.jsonl"),), **options), tokenizer, 0, tmp_path / "cache")
    return open_corpus(prepared.folder).training


def learnt(split: Whole, tokenizer) -> list[list[str]]:
    """The runs of tokens that are learnt, of each document."""
    found = []
    for begin, end in zip(split.offsets[:-1], split.offsets[1:], strict=True):
        is_learnt = split.is_learnt[begin:end].astype(bool)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_learnt, [False]]).astype(int)))
        found.append(
            [tokenizer.decode(split.tokens[begin:end][a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        )
    return found


def test_a_completion_is_learnt_with_its_end_and_the_prompt_is_not(tmp_path):
    split = built(
        tmp_path, [{"prompt": "é? ", "completion": "oui"}, {"prompt": "", "completion": "x"}], ByteTokenizer()
    )
    assert learnt(split, ByteTokenizer()) == [["oui"], ["x"]]
    assert split.tokens[split.offsets[1:] - 1].tolist() == [256, 256] and split.is_learnt[split.offsets[1:] - 1].all()


def test_a_question_and_its_answer_are_a_prompt_and_its_completion(tmp_path):
    usual, others = (
        {first: "2? ", second: "4"} for first, second in (("prompt", "completion"), ("question", "answer"))
    )
    tokens = [built(tmp_path / kind, [row], ByteTokenizer()) for kind, row in (("a", usual), ("b", others))]
    assert learnt(tokens[1], ByteTokenizer()) == [["4"]] and tokens[0].tokens.tolist() == tokens[1].tokens.tolist()
    with pytest.raises(ConfigError, match="the column 'context' holds"):
        built(tmp_path / "c", [others | {"context": "It is noon."}], ByteTokenizer())


def test_alpaca_columns_become_its_prompt(tmp_path):
    rows = [
        {"instruction": "Add.", "input": "2 2", "output": "4"},
        {"instruction": "Greet.", "input": "", "output": "Hi"},
    ]
    split = built(tmp_path, rows, ByteTokenizer())
    assert learnt(split, ByteTokenizer()) == [["4"], ["Hi"]]
    text = ByteTokenizer().decode(split.tokens)
    assert "### Instruction:\nAdd.\n\n### Input:\n2 2\n\n### Response:\n4" in text
    assert text.count("### Input:") == 1 and text.count("Below is an instruction that describes a task") == 2


@pytest.mark.all
def test_the_assistants_turns_are_learnt_with_the_tokens_that_end_them(tmp_path, chat_folder):
    tokenizer = FileTokenizer(chat_folder)
    split = built(tmp_path, [{"messages": TALK}], tokenizer)
    assert learnt(split, tokenizer) == [["Four, I say.\n", "Five.\n"]]
    assert int((split.tokens[split.is_learnt.astype(bool)] == tokenizer.end_of_document).sum()) == 2, (
        "special tokens of the template are tokens"
    )
    transcript = tokenizer.spell_out(split.tokens)
    assert transcript.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert transcript.endswith("Five.<|im_end|>\n"), "what follows the last answer teaches nothing"


QUESTION, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}


@pytest.mark.follows("data.template = own")
@pytest.mark.parametrize("template", ["own", "{root}/chat_template.jinja"])
@pytest.mark.parametrize(
    ("row", "as_messages"),
    [
        ({"prompt": "2+2?", "completion": "4"}, {"messages": [QUESTION, ANSWER]}),
        ({"instruction": "2+2?", "input": "", "output": "4"}, {"messages": [QUESTION, ANSWER]}),
        (
            {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
            {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": "5"},
        ),
    ],
)
def test_a_template_that_is_given_writes_prompts_and_answers_of_text_as_turns(
    tmp_path, chat_folder, row, as_messages, template
):
    tokenizer = FileTokenizer(chat_folder)
    (tmp_path / "chat_template.jinja").write_text(str(template_of(chat_folder)))
    asked = built(tmp_path, [as_messages], tokenizer)
    split = built(tmp_path, [row], tokenizer, template=template.replace("{root}", str(tmp_path)))
    assert split.tokens.tolist() == asked.tokens.tolist() and split.is_learnt.tolist() == asked.is_learnt.tolist()
    recipe = TokenisingRecipe(list_sources((str(tmp_path / "a.jsonl"),)), SourceOptions(()), tokenizer, 0.0)
    words = "writes prompts and answers as they are, not by the tokenizer's chat template: for that, set"
    assert any(f"{words} data.template = own" in note for note in recipe.notes()), "without it, that is said"


SHARED = [
    {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]} for m in TALK
]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": SHARED},
        {"conversations": SHARED[1:], "system": TALK[0]["content"]},
        {"conversations": TALK},
        {"messages": SHARED, "conversations": []},
    ],
)
def test_conversations_of_share_gpt_are_learnt_as_messages(tmp_path, chat_folder, row):
    tokenizer = FileTokenizer(chat_folder)
    split, asked = built(tmp_path, [row], tokenizer), built(tmp_path, [{"messages": TALK}], tokenizer)
    assert split.tokens.tolist() == asked.tokens.tolist() and split.is_learnt.tolist() == asked.is_learnt.tolist()


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        (
            [{"from": "humam", "value": "x"}],
            r"row 1, turn 1: nobody knows the role of 'humam' \(from\). Did you mean 'h",
        ),
        ([SHARED[1], {"from": "gpt", "value": 5}], r"row 1, turn 2: its value must be text, and is 5"),
        (SHARED[:2], r"row 1: the conversation has no turn of the role 'assistant'"),
        ([SHARED[1], TALK[2]], r"row 1: 'conversations' must be a list of messages with a role .*as ShareGPT"),
        ([], r"row 1: the conversation has no turn of the role 'assistant'"),
    ],
)
def test_what_is_wrong_in_a_conversation_is_named_with_row_and_turn(tmp_path, chat_folder, turns, words):
    with pytest.raises(ConfigError, match=r"a.jsonl, " + words):
        built(tmp_path, [{"conversations": turns}], FileTokenizer(chat_folder))


def test_ids_are_those_of_the_whole_text_at_once(tmp_path, chat_folder):
    tokenizer = FileTokenizer(chat_folder)
    split = built(tmp_path, [{"messages": TALK}], tokenizer)
    from meshwright.data.turns import load_template

    text = load_template("", chat_folder).render(TALK[:5])
    assert split.tokens.tolist() == tokenizer.encode(text).tolist()


def test_an_answer_that_later_turns_rewrite_becomes_an_example_of_its_own(tmp_path):
    (tmp_path / "t.jinja").write_text(FORGETFUL)
    talk = [{**m, "thought": "hm"} if m["role"] == "assistant" else m for m in TALK]
    split = built(tmp_path, [{"messages": talk}], ByteTokenizer(), template=str(tmp_path / "t.jinja"))
    assert learnt(split, ByteTokenizer()) == [["(hm)Four, I say.;"], ["(hm)Five.;"]]
    texts = [
        ByteTokenizer().decode(split.tokens[a:b]) for a, b in zip(split.offsets[:-1], split.offsets[1:], strict=True)
    ]
    assert texts[1].count("(hm)") == 1, "the earlier answer stands as the model will see it"


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        (
            {"messages": TALK},
            {},
            r"conversations cannot be written out without a chat template, and bytes have none",
        ),
        ({"messages": TALK}, {"template": "none.jinja"}, "data.template = .none.jinja. does not exist"),
        (
            {"messages": "hello"},
            {"task": "chat", "template": "{root}/t.jinja"},
            r"row 1: 'messages' must be a list of messages",
        ),
        (
            {"messages": TALK[:2]},
            {"template": "{root}/t.jinja"},
            r"row 1: the conversation has no turn of the role 'assistant'",
        ),
        (
            {"messages": TALK},
            {"template": "{root}/bad.jinja"},
            r"row 1: the chat template refuses it \(.*no system turn",
        ),
        (
            {"messages": TALK},
            {"template": "{root}/odd.jinja"},
            r"row 1: the chat template writes an answer differently from how it asks",
        ),
        (
            {"prompt": "a", "response": "b"},
            {"task": "completion"},
            r"row 1: the column 'completion' is missing.*'prompt', 'response'",
        ),
        (
            {"text": "a"},
            {"template": "{root}/t.jinja"},
            "the task is 'text', whose documents have no turns",
        ),
        ({"prompt": "a", "completion": "b"}, {"template": "own"}, "bytes have none: name the model"),
    ],
)
def test_refusals_teach(tmp_path, row, options, words):
    (tmp_path / "t.jinja").write_text(CHATML)
    (tmp_path / "bad.jinja").write_text("{{ raise_exception('no system turn') }}")
    (tmp_path / "odd.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}?{% endif %}"
    )
    with pytest.raises(ConfigError, match=words):
        built(
            tmp_path,
            [row],
            ByteTokenizer(),
            **{key: value.replace("{root}", str(tmp_path)) for key, value in options.items()},
        )


def test_text_files_have_no_records(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match="data.task = 'chat' needs records"):
        prepare(SourceOptions((str(tmp_path / "a.txt"),), task="chat"), ByteTokenizer(), 0, tmp_path / "cache")


def test_a_tokenizer_that_cannot_say_where_its_tokens_stand_is_refused(tmp_path):
    class Bare:
        vocab_size, end_of_document, fingerprint = 257, 256, "bare"
        encode, decode = ByteTokenizer().encode, ByteTokenizer().decode

    with pytest.raises(
        ConfigError, match="the task 'completion' must know which text each id stands for.*has no encode_aligned"
    ):
        built(tmp_path, [{"prompt": "a", "completion": "b"}], Bare())


def test_too_long_a_conversation_meets_the_policy(tmp_path):
    rows = [{"prompt": "p" * n, "completion": "c" * m} for n, m in ((1, 1), (2, 2), (2, 38))]
    split = built(tmp_path, rows, ByteTokenizer())
    with pytest.raises(
        ConfigError,
        match=r"1 of the 3 conversations .* longer than data.seq_len = 8 \(the longest has 41.*data.too_long ="
        r" 'truncate' or 'skip'",
    ):
        split.n_samples(8)
    cut = Whole("training", split.tokens, split.offsets, split.is_learnt, "truncate")
    left_out = Whole("training", split.tokens, split.offsets, split.is_learnt, "skip")
    assert (cut.n_samples(8), left_out.n_samples(8), left_out.n_too_long(8)) == (2, 1, 1)
    assert cut.rows(np.array([0]), 8)["tokens"].tolist() == [[*b"ppcccccc"]]


def test_best_fit_fills_bins_and_loses_nothing():
    members, bounds = best_fit(np.array([5, 3, 8, 2, 1, 0, 7]), 8)
    bins = [sorted(members[a:b].tolist()) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    assert bins == [[2], [4, 6], [0, 1], [3]], "8 | 7 + 1 | 5 + 3 | 2; the empty item is nowhere"


def test_padding_is_a_document_of_its_own_without_labels():
    split = Whole(
        "training", np.array([1, 2, 3, 4, 5]), np.array([0, 3, 5]), np.array([0, 1, 1, 0, 1], dtype=np.uint8), padding=9
    )
    rows = split.rows(np.array([0]), 7)
    assert rows["tokens"].tolist() == [[1, 2, 3, 4, 5, 9, 9]]
    assert rows["labels"].tolist() == [[2, 3, IGNORE_INDEX, 5, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]]
    assert rows["positions"].tolist() == [[0, 1, 2, 0, 1, 0, 1]] and rows["document_ids"].tolist() == [
        [0, 0, 0, 1, 1, -1, -1]
    ]


def test_a_special_token_of_the_template_decides_the_corpus(tmp_path, chat_folder):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((chat_folder / "tokenizer.json").read_bytes())
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    ends = {}
    for token in ("<|endoftext|>", "</turn>"):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": token}))
        tokenizer = FileTokenizer(folder)
        ends[token] = tokenizer.spell_out(built(tmp_path, [{"messages": TALK[1:3]}], tokenizer).tokens)
    assert ends["<|endoftext|>"].endswith("Four, I say.<|endoftext|>") and ends["</turn>"].endswith(
        "Four, I say.</turn>"
    )


CALLS = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['content'] is none %}CALL {{ m['call'] | tojson }}{% else %}{{ m['content'] }}{% endif %};{% endfor %}"
)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_call_of_a_tool_without_content_is_written_as_the_template_says(tmp_path, kind):
    (tmp_path / "t.jinja").write_text(CALLS + "{% if add_generation_prompt %}<assistant>{% endif %}")
    rows = [
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "call": {"city": "Rome"}},
            ]
        },
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "call": {"n": 3}}]},
    ]
    if kind == "jsonl":
        split = built(tmp_path, rows, ByteTokenizer(), template=str(tmp_path / "t.jinja"))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
        options = SourceOptions((str(tmp_path / "a.parquet"),), template=str(tmp_path / "t.jinja"))
        split = open_corpus(prepare(options, ByteTokenizer(), 0, tmp_path / "cache").folder).training
    assert learnt(split, ByteTokenizer()) == [['CALL {"city": "Rome"};'], ['CALL {"n": 3};']], (
        "keys of other rows are not filled in"
    )


def test_no_part_of_an_answer_is_lost_where_a_prompt_ends_in_a_blank(tmp_path):
    (tmp_path / "text.txt").write_text("The answer: yes. The answer: no. " * 50)
    tokenizer = trained_bpe(
        "bpe:300", [SourceOptions((str(tmp_path / "text.txt"),))], tmp_path / "bpe", lambda line: None
    )
    split = built(tmp_path, [{"prompt": "The answer: ", "completion": "yes"}], tokenizer)
    assert "yes" in "".join(learnt(split, tokenizer)[0]) and not split.is_learnt[0]


def test_half_a_character_is_a_bad_row(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "cut \\ud83d"}\n{"text": "whole"}\n')
    with pytest.raises(ConfigError, match=r"row 1: the text holds half a character .* at character 4\)"):
        prepare(str(tmp_path / "a.jsonl"), ByteTokenizer(), 0, tmp_path / "cache")
    options = SourceOptions((str(tmp_path / "a.jsonl"),), on_bad_row="skip")
    assert open_corpus(prepare(options, ByteTokenizer(), 0, tmp_path / "cache").folder).training.n_documents == 1
