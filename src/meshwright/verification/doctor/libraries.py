"""Compare the installed packages with the tested releases, and find a second torch; without importing any of them."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from meshwright.core.errors import install_command
from meshwright.core.host.versions import TESTED, installed, numbers

from .findings import FAILURE, NOTE, OK, VERSIONS, WARNING, Finding

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
    folders = list(dict.fromkeys(place.resolve() for entry in path if (place := _torch_in(entry)) is not None))
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
    yield Finding(
        VERSIONS,
        "torch, twice",
        FAILURE,
        text,
        _removal(path, folders),
        {"folders": [str(folder) for folder in folders], "versions": sorted(versions)},
    )


def _torch_in(entry: str) -> Path | None:
    place = Path(entry or os.curdir) / "torch"
    return place if (place / "__init__.py").is_file() else None


def _removal(path: list[str], folders: list[Path]) -> str:
    """Return the command that leaves one torch: without PYTHONPATH if the first copy is on it, else a new install."""
    given = [str(Path(entry).resolve()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if len(folders) > 1 and str(folders[0].parent) in given:
        return "unset PYTHONPATH"
    if len(folders) > 1 and folders[0].parent == Path.cwd():
        return f"leave the folder {shlex.quote(str(folders[0].parent))}, or rename its torch"
    install = install_command(f"torch>={TESTED['torch'].oldest}")
    return f"{install.replace(' install ', ' uninstall ').rsplit(' ', 1)[0]} torch (until none is left), then {install}"
