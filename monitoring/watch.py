"""A live view of the swarm in a terminal: `python run_training_monitor.py --watch`.

It joins the DHT as a client that only reads. It does not count as a peer of the run, and writes no file. It shows the
trainers' signed records: their metrics of the last epoch, their progress in this one, and their contract.
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
from functools import partial

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
from common.console import format_bytes, format_clock, format_epoch
from common.signals import afterwards
from monitoring.history import name_peer
from monitoring.progress import RunCourse
from swarm.joining import Swarm
from swarm.membership import Membership
from swarm.trust import ContributorRegistry
from training.figures import fetch_metrics, fetch_progress, find_evaluation, format_evaluation
from training.progress import RECENT_EPOCHS
from training.settings import make_swarm_config
from utils import LocalMetrics, SwarmMetrics, aggregate_metrics, filter_plausible_records

logger = logging.getLogger("watch")

WATCH_PERIOD = 2.0  # seconds; upper bound on the time between two updates
FETCH_TIMEOUT = 5.0
WIDE = 72  # columns of a terminal with room for all values
BARS = "▁▂▃▄▅▆▇█"


@dataclass
class SwarmSnapshot:
    """The swarm's records in the DHT at one moment."""

    metrics: dict[str, LocalMetrics]  # by peer label
    progress: dict[str, LocalTrainingProgress]  # by peer label
    swarm: SwarmMetrics | None

    def __post_init__(self):
        reports = self.progress.values()
        self.evaluation = find_evaluation(list(self.metrics.items()))
        #: the swarm's current epoch
        self.epoch = max((report.epoch for report in reports), default=self.swarm.epoch if self.swarm else None)
        #: samples for the next step so far
        self.samples = sum(report.samples_accumulated for report in reports if report.epoch == self.epoch)
        self.samples_per_second = math.fsum(report.samples_per_second for report in reports)


def watch_swarm(swarm: SwarmArguments, membership: Membership | None, refresh_period: float) -> None:
    """Show the swarm until Ctrl-C: live in a terminal, otherwise one line per epoch."""
    prefix = swarm.experiment_prefix
    # without the identity file, which a running monitor may use
    swarm = dataclasses.replace(swarm, client_mode=True, identity_path=None)
    dht = Swarm.join(make_swarm_config(swarm), membership).dht
    losses: deque[float] = deque(maxlen=48)  # bars that fit
    seconds: deque[float] = deque(maxlen=RECENT_EPOCHS)
    course, workers, last_epoch = (
        RunCourse(prefix),
        ContributorRegistry(dht.attestation.workers if dht.attestation else ()),
        None,
    )
    with open_screen() as show:
        while True:
            snapshot = take_snapshot(dht, prefix, last_epoch, workers)
            is_new = snapshot.swarm is not None and snapshot.swarm.epoch != last_epoch
            if is_new:
                last_epoch = snapshot.swarm.epoch
                losses.append(snapshot.swarm.loss)
                seconds.append(snapshot.swarm.epoch_seconds)
            progress = course.measure(dht, last_epoch or 0, list(snapshot.metrics.items()), seconds, workers)
            if show:
                show(snapshot, prefix, progress, losses)
            elif is_new:
                print(describe(snapshot, progress), flush=True)
            time.sleep(min(WATCH_PERIOD, refresh_period))


def take_snapshot(
    dht: hivemind.DHT, prefix: str, last_epoch: int | None, workers: ContributorRegistry
) -> SwarmSnapshot:
    """Read the swarm's records from the DHT."""
    records = filter_plausible_records(fetch_metrics(dht, prefix, FETCH_TIMEOUT, workers), last_epoch)
    # both kinds of records may hold an implausible epoch
    progress = filter_plausible_records(list(fetch_progress(dht, prefix, FETCH_TIMEOUT).items()), last_epoch)
    return SwarmSnapshot(dict(records), dict(progress), aggregate_metrics(records, last_epoch))


def describe(snapshot: SwarmSnapshot, progress: dict[str, float]) -> str:
    """Return one line for output that is not a terminal."""
    swarm, evaluation = snapshot.swarm, snapshot.evaluation
    parts = [
        f"{time.strftime('%H:%M:%S')} {format_epoch(dataclasses.asdict(swarm) | progress)}",
        f"validation loss {evaluation.loss:.4f} at epoch {evaluation.epoch}" if evaluation else "",
    ]
    return "  ".join(filter(None, parts))


