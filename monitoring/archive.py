"""Archive states of the swarm and publish them on the Hugging Face Hub (run_training_monitor.py, run_aux_peer.py).

A checkpoint of the archive has a trainer's format (see training/checkpoint.py), a model card, and a stamp with its
epoch, loss and donor. It holds only arguments that match on all peers and none of this machine, so that it can be
published. To publish the newest one now, such as after the end of a run:

    HF_TOKEN=hf_XXXX python -m monitoring.archive --store_checkpoints --local_path outputs/monitor --repo_url ORG/NAME
"""

import contextlib
import logging
import statistics
import threading
import time
from pathlib import Path

from arguments import SHARED_ARGS, ArchiveArguments, OptimizerArguments, SwarmArguments, parse_arguments
from common.console import UserError, edge, first_line, setup_logging
from common.files import lock_folder
from common.flags import list_shared

if __name__ == "__main__":  # before the imports below, which take seconds
    with edge(interrupted="the same command goes on"):
        groups = parse_arguments(ArchiveArguments, description=__doc__)

import torch

from experiment.optimizer import choose_optimizer
from experiment.samples import sample_texts
from monitoring.history import pick
from monitoring.hub import Publisher, explain_failure, read_stamp
from swarm.optimizer import CollaborativeOptimizer
from training.checkpoint import (
    collect_state,
    find_checkpoints,
    is_known,
    put_back,
    read_epoch,
    remove_checkpoints,
    save_model,
    set_aside,
    write_code,
)
from training.figures import TrainingSchedule
from utils import SwarmMetrics

logger = logging.getLogger("archive")

FINAL_WAIT = 10.0  # seconds to wait for the last checkpoint at the end of this process
REPORT_LAG = 10  # epochs by which peers' reports may lag behind their state
MAX_SHOWN = 10  # checkpoints on the status page
REPORT_WAIT = 10.0  # seconds that a state waits for the metrics of its epoch
CARD = Path(__file__).with_name("card.md")
#: the names of arguments that match on all peers, without paths of this machine
PUBLIC_ARGUMENTS = {name for name in list_shared((SwarmArguments, *SHARED_ARGS)) if not name.endswith("_path")}


