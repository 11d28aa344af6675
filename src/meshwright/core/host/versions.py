"""State the versions of Python and of other libraries that were tested, and compare those that are here with them.

``docs/versions.md`` has what ran on each. The package's metadata has the same lower bounds.
"""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass
from importlib import metadata, util

from meshwright.core.errors import MissingExtraError, UnsupportedError


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
    """Refuse a package that is older than the tested range.

    Raises:
        UnsupportedError: what is tested, and what is here.
    """
    here, tested = installed(package), TESTED[package]
    if here is not None and tested.is_older(here):
        raise UnsupportedError(
            f"{package} {here} is here; meshwright is tested with {package} {tested} and needs {tested.oldest}: pip"
            f" install '{package}>={tested.oldest}'. {DOCTOR}"
        )


def refuse_unfit_torch() -> None:
    """Refuse to go on without torch, or with one that is older than the tested range.

    Raises:
        MissingExtraError: the command that installs torch.
        UnsupportedError: what is tested, and what is here.
    """
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
