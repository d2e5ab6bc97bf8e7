"""Membership of closed runs, and the one check of all calls that a peer serves.

The transport proves the caller's id. Before the first call between two peers, they exchange credentials in
RPC_SHOW_CREDENTIAL, the only RPC that unauthenticated peers may call. From then on, all processes of each peer
recognize the other one by its id, until its credential expires. An open run has no credentials and no such check.
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
from hivemind.utils import get_dht_time
from hivemind.utils.serializer import MSGPackSerializer

from common.console import format_count
from swarm.credentials import Authority, Invitation, MembershipCredential, parse_credential, read_revocations
from swarm.errors import SwarmError
from swarm.patches import replace_client
from utils import MAX_RECORD_LIFETIME, RecordValidator, find_peer_id, find_subkey_owner

logger = logging.getLogger("members")

RPC_SHOW_CREDENTIAL = "show_pass"
RPC_TIMEOUT = 10.0  # seconds
MAX_MESSAGE_BYTES = 70_000  # two credentials and a revocation list of the maximum size
MAX_MEMBERS = 4096  # authenticated peers that are remembered
SYNC_INTERVAL = 5.0  # seconds between two checks for new revocations, which are then forwarded
ISSUER_CREDENTIAL_TTL = 3660 * 86400.0  # seconds that the authority's own credential is valid
WARNING_INTERVAL = 3600.0  # seconds between two warnings about rejected calls; the first one is logged at once
MAX_COUNTED_PEERS = 64  # peers whose rejected calls are counted separately between two warnings

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


class SharedMemoryDict:
    """A small dictionary that this process shares with helper processes that it forks later."""

    def __init__(self, size: int, value: dict):
        self.lock, self.memory = multiprocessing.Lock(), multiprocessing.RawArray(ctypes.c_char, size)
        self.length = multiprocessing.RawValue(ctypes.c_int)
        self._write(value)

    def _write(self, value: dict) -> None:
        data = MSGPackSerializer.dumps(value)
        self.memory[: len(data)], self.length.value = data, len(data)

    def read(self) -> dict:
        """Return a copy of the dictionary."""
        with self.lock:
            data = self.memory[: self.length.value]
        return MSGPackSerializer.loads(data)

    @contextlib.contextmanager
    def change(self):
        """Hold the lock, yield the dictionary for changes, and write it back. The context must not call `read`."""
        with self.lock:
            yield (value := MSGPackSerializer.loads(self.memory[: self.length.value]))
            self._write(value)


class Membership:
    """This peer's credential for a closed run, and its authenticated peers, shared with helpers forked later."""

    def __init__(self, credential: bytes, public_key: bytes, invite: str = "", issuer: Authority | None = None):
        """:param invite: the invitation file
        :param issuer: the authority, at the peer that holds its key"""
        own = parse_credential(credential, public_key)
        self.prefix, self.username, self.own_id = own.prefix, own.username, own.peer_id
        self.credential, self.public_key, self.issuer, self.invite = credential, public_key, issuer, invite
        #: "peers" maps authenticated peers to the expiration times of their credentials, "rejected" other peers to the
        #: number of their calls and the last reason
        size = 64 * (MAX_MEMBERS + MAX_COUNTED_PEERS) + MAX_MESSAGE_BYTES
        self.state = SharedMemoryDict(size, {"revocations": b"", "peers": {}, "rejected": {}})
        self.load_revocations()

    @classmethod
    def from_invitation(cls, path: str, invitation: Invitation, prefix: str, username: str | None) -> "Membership":
        """Return the membership that an invitation grants, or raise a SwarmError if it is not for these names."""
        self = cls(invitation.credential, invitation.authority, invite=path)
        settings = {"experiment_prefix": (prefix, self.prefix), "username": (username, self.username)}
        for setting, (value, invited) in settings.items():
            if value and value != invited:
                raise SwarmError(f"`invite` {path} is for `{setting}` {invited}, not {value}: omit `{setting}`")
        return self

    @classmethod
    def from_authority(cls, issuer: Authority, prefix: str, username: str | None) -> "Membership":
        """Return the membership of the peer that holds the authority's key."""
        own_id = find_peer_id(RecordValidator().local_public_key)
        with issuer.open_run(prefix):  # adds the run to the member list
            credential = issuer.issue(prefix, own_id, username or "authority", get_dht_time() + ISSUER_CREDENTIAL_TTL)
        return cls(credential, issuer.public_key, issuer=issuer)

    # --- checks

    @property
    def revoked(self) -> frozenset[bytes]:
        """The ids of peers whose credentials are revoked."""
        return read_revocations(self.state.read()["revocations"], self.public_key, self.prefix)[1]

    def verify_credential(self, data: bytes, peer_id: bytes) -> MembershipCredential:
        """Return the content of a peer's credential, or raise an AccessDeniedError if it is not valid for this peer."""
        if not data:
            raise AccessDeniedError("no pass")
        try:
            member = parse_credential(data, self.public_key)
        except ValueError:
            raise AccessDeniedError("forged") from None
        conditions = {
            "another run": member.prefix != self.prefix,
            "another peer": member.peer_id != peer_id,
            "expired": member.expires <= get_dht_time(),
            "revoked": peer_id in self.revoked,
        }
        for reason, is_met in conditions.items():
            if is_met:
                raise AccessDeniedError(reason)
        return member

    def is_authenticated(self, peer: PeerID) -> bool:
        """Return whether this peer has shown a credential that is still valid."""
        return self.state.read()["peers"].get(peer.to_bytes(), 0.0) > get_dht_time()

    def require(self, peer: PeerID) -> None:
        """Raise an AccessDeniedError, and count the call, unless this peer is authenticated."""
        if not self.is_authenticated(peer):
            self.count_rejected_call(peer, "no pass")
            raise AccessDeniedError("no pass")

    def check_own_credential(self) -> None:
        """Raise a SwarmError if this peer's own credential is no longer valid; the check involves no other peer."""
        try:
            self.verify_credential(self.credential, self.own_id)
        except AccessDeniedError as e:
            raise SwarmError(REASONS[e.args[0]]) from None

    def count_rejected_call(self, peer: PeerID, reason: str) -> None:
        """Count a rejected call for the next warning, of MAX_COUNTED_PEERS peers at most."""
        with self.state.change() as state:
            rejected, key = state["rejected"], peer.to_bytes()
            if key in rejected or len(rejected) < MAX_COUNTED_PEERS:
                rejected[key] = [rejected.get(key, [0])[0] + 1, reason]

    def warn_of_rejected_calls(self) -> bool:
        """Log how many calls were rejected since the last warning, if there are any; return whether there are."""
        with self.state.change() as state:
            rejected, state["rejected"] = state["rejected"], {}
        if rejected:
            calls = format_count(sum(count for count, _ in rejected.values()), "call")
            others = f" and {len(rejected) - 1} more" if len(rejected) > 1 else ""
            reasons = ", ".join(sorted({reason for _, reason in rejected.values()})).replace("pass", "credential")
            refused = f"refused {calls} of peer {PeerID(max(rejected))}{others}"
            logger.warning(f"{refused}, which may not take part in this run: {reasons}")
        return bool(rejected)

    # --- the exchange of credentials

    def admit(self, peer: PeerID, credential: bytes, revocations: bytes) -> None:
        """Record a peer as authenticated if its credential is valid, otherwise raise an AccessDeniedError."""
        self.apply_revocations(revocations)
        member = self.verify_credential(credential, peer.to_bytes())
        with self.state.change() as state:
            state["rejected"].pop(member.peer_id, None)  # it may have been rejected because this peer had restarted
            state["peers"][member.peer_id] = member.expires
            if len(state["peers"]) > MAX_MEMBERS:
                del state["peers"][min(state["peers"], key=state["peers"].get)]

    async def serve_exchange(self, data: bytes, peer: PeerID) -> bytes:
        """Serve RPC_SHOW_CREDENTIAL: verify a credential; return the reason if it is invalid, otherwise this peer's own
        one and its revocation list."""
        try:
            self.admit(peer, *parse_message(data, 2))
        except AccessDeniedError as e:
            self.count_rejected_call(peer, reason := e.args[0])
            proof = self.state.read()["revocations"] if reason == "revoked" else b""
            return MSGPackSerializer.dumps([reason.encode(), b"", proof])
        return MSGPackSerializer.dumps([b"", self.credential, self.state.read()["revocations"]])

    async def exchange_credentials(self, client: p2pclient.Client, peer: PeerID) -> None:
        """Exchange credentials with a peer, or raise a P2PHandlerError if one is invalid; see `explain_denial`."""
        message = MSGPackSerializer.dumps([self.credential, self.state.read()["revocations"]])
        try:
            call = client.control.call_unary_handler(peer, RPC_SHOW_CREDENTIAL, message)
            reason, credential, revocations = parse_message(await asyncio.wait_for(call, RPC_TIMEOUT), 3)
            if reason:
                self.apply_revocations(revocations)
                raise AccessDeniedError(reason.decode(errors="replace"))
            self.admit(peer, credential, revocations)
        except AccessDeniedError as e:
            raise P2PHandlerError(repr(e)) from None
        except P2PDaemonError as e:
            if "protocols not supported" not in str(e):
                raise
            raise P2PHandlerError(repr(AccessDeniedError("open"))) from None

    # --- revocations

    def apply_revocations(self, data: bytes) -> None:
        """Replace this peer's revocation list if this one is newer and valid."""
        with contextlib.suppress(ValueError):
            signed_at, revoked = read_revocations(data, self.public_key, self.prefix)
            if signed_at > read_revocations(self.state.read()["revocations"], self.public_key, self.prefix)[0]:
                with self.state.change() as state:
                    state["revocations"] = data
                    state["peers"] = {peer: time for peer, time in state["peers"].items() if peer not in revoked}
                logger.info(f"loaded a revocation list with {format_count(len(revoked), 'peer')}")

    def load_revocations(self) -> None:
        """At the authority, load the revocations by invite.py."""
        if self.issuer:
            try:
                run = self.issuer.read_members().get(self.prefix, {})
                self.apply_revocations(bytes.fromhex(run.get("revocations", "")))
            except SwarmError as e:
                logger.warning(str(e))