# --- the terminal -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_screen() -> Iterator[Callable | None]:
    """Yield a function that shows a snapshot (see `make_screen`), or None if standard output is not a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield None
        return
    with (
        afterwards(partial(console.show_cursor, True)),  # Live hides it
        Live(console=console, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        # Live has replaced sys.stderr by a stream that prints warnings above the view
        for handler in logging.getLogger().handlers:
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
        yield lambda *what: live.update(make_screen(console, *what), refresh=True)


def make_screen(
    console: Console, snapshot: SwarmSnapshot, prefix: str, progress: dict[str, float], losses: Sequence[float]
) -> RenderableType:
    """Return the view: run, epoch and loss, then as many peers as fit into the terminal, largest contribution first.

    :param progress: the result of measure_progress
    """
    is_wide = console.width >= WIDE
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
        head.add_row("progress", make_progress(snapshot, progress.get("target_batch_size"), 24 if is_wide else 8))
        if "final_epoch" in progress:
            left = f", ETA {format_clock(progress['seconds_left'])}" if progress.get("seconds_left") else ""
            head.add_row("training", f"until epoch {progress['final_epoch']:,}{left}")
    if losses:
        line = Text(f"{losses[-1]:.4f}  ", style="bold")
        if console.encoding.startswith("utf"):
            line.append(make_sparkline(losses), style="not bold cyan")
        head.add_row("loss", line)
    if snapshot.evaluation:
        head.add_row("validation", format_evaluation(snapshot.evaluation))
    if snapshot.swarm:
        swarm = snapshot.swarm
        head.add_row(
            "last epoch",
            f"{swarm.epoch_seconds:.1f} s: computing {swarm.compute_seconds:.1f}, waiting {swarm.waiting_seconds:.1f}, "
            f"averaging {swarm.averaging_seconds:.1f}",
        )
        traffic = f"{format_bytes(swarm.bytes_sent)} sent, {format_bytes(swarm.bytes_received)} received by all peers"
        head.add_row("traffic", traffic)
    # rows that are not peers: the table's head and rule, the line with the number of other peers, and the clock
    table, left_out = make_peer_table(snapshot, max(3, console.height - head.row_count - 6), is_wide)
    foot = f"{time.strftime('%H:%M:%S')}  Ctrl-C ends"
    return Group(head, table, Text(f"and {left_out} more peers\n" * bool(left_out) + foot, style="dim"))


def make_progress(snapshot: SwarmSnapshot, target: int | None, width: int) -> RenderableType:
    if target is None:
        return f"{snapshot.samples:,} samples"
    missing = max(0, target - snapshot.samples)
    speed = snapshot.samples_per_second
    left = f", {missing / speed:,.0f} s left" if speed > 0 and missing / speed < 1e6 else ""
    styles = dict(complete_style="cyan", finished_style="cyan")
    bar = ProgressBar(total=target, completed=min(snapshot.samples, target), width=width, **styles)
    row = Table.grid(padding=(0, 1))
    row.add_row(bar, f"{snapshot.samples:,} of {target:,} samples{left}")
    return row


def make_sparkline(losses: Sequence[float]) -> str:
    """Return the losses as a line of bars."""
    low, high = min(losses), max(losses)
    return "".join(BARS[round((loss - low) / ((high - low) or 1) * (len(BARS) - 1))] for loss in losses)


def make_peer_table(snapshot: SwarmSnapshot, rows: int, is_wide: bool) -> tuple[Table, int]:
    """Return a table of the peers, and the number of peers that did not fit into it."""
    columns = ("peer", "epoch", "samples", "share", "samples/s", "last seen", "connection")
    columns = columns if is_wide else ("peer", "samples", "samples/s", "last seen")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("peer", "connection") else "right", no_wrap=True)
    labels = snapshot.metrics.keys() | snapshot.progress.keys()
    given = dict.fromkeys(labels, 0) | {label: metrics.total_samples for label, metrics in snapshot.metrics.items()}
    total = max(1, sum(given.values()))
    labels = sorted(labels, key=lambda label: (-given[label], label))
    for label in labels[:rows]:
        metrics, report = snapshot.metrics.get(label), snapshot.progress.get(label)
        newest = report or metrics
        seconds = max(0.0, get_dht_time() - report.time) if report else None
        row = {
            "peer": name_peer(label, metrics and metrics.username),
            "epoch": f"{newest.epoch:,}",
            "samples": f"{given[label]:,}",
            "share": f"{given[label] / total:.1%}",
            "samples/s": f"{newest.samples_per_second:,.1f}" if report else "-",
            "last seen": f"{seconds:,.0f} s ago" if report else "left",
            "connection": "client" if newest.client_mode else "public",
        }
        table.add_row(*(row[name] for name in columns), style=None if report else "dim")
    return table, max(0, len(labels) - rows)
