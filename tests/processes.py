"""Start the project's scripts as users do, wait for their output, and check that they leave no process behind."""

import contextlib
import ctypes
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import psutil

ROOT = Path(__file__).parent.parent
LOOPBACK = ["--host_maddrs", "/ip4/127.0.0.1/tcp/0"]


def wait_until(condition: Callable[[], object], seconds: float, what: str):
    """Return the condition's first true value, or fail the test after this time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:g} s: {what}")


def list_running(processes: Iterable[psutil.Process], session: int | None = None) -> list[psutil.Process]:
    """Return the processes, of this session or any, that have not ended."""
    running = []
    for process in processes:
        with contextlib.suppress(ProcessLookupError, psutil.Error):  # it ends while it is looked at
            if session in (None, os.getsid(process.pid)) and process.is_running():
                running += [process] if process.status() != psutil.STATUS_ZOMBIE else []
    return running


def wait_for_end(processes: list[psutil.Process], seconds: float) -> None:
    wait_until(lambda: not list_running(processes), seconds, f"the end of {processes}")


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_prefix() -> str:
    """Return a unique run name, so that swarms of different tests never meet."""
    return f"test_{uuid.uuid4().hex[:12]}"


class ForkedProcess:
    """A child process that the fork server has made, with an interface like subprocess.Popen."""

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# variables that no import reads (torch sets the last ones when it compiles); if others differ, a program does not fork
LATE_VARIABLES = re.compile(
    "CLOCK_FILE|CUDA_VISIBLE_DEVICES|GOGC|GOMAXPROCS|HF_ENDPOINT|HF_TOKEN|KMP_.*|LIBP2P_.*|OBSERVED|PYTEST_.*|PYTHONPATH|"
    "WANDB_.*|_TORCHINDUCTOR_.*"
)


class ForkServer:
    """The connection to fork_server.py, which `start` starts with its end of the socket."""

    def __init__(self, start: Callable[["ForkServer", socket.socket], None]):
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.env = make_environment()
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        start(self, theirs)
        theirs.close()

    def can_start(self, words: list[str], env: dict[str, str]) -> bool:
        is_program = words[0] in ("-c", "-m") or not words[0].startswith("-")
        return is_program and all(LATE_VARIABLES.fullmatch(name) for name, _ in env.items() ^ self.env.items())

    def start(self, files: list[int], **request) -> ForkedProcess:
        """Start a program with these files as its standard ones, and these arguments of fork_server.become_program."""
        # only for this moment, because orphans of other programs belong to init
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
        try:
            socket.send_fds(self.requests, [json.dumps(request).encode()], files)
            pid, is_child = self.requests.recv(64), self.requests.recv(64)
        finally:
            ctypes.CDLL(None).prctl(36, 0)
        if not is_child:
            self.errors.seek(0)
            raise OSError(f"tests/fork_server.py has ended:\n{self.errors.read()}")
        return ForkedProcess(int(pid))


IS_FORKING = False  # whether programs start as forks of one process, which conftest.py decides
FORK_SERVER: ForkServer | None = None  # until the first program starts, unless parallel.py has set it


def start_fork_server(server: ForkServer, theirs: socket.socket) -> None:
    command = [sys.executable, ROOT / "tests" / "fork_server.py", str(theirs.fileno())]
    files = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=server.errors)
    subprocess.Popen(command, env=server.env, **files, pass_fds=[theirs.fileno()], start_new_session=True)


def make_environment(**more: str) -> dict[str, str]:
    """Return this process's environment and more, for a program that shares the cores with others."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **more}


