"""run_training_monitor.py that is not reached through a third peer, nor reaches others so."""

from dataclasses import dataclass

import run_training_monitor
from arguments import SwarmArguments, parse_arguments
from common.flags import flag


@dataclass
class UnrelayedArguments(SwarmArguments):
    """The connection to the swarm, with another field of SwarmConfig."""

    use_relay: bool = flag(False, "Reach peers behind routers, and be reached by others, through a third peer.")


with run_training_monitor.clean_end():
    _, *groups = run_training_monitor.GROUPS
    run_training_monitor.main(*parse_arguments(UnrelayedArguments, *groups))
