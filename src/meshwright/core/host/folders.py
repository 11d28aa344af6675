"""Name the folders outside a run that meshwright writes into."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/meshwright``, or ``~/.cache/meshwright`` where the variable is unset.

    The XDG specification says to ignore a relative path, so it counts as unset.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "meshwright"
