"""Every flag of every role, as dataclasses for HfArgumentParser, grouped by who reads them.

Names and defaults are those of hivemind's ALBERT example, or of RuLeanALBERT for what only it has; the defaults are the
real experiment, small runs come from flags. `shared=True` means that every trainer of a run must use the same value.
These values make up the run's contract, which is published on the DHT and compared when a peer joins. "Should match on
all trainers" in a help text marks values that are not compared.
An *epoch* is one optimizer step of the whole swarm (target_batch_size samples), not a pass over the data. Flags that
end in `_steps` count epochs; only --gradient_accumulation_steps and --grad_acc_steps count batches.
"""

import hashlib
import ipaddress
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from common.console import UserError
from common.flags import check_exclusive, check_needs, check_order, check_range, check_username, flag, parse_flags
from common.hub import make_repo_id

OBJECTIVES = Literal["mlm", "mlm_sop", "clm"]

DEFAULT_CONFIG_PATH = "configs/albert-large.json"
DEFAULT_TOKENIZER_PATH = "data/tokenizer"
DEFAULT_DATASET_PATH = "data/albert_tokenized_wikitext"
SAMPLE_TEXT = "sample_data/austen.txt.xz"
SHORTEST_INSTANCE = 8  # tokens; a pair of sentences has three special ones
LARGEST_SEED = 2**32 - 1  # of numpy's generators

LOGGING_DIR_HELP = "Folder for log files and, unless TRACKIO_DIR or WANDB_DIR name one, the dashboard's data."
REPORT_DIR_HELP = "Folder for metrics.jsonl, learning_curve.png, summary.json and the checkpoints."
SENTENCE_SPLITTER_HELP = "Sentence splitter: punkt, or razdel, the default for Russian."


@dataclass
class SwarmArguments:
    """The connection to the swarm. Read by every role."""

    experiment_prefix: str = flag(
        "",
        "Unique name of the run, without a dot. Default: that of --initial_peers, or for a new run a generated one.",
        aliases=["--run_id"],
        shared=True,
    )
    initial_peers: list[str] = flag(
        [],
        "Peers through which to join the run: multiaddrs as the monitor prints them, e.g. "
        "/ip4/203.0.113.1/tcp/31337/p2p/XXXX, or host:port of a peer or its status page. Default: none, a new swarm.",
    )
    adopt: bool = flag(True, "Load shared flags that are not given from the initial peers.")
    new_run: bool = flag(False, "Start a new run, even if the initial peers serve another one.")
    use_ipfs: bool = flag(False, "Find initial peers by their ids alone (/p2p/XXXX), through the public IPFS network.")
    host_maddrs: list[str] = flag(
        ["/ip4/0.0.0.0/tcp/0"],
        "Multiaddrs to listen on, best with a port that your router forwards (0: any); /ip6/::/tcp/0 among them for "
        "IPv6. host:port is accepted too, with '[::]:*' for all addresses and any port.",
        aliases=["--dht_listen_on"],
    )
    announce_maddrs: list[str] = flag(
        [], "Multiaddrs to announce instead: your public IP and forwarded port. An empty list means none."
    )
    use_google_dns: bool = flag(
        False,
        "Announce the public address that --public_ip_url (not Google) reports, with the ports of --host_maddrs: for a "
        "machine without a public address of its own, as in a cloud.",
    )
    public_ip_url: str = flag(
        "https://api.ipify.org", "With --use_google_dns: URL of a page that contains only the visitor's IP address."
    )
    authorize: bool = flag(False, "Require a closed run. Needs --invite; on its monitor, --authority_key.")
    invite: str | None = flag(
        None,
        "Invitation file from invite.py for a closed run: the peer's identity and its (renewed) credential.",
    )
    authority_key: str | None = flag(
        None, "On a closed run's monitor: key file that signs credentials, created if missing."
    )
    username: str | None = flag(None, "Name on dashboards; in a closed run, the name in --invite. Default: a number.")
    client_mode: bool = flag(False, "Accept no connection (one trainer must); automatic if others cannot reach it.")
    use_relay: bool = flag(True, "Connect to peers behind routers through a third peer, in both directions.")
    use_auto_relay: bool = flag(
        False,
        "If others cannot reach this peer, relay all its traffic through --initial_peers.",
    )
    identity_path: str | None = flag(
        None, "File with this peer's private key, created if missing: keeps its id and address across restarts."
    )
    status_port: int | None = flag(
        None, "TCP port of the status page, and of its JSON for programs (0: any); others may join by its address."
    )

    def __post_init__(self):
        self.host_maddrs = [maddr for text in self.host_maddrs for maddr in make_host_maddrs(text)]
        # "$VARIABLE" of a shell that does not set it
        self.announce_maddrs = [maddr for maddr in self.announce_maddrs if maddr]
        if self.status_port is not None and not 0 <= self.status_port < 2**16:
            raise UserError(f"--status_port {self.status_port} is not a TCP port: choose one from 1024 to 65535, or 0")
        check_exclusive(self, "use_google_dns", "announce_maddrs")
        if self.use_auto_relay and not self.use_relay:
            raise UserError("--use_auto_relay and --no_use_relay are mutually exclusive: give one of them")
        is_adopted = self.initial_peers and self.adopt and not self.new_run and not self.use_ipfs
        if not self.experiment_prefix and not is_adopted and (self.initial_peers or self.invite):
            raise UserError("--experiment_prefix is missing: name a new run, or give --initial_peers of one")
        if "." in self.experiment_prefix:
            # hivemind separates the group bits from the prefix by a dot (hivemind/averaging/key_manager.py)
            name = self.experiment_prefix
            raise UserError(f"--experiment_prefix {name} contains a dot, try {name.replace('.', '_')}")
        check_needs(self, "use_ipfs", "initial_peers", " /p2p/XXXX")
        check_exclusive(self, "invite", "authority_key")
        check_exclusive(self, "invite", "identity_path")
        check_needs(self, "authority_key", "experiment_prefix", " NAME")
        if self.authorize and not self.invite and not self.authority_key:
            raise UserError("--authorize needs --invite FILE, or on the monitor --authority_key FILE: add it")
        check_username("username", self.username)


