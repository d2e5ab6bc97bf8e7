"""Several devices of one machine as one peer of the swarm, with a process for each. Only rank 0 talks to other peers.

    torchrun --standalone --nproc_per_node 2 run_trainer.py ...
    python run_trainer.py ...          # does the same with all GPUs that are visible
    python run_trainer.py --device cpu --num_devices 2 ...

Each rank computes gradients of its own data. The ranks average them once per step, and rank 0 continues with them like
a trainer with one device. The others wait for rank 0, also during rounds, over gloo's sockets, which use no CPU time
and are closed when a process ends. GPUs exchange gradients and weights by NCCL once all ranks have confirmed a step.
"""

import contextlib
import copy
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from arguments import TrainerArguments
from common.console import UserError, first_line, setup_logging
from common.signals import CLEANUPS, block_signals
from swarm.processes import STOP_REQUESTED
from training.devices import choose_devices, is_out_of_memory, log_versions

logger = logging.getLogger("trainer")

NO_TIMEOUT = timedelta(days=365)  # rank 0 may take any time to join the swarm, to download a state or to average
NCCL_TIMEOUT = timedelta(minutes=5)
BUCKET_BYTES = 100_000_000  # of tensors that are exchanged together
#: environment variable with the path of the file store for ranks that this script has started
STORE_VARIABLE = "TRAINER_RANKS_FILE"


class RankFailedError(Exception):
    """An error that says that another rank has ended or cannot be reached."""


def start_ranks(args: TrainerArguments) -> "RankGroup":
    """Return this process's rank of torchrun, or as rank 0 start a rank for each other device.

    This starts no thread and makes no CUDA context.
    """
    devices, kind = choose_devices(args), ShardedRankGroup if args.sharded else RankGroup
    number, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if "LOCAL_RANK" not in os.environ:  # torchrun sets it; a cloud may set WORLD_SIZE alone
        return kind(0, devices, *(start_others(devices) if len(devices) > 1 else ()))
    if int(os.environ.get("LOCAL_WORLD_SIZE", count)) != count:
        raise UserError(
            "torchrun --nnodes: a peer has the ranks of one machine only: start torchrun --standalone on each machine"
        )
    if devices[0].type == "cpu" and not args.num_devices:
        devices *= count
    if len(devices) < count or (args.num_devices or count) != count:
        raise UserError(
            f"torchrun has started {count} processes for {len(devices)} devices (--device, --num_devices): set "
            "--nproc_per_node to the number of devices"
        )
    if count == 1:
        return kind(0, devices[:1])
    path = os.environ.get(STORE_VARIABLE)
    store = dist.FileStore(path, count) if path else next(dist.rendezvous("env://", timeout=NO_TIMEOUT))[0]
    if number > 0:  # only rank 0 logs more than warnings
        setup_logging(f"trainer rank {number}", args.logging_dir)
        logging.getLogger().setLevel(logging.WARNING)
    return kind(number, devices[:count], store)


def start_others(devices: list[torch.device]) -> tuple[dist.Store, list[subprocess.Popen]]:
    """Start this process's command again for each device but the first; return the ranks' store and the processes."""
    folder = tempfile.mkdtemp(prefix="ranks_")
    CLEANUPS.append(partial(shutil.rmtree, folder, ignore_errors=True))
    path, count = os.path.join(folder, "store"), len(devices)
    if devices[0].type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, torch.get_num_threads() // count)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)
    children = []
    with block_signals():  # inherited, so that a child receives signals only once it handles them
        for number in range(1, count):
            where = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            env = os.environ | {name: str(value) for name, value in where.items()} | {STORE_VARIABLE: path}
            command = [sys.executable, *sys.orig_argv[1:]]
            children.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL))
    return dist.FileStore(path, count), children


