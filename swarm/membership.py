"""Membership of closed runs, and the one check of all calls that a peer serves.

The transport proves the caller's id. Before the first call between two peers, they exchange credentials in the RPC
`show_pass`, the only one that unauthenticated peers may call. From then on, all processes of each peer recognize the
other one by its id, until its credential expires. An open run has no credentials and no such check.
"""

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import random
import re
import time
from pathlib import Path

import hivemind
import hivemind.p2p.p2p_daemon_bindings.p2pclient as p2pclient
from hivemind.dht.node import DHTNode
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto.p2pd_pb2 import RPCError
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.serializer import MSGPackSerializer

from support.console import UserError, format_count
from swarm.passes import (
    MAX_LIST_BYTES,
    MAX_PASS_BYTES,
    Authority,
    Invitation,
    Pass,
    parse_credential,
    read_revocations,
)
from swarm.patches import replace_client
from utils import MAX_RECORD_LIFETIME, RecordValidator, find_peer_id, find_subkey_owner

logger = logging.getLogger("members")

SHOW = "show_pass"  # the name of the RPC
ANSWER_SECONDS = 10.0
MAX_MEMBERS = 4096  # authenticated peers that are remembered
MAX_MESSAGE_BYTES = 2 * MAX_PASS_BYTES + MAX_LIST_BYTES + 64
PERIOD = 5.0  # seconds between two checks for new credentials and revocations, which are then passed on
OWN_LIFETIME = 86400.0  # seconds that the authority's own credential is valid
LINE_PERIOD = 3600.0  # seconds between two warnings about rejected calls; the first one is logged at once
MAX_STRANGERS = 64  # peers whose rejected calls are counted separately between two warnings

REASONS = {
    "no pass": "its run is closed: ask its organizer for an invitation, and add --invite FILE",
    "forged": "the authority of its run has not signed the pass in --invite: ask its organizer for an invitation",
    "another run": "the pass in --invite is for another run: ask the organizer of this one for an invitation",
    "another peer": "the pass in --invite is for another peer: ask the organizer for an invitation of your own",
    "expired": "the pass in --invite has expired: ask the organizer for a new invitation",
    "revoked": "the pass in --invite has been revoked: ask the organizer why",
    "open": "it does not check passes, so its run is open: omit --invite, or correct --initial_peers",
}


class Refused(Exception):
    """A call from a peer without a valid credential. The argument is a key of REASONS."""


def explain_denial(error: Exception) -> str | None:
    """Return the reason and the remedy if a call failed because of an invalid credential, otherwise None."""
    match = re.search(r"Refused\('([a-z ]+)'\)", str(error)) if isinstance(error, P2PHandlerError) else None
    return REASONS.get(match[1]) if match else None


class SharedMemoryDict:
    """A small dictionary that this process shares with helper processes that it forks later."""

    def __init__(self, size: int, value: dict):
        self.lock, self.memory = multiprocessing.Lock(), multiprocessing.RawArray(ctypes.c_char, size)
        self.length, self.version = multiprocessing.RawValue(ctypes.c_int), multiprocessing.RawValue(ctypes.c_longlong)
        self.seen, self.value = 0, value
        self.write(value)

    def write(self, value: dict) -> None:
        """Replace the dictionary; the caller holds the lock."""
        data = MSGPackSerializer.dumps(value)
        self.memory[: len(data)], self.length.value = data, len(data)
        self.version.value += 1

    def load(self) -> dict:
        """Return the current dictionary; the caller holds the lock."""
        if self.seen != self.version.value:
            self.value = MSGPackSerializer.loads(self.memory[: self.length.value])
            self.seen = self.version.value
        return self.value

    def read(self) -> dict:
        """Return the current dictionary, which the caller must not modify."""
        if self.seen != self.version.value:
            with self.lock:
                self.load()
        return self.value

    @contextlib.contextmanager
    def change(self):
        """Hold the lock, and write the dictionary back when the context ends."""
        with self.lock:
            yield (value := self.load())
            self.write(value)