@dataclass
class ModelArguments:
    """The model to train. Read by trainers, and by a monitor that stores checkpoints."""

    config_path: str | None = flag(
        None,
        "Shape of a model to train from scratch: a JSON file (see configs/), or a folder or name on the Hugging "
        f"Face Hub; the vocabulary is the tokenizer's. Default: {DEFAULT_CONFIG_PATH}.",
        aliases=["--model_config_path", "--config_name"],
        shared=True,
    )
    model_name_or_path: str | None = flag(
        None,
        "Pretrained model to train on instead: folder or Hub name; missing heads start at random.",
        shared=True,
    )
    objective: OBJECTIVES | None = flag(
        None,
        "Pretraining objective: mlm (masked tokens), mlm_sop (also the order of sentences) or clm (the next token). "
        "Default: mlm_sop for ALBERT and LeanALBERT, mlm for BERT, RoBERTa and similar models, clm for GPT-2, Llama "
        "and similar models.",
        shared=True,
    )
    attn_implementation: str | None = flag(
        None,
        "Attention of transformers: eager, sdpa, flash_attention_2, ... Default: the model's fastest.",
    )
    tokenizer_path: str | None = flag(
        None,
        "Folder of the tokenizer that made the dataset, or its name on the Hugging Face Hub. Default: that of "
        f"--model_name_or_path, if one is given, else {DEFAULT_TOKENIZER_PATH}; a trainer whose --dataset_path is an "
        "archive uses the tokenizer in it.",
        aliases=["--tokenizer", "--tokenizer_name"],
        shared=True,
    )
    seed: int = flag(42, "Seed of the initial weights; the data order depends on the peer id instead.", shared=True)

    def __post_init__(self):
        check_exclusive(self, "model_name_or_path", "config_path")
        if not self.model_name_or_path:
            self.config_path = self.config_path or DEFAULT_CONFIG_PATH
        self.tokenizer_path = self.tokenizer_path or self.model_name_or_path or DEFAULT_TOKENIZER_PATH
        check_range(self, "seed", at_least=0, at_most=LARGEST_SEED)


@dataclass
class OptimizerArguments:
    """The optimizer and its schedule. Read by trainers, and by a monitor that stores checkpoints."""

    optim: Literal["lamb", "lamb_8bit", "adamw"] = flag(
        "lamb",
        "LAMB (arxiv.org/abs/1904.00962) suits large batches, AdamW small ones. lamb_8bit keeps its moments in 2 "
        "bytes per parameter instead of 8, to save memory and bandwidth; its step takes twice as long.",
        shared=True,
    )
    min_8bit_size: int = flag(
        2**16,
        "lamb_8bit only: tensors with fewer elements keep 32-bit moments. Lower it for small models.",
        shared=True,
    )
    learning_rate: float = flag(0.00176, "Peak learning rate.", shared=True)
    warmup_steps: int = flag(5000, "Epochs of linear warm-up to the peak; 1/25 of total_steps for LAMB.", shared=True)
    total_steps: int = flag(125_000, "Epoch at which the linear decay reaches min_learning_rate.", shared=True)
    min_learning_rate: float = flag(
        0.0,
        "Learning rate at which the decay ends and stays: raise it for runs that go beyond total_steps.",
        shared=True,
    )
    adam_beta1: float = flag(0.9, "Decay of the first moment, per epoch.", shared=True)
    adam_beta2: float = flag(0.999, "Decay of the second moment, per epoch.", shared=True)
    adam_epsilon: float = flag(1e-6, "Added to the root of the second moment.", shared=True)
    weight_decay: float = flag(0.01, "Decay of all weights except norms and biases, per epoch.", shared=True)
    max_grad_norm: float = flag(1.0, "The averaged gradient is clipped to this norm before each step.", shared=True)
    clamp_value: float = flag(
        10000.0, "Both LAMBs only: upper bound of the weight norm in the trust ratio.", shared=True
    )

    def __post_init__(self):
        check_range(self, "total_steps", "min_8bit_size", at_least=1)
        check_range(self, "warmup_steps", "min_learning_rate", at_least=0)
        check_range(self, "learning_rate", above=0, at_most=1e3)
        check_order(self, "warmup_steps", "total_steps")
        check_order(self, "min_learning_rate", "learning_rate")
        check_range(self, "max_grad_norm", "adam_epsilon", "clamp_value", above=0)
        check_range(self, "adam_beta1", "adam_beta2", "weight_decay", at_least=0, below=1)


