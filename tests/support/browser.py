"""A Chromium without a window, driven over a pipe by its DevTools protocol: pages at a width, light or dark, and what
became of them.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))),
    None,
)
WHY_NOT = "no Chromium on this machine (scripts/test_programs.py install gets it)"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")


class Browser:
    """One process with one page; ``with`` ends it."""

    def __init__(self, folder: Path):
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        script = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        words = [str(BROWSER), *FLAGS, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", str(to_browser), str(from_browser), *words],
            pass_fds=(to_browser, from_browser),
            env={**os.environ, "HOME": str(folder)},
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._read, self._session, self.console, self.loads = 0, b"", "", [], 0
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a call of the protocol."""
        self._number += 1
        call: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            call["sessionId"] = self._session
        os.write(self._to, json.dumps(call).encode() + b"\0")
        while (message := self._message()).get("id") != self._number:
            pass
        assert "error" not in message, message
        return message["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            assert select.select([self._from], [], [], 60)[0], "the browser says nothing"
            got = os.read(self._from, 1 << 16)
            assert got, "the browser has ended"
            self._read += got
        text, _, self._read = self._read.partition(b"\0")
        message = json.loads(text)
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.console.append(message["params"])
        self.loads += message.get("method") == "Page.loadEventFired"
        return message

    def show(self, path: Path, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Open a page at a width in CSS pixels, and wait until it is loaded."""
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        before = self.loads
        self.ask("Page.navigate", url=path.as_uri())
        self.wait_for_load(before)

    def wait_for_load(self, before: int) -> None:
        """Wait until a page was loaded that is not among the first ``before``."""
        while self.loads == before:
            self._message()

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, as JSON."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 8000), "scale": 1}
        data = self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))
