"""Plots of a run's learning curve."""

from pathlib import Path

from common.console import format_count
from common.files import write_file
from common.memory import collect_garbage
from monitoring.history import History


def draw_learning_curve(history: History, prefix: str, path: Path) -> bool:
    """Draw losses and samples per second over epochs, and return whether the file was written."""
    figure, (upper, lower) = make_panels(2, 1, sharex=True, figsize=(9, 6), height_ratios=[3, 1])
    marker = "." if len(history) < 50 else None
    epochs, losses, speeds = ([entry[name] for entry in history] for name in ("epoch", "loss", "samples_per_second"))
    upper.plot(epochs, losses, label="training", color="#1f5fa8", linewidth=1.8, marker=marker)
    lower.plot(epochs, speeds, color="#c2571a", linewidth=1.2, marker=marker)
    last = history[-1]
    title = f"{prefix}: loss {last['loss']:.3f} at epoch {last['epoch']:,}, {format_count(last['alive_peers'], 'peer')}"
    if history.validation:
        epochs, losses = ([entry[f"validation_{name}"] for entry in history.validation] for name in ("epoch", "loss"))
        style = dict(color="#b3367d", linewidth=1.4, marker="o", markersize=3.5)
        upper.plot(epochs, losses, label="validation (words)", **style)
        upper.legend(frameon=False)
        title += f"; validation {losses[-1]:.3f}"
    # matplotlib would parse a formula between two dollar signs
    upper.set(title=title.replace("$", r"\$"), ylabel="loss (nats)")
    lower.set(xlabel="epoch (optimizer step of the swarm)", ylabel="samples/s", ylim=(0, 1.15 * max(speeds) or 1))
    lower.xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels()
    return save_figure(figure, path)


def make_panels(rows: int, columns: int, figsize: tuple[float, float], **options):
    """Return a new figure and its axes, an array unless there is only one."""
    from matplotlib.figure import Figure  # not pyplot, which would open a display

    figure = Figure(figsize=figsize, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def save_figure(figure, path: Path) -> bool:
    """Write the figure as a PNG file; return whether that worked."""
    for axes in figure.axes:
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    is_written = write_file(path, lambda file: figure.savefig(file, dpi=130, format="png"))
    # a figure has reference cycles: without a collection, each drawing would leave 2 to 4 MB
    collect_garbage()
    return is_written
