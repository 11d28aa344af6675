"""Create process group and mesh from torchrun's or Slurm's variables, try them, and tear them down in bounded time."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
from dataclasses import dataclass
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.devices import (
    CPU,
    CUDA,
    DEFAULT_BACKEND,
    current_device,
    is_accelerator,
    local_device,
    why_cuda_is_unusable,
)
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.core.host import refuse_absent_interfaces
from meshwright.distributed.mesh import BUILT, axis_sizes, build_mesh, data_position, get_expert_mesh
from meshwright.distributed.mesh import (
    get_dp_mesh as get_dp_mesh,  # KempnerForge's users import it, and is_rank_zero, from here
)
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import STORE, get_world_info, ranks_per_node, warn_of_small_shared_memory
from meshwright.distributed.process.world import is_rank_zero as is_rank_zero
from meshwright.distributed.torch_private import forget_meshes
from meshwright.planning.layout import Layout

log = logging.getLogger("meshwright")

SPLITTING = ("nccl", "xccl")
"""Backends of torch that split a communicator."""


@dataclass(frozen=True)
class DistributedConfig(Layout):
    """A layout, and how its processes communicate, in seconds; ``backend``: torch's device:backend list."""

    pp_schedule: str = "1f1b"
    """Alias of ``techniques.pipeline_schedule``, read by ``plan`` and ``parallelize`` if they get this config."""
    nccl_timeout_sec: int = 1800
    """Time limit of a collective, on any backend, once all processes are connected."""
    backend: str = DEFAULT_BACKEND
    startup_timeout_sec: int = 300
    """Time limit for processes to find each other."""

    @property
    def requested_schedule(self) -> str:
        return "" if self.pp_schedule == DistributedConfig.pp_schedule else self.pp_schedule


def init_distributed(
    config: DistributedConfig | Layout, seed: int = 42, *, store: dist.Store | None = None
) -> DeviceMesh | None:
    """Create the process group and the mesh of ``config``; None (and no process group) for a world of one process.

    Works under torchrun (also after an elastic restart), under plain srun, and with a ``store`` that the caller
    brings; an existing process group is used as it is. Seeds the random streams of torch, numpy and Python from
    (seed, data rank); initial weights are drawn independently of them.

    Raises:
        ConfigError: sizes that do not fit the world, or a backend that this build of torch lacks.
    """
    if not isinstance(config, DistributedConfig):
        config = DistributedConfig(**vars(config))
    rank, local_rank, world = get_world_info()
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    layout = config.resolve(world, ranks_per_node=ranks_per_node() or None)
    backend, device_type = choose_backend(config.backend)
    if world == 1:
        seed_streams(seed, None)
        return None
    if is_accelerator(device_type):
        module = torch.get_device_module(device_type)
        module.set_device(torch.device(device_type, local_rank % module.device_count()))
        if rank == 0:
            warn_of_small_shared_memory(ranks_per_node())
    if not dist.is_initialized():
        refuse_absent_interfaces()
        # torch's flight recorder of the last collectives, for a post-mortem, unless the user has set it
        for name, value in (("TORCH_FR_BUFFER_SIZE", "2000"), ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")):
            os.environ.setdefault(name, value)
        dist.init_process_group(
            backend,
            store=store if store is not None else _rendezvous(rank, world, config.startup_timeout_sec),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=config.startup_timeout_sec),
            device_id=bound_device(backend, device_type),
        )
    device_mesh = build_mesh(layout, device_type)
    agree.any_rank(False)  # all are connected: whoever ends at once would break the connecting of others
    begin_steps(device_mesh, config.nccl_timeout_sec)
    seed_streams(seed, device_mesh)
    return device_mesh


def single_process_mesh(device_type: str, backend: str = DEFAULT_BACKEND) -> DeviceMesh:
    """Make a mesh of one rank, for techniques that act over a mesh of size 1 (mixed precision, offload)."""
    if not dist.is_initialized():
        chosen, _ = choose_backend(backend)
        device_id = bound_device(chosen, device_type)
        dist.init_process_group(chosen, store=dist.HashStore(), rank=0, world_size=1, device_id=device_id)
    return build_mesh(Layout(dp_shard=1), device_type)


def begin_steps(device_mesh: DeviceMesh | None, step_timeout_sec: float) -> None:
    """Set the time limit of collectives of all groups of the mesh."""
    if device_mesh is None:
        return
    meshes = [mesh for mesh in (device_mesh, get_expert_mesh(device_mesh)) if mesh is not None]
    groups = [mesh.get_group(name) for mesh in meshes for name, size in axis_sizes(mesh).items() if size > 1]
    agree.set_timeout(step_timeout_sec, groups)


def destroy_distributed(*, patience_sec: float = 20.0) -> None:
    """Tear the process group down, also after an exception, in at most ``patience_sec``; safe to call twice."""
    if not dist.is_initialized():
        return

    def destroy() -> None:
        try:
            dist.destroy_process_group()
        except Exception as error:  # noqa: BLE001  (peers may be gone already: there is nobody left to tell)
            log.warning("closing the process group: %s", error)

    worker = threading.Thread(target=destroy, daemon=True)
    worker.start()
    worker.join(patience_sec)
    if worker.is_alive():
        log.warning("the process group did not close within %.0f s; leaving it to the end of the process", patience_sec)
    BUILT.clear()
    forget_meshes()
    # wrapped modules are cycles and hold the groups, whose gloo threads look for messages until they go
    gc.collect()


def seed_streams(seed: int, device_mesh: DeviceMesh | None) -> None:
    """Seed torch's, numpy's and Python's generators: different streams for different samples, else equal ones."""
    own = seed * 1_000_003 + data_position(device_mesh)[0]
    torch.manual_seed(own)
    numpy.random.seed(own % 2**32)
    random.seed(own)


