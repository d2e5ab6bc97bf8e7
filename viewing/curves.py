"""Pictures of a run's learning curve."""

import gc
from collections.abc import Callable
from pathlib import Path

from support.files import write_file
from viewing.history import History

TRAINING = dict(color="#1f5fa8", linewidth=1.8)
VALIDATION = dict(color="#b3367d", linewidth=1.4, marker="o", markersize=3.5)


def draw_learning_curve(history: History, prefix: str, path: Path) -> bool:
    """Loss, and below it samples per second, over epochs; whether it could be written, whole."""
    pyplot = import_pyplot()
    epochs = [entry["epoch"] for entry in history]
    figure, (upper, lower) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 6), height_ratios=[3, 1], layout="constrained"
    )
    dot = "." if len(epochs) < 50 else None
    upper.plot(epochs, [entry["loss"] for entry in history], label="training", **TRAINING, marker=dot)
    draw_validation(upper, history, lambda epoch: epoch)
    upper.set_title(describe_last(history, prefix))
    lower.plot(epochs, [entry["samples_per_second"] for entry in history], color="#c2571a", linewidth=1.2, marker=dot)
    lower.set_ylabel("samples/s")
    lower.set_ylim(0, 1.15 * max(entry["samples_per_second"] for entry in history) or 1)
    lower.set_xlabel("epoch (optimizer step of the swarm)")
    lower.xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels()
    return save_figure(pyplot, figure, path)


def plot_run(history: History, prefix: str, path: Path) -> bool:
    """Loss over epochs, over samples and over hours, side by side; whether it could be written, whole."""
    pyplot = import_pyplot()
    import numpy
    from matplotlib.ticker import EngFormatter

    losses = [entry["loss"] for entry in history]
    figure, panels = pyplot.subplots(1, 3, sharey=True, figsize=(15, 4.8), layout="constrained")
    epochs = [entry["epoch"] for entry in history]
    over = {
        "epoch (optimizer step of the swarm)": epochs,
        "samples contributed by the peers": [entry["total_samples"] for entry in history],
        "hours since the first epoch shown": [(entry["time"] - history[0]["time"]) / 3600 for entry in history],
    }
    for axes, (label, values) in zip(panels, over.items(), strict=True):
        axes.plot(values, losses, label="training", **TRAINING, marker="." if len(losses) < 50 else None)
        draw_validation(axes, history, lambda epoch, values=values: numpy.interp(epoch, epochs, values))
        axes.set_xlabel(label)
    for axes in panels[1:]:
        axes.set_ylabel(None)
    panels[0].xaxis.get_major_locator().set_params(integer=True)
    panels[1].xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.suptitle(describe_last(history, prefix))
    return save_figure(pyplot, figure, path)


def draw_validation(axes, history: History, place: Callable[[float], float]) -> None:
    """The second line, if anybody evaluates: of the words to be predicted alone, without the order of sentences.

    :param place: from an epoch to where it is on the horizontal axis
    """
    axes.set_ylabel("loss (nats)" if history.validation else "training loss (nats)")
    if history.validation:
        points = [(place(values["epoch"]), values["loss"]) for values in history.validation]
        axes.plot(*zip(*points, strict=True), label="validation (words)", **VALIDATION)
        axes.legend(frameon=False)


def describe_last(history: History, prefix: str) -> str:
    last = history[-1]
    peers = last["alive_peers"]
    text = f"{prefix}: loss {last['loss']:.3f} at epoch {last['epoch']:,}, {peers} peer{'s'[: peers != 1]}"
    if history.validation:
        text += f"; validation {history.validation[-1]['loss']:.3f}"
    return text.replace("$", r"\$")  # two of them would be a formula


def import_pyplot():
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    return pyplot


def save_figure(pyplot, figure, path: Path) -> bool:
    for axes in figure.axes:
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    is_written = write_file(path, lambda file: figure.savefig(file, dpi=130, format="png"))
    pyplot.close(figure)
    # a figure's parts refer to each other: 2 to 4 MB a drawing pile up until Python happens to look for such circles
    gc.collect()
    return is_written
