"""The progress of a run, its estimated end, and a trainer's line that shows it."""

import logging
import statistics
import time
from collections.abc import Callable, Iterable

from tqdm import tqdm

from arguments import TrainerArguments
from common.console import fit_terminal, format_epoch
from training.figures import TrainingSchedule

logger = logging.getLogger("trainer")

RECENT_EPOCHS = 20  # the median of their times predicts the end of a run
BAR_INTERVAL = 0.5  # seconds between lines on a terminal
LOG_INTERVAL = 20.0  # the same in a log file


def measure_progress(
    epoch: int, final_epoch: int | None, schedule: TrainingSchedule, recent: Iterable[tuple[int, float]]
) -> dict[str, float]:
    """Return the swarm's progress and estimated time left, as far as known, by the names of files and dashboards.

    :param recent: the epochs that recent ones have led to, and the seconds that these took
    """
    progress = {}
    count = int  # without a schedule, all epochs count the same
    if schedule.target_batch_size:
        count = schedule.count_samples
        progress = {"target_batch_size": count(epoch + 1) - count(epoch), "swarm_samples": count(epoch)}
    if final_epoch:
        progress["final_epoch"] = final_epoch
        # by samples, because an epoch with local steps has many times those of an earlier one
        if paces := [seconds / (count(reached) - count(reached - 1)) for reached, seconds in recent if seconds > 0]:
            progress["seconds_left"] = max(0, count(final_epoch) - count(epoch)) * statistics.median(paces)
    return progress


class ProgressDisplay:
    """A trainer's progress: one line that a terminal rewrites, or lines in a log file."""

    def __init__(self, args: TrainerArguments):
        self.args = args
        self.bar = tqdm(unit="", dynamic_ncols=True, leave=False, disable=None, bar_format="{desc}")
        self.interval = LOG_INTERVAL if self.bar.disable else BAR_INTERVAL
        self.next_time = time.monotonic() + self.interval

    def update(self, format_line: Callable[[], str]) -> None:
        """Show a line if it is time for the next one; a narrow terminal shows the first parts of it."""
        if time.monotonic() >= self.next_time:
            self.next_time = time.monotonic() + self.interval
            if self.bar.disable:
                logger.info(format_line())
            else:
                self.bar.set_description_str(fit_terminal(format_line()))

    def log_epoch(self, line: dict, is_first: bool) -> None:
        """Log a line of history.jsonl if --logging_steps selects its epoch; a terminal has the bar instead."""
        is_selected = line["epoch"] % self.args.logging_steps == 0 or (is_first and self.args.logging_first_step)
        if self.bar.disable and is_selected:
            self.next_time = time.monotonic() + self.interval
            logger.info(format_epoch(line))

    def close(self) -> None:
        """Remove the terminal's line."""
        self.bar.close()
