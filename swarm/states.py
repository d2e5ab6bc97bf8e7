"""States: given to peers that join, and taken over block by block from all donors that have the same one.

A donor describes its state and keeps that very copy of it for as long as somebody fetches it. Who joins asks several
for their description, takes those that agree, and lets each of them work on one queue of blocks as fast as its line is.
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
from swarm.rounds import VerifyingAverager

logger = logging.getLogger("swarm")

FIRST_ANSWER = 5.0  # seconds until a client that is asked for its state begins to answer
DOWNLOAD_PAUSE = 0.5  # seconds between two passes over the donors: short, as a state is good for one epoch
PROGRESS_PERIOD = 5.0  # seconds between two lines about a running download
RELAY = math.inf  # the epoch that auxiliary peers declare: as new as any client's
DOWNLOAD_TRIES = 16  # passes over all donors until one has the epoch that is wanted
LONE_TRIES = 3  # of these in which a state is not taken that one donor alone has, where others could agree

MAX_GIVING, MAX_GIVING_RELAYED = 8, 2  # peers that a trainer gives states to at once; a client, or an auxiliary peer
MAX_SNAPSHOTS = 2  # states that a donor keeps for those who fetch them
KEPT, IN_USE = 30.0, 5.0  # seconds without a request until a snapshot is dropped, and until it makes room for another
LONGEST_KEPT = 1200.0  # seconds after which a snapshot is dropped in any case
DONORS = 8  # peers that are asked to describe their state at once, and give it: each sends 10 Mbit/s at home


def list_params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer, in the order of its groups, in which peers exchange them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def initialize_optimizer_state_(optimizer: torch.optim.Optimizer) -> None:
    """Make the tensors of the optimizer's state, as before its first step.

    hivemind needs them, and makes them by a step with zero gradients at the full learning rate: it counts in bias
    correction (note 8), and weight decay moves the parameters, or gets into the momentum of SGD.
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
        if "step" in state:  # torch's SGD, for one, counts none
            state["step"] = torch.zeros_like(state["step"]) if torch.is_tensor(state["step"]) else 0


def select_voters(peers: Iterable[PeerID], known: Sequence[bytes]) -> list[PeerID]:
    """Those of these peers that decide which state is the swarm's: some of the known ones, at random."""
    voters = [peer for peer in peers if peer.to_bytes() in known]
    return random.sample(voters, min(DONORS, len(voters)))


def make_step_key(digest: str) -> str:
    """Return the name of the step from the state of this lineage; states are requested by lineage."""
    return f"{digest} step"


