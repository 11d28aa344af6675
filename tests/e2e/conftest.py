"""A tiny corpus, a cache of its own, and a config small enough that a run takes a second."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
from e2e_runs import Job, Result, finish, start
from support.families import save_tokenizer, saved

from meshwright.cli.main import main

WORDS = (
    "the a mesh axis rank loss step shard wright plan token batch layer model data of and to in is not every one sum"
).split()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of four text files, 50 KB in all; the smallest is what gets held out."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    for name, size in (("a.txt", 20_000), ("b.md", 16_000), ("c.py", 10_000), ("held.txt", 4_000)):
        text = ""
        while len(text) < size:
            text += " ".join(draw.choices(WORDS, k=draw.randint(3, 12))) + ".\n"
        (folder / name).write_text(text[:size])
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny(corpus, cache) -> dict:
    """What the tests' runs have in common, by dotted keys: little data, and nothing beside training."""
    data = {"data.source": [str(corpus)], "data.cache": str(cache), "data.seq_len": 32, "batch.global_batch": 8}
    quiet = {"validation.every": 0, "checkpoint.every": 0, "logging.tensorboard": "off", "sample.tokens": 0}
    return data | quiet


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A folder of transformers' files: a Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    saved(folder, "llama")
    save_tokenizer(folder)
    return folder


@pytest.fixture
def small(tiny, tmp_path):
    """``small({"batch.microbatch": 2, ...})``: the tiny config as one dict of dotted keys, with those over it."""

    def make(changes=None) -> dict:
        return tiny | {"out": str(tmp_path / "runs"), "steps": 6, "model.size": "debug"} | (changes or {})

    return make


@pytest.fixture
def flags(small):
    """The tiny config as flags, with changes over it."""

    def make(changes=None) -> list[str]:
        words = []
        for key, value in small(changes).items():
            if isinstance(value, list):
                words += [f"--{key}", *value]
            else:
                words.append(f"--{key}={str(value).lower() if isinstance(value, bool) else value}")
        return words

    return make


@pytest.fixture
def train(spmd, small):
    """``train(world, changes)``: a run on ``world`` ranks of the pool; ``train(world, folder=RUN, ...)`` goes on."""

    def run(world, changes=None, *, folder=None, job=None, timeout=60.0) -> list[Result]:
        job = job or Job(
            small(changes) if folder is None else dict(changes or {}), str(folder) if folder is not None else None
        )
        return spmd(world, job, timeout=timeout)

    return run


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """For commands: the tests' environment without a launcher's variables, and with a folder of their own for
    temporary files.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "TORCHELASTIC_", "MESHWRIGHT_"))
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    return kept | {
        "TMPDIR": str(temporary),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
    }


@pytest.fixture
def meshwright(environment, tmp_path):
    """``meshwright("train", ...)``: the command in a process of its own; waits for its end."""

    def run(*words, cwd=None, prefix=(sys.executable, "-m", "meshwright")):
        return finish(start([*prefix, *map(str, words)], environment, cwd or tmp_path))

    return run


@pytest.fixture
def ask(capsys):
    """``ask(verb, ...)`` -> (status, what it printed, what it complained)."""

    def command(*words):
        status = main([str(word) for word in words])
        said = capsys.readouterr()
        return status, said.out, said.err

    return command
