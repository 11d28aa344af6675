"""Public shapes of records: which text is read and which is learnt, or the sentence of a refusal."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright.cli.main import main
from meshwright.core.errors import ConfigError
from meshwright.data import load_tokenizer
from meshwright.data.cache import open_corpus, prepare
from meshwright.data.formats import BadRow, first_record
from meshwright.data.options import SourceOptions
from meshwright.data.packing import IGNORE_INDEX
from meshwright.data.tasks import choose_task
from meshwright.data.tokenizers import ByteTokenizer
from meshwright.training.config import Config
from meshwright.training.feed import build_feed
from meshwright.training.views.progress import Progress

TEMPLATE = (
    "{% if tools %}[tools {{ tools | length }}]{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] or '' }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }}){% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NONE = ""
PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }};"
    "{% endgeneration %}{% else %}{{ m['content'] }};{% endif %}{% endfor %}"
)


def turn(role, content, **others):
    return {"role": role, "content": content, **others}


def said(speaker, value, **others):
    return {"from": speaker, "value": value, **others}


ASK, FOUR, FIVE, MORE, SIX = (
    turn("user", "2+2?"),
    turn("assistant", "4"),
    turn("assistant", "5"),
    turn("user", "3+3?"),
    turn("assistant", "6"),
)
CALL = turn("assistant", None, tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}])
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def read(tmp_path, record, template=TEMPLATE, **options):
    """Write each example as its text, with what is learnt in [[ ]], and the task's name before them."""
    template = options.pop("template", template)
    (tmp_path / "t.jinja").write_text(template)
    talks = "output" in record and {"system", "history"} & {*record} - {*options.get("ignore", ())}
    lists = [value for value in record.values() if isinstance(value, list)] if talks or "output" not in record else []
    lists = [] if template is NONE else [*lists, *(talks or ())]
    if lists or isinstance(record.get("chosen"), dict) or "messages" in record or "[{" in record.get("chosen", ""):
        options["template"] = str(tmp_path / "t.jinja")
    task = choose_task(SourceOptions(**options), ByteTokenizer(), record)
    examples = task.examples_in(record, "row 1", tmp_path)
    return task.name, *("".join(f"[[{text}]]" if learnt else text for text, learnt in each) for each in examples)


