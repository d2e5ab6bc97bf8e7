"""Checks that take no time, of this machine and of the first epochs; training/preflight.py has the others."""

import logging
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
from transformers import PreTrainedModel

from arguments import TrainerArguments
from common.console import UserError, format_bytes, format_count, name_flags
from common.files import lock_folder, raise_file_limit
from models.build import find_longest_sequence
from swarm.config import SwarmConfig, make_config
from swarm.identity import KEY_FILE, keep_identity
from text.batches import check_data_arguments
from text.tokenizers import tokenizer_fingerprint
from training.checkpoint import MAX_FILE_BYTES, choose_state
from training.devices import list_devices

logger = logging.getLogger("checks")

ENOUGH_FILES = 4096
# measured with ALBERT-large on a CPU: parameters, gradients, moments, sums, copies to average, send and restore
HOST_BYTES_PER_PARAMETER = 79
SHARED_BYTES_PER_PARAMETER = 24  # of these in /dev/shm, with a state for a joining peer
STATE_BYTES_PER_PARAMETER = 12  # on disk: parameters and two moments; with lamb_8bit half of it
LOCAL_STATE_BYTES_PER_PARAMETER = 24  # with local steps also the outer momentum, and this peer's own moments


@dataclass
class Check:
    """One line of the table, and a hint for a problem."""

    what: str
    message: str
    hint: str = ""
    level: str = "ok"  # or warning, or fatal

    def __str__(self) -> str:
        line = name_flags(f"{self.level:<8}{self.what:<15} {self.message}")
        return line if self.level == "ok" or not self.hint else f"{line}\n{'':24}-> {self.hint}"


def check_machine(model: PreTrainedModel, args: TrainerArguments, local_steps: int) -> list[Check]:
    """Run the checks that take no time, for this model."""
    parameters = model.num_parameters(only_trainable=True)
    frozen = sum(param.nbytes for param in model.parameters() if not param.requires_grad)  # as those below adapters
    files = raise_file_limit()
    message = f"{files:,} at most" if files < math.inf else "no limit"
    hint = f"a larger swarm needs more: ulimit -n {ENOUGH_FILES}, or raise nofile in /etc/security/limits.conf"
    checks = [Check("open files", message, hint, "ok" if files >= ENOUGH_FILES else "warning")]
    free = psutil.virtual_memory().available
    is_moved = hasattr(model, "peft_config") and not args.sharded and list_devices(args)[0].type != "cpu"
    # a GPU's checkpoint copies the weights below adapters file by file
    held = min(frozen, MAX_FILE_BYTES) if is_moved else frozen
    needed = HOST_BYTES_PER_PARAMETER * parameters + held
    others = " and a file of the others" if is_moved else " and all others" if frozen else ""
    what = f"{parameters:,} trained parameters{others}"
    message = f"{format_bytes(free)} free, {format_bytes(needed)} needed for {what}, and batches"
    hint = "end other programs, add swap, or train a smaller --config_path"
    level = "fatal" if free < needed else "warning" if free < 1.2 * needed else "ok"
    checks.append(Check("memory", message, hint, level))
    of_state = STATE_BYTES_PER_PARAMETER if local_steps == 1 else LOCAL_STATE_BYTES_PER_PARAMETER
    checks.append(check_disk(args.output_dir, parameters, args.save_total_limit, of_state, frozen))
    return checks + check_shared_memory(parameters)


def check_shared_memory(parameters: int) -> list[Check]:
    """Check the shared memory for this many trained parameters, on systems that limit it."""
    if not os.path.isdir("/dev/shm"):
        return []
    # containers often have 64 MB, and a bus error kills a process that needs more, without a message
    free = shutil.disk_usage("/dev/shm").free
    needed = SHARED_BYTES_PER_PARAMETER * parameters
    message = f"/dev/shm has {format_bytes(free)} free, {format_bytes(needed)} needed"
    hint = "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
    return [Check("shared memory", message, hint, "fatal" if free < needed else "ok")]


def check_disk(folder: str, parameters: int, kept: int, of_state: int, frozen: int) -> Check:
    """Check the free space for the model and `kept` training states, each with `of_state` bytes per trained parameter
    and `frozen` bytes of other weights; less than one of them is fatal."""
    # one more than are kept may be in the making
    one, needed = ((of_state * states + 4) * parameters + (states + 1) * frozen for states in (1, kept + 1))
    path = Path(folder).absolute()
    free = shutil.disk_usage(next(parent for parent in (path, *path.parents) if os.path.exists(parent))).free
    message = f"{folder} has {format_bytes(free)} free, up to {format_bytes(needed)} needed"
    if free < one:
        message = f"{folder} has {format_bytes(free)} free, {format_bytes(one)} needed for the model and one checkpoint"
    hint = "free some, or choose another --output_dir: checkpoints would be lost"
    return Check("disk", message, hint, "fatal" if free < one else "warning" if free < needed else "ok")


def check_step_time(seconds: float, batch_size: int) -> Check:
    """Check the time of a step, after each of which this peer reports its progress."""
    message = f"{seconds:.2f} s per step of {batch_size} samples; 0.5 to 10 s are recommended"
    hint = f"{'raise' if seconds < 0.5 else 'lower'} --per_device_train_batch_size or --gradient_accumulation_steps"
    return Check("step time", message, hint, "ok" if 0.5 <= seconds <= 10 else "warning")


def check_epoch_time(seconds: float, peers: int, matchmaking_time: float) -> Check:
    """Check the time of an epoch with this many peers, this one included. A single peer looks for no group."""
    is_short = peers > 1 and seconds < matchmaking_time
    message = f"about {seconds:,.1f} s with {format_count(peers, 'peer')}"
    if is_short:
        message += f": others wait up to {matchmaking_time:.3g} s for a late peer (--matchmaking_time)"
    hint = "raise --target_batch_size (on all peers) or lower --matchmaking_time: an epoch should take longer than that"
    return Check("epoch time", message, hint, "warning" if is_short else "ok")


def warn_of(checks: list[Check]) -> None:
    """Log each problem in one line, or raise a UserError if disk or shared memory have no room for the state."""
    for check in checks:
        if check.what in ("disk", "shared memory") and check.level == "fatal":
            raise UserError(f"{check.message}: {check.hint}")
        if check.level != "ok":
            logger.warning(f"{check.what}: {check.message}; {check.hint}")


def prepare_start(groups: tuple, model, tokenizer, corpus: dict) -> Path | None:
    """Check a trainer's needs before it joins, lock its folder, keep its identity there, and return the state to resume
    from, if any."""
    swarm, *_, averaging, data_args, args = groups
    check_data_arguments(data_args, tokenizer, corpus, find_longest_sequence(model))
    warn_of(check_machine(model, args, averaging.local_steps))
    lock_folder("--output_dir", args.output_dir)
    keep_identity(make_config(SwarmConfig, swarm), Path(args.output_dir) / KEY_FILE)
    return choose_state(args, model, swarm.experiment_prefix, tokenizer_fingerprint(tokenizer))