class Membership:
    """This peer's credential for a closed run, and its authenticated peers, shared with helper processes forked later.

    In an open run, None takes the place of a membership.
    """

    def __init__(self, prefix: str, username: str, own: bytes, public_key: bytes, issuer: Authority | None = None):
        """
        :param prefix: the name of the run
        :param username: the name of this peer in its credential
        :param own: the credential
        :param public_key: the public key of the authority
        :param issuer: the authority, if this peer is the run's monitor
        """
        self.prefix, self.username, self.public_key, self.issuer = prefix, username, public_key, issuer
        #: the path of the invitation, where a renewed credential is saved
        self.invite: str | None = None
        self.own_id = find_peer_id(RecordValidator().local_public_key)
        size = 64 * MAX_MEMBERS + MAX_LIST_BYTES + MAX_PASS_BYTES
        self.known = SharedMemoryDict(size, {"pass": own, "revocations": b"", "peers": {}})
        self.strangers = SharedMemoryDict(2**16, {})
        self.reload_member_list()

    @classmethod
    def from_invitation(cls, path: str, invitation: Invitation, prefix: str, username: str | None) -> "Membership":
        """Return the membership that the invitation grants; its key is already this process's key.

        :param path: the value of --invite
        :param prefix: the value of --experiment_prefix, or an empty string
        :param username: the value of --username, or None
        :raises UserError: the invitation is for another run or another name
        """
        member = parse_credential(invitation.data, invitation.authority)
        for flag, value, invited in (
            ("experiment_prefix", prefix, member.prefix),
            ("username", username, member.username),
        ):
            if value and value != invited:
                raise UserError(f"--invite {path} is for --{flag} {invited}, not {value}: omit --{flag}")
        self = cls(member.prefix, member.username, invitation.data, invitation.authority)
        self.invite = path
        return self

    @classmethod
    def from_authority(cls, issuer: Authority, prefix: str, username: str | None) -> "Membership":
        """Return the membership of the peer that holds the authority's key.

        :raises UserError: the member list cannot be read
        """
        username = username or "authority"
        with issuer.open_members() as runs:
            issuer.open_run(runs, prefix)
        own_id = find_peer_id(RecordValidator().local_public_key)
        own = issuer.issue(prefix, own_id, username, OWN_LIFETIME)
        return cls(prefix, username, own, issuer.public_key, issuer)

    # --- checks

    @property
    def revoked(self) -> frozenset[bytes]:
        """The ids of peers whose credentials are revoked."""
        return read_revocations(self.known.read()["revocations"], self.public_key, self.prefix)[1]

    def verify_credential(self, data: bytes, peer_id: bytes) -> Pass:
        """Return the content of a peer's credential, or raise Refused if it is not a valid one of this peer."""
        if not data:
            raise Refused("no pass")
        try:
            member = parse_credential(data, self.public_key)
        except ValueError:
            raise Refused("forged") from None
        conditions = {
            "another run": member.prefix != self.prefix,
            "another peer": member.peer_id != peer_id,
            "expired": member.expires <= get_dht_time(),
            "revoked": peer_id in self.revoked,
        }
        for reason, is_met in conditions.items():
            if is_met:
                raise Refused(reason)
        return member

    def is_authenticated(self, peer: PeerID) -> bool:
        """Return whether this peer has shown a credential that is still valid."""
        return self.known.read()["peers"].get(peer.to_bytes(), 0.0) > get_dht_time()

    def require(self, peer: PeerID) -> None:
        """Raise Refused, and count the call, unless this peer is authenticated."""
        if not self.is_authenticated(peer):
            self.count_rejected_call(peer, "no pass")
            raise Refused("no pass")

    def check_own_credential(self) -> None:
        """Raise a UserError if this peer's own credential is no longer valid; the check involves no other peer."""
        try:
            self.verify_credential(self.known.read()["pass"], self.own_id)
        except Refused as e:
            raise UserError(REASONS[e.args[0]]) from None

    def add_member(self, member: Pass) -> None:
        """Record the peer with this credential as authenticated."""
        if self.known.read()["peers"].get(member.peer_id) != member.expires:
            with self.known.change() as known:
                known["peers"][member.peer_id] = member.expires
                if len(known["peers"]) > MAX_MEMBERS:
                    del known["peers"][min(known["peers"], key=known["peers"].get)]
        if member.peer_id in self.strangers.read():  # it was rejected because this peer had restarted
            with self.strangers.change() as strangers:
                strangers.pop(member.peer_id, None)

    def forget(self, peer: PeerID) -> None:
        """Record a peer as not authenticated, so that the next call to it starts with the credentials."""
        with self.known.change() as known:
            known["peers"].pop(peer.to_bytes(), None)

    def count_rejected_call(self, peer: PeerID, reason: str) -> None:
        """Count a rejected call for the next warning; peers beyond MAX_STRANGERS share one entry."""
        with self.strangers.change() as strangers:
            key = peer.to_bytes() if peer.to_bytes() in strangers or len(strangers) < MAX_STRANGERS else b""
            strangers[key] = [strangers.get(key, [0])[0] + 1, reason]

    # --- the exchange of credentials

    async def answer(self, data: bytes, peer: PeerID) -> bytes:
        """Serve SHOW: check a peer's credential, load newer revocations, and return this peer's own data. The authority
        also returns a new credential if that of the peer is due for renewal."""
        try:
            shown, revocations = parse_message(data, 2)
            self.apply_revocations(revocations)
            member = self.verify_credential(shown, peer.to_bytes())
        except Refused as e:
            self.count_rejected_call(peer, reason := e.args[0])
            proof = self.known.read()["revocations"] if reason == "revoked" else b""
            return MSGPackSerializer.dumps([reason.encode(), b"", proof, b""])
        self.add_member(member)
        renewed, known = b"", self.known.read()
        if self.issuer and member.is_due:
            renewed = self.issuer.issue(self.prefix, member.peer_id, member.username, member.lifetime)
            with self.issuer.open_members() as runs:
                self.issuer.record_issued(runs, self.prefix, renewed)
        return MSGPackSerializer.dumps([b"", known["pass"], known["revocations"], renewed])

    async def show(self, client: p2pclient.Client, peer: PeerID) -> None:
        """Exchange credentials with a peer, or raise a P2PHandlerError if one is invalid; see `explain_denial`."""
        known = self.known.read()
        message = MSGPackSerializer.dumps([known["pass"], known["revocations"]])
        try:
            answer = await asyncio.wait_for(client.call_unary_handler(peer, SHOW, message), ANSWER_SECONDS)
            reason, theirs, revocations, renewed = parse_message(answer, 4)
            self.apply_revocations(revocations)
            if reason:
                raise Refused(reason.decode(errors="replace"))
            self.add_member(self.verify_credential(theirs, peer.to_bytes()))
        except Refused as e:
            raise P2PHandlerError(repr(e)) from None
        except P2PDaemonError as e:
            if "protocols not supported" not in str(e):
                raise
            raise P2PHandlerError(repr(Refused("open"))) from None
        with contextlib.suppress(Refused):
            self.apply_renewed(self.verify_credential(renewed, self.own_id), renewed)

    def apply_revocations(self, data: bytes) -> None:
        """Replace this peer's revocation list if this one is newer and valid."""
        with contextlib.suppress(ValueError):
            signed, revoked = read_revocations(data, self.public_key, self.prefix)
            if signed > read_revocations(self.known.read()["revocations"], self.public_key, self.prefix)[0]:
                with self.known.change() as known:
                    known["revocations"] = data
                    known["peers"] = {peer: time for peer, time in known["peers"].items() if peer not in revoked}
                logger.info(f"loaded a revocation list with {format_count(len(revoked), 'peer')}")

    def apply_renewed(self, member: Pass, data: bytes) -> None:
        """Replace this peer's own credential, and save it to the invitation file for the next start."""
        with self.known.change() as known:  # the lock also ensures that only one process writes the file
            if member.expires <= parse_credential(known["pass"], self.public_key).expires:
                return
            known["pass"] = data
            if self.invite:
                try:
                    Invitation(RSAPrivateKey.process_wide(), data, self.public_key).save("--invite", Path(self.invite))
                except UserError as e:
                    logger.warning(f"{e}; the pass was renewed, but the new one will be lost when this peer stops")

    def reload_member_list(self) -> None:
        """At the authority, load the revocations by invite.py, and renew this peer's own credential if it is due."""
        if not self.issuer:
            return
        try:
            self.apply_revocations(self.issuer.read_run_revocations(self.prefix))
        except UserError as e:
            logger.warning(str(e))
        if parse_credential(self.known.read()["pass"], self.public_key).is_due:
            data = self.issuer.issue(self.prefix, self.own_id, self.username, OWN_LIFETIME)
            self.apply_renewed(parse_credential(data, self.public_key), data)


