"""Look at this process and its host: the collector of cycles, installed releases, network interfaces, shared memory.

No file imports torch.

gloo takes the names of GLOO_SOCKET_IFNAME, else the interface with the address of the host's own name, else the
loopback (torch's ``ProcessGroupGloo``). NCCL takes NCCL_SOCKET_IFNAME (beginnings of names, ``=`` whole names, ``^``
all others), else "ib…", else any but docker's and the loopback (NCCL's ``ncclFindInterfaces``).

``docs/tested.md`` has what ran on each. The package's metadata has the same lower bounds.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from meshwright.core.errors import ConfigError, MissingExtraError, UnsupportedError

# --- pause this process's collector of cycles


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Pause Python's collector of cycles: a full collection beside an imported torch takes a quarter of a second.

    Imports and small copies of models leave cycles of a few kilobytes. A collector that was off stays off.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# --- name the folders outside a run that meshwright writes into


def default_cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/meshwright``, or ``~/.cache/meshwright`` where the variable is unset.

    The XDG specification says to ignore a relative path, so it counts as unset.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "meshwright"


# --- find the network interfaces of this host, and those that gloo and NCCL would choose

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class Choice:
    """The interfaces that a library would take, and why; ``problem``: why there is none that ranks can meet on.

    ``suggestion``: an interface to name in ``variable`` instead.
    """

    names: tuple[str, ...]
    reason: str
    problem: str = ""
    variable: str = ""
    suggestion: str = ""


def interfaces() -> dict[str, tuple[str, ...]]:
    """Return the addresses of each interface that is up and has one, in the kernel's order."""
    import psutil

    usable, up = psutil.net_if_addrs(), psutil.net_if_stats()
    found = {}
    for _, name in sorted(socket.if_nameindex()):
        addresses = usable.get(name, ())
        words = tuple(a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6))
        if words and (name not in up or up[name].isup):
            found[name] = words
    return found


