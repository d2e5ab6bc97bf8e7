"""What a newcomer was not told it takes over from the peers in --initial_peers: their run, and flags that its peers
share. Other values of these flags are refused.

They are its root of trust (see swarm/vouching.py). Their flags are parsed and checked as if they had been typed, and
none of them names a file or folder but the model shapes that came with this repository.
"""

import asyncio
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

from arguments import SwarmArguments, parse_arguments
from support.console import UserError
from support.flags import format_flag
from swarm.addresses import check_multiaddrs
from swarm.membership import Membership
from swarm.outside import ask_from_outside, find_problem
from swarm.status import resolve_initial_peers
from swarm.vouching import RunAttestation, merge_attestations

logger = logging.getLogger("joining")

OWN_FLAGS = ("experiment_prefix", "model_name_or_path", "tokenizer_path")  # what may lead elsewhere on each machine
CONFIGS = "configs"


def discover_settings(swarm: SwarmArguments, membership: Membership | None) -> list[str]:
    """The run that the peers in --initial_peers serve and the flags that they vouch for, as --NAME=VALUE.

    :raises UserError: they serve another run, or disagree; or nobody tells which run they serve, and none was given
    """
    if not swarm.initial_peers or not swarm.adopt or swarm.use_ipfs:
        return []
    prefix = swarm.experiment_prefix or (membership.prefix if membership else "")
    maddrs = resolve_initial_peers(swarm.initial_peers, prefix)
    check_multiaddrs("--initial_peers", maddrs, needs_peer_id=True)
    found = merge_attestations(asyncio.run(ask_from_outside(maddrs, membership)), prefix, swarm.new_run)
    if not found:
        if prefix:
            return [] if swarm.experiment_prefix else [f"--experiment_prefix={prefix}"]
        raise UserError(
            find_problem(maddrs, membership) or "--initial_peers do not tell which run they serve: --experiment_prefix"
        )
    if not prefix and not re.fullmatch(r"[\w-]{1,100}", found.prefix, re.ASCII):
        # it names folders and dashboards
        raise UserError(f"--initial_peers serve run {found.prefix!r}: if you trust that, give --experiment_prefix")
    settings = list_settings(found)
    if not found.contract and not settings:
        logger.info("--initial_peers know no settings of the run yet: what is not given has its default")
    return [f"--experiment_prefix={found.prefix}", *settings]


def list_settings(statement: RunAttestation) -> list[str]:
    """Return the flags that bind a peer that hears this, as --NAME=VALUE."""
    flags = statement.contract.flags if statement.contract else statement.flags
    return [*filter(is_for_all, (flag.replace(" ", "=", 1) for flag in re.split(" (?=--)", flags) if flag))]


def is_for_all(setting: str) -> bool:
    """Whether a flag means the same on each machine."""
    name, _, value = setting.removeprefix("--").partition("=")
    return name not in OWN_FLAGS and (name != "config_path" or value in map(str, Path(CONFIGS).glob("*.json")))


def require_settings(settings: Iterable[str], groups: tuple) -> None:
    """Raise a UserError that names the flags which differ from these settings.

    :param settings: as --NAME=VALUE
    :param groups: instances of the dataclasses
    """
    own = {name: value for group in groups for name, value in vars(group).items()}
    differences = []
    for setting in settings:
        name, theirs = split_setting(setting)
        _, mine = split_setting(format_flag(name, own[name]).replace(" ", "=", 1))
        # one file may be written in several ways
        if theirs != mine and not (name == "config_path" and os.path.realpath(theirs) == os.path.realpath(mine)):
            differences.append(f"--{name}: the run has {theirs}, you have {mine}")
    if differences:
        raise UserError(
            f"run {own['experiment_prefix']!r} uses different settings; {'; '.join(differences)}. Omit these flags to "
            "take over the run's, or begin another run with --new_run --experiment_prefix NAME"
        )


def require_vouched(vouched: RunAttestation | None, groups: tuple) -> None:
    """Raise a UserError if the flags differ from those that bind the first trainers; later, a contract binds.

    `apply_settings` has compared them before, unless --no_adopt or --use_ipfs skipped that, or the attesting peer
    had only just started.
    """
    if vouched and not vouched.contract:
        require_settings(list_settings(vouched), groups)


def split_setting(setting: str) -> tuple[str, str]:
    """Return the name of --NAME=VALUE, --NAME or --no_NAME, and its value in words."""
    is_off, name, value = re.fullmatch(r"--(no_)?(\w+)(?:=(.*))?", setting).groups()
    return name, value or ("off" if is_off else "on")


def apply_settings(groups: tuple, settings: list[str]) -> tuple:
    """The command line once more, with these settings where it does not give them; a line tells which.

    :param groups: as it was parsed before, instances of the dataclasses
    :raises UserError: it gives other values, or the settings do not fit it
    """
    if not settings:
        return groups
    given = " ".join(settings).replace("=", " ")
    try:
        adopted = parse_arguments(*map(type, groups), before=settings)
    except UserError as e:
        raise UserError(f"{e} (with {given} of --initial_peers; --no_adopt takes nothing over)") from e
    own, new = ({name: value for group in them for name, value in vars(group).items()} for them in (groups, adopted))
    require_settings(settings, adopted)
    names = [split_setting(setting)[0] for setting in settings]
    taken = [setting for name, setting in zip(names, settings, strict=True) if own[name] != new[name]]
    if taken:
        logger.info(f"taken over from --initial_peers: {' '.join(taken).replace('=', ' ')}")
    return adopted