@dataclass
class AveragingArguments:
    """Batches and averaging of the swarm. Read by trainers, and by a monitor that stores checkpoints."""

    target_batch_size: int = flag(4096, "Samples of the whole swarm per epoch (optimizer step).", shared=True)
    batch_size_lead: int = flag(
        0, "Start matchmaking N samples before target_batch_size is reached; raise it if rounds start late."
    )
    matchmaking_time: float | None = flag(
        None,
        "Seconds of matchmaking; an epoch should take several times as long. Default: derived from the measured "
        "response times, 5 to 8 s on a good connection; at least 8 %% of an epoch, at most 15 s.",
        aliases=["--averaging_expiration"],
    )
    request_timeout: float | None = flag(
        None,
        "Seconds that a peer has to answer a matchmaking request. Default: derived from the measured response times, "
        "3 s on a good connection.",
    )
    averaging_timeout: float | None = flag(
        None,
        "Seconds after which an averaging round fails; its gradients are kept. Default: three times the transfer time "
        "of the model in the group or the time of the last rounds, at least 30 s, plus matchmaking_time.",
    )
    next_chunk_timeout: float | None = flag(
        None, "Seconds without data until a peer is excluded from a round. Default: half a round's time, at least 10."
    )
    target_group_size: int = flag(
        256, "Maximum number of peers in an averaging group; a full group starts at once.", shared=True
    )
    bandwidth: float | None = flag(
        None,
        "Upload bandwidth in Mbit/s, which limits this peer's traffic and its share of the averaging. Pass less than "
        "your uplink has to keep some for yourself. Default: measured, then adjusted continuously.",
    )
    min_vector_size: int = flag(
        0,
        "Minimum number of elements that one peer averages; raise it if large groups send many small messages.",
        shared=True,
    )
    compression: Literal["none", "float16", "8bit", "sparse"] = flag(
        "float16",
        "Compression of gradients; 8bit: half of float16; sparse, with --local_steps: top-k entries in 2 bits.",
        aliases=["--grad_compression"],
        shared=True,
    )
    state_compression: Literal["none", "float16"] = flag("none", "Compression of averaged parameters.", shared=True)
    load_state_compression: Literal["none", "float16", "8bit"] = flag(
        "8bit",
        "Compression of a state transfer. float16: parameters only; 8bit: moments too, which changed no loss by more "
        "than 0.01 percent; none: 3 times the bytes.",
        shared=True,
    )
    robust_averaging: Literal["clip", "none"] = flag(
        "clip",
        "Treatment of outliers. clip: limit gradients to twice the median norm, drop those that point away from all "
        "others, and average parameters by their median.",
    )
    average_state_every: int = flag(
        10, "Average parameters every N epochs, in the background, because failed rounds let them diverge.", shared=True
    )
    local_steps: int = flag(1, "Batches per epoch, each a local step; 1: average every gradient.", shared=True)
    local_steps_from: int | None = flag(None, "First epoch of local steps; default: warmup_steps or 200.", shared=True)
    outer_lr: float = flag(0.7, "With --local_steps: learning rate of the outer step.", shared=True)
    outer_momentum: float = flag(0.6, "With --local_steps: Nesterov momentum of the outer step.", shared=True)
    density: float = flag(0.03, "With --compression sparse: share of entries that are sent.", shared=True)
    overlap: bool = flag(
        False,
        "Average in the background, for long rounds; small models stop learning without --local_steps.",
        aliases=["--delay_grad_averaging", "--delay_optimizer_step"],
        shared=True,
    )
    min_refresh_period: float = flag(0.5, "Minimum seconds between two checks of the swarm's progress.")
    max_refresh_period: float = flag(5, "Maximum seconds between two checks of the swarm's progress.")
    default_refresh_period: float = flag(3, "Seconds between two checks before any progress is reported.")
    expected_drift_peers: float = flag(3, "Peers expected to join within one epoch.")
    expected_drift_rate: float = flag(0.2, "Share of the swarm expected to join or leave within one epoch.")
    performance_ema_alpha: float = flag(0.1, "Weight of the newest step in the moving average of samples per second.")
    metadata_expiration: float = flag(120, "Seconds that this peer's progress and contract stay on the DHT.")

    def __post_init__(self):
        check_range(self, "target_batch_size", "average_state_every", "local_steps", at_least=1)
        check_range(self, "target_group_size", at_least=2)
        check_range(self, "local_steps_from", "batch_size_lead", "min_vector_size", at_least=0)
        check_range(self, "outer_momentum", "expected_drift_peers", "expected_drift_rate", at_least=0)
        check_range(self, "matchmaking_time", "request_timeout", "averaging_timeout", "next_chunk_timeout", above=0)
        check_range(self, "outer_lr", "min_refresh_period", "max_refresh_period", "default_refresh_period", above=0)
        check_range(self, "performance_ema_alpha", "density", above=0, at_most=1)
        if self.compression == "sparse" and self.local_steps == 1:
            raise UserError("--compression sparse is for local steps: add e.g. --local_steps 25, or use float16")
        check_order(self, "batch_size_lead", "target_batch_size", is_strict=True)
        # hivemind warns of deadlocks otherwise (hivemind/averaging/matchmaking.py)
        check_order(self, "request_timeout", "matchmaking_time", is_strict=True)
        # otherwise no round would have time to form
        check_order(self, "matchmaking_time", "averaging_timeout", is_strict=True)
        check_order(self, "min_refresh_period", "max_refresh_period")
        check_range(self, "bandwidth", at_least=0.01, at_most=1e6)  # PLAUSIBLE_MBITS in swarm/plan.py
        # others refuse records that live longer: utils.py
        check_range(self, "metadata_expiration", above=0, at_most=3600)


