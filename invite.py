#!/usr/bin/env python
"""Manage the members of a closed run: invite them, revoke invitations, list all.

    python run_training_monitor.py --experiment_prefix my_albert --authorize --authority_key authority.pem ...
    python invite.py --authority_key authority.pem --username ada --out ada.invite

The second command writes one file, for one peer. Send it to Ada over a private channel: she starts
`run_trainer.py --invite ada.invite`. She may take part until it expires, or until you run

    python invite.py --authority_key authority.pem --revoke ada

A revocation reaches the run within a minute. Without --username and --revoke, the script lists all invitations. Keep
the key, and the member list next to it, on one machine, and back both up.
"""

import asyncio
import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path

from arguments import SwarmArguments, parse_arguments
from common.console import UserError, edge, format_count
from common.flags import FlagGroup, check_username, flag


@dataclass
class InviteArguments(FlagGroup):
    """Invitations to closed runs."""

    authority_key: str = flag("authority.pem", "Key file that signs credentials, as the run's monitor created it.")
    experiment_prefix: str = flag("", "Name of the run. Default: the key's only run.", aliases=["--run_id"])
    username: str | None = flag(None, "Invite a member with this name.", excludes="revoke")
    expires: str = flag("365d", "With --username: validity of the invitation: 30d, 12h, 45m, 90s.")
    out: str | None = flag(None, "With --username: file for the invitation. Default: NAME.invite.")
    revoke: str | None = flag(None, "Revoke all invitations of the member with this name.")
    initial_peers: list[str] = flag([], "With --revoke: peers of the run to notify, if its monitor runs elsewhere.")

    def __post_init__(self):
        super().__post_init__()
        check_username(self.username)


if __name__ == "__main__":  # before the imports below, which take seconds
    with edge(interrupted="`python invite.py` shows what was done"):
        [args] = parse_arguments(InviteArguments, description=__doc__)

from swarm.credentials import Authority

UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}  # seconds
MAX_LIFETIME = 3660 * 86400.0  # seconds


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as 30d, 12h, 45m or 90s, or raise a UserError."""
    match = re.fullmatch(r"(\d{1,9})([dhms])", text, re.ASCII)
    seconds = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not 0.0 < seconds <= MAX_LIFETIME:
        raise UserError(f"--expires {text} is not a time such as 30d, 12h, 45m or 90s, at most ten years")
    return seconds


def invite(args: InviteArguments) -> None:
    """Write an invitation file for --username and print how to use it."""
    lifetime = parse_duration(args.expires)
    path = Path(args.out or f"{args.username}.invite")
    if path.exists():
        raise UserError(f"--out {path} exists: name a new file, because an invitation is for one peer")
    prefix = find_run(args)
    Authority(args.authority_key).invite(prefix, args.username, lifetime, path)
    print(f"{path}: {args.username} may join run {prefix!r} by run_trainer.py --invite {path}; send it to no one else")


def revoke(args: InviteArguments) -> None:
    """Revoke all invitations of a name, and publish that to --initial_peers if they are given."""
    prefix = find_run(args)
    membership = None
    if args.initial_peers and prefix in read_members(args):
        from swarm.attestation import contact_initial_peers
        from swarm.identity import make_identity
        from training.settings import make_swarm_config

        config = make_swarm_config(SwarmArguments(prefix, args.initial_peers, authority_key=args.authority_key))
        membership = make_identity(config)
        # loads their revocation list, which the new one replaces; the second call reports failures
        with contextlib.suppress(UserError):
            asyncio.run(contact_initial_peers(config.initial_peers, membership))
        membership.load_revocations()
    count = Authority(args.authority_key).revoke(prefix, args.revoke)
    print(f"{args.revoke}: {format_count(count, 'invitation')} revoked")
    if membership:
        membership.load_revocations()
        # sends them the new revocation list
        _, problem = asyncio.run(contact_initial_peers(config.initial_peers, membership))
        if problem:
            raise UserError(problem)


def show_members(args: InviteArguments) -> None:
    """Print the members of all runs, and until when they may take part."""
    for prefix, run in read_members(args).items():
        for peer_id, member in run["members"].items():
            expires = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(member["expires"]))
            verb = "expired" if member["expires"] <= time.time() else "expires"
            state = "revoked" if member["revoked"] else f"{verb} {expires}"
            print(f"{prefix}  {member['username']}  {peer_id}  {state}")


def read_members(args: InviteArguments) -> dict[str, dict]:
    """Return the members of each run that the key has served, or raise a UserError if there is none."""
    # Authority would create a missing key
    runs = Authority(args.authority_key).read_members() if Path(args.authority_key).exists() else {}
    if not runs:
        raise UserError(f"--authority_key {args.authority_key} has served no run yet: start its monitor first")
    return runs


def find_run(args: InviteArguments) -> str:
    """Return the run of --experiment_prefix, or the only one that the key has served, or raise a UserError."""
    if args.experiment_prefix:
        return args.experiment_prefix
    runs = sorted(read_members(args))
    if len(runs) != 1:
        raise UserError(f"--authority_key has served {' and '.join(runs)}: give --experiment_prefix")
    return runs[0]


def main(args: InviteArguments) -> None:
    if args.username:
        invite(args)
    elif args.revoke:
        revoke(args)
    else:
        show_members(args)


if __name__ == "__main__":
    with edge(interrupted="`python invite.py` shows what was done"):
        main(args)
