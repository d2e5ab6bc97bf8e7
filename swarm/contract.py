"""The contract of a run: the settings that each trainer publishes, which are compared when a peer joins."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

from hivemind.utils import get_dht_time

from arguments import AveragingArguments, SwarmArguments
from support.console import UserError
from swarm.dht import DHT
from swarm.vouching import ask_initial_peers
from utils import FETCH_TIMEOUT, RunContract, fetch_dictionary


def fetch_contracts(dht: DHT, prefix: str, timeout: float = FETCH_TIMEOUT) -> dict[bytes, RunContract]:
    """Return the contracts of live trainers by their public keys.

    :param timeout: seconds to wait for the DHT; if it does not answer, the result is empty
    """
    records = fetch_dictionary(dht, f"{prefix}_run", timeout)
    return {key: RunContract.parse_obj(entry.value) for key, entry in records.items() if entry.value is not None}


def describe_averaging(averaging: AveragingArguments) -> dict[str, str]:
    """Return the terms of a run's contract that concern averaging."""
    terms = {
        # The whole batch, without --batch_size_lead, because each peer may start matchmaking as early as it needs.
        "target_batch_size": str(averaging.target_batch_size),
        "compression": f"gradients {averaging.compression}, state {averaging.state_compression}, "
        f"loaded {averaging.load_state_compression}",
        "averaging": f"groups of {averaging.target_group_size}, vectors of {averaging.min_vector_size}, "
        f"state every {averaging.average_state_every}, overlap {averaging.overlap:d}",
    }
    if averaging.local_steps > 1:
        terms["local steps"] = (
            f"{averaging.local_steps} from epoch {averaging.local_steps_from}, outer rate {averaging.outer_lr:g}, "
            f"momentum {averaging.outer_momentum:g}, density {averaging.density:g}"
        )
    return terms


@dataclasses.dataclass
class TrainingSchedule:
    """The length of a run's epochs and of the whole run, as its contract defines them."""

    target_batch_size: int | None = None  # samples per epoch
    total_steps: int | None = None  # epochs until the learning rate is lowest
    local_steps: int = 1  # factor on the samples per epoch, once the run is at epoch local_steps_from
    local_steps_from: int | None = None

    def count_samples(self, epoch: int) -> int:
        """Return the number of samples of all epochs before this one."""
        return self.target_batch_size * (epoch + (self.local_steps - 1) * max(0, epoch - (self.local_steps_from or 0)))


def parse_schedule(contract: RunContract) -> TrainingSchedule:
    """Parse the schedule from the texts of a contract; numbers that are missing keep their defaults."""

    def find_numbers(name: str, pattern: str) -> list[int | None]:
        match = re.fullmatch(pattern, contract.contract.get(name, ""), re.ASCII)
        return [int(number) for number in match.groups()] if match else []

    return TrainingSchedule(
        *(find_numbers("target_batch_size", r"(\d{1,9})") or [None]),
        *(find_numbers("schedule", r".*\btotal (\d{1,9})") or [None]),
        *find_numbers("local steps", r"(\d{1,9}) from epoch (\d{1,9}),.*"),
    )


def publish_contract(dht: DHT, prefix: str, public_key: bytes, contract: RunContract | None, expiration: float):
    """Store this peer's signed contract for `expiration` seconds, or None to withdraw it; return a future."""
    return dht.store(
        f"{prefix}_run",
        subkey=public_key,
        value=None if contract is None else contract.dict(),
        expiration_time=get_dht_time() + expiration,
        return_future=True,
    )


def choose_contract(contracts: Iterable[RunContract]) -> RunContract | None:
    """Return the contract with the most holders, or the oldest of several, with the flags that most holders name."""
    contracts = sorted(contracts, key=lambda contract: contract.joined)
    votes = Counter(tuple(sorted(contract.contract.items())) for contract in contracts)
    chosen = max(contracts, key=lambda contract: votes[tuple(sorted(contract.contract.items()))], default=None)
    flags = Counter(contract.flags for contract in contracts if contract.contract == chosen.contract)
    return chosen and chosen.copy(update={"flags": flags.most_common(1)[0][0]})


