"""A headless Chromium, controlled by DevTools messages over two pipes.

Decides how it is started and ended, and how a test uses a page: reads a value, waits for a condition, presses a key,
takes a screenshot. Does not know the pages.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
WAIT_S = 15.0
_FREE = 10  # higher than the browser's descriptors 3 and 4


class Page:
    """One tab. Raises AssertionError if something does not happen in time."""

    def __init__(self, write: int, read: int) -> None:
        self._write = write
        self._read = read
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.said: list[str] = []  # errors of the page: console, content security policy, uncaught exceptions

    def open(self, url: str) -> None:
        """Open a page, and wait until it is completely loaded."""
        self.ask("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def attach(self) -> None:
        """Create the tab that later commands refer to."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> Any:
        """Send one DevTools command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + WAIT_S
        while True:
            answer = self._next(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _next(self, until: float) -> Any:
        while b"\0" not in self._received:
            readable, _, _ = select([self._read], [], [], max(until - time.monotonic(), 0))
            assert readable, "the browser does not answer"
            data = os.read(self._read, 1 << 16)
            assert data, "the browser is gone"
            self._received += data
        message, self._received = self._received.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: Any) -> None:
        method, told = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(told["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.said.append(f"{told['entry']['level']}: {told['entry']['text']}")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        asked = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in asked, asked["exceptionDetails"]
        return asked["result"].get("value")

    def until(self, script: str, within_s: float = WAIT_S) -> Any:
        """The value of an expression as soon as it is true."""
        end = time.monotonic() + within_s
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}; the page said {self.said}"
            time.sleep(0.05)
        return value

    def press(self, key: str, code: int) -> None:
        """Press a key."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    def look(self, scheme: str, width: int, height: int) -> None:
        """Set the colour scheme ("dark" or "light") and the size of the window."""
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self) -> bytes:
        """The window as a PNG."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browsing(profile: Path, *more: str) -> Iterator[Page]:
    """A browser until the block ends."""
    assert CHROMIUM is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    def place() -> None:  # the browser reads descriptor 3 and writes 4
        theirs = [fcntl.fcntl(one, fcntl.F_DUPFD, _FREE) for one in (to_read, from_write)]
        for number, one in enumerate(theirs, 3):
            os.dup2(one, number)

    command: Sequence[str] = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", *more, "about:blank"]
    process = subprocess.Popen(
        command, preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(to_read)
    os.close(from_write)
    try:
        page = Page(to_write, from_read)
        page.attach()
        yield page
    finally:
        os.close(to_write)  # the browser exits when its command pipe closes
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_read)