def choose_backend(request: str) -> tuple[str, str]:
    """Choose this process's (backend string, device type).

    The default list has the backend that torch knows for this machine's accelerator. Those that this build or machine
    lacks are dropped and logged; named ones must exist.

    Raises:
        ConfigError: a named backend that this torch lacks on this machine, or a malformed list.
    """
    here = local_device()
    pairs = dict(_device_and_name(part.strip()) for part in request.split(","))
    if request == DEFAULT_BACKEND and here not in pairs:
        try:
            pairs = {CPU: pairs[CPU], here: dist.get_default_backend_for_device(here)}
        except ValueError as error:
            raise ConfigError(
                f"torch knows no backend for {here}, the accelerator of this machine. Import the package that"
                f" registers one, name it (process.backend = 'cpu:gloo,{here}:…'), or compute on the CPU with"
                f" process.backend = 'gloo'."
            ) from error
    missing = {device: name for device, name in pairs.items() if not _is_available(name, here)}
    if missing and request != DEFAULT_BACKEND:
        device, name = next(iter(missing.items()))
        known = {"mpi", *(dist.Backend.default_device_backend_map.get(device, "gloo") for device in (CPU, here))}
        have = ", ".join(sorted(name for name in known if _is_available(name, here)))
        raise ConfigError(
            f"backend '{request}': '{name}' for {device} is not available in this torch on this machine. Available:"
            f" {have}. {why_cuda_is_unusable()}".rstrip()
        )
    kept = {device: name for device, name in pairs.items() if device not in missing}
    if missing:
        log.info(
            "back ends that this machine lacks were dropped: %s", ", ".join(f"{d}:{n}" for d, n in missing.items())
        )
        if is_rank_zero() and (why := why_cuda_is_unusable()):
            log.warning("this host has GPUs, and ranks compute on its CPU: %s", why)
    device_type = here if here in kept else CPU
    if len(kept) == 1:  # torch warns about back ends "of type 0" when a list of one is given
        return next(iter(kept.values())), device_type
    return ",".join(f"{device}:{name}" for device, name in kept.items()), device_type


def bound_device(backend: str, device_type: str) -> torch.device | None:
    """Return the device to bind a process group to, from whose communicator torch then splits those of a mesh.

    Other backends than those of ``SPLITTING`` cannot split, and torch refuses a mesh over a group that is bound.
    """
    names = dict(_device_and_name(part) for part in backend.split(","))
    return current_device(device_type) if names.get(device_type) in SPLITTING else None


def _device_and_name(part: str) -> tuple[str, str]:
    device, colon, name = part.partition(":")
    if colon:
        return device, name
    devices = _devices_of(part)
    return (CPU if CPU in devices else devices[0]), part


def _is_available(name: str, here: str) -> bool:
    """Return whether this torch has a backend, and this machine a device for it."""
    return dist.is_backend_available(name) and not {CPU, here}.isdisjoint(_devices_of(name))


def _devices_of(name: str) -> list[str]:
    return dist.Backend.backend_capability.get(name, [CPU])


def _rendezvous(rank: int, world: int, timeout_sec: float) -> dist.Store:
    """Open the store at MASTER_ADDR:MASTER_PORT, with keys of this restart only.

    Without the prefix a restarted world reads the addresses of the dead one and never comes up.
    """
    if path := os.environ.get(STORE):  # workers of a local pool
        return dist.FileStore(path, world)
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise ConfigError(
            "MASTER_ADDR and MASTER_PORT are not set; start the processes with torchrun or srun, or pass a store"
        )
    if not port.isdigit() or not 0 < int(port) < 65_536:
        raise ConfigError(f"MASTER_PORT = '{port}' is no port: it is a whole number from 1 to 65535")
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        host, int(port), world, is_master=not agent_hosts and rank == 0, timeout=timedelta(seconds=timeout_sec)
    )
    return dist.PrefixStore(f"run{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


# --- exchange first messages over the back ends of this torch


def back_ends() -> dict[str, str]:
    """Return the back ends of torch.distributed in this build, and NCCL's version."""
    found = {name: "" for name in ("gloo", "nccl", "mpi", "xccl") if dist.is_backend_available(name)}
    if "nccl" in found:
        found["nccl"] = ".".join(map(str, torch.get_device_module(CUDA).nccl.version()))
    return found


def exchanged() -> list[str]:
    """Exchange numbers among the ranks of a world: a sum over all, and a message from each to the next. Collective.

    Returns a word for each back end that carried them, like "gloo (cpu)".
    """
    rank, _, world = get_world_info()
    backend, device_type = choose_backend(DEFAULT_BACKEND)
    init_distributed(Layout(dp_shard=world))
    carried = []
    for kind in dict.fromkeys((CPU, device_type)):
        own = torch.full((1024,), float(rank + 1), device=current_device(kind))
        total, heard = own.clone(), torch.empty_like(own)
        dist.all_reduce(total)
        sent = dist.isend(own, (rank + 1) % world)
        dist.recv(heard, (rank - 1) % world)
        if sent is not None:
            sent.wait()
        expected = world * (world + 1) / 2, float((rank - 1) % world + 1)
        arrived = total.unique().tolist(), heard.unique().tolist()
        if arrived != ([expected[0]], [expected[1]]):
            raise IntegrityError(f"rank {rank} expected {expected} on {kind}, and {arrived} arrived")
        pairs = dict(part.split(":") for part in backend.split(",") if ":" in part)
        carried.append(f"{pairs.get(kind, backend)} on {kind}")
    return carried
