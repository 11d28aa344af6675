"""Process group and mesh: up from every launcher's variables, refused before anything hangs, down without hanging."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import random
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist
from support.families import config_of
from support.host_time import own_calls
from support.ranks import ranks
from support.states import DENSE
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright import ConfigError, Layout
from meshwright.distributed import (
    DistributedConfig,
    destroy_distributed,
    get_cp_mesh,
    get_dp_mesh,
    get_ep_mesh,
    get_fsdp_mesh,
    get_pp_mesh,
    get_pp_rank,
    get_pp_size,
    get_tp_mesh,
    get_world_info,
    has_dp_mesh,
    init_distributed,
)
from meshwright.distributed import setup as floor
from meshwright.distributed.mesh import BUILT, build_mesh, data_position
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.process import agree
from meshwright.distributed.process.workers import WorkerPool
from meshwright.distributed.process.world import STORE
from meshwright.distributed.setup import DEFAULT_BACKEND, begin_steps, choose_backend
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.build import plan as make_plan

parallelize_module = importlib.import_module("meshwright.distributed.parallelize")
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def summed(group: dist.ProcessGroup | None = None) -> int:
    """Sum of the ranks plus one over a group."""
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total, group=group)
    return int(total)


# --- meshes


def described(mesh) -> tuple | None:
    return None if mesh is None else (mesh.mesh_dim_names, tuple(mesh.shape), mesh.mesh.flatten().tolist())


def data_mesh(mesh):
    try:
        return described(get_dp_mesh(mesh))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def mesh_job(sizes: dict[str, int]) -> dict:
    mesh = init_distributed(DistributedConfig(**sizes))
    return {
        "axes": (mesh.mesh_dim_names, tuple(mesh.shape)),
        "dp": data_mesh(mesh),
        "fsdp": [described(get_fsdp_mesh(mesh)) for _ in range(2)],
        "one axis": [described(get(mesh)) for get in (get_pp_mesh, get_cp_mesh, get_tp_mesh, get_ep_mesh)],
        "pp": (get_pp_rank(mesh), get_pp_size(mesh)),
        "has": has_dp_mesh(mesh),
        "position": data_position(mesh),
        "world": summed(),
    }


def test_axes_of_size_one_exist_and_data_axes_make_one_mesh(spmd):
    found = spmd(4, mesh_job, {"dp_replicate": 2})
    for rank, got in enumerate(found):
        group = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert got["axes"] == (AXES, (1, 2, 2, 1, 1)), "the open size took what was left"
        assert got["dp"] == (("dp_replicate", "dp_shard"), (2, 2), [0, 1, 2, 3])
        assert got["fsdp"] == [(("dp_shard",), (2,), group)] * 2
        assert got["one axis"] == [None] * 4, "an axis of size 1 is no axis to those who ask for one"
        assert (got["pp"], got["has"], got["position"], got["world"]) == ((0, 1), True, (rank, 4), 10)


def test_axes_without_data(spmd):
    found = spmd(4, mesh_job, {"pp": 2, "tp": 2, "dp_shard": 1})
    for rank, got in enumerate(found):
        assert got["pp"] == (rank // 2, 2), "stages are outermost"
        assert got["dp"].startswith(
            "ValueError: the mesh (pp = 2, dp_replicate = 1, dp_shard = 1, cp = 1, tp = 2) has no data axis"
        )
        assert not got["has"] and got["fsdp"] == [None, None]
        assert got["one axis"][2] == (("tp",), (2,), [rank // 2 * 2, rank // 2 * 2 + 1])
        assert got["position"] == (0, 1)


def test_dense_parameters_are_sharded_over_context_too(spmd):
    found = spmd(4, mesh_job, {"cp": 2, "dp_shard": 2})
    for rank, got in enumerate(found):
        assert got["fsdp"] == [(("dp_shard_cp",), (4,), [0, 1, 2, 3])] * 2
        assert got["dp"] == (("dp_shard",), (2,), [rank % 2, rank % 2 + 2])
        assert got["position"] == (rank // 2, 2)


# --- streams


def stream_job(layout: Layout, seed: int) -> list[float]:
    init_distributed(layout, seed)
    return torch.rand(2).tolist()


@pytest.mark.all
def test_streams_differ_where_samples_do_and_only_there(spmd):
    data = spmd(2, stream_job, Layout(dp_shard=2), 7)
    tensor = spmd(2, stream_job, Layout(tp=2, dp_shard=1), 7)
    assert data[0] != data[1] and tensor[0] == tensor[1] == data[0]
    assert spmd(2, stream_job, Layout(dp_replicate=2, dp_shard=1), 7) == data
    assert spmd(1, stream_job, Layout(), 7) == [data[0]], "one process draws what rank 0 draws"
    assert spmd(2, stream_job, Layout(dp_shard=2), 8)[0] not in data
    torch.manual_seed(7)
    assert torch.rand(2).tolist() != data[0]


# --- refusals, before any process group exists


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", STORE):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    yield monkeypatch
    assert not dist.is_initialized()


def test_one_process_needs_no_group(alone):
    assert init_distributed(DistributedConfig()) is None
    first = torch.rand(1)
    assert init_distributed(Layout(), seed=42) is None and torch.rand(1) == first, "42 is the seed where none is given"


@pytest.mark.parametrize(
    ("layout", "world", "kind", "words"),
    [
        (Layout(dp_shard=2), 1, ConfigError, "dp_shard = 2 does not divide the world size 1. Start 2 processes"),
        (
            Layout(dp_shard=3),
            2,
            ConfigError,
            "dp_shard = 3 does not divide the world size 2. Start 3 processes, or change the layout",
        ),
        (Layout(tp=4), 6, ConfigError, "tp = 4 does not divide the world size 6. Start a multiple of 4 processes"),
        (Layout(ep=3), 2, ConfigError, "layout.ep = 3 does not divide the 2 ranks of dp_shard * cp * tp"),
        (
            DistributedConfig(dp_replicate=2, dp_shard=1, ep=2),
            2,
            ConfigError,
            "layout.ep = 2 does not divide the 1 ranks",
        ),
        (
            DistributedConfig(backend="nccl"),
            2,
            ConfigError,
            "backend 'nccl': 'nccl' for cuda is not available in this torch on this machine",
        ),
        (DistributedConfig(backend="cpu:gloo,cuda:mpi"), 1, ConfigError, "'mpi' for cuda is not available"),
        (
            DistributedConfig(backend="cpu:glue"),
            1,
            ConfigError,
            "'glue' for cpu is not available in this torch on this machine. Available: gloo",
        ),
        (DistributedConfig(backend=""), 1, ConfigError, "backend ''"),
        (
            Layout(),
            2,
            ConfigError,
            "MASTER_ADDR and MASTER_PORT are not set; start the processes with torchrun or srun, or pass a store",
        ),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA says")
def test_what_cannot_come_up_is_refused(alone, layout, world, kind, words):
    if world > 1:
        alone.setenv("RANK", "0")
        alone.setenv("WORLD_SIZE", str(world))
    with pytest.raises(kind) as caught:
        init_distributed(layout)
    assert words in str(caught.value)


@pytest.mark.parametrize("port", ["", "http", "0", "70000", "-1"])
def test_a_port_that_is_none_is_refused(alone, port):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        alone.setenv(name, value)
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        init_distributed(Layout())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA drops nothing")
def test_what_the_default_loses_is_said(caplog):
    with caplog.at_level(logging.INFO, logger="meshwright"):
        assert choose_backend(DEFAULT_BACKEND) == ("gloo", "cpu")
        assert "back ends that this machine lacks were dropped: cuda:nccl" in caplog.text
        caplog.clear()
        assert choose_backend("gloo") == choose_backend("cpu:gloo") == ("gloo", "cpu") and not caplog.text


# --- launchers


@contextmanager
def environment(**values: str):
    """The launcher's variables, and no others."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", STORE)
    kept = dict(os.environ)
    for name in [name for name in os.environ if name in names or name.startswith("SLURM_")]:
        del os.environ[name]
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def srun_job(job_id: int) -> tuple:
    with environment(
        SLURM_PROCID=os.environ["RANK"], SLURM_LOCALID=os.environ["RANK"], SLURM_NTASKS="2", SLURM_JOB_ID=str(job_id)
    ):
        mesh = init_distributed(DistributedConfig(startup_timeout_sec=20))
        found = (get_world_info(), tuple(mesh.shape), summed(), os.environ["MASTER_PORT"])
        destroy_distributed()
        return found


