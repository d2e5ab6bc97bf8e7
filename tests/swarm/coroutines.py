"""Tests that are coroutines, and their clock."""

import asyncio
import functools
from collections.abc import Callable, Coroutine


def run_async(test: Callable[..., Coroutine]) -> Callable[..., None]:
    """Let a test run in an event loop of its own."""
    return functools.wraps(test)(lambda *args, **fixtures: asyncio.run(test(*args, **fixtures)))


def run_timeless(test: Callable[..., Coroutine]) -> Callable[..., None]:
    """Let a test run in a TimelessLoop of its own."""

    def run(*args, **fixtures) -> None:
        with asyncio.Runner(loop_factory=TimelessLoop) as runner:
            runner.run(test(*args, **fixtures))

    return functools.wraps(test)(run)


class TimelessLoop(asyncio.SelectorEventLoop):
    """Its clock leaps to whatever it waits for, or past that: on a busy machine, sleeping would take longer."""

    now, late = 100.0, 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if self._scheduled and not self._ready:
            self.now = max(self.now, self._scheduled[0].when() + self.late)
        super()._run_once()
