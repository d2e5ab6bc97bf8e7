"""Collaborative training over hivemind 1.1.12: all that it lacks or gets wrong; nothing here knows a model or a flag.

Scripts use `Swarm` (joining.py), `SwarmConfig` and `AveragingConfig` (config.py), `make_identity` (identity.py),
`CollaborativeOptimizer` and `AveragingHelper` (optimizer.py), and `SwarmError`; see docs/design.md. A "note NN" is in
docs/hivemind.md. For many of them, a test in tests/swarm/test_hivemind_gaps.py fails once hivemind has repaired it.
"""

import logging
import multiprocessing

from common.console import UserError

logger = logging.getLogger("swarm")
# before hivemind is imported: helper processes inherit what these modules share with them, as only forks can
multiprocessing.set_start_method("fork", force=True)


class SwarmError(UserError):
    """An error of the swarm that the user can fix; its text names settings in backquotes, as SwarmConfig has them."""