def test_plain_srun_variables_bring_the_world_up(spmd):
    port = 0
    while not port:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(20_000, 32_000)))  # where the ports of job ids lie
            port = probe.getsockname()[1]
    assert spmd(2, srun_job, port - 20_000) == [((rank, rank, 2), (1, 1, 2, 1, 1), 3, str(port)) for rank in range(2)]


def own_store_job(path: str) -> int:
    with environment(RANK=os.environ["RANK"], WORLD_SIZE="2"):
        init_distributed(Layout(), store=dist.FileStore(path, 2))
        return summed()


def test_a_store_of_the_callers_own(spmd, tmp_path):
    assert spmd(2, own_store_job, str(tmp_path / "store")) == [3, 3]


@ranks(2)
def test_a_process_group_of_the_callers_own_is_used(tmp_path):
    path = str(tmp_path / "store")
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    mine = dist.group.WORLD
    mesh = init_distributed(Layout(dp_shard=-1))
    found = tuple(mesh.shape), dist.group.WORLD is mine, summed()
    destroy_distributed()
    assert found == ((1, 1, 2, 1, 1), True, 3)


@ranks(2)
def test_a_refused_layout_leaves_the_way_free_for_another():
    layout = Layout(dp_shard=4)
    try:
        init_distributed(layout)
        said = "none"
    except ConfigError as error:
        said = str(error)
    up = dist.is_initialized()
    init_distributed(Layout())
    total = summed()
    assert "dp_shard = 4 does not divide the world size 2" in said and not up and total == 3


