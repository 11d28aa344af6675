"""Advice that an error or a notice prints names what exists, and works when it is followed."""

from __future__ import annotations

import ast
import copy
import json
import re
import shlex
import tomllib
from dataclasses import replace
from functools import cache
from importlib.metadata import requires
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.advice import (
    FLAG,
    HOUSE,
    LEFT_OUT,
    MARKUP,
    Way,
    advices,
    faults,
    flags_of,
    is_followed,
    legal,
    links,
    messages,
    name_of,
    strings,
    trees,
    verbs,
    ways,
)
from support.followed import found_in
from test_followed_calls import FOLLOWED as BY_CALL
from test_followed_commands import FOLLOWED as BY_COMMAND
from test_rules import CASES, attempt, with_own_loss

from meshwright import ConfigError, Layout, UnsupportedError
from meshwright.cli.arguments import read_launch
from meshwright.cli.main import main
from meshwright.core.config import to_dict
from meshwright.core.errors import MeshwrightError, MissingExtraError
from meshwright.data import SourceOptions, load_tokenizer, open_corpus, prepare
from meshwright.introspection.source import as_module
from meshwright.training.build import build_schedule
from meshwright.training.config import Config
from meshwright.training.feed import build_feed, refuse_contradictions
from meshwright.training.launch import process_count
from meshwright.training.views.progress import Progress


def planned(model, layout: Layout, techniques, changes: Way):
    """Plan a request with some of its keys changed."""
    techniques = copy.deepcopy(techniques) if isinstance(techniques, dict) else to_dict(techniques)
    for key, value in changes:
        section, _, name = key.partition(".")
        if section == "layout":
            layout = replace(layout, **{name: value})
        elif section == "model":
            model = replace(model, moe=replace(model.moe, **{name.removeprefix("moe."): value}))
        else:
            *path, last = [section, *name.split(".")] if section == "adapters" else name.split(".")
            table = techniques
            for part in path:
                table = table.setdefault(part, {})
            if value is LEFT_OUT:
                table.pop(last, None)
            else:
                table[last] = value
    return attempt(model if "adapters" in techniques else measured(model), layout, techniques)


@cache
def measured(model):
    """A model that is built once, so that each question about it is measured once (adapters change a module)."""
    return as_module(model)


def refusal(*request) -> str:
    try:
        planned(*request)
    except (ConfigError, UnsupportedError) as error:
        return str(error)
    return ""


def followed(*request, known: set[str]) -> set[str]:
    """Follow every advice of a refused request, each line's with one of every other line's, and name the advices.

    Of values that are listed as legal, one is enough: others may need what the request has not.
    """
    lines = refusal(*request, ()).splitlines()
    found: set[str] = set()
    offered = [ways(line) for line in lines]
    for number, line in enumerate(lines):
        others = list(product(*(other for n, other in enumerate(offered) if n != number and other)))
        for way in offered[number]:
            if name_of(way) <= known | found:
                continue
            together = [(*way, *(one for other in rest for one in other)) for rest in others]
            answers = (refusal(*request, changes) for changes in together[:6])
            assert "" in answers, (
                f"{line}\nFollowed by {way}, this is refused in turn: {refusal(*request, together[0])}"
            )
            found |= name_of(way)
        if values := legal(line):
            answers = [refusal(*request, way) for way in values[:2]]
            assert "" in answers and line not in answers, f"{line}\nNone of these is legal: {answers}"
    return found


