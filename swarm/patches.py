"""All monkey patches of hivemind, and the variables of its daemon. The functions at the end install them."""

import asyncio
import contextlib
import hashlib
import os
import threading
import weakref

from hivemind.averaging import allreduce, averager, matchmaking
from hivemind.averaging.control import StepControl
from hivemind.dht import dht, node
from hivemind.p2p import P2P, P2PContext, P2PHandlerError, PeerID, p2p_daemon
from hivemind.p2p.p2p_daemon_bindings import p2pclient
from hivemind.proto.p2pd_pb2 import RPCError
from hivemind.utils import MPFuture, MSGPackSerializer, as_aiter, switch_to_uvloop
from hivemind.utils.crypto import RSAPrivateKey

from swarm.guard import RobustReducer, VerifyingContainer
from swarm.matchmaking import EarlyStartMatchmaking, NonBlockingKeyManager
from utils import MAX_RECORD_BYTES

ENVIRONMENT = {
    "LIBP2P_TCP_REUSEPORT": "false",  # otherwise, two peers that dial each other at the same moment can fail (note 6)
    "GOMAXPROCS": "1",  # on more cores, p2pd often relays only 128 kB (note 48); one is enough for 0.5 GB/s
    "GOGC": "50",  # otherwise, p2pd uses 20 MB more for the same 24 MB of live data (note 90)
}
END_OF_STREAM = "end of stream"  # the last message of a stream
UNREAD_TIMEOUT = 60.0  # seconds to send a message or to read one, and for a caller to close a stream that has ended
MAX_MESSAGE_BYTES = 2**22  # of a stream; the description of a state has 36 bytes for each 65,536 numbers
EXTENSIONS = (0x40, 0x50)  # hivemind's types in a message: tuples, and dictionaries of the DHT
MAX_NESTING = 8  # of values of these types
MAX_CHECKED = 8192  # records; five nodes may send those of 1,024 peers each (`MAX_SENDERS` in swarm/dht.py) for one key
DECODE_EXTENSION = MSGPackSerializer._decode_ext_types
NESTING = threading.local()  # the depth of the value that this thread decodes


class ResilientControlClient(p2pclient.ControlClient):
    """A connection to the daemon that survives the cancellation of a request whose answer just arrives (note 80)."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._handler_tasks = weakref.WeakValueDictionary()  # hivemind keeps those that the caller cancels (note 96)

    async def _read_from_persistent_conn(self, reader: asyncio.StreamReader) -> None:
        while not reader.at_eof():
            with contextlib.suppress(asyncio.InvalidStateError):
                await super()._read_from_persistent_conn(reader)


class CachingValidator(dht.CompositeValidator):
    """Validators that check each small record once: all nodes that a lookup asks send the same ones (note 100)."""

    def extend(self, validators) -> None:
        """Add validators. Records that were checked without them are checked again."""
        super().extend(validators)
        self.checked: dict[bytes, bool] = {}  # by hash, because records may have 16 kB each

    def validate(self, record) -> bool:
        """Return whether a record is small, and valid for all validators."""
        if len(record.value) + len(record.subkey) > MAX_RECORD_BYTES:
            return False
        name = hashlib.sha256(repr(record).encode()).digest()
        is_valid = self.checked.get(name)
        if is_valid is None:
            is_valid = self.checked[name] = super().validate(record)
            if len(self.checked) > MAX_CHECKED:
                del self.checked[next(iter(self.checked))]
        return is_valid


class CancellableStep(StepControl):
    """A step control whose step always ends when it is cancelled."""

    def cancel(self) -> bool:
        """Cancel the step, and only then notify the averager's process, which may check it in between (note 84)."""
        is_cancelled = MPFuture.cancel(self)
        self._trigger.cancel()
        if not self._cancel.done():  # `leave` and `finish_background` may both cancel it
            self._cancel.set_result(None)
        return is_cancelled


def abort_unclosed(writer: asyncio.StreamWriter) -> None:
    """Close the connection of a writer that is deleted, as Python does from 3.11.5 on (note 106)."""
    if not writer.transport.is_closing():
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            writer.transport.abort()


def decode_extension(cls: type, code: int, data: bytes) -> object:
    """Decode hivemind's own types, which crash the process if a peer nests hundreds (note 93); refuse all others."""
    NESTING.depth = getattr(NESTING, "depth", 0) + 1
    try:
        if NESTING.depth > MAX_NESTING or code not in EXTENSIONS:
            raise ValueError("values of unknown types, or nested ones")
        return DECODE_EXTENSION(code, data)
    finally:
        NESTING.depth -= 1


async def receive_limited(reader: asyncio.StreamReader) -> bytes:
    """Receive a message of a stream, of which hivemind would keep as many bytes as a peer claims, forever (note 92)."""
    size = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), P2P.BYTEORDER)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes")
    async with asyncio.timeout(UNREAD_TIMEOUT):
        return await reader.readexactly(size)