READ = {
    "prompt and completion": ({"prompt": "2+2=", "completion": "4"}, "completion", "2+2=[[4]]"),
    "alpaca, no input": ({"instruction": "Add.", "input": "", "output": "4"}, "alpaca", "### Response:\n[[4]]"),
    "alpaca, history": (
        {"instruction": "3+3?", "input": "now", "output": "6", "history": [["2+2?", "4"], ["And?", "So"]]},
        "alpaca",
        "<user>2+2?;<assistant>[[4;]]<user>And?;<assistant>[[So;]]<user>3+3?\nnow;<assistant>[[6;]]",
    ),
    "alpaca, system": (
        {"instruction": "2+2?", "input": "", "output": "4", "history": [], "system": "S"},
        "alpaca",
        "<system>S;<user>2+2?;<assistant>[[4;]]",
    ),
    "alpaca, history as JSON": (
        {"instruction": "3+3?", "output": "6", "system": "", "history": json.dumps([["2+2?", "4"]])},
        "alpaca",
        "<user>2+2?;<assistant>[[4;]]<user>3+3?;<assistant>[[6;]]",
    ),
    "alpaca, its text too": ({"instruction": "Add.", "output": "4", "text": "Add. 4"}, "alpaca", "Response:\n[[4]]"),
    "messages": ({"messages": [ASK, FOUR]}, "chat", "<user>2+2?;<assistant>[[4;]]"),
    "ultrachat": ({"prompt": "2+2?", "prompt_id": "x", "messages": [ASK, FOUR]}, "chat", "?;<assistant>[[4;]]"),
    "messages as JSON": ({"messages": json.dumps([ASK, FOUR])}, "chat", "<user>2+2?;<assistant>[[4;]]"),
    "system beside": ({"system": "S", "messages": [ASK, FOUR]}, "chat", "<system>S;<user>2+2?;<assistant>[[4;]]"),
    "system twice": ({"system": "S", "messages": [turn("system", "S"), ASK, FOUR]}, "chat", "<system>S;<user>2+2?;"),
    "ShareGPT": ({"conversations": [said("human", "2+2?"), said("gpt", "4")]}, "chat", "<assistant>[[4;]]"),
    "ShareGPT, weight": (
        {
            "conversations": [
                said("human", "2+2?"),
                said("gpt", "5", weight=0),
                said("human", "No"),
                said("gpt", "4", weight=1),
            ]
        },
        "chat",
        "<user>2+2?;<assistant>5;<user>No;<assistant>[[4;]]",
    ),
    "weight": (
        {"messages": [ASK, {**FIVE, "weight": 0}, MORE, SIX]},
        "chat",
        "<assistant>5;<user>3+3?;<assistant>[[6;]]",
    ),
    "train": ({"messages": [ASK, {**FIVE, "train": False}, MORE, SIX]}, "chat", "5;<user>3+3?;<assistant>[[6;]]"),
    "the last is not learnt": ({"messages": [ASK, FOUR, MORE, {**SIX, "weight": 0}]}, "chat", "<assistant>[[4;]]"),
    "tools": (
        {"tools": TOOLS, "messages": [ASK, CALL, turn("tool", "4"), FOUR]},
        "chat",
        "[tools 1]<user>2+2?;<assistant>[[(add);]]",
    ),
    "tools as JSON": ({"tools": json.dumps(TOOLS), "messages": [ASK, FOUR]}, "chat", "[tools 1]<user>"),
    "parts": (
        {"messages": [turn("user", [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]), FOUR]},
        "chat",
        "<user>2+2?;",
    ),
    "assistant first": (
        {"messages": [turn("assistant", "Hi"), ASK, FOUR]},
        "chat",
        "<assistant>[[Hi;]]<user>2+2?;<assistant>[[4;]]",
    ),
    "conversational completion": (
        {"prompt": [ASK, FOUR, MORE], "completion": [SIX]},
        "completion",
        "<assistant>4;<user>3+3?;<assistant>[[6;]]",
    ),
    "preference of text": ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "preference", "2+2=[[4]]", "2+2=[[5]]"),
    "hh-rlhf": (
        {"chosen": "\n\nHuman: 2+2?\n\nAssistant: four", "rejected": "\n\nHuman: 2+2?\n\nAssistant: five"},
        "preference",
        "Assistant: [[four]]",
        "Assistant: [[five]]",
    ),
    "preference of messages": ({"chosen": [ASK, FOUR], "rejected": [ASK, FIVE]}, "preference", "[[4;]]", "[[5;]]"),
    "ultrafeedback": (
        {
            "prompt": "2+2?",
            "chosen": [ASK, FOUR],
            "rejected": [ASK, FIVE],
            "messages": [ASK, FOUR],
            "score_chosen": 9.0,
        },
        "preference",
        "<user>2+2?;<assistant>[[4;]]",
        "<user>2+2?;<assistant>[[5;]]",
    ),
    "a conversation with two answers": (
        {"conversations": [said("human", "2+2?")], "chosen": said("gpt", "4"), "rejected": said("gpt", "5")},
        "preference",
        "<user>2+2?;<assistant>[[4;]]",
        "<user>2+2?;<assistant>[[5;]]",
    ),
    "earlier turns": (
        {"messages": [ASK, FOUR, MORE], "chosen": "6", "rejected": "7"},
        "preference",
        "<assistant>4;<user>3+3?;<assistant>[[6;]]",
        "<assistant>4;<user>3+3?;<assistant>[[7;]]",
    ),
    "a whole conversation beside two answers of text": (
        {"messages": [ASK, FOUR], "chosen": "4", "rejected": "5"},
        "preference",
        "<user>2+2?;<assistant>[[4;]]",
        "<user>2+2?;<assistant>[[5;]]",
    ),
    "a ShareGPT of the worse answer": (
        {
            "conversations": [said("human", "2+2?"), said("gpt", "5")],
            "chosen": said("gpt", "4"),
            "rejected": said("gpt", "5"),
        },
        "preference",
        "<user>2+2?;<assistant>[[4;]]",
        "<user>2+2?;<assistant>[[5;]]",
    ),
    "a prompt that ends with an answer": (
        {"prompt": [ASK, FOUR], "chosen": [FOUR], "rejected": [FIVE]},
        "preference",
        "<user>2+2?;<assistant>[[4;]]",
        "<user>2+2?;<assistant>[[5;]]",
    ),
    "answers that are JSON, by a template": (
        {"prompt": [ASK], "chosen": '{"sum": 4}', "rejected": "[4]"},
        "preference",
        '<assistant>[[{"sum": 4};]]',
        "<assistant>[[[4];]]",
    ),
    "pairs of messages as JSON": (
        {"chosen": json.dumps([ASK, FOUR]), "rejected": json.dumps([ASK, FIVE])},
        "preference",
        "<user>2+2?;<assistant>[[4;]]",
        "<assistant>[[5;]]",
    ),
    "a completion that is a list, by a template": (
        {"prompt": [turn("user", "Sort 2, 1")], "completion": "[1, 2]"},
        "completion",
        "<user>Sort 2, 1;<assistant>[[[1, 2];]]",
    ),
    "a completion that repeats its prompt": (
        {"prompt": [ASK], "completion": [ASK, FOUR]},
        "completion",
        "<user>2+2?;<assistant>[[4;]]",
    ),
    "ShareGPT, calls": (
        {"conversations": [said("human", "2+2?"), said("gpt", "Wait", tool_calls=CALL["tool_calls"])]},
        "chat",
        "<assistant>[[Wait(add);]]",
    ),
    "preference with system": (
        {"system": "S", "prompt": [ASK], "chosen": [FOUR], "rejected": [FIVE]},
        "preference",
        "<system>S;<user>",
        "S",
    ),
    "text": ({"text": "once", "url": "u"}, "text", "[[once]]"),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_read_and_learnt(name, tmp_path):
    record, *expected = READ[name]
    found = read(tmp_path, record)
    assert len(found) == len(expected)
    assert all(want in got for want, got in zip(expected, found, strict=True)), found


