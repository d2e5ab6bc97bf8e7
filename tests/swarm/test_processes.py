"""Programs that start as forks behave like programs that start by themselves."""

import json
import signal

import processes
import pytest
from processes import ROOT, ForkedProcess, run_python, start_python

# This program prints the conditions of its own start.
LOOK = """
import json, multiprocessing, os, signal, sys, threading

def look_into_main():
    import __main__
    return [__name__, __main__.WHAT, sys.modules["__main__"] is __main__, "__file__" in globals()]

WHAT = "seen"
facts = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "first_path": sys.path[0], "own_path": "/some/where" in sys.path,
    "folder": os.getcwd(), "variable": os.environ.get("OBSERVED"), "main": look_into_main(),
    "leads_session": os.getsid(0) == os.getpid() == os.getpgrp(), "threads": threading.active_count(),
    "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
    "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "stdin": sys.stdin.read(),
    "files": [os.isatty(number) for number in range(3)], "ours": "common.console" in sys.modules,
}
print(json.dumps(facts))
print("an error", file=sys.stderr)
"""
ENDS = {
    "raise SystemExit('bye')": 1,
    "import sys; sys.exit(7)": 7,
    "import atexit; atexit.register(print, 'at the end')": 0,
    "1 / 0": 1,
    "import os, signal; os.kill(os.getpid(), signal.SIGINT)": -signal.SIGINT,
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "import os; os._exit(3)": 3,
}


@pytest.fixture(params=["-c", "-m", "script"])
def words(request, tmp_path) -> list:
    (tmp_path / "look.py").write_text(LOOK)
    return {"-c": ["-c", LOOK], "-m": ["-m", "look"], "script": ["look.py"]}[request.param]


def test_fork_sees_program_environment(words, tmp_path):
    env = {"OBSERVED": "é", "PYTHONPATH": "/some/where"}
    runs = [run_python(*words, "one", 2, cwd=tmp_path, env=env, expect=0, is_real=is_real) for is_real in (False, True)]
    forked, real = (json.loads(run.stdout) for run in runs)
    assert forked == real and forked["variable"] == "é" and forked["leads_session"]
    assert runs[0].stderr == runs[1].stderr == "an error\n"


@pytest.mark.parametrize("code", ENDS)
def test_fork_exits_like_program(code):
    run, real = (run_python("-c", code, expect=ENDS[code], is_real=is_real) for is_real in (False, True))
    assert run.stdout == real.stdout and run.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_forks_have_own_random_state_and_locks():
    """Of hivemind's: a program that is killed while it has one would stop all others."""
    code = (
        "import random, numpy, torch, uuid\n"
        "from hivemind.utils.asyncio import _AsyncContextWrapper\n"
        "from hivemind.utils.mpfuture import MPFuture, SharedBytes\n"
        "print(random.random(), numpy.random.random(), uuid.uuid4(), torch.rand(1).item())\n"
        "locks = [MPFuture._initialization_lock, MPFuture._update_lock, SharedBytes._lock]\n"
        "print(*[lock.acquire(timeout=1) for lock in [*locks, _AsyncContextWrapper.EXECUTOR_LOCK]])"
    )
    first, second = (run_python("-c", code, expect=0).stdout.splitlines() for _ in range(2))
    assert first[1] == second[1] == "True True True True"
    assert all(one != other for one, other in zip(first[0].split(), second[0].split(), strict=True))


def test_library_variable_disables_forking(tmp_path, monkeypatch):
    run_python("-c", "")  # starts the server, if no test has
    if processes.FORK_SERVER:  # earlier tests may have changed the environment since
        monkeypatch.setattr(processes.FORK_SERVER, "env", processes.make_environment())
    code = "import sys; print('torch' in sys.modules)"
    for name, is_forked in (("PYTHONPATH", processes.IS_FORKING), ("HF_HOME", False)):
        with open(tmp_path / name, "w") as log:
            process = start_python("-c", code, stdout=log, stderr=log, env={name: str(ROOT)})
        assert process.wait(60) == 0 and isinstance(process, ForkedProcess) == is_forked
        assert (tmp_path / name).read_text() == f"{is_forked}\n"
