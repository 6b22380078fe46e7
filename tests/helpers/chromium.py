"""A real browser, controlled by its DevTools protocol, which clicks where an element is drawn, and types."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.helpers.programs import CHROMIUM

START_TIMEOUT_S = 60.0
KEYS = {"ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "c": 67}


class Tab:
    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self.problems: list[str] = []
        self._login: tuple[str, str] | None = None
        for domain in ("Runtime", "Page", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Return the result of a command. Errors and logs of the page are added to `problems`."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=START_TIMEOUT_S))
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(json.dumps(message["params"]))
            if message.get("method") == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                if not url.startswith("file:"):
                    self.problems.append(f"asks for {url}")
            if message.get("method", "").startswith("Fetch."):
                self._let_pass(message["method"], message["params"])
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    def log_in(self, user: str, password: str) -> None:
        self._login = (user, password)
        self.call("Fetch.enable", handleAuthRequests=True)

    def _let_pass(self, method: str, params: Any) -> None:
        """Continue a paused request, without waiting for the response to this command."""
        answer: dict[str, Any] = {"requestId": params["requestId"]}
        if method == "Fetch.authRequired":
            assert self._login is not None
            answer["authChallengeResponse"] = {
                "response": "ProvideCredentials",
                "username": self._login[0],
                "password": self._login[1],
            }
        command = "Fetch.continueWithAuth" if method == "Fetch.authRequired" else "Fetch.continueRequest"
        self._socket.send(json.dumps({"id": -1, "method": command, "params": answer}))

    def open(self, file: Path) -> None:
        self.call("Page.navigate", url=file.as_uri())
        self.wait(f"document.readyState === 'complete' && location.href === {json.dumps(file.as_uri())}")

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        return self.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.innerText)")

    def wait(self, expression: str) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while not self.value(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        element = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{element}.scrollIntoView({{block: 'nearest', inline: 'nearest'}})")
        self.frame()
        box = self.value(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({element}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def frame(self) -> None:
        drawn = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.call("Runtime.evaluate", expression=drawn, awaitPromise=True)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def choose(self, selector: str, value: str) -> None:
        """Choose another entry of a list, whose menu is not part of the page."""
        self.value(
            f"((list) => {{ list.value = {json.dumps(value)}; list.dispatchEvent(new Event('change')); }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )


@contextmanager
def open_tab(profile: Path, *options: str) -> Iterator[Tab]:
    assert CHROMIUM is not None
    arguments = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    arguments += " --remote-debugging-port=0 --window-size=1280,900"
    command = [CHROMIUM, *arguments.split(), *options, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            # No pings: a browser on a busy machine answers them late, and every wait has a deadline own.
            with connect(_address(profile, browser), max_size=None, ping_interval=None) as socket:
                yield Tab(socket)
        finally:
            browser.kill()


def _address(profile: Path, browser: subprocess.Popen) -> str:
    """Return the address of the open tab. The browser writes its port into its profile."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        assert browser.poll() is None, f"{CHROMIUM} ended with {browser.returncode}"
        with suppress(OSError, ValueError, IndexError, StopIteration):
            port = (profile / "DevToolsActivePort").read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=START_TIMEOUT_S) as reply:
                return next(one["webSocketDebuggerUrl"] for one in json.load(reply) if one["type"] == "page")
        time.sleep(0.05)
    raise AssertionError(f"{CHROMIUM} opens no tab")