async def add_whole_stream_handler(
    self: P2P, name: str, handler, request_type: type, max_prefetch: int = 5, balanced: bool = False
) -> None:
    """Add a handler of streams that ends with a last message, after which the caller closes the stream (note 87).
    Requests after its end are dropped, and a caller that does not read is given up (note 91)."""

    async def serve(info, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests = asyncio.Queue(max_prefetch)
        has_ended = asyncio.Event()

        async def receive() -> None:
            while True:  # until the caller closes the stream
                request, end = await P2P.receive_protobuf(request_type, reader)
                if not has_ended.is_set():
                    await requests.put(request)
                elif end is not None and end.message:  # the caller has read the last message; its usual end has no text
                    return

        async def read_requests():
            while (request := await requests.get()) is not None:
                yield request

        async def answer() -> None:
            last = END_OF_STREAM
            context = P2PContext(name, self.peer_id, info.peer_id)
            try:
                async with contextlib.aclosing(handler(read_requests(), context)) as messages:
                    async for message in messages:
                        await asyncio.wait_for(P2P.send_protobuf(message, writer), UNREAD_TIMEOUT)
            except Exception as e:  # for the caller
                last = str(e)
            has_ended.set()
            while not requests.empty():  # `receive` may be waiting for room
                requests.get_nowait()
            await asyncio.wait_for(P2P.send_protobuf(RPCError(message=last), writer), UNREAD_TIMEOUT)
            await asyncio.sleep(UNREAD_TIMEOUT)

        tasks = [asyncio.create_task(receive()), asyncio.create_task(answer())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            writer.transport.abort()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    await self.add_binary_stream_handler(name, serve, balanced=balanced)


async def call_whole_stream_handler(self: P2P, peer_id: PeerID, name: str, requests, answer_type: type):
    """Call a handler of streams, and return the iterator of its answers, which raises a P2PHandlerError if the handler
    fails. After the last message, the other side closes the stream: first, it must have read all requests (note 91)."""
    _, reader, writer = await self.call_binary_stream_handler(peer_id, name)

    async def write() -> None:
        async for request in requests if hasattr(requests, "__aiter__") else as_aiter(requests):
            await P2P.send_protobuf(request, writer)
        await P2P.send_protobuf(P2P.END_OF_STREAM, writer)

    async def await_close() -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            async with asyncio.timeout(UNREAD_TIMEOUT):
                await P2P.send_protobuf(RPCError(message=END_OF_STREAM), writer)
                await reader.read(1)

    async def read():
        error = None
        try:
            while error is None:
                answer, error = await P2P.receive_protobuf(answer_type, reader)
                if error is None:
                    yield answer
        except asyncio.IncompleteReadError:  # the connection is closed
            await writing
        finally:
            writing.cancel()
            if error is not None:
                asyncio.create_task(await_close())
            else:
                writer.close()
        if error is not None and error.message != END_OF_STREAM:
            raise P2PHandlerError(f"`{name}` of {peer_id} failed: {error.message}")

    writing = asyncio.create_task(write())
    writing.add_done_callback(lambda it: it.cancelled() or it.exception())  # no caller may read it
    return read()


def install() -> None:
    """Replace classes and settings of this process and its helpers; must be called before the first connection."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    P2P.create.__func__.__kwdefaults__["startup_timeout"] = 60  # seconds, see note 13
    # New identities use the key that signs this process's records: its owner is the peer that the transport verifies.
    p2p_daemon.RSAPrivateKey = RSAPrivateKey.process_wide
    p2pclient.ControlClient = ResilientControlClient
    MSGPackSerializer._decode_ext_types = classmethod(decode_extension)
    P2P.receive_raw_data = staticmethod(receive_limited)
    P2P._add_protobuf_stream_handler = add_whole_stream_handler
    P2P.iterate_protobuf_handler = call_whole_stream_handler
    if not hasattr(asyncio.StreamWriter, "__del__"):
        asyncio.StreamWriter.__del__ = abort_unclosed
    averager.StepControl = CancellableStep
    dht.CompositeValidator = CachingValidator


def make_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop that holds its unfinished tasks, which asyncio itself does not (notes 81 and 86)."""
    loop = switch_to_uvloop()
    tasks = set()

    def make_task(loop: asyncio.AbstractEventLoop, coroutine, **options) -> asyncio.Task:
        tasks.add(task := asyncio.Task(coroutine, loop=loop, **options))
        task.add_done_callback(tasks.discard)
        return task

    loop.set_task_factory(make_task)
    return loop


def install_in_dht_process(protocol_class: type, node_class: type) -> None:
    """Replace the DHT's protocol and node classes by these subclasses, in the DHT's process only."""
    node.DHTProtocol = protocol_class
    dht.DHTNode = node_class
    dht.switch_to_uvloop = make_event_loop


def install_in_averager_process() -> None:
    """Replace the matchmaking (notes 11, 22, 78, 82, 83, 85) and all-reduce classes, in an averager's process only."""
    averager.Matchmaking = EarlyStartMatchmaking
    averager.switch_to_uvloop = make_event_loop
    matchmaking.GroupKeyManager = NonBlockingKeyManager
    allreduce.TensorPartContainer = VerifyingContainer
    allreduce.TensorPartReducer = RobustReducer


def replace_client(client: type[p2pclient.Client]) -> None:
    """Make this process and its helpers call peers through this subclass, which in a closed run shows a credential."""
    p2pclient.Client = client
