"""Define a finding: one line of the doctor's report, with the command that repairs it."""

from __future__ import annotations

import getpass
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

from meshwright.core import host
from meshwright.core.devices import gpu_count
from meshwright.core.errors import install_command
from meshwright.core.host import (
    GLOO,
    LOOPBACK,
    TESTED,
    Choice,
    addresses_of_host,
    default_cache_dir,
    gloo_choice,
    installed,
    interfaces,
    nccl_choice,
    numbers,
    usable_cores,
)
from meshwright.verification.doctor.inside import AXES

OK, NOTE, WARNING, FAILURE = "ok", "-", "warn", "FAIL"
"""Statuses: as it should be; absent and optional; works, but look at it; does not work."""

VERSIONS, HOST, TORCH, PRIVATE, TRIALS = "versions", "host", "torch", "private points", "trials"
"""Sections, in the order of the report."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    section: str
    name: str
    status: str
    text: str
    remedy: str = ""
    """A command, or an instruction, that repairs it."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs: plain numbers, texts and lists of them."""

    def plain(self) -> dict[str, Any]:
        """Return the finding as values of JSON."""
        return {key: value for key, value in asdict(self).items() if value not in ("", {})}


def gibibytes(number: float) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


# --- write the doctor's report

WIDTH, NAME, STATUS = 118, 14, 4


def lines_of(finding: Finding, section_before: str) -> list[str]:
    """Return the lines of a finding, under a heading where its section is another than that of the one before."""
    heading = [] if finding.section == section_before else ["", finding.section]
    indent = " " * (STATUS + NAME + 6)
    is_long = len(finding.name) > NAME
    head = f"  {finding.status:<{STATUS}}  {finding.name:<{NAME}}  "
    text = textwrap.wrap(finding.text, WIDTH - len(indent), break_on_hyphens=False) or [""]
    first = [head.rstrip(), indent + text[0]] if is_long else [head + text[0]]
    return [*heading, *first, *(indent + line for line in text[1:])]


def closing(findings: Sequence[Finding], seconds: float) -> list[str]:
    """Return the last lines: the commands that repair, how much holds, and the time."""
    faults = [f for f in findings if f.status == FAILURE]
    repairs: dict[str, Finding] = {}
    for finding in findings:
        if finding.remedy:
            repairs.setdefault(finding.remedy, finding)
    lines = ["", "to repair"] if repairs else []
    for remedy, finding in repairs.items():
        lines += [f"  {finding.name}:", f"    {remedy}"]
    warned = sum(f.status == WARNING for f in findings)
    word = f"{len(faults)} of {len(findings)} fail" if faults else "all hold"
    return [*lines, "", f"{word}{f', {warned} warned of' if warned else ''} ({seconds:.0f} s)"]


def plain(findings: Sequence[Finding], seconds: float, version: str) -> dict[str, Any]:
    """Return everything as values of JSON."""
    by_section: dict[str, dict[str, Any]] = {}
    for finding in findings:
        own = {key: value for key, value in finding.plain().items() if key not in ("section", "name")}
        by_section.setdefault(finding.section, {})[finding.name] = own
    of_axes = {f.name.partition(" ")[0]: f.figures.get("verdict") for f in findings if f.section == TRIALS}
    return {
        "meshwright": version,
        "holds": holds(findings),
        "seconds": round(seconds, 1),
        "verdicts": {axis: of_axes.get(axis) for axis in AXES},
        "repairs": list(dict.fromkeys(f.remedy for f in findings if f.remedy)),
        **by_section,
    }


def holds(findings: Sequence[Finding]) -> bool:
    """Return whether nothing failed; warnings, and what is optional, leave that be."""
    return all(finding.status != FAILURE for finding in findings)


# --- look at the host

LEAST_FILES, WANTED_FILES = 1024, 65_536
LEAST_PROCESSES, WANTED_PROCESSES = 4096, 65_536
"""A rank takes a process, and a thread for each core and for each connection; Linux counts threads."""


def host_findings() -> Iterator[Finding]:
    """Yield what the host gives to processes."""
    cores = usable_cores()
    system = f"{platform.system()} {platform.release()} on {platform.machine()}, {cores} core{'s' * (cores > 1)}"
    try:
        import psutil
    except ImportError:  # said already, among the versions
        yield Finding(HOST, "memory", NOTE, f"unknown; {system}", figures={"cores": cores})
    else:
        memory, limit = psutil.virtual_memory(), Path("/sys/fs/cgroup/memory.max")
        allowed = limit.read_text().strip() if limit.is_file() else "max"
        total = min(memory.total, int(allowed)) if allowed.isdigit() else memory.total
        text = f"{gibibytes(min(memory.available, total))} free of {gibibytes(total)}; {system}"
        figures = {"total": total, "free": memory.available, "cores": cores}
        yield Finding(HOST, "memory", OK, text, figures=figures)
    name, size = str(host.FOLDER), host.shared_memory()
    if size is None:
        yield Finding(HOST, name, NOTE, "there is none")
    elif size >= host.WANTED:
        yield Finding(HOST, name, OK, gibibytes(size), figures={"bytes": size})
    else:
        text = f"{gibibytes(size)}: NCCL's ranks exchange through it, and want 1 GiB or more"
        yield Finding(HOST, name, WARNING, text, host.REPAIR, {"bytes": size})
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
    yield from folder_findings()
    yield from network_findings()


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


# --- ask NVIDIA's driver for its version, its GPUs and the links between them

ASKED = ("--query-gpu=index,name,memory.total,driver_version,compute_mode", "--format=csv,noheader,nounits")
LINK = re.compile(r"^(?:NV\d+|PIX|PXB|PHB|NODE|SYS)$")


