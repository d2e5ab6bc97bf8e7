"""Tests that are coroutines."""

import asyncio
import functools
from collections.abc import Callable, Coroutine


def run_async(test: Callable[..., Coroutine]) -> Callable[..., None]:
    """Let a test run in an event loop of its own."""
    return functools.wraps(test)(lambda *args, **fixtures: asyncio.run(test(*args, **fixtures)))
