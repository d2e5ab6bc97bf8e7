"""Membership of closed runs, and the one check of all calls that a peer serves.

The transport proves the caller's id. In a closed run, each call begins with the caller's credential. The names of these
calls end with OF_MEMBERS, so peers of open runs do not know them. An open run has no credentials and no such check.
"""

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import random
import re
import time

import hivemind
import hivemind.p2p.p2p_daemon_bindings.p2pclient as p2pclient
from hivemind.dht.node import DHTNode
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto.p2pd_pb2 import RPCError
from hivemind.utils import MSGPackSerializer, get_dht_time

from common.console import format_count
from swarm import SwarmError
from swarm.credentials import MAX_LIST_BYTES, Authority, parse_credential, read_revocations
from utils import MAX_RECORD_LIFETIME, RecordValidator, find_peer_id, find_subkey_owner

logger = logging.getLogger("members")

OF_MEMBERS = " of members"  # the end of the names of calls in closed runs
RPC_REVOCATIONS = "revocations"
RPC_TIMEOUT = 10.0  # seconds
SYNC_INTERVAL = 5.0  # seconds between two checks for new revocations, which are then forwarded
ISSUER_CREDENTIAL_TTL = 3660 * 86400.0  # seconds that the authority's own credential is valid
WARNING_INTERVAL = 3600.0  # seconds between two warnings about rejected calls; the first one is logged at once

# The keys are sent to other peers, and "pass" is the word for a credential there.
REASONS = {
    "no pass": "its run is closed: ask its organizer for an invitation, and add `invite` FILE",
    "forged": "the authority of its run has not signed the credential in `invite`: ask its organizer for an invitation",
    "another run": "the credential in `invite` is for another run: ask the organizer of this one for an invitation",
    "another peer": "the credential in `invite` is for another peer: ask the organizer for an invitation of your own",
    "expired": "the credential in `invite` has expired: ask the organizer for a new invitation",
    "revoked": "the credential in `invite` has been revoked: ask the organizer why",
    "open": "it does not check credentials, so its run is open: omit `invite`, or correct `initial_peers`",
}


class AccessDeniedError(Exception):
    """The rejection of a peer without a valid credential. The argument is a key of REASONS."""

    def __repr__(self) -> str:
        return f"Refused({self.args[0]!r})"  # hivemind sends this text to the caller


def explain_denial(error: Exception) -> str | None:
    """Return the reason and the remedy if a call failed because of an invalid credential, otherwise None."""
    match = re.search(r"Refused\('([a-z ]+)'\)", str(error))
    return REASONS.get(match[1]) if match else None


