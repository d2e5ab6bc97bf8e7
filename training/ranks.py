"""Several devices of one machine as one peer of the swarm, with a process for each. Only rank 0 talks to other peers.

    python run_trainer.py ...          # on all GPUs that are visible
    python run_trainer.py --device cpu --num_devices 2 ...

The process that the user starts is rank 0. It starts the other ranks by the same command, once it has loaded the data.
Each rank computes gradients of its own data. The ranks average them once per step, and rank 0 continues with them like
a trainer with one device. The others wait for rank 0, also during rounds, over gloo's sockets, which use no CPU time
and are closed when a process ends. GPUs exchange gradients and weights by NCCL once all ranks have confirmed a step.
"""

import contextlib
import copy
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from arguments import SwarmArguments, TrainerArguments
from common.console import UserError, first_line, setup_logging
from common.signals import CLEANUPS, STOP_REQUESTED, exit_with_parent, obey_signals
from training.checkpoint import VERSIONS
from training.devices import choose_devices, find_blocks

logger = logging.getLogger("trainer")

NO_TIMEOUT = timedelta(days=365)  # rank 0 may take any time to download a state or to average
NCCL_TIMEOUT = timedelta(minutes=5)
BUCKET_BYTES = 100_000_000  # of tensors that are exchanged together
END_TIMEOUT = 10.0  # seconds for the other ranks to end after their loops
#: environment variables of ranks other than 0: the number, the id of rank 0's process, and the file by which the ranks
#: find each other
NUMBER_VARIABLE = "TRAINER_RANK"
PARENT_VARIABLE = "TRAINER_RANK_PARENT"
STORE_VARIABLE = "TRAINER_RANKS_FILE"


class RankFailedError(UserError):
    """An error that says that another rank has ended."""


def join_ranks(args: TrainerArguments) -> "RankGroup":
    """Return this process's rank, which is 0 unless rank 0 has started it. This makes no CUDA context."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("omit torchrun: python run_trainer.py starts a process for each device (--num_devices) itself")
    number = int(os.environ.get(NUMBER_VARIABLE, 0))
    devices = choose_devices(args)
    if number > 0:
        exit_with_parent(int(os.environ[PARENT_VARIABLE]))  # rank 0 may have been killed during the imports
        setup_logging(f"trainer rank {number}", args.logging_dir)
        logging.getLogger().setLevel(logging.WARNING)
    versions = ", ".join(f"{name} {version}" for name, version in VERSIONS.items())
    logger.info(f"{versions}, {' '.join(map(str, devices))}")
    return ShardedRankGroup(number, devices) if args.sharded else RankGroup(number, devices)


class RankGroup:
    """A process among the ranks of one peer. With a single rank, no method exchanges data.

    On rank 0, waits for other ranks raise RankFailedError if one has ended. The others end with rank 0.
    """

    def __init__(self, number: int, devices: list[torch.device]):
        self.number = number
        self.count = len(devices)
        self.device = devices[number]
        #: whether this is rank 0, the only one that talks to the swarm and the user
        self.is_main = number == 0
        #: the other ranks, on rank 0
        self.children: list[subprocess.Popen] = []
        self.group: dist.ProcessGroup | None = None  # of GPUs
        self.exit_code = 0  # of rank 0, unless its training failed
        self.sent_versions: list[int] = []

    def start_others(self, swarm: SwarmArguments, flags: str) -> None:
        """Start this process's command again for each device but the first. This starts no thread.

        :param flags: the run's shared flags, which rank 0 may have inherited
        """
        if self.count == 1:
            return
        folder = tempfile.mkdtemp(prefix="ranks_")
        CLEANUPS.append(partial(shutil.rmtree, folder, ignore_errors=True))
        os.environ[STORE_VARIABLE] = os.path.join(folder, "store")
        if self.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, torch.get_num_threads() // self.count)
            torch.set_num_threads(threads)
            os.environ["OMP_NUM_THREADS"] = str(threads)
        command = [sys.executable, *sys.orig_argv[1:]]
        if swarm.initial_peers:
            command += ["--experiment_prefix", swarm.experiment_prefix, *flags.split()]
        for number in range(1, self.count):
            env = os.environ | {NUMBER_VARIABLE: str(number), PARENT_VARIABLE: str(os.getpid())}
            # in a process group of its own, so that a terminal sends Ctrl-C to rank 0 alone
            self.children.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, process_group=0))

    def connect(self) -> None:
        """Connect the ranks. Rank 0 must call this after hivemind has forked its helpers; the others wait for it."""
        if self.count == 1:
            return
        if self.is_main:
            threading.Thread(target=self.pass_on_stop, name="pass on stop", daemon=True).start()
        else:
            obey_signals(lambda _: STOP_REQUESTED.set())
        store = dist.FileStore(os.environ[STORE_VARIABLE], self.count)
        store.set(f"ready {self.number}", "1")
        # a connection would wait for a rank that has ended
        while self.is_main and not store.check([f"ready {number}" for number in range(self.count)]):
            self.require_others()
            time.sleep(0.1)
        if sys.platform == "linux":
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, "lo")  # no connections from other machines
        with self.exchange():
            dist.init_process_group("gloo", store=store, rank=self.number, world_size=self.count, timeout=NO_TIMEOUT)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                self.group = dist.new_group(backend="nccl", timeout=NCCL_TIMEOUT)
        # a seed for each rank; otherwise all would drop out the same neurons
        torch.manual_seed(torch.initial_seed() + self.number)

    def pass_on_stop(self) -> None:
        """Send a stop request to the other ranks, because rank 0 would wait for one that waits for data."""
        STOP_REQUESTED.wait()
        for child in self.children:
            child.terminate()

    def require_others(self) -> None:
        """Raise RankFailedError if another rank has ended. Only rank 0, which started the others, can tell."""
        for number, child in enumerate(self.children, start=1):
            if child.poll() is not None:
                raise RankFailedError(f"rank {number} of this machine has ended (exit code {child.returncode})")

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Raise RankFailedError on rank 0 if an exchange fails because another rank has ended."""
        try:
            yield
        except RuntimeError as e:
            if not self.is_main:
                logger.warning(f"no exchange with the other ranks ({first_line(e)}), ending")
                raise SystemExit(1) from e
            time.sleep(0.5)  # a process closes its connections before it ends
            self.require_others()
            raise

    # -- after the connection: all ranks call each of these, in the same order

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model for this rank's passes: the model itself. Call this before it moves to a device."""
        return model

    def align(self, batches: Iterable) -> Iterator:
        """Yield the batches that this rank may begin to compute, until a stop request."""
        return itertools.takewhile(lambda _: not STOP_REQUESTED.is_set(), batches)

    def broadcast(self, value: object = None) -> object:
        """Return the value of rank 0 on all ranks."""
        values = [value]
        if self.count > 1:
            with self.exchange():
                dist.broadcast_object_list(values, src=0)
        return values[0]

    def average_number(self, number: float) -> float:
        """Return the mean of the ranks' numbers."""
        mean = torch.tensor(number, dtype=torch.float64)
        if self.count > 1:
            with self.exchange():
                dist.all_reduce(mean)
        return mean.item() / self.count

    def all_continue(self, goes_on: bool) -> bool:
        """Return whether all ranks continue."""
        if self.count == 1:
            return goes_on
        if self.device.type == "cuda" and type(self) is RankGroup:
            # finds a rank whose passes failed here, over sockets, instead of by NCCL's timeout; shards wait for NCCL
            torch.cuda.current_stream(self.device).synchronize()
        return self.average_number(float(goes_on)) == 1

    @torch.no_grad()
    def average(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each tensor by its mean over the ranks. A value that is not finite spreads to all ranks."""
        if self.count > 1:
            with self.exchange():
                for bucket in _take_tensors(tensors, BUCKET_BYTES):
                    flat = _flatten_dense_tensors(bucket)
                    dist.all_reduce(flat, group=self.group)
                    torch._foreach_copy_(bucket, _unflatten_dense_tensors(flat.div_(self.count), bucket))

    def average_gradients(self, model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
        """Replace the model's gradients by their means over the ranks, and return the mean of the loss."""
        self.average([*list_gradients(model), loss])
        return loss

    def send_weights(self, model: torch.nn.Module) -> None:
        """Send weights and buffers of rank 0 to all ranks, those that are not trained only the first time."""
        weights = list_trained(model) if self.sent_versions else model.parameters()
        for bucket in _take_tensors([*weights, *model.buffers()], BUCKET_BYTES):
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
        with self.exchange():
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
        """If training fails on rank 0, kill the other ranks and keep an exit code; on the others, raise the error."""
        try:
            yield
        except UserError as e:
            if not self.is_main:
                raise
            for child in self.children:  # they wait for rank 0 and have no state to save
                child.kill()
            if not STOP_REQUESTED.is_set():
                self.exit_code = 1 if isinstance(e, RankFailedError) else 2
                logger.error(f"{e}; saving the state: the same command continues from there")

    def end(self) -> None:
        """Wait for the other ranks, which end by themselves after their loops."""
        deadline = time.monotonic() + END_TIMEOUT
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, deadline - time.monotonic()))


