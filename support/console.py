"""What everybody says to the user: errors of the user, log lines, numbers for people. Imports nothing slow."""

import contextlib
import signal
import sys
from collections.abc import Iterator


class UserError(Exception):
    """What the user can fix, in one line that names the cure. `edge` prints it."""


@contextlib.contextmanager
def edge(interrupted: str | None = None) -> Iterator[None]:
    """The edge of a script: a UserError becomes one line on standard error and exit code 2, without a traceback.

    So does Ctrl-C, with exit code 130, where there is something to say about it. Where there is not, it ends the
    process at once: in here, and in the slow imports that follow on the arguments.

    :param interrupted: what Ctrl-C leaves behind, or what to do next
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL if interrupted is None else signal.default_int_handler)
    try:
        yield
    except UserError as e:
        print(f"{sys.argv[0].rsplit('/', 1)[-1]}: error: {e}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if interrupted is None:
            raise
        print(f"\ninterrupted: {interrupted}", file=sys.stderr)
        raise SystemExit(130) from None


def first_line(error: Exception) -> str:
    """What an error says, in one line: where that is a heading alone, with the next one."""
    first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{first} {more[0]}" if first.endswith(":") and more else first


def show_bytes(count: float) -> str:
    """For people: 210.0 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
