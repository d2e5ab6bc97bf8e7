"""Archive states of the swarm and publish them on the Hugging Face Hub (run_training_monitor.py, run_aux_peer.py).

A checkpoint of the archive has a trainer's format (see training/checkpoint.py), a model card, and a stamp with its
epoch, loss and donor. It holds only arguments that match on all peers and none of this machine, so that it can be
published.
"""

import contextlib
import hashlib
import logging
import statistics
import threading
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path

import jinja2
import torch

from arguments import SHARED_ARGS, OptimizerArguments, SwarmArguments
from common.console import UserError
from common.files import lock_folder, write_file
from common.flags import list_shared, list_values
from experiment.model import find_objective, make_model
from experiment.optimizer import choose_optimizer, make_contract, make_optimizer
from experiment.samples import sample_texts
from monitoring.history import pick
from monitoring.hub import Publisher, read_stamp
from swarm.contract import RunContract
from swarm.joining import Swarm
from swarm.optimizer import AveragingHelper, CollaborativeOptimizer
from text.tokenizers import load_tokenizer, tokenizer_fingerprint
from training import checkpoint
from training.checks import check_shared_memory, warn_of
from training.figures import SwarmMetrics, TrainingSchedule

logger = logging.getLogger("archive")

FINAL_WAIT = 60.0  # seconds to wait for the last checkpoint at the end of this process
REPORT_LAG = 10  # epochs by which peers' reports may lag behind their state
MAX_SHOWN = 10  # checkpoints on the status page
MAX_SAMPLED_PARAMETERS = 10**9  # of a model whose cards have sample texts, which the CPU of a peer computes
CARD = Path(__file__).with_name("card.md")
#: the names of arguments that match on all peers, without paths of this machine
PUBLIC_ARGUMENTS = {name for name in list_shared((SwarmArguments, *SHARED_ARGS)) if not name.endswith("_path")}


def make_auxiliary(
    swarm: Swarm, groups: tuple, assists: bool = False
) -> tuple[AveragingHelper, "CheckpointHandler | None", RunContract]:
    """Return an optimizer of the trainers' model, an archive if --store_checkpoints is set, and this peer's contract.

    The optimizer has no gradients: it averages for other peers and passes their states on (`assists`), or only
    downloads states. It starts helper processes.

    :raises UserError: if live trainers use different settings, shared memory is short, or the archive's folder cannot
        be written
    """
    _, report_args, archive_args, model_args, optimizer_args, averaging_args = groups
    tokenizer = load_tokenizer(model_args.tokenizer_path, find_objective(model_args).kind)
    if assists:
        swarm.measure_bandwidth(averaging_args.bandwidth)
    model = make_model(model_args, tokenizer)
    warn_of(check_shared_memory(model.num_parameters(only_trainable=True)))
    contract = make_contract(model, tokenizer_fingerprint(tokenizer), optimizer_args, averaging_args)
    swarm.compare_contract(contract)
    folder = Path(report_args.output_dir) / "log"  # which the next process continues, or empties
    optimizer = make_optimizer(model, swarm, optimizer_args, averaging_args, folder=folder, auxiliary=True)
    if assists:
        optimizer.state_averager.relay_states()
    archive = CheckpointHandler(groups, model, tokenizer, optimizer) if archive_args.store_checkpoints else None
    return optimizer, archive, contract