def addresses_of_host() -> tuple[str, ...]:
    """Return the addresses that a look-up of this host's name gives; none where it fails."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def gloo_choice(here: Mapping[str, tuple[str, ...]], env: Mapping[str, str] = os.environ) -> Choice:
    """Return the interface that gloo takes in ranks of a launcher; those that meshwright starts take the loopback."""
    outward = next((name for name in here if name != LOOPBACK), next(iter(here), ""))
    if wanted := env.get(GLOO, ""):
        names = tuple(wanted.split(","))
        absent = [name for name in names if name not in here]
        problem = f"{GLOO} = {wanted}: {_no_interface(absent[0], here)}" if absent else ""
        return Choice(names, f"{GLOO} names it", problem, GLOO, outward)
    if not here:
        return Choice((), "", "no interface of this host is up and has an address: gloo cannot connect ranks", GLOO)
    own, name = addresses_of_host(), socket.gethostname()
    by_name = tuple(
        name for name, addresses in here.items() if set(own) & {word.partition("%")[0] for word in addresses}
    )
    if by_name and by_name[0] != LOOPBACK:
        return Choice(by_name[:1], f"the name of this host, {name}, is {own[0]}", "", GLOO, outward)
    why = f"is {own[0]}" if own else "has no address"
    return Choice((LOOPBACK,), f"the name of this host, {name}, {why}", "", GLOO, outward)


def nccl_choice(here: Mapping[str, tuple[str, ...]], env: Mapping[str, str] = os.environ) -> Choice:
    """Return the interfaces that NCCL takes for its first messages between hosts."""
    if wanted := env.get(NCCL, ""):
        excluding, exact = wanted.startswith("^"), "=" in wanted[:2]
        words = wanted.lstrip("^=").split(",")
        is_named = {name: any(name == w if exact else name.startswith(w) for w in words) for name in here}
        names = tuple(name for name, named in is_named.items() if named is not excluding)
        problem = "" if names else f"{NCCL} = {wanted}: {_no_interface(wanted, here)}"
        outward = next((name for name in here if name != LOOPBACK), "")
        return Choice(names, f"{NCCL} names it", problem, NCCL, outward)
    kinds = (
        [name for name in here if name.startswith("ib")],
        [name for name in here if not name.startswith(("docker", LOOPBACK))],
        [name for name in here if name.startswith("docker")],
        [name for name in here if name == LOOPBACK],
    )
    names = tuple(next(filter(None, kinds), ()))
    problem = "" if names else "no interface of this host is up and has an address: NCCL cannot connect ranks"
    return Choice(names, "NCCL's own order", problem, NCCL)


def refuse_absent_interfaces() -> None:
    """Raise ConfigError for an interface for gloo that this host lacks, before the connection fails or hangs."""
    wanted = os.environ.get(GLOO)
    if not wanted:
        return
    choice = gloo_choice(interfaces())
    if choice.problem:
        repair = f"export {GLOO}={choice.suggestion}" if choice.suggestion else f"ip link set {LOOPBACK} up"
        raise ConfigError(f"{choice.problem}. Type: {repair}")


def _no_interface(name: str, here: Mapping[str, tuple[str, ...]]) -> str:
    return f"{name} is no interface of this host that is up and has an address ({', '.join(here) or 'none is'})"


# --- state the versions of Python and of other libraries that were tested


@dataclass(frozen=True)
class Range:
    """The oldest and the newest tested release of a package, inclusive: "2.11" includes 2.11.1."""

    oldest: str
    newest: str

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}"

    def is_older(self, version: str) -> bool:
        """Return whether a version came before the range."""
        return numbers(version) < numbers(self.oldest)

    def is_newer(self, version: str) -> bool:
        """Return whether a version came after the range."""
        newest = numbers(self.newest)
        return numbers(version)[: len(newest)] > newest


TESTED = {
    "python": Range("3.11", "3.13"),
    "torch": Range("2.11", "2.15"),
    "transformers": Range("5.17", "5.24"),
}
"""Tested releases by the name of the package."""

DOCTOR = "'meshwright doctor' tells what works here"


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    return tuple(int(number) for number in re.split(r"[^0-9.]", version, maxsplit=1)[0].split(".") if number)


@functools.cache
def installed(package: str) -> str | None:
    """Return the version of a package that is installed, by its metadata; None if it is not. "python": this one."""
    if package == "python":
        return ".".join(map(str, sys.version_info[:3]))
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_at_least(package: str, version: str) -> bool:
    """Return whether a package of at least this version is installed."""
    here = installed(package)
    return here is not None and numbers(here) >= numbers(version)


def refuse_older(package: str) -> None:
    """Raise UnsupportedError for a package that is older than the tested range."""
    here, tested = installed(package), TESTED[package]
    if here is not None and tested.is_older(here):
        raise UnsupportedError(
            f"{package} {here} is here; meshwright is tested with {package} {tested} and needs {tested.oldest}: pip"
            f" install '{package}>={tested.oldest}'. {DOCTOR}"
        )


def refuse_unfit_torch() -> None:
    """Raise MissingExtraError without torch, UnsupportedError with one that is older than the tested range."""
    if installed("torch") is None and util.find_spec("torch") is None:
        raise MissingExtraError("meshwright", f"torch>={TESTED['torch'].oldest}", "")
    refuse_older("torch")


def newer_than_tested() -> list[str]:
    """Return a sentence for each package that is newer than the tested range."""
    return [
        f"{package} {here} is newer than the releases that meshwright is tested with ({tested}): {DOCTOR}"
        for package, tested in TESTED.items()
        if (here := installed(package)) is not None and tested.is_newer(here)
    ]


# --- bound how many processes a command starts on this host

PER_CORE, ON_FEW_CORES, ALWAYS = 8, 16, 4
"""Processes that a core serves; how many are served by few cores; how many are never refused."""
MIB = 300
"""Memory of a process that has imported torch and trains a small model."""


def usable_cores() -> int:
    """Count the threads of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_cores() -> int:
    """Count the cores that this process may use: threads of a core count once, and a container's share is heeded."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    places = {n: Path(f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list") for n in allowed}
    cores = len({place.read_text() if place.is_file() else str(n) for n, place in places.items()})
    limit = Path("/sys/fs/cgroup/cpu.max")
    quota, _, period = limit.read_text().strip().partition(" ") if limit.is_file() else ("max", "", "")
    return max(1, min(cores, int(quota) // int(period)) if quota.isdigit() and period.isdigit() else cores)


def refuse_too_many(count: int) -> None:
    """Raise ConfigError for more processes than cores or free memory serve: they would end others' programs."""
    import psutil  # which the first line of a run does not wait for

    cores = usable_cores()
    free = psutil.virtual_memory().available
    for_cores, for_memory = max(ON_FEW_CORES, PER_CORE * cores), free // (MIB << 20)
    if count <= max(ALWAYS, min(for_cores, for_memory)):
        return
    raise ConfigError(
        f"{count:,} processes on this host: its {cores} cores serve {for_cores}, and its free memory of"
        f" {free / 2**30:.1f} GiB holds {for_memory}, at {MIB} MiB each. If that layout is for a cluster, see what it"
        f" would do with 'meshwright plan' or 'meshwright rehearse', which start none of them, and start it there"
        f" (torchrun, or 'meshwright launch' for Slurm). To train over them here all the same: process.count = {count}"
    )


# --- measure the memory that processes of a host share, through which NCCL's ranks exchange

FOLDER = Path("/dev/shm")
WANTED = 2**30
"""Bytes that NCCL's manual asks containers for (``--shm-size=1g``); the default of Docker is 64 MiB."""
REPAIR = f"mount -o remount,size=8g {FOLDER}   (Docker: --shm-size=8g)"


def shared_memory() -> int | None:
    """Return the bytes of shared memory; None where the system has none of Linux's kind."""
    return shutil.disk_usage(FOLDER).total if FOLDER.is_dir() else None