BY_RULE = {
    "async_tensor_fits": [
        "layout.tp = …",
        "techniques.async_tensor_parallel = false",
        "techniques.sequence_parallel = true",
    ],
    "checkpointing_companions": [
        "techniques.activation_checkpointing = full",
        "techniques.activation_checkpointing = memory_budget",
        "techniques.activation_checkpointing = selective_op",
        "techniques.async_tensor_parallel = false",
        "techniques.compile = false",
    ],
    "checkpointing_keys": ["techniques.activation_checkpointing = selective_op", "techniques.checkpoint_keep, by 'it'"],
    "checkpointing_matches": ["techniques.activation_checkpointing = full"],
    "context_companions": ["layout.cp = …", "model.moe.capacity_factor = …"],
    "ddp_fits": ["layout.dp_replicate = …", "layout.dp_shard = …", "techniques.data_parallel = fully_shard"],
    "experts_companions": [
        "model.moe.capacity_factor = …",
        "techniques.data_parallel = fully_shard",
        "techniques.sequence_parallel = false",
        "techniques.zero_stage = …",
    ],
    "experts_fit": ["layout.ep = …"],
    "decisions_are_of_a_row": ["layout.dp_shard = …", "layout.pp = …"],
    "float8_companions": ["techniques.async_tensor_parallel = false"],
    "float8_gathering": [
        "layout.dp_shard = …",
        "techniques.float8 = tensorwise",
        "techniques.float8_all_gather = false",
        "techniques.reshard_after_forward = true",
    ],
    "float8_requested": [
        "layout.dp_shard = …",
        "techniques.float8 = none",
        "techniques.float8 = tensorwise",
        "techniques.float8_all_gather = false",
        "techniques.float8_filter, by 'it'",
        "techniques.precision.compute = bfloat16",
    ],
    "half_precision": [
        "techniques.precision.compute = float16",
        "techniques.precision.loss_scale, by 'it'",
        "techniques.precision.master = float32",
        "techniques.precision.output = float32",
        "techniques.precision.reduce = float32",
    ],
    "lengths_of_whole_rows": ["adapters.kind = lora", "layout.tp = …"],
    "one_dtype": ["techniques.precision.master = float32", "techniques.precision.master = float64"],
    "optimizer_fits": [
        "techniques.optimizer_state = full",
        "techniques.precision.master = bfloat16",
        "techniques.precision.master = float32",
        "techniques.stochastic_rounding, by 'it'",
    ],
    "parameters_are_reached": ["techniques.sequence_parallel = false"],
    "pipeline_companions": [
        "techniques.compile = false",
        "techniques.data_parallel = fully_shard",
        "techniques.pipeline_schedule = 1f1b",
        "techniques.pipeline_schedule = interleaved_1f1b",
        "techniques.sync_grad_accum = false",
        "techniques.zero_stage = …",
    ],
    "pipeline_requested": ["techniques.layers_per_stage, by 'it'", "techniques.pipeline_cuts, by 'it'"],
    "postponed_all_reduce": ["techniques.sync_grad_accum = true"],
    "quantize_companions": [
        "techniques.async_tensor_parallel = false",
        "techniques.float8 = none",
        "techniques.quantize_frozen = none",
    ],
    "resharding": ["techniques.reshard_after_forward = true"],
    "rows_stand_alone": ["layout.cp = …", "layout.dp_replicate = …", "layout.dp_shard = …", "layout.tp = …"],
    "stacked_adapters": ["techniques.compile = false"],
    "state_stays": ["techniques.activation_checkpointing = none"],
    "tensor_companions": ["techniques.data_parallel = fully_shard"],
    "units_fit": ["techniques.blocks_per_unit, by 'it'"],
    "zero_fits": [
        "layout.dp_replicate = …",
        "layout.dp_shard = …",
        "techniques.data_parallel = fully_shard",
        "techniques.data_parallel, by 'it'",
        "techniques.zero_stage = auto",
        "techniques.zero_stage = …",
        "techniques.zero_stage, by 'it'",
    ],
}
"""Advices of each rule of planning that are followed."""


@pytest.mark.parametrize("rule", sorted({case[0] for case in CASES}))
def test_advice_of_a_rule_is_followed(rule):
    found: set[str] = set()
    for name, model, layout, techniques, *_ in CASES:
        if name == rule and model is not with_own_loss:  # no forward, so nothing can be measured of it
            found |= followed(model, layout, techniques, known=found)
    assert found >= set(BY_RULE.get(rule, ()))


def test_names_in_every_message_exist():
    wrong = [
        f"{place}:{line}: {', '.join(found)}: {text}"
        for place in trees()
        for line, text in strings(place)
        if not MARKUP.search(text) and (found := faults(text))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Set techniques.sequence_paralel = false", "techniques.sequence_paralel is no key"),
        ("set data.on_bad_row = 'drop'", "on_bad_row"),
        ("Set techniques.precision.master = fp33", "fp33"),
        ("Set techniques.float8 = colwise.", "expected one of"),
        ("Set steps, or batch.global_batch = 0", "out of range"),
        ("write one with: meshwright traces CONFIG", "no such verb"),
        ("write one with: meshwright verify CONFIG --write-traces FILE", "does not take --write-traces"),
        ("add --dry-runs", "no verb takes --dry-runs"),
        ("Set techniques={'optimiser': 'muon'}", "unknown key 'optimiser'"),
        ("Use parallelize(model, mash=None)", "takes no mash"),
        ("call meshwright.store(model)", "does not exist"),
        ("give los_fn=", "no function takes los_fn="),
        ("see docs/precisions.md", "is not there"),
    ],
)
def test_names_that_do_not_exist_are_found(text, words):
    assert words in " ".join(faults(text))