REFUSED = {
    "alpaca's history": (
        {"instruction": "Go on.", "output": "4", "history": [["Hi", "Ho"]]},
        {"template": NONE},
        "'history'.*data.ignore.*A chat template .* writes 'system' and 'history' as turns",
    ),
    "alpaca's system": (
        {"instruction": "Add.", "output": "4", "system": "Be brief"},
        {"template": NONE},
        "'system'.*data.ignore",
    ),
    "a history of no pairs": (
        {"instruction": "Add.", "output": "4", "history": [["Hi"]]},
        {},
        "'history' must be a list of pairs of text",
    ),
    "a system that the template drops": (
        {"messages": [turn("system", "S"), ASK, FOUR]},
        {"template": PLAIN.replace("messages %}", "messages if m['role'] != 'system' %}")},
        "turn 1: the chat template does not write the system's 'S'",
    ),
    "a pair's system that the template drops": (
        {"system": "S", "prompt": [ASK], "chosen": [FOUR], "rejected": [FIVE]},
        {"template": PLAIN.replace("messages %}", "messages if m['role'] != 'system' %}")},
        "turn 1: the chat template does not write the system's 'S'",
    ),
    "a tool that the template drops": (
        {"messages": [ASK, CALL, turn("tool", "4!"), FOUR]},
        {"template": TEMPLATE.replace("messages %}", "messages if m['role'] != 'tool' %}")},
        "turn 3: the chat template does not write the tool's '4!'",
    ),
    "a tool whose few words stand elsewhere": (
        {"messages": [ASK, CALL, turn("tool", "2"), FOUR]},
        {"template": TEMPLATE.replace("messages %}", "messages if m['role'] != 'tool' %}")},
        "turn 3: the chat template does not write the tool's '2'",
    ),
    "a call of a function": (
        {"messages": [ASK, {**FOUR, "function_call": {"name": "add"}}]},
        {},
        "turn 2: the turn has function_call, and the chat template writes none.*take the key out",
    ),
    "reasoning that the template drops": (
        {"messages": [ASK, {**FOUR, "reasoning_content": "2 and 2"}]},
        {},
        "turn 2: the turn has reasoning_content",
    ),
    "another answer behind the prompt": (
        {"messages": [ASK, SIX], "chosen": "4", "rejected": "5"},
        {},
        "'messages' ends with an answer that is neither 'chosen' nor 'rejected'.*: take that turn out$",
    ),
    "an empty side of text": (
        {"prompt": "2+2=", "chosen": "4", "rejected": " "},
        {},
        "'rejected' is empty, so an immediate end",
    ),
    "an empty side of messages": (
        {"prompt": [ASK], "chosen": [turn("assistant", "")], "rejected": [FIVE]},
        {},
        "'chosen' is empty, so an immediate end",
    ),
    "broken messages": (
        {"prompt": [ASK], "completion": '[{"role": "assistant", "cont'},
        {},
        "must be a list of messages",
    ),
    "marks of no answer in a pair": (
        {"prompt": [ASK], "chosen": [FOUR], "rejected": [FIVE]},
        {
            "template": MARKED.replace("{% generation %}", "{% generation %}{% endgeneration %}{% if true %}").replace(
                "{% endgeneration %}{% else", "{% endif %}{% else"
            )
            + "{% if add_generation_prompt %}<assistant>{% endif %}"
        },
        "marks nothing of the answer",
    ),
    "two systems": ({"system": "S", "messages": [turn("system", "T"), ASK, FOUR]}, {}, "another|leave one of them out"),
    "null": ({"messages": [ASK, turn("assistant", None)]}, {}, "turn 2: the content must be text.*null"),
    "a number": ({"messages": [turn("user", 5), FOUR]}, {}, "turn 1: the content must be text.*int"),
    "an image part": ({"messages": [turn("user", [{"type": "audio", "path": "a"}]), FOUR]}, {}, "turn 1: the content"),
    "a robot": ({"messages": [turn("robot", "2+2?"), FOUR]}, {}, "the role 'robot'"),
    "an empty answer": ({"messages": [ASK, turn("assistant", " ")]}, {}, "turn 2: the assistant's answer is empty"),
    "an empty completion": ({"prompt": "2+2=", "completion": ""}, {}, "the answer is empty"),
    "half a weight": ({"messages": [ASK, {**FOUR, "weight": 0.5}]}, {}, "weight = 0.5 .* must be 0 or 1"),
    "nothing to learn": (
        {"messages": [ASK, {**FOUR, "train": False}]},
        {},
        "no answer of the conversation is to be learnt",
    ),
    "calls under a plain template": ({"messages": [ASK, CALL]}, {"template": PLAIN}, "has tool_calls"),
    "tools under a plain template": (
        {"tools": TOOLS, "messages": [ASK, FOUR]},
        {"template": PLAIN},
        "the record has tools",
    ),
    "two tasks": ({"messages": [ASK, FOUR], "prompt": "p", "completion": "c"}, {}, "fit the tasks chat and completion"),
    "another prompt": ({"prompt": "3+3?", "messages": [ASK, FOUR]}, {}, "'prompt'.*data.ignore"),
    "another conversation": (
        {"messages": [MORE], "chosen": [ASK, FOUR], "rejected": [ASK, FIVE], "note": "n"},
        {"ignore": ("note",)},
        r"on purpose: data.ignore = \['note', 'messages'\]$",
    ),
    "an input that is no text": ({"instruction": "Add.", "input": {"a": 1}, "output": "4"}, {}, "must hold text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(name, tmp_path):
    record, options, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, record, **options)


def test_what_a_tool_returned_may_be_written_as_text_of_json(tmp_path):
    template = TEMPLATE.replace(
        "m['content'] or ''", "m['content'] | tojson if m['role'] == 'tool' else m['content'] or ''"
    )
    record = {"messages": [ASK, CALL, turn("tool", 'é "4"'), FOUR]}
    assert read(tmp_path, record, template=template)[1].count('<tool>"é \\"4\\"";') == 1


def test_a_null_in_the_first_record_decides_no_task(tmp_path):
    rows = [{"messages": None}, {"messages": [ASK, FOUR]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    options = {"template": str(tmp_path / "t.jinja"), "on_bad_row": "skip"}
    prepared = prepare(SourceOptions((str(tmp_path / "a.jsonl"),), **options), ByteTokenizer(), 0.0, tmp_path / "cache")
    assert prepared.meta.training.n_documents == 1
    assert first_record([tmp_path / "a.jsonl"], "jsonl") == rows[1]


def test_answers_that_begin_with_their_prompt_are_counted(tmp_path):
    rows = [{"prompt": a, "completion": b} for a, b in (("2+2= ", "2+2= 4"), ("3+3= ", "6"), (" ", "4"))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = prepare(SourceOptions((str(tmp_path / "a.jsonl"),)), ByteTokenizer(), 0.0, tmp_path / "cache")
    (note,) = prepared.meta.notes
    assert note.startswith("answers that begin with their whole prompt") and "once more: 1; where" in note


def test_a_column_is_left_out_on_purpose(tmp_path):
    record = {"instruction": "Go on.", "output": "4", "history": [["Hi", "Ho"]]}
    assert read(tmp_path, record, ignore=("history",))[1].endswith("[[4]]")
    both = {"messages": [ASK, FOUR], "prompt": "p", "completion": "c"}
    assert read(tmp_path, both, ignore=("prompt", "completion")) == ("chat", "<user>2+2?;<assistant>[[4;]]")


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize(
    ("learn", "expected"),
    [
        ("answers", "<user>2+2?;<assistant>[[4;]]<user>3+3?;<assistant>[[6;]]"),
        ("last", "<user>2+2?;<assistant>4;<user>3+3?;<assistant>[[6;]]"),
        ("all", "[[<user>2+2?;<assistant>4;<user>3+3?;<assistant>6;]]"),
    ],
)
def test_which_turns_are_learnt(learn, expected, template, tmp_path):
    assert read(tmp_path, {"messages": [ASK, FOUR, MORE, SIX]}, template, learn=learn) == ("chat", expected)


def test_a_history_is_learnt_as_data_learn_has_it(tmp_path):
    record = {"instruction": "3+3?", "output": "6", "history": [["2+2?", "4"]]}
    found = read(tmp_path, record, learn="last")
    assert found == ("alpaca", "<user>2+2?;<assistant>4;<user>3+3?;<assistant>[[6;]]")


def test_marks_of_a_pair_are_learnt_and_no_more(tmp_path):
    template = MARKED.replace("}};{% endgeneration %}", "}}{% endgeneration %};")
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    found = read(tmp_path, {"chosen": [ASK, FOUR, MORE, SIX], "rejected": [ASK, FOUR, MORE, FIVE]}, template)
    asked = "<user>2+2?;<assistant>4;<user>3+3?;<assistant>"
    assert found == ("preference", f"{asked}[[6]];", f"{asked}[[5]];")


def test_marks_of_a_template_and_of_turns(tmp_path):
    found = read(tmp_path, {"messages": [ASK, {**FIVE, "weight": 0}, MORE, SIX]}, MARKED)
    assert found[1].replace("[[]]", "") == "<user>2+2?;<assistant>5;<user>3+3?;<assistant>[[6;]]"


def test_all_of_a_prompt_is_learnt(tmp_path):
    assert read(tmp_path, {"prompt": "2+2=", "completion": "4"}, learn="all") == ("completion", "[[2+2=]][[4]]")
    with pytest.raises(ConfigError, match="data.learn = 'last' is of conversations"):
        read(tmp_path, {"prompt": "2+2=", "completion": "4"}, learn="last")
    with pytest.raises(BadRow, match="turn 2 is marked not to be"):
        read(tmp_path, {"messages": [ASK, {**FOUR, "weight": 0}, MORE, SIX]}, learn="all")


def test_what_is_cut_before_its_answer_is_left_out(tmp_path):
    """Of rows of 24 tokens, a long question leaves none for its answer."""
    rows = [{"prompt": "a" * n, "completion": "yes, it is so"} for n in (4, 20, 24, 40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceOptions((str(tmp_path / "a.jsonl"),), too_long="truncate")
    split = open_corpus(prepare(source, ByteTokenizer(), 0.0, tmp_path / "cache").folder, "truncate").training
    assert (split.n_samples(24), split.n_too_long(24), split.n_unlearnt(24)) == (2, 3, 2)
    labels = split.rows(np.arange(2), 24)["labels"]
    assert all((row != IGNORE_INDEX).any() for row in labels)


def test_a_pair_is_left_out_with_its_longer_answer(tmp_path):
    rows = [{"prompt": "a" * n, "chosen": "yes", "rejected": "no"} for n in (4, 30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceOptions((str(tmp_path / "a.jsonl"),), too_long="truncate")
    split = open_corpus(prepare(source, ByteTokenizer(), 0.0, tmp_path / "cache").folder, "truncate").training
    assert (split.n_samples(24), split.n_unlearnt(24)) == (2, 2)


def test_columns_that_are_not_read_are_counted(tmp_path):
    rows = [{"prompt": "a", "completion": "b", "id": 1}, {"prompt": "a", "completion": "c", "id": 2, "url": "u"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceOptions((str(tmp_path / "a.jsonl"),))
    notes = open_corpus(prepare(source, ByteTokenizer(), 0.0, tmp_path / "cache").folder, "refuse").meta.notes
    assert notes == ["the task 'completion' reads prompt, completion; columns not read: id (in 2), url (in 1)"]


def test_ignored_columns_that_no_record_has_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b", "id": 1}) + "\n")
    source = SourceOptions((str(tmp_path / "a.jsonl"),), ignore=("id", "id,url"))
    notes = open_corpus(prepare(source, ByteTokenizer(), 0.0, tmp_path / "cache").folder, "refuse").meta.notes
    assert notes == ["data.ignore names ['id,url'], which no record has"]


@pytest.mark.parametrize("too_long", ["skip", "truncate"])
def test_inspect_and_train_count_alike(tmp_path, capsys, too_long):
    """Of chats, some of them bad and some too long, and of a text: the same words with the same numbers."""
    chats = [{"messages": [ASK, turn("assistant", "so it is" * (1 + n % 4))]} for n in range(30)] + [{"messages": []}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    (tmp_path / "a.txt").write_text("once upon a time " * 40)
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    data: dict = {"template": str(tmp_path / "t.jinja"), "seq_len": 50, "too_long": too_long, "on_bad_row": "skip"}
    data |= {"validation_fraction": 0.2, "cache": str(tmp_path / "cache")}
    for name in ("a.jsonl", "a.txt"):
        given = data if name == "a.jsonl" else data | {"template": "", "too_long": "refuse", "on_bad_row": "refuse"}
        assert main(["inspect", str(tmp_path / name), *(f"--data.{key}={value}" for key, value in given.items())]) == 0
        lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
        seen = next(text for title, text in lines if title == "data")
        config = Config.from_dict({"data": given | {"source": [str(tmp_path / name)]}, "batch": {"global_batch": 2}})
        feed = build_feed(config, load_tokenizer("bytes"), 0, 1, Progress())
        assert feed.description.startswith(f"{seen} · 50 tokens per row") and " held out" in seen
        said = " ".join(feed.notes)
        assert ("1 row of" in said and "is left out (data.on_bad_row = 'skip')" in said) == (name == "a.jsonl")


def test_one_refusal_names_bad_rows_and_those_that_are_too_long(tmp_path):
    rows = [{"prompt": "a", "completion": "b" * n} for n in (3, 60, 3, 0, 70)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict = {"source": (str(tmp_path / "a.jsonl"),)}
    with pytest.raises(ConfigError) as refused:
        prepare(SourceOptions(**given), ByteTokenizer(), 0.0, tmp_path / "cache", seq_len=24)
    said = str(refused.value)
    assert said.startswith(f"3 rows of {tmp_path / 'a.jsonl'} cannot be used, for 2 reasons:\n- row 4: ")
    assert "- row 2: longer than data.seq_len = 24 (also row 5)\n" in said
    assert "set data.on_bad_row = 'skip' and data.too_long = 'skip';" in said
    given |= {"on_bad_row": "skip", "too_long": "skip"}
    prepared = prepare(SourceOptions(**given), ByteTokenizer(), 0.0, tmp_path / "cache", seq_len=24)
    assert open_corpus(prepared.folder, "skip").training.n_samples(24) == 1
    with pytest.raises(ConfigError, match="row 4: the answer is empty.*data.on_bad_row = 'skip'; mesh"):
        prepare(SourceOptions((given["source"]), too_long="skip"), ByteTokenizer(), 0.0, tmp_path / "b", seq_len=24)


def test_turns_behind_the_last_learnt_answer_are_left_out_and_counted(tmp_path, capsys):
    rows = [[ASK, FOUR], [ASK, FOUR, MORE], [ASK, FOUR, MORE, {**SIX, "weight": 0}]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    source = [str(tmp_path / "a.jsonl"), f"--data.template={tmp_path / 't.jinja'}"]
    assert main(["inspect", *source]) == 0
    words = "3 turns at the end of 2 conversations, behind the last answer that is learnt, left out"
    assert words in capsys.readouterr().out
    options = SourceOptions((source[0],), template=str(tmp_path / "t.jinja"))
    assert words in " ".join(prepare(options, ByteTokenizer(), 0.0, tmp_path / "cache").meta.notes)


def test_inspect_counts_records_that_are_copies_of_others(tmp_path, capsys):
    rows = [{"prompt": "a", "completion": n} for n in "bcbdcb"]
    for kept, words in ((rows, "3 documents are exact copies of others"), (rows[:3], "1 document is an exact copy of")):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        assert main(["inspect", str(tmp_path / "a.jsonl")]) == 0
        assert words in capsys.readouterr().out


def test_inspect_says_what_becomes_of_each_record(tmp_path, capsys):
    answers = ["Hello there", None, "Bye, and good night to all of you"]
    rows = [{"messages": [ASK, turn("assistant", answer)], "id": n} for n, answer in enumerate(answers)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    argv = [f"--data.template={tmp_path / 't.jinja'}", "--data.seq_len=40", "--data.too_long=truncate"]
    assert main(["inspect", str(tmp_path / "a.jsonl"), *argv]) == 0
    said_lines = capsys.readouterr().out
    for words in (
        "chat (by the columns of the first record), which reads messages, system, tools",
        "records    3; 1 of them cannot be used:",
        "row 2, turn 2: the content must be text",
        "data       ",
        "[[ ]]      is read, and not learnt",
        "1 of 2 documents is longer than data.seq_len = 40: cut short, 0 of them left out",
        "columns not read: id (in 3)",
        "[[<user>2+2?;<assistant>]]Hello there;",
    ):
        assert words in said_lines, said_lines
