"""Tokenizers made on the spot, one for each way in which a text becomes ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BEGUN = "{{ bos_token }}" + CHATML
ENDLESS = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n{% else %}"
    "{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSIDE = MARKED.replace("{{ m['content'] }}<|im_end|>{% endgen", "{{ m['content'][:-2] }}{% endgen").replace(
    "{% endgeneration %}\n", "{% endgeneration %}{{ m['content'][-2:] }}<|im_end|>\n"
)
"""Its marks end before an answer's last two characters, which may be within a token."""
CALLS = (
    "{{ m['content'] or '' }}{% for call in m.tool_calls or [] %}"
    "({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}"
)
CALLING = CHATML.replace("{{ m['content'] }}", CALLS)
"""It writes the calls of tools."""
TEXTS = ["Two and two? Four, I say. And three? Five. user assistant system Be brief: Hello there, yes\n"] * 4


def _byte_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=330, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    )
    return made


def _byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 and Gemma have it."""
    letters = sorted({*"".join(TEXTS), "▁"} - {" "})
    words = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *letters, "▁T", "wo", "▁Two"]
    merges = [("▁", "T"), ("w", "o"), ("▁T", "wo")]
    vocabulary = {word: i for i, word in enumerate(words)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(list(SPECIAL))
    return made


def _unigram() -> tokenizers.Tokenizer:
    """As sentencepiece has it, with a blank before the first word."""
    letters = sorted({*"".join(TEXTS), "▁", "<", ">", "|", "_", "{", "}", '"', ":", "[", "]"} - {" "})
    pieces = [(word, 0.0) for word in SPECIAL] + [(letter, -5.0) for letter in letters]
    pieces += [(word, -6.0) for word in ("▁Two", "▁and", "▁I", "▁say", "▁three", "▁Be", "▁yes", "▁user")]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens(list(SPECIAL))
    return made


def _around(made: tokenizers.Tokenizer, single: str) -> tokenizers.Tokenizer:
    tokens = [(text, made.token_to_id(text)) for text in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    return made


def _stripping() -> tokenizers.Tokenizer:
    made = _byte_level()
    made.add_special_tokens(
        [
            AddedToken("<|im_start|>", lstrip=True, special=True),
            AddedToken("<|im_end|>", rstrip=True, special=True),
            AddedToken("</s>", lstrip=True, rstrip=True, special=True),
        ]
    )
    return made


def _with_words() -> tokenizers.Tokenizer:
    made = _byte_level()
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("brief", single_word=True)])
    return made


WAYS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "begins": (lambda: _around(_byte_level(), "<s> $A"), {"bos_token": "<s>", "eos_token": "</s>"}, CHATML),
    "ends": (lambda: _around(_byte_level(), "$A </s>"), {"eos_token": "</s>"}, CHATML),
    "begins and ends": (
        lambda: _around(_byte_level(), "<s> $A </s>"),
        {"bos_token": "<s>", "eos_token": "</s>"},
        CHATML,
    ),
    "neither": (_byte_level, {"eos_token": "<|im_end|>"}, CHATML),
    "strips": (_stripping, {"eos_token": "</s>"}, CHATML),
    "strips its end": (_stripping, {"eos_token": "<|im_end|>", "bos_token": "<s>"}, CHATML),
    "bytes": (lambda: _around(_byte_fallback(), "<s> $A"), {"bos_token": "<s>", "eos_token": "</s>"}, CHATML),
    "a class of its own": (
        lambda: _around(_byte_fallback(), "<s> $A"),
        {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer", "add_bos_token": True},
        CHATML,
    ),
    "unigram": (lambda: _around(_unigram(), "<s> $A"), {"bos_token": "<s>", "eos_token": "</s>"}, CHATML),
    "added words": (_with_words, {"eos_token": "</s>"}, CHATML),
    "no end in the template": (
        lambda: _around(_byte_level(), "<s> $A"),
        {"bos_token": "<s>", "eos_token": "</s>"},
        ENDLESS,
    ),
    "marks": (lambda: _around(_byte_level(), "<s> $A"), {"bos_token": "<s>", "eos_token": "</s>"}, MARKED),
    "marks inside tokens": (_byte_level, {"eos_token": "</s>"}, INSIDE),
    "begins twice": (lambda: _around(_byte_level(), "<s> $A"), {"bos_token": "<s>", "eos_token": "<|im_end|>"}, BEGUN),
    "calls tools": (lambda: _around(_byte_level(), "<s> $A"), {"bos_token": "<s>", "eos_token": "</s>"}, CALLING),
    "special tokens are text": (
        lambda: _around(_byte_level(), "<s> $A"),
        {"bos_token": "<s>", "eos_token": "</s>", "split_special_tokens": True},
        CHATML,
    ),
}


def save_way(name: str, folder: Path) -> Path:
    """Write one of the tokenizers to a folder, with its settings and its chat template."""
    make, settings, template = WAYS[name]
    folder.mkdir(parents=True, exist_ok=True)
    make().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return folder