def parse_message(data: bytes, count: int) -> list[bytes]:
    """Decode a message of `count` byte strings, or raise an AccessDeniedError."""
    with contextlib.suppress(Exception):  # on untrusted bytes, the decoder can raise any exception
        message = MSGPackSerializer.loads(data) if len(data) <= MAX_MESSAGE_BYTES else None
        if isinstance(message, list) and [type(part) for part in message] == [bytes] * count:
            return message
    raise AccessDeniedError("forged")


async def maintain_membership(dht: hivemind.DHT, node: DHTNode) -> None:
    """Forward revocations, and log rejected calls. Runs in the DHT's process, forever."""
    membership: Membership = dht.membership
    last_sent, next_warning, connected = b"", 0.0, []
    while True:
        membership.load_revocations()
        state, now = membership.state.read(), time.monotonic()
        with contextlib.suppress(OSError, P2PDaemonError):  # the daemon may be busy
            connected = await node.p2p.list_peers()
        peers = [info.peer_id for info in connected if info.peer_id.to_bytes() in state["peers"]]
        if state["revocations"] == last_sent:
            peers = random.sample(peers, min(1, len(peers)))  # it may have missed the list
        last_sent = state["revocations"]
        exchanges = (membership.exchange_credentials(node.p2p._client, peer) for peer in peers)
        await asyncio.gather(*exchanges, return_exceptions=True)
        if now >= next_warning and membership.warn_of_rejected_calls():
            next_warning = now + WARNING_INTERVAL
        await asyncio.sleep(SYNC_INTERVAL)