@dataclass
class DataArguments:
    """The data and their preparation. Read by trainers and by experiment/show.py."""

    dataset_path: str = flag(
        DEFAULT_DATASET_PATH,
        "Tokenized dataset: a folder that tokenize_wikitext103.py wrote, its archive (.tar, .tar.gz), an index of "
        "shards (.json), or the http(s) URL of such a file.",
    )
    dataset_sha256: str | None = flag(
        None, "SHA-256 that the archive or index must have, as tokenize_wikitext103.py --archive prints it."
    )
    dataset_cache_dir: str = flag(
        "data/cache",
        "Folder for downloaded and unpacked data, which several trainers may share; if the disk is full, the least "
        "recently read shards are deleted.",
    )
    dataset_name: str | None = flag(
        None, "Text to train on instead, tokenized at the first start: a dataset on the Hub, or its folder."
    )
    dataset_config_name: str | None = flag(None, "With --dataset_name: its configuration, if it has several.")
    train_file: str | None = flag(
        None,
        "Like --dataset_name, but a file: plain text, .jsonl, .csv or .tsv (field --text_column), also .gz, .xz.",
    )
    validation_file: str | None = flag(
        None, "With --train_file or --dataset_name: text for --do_eval. Default: its validation split, or 5 percent."
    )
    text_column: str = flag("text", "With --dataset_name, .jsonl, .csv and .tsv: the field that holds the text.")
    streaming: bool = flag(
        False,
        "Train on an endless stream of text that is read, tokenized and shuffled on the fly. Needs --sources and the "
        "swarm's tokenizer in --tokenizer_path; --dataset_path is then used by --do_eval only.",
    )
    sources: str = flag(
        "configs/sources.json",
        "With --streaming: file of sources (docs/data.md). Should match on all trainers.",
    )
    language: str = flag("english", "With --dataset_name or --train_file: language, for splitting sentences.")
    sentence_splitter: Literal["auto", "punkt", "razdel"] = flag(
        "auto", f"With --dataset_name, --train_file or --streaming: {SENTENCE_SPLITTER_HELP} A source may name its own."
    )
    shuffle_buffer: int = flag(8192, "With --streaming: sequences shuffled together, twice; 3 kB each at 512 tokens.")
    mlm_probability: float = flag(
        0.15, "Share of tokens to predict: 80 percent as [MASK], 10 percent random. Should match on all trainers."
    )
    whole_word_mask: bool = flag(
        True, "Mask whole words, if the tokenizer and the text mark them. Should match on all trainers."
    )
    max_sequence_length: int | None = flag(
        None,
        "Maximum tokens of a sequence; longer ones are truncated. Default: as in the dataset; 512 with --streaming, "
        "--train_file or --dataset_name. Should match on all trainers.",
        aliases=["--block_size", "--max_seq_length"],
    )
    initial_sequence_length: int | None = flag(
        None, "Maximum tokens at epoch 0; short sequences train faster. Should match on all trainers."
    )
    sequence_length_warmup_steps: int = flag(
        0, "Epochs of growth from --initial_sequence_length, by pad_to_multiple_of. Should match on all trainers."
    )
    pad_to_multiple_of: int | None = flag(
        None, "Pad batches to multiples of N. Default: 8, or 1 below 128 tokens. Should match on all trainers."
    )

    def __post_init__(self):
        if self.dataset_sha256 and not re.fullmatch(r"[0-9a-fA-F]{64}", self.dataset_sha256):
            raise UserError(f"--dataset_sha256 {self.dataset_sha256} is not a SHA-256, which has 64 hexadecimal digits")
        check_exclusive(self, "dataset_name", "train_file")
        text = self.dataset_name or self.train_file
        if self.streaming and text:
            raise UserError("--streaming reads --sources: omit --dataset_name and --train_file")
        if self.validation_file and not text:
            raise UserError("--validation_file needs --train_file or --dataset_name: add one of them")
        check_needs(self, "dataset_config_name", "dataset_name")
        check_range(self, "mlm_probability", above=0, below=1)
        check_range(self, "pad_to_multiple_of", "shuffle_buffer", at_least=1)
        if self.max_sequence_length is None and (self.streaming or text):
            self.max_sequence_length = 512
        check_range(self, "max_sequence_length", "initial_sequence_length", at_least=SHORTEST_INSTANCE)
        check_range(self, "sequence_length_warmup_steps", at_least=0)
        check_needs(self, "sequence_length_warmup_steps", "initial_sequence_length")
        if self.initial_sequence_length:
            if not self.max_sequence_length or not self.sequence_length_warmup_steps:
                raise UserError(
                    "--initial_sequence_length needs --max_sequence_length and --sequence_length_warmup_steps: add them"
                )
            check_order(self, "initial_sequence_length", "max_sequence_length")