class CheckpointHandler:
    """A handler that downloads, saves and publishes the swarm's state every few epochs.

    A helper process downloads, and threads write and upload, so that `step` returns at once. The constructor raises a
    UserError if the folder cannot be written or there is no token for the Hub.

    :param groups: instances of MONITOR_ARGS or AUX_PEER_ARGS; checkpoints hold their PUBLIC_ARGUMENTS
    :param optimizer: an auxiliary optimizer, which has the trainers' state only right after a download (note 28)
    """

    def __init__(self, groups: tuple, model: torch.nn.Module, tokenizer, optimizer: CollaborativeOptimizer):
        swarm, report_args, self.args, *_ = groups
        self.prefix = swarm.experiment_prefix
        self.output_dir = Path(report_args.output_dir)
        self.folder = Path(self.args.local_path or self.output_dir)
        self.model = model
        self.tokenizer = tokenizer
        self.optimizer = optimizer
        for adapter in getattr(model, "peft_config", {}).values():
            adapter.base_model_name_or_path = self.args.repo_url  # transformers opens this model with the adapters
        self.settings = {name: value for name, value in list_values(groups).items() if name in PUBLIC_ARGUMENTS}
        self.download = self.saving = None
        self.last_epoch = 0
        self.start = time.time()
        try:
            lock_folder("--local_path", self.folder)
            saved = checkpoint.find_checkpoints(self.folder)
            if saved and read_stamp(saved[-1]).get("experiment_prefix") == self.prefix:
                self.last_epoch = checkpoint.read_epoch(saved[-1])
            elif saved:
                logger.info(f"{saved[-1]} does not belong to the run {self.prefix}")
                checkpoint.set_aside(self.folder, -1)
        except OSError as e:
            text = f"--local_path {self.folder} cannot be written ({e.strerror}): choose another folder"
            raise UserError(text) from e
        url = self.args.repo_url
        self.publisher = Publisher(url, self.args.upload_interval, self.folder) if url else None

    def step(
        self, metrics: SwarmMetrics | None, history: list[dict], validation: dict, contributors: Collection[bytes]
    ) -> None:
        """Continue downloads and uploads that are due, without waiting for network or disk.

        :param metrics: the metrics of the swarm's newest epoch, or None if the last call had them
        :param contributors: the ids of the run's contributors, of which most must have the state that is saved
        """
        is_saving = bool(self.saving and self.saving.is_alive())
        if self.publisher and not is_saving:  # the card is complete
            self.publisher.step()
        if self.download is None:
            if metrics and self.is_due(metrics.epoch) and not is_saving:
                self.download = self.optimizer.state_averager.start_download(
                    min_epoch=metrics.epoch,
                    contributors=[*contributors],
                    is_synchronous=self.optimizer.rounds.is_synchronous(),
                    clients=self.optimizer.tracker.list_clients(),
                )
        elif self.download.done() and history:  # empty after a run has just started over
            loaded = self.download.result()
            self.download = None
            if loaded is None:
                logger.warning("no peer sent its state: retrying at the next epoch")
            elif self.last_epoch - REPORT_LAG <= loaded[0]["epoch"] <= self.last_epoch:
                logger.warning(f"the swarm sent a state before the saved epoch {self.last_epoch}: retrying")
            else:
                self.save(*loaded, history, validation)

    def is_due(self, epoch: int) -> bool:
        """Return whether a checkpoint is due at this epoch, also of a swarm that has started over."""
        return not self.last_epoch - REPORT_LAG <= epoch < self.last_epoch + self.args.save_steps

    def save(self, metadata: dict, tensors: list[torch.Tensor], history: list[dict], validation: dict) -> None:
        """Load a state that has just been downloaded, and start to write it."""
        epoch = self.optimizer.local_epoch
        self.optimizer.state_averager.apply_downloaded_state(metadata, tensors)
        # a complete training state, from which a trainer can continue (--resume_from_checkpoint)
        state = checkpoint.collect_state(self.model, self.optimizer, self.settings)
        # an aux peer that averages continues at its previous epoch
        self.optimizer.state_averager.set_epoch(epoch)
        self.last_epoch = epoch = state["local_epoch"]
        # up to the state's epoch, or the last known one before it
        known = [entry for entry in history if entry["epoch"] <= epoch] or history[:1]
        metrics = pick(known[-1], SwarmMetrics)
        stamp = {
            "epoch": epoch,
            "loss": metrics["loss"],
            "time": time.time(),
            "experiment_prefix": self.prefix,
            # a digest identifies the donor too, but its peer id would reveal its address
            "given_by": [hashlib.sha256(donor.encode()).hexdigest()[:8] for donor in metadata["donors"][:1]],
            "swarm": metrics,
            "validation": validation,
            "settings": self.settings,
        }
        self.saving = threading.Thread(target=self.write, args=(state, stamp, known), name="save", daemon=True)
        self.saving.start()

    def write(self, state: dict, stamp: dict, known: list[dict]) -> None:
        """Write a checkpoint, then its card with sample texts if the model is small. This runs in a thread, because it
        takes seconds."""
        curve = self.output_dir / "learning_curve.png"
        extra_files = {}
        with contextlib.suppress(FileNotFoundError):
            # only of this run; the report draws it every half minute
            if curve.stat().st_mtime >= self.start:
                extra_files[curve.name] = curve.read_bytes()
        place = self.args.repo_url or f"checkpoint-{stamp['epoch']}"
        card = partial(write_card, stamp, known, self.model, self.tokenizer, place, bool(extra_files))
        extra_files["README.md"] = card(with_texts=False).encode()
        own = self.folder, state, stamp, self.args.save_total_limit, extra_files
        if checkpoint.save_checkpoint(self.model, self.tokenizer, *own):
            folder = self.folder / f"checkpoint-{stamp['epoch']}"
            logger.info(f"saved {folder}  loss {stamp['loss']:.4f}")
            # after the checkpoint, which the end of this process could cost otherwise
            if self.model.num_parameters() < MAX_SAMPLED_PARAMETERS:
                # the weights stay until the next download, which waits for this thread
                write_file(folder / "README.md", card())

    def describe(self) -> dict:
        """Return the archive's figures for the status page."""
        saved = checkpoint.find_checkpoints(self.folder)[-MAX_SHOWN:]
        shown = {"checkpoints": [checkpoint.read_epoch(path) for path in saved]}
        uploaded = self.publisher.uploaded if self.publisher else {}
        shown |= {f"uploaded_{name}": uploaded.get(name) for name in ("epoch", "time")}
        return shown | {"repository": self.args.repo_url}

    def finish(self) -> None:
        """Wait for a checkpoint that is being written, and abandon an upload."""
        if self.saving:
            self.saving.join(FINAL_WAIT)
        if self.publisher and (folder := self.publisher.find_new()):
            logger.info(f"{folder} is not on the Hub yet. To upload it: hf upload {self.args.repo_url} {folder} .")


def write_card(
    stamp: dict,
    history: list[dict],
    model: torch.nn.Module,
    tokenizer,
    place: str,
    has_curve: bool,
    with_texts: bool = True,
) -> str:
    """Return the README.md of a checkpoint, from card.md; `place` is the model's name for from_pretrained."""
    settings = stamp["settings"]
    text = CARD.read_text(encoding="utf-8")
    options = dict(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    return jinja2.Template(text, **options).render(
        stamp=stamp,
        settings=settings,
        metrics=stamp["swarm"],
        validation=stamp["validation"],
        history=history,
        model=model,
        samples=TrainingSchedule(**pick(settings, TrainingSchedule)).count_samples(stamp["epoch"]),
        samples_per_second=statistics.median(entry["samples_per_second"] for entry in history),
        optimizer=choose_optimizer(OptimizerArguments(**pick(settings, OptimizerArguments)))[1],
        precision={"none": "32 bits", "8bit": "8 bits"}.get(settings["compression"], "16 bits"),
        texts=[" ".join(text.split()) for text in sample_texts(model, tokenizer)] if with_texts else [],
        code=checkpoint.write_code(model, place),
        has_heads=model.objective.kind.has_pairs and checkpoint.is_known(model),
        place=place,
        has_curve=has_curve,
    )
