"""The flags of trainer, monitor and auxiliary peer, as dataclasses for HfArgumentParser, grouped by who reads them.

Names and defaults are those of hivemind's ALBERT example, or of RuLeanALBERT for flags that only it has. The defaults
suit the real experiment: pass flags for small runs. `shared=True` means that every trainer of a run must use the same
value. These values make up the run's contract, which is published on the DHT and compared when a peer joins.
An *epoch* is one optimizer step of the whole swarm (target_batch_size samples), not a pass over the data. Flags that
end in `_steps` count epochs; only --local_steps, --gradient_accumulation_steps and --grad_acc_steps count batches.
"""

import hashlib
import importlib.util
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from common.addresses import make_host_maddrs
from common.console import UserError
from common.flags import FlagGroup, check_username, flag, parse_flags
from common.hub import make_repo_id

OBJECTIVES = Literal["mlm", "mlm_sop", "clm", "sft"]

DEFAULT_CONFIG_PATH = "configs/albert-large.json"
DEFAULT_TOKENIZER_PATH = "data/tokenizer"
DEFAULT_DATASET_PATH = "data/albert_tokenized_wikitext"
SAMPLE_TEXT = "sample_data/austen.txt.xz"
MIN_SEQUENCE_LENGTH = 8  # tokens; a pair of sentences has three special ones
MAX_SEED = 2**32 - 1  # of numpy's generators
MAX_RECORD_LIFETIME = 3600.0  # seconds, and 10 more for readers: for one record, they drop all that a node sends

LOGGING_DIR_HELP = "Folder for log files and, unless WANDB_DIR names one, the dashboard's data."
REPORT_DIR_HELP = "Folder for metrics.jsonl, learning_curve.png, summary.json and the checkpoints."
TOTAL_LIMIT_HELP = "Keep N checkpoints, each 3 times as large as the weights (lamb_8bit: half; local_steps: double)."


@dataclass
class SwarmArguments(FlagGroup):
    """The connection to the swarm. Read by every role."""

    experiment_prefix: str = flag(
        "", "Unique name of the run. Default: that of --initial_peers, or a new one.", aliases=["--run_id"], shared=True
    )
    initial_peers: list[str] = flag(
        [], "Peers to join through: multiaddrs as the monitor prints them, or host:port of a peer or its status page."
    )
    new_run: bool = flag(False, "Start a new run, even if the initial peers serve another one.")
    use_ipfs: bool = flag(
        False, "Find initial peers by ids (/p2p/XXXX), through the public IPFS network.", requires="initial_peers"
    )
    host_maddrs: list[str] = flag(
        ["/ip4/0.0.0.0/tcp/0"], "Multiaddrs or host:port to listen on (port 0: any).", aliases=["--dht_listen_on"]
    )
    announce_maddrs: list[str] = flag(
        [],
        "Multiaddrs to announce instead: your public IP and forwarded port. An empty list means none.",
        may_be_empty=True,  # guides write --announce_maddrs $ANNOUNCE_ON, which is not always set
    )
    use_google_dns: bool = flag(
        False, "Announce the address that api.ipify.org reports, with --host_maddrs' port.", excludes="announce_maddrs"
    )
    authorize: bool = flag(False, "Require a closed run.", requires=["invite FILE", "authority_key FILE"])
    invite: str | None = flag(
        None, "For a closed run: invitation from invite.py, with a key.", excludes=["authority_key", "identity_path"]
    )
    authority_key: str | None = flag(
        None, "On a closed run's monitor: file of the key that signs credentials.", requires="experiment_prefix NAME"
    )
    username: str | None = flag(None, "Name on dashboards; in a closed run, the name in --invite. Default: a number.")
    client_mode: bool = flag(False, "Accept no connections (one trainer or aux peer must); automatic if unreachable.")
    identity_path: str | None = flag(
        None, "File with this peer's private key, created if missing: keeps its id and address across restarts."
    )
    status_port: int | None = flag(
        None, "TCP port of the status page (0: any), by which others may join; also JSON.", ge=0, lt=2**16
    )

    def __post_init__(self):
        super().__post_init__()
        self.host_maddrs = [maddr for text in self.host_maddrs for maddr in make_host_maddrs(text)]
        # "$VARIABLE" of a shell that does not set it
        self.announce_maddrs = [maddr for maddr in self.announce_maddrs if maddr]
        is_inherited = self.initial_peers and not self.new_run and not self.use_ipfs
        if not self.experiment_prefix and not is_inherited and (self.initial_peers or self.invite):
            raise UserError("--experiment_prefix is missing: name a new run, or give --initial_peers of one")
        if len(self.experiment_prefix) > 256:  # the limit of attestations (swarm/attestation.py)
            raise UserError(f"--experiment_prefix has {len(self.experiment_prefix)} characters: give 256 at most")
        if "." in self.experiment_prefix:
            # hivemind separates the group bits from the prefix by a dot (hivemind/averaging/key_manager.py)
            name = self.experiment_prefix
            raise UserError(f"--experiment_prefix {name} contains a dot, try {name.replace('.', '_')}")
        check_username(self.username)