def meshes_job(number: int) -> float:
    """A sharded parameter over the last of several equal meshes, as one whole tensor."""
    meshes = [init_distributed(Layout(dp_replicate=2, dp_shard=2))]
    for _ in range(number - 1):
        BUILT.clear()  # else it is the same one
        meshes.append(build_mesh(Layout(dp_replicate=2, dp_shard=2), "cpu"))
    mesh = meshes[-1]["dp_replicate", "dp_shard"]
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate(), Shard(0)]))
    return parameter.detach().full_tensor().sum().item()


@pytest.mark.all
def test_a_second_group_does_not_meet_the_meshes_of_the_first(spmd):
    assert spmd(4, meshes_job, 3) == spmd(4, meshes_job, 1) == [4.0] * 4


@pytest.mark.all
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads have names under /proc only")
@pytest.mark.parametrize(
    ("name", "layout"),
    [("decoder", Layout(dp_shard=2, tp=2)), ("gpt_neox", Layout(dp_shard=2, tp=2)), ("decoder", Layout(dp_shard=4))],
    ids=str,
)
@ranks(4)
def test_a_second_model_starts_no_thread_and_the_end_leaves_none(name, layout):
    """Those of gloo wake up every few milliseconds: hundreds of them, left over by earlier jobs, slow a process down
    many times.
    """
    source = DecoderConfig(64, 16, 2, n_heads=2, n_kv_heads=2, hidden_dim=24, max_seq_len=8)
    source = source if name == "decoder" else config_of(name)

    def listening() -> int:
        found = 0
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # a thread that ends meanwhile
                found += "gloo" in (task / "comm").read_text()
        return found

    before = listening()
    model = parallelize(source, layout)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.ones(2, 5, dtype=torch.int64)
    model.forward_backward({"tokens": tokens, "labels": tokens})
    model.optimizer_step(optimizer, 1.0)
    meanwhile = listening()
    again = parallelize(source, layout)
    assert again.forward_backward({"tokens": tokens, "labels": tokens}).loss > 0 and listening() == meanwhile
    del model, optimizer, again
    destroy_distributed()
    assert listening() <= before < meanwhile


# --- agreement