@dataclass
class PrecisionArguments:
    """The precision of a model, in pretraining and fine-tuning."""

    fp16: bool = flag(False, "Mixed precision with float16 and loss scaling; needs a CUDA GPU.")
    bf16: bool = flag(False, "Mixed precision with bfloat16; needs a GPU or CPU that supports it.")

    def __post_init__(self):
        check_exclusive(self, "fp16", "bf16")


@dataclass
class TrainerArguments(PrecisionArguments):
    """The trainer. Read by run_trainer.py."""

    preflight: bool = flag(False, "Check the machine, data and connection, and print a table, without training.")
    per_device_train_batch_size: str = flag(
        "4",
        "Samples per forward pass of each device, as many as fit into memory; auto: measure the first device at the "
        "start, and choose gradient_accumulation_steps too.",
    )
    gradient_accumulation_steps: int = flag(
        2, "Batches (not epochs) per step of this peer, which should take 0.5 to 10 s, as reports follow steps."
    )
    device: str = flag(
        "auto",
        "Device to compute on: cpu, cuda (all visible GPUs), cuda:N (one of them) or mps (an Apple GPU, "
        "untested); auto: cuda if there is a GPU, otherwise cpu.",
    )
    num_devices: int | None = flag(
        None, "Number of devices in this peer, one process each. Default: all GPUs of the machine, or one CPU."
    )
    tf32: bool = flag(False, "Multiply float32 with a 10-bit mantissa, several times as fast (NVIDIA, since 2020).")
    torch_compile: bool = flag(
        False,
        "Compile the model: faster steps, a start slower by minutes. Needs a C++ compiler, on GPUs also triton.",
    )
    gradient_checkpointing: bool = flag(
        False,
        "Recompute activations in the backward pass to save memory; steps take somewhat longer. Only for models that "
        "support it.",
        aliases=["--gradient_checkpoints"],
    )
    dataloader_num_workers: int = flag(4, "Processes that prepare batches; 0: the training process prepares them.")
    max_steps: int | None = flag(None, "Epoch at which to stop. Default: total_steps.")
    num_train_epochs: float | None = flag(
        None, "Leave the swarm after N passes over this trainer's own data (not epochs), restarts included."
    )
    logging_steps: int = flag(1, "Log every N epochs; the progress bar of a terminal shows every epoch.")
    logging_first_step: bool = flag(False, "Log this trainer's first epoch too, if --logging_steps is larger.")
    logging_dir: str | None = flag(None, LOGGING_DIR_HELP)
    wandb_project: str | None = flag(
        None, "Weights & Biases project for this trainer's own curves. Default: WANDB_PROJECT, or none."
    )
    output_dir: str = flag(
        "outputs/trainer",
        "Folder for checkpoints, the trained model (from_pretrained format), history.jsonl and summary.json; each "
        "trainer needs its own. Running the same command again resumes from it.",
    )
    overwrite_output_dir: bool = flag(False, "Ignored, for old commands: a run in output_dir is always resumed.")
    resume_from_checkpoint: str | None = flag(
        None,
        "Checkpoint folder or state file to resume from, or none to start over. Default: the newest complete one in "
        "output_dir or at state_path. A swarm that is ahead always sends its state.",
    )
    save_steps: int = flag(500, "Save a checkpoint every N epochs (and at a normal end).")
    save_total_limit: int = flag(2, "Keep N checkpoints, each three times as large as the weights (lamb_8bit: half).")
    do_eval: bool = flag(False, "Measure loss and accuracy on the validation split, before and after training.")
    eval_steps: int | None = flag(
        None,
        "With --do_eval: also measure every N epochs and report to the monitor; one trainer of a swarm is enough. The "
        "swarm does not wait: choose --max_eval_samples so that a measurement rarely exceeds an epoch.",
    )
    per_device_eval_batch_size: int = flag(32, "Samples per forward pass in evaluation.")
    max_eval_samples: int | None = flag(None, "Maximum number of validation samples. Default: the whole split.")
    statistics_expiration: float = flag(600, "Seconds that this peer's published metrics stay on the DHT.")
    backup_every_epochs: int = flag(10, "Write --state_path every N epochs.", aliases=["--backup_every_steps"])
    state_path: str | None = flag(None, "File for the state between checkpoints, resumed from if it is newest.")

    def __post_init__(self):
        super().__post_init__()
        check_needs(self, "eval_steps", "do_eval")
        check_range(self, "num_train_epochs", above=0, at_most=1e9)
        check_range(self, "statistics_expiration", above=0, at_most=3600)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", self.device):
            raise UserError(f"--device {self.device}: not supported, choose auto, cpu, cuda, cuda:N or mps")
        if self.per_device_train_batch_size != "auto":
            try:
                self.per_device_train_batch_size = int(self.per_device_train_batch_size)
            except ValueError:
                raise UserError("--per_device_train_batch_size must be a number or auto") from None
            check_range(self, "per_device_train_batch_size", at_least=1)
        check_range(self, "max_steps", "dataloader_num_workers", at_least=0)
        check_range(self, "num_devices", "gradient_accumulation_steps", "per_device_eval_batch_size", at_least=1)
        check_range(self, "max_eval_samples", "eval_steps", "logging_steps", "backup_every_epochs", at_least=1)
        check_range(self, "save_steps", "save_total_limit", at_least=1)