class CheckpointHandler:
    """A handler that downloads, saves and publishes the swarm's state every few epochs.

    A helper process downloads, and threads write and upload, so that `step` returns at once. The constructor raises a
    UserError if the folder cannot be written or there is no token for the Hub.

    :param groups: instances of MONITOR_ARGS or AUX_PEER_ARGS; checkpoints hold their PUBLIC_ARGUMENTS
    :param optimizer: an auxiliary optimizer, which has the trainers' state only right after a download (note 28)
    """

    def __init__(self, groups: tuple, model: torch.nn.Module, tokenizer, optimizer: CollaborativeOptimizer):
        swarm, report_args, self.args, *_ = groups
        self.prefix, self.output_dir = swarm.experiment_prefix, Path(report_args.output_dir)
        self.folder = Path(self.args.local_path or self.output_dir)
        self.model, self.tokenizer, self.optimizer = model, tokenizer, optimizer
        arguments = {name: value for group in groups for name, value in vars(group).items()}
        self.settings = {name: value for name, value in arguments.items() if name in PUBLIC_ARGUMENTS}
        self.download = self.arrival = self.saving = None
        self.wanted_epoch = self.last_epoch = 0
        self.start = time.time()
        try:
            lock_folder("--local_path", self.folder)
            put_back(self.folder)
            saved = find_checkpoints(self.folder)
            if saved and read_stamp(saved[-1]).get("experiment_prefix") == self.prefix:
                self.last_epoch = read_epoch(saved[-1])
            elif saved:
                logger.info(f"{saved[-1]} does not belong to the run {self.prefix}")
                set_aside(self.folder, -1)
        except OSError as e:
            text = f"--local_path {self.folder} cannot be written ({e.strerror}): choose another folder"
            raise UserError(text) from e
        url, interval = self.args.repo_url, self.args.upload_interval
        self.publisher = Publisher(url, interval, self.folder) if url else None

    def step(self, metrics: SwarmMetrics | None, history: list[dict], validation: dict) -> None:
        """Continue downloads and uploads that are due, without waiting for network or disk.

        :param metrics: the metrics of the swarm's newest epoch, or None if the last call had them
        :param history: the run's history, see monitoring/report.py
        :param validation: the newest evaluation, as describe_evaluation returns it, or an empty dictionary
        """
        if self.publisher:
            self.publisher.step()
        if self.download is None:
            is_saving = self.saving is not None and self.saving.is_alive()
            if metrics and not is_saving and self.is_due(metrics.epoch):
                self.wanted_epoch = metrics.epoch
                self.download = self.optimizer.state_averager.start_download(min_epoch=metrics.epoch)
        elif self.download.done() and history:  # empty after a run has just started over
            loaded, self.arrival = self.download.result(), self.arrival or time.monotonic()
            epoch = loaded[0]["epoch"] if loaded else None
            if loaded and epoch > history[-1]["epoch"] and time.monotonic() < self.arrival + REPORT_WAIT:
                return  # wait for the metrics of its epoch
            self.download = self.arrival = None
            if loaded is None:
                logger.warning("No peer sent its state, will try to save a checkpoint at the next epoch")
            elif epoch <= self.last_epoch < self.wanted_epoch:
                logger.warning(
                    f"The swarm sent a state of epoch {epoch}, but epoch {self.last_epoch} is saved. Will try again "
                    "at the next epoch"
                )
            else:
                self.save(*loaded, history, validation)

    def is_due(self, epoch: int) -> bool:
        """Return whether a checkpoint is due at this epoch, also of a swarm that has started over."""
        return not self.last_epoch - REPORT_LAG <= epoch < self.last_epoch + self.args.save_steps

    def save(self, metadata: dict, tensors: list[torch.Tensor], history: list[dict], validation: dict) -> None:
        """Load a state that has just been downloaded, and start to write it."""
        averager, epoch = self.optimizer.state_averager, self.optimizer.local_epoch
        averager.apply_downloaded_state(metadata, tensors)
        # a complete training state, from which a trainer can continue (--resume_from_checkpoint)
        state = collect_state(self.model, self.optimizer, self.settings)
        # an aux peer that averages continues at its previous epoch
        averager.set_epoch(epoch)
        self.last_epoch = epoch = state["local_epoch"]
        # up to the state's epoch, or the last known one before it
        known = [entry for entry in history if entry["epoch"] <= epoch] or history[:1]
        metrics = pick(known[-1], SwarmMetrics)
        stamp = {
            "epoch": epoch,
            "loss": metrics["loss"],
            "time": time.time(),
            "experiment_prefix": self.prefix,
            "given_by": metadata["donors"][:1],
            "swarm": metrics,
            "validation": validation,
            "settings": self.settings,
        }
        self.saving = threading.Thread(target=self.write, args=(state, stamp, known), name="save", daemon=True)
        self.saving.start()

    def write(self, state: dict, stamp: dict, known: list[dict]) -> None:
        """Write a checkpoint and its card; this runs in a thread, because it takes seconds."""
        curve, extra_files = self.output_dir / "learning_curve.png", {}
        with contextlib.suppress(FileNotFoundError):
            # only of this run; the report draws it every half minute
            if curve.stat().st_mtime >= self.start:
                extra_files[curve.name] = curve.read_bytes()
        place = self.args.repo_url or f"checkpoint-{stamp['epoch']}"
        # the weights stay until the next download, which waits for this thread
        card = write_card(stamp, known, self.model, self.tokenizer, place, bool(extra_files))
        extra_files["README.md"] = card.encode()
        folder = self.folder / f"checkpoint-{stamp['epoch']}"
        try:
            set_aside(self.folder, stamp["epoch"])
        except OSError as e:
            logger.warning(f"Checkpoints beyond epoch {stamp['epoch']} could not be moved: {e}")
        if save_model(self.model, self.tokenizer, folder, stamp, state, extra_files):
            logger.info(f"Saved {folder}  loss = {stamp['loss']:.5f}")
            interval = self.args.keep_one_in * self.args.save_steps
            remove_checkpoints(select_outdated(find_checkpoints(self.folder), self.args.save_total_limit, interval))

    def describe(self) -> dict:
        """Return the archive's figures for the status page."""
        shown = {"checkpoints": [read_epoch(path) for path in find_checkpoints(self.folder)][-MAX_SHOWN:]}
        uploaded = self.publisher.uploaded if self.publisher else {}
        shown |= {f"uploaded_{name}": uploaded.get(name) for name in ("epoch", "time")}
        return shown | {"repository": self.args.repo_url}

    def finish(self) -> None:
        """Wait for a checkpoint that is being written, and abandon an upload."""
        if self.saving:
            self.saving.join(FINAL_WAIT)
        if self.publisher and (folder := self.publisher.find_new()):
            logger.info(
                f"{folder} is not on the Hub yet. To upload it: python -m monitoring.archive --store_checkpoints "
                f"--local_path {self.folder} --repo_url {self.args.repo_url}"
            )