def find_differences(mine: RunContract, others: Iterable[RunContract]) -> list[str]:
    """Return one text per term in which this contract differs from the one that `choose_contract` returns."""
    theirs = (choose_contract(others) or mine).contract
    names = sorted(set(theirs) | set(mine.contract))
    return [
        f"{name}: the run has {theirs.get(name, 'none')}, you have {mine.contract.get(name, 'none')}"
        for name in names
        if theirs.get(name) != mine.contract.get(name)
    ]


def raise_contract_mismatch(prefix: str, differences: list[str], others: Iterable[RunContract]) -> NoReturn:
    """Raise a UserError with the differences, and with the flags that remove them."""
    raise UserError(
        f"run {prefix!r} uses different settings; {'; '.join(differences)}. Use its flags "
        f"({choose_contract(others).flags or 'all that peers must share have their defaults'}), or choose another "
        "--experiment_prefix"
    )


def require_same(prefix: str, contract: dict[str, str], others: list[RunContract]) -> None:
    """Raise a UserError if these terms differ from the contract that `choose_contract` returns."""
    if differences := find_differences(RunContract(joined=get_dht_time(), contract=contract), others):
        raise_contract_mismatch(prefix, differences, others)


def resolve_contract(dht: DHT, prefix: str, own_key: bytes = b"") -> list[RunContract]:
    """Return the contracts that bind a peer: the one that --initial_peers attest, or none if no peer has contributed.

    Only if no initial peer answered, these are the contracts that live trainers published, which any peer can do.
    """
    if dht.vouched:
        return [dht.vouched.contract] if dht.vouched.contract else []
    return [other for key, other in fetch_contracts(dht, prefix).items() if key != own_key]


def compare_with_run(dht: DHT, prefix: str, contract: dict[str, str]) -> int:
    """Raise a UserError if this contract differs from the run's. For peers that do not train, such as monitors.

    :returns: the number of contracts that it was compared with
    """
    others = resolve_contract(dht, prefix)
    require_same(prefix, contract, others)
    return len(others)


def join_run(
    dht: DHT,
    public_key: bytes,
    contract: dict[str, str],
    swarm: SwarmArguments,
    averaging: AveragingArguments,
    flags: str = "",
) -> RunContract:
    """Compare this peer's contract with the run's and publish it.

    Peers that start at the same moment do not see each other, so each compares again after it has published. Then at
    least one of two peers sees the other. Only peers that joined earlier count. See also `recheck_contract`.

    :param flags: the flags that define the contract, see `describe_shared`
    :raises UserError: if the contracts differ
    """
    prefix, expiration = swarm.experiment_prefix, averaging.metadata_expiration
    mine = RunContract(joined=get_dht_time(), contract=contract, flags=flags)
    for published in (False, True):
        others = resolve_contract(dht, prefix, public_key)
        if published:
            others = [other for other in others if other.joined < mine.joined]
        if differences := find_differences(mine, others):
            if published:
                publish_contract(dht, prefix, public_key, None, expiration).result(timeout=30)
            raise_contract_mismatch(prefix, differences, others)
        if not published:
            publish_contract(dht, prefix, public_key, mine, expiration).result(timeout=30)
    return mine


def recheck_contract(dht: DHT, prefix: str, mine: RunContract) -> None:
    """Compare the contracts again after an epoch, if this peer joined before any peer had contributed.

    :raises UserError: if the run turns out to have another contract
    """
    if dht.vouched and not dht.vouched.contract:
        dht.vouched = ask_initial_peers(dht, prefix, map(str, dht.initial_peers or ()), is_new_run=True)
        require_same(prefix, mine.contract, resolve_contract(dht, prefix) if dht.vouched else [])
