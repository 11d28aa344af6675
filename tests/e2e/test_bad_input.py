"""What cannot be done is refused in a sentence, before anything is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from e2e_runs import Job, tree

from meshwright.cli.main import main
from meshwright.training.run.occupancy import occupied

pytestmark = pytest.mark.all

CONFIG, REFUSED = 2, 3
MOE = {"model.moe.n_experts": 4, "model.moe.top_k": 2}


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.fixture(scope="module")
def run(pool, tiny, tmp_path_factory) -> Path:
    """The folder of a run that bad words are said about."""
    config = tiny | {"model.size": "debug", "steps": 1, "out": str(tmp_path_factory.mktemp("out"))}
    return pool.run(Job(config), world=1, timeout=60)[0].folder


@pytest.fixture
def refused(flags, tmp_path, run, capsys, monkeypatch):
    """``refused(status, changes, *words)``: the command says no, in one sentence with those words, and leaves no
    trace.
    """
    monkeypatch.chdir(tmp_path)

    def attempt(status, changes, *words, argv=None):
        before = tree(run)
        for place in ({}, {"run": str(run)}) if argv is None else ({},):
            asked = ["train", *flags({"process.count": 1} | place | changes)] if argv is None else argv
            ended = main(asked)
            said = capsys.readouterr().err
            assert ended == status, said
            assert "Traceback" not in said and all(word in said for word in words), said
            assert said.startswith("meshwright: ") and len(said.splitlines()) == 1, said
            assert not (tmp_path / "runs").exists() and tree(run) == before
        return said

    return attempt


def test_a_file_with_a_mistake_is_refused_by_line(refused, tmp_path):
    unknown = write(tmp_path / "unknown.toml", "steps = 2\n[data]\nseqlen = 32\n")
    refused(CONFIG, None, f"{unknown}:3", "'data.seqlen'", "Did you mean 'data.seq_len'?", argv=["train", unknown])
    wrong = write(tmp_path / "wrong.toml", '[batch]\n\nglobal_batch = "8"\n')
    refused(
        CONFIG, None, f"{wrong}:3", 'batch.global_batch = "8" is text; expected a whole number', argv=["train", wrong]
    )
    torn = write(tmp_path / "torn.toml", "steps = \n")
    refused(CONFIG, None, f"{torn}:1", "not valid TOML", argv=["train", torn])
    refused(CONFIG, None, "none.toml: no such file", argv=["train", "none.toml"])


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--stpes=3", ["unknown key 'stpes'", "Did you mean 'steps'?"]),
        ("--data.seqlen=3", ["unknown key 'data.seqlen'", "Did you mean 'data.seq_len'?"]),
        ("--lr=0.1", ["unknown key 'lr'", "belongs elsewhere: optimizer.lr"]),
        ("--steps.x=1", ["steps", "expected a whole number"]),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest(refused, flag, words):
    refused(CONFIG, None, *words, argv=["train", flag])


@pytest.mark.first
@pytest.mark.parametrize(
    ("flag", "word"), [("--steps=many", "--steps"), ("--schedule.kind=cosin", "'cosine'"), ("--layout.tp", "tp")]
)
def test_a_flag_of_the_wrong_type_is_refused_by_name(flag, word, refused):
    refused(CONFIG, None, word, argv=["train", flag])


HALF = "techniques.precision.compute"
SUMS = "techniques.precision.reduce"


@pytest.mark.first("2-changes19-words19")
@pytest.mark.parametrize(
    ("status", "changes", "words"),
    [
        (CONFIG, {"steps": 0}, ["steps = 0", "1 or more"]),
        (CONFIG, {"optimizer.lr": "nan"}, ["optimizer.lr = nan"]),
        (CONFIG, {"schedule.warmup_steps": 6}, ["schedule.warmup_steps = 6", "run of 6 steps", "at most 5"]),
        (CONFIG, {"name": "a/b"}, ["name = 'a/b'"]),
        (CONFIG, {"model.size": "debugg"}, ["model.size = 'debugg'", "Did you mean 'debug'?"]),
        (CONFIG, {"model.dim": 65}, ["model.dim = 65", "model.n_heads = 4"]),
        (CONFIG, {"data.seq_len": 512}, ["data.seq_len = 512", "model.max_seq_len = 256"]),
        (CONFIG, {"layout.dp_shard": 3, "process.count": 4}, ["dp_shard = 3", "world size 4", "layout"]),
        (CONFIG, {"layout.tp": -1}, ["dp_shard, tp", "open (-1)"]),
        (
            CONFIG,
            {"batch.global_batch": 6, "process.count": 4},
            ["batch.global_batch = 6", "4 data ranks", "such as 4 or 8"],
        ),
        (CONFIG, {"layout.cp": 64, "process.count": 64, "data.seq_len": 32}, ["layout.cp = 64", "rows of 32"]),
        (CONFIG, {"techniques.context_parallel_method": "ring"}, ["context_parallel_method = ring", "layout.cp = 1"]),
        (
            REFUSED,
            {"layout.cp": 2, "layout.dp_shard": 1, "process.count": 2, **MOE, "model.moe.capacity_factor": 1.0},
            ["model.moe.capacity_factor = 1.0 with layout.cp = 2", "or layout.cp = 1"],
        ),
        (
            REFUSED,
            {"layout.cp": 2, "layout.ep": 2, "layout.dp_shard": 1, "process.count": 2, **MOE}
            | {"techniques.data_parallel": "ddp"},
            ["techniques.data_parallel = ddp does not go with layout.ep = 2"],
        ),
        (
            CONFIG,
            {"layout.pp": 4, "process.count": 4},
            ["layout.pp = 4 with 1f1b makes 4 stages", "Legal here: layout.pp = 1 to 2"],
        ),
        (CONFIG, {"layout.ep": 3}, ["layout.ep = 3", "Legal here"]),
        (CONFIG, {"layout.ep": 2, "process.count": 2}, ["layout.ep = 2", "no module of stacked experts"]),
        (REFUSED, {SUMS: "float16"}, [SUMS + " = float16", "would lose small gradients"]),
        (CONFIG, {HALF: "bf61"}, [HALF, "Did you mean 'bf16'?"]),
        (CONFIG, {"techniques.freeze": ["("]}, ["techniques.freeze[0] = '('", "no regular expression"]),
        (CONFIG, {"techniques.freeze": ["xyzzy"]}, ["techniques.freeze", "'xyzzy' matches no parameter"]),
        (CONFIG, {"techniques.freeze": ["."]}, ["all 25 parameters", "techniques.freeze"]),
        (
            CONFIG,
            {"techniques.data_parallel": "ddp", "process.count": 2, "layout.dp_shard": 2},
            ["techniques.data_parallel = ddp"],
        ),
        (
            CONFIG,
            {"optimizer.overrides": "[{pattern='xyzzy'}]"},
            ["optimizer.overrides", "'xyzzy' matches no trainable parameter"],
        ),
        (CONFIG, {"checkpoint.host_memory": 1e6}, ["checkpoint.host_memory = 1e+06", "of this host: set at most"]),
        (
            CONFIG,
            {"checkpoint.memory_every": 2, "checkpoint.asynchronous": False},
            ["checkpoint.memory_every keeps states while training goes on: set checkpoint.asynchronous = true"],
        ),
        (
            CONFIG,
            {"checkpoint.memory_every": 2, "checkpoint.memory_folder": "/proc/none"},
            [
                "checkpoint.memory_folder = /proc/none: /proc/none is no folder that can be written",
                "checkpoint.memory_every = 0",
            ],
        ),
        (CONFIG, {"sample.prompt": ""}, ["sample.prompt = ''"]),
        (CONFIG, {"data.tokenizer": "gpt2"}, ["data.tokenizer = 'gpt2'", "Nothing is downloaded"]),
        (CONFIG, {"data.source": ["nowhere"]}, ["data.source: 'nowhere' does not exist"]),
        (CONFIG, {"data.source": ["stdlb"]}, ["data.source: 'stdlb'", "Did you mean 'stdlib'?"]),
    ],
)
def test_a_value_that_cannot_be_is_refused(refused, status, changes, words):
    refused(status, changes, *words)


def test_text_that_cannot_be_trained_on_is_refused(refused, tmp_path):
    (tmp_path / "empty folder").mkdir()
    refused(CONFIG, {"data.source": ["empty folder"]}, "data.source", "empty folder holds no text file")
    refused(CONFIG, {"data.source": [write(tmp_path / "empty.txt", "")]}, "data.source", "all of 0 bytes")
    latin = write(tmp_path / "latin.txt", "café".encode("latin-1"))
    refused(CONFIG, {"data.source": [latin]}, "data.source", "latin.txt is not UTF-8: byte 0xe9 at offset 3")
    short = write(tmp_path / "short.txt", "hello")
    refused(
        CONFIG, {"data.source": [short]}, "the training split has 5 tokens", "data.seq_len = 32", "seq_len from 1 to 5"
    )


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(refused, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, 300)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w1"))
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", '{"eos_token": "<|endoftext|>"}')
    wanted = {"data.tokenizer": str(tmp_path / "tokenizer.json"), "model.vocab_size": 257}
    refused(CONFIG, wanted, "300 token ids", "model.vocab_size = 257", "Set model.vocab_size = 300")
    refused(
        CONFIG,
        {"data.tokenizer": write(tmp_path / "other.json", "{}")},
        "data.tokenizer",
        "other.json is not a tokenizer.json",
    )


def test_a_loss_of_pairs_needs_pairs_and_whole_ones(refused, tmp_path):
    refused(CONFIG, {"dpo.beta": 0.5}, "dpo.beta = 0.5", "give records with the columns chosen and rejected")
    refused(CONFIG, {"dpo.label_smoothing": 0.5}, "dpo.label_smoothing = 0.5", "0 or more and below 0.5")
    pairs = write(tmp_path / "a.jsonl", '{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 40)
    refused(
        CONFIG, {"data.source": [pairs], "batch.microbatch": 1}, "batch.microbatch = 1 rows would part the two rows"
    )
    refused(CONFIG, {"data.source": [pairs], "batch.global_batch": 5}, "each pair of answers takes 2", "like 4 or 6")
    torn = write(
        tmp_path / "b.jsonl", '{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "chosen": "b"}'
    )
    refused(CONFIG, {"data.source": [torn]}, "b.jsonl, row 2: the column 'rejected' is missing")


@pytest.mark.parametrize("key", ["out", "run"])
def test_a_file_in_the_place_of_the_folder_is_refused_and_kept(flags, tmp_path, capsys, key):
    taken = write(tmp_path / "taken", "years of work")
    assert main(["train", *flags({key: taken, "process.count": 1})]) == CONFIG
    said = capsys.readouterr().err
    assert said.startswith(f"meshwright: {key} = {taken}: cannot make") and len(said.splitlines()) == 1
    assert Path(taken).read_text() == "years of work"


def test_the_refusal_of_a_worker_reaches_the_terminal_as_a_sentence_and_a_status(meshwright, flags, tmp_path):
    asked = flags({"process.count": 2, "layout.dp_shard": 2, "techniques.reshard_after_forward": 7})
    done = meshwright("train", *asked)
    assert done.status == CONFIG and re.fullmatch(r"meshwright \S+ · demo · 2 processes · \S+\n", done.out)
    assert done.err.startswith("meshwright: techniques.reshard_after_forward = 7") and len(done.err.splitlines()) == 1
    assert not (tmp_path / "runs").exists() and not list((tmp_path / "tmp").glob("meshwright-*"))


def test_a_second_job_in_a_runs_folder_is_refused_and_harms_nothing(refused, run, monkeypatch):
    monkeypatch.setattr("meshwright.training.run.occupancy._PATIENCE_SEC", 0.1)
    with occupied(run):
        refused(
            CONFIG,
            None,
            "is being trained by another job (process",
            "leave run empty",
            argv=["train", str(run), "--process.count=1", "--steps=5"],
        )
