"""Closed runs: members take part, and all calls of other peers are rejected and counted, and have no effect."""

import asyncio
import contextlib
import json
import os
import shutil
import stat
import time
from functools import partial
from pathlib import Path

import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.utils import get_dht_time
from mains import parse
from members import addresses, connect, leave, make_invitation, open_stream, run_peer
from processes import make_prefix, run_python, wait_until

import invite
from arguments import SwarmArguments
from common.console import UserError
from swarm.attestation import RPC_ATTEST
from swarm.config import SwarmConfig, make_config
from swarm.credentials import Authority, load_invitation, parse_credential, read_revocations
from swarm.dht import DHT
from swarm.identity import make_identity
from swarm.membership import OF_MEMBERS, AccessDeniedError, Membership, explain_denial
from swarm.reachability import DIAL_BACK, MEASURE
from training.settings import discover_settings
from utils import RecordValidator


async def call(_, node, peer: PeerID, name: str) -> str:
    """Return the result of a call to that peer. Runs in a DHT's process."""
    try:
        answer = await node.p2p.call_protobuf_handler(peer, name, BytesValue(), BytesValue)
    except P2PHandlerError as e:
        return explain_denial(e) or str(e)
    return f"{len(answer.value)} bytes"


async def serve_stream(_, node, name: str) -> None:
    async def answer(request: BytesValue, context):
        yield BytesValue()

    await node.p2p.add_protobuf_handler(name, answer, BytesValue, stream_output=True)


async def call_with(_, node, peer: PeerID, greeting: bytes) -> str:
    """Call a peer as a member of a closed run does, with these bytes before the request. Runs in a DHT's process."""
    try:
        return str(await node.p2p._client.call_unary_handler(peer, MEASURE + OF_MEMBERS, greeting))
    except P2PHandlerError as e:
        return str(e)


async def stream_with(_, node, peer: PeerID, greeting: bytes, is_cut: bool = False) -> bytes:
    """The same in a stream, of which the end of the answer is returned."""
    _, reader, writer = await node.p2p.call_binary_stream_handler(peer, "stream" + OF_MEMBERS)
    writer.write(greeting)
    if is_cut:
        writer.write_eof()
    return await asyncio.wait_for(reader.read(), 20)


async def list_revoked(dht, _) -> frozenset[bytes]:
    return dht.membership.revoked


async def list_routes(_, node) -> set[PeerID]:
    return set(node.protocol.routing_table.peer_id_to_uid)


async def find_own_fault(dht, _) -> str:
    try:
        dht.membership.check_own_credential()
        return ""
    except UserError as e:
        return str(e)


def measure(caller: DHT, peer: DHT) -> str:
    """Return the result of a call that measures the bandwidth."""
    return caller.run_coroutine(partial(call, peer=peer.peer_id, name=MEASURE))


def join(*dhts: DHT, prefix: str = "", **swarm) -> dict[str, str]:
    """Return the settings that a joining peer gets from these peers."""
    leave()
    try:
        args = SwarmArguments(prefix, addresses(*dhts), **swarm)
        return discover_settings(args, make_identity(make_config(SwarmConfig, args)))
    finally:
        leave()


