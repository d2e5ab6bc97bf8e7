"""The contract of a run: the settings that each trainer publishes, which are compared when a peer joins."""

from collections import Counter
from collections.abc import Iterable

from hivemind import DHT
from hivemind.optim.progress_tracker import TrainingProgressSchema
from pydantic.v1 import BaseModel, confloat, constr, root_validator

from swarm import SwarmError
from utils import FETCH_TIMEOUT, Flags, MetricSchema, PublicKeyBytes, fetch_dictionary

CONTRACT_LIFETIME = 120.0  # seconds for which a contract stays in the DHT
MAX_CONTRACT_BYTES = 9000  # an attestation carries it through a hivemind pipe, which breaks at 16 KB


class RunContract(BaseModel):
    """The settings that one peer trains with, as a map of names to texts, so that later versions can add names."""

    joined: confloat(strict=True, ge=0.0, le=1e11)  # Unix time of this peer's first publication of its contract
    contract: dict[constr(strict=True, min_length=1, max_length=64), constr(strict=True, max_length=200)]
    flags: Flags = ""  # the flags that define the contract

    @root_validator(skip_on_failure=True)
    def bound_entries(cls, values: dict) -> dict:
        """Bound the size of the map, and allow only text that other peers can print."""
        texts = "".join(text for entry in values["contract"].items() for text in entry)
        if len(values["contract"]) > 32 or len(texts.encode()) > MAX_CONTRACT_BYTES or not texts.isprintable():
            raise ValueError(f"a contract has 32 entries and {MAX_CONTRACT_BYTES:,} bytes of printable text at most")
        return values


class RunSchema(MetricSchema, TrainingProgressSchema):
    """The schema of the keys `{prefix}_metrics`, `_progress` and `_run`: dictionaries of records by public key."""

    run: dict[PublicKeyBytes, RunContract | None]


def fetch_contracts(dht: DHT, prefix: str, timeout: float = FETCH_TIMEOUT) -> dict[bytes, RunContract]:
    """Return the contracts of live trainers by their public keys, see `fetch_dictionary`."""
    return {key: it for key, (it, _) in fetch_dictionary(dht, f"{prefix}_run", RunContract, timeout).items()}


def choose_contract(contracts: Iterable[RunContract]) -> RunContract | None:
    """Return the contract with the most holders, or the oldest of several, with the flags that most holders name."""
    contracts = sorted(contracts, key=lambda contract: contract.joined)
    votes = Counter(tuple(sorted(contract.contract.items())) for contract in contracts)
    chosen = max(contracts, key=lambda contract: votes[tuple(sorted(contract.contract.items()))], default=None)
    flags = Counter(contract.flags for contract in contracts if contract.contract == chosen.contract)
    return chosen and chosen.copy(update={"flags": flags.most_common(1)[0][0]})


def find_differences(mine: RunContract, others: Iterable[RunContract]) -> list[str]:
    """Return one text per term in which this contract differs from the one of `choose_contract`."""
    theirs = (choose_contract(others) or mine).contract
    return [
        f"{name}: the run has {theirs.get(name, 'none')}, you have {mine.contract.get(name, 'none')}"
        for name in sorted(theirs.keys() | mine.contract.keys())
        if theirs.get(name) != mine.contract.get(name)
    ]


class ContractMismatch(SwarmError):
    """This peer's settings differ from the run's."""


def require_same(prefix: str, mine: RunContract, others: list[RunContract]) -> None:
    """Raise a ContractMismatch, with the flags to use, if a contract differs from the one of `choose_contract`."""
    if differences := find_differences(mine, others):
        flags = choose_contract(others).flags or "all that peers must share have their defaults"
        raise ContractMismatch(
            f"run {prefix!r} uses different settings; {'; '.join(differences)}. Use its flags ({flags}) and its "
            "version of the code, or choose another `experiment_prefix`"
        )
