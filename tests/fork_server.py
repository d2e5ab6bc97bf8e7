"""Start Python programs as forks of this server, which imports the libraries once.

processes.py sends it, over a socket, the words, folder and environment of a program with its standard input, output and
error. A program still imports our own modules itself. No Python thread runs here, so a fork loses nothing.
"""

import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import random
import runpy
import socket
import sys
import time
import types
from pathlib import Path

LIBRARIES = """datasets hivemind hivemind.optim.optimizer matplotlib.backends.backend_agg matplotlib.figure numpy psutil
rich safetensors.torch sklearn.metrics tokenizers torch torch_optimizer transformers transformers.modeling_utils
transformers.models.albert.modeling_albert transformers.models.auto.modeling_auto"""


def import_libraries() -> None:
    multiprocessing.set_start_method("fork")
    for library in LIBRARIES.split():
        importlib.import_module(library)
    gc.collect()
    gc.freeze()  # otherwise the first collection in each program would copy the pages of all modules


def wait_for_program(requests: socket.socket) -> dict:
    """Fork for each request, and return it in the new process only."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 2**20, 3)
        if not message:
            raise SystemExit  # pytest has ended
        middle = os.fork()
        if not middle:
            middle = os.getpid()
            if pid := os.fork():
                requests.send(str(pid).encode())
                os._exit(0)
            # when the process in between ends, pytest becomes the parent, as the nearest subreaper
            while os.getppid() == middle:
                time.sleep(0.001)
            requests.close()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            return json.loads(message)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(middle, 0)
        requests.send(b"has its parent")


def become_program(words: list[str], cwd: str, env: dict[str, str], netns: str | None) -> None:
    """Make this process equal to `python` with these words, in this network namespace, after imports of LIBRARIES."""
    import huggingface_hub
    import numpy
    import torch
    from hivemind.utils.asyncio import _AsyncContextWrapper
    from hivemind.utils.mpfuture import MPFuture

    os.setsid()
    if netns:
        with open(f"/run/netns/{netns}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), f"setns {netns}")
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for module in (random, numpy.random, torch):
        module.seed()
    # constants that were read at import
    huggingface_hub.constants.ENDPOINT = env.get("HF_ENDPOINT", "https://huggingface.co")
    huggingface_hub.hf_api.api.endpoint = huggingface_hub.constants.ENDPOINT
    # otherwise all programs would share these locks, and wait for a lock of a killed program
    MPFuture.reset_backend()
    _AsyncContextWrapper.EXECUTOR_LOCK = multiprocessing.Lock()
    sys.orig_argv = [sys.executable, *words]
    sys.argv = words[1:] if words[0] == "-m" else ["-c", *words[2:]] if words[0] == "-c" else words
    first = {"-c": "", "-m": cwd}.get(words[0], str(Path(words[0]).absolute().parent))
    sys.path[0:1] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]


def serve(requests: socket.socket) -> None:
    """Become the server. In a fork, run a script, or `-m` module, or `-c` code, as the interpreter does, and return."""
    program = wait_for_program(requests)
    become_program(**program)
    kind, *words = program["words"]
    if kind == "-m":
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind != "-c":
        main.__file__ = os.path.abspath(kind)
    source, name = (words[0], "<string>") if kind == "-c" else (Path(kind).read_text(), kind)
    exec(compile(source, name, "exec"), main.__dict__)


if __name__ == "__main__":
    import_libraries()
    serve(socket.socket(fileno=int(sys.argv[1])))