@dataclass
class ModelArguments(FlagGroup):
    """The model to train. Read by trainers, and by other roles that build the model."""

    config_path: str | None = flag(
        None,
        f"Shape of a model to train from scratch: JSON file, folder or Hub name. Default: {DEFAULT_CONFIG_PATH}.",
        aliases=["--model_config_path", "--config_name"],
        shared=True,
    )
    model_name_or_path: str | None = flag(
        None, "Pretrained model to train on instead: folder or Hub name.", shared=True, excludes="config_path"
    )
    lora_r: int | None = flag(
        None, "Rank of adapters to train instead of weights.", shared=True, requires="model_name_or_path NAME", ge=1
    )
    objective: OBJECTIVES | None = flag(
        None,
        "mlm (masked tokens), mlm_sop (also the order of sentences), clm (the next token) or sft (the assistant's "
        "tokens in conversations). Default: by the model's type.",
        shared=True,
    )
    tokenizer_path: str | None = flag(
        None,
        f"Tokenizer's folder or Hub name. Default: the model's, the dataset archive's, or {DEFAULT_TOKENIZER_PATH}.",
        aliases=["--tokenizer", "--tokenizer_name"],
        shared=True,
    )
    seed: int = flag(
        42, "Seed of the initial weights; the data order depends on the peer id.", shared=True, ge=0, le=MAX_SEED
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.model_name_or_path:
            self.config_path = self.config_path or DEFAULT_CONFIG_PATH
        self.tokenizer_path = self.tokenizer_path or self.model_name_or_path or DEFAULT_TOKENIZER_PATH


@dataclass
class OptimizerArguments(FlagGroup):
    """The optimizer and its schedule. Read by trainers, and by other roles that build the model."""

    optim: Literal["lamb", "lamb_8bit", "adamw", "muon"] = flag(
        "lamb",
        "LAMB (arxiv.org/abs/1904.00962) for large batches, AdamW for small ones; lamb_8bit saves memory and bytes; "
        "Muon (arxiv.org/abs/2502.16982) for hidden matrices, with AdamW for all others.",
        shared=True,
    )
    min_8bit_size: int = flag(
        2**16, "lamb_8bit only: smaller tensors keep 32-bit moments. Lower it for small models.", shared=True, ge=1
    )
    learning_rate: float = flag(0.00176, "Peak learning rate.", shared=True, gt=0, le=1e3)
    warmup_steps: int = flag(
        5000, "Epochs of linear warm-up; 1/25 of total_steps for LAMB.", shared=True, ge=0, le="total_steps"
    )
    total_steps: int = flag(125_000, "Epoch at which the decay reaches min_learning_rate.", shared=True, ge=1)
    lr_scheduler_type: Literal["linear", "cosine", "wsd", "constant"] = flag(
        "linear", "Decay after the warm-up; wsd decays over the last fifth of the batches.", shared=True
    )
    min_learning_rate: float = flag(
        0.0, "Final learning rate, also beyond total_steps.", shared=True, ge=0, le="learning_rate"
    )
    adam_beta2: float = flag(0.999, "Decay of the second moment, per epoch.", shared=True, ge=0, lt=1)
    weight_decay: float = flag(0.01, "Decay of all weights but norms and biases, per epoch.", shared=True, ge=0, lt=1)
    max_grad_norm: float = flag(1.0, "Norm to which each averaged gradient is clipped.", shared=True, gt=0)
    clamp_value: float = flag(10_000.0, "LAMB's upper bound of the weight norm in the trust ratio.", shared=True, gt=0)


@dataclass
class AveragingArguments(FlagGroup):
    """Batches and averaging of the swarm. Read by trainers, and by other roles that build the model."""

    target_batch_size: int = flag(4096, "Samples of the whole swarm per epoch (optimizer step).", shared=True, ge=1)
    batch_size_lead: int = flag(
        0, "End each epoch N samples early; raise it if rounds start late.", ge=0, lt="target_batch_size"
    )
    matchmaking_time: float | None = flag(
        None, "Seconds to form a group. Default: 7.5 to 25 by RTT.", aliases=["--averaging_expiration"], gt=0, le=600
    )
    target_group_size: int = flag(
        256, "Maximum number of peers in an averaging group; a full group starts at once.", shared=True, ge=2
    )
    bandwidth: float | None = flag(  # within PLAUSIBLE_MBITS of swarm/allreduce.py
        None, "Mbit/s up, the limit of this peer's traffic. Default: measured continuously.", ge=0.01, le=1e6
    )
    min_vector_size: int = flag(
        0, "Minimum elements that one peer averages; raise it for fewer, larger messages.", shared=True, ge=0
    )
    compression: Literal["none", "float16", "8bit", "sparse"] = flag(
        "float16",
        "Compression of gradients; 8bit: half of float16; sparse, with --local_steps: the same as float16.",
        aliases=["--grad_compression"],
        shared=True,
    )
    load_state_compression: Literal["none", "float16", "8bit"] = flag(
        "8bit", "Compression of a state transfer; float16: of parameters only; 8bit: of moments too.", shared=True
    )
    average_state_every: int = flag(
        10, "Average parameters every N epochs, because failed rounds let them diverge.", shared=True, ge=1
    )
    local_steps: int = flag(
        1, "Batches of target_batch_size per epoch; above 1, each peer also steps by itself.", shared=True, ge=1
    )
    local_steps_from: int | None = flag(
        None, "First epoch of local steps; default: warmup_steps, but at least 200.", shared=True, ge=0
    )
    overlap: bool = flag(
        False,
        "Average gradients in the background, for long rounds; small models stop learning. No effect on local steps.",
        aliases=["--delay_grad_averaging", "--delay_optimizer_step"],
        shared=True,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.compression == "sparse" and self.local_steps == 1:
            raise UserError("--compression sparse is for local steps: add e.g. --local_steps 25, or use float16")


@dataclass
class DataArguments(FlagGroup):
    """The data and their preparation. Read by trainers and by experiment/show.py."""

    dataset_path: str = flag(
        DEFAULT_DATASET_PATH,
        "Folder from tokenize_wikitext103.py, or its archive (.tar, .tar.gz), or the URL of one.",
    )
    dataset_sha256: str | None = flag(
        None, "SHA-256 that the archive must have, as tokenize_wikitext103.py --archive prints it."
    )
    dataset_cache_dir: str = flag("data/cache", "Folder for downloads, which trainers may share.")
    dataset_name: str | None = flag(
        None, "Text to train on instead: a folder, or NAME or NAME:CONFIG on the Hub.", excludes="train_file"
    )
    train_file: str | None = flag(
        None, "Like --dataset_name, but a file: plain text, .jsonl, .csv or .tsv (field --text_column), also .gz, .xz."
    )
    validation_file: str | None = flag(
        None, "Text for --do_eval. Default: a split, or 5 percent.", requires=["train_file", "dataset_name"]
    )
    text_column: str = flag("text", "With --dataset_name, .jsonl, .csv and .tsv: the field that holds the text.")
    streaming: bool = flag(
        False, "Train on an endless stream from --sources (docs/data.md).", excludes=["dataset_name", "train_file"]
    )
    sources: str = flag("configs/sources.json", "With --streaming: file of sources (docs/data.md).")
    language: str = flag("english", "With --dataset_name or --train_file: language, for splitting sentences.")
    mlm_probability: float = flag(
        0.15, "Share of tokens to predict: 80 percent as [MASK], 10 percent random.", gt=0, lt=1
    )
    whole_word_mask: bool = flag(True, "Mask whole words, if the tokenizer and the text mark them.")
    max_sequence_length: int | None = flag(
        None,
        "Maximum tokens of a sequence. Default: the dataset's, or 512 for text that is tokenized here.",
        aliases=["--block_size", "--max_seq_length"],
        ge=MIN_SEQUENCE_LENGTH,
    )
    initial_sequence_length: int | None = flag(
        None, "Maximum tokens at epoch 0, to train faster.", ge=MIN_SEQUENCE_LENGTH, le="max_sequence_length"
    )
    sequence_length_warmup_steps: int = flag(
        0, "Epochs of growth to max_sequence_length.", requires="initial_sequence_length", ge=0
    )

    def __post_init__(self):
        if self.max_sequence_length is None and (self.streaming or self.dataset_name or self.train_file):
            self.max_sequence_length = 512
        super().__post_init__()
        if self.dataset_sha256 and not re.fullmatch(r"[0-9a-fA-F]{64}", self.dataset_sha256):
            raise UserError(f"--dataset_sha256 {self.dataset_sha256} is not a SHA-256, which has 64 hexadecimal digits")
        growth = self.max_sequence_length and self.sequence_length_warmup_steps
        if self.initial_sequence_length and not growth:
            needed = "--max_sequence_length and --sequence_length_warmup_steps"
            raise UserError(f"--initial_sequence_length needs {needed}: add them")


@dataclass
class PrecisionArguments(FlagGroup):
    """The precision of a model, in pretraining and fine-tuning."""

    fp16: bool = flag(False, "Mixed precision with float16 and loss scaling; needs a CUDA GPU.", excludes="bf16")
    bf16: bool = flag(False, "Mixed precision with bfloat16; needs a GPU or CPU that supports it.")


@dataclass
class TrainerArguments(PrecisionArguments):
    """The trainer. Read by run_trainer.py."""

    preflight: bool = flag(False, "Check the machine, data and connection, and print a table, without training.")
    per_device_train_batch_size: str = flag(
        "4", "Samples per forward pass of each device; auto: measure, and choose gradient_accumulation_steps too.", ge=1
    )
    gradient_accumulation_steps: int = flag(
        2, "Batches (not epochs) per step of this peer, which should take 0.5 to 10 s, as reports follow steps.", ge=1
    )
    device: str = flag("auto", "cpu, cuda (all visible GPUs), cuda:N or mps (untested); auto: cuda if there is a GPU.")
    num_devices: int | None = flag(
        None, "Number of devices in this peer, one process each. Default: all GPUs of the machine, or one CPU.", ge=1
    )
    sharded: bool = flag(
        False, "Divide the model among the devices; the host holds it whole. Not with --fp16.", excludes="fp16"
    )
    torch_compile: bool = flag(
        False, "Compile the model: faster steps, half a minute to start. Needs a C++ compiler, on GPUs also triton."
    )
    gradient_checkpointing: bool = flag(
        False, "Recompute activations in the backward pass to save memory.", aliases=["--gradient_checkpoints"]
    )
    dataloader_num_workers: int = flag(4, "Processes that prepare batches; 0: the training process does.", ge=0)
    max_steps: int | None = flag(None, "Epoch at which to stop. Default: total_steps.", ge=0, le=10**9)
    num_train_epochs: float | None = flag(
        None, "Passes (not epochs) over this trainer's data after which it leaves, restarts included.", gt=0, le=1e9
    )
    logging_steps: int = flag(1, "Log every N epochs; the progress bar of a terminal shows every epoch.", ge=1)
    logging_first_step: bool = flag(False, "Log this trainer's first epoch too, if --logging_steps is larger.")
    logging_dir: str | None = flag(None, LOGGING_DIR_HELP)
    output_dir: str = flag("outputs/trainer", "Folder of this trainer alone, from which the same command resumes.")
    overwrite_output_dir: bool = flag(False, "Ignored, for old commands: a run in output_dir is always resumed.")
    resume_from_checkpoint: str | None = flag(
        None, "Checkpoint to resume from, or none to start over. Default: the newest in output_dir."
    )
    save_steps: int | None = flag(
        None, "Save a checkpoint every N epochs, and at a normal end. Default: 500, or as many local steps.", ge=1
    )
    save_total_limit: int = flag(2, TOTAL_LIMIT_HELP, ge=1)
    do_eval: bool = flag(False, "Measure loss and accuracy on the validation split, before and after training.")
    eval_steps: int | None = flag(
        None, "Measure every N epochs too, and report that; one trainer of a swarm is enough.", requires="do_eval", ge=1
    )
    max_eval_samples: int | None = flag(None, "Maximum number of validation samples. Default: the whole split.", ge=1)
    statistics_expiration: float = flag(
        600, "Seconds that this peer's published metrics stay on the DHT.", gt=0, le=MAX_RECORD_LIFETIME
    )

    def __post_init__(self):
        if not re.fullmatch(r"auto|cpu|cuda(:(0|[1-9]\d?))?|mps", self.device):
            raise UserError(f"--device {self.device}: not supported, choose auto, cpu, cuda, cuda:N or mps")
        if self.per_device_train_batch_size != "auto":
            try:
                self.per_device_train_batch_size = int(self.per_device_train_batch_size)
            except ValueError:
                raise UserError("--per_device_train_batch_size must be a number or auto") from None
        elif self.sharded:
            raise UserError("--per_device_train_batch_size auto does not work with --sharded: pass a number")
        super().__post_init__()


@dataclass
class ReportArguments(FlagGroup):
    """Reports on the whole swarm. Read by monitoring/report.py, for monitor and auxiliary peers."""

    refresh_period: float = flag(30, "Seconds between two checks of the swarm's metrics.", gt=0)
    wandb_project: str | None = flag(
        None, "Weights & Biases project to report to; WANDB_MODE and WANDB_DISABLED are respected."
    )
    logging_dir: str | None = flag(None, LOGGING_DIR_HELP)
    output_dir: str = flag("outputs/monitor", REPORT_DIR_HELP)

    def __post_init__(self):
        super().__post_init__()
        if self.wandb_project and importlib.util.find_spec("wandb") is None:
            raise UserError("--wandb_project needs wandb: pip install wandb, or omit the flag")


@dataclass
class AuxPeerArguments(ReportArguments):
    """The auxiliary peer. Read by run_aux_peer.py."""

    output_dir: str = flag("outputs/aux_peer", REPORT_DIR_HELP)
    assist_in_averaging: bool = flag(
        False, "Average for other peers, mainly clients. Needs the trainers' model and averaging flags."
    )
    assist_refresh: float = flag(
        1.0, "With --assist_in_averaging: seconds between two checks of the epoch's progress.", gt=0, le=1e9
    )


@dataclass
class ArchiveArguments(FlagGroup):
    """Checkpoints and uploads of the swarm's state. Read by monitoring/archive.py, for monitor and auxiliary peers."""

    store_checkpoints: bool = flag(False, "Save the swarm's state. Needs trainers' model, optimizer, averaging flags.")
    save_steps: int = flag(
        5,
        "Save the swarm's state every N epochs; each time, a trainer sends it.",
        aliases=["--save_checkpoint_step_interval", "--save_checkpoint_epoch_interval"],
        ge=1,
    )
    save_total_limit: int = flag(2, TOTAL_LIMIT_HELP, ge=1)
    local_path: str | None = flag(
        None, "Folder of checkpoints. Default: output_dir.", aliases=["--repo_path"], requires="store_checkpoints"
    )
    repo_url: str | None = flag(
        None, "Hub repository (public if new) of the newest checkpoint: ORG/NAME or URL.", requires="store_checkpoints"
    )
    upload_interval: float = flag(
        43_200.0, "Seconds between uploads, which count towards the quota.", requires="repo_url ORG/NAME", gt=0
    )

    def __post_init__(self):
        super().__post_init__()
        if self.repo_url is not None:
            self.repo_url = make_repo_id(self.repo_url)


#: dataclasses of each script, in the order in which its functions take them
SHARED_ARGS = (ModelArguments, OptimizerArguments, AveragingArguments)
TRAINER_ARGS = (SwarmArguments, *SHARED_ARGS, DataArguments, TrainerArguments)
MONITOR_ARGS = (SwarmArguments, ReportArguments, ArchiveArguments, *SHARED_ARGS)
AUX_PEER_ARGS = (SwarmArguments, AuxPeerArguments, ArchiveArguments, *SHARED_ARGS)


#: flags that --help lists if a script has many: those needed to join or start a run, including all of README.md's
BASIC_FLAGS = {
    *("experiment_prefix", "initial_peers", "host_maddrs", "identity_path", "status_port", "username", "client_mode"),
    *("authorize", "invite", "authority_key", "config_path", "model_name_or_path", "tokenizer_path", "objective"),
    *("optim", "learning_rate", "warmup_steps", "total_steps", "target_batch_size", "target_group_size", "bandwidth"),
    *("matchmaking_time", "average_state_every", "local_steps", "compression", "dataset_path", "train_file"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "dataloader_num_workers", "fp16", "do_eval"),
    *("eval_steps", "max_eval_samples", "save_steps", "output_dir", "preflight", "wandb_project", "refresh_period"),
    *("store_checkpoints", "assist_in_averaging"),
}


def begin_new_run(groups: dict[type, FlagGroup]) -> None:
    """Name a run that has neither a name nor peers.

    The name is a digest of this machine's name and --output_dir, so that the same command continues the same run. A
    pretrained model with its own tokenizer and no data trains on the sample text.

    :param groups: the instances of the script's dataclasses, by class
    """
    output_dir = next(group.output_dir for group in groups.values() if hasattr(group, "output_dir"))
    place = f"{platform.node()} {os.path.abspath(output_dir)}"
    groups[SwarmArguments].experiment_prefix = f"run-{hashlib.sha256(place.encode()).hexdigest()[:8]}"
    model = groups[ModelArguments]
    data = groups.get(DataArguments)
    if data and model.tokenizer_path == model.model_name_or_path:
        is_given = data.train_file or data.dataset_name or data.streaming or data.dataset_path != DEFAULT_DATASET_PATH
        # another tokenizer may have made the default dataset
        groups[DataArguments] = data if is_given else replace(data, train_file=SAMPLE_TEXT)


def parse_arguments(*groups: type, description: str | None = None, before: Sequence[str] = ()) -> tuple:
    """Parse the command line into one instance of each dataclass, in order (see `parse_flags`)."""
    found = {type(parsed): parsed for parsed in parse_flags(groups, BASIC_FLAGS, description, before)}
    swarm, trainer = map(found.get, (SwarmArguments, TrainerArguments))
    if trainer and trainer.num_train_epochs and found[DataArguments].streaming:
        raise UserError("--num_train_epochs: --streaming has no passes over the data: pass --max_steps instead")
    if swarm and not swarm.experiment_prefix and not swarm.initial_peers:
        begin_new_run(found)
    averaging = next((group for group in found.values() if isinstance(group, AveragingArguments)), None)
    if averaging and averaging.local_steps > 1 and averaging.local_steps_from is None:
        averaging.local_steps_from = max(200, found[OptimizerArguments].warmup_steps)  # see docs/measured.md
    if averaging and averaging.local_steps > 1 and averaging.local_steps_from >= found[OptimizerArguments].total_steps:
        raise UserError(
            f"--local_steps {averaging.local_steps}: they begin at epoch {averaging.local_steps_from}, when the run is "
            "over: pass a smaller --local_steps_from or --warmup_steps, or a larger --total_steps"
        )
    return tuple(found.values())