@dataclass
class ReportArguments:
    """Reports on the whole swarm. Read by monitoring/report.py."""

    refresh_period: float = flag(30, "Seconds between two checks of the swarm's metrics.")
    report_to: Literal["trackio", "wandb", "none"] = flag(
        "trackio", "Dashboard: trackio is local and needs no account; wandb needs --wandb_project."
    )
    wandb_project: str | None = flag(
        None, "Weights & Biases project to report to; WANDB_MODE and WANDB_DISABLED are respected."
    )
    logging_dir: str | None = flag(None, LOGGING_DIR_HELP)
    output_dir: str = flag("outputs/monitor", REPORT_DIR_HELP)

    def __post_init__(self):
        check_range(self, "refresh_period", above=0)
        if self.report_to == "wandb" and not self.wandb_project:
            raise UserError("--report_to wandb needs --wandb_project NAME")
        if self.wandb_project:
            self.report_to = "wandb"


@dataclass
class MonitorArguments(ReportArguments):
    """The monitor. Read by run_training_monitor.py."""

    plot: str | None = flag(
        None, "Draw the loss from a monitor's --output_dir to this PNG file, instead of monitoring."
    )

    def __post_init__(self):
        super().__post_init__()
        if self.plot == "":
            raise UserError("--plot needs the name of a file, e.g. --plot loss.png")


@dataclass
class AuxPeerArguments(ReportArguments):
    """The auxiliary peer. Read by run_aux_peer.py."""

    output_dir: str = flag("outputs/aux_peer", REPORT_DIR_HELP)
    assist_in_averaging: bool = flag(
        False, "Average for other peers, mainly clients. Needs the trainers' model and averaging flags."
    )
    assist_refresh: float = flag(1.0, "With --assist_in_averaging: seconds between two checks of the epoch's progress.")

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "assist_refresh", above=0, at_most=1e9)


@dataclass
class ArchiveArguments:
    """Checkpoints and uploads of the swarm's state. Read by monitoring/archive.py, for monitor and auxiliary peers."""

    store_checkpoints: bool = flag(False, "Save the swarm's state. Needs trainers' model, optimizer, averaging flags.")
    save_checkpoint_step_interval: int = flag(
        5,
        "With --store_checkpoints: save every N epochs; each time, a trainer uploads the whole state.",
        aliases=["--save_checkpoint_epoch_interval"],
    )
    save_total_limit: int = flag(
        2, "With --store_checkpoints: keep N checkpoints, each three times as large as the weights (lamb_8bit: half)."
    )
    keep_one_in: int = flag(0, "With --store_checkpoints: also keep one in N checkpoints forever, e.g. 100; 0: none.")
    local_path: str | None = flag(
        None, "With --store_checkpoints: folder of this peer alone. Default: output_dir.", aliases=["--repo_path"]
    )
    repo_url: str | None = flag(
        None,
        "With --store_checkpoints: Hugging Face Hub model repository for the newest checkpoint: ORG/NAME, its URL, or "
        "NAME in HF_ORGANIZATION_NAME; created as a public one if missing. The token comes from HF_TOKEN, "
        "HF_USER_ACCESS_TOKEN or `hf auth login`; a terminal prompts for a login.",
    )
    upload_interval: float | None = flag(
        None, "With --repo_url: seconds between uploads, which all count towards the quota. Default: 43200 (12 hours)."
    )

    def __post_init__(self):
        check_range(self, "save_checkpoint_step_interval", "save_total_limit", at_least=1)
        check_range(self, "keep_one_in", at_least=0)
        check_needs(self, "local_path", "store_checkpoints")
        check_needs(self, "repo_url", "store_checkpoints")
        check_needs(self, "upload_interval", "repo_url", " ORG/NAME")
        check_range(self, "upload_interval", above=0)
        if self.repo_url is not None:
            self.repo_url = make_repo_id(self.repo_url)
            self.upload_interval = self.upload_interval or 43_200.0


