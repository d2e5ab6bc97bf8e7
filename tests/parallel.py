"""Run pytest in several parts at a time, because a swarm mostly waits. A part takes the next file that is free, at last
the tests that are left of other parts' files, and its output appears when it ends. `make test` runs this:

    python tests/parallel.py 5 -m "not slow"

The libraries are imported once: each part, and each program that a part starts, is a fork of this process.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from typing import IO

import fork_server
import processes

IS_FORKING = sys.platform == "linux"


def start_part(flags: list[str], output: IO) -> int:
    """:returns: the process id of a child whose exit code is pytest's"""
    if not IS_FORKING:
        command = [sys.executable, "-m", "pytest", *flags]
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT).pid
    if pid := os.fork():
        return pid
    ctypes.CDLL(None).prctl(1, signal.SIGINT)  # PR_SET_PDEATHSIG: the parent has ended, e.g. by Ctrl-C
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    # this part becomes the parent of all programs of its server
    processes.FORK_SERVER = processes.ForkServer(fork_the_server)
    # no plugins are needed, and pytest would warn that anyio is already imported
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest  # not earlier, because programs must not inherit it

    sys.exit(pytest.main(flags))


def fork_the_server(server: processes.ForkServer, theirs: socket.socket) -> None:
    if os.fork():
        return
    server.requests.close()  # now the server ends when the part ends
    os.setsid()
    with open(os.devnull, "r+") as null:
        for number, file in enumerate((null, null, server.errors)):
            os.dup2(file.fileno(), number)
    fork_server.serve(theirs)
    sys.exit()


def main(count: int, flags: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background processes ignore it
    if IS_FORKING:
        os.environ |= processes.make_environment()  # before the libraries read it
        fork_server.import_libraries()
    claims, outputs = tempfile.mkdtemp(), {}
    # without bytecode on disk, each program compiles our modules again, which takes 0.3 s
    if sys.dont_write_bytecode:
        sys.dont_write_bytecode, sys.pycache_prefix = False, f"{claims}/bytecode"
    for _ in range(count):
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        outputs[start_part([f"--claims={claims}", *flags], output)] = output
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends only the parts
    has_failed = False
    while outputs:
        pid, status = os.wait()
        output = outputs.pop(pid)
        output.seek(0)
        print(output.read(), flush=True)
        has_failed |= status != 0
    shutil.rmtree(claims)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