class StateAverager(TrainingStateAverager, VerifyingAverager):
    """Gives states to peers that join, and takes them: from several donors, of which some may fail, in bounded time.

    hivemind (note 25) tries forever, believes what it gets, and ends with the first answer that is truncated.

    Clients give no state in hivemind: where all trainers are clients nobody could join, and who has lost a round would
    be lost. Here they give it to peers that they have called, and auxiliary peers, which all clients call, pass it on.
    """

    #: who has missed the others' group would wait here for averaging_timeout, and its next step with it
    gives_up_early = True
    #: id of the group whose gradient the next step takes, or of this peer that is alone; set by the optimizer
    group_id = b""
    #: whose last step is given to those who have missed it; set by the optimizer
    grad_averager: GradientAverager | None = None
    #: the steps of this peer's own, with which its model is ahead of the parameters here; set by the optimizer
    local = None

    def __init__(self, *args, **kwargs):
        self._lock_step = threading.Lock()
        self._lineage = multiprocessing.Array(ctypes.c_char, MAX_LINEAGE)
        # kept for those who fetch them, and to whom states are given: when each has asked last
        self._snapshots: list[StateSnapshot] = []
        self._lock_snapshots, self._asked = asyncio.Lock(), {}
        # what the averager's process asks the other one for: a state, or the last step
        self._wants_step = multiprocessing.Value(ctypes.c_bool)
        # an auxiliary peer's: how often clients have broken off, and who has described which state
        self._broken, self._origins = Counter(), {}
        # of the last download: bytes, elements, milliseconds
        self.received = multiprocessing.Array(ctypes.c_longlong, 3)
        super().__init__(*args, **kwargs)

    @property
    def lineage(self) -> str:
        """Names the common history of peers whose state is the same: a digest of the groups that each epoch was made
        with. Known to the averager's process too."""
        return self._lineage.value.decode()

    @lineage.setter
    def lineage(self, value: str) -> None:
        self._lineage.value = value.encode()

    def donor_timeout(self) -> float:
        """Seconds without a message after which a donor is given up."""
        return max(FIRST_ANSWER, self.dht.uplink.timeouts.next_chunk)

    def serve_state(self) -> None:
        """From now on give this client's state to whom it has called, or, if auxiliary, pass on those of clients."""
        if self.mode == AveragingMode.AUX:
            self.allow_state_sharing = True
        else:
            self._outer_pipe.send(("_serve_state_as_client", [], {}))

    async def _serve_state_as_client(self) -> None:
        """Runs in the process of a client's averager, forever."""
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
            except Exception as e:  # of whatever kind the DHT's process raises: the next one may work
                logger.debug(f"could not announce this client's state: {e!r}")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._state_updated.wait(), self.declare_state_period / 2)

    @property
    def state_sharing_priority(self) -> float:
        # not the epoch that an auxiliary peer is at: its own state is no trainer's
        return RELAY if self.mode == AveragingMode.AUX else super().state_sharing_priority

    @state_sharing_priority.setter
    def state_sharing_priority(self, value: float) -> None:
        TrainingStateAverager.state_sharing_priority.fset(self, value)

    @property
    def _state_key(self) -> str:
        return self._matchmaking.group_key_manager.prefix

    async def _fetch_epochs(self, key: str) -> dict[PeerID, float]:
        """The epochs of the states that other peers say they give."""
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
        asked = parse_request(request.value)
        if asked is None or not self.allow_state_sharing or self._is_busy_without(context.remote_id):
            return
        if self.mode == AveragingMode.AUX:
            answer = self._relay_client_state(request, asked, context)
        else:
            give = self._stream_blocks if len(asked) == 3 else self._describe
            answer = give(context.remote_id, *asked)
        async for message in self.dht.uplink.send(answer, is_round=False):
            yield message

    def _is_busy_without(self, peer: PeerID) -> bool:
        """Whether a volunteer's line at home serves enough other peers; they ask another one, or again."""
        now = time.monotonic()
        self._asked = {other: at for other, at in self._asked.items() if now - at < IN_USE}
        most = MAX_GIVING if self.mode == AveragingMode.NODE else MAX_GIVING_RELAYED
        if peer not in self._asked and len(self._asked) >= most:
            return True
        self._asked[peer] = now
        return False

    async def _describe(
        self, peer: PeerID, epoch: int, digest: str | None = None
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Of a state of at least this epoch; or, where a lineage is named, of the step from this very state."""
        description = {"epoch": -1, "lineage": ""}
        if self._state_sharing_priority.value >= epoch and (snapshot := await self._take_snapshot(peer, epoch, digest)):
            description = snapshot.description
        yield averaging_pb2.DownloadData(metadata=self.serializer.dumps(description))

    async def _take_snapshot(self, peer: PeerID, epoch: int, digest: str | None) -> StateSnapshot | None:
        """The present state, or the last one that was kept when there is no room for another; or a step, if that is
        the last one and no round has begun since."""
        async with self._lock_snapshots:
            for snapshot in self._snapshots:
                snapshot.used.pop(peer, None)  # who asks for a description fetches nothing else any more
            unused = [snapshot for snapshot in self._snapshots if time.monotonic() - snapshot.last_use > IN_USE]
            wanted = self.lineage if digest is None else make_step_key(digest)
            snapshot = next((snapshot for snapshot in self._snapshots if snapshot.lineage == wanted), None)
            if snapshot is None and len(self._snapshots) >= MAX_SNAPSHOTS and not unused:
                if digest is not None:
                    return None
                snapshot = self._snapshots[-1]
            if snapshot is None:
                self._wants_step.value = digest is not None
                metadata, tensors, infos = await self._get_current_state_from_host_process()
                metadata = self.serializer.loads(metadata)
                if metadata["epoch"] < epoch or digest is not None and metadata["lineage"] != wanted:
                    return None
                snapshot = await asyncio.to_thread(StateSnapshot, metadata, tensors, infos)
                if len(self._snapshots) >= MAX_SNAPSHOTS:
                    self._snapshots.remove(min(unused, key=lambda snapshot: snapshot.last_use))
                self._snapshots.append(snapshot)
                asyncio.create_task(self._drop_when_unused(snapshot))
            snapshot.used[peer] = time.monotonic()
            return snapshot

    async def _drop_when_unused(self, snapshot: StateSnapshot) -> None:
        while (left := min(snapshot.last_use + KEPT, snapshot.taken + LONGEST_KEPT) - time.monotonic()) > 0:
            await asyncio.sleep(min(left, KEPT))
        with contextlib.suppress(ValueError):  # it has made room for another
            self._snapshots.remove(snapshot)

    async def _stream_blocks(
        self, peer: PeerID, epoch: int, digest: str, numbers: list[int]
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        kept = [snapshot for snapshot in self._snapshots if (snapshot.epoch, snapshot.lineage) == (epoch, digest)]
        if not kept or not 0 <= min(numbers) <= max(numbers) < len(kept[0].blocks):
            yield averaging_pb2.DownloadData(metadata=self.serializer.dumps({"gone": True}))
            return
        for message in kept[0].give(numbers, self.state_compression, peer):
            yield message

    async def _relay_client_state(
        self, request: BytesValue, asked: list, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """The answer of a client; to who asks for a description that of another one when it gives none."""
        is_description = len(asked) == 1
        if is_description:
            epochs = await self._fetch_epochs("clients")
            epochs = {peer: epoch for peer, epoch in epochs.items() if epoch < math.inf and peer != context.remote_id}
            # any of those who are not behind, as a stranger may boast of the highest epoch; first who never failed
            usual = statistics.median(epochs.values()) if epochs else 0
            clients = [peer for peer, epoch in epochs.items() if epoch >= usual]
        else:
            clients = [peer for key, peer in self._origins.items() if key == (asked[0], asked[1])]
        for peer in sorted(clients, key=lambda peer: (self._broken[peer], random.random())):
            passed = 0
            try:
                call = self.get_stub(self._p2p, peer, namespace=self.prefix).rpc_download_state(request)
                stream = await asyncio.wait_for(call, FIRST_ANSWER)
                # sooner than who is waiting here gives up
                async for message in aiter_with_timeout(
                    stream, FIRST_ANSWER if is_description else self.donor_timeout()
                ):
                    if is_description:
                        metadata = self.serializer.loads(message.metadata)
                        self._origins[int(metadata["epoch"]), str(metadata["lineage"])[:MAX_LINEAGE]] = peer
                        self._origins = dict(list(self._origins.items())[-2 * MAX_GIVING_RELAYED :])
                        message.metadata = self.serializer.dumps(metadata | {"origin": str(peer)})
                    passed += 1
                    yield message
                if passed:
                    return
            except Exception as e:  # a stranger's bytes and a broken network raise whatever they like
                logger.debug(f"the state of {peer} could not be passed on: {e!r}")
            self._broken[peer] += 1
            if passed:
                return

    def step(self, *args, increment_epoch: bool = False, **kwargs):
        if not increment_epoch:
            return super().step(*args, **kwargs)
        # hivemind counts the epoch first and steps then: who downloads in between gets the old parameters as new ones
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
        with self._lock_step:
            if self._wants_step.value:
                return self._get_last_step()
            metadata, tensors, infos = super().get_current_state()
            return metadata | {"lineage": self.lineage}, copy_flat(tensors, infos), infos

    def _get_last_step(self):
        """The gradients of the last step while they are there, which is until the next round begins."""
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
        """Download the state of the peers that are furthest, and take it over completely or not at all.

        :param min_epoch: wait some seconds for a state of this epoch before taking an earlier one
        :param donors: ids of peers that are known to have worked: more than half of them have to describe the same
            state, which is the one that is loaded; empty: no such peer is known, and the largest group decides
        :param avoid: ids of peers to ask last
        :param timeout: seconds for a whole state
        :returns: whether parameters, optimizer, epoch and lineage are now that peer's
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
        """Download the gradients of the step that others have made from this very state.

        :param donors: as for load_state_from_peers
        :param avoid: ids of peers not to ask
        :returns: them, and the id of the group that averaged them; None: nobody has them, or not any more
        """
        future, own = MPFuture(), (self.local_epoch, self.lineage)
        self._outer_pipe.send(
            ("_run_download", [future, "_download_step"], dict(own=own, donors=donors, avoid=avoid, timeout=timeout))
        )
        return self._wait_for_download(future, sum(map(torch.Tensor.numel, list_params(self.optimizer))), "step")

    def _wait_for_download(self, future: MPFuture, elements: int, content: str):
        """The download's result, or None when this peer is asked to stop."""
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
        """What the gradients of a step take when they are downloaded."""
        params = list_params(self.optimizer)
        infos = [CompressionInfo.from_tensor(param, role=TensorRole.GRADIENT) for param in params]
        return count_bits(params, self.state_compression, infos)

    def start_download(
        self, min_epoch: int = 0, donors: Sequence[bytes] = (), avoid: Sequence[bytes] = (), timeout: float = 600.0
    ) -> MPFuture:
        """Begin to download a state, see `load_state_from_peers`, without waiting for it.

        :returns: a future of (metadata, tensors) for `apply_downloaded_state`, or of None if no peer sent its state.
            metadata["epoch"] is the state's epoch, metadata["donors"] the ids of the peers that sent it, and
            metadata["donor"] the id of the peer that sent most of it
        """
        future = MPFuture()
        # what clients declare may lag behind what they have, and an auxiliary peer has no state of its own to keep
        lowest = 0 if self.mode == AveragingMode.AUX else min(min_epoch, self.local_epoch)
        options = dict(min_epoch=min_epoch, lowest_epoch=lowest, donors=donors, avoid=avoid, timeout=timeout)
        self._outer_pipe.send(("_run_download", [future, "_download_state"], options))
        return future

    def apply_downloaded_state(self, metadata: dict, tensors: Sequence[torch.Tensor]) -> None:
        """Make a downloaded state this peer's own."""
        targets = (*list_params(self.optimizer), *self.extra_tensors)
        # the run's own: all peers have the same, unless one lies
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        # an auxiliary peer has nothing to average, and must not wait here for a round of the others
        averaged = contextlib.nullcontext() if self.mode == AveragingMode.AUX else self.lock_averaged_tensors
        with self._lock_step, torch.no_grad(), averaged:
            # torch would keep these very tensors, and with each the memory of the whole download
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
        """A copy of all that the next step depends on but the gradients, at any moment between two steps.

        Without waiting for an averaging of parameters that runs in the background: for some of them the copy may hold
        the values before it, for others those after it, as all peers do that lose their connection in it.

        :returns: parameters (a list, in the order of the param groups), optimizer and scheduler (their state_dict),
            local_epoch, lineage; all of it of types that torch.load reads with weights_only=True
        """
        with self.lock_optimizer, torch.no_grad():
            # a step in the background counts when it has ended, which is when it moves the schedule on
            return {
                "parameters": [param.detach().clone() for param in list_params(self.optimizer)],
                "optimizer": copy.deepcopy(self.optimizer.state_dict()),
                "scheduler": copy.deepcopy(self.scheduler.state_dict()),
                "local_epoch": self.scheduler.last_epoch,
                "lineage": self.lineage,
            }

    def restore_state(self, state: dict) -> None:
        """Take over what `dump_state` returned. Learning rate and other options remain those of this process, which the
        run's contract names.

        :raises ValueError: the tensors have other shapes than this optimizer's; nothing has changed then
        """
        own, params, moments = self.optimizer.state_dict(), list_params(self.optimizer), state["optimizer"]["state"]

        def shapes(parameters: list[torch.Tensor], moments: dict[int, dict]) -> list:
            # single numbers are tensors at one time and not at another: LAMB's trust ratio
            return [tuple(tensor.shape) for tensor in parameters] + [
                {name: tuple(getattr(value, "shape", ())) for name, value in entry.items()}
                for _, entry in sorted(moments.items())
            ]

        if shapes(state["parameters"], moments) != shapes(params, own["state"]):
            raise ValueError(
                "its optimizer differs (--optim, --min_8bit_size, --local_steps), or its tensors' shapes do"
            )
        with self.lock_optimizer, self.lock_averaged_tensors, torch.no_grad():
            for param, saved in zip(params, state["parameters"], strict=True):
                param.copy_(saved)
            # a copy: torch would keep these tensors and change them in place
            self.optimizer.load_state_dict({"state": copy.deepcopy(moments), "param_groups": own["param_groups"]})
            self.scheduler.load_state_dict({**state["scheduler"], "base_lrs": self.scheduler.base_lrs})
            self.set_epoch(state["local_epoch"])
            self.lineage = state.get("lineage", "")
        self._apply_optimizer_parameters_()

    def set_epoch(self, epoch: int) -> None:
        """Move epoch and learning rate to this epoch, also back; hivemind's only ever go forward."""
        if self.scheduler is not None:
            self.scheduler.last_epoch, self.scheduler._step_count = epoch - 1, epoch
            self.scheduler.step()
        self.local_epoch = epoch
        self._declare_as_client()

    async def _run_download(self, future: MPFuture, method: str, **options) -> None:
        """Runs in the averager's process; None is the result of a download that fails in whatever way."""
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
        asked = [*voters, *others][:DONORS]
        wanted = [(param, TensorRole.GRADIENT) for param in list_params(self.optimizer)]
        found = await self._ask_for_descriptions(asked, own, wanted, None, failures, voters)
        for group in select_agreed(group_donors(found, dict.fromkeys(asked, ())), voters):
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
            await asyncio.sleep(DOWNLOAD_PAUSE * bool(attempt))
            # the last time, a state that is older than wanted is better than none
            wanted = min_epoch if attempt < DOWNLOAD_TRIES - 1 else lowest_epoch
            epochs = await self._fetch_epochs("all_averagers")
            # trainers that have what is wanted go before auxiliary peers, which have it from a client
            voters = select_voters([peer for peer in epochs if failures[peer] < 2], donors)
            kinds = {peer: 2 if wanted <= epoch < RELAY else 1 for peer, epoch in epochs.items()}
            if self.mode != AveragingMode.CLIENT:
                # clients last, as only those reach them whom they have called
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
                break  # nobody is there, or nobody who can give a state
            ranked = sorted(ranks, key=ranks.get, reverse=True)
            ranked = [*(peer for peer in voters if peer in ranks), *(peer for peer in ranked if peer not in voters)]
            # those who are known to have worked are among the first to be asked; the others cannot decide
            batches = [ranked[at : at + DONORS] for at in range(0, len(ranked), DONORS)][: 1 if voters else None]
            for peers in batches:
                found = await self._ask_for_descriptions(peers, [wanted], own, self.optimizer, failures, voters)
                groups = group_donors(found, {peer: rank[:-2] for peer, rank in ranks.items()})
                for group in select_agreed(groups, voters):
                    if not voters and len(group) == 1 and len(ranks) > 2 and attempt < LONE_TRIES:
                        continue
                    for donor in found:
                        if donor.key == group[0].key and donor not in group:
                            logger.warning(f"the state of peer {donor.peer} differs from others' of the same epoch")
                    if tensors := await self._fetch_from(group, timeout, failures):
                        givers = sorted((donor for donor in group if donor.elements), key=lambda d: -d.elements)
                        names = list(dict.fromkeys(donor.name for donor in givers))
                        return group[0].metadata | {"donor": names[0], "donors": names}, tensors
        return None

    async def _fetch_from(
        self, group: list[Donor], timeout: float, failures: dict[PeerID, int]
    ) -> list[torch.Tensor] | None:
        """What all of these donors have, unless all of them fail."""
        self.received[:] = 0, 0, 0
        download = MultiSourceDownload(group, self._request, self.donor_timeout, self.state_compression, self.received)
        note_failure = partial(self._note_failure, failures)
        try:
            if await asyncio.wait_for(download.fetch(note_failure), timeout):
                return download.tensors
        except TimeoutError:
            for donor in download.donors:
                note_failure(donor.peer, InvalidStateError(f"it has not come within {timeout:.0f} s"))
        return None

    def _note_failure(self, failures: dict[PeerID, int], peer: PeerID, error: Exception) -> None:
        failures[peer] += 1
        reason = (
            str(error) if isinstance(error, InvalidStateError) else f"{type(error).__name__}: {error}".splitlines()[0]
        )
        logger.info(f"the state of peer {peer} cannot be used ({reason}), asking another one")

    async def _ask_for_descriptions(
        self,
        peers: Sequence[PeerID],
        request: Sequence,
        wanted: Sequence[tuple[torch.Tensor, TensorRole]],
        optimizer: torch.optim.Optimizer | None,
        failures: dict[PeerID, int],
        voters: Sequence[PeerID],
    ) -> list[Donor]:
        """Those of these peers that have what is asked for, see parse_request and parse_description; nobody waits much
        longer than for the first of them, or for more than half of the voters: a malicious peer may be quick."""

        async def ask(peer: PeerID) -> Donor:
            stream = await self._request(peer, request)
            try:
                async for message in stream:
                    metadata = self.serializer.loads(message.metadata)
                    return parse_description(peer, metadata, request[0], wanted, optimizer)
                raise InvalidStateError("it sent none")
            finally:
                await stream.aclose()

        asked = {asyncio.create_task(asyncio.wait_for(ask(peer), self.donor_timeout())): peer for peer in peers}
        donors, pending, start, deadline = [], set(asked), time.monotonic(), math.inf
        try:
            while pending and (now := time.monotonic()) < deadline:
                timeout = None if deadline == math.inf else deadline - now
                done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        donors.append(task.result())
                    except StaleStateError:
                        continue
                    except Exception as e:  # a stranger's bytes and a broken network raise whatever they like
                        self._note_failure(failures, asked[task], e)
                has_enough = not voters or 2 * sum(donor.peer in voters for donor in donors) > len(voters)
                if donors and has_enough and deadline == math.inf:
                    now = time.monotonic()
                    deadline = now + max(1.0, now - start)
        finally:
            for task in asked:
                task.cancel()
        return donors

    async def _request(self, peer: PeerID, request: Sequence) -> AsyncIterator[averaging_pb2.DownloadData]:
        stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
        stream = await stub.rpc_download_state(BytesValue(value=self.serializer.dumps(list(request))))
        return self.dht.uplink.receive(stream)