@dataclass
class TokenizeArguments:
    """Tokenization of a dataset. Read by tokenize_wikitext103.py."""

    objective: OBJECTIVES = flag(
        "mlm_sop",
        "Kind of sequences. mlm_sop: segment pairs, for ALBERT and LeanALBERT, also usable by BERT; mlm: full "
        "blocks of text, for BERT, RoBERTa and similar models; clm: full blocks with no special token except an end "
        "token after each document, for GPT-2, Llama and similar models.",
    )
    corpus: Literal["wikitext103", "sample"] = flag(
        "wikitext103", "WikiText-103 from the Hugging Face Hub, or the sample included in this repository."
    )
    text_files: list[str] = flag(
        [],
        "Your own text instead of a corpus: plain, .jsonl, .csv or .tsv files, also .gz or .xz, UTF-8. A document is "
        "a JSON line, a row, or a file (an article of a file in WikiText format).",
    )
    text_column: str = flag("text", "Field of a JSON line or a row that holds the text.")
    tokenizer: str = flag("albert/albert-large-v2", "Tokenizer to use: a name on the Hugging Face Hub or a folder.")
    train_tokenizer: bool = flag(
        False, "Train a tokenizer on the text instead: Unigram as ALBERT's; for clm BPE of bytes, as GPT-2's."
    )
    vocab_size: int = flag(30_000, "With --train_tokenizer: maximum number of tokens in the vocabulary.")
    cased: bool = flag(False, "With --train_tokenizer: distinguish upper and lower case; always done for clm.")
    keep_accents: bool = flag(False, "With --train_tokenizer: keep accents; Russian needs them. Always kept for clm.")
    language: str = flag("english", "Language of the text, for splitting it into sentences.")
    sentence_splitter: Literal["auto", "punkt", "razdel"] = flag("auto", SENTENCE_SPLITTER_HELP)
    seq_length: int = flag(512, "Maximum number of tokens of a sequence.")
    validation_fraction: float = flag(0.05, "Share of documents for validation, unless the corpus has a split for it.")
    seed: int = flag(42, "Seed of the split, the cuts and the swaps.")
    num_proc: int = flag(1, "Processes to tokenize with; the result does not depend on it.")
    cache_dir: str = flag("data/cache", "Folder for downloads from the Hub.")
    dataset_path: str = flag(DEFAULT_DATASET_PATH, "Folder to write the dataset to; must not exist yet.")
    tokenizer_path: str = flag("data/tokenizer", "Folder to write the tokenizer to; must not exist yet.")
    archive: str | None = flag(None, "Archive for dataset and tokenizer, also existing ones: NAME.tar.gz or NAME.tar.")
    archive_shards: int = flag(
        1, "With --archive NAME.tar.gz: number of parts, NAME-00000-of-0000N.tar.gz, with an index, NAME.json."
    )

    def __post_init__(self):
        check_range(self, "seq_length", at_least=SHORTEST_INSTANCE)
        check_range(self, "num_proc", "archive_shards", at_least=1)
        check_range(self, "seed", at_least=0, at_most=LARGEST_SEED)
        check_range(self, "validation_fraction", above=0, below=1)
        if self.train_tokenizer:
            check_range(self, "vocab_size", at_least=100)
        if self.archive and not re.fullmatch(r"[^/.][^/.]*\.(tar|tar\.gz|tgz)", self.archive.rsplit("/", 1)[-1]):
            raise UserError(f"--archive {self.archive} is not a name such as wikitext.tar.gz, without another dot")
        if self.archive_shards > 1:
            check_needs(self, "archive_shards", "archive", " NAME.tar.gz")


@dataclass
class InviteArguments:
    """Invitations to closed runs. Read by invite.py."""

    authority_key: str = flag("authority.pem", "Key file that signs credentials, as the run's monitor created it.")
    experiment_prefix: str = flag("", "Name of the run. Default: the key's only run.", aliases=["--run_id"])
    username: str | None = flag(None, "Invite a member with this name.")
    expires: str = flag("30d", "With --username: validity of the credential and its renewals: 30d, 12h, 45m, 90s.")
    out: str | None = flag(None, "With --username: file for the invitation. Default: NAME.invite.")
    revoke: str | None = flag(None, "Revoke all invitations of the member with this name.")
    initial_peers: list[str] = flag([], "With --revoke: peers of the run to notify, if its monitor runs elsewhere.")
    list: bool = flag(False, "List all invitations.")

    def __post_init__(self):
        check_username("username", self.username)
        if sum([bool(self.username), bool(self.revoke), self.list]) != 1:
            raise UserError("give one of --username NAME, --revoke NAME and --list")