def graphics_findings() -> Iterator[Finding]:
    """Yield driver, GPUs and links; nothing where there is no driver."""
    rows = [[word.strip() for word in line.split(",")] for line in _ask(*ASKED).splitlines()]
    rows = [row for row in rows if len(row) == 5]
    if not rows:
        return
    release = re.search(r"CUDA Version:\s*([\d.]+)", _ask())
    newest = release.group(1) if release else ""
    figures = {"driver": rows[0][3], "newest_release": newest}
    text = f"{rows[0][3]}{f', for CUDA up to {newest}' if newest else ''}"
    yield Finding(HOST, "driver", OK, text, figures=figures)
    for index, name, mebibytes, _, mode in rows:
        size = f", {gibibytes(float(mebibytes) * 2**20)}" if mebibytes.isdigit() else ""
        yield Finding(
            HOST, f"GPU {index}", OK, f"{name}{size}{f', {mode}' if mode not in ('Default', '[N/A]') else ''}"
        )
    links = links_of(_ask("topo", "-m")) if len(rows) > 1 else {}
    if links:
        text = ", ".join(f"{first}-{second} {kind}" for (first, second), kind in links.items())
        yield Finding(HOST, "links", OK, text, figures={f"{a}-{b}": kind for (a, b), kind in links.items()})


def links_of(topology: str) -> dict[tuple[int, int], str]:
    """Return the kind of link between each pair of GPUs: "NV18", "PIX", … as ``nvidia-smi topo -m`` prints them."""
    found: dict[tuple[int, int], str] = {}
    for line in topology.splitlines():
        head, *cells = re.sub(r"\x1b\[[\d;]*m", "", line).split() or [""]
        if match := re.fullmatch(r"GPU(\d+)", head):
            row = int(match.group(1))
            found |= {(row, column): cell for column, cell in enumerate(cells) if row < column and LINK.match(cell)}
    return found


def _ask(*words: str) -> str:
    """Return what nvidia-smi answers; empty where it is absent, fails or hangs."""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=8, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# --- compare the installed packages with the tested releases, and find a second torch

NEEDED = ("python", "torch")


def version_findings() -> Iterator[Finding]:
    """Yield a finding for each package of the tested releases, for missing dependencies, and for a second torch."""
    for package, tested in TESTED.items():
        here = installed(package)
        figures = {"version": here, "oldest": tested.oldest, "newest": tested.newest}
        repair = install_command(f"{package}>={tested.oldest}") if package != "python" else ""
        if here is None and package not in NEEDED:
            status, repair, words = NOTE, "", "absent, optional; tested"
        elif here is None and util.find_spec(package) is not None:
            status, repair, words = WARNING, "", "here without metadata; tested"
        elif here is None:
            status, words = FAILURE, "not installed; tested"
        elif tested.is_older(here):
            status, words = FAILURE, f"{here:<13} older than tested:"
        elif tested.is_newer(here):
            status, repair, words = WARNING, "", f"{here:<13} newer than tested:"
        else:
            status, repair, words = OK, "", f"{here:<13} tested:"
        yield Finding(VERSIONS, package, status, f"{words} {tested}", repair, figures)
    yield from _missing_dependencies()
    yield from second_torch(sys.path)


def _missing_dependencies() -> Iterator[Finding]:
    """Yield the packages without which meshwright's own commands fail, by its metadata."""
    try:
        lines = metadata.requires("meshwright") or []
    except metadata.PackageNotFoundError:  # imported from a source tree
        return
    for line in lines:
        name, at_least = re.match(r"([\w.-]+)(?:>=([\d.]+))?", line).groups()  # pyright: ignore[reportOptionalMemberAccess]
        if "extra ==" in line or name in TESTED:
            continue
        here = installed(name)
        if here is None or (at_least and numbers(here) < numbers(at_least)):
            text = f"{here or 'not installed'}; {line} is needed"
            yield Finding(VERSIONS, name, FAILURE, text, install_command(line), {"version": here})


def second_torch(path: list[str]) -> Iterator[Finding]:
    """Yield a finding if several copies of torch lie on the path: which one is imported depends on its order."""
    places = (Path(entry or os.curdir) / "torch" for entry in path)
    folders = list(dict.fromkeys(place.resolve() for place in places if (place / "__init__.py").is_file()))
    versions = {
        (found.version, str(Path(str(found.locate_file(""))).resolve()))
        for found in metadata.distributions(name="torch", path=path)
    }
    if len(folders) <= 1 and len(versions) <= 1:
        return
    first = folders[0] if folders else None
    several = f"{len(folders)} folders: {', '.join(map(str, folders))}" if len(folders) > 1 else ""
    named = ", ".join(f"{version} in {folder}" for version, folder in sorted(versions))
    text = f"several copies of torch ({several or named}); {first} is imported"
    # one is left without PYTHONPATH if the first copy is on it, else after a new install
    given = [str(Path(entry).resolve()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    install = install_command(f"torch>={TESTED['torch'].oldest}")
    remove = install.replace(" install ", " uninstall ").rsplit(" ", 1)[0]
    remedy = f"{remove} torch (until none is left), then {install}"
    if len(folders) > 1 and str(folders[0].parent) in given:
        remedy = "unset PYTHONPATH"
    elif len(folders) > 1 and folders[0].parent == Path.cwd():
        remedy = f"leave the folder {shlex.quote(str(folders[0].parent))}, or rename its torch"
    figures = {"folders": [str(folder) for folder in folders], "versions": sorted(versions)}
    yield Finding(VERSIONS, "torch, twice", FAILURE, text, remedy, figures)
