"""Write a run's figures to TensorBoard files."""

from __future__ import annotations

import importlib.util
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.core.errors import ConfigError, MissingExtraError, install_command

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

MODES = ("auto", "on", "off")


def check(mode: str) -> None:
    """Refuse a mode that is unknown or unavailable.

    Raises:
        ConfigError: ``mode`` is none of auto, on, off.
        MissingExtraError: ``mode`` is on, and the package is not installed.
    """
    if mode not in MODES:
        raise ConfigError(f"logging.tensorboard = {mode!r} is none of {', '.join(MODES)}")
    if mode == "on" and not _is_installed():
        raise MissingExtraError("logging.tensorboard = 'on'", "tensorboard", "track")


def why_not(mode: str) -> str:
    """Return the reason why this mode writes no TensorBoard files; empty if it does. Raises as ``check``."""
    check(mode)
    if mode == "off":
        return "off (tensorboard = 'off')"
    return (
        ""
        if _is_installed()
        else f"not written: the package 'tensorboard' is not installed ({install_command('tensorboard')})"
    )


class TensorBoard:
    """The tracker that writes a run's numeric figures, but no events, to ``<run_folder>/tensorboard``.

    After a resume TensorBoard purges the later steps.
    """

    def __init__(self, run_folder: str | Path):
        self.folder = Path(run_folder) / "tensorboard"
        self._writer: SummaryWriter | None = None
        self._resumed_at: int | None = None

    def log(self, step: int, values: Mapping[str, object]) -> None:
        writer = self._open()
        for name, value in values.items():
            if isinstance(value, numbers.Real) and not isinstance(value, bool):
                writer.add_scalar(name, float(value), global_step=step)

    def event(self, name: str, values: Mapping[str, object], step: int | None = None) -> None:
        """Do nothing."""

    def resumed(self, step: int) -> None:
        self.close()
        self._resumed_at = step

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            # Here and not above: the import takes 0.15 s, and seconds where tensorflow is installed beside it.
            from torch.utils.tensorboard.writer import SummaryWriter

            purge = None if self._resumed_at is None else self._resumed_at + 1
            self._writer = SummaryWriter(str(self.folder), purge_step=purge)
        return self._writer


def _is_installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None
