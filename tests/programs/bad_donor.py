"""A peer that offers a state to joining peers, and sends invalid ones: each time another kind of KINDS.

It claims the highest epoch, so that it is asked first. Its parameter is that of gradient_peer.py.
"""

import asyncio
import ctypes
import multiprocessing
import sys
import time
from typing import AsyncIterator  # noqa: UP035 (hivemind knows a stream by this very type)

import torch
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext
from hivemind.proto.averaging_pb2 import DownloadData

from common.console import clean_end, handle_stop_signals, setup_logging
from swarm.log_records import unpack
from swarm.optimizer_state import StateAverager
from swarm.state_server import StateRequest
from tests.programs.peers import join, list_maddrs, make_state_averager, print_facts, shut_down

KINDS = ("mute", "shapes", "types", "infinite", "metadata", "bytes", "truncated", "hanging", "breaking", "lying")


class BadStateAverager(StateAverager):
    def __init__(self, *args, **kwargs):
        # of downloads so far, shared by all processes
        self.downloads = multiprocessing.Value(ctypes.c_int, 0)
        super().__init__(*args, **kwargs)

    @property
    def kind(self) -> str:
        return KINDS[(self.downloads.value - 1) % len(KINDS)]

    def get_current_state(self):
        metadata, tensors, infos = super().get_current_state()
        metadata["epoch"] = 1000
        if self.kind == "shapes":
            tensors = [tensor[:-1] for tensor in tensors]
        if self.kind == "types":
            tensors = [tensor.double() for tensor in tensors]
        if self.kind == "infinite" and tensors:
            tensors[0][7] = float("inf")
        if self.kind == "metadata":
            metadata["epoch"] = "1000"
        return metadata, tensors, infos

    async def rpc_download_state(self, request: BytesValue, context: P2PContext) -> AsyncIterator[DownloadData]:
        if is_description := not unpack(StateRequest, request.value).blocks:
            self.downloads.value += 1
            self._snapshots.clear()
            print_facts(gave=self.kind)
            if self.kind == "mute":
                await asyncio.sleep(3600)
        parts = 0
        async for message in super().rpc_download_state(request, context):
            parts += 1
            match None if is_description else self.kind:
                case "truncated" if parts == 2:
                    return
                case "hanging" if parts == 2:
                    await asyncio.sleep(3600)
                case "breaking" if parts == 2:
                    raise RuntimeError("this donor breaks")
                case "bytes":
                    message.tensor_part.buffer = b"not a tensor"
                case "lying":  # 0 where it has described -777
                    message.tensor_part.buffer = bytes(len(message.tensor_part.buffer))
            yield message


# hivemind finds the calls of a peer under the name of its averager's class
BadStateAverager.__name__ = StateAverager.__name__
BadStateAverager.__qualname__ = StateAverager.__qualname__


if __name__ == "__main__":
    with clean_end():
        prefix, *maddrs = sys.argv[1:]
        setup_logging("donor")
        dht = join(prefix, maddrs).dht
        averager = make_state_averager(dht, prefix, torch.full([100_000], -777.0), kind=BadStateAverager)
        averager.state_sharing_priority = 1000
        stop = handle_stop_signals()
        print_facts(maddrs=list_maddrs(dht))
        while not stop.is_set():
            time.sleep(0.2)
        shut_down(dht)