@pytest.mark.parametrize("verb", [verb for verb in verbs() if verb != "completion"])
def test_a_verb_speaks_of_flags_that_it_takes(verb):
    said = {flag for _, text in strings(f"cli/{verb}.py") for flag in FLAG.findall(text) if "sbatch" not in text}
    assert said <= flags_of(verb) | {"--layout", "--process", "--data"}


@pytest.mark.follows("pip install")
def test_every_extra_that_is_missed_can_be_installed():
    extras = tomllib.loads((HOUSE.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    calls = [
        (f"{place}:{node.lineno}", node)
        for place, parts in trees().items()
        for node in parts
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "MissingExtraError"
    ]
    assert len(calls) > 15
    for place, call in calls:
        package, extra = (str(one.value) if isinstance(one, ast.Constant) else "" for one in call.args[1:3])
        if extra:
            brought = [need for line in extras[extra] for need in requires(re.split(r"[>\[]", line)[0]) or ()]
            assert any(line.startswith(package) for line in [*extras[extra], *brought]), f"{place}: {package}"
        error = str(MissingExtraError("it", package or "it", extra))
        command = found_in(
            "which is not installed. Install it with: .*pip (install .*)", error
        )  # or uv's "pip install"
        named = {line.name for line in map(Requirement, shlex.split(command)[1:])}  # as pip reads them
        assert named and named <= {
            package or "it",
            *(Requirement(line).name for lines in extras.values() for line in lines),
        }


CONFIGS = [
    (["--optimizer.kind=schedule_free_adamw", "--schedule.kind=cosine"], {}),
    (["--optimizer.kind=schedule_free_adamw", "--schedule.kind=constant", "--optimizer.beta1=0"], {}),
    (["--optimizer.kind=sgd", "--optimizer.beta2=0.5"], {}),
    (
        ["--schedule.tokens=1000", "--schedule.warmup_steps=3"],
        {"schedule.warmup_tokens": 30, "schedule.warmup_steps": LEFT_OUT},
    ),
    (["--schedule.warmup_tokens=30"], {"schedule.tokens": 1000}),
    (["--schedule.warmup_tokens=30"], {"schedule.warmup_steps": 3, "schedule.warmup_tokens": LEFT_OUT}),
    (
        ["--schedule.tokens=100000", "--schedule.kind=inverse_sqrt", "--schedule.warmup_tokens=0"],
        {"schedule.warmup_tokens": 500},
    ),
    (["--schedule.tokens=100000", "--steps=4", "--schedule.warmup_tokens=99999"], {"schedule.warmup_tokens": 500}),
    (["--steps=10", "--schedule.warmup_steps=20"], {}),
    (
        ["--steps=10", "--schedule.kind=wsd", "--schedule.warmup_steps=8", "--schedule.decay_fraction=0.5"],
        {"schedule.warmup_steps": 1},
    ),
    (
        ["--steps=1000000", "--schedule.kind=wsd", "--schedule.warmup_steps=333333", "--schedule.decay_fraction=0.9"],
        {},
    ),
    (["--model.trust_remote_code=true"], {"model.hf": "folder"}),
    (["--model.hf=folder", "--model.dim=128"], {}),
    (["--adapters.rank=4"], {"model.hf": "folder"}),
    (["--data.streaming=true", "--data.max_epochs=2"], {}),
    (["--layout.dp_shard=4", "--process.count=2"], {"process.count": 0}),
    (["--slurm.tasks_per_node=1", "--slurm.gpus_per_node=2"], {}),
    (["--slurm.time=00:01:00", "--slurm.signal_sec=600"], {"slurm.time": "01:00:00"}),
    (["--slurm.time=00:01:00", "--slurm.signal_sec=600"], {"slurm.signal_sec": 10}),
]
"""Flags that are refused, and values for the keys that the refusal advises without one."""
BY_CONFIG = {
    "optimizer.beta1 = …",
    "optimizer.kind = adamw",
    "model.hf",
    "model.trust_remote_code, by 'it'",
    "data.max_epochs",
    "process.count",
    "--process.count",
    "schedule.decay_fraction = …",
    "schedule.kind = constant",
    "schedule.tokens",
    "schedule.warmup_steps",
    "schedule.warmup_tokens",
    "slurm.gpus_per_node = …",
    "slurm.signal_sec",
    "slurm.tasks_per_node = …",
    "slurm.time",
}


def answer(flags: list[str]) -> str:
    """What a command says of its flags before it reads data or a model; empty if it goes on."""
    try:
        config = read_launch(flags)
        build_schedule(config)
        refuse_contradictions(config)
        process_count(config)
    except MeshwrightError as error:
        return str(error)
    return ""


def changed(flags: list[str], changes: Way) -> list[str]:
    named = {key for key, _ in changes}
    kept = [flag for flag in flags if flag.partition("=")[0].removeprefix("--") not in named]
    return [*kept, *(f"--{key}={value}" for key, value in changes if value is not LEFT_OUT)]


def test_advice_about_a_config_is_followed():
    found: set[str] = set()
    for flags, values in CONFIGS:
        text = answer(flags)
        assert all(key in text for key in values), f"{text}\nnames not all of {', '.join(values)}"
        offered = [*ways(text), *([tuple(values.items())] if values else [])]
        assert offered, f"{flags}: no advice is found in {text!r}"
        for way in offered:
            assert (again := answer(changed(flags, way))) == "", f"{text}\nFollowed by {way}, this is said: {again}"
            found |= name_of(way)
        found |= {name for name in advices(text) if name.removeprefix("--") in values}
    assert found >= BY_CONFIG


RECORDS = [{"prompt": "a", "completion": "b"}] * 3
OTHER = {"instruction": "an instruction", "output": "an output"}
SOURCES: list[tuple[dict[str, object], dict[str, object], dict[str, object]]] = [
    ({"a.jsonl": [*RECORDS, {"prompt": "a"}]}, {}, {}),
    ({"a.jsonl": [{**RECORDS[0], **OTHER}]}, {}, {"data.task": "completion", "data.ignore": tuple(OTHER)}),
    ({"a.jsonl": [{**RECORDS[0], **OTHER}, *RECORDS]}, {"task": "completion"}, {"data.ignore": tuple(OTHER)}),
    ({"a.jsonl": RECORDS}, {"learn": "last"}, {}),
    ({"a.json": '{\n  "rows": 1\n}'}, {}, {}),
    ({"a.txt": "some text", "a.jsonl": RECORDS}, {}, {"data.format": "text"}),
    ({"a.txt": "some text"}, {"seq_len": 999}, {"data.seq_len": 4}),
    ({"a.jsonl": [{"prompt": "a", "completion": "b" * 9}]}, {"seq_len": 4}, {"data.seq_len": 32}),
]
"""Files, the options under which they are refused, and values for the keys that the refusal advises without one."""
BY_SOURCE = {
    "data.format",
    "data.format = text",
    "data.ignore",
    "data.learn, by 'it'",
    "data.on_bad_row = skip",
    "data.seq_len",
    "data.task",
    "data.too_long = truncate",
}


def reading(folder: Path, options: dict) -> str:
    """What reading a folder's files says; empty if it has rows."""
    options = dict(options)
    seq_len = options.pop("seq_len", 3)
    files = sorted(str(path) for path in folder.glob("a.json*"))
    source = files if len(list(folder.iterdir())) == 1 and files else [str(folder)]
    try:
        made = SourceOptions(tuple(source), **options)
        prepared = prepare(made, load_tokenizer("bytes"), 0, folder.parent / "cache")
        assert open_corpus(prepared.folder, made.too_long).training.n_samples(seq_len) > 0
    except MeshwrightError as error:
        return str(error)
    return ""


def test_advice_about_data_is_followed(tmp_path):
    found: set[str] = set()
    for number, (files, options, values) in enumerate(SOURCES):
        folder = tmp_path / str(number) / "files"
        folder.mkdir(parents=True)
        for name, held in files.items():
            lines = "\n".join(map(json.dumps, held)) if isinstance(held, list) else json.dumps(held)
            (folder / name).write_text(held if isinstance(held, str) else lines)
        text = reading(folder, options)
        assert all(key in text for key in values), f"{text}\nnames not all of {', '.join(values)}"
        offered = [*ways(text), *([tuple(values.items())] if values else [])]
        assert offered, f"{files}: no advice is found in {text!r}"
        for way in offered:
            new = {**options, **{key.removeprefix("data."): value for key, value in way}}
            new = {key: value for key, value in new.items() if value is not LEFT_OUT}
            assert (again := reading(folder, new)) == "", f"{text}\nFollowed by {way}, this is said: {again}"
            found |= name_of(way)
        found |= {name for name in advices(text) if name in values}
        found |= {key for key in values if re.search(rf"{key}\b", text)}
    assert found >= BY_SOURCE, BY_SOURCE - found


BY_STREAM = {"data.column = chosen", "data.streaming", "data.task = chat"}
BY_INSPECTION = {"meshwright inspect"}
SIDE = "assistant"


def test_advice_about_a_stream_of_pairs_is_followed(tmp_path):
    ask, good, bad = ({"role": role, "content": text} for role, text in (("user", "2?"), (SIDE, "2"), (SIDE, "3")))
    (tmp_path / "a.jsonl").write_text(json.dumps({"chosen": [ask, good], "rejected": [ask, bad]}) + "\n")
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}")
    given = {"source": [str(tmp_path / "a.jsonl")], "template": str(tmp_path / "t.jinja"), "seq_len": 8}
    given |= {"cache": str(tmp_path / "cache"), "validation_fraction": 0.0}

    def read(changes: dict) -> str:
        try:
            feed = build_feed(Config.from_dict({"data": given | changes}), load_tokenizer("bytes"), 0, 1, Progress())
            return "" if len(next(feed.loader)["tokens"]) else "no rows"
        except MeshwrightError as error:
            return str(error)

    text = read({"streaming": True})
    assert advices(text) >= BY_STREAM
    for changes in ({}, {"streaming": True, "task": "chat", "column": "chosen", "ignore": ["rejected"]}):
        given["seq_len"] = 64
        assert read(changes) == ""


def test_what_a_refusal_says_of_inspect_is_so(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [*RECORDS, {"prompt": "a"}]))
    assert "meshwright inspect lists up to 50 kinds, of the first 10,000 records" in reading(tmp_path, {})
    assert main(["inspect", str(tmp_path / "a.jsonl")]) == 0
    assert "4; 1 of them cannot be used:" in capsys.readouterr().out


