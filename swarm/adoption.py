"""What a newcomer was not told it takes over from the peers in --initial_peers: their run, and flags that its peers
share.

They are its root of trust (see swarm/vouching.py). Their flags are parsed and checked as if they had been typed, what
was typed goes before them, and none of them names a file or folder but the model shapes that came with this repository.
"""

import asyncio
import logging
import re
from pathlib import Path

from arguments import SwarmArguments, parse_arguments
from support.console import UserError
from swarm.addresses import check_multiaddrs
from swarm.membership import MEMBERS
from swarm.outside import ask_from_outside, find_problem
from swarm.status import resolve_initial_peers
from swarm.vouching import combine

logger = logging.getLogger("joining")

OWN_FLAGS = ("experiment_prefix", "model_name_or_path", "tokenizer_path")  # what may lead elsewhere on each machine
CONFIGS = "configs"


def find_settings(swarm: SwarmArguments) -> list[str]:
    """The run that the peers in --initial_peers serve and the flags that they vouch for, as --NAME=VALUE.

    :raises UserError: they serve another run, or disagree; or nobody tells which run they serve, and none was given
    """
    if not swarm.initial_peers or not swarm.adopt or swarm.use_ipfs:
        return []
    MEMBERS.enter(swarm)
    prefix = swarm.experiment_prefix or MEMBERS.prefix
    maddrs = resolve_initial_peers(swarm.initial_peers, prefix)
    check_multiaddrs("--initial_peers", maddrs, needs_peer_id=True)
    found = combine(asyncio.run(ask_from_outside(maddrs)), prefix, swarm.new_run)
    if not found:
        if prefix:
            return [] if swarm.experiment_prefix else [f"--experiment_prefix={prefix}"]
        raise UserError(find_problem(maddrs) or "--initial_peers do not tell which run they serve: --experiment_prefix")
    if not prefix and not re.fullmatch(r"[\w-]{1,100}", found.prefix, re.ASCII):
        # it names folders and dashboards
        raise UserError(f"--initial_peers serve run {found.prefix!r}: if you trust that, give --experiment_prefix")
    flags = found.contract.flags if found.contract else found.flags
    if not found.contract and not flags:
        logger.info("--initial_peers know no settings of the run yet: what is not given has its default")
    settings = [flag.replace(" ", "=", 1) for flag in re.split(" (?=--)", flags) if flag]
    return [f"--experiment_prefix={found.prefix}", *filter(is_for_all, settings)]


def is_for_all(setting: str) -> bool:
    """Whether a flag means the same on each machine."""
    name, _, value = setting.removeprefix("--").partition("=")
    return name not in OWN_FLAGS and (name != "config_path" or value in map(str, Path(CONFIGS).glob("*.json")))


def adopt(groups: tuple, settings: list[str]) -> tuple:
    """The command line once more, with these settings where it does not say otherwise; a line tells which.

    :param groups: as it was parsed before, instances of the dataclasses
    """
    if not settings:
        return groups
    given = " ".join(settings).replace("=", " ")
    try:
        adopted = parse_arguments(*map(type, groups), before=settings)
    except UserError as e:
        raise UserError(f"{e} (with {given} of --initial_peers; --no_adopt takes nothing over)") from e
    own, new = ({name: value for group in them for name, value in vars(group).items()} for them in (groups, adopted))
    names = [re.match("--(?:no_)?([^=]+)", setting)[1] for setting in settings]
    taken = [setting for name, setting in zip(names, settings, strict=True) if own[name] != new[name]]
    if taken:
        logger.info(f"taken over from --initial_peers: {' '.join(taken).replace('=', ' ')}")
    return adopted