class Membership:
    """This peer's credential for a closed run, and the newest revocation list, shared with helpers forked later."""

    def __init__(self, credential: bytes, public_key: bytes, issuer: Authority | None = None):
        """:param issuer: the authority, at the peer that holds its key; all others have an invitation"""
        self.own = parse_credential(credential, public_key)
        self.credential = credential
        self.public_key = public_key
        self.issuer = issuer
        self.greeting = len(credential).to_bytes(2, "big") + credential  # the beginning of each call
        self._list = multiprocessing.Array(ctypes.c_char, 2 * MAX_LIST_BYTES)  # in hexadecimal
        self._num_rejected = 0  # since the last warning, in each process
        self._next_warning = 0.0
        self.load_revocations()

    @classmethod
    def from_authority(cls, issuer: Authority, prefix: str, username: str | None) -> "Membership":
        """Return the membership of the peer that holds the authority's key."""
        own_id = find_peer_id(RecordValidator().local_public_key)
        with issuer.open_run(prefix):  # adds the run to the member list
            credential = issuer.issue(prefix, own_id, username or "authority", get_dht_time() + ISSUER_CREDENTIAL_TTL)
        return cls(credential, issuer.public_key, issuer=issuer)

    def find_fault(self, credential: bytes, peer_id: bytes) -> str | None:
        """Return why a credential is not valid for this peer (a key of REASONS), or None if it is."""
        try:
            member = parse_credential(credential, self.public_key)
        except ValueError:
            return "forged" if credential else "no pass"
        faults = {
            "another run": member.prefix != self.own.prefix,
            "another peer": member.peer_id != peer_id,
            "expired": member.expires <= get_dht_time(),
            "revoked": peer_id in self.revoked,
        }
        return next((reason for reason, is_met in faults.items() if is_met), None)

    def check_own_credential(self) -> None:
        """Raise a SwarmError if this peer's own credential is no longer valid; the check involves no other peer."""
        if reason := self.find_fault(self.credential, self.own.peer_id):
            raise SwarmError(REASONS[reason])

    def require(self, credential: bytes, caller: PeerID) -> None:
        """Raise an AccessDeniedError if the caller's credential is not valid, and sometimes log the number of them."""
        if not (reason := self.find_fault(credential, caller.to_bytes())):
            return
        self._num_rejected += 1
        if time.monotonic() >= self._next_warning:
            calls = format_count(self._num_rejected, "call")
            why = reason.replace("pass", "credential")
            logger.warning(f"refused {calls}, the last of peer {caller}, which may not take part in this run: {why}")
            self._num_rejected = 0
            self._next_warning = time.monotonic() + WARNING_INTERVAL
        raise AccessDeniedError(reason)

    @property
    def revocations(self) -> bytes:
        """The newest revocation list, signed by the authority; empty if there is none."""
        return bytes.fromhex(self._list.value.decode())

    @property
    def revoked(self) -> frozenset[bytes]:
        """The ids of peers whose credentials are revoked."""
        return read_revocations(self.revocations, self.public_key, self.own.prefix)[1]

    def apply_revocations(self, data: bytes) -> None:
        """Replace this peer's revocation list if this one is newer and valid."""
        signed_at, revoked = read_revocations(data, self.public_key, self.own.prefix)
        if signed_at > read_revocations(self.revocations, self.public_key, self.own.prefix)[0]:
            self._list.value = data.hex().encode()
            logger.info(f"loaded a revocation list with {format_count(len(revoked), 'peer')}")

    def load_revocations(self) -> None:
        """At the authority, load the revocations by invite.py, and add those by it elsewhere to the member list."""
        if self.issuer:
            try:
                listed = self.issuer.read_members().get(self.own.prefix, {}).get("revocations", "")
                self.apply_revocations(bytes.fromhex(listed))
                if listed != self.revocations.hex():
                    self.issuer.revoke(self.own.prefix, newer=self.revocations)
            except (SwarmError, ValueError) as e:  # a member list that was edited by hand
                logger.warning(str(e))

    async def exchange_revocations(self, p2p: P2P, peers: list[PeerID]) -> None:
        """Send this peer's revocation list to others, and load theirs if they are newer."""
        calls = [p2p._client.call_unary_handler(peer, RPC_REVOCATIONS, self.revocations) for peer in peers]
        answers = await asyncio.gather(*(asyncio.wait_for(call, RPC_TIMEOUT) for call in calls), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, bytes):
                self.apply_revocations(answer)


async def maintain_revocations(dht: hivemind.DHT, node: DHTNode) -> None:
    """Serve and forward revocations. Runs in the DHT's process, forever."""
    membership: Membership = dht.membership

    async def serve(data: bytes, _: PeerID) -> bytes:
        membership.apply_revocations(data)
        return membership.revocations

    await node.p2p._client.add_unary_handler(RPC_REVOCATIONS, serve)
    last_sent = None
    peers = []
    while True:
        membership.load_revocations()
        with contextlib.suppress(OSError, EOFError, P2PDaemonError):  # the daemon may be busy
            peers = [info.peer_id for info in await node.p2p.list_peers()]
        if last_sent == (current := membership.revocations):
            peers = random.sample(peers, min(1, len(peers)))  # it may have missed the list
        last_sent = current
        await membership.exchange_revocations(node.p2p, peers)
        await asyncio.sleep(SYNC_INTERVAL)