FOLLOWED_BY_MARKER = links()
KEYS_PRINTED = {
    "planning/data.py": {"techniques.blocks_per_unit, by 'it'"},
    "planning/pipeline/plan.py": {"techniques.layers_per_stage, by 'it'", "techniques.pipeline_cuts, by 'it'"},
    "planning/quantize.py": {"techniques.quantize_frozen, by 'it'", "techniques.quantize_frozen = none"},
    "planning/recompute.py": {"techniques.checkpoint_keep, by 'it'"},
    "planning/tensor/make.py": {"techniques.async_tensor_parallel = false"},
}
"""Files whose messages name a key that is known when they are printed, and the advices as they are printed."""


def test_every_advice_is_followed():
    known = {
        *BY_CALL,
        *BY_COMMAND,
        *BY_CONFIG,
        *BY_SOURCE,
        *BY_STREAM,
        *BY_INSPECTION,
        *FOLLOWED_BY_MARKER,
        *(name for names in BY_RULE.values() for name in names),
    }
    assert not set().union(*KEYS_PRINTED.values()) - known
    places: dict[str, list[str]] = {}
    for message in messages():
        for name in advices(message.text):
            places.setdefault(name, []).append(message.place)
    printed = {place.partition(":")[0] for place in places.pop("…, by 'it'")}
    assert printed == KEYS_PRINTED.keys(), "name here the keys that these files print"
    left = {name: where for name, where in places.items() if not is_followed(name, known)}
    assert not left, f"follow these in a case of this file, or in a test with the marker follows: {left}"


def test_a_test_that_follows_an_advice_quotes_its_message():
    """Four words in a row of the message, and the name that it advises."""
    said: dict[str, list[str]] = {}
    for message in messages():
        for name in advices(message.text):
            said.setdefault(name, []).append(message.text)
    assert len(FOLLOWED_BY_MARKER) > 30
    for name, tests in FOLLOWED_BY_MARKER.items():
        assert name in said, f"{name} is no longer advised: {list(tests)}"
        for node, source in tests.items():
            words = re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*f?"', "", source))
            assert any(quoted(text, words) for text in said[name]), f"{node} quotes no message that advises {name}"
            bare = re.sub(r"^(meshwright|pip) |[(]?[)]?=?$| = .*|, by 'it'", "", name).rpartition(".")[2]
            assert bare in words, f"{node} does not name {name}"


def quoted(text: str, source: str) -> bool:
    parts = [part.split() for part in re.split("«[^»]*»", text)]
    return any(" ".join(part[at : at + 4]) in source for part in parts for at in range(len(part) - 3))
