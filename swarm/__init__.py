"""Everything that hivemind 1.1.12 lacks or gets wrong; nothing here knows a model.

Each repair names what it repairs, as "(note NN)" where docs/hivemind.md has more;
tests/swarm/test_hivemind_gaps.py tells when hivemind repairs it itself. What stands below has to be set before hivemind
is imported.
"""

import multiprocessing
import os

# Two public peers that dial each other at the same moment can both fail, and a round is lost: 10 of 20 first dials did,
# none of 25 with this setting. The daemon reads it when the DHT starts.
os.environ.setdefault("LIBP2P_TCP_REUSEPORT", "false")
# p2pd starts two relay services, one that passes 128 kB and one that passes 4 GB, and the later one wins: on two cores
# the small one in 9 of 12 starts, on one never (of 16). One core is enough for p2pd: 0.5 GB/s with either setting.
os.environ.setdefault("GOMAXPROCS", "1")

# Helper processes inherit what these modules share with them, which other ways to start a process do not provide for.
multiprocessing.set_start_method("fork", force=True)
