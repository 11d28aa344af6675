"""Define the one error family; each class tells its reader whose move it is."""

from __future__ import annotations


class MeshwrightError(Exception):
    """The base of every error that meshwright raises on purpose."""

    exit_status = 1


class ConfigError(MeshwrightError, ValueError):
    """A request that is wrong and that the reader can mend: the message says how."""

    exit_status = 2


class UnsupportedError(MeshwrightError, NotImplementedError):
    """A sound request that meshwright cannot fulfil: the message names the nearest thing that it can do."""

    exit_status = 3


class IntegrityError(MeshwrightError, RuntimeError):
    """Data on disk, or replicas in memory, that have changed."""


class NonFiniteError(MeshwrightError, ArithmeticError):
    """A gradient that is not a number, or infinite: the message names its parameter."""


class MissingExtraError(MeshwrightError, ImportError):
    """A needed optional dependency that is not installed: the message gives the command that installs it."""

    exit_status = 2

    def __init__(self, what: str, package: str, extra: str):
        super().__init__(
            f"{what} needs the package '{package}', which is not installed. Install it with: pip install"
            f" 'meshwright[{extra}]'"
        )
        self._made_of = what, package, extra

    def __reduce__(self):
        return type(self), self._made_of  # errors travel from workers to the command


def nearest(word: str, choices) -> str:
    """Return a clause that names the valid spelling closest to ``word`` (empty when none is close)."""
    import difflib

    spellings = {str(choice).lower(): str(choice) for choice in choices}
    found = difflib.get_close_matches(word.lower(), spellings, n=1, cutoff=0.6)
    return f" Did you mean '{spellings[found[0]]}'?" if found else ""
