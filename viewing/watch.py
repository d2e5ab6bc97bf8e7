"""The swarm live in a terminal, for anyone who wants to watch: `python run_training_monitor.py --watch`.

It joins the DHT as a client that only reads: it is not a peer of the run, is not counted and writes no file. What it
shows is what trainers have published, signed: their metrics of the last epoch, their progress in this one, their
contract.
"""

import contextlib
import dataclasses
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import hivemind
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.utils import get_dht_time
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from arguments import SwarmArguments
from support.console import UserError, format_bytes
from swarm.contract import find_run_schedule
from swarm.joining import make_dht
from swarm.processes import handle_stop_signals, shut_down
from utils import (
    RECENT_EPOCHS,
    Evaluation,
    LocalMetrics,
    SwarmMetrics,
    aggregate_metrics,
    fetch_metrics,
    fetch_progress,
    find_evaluation,
    find_final_epoch,
    format_progress,
    format_samples,
    measure_progress,
    perplexity,
    select_believable,
)

logger = logging.getLogger("watch")

WATCH_PERIOD = 2.0  # seconds between two looks, at most
FETCH_TIMEOUT = 5.0
CONTRACT_PERIOD = 30.0  # seconds between two looks at what never changes in a run
WIDE = 72  # columns of a terminal that has room for everything
BARS = "▁▂▃▄▅▆▇█"


@dataclass
class SwarmSnapshot:
    """What the DHT tells of the swarm at one moment."""

    metrics: dict[str, LocalMetrics]  # by peer label
    progress: dict[str, LocalTrainingProgress]  # by peer label
    swarm: SwarmMetrics | None

    @property
    def evaluation(self) -> Evaluation | None:
        return find_evaluation(list(self.metrics.items()))

    @property
    def labels(self) -> set[str]:
        return self.metrics.keys() | self.progress.keys()

    @property
    def epoch(self) -> int | None:
        """That the swarm works at."""
        epochs = [report.epoch for report in self.progress.values()]
        return max(epochs) if epochs else self.swarm.epoch if self.swarm else None

    @property
    def samples(self) -> int:
        """Gathered so far toward the next step."""
        return sum(r.samples_accumulated for r in self.progress.values() if r.epoch == self.epoch)

    @property
    def samples_per_second(self) -> float:
        return math.fsum(report.samples_per_second for report in self.progress.values())


def watch_swarm(swarm: SwarmArguments, refresh_period: float) -> None:
    """Show the swarm until Ctrl-C: live in a terminal, else a line an epoch."""
    if not swarm.initial_peers:
        raise UserError("--watch needs --initial_peers: the address of a peer of the swarm, as the monitor prints it")
    prefix = swarm.experiment_prefix
    # the identity file may be the monitor's, and two peers of one name are one too many
    dht, _ = make_dht(dataclasses.replace(swarm, client_mode=True, identity_path=None))
    stop = handle_stop_signals()
    losses: deque[float] = deque(maxlen=200)
    seconds: deque[float] = deque(maxlen=RECENT_EPOCHS)
    schedule, next_contract, last_epoch = None, 0.0, None
    with open_screen() as show:
        while True:
            if time.monotonic() >= next_contract:
                schedule = find_run_schedule(dht, prefix, FETCH_TIMEOUT) or schedule
                next_contract = time.monotonic() + (CONTRACT_PERIOD if schedule else WATCH_PERIOD)
            snapshot = take_snapshot(dht, prefix, last_epoch)
            target, total_steps = (schedule.target_batch_size, schedule.total_steps) if schedule else (None, None)
            is_new = snapshot.swarm is not None and snapshot.swarm.epoch != last_epoch
            if is_new:
                last_epoch = snapshot.swarm.epoch
                losses.append(snapshot.swarm.loss)
                seconds.append(snapshot.swarm.epoch_seconds)
            final_epoch = find_final_epoch(list(snapshot.metrics.items()), total_steps)
            course = measure_progress(last_epoch or 0, final_epoch, target, seconds)
            if show is None and is_new:
                print(describe(snapshot.swarm, course, snapshot.evaluation), flush=True)
            if show:
                show(snapshot, prefix, course, losses)
            if stop.wait(min(WATCH_PERIOD, refresh_period)):
                break
    shut_down(dht)


def take_snapshot(dht: hivemind.DHT, prefix: str, last_epoch: int | None) -> SwarmSnapshot:
    records = select_believable(fetch_metrics(dht, prefix, FETCH_TIMEOUT), last_epoch)
    # both have an epoch, and both may hold an absurd one
    progress = select_believable(list(fetch_progress(dht, prefix, FETCH_TIMEOUT).items()), last_epoch)
    return SwarmSnapshot(dict(records), dict(progress), aggregate_metrics(records, last_epoch))


def describe(swarm: SwarmMetrics, course: dict[str, float], evaluation: Evaluation | None) -> str:
    """Return one line, for where there is no terminal."""
    parts = [
        f"{time.strftime('%H:%M:%S')} epoch {swarm.epoch}  loss {swarm.loss:.4f}  peers {swarm.alive_peers}",
        f"{swarm.samples_per_second:.1f} samples/s  {swarm.epoch_seconds:.1f} s",
        format_progress(swarm.epoch, course),
    ]
    if evaluation:
        parts.append(f"validation loss {evaluation.loss:.4f} at epoch {evaluation.epoch}")
    return "  ".join(part for part in parts if part)