class AuthenticatedP2PClient(p2pclient.Client):
    """A client of the libp2p daemon that exchanges credentials before calls (by `client.control`), and rejects
    unauthenticated callers."""

    #: set in a subclass by `install_client`, because hivemind creates the instances
    membership: Membership

    async def add_unary_handler(self, proto, handler, balanced=False):
        """Add a handler that rejects unauthenticated callers."""

        async def handle(data: bytes, peer: PeerID) -> bytes:
            self.membership.require(peer)
            return await handler(data, peer)

        await super().add_unary_handler(proto, handle, balanced)

    async def stream_handler(self, proto, handler_cb, balanced=False):
        """Add a stream handler that rejects unauthenticated callers with an error message."""

        async def handle(info, reader, writer) -> None:
            try:
                self.membership.require(info.peer_id)
            except AccessDeniedError as e:
                with contextlib.closing(writer), contextlib.suppress(OSError, TimeoutError, EOFError):
                    await P2P.send_protobuf(RPCError(message=repr(e)), writer)
                    # closing a stream with unread data would reset it, and the answer would be lost
                    await asyncio.wait_for(reader.readexactly(2**17), 1.0)
            else:
                await handler_cb(info, reader, writer)

        await super().stream_handler(proto, handle, balanced)

    async def call_unary_handler(self, peer_id, proto, data):
        """Call a peer after the exchange of credentials, which is repeated if the peer has restarted."""
        if self.membership.is_authenticated(peer_id):
            try:
                return await super().call_unary_handler(peer_id, proto, data)
            except P2PHandlerError as e:
                if not explain_denial(e):
                    raise
        await self.membership.exchange_credentials(self, peer_id)
        return await super().call_unary_handler(peer_id, proto, data)

    async def stream_open(self, peer_id, protocols):
        """Open a stream to a peer after the exchange of credentials."""
        if not self.membership.is_authenticated(peer_id):
            await self.membership.exchange_credentials(self, peer_id)
        return await super().stream_open(peer_id, protocols)


def install_client(membership: Membership) -> None:
    """Make this process and its helpers exchange credentials with each peer before their first call to it."""
    replace_client(type("AuthenticatedP2PClient", (AuthenticatedP2PClient,), {"membership": membership}))


class CredentialValidator(RecordValidatorBase):
    """A validator that accepts only records of members. Each record carries the credential of its owner."""

    priority = 20  # outside of the signature

    def __init__(self, signature: RecordValidator, membership: Membership):
        self.signature, self.membership = signature, membership

    def sign_value(self, record: DHTRecord) -> bytes:
        """Append this peer's credential and its length to the signed value."""
        own = self.membership.credential
        return record.value + own + len(own).to_bytes(2, "big")

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
            is_own = (member.prefix, member.peer_id, member.username) == (self.membership.prefix, owner, username)
            # A peer must be authenticated to store a record, so its credential was valid then.
            return is_own and record.expiration_time <= member.expires + MAX_RECORD_LIFETIME
        except Exception as e:  # on untrusted bytes, the decoder and its extension types can raise any exception
            logger.debug(f"refused a record without a valid credential: {e!r}")
            return False