class RankGroup(contextlib.AbstractContextManager):
    """A process among the ranks of one peer. With a single rank, all methods do nothing.

    Waits for other ranks raise RankFailedError if one has ended; `with` turns it into one log line and exit code 1.
    """

    def __init__(
        self,
        number: int,
        devices: list[torch.device],
        store: dist.Store | None = None,
        children: Iterable[subprocess.Popen] = (),
    ):
        self.number, self.count, self.device = number, len(devices), devices[number]
        self.store, self.children = store, list(children)
        self.parent = os.getppid()
        self.group: dist.ProcessGroup | None = None  # of GPUs
        self.failure: Exception | None = None  # that ended the training of rank 0
        self.sent_versions: list[int] = []

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, the only one that talks to the swarm and the user."""
        return self.number == 0

    @property
    def suffix(self) -> str:
        """The suffix of this rank's name; empty for rank 0."""
        return "" if self.is_main else f" rank {self.number}"

    @property
    def exit_code(self) -> int:
        """The exit code of rank 0 after its failure, if any."""
        if self.failure is None:
            return 0
        return 2 if isinstance(self.failure, UserError) else 1

    def __enter__(self) -> "RankGroup":
        if self.is_main:
            log_versions(self.device, self.count)
        return self

    def __exit__(self, _, error: BaseException | None, __) -> bool:
        if isinstance(error, RankFailedError) and not STOP_REQUESTED.is_set():
            logger.error(f"{error}; ending")
            raise SystemExit(1) from error
        return isinstance(error, RankFailedError)

    # -- before the connection: polls of the store in Python, which Ctrl-C can interrupt

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on rank 0 before the other ranks, and have rank 0 wait for them."""
        if not self.is_main:
            self.wait_for("loaded", [0])
        yield
        self.announce("loaded")
        if self.is_main:
            self.wait_for("loaded", range(1, self.count))

    def announce(self, what: str, value: str = "1") -> None:
        """Tell the other ranks that this one has reached a point, and a value."""
        if self.count > 1:
            self.store.set(f"{what} {self.number}", value)

    def wait_for(self, what: str, numbers: Iterable[int]) -> None:
        """Wait until these ranks have announced a point."""
        keys = [f"{what} {number}" for number in numbers]
        while keys and not self.store.check(keys):
            for number, child in enumerate(self.children, start=1):
                if child.poll() is not None:
                    reason = f"rank {number} of this machine ended at its start with code {child.returncode}"
                    raise RankFailedError(reason)
            if os.getppid() != self.parent:
                raise RankFailedError("the process that started this one has ended")
            time.sleep(0.1)

    def share(self, words: list[str]) -> list[str]:
        """Return the words of rank 0 on all ranks."""
        if self.is_main:
            self.announce("words", json.dumps(words))
            return words
        self.wait_for("words", [0])
        return json.loads(self.store.get("words 0"))

    def connect(self) -> None:
        """Connect the ranks. Rank 0 must call this after hivemind has forked its helpers; the others wait for it."""
        if self.count == 1:
            return
        with self.explain():
            # no rank connects before all are ready, because a connection would wait for a rank that has ended
            self.announce("ready")
            self.wait_for("ready", range(self.count))
            if sys.platform == "linux":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no connections from other machines
            dist.init_process_group(
                "gloo", store=self.store, rank=self.number, world_size=self.count, timeout=NO_TIMEOUT
            )
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                self.group = dist.new_group(backend="nccl", timeout=NCCL_TIMEOUT)
        # a seed for each rank; otherwise all would drop out the same neurons
        torch.manual_seed(torch.initial_seed() + self.number)

    @contextlib.contextmanager
    def explain(self) -> Iterator[None]:
        """Turn the error of an exchange between ranks into a RankFailedError that names the rank that has ended."""
        try:
            yield
        except RuntimeError as e:
            if is_out_of_memory(e):
                raise
            if self.children:
                time.sleep(0.5)  # a process closes its connections before it ends
            for number, child in enumerate(self.children, start=1):
                if child.poll() is not None:
                    text = f"rank {number} of this machine has ended (exit code {child.returncode})"
                    raise RankFailedError(text) from e
            reason, is_of_exchange = first_line(e), isinstance(e, dist.DistError) or "gloo" in str(e)
            if any(words in reason for words in ("closed by peer", "reset by peer", "Broken pipe")):
                reason, is_of_exchange = "its connection is closed", True
            if not is_of_exchange or "CUDA error" in str(e):  # an error of this rank's own work
                raise
            raise RankFailedError(f"another rank of this machine has ended ({reason})") from e

    # -- after the connection: all ranks call each of these, in the same order

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model for this rank's passes: the model itself. Call this before it moves to a device."""
        return model

    def align(self, batches: Iterator) -> Iterator:
        """Return the batches that this rank may begin to compute."""
        return batches

    def broadcast(self, value: object = None) -> object:
        """Return the value of rank 0 on all ranks."""
        values = [value]
        if self.count > 1:
            with self.explain():
                dist.broadcast_object_list(values, src=0)
        return values[0]

    def require_same(self, what: str, value: object) -> None:
        """Raise a UserError if this rank's value differs from that of rank 0."""
        if self.broadcast(value) != value:
            raise UserError(f"{what} changed while the ranks of this machine were starting: start them again")

    def all_continue(self, goes_on: bool) -> bool:
        """Return whether all ranks continue, or raise RankFailedError if only another rank was stopped."""
        if self.count == 1:
            return goes_on
        if self.device.type == "cuda":
            # finds a rank whose passes failed here, over sockets, instead of by NCCL's timeout
            torch.cuda.current_stream(self.device).synchronize()
        with self.explain():
            stopping = torch.tensor([float(not goes_on)])
            dist.all_reduce(stopping)
        # a signal to all ranks, such as Ctrl-C, may reach this rank last
        if stopping.item() and goes_on and self.is_main and not STOP_REQUESTED.wait(1.0):
            raise RankFailedError("another rank of this machine was stopped")
        return not stopping.item()

    @torch.no_grad()
    def average(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each tensor by its mean over the ranks. A value that is not finite spreads to all ranks."""
        if self.count > 1:
            with self.explain():
                for bucket in _take_tensors(tensors, BUCKET_BYTES):
                    flat = _flatten_dense_tensors(bucket)
                    dist.all_reduce(flat, group=self.group)
                    torch._foreach_copy_(bucket, _unflatten_dense_tensors(flat.div_(self.count), bucket))

    def average_gradients(self, model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
        """Replace the model's gradients by their means over the ranks, and return the mean of the loss."""
        self.average([*list_gradients(model), loss])
        return loss

    def send_weights(self, model: torch.nn.Module) -> None:
        """Send weights and buffers of rank 0 to all ranks."""
        for bucket in _take_tensors([*model.parameters(), *model.buffers()], BUCKET_BYTES):
            flat = _flatten_dense_tensors(bucket)
            dist.broadcast(flat, src=0, group=self.group)
            if self.number:
                torch._foreach_copy_(bucket, _unflatten_dense_tensors(flat, bucket))

    @torch.no_grad()
    def broadcast_state(self, model: torch.nn.Module, epoch: int, scaler: torch.amp.GradScaler) -> int:
        """Send epoch, loss scale and, if changed, the weights of rank 0 to all ranks; return that epoch.

        Weights may change between epochs too, by parameter averaging.
        """
        if self.count == 1:
            return epoch
        versions = [param._version for param in model.parameters()]
        message = torch.tensor([epoch, versions != self.sent_versions, scaler.get_scale()], dtype=torch.float64)
        with self.explain():
            dist.broadcast(message, src=0)
            epoch, is_changed, scale = message.tolist()
            if is_changed:
                self.send_weights(model)
        self.sent_versions = versions
        if self.number and scaler.is_enabled():
            scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
        return int(epoch)

    @contextlib.contextmanager
    def catch_failure(self) -> Iterator[None]:
        """If training fails on rank 0, kill the other ranks and keep the error as `failure`; on others, raise it."""
        try:
            yield
        except (RankFailedError, UserError) as e:
            if not self.is_main:
                raise
            for child in self.children:  # they wait for rank 0 and have no state to save
                child.kill()
            if not STOP_REQUESTED.is_set():
                self.failure = e
                logger.error(f"{e}; saving the state: the same command continues from there")

    def end(self) -> None:
        """Wait up to 10 s for the other ranks, which end by themselves after their loops."""
        deadline = time.monotonic() + 10
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, deadline - time.monotonic()))


