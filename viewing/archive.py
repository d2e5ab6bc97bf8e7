"""Keep states of the swarm and publish them on the Hugging Face Hub; for run_training_monitor.py and run_aux_peer.py.

A checkpoint of the archive is a trainer's (see machine/checkpoint.py) with a model card beside it, stamped with its
epoch, loss and the peer that gave it. Of the command line it holds what all peers of the run agree on, and nothing of
this machine: it may be published as it is. To publish the newest one at once, after the end of a run for instance:

    HF_TOKEN=hf_XXXX python -m viewing.archive --store_checkpoints --local_path outputs/monitor --repo_url ORG/NAME
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import statistics
import threading
import time
from pathlib import Path

import hivemind
import huggingface_hub
import torch

from arguments import (
    ArchiveArguments,
    AveragingArguments,
    ModelArguments,
    OptimizerArguments,
    SwarmArguments,
    parse_arguments,
)
from experiment.model import USES_OF, make_model
from experiment.optimizer import describe_contract, make_optimizer
from machine.checkpoint import (
    collect_state,
    find_checkpoints,
    put_back,
    read_epoch,
    remove_checkpoints,
    save_model,
    set_aside,
)
from support.console import UserError, edge, setup_logging
from support.files import lock_folder, write_file
from swarm.joining import compare_with_run
from swarm.optimizer import Optimizer
from text.tokenizers import tokenizer_fingerprint
from utils import SwarmMetrics

logger = logging.getLogger("archive")

FINAL_WAIT = 10.0  # seconds that the end of this process waits for a checkpoint that is being written
REPORT_LAG = 10  # epochs by which peers' reports may lie behind their state
REPORT_WAIT = 10.0  # seconds that a state waits for the figures of its own epoch
RETRY_PERIOD = 600.0  # seconds between two tries to upload, unless --upload_interval is shorter
NETWORK_TIMEOUT = 60.0  # seconds without a byte, or an answer, from the Hub
#: what all peers of a run agree on, without the places where this machine has it
PUBLIC_ARGUMENTS = {
    field.name
    for group in (SwarmArguments, ModelArguments, OptimizerArguments, AveragingArguments)
    for field in dataclasses.fields(group)
    if "ALL PEERS" in field.metadata["help"] and not field.name.endswith("_path")
}


class CheckpointHandler:
    """Downloads the swarm's state every few epochs, saves it, publishes it; what lives from one look to the next.

    Downloads are a helper process's work, writing and uploading that of threads: `step` returns at once. A user's error
    (a folder that cannot be written, no token for the Hub) ends the process with one line.

    :param optimizer: an auxiliary one, made by make_optimizer. Its state is the trainers' only right after a download
        (note 28)
    :param arguments: of the whole command line, by name: checkpoints note PUBLIC_ARGUMENTS
    """

    def __init__(
        self,
        args: ArchiveArguments,
        swarm: SwarmArguments,
        output_dir: str,
        *,
        model: torch.nn.Module,
        tokenizer,
        optimizer: Optimizer,
        arguments: dict,
    ):
        self.args, self.prefix, self.output_dir = args, swarm.experiment_prefix, Path(output_dir)
        self.folder = Path(args.local_path or output_dir)
        self.model, self.tokenizer, self.optimizer = model, tokenizer, optimizer
        self.settings = {name: value for name, value in arguments.items() if name in PUBLIC_ARGUMENTS}
        self.download = self.arrival = self.saving = None
        self.wanted_epoch = self.last_epoch = 0
        self.start = time.time()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock_folder("--local_path", self.folder)
            put_back(self.folder)
            saved = find_checkpoints(self.folder)
            if saved and read_stamp(saved[-1]).get("experiment_prefix") == self.prefix:
                self.last_epoch = read_epoch(saved[-1])
            elif saved:
                logger.info(f"{saved[-1]} is not of the run {self.prefix}")
                set_aside(self.folder, -1)
        except OSError as e:
            raise UserError(
                f"--local_path {self.folder} cannot be written ({e.strerror}): choose another folder"
            ) from e
        self.publisher = None
        if args.repo_url:
            if find_token() is None:
                raise UserError("--repo_url needs a token that may write: set HF_TOKEN, or run `hf auth login` once")
            self.publisher = Publisher(args.repo_url, args.upload_interval, self.folder)

    def step(self, metrics: SwarmMetrics | None, history: list[dict]) -> None:
        """Go on with what is due, without waiting for network or disk: call it at each look at the swarm.

        :param metrics: of the swarm's newest epoch, if that was not given before
        :param history: of the run, see viewing/dashboard.py
        """
        if self.publisher:
            self.publisher.step()
        if self.download is None:
            is_saving = self.saving is not None and self.saving.is_alive()
            if metrics and not is_saving and self.is_due(metrics.epoch):
                self.wanted_epoch = metrics.epoch
                self.download = self.optimizer.state_averager.start_download(min_epoch=metrics.epoch)
        elif self.download.done():
            loaded, self.arrival = self.download.result(), self.arrival or time.monotonic()
            is_ahead = loaded is not None and loaded[0]["epoch"] > history[-1]["epoch"]
            if is_ahead and time.monotonic() < self.arrival + REPORT_WAIT:
                return  # the figures of its own epoch are about to be seen
            self.download = self.arrival = None
            if loaded is None:
                logger.warning("No peer gave its state, will try to save a checkpoint at the next epoch")
            elif loaded[0]["epoch"] <= self.last_epoch < self.wanted_epoch:
                logger.warning(
                    f"The swarm gave a state of epoch {loaded[0]['epoch']}, epoch {self.last_epoch} is saved already. "
                    "Will try again at the next epoch"
                )
            else:
                self.save(*loaded, history)

    def is_due(self, epoch: int) -> bool:
        """Whether it is time for a checkpoint; also when the swarm has gone back, as it does when a run begins anew."""
        return not self.last_epoch - REPORT_LAG <= epoch < self.last_epoch + self.args.save_checkpoint_step_interval

    def save(self, metadata: dict, tensors: list[torch.Tensor], history: list[dict]) -> None:
        """Take over a state that has just been downloaded, and begin to write it."""
        averager, epoch = self.optimizer.state_averager, self.optimizer.local_epoch
        averager.take_over(metadata, tensors)
        # a whole training state: should all trainers die, one can go on from it (--resume_from_checkpoint)
        state = collect_state(self.model, self.optimizer, self.settings)
        # who averages for the trainers meanwhile goes on where it was
        averager.set_epoch(epoch)
        self.last_epoch = epoch = state["local_epoch"]
        # up to the state's own epoch, or the last one before it in which this observer looked
        known = [entry for entry in history if entry["epoch"] <= epoch] or history[:1]
        public = {field.name for field in dataclasses.fields(SwarmMetrics)}
        metrics = {name: value for name, value in known[-1].items() if name in public}
        stamp = {
            "epoch": epoch,
            "loss": metrics["loss"],
            "time": time.time(),
            "experiment_prefix": self.prefix,
            "given_by": [metadata["donor"]],
            "swarm": metrics,
            "settings": self.settings,
        }
        curve, beside = self.output_dir / "learning_curve.png", {}
        with contextlib.suppress(FileNotFoundError):
            # of this run, and seconds old: the report of this role draws it every half minute
            if curve.stat().st_mtime >= self.start:
                beside[curve.name] = curve.read_bytes()
        where = self.args.repo_url or f"checkpoint-{epoch}"
        beside["README.md"] = write_card(stamp, known, self.model, where, bool(beside)).encode()
        self.saving = threading.Thread(target=self.write, args=(state, stamp, beside), name="save", daemon=True)
        self.saving.start()

    def write(self, state: dict, stamp: dict, beside: dict[str, bytes]) -> None:
        """In a thread: hashing and writing takes seconds."""
        folder = self.folder / f"checkpoint-{stamp['epoch']}"
        try:
            set_aside(self.folder, stamp["epoch"])
        except OSError as e:
            logger.warning(f"Checkpoints beyond epoch {stamp['epoch']} could not be set aside: {e}")
        if save_model(self.model, self.tokenizer, folder, stamp, state, beside):
            logger.info(f"Saved {folder}  loss = {stamp['loss']:.5f}")
            interval = self.args.keep_one_in * self.args.save_checkpoint_step_interval
            remove_checkpoints(select_outdated(find_checkpoints(self.folder), self.args.save_total_limit, interval))

    def finish(self) -> None:
        """Let a checkpoint that is being written get ready, and give up an upload that is going on."""
        if self.saving:
            self.saving.join(FINAL_WAIT)
        if self.publisher and (folder := self.publisher.find_new()):
            logger.info(
                f"{folder} is not on the Hub yet. This uploads it: python -m viewing.archive --store_checkpoints "
                f"--local_path {self.folder} --repo_url {self.args.repo_url}"
            )


def make_observer(
    dht: hivemind.DHT,
    swarm: SwarmArguments,
    model_args: ModelArguments,
    optimizer_args: OptimizerArguments,
    averaging_args: AveragingArguments,
    tokenizer,
) -> tuple[torch.nn.Module, Optimizer, dict[str, str]]:
    """What a role that computes no gradients needs to take the trainers' states, or to average for them.

    :returns: model and optimizer as the trainers build them, and the contract that this implies; where that of live
        trainers differs, it stops with one line
    """
    model = make_model(model_args, tokenizer)
    contract = describe_contract(model, tokenizer_fingerprint(tokenizer), optimizer_args, averaging_args)
    compare_with_run(dht, swarm.experiment_prefix, contract)
    return model, make_optimizer(model, dht, swarm, optimizer_args, averaging_args, auxiliary=True), contract


def read_stamp(folder: Path) -> dict:
    """What a checkpoint's training_state.json says of it; nothing when that is damaged."""
    try:
        stamp = json.loads((folder / "training_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def select_outdated(folders: list[Path], newest: int, interval: int) -> list[Path]:
    """Those checkpoints to remove that are neither among the newest nor the first in an interval.

    :param folders: by epoch
    :param newest: number of newest ones to keep
    :param interval: epochs of which the first checkpoint is kept for ever; 0: of none
    """
    first = {read_epoch(path) // interval: path for path in reversed(folders)} if interval else {}
    return [path for path in folders[:-newest] if path not in first.values()]


# --- the model card ---------------------------------------------------------------------------------------------------

CARD = """\
---
library_name: transformers
pipeline_tag: {task}
license: unknown
tags:
- {model_type}
- hivemind
- collaborative-training
- volunteer-computing
---

# {name}

A model of {parameters:,} parameters at epoch {epoch} of the run `{name}`: volunteers train it together over the
internet, with [hivemind](https://github.com/learning-at-home/hivemind). An epoch is one optimizer step of the whole
swarm. This card is written anew with each upload; language and license are not recorded in the run.

{curve}| | |
|---|---|
{figures}

## Use

```python
from transformers import pipeline

predict = pipeline("{task}", "{where}"{trust})
print(predict({example}))
```

{heads}`training_state.pt` holds the optimizer and everything else that training goes on from: download the folder and
give it to `run_trainer.py --resume_from_checkpoint`. `training_state.json` has the size and SHA-256 of each file.
"""


def write_card(stamp: dict, history: list[dict], model: torch.nn.Module, where: str, has_curve: bool) -> str:
    """The README.md of a checkpoint, with the YAML header that the Hub reads.

    :param stamp: of the checkpoint, as CheckpointHandler.save writes it
    :param history: of the run up to this epoch, as far as this observer saw it
    :param where: what from_pretrained finds it by
    :param has_curve: whether learning_curve.png lies beside it
    """
    settings, metrics = stamp["settings"], stamp["swarm"]
    what, task, example = USES_OF[model.objective]
    trust = ", trust_remote_code=True" * hasattr(model.config, "auto_map")
    heads = f'`AutoModelForPreTraining.from_pretrained("{where}"{trust})` loads it with both of its heads.\n'
    samples = stamp["epoch"] * settings["target_batch_size"]
    hours = (history[-1]["time"] - history[0]["time"]) / 3600
    speed = statistics.median(entry["samples_per_second"] for entry in history)
    # which the stamps of earlier versions lack
    floor = settings.get("min_learning_rate", 0.0)
    clamp = f", clamp {settings['clamp_value']:g}" if settings["optim"] != "adamw" else ""
    precision = {"none": "32 bits", "float16": "16 bits", "8bit": "8 bits"}[settings["compression"]]
    figures = {
        "epoch": f"{stamp['epoch']:,} of {settings['total_steps']:,}",
        "training loss": f"{metrics['loss']:.4f} nats, {what}, at epoch {metrics['epoch']:,}",
        "samples": f"{samples:,} (epochs x batch size)",
        "peers": f"{metrics['alive_peers']} at this epoch, {max(entry['alive_peers'] for entry in history)} at most",
        "watched for": f"{hours:.1f} hours, from epoch {history[0]['epoch']:,}",
        "throughput": f"{speed:.1f} samples/s, the median epoch",
        "batch size": f"{settings['target_batch_size']:,} samples, gathered by all peers",
        "optimizer": f"{settings['optim']}, beta {settings['adam_beta1']:g} {settings['adam_beta2']:g}, epsilon "
        f"{settings['adam_epsilon']:g}, weight decay {settings['weight_decay']:g}, gradients clipped to "
        f"{settings['max_grad_norm']:g}{clamp}",
        "schedule": f"peak learning rate {settings['learning_rate']:g} after {settings['warmup_steps']:,} epochs of "
        f"linear warm-up, linear decay to {floor:g} at epoch {settings['total_steps']:,}",
        "averaging": f"gradients in {precision}, parameters every {settings['average_state_every']} epochs",
    }
    return CARD.format(
        model_type=model.config.model_type,
        name=stamp["experiment_prefix"],
        parameters=model.num_parameters(),
        epoch=stamp["epoch"],
        figures="\n".join(f"| {name} | {value} |" for name, value in figures.items()),
        where=where,
        # the folder brings the model's code where transformers has none
        trust=trust,
        task=task,
        example=example,
        heads=heads * (model.objective == "mlm_sop"),
        curve="![learning curve](learning_curve.png)\n\n" * has_curve,
    )


# --- the Hugging Face Hub ---------------------------------------------------------------------------------------------


class Publisher:
    """Uploads the newest checkpoint of a folder, not more often than once in an interval, from a thread of its own.

    What goes wrong is one warning for each new reason, and another try. `uploaded.json` notes the last upload, so that
    a restart neither uploads the same again nor begins to count anew.
    """

    def __init__(self, repo_id: str, interval: float, folder: Path):
        self.repo_id, self.interval, self.folder = repo_id, interval, folder
        self.record = folder / "uploaded.json"
        self.thread = self.last_failure = None
        self.uploaded: dict = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(self.record.read_text(encoding="utf-8"))
            self.uploaded = record if record["repo_id"] == repo_id else {}
        # a clock that was set back must not put it off for ever
        wait = self.uploaded.get("time", 0) + interval - time.time()
        self.next_upload = time.monotonic() + min(max(wait, 0), interval)
        bound_waiting_for_the_hub()

    def find_new(self) -> Path | None:
        """The newest checkpoint, unless it is on the Hub."""
        newest = find_checkpoints(self.folder)[-1:]
        return newest[0] if newest and read_stamp(newest[0]).get("time") != self.uploaded.get("checkpoint") else None

    def step(self) -> None:
        """Begin an upload that is due."""
        if time.monotonic() < self.next_upload or (self.thread and self.thread.is_alive()):
            return
        if folder := self.find_new():
            self.thread = threading.Thread(target=self.upload, args=(folder,), name="upload", daemon=True)
            self.thread.start()

    def upload(self, folder: Path) -> None:
        """In a thread: upload one checkpoint, or warn and have it tried again."""
        start = time.monotonic()
        try:
            self.publish(folder)
            self.next_upload, self.last_failure = start + self.interval, None
        except Exception as e:  # whatever client, network and server come up with: the run matters more
            wait, reason = min(self.interval, RETRY_PERIOD), explain_failure(e)
            self.next_upload = time.monotonic() + wait
            if reason != self.last_failure:
                logger.warning(f"{folder.name} is not on the Hub: {reason}. Will try every {wait:g} s until it works")
            self.last_failure = reason

    def publish(self, folder: Path) -> None:
        """Upload one checkpoint and note it; raises whatever goes wrong."""
        stamp, start = read_stamp(folder), time.monotonic()
        url = upload_checkpoint(folder, self.repo_id)
        logger.info(f"Uploaded {folder.name} to {url} in {time.monotonic() - start:.1f} s")
        self.uploaded = {"repo_id": self.repo_id, "checkpoint": stamp["time"], "time": time.time()}
        write_file(self.record, lambda file: file.write(json.dumps(self.uploaded).encode()))


def find_token() -> str | None:
    """The Hub's token from the environment, or that of `hf auth login`."""
    return os.environ.get("HF_TOKEN") or os.environ.get("HF_USER_ACCESS_TOKEN") or huggingface_hub.get_token()


def bound_waiting_for_the_hub() -> None:
    """Have huggingface_hub, which waits for ever, give up a connection that is silent."""
    client = huggingface_hub.get_session()
    huggingface_hub.set_client_factory(
        lambda: type(client)(event_hooks=client.event_hooks, follow_redirects=True, timeout=NETWORK_TIMEOUT)
    )
    # it warns of each of its own tries, with addresses that are not for everybody
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    huggingface_hub.utils.disable_progress_bars()


def upload_checkpoint(folder: Path, repo_id: str) -> str:
    """Make all files of a checkpoint of the archive the repository's, in one commit; raises whatever goes wrong.

    :returns: the commit's address
    """
    stamp = read_stamp(folder)
    if "settings" not in stamp:
        raise ValueError(f"{folder} is not of an archive: a trainer's checkpoint holds its whole command line")
    # a peer's id leads to its address: a digest tells as well whether two states are of one peer
    stamp["given_by"] = [hashlib.sha256(donor.encode()).hexdigest()[:8] for donor in stamp["given_by"]]
    api = huggingface_hub.HfApi(token=find_token())
    with contextlib.ExitStack() as files:
        operations = []
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            # open files, not names: they stay when the checkpoint is removed meanwhile, and they go over plain HTTP.
            # The Hub's other way, Xet, knows no time limit, and would spare nothing: every weight is new each time
            content = files.enter_context(open(path, "rb"))
            if path.name == "training_state.json":
                content = (json.dumps(stamp, indent=2) + "\n").encode()
            operations.append(huggingface_hub.CommitOperationAdd(path.relative_to(folder).as_posix(), content))
        api.create_repo(repo_id, exist_ok=True)
        message = f"epoch {stamp['epoch']}, loss {stamp['loss']:.4f}"
        # not upload_folder: it may commit in several steps, and who downloads in between gets two epochs mixed
        return api.create_commit(repo_id, operations, commit_message=message).commit_url


def explain_failure(error: BaseException) -> str:
    """One line on why an upload failed, with the cure; without the token."""
    # the base of its HTTP client's errors: versions of huggingface_hub differ in it
    client_error = huggingface_hub.errors.HTTPError
    is_of_network = isinstance(error, client_error)
    while getattr(error, "response", None) is None and error.__cause__ is not None:
        error = error.__cause__
        is_of_network = is_of_network or isinstance(error, client_error)
    response = getattr(error, "response", None)
    if response is None:
        if isinstance(error, OSError) and error.filename is not None:
            return f"{error.filename}: {error.strerror}"
        text = re.sub(r"hf_\w+", "hf_***", " ".join(str(error).split())[:300])
        text = f"{type(error).__name__}: {text}"
        if is_of_network:
            return f"no answer from {huggingface_hub.constants.ENDPOINT} ({text}), see to the network"
        return text
    cures = {
        401: "the token is refused: set HF_TOKEN to one that may write (huggingface.co/settings/tokens), or run "
        "`hf auth login`",
        403: "the token may not write there, or the quota is used up: see the Hub's settings of both",
        404: "there is no such user or organization, or the token may not see it: check --repo_url",
        413: "it is too large for the quota: make room there",
        429: "too many requests: raise --upload_interval",
    }
    cure = cures.get(response.status_code, "the Hub has a problem of its own" if response.status_code >= 500 else "")
    # the server's own words alone: the client's name addresses that let anybody upload
    text = " ".join((getattr(error, "server_message", None) or response.reason_phrase).split())[:300]
    return f"HTTP {response.status_code} ({text}){cure and ', '}{cure}"


def main() -> None:
    """Upload the newest checkpoint of --local_path now."""
    setup_logging("archive")
    [args] = parse_arguments(ArchiveArguments, description=__doc__.splitlines()[0])
    if not args.repo_url or not args.local_path:
        raise UserError("give --local_path FOLDER and --repo_url ORG/NAME: what to upload, and where to")
    if find_token() is None:
        raise UserError("--repo_url needs a token that may write: set HF_TOKEN, or run `hf auth login` once")
    folders = find_checkpoints(args.local_path)
    if not folders:
        raise UserError(
            f"--local_path {args.local_path} has no checkpoint: give the folder that holds checkpoint-EPOCH"
        )
    if "settings" not in read_stamp(folders[-1]):
        raise UserError(
            f"--local_path {args.local_path}: {folders[-1].name} is damaged, or a trainer's, which holds its whole "
            "command line: give the folder that a monitor or an auxiliary peer keeps with --store_checkpoints"
        )
    try:
        Publisher(args.repo_url, args.upload_interval, Path(args.local_path)).publish(folders[-1])
    except Exception as e:  # see Publisher.upload
        logger.error(f"{folders[-1].name} is not on the Hub: {explain_failure(e)}")
        raise SystemExit(1) from None


if __name__ == "__main__":
    with edge():
        main()