class ShardedRankGroup(RankGroup):
    """Ranks that hold a part of each weight and gradient, for a model that one GPU cannot hold (--sharded).

    In a pass, the ranks collect the weights of a layer at a time, and each computes with data of its own. This is
    ZeRO-3 (arxiv.org/abs/1910.02054) by torch's FSDP2. Rank 0 also has the whole model in host memory, for the
    optimizer, evaluations and checkpoints. It collects gradients and sends weights, one tensor at a time.
    """

    def __init__(self, number: int, devices: list[torch.device]):
        super().__init__(number, devices)
        self.shards: list[torch.nn.Parameter] = []  # the sharded model's trained parameters, which are DTensors

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the sharded model: on rank 0 a copy, on the others the model itself.

        A block of layers moves to the device as a whole, and leaves this rank's part of it there.
        """
        from torch.distributed.fsdp import fully_shard  # this import and the one below take a second
        from torch.distributed.tensor import DeviceMesh

        worker = copy.deepcopy(model) if self.is_main else model
        with self.exchange():
            mesh = DeviceMesh.from_group(self.group or dist.group.WORLD, self.device.type)
            for module in [*find_blocks(worker), worker]:
                fully_shard(module, mesh=mesh)
        self.shards = list_trained(worker)
        return worker

    def align(self, batches: Iterable) -> Iterator:
        """Yield batches as long as all ranks have one, because each pass needs all ranks."""
        batches = super().align(batches)
        while self.all_continue((batch := next(batches, None)) is not None):
            yield batch

    @torch.no_grad()
    def average_gradients(self, model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
        """Move the sharded gradients, which FSDP has averaged, to the model of rank 0; return the mean of the loss."""
        with self.exchange():
            for param, shard in zip(list_trained(model), self.shards, strict=True):
                gradient = shard.grad
                shard.grad = None
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
        with super().catch_failure(), self.exchange():
            yield


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
