"""A real browser, Debian's chromium. It is controlled through a pipe (--remote-debugging-pipe), without a driver."""

import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

from processes import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
ANSWER_TIMEOUT = 60.0  # seconds; a loaded machine is slow


class Browser:
    """A browser tab and the actions of the tests."""

    def __init__(self, commands: int, answers: int):
        self.commands, self.answers, self.numbers, self.unread = commands, answers, itertools.count(1), b""
        #: the page's errors, including violations of its policy
        self.complaints: list[str] = []
        self.session = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params) -> dict:
        """Send a command of the DevTools protocol, and return its result."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != number:
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.complaints.append(answer["params"]["entry"]["text"])
            elif answer.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(answer["params"]["exceptionDetails"]))
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def read(self) -> dict:
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while b"\0" not in self.unread:
            ready, *_ = select.select([self.answers], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self.answers, 1 << 20) if ready else b""
            assert data, "the browser has ended" if ready else f"the browser has not answered in {ANSWER_TIMEOUT:g} s"
            self.unread += data
        message, _, self.unread = self.unread.partition(b"\0")
        return json.loads(message)

    def run(self, script: str):
        """Return the value of an expression in the page."""
        result = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, address: str) -> None:
        self.ask("Page.navigate", url=address)
        wait_until(lambda: self.run("document.readyState") == "complete", 60, f"{address} is loaded")

    def wait_for(self, script: str, seconds: float = 60):
        try:
            return wait_until(lambda: self.run(script), seconds, f"in the page: {script}")
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.complaints}\n{self.run('document.body.innerText')}") from None

    def click(self, selector: str) -> None:
        """Click with the mouse, because a page may copy only after a real click."""
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.run(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        where = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)

    def read_clipboard(self) -> str:
        self.ask("Browser.grantPermissions", permissions=["clipboardReadWrite"])
        return self.run("navigator.clipboard.readText()")

    def set_width(self, width: int) -> None:
        options = {"height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", width=width, **options)


@contextlib.contextmanager
def open_browser(folder: Path):
    """:param folder: the folder for its profile"""
    (theirs_in, commands), (answers, theirs_out) = os.pipe(), os.pipe()
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]
    # it reads commands from file 3 and answers in file 4
    shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} 2>/dev/null'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command], pass_fds=[theirs_in, theirs_out], start_new_session=True
    )
    os.close(theirs_in), os.close(theirs_out)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands), os.close(answers)  # ends it
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
