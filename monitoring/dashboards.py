"""A run's dashboard on wandb. Its failures never end the run."""

import contextlib
import io
import logging
import math
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

from common.console import first_line

logger = logging.getLogger("dashboards")

INIT_TIMEOUT = 20.0  # seconds; without a network, wandb would try for 90 s
RETRY_INTERVAL = 600.0  # seconds after a failure of wandb's service, until it is tried again

# the groups of our metrics on dashboards, which show metrics without a group first
GROUPS = {
    "": ("loss", "validation_loss", "learning_rate", "alive_peers", "samples_per_second", "total_samples"),
    "validation/": ("validation_perplexity", "validation_accuracy"),
    "progress/": ("swarm_samples", "seconds_left"),
    "epoch/": ("epoch_seconds", "compute_seconds", "waiting_seconds", "averaging_seconds"),
    "round/": ("samples", "averaged_with", "grad_norm", "skipped_steps"),
    "traffic/": ("bytes_sent", "bytes_received"),
}


class Dashboard:
    """A run on wandb that any thread can use, unlike wandb's own functions. Without a run, such as after a failure, it
    drops all reports."""

    def __init__(self, run: Any = None, can_retry: bool = False):
        self.run = run
        #: when the service may be there again
        self.retry_at = time.monotonic() + RETRY_INTERVAL if can_retry else math.inf

    def report(self, values: dict) -> None:
        """Log metrics by name, including `epoch`, without waiting."""
        if self.run is None:
            return
        names = [(f"{group}{name}", name) for group, names in GROUPS.items() for name in names if name in values]
        # no chart of zeros
        shown = {title: values[name] for title, name in names if values[name] or name != "skipped_steps"}
        try:
            self.run.log(shown, step=values["epoch"])
        except Exception as e:  # wandb's service raises many types, and none may stop training
            logger.warning(f"the dashboard failed ({e!r}) and gets no reports for {RETRY_INTERVAL:.0f} s")
            self.run = None
            self.retry_at = time.monotonic() + RETRY_INTERVAL

    def finish(self) -> None:
        """Write pending reports and end the dashboard's threads and helper processes."""
        if self.run is None:
            return
        import wandb

        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self.run.finish()
            wandb.teardown()  # its service process
        except Exception as e:  # as above
            logger.warning(f"the dashboard may lack the last epochs ({e!r})")


def make_run_name(prefix: str) -> str:
    """Return a run name that is unique among the peers that report to a dashboard."""
    return f"{prefix}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def start_dashboard(project: str, name: str) -> Dashboard:
    """Start or continue a run on wandb, or log why that is impossible.

    wandb gets the reports alone: no flags, host name, command line or console output, which hold addresses.
    """
    # wandb no longer reads the first of these variables
    is_disabled = os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes")
    if is_disabled or os.environ.get("WANDB_MODE") == "disabled":
        logger.info("dashboard: none, because of WANDB_DISABLED or WANDB_MODE")
        return Dashboard()
    try:
        import wandb

        with contextlib.suppress(Exception):  # as below
            wandb.teardown()  # otherwise wandb would return a run that has failed
        if folder := os.environ.get("WANDB_DIR"):
            os.makedirs(folder, exist_ok=True)  # otherwise wandb writes to /tmp
        settings = wandb.Settings(
            init_timeout=INIT_TIMEOUT,
            login_timeout=60,  # in a terminal, wandb asks for a missing key
            finish_timeout=10,  # wandb would wait forever; the rest stays on disk for `wandb sync`
            console="off",
            disable_code=True,
            disable_git=True,
            host="",
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        # made of the name, so that a restart continues the run, with only characters that an id may have
        run_id = re.sub(r"[^\w-]", "-", name, flags=re.ASCII)[-64:]
        run = wandb.init(project=project, id=run_id, name=name, settings=settings, resume="allow")
    except Exception as e:  # many types: a full disk, no network
        logger.warning(f"no dashboard: wandb failed ({first_line(e)}); metrics.jsonl and the curve are still written")
        with contextlib.suppress(Exception):  # as above
            wandb.teardown()
        # without a key, wandb could ask for one on a terminal again and again
        return Dashboard(can_retry=type(e).__name__ == "CommError")
    logger.info(f"dashboard: {run.url or f'wandb sync {Path(run.dir).parent}'}")
    return Dashboard(run)