def start_python(
    *words: object, stdout, stderr, cwd=ROOT, env=None, prefix: Sequence[str] = (), is_real=False, stdin=None
) -> subprocess.Popen | ForkedProcess:
    """Start `python` followed by these words, in a session of its own.

    :param env: more variables for its environment
    :param prefix: words before the command, such as netlab's for a host; the command must keep their process id
    :param is_real: whether to start it without the fork server
    :param stdin: the descriptor of a terminal; None: an empty input
    """
    global FORK_SERVER
    words, env = [str(word) for word in words], make_environment(**(env or {}))
    with open(os.devnull if stdin is None else os.dup(stdin)) as stdin:
        netns = prefix[3] if list(prefix[:3]) == ["ip", "netns", "exec"] else None
        if IS_FORKING and (netns or not prefix) and not is_real:
            FORK_SERVER = FORK_SERVER or ForkServer(start_fork_server)
            if FORK_SERVER.can_start(words, env):
                files = [file.fileno() for file in (stdin, stdout, stderr)]
                return FORK_SERVER.start(files, words=words, cwd=str(cwd), env=env, netns=netns)
        command, files = [*prefix, sys.executable, *words], dict(stdin=stdin, stdout=stdout, stderr=stderr)
        return subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True, **files)


def run_python(*words: object, timeout: float = 120, expect: int | None = None, **options) -> CompletedProcess:
    """Run `python` followed by these words, like subprocess.run, and expect this exit code, by default any."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = start_python(*words, stdout=output, stderr=errors, **options)
        try:
            process.wait(timeout)
        finally:
            process.kill()
        output.seek(0)
        errors.seek(0)
        result = CompletedProcess(words, process.returncode, output.read(), errors.read())
    assert expect in (None, result.returncode), f"{words[0]} ended with {result.returncode}:\n{result.stderr[-3000:]}"
    return result


class Script:
    """A script in its own session, with its output in a file. Its options are those of `start_python`."""

    def __init__(self, log: Path, *command: object, **options):
        self.log, self.command = log, [str(word) for word in command]
        with open(log, "w") as output:
            self.process = start_python(*command, stdout=output, stderr=output, **options)
        self.session = self.process.pid

    @property
    def text(self) -> str:
        return self.log.read_text()

    def json_lines(self) -> list[dict]:
        return [json.loads(line) for line in self.text.splitlines() if line.startswith("{") and line.endswith("}")]

    def wait_for(self, pattern: str, seconds: float = 60) -> re.Match:
        """Return the first match in the output; fail if the script ends without one."""

        def search():
            has_ended = self.process.poll() is not None
            match = re.search(pattern, self.text)
            assert match or not has_ended, f"{self.command} ended with {self.process.returncode} without {pattern!r}"
            return match

        try:
            return wait_until(search, seconds, f"{pattern!r} from {self.command}")
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.text[-3000:]}") from None

    def wait(self, seconds: float = 60) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.command} did not end within {seconds} s:\n{self.text[-3000:]}") from None

    def interrupt(self) -> None:
        os.killpg(self.session, signal.SIGINT)

    def kill(self, number: int = signal.SIGKILL) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def freeze(self) -> None:
        self.kill(signal.SIGSTOP)  # like a machine that sleeps

    def thaw(self) -> None:
        self.kill(signal.SIGCONT)

    def processes(self) -> list[psutil.Process]:
        return list_running(psutil.process_iter(), self.session)

    def left_processes(self) -> list[str]:
        return list(map(str, self.processes()))

    def assert_clean_end(self, seconds: float = 60, code: int = 0) -> None:
        """Wait for a normal end: this exit code, no traceback, no process left, and no failure that hivemind logs and
        hides, as of an optimizer's step."""
        assert self.wait(seconds) == code and "Traceback" not in self.text, self.text[-3000:]
        assert "error: [hivemind]" not in self.text, self.text[-3000:]
        wait_until(lambda: not self.left_processes(), 60, f"no process left of {self.command}: {self.left_processes()}")

    def assert_user_error(self, pattern: str, seconds: float = 60) -> None:
        """Wait for the end by a UserError, and find the pattern in its line."""
        self.assert_clean_end(seconds, code=2)
        errors = [line for line in self.text.splitlines() if "error:" in line]
        assert len(errors) == 1 and re.search(pattern, errors[0]), self.text[-3000:]
