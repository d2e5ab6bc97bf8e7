"""Settings that a new peer inherits from the peers in --initial_peers: the run name, and flags that all peers share.
A command line that sets one of these flags to another value is rejected.

The initial peers are the root of trust (see swarm/vouching.py). Their flags are parsed and checked like typed ones.
None of these flags can name a file or folder, except for the model shapes in this repository.
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

OWN_FLAGS = ("experiment_prefix", "model_name_or_path", "tokenizer_path")  # may mean another thing on each machine
CONFIGS = "configs"


def discover_settings(swarm: SwarmArguments, membership: Membership | None) -> list[str]:
    """Ask the peers in --initial_peers for their run name and shared flags and return these as --NAME=VALUE.

    :raises UserError: if the peers disagree or serve another run, or if the run name remains unknown
    """
    if not swarm.initial_peers or not swarm.adopt or swarm.use_ipfs:
        return []
    prefix = swarm.experiment_prefix or (membership.prefix if membership else "")
    maddrs = resolve_initial_peers(swarm.initial_peers, prefix)
    check_multiaddrs("--initial_peers", maddrs, needs_peer_id=True)
    attestation = merge_attestations(asyncio.run(ask_from_outside(maddrs, membership)), prefix, swarm.new_run)
    if not attestation:
        if prefix:
            return [] if swarm.experiment_prefix else [f"--experiment_prefix={prefix}"]
        problem = find_problem(maddrs, membership)
        raise UserError(problem or "--initial_peers did not send a run name: pass --experiment_prefix")
    if not prefix and not re.fullmatch(r"[\w-]{1,100}", attestation.prefix, re.ASCII):
        # The name becomes a part of folder and dashboard names, so the user must confirm an unusual one.
        raise UserError(f"--initial_peers serve run {attestation.prefix!r}: if you trust it, pass --experiment_prefix")
    settings = list_settings(attestation)
    if not attestation.contract and not settings:
        logger.info("--initial_peers have no settings of the run yet: using defaults for all flags that are not set")
    return [f"--experiment_prefix={attestation.prefix}", *settings]


def list_settings(statement: RunAttestation) -> list[str]:
    """Return the flags in an attestation that bind a new peer, as --NAME=VALUE."""
    flags = statement.contract.flags if statement.contract else statement.flags
    return [*filter(is_for_all, (flag.replace(" ", "=", 1) for flag in re.split(" (?=--)", flags) if flag))]


def is_for_all(setting: str) -> bool:
    """Return whether a flag means the same on each machine."""
    name, _, value = setting.removeprefix("--").partition("=")
    return name not in OWN_FLAGS and (name != "config_path" or value in map(str, Path(CONFIGS).glob("*.json")))


def require_settings(settings: Iterable[str], groups: tuple) -> None:
    """Raise a UserError that lists the flags which differ from the run's.

    :param settings: the run's flags as --NAME=VALUE
    :param groups: the parsed command line, one dataclass instance per group of flags
    """
    own = {name: value for group in groups for name, value in vars(group).items()}
    differences = []
    for setting in settings:
        name, theirs = split_setting(setting)
        _, mine = split_setting(format_flag(name, own[name]).replace(" ", "=", 1))
        # Different paths may lead to the same file.
        if theirs != mine and not (name == "config_path" and os.path.realpath(theirs) == os.path.realpath(mine)):
            differences.append(f"--{name}: the run has {theirs}, you have {mine}")
    if differences:
        raise UserError(
            f"run {own['experiment_prefix']!r} uses different settings; {'; '.join(differences)}. Omit these flags to "
            "use the run's, or start another run with --new_run --experiment_prefix NAME"
        )


def require_vouched(vouched: RunAttestation | None, groups: tuple) -> None:
    """Raise a UserError if the flags differ from the attested ones, which bind trainers until there is a contract.

    Usually `apply_settings` has compared them before. It has not if --no_adopt or --use_ipfs skipped that, or if the
    attesting peer had only just started.
    """
    if vouched and not vouched.contract:
        require_settings(list_settings(vouched), groups)


def split_setting(setting: str) -> tuple[str, str]:
    """Split --NAME=VALUE, --NAME or --no_NAME into the name and the value, which is "on" or "off" for switches."""
    is_off, name, value = re.fullmatch(r"--(no_)?(\w+)(?:=(.*))?", setting).groups()
    return name, value or ("off" if is_off else "on")


def apply_settings(groups: tuple, settings: list[str]) -> tuple:
    """Parse the command line again, with the run's settings as defaults, and log the flags that changed.

    :param groups: the command line as parsed before, one dataclass instance per group of flags
    :param settings: the run's flags as --NAME=VALUE
    :raises UserError: if the command line sets other values, or does not fit the settings
    """
    if not settings:
        return groups
    try:
        adopted = parse_arguments(*map(type, groups), before=settings)
    except UserError as e:
        flags = " ".join(settings).replace("=", " ")
        raise UserError(f"{e} (with {flags} from --initial_peers; --no_adopt ignores their flags)") from e
    own, new = ({name: value for group in each for name, value in vars(group).items()} for each in (groups, adopted))
    require_settings(settings, adopted)
    names = [split_setting(setting)[0] for setting in settings]
    inherited = [setting for name, setting in zip(names, settings, strict=True) if own[name] != new[name]]
    if inherited:
        logger.info(f"inherited from --initial_peers: {' '.join(inherited).replace('=', ' ')}")
    return adopted
