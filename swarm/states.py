"""State transfer: serving this peer's state, and downloading a state block by block from several donors.

A donor describes its state and keeps that copy while any peer downloads it. A joining peer requests descriptions from
several donors and selects those that agree. Each of them serves blocks from one queue, as fast as its uplink allows.
"""

import asyncio
import concurrent.futures
import contextlib
import copy
import ctypes
import hashlib
import logging
import math
import multiprocessing
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import AsyncIterator  # noqa: UP035 (hivemind does not recognise that of collections.abc)

import torch
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.averaging.allreduce import AveragingMode
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.optim.state_averager import TrainingStateAverager, dump_optimizer_state, load_optimizer_state
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, ValueWithExpiration, get_dht_time
from hivemind.utils.asyncio import aiter_with_timeout

from swarm.averager import VerifyingAverager
from swarm.downloads import (
    MAX_LINEAGE,
    Donor,
    InvalidStateError,
    MultiSourceDownload,
    StaleStateError,
    StateSnapshot,
    copy_flat,
    group_donors,
    parse_description,
    parse_request,
    select_agreed,
)
from swarm.gradients import GradientAverager
from swarm.plan import count_bits
from swarm.processes import STOP_REQUESTED

logger = logging.getLogger("swarm")

FIRST_ANSWER = 5.0  # seconds; timeout for the first message from a client
DOWNLOAD_PAUSE = 0.5  # seconds between two passes over the donors: short, because a state is current for one epoch
PROGRESS_PERIOD = 5.0  # seconds between two log lines about a running download
RELAY = math.inf  # the epoch that auxiliary peers declare: as new as any client's
DOWNLOAD_TRIES = 16  # passes over all donors until one has the requested epoch
LONE_TRIES = 3  # the first passes, in which a single donor's state is not loaded if other donors could confirm it

MAX_SERVED_PEERS, MAX_RELAYED_PEERS = 8, 2  # concurrent downloads from a trainer; from a client or an auxiliary peer
MAX_SNAPSHOTS = 2  # states that a donor keeps for downloads
UNUSED_TIMEOUT = 30.0  # seconds without a request until a snapshot is dropped
IN_USE = 5.0  # seconds since its last request in which a snapshot is not replaced, and a peer counts as served
MAX_SNAPSHOT_AGE = 1200.0  # seconds after which a snapshot is dropped in any case
MAX_DONORS = 8  # peers that are asked for descriptions at once, and then serve blocks: at home, each sends 10 Mbit/s


def list_params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters in the order of the optimizer's groups, in which peers exchange them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def initialize_optimizer_state_(optimizer: torch.optim.Optimizer) -> None:
    """Create the tensors of the optimizer's state as they are before its first step.

    hivemind needs these tensors, and creates them by a step with zero gradients at the full learning rate. That step
    counts in bias correction (note 8), and its weight decay moves the parameters or enters the momentum of SGD.
    """
    params = list_params(optimizer)
    gradients = [param.grad for param in params]
    settings = [dict(group) for group in optimizer.param_groups]
    for param in params:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}
    optimizer.step()
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
        state = optimizer.state[param]
        if "step" in state:  # torch's SGD, for example, counts no steps
            state["step"] = torch.zeros_like(state["step"]) if torch.is_tensor(state["step"]) else 0


def select_voters(peers: Iterable[PeerID], known: Sequence[bytes]) -> list[PeerID]:
    """Return the peers that decide which state is the swarm's: a random sample of the trusted ones.

    :param known: the ids of peers that are known to have worked
    """
    voters = [peer for peer in peers if peer.to_bytes() in known]
    return random.sample(voters, min(MAX_DONORS, len(voters)))


def make_step_key(digest: str) -> str:
    """Return the name by which peers request the step from the state of this lineage."""
    return f"{digest} step"


