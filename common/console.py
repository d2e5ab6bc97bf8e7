"""Output for the user, errors, log lines and formatted numbers, and the end of scripts. It imports nothing slow."""

import contextlib
import difflib
import gc
import logging
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from common.signals import LAST_ACT, STOP_REQUESTED, obey_signals, terminate_process_tree

logger = logging.getLogger("common")

CONFIRM_TIMEOUT = 10.0  # seconds; the first Ctrl-C has no visible effect at once, and a second one must be confirmed


class UserError(Exception):
    """An error that the user can fix. Its text is one line that says how; `edge` prints it."""

    def __init__(self, text: str):
        super().__init__(make_printable(name_flags(text)))


def name_flags(text: str) -> str:
    """Replace each setting in backquotes by its flag, because swarm/ knows settings but no flags."""
    return re.sub(r"`(\w+)`", r"--\1", text)


def make_printable(text: str) -> str:
    """Return a text as one line without control characters, because peers may have written parts of it."""
    return "".join(character if character.isprintable() else " " for character in text)


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line at once, by default on standard output; drop it on a full disk, or if a pipe has no reader."""
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


@contextlib.contextmanager
def edge(interrupted: str | None = None) -> Iterator[None]:
    """Turn a UserError and STOP_SIGNALS into one line on standard error, here and in the slow imports that follow.

    The exit code is 2 after an error, and 0 after a signal. A script that has not done its work gives `interrupted`, a
    text with the state of its files or the next step: the exit code is then 128 plus the signal's number.
    """

    def stop(number: int) -> None:
        LAST_ACT.acquire()
        if interrupted is not None:
            print_line(f"\ninterrupted: {interrupted}", sys.stderr)
        elif logging.getLogger().handlers:
            logger.info("stopped")
        else:
            print_line("stopped", sys.stderr)
        terminate_process_tree(0 if interrupted is None else 128 + number)

    obey_signals(stop, pause=1.0)
    gc.freeze()
    gc.enable()
    try:
        yield
        # Imports follow until the next edge. They leave no garbage, and the search for it takes a third of their time.
        gc.disable()
    except UserError as e:
        with LAST_ACT:  # do not print an error that another thread causes by ending this process
            print_line(f"{sys.argv[0].rsplit('/', 1)[-1]}: error: {e}", sys.stderr)
        raise SystemExit(2) from None
    except BaseException:
        with LAST_ACT:
            raise


@contextlib.contextmanager
def clean_end(interrupted: str | None = None) -> Iterator[None]:
    """Run a script's main() and then exit, together with all child processes, also after an exception in any thread:
    with code 0 after success, 1 after an exception, and 2 after a user error; after a signal, see `edge`."""

    def exit_after_thread_failed(failure: threading.ExceptHookArgs) -> None:
        LAST_ACT.acquire()
        with contextlib.suppress(OSError):
            traceback.print_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
        terminate_process_tree(1)

    code = 0
    try:
        with edge(interrupted):
            threading.excepthook = exit_after_thread_failed
            yield
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else (0 if e.code is None else 1)
    except BaseException:
        code = 1
        with contextlib.suppress(OSError):
            traceback.print_exc()
    terminate_process_tree(code)


def handle_stop_signals(unsaved: str | None = None) -> threading.Event:
    """Make STOP_SIGNALS set STOP_REQUESTED, and return that event. A second signal stops at once; if work is unsaved,
    which the log names, an early second Ctrl-C only asks to confirm."""
    start = first = None

    def request_stop(number: int) -> None:
        nonlocal start, first, unsaved
        STOP_REQUESTED.set()
        if start is None:
            start = time.monotonic()
            first = number
            if unsaved:
                logger.info("stopping: saving; Ctrl-C again discards unsaved work")
        elif signal.SIGHUP in (number, first) and number != signal.SIGINT:
            pass  # at a logout, the shell and the system send several
        elif unsaved and number == signal.SIGINT and time.monotonic() < start + CONFIRM_TIMEOUT:
            logger.info(f"still stopping: Ctrl-C once more stops at once, and loses {unsaved}")
            start = -math.inf
        else:
            LAST_ACT.acquire()
            if unsaved:
                logger.info(f"stopped at once; lost: {unsaved}")
            terminate_process_tree(130 if unsaved else 0)

    obey_signals(request_stop)
    return STOP_REQUESTED


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean --learning_rate?` with the most similar name, or an empty string if none is similar."""
    names = {other.lower().strip("-"): other for other in known}
    nearest = difflib.get_close_matches(name.lower().strip("-"), names, n=1, cutoff=0.7)
    return f", did you mean {names[nearest[0]]}?" if nearest else ""


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, and the next one if the first ends with a colon."""
    if "custom code which must be executed" in str(error):  # transformers, and an auto_map
        return "it needs custom code that comes with it, which is not run"
    first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{first} {more[0]}" if first.endswith(":") and more else first


def format_bytes(count: float) -> str:
    """Return a size such as 210.0 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000


