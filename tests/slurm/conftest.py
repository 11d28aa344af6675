"""A private Slurm of two virtual nodes, a config small enough that a run takes seconds, and two hosts without Slurm."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))
sys.path.insert(0, str(ROOT / "scripts"))

import slurm_cluster  # noqa: E402
from cluster_jobs import Cluster, flags_of  # noqa: E402
from e2e_runs import finish, only_run, start  # noqa: E402

WORDS = (
    "the a mesh axis rank loss step shard wright plan token batch layer model data of and to in is not every one sum"
).split()


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The tests' environment without a launcher's variables."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "TORCHELASTIC_", "MESHWRIGHT_"))
    }
    kept = {name: value for name, value in kept.items() if name not in ours}
    return kept | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"}


@pytest.fixture(scope="session")
def cluster(environment):
    """The cluster, up. It ends with the session."""
    if reason := slurm_cluster.why_not() or slurm_cluster.what_is_missing():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a socket's path is short
    script = [sys.executable, str(ROOT / "scripts/slurm_cluster.py")]
    started = subprocess.run([*script, "start", str(folder)], capture_output=True, text=True, env=environment)
    assert started.returncode == 0, (started.stderr, [path.read_text()[-2000:] for path in folder.glob("*.log")])
    yield Cluster(environment | {"SLURM_CONF": str(folder / "slurm.conf")})
    ended = subprocess.run([*script, "stop", str(folder)], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def config(tmp_path_factory) -> Mapping[str, object]:
    """Hybrid sharding by node, in fp64.

    The rate is the same at every step, so that runs of any length can be compared.
    """
    corpus = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    for name, size in (("a.txt", 20_000), ("held.txt", 4_000)):
        words = draw.choices(WORDS, k=size // 4)
        (corpus / name).write_text(" ".join(words)[:size])
    return {
        "steps": 60,
        "model.size": "debug",
        "data.source": str(corpus),
        "data.cache": str(tmp_path_factory.mktemp("cache")),
        "data.seq_len": 32,
        "batch.global_batch": 8,
        "layout.dp_replicate": -1,
        "layout.dp_shard": -1,
        "techniques.precision.master": "float64",
        "schedule.kind": "constant",
        "schedule.warmup_steps": 0,
        "validation.every": 0,
        "checkpoint.every": 0,
        "logging.tensorboard": "off",
        "sample.tokens": 0,
    }


@pytest.fixture(scope="session")
def on_one_host(environment, config, tmp_path_factory) -> Path:
    """The run folder of the same training by four processes of one host."""
    place = tmp_path_factory.mktemp("one-host")
    layout = {"layout.dp_replicate": 2, "layout.dp_shard": 2, "process.count": 4}
    done = finish(start(["meshwright", "train", *flags_of({**config, **layout})], environment, place))
    assert done.status == 0, done
    return only_run(place / "runs")
