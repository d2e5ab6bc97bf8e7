"""Invitations to closed runs."""

import base64
import json
from pathlib import Path

from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from swarm.passes import Authority, Invitation
from utils import RecordValidator, find_peer_id


def make_invitation(folder: Path, prefix: str, name: str, lifetime: float = 3600.0, **changes) -> str:
    """The file of an invitation by the authority in this folder; `changes` are of what the pass says."""
    authority, path = Authority(folder / "authority.pem"), folder / f"{name}.invite"
    key = RSAPrivateKey()
    peer_id = find_peer_id(RecordValidator(key).local_public_key)
    said = dict(prefix=prefix, peer_id=peer_id, username=name, expires=get_dht_time() + lifetime, lifetime=lifetime)
    data = authority.sign(b"pass", (said | changes).values())
    with authority.open_members() as runs:
        authority.note(runs, prefix, data)
    Invitation(key, data, authority.public_key).save("--out", path)
    return str(path)


def secret_parts(invitation: str) -> list[str]:
    """Pieces of the key and of the pass in the text of an invitation, as any copy of them would hold: in base64 at each
    of its three offsets, hexadecimal, or as text that was made of the bytes."""
    parts = json.loads(invitation)
    found = []
    for data in (base64.b64decode(parts["key"])[100:], base64.b64decode(parts["pass"])):
        found += [base64.b64encode(data[at:])[:40].decode() for at in range(3)]
        found += [data[:30].hex(), data[:30].decode(errors="replace")]
    return found
