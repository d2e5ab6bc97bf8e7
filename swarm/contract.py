"""The contract of a run: what each trainer publishes that it trains by, compared when a peer joins."""

import dataclasses
import re
from collections import Counter
from typing import NoReturn

import hivemind
from hivemind.utils import get_dht_time

from support.console import UserError
from utils import FETCH_TIMEOUT, RunContract, fetch_dictionary


def fetch_contracts(dht: hivemind.DHT, prefix: str, timeout: float = FETCH_TIMEOUT) -> dict[bytes, RunContract]:
    """The contracts that live trainers have published, by their public keys.

    :param timeout: seconds to wait for the DHT; the result is empty when it does not answer
    """
    found = fetch_dictionary(dht, f"{prefix}_run", timeout)
    return {key: RunContract.parse_obj(entry.value) for key, entry in found.items() if entry.value is not None}


@dataclasses.dataclass
class RunSchedule:
    """What the contracts of a run's trainers say about its course."""

    target_batch_size: int | None = None  # samples that make an epoch
    total_steps: int | None = None  # epochs, at the end of which the learning rate is lowest


def find_run_schedule(dht: hivemind.DHT, prefix: str, timeout: float) -> RunSchedule | None:
    """Return the schedule in the contract that most trainers have published; None while there is none.

    :param timeout: seconds to wait for the DHT
    """
    contracts = [contract.contract for contract in fetch_contracts(dht, prefix, timeout).values()]

    def find_most_frequent(name: str, pattern: str) -> int | None:
        matches = [re.fullmatch(pattern, contract.get(name, ""), re.ASCII) for contract in contracts]
        numbers = Counter(int(match[1]) for match in matches if match)
        return numbers.most_common(1)[0][0] if numbers else None

    schedule = RunSchedule(
        find_most_frequent("target_batch_size", r"(\d{1,9})"), find_most_frequent("schedule", r".*\btotal (\d{1,9})")
    )
    return schedule if contracts else None


def publish_contract(
    dht: hivemind.DHT, prefix: str, public_key: bytes, contract: RunContract | None, expiration: float
):
    """Store this peer's signed contract for `expiration` seconds, or withdraw it with None, without waiting."""
    return dht.store(
        f"{prefix}_run",
        subkey=public_key,
        value=None if contract is None else contract.dict(),
        expiration_time=get_dht_time() + expiration,
        return_future=True,
    )


def find_differences(mine: RunContract, others: list[RunContract]) -> list[str]:
    """Where my contract differs from the one that most others hold (among equals the eldest), one text per term."""
    if not others:
        return []
    votes = Counter(tuple(sorted(other.contract.items())) for other in others)
    joined = {tuple(sorted(other.contract.items())): -other.joined for other in sorted(others, key=lambda o: -o.joined)}
    theirs = dict(max(votes, key=lambda terms: (votes[terms], joined[terms])))
    names = sorted(set(theirs) | set(mine.contract))
    return [
        f"{name}: the run has {theirs.get(name, 'none')}, you have {mine.contract.get(name, 'none')}"
        for name in names
        if theirs.get(name) != mine.contract.get(name)
    ]


def stop_different(prefix: str, differences: list[str]) -> NoReturn:
    raise UserError(
        f"run {prefix!r} uses different settings; {'; '.join(differences)}. Take over its flags, or choose another "
        "--experiment_prefix"
    )


def compare_with_run(dht: hivemind.DHT, prefix: str, contract: dict[str, str]) -> int:
    """A UserError where this contract differs from the live trainers'; for who helps them, and binds nobody.

    :returns: the number of these trainers
    """
    others = list(fetch_contracts(dht, prefix).values())
    if differences := find_differences(RunContract(joined=get_dht_time(), contract=contract), others):
        stop_different(prefix, differences)
    return len(others)


def join_run(
    dht: hivemind.DHT, prefix: str, public_key: bytes, contract: dict[str, str], expiration: float
) -> RunContract:
    """Compare this peer's contract with the live trainers' and publish it; a UserError where they differ.

    Peers that start at the same moment see nobody, so each looks again after it has published: then at least one of two
    sees the other, and only elder peers count.
    """
    mine = RunContract(joined=get_dht_time(), contract=contract)
    for published in (False, True):
        others = [other for key, other in fetch_contracts(dht, prefix).items() if key != public_key]
        if published:
            others = [other for other in others if other.joined < mine.joined]
        if differences := find_differences(mine, others):
            if published:
                publish_contract(dht, prefix, public_key, None, expiration).result(timeout=30)
            stop_different(prefix, differences)
        if not published:
            publish_contract(dht, prefix, public_key, mine, expiration).result(timeout=30)
    return mine
