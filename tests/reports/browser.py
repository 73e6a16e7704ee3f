"""A headless Chromium, spoken to through the pipe of its DevTools protocol: no driver and no network needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
PATIENCE = 60.0  # seconds for one answer
TOOLS = """
window.$ = (selector) => document.querySelector(selector);
window.$$ = (selector) => [...document.querySelectorAll(selector)];
window.wait = (milliseconds = 50) => new Promise((done) => setTimeout(done, milliseconds));
window.until = async (what) => { for (let trial = 0; trial < 400 && !what(); trial++) await wait(25); };
"""


class Browser:
    """One page at a time. ``errors``: what the page complained of, ``requests``: all that it asked for."""

    def __init__(self) -> None:
        ours, theirs = os.pipe(), os.pipe()  # (read, write): from it, to it
        self._read, self._write = ours[0], theirs[1]

        def pipes() -> None:  # the protocol's own numbers: it reads 3 and writes 4
            spare = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (theirs[0], ours[1])]
            for number, one in zip((3, 4), spare, strict=True):
                os.dup2(one, number)

        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [str(CHROMIUM), *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=pipes, pass_fds=(3, 4), start_new_session=True,
        )  # fmt: skip
        os.close(ours[1])
        os.close(theirs[0])
        self._buffer, self._count, self._session = b"", 0, ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=TOOLS)

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result; what the page reports meanwhile is kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer.get('error')}"
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0], "Chromium does not answer"
            piece = os.read(self._read, 1 << 20)
            assert piece, "Chromium has ended"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._keep(message.get("method"), message.get("params", {}))
        return message

    def _keep(self, event: str | None, facts: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(one.get("value", one.get("description"))) for one in facts["args"]))
        elif event == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.errors.append(facts["entry"]["text"])
        elif event == "Page.javascriptDialogOpening":
            self.errors.append(f"dialog: {facts['message']}")
        elif event == "Network.requestWillBeSent" and not facts["request"]["url"].startswith("data:"):
            self.requests.append(facts["request"]["url"])

    def open(
        self, path: Path, width: int = 1280, height: int = 900, dark: bool = False, everything: bool = True
    ) -> None:
        """Show ``path``; with ``everything`` every plot is scrolled to and drawn, before the page's top is shown."""
        self.errors, self.requests = [], []
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
                  {"name": "prefers-reduced-motion", "value": "reduce"}]  # fmt: skip
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"file://{path}")
        self.run("await until(() => document.readyState === 'complete' && window.Plotly); await wait(100); return 0;")
        if everything:
            self.run(
                "for (const each of $$('details.folded')) each.open = true;"
                "for (const each of $$('.plot')) { each.scrollIntoView(); await until(() => each.dataset.drawn); }"
                "scrollTo(0, 0); await wait(); return 0;"
            )

    def run(self, script: str) -> Any:
        """What ``script`` (the body of an async function) returns."""
        asked = {"expression": f"(async () => {{ {script} }})()", "awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]["exception"]["description"]
        return answer["result"].get("value")

    def shoot(self, path: Path) -> Path:
        """A screenshot of what the window shows."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path