def select_outdated(folders: list[Path], newest: int, interval: int) -> list[Path]:
    """Return the checkpoints to remove: those that are neither among the newest nor the first of an interval.

    :param folders: the checkpoints by epoch
    :param newest: the number of newest checkpoints to keep
    :param interval: the epochs of an interval whose first checkpoint is kept forever; 0: keep no such checkpoints
    """
    first = {read_epoch(path) // interval: path for path in reversed(folders)} if interval else {}
    return [path for path in folders[:-newest] if path not in first.values()]


def describe_texts(model: torch.nn.Module, tokenizer) -> str:
    """Return sample texts by the model's present weights in Markdown; none if the model cannot make them."""
    try:
        texts = sample_texts(model, tokenizer)
    except Exception as e:  # many types, of any model; an upload matters more
        logger.warning(f"The card has no sample texts ({first_line(e)})")
        return ""
    # indented, so that nothing in them is a link or HTML
    return "## Sample texts\n\n" + "".join(f"    {' '.join(text.split())}\n" for text in texts) + "\n"


def describe_validation(validation: dict) -> str:
    """Return the card's row of the newest evaluation, or nothing if no trainer has evaluated."""
    if not validation:
        return ""
    values = {name.removeprefix("validation_"): value for name, value in validation.items()}
    bits = f", {values['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in values else ""
    text = "| validation | loss {loss:.4f} nats per token, perplexity {perplexity:,.1f}{bits}, at epoch {epoch:,} |\n"
    return text.format(**values | {"bits": bits})


def write_card(stamp: dict, history: list[dict], model: torch.nn.Module, tokenizer, place: str, has_curve: bool) -> str:
    """Return the README.md of a checkpoint, from card.md.

    :param history: the run's known history up to the checkpoint's epoch
    :param place: the model's name or folder for from_pretrained
    """
    settings, objective = stamp["settings"], model.objective
    trust = ", trust_remote_code=True" if model.is_remote_code() else ""
    heads = f'`AutoModelForPreTraining.from_pretrained("{place}"{trust})` loads it with both of its heads.\n'
    local_steps = f", {settings['local_steps']} local steps from epoch {settings['local_steps_from']}"
    return CARD.read_text(encoding="utf-8").format(
        stamp=stamp,
        settings=settings,
        metrics=stamp["swarm"],
        first=history[0],
        model=model,
        objective=objective,
        parameters=model.num_parameters(),
        samples=TrainingSchedule(**pick(settings, TrainingSchedule)).count_samples(stamp["epoch"]),
        most_peers=max(entry["alive_peers"] for entry in history),
        hours=(history[-1]["time"] - history[0]["time"]) / 3600,
        samples_per_second=statistics.median(entry["samples_per_second"] for entry in history),
        optimizer=choose_optimizer(OptimizerArguments(**pick(settings, OptimizerArguments)))[1],
        precision={"none": "32 bits", "8bit": "8 bits"}.get(settings["compression"], "16 bits"),
        local_steps=local_steps if settings["local_steps"] > 1 else "",
        validation=describe_validation(stamp["validation"]),
        texts=describe_texts(model, tokenizer),
        code=write_code(model, place),
        heads=heads if objective.kind.has_pairs and is_known(model) else "",
        curve="![learning curve](learning_curve.png)\n\n" if has_curve else "",
    )


def main(args: ArchiveArguments) -> None:
    """Upload the newest checkpoint of --local_path now."""
    setup_logging("archive")
    if not args.repo_url or not args.local_path:
        raise UserError("give --local_path FOLDER, to upload from, and --repo_url ORG/NAME, to upload to")
    publisher = Publisher(args.repo_url, args.upload_interval, Path(args.local_path))
    folders = find_checkpoints(args.local_path)
    if not folders:
        raise UserError(
            f"--local_path {args.local_path} has no checkpoint: give the folder that contains checkpoint-EPOCH"
        )
    if "settings" not in read_stamp(folders[-1]):
        raise UserError(
            f"--local_path {args.local_path}: {folders[-1].name} is damaged, or a trainer's, which holds its whole "
            "command line: give the folder that a monitor or an auxiliary peer keeps with --store_checkpoints"
        )
    try:
        publisher.publish(folders[-1])
    except Exception as e:  # see Publisher.upload
        logger.error(f"{folders[-1].name} is not on the Hub: {explain_failure(e)}")
        raise SystemExit(1) from None


if __name__ == "__main__":
    with edge(interrupted="the same command goes on"):
        main(*groups)
