"""The settings of the swarm. Scripts make them from their flags, which have the same names, by `make_config`."""

from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class SwarmConfig:
    """The settings with which a peer finds the others and is found by them."""

    experiment_prefix: str  # the name of the run
    initial_peers: list[str] = field(default_factory=list)  # multiaddrs; with use_ipfs, peer ids as /p2p/XXXX
    host_maddrs: list[str] = field(default_factory=lambda: ["/ip4/0.0.0.0/tcp/0"])  # to listen on
    announce_maddrs: list[str] = field(default_factory=list)  # to tell other peers, instead of those of host_maddrs
    new_run: bool = False  # start a run, even if the initial peers serve another one
    use_ipfs: bool = False  # find the initial peers through the public IPFS network
    client_mode: bool = False  # accept no connections
    use_relay: bool = True  # reach peers behind routers, and be reached by others, through a third peer
    identity_path: str | None = None  # the file of this peer's key
    invite: str | None = None  # in a closed run, the file of the invitation
    authority_key: str | None = None  # on a closed run's monitor, the file of the key that signs credentials
    username: str | None = None


@dataclass(frozen=True)
class AveragingConfig:
    """The settings of batches and averaging. With None, a time in seconds follows from the network."""

    target_batch_size: int  # samples of an epoch
    batch_size_lead: int  # samples by which an epoch ends before that number
    matchmaking_time: float | None
    target_group_size: int  # the maximum number of trainers in a group
    min_vector_size: int  # the minimum number of elements that a peer averages
    compression: str  # the name of a codec, as the other two; the caller of CollaborativeOptimizer passes the codecs
    load_state_compression: str
    average_state_every: int  # epochs between two rounds of parameters
    local_steps: int  # batches of target_batch_size per epoch, in which peers step by themselves; 1: no local steps
    local_steps_from: int | None  # the first epoch with local steps
    overlap: bool  # whether rounds run in the background
    # no script has flags for the following
    state_compression: str = "none"
    averaging_timeout: float | None = None
    next_chunk_timeout: float | None = None
    robust_averaging: str = "clip"  # or none: trust all gradients
    outer_lr: float = 1.0  # of the step after local steps, and its momentum (docs/measured.md)
    outer_momentum: float = 0.5
    density: float = 0.03  # the share of entries in sparse pseudo-gradients
    min_refresh_period: float = 0.5  # seconds between two refreshes of the swarm's progress
    max_refresh_period: float = 5.0
    default_refresh_period: float = 1.0  # before any progress is reported
    metadata_expiration: float = 120.0  # seconds for which records stay in the DHT


def count_batches(epoch: int, local_steps: int, local_steps_from: int | None) -> int:
    """Return the number of batches of target_batch_size samples in all epochs before this one."""
    more = max(0, local_steps - 1)  # a contract may say 0
    return epoch + more * max(0, epoch - (local_steps_from or 0))


def make_config(kind: type, source: object, **values: object):
    """Return a config of this class with these values, and the attributes of another object with its fields' names."""
    found = {item.name: getattr(source, item.name) for item in fields(kind) if hasattr(source, item.name)}
    return kind(**{**found, **values})