def test_members_connect_and_other_peers_are_rejected(tmp_path):
    prefix, key = make_prefix(), str(tmp_path / "authority.pem")
    with run_peer(prefix, authority_key=key, username="organizer") as monitor:
        ada, bob = (make_invitation(tmp_path, prefix, name) for name in ("ada", "bob"))
        assert join(monitor, invite=ada) == {"experiment_prefix": prefix}
        monitor.run_coroutine(partial(serve_stream, name="stream"))
        at_monitor = {"peer": monitor.peer_id}
        with (
            run_peer(prefix, monitor, invite=ada) as one,
            run_peer(prefix, monitor, invite=bob, client_mode=True) as client,
            run_peer("intruder") as intruder,
        ):
            for peer in (one, client):
                assert measure(peer, monitor) == "0 bytes"
                assert peer.run_coroutine(partial(open_stream, **at_monitor, name="stream")) == "an answer"
            # it has called, so others may call it, through this connection only
            assert measure(monitor, client) == "0 bytes"
            intruder.run_coroutine(partial(connect, **at_monitor, maddrs=addresses(monitor)))
            names = (RPC_ATTEST, DIAL_BACK, MEASURE, *(f"DHTProtocol.rpc_{what}" for what in ("ping", "store", "find")))
            for name in names:
                said = intruder.run_coroutine(partial(call, **at_monitor, name=name))
                assert "its run is closed" in said and "`invite` FILE" in said, (name, said)
            assert "its run is closed" in intruder.run_coroutine(partial(open_stream, **at_monitor, name="stream"))
            assert "its run is open" in measure(one, intruder)
            authority, other = Authority(key), Authority(str(tmp_path / "other.pem"))
            own_id = intruder.peer_id.to_bytes()
            wrong = {
                b"": "no pass",
                b"x" * 200: "forged",
                other.issue(prefix, own_id, "eve", 1e11): "forged",
                authority.sign(b"revocations", [prefix, own_id, "eve", 1e11]): "forged",
                authority.issue(prefix, own_id, "eve", get_dht_time() - 1): "expired",
                authority.issue(f"{prefix}_too", own_id, "eve", 1e11): "another run",
                load_invitation(ada).credential: "another peer",
            }
            for data, reason in wrong.items():
                greeting, refused = len(data).to_bytes(2, "big") + data, repr(AccessDeniedError(reason))
                assert refused in intruder.run_coroutine(partial(call_with, **at_monitor, greeting=greeting))
                assert refused.encode() in intruder.run_coroutine(partial(stream_with, **at_monitor, greeting=greeting))
            for greeting in (b"", b"\0", b"\xff\xff", b"\0\1"):
                own = {**at_monitor, "greeting": greeting}
                assert "Refused('no pass')" in intruder.run_coroutine(partial(call_with, **own))
                assert not intruder.run_coroutine(partial(stream_with, **own, is_cut=True))
            routes = monitor.run_coroutine(list_routes)
            assert intruder.peer_id not in routes and {one.peer_id, client.peer_id} & routes == {one.peer_id}
        # the errors that stop a joining peer
        for name, words, changes in (
            ("late", "late has expired", {"expires": get_dht_time() - 1}),
            ("moved", "is for --experiment_prefix elsewhere, not", {"prefix": "elsewhere"}),
            ("thief", "belongs to another peer", {"peer_id": one.peer_id.to_bytes()}),
        ):
            with pytest.raises(UserError, match=words):
                join(monitor, prefix=prefix, invite=make_invitation(tmp_path, prefix, name, **changes))
        (tmp_path / "forger").mkdir()
        forged = make_invitation(tmp_path / "forger", prefix, "eve")
        for words, invited in (("has not signed the credential", forged), ("its run is closed", None)):
            with pytest.raises(UserError, match=f"peer {monitor.peer_id} in --initial_peers.*{words}"):
                join(monitor, prefix=prefix, invite=invited)


def test_revocations_reach_all_peers(tmp_path):
    prefix, key = make_prefix(), str(tmp_path / "authority.pem")
    with run_peer(prefix, authority_key=key) as monitor:
        ada, bob, eve = (make_invitation(tmp_path, prefix, name) for name in ("ada", "bob", "eve"))
        with (
            run_peer(prefix, monitor, invite=ada) as one,
            run_peer(prefix, one, invite=bob, client_mode=True) as client,
            run_peer(prefix, one, invite=eve) as hostile,
        ):
            authority, expiration = Authority(key), get_dht_time() + 300
            subkey = RecordValidator(load_invitation(eve).key).local_public_key
            assert hostile.store("records", {"a": 1}, expiration, subkey=subkey)

            def read_records() -> dict:
                return getattr(one.get("records", latest=True), "value", None) or {}

            wait_until(lambda: (it := read_records().get(subkey)) and it.value == {"a": 1}, 60, "its record")
            # dashboards would show a false user name
            assert not hostile.store("records", {"username": "ada"}, expiration + 1, subkey=subkey)
            assert hostile.store("records", {"username": "eve"}, expiration + 2, subkey=subkey)
            start = time.monotonic()
            assert authority.revoke(prefix, "eve") == 1

            def knows(peer: DHT) -> bool:
                said = peer.run_coroutine(find_own_fault)
                is_revoked = hostile.peer_id.to_bytes() in peer.run_coroutine(list_revoked)
                fault = "the credential in --invite has been revoked" if peer is hostile else ""
                return is_revoked and bool(said) == bool(fault) and fault in said

            for peer in (monitor, one, client, hostile):
                wait_until(partial(knows, peer), 60, "the revocation")
            print(f"revoked within {time.monotonic() - start:.1f} s")
            assert "has been revoked" in measure(hostile, one)
            assert "its credential is revoked" in measure(one, hostile)  # its answers could hold votes
            hostile.store("records", {"a": 2}, expiration + 3, subkey=subkey)
            wait_until(lambda: not read_records(), 60, "the end of its record")
            with pytest.raises(UserError, match="has been revoked"):
                join(one, prefix=prefix, invite=eve)
            assert measure(client, one) == "0 bytes"


