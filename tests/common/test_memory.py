import ctypes
import platform
from pathlib import Path

import pytest
from processes import run_python

from common.memory import collect_garbage

BLOCKS, SIZE = 1000, 2**16  # below glibc's limit for blocks with a mapping of their own
CYCLES = """
import collections, gc, sys
from common.memory import settle_memory

class Cycle:
    def __init__(self):
        self.itself = self

modules = [[] for _ in range(10**6)]
gc.collect()
if sys.argv[1:]:
    settle_memory()
alive = collections.deque(maxlen=50_000)  # until the garbage collector takes them for old ones
for _ in range(2):
    alive.extend(Cycle() for _ in range(100_000))
    print(sum(type(it) is Cycle for it in gc.get_objects()))
"""


def measure_memory() -> int:
    """Return the bytes of this process's own pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have other heaps")
def test_gaps_between_blocks_return_to_system():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(SIZE) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(ctypes.c_void_p(block), 1, SIZE)
    full = measure_memory()
    for number, block in enumerate(blocks, 1):
        if number % 100:  # the last block stays, so that glibc returns no gap itself
            libc.free(block)
    assert full - measure_memory() < 0.1 * BLOCKS * SIZE
    collect_garbage()
    assert full - measure_memory() > 0.9 * BLOCKS * SIZE
    for block in blocks[99::100]:
        libc.free(block)


def test_old_cycles_are_collected_after_settling():
    """Without it, nearly all stay, because they are fewer than a quarter of the objects of the modules."""
    outputs = (run_python("-c", CYCLES, *words, expect=0, is_real=True).stdout for words in ((), ("settle",)))
    kept, settled = (list(map(int, output.split())) for output in outputs)
    assert kept[1] - kept[0] > 90_000
    assert settled[1] < 90_000
