"""A joining peer believes the peers in --initial_peers, and not the records of untrusted peers."""

import re
import sys
from functools import partial

import pytest
from hivemind.utils import get_dht_time
from mains import refuse
from members import addresses, run_peer
from processes import make_prefix, wait_until
from records import make_tracker

import run_trainer
from arguments import TRAINER_ARGS, SwarmArguments, parse_arguments
from common.console import UserError
from swarm.addresses import get_peer_id
from swarm.attestation import RunAttestation, ask_initial_peers, request_in_dht, set_attestation
from swarm.config import SwarmConfig
from swarm.contract import ContractMismatch, RunContract, fetch_contracts
from swarm.dht import DHT
from swarm.joining import Swarm
from training.settings import apply_settings, discover_settings, require_attested

PREFIX = make_prefix()


@pytest.fixture(scope="module")
def all_peers():
    with run_peer(PREFIX) as one, run_peer(PREFIX, one) as two, run_peer(PREFIX, one, two) as three:
        yield one, two, three


@pytest.fixture
def peers(all_peers):
    """Three peers of a run, which know of no contract."""
    yield all_peers
    for dht in all_peers:
        dht.run_coroutine(partial(set_attestation, attestation=RunAttestation(prefix=PREFIX)))
        dht.attestation = None


def make_contract(**terms: str) -> RunContract:
    return RunContract(joined=get_dht_time(), contract=terms)


def tell(dht: DHT, asking: DHT, statement: RunAttestation) -> None:
    dht.run_coroutine(partial(set_attestation, attestation=statement))
    ask = partial(request_in_dht, peers=[dht.peer_id])
    wait_until(lambda: asking.run_coroutine(ask) == {dht.peer_id: statement}, 60, "the statement")


def ask(dht: DHT, prefix: str, maddrs: list[str], is_new_run: bool = False) -> RunAttestation | None:
    """Ask these peers instead of those that the DHT was started with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dht, "initial_ids", list(dict.fromkeys(map(get_peer_id, maddrs))))
        return ask_initial_peers(dht, prefix, is_new_run)


async def set_nonsense(dht, node, values: dict) -> None:
    await set_attestation(dht, node, RunAttestation.construct(**values))


def test_new_peer_receives_attestation(peers):
    contract, (one, two, newcomer) = make_contract(learning_rate="0.1"), peers
    assert ask(newcomer, PREFIX, addresses(one)) == RunAttestation(prefix=PREFIX) and not ask(newcomer, PREFIX, [])
    with pytest.raises(UserError, match=f"{one.peer_id} in --initial_peers serves run '{PREFIX}', not 'other'"):
        ask(newcomer, "other", addresses(one))
    assert ask(newcomer, "other", addresses(one), is_new_run=True) is None
    tell(one, newcomer, RunAttestation(prefix=PREFIX, contract=contract, workers=[b"a", b"b"]))
    tell(two, newcomer, RunAttestation(prefix=PREFIX, workers=[b"b", b"c"]))
    found = ask(newcomer, PREFIX, addresses(one, two))
    assert found.contract == contract and found.workers == [b"a", b"b", b"c"]
    tell(two, newcomer, RunAttestation(prefix=PREFIX, contract=make_contract(learning_rate="0.2")))
    with pytest.raises(UserError, match=f"disagree.*{one.peer_id}, {two.peer_id}"):
        ask(newcomer, PREFIX, addresses(one, two))
    escape = {"joined": 0.0, "contract": {"a": "\033[2J"}}
    for values in (dict(prefix=7), dict(workers=[b"x" * 100]), dict(workers=[b"x"] * 65), dict(contract=escape)):
        two.run_coroutine(partial(set_nonsense, values={"prefix": PREFIX, **values}))
        assert ask(newcomer, PREFIX, addresses(one, two)).contract == contract
        assert ask(newcomer, PREFIX, addresses(two)) is None


def test_settings_of_other_version_stop_new_peer(peers):
    """They would count as no answer, and a peer that then gets the run's name would train by its own settings."""
    one, two, newcomer = peers
    unknown = "--optim adamw --flag_of_another_version 3"
    contract = RunContract.construct(joined=0.0, contract={"a": "b"}, flags=unknown)
    for values in (dict(flags=unknown), dict(contract=contract)):
        one.run_coroutine(partial(set_nonsense, values={"prefix": PREFIX, **values}))
        for prefix in ("", PREFIX):
            with pytest.raises(UserError, match=f"peer {one.peer_id} in --initial_peers .* this version of the code"):
                discover_settings(SwarmArguments(prefix, addresses(one)), None)
        # another peer has an answer, and a running trainer goes on
        assert discover_settings(SwarmArguments("", addresses(one, two)), None) == {"experiment_prefix": PREFIX}
        assert ask(newcomer, PREFIX, addresses(one)) is None
    # other invalid answers are none, as before
    one.run_coroutine(partial(set_nonsense, values={"prefix": PREFIX, "workers": [b"x" * 100]}))
    assert discover_settings(SwarmArguments(PREFIX, addresses(one)), None) == {}