def format_number(value: float) -> str:
    """Return a number with three significant digits, such as 2,010 or 0.31."""
    return f"{float(f'{value:.3g}'):,.12g}"


def format_count(number: int, what: str) -> str:
    """Return a number and its noun, such as 1 peer or 2 peers."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def fit_terminal(line: str) -> str:
    """Drop parts, two spaces apart, from the end of a line until it fits the terminal's width."""
    while len(line) >= shutil.get_terminal_size().columns and "  " in line:
        line = line.rpartition("  ")[0]
    return line


def format_clock(seconds: float) -> str:
    """Return a duration such as 1:54 or 2:05:00."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def format_epoch(values: dict) -> str:
    """Return `epoch 12/128  loss 5.8370  peers 2/2  1.9 s  local samples 384  ETA 1:54` for a line of a trainer's
    history.jsonl; for one of a monitor's metrics.jsonl, the same without `local`. Unknown parts are omitted."""
    loss, final_epoch, seconds_left = map(values.get, ("loss", "final_epoch", "seconds_left"))
    is_local = "samples_accumulated" in values
    parts = [
        f"epoch {values['epoch']}/{final_epoch}" if final_epoch else f"epoch {values['epoch']}",
        "" if loss is None else f"loss {loss:.4f}",
        f"peers {values['averaged_with']}/{values['num_peers' if is_local else 'alive_peers']}",
        f"{values['epoch_seconds']:.1f} s",
        f"local samples {values['samples_accumulated']:,}" if is_local else f"samples {values['samples']:,}",
        f"ETA {format_clock(seconds_left)}" if seconds_left else "",
    ]
    return "  ".join(filter(None, parts))


def show_progress(what: str, total: int | None):
    """Return a progress bar of bytes, which `update` advances; without a terminal, it is printed every 10 s."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no monitor thread, because hivemind will fork later
    interval = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(desc=what, total=total, unit="B", unit_scale=True, dynamic_ncols=True, mininterval=interval)


class RoleFormatter(logging.Formatter):
    """A formatter for `HH:MM:SS role message`, with the level of warnings and errors and the name of the library."""

    def __init__(self, role_name: str, datefmt: str = "%H:%M:%S", is_terminal: bool = False):
        super().__init__(datefmt=datefmt)
        self.role_name = role_name
        self.colors = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m"} if is_terminal else {}
        # overwrites a progress bar of any process, which is then drawn again below
        self.begin = "\r\033[K" if is_terminal else ""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, and the lines of its traceback."""
        level = "" if record.levelno <= logging.INFO else f"{logging.getLevelName(record.levelno).lower()}: "
        level = level.replace("warn:", "warning:")  # hivemind renames the level for the whole process
        library = "" if is_ours(record) else f"[{record.name.split('.')[0]}] "
        text = make_printable(name_flags(record.getMessage()))
        line = f"{self.formatTime(record, self.datefmt)} {self.role_name} {level}{library}{text}"
        if record.levelno in self.colors:
            line = f"{self.colors[record.levelno]}{line}\033[0m"
        trace = self.formatException(record.exc_info).splitlines() if record.exc_info else []
        return "\n".join([self.begin + line, *map(make_printable, trace)])


def is_ours(record: logging.LogRecord) -> bool:
    """Return whether one of the project's own files logged the record."""
    path = Path(record.pathname).absolute()
    return path.is_relative_to(Path(__file__).absolute().parent.parent) and "site-packages" not in path.parts


def is_shown(record: logging.LogRecord) -> bool:
    """Return False for messages below WARNING from libraries other than hivemind."""
    return record.levelno >= logging.WARNING or is_ours(record) or record.name.startswith("hivemind")


def setup_logging(role_name: str, folder: str | None = None) -> None:
    """Send all log lines to standard error: ours from INFO, libraries' from WARNING, hivemind's from HIVEMIND_LOGLEVEL.

    Call this before any process is forked.

    :param folder: a folder for {role_name}.log, with dates, and for the dashboards' data
    """
    from hivemind.utils.logging import use_hivemind_log_handler

    use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(os.environ.get("HIVEMIND_LOGLEVEL", "WARNING").upper())
    handlers = [logging.StreamHandler()]
    handlers[0].setFormatter(RoleFormatter(role_name, is_terminal=sys.stderr.isatty()))
    if folder:
        path = os.path.join(folder, f"{role_name.replace(' ', '_')}.log")
        try:
            os.makedirs(folder, exist_ok=True)
            handlers.append(logging.FileHandler(path, encoding="utf-8"))
        except OSError as e:
            raise UserError(f"--logging_dir {folder} cannot be written ({e.strerror}): choose another folder") from e
        handlers[1].setFormatter(RoleFormatter(role_name, datefmt="%Y-%m-%d %H:%M:%S"))
        os.environ.setdefault("WANDB_DIR", os.path.abspath(folder))  # wandb adds the folder wandb to it
    for handler in handlers:
        handler.addFilter(is_shown)
    # a full disk would cost a traceback on standard error for each line
    logging.raiseExceptions = False
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
