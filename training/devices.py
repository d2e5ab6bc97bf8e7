"""The device, precision, compiler and batch size of a trainer.

Devices are chosen without a CUDA context, because hivemind forks its helpers later (see run_trainer.py).
"""

import contextlib
import dataclasses
import itertools
import logging
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import psutil
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from arguments import AveragingArguments, DataArguments, PrecisionArguments, TrainerArguments
from common.console import UserError, first_line
from experiment.data import make_train_batches
from experiment.objectives import compute_losses
from models.build import find_longest_sequence
from training.model import move_batch

logger = logging.getLogger("trainer")

Batch = dict[str, torch.Tensor]

MAX_PASS_SECONDS = 5.0  # a step of up to 10 s is advised
MEASURED_BATCHES = 10  # by `measure_step`, unless MEASURED_SECONDS end it earlier
MEASURED_SECONDS = 20.0
MIN_LOSS_SCALE = 1.0  # as in DeepSpeed
MAX_MEMORY_SHARE = 0.8  # of the memory that is free without a batch; rounds and other batches need the rest

# Dense TFLOP/s by NVIDIA's data sheets: in bf16 or fp16 with sums in float32, and in float32, which is TF32 on all but
# T4 and V100.
# fmt: off
PEAK_TFLOPS = {
    "H100 PCIe": (756, 378), "H100 NVL": (835, 418), "H100": (989, 495), "H200": (989, 495), "A100": (312, 156),
    "L4": (121, 60), "T4": (65, 8.1), "V100": (125, 15.7),
    "RTX 3060": (25.5, 12.7), "RTX 3060 Ti": (32.4, 16.2), "RTX 3070": (40.6, 20.3), "RTX 3070 Ti": (43.5, 21.7),
    "RTX 3080": (59.5, 29.8), "RTX 3080 Ti": (68.2, 34.1), "RTX 3090": (71, 35.6), "RTX 3090 Ti": (80, 40),
    "RTX 4060": (30.2, 15.1), "RTX 4060 Ti": (44.1, 22.1), "RTX 4070": (58.3, 29.1), "RTX 4070 Ti": (80.2, 40.1),
    "RTX 4080": (97.5, 48.7), "RTX 4090": (165.2, 82.6), "RTX 5090": (209.5, 104.8),
}
# fmt: on


def choose_devices(args: TrainerArguments) -> list[torch.device]:
    """Return the devices of this peer, which suit its flags. On a CPU, each stands for one training process."""
    devices = list_devices(args)
    if args.sharded and len(devices) < 2:
        raise UserError("--sharded needs several devices, this peer has one: omit it, or see --num_devices")
    return devices


