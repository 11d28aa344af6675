#!/usr/bin/env python3
"""Programs beside Python with which tests look at pages and completion: a browser, and other shells than bash.

    test_programs.py check            which of them this machine has; says what is missing
    test_programs.py install          get what is missing by apt-get (Debian or Ubuntu, root)

Tests that need one that is missing are skipped, and say so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PROGRAMS = {"chromium": ("chromium", "chromium-browser", "google-chrome", "chrome"), "zsh": ("zsh",), "fish": ("fish",)}
"""Debian's package -> commands, any of which will do."""
PATIENCE_SEC = 300
"""Longest that apt-get may take, where no network answers."""


def main(words: list[str]) -> int:
    match words:
        case ["check"]:
            return say(what_is_missing())
        case ["install"]:
            return say(install())
    print(__doc__)
    return 2


def say(problem: str) -> int:
    if problem:
        print(f"test_programs: {problem}", file=sys.stderr)
    return 1 if problem else 0


def missing() -> list[str]:
    return [package for package, commands in PROGRAMS.items() if not any(map(shutil.which, commands))]


def what_is_missing() -> str:
    names = ", ".join(missing())
    return names and f"{names} missing: their tests are skipped"


def install() -> str:
    """Get what is missing. Returns why that is not possible here, or nothing."""
    if not missing():
        return ""
    if shutil.which("apt-get") is None or os.geteuid():
        return f"{what_is_missing()}, and packages cannot be installed here (that takes apt-get and root)"
    for words in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", *missing()]):
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        command = ["timeout", str(PATIENCE_SEC), "apt-get", *words]
        done = subprocess.run(command, env=quiet, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr or done.stdout).strip()[-300:] or f"status {done.returncode}"
            return f"{what_is_missing()}; apt-get {words[0]} failed: {why}"
    return what_is_missing()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