@pytest.mark.slow
def test_expired_credential_without_authority_affects_only_its_owner(tmp_path):
    prefix, key, lifetime = make_prefix(), str(tmp_path / "authority.pem"), 40.0
    with contextlib.ExitStack() as stack:
        with run_peer(prefix, authority_key=key) as monitor:
            ada, bob = (make_invitation(tmp_path, prefix, name) for name in ("ada", "bob"))
            one = stack.enter_context(run_peer(prefix, monitor, invite=ada))
        # without the authority, invited peers still join
        two = stack.enter_context(run_peer(prefix, one, invite=bob))
        three = stack.enter_context(run_peer(prefix, one, invite=make_invitation(tmp_path, prefix, "eve", lifetime)))
        assert measure(three, one) == "0 bytes"
        wait_until(lambda: three.run_coroutine(find_own_fault), lifetime + 10, "the end of the credential")
        assert "the credential in --invite has expired" in three.run_coroutine(find_own_fault)
        assert "the credential in `invite` has expired" in measure(three, one)
        assert measure(two, one) == "0 bytes" and not one.run_coroutine(find_own_fault)


def test_unreadable_member_list_stops_no_peer(tmp_path, caplog):
    prefix, authority, peer_id = make_prefix(), Authority(str(tmp_path / "authority.pem")), PeerID(b"ada")
    try:
        membership = Membership.from_authority(authority, prefix, None)
    finally:
        leave()
    authority.member_list.write_text("{")
    membership.load_revocations()
    assert "cannot be read" in caplog.text
    # invitations of an earlier version, whose credentials were renewed, end with their lifetime
    shown = authority.sign(b"pass", [prefix, peer_id.to_bytes(), "ada", get_dht_time() + 40, 100.0])
    membership.require(shown, peer_id)


def test_invite_sends_revocation_to_initial_peers(tmp_path):
    """The monitor with the key runs on another machine. A revocation by a copy of the key keeps the first one."""
    prefix, key, copy = make_prefix(), tmp_path / "authority.pem", tmp_path / "copy"
    for name in ("bob", "eve"):
        make_invitation(tmp_path, prefix, name)
    with run_peer(prefix, invite=make_invitation(tmp_path, prefix, "ada")) as one:
        shutil.copytree(tmp_path, copy)
        words = ["--authority_key", key, "--revoke", "eve", "--initial_peers", *addresses(one)]
        assert run_python("invite.py", *words, expect=0).stdout == "eve: 1 invitation revoked\n"
        assert len(one.run_coroutine(list_revoked)) == 1
        others = ["--authority_key", copy / key.name, "--revoke", "bob", *words[4:]]
        assert run_python("invite.py", *others, expect=0).stdout == "bob: 1 invitation revoked\n"
        assert len(one.run_coroutine(list_revoked)) == 2
    unreachable = run_python("invite.py", *words[:2], "--revoke", "ada", *words[4:], expect=2)
    assert "cannot reach --initial_peers" in unreachable.stderr.splitlines()[-1]


def test_invite_creates_lists_and_revokes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> str:
        [args] = parse([invite.InviteArguments], "./invite.py", *flags)
        invite.main(args)
        return capsys.readouterr().out

    def refuse(words: str, *flags: str) -> None:
        with pytest.raises(UserError, match=words):
            run(*flags)

    for flags in ((), ("--username", "ada")):
        refuse("authority.pem has served no run yet", *flags)
    refuse("--username and --revoke are mutually exclusive", "--username", "ada", "--revoke", "bob")
    refuse("'a b' is not a name", "--username", "a b", "--run_id", "r")
    refuse("--expires soon is not a time", "--username", "ada", "--run_id", "r", "--expires", "soon")
    assert not list(tmp_path.glob("*.pem"))
    assert "--invite ada.invite" in run("--username", "ada", "--run_id", "one", "--expires", "2h")
    run("--username", "bob", "--out", "b")
    for path in ("authority.pem", "authority.members.json", "ada.invite", "b"):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    refuse("--out b exists", "--username", "eve", "--out", "b")
    for _ in range(2):  # once more, if --initial_peers could not be reached the first time
        assert run("--revoke", "ada") == "ada: 1 invitation revoked\n"
    refuse("has no member 'eve'", "--revoke", "eve")
    refuse("run 'unknown' has no member 'ada'", "--revoke", "ada", "--run_id", "unknown")
    assert "unknown" not in Path("authority.members.json").read_text()
    run("--username", "ada", "--out", "c", "--run_id", "two")
    refuse("has served one and two: give --experiment_prefix", "--username", "eve")
    rows = [[*line.split()[:2], line.split()[3]] for line in run().splitlines()]
    assert rows == [["one", "ada", "revoked"], ["one", "bob", "expires"], ["two", "ada", "expires"]]
    # each file is for one peer, and its content is signed
    invitations = [load_invitation(path) for path in ("b", "c")]
    assert [parse_credential(i.credential, i.authority).prefix for i in invitations] == ["one", "two"]
    parts = json.loads(Path("b").read_text()) | {"key": json.loads(Path("c").read_text())["key"]}
    for text, words in (
        (json.dumps(parts), "its key belongs to another peer"),
        ("hello", "is damaged or incomplete"),
        (Path("b").read_text()[:500], "is damaged or incomplete"),
        (Path("b").read_text().replace('"pass": "', '"pass": "AAAA'), "has not signed it"),
    ):
        Path("d").write_text(text)
        with pytest.raises(UserError, match=f"--invite d .*{words}"):
            load_invitation("d")
    with pytest.raises(UserError, match="--invite e cannot be read"):
        load_invitation("e")
    Path("authority.pem").write_text("hello")
    with pytest.raises(UserError, match="--authority_key authority.pem: it does not hold"):
        Authority("authority.pem")


