"""Look at the host: memory, shared memory, limits, folders, network interfaces and NVIDIA's driver; without torch."""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from meshwright.core.devices import gpu_count
from meshwright.core.host import shared_memory
from meshwright.core.host.folders import default_cache_dir
from meshwright.core.host.interfaces import (
    GLOO,
    LOOPBACK,
    Choice,
    addresses_of_host,
    gloo_choice,
    interfaces,
    nccl_choice,
)

from .findings import FAILURE, HOST, NOTE, OK, WARNING, Finding, gibibytes

LEAST_FILES, WANTED_FILES = 1024, 65_536
LEAST_PROCESSES, WANTED_PROCESSES = 4096, 65_536
"""A rank takes a process, and a thread for each core and for each connection; Linux counts threads."""


def host_findings() -> Iterator[Finding]:
    """Yield what the host gives to processes."""
    yield _memory()
    yield _shared_memory()
    yield from _limits()
    yield from folder_findings()
    yield from network_findings()


def _memory() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    system = f"{platform.system()} {platform.release()} on {platform.machine()}, {cores} core{'s' * (cores > 1)}"
    try:
        import psutil
    except ImportError:  # said already, among the versions
        return Finding(HOST, "memory", NOTE, f"unknown; {system}", figures={"cores": cores})
    memory = psutil.virtual_memory()
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    total = min(memory.total, int(allowed)) if allowed.isdigit() else memory.total
    text = f"{gibibytes(min(memory.available, total))} free of {gibibytes(total)}; {system}"
    return Finding(HOST, "memory", OK, text, figures={"total": total, "free": memory.available, "cores": cores})


def _shared_memory() -> Finding:
    name, size = str(shared_memory.FOLDER), shared_memory.shared_memory()
    if size is None:
        return Finding(HOST, name, NOTE, "there is none")
    if size >= shared_memory.WANTED:
        return Finding(HOST, name, OK, gibibytes(size), figures={"bytes": size})
    text = f"{gibibytes(size)}: NCCL's ranks exchange through it, and want 1 GiB or more"
    return Finding(HOST, name, WARNING, text, shared_memory.REPAIR, {"bytes": size})


def _limits() -> Iterator[Finding]:
    import resource

    for name, number, least, wanted, flag in (
        ("open files", resource.RLIMIT_NOFILE, LEAST_FILES, WANTED_FILES, "n"),
        ("processes", getattr(resource, "RLIMIT_NPROC", None), LEAST_PROCESSES, WANTED_PROCESSES, "u"),
    ):
        if number is None:
            continue
        soft, hard = ("unlimited" if limit < 0 else limit for limit in resource.getrlimit(number))
        figures = {"soft": soft, "hard": hard}
        text = f"{soft} (can be raised to {hard})" if soft != hard else f"{soft}"
        is_few = soft != "unlimited" and int(soft) < least
        attainable = wanted if hard == "unlimited" else min(wanted, int(hard))
        remedy = f"ulimit -{flag} {attainable}" if is_few else ""
        yield Finding(HOST, name, WARNING if is_few else OK, text, remedy, figures)


def folder_findings() -> Iterator[Finding]:
    """Yield whether the home, the cache of prepared data and the temporary folder can be written."""
    try:
        home = Path.home()
        cache = default_cache_dir()
    except RuntimeError as error:  # no HOME, and a user without an entry
        yield Finding(HOST, "home", FAILURE, f"{error}", "export HOME=/a/folder/of/yours")
        return
    trouble = _unwritable(home)
    if trouble:
        yield Finding(HOST, "home", WARNING, trouble, "export HOME=/a/folder/of/yours", {"folder": str(home)})
    trouble = _unwritable(cache)
    remedy = "export XDG_CACHE_HOME=/a/folder/with/room   (or --data.cache=FOLDER)" if trouble else ""
    status = FAILURE if trouble else OK
    yield Finding(HOST, "cache", status, trouble or str(cache), remedy, {"folder": str(cache)})
    asked = os.environ.get("TMPDIR", "")
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        yield Finding(HOST, "temporary", FAILURE, str(error), "export TMPDIR=/a/folder/with/room")
    else:
        ignored = f"TMPDIR = {asked} cannot be written; {folder} is used" if asked and folder != asked else ""
        status, remedy = (WARNING, f"export TMPDIR={folder}") if ignored else (OK, "")
        free = f", {gibibytes(shutil.disk_usage(folder).free)} free"
        yield Finding(HOST, "temporary", status, ignored or folder + free, remedy, {"folder": folder})
    try:
        getpass.getuser()
    except (KeyError, OSError):
        text = f"user {os.getuid()} has no name, and torch.compile names its cache by it"
        yield Finding(HOST, "user", WARNING, text, "export USER=me")


def _unwritable(folder: Path) -> str:
    """Return why nothing can be written into a folder, or into the nearest one above it that exists."""
    above = next((place for place in (folder, *folder.parents) if os.path.lexists(place)), folder)
    try:
        with tempfile.TemporaryFile(dir=above):
            list(os.scandir(above))
    except OSError as error:
        where = f"{folder}" if above == folder else f"{folder}: {above}"
        return f"{where} cannot be read and written ({error.strerror or error})"
    return ""


def network_findings() -> Iterator[Finding]:
    """Yield the interfaces, and those that gloo and NCCL would choose."""
    try:
        here = interfaces()
    except ImportError as error:
        yield Finding(HOST, "interfaces", NOTE, f"unknown: {error}")
        return
    text = ", ".join(f"{name} ({addresses[0]})" for name, addresses in here.items()) or "none that is up"
    yield Finding(HOST, "interfaces", OK if here else FAILURE, text, "" if here else f"ip link set {LOOPBACK} up", here)
    name, own = socket.gethostname(), addresses_of_host()
    yield Finding(
        HOST,
        "host name",
        OK if own else WARNING,
        f"{name} is {', '.join(own)}" if own else f"{name} has no address: several hosts cannot meet by it",
        "" if own else f"echo '127.0.1.1 {name}' >> /etc/hosts   (several hosts: the address that the others see)",
        {"name": name, "addresses": list(own)},
    )
    yield _chosen("gloo", gloo_choice(here))
    if gpu_count():
        yield _chosen("NCCL", nccl_choice(here))


def _chosen(library: str, choice: Choice) -> Finding:
    figures = {"interfaces": list(choice.names), "reason": choice.reason}
    if choice.problem:
        repair = f"export {choice.variable}={choice.suggestion}" if choice.suggestion else f"unset {choice.variable}"
        return Finding(HOST, library, FAILURE, choice.problem, repair, figures)
    text = f"takes {', '.join(choice.names)}: {choice.reason}"
    if choice.names == (LOOPBACK,) and choice.suggestion not in ("", LOOPBACK):
        text += f", so only its own ranks meet; over several hosts: export {choice.variable}={choice.suggestion}"
    elif library == "gloo" and GLOO not in os.environ:
        text += f"; {LOOPBACK} among ranks that meshwright starts"
    return Finding(HOST, library, OK, text, figures=figures)