def test_attested_settings_are_inherited_and_binding(monkeypatch, peers):
    shared, (one, _, three) = "--optim adamw --learning_rate 0.1 --config_path configs/demo.json", peers
    with run_peer("other", one) as two:
        tell(one, three, RunAttestation(prefix=PREFIX, flags=shared))
        # the first trainer chooses the settings that no peer has
        own = ["--config_path", "./configs/demo.json", "--total_steps", "9000"]
        command = ["run_trainer.py", "--initial_peers", *addresses(one), *own]
        monkeypatch.setattr(sys, "argv", command)
        groups = parse_arguments(*TRAINER_ARGS)
        swarm, model, optimizer, *_ = apply_settings(groups, discover_settings(groups[0], None))
        assert (swarm.experiment_prefix, model.config_path) == (PREFIX, "./configs/demo.json")
        assert (optimizer.optim, optimizer.learning_rate, optimizer.total_steps) == ("adamw", 0.1, 9000)
        assert discover_settings(SwarmArguments(PREFIX, addresses(one), use_ipfs=True), None) == {}
        # the monitor's settings bind: in the preflight too, and whether they are taken over or not
        wrong = "--learning_rate: the run has 0.1, you have 0.2. Omit these flags"
        named = ["--experiment_prefix", PREFIX, "--optim", "adamw", "--use_ipfs"]
        for more in (["--preflight"], []):
            assert wrong in refuse(run_trainer, *command[1:], "--learning_rate", "0.2", *more)
        monkeypatch.setattr(sys, "argv", [*command, "--learning_rate", "0.2", *named])
        three.attestation = vouched = ask(three, PREFIX, addresses(one))
        place = Swarm(SwarmConfig(PREFIX), three, b"")
        with pytest.raises(UserError, match=re.escape(wrong)):
            require_attested(place, parse_arguments(*TRAINER_ARGS))
        three.attestation = vouched.copy(update={"contract": make_contract(a="b")})
        require_attested(place, groups)
        # of several peers, one may have been given more than another
        tell(three, one, RunAttestation(prefix=PREFIX, flags="--optim adamw --seed 3"))
        both = addresses(one, three)
        assert ask(two, PREFIX, both).flags == shared
        tell(three, one, RunAttestation(prefix=PREFIX, flags="--optim lamb"))
        with pytest.raises(UserError, match="disagree on the settings"):
            ask(two, PREFIX, both)
        tell(three, one, RunAttestation(prefix=PREFIX))
        # a contract has priority over a monitor's flags, and no flag names a file of this machine
        flags = "--seed 7 --tokenizer_path data/mine --model_name_or_path gpt2 --config_path configs/../README.md"
        contract = make_contract(a="b").copy(update={"flags": flags + f" --experiment_prefix {PREFIX}x"})
        tell(one, three, RunAttestation(prefix=PREFIX, contract=contract, flags=shared))
        settings = {"experiment_prefix": PREFIX, "seed": "7"}
        taken = discover_settings(SwarmArguments("", addresses(one)), None)
        assert taken == settings | {"model_name_or_path": "gpt2"}
        with pytest.raises(UserError, match="--model_name_or_path gpt2: if you trust this model, add the flag"):
            apply_settings(groups, taken)
        assert apply_settings(groups, settings)[1].seed == 7
        for name, wrong in {"seed": "-1", "optim": "sgd", "min_learning_rate": "0.3"}.items():
            with pytest.raises(UserError, match=f"--{name}.* from --initial_peers"):
                apply_settings(groups, {name: wrong})
        tell(three, one, RunAttestation(prefix=PREFIX, contract=make_contract(a="c")))
        for names, others, words in (
            (PREFIX, (one, three), "disagree"),
            ("", (one, two), f"several runs: choose one by --experiment_prefix \\('other', '{PREFIX}'\\)"),
            (PREFIX, (two,), f"serves run 'other', not '{PREFIX}'"),
        ):
            with pytest.raises(UserError, match=words):
                discover_settings(SwarmArguments(names, addresses(*others)), None)
        tell(two, three, RunAttestation(prefix="an/other"))
        assert discover_settings(SwarmArguments("an/other", addresses(two)), None) == {"experiment_prefix": "an/other"}
        with pytest.raises(UserError, match="serve run 'an/other': if you trust it"):
            discover_settings(SwarmArguments("", addresses(two)), None)
        gone = addresses(two)
    assert discover_settings(SwarmArguments(PREFIX, gone), None) == {}
    with pytest.raises(UserError, match="cannot reach --initial_peers"):
        discover_settings(SwarmArguments("", gone), None)