def split_host_port(text: str) -> tuple[str, int | None]:
    """Split `host:port`, `[IPv6]:port` or `host:*` (port None) in two, or raise a ValueError."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/\s]+)):(\*|\d{1,5})", text)
    port = None if match and match[3] == "*" else int(match[3]) if match else -1
    if port is not None and not 0 <= port < 2**16:
        raise ValueError(f"{text!r} is neither an address such as /ip4/203.0.113.1/tcp/31337 nor HOST:PORT")
    return match[1] or match[2], port


def make_host_maddrs(text: str) -> list[str]:
    """Return the multiaddrs to listen on for a multiaddr, or for `host:port` as older guides write it."""
    if text.startswith("/"):
        return [text]
    try:
        host, port = split_host_port(text)
        address = ipaddress.ip_address(host)
    except ValueError:
        raise UserError(
            f"--host_maddrs {text!r} is not an address to listen on, such as /ip4/0.0.0.0/tcp/31337 or '[::]:31337'"
        ) from None
    # a socket on [::] also accepts IPv4, but libp2p's does not
    addresses = ["ip4/0.0.0.0", "ip6/::"] if address == ipaddress.ip_address("::") else [f"ip{address.version}/{host}"]
    return [f"/{address}/tcp/{port or 0}" for address in addresses]


#: dataclasses of each script, in the order in which its functions take them
SHARED_ARGS = (ModelArguments, OptimizerArguments, AveragingArguments)
TRAINER_ARGS = (SwarmArguments, *SHARED_ARGS, DataArguments, TrainerArguments)
MONITOR_ARGS = (SwarmArguments, MonitorArguments, ArchiveArguments, *SHARED_ARGS)
AUX_PEER_ARGS = (SwarmArguments, AuxPeerArguments, ArchiveArguments, *SHARED_ARGS)


#: flags that --help lists if a script has many: those needed to join or start a run, including all of README.md's
BASIC_FLAGS = {
    *("experiment_prefix", "initial_peers", "host_maddrs", "identity_path", "status_port", "username", "client_mode"),
    *("authorize", "invite", "authority_key", "config_path", "model_name_or_path", "tokenizer_path", "objective"),
    *("optim", "learning_rate", "warmup_steps", "total_steps", "target_batch_size", "target_group_size", "bandwidth"),
    *("matchmaking_time", "request_timeout", "averaging_timeout", "next_chunk_timeout", "default_refresh_period"),
    *("average_state_every", "local_steps", "compression", "dataset_path", "train_file", "dataloader_num_workers"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "fp16", "do_eval", "eval_steps"),
    *("max_eval_samples", "save_steps", "output_dir", "preflight", "wandb_project", "refresh_period"),
    *("store_checkpoints", "assist_in_averaging"),
}

#: lists that may have no value: guides write --announce_maddrs $ANNOUNCE_ON, which is not always set
MAY_BE_EMPTY = {"announce_maddrs"}


def begin_new_run(found: dict[type, Any]) -> None:
    """Name a run that has neither a name nor peers.

    The name is a digest of this machine's name and --output_dir, so that the same command continues the same run. A
    pretrained model with its own tokenizer and no data trains on the sample text.

    :param found: the instances of the script's dataclasses, by class
    """
    output_dir = next(group.output_dir for group in found.values() if hasattr(group, "output_dir"))
    place = f"{platform.node()} {os.path.abspath(output_dir)}"
    found[SwarmArguments].experiment_prefix = f"run-{hashlib.sha256(place.encode()).hexdigest()[:8]}"
    model, data = found[ModelArguments], found.get(DataArguments)
    if data and model.tokenizer_path == model.model_name_or_path:
        is_given = data.train_file or data.dataset_name or data.streaming or data.dataset_path != DEFAULT_DATASET_PATH
        # another tokenizer may have made the default dataset
        found[DataArguments] = data if is_given else replace(data, train_file=SAMPLE_TEXT)


def parse_arguments(*groups: type, description: str | None = None, before: Sequence[str] = ()) -> tuple:
    """Parse the command line into one instance of each dataclass, in order (see `parse_flags`)."""
    found = {type(parsed): parsed for parsed in parse_flags(groups, BASIC_FLAGS, MAY_BE_EMPTY, description, before)}
    swarm, averaging = map(found.get, (SwarmArguments, AveragingArguments))
    trainer, data = found.get(TrainerArguments), found.get(DataArguments)
    if trainer and trainer.num_train_epochs and data.streaming:
        raise UserError("--num_train_epochs: --streaming has no passes over the data: pass --max_steps instead")
    if swarm and not swarm.experiment_prefix and not swarm.initial_peers:
        begin_new_run(found)
    if averaging and averaging.local_steps > 1 and averaging.local_steps_from is None:
        averaging.local_steps_from = max(200, found[OptimizerArguments].warmup_steps)  # see docs/measured.md
    return tuple(found.values())
