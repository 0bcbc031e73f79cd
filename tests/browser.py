"""A headless Chromium, driven over its DevTools protocol through two pipes: no driver, no port, no dependency."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from typing import Any

PATIENCE_S = 60.0
"""How long a browser on a busy machine may take for anything."""

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # of no use as root in a container, and impossible there
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
)
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "ArrowLeft": (37, ""), "ArrowRight": (39, "")}
_SHIFT = 8


def find_chromium() -> str | None:
    """The executable that PILOTFISH_CHROMIUM names, or one on the path."""
    found = map(shutil.which, filter(None, (os.environ.get("PILOTFISH_CHROMIUM"), *_NAMES)))
    return next((path for path in found if path), None)


class Page:
    """A tab.

    Attributes:
        errors: what the console complained of: messages, exceptions, refused and failed loads.
        requests: what the page asked for, as DevTools tells: url, method, postData.
    """

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._held, self._last = b"", 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol."""
        self._last += 1
        command = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while (found := self._read()).get("id") != self._last:
            pass
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']['message']}")
        result: dict[str, Any] = found["result"]
        return result

    def open(self, url: str) -> None:
        """Goes there, and waits until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def look(self, expression: str) -> Any:
        """What a JavaScript expression comes to, awaited, as JSON."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {_exception(found['exceptionDetails'])}")
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Until an expression comes to something true, which is returned."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.look(expression)):
            assert time.monotonic() < deadline, f"still not so: {expression}"
            time.sleep(0.02)
        return found

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key that gives no letter."""
        code, text = _KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": _SHIFT if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Writes into what has the focus."""
        self.call("Input.insertText", text=text)

    def hover(self, selector: str) -> None:
        """Moves the mouse over the first element that a selector finds."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **self._middle(selector))

    def click(self, selector: str) -> None:
        """Clicks on the first element that a selector finds."""
        for kind in ("mousePressed", "mouseReleased"):
            place = self._middle(selector)
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def size(self, width: int, height: int, *, scale: float = 1, dark: bool = False) -> None:
        """Of the window, and the colours that its owner prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """What is seen, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _middle(self, selector: str) -> dict[str, float]:
        quoted = json.dumps(selector)
        self.look(f"document.querySelector({quoted}).scrollIntoView({{block: 'nearest'}})")
        box = self.look(f"document.querySelector({quoted}).getBoundingClientRect().toJSON()")
        return {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}

    def _read(self) -> dict[str, Any]:
        """The next message; events are noted."""
        while b"\0" not in self._held:
            ready, _, _ = select([self._back], [], [], PATIENCE_S)
            assert ready, "Chromium does not answer"
            data = os.read(self._back, 1 << 16)
            assert data, "Chromium has ended"
            self._held += data
        text, _, self._held = self._held.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(_exception(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert", "warning"):
            self.errors.append(" ".join(str(each.get("value", each.get("description"))) for each in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


def _exception(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description", details["text"]))


@contextmanager
def browsing(executable: str, profile: Path) -> Iterator[Page]:
    """A browser with one page.

    Args:
        executable: of Chromium.
        profile: an empty folder for what it writes.
    """
    theirs_in, to = os.pipe()
    back, theirs_out = os.pipe()
    # Chromium reads from 3 and writes to 4; first out of the way of those, or one would close the other.
    high_in, high_out = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out))
    argv = [executable, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    quiet = os.open(os.devnull, os.O_RDWR)
    actions = [
        *((os.POSIX_SPAWN_DUP2, quiet, end) for end in (0, 1, 2)),
        (os.POSIX_SPAWN_DUP2, high_in, 3),
        (os.POSIX_SPAWN_DUP2, high_out, 4),
    ]
    child = os.posix_spawn(executable, argv, os.environ, file_actions=actions, setsid=True)
    for end in (theirs_in, theirs_out, high_in, high_out, quiet):
        os.close(end)
    try:
        yield Page(to, back)
    finally:
        os.close(to)
        os.close(back)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # its own session: the browser and all that it started
        os.waitpid(child, 0)