class AuthenticatedP2PClient(p2pclient.Client):
    """A client of the daemon. Each call begins with a credential, after its length in two bytes, or it is rejected."""

    membership: Membership  # set in a subclass by `make_identity`

    async def add_unary_handler(self, proto, handler, balanced=False):
        """Add a handler of members' calls, and one that rejects the calls of other peers."""

        async def handle(data: bytes, peer: PeerID) -> bytes:
            start = 2 + int.from_bytes(data[:2], "big")
            self.membership.require(data[2:start], peer)
            return await handler(data[start:], peer)

        async def reject(data: bytes, peer: PeerID) -> bytes:
            self.membership.require(b"", peer)

        await super().add_unary_handler(proto + OF_MEMBERS, handle, balanced)
        await super().add_unary_handler(proto, reject, balanced)

    async def stream_handler(self, proto, handler_cb, balanced=False):
        """Add a handler of members' streams, and one that rejects those of other peers with an error message."""

        async def handle(info, reader, writer) -> None:
            credential = b""
            try:
                if info.proto != proto:
                    async with asyncio.timeout(RPC_TIMEOUT):
                        credential = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
                self.membership.require(credential, info.peer_id)
            except (OSError, TimeoutError, EOFError):
                writer.close()
            except AccessDeniedError as e:
                with contextlib.closing(writer), contextlib.suppress(OSError, TimeoutError, EOFError):
                    await P2P.send_protobuf(RPCError(message=repr(e)), writer)
                    # closing a stream with unread data would reset it, and the answer would be lost
                    await asyncio.wait_for(reader.readexactly(2**17), 1.0)
            else:
                await handler_cb(info, reader, writer)

        await super().stream_handler(proto + OF_MEMBERS, handle, balanced)
        await super().stream_handler(proto, handle, balanced)

    async def call_unary_handler(self, peer_id, proto, data):
        """Call a peer as a member; a peer of an open run does not know the call."""
        if proto != RPC_REVOCATIONS and peer_id.to_bytes() in self.membership.revoked:  # it may still be a voter
            raise P2PHandlerError("its credential is revoked")
        try:
            return await super().call_unary_handler(peer_id, proto + OF_MEMBERS, self.membership.greeting + data)
        except P2PDaemonError as e:
            if "protocols not supported" not in str(e):
                raise
            raise P2PHandlerError(repr(AccessDeniedError("open"))) from None

    async def stream_open(self, peer_id, protocols):
        """Open a stream to a peer as a member; libp2p's own protocols have no credentials."""
        [proto] = protocols
        if proto.startswith("/libp2p/"):
            return await super().stream_open(peer_id, protocols)
        if peer_id.to_bytes() in self.membership.revoked:
            raise P2PHandlerError("its credential is revoked")
        info, reader, writer = await super().stream_open(peer_id, [proto + OF_MEMBERS])
        writer.write(self.membership.greeting)
        return info, reader, writer


class CredentialValidator(RecordValidatorBase):
    """A validator that accepts only records of members. Each record carries the credential of its owner."""

    priority = 20  # outside of the signature

    def __init__(self, signature: RecordValidator, membership: Membership):
        self.signature = signature
        self.membership = membership

    def sign_value(self, record: DHTRecord) -> bytes:
        """Append this peer's credential and its length to the signed value."""
        return record.value + self.membership.credential + len(self.membership.credential).to_bytes(2, "big")

    def strip_value(self, record: DHTRecord) -> bytes:
        """Return the signed value without the credential and its length."""
        return record.value[: -2 - int.from_bytes(record.value[-2:], "big")]

    def validate(self, record: DHTRecord) -> bool:
        """Return whether the credential is the owner's, for this run, and was valid when the record was stored."""
        try:
            value = self.strip_value(record)
            member = parse_credential(record.value[len(value) : -2], self.membership.public_key)
            owner = find_subkey_owner(MSGPackSerializer.loads(record.subkey))
            content = MSGPackSerializer.loads(self.signature.strip_value(DHTRecord(b"", b"", value, 0.0)))
            username = content.get("username", member.username) if isinstance(content, dict) else member.username
            is_own = (member.prefix, member.peer_id, member.username) == (self.membership.own.prefix, owner, username)
            # A peer must be authenticated to store a record, so its credential was valid then.
            return is_own and record.expiration_time <= member.expires + MAX_RECORD_LIFETIME
        except Exception:  # on untrusted bytes, the decoder and its extension types can raise any exception
            return False
