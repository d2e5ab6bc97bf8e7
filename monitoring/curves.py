"""Plots of a run's learning curve."""

import gc
from collections.abc import Sequence
from pathlib import Path

from common.console import format_count
from common.files import write_file
from monitoring.history import History

TRAINING = dict(color="#1f5fa8", linewidth=1.8)
VALIDATION = dict(color="#b3367d", linewidth=1.4, marker="o", markersize=3.5)
EPOCH = "epoch (optimizer step of the swarm)"


def draw_learning_curve(history: History, prefix: str, path: Path) -> bool:
    """Draw loss and samples per second over epochs, and return whether the file was written."""
    figure, (upper, lower) = make_panels(2, 1, sharex=True, figsize=(9, 6), height_ratios=[3, 1])
    epochs, speeds = ([entry[name] for entry in history] for name in ("epoch", "samples_per_second"))
    draw_loss(upper, history, epochs)
    upper.set_title(describe_last(history, prefix))
    lower.plot(epochs, speeds, color="#c2571a", linewidth=1.2, marker=choose_marker(history))
    lower.set(xlabel=EPOCH, ylabel="samples/s", ylim=(0, 1.15 * max(speeds) or 1))
    lower.xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels()
    return save_figure(figure, path)


def plot_run(history: History, prefix: str, path: Path) -> bool:
    """Draw loss over epochs, samples and hours, and return whether the file was written."""
    from matplotlib.ticker import EngFormatter

    figure, panels = make_panels(1, 3, sharey=True, figsize=(15, 4.8))
    over = {
        EPOCH: [entry["epoch"] for entry in history],
        "samples contributed by the peers": [entry["total_samples"] for entry in history],
        "hours since the first epoch shown": [(entry["time"] - history[0]["time"]) / 3600 for entry in history],
    }
    for axes, (label, values) in zip(panels, over.items(), strict=True):
        draw_loss(axes, history, values)
        axes.set_xlabel(label)
    for axes in panels[1:]:
        axes.set_ylabel(None)
    panels[0].xaxis.get_major_locator().set_params(integer=True)
    panels[1].xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.suptitle(describe_last(history, prefix))
    return save_figure(figure, path)


def make_panels(rows: int, columns: int, figsize: tuple[float, float], **options):
    """Return a new figure and its axes, an array unless there is only one."""
    from matplotlib.figure import Figure  # not pyplot, which would open a display

    figure = Figure(figsize=figsize, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def draw_loss(axes, history: History, values: Sequence[float]) -> None:
    """Draw the training loss and, if a peer evaluates, the validation loss of tokens without sentence order.

    :param values: the horizontal positions of the history's epochs
    """
    import numpy

    losses, epochs = ([entry[name] for entry in history] for name in ("loss", "epoch"))
    axes.plot(values, losses, label="training", **TRAINING, marker=choose_marker(history))
    axes.set_ylabel("loss (nats)" if history.validation else "training loss (nats)")
    if history.validation:
        at, losses = ([entry[f"validation_{name}"] for entry in history.validation] for name in ("epoch", "loss"))
        axes.plot(numpy.interp(at, epochs, values), losses, label="validation (words)", **VALIDATION)
        axes.legend(frameon=False)


def choose_marker(history: History) -> str | None:
    """Return the marker of a curve: dots while it is short."""
    return "." if len(history) < 50 else None


def describe_last(history: History, prefix: str) -> str:
    """Return a title with the values of the newest epoch."""
    last = history[-1]
    peers = format_count(last["alive_peers"], "peer")
    text = f"{prefix}: loss {last['loss']:.3f} at epoch {last['epoch']:,}, {peers}"
    if history.validation:
        text += f"; validation {history.validation[-1]['validation_loss']:.3f}"
    return text.replace("$", r"\$")  # matplotlib would parse a formula between two of them


def save_figure(figure, path: Path) -> bool:
    """Write the figure as a PNG file; return whether that worked."""
    for axes in figure.axes:
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    is_written = write_file(path, lambda file: figure.savefig(file, dpi=130, format="png"))
    # a figure has reference cycles: without a collection, each drawing would leave 2 to 4 MB
    gc.collect()
    return is_written
