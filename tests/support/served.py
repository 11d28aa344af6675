"""Run ``meshwright`` and the scripts that it starts in forks of one process, which has imported torch."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

JUDGES = Path(__file__).parents[2] / "silent100" / "judges"
LONGEST = 300.0
"""Seconds for a command."""


class Meshwright:
    """The process, started with the first command: ``Meshwright().run(["blame", "one", "many"])``.

    Words of the form ``python -c CODE`` behind ``--`` become a file, because only files run in forks.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.folder = tempfile.TemporaryDirectory(prefix="served-")
        self.scripts = 0

    def run(self, words: Sequence[object]) -> subprocess.CompletedProcess[str]:
        """Run a verb to its end, as ``subprocess.run(…, capture_output=True, text=True)`` does."""
        if self.process is None:
            command, pipe = [sys.executable, "-m", "support.served"], subprocess.PIPE
            path = os.pathsep.join([str(JUDGES), str(Path(__file__).parents[1]), *filter(None, sys.path)])
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        texts = list(map(str, words))
        if "-c" in texts:
            at, self.scripts = texts.index("-c"), self.scripts + 1
            script = Path(self.folder.name, f"{self.scripts}.py")
            script.write_text(texts[at + 1], encoding="utf-8")
            texts[at : at + 2] = [str(script)]
        printed = {name: str(Path(self.folder.name, name)) for name in ("out", "err")}
        self.process.stdin.write(json.dumps({"words": texts, "folder": os.getcwd(), **printed}) + "\n")
        self.process.stdin.flush()
        late = threading.Timer(LONGEST, os.killpg, (self.process.pid, signal.SIGKILL))
        late.start()
        answer = self.process.stdout.readline()
        late.cancel()
        assert answer, f"no end in {LONGEST:g} s: {texts}"
        texts_printed = [Path(printed[name]).read_text(encoding="utf-8") for name in ("out", "err")]
        return subprocess.CompletedProcess(texts, json.loads(answer)["status"], *texts_printed)

    def close(self) -> None:
        """Let the process end; the next command starts another: pytest's workers may come back to a module of tests."""
        if self.process is not None:
            self.process.communicate()
        self.folder.cleanup()
        self.process, self.folder = None, tempfile.TemporaryDirectory(prefix="served-")


def asked(words: list[str], folder: str, out: str, err: str) -> dict[str, Any]:
    """Run a verb in a fork; what it starts runs in forks too."""
    import forks

    def verb() -> None:
        os.chdir(folder)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        subprocess.run = forks.run
        sys.argv = ["meshwright", *words]
        runpy.run_module("meshwright", run_name="__main__", alter_sys=True)

    return {"status": os.waitstatus_to_exitcode(os.waitpid(forks.forked(verb), 0)[1])}


if __name__ == "__main__":
    import forks

    forks.serve(asked)