def test_untrusted_contract_blocks_no_peer(peers, monkeypatch):
    terms, flags, (monitor, stranger, newcomer) = {"learning_rate": "0.1"}, "--learning_rate 0.1", peers
    other, own = (Swarm(SwarmConfig(PREFIX), dht, dht.public_key) for dht in (stranger, newcomer))
    other.publish_contract(make_contract(learning_rate="9")).result(timeout=30)
    mine = make_contract(**terms).copy(update={"flags": flags})
    with pytest.raises(
        ContractMismatch, match="the run has 9, you have 0.1.* version of the code"
    ):  # without any attestation
        own.agree_on(mine)
    newcomer.attestation = ask(newcomer, PREFIX, addresses(monitor))
    own.agree_on(mine)
    assert not own.compare_contract(mine)
    own.recheck_contract()
    # now somebody has worked, by other terms
    tell(monitor, newcomer, RunAttestation(prefix=PREFIX, contract=make_contract(learning_rate="0.2")))
    for check in (own.recheck_contract, partial(own.agree_on, mine)):
        with pytest.raises(ContractMismatch, match="the run has 0.2, you have 0.1"):
            check()
    assert own.contract.flags == flags
    tell(monitor, newcomer, RunAttestation(prefix=PREFIX, contract=make_contract(**terms)))
    newcomer.attestation = RunAttestation(prefix=PREFIX)
    with monkeypatch.context() as patch:  # an initial peer that is busy once
        patch.setattr("swarm.attestation.ask_initial_peers", lambda *_, **__: None)
        own.recheck_contract()
    assert not newcomer.attestation.contract
    own._next_check = 0.0
    own.recheck_contract()
    assert newcomer.attestation.contract.contract == terms


def test_contract_is_published_without_wait(peers):
    other, *_, dht = peers
    dht.attestation, own = RunAttestation(prefix=PREFIX), Swarm(SwarmConfig(PREFIX), dht, dht.public_key)
    own.agree_on(make_contract(learning_rate="0.1"))
    published = dht.public_key, own.contract
    wait_until(lambda: published in fetch_contracts(other, PREFIX).items(), 60, "the contract")


def test_early_peer_learns_contributors_later(peers):
    """It joined before any peer had contributed, so it would never trust the others."""
    monitor, early, _ = peers
    tracker = make_tracker(early, PREFIX, 10**6)
    try:
        tell(monitor, early, RunAttestation(prefix=PREFIX, workers=[b"a", b"b"]))
        assert not tracker.trust.attested
        tracker.refresh_attested_peers()
        wait_until(lambda: tracker.trust.attested == {b"a", b"b"}, 20, "the workers")
        tell(monitor, early, RunAttestation(prefix="other", workers=[b"c"]))
        tracker.refresh_attested_peers()
        wait_until(tracker._attestations.done, 20, "an answer about another run")
        tell(monitor, early, RunAttestation(prefix=PREFIX, workers=[b"d"]))
        assert tracker.trust.attested == {b"a", b"b"}
        tracker.refresh_attested_peers()
        wait_until(lambda: tracker.trust.attested == {b"d"}, 20, "the newest")
    finally:
        tracker.shutdown()