class ShardedRankGroup(RankGroup):
    """Ranks that hold a part of each weight and gradient, for a model that one GPU cannot hold (--sharded).

    In a pass, the ranks collect the weights of a layer at a time, and each computes with data of its own. This is
    ZeRO-3 (arxiv.org/abs/1910.02054) by torch's FSDP2. Rank 0 also has the whole model in host memory, for the
    optimizer, evaluations and checkpoints. It collects gradients and sends weights, one tensor at a time.
    """

    def __init__(self, number: int, devices: list[torch.device], *processes):
        if len(devices) < 2:
            raise UserError("--sharded needs several devices, this peer has one: omit it, or see --num_devices")
        super().__init__(number, devices, *processes)
        self.shards: list[torch.nn.Parameter] = []  # the sharded model's trained parameters, which are DTensors

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the sharded model: on rank 0 a copy, on the others the model itself.

        A block of layers moves to the device as a whole, and leaves this rank's part of it there.
        """
        from torch.distributed.fsdp import fully_shard  # this import and the one below take a second
        from torch.distributed.tensor import DeviceMesh

        worker = copy.deepcopy(model) if self.is_main else model
        with self.explain():
            mesh = DeviceMesh.from_group(self.group or dist.group.WORLD, self.device.type)
            for module in [*dict.fromkeys(find_blocks(worker)), worker]:
                fully_shard(module, mesh=mesh)
        self.shards = list_trained(worker)
        return worker

    def align(self, batches: Iterator) -> Iterator:
        """Return batches as long as all ranks have one, because each pass needs all ranks."""
        while True:
            batch = next(batches, None)
            if not self.all_continue(batch is not None):
                return
            yield batch

    @torch.no_grad()
    def average_gradients(self, model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
        """Move the sharded gradients, which FSDP has averaged, to the model of rank 0; return the mean of the loss."""
        with self.explain():
            for param, shard in zip(list_trained(model), self.shards, strict=True):
                gradient, shard.grad = shard.grad, None
                if gradient is not None:
                    whole = gradient.full_tensor()
                    if self.is_main:
                        param.grad = whole.to(param.device)
        self.average([loss])
        return loss.to(model.device)

    def send_weights(self, model: torch.nn.Module) -> None:
        """Send the trained weights of rank 0's model to the shards."""
        from torch.distributed.tensor import distribute_tensor

        for param, shard in zip(list_trained(model), self.shards, strict=True):
            whole = param.detach().to(self.device) if self.is_main else torch.empty(shard.shape, device=self.device)
            shard.copy_(distribute_tensor(whole, shard.device_mesh, shard.placements))

    @contextlib.contextmanager
    def catch_failure(self) -> Iterator[None]:
        """Do as for other ranks, also if a pass fails because another rank has ended."""
        with super().catch_failure(), self.explain():
            yield


def find_blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Return the outermost modules in lists of modules that compute, such as the layers of a transformer."""
    for child in module.children():
        computes = type(child).forward is not torch.nn.Module.forward
        if isinstance(module, torch.nn.ModuleList) and computes:
            yield child
        else:
            yield from find_blocks(child)


def list_trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that are trained."""
    return [param for param in model.parameters() if param.requires_grad]


def list_gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the gradients of all trained parameters, with zeros for missing ones, so that all ranks have as many."""
    trained = list_trained(model)
    for param in trained:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    return [param.grad for param in trained]
