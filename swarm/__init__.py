"""Everything that hivemind 1.1.12 lacks or gets wrong; nothing here knows a model.

Each repair names what it repairs, as "(note NN)" where docs/hivemind.md has more;
tests/swarm/test_hivemind_gaps.py tells when hivemind repairs it itself.
"""

import multiprocessing

# Before hivemind is imported: helper processes inherit what these modules share with them, which other ways to start a
# process do not provide for.
multiprocessing.set_start_method("fork", force=True)
