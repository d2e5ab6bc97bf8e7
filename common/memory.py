"""The memory of a process that runs for days: its objects that refer to themselves, and the gaps in its heap."""

import contextlib
import ctypes
import gc


def settle_memory() -> None:
    """Exclude the objects that are there, those of all modules, from garbage collection. Python collects old objects
    only when a quarter as many new ones have become old: these are 100,000, which takes a trainer many hours. In a
    forked process, these objects share their memory with the parent until a collection writes to it."""
    gc.freeze()
    gc.collect()  # from now on, there are few old objects


def collect_garbage() -> None:
    """Free the objects that only refer to each other, and return freed memory to the system. glibc keeps the gaps
    between blocks that are in use, which are 5 to 15 MB of a trainer after some epochs."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
