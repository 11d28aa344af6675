"""Public shapes of records, and what each is to a tokenizer, computed by transformers and the published texts alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import test_record_shapes as shapes

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def own(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


# --- compute ids and mask of a text or a conversation by a tokenizer's own calls


def ended(tokenizer, ids: list[int]) -> list[int]:
    return ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def own_pair(tokenizer, prompt: str, answer: str) -> tuple[list[int], list[bool]]:
    """The ids of a prompt with its answer, and which are learnt: from the first token that ends in the answer.

    A token's end is that of its own text: blanks that it strips behind itself are not its characters.
    """
    text = prompt + answer
    made = tokenizer(text, return_offsets_mapping=True)
    ids, offsets = made["input_ids"], made["offset_mapping"]
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    before = next(i for i in range(len(ids)) if ids[i : i + len(bare)] == bare)
    strips = {i for i, token in tokenizer.added_tokens_decoder.items() if token.rstrip}
    mask = [False] * before
    for i, (begin, end) in zip(bare, offsets[before : before + len(bare)], strict=True):
        end = begin + len(text[begin:end].rstrip()) if i in strips else end
        mask.append(max(end - 1, begin) >= len(prompt))
    return ended(tokenizer, ids), mask + [True] * (len(ended(tokenizer, ids)) - len(mask))


def answers_of(tokenizer, messages: list[dict], learnt=None, **others) -> list[bool]:
    """The mask of a conversation by its texts alone: the tokens that each answer adds to its prompt."""
    mask: list[bool] = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            asked = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, return_dict=False, **others)
            whole = tokenizer.apply_chat_template(messages[: i + 1], return_dict=False, **others)
            n = next((n for n, (a, b) in enumerate(zip(asked, whole, strict=False)) if a != b), len(asked))
            mask += [False] * (n - len(mask)) + [learnt is None or i in learnt] * (len(whole) - n)
    return mask


def own_mask(tokenizer, messages, learnt, **others) -> tuple[list[int], list[bool]]:
    """The ids of a conversation and which are learnt, by transformers alone."""
    whole = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **others)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    learnt = answers if learnt is None else learnt
    if any(whole["assistant_masks"]):
        runs = np.cumsum(np.diff(whole["assistant_masks"], prepend=0) == 1)
        mask = np.array(whole["assistant_masks"]).astype(bool)
        return whole["input_ids"], (mask & np.isin(runs - 1, [answers.index(i) for i in learnt])).tolist()
    return whole["input_ids"], answers_of(tokenizer, messages, learnt, **others)


def published(record: dict) -> tuple[str, str]:
    """An Alpaca record's prompt and answer, in the words of Stanford's data (Taori et al. 2023, column ``text``)."""
    asked = "Below is an instruction that describes a task"
    if record.get("input"):
        asked += ", paired with an input that provides further context"
    asked += ". Write a response that appropriately completes the request.\n\n"
    parts = {"Instruction": record["instruction"]} | ({"Input": record["input"]} if record.get("input") else {})
    asked += "".join(f"### {name}:\n{text}\n\n" for name, text in parts.items())
    return f"{asked}### Response:\n", record["output"]


# --- list public shapes of records: each is read as these conversations, or refused


@dataclass(frozen=True)
class Shape:
    """A record, and what each of its examples is: messages, or a prompt with its answer, or text alone.

    Attributes:
        learnt: turns that are learnt; None: all of the assistant.
        tools: those of the template; ``calls``: whether turns call tools.
        says: what a refusal names behind the row; "" where the record is read.
    """

    record: dict[str, Any]
    read: tuple[Any, ...] = ()
    learnt: list[int] | None = None
    tools: list | None = None
    calls: bool = False
    says: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def refusal(self, template: str) -> str:
        """What a refusal names of the record under a tokenizer's template; "" where the record is read."""
        if self.tools and "tools" not in template:
            return r".*the record has tools.*data.ignore = \['tools'\]"
        if self.calls and "tool_calls" not in template:
            return "turn 2: the turn has tool_calls"
        return self.says


def shape(record, *conversations, learnt=None, tools=None, calls=False, **options) -> Shape:
    return Shape(record, conversations, learnt, tools, calls, options=options)


def refused(record, says: str) -> Shape:
    return Shape(record, says=says)