def list_devices(args: TrainerArguments) -> list[torch.device]:
    """Return the devices that --device and --num_devices select."""
    # counts by the driver's management library; is_available() would initialize CUDA
    accelerator = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    present = accelerator.type if count else "cpu"
    default = "cuda" if present == "cuda" else "cpu"
    device = torch.device(default if args.device == "auto" else args.device)
    if args.fp16 and device.type != "cuda":
        raise UserError("--fp16 needs a CUDA GPU, and there is none here: omit it or use --bf16")
    if device.type == "cpu":
        return [device] * (args.num_devices or 1)
    if device.index is not None and args.num_devices not in (None, 1):
        raise UserError(f"--num_devices {args.num_devices}: --device {args.device} is one device: omit one of them")
    count = count if device.type == present else 0
    numbers = range(args.num_devices or count) if device.index is None else [device.index]
    if not count or max(numbers) >= count:
        number = f" --num_devices {args.num_devices}" if args.num_devices else ""
        raise UserError(
            f"--device {args.device}{number}: torch finds {count} such devices here: look at "
            "nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    return [torch.device(device.type, number) for number in numbers]


class LossScaler(torch.amp.GradScaler):
    """A loss scaler whose scale never reaches 0, where it would stay: each skipped step halves it."""

    def update(self, new_scale: float | None = None) -> None:
        """Adapt the scale to the step. This waits for the device, which is idle then."""
        super().update(new_scale)
        if self.is_enabled() and self.get_scale() < MIN_LOSS_SCALE:
            super().update(MIN_LOSS_SCALE)


def try_device(device: torch.device) -> None:
    """Compute on a device, or raise a UserError if this torch cannot: its driver or the GPU itself may be too old. Call
    this after hivemind has forked its helpers."""
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError as e:
        if is_out_of_memory(e):
            raise
        raise UserError(
            f"{device} does not work with torch {torch.__version__} ({first_line(e)}): update its driver, install a "
            "torch for it (rm -rf .venv; make setup TORCH=...), or use --device cpu"
        ) from e


def place_model(
    model: torch.nn.Module, device: torch.device, args: PrecisionArguments
) -> tuple[AbstractContextManager, torch.amp.GradScaler]:
    """Move the model to its device, in training mode. A trainer calls this after hivemind has forked its helpers.

    :returns: a context for forward passes in the chosen precision, and a loss scaler, which is disabled without --fp16
    """
    try_device(device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        if args.bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise UserError("--bf16 is not supported by this GPU: use --fp16")
    model.to(device).train()
    precision = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else None
    autocast = torch.autocast(device.type, precision) if precision else contextlib.nullcontext()
    return autocast, LossScaler(device.type, enabled=args.fp16)


@torch.no_grad()
def all_finite(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return whether all values are finite as a scalar on their device, without waiting for it."""
    return torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]).isfinite().all()


@torch.no_grad()
def read_loss(loss: torch.Tensor, gradients: Iterable[torch.Tensor]) -> float:
    """Return the loss as a number, or nan unless all gradients are finite. This waits for the device once."""
    return torch.where(all_finite(gradients), loss, torch.nan).item()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that the device or this machine is out of memory."""
    # torch's allocators, the driver and CUDA's libraries (CUBLAS_STATUS_ALLOC_FAILED) have different texts
    says_so = any(words in str(error).lower() for words in ("out of memory", "can't allocate memory", "alloc_failed"))
    return says_so or isinstance(error, (torch.OutOfMemoryError, MemoryError))


@contextlib.contextmanager
def stop_when_out_of_memory(args: TrainerArguments, device: torch.device, model: PreTrainedModel) -> Iterator[None]:
    """Turn torch's out-of-memory error into a UserError that names the flags that may help."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        if str(e).startswith("DataLoader worker"):
            cure = f"lower --dataloader_num_workers (now {args.dataloader_num_workers})"
            raise UserError(f"a process that prepares batches was killed, perhaps without memory: {cure}") from e
        if not is_out_of_memory(e):
            raise
        cures = [f"a smaller --per_device_train_batch_size (now {args.per_device_train_batch_size})"]
        if not args.gradient_checkpointing and model.supports_gradient_checkpointing:
            cures.append("--gradient_checkpointing")
        if not args.bf16 and not args.fp16:
            cures.append("--bf16 (old GPUs: --fp16)")
        cures.append("shorter sequences (--max_sequence_length)")
        raise UserError(f"out of memory on {device}: try {', or '.join(cures)}") from e


def measure_memory(device: torch.device) -> float:
    """Return the used share of the device's memory. On a GPU, torch's cached memory counts as used."""
    if device.type != "cpu":
        # notebooks keep their torch, and torch.accelerator of 2.9 lacks this function
        get_memory = torch.cuda.mem_get_info if device.type == "cuda" else torch.accelerator.get_memory_info
        free, total = get_memory(device)
        return 1 - free / total  # includes memory of other programs
    return psutil.virtual_memory().percent / 100


def make_trial_batch(
    model: PreTrainedModel, dataset, tokenizer, corpus: dict, data_args: DataArguments, seed: int
) -> Batch:
    """Return a batch of one sequence of the data, repeated up to the maximum length in training."""
    batch = next(iter(make_train_batches(dataset, tokenizer, data_args, batch_size=8, seed=seed)))
    stored = corpus["seq_length"]
    length = int(min(stored, data_args.max_sequence_length or stored, find_longest_sequence(model)))
    filled = batch["attention_mask"].sum(1)
    row = filled.argmax()
    columns = torch.arange(length) % filled.max()
    return {name: (tensor[row, columns] if tensor.dim() == 2 else tensor[row])[None] for name, tensor in batch.items()}


def find_peak(name: str, is_half: bool) -> float | None:
    """Return the peak FLOP/s of a device by its name in torch, in half precision or float32, or None if unknown."""
    for key, (half, full) in PEAK_TFLOPS.items():
        # not a part of one (MIG), and no laptop's
        if re.fullmatch(rf"(NVIDIA |GeForce |Tesla )*{key}([- ](SXM\d?|PCIe|HBM\d|\d+GB))*", name, re.IGNORECASE):
            return 1e12 * (half if is_half else full)
    return None


def count_flop(model: PreTrainedModel, batch: Batch, device: torch.device) -> int:
    """Return the FLOP of the matrix products in a forward and a backward pass, without those that are recomputed, as in
    the definition of MFU (arxiv.org/abs/2204.02311, appendix B).

    It takes the memory of a forward pass in half precision: neither the precision nor a GPU's attention kernel changes
    the count. The counter does not know the fused attention of the CPU.
    """
    # a GPU's default is float16, which would keep a copy of each matrix in bfloat16 (see --lora_r)
    precision = torch.bfloat16 if model.dtype == torch.bfloat16 else None
    counter = FlopCounterMode(display=False)
    counter.flop_registry = {name: partial(count_products, it) for name, it in counter.flop_registry.items()}
    autocast = torch.autocast(device.type, precision)
    kernel = sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else contextlib.nullcontext()
    with leave_no_trace(model, device), torch.compiler.set_stance("force_eager"), kernel, autocast, counter:
        compute_losses(model, move_batch(batch, device))
    return counter.get_total_flops()


def count_products(count: Callable[..., int], *args, **options) -> int:
    """Return the FLOP of a product, and of the one in the backward pass for each of its factors that needs a gradient.

    :param count: the counter's function for this product, or for attention: two products of three factors
    """
    needed = sum(torch.is_tensor(it) and it.dim() > 1 and it.requires_grad for it in args)
    return count(*args, **options) * (1 + min(needed, 2))


def stretch_batch(batch: Batch, rows: int) -> Batch:
    """Return a batch that repeats this batch of one sequence."""
    return {name: tensor.repeat(rows, *[1] * (tensor.dim() - 1)) for name, tensor in batch.items()}


def time_pass(model: torch.nn.Module, batch: Batch, autocast: AbstractContextManager) -> float:
    """Return the seconds of one forward and backward pass."""
    start = time.monotonic()
    with autocast:
        loss = compute_losses(model, batch)["loss"]
    loss.backward()
    if loss.device.type != "cpu":
        torch.accelerator.synchronize(loss.device)
    return time.monotonic() - start


@contextlib.contextmanager
def leave_no_trace(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the random state, zero the gradients and forget the peak of memory after trial passes."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            model.zero_grad(set_to_none=False)
            if device.type != "cpu":
                torch.get_device_module(device).empty_cache()
            if device.type == "cuda":  # `peak_memory_bytes` would be that of a trial batch
                torch.cuda.reset_peak_memory_stats(device)


def find_batch_size(
    model,
    batch: Batch,
    device: torch.device,
    autocast: AbstractContextManager,
    largest_step: int,
    num_devices: int = 1,
    copies: int = 0,
) -> tuple[int, int]:
    """Return the samples per forward pass and the batches per step that suit this machine.

    The batch is doubled while memory, the time of a pass and samples/s allow it. Passes below 0.25 s vary too much to
    compare. Then enough batches are accumulated for a step of a second.

    :param batch: the longest sequence, from make_trial_batch
    :param num_devices: the number of this peer's devices; on a CPU they share one memory, and only this one measures
    :param copies: the number of copies of the trained parameters that the device will have to hold later
    """
    best = 0
    best_seconds = float("inf")
    size = 1
    at_start = measure_memory(device)
    sharing = 1 if device.type == "cuda" else num_devices
    later = [torch.empty_like(it) for it in model.parameters() if it.requires_grad for _ in range(copies)]
    with leave_no_trace(model, device):
        while size <= max(1, largest_step):
            try:
                trial = move_batch(stretch_batch(batch, size), device)
                seconds = min([time_pass(model, trial, autocast) for _ in range(3)][1:])
            except (RuntimeError, MemoryError) as e:
                if not is_out_of_memory(e):
                    raise
                logger.info(f"{size:6} samples: too much for this device's memory")
                break
            used = sharing * max(0.0, measure_memory(device) - at_start) / max(1 - at_start, 1e-9)
            logger.info(
                f"{size:6} samples: {seconds:.3f} s, {size / seconds:,.1f} samples/s, {used:.0%} of the free memory"
            )
            is_faster = size / seconds > 1.05 * best / best_seconds
            if best and (used > MAX_MEMORY_SHARE or seconds > MAX_PASS_SECONDS or (seconds > 0.25 and not is_faster)):
                break
            best = size
            best_seconds = seconds
            size = 2 * size
        del later
    if not best:
        raise UserError("one sample does not fit into this device's memory: use another device or a smaller model")
    return best, max(1, min(round(1 / best_seconds), largest_step // best))


def find_blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the outermost modules in lists of modules that compute, such as the layers of a transformer."""
    blocks = []
    for child in module.children():
        computes = type(child).forward is not torch.nn.Module.forward
        blocks += [child] if isinstance(module, torch.nn.ModuleList) and computes else find_blocks(child)
    return list(dict.fromkeys(blocks))


def compile_model(model, batch: Batch, device: torch.device, autocast: AbstractContextManager) -> None:
    """Compile the model's layers and loss in place (--torch_compile), or raise a UserError if the compiler fails.

    Layers of one kind share their code. The whole model would take several times as long (docs/measured.md).
    """
    start = time.monotonic()
    for block in find_blocks(model) or [model]:
        block.compile(dynamic=True)  # in place, so that parameters keep their names; once for all sizes
    # fused, it needs no logits in float32: these took a quarter of GPT-2's step (docs/measured.md)
    model.sum_token_losses = torch.compile(model.sum_token_losses, dynamic=True)
    # a length of its own, because the compiler would take it for the hidden size if they were equal
    batch = {name: tensor[:, :-1] if tensor.dim() == 2 else tensor for name, tensor in batch.items()}
    full = stretch_batch(batch, 2)
    padded = stretch_batch(batch, 2)
    padded["attention_mask"][0, -1] = 0  # batches without padding have no mask, see move_batch
    full.pop("position_ids", None)  # as for batches without packed documents
    if "position_ids" in padded:
        padded["position_ids"][0, -1] = 0
    try:
        with leave_no_trace(model, device):
            for trial in (full, padded):
                time_pass(model, move_batch(trial, device), autocast)
    except Exception as e:  # the compiler raises many types
        if is_out_of_memory(e):
            raise
        raise UserError(f"--torch_compile: the compiler failed ({first_line(e)[:200]}): omit the flag") from e
    logger.info(f"compiled the model in {time.monotonic() - start:.0f} s")


def tune_to_device(
    model: torch.nn.Module,
    make_trial: Callable[[], Batch],
    args: TrainerArguments,
    device: torch.device,
    autocast: AbstractContextManager,
    averaging: AveragingArguments | None,
    num_devices: int,
) -> TrainerArguments:
    """Compile the model and choose its batch size, if --torch_compile and --per_device_train_batch_size auto are set.

    :param averaging: the swarm's settings; its batch is at least eight steps of this peer. None if another rank chooses
    :returns: the arguments with the chosen batch size
    """
    is_auto = args.per_device_train_batch_size == "auto" and averaging is not None
    batch = make_trial() if args.torch_compile or is_auto else None
    if args.torch_compile:
        compile_model(model, batch, device, autocast)
    if is_auto:
        largest_step = averaging.target_batch_size // (8 * num_devices)
        # the pending gradients, with --overlap also those of the round in the background; with local steps, also the
        # anchor and two moments, of which loading makes new ones
        copies = 6 if averaging.local_steps > 1 else 1 + averaging.overlap
        size, count = find_batch_size(model, batch, device, autocast, largest_step, num_devices, copies)
        logger.info(f"--per_device_train_batch_size {size} --gradient_accumulation_steps {count} suit this device")
        args = dataclasses.replace(args, per_device_train_batch_size=size, gradient_accumulation_steps=count)
    return args


def measure_step(model, loaded: tuple, devices: list[torch.device], groups: tuple) -> tuple[float, int]:
    """Move the model to the first device, tune both, and return the seconds of a step and its samples."""
    _, model_args, _, averaging, data_args, args = groups
    (tokenizer, dataset, corpus) = loaded
    device = devices[0]
    trial = partial(make_trial_batch, model, dataset["train"], tokenizer, corpus, data_args, model_args.seed)
    with stop_when_out_of_memory(args, device, model):
        autocast, _ = place_model(model, device, args)
        args = tune_to_device(model, trial, args, device, autocast, averaging, len(devices))
        size = args.per_device_train_batch_size
        count = args.gradient_accumulation_steps
        batches = make_train_batches(dataset["train"], tokenizer, data_args, batch_size=size, seed=model_args.seed)
        deadline = time.monotonic() + MEASURED_SECONDS
        times = []
        for batch in itertools.islice(batches, MEASURED_BATCHES):
            times.append(time_pass(model, move_batch(batch, device), autocast))
            if time.monotonic() > deadline:
                break
    # the first pass is slower
    return count * statistics.mean(times[1:] or times), size * count * len(devices)
