"""Dashboards on trackio, which is local, or wandb. Their failures never end a run."""

import contextlib
import io
import logging
import os
import re
import secrets
import shlex
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from arguments import TrainerArguments
from common.console import first_line
from swarm.joining import Swarm

logger = logging.getLogger("dashboards")

# the groups of our metrics on dashboards, which show metrics without a group first
GROUPS = {
    "": ("loss", "validation_loss", "learning_rate", "alive_peers", "num_peers", "samples_per_second", "total_samples"),
    "validation/": ("validation_perplexity", "validation_accuracy"),
    "progress/": ("swarm_samples", "seconds_left"),
    "epoch/": ("epoch_seconds", "compute_seconds", "waiting_seconds", "averaging_seconds", "data_wait_share"),
    "round/": ("samples", "samples_accumulated", "averaged_with", "grad_norm", "skipped_steps"),
    "traffic/": ("bytes_sent", "bytes_received"),
}
# the ends of names of arguments that are hidden from dashboards, because they hold addresses and names of users
PRIVATE = (
    *("initial_peers", "_maddrs", "_path", "_dir", "_url", "_port", "token", "_checkpoint", "invite", "_key"),
    *("_file", "sources", "dataset_name"),
)


class Dashboard:
    """A run on trackio or wandb (`module`) that any thread can use, unlike the functions of these modules.

    Without a run, such as after a failure, it drops all reports.
    """

    def __init__(self, module: ModuleType | None = None, run: Any = None):
        self.module, self.run = module, run

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
            logger.warning(f"the dashboard failed ({e!r}) and gets no more reports")
            self.run = None

    def finish(self) -> None:
        """Write pending reports and end the dashboard's threads and helper processes."""
        if self.run is None:
            return
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self.run.finish()
            if hasattr(self.module, "teardown"):  # wandb's service process
                self.module.teardown()
        except Exception as e:  # as above
            logger.warning(f"the dashboard may lack the last epochs ({e!r})")


def make_run_name(prefix: str) -> str:
    """Return a run name that is unique among the peers that report to a dashboard."""
    return f"{prefix}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def start_dashboard(kind: str, project: str, run_name: str, config: dict) -> Dashboard:
    """Start or continue a run on trackio or wandb, or log why that is impossible.

    The dashboard gets the arguments of the command line that are not PRIVATE, and the reports.
    """
    config = {name: value for name, value in config.items() if not name.endswith(PRIVATE)}
    start = {"trackio": start_trackio, "wandb": start_wandb}[kind]
    try:
        dashboard, place = start(project, name=run_name, config=config, resume="allow")
    except Exception as e:  # many types: a full disk, no network, a missing package
        logger.warning(f"no dashboard: {kind} failed ({first_line(e)}); metrics.jsonl and the curve are still written")
        return Dashboard()
    logger.info(f"dashboard: {place}")
    return dashboard


def start_trackio(project: str, **options) -> tuple[Dashboard, str]:
    """Start a run in a local SQLite file, without server or account, and return it with the command that shows it."""
    import trackio

    with contextlib.redirect_stdout(io.StringIO()):  # its greeting
        run = trackio.init(project, embed=False, auto_log_cpu=False, auto_log_gpu=False, **options)
    command = Path(sys.executable).with_name("trackio")
    folder = f"TRACKIO_DIR={shlex.quote(os.environ['TRACKIO_DIR'])} " if os.environ.get("TRACKIO_DIR") else ""
    return Dashboard(trackio, run), f"{folder}{command} show --project {shlex.quote(project)}"


def start_wandb(project: str, name: str, **options) -> tuple[Dashboard, str]:
    """Start a run on wandb, and return it with its address.

    wandb gets no host name, command line or console output, which holds addresses.
    """
    # wandb no longer reads the first of these variables
    is_disabled = os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes")
    if is_disabled or os.environ.get("WANDB_MODE") == "disabled":
        return Dashboard(), "none, because of WANDB_DISABLED or WANDB_MODE"
    import wandb

    if folder := os.environ.get("WANDB_DIR"):
        os.makedirs(folder, exist_ok=True)  # otherwise wandb writes to /tmp
    settings = wandb.Settings(
        init_timeout=20,  # without a network, wandb would try for 90 s
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
    try:
        run = wandb.init(project=project, id=run_id, name=name, settings=settings, **options)
    except Exception:
        wandb.teardown()
        raise
    return Dashboard(wandb, run), run.url or f"wandb sync {Path(run.dir).parent}"


def start_trainer_dashboard(args: TrainerArguments, swarm: Swarm, config: dict) -> Dashboard:
    """Start a trainer's own run on wandb, if --wandb_project or WANDB_PROJECT is set.

    A restarted trainer has the same peer id, and so continues the same run. Call this after hivemind has forked its
    helper processes.
    """
    project = args.wandb_project or os.environ.get("WANDB_PROJECT")
    run_name = f"{swarm.prefix}-trainer-{str(swarm.dht.peer_id)[-8:]}"
    return start_dashboard("wandb", project, run_name, config) if project else Dashboard()
