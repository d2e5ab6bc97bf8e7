"""Start the project's scripts as users do, wait for what they print or write, and see that nothing is left behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

ROOT = Path(__file__).parent.parent
LOOPBACK = ["--host_maddrs", "/ip4/127.0.0.1/tcp/0"]
T = TypeVar("T")


def wait_until(condition: Callable[[], T], seconds: float, what: str) -> T:
    """The condition's first true value; fails the test when there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:g} s: {what}")


def make_prefix() -> str:
    """A run of its own for each swarm, so that tests cannot meet."""
    return f"test_{uuid.uuid4().hex[:12]}"


class Script:
    """A script in a session of its own, its output in a file.

    :param prefix: words before the command, as netlab's that run it on a host; the command must keep their process id
    """

    def __init__(self, log: Path, *command: object, env: dict[str, str] | None = None, prefix: list[str] = ()):
        self.log, self.command = log, [str(word) for word in command]
        with open(log, "w") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, *self.command],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.session = self.process.pid

    @property
    def text(self) -> str:
        return self.log.read_text()

    def json_lines(self) -> list[dict]:
        return [json.loads(line) for line in self.text.splitlines() if line.startswith("{") and line.endswith("}")]

    def wait_for(self, pattern: str, seconds: float = 60) -> re.Match:
        """The first match in the output; fails when the script ends without."""

        def search():
            match = re.search(pattern, self.text)
            if match is None and self.process.poll() is not None:
                match = re.search(pattern, self.text)
                assert match, f"{self.command} ended with {self.process.returncode} without {pattern!r}:\n{self.text}"
            return match

        try:
            return wait_until(search, seconds, f"{pattern!r} from {self.command}")
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.text[-3000:]}") from None

    def wait(self, seconds: float = 60) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.command} did not end within {seconds} s:\n{self.text[-3000:]}") from None

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal sends it: to the script's process group."""
        os.killpg(self.session, signal.SIGINT)

    def send_to_all(self, number: int) -> None:
        """Send a signal to the script and all it has started."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def kill(self) -> None:
        """kill -9 of the script and all it has started."""
        self.send_to_all(signal.SIGKILL)

    def freeze(self) -> None:
        """As a machine that sleeps, until `thaw`."""
        self.send_to_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send_to_all(signal.SIGCONT)

    def processes(self) -> list[psutil.Process]:
        """What runs of the script's session."""
        running = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                if os.getsid(process.pid) == self.session and process.status() != psutil.STATUS_ZOMBIE:
                    running.append(process)
        return running

    def left_processes(self) -> list[str]:
        """Command lines of what still runs of the script's session."""
        left = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                left.append(" ".join(process.cmdline()))
        return left

    def assert_clean_end(self, seconds: float = 60) -> None:
        """The script ends, as after a normal stop: exit code 0, no traceback, no process left."""
        assert self.wait(seconds) == 0, self.text[-3000:]
        assert "Traceback" not in self.text, self.text[-3000:]
        wait_until(lambda: not self.left_processes(), 5, f"no process left of {self.command}: {self.left_processes()}")