def parse_message(data: bytes, count: int) -> list[bytes]:
    """Decode a message of `count` byte strings, or raise Refused."""
    try:
        message = MSGPackSerializer.loads(data) if len(data) <= MAX_MESSAGE_BYTES else None
    except Exception:  # on untrusted bytes, the decoder can raise any exception
        message = None
    if not isinstance(message, list) or [type(part) for part in message] != [bytes] * count:
        raise Refused("forged")
    return message


async def maintain_membership(dht: hivemind.DHT, node: DHTNode) -> None:
    """Pass on new credentials and revocations, renew credentials, and log rejected calls. Runs in the DHT's process,
    forever."""
    membership: Membership = dht.membership
    last_sent, next_request, next_line, connected = None, 0.0, 0.0, []
    while True:
        membership.reload_member_list()
        known, now = membership.known.read(), time.monotonic()
        own = parse_credential(known["pass"], membership.public_key)
        with contextlib.suppress(OSError, P2PDaemonError):  # the daemon may be busy
            connected = await node.p2p.list_peers()
        peers = [info.peer_id for info in connected if membership.is_authenticated(info.peer_id)]
        is_due = own.is_due and now >= next_request
        if is_due:
            next_request = now + max(PERIOD, own.lifetime / 50)
        if last_sent != (current := (known["pass"], known["revocations"])):
            last_sent = current
            delete_records(node, membership.revoked)
        elif not is_due:
            peers = random.sample(peers, min(1, len(peers)))  # it may have missed an update
        await asyncio.gather(*(membership.show(node.p2p._client, peer) for peer in peers), return_exceptions=True)
        if now >= next_line and (strangers := membership.strangers.read()):
            next_line = now + LINE_PERIOD
            logger.warning(describe_rejected_calls(strangers))
            with membership.strangers.change() as counted:
                counted.clear()
        await asyncio.sleep(PERIOD)