class StateAverager(TrainingStateAverager, VerifyingAverager):
    """A state averager that serves its state, and downloads one from several donors in bounded time.

    Some of the donors may fail. hivemind (note 25) retries forever, accepts states unchecked, and crashes on a
    truncated answer.

    In hivemind, clients serve no state. If all trainers were clients, no peer could join, and a peer that lost a round
    could not recover. Here, clients serve it to the peers that they have called. Auxiliary peers, which all clients
    call, relay it.
    """

    #: a peer that missed the group of the others would otherwise delay its next step by averaging_timeout
    gives_up_early = True
    #: the id of the group whose gradients the next step applies, or of this peer if it is alone; set by the optimizer
    group_id = b""
    #: the averager whose last step is served to peers that missed it; set by the optimizer
    grad_averager: GradientAverager | None = None
    #: the local steps, by which the model is ahead of the parameters here, or None; set by the optimizer
    local = None

    def __init__(self, *args, **kwargs):
        self._lock_step = threading.Lock()
        self._lineage = multiprocessing.Array(ctypes.c_char, MAX_LINEAGE)
        self._snapshots: list[StateSnapshot] = []
        self._lock_snapshots = asyncio.Lock()
        self._asked = {}  # the time of each served peer's last request
        # whether the averager's process requests the last step from the main process, and not the state
        self._wants_step = multiprocessing.Value(ctypes.c_bool)
        # for an auxiliary peer: the failures of each client, and the client that described each state
        self._broken, self._origins = Counter(), {}
        # the progress of the last download: bytes, elements, milliseconds
        self.received = multiprocessing.Array(ctypes.c_longlong, 3)
        super().__init__(*args, **kwargs)

    @property
    def lineage(self) -> str:
        """The hash of the groups that averaged each epoch. Peers with the same state share it.

        The averager's process can read it too.
        """
        return self._lineage.value.decode()

    @lineage.setter
    def lineage(self, value: str) -> None:
        """Set the lineage hash, in all processes."""
        self._lineage.value = value.encode()

    def donor_timeout(self) -> float:
        """Return the timeout of a donor, in seconds without a message."""
        return max(FIRST_ANSWER, self.dht.uplink.timeouts.next_chunk)

    def serve_state(self) -> None:
        """Start to serve this client's state to the peers that it has called; an auxiliary peer starts to relay."""
        if self.mode == AveragingMode.AUX:
            self.allow_state_sharing = True
        else:
            self._outer_pipe.send(("_serve_state_as_client", [], {}))

    async def _serve_state_as_client(self) -> None:
        """Serve the state and declare it in the DHT, forever; runs in the averager's process."""
        name = self._get_handle_name(self.prefix, "rpc_download_state")
        options = dict(input_protobuf_type=BytesValue, stream_output=True)
        await self._p2p.add_protobuf_handler(name, self.rpc_download_state, **options)
        self._allow_state_sharing.value = True
        while True:
            self._state_updated.clear()
            try:
                await self.dht.store(
                    f"{self._state_key}.clients",
                    subkey=self.peer_id.to_bytes(),
                    value=self.state_sharing_priority,
                    expiration_time=get_dht_time() + self.declare_state_period,
                    return_future=True,
                )
            except Exception as e:  # the DHT's process can raise any exception; the next attempt may succeed
                logger.debug(f"could not declare this client's state: {e!r}")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._state_updated.wait(), self.declare_state_period / 2)

    @property
    def state_sharing_priority(self) -> float:
        """The priority as a donor: the epoch, or RELAY for an auxiliary peer, which has no trainer's state itself."""
        return RELAY if self.mode == AveragingMode.AUX else super().state_sharing_priority

    @state_sharing_priority.setter
    def state_sharing_priority(self, value: float) -> None:
        """Set the priority like hivemind."""
        TrainingStateAverager.state_sharing_priority.fset(self, value)

    @property
    def _state_key(self) -> str:
        return self._matchmaking.group_key_manager.prefix

    async def _fetch_epochs(self, key: str) -> dict[PeerID, float]:
        """Return the epochs of the states that other peers declare."""
        entry = await self.dht.get(f"{self._state_key}.{key}", latest=True, return_future=True)
        declared = entry.value.items() if entry is not None and isinstance(entry.value, dict) else ()
        return {
            PeerID(peer): float(info.value)
            for peer, info in declared
            if isinstance(info, ValueWithExpiration)
            and isinstance(info.value, (int, float))
            and info.value >= 0  # no NaN
            and peer != self.peer_id.to_bytes()
        }

    async def rpc_download_state(
        self, request: BytesValue, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Serve a description or blocks of the state, or relay a client's state, at the uplink's pace."""
        fields = parse_request(request.value)
        if fields is None or not self.allow_state_sharing or self._is_busy_without(context.remote_id):
            return
        if self.mode == AveragingMode.AUX:
            answer = self._relay_client_state(request, fields, context)
        else:
            serve = self._stream_blocks if len(fields) == 3 else self._describe
            answer = serve(context.remote_id, *fields)
        async for message in self.dht.uplink.send(answer, is_round=False):
            yield message

    def _is_busy_without(self, peer: PeerID) -> bool:
        """Return whether this peer's uplink already serves enough other peers; if not, count this peer among them.

        A refused peer asks another donor, or retries.
        """
        now = time.monotonic()
        self._asked = {other: at for other, at in self._asked.items() if now - at < IN_USE}
        max_peers = MAX_SERVED_PEERS if self.mode == AveragingMode.NODE else MAX_RELAYED_PEERS
        if peer not in self._asked and len(self._asked) >= max_peers:
            return True
        self._asked[peer] = now
        return False

    async def _describe(
        self, peer: PeerID, epoch: int, digest: str | None = None
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Yield the description of a state of at least this epoch; with a lineage, of the step from that state."""
        description = {"epoch": -1, "lineage": ""}
        if self._state_sharing_priority.value >= epoch and (snapshot := await self._take_snapshot(peer, epoch, digest)):
            description = snapshot.description
        yield averaging_pb2.DownloadData(metadata=self.serializer.dumps(description))

    async def _take_snapshot(self, peer: PeerID, epoch: int, digest: str | None) -> StateSnapshot | None:
        """Return a snapshot of the current state, or the newest existing snapshot if there is no room for another.

        :param digest: the lineage of the state whose next step is requested instead. That step must be the last one,
            and no round may have started since; otherwise the result is None
        """
        async with self._lock_snapshots:
            for snapshot in self._snapshots:
                snapshot.used.pop(peer, None)  # a peer that requests a description has ended its last download
            unused = [snapshot for snapshot in self._snapshots if time.monotonic() - snapshot.last_use > IN_USE]
            lineage = self.lineage if digest is None else make_step_key(digest)
            snapshot = next((snapshot for snapshot in self._snapshots if snapshot.lineage == lineage), None)
            if snapshot is None and len(self._snapshots) >= MAX_SNAPSHOTS and not unused:
                states = [snapshot for snapshot in self._snapshots if not snapshot.lineage.endswith(make_step_key(""))]
                if digest is not None or not states:
                    return None
                snapshot = states[-1]
            if snapshot is None:
                self._wants_step.value = digest is not None
                metadata, tensors, infos = await self._get_current_state_from_host_process()
                metadata = self.serializer.loads(metadata)
                if metadata["epoch"] < epoch or digest is not None and metadata["lineage"] != lineage:
                    return None
                snapshot = await asyncio.to_thread(StateSnapshot, metadata, tensors, infos)
                if len(self._snapshots) >= MAX_SNAPSHOTS:
                    self._snapshots.remove(min(unused, key=lambda snapshot: snapshot.last_use))
                self._snapshots.append(snapshot)
                asyncio.create_task(self._drop_when_unused(snapshot))
            snapshot.used[peer] = time.monotonic()
            return snapshot

    async def _drop_when_unused(self, snapshot: StateSnapshot) -> None:
        while (end := min(snapshot.last_use + UNUSED_TIMEOUT, snapshot.taken + MAX_SNAPSHOT_AGE)) > time.monotonic():
            await asyncio.sleep(min(end - time.monotonic(), UNUSED_TIMEOUT))
        with contextlib.suppress(ValueError):  # a newer snapshot has replaced it
            self._snapshots.remove(snapshot)

    async def _stream_blocks(
        self, peer: PeerID, epoch: int, digest: str, numbers: list[int]
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        snapshots = [snapshot for snapshot in self._snapshots if (snapshot.epoch, snapshot.lineage) == (epoch, digest)]
        if not snapshots or not 0 <= min(numbers) <= max(numbers) < len(snapshots[0].blocks):
            yield averaging_pb2.DownloadData(metadata=self.serializer.dumps({"gone": True}))
            return
        for message in snapshots[0].give(numbers, self.state_compression, peer):
            yield message

    async def _relay_client_state(
        self, request: BytesValue, asked: list, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Relay the answer of a client; if it does not describe its state, try the next client."""
        is_description = len(asked) == 1
        if is_description:
            epochs = await self._fetch_epochs("clients")
            epochs = {peer: epoch for peer, epoch in epochs.items() if epoch < math.inf and peer != context.remote_id}
            # any client at or above the median: an untrusted one may claim the highest epoch
            usual = statistics.median(epochs.values()) if epochs else 0
            clients = [peer for peer, epoch in epochs.items() if epoch >= usual]
        else:
            clients = [peer for key, peer in self._origins.items() if key == (asked[0], asked[1])]
        # clients with the fewest failures come first
        for peer in sorted(clients, key=lambda peer: (self._broken[peer], random.random())):
            message_count = 0
            try:
                call = self.get_stub(self._p2p, peer, namespace=self.prefix).rpc_download_state(request)
                stream = await asyncio.wait_for(call, FIRST_ANSWER)
                # shorter than the timeout of the peer that waits for this answer
                async for message in aiter_with_timeout(
                    stream, FIRST_ANSWER if is_description else self.donor_timeout()
                ):
                    if is_description:
                        metadata = self.serializer.loads(message.metadata)
                        self._origins[int(metadata["epoch"]), str(metadata["lineage"])[:MAX_LINEAGE]] = peer
                        self._origins = dict(list(self._origins.items())[-2 * MAX_RELAYED_PEERS :])
                        message.metadata = self.serializer.dumps(metadata | {"origin": str(peer)})
                    message_count += 1
                    yield message
                if message_count:
                    return
            except Exception as e:  # untrusted bytes and a broken network can raise any exception
                logger.debug(f"could not relay the state of peer {peer}: {e!r}")
            self._broken[peer] += 1
            if message_count:
                return

    def step(self, *args, increment_epoch: bool = False, **kwargs):
        """Step like hivemind, but hold back downloads during the step, and update the lineage hash."""
        if not increment_epoch:
            return super().step(*args, **kwargs)
        # hivemind advances the epoch before the step: a download in between would get old parameters as new ones
        with self._lock_step:
            result = super().step(*args, increment_epoch=True, **kwargs)
            history = f"{self.lineage} {self.local_epoch} {self.group_id.hex()}"
            self.lineage = hashlib.sha256(history.encode()).hexdigest()[:16]
            self._declare_as_client()
            return result

    def _apply_optimizer_parameters_(self) -> None:
        if self.local is None:
            super()._apply_optimizer_parameters_()
        else:
            self.local.move_anchor(list_params(self.optimizer))

    def _declare_as_client(self) -> None:
        if self.client_mode:
            self._state_sharing_priority.value = self.local_epoch
            self._outer_pipe.send(("_trigger_declare_load_state", [], {}))

    def get_current_state(self):
        """Return a consistent copy of the state with its lineage hash, or the last step's gradients if requested."""
        with self._lock_step:
            if self._wants_step.value:
                return self._get_last_step()
            metadata, tensors, infos = super().get_current_state()
            return metadata | {"lineage": self.lineage}, copy_flat(tensors, infos), infos

    def _get_last_step(self):
        """Return the gradients of the last step; they exist until the next round starts."""
        if self.grad_averager is None or self.grad_averager.last_step is None:
            return {"epoch": -1, "lineage": ""}, [], []
        with self.grad_averager.get_tensors() as gradients:
            epoch, digest, group_id = self.grad_averager.last_step or (-1, "", b"")
            infos = [
                CompressionInfo.from_tensor(tensor, key=i, role=TensorRole.GRADIENT)
                for i, tensor in enumerate(gradients)
            ]
            metadata = {"epoch": epoch, "lineage": make_step_key(digest), "group": group_id}
            return metadata, copy_flat(gradients, infos), infos

    def load_state_from_peers(
        self, min_epoch: int = 0, donors: Sequence[bytes] = (), avoid: Sequence[bytes] = (), timeout: float = 600.0
    ) -> bool:
        """Download the newest state and load it, completely or not at all.

        :param min_epoch: the epoch to wait for, some seconds, before an earlier state is accepted
        :param donors: the ids of peers that are known to have worked: the state that more than half of them describe is
            loaded; if empty, no such peer is known, and the largest group decides
        :param avoid: the ids of peers to ask last
        :param timeout: the time limit for a whole state, in seconds
        :returns: whether parameters, optimizer, epoch and lineage are now the donors'
        """
        future = self.start_download(min_epoch, donors, avoid, timeout)
        targets = (*list_params(self.optimizer), *self.extra_tensors)
        elements = sum(map(torch.Tensor.numel, (*targets, *dump_optimizer_state(self.optimizer)[1])))
        loaded = self._wait_for_download(future, elements, "state")
        if loaded is None:
            return False
        self.apply_downloaded_state(*loaded)
        return True

    def download_missed_step(
        self, donors: Sequence[bytes], avoid: Sequence[bytes], timeout: float
    ) -> tuple[list[torch.Tensor], bytes] | None:
        """Download the averaged gradients of the step that other peers made from this peer's state.

        :param donors: the trusted peers, see `load_state_from_peers`
        :param avoid: the ids of peers not to ask
        :param timeout: the time limit for the download, in seconds
        :returns: the gradients and the id of the group that averaged them; None if no peer has them now
        """
        future, own = MPFuture(), (self.local_epoch, self.lineage)
        self._outer_pipe.send(
            ("_run_download", [future, "_download_step"], dict(own=own, donors=donors, avoid=avoid, timeout=timeout))
        )
        return self._wait_for_download(future, sum(map(torch.Tensor.numel, list_params(self.optimizer))), "step")

    def _wait_for_download(self, future: MPFuture, elements: int, content: str):
        """Return the download's result, or None if this peer should stop."""
        next_report = time.monotonic()
        while True:
            try:
                return future.result(timeout=0.5)
            except concurrent.futures.TimeoutError:
                received_bytes, received_elements, milliseconds = self.received
                if received_elements and time.monotonic() >= next_report + PROGRESS_PERIOD:
                    next_report = time.monotonic()
                    logger.info(
                        f"downloading the swarm's {content}: {received_elements / elements:.0%}, "
                        f"{received_bytes / 1e6:.1f} MB at {received_bytes * 8e-3 / max(1, milliseconds):.1f} Mbit/s"
                    )
                if STOP_REQUESTED.is_set():
                    return None

    def count_step_size_bits(self) -> int:
        """Return the download size of one step's gradients, in bits."""
        params = list_params(self.optimizer)
        infos = [CompressionInfo.from_tensor(param, role=TensorRole.GRADIENT) for param in params]
        return count_bits(params, self.state_compression, infos)

    def start_download(
        self, min_epoch: int = 0, donors: Sequence[bytes] = (), avoid: Sequence[bytes] = (), timeout: float = 600.0
    ) -> MPFuture:
        """Start to download a state, see `load_state_from_peers`, without waiting for it.

        :returns: a future of (metadata, tensors) for `apply_downloaded_state`, or of None if no peer sent its state.
            metadata["epoch"] is the state's epoch, metadata["donors"] the ids of the peers that sent it, and
            metadata["donor"] the id of the peer that sent most of it
        """
        future = MPFuture()
        # the epoch that clients declare may lag behind their state; an auxiliary peer has no state of its own to keep
        lowest = 0 if self.mode == AveragingMode.AUX else min(min_epoch, self.local_epoch)
        options = dict(min_epoch=min_epoch, lowest_epoch=lowest, donors=donors, avoid=avoid, timeout=timeout)
        self._outer_pipe.send(("_run_download", [future, "_download_state"], options))
        return future

    def apply_downloaded_state(self, metadata: dict, tensors: Sequence[torch.Tensor]) -> None:
        """Replace this peer's state by a downloaded one.

        :param metadata: the state's description, see `start_download`
        :param tensors: the state's parameters, then extra tensors, then the optimizer's tensors
        """
        targets = (*list_params(self.optimizer), *self.extra_tensors)
        # keep this peer's hyperparameters: correct peers have the same, and a malicious donor may send others
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        # an auxiliary peer has nothing to average and must not wait for the other peers' round
        averaged = contextlib.nullcontext() if self.mode == AveragingMode.AUX else self.lock_averaged_tensors
        with self._lock_step, torch.no_grad(), averaged:
            # clones, because torch keeps the tensors it loads, and each of them the memory of the whole download
            moments = [tensor.clone() for tensor in tensors[len(targets) :]]
            load_optimizer_state(self.optimizer, metadata["optimizer_metadata"], moments)
            for group, own in zip(self.optimizer.param_groups, settings, strict=True):
                group.update(own)
            for target, tensor in zip(targets, tensors, strict=False):
                target.copy_(tensor)
            self.set_epoch(metadata["epoch"])
            self.lineage = metadata["lineage"]
        if self.offload_optimizer:
            self._apply_optimizer_parameters_()
        if not self.reuse_tensors and self.mode != AveragingMode.AUX:
            self._load_local_tensors_into_averager_()

    def dump_state(self) -> dict:
        """Return a copy of the training state without gradients; call it between two steps.

        It does not wait for parameter averaging in the background. Some parameters may have the values from before the
        averaging, others those after it, as on a peer that loses its connection during the averaging.

        :returns: parameters (a list, in the order of the param groups), optimizer and scheduler (their state_dict),
            local_epoch and lineage; torch.load can read all of them with weights_only=True
        """
        with self.lock_optimizer, torch.no_grad():
            # the scheduler's epoch: a step in the background counts once it has finished and moved the schedule
            return {
                "parameters": [param.detach().clone() for param in list_params(self.optimizer)],
                "optimizer": copy.deepcopy(self.optimizer.state_dict()),
                "scheduler": copy.deepcopy(self.scheduler.state_dict()),
                "local_epoch": self.scheduler.last_epoch,
                "lineage": self.lineage,
            }

    def restore_state(self, state: dict) -> None:
        """Load a state from `dump_state`; learning rate and other options of this process stay, as the contract says.

        :raises ValueError: the tensors' shapes differ from this optimizer's; nothing was changed
        """
        own, params, moments = self.optimizer.state_dict(), list_params(self.optimizer), state["optimizer"]["state"]

        def shapes(parameters: list[torch.Tensor], moments: dict[int, dict]) -> list:
            # a single number may be a tensor at one time and a plain number at another, as LAMB's trust ratio
            return [tuple(tensor.shape) for tensor in parameters] + [
                {name: tuple(getattr(value, "shape", ())) for name, value in entry.items()}
                for _, entry in sorted(moments.items())
            ]

        if shapes(state["parameters"], moments) != shapes(params, own["state"]):
            raise ValueError(
                "the optimizer differs (--optim, --min_8bit_size, --local_steps), or the shapes of its tensors"
            )
        with self.lock_optimizer, self.lock_averaged_tensors, torch.no_grad():
            for param, saved in zip(params, state["parameters"], strict=True):
                param.copy_(saved)
            # a copy, because torch keeps the tensors it loads and changes them in place
            self.optimizer.load_state_dict({"state": copy.deepcopy(moments), "param_groups": own["param_groups"]})
            self.scheduler.load_state_dict({**state["scheduler"], "base_lrs": self.scheduler.base_lrs})
            self.set_epoch(state["local_epoch"])
            self.lineage = state.get("lineage", "")
        self._apply_optimizer_parameters_()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch and its learning rate, also to an earlier epoch; hivemind can only advance them."""
        if self.scheduler is not None:
            self.scheduler.last_epoch, self.scheduler._step_count = epoch - 1, epoch
            self.scheduler.step()
        self.local_epoch = epoch
        self._declare_as_client()

    async def _run_download(self, future: MPFuture, method: str, **options) -> None:
        """Run a download in the averager's process; the future's result is None if the download fails."""
        self.received[:] = 0, 0, 0
        try:
            future.set_result(await getattr(self, method)(**options))
        finally:
            if not future.done():
                future.set_result(None)

    async def _download_step(
        self, own: tuple[int, str], donors: Sequence[bytes], avoid: Sequence[bytes], timeout: float
    ) -> tuple[list[torch.Tensor], bytes] | None:
        epochs, failures = await self._fetch_epochs("all_averagers"), Counter()
        voters = select_voters(epochs, donors)
        others = [peer for peer, epoch in epochs.items() if own[0] < epoch < RELAY and peer.to_bytes() not in avoid]
        others = [peer for peer in others if peer not in voters]
        random.shuffle(others)
        peers = [*voters, *others][:MAX_DONORS]
        gradients = [(param, TensorRole.GRADIENT) for param in list_params(self.optimizer)]
        candidates = await self._ask_for_descriptions(peers, own, gradients, None, failures, voters)
        for group in select_agreed(group_donors(candidates, dict.fromkeys(peers, ())), voters):
            group_id = group[0].metadata.get("group")
            if group[0].key != (own[0], make_step_key(own[1])) or not isinstance(group_id, bytes):
                continue
            if tensors := await self._fetch_from(group, timeout, failures):
                return tensors, group_id[:MAX_LINEAGE]
        return None

    async def _download_state(
        self, timeout: float, min_epoch: int, lowest_epoch: int, donors: Sequence[bytes], avoid: Sequence[bytes]
    ) -> tuple[dict, list[torch.Tensor]] | None:
        failures: dict[PeerID, int] = Counter()
        own = [(tensor, TensorRole.PARAMETER) for tensor in list_params(self.optimizer)]
        own += [(tensor, TensorRole.UNSPECIFIED) for tensor in self.extra_tensors]
        for attempt in range(DOWNLOAD_TRIES):
            await asyncio.sleep(DOWNLOAD_PAUSE if attempt else 0)
            # on the last attempt, an earlier state is better than none
            first_epoch = min_epoch if attempt < DOWNLOAD_TRIES - 1 else lowest_epoch
            epochs = await self._fetch_epochs("all_averagers")
            # trainers that have the epoch rank before auxiliary peers, which relay it from a client
            voters = select_voters([peer for peer in epochs if failures[peer] < 2], donors)
            kinds = {peer: 2 if first_epoch <= epoch < RELAY else 1 for peer, epoch in epochs.items()}
            if self.mode != AveragingMode.CLIENT:
                # clients come last, because only the peers that they have called can reach them
                has_newest = any(min_epoch - 1 <= epoch < RELAY for epoch in epochs.values())
                clients = await self._fetch_epochs("clients")
                epochs |= {peer: clients[peer] for peer in clients if not has_newest or peer.to_bytes() in donors}
            ranks = {}
            for peer, epoch in epochs.items():
                if epoch >= lowest_epoch and failures[peer] < (2 if epoch < RELAY else 6):
                    is_donor, is_avoided = peer.to_bytes() in donors, peer.to_bytes() in avoid
                    rank = (-failures[peer], is_donor, not is_avoided, kinds.get(peer, 0), epoch, random.random())
                    ranks[peer] = rank
            if not ranks and attempt >= 3:
                break  # no peer can serve a state
            ranked = sorted(ranks, key=ranks.get, reverse=True)
            ranked = [*(peer for peer in voters if peer in ranks), *(peer for peer in ranked if peer not in voters)]
            batches = [ranked[at : at + MAX_DONORS] for at in range(0, len(ranked), MAX_DONORS)]
            # all voters are in the first batch, and batches without voters cannot decide
            for peers in batches[:1] if voters else batches:
                candidates = await self._ask_for_descriptions(
                    peers, [first_epoch], own, self.optimizer, failures, voters
                )
                groups = group_donors(candidates, {peer: rank[:-2] for peer, rank in ranks.items()})
                for group in select_agreed(groups, voters):
                    if not voters and len(group) == 1 and len(ranks) > 2 and attempt < LONE_TRIES:
                        continue
                    for donor in candidates:
                        if donor.key == group[0].key and donor not in group:
                            logger.warning(f"the state of peer {donor.peer} differs from others' of the same epoch")
                    if tensors := await self._fetch_from(group, timeout, failures):
                        senders = sorted((donor for donor in group if donor.elements), key=lambda d: -d.elements)
                        names = list(dict.fromkeys(donor.name for donor in senders))
                        return group[0].metadata | {"donor": names[0], "donors": names}, tensors
        return None

    async def _fetch_from(
        self, group: list[Donor], timeout: float, failures: dict[PeerID, int]
    ) -> list[torch.Tensor] | None:
        """Download the state that all these donors have; return None if all of them fail."""
        self.received[:] = 0, 0, 0
        download = MultiSourceDownload(group, self._request, self.donor_timeout, self.state_compression, self.received)
        note_failure = partial(self._note_failure, failures)
        try:
            if await asyncio.wait_for(download.fetch(note_failure), timeout):
                return download.tensors
        except TimeoutError:
            for donor in download.donors:
                note_failure(donor.peer, InvalidStateError(f"not complete after {timeout:.0f} s"))
        return None

    def _note_failure(self, failures: dict[PeerID, int], peer: PeerID, error: Exception) -> None:
        failures[peer] += 1
        if isinstance(error, InvalidStateError):
            reason = str(error)
        else:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.info(f"the state of peer {peer} cannot be used ({reason}), trying other donors")

    async def _ask_for_descriptions(
        self,
        peers: Sequence[PeerID],
        request: Sequence,
        wanted: Sequence[tuple[torch.Tensor, TensorRole]],
        optimizer: torch.optim.Optimizer | None,
        failures: dict[PeerID, int],
        voters: Sequence[PeerID],
    ) -> list[Donor]:
        """Return the peers that describe the requested state, see `parse_request` and `parse_description`.

        Once a peer has described it, the others get as much time again, and at least 1 s. With voters, more than half
        of them must have described it first, because a malicious peer may be quick.
        """

        async def ask(peer: PeerID) -> Donor:
            stream = await self._request(peer, request)
            try:
                async for message in stream:
                    metadata = self.serializer.loads(message.metadata)
                    return parse_description(peer, metadata, request[0], wanted, optimizer)
                raise InvalidStateError("the peer sent no description")
            finally:
                await stream.aclose()

        tasks = {asyncio.create_task(asyncio.wait_for(ask(peer), self.donor_timeout())): peer for peer in peers}
        donors, pending = [], set(tasks)
        start, deadline = time.monotonic(), math.inf
        try:
            while pending and (now := time.monotonic()) < deadline:
                timeout = None if deadline == math.inf else deadline - now
                done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        donors.append(task.result())
                    except StaleStateError:
                        continue
                    except Exception as e:  # untrusted bytes and a broken network can raise any exception
                        self._note_failure(failures, tasks[task], e)
                has_enough = not voters or 2 * sum(donor.peer in voters for donor in donors) > len(voters)
                if donors and has_enough and deadline == math.inf:
                    now = time.monotonic()
                    deadline = now + max(1.0, now - start)
        finally:
            for task in tasks:
                task.cancel()
        return donors

    async def _request(self, peer: PeerID, request: Sequence) -> AsyncIterator[averaging_pb2.DownloadData]:
        stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
        stream = await stub.rpc_download_state(BytesValue(value=self.serializer.dumps(list(request))))
        return self.dht.uplink.receive(stream)
