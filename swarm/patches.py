"""All monkey patches of hivemind, and the variables of its daemon. Each docstring names the processes it affects."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

from hivemind.averaging import allreduce, averager, matchmaking
from hivemind.averaging.control import StepControl
from hivemind.dht import dht, node
from hivemind.p2p import P2P, P2PHandlerError, p2p_daemon
from hivemind.p2p.p2p_daemon_bindings import p2pclient
from hivemind.proto.p2pd_pb2 import RPCError
from hivemind.utils import MPFuture, switch_to_uvloop
from hivemind.utils.crypto import RSAPrivateKey

from swarm.guard import RobustReducer, VerifyingContainer
from swarm.matchmaking import EarlyStartMatchmaking, NonBlockingKeyManager

ENVIRONMENT = {
    "LIBP2P_TCP_REUSEPORT": "false",  # otherwise, two peers that dial each other at the same moment can fail (note 6)
    "GOMAXPROCS": "1",  # on more cores, p2pd often relays only 128 kB (note 48); one is enough for 0.5 GB/s
    "GOGC": "50",  # otherwise, p2pd uses 20 MB more for the same 24 MB of live data (note 90)
}
END_OF_STREAM = "end of stream"  # the last message of a stream
ADD_STREAM_HANDLER, CALL_STREAM_HANDLER = P2P._add_protobuf_stream_handler, P2P.iterate_protobuf_handler


class ResilientControlClient(p2pclient.ControlClient):
    """A connection to the daemon that survives the cancellation of a request whose answer just arrives (note 80)."""

    async def _read_from_persistent_conn(self, reader: asyncio.StreamReader) -> None:
        while not reader.at_eof():
            with contextlib.suppress(asyncio.InvalidStateError):
                await super()._read_from_persistent_conn(reader)


class CancellableStep(StepControl):
    """A step control whose step always ends when it is cancelled."""

    def cancel(self) -> bool:
        """Cancel the step, and only then notify the averager's process, which may check it in between (note 84)."""
        is_cancelled = MPFuture.cancel(self)
        self._trigger.cancel()
        if not self._cancel.done():  # `leave` and `finish_background` may both cancel it
            self._cancel.set_result(None)
        return is_cancelled


class Requests:
    """The requests of a stream, of which a read that is cancelled loses none."""

    def __init__(self, requests: AsyncIterator):
        self.requests, self.next = requests, None

    def __aiter__(self):
        return self

    async def __anext__(self):
        self.next = self.next or asyncio.ensure_future(anext(self.requests))
        await asyncio.wait([self.next])
        request, self.next = self.next, None
        return request.result()

    def close(self) -> None:
        """End a read that nothing waits for."""
        if self.next:
            self.next.cancel()


async def add_whole_stream_handler(self: P2P, name: str, handler, *args, **kwargs) -> None:
    """Add a handler of streams that ends with a last message, after which the caller closes the stream (note 87). Until
    then its requests are dropped: hivemind would not notice the end, and a full stream blocks the others (note 91)."""

    async def handle(requests, context):
        requests = Requests(requests)
        try:
            try:
                async for answer in handler(requests, context):
                    yield answer
                yield RPCError(message=END_OF_STREAM)
            except Exception as e:  # for the caller
                yield RPCError(message=str(e))
            async for _ in requests:
                pass
            await asyncio.sleep(60.0)  # hivemind cancels this when the caller closes the stream
        finally:
            requests.close()

    await ADD_STREAM_HANDLER(self, name, handle, *args, **kwargs)


async def call_whole_stream_handler(self: P2P, *args):
    """Call a handler of streams, and return the iterator of its answers, which closes the stream at the last one."""
    answers = await CALL_STREAM_HANDLER(self, *args)

    async def read():
        async with contextlib.aclosing(answers):
            try:
                async for answer in answers:
                    yield answer
            except P2PHandlerError as e:
                if not str(e).endswith(END_OF_STREAM):
                    raise

    return read()


def install() -> None:
    """Replace classes and settings of this process and its helpers; must be called before the first connection."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # With relay discovery, p2pd waits three minutes for a fourth relay (note 30); it contacts fixed relays at once.
    P2P.FORCE_REACHABILITY_MAPPING["relayed"] = {"forceReachabilityPrivate": 1, "relayDiscovery": 0}
    P2P.create.__func__.__kwdefaults__["startup_timeout"] = 60  # seconds, see note 13
    # New identities use the key that signs this process's records: its owner is the peer that the transport verifies.
    p2p_daemon.RSAPrivateKey = RSAPrivateKey.process_wide
    p2pclient.ControlClient = ResilientControlClient
    P2P._add_protobuf_stream_handler = add_whole_stream_handler
    P2P.iterate_protobuf_handler = call_whole_stream_handler
    averager.StepControl = CancellableStep


def make_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop that holds its unfinished tasks, which asyncio itself does not (notes 81 and 86)."""
    loop, tasks = switch_to_uvloop(), set()

    def make_task(loop: asyncio.AbstractEventLoop, coroutine, **options) -> asyncio.Task:
        tasks.add(task := asyncio.Task(coroutine, loop=loop, **options))
        task.add_done_callback(tasks.discard)
        return task

    loop.set_task_factory(make_task)
    return loop


def install_in_dht_process(protocol_class: type, node_class: type) -> None:
    """Replace the DHT's protocol and node classes by these subclasses, in the DHT's process only."""
    node.DHTProtocol, dht.DHTNode, dht.switch_to_uvloop = protocol_class, node_class, make_event_loop


def install_in_averager_process() -> None:
    """Replace the matchmaking (notes 11, 22, 78, 82, 83, 85) and all-reduce classes, in an averager's process only."""
    averager.Matchmaking, averager.switch_to_uvloop = EarlyStartMatchmaking, make_event_loop
    matchmaking.GroupKeyManager = NonBlockingKeyManager
    allreduce.TensorPartContainer = VerifyingContainer
    allreduce.TensorPartReducer = RobustReducer


def replace_client(client: type[p2pclient.Client]) -> None:
    """Make this process and its helpers call peers through this subclass, which in a closed run shows a credential."""
    p2pclient.Client = client