def describe_rejected_calls(strangers: dict[bytes, list]) -> str:
    """Return the warning about these rejected calls."""
    calls = sum(count for count, _ in strangers.values())
    callers = f"peer {PeerID(max(strangers))}"
    if len(strangers) > 1:
        callers += f" and {format_count(len(strangers) - 1, 'other')}"
    reasons = ", ".join(sorted({reason for _, reason in strangers.values()}))
    return f"refused {format_count(calls, 'call')} of {callers}, which may not take part in this run: {reasons}"


def delete_records(node: DHTNode, peer_ids: frozenset[bytes]) -> None:
    """Delete the records that these peers have stored at this node."""
    for storage in (node.protocol.storage, node.protocol.cache):
        for _, item in list(storage.items()):
            if isinstance(item.value, DictionaryDHTValue):
                for subkey in [subkey for subkey in item.value.data if find_subkey_owner(subkey) in peer_ids]:
                    del item.value[subkey]


class AuthenticatedP2PClient(p2pclient.Client):
    """A client of the libp2p daemon that exchanges credentials before calls, and rejects unauthenticated callers."""

    #: set in a subclass by `install_client`, because hivemind creates the instances
    membership: Membership

    async def add_unary_handler(self, proto, handler, balanced=False):
        """Add a handler that rejects unauthenticated callers, except for SHOW."""

        async def handle(data: bytes, peer: PeerID) -> bytes:
            self.membership.require(peer)
            return await handler(data, peer)

        await super().add_unary_handler(proto, handler if proto == SHOW else handle, balanced)

    async def stream_handler(self, proto, handler_cb, balanced=False):
        """Add a stream handler that rejects unauthenticated callers with an error message."""

        async def handle(info, reader, writer) -> None:
            try:
                self.membership.require(info.peer_id)
            except Refused as e:
                with contextlib.closing(writer), contextlib.suppress(OSError, TimeoutError):
                    await P2P.send_protobuf(RPCError(message=repr(e)), writer)
                    # closing a stream with unread data would reset it, and the answer would be lost
                    await asyncio.wait_for(reader.read(2**16), 1.0)
                    await asyncio.wait_for(reader.read(2**16), 1.0)
                return
            await handler_cb(info, reader, writer)

        await super().stream_handler(proto, handle, balanced)

    async def authenticate_with(self, peer: PeerID) -> None:
        """Exchange credentials with a peer unless it is authenticated, or raise a P2PHandlerError if one is invalid."""
        if self.membership.is_authenticated(peer):
            return
        meetings = self.__dict__.setdefault("meetings", {})
        if peer not in meetings:
            meetings[peer] = asyncio.create_task(self.membership.show(self, peer))
            meetings[peer].add_done_callback(lambda _: meetings.pop(peer))
        await asyncio.shield(meetings[peer])

    async def call_unary_handler(self, peer_id, proto, data):
        """Call a peer after the exchange of credentials, which is repeated if the peer has restarted."""
        if proto == SHOW:
            return await super().call_unary_handler(peer_id, proto, data)
        await self.authenticate_with(peer_id)
        try:
            return await super().call_unary_handler(peer_id, proto, data)
        except P2PHandlerError as e:
            if not explain_denial(e):
                raise
            self.membership.forget(peer_id)  # it has restarted, and needs the credential again
        await self.authenticate_with(peer_id)
        return await super().call_unary_handler(peer_id, proto, data)

    async def stream_open(self, peer_id, protocols):
        """Open a stream to a peer after the exchange of credentials."""
        await self.authenticate_with(peer_id)
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
        own = self.membership.known.read()["pass"]
        return record.value + own + len(own).to_bytes(2, "big")

    def split(self, value: bytes) -> tuple[bytes, bytes]:
        """Return the signed value and the owner's credential."""
        at = max(0, len(value) - 2 - int.from_bytes(value[-2:], "big"))
        return value[:at], value[at:-2]

    def strip_value(self, record: DHTRecord) -> bytes:
        """Return the signed value without the credential."""
        return self.split(record.value)[0]

    def validate(self, record: DHTRecord) -> bool:
        """Return whether the credential is the owner's, for this run, and was valid when the record was stored."""
        try:
            value, data = self.split(record.value)
            member = parse_credential(data, self.membership.public_key)
            owner = find_subkey_owner(MSGPackSerializer.loads(record.subkey))
            content = MSGPackSerializer.loads(self.signature.strip_value(DHTRecord(b"", b"", value, 0.0)))
            username = content.get("username", member.username) if isinstance(content, dict) else member.username
            # A peer must be authenticated to store a record, so its credential was valid then.
            is_in_time = record.expiration_time <= member.expires + MAX_RECORD_LIFETIME
            is_own = (member.prefix, member.peer_id, member.username) == (self.membership.prefix, owner, username)
            return is_own and is_in_time
        except Exception as e:  # on untrusted bytes, the decoder and its extension types can raise any exception
            logger.debug(f"refused a record without a valid credential: {e!r}")
            return False
