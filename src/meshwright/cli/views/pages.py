"""Write a page to the file that the command line names."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.core.errors import ConfigError
from meshwright.core.files import replace_text


def check_page(target: Path) -> None:
    """Raise ConfigError where a page cannot be written to ``target``, before the work for it."""
    file = target.expanduser()
    folder = file.parent
    why = ""
    if not folder.is_dir():
        why = f"there is no folder {folder}"
    elif file.is_dir():
        why = "it is a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        why = f"the folder {folder} cannot be written to"
    if why:
        raise ConfigError(f"--html = {target}: cannot write this file ({why})")


def write_page(target: Path, text: str) -> str:
    """Write a page in place of an older one; return what to tell the user.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        replace_text(target.expanduser(), text)
    except OSError as error:
        raise ConfigError(f"--html = {target}: cannot write this file ({error.strerror or error})") from None
    return f"wrote {target}: open it in a browser"
