"""The contract of a run: the settings that each trainer publishes, which are compared when a peer joins."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable

from hivemind import DHT

from swarm.config import AveragingConfig
from swarm.errors import SwarmError
from utils import FETCH_TIMEOUT, RunContract, fetch_dictionary

NUMBER = re.compile(r"\d{1,9}", re.ASCII)


def fetch_contracts(dht: DHT, prefix: str, timeout: float = FETCH_TIMEOUT) -> dict[bytes, RunContract]:
    """Return the contracts of live trainers by their public keys.

    :param timeout: seconds to wait for the DHT; if it does not answer, the result is empty
    """
    records = fetch_dictionary(dht, f"{prefix}_run", timeout)
    return {key: RunContract.parse_obj(entry.value) for key, entry in records.items() if entry.value is not None}


def describe_averaging(averaging: AveragingConfig) -> dict[str, str]:
    """Return the terms of a run's contract that concern averaging."""
    terms = {
        # The whole batch, without `batch_size_lead`, because each peer may start matchmaking as early as it needs.
        "target_batch_size": str(averaging.target_batch_size),
        "compression": f"gradients {averaging.compression}, state {averaging.state_compression}, "
        f"loaded {averaging.load_state_compression}",
        "averaging": f"groups of {averaging.target_group_size}, vectors of {averaging.min_vector_size}, "
        f"state every {averaging.average_state_every}, overlap {averaging.overlap:d}",
    }
    if averaging.local_steps > 1:
        terms["local_steps"] = str(averaging.local_steps)
        terms["local_steps_from"] = str(averaging.local_steps_from)
        terms["outer step"] = (
            f"rate {averaging.outer_lr:g}, momentum {averaging.outer_momentum:g}, density {averaging.density:g}"
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
    """Return the schedule in a contract; numbers that are missing or invalid keep their defaults."""
    names = [item.name for item in dataclasses.fields(TrainingSchedule)]
    texts = {name: contract.contract.get(name, "") for name in names}
    return TrainingSchedule(**{name: int(text) for name, text in texts.items() if NUMBER.fullmatch(text)})


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


class ContractMismatch(SwarmError):
    """This peer's settings differ from the run's."""


def require_same(prefix: str, mine: RunContract, others: list[RunContract]) -> None:
    """Compare a contract with the one that `choose_contract` returns.

    :raises ContractMismatch: they differ; its text names the differences, and the flags that remove them
    """
    if differences := find_differences(mine, others):
        flags = choose_contract(others).flags or "all that peers must share have their defaults"
        raise ContractMismatch(
            f"run {prefix!r} uses different settings; {'; '.join(differences)}. Use its flags ({flags}), or choose "
            "another `experiment_prefix`"
        )
