"""A real browser without a window, for tests: Chromium, driven by its chromedriver over HTTP (W3C WebDriver).

with Browser() as browser:
    browser.open("http://127.0.0.1:30000/pools")
    browser.type("#question", "a question" + ENTER)
"""

from __future__ import annotations

import base64
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.server import free_port, until

DRIVER, BROWSERS = "chromedriver", ("chromium", "chromium-browser", "google-chrome")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the standard's name of an element's id
CONTROL, TAB, ENTER = "\ue009", "\ue004", "\ue007"  # its keys
SECONDS = 60


def installed() -> str | None:
    """The browser, where one is installed with its driver."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    return found if shutil.which(DRIVER) else None


needs_browser = pytest.mark.skipif(
    installed() is None, reason="no browser: install Chromium and its driver (Debian: chromium chromium-driver)"
)


class Browser:
    """One window. Its errors are AssertionErrors with the driver's words.

    Args:
        dark: whether pages are told that the user prefers dark colours.
        width: of the window, in CSS pixels.
        height: the same.
    """

    def __init__(self, dark: bool = False, width: int = 1280, height: int = 900) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.session = ""
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-ext-browser-")
        self._arguments = [
            "--headless=new",
            "--no-sandbox",  # tests may run as root, for whom Chromium's sandbox does not start
            "--disable-dev-shm-usage",
            "--disable-gpu",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
            "--no-first-run",
            "--disable-background-networking",
            f"--window-size={width},{height}",
            f"--user-data-dir={self._folder.name}",
        ]
        self._dark = dark
        self._process: subprocess.Popen[bytes] | None = None

    # ---- life ----

    def __enter__(self) -> Browser:
        command = [str(shutil.which(DRIVER)), f"--port={self.port}"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(self._ready, SECONDS)
            chrome = {"binary": installed(), "args": self._arguments}
            wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
            made = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self.session = f"/session/{made['sessionId']}"
            scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
            self.devtools("Emulation.setEmulatedMedia", features=[scheme])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            if self.session:
                self._send("DELETE", self.session)
        finally:
            if self._process is not None:
                self._process.terminate()
                self._process.wait(timeout=SECONDS)
            self._folder.cleanup()

    def _ready(self) -> bool:
        try:
            return bool(requests.get(self.url + "/status", timeout=5).json()["value"]["ready"])
        except requests.RequestException:
            return False

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        sent = {} if body is None and method == "POST" else body
        answer = requests.request(method, self.url + path, json=sent, timeout=SECONDS)
        value = answer.json()["value"]
        assert answer.status_code == 200, f"{method} {path}: {value['error']}: {value['message'][:500]}"
        return value

    # ---- what a user does ----

    def open(self, url: str) -> None:
        """Load a page."""
        self._send("POST", f"{self.session}/url", {"url": url})

    def find(self, selector: str) -> str:
        """The id of the first element that a CSS selector names, once there is one."""
        body = {"using": "css selector", "value": selector}
        found: str = until(lambda: self._send("POST", f"{self.session}/elements", body), SECONDS)[0][ELEMENT]
        return found

    def click(self, selector: str) -> None:
        """Click on an element, which must be visible; on the one in its place where the page has just replaced it."""

        def clicked() -> bool:
            try:
                self._send("POST", f"{self.session}/element/{self.find(selector)}/click")
            except AssertionError as error:
                if "stale element reference" not in str(error):
                    raise
                return False
            return True

        until(clicked, SECONDS)

    def type(self, selector: str, text: str, clear: bool = True) -> None:
        """Type into an element, in place of what is there."""
        element = f"{self.session}/element/{self.find(selector)}"
        if clear:
            self._send("POST", f"{element}/clear")
        self._send("POST", f"{element}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Press keys one after the other, wherever the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._send("POST", f"{self.session}/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    # ---- what a user sees ----

    def text(self, selector: str = "body") -> str:
        """The visible text of an element."""
        found: str = self._send("GET", f"{self.session}/element/{self.find(selector)}/text")
        return found

    def wait_for(self, text: str, selector: str = "body") -> str:
        """The visible text of an element, once `text` is in it."""
        seen = ""

        def shows() -> bool:
            nonlocal seen
            seen = self.run(f"return document.querySelector({selector!r})?.innerText ?? ''")
            return text in seen

        try:
            until(shows, SECONDS)
        except AssertionError:
            raise AssertionError(f"{text!r} did not come up in {selector}: {seen[:2000]}") from None
        return seen

    def wait_for_element(self, selector: str) -> None:
        """Return once there is such an element."""
        until(lambda: self.run(f"return document.querySelector({selector!r}) !== null"), SECONDS)

    def run(self, script: str) -> Any:
        """What the body of a function of JavaScript returns, in the page."""
        return self._send("POST", f"{self.session}/execute/sync", {"script": script, "args": []})

    def complaints(self) -> list[str]:
        """What the browser said of errors since the last call: of scripts, and of what a policy refused."""
        entries = self._send("POST", f"{self.session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def devtools(self, method: str, **params: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._send("POST", f"{self.session}/goog/cdp/execute", {"cmd": method, "params": params})

    def picture(self, file: Path) -> None:
        """A PNG of the window."""
        file.write_bytes(base64.b64decode(self._send("GET", f"{self.session}/screenshot")))
