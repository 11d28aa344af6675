"""The one error family. Each class answers one question of its reader: whose move is it?"""

from __future__ import annotations


class MeshwrightError(Exception):
    """Base of every error that meshwright raises on purpose."""

    exit_status = 1


class ConfigError(MeshwrightError, ValueError):
    """What was asked for is wrong, and the reader can mend it: the text says how."""

    exit_status = 2


class UnsupportedError(MeshwrightError, NotImplementedError):
    """What was asked for is sound, but meshwright cannot do it: the text names the nearest thing that it can."""

    exit_status = 3


class IntegrityError(MeshwrightError, RuntimeError):
    """Data on disk or replicas in memory are not what they were."""


class NonFiniteError(MeshwrightError, ArithmeticError):
    """A gradient is not a number, or infinite: the text names its parameter."""


class MissingExtraError(MeshwrightError, ImportError):
    """An optional dependency is needed and not installed: the text gives the command that installs it."""

    exit_status = 2

    def __init__(self, what: str, package: str, extra: str):
        super().__init__(
            f"{what} needs the package '{package}', which is not installed. Install it with: pip install 'meshwright[{extra}]'"
        )
        self._made_of = what, package, extra

    def __reduce__(self):
        return type(self), self._made_of  # errors travel from workers to the command


def nearest(word: str, choices) -> str:
    """A clause naming the valid spelling closest to ``word`` (empty when none is close)."""
    import difflib

    spellings = {str(choice).lower(): str(choice) for choice in choices}
    found = difflib.get_close_matches(word.lower(), spellings, n=1, cutoff=0.6)
    return f" Did you mean '{spellings[found[0]]}'?" if found else ""