class Unportable(Exception):
    """Survives no pickling: its arguments are not those of its constructor."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def agreement_job() -> list:
    init_distributed(Layout())
    rank = dist.get_rank()
    said = []
    for error in (ConfigError("a config"), Unportable("one", "two"), OSError(28, "disk")):

        def act(error=error):
            if rank == 1:
                raise error
            return "fine"

        try:
            said.append(agree.together(act))
        except Exception as caught:
            said.append((type(caught).__name__, str(caught)))
    return [
        *said,
        agree.together(lambda: rank, here=rank == 1),
        agree.everybody_says(rank * 10),
        agree.from_rank_zero(f"said by {rank}"),
        (agree.largest(rank), agree.any_rank(rank == 1), agree.any_rank(False)),
    ]


def test_what_one_rank_meets_all_ranks_hear(spmd):
    for rank, found in enumerate(spmd(2, agreement_job)):
        assert found[:3] == [
            ("ConfigError", "a config"),
            ("MeshwrightError", "Unportable: one and two"),
            ("OSError", "[Errno 28] disk"),
        ]
        assert found[3:] == [None if rank == 0 else 1, [0, 10], "said by 0", (1, True, False)]


# --- time limits and the end


def limit_job(folder: str) -> list:
    """No rank joins rank 0's collectives until it has given up twice: over an axis, and over the world."""
    mesh = init_distributed(Layout(dp_replicate=2, dp_shard=2))
    begin_steps(None, 1.0)
    begin_steps(mesh, 1.0)
    done = Path(folder) / "done"
    if dist.get_rank() > 0:
        while not done.exists():
            time.sleep(0.02)
        return []
    found = []
    for group in (mesh["dp_shard"].get_group(), None):
        begun = time.monotonic()
        try:
            summed(group)
            found.append("none")
        except RuntimeError as error:
            found.append((time.monotonic() - begun, str(error)))
    done.touch()
    return found


@pytest.mark.all
def test_a_collective_that_a_rank_never_joins_fails_in_time(spmd, tmp_path):
    found = spmd(4, limit_job, str(tmp_path))[0]
    assert len(found) == 2
    for seconds, said in found:
        assert 0.9 < seconds < 10 and "imed out" in said, found


@ranks(2)
def test_the_end_after_an_exception_does_not_hang():
    init_distributed(Layout(dp_shard=2))
    summed()
    begun = time.monotonic()
    try:
        if dist.get_rank() == 1:
            raise ValueError("rank 1 is in trouble")
        dist.barrier()
    except (ValueError, RuntimeError):
        destroy_distributed()
        destroy_distributed()
    seconds, up = time.monotonic() - begun, dist.is_initialized()
    assert seconds < 10 and not up


@pytest.mark.all
def test_the_end_gives_up_waiting_and_says_so(monkeypatch, caplog):
    destroy_distributed()  # without a group: nothing to do
    monkeypatch.setattr(floor.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(floor.dist, "destroy_process_group", lambda: time.sleep(15))
    begun = time.monotonic()
    destroy_distributed(patience_sec=0.1)
    assert time.monotonic() - begun < 8 and "did not close within" in caplog.text
    monkeypatch.setattr(floor.dist, "destroy_process_group", lambda: 1 / 0)
    destroy_distributed()
    assert "closing the process group: division by zero" in caplog.text


# --- one rank plans for all


def planned_job(ranks_of: int) -> tuple[int, str, bool]:
    """The number of plans that this rank made, what was refused, and whether its streams are those of the others."""
    made, refusal = [], ""

    def drawing(*args, **options):
        made.append(torch.rand(3).sum().item() + random.random() + numpy.random.rand())
        return make_plan(*args, **options)

    with patch.object(parallelize_module, "make_plan", drawing):
        try:
            parallelize(DENSE, Layout(tp=ranks_of, dp_shard=1))
        except ConfigError as error:
            refusal = str(error)
    streams = agree.everybody_says((torch.rand(3).tolist(), random.random(), numpy.random.rand()))
    return len(made), refusal, all(stream == streams[0] for stream in streams)


@pytest.mark.parametrize("group_exists", [False, True])
def test_one_rank_plans_for_all_and_keeps_its_streams(spmd, group_exists):
    runs = spmd(2, with_group if group_exists else planned_job, 2)
    assert runs == [(1, "", True), (0, "", True)]


def with_group(ranks_of: int) -> tuple[int, str, bool]:
    init_distributed(Layout(tp=ranks_of, dp_shard=1))
    return planned_job(ranks_of)


def test_what_the_planning_rank_refuses_is_refused_on_all(spmd):
    (made, refusal, alike), *others = spmd(3, planned_job, 3)
    assert made == 1 and alike and "4 heads" in refusal
    assert others == [(0, refusal, True)] * 2


def calls_of_parallelize() -> int:
    return own_calls(lambda: parallelize(Decoder(DENSE), Layout(dp_shard=2, tp=2))).total()


def test_a_start_grows_by_no_call():
    """Calls of Python 3.11 without those of models, in processes that remember nothing; later ones make fewer."""
    with WorkerPool(4, threads=1) as fresh:
        first, *others = fresh.run(calls_of_parallelize, timeout=120)
    assert first <= 32_500 and max(others) <= 5_500