def _shapes():
    """Public shapes of records: each is read as these conversations, or refused."""
    ask, more, said, turn = shapes.ASK, shapes.MORE, shapes.said, shapes.turn
    system, *answers = turn("system", "Be brief"), *(turn("assistant", text) for text in ("Four", "Five", "Six"))
    four, five, six = answers
    talk, longer = [ask, four], [ask, four, more, six]
    pair = [[ask, four], [ask, five]]
    plain = {"instruction": "Two and two?", "input": "", "output": "Four. "}
    given = {**plain, "input": "Be brief"}
    history = {"history": [["2+2?", "Four"]]}
    asked = [turn("user", "Two and two?"), turn("assistant", "Four. ")]
    gpt = [said("human", "2+2?"), said("gpt", "Four")]
    arrow = {"tool_calls": None, "name": None}
    called = [shapes.CALL, turn("tool", "Four"), four]
    parts = turn("assistant", [{"type": "text", "text": "Fo"}, {"type": "text", "text": "ur"}])
    asking = turn("user", [{"type": "text", "text": "2+2?"}])
    add = {"type": "function", "function": {"name": "add", "arguments": {"b": 3}}}
    other = [turn("assistant", None, tool_calls=[add]), turn("tool", "Six"), six]
    spelt = turn("user", "Two<|im_end|> and </s>?")
    yield from {
        "alpaca": shape(plain, published(plain)),
        "alpaca, null input": shape({**plain, "input": None}, published(plain)),
        "alpaca, input": shape(given, published(given)),
        "alpaca, no input": shape({**plain, "text": "Four. "}, published(plain)),
        "alpaca, history": shape({**plain, **history}, [ask, four, *asked]),
        "alpaca, history, last": shape({**plain, **history}, [ask, four, *asked], learnt=[3], learn="last"),
        "alpaca, history left out": shape({**plain, **history}, published(plain), ignore=("history",)),
        "alpaca, empty history": shape({**plain, "history": []}, asked),
        "alpaca, system": shape({**plain, "system": "Be brief"}, [system, *asked]),
        "alpaca, all": shape({**plain, "system": "Be brief", **history}, [system, ask, four, *asked]),
        "alpaca, tools": shape({**plain, "system": "", "tools": json.dumps(TOOLS)}, asked, tools=TOOLS),
        "ShareGPT": shape({"conversations": gpt}, talk),
        "ShareGPT, id": shape({"id": "x", "conversations": gpt}, talk),
        "ShareGPT, system": shape({"system": "Be brief", "conversations": gpt}, [system, *talk]),
        "ShareGPT, system turn": shape({"conversations": [said("system", "Be brief"), *gpt]}, [system, *talk]),
        "ShareGPT, weights": shape(
            {"conversations": [*gpt[:1], said("gpt", "Four", weight=0), said("human", "3+3?"), said("gpt", "Six")]},
            longer,
            learnt=[3],
        ),
        "ShareGPT, as JSON": shape({"conversations": json.dumps(gpt)}, talk),
        "ShareGPT, tools": shape({"conversations": gpt, "tools": json.dumps(TOOLS)}, talk, tools=TOOLS),
        "ShareGPT, unknown speaker": refused(
            {"conversations": [said("bard", "Five"), *gpt]}, "turn 1: nobody knows the role of 'bard'"
        ),
        "ShareGPT, function_call": refused(
            {"conversations": [gpt[0], said("function_call", "{}"), gpt[1]]}, "turn 2: .* the role of 'function_call'"
        ),
        "ShareGPT, null value": refused(
            {"conversations": [gpt[0], said("gpt", None)]}, "turn 2: its value must be text"
        ),
        "messages": shape({"messages": talk}, talk),
        "messages, two answers": shape({"messages": longer}, longer),
        "messages, last": shape({"messages": longer}, longer, learnt=[3], learn="last"),
        "messages, question behind": shape({"messages": [*talk, more]}, talk),
        "messages, system": shape({"messages": [system, *talk]}, [system, *talk]),
        "messages, developer": shape({"messages": [turn("developer", "S"), *talk]}, [turn("developer", "S"), *talk]),
        "messages, system beside": shape({"system": "Be brief", "messages": talk}, [system, *talk]),
        "messages as JSON": shape({"messages": json.dumps(talk)}, talk),
        "messages of Arrow": shape({"messages": [{**each, **arrow} for each in talk]}, talk),
        "messages, parts": shape({"messages": [turn("user", [{"type": "text", "text": "2+2?"}]), four]}, talk),
        "messages, weight": shape({"messages": [ask, {**four, "weight": 0}, more, six]}, longer, learnt=[3]),
        "messages, the last not": shape({"messages": [ask, four, more, {**six, "weight": 0}]}, talk),
        "messages, train": shape({"messages": [ask, {**four, "train": False}, more, six]}, longer, learnt=[3]),
        "messages, tools": shape({"messages": talk, "tools": TOOLS}, talk, tools=TOOLS),
        "messages, call": shape({"messages": [ask, *called], "tools": TOOLS}, [ask, *called], tools=TOOLS, calls=True),
        "messages, call of no tools": shape({"messages": [ask, *called]}, [ask, *called], calls=True),
        "messages, other arguments": shape(
            {"messages": [ask, *called, more, *other]}, [ask, *called, more, *other], calls=True
        ),
        "messages, all in parts": shape({"messages": [asking, parts]}, talk),
        "messages, call at the end": shape({"messages": [ask, called[0]]}, [ask, called[0]], calls=True),
        "messages, tool's answer": shape(
            {"messages": [ask, four, turn("tool", "Four"), six]}, [ask, four, turn("tool", "Four"), six]
        ),
        "messages, answer in parts": shape({"messages": [ask, parts]}, talk),
        "messages, special token spelt": shape({"messages": [spelt, four]}, [spelt, four]),
        "messages, null answer": refused({"messages": [ask, turn("assistant", None)]}, "turn 2: .*null"),
        "messages, empty answer": refused({"messages": [ask, turn("assistant", "")]}, "turn 2: .* answer is empty"),
        "messages, half a weight": refused({"messages": [ask, {**four, "weight": 0.5}]}, "turn 2: weight = 0.5"),
        "messages, no answer": refused({"messages": [ask]}, ".* no turn of the role 'assistant'"),
        "messages, context beside": refused(
            {"messages": talk, "context": "Sums"}, r"the column 'context' .*data.ignore = \['context'\]"
        ),
        "ultrachat": shape({"prompt": "2+2?", "prompt_id": "x", "messages": talk}, talk),
        "conversation": shape({"conversation": talk}, talk, column="conversation"),
        "completion": shape({"prompt": "Two and", "completion": " two"}, ("Two and", " two")),
        "completion, blank": shape({"prompt": "Two and ", "completion": "two"}, ("Two and ", "two")),
        "completion, lines": shape({"prompt": "Two?\n", "completion": "Four\n"}, ("Two?\n", "Four\n")),
        "completion, special token spelt": shape(
            {"prompt": "Two<|im_end|> and ", "completion": "two"}, ("Two<|im_end|> and ", "two")
        ),
        "completion, prompt ends in one": shape(
            {"prompt": "Two<|im_end|>", "completion": " two"}, ("Two<|im_end|>", " two")
        ),
        "completion, answer begins with one": shape(
            {"prompt": "Two ", "completion": "<|im_start|>two"}, ("Two ", "<|im_start|>two")
        ),
        "completion, empty": refused({"prompt": "Two", "completion": ""}, "the answer is empty"),
        "completion, a number": refused({"prompt": "Two", "completion": 2}, "the column 'completion' must hold text"),
        "completion, system": refused(
            {"prompt": "Two", "completion": "two", "system": "Be brief"}, r"the column 'system' .* = \['system'\]"
        ),
        "completion of messages": shape({"prompt": [ask], "completion": [four]}, talk),
        "completion of messages, parts": shape({"prompt": [ask], "completion": [parts]}, talk),
        "completion of messages, earlier": shape({"prompt": longer[:3], "completion": [six]}, longer, learnt=[3]),
        "completion, text and message": shape({"prompt": "2+2?", "completion": [four]}, talk),
        "completion of messages, tools": shape(
            {"prompt": [ask], "completion": [four], "tools": TOOLS}, talk, tools=TOOLS
        ),
        "preference": shape(
            {"prompt": "Two and", "chosen": " two", "rejected": " I"}, ("Two and", " two"), ("Two and", " I")
        ),
        "preference, implicit": shape(
            {"chosen": "\n\nHuman: Two?\n\nAssistant: Four", "rejected": "\n\nHuman: Two?\n\nAssistant: I"},
            ("\n\nHuman: Two?\n\nAssistant: ", "Four"),
            ("\n\nHuman: Two?\n\nAssistant: ", "I"),
        ),
        "preference, the same": refused(
            {"prompt": "Two and", "chosen": " two", "rejected": " two"}, "'chosen' and 'rejected' are the same"
        ),
        "preference of messages, parts": shape({"prompt": [ask], "chosen": [parts], "rejected": [five]}, *pair),
        "preference of messages": shape({"prompt": [ask], "chosen": [four], "rejected": [five]}, *pair),
        "preference of messages, implicit": shape({"chosen": pair[0], "rejected": pair[1]}, *pair),
        "preference, ShareGPT": shape(
            {"conversations": gpt[:1], "chosen": said("gpt", "Four"), "rejected": said("gpt", "Five")}, *pair
        ),
        "preference, system": shape(
            {"system": "Be brief", "prompt": [ask], "chosen": [four], "rejected": [five]},
            *([system, *side] for side in pair),
        ),
        "ultrafeedback": shape(
            {"prompt": "2+2?", "chosen": pair[0], "rejected": pair[1], "messages": talk, "score_chosen": 9.0}, *pair
        ),
        "preference, earlier": shape(
            {"prompt": longer[:3], "chosen": "Six", "rejected": "Five"}, longer, [*longer[:3], five], learnt=[3]
        ),
        "text": shape({"text": "Two and two? Four."}, "Two and two? Four."),
    }.items()


SHAPES = dict(_shapes())