def list_names(authority: Authority, prefix: str) -> set[str]:
    """Return the names of the peers in an authority's revocation list, if they are members, or else their ids."""
    run = authority.read_members()[prefix]
    ids = read_revocations(bytes.fromhex(run["revocations"]), authority.public_key, prefix)[1]
    names = {str(PeerID(peer_id)): str(PeerID(peer_id)) for peer_id in ids}
    names |= {name: run["members"][name]["username"] for name in names if name in run["members"]}
    assert {name for name, it in run["members"].items() if it["revoked"]} <= names.keys()
    return {*names.values()}


def test_revocations_of_two_copies_are_united(tmp_path, monkeypatch):
    """invite.py runs at the monitor, and with a copy of the key and the member list."""
    prefix, folder = make_prefix(), tmp_path / "server"
    folder.mkdir()
    for name in ("ada", "bob", "eve"):
        make_invitation(folder, prefix, name, lifetime=1e6)
    shutil.copytree(folder, tmp_path / "laptop")
    server, laptop = (Authority(tmp_path / name / "authority.pem") for name in ("server", "laptop"))
    backup = server.member_list.read_bytes()
    try:
        monitor = Membership.from_authority(server, prefix, None)
    finally:
        leave()
    make_invitation(tmp_path / "laptop", prefix, "dan", lifetime=1e6)
    [dan] = (name for name, it in laptop.read_members()[prefix]["members"].items() if it["username"] == "dan")

    def send() -> bytes:
        """Send the laptop's list to the monitor, which reads the member list as it does every few seconds."""
        listed = bytes.fromhex(laptop.read_members()[prefix]["revocations"])
        monitor.apply_revocations(listed)
        monitor.load_revocations()
        monitor.load_revocations()
        assert monitor.revocations.hex() == server.read_members()[prefix]["revocations"]
        return listed

    with monkeypatch.context() as patch:
        patch.setattr("swarm.credentials.get_dht_time", lambda: time.time() + 1e5)  # the laptop's clock
        for name in ("ada", "dan"):
            laptop.revoke(prefix, name)
    assert send() == monitor.revocations
    assert list_names(server, prefix) == {"ada", dan}
    server.revoke(prefix, "eve")
    monitor.load_revocations()
    assert len(monitor.revoked) == 3 and list_names(server, prefix) == {"ada", dan, "eve"}
    # a list that was made without the newest one, which it replaces at the peers
    with monkeypatch.context() as patch:
        patch.setattr("swarm.credentials.get_dht_time", lambda: time.time() + 2e5)
        laptop.revoke(prefix, "bob")
    assert send() != monitor.revocations
    assert len(monitor.revoked) == 4 and list_names(server, prefix) == {"ada", "bob", dan, "eve"}
    server.member_list.write_bytes(backup)
    monitor.load_revocations()
    assert list_names(server, prefix) == {"ada", "bob", dan, "eve"}


def test_new_key_next_to_old_list_revokes(tmp_path):
    """The organizer has lost the key, and the monitor has made another one."""
    path, prefix = tmp_path / "authority.pem", make_prefix()
    make_invitation(tmp_path, prefix, "ada")
    Authority(path).revoke(prefix, "ada")
    path.unlink()
    make_invitation(tmp_path, prefix, "bob")
    authority = Authority(path)
    assert authority.revoke(prefix, "bob") == 1
    listed = bytes.fromhex(authority.read_members()[prefix]["revocations"])
    assert len(read_revocations(listed, authority.public_key, prefix)[1]) == 2