# --- the terminal -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_screen() -> Iterator[Callable | None]:
    """What shows a snapshot of the swarm (see `make_screen`), or None: standard output is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield None
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        # warnings above the picture, not across it: Live has put something of its own in place of sys.stderr
        for handler in logging.getLogger().handlers:
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
        yield lambda *what: live.update(make_screen(console, *what), refresh=True)


def make_screen(
    console: Console, snapshot: SwarmSnapshot, prefix: str, course: dict[str, float], losses: Sequence[float]
) -> RenderableType:
    """The picture: run, epoch and loss, then the peers, most generous first, as many as fit into the terminal.

    :param course: of utils.measure_progress
    """
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim", no_wrap=True, min_width=10)
    head.add_column(no_wrap=True, overflow="ellipsis")
    head.add_row("run", Text(prefix, style="bold"))
    if snapshot.epoch is None:
        head.add_row("epoch", "no trainer has reported yet")
    else:
        clients = sum(report.client_mode for report in snapshot.progress.values())
        count = len(snapshot.progress)
        who = f"{count} peer{'s'[: count != 1]}" + f" ({clients} in client mode)" * bool(clients)
        head.add_row("epoch", f"{snapshot.epoch:,}   {who}, {snapshot.samples_per_second:,.1f} samples/s")
        head.add_row(
            "progress", make_progress(snapshot, course.get("target_batch_size"), 24 if console.width >= WIDE else 8)
        )
        if text := "; ".join(filter(None, (format_progress(snapshot.epoch, course), format_samples(course)))):
            head.add_row("training", text)
    if losses:
        line = Text(f"{losses[-1]:.4f}  ", style="bold")
        if console.encoding.startswith("utf"):
            line.append(make_sparkline(losses), style="not bold cyan")
        head.add_row("loss", line)
    if evaluation := snapshot.evaluation:
        head.add_row(
            "validation",
            f"loss {evaluation.loss:.4f}, perplexity {perplexity(evaluation.loss):,.1f}, accuracy "
            f"{evaluation.accuracy:.1%} at epoch {evaluation.epoch:,}",
        )
    if snapshot.swarm:
        swarm = snapshot.swarm
        head.add_row(
            "last epoch",
            f"{swarm.epoch_seconds:.1f} s: computing {swarm.compute_seconds:.1f}, waiting {swarm.waiting_seconds:.1f}, "
            f"averaging {swarm.averaging_seconds:.1f}",
        )
        traffic = f"{format_bytes(swarm.bytes_sent)} sent, {format_bytes(swarm.bytes_received)} received by all peers"
        head.add_row("traffic", traffic)
    # below the head: the table's own head and rule, a line on those left out, and the line with the clock
    table, left_out = make_peer_table(snapshot, max(3, console.height - head.row_count - 6), console.width >= WIDE)
    foot = f"{time.strftime('%H:%M:%S')}  Ctrl-C ends"
    return Group(head, table, Text(f"and {left_out} more peers\n" * bool(left_out) + foot, style="dim"))


def make_progress(snapshot: SwarmSnapshot, target: int | None, width: int) -> RenderableType:
    if target is None:
        return f"{snapshot.samples:,} samples"
    missing = max(0, target - snapshot.samples)
    speed = snapshot.samples_per_second
    left = f", {missing / speed:,.0f} s left" if speed > 0 and missing / speed < 1e6 else ""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(
            total=target,
            completed=min(snapshot.samples, target),
            width=width,
            complete_style="cyan",
            finished_style="cyan",
        ),
        f"{snapshot.samples:,} of {target:,} samples{left}",
    )
    return bar


def make_sparkline(losses: Sequence[float], width: int = 48) -> str:
    """The newest losses as a line of bars, lowest to highest."""
    recent = list(losses)[-width:]
    low, high = min(recent), max(recent)
    bars = [BARS[round((loss - low) / (high - low) * (len(BARS) - 1)) if high > low else 0] for loss in recent]
    return "".join(bars)


def make_peer_table(snapshot: SwarmSnapshot, rows: int, is_wide: bool) -> tuple[Table, int]:
    """:returns: the table, and how many peers did not fit into it"""
    columns = ("peer", "epoch", "samples", "share", "samples/s", "last seen", "connection")
    columns = columns if is_wide else ("peer", "samples", "samples/s", "last seen")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("peer", "connection") else "right", no_wrap=True)
    given = {
        label: snapshot.metrics[label].total_samples if label in snapshot.metrics else 0 for label in snapshot.labels
    }
    total = max(1, sum(given.values()))
    labels = sorted(snapshot.labels, key=lambda label: (-given[label], label))
    for label in labels[:rows]:
        metrics, report = snapshot.metrics.get(label), snapshot.progress.get(label)
        newest = report or metrics
        seconds = max(0.0, get_dht_time() - report.time) if report else None
        row = {
            "peer": label,
            "epoch": f"{newest.epoch:,}",
            "samples": f"{given[label]:,}",
            "share": f"{given[label] / total:.1%}",
            "samples/s": f"{newest.samples_per_second:,.1f}" if report else "-",
            "last seen": f"{seconds:,.0f} s ago" if report else "gone",
            "connection": "client" if newest.client_mode else "public",
        }
        table.add_row(*(row[name] for name in columns), style=None if report else "dim")
    return table, max(0, len(labels) - rows)
