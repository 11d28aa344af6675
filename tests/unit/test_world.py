"""Who am I among the processes: the launcher's variables are read exactly, and what is malformed is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from meshwright import ConfigError
from meshwright.distributed import get_world_info, is_rank_zero
from meshwright.distributed.process.world import check_nodes_in_use, first_host, ranks_per_node

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def env(monkeypatch):
    """An environment without a launcher; ``env(NAME="value")`` sets variables."""
    for name in [*NAMES, "ENVIRONMENT", *(name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_")))]:
        monkeypatch.setenv(name, "")  # so that whatever the code sets is undone
        monkeypatch.delenv(name)
    return lambda **values: [monkeypatch.setenv(name, value) for name, value in values.items()]


def test_without_a_launcher_a_process_is_alone(env):
    assert get_world_info() == (0, 0, 1) and is_rank_zero() and ranks_per_node() == 0
    assert not set(NAMES) & set(os.environ)


def test_torchrun(env):
    env(
        RANK="5",
        LOCAL_RANK="1",
        WORLD_SIZE="8",
        LOCAL_WORLD_SIZE="4",
        SLURM_PROCID="0",
        SLURM_LOCALID="0",
        SLURM_NTASKS="2",
    )
    assert get_world_info() == (5, 1, 8) and not is_rank_zero() and ranks_per_node() == 4
    assert "MASTER_ADDR" not in os.environ, "torchrun sets it; nobody else may"


def test_without_a_local_rank_the_ranks_are_on_one_host(env):
    env(RANK="3", WORLD_SIZE="4")
    assert get_world_info() == (3, 3, 4)


def test_plain_srun_with_three_variables(env):
    env(SLURM_PROCID="3", SLURM_LOCALID="1", SLURM_NTASKS="4")
    assert get_world_info() == (3, 1, 4)
    exported = {name: os.environ.get(name) for name in NAMES}
    assert exported == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": None,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "20000",
    }
    assert get_world_info() == (3, 1, 4), "the second call reads what the first one set"


def test_plain_srun_over_several_hosts(env):
    env(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NTASKS="4", SLURM_JOB_ID="1234567", SLURM_JOB_NODELIST="n[1-4]")
    env(SLURM_STEP_NODELIST="n[3-4]", SLURM_TASKS_PER_NODE="2(x2)")
    assert get_world_info() == (0, 0, 4) and is_rank_zero() and ranks_per_node() == 2
    assert os.environ["MASTER_ADDR"] == "n3", "the hosts of the step, not of the whole job"
    assert os.environ["MASTER_PORT"] == str(20_000 + 1234567 % 12_000)


def test_what_the_user_set_stays(env):
    env(
        SLURM_PROCID="0",
        SLURM_LOCALID="0",
        SLURM_NTASKS="2",
        SLURM_JOB_NODELIST="]unreadable[",
        MASTER_ADDR="head",
        MASTER_PORT="29400",
    )
    assert get_world_info() == (0, 0, 2)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("head", "29400")


BATCH = {"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
SALLOC = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "4294967290",
}


@pytest.mark.parametrize("values", [{"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, BATCH, SALLOC])
def test_a_batch_script_or_shell_without_srun_is_one_process(env, values):
    env(**values)
    assert get_world_info() == (0, 0, 1)
    assert not set(NAMES) & set(os.environ)


@pytest.mark.parametrize("step", ["0", "3"])
def test_a_step_of_a_batch_script_is_a_rank(env, step):
    env(**BATCH | {"SLURM_PROCID": "2", "SLURM_STEP_ID": step})
    assert get_world_info() == (2, 0, 4)


@pytest.mark.parametrize("values", [BATCH, SALLOC])
def test_nodes_are_not_left_idle(env, values):
    env(**values, SLURM_JOB_NUM_NODES="2")
    with pytest.raises(ConfigError, match=r"this job has 2 nodes.*Write: srun meshwright train"):
        check_nodes_in_use()


@pytest.mark.parametrize(
    ("values", "world"),
    [
        (BATCH | {"SLURM_JOB_NUM_NODES": "1"}, 1),
        (BATCH | {"SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_ID": "0"}, 4),
        (BATCH | {"SLURM_JOB_NUM_NODES": "2", "RANK": "0", "WORLD_SIZE": "2"}, 2),
        ({}, 1),
    ],
)
def test_one_node_a_step_and_torchrun_leave_none_idle(env, values, world):
    """The same processes on two nodes of which a batch script has one are refused (above)."""
    env(**values)
    assert check_nodes_in_use() is None and get_world_info()[2] == world


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"RANK": "0"}, "the environment variable WORLD_SIZE is missing, although others of its launcher are set"),
        ({"WORLD_SIZE": "2"}, "the environment variable RANK is missing"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "the environment variable SLURM_LOCALID is missing"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "the environment variable RANK = 'one' is not a whole number"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "the environment variable RANK = '' is not a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "the environment variable RANK = '-1' is not a whole number from 0 up"),
        ({"RANK": "²", "WORLD_SIZE": "4"}, "the environment variable RANK = '²' is not a whole number"),
        ({"RANK": "0", "LOCAL_RANK": "x", "WORLD_SIZE": "2"}, "the environment variable LOCAL_RANK = 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2.0"}, "the environment variable WORLD_SIZE = '2.0'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 is outside a world of 2 processes: check RANK and WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 is outside a world of 0 processes"),
        (
            {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"},
            "rank 4 is outside a world of 4 processes: check SLURM_PROCID",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7_1"},
            "SLURM_JOB_ID = '7_1'",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "["},
            "Slurm's host list '['",
        ),
    ],
)
def test_malformed_variables_are_named(env, values, words):
    env(**values)
    with pytest.raises(ConfigError, match=re.escape(words)):
        get_world_info()
    assert not {"RANK", "MASTER_ADDR"} & (set(os.environ) - set(values)), "nothing is exported from what is wrong"


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ({}, 0),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_TASKS_PER_NODE": "2"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_TASKS_PER_NODE": "4"}, 4),
        ({"SLURM_TASKS_PER_NODE": "4(x16)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_TASKS_PER_NODE": "4(x2)"}, 2),
        ({"SLURM_TASKS_PER_NODE": "4(x2),3"}, 0),
    ],
)
def test_ranks_of_a_host(env, values, ranks):
    env(**values)
    assert ranks_per_node() == ranks


def test_a_malformed_number_of_ranks_is_named(env):
    env(LOCAL_WORLD_SIZE="four")
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE = 'four'"):
        ranks_per_node()


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[03-05,9],login1", "n03"),
        ("n[9]", "n9"),
        ("gpu-[001-128]", "gpu-001"),
        ("rack[1-2]n[01-04],x", "rack1n01"),
        ("n[1,3].cluster.example", "n1.cluster.example"),
        ("10.0.0.1,10.0.0.2", "10.0.0.1"),
    ],
)
def test_the_first_host_of_slurms_list(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", ",n1", "n[1-2", "n[a-b]", "n]1["])
def test_a_list_that_is_none_is_refused(hosts):
    with pytest.raises(ConfigError, match="cannot read the first host.*set MASTER_ADDR"):
        first_host(hosts)


def test_asking_needs_no_torch():
    code = (
        "import sys, meshwright.distributed as d; print(d.get_world_info(), d.is_rank_zero(), 'torch' in sys.modules)"
    )
    alone = {k: v for k, v in os.environ.items() if k not in NAMES}
    said = subprocess.run([sys.executable, "-c", code], check=True, env=alone, capture_output=True, text=True).stdout
    assert said.strip() == "(0, 0, 1) True False"
