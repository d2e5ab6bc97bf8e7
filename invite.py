#!/usr/bin/env python
"""Invitations to a closed run: who may take part in it, for how long, and who may not any more.

    python run_training_monitor.py --experiment_prefix my_albert --authorize --authority_key authority.pem ...
    python invite.py --authority_key authority.pem --username ada --expires 30d --out ada.invite

writes one file, for one peer, to be sent to Ada by a way that nobody else reads: `run_trainer.py --invite ada.invite`.
Her pass is renewed for as long as the monitor with the authority's key is there, until

    python invite.py --authority_key authority.pem --revoke ada

which reaches the run within a minute: by that monitor, if it runs on this machine, and by --initial_peers. --list shows
all invitations. The key is who decides: keep it, and the list of members beside it, on one machine, and back both up.
"""

import time
from pathlib import Path

from arguments import InviteArguments, SwarmArguments, parse_arguments
from support.console import UserError, edge, format_count

if __name__ == "__main__":  # before the imports below, which take seconds
    with edge(interrupted="no invitation was written"):
        [args] = parse_arguments(InviteArguments, description=__doc__)

from hivemind.utils.crypto import RSAPrivateKey

from swarm.passes import Authority, Invitation, parse_duration
from utils import RecordValidator, find_peer_id


def invite(args: InviteArguments) -> None:
    lifetime, path = parse_duration("--expires", args.expires), Path(args.out or f"{args.username}.invite")
    if path.exists():
        raise UserError(f"--out {path} exists: name a new file, as an invitation is for one peer")
    prefix, authority = find_run(args), Authority(args.authority_key)
    key = RSAPrivateKey()
    data = authority.issue(prefix, find_peer_id(RecordValidator(key).local_public_key), args.username, lifetime)
    with authority.open_members() as runs:
        authority.record_issued(runs, prefix, data)
        Invitation(key, data, authority.public_key).save("--out", path)
    print(f"{path}: {args.username} may join run {prefix!r} by run_trainer.py --invite {path}; send it to nobody else")


def revoke(args: InviteArguments) -> None:
    prefix, authority = find_run(args), Authority(args.authority_key)
    with authority.open_members() as runs:
        count = authority.revoke(runs, prefix, args.revoke)
    if not count:
        raise UserError(f"--revoke {args.revoke}: run {prefix!r} has no such member, or not any more; --list shows all")
    print(f"{args.revoke}: {format_count(count, 'invitation')} revoked")
    if args.initial_peers:
        from machine.settings import begin

        begin((SwarmArguments(prefix, args.initial_peers, authority_key=args.authority_key),))  # shows them the list


def show_members(args: InviteArguments) -> None:
    for prefix, run in Authority(args.authority_key).read_members().items():
        for peer_id, member in run["members"].items() if args.experiment_prefix in ("", prefix) else ():
            expires = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(member["expires"]))
            state = "expired " if member["expires"] <= time.time() else "expires "
            state = "revoked" if member["revoked"] else state + expires
            print(f"{prefix}  {member['username']}  {peer_id}  {state}")


def main(args: InviteArguments) -> None:
    (show_members if args.list else revoke if args.revoke else invite)(args)


def find_run(args: InviteArguments) -> str:
    """:raises UserError: the key serves several runs, or none yet, and none of them is given"""
    if args.experiment_prefix:
        return args.experiment_prefix
    runs = sorted(Authority(args.authority_key).read_members()) if Path(args.authority_key).exists() else []
    if len(runs) != 1:
        which = f"has served {' and '.join(runs)}" if runs else "has served no run yet: start its monitor first"
        raise UserError(f"--authority_key {args.authority_key} {which}, or give --experiment_prefix")
    return runs[0]


if __name__ == "__main__":
    with edge(interrupted="no invitation was written"):
        main(args)
