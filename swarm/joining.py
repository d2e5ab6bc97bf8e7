"""Joining a run: start the DHT in a way that the network allows. Each failure is one line that says what to do."""

import asyncio
import concurrent.futures
import logging
import re
import time
from collections.abc import Iterable
from functools import partial

from hivemind.dht.protocol import ValidationError
from hivemind.p2p import P2PDaemonError
from hivemind.utils import MPFuture, get_dht_time

from common.addresses import find_used_port
from common.console import format_number
from common.files import raise_file_limit
from swarm import SwarmError, attestation, reachability
from swarm.addresses import list_shareable_maddrs
from swarm.config import SwarmConfig
from swarm.contract import CONTRACT_LIFETIME, RunContract, RunSchema, fetch_contracts, require_same
from swarm.dht import DHT, check_versions
from swarm.membership import CredentialValidator, Membership
from swarm.processes import exit_if_process_dies, quiet_hivemind_logs, shut_down
from utils import MAX_WORKERS, make_validators

logger = logging.getLogger("joining")

STORE_TIMEOUT = 2.0  # seconds to wait at the end for this peer's last records
PING_TIMEOUT = 10.0  # seconds; an initial peer may ping this peer's killed process meanwhile
STRAGGLER_TIMEOUT = 3.0
NO_ANSWER_PAUSE = 60.0  # seconds until initial peers that are gone are asked again, which takes seconds


class Swarm:
    """A peer's place in a run, with its DHT and the records that it publishes."""

    def __init__(self, config: SwarmConfig, dht: DHT, public_key: bytes):
        """:param public_key: the subkey of the records that this peer signs"""
        self.config = config
        self.prefix = config.experiment_prefix
        self.dht = dht
        self.public_key = public_key
        self.contract: RunContract | None = None  # the contract that this peer trains by, and publishes
        self.stores: dict[str, MPFuture] = {}  # by name, the last record of this peer on its way to the DHT
        self._next_check = 0.0  # of the contract

    @classmethod
    def join(cls, config: SwarmConfig, membership: Membership | None = None) -> "Swarm":
        """Start this peer's DHT, or raise a SwarmError. The initial peers dial back. If they cannot, this peer becomes
        a client (`dht.client_mode`) if it directly reaches a peer that averages; otherwise it gets a relay.

        :param membership: the membership of a closed run, see `make_identity`
        """
        raise_file_limit()
        quiet_hivemind_logs()
        # with a free UDP port, p2pd would start, and announce the TCP port of another program
        if not config.client_mode and (used := find_used_port(config.host_maddrs)):
            raise SwarmError(f"`host_maddrs` {used}: the port is in use, choose another or 0")
        validators, public_key = make_validators(config.experiment_prefix, schema=RunSchema)
        dht = start_dht(config, validators, membership, client_mode=config.client_mode)
        if config.initial_peers and not config.client_mode:
            seen_at, is_reachable = reachability.find_reachability(dht)
            if is_reachable is False:  # None: no peer has answered
                where = f"at {' and '.join(seen_at)}, port {' and '.join(map(str, reachability.find_ports(dht)))}"
                if config.announce_maddrs:
                    logger.warning(f"others cannot reach this peer {where}: check `announce_maddrs` and the firewall")
                else:
                    dht = restart_as_client_or_relayed(config, validators, dht, where)
        try:
            dht.attestation = attestation.ask_initial_peers(dht, config.experiment_prefix, config.new_run)
        except SwarmError:
            shut_down(dht)
            raise
        exit_if_process_dies(dht, "DHT")
        return cls(config, dht, public_key)

    def list_maddrs(self) -> list[str]:
        """Return the addresses by which others reach this peer, the best one first."""
        return list_shareable_maddrs(self.dht.get_visible_maddrs())

    def list_contracts(self) -> list[RunContract]:
        """Return the contracts that bind this peer: that which the initial peers attest, if any peer has contributed.
        Only if no initial peer answered, these are the contracts of live trainers, which any peer can publish."""
        if self.dht.attestation:
            return [self.dht.attestation.contract] if self.dht.attestation.contract else []
        return [other for key, other in fetch_contracts(self.dht, self.prefix).items() if key != self.public_key]

    def compare_contract(self, contract: RunContract) -> bool:
        """Return whether the run has a contract yet, or raise a ContractMismatch; for a peer that publishes none."""
        others = self.list_contracts()
        require_same(self.prefix, contract, others)
        return bool(others)

    def agree_on(self, contract: RunContract) -> None:
        """Compare this peer's contract with the run's, and publish it, or raise a ContractMismatch. The first peers
        of a run compare again after an epoch, see `recheck_contract`."""
        self.compare_contract(contract)
        self.contract = contract
        self.publish_contract(contract)

    def recheck_contract(self) -> None:
        """Compare the contracts again after an epoch if this peer came first; a difference is a ContractMismatch."""
        if self.dht.attestation and not self.dht.attestation.contract and time.monotonic() > self._next_check:
            answer = attestation.ask_initial_peers(self.dht, self.prefix, is_new_run=True)
            self.dht.attestation = answer or self.dht.attestation
            self._next_check = 0.0 if answer else time.monotonic() + NO_ANSWER_PAUSE
            require_same(self.prefix, self.contract, self.list_contracts())

    def publish_contract(self, contract: RunContract | None) -> MPFuture:
        """Store this peer's contract for CONTRACT_LIFETIME, without waiting; None withdraws it for the next run."""
        return self.publish("run", contract and contract.dict(), CONTRACT_LIFETIME)

    def attest(self, contract: RunContract | None, flags: str, contributors: Iterable[bytes] = ()) -> None:
        """Tell new peers the contract of most contributors and their ids, or without a contract the flags that bind."""
        workers = list(contributors)[:MAX_WORKERS]
        own = attestation.RunAttestation(prefix=self.prefix, contract=contract, flags=flags, workers=workers)
        self.dht.run_coroutine(partial(attestation.set_attestation, attestation=own), return_future=True)

    def measure_bandwidth(self, mbits: float | None) -> float:
        """Pace the uplink by the user's Mbit/s, or else by those measured against an initial peer, and return them."""
        is_fixed = mbits is not None
        if not is_fixed:
            measured = self.dht.run_coroutine(reachability.measure_rate)
            how = "measured" if measured else "no initial peer has measured it, starting with"
            mbits = float(f"{measured or reachability.DEFAULT_BANDWIDTH:.2g}")
            logger.info(f"bandwidth: {how} {format_number(mbits)} Mbit/s up (`bandwidth`)")
        self.dht.uplink.set_bandwidth(mbits, is_fixed=is_fixed)
        return mbits

    def leave(self, optimizer=None) -> None:
        """Wait until other peers have this peer's last records, then stop the optimizer's averagers and the DHT."""
        concurrent.futures.wait(self.stores.values(), STORE_TIMEOUT)
        shut_down(self.dht, optimizer)

    def publish(self, name: str, value: dict | None, lifetime: float) -> MPFuture:
        """Store this peer's record for this number of seconds under one of the keys of RunSchema, without waiting."""
        options = dict(value=value, expiration_time=get_dht_time() + lifetime, return_future=True)
        self.stores[name] = self.dht.store(f"{self.prefix}_{name}", subkey=self.public_key, **options)
        return self.stores[name]


def start_dht(config: SwarmConfig, validators: list, membership: Membership | None, **options) -> DHT:
    """Start the DHT's helper process and register this peer's request handlers, or raise a SwarmError. A start that
    failed although all initial peers can be reached is retried once."""
    check_versions()
    if not options.get("client_mode") and not config.use_ipfs:
        # Without this, libp2p takes minutes to detect that this peer is public, and it cannot be a relay until then.
        options.setdefault("force_reachability", "public")
    of_members = [CredentialValidator(validators[1], membership)] if membership else []
    options |= dict(initial_peers=config.initial_peers, host_maddrs=config.host_maddrs, use_ipfs=config.use_ipfs)
    options |= dict(identity_path=config.identity_path, use_relay=config.use_relay, membership=membership)
    own = dict(wait_timeout=PING_TIMEOUT, bootstrap_timeout=STRAGGLER_TIMEOUT)
    options = {**own, "announce_maddrs": config.announce_maddrs or None, **options}
    options |= dict(record_validators=[*validators, *of_members])
    try:
        dht = DHT(start=True, **options)
    except (ValidationError, P2PDaemonError, RuntimeError, OSError, ValueError) as e:
        if clocks := re.search(r"local: ([\d.]+), peer: ([\d.]+)", str(e)):
            ahead = float(clocks[1]) - float(clocks[2])
            raise SwarmError(
                f"this machine's clock is {abs(ahead):,.1f} s {'ahead of' if ahead > 0 else 'behind'} the swarm's, "
                "which allows 3 s: synchronize it, e.g. sudo timedatectl set-ntp true (or that of `initial_peers`)"
            ) from e
        # hivemind gives the others the shorter time once a dead peer has failed to answer
        lenient = dict(strict=False, check_if_identity_free=False, bootstrap_timeout=PING_TIMEOUT)
        reason = None if isinstance(e, ValidationError) else explain_failed_start(config, str(e), membership)
        if reason or options.items() >= lenient.items():
            raise SwarmError(reason or f"`initial_peers` did not answer at first, but do now ({e}): try again") from e
        # A ping in return may fail: `find_reachability` tests this later, and waits longer.
        return start_dht(config, validators, **options | lenient)
    dht.run_coroutine(reachability.register_dial_back_handler)
    dht.run_coroutine(partial(attestation.register_attestation_handler, prefix=config.experiment_prefix))
    return dht


def restart_as_client_or_relayed(config: SwarmConfig, validators: list, dht: DHT, where: str) -> DHT:
    """Replace this DHT, which others cannot reach at this place, by one in client mode or behind a relay."""
    reason = f"others cannot reach this peer {where} (a firewall or router is in between)"
    averagers = dht.run_coroutine(partial(reachability.count_reachable_averagers, config.experiment_prefix))
    relays = dht.run_coroutine(partial(reachability.find_relays, config.initial_peers)) if config.use_relay else []
    dht.shutdown()
    options = dict(check_if_identity_free=False)  # other peers may still know this identity from the old DHT
    if not relays or averagers:
        outlook = f"{averagers} peer{'s that average' if averagers != 1 else ' that averages'} can be reached directly"
        if not averagers:
            why = "none of `initial_peers` is a relay" if config.use_relay else "`use_relay` is off"
            outlook = f"its gradients count once a reachable trainer joins ({why})"
        logger.log(logging.INFO if averagers else logging.WARNING, f"{reason}: continuing in client mode, {outlook}")
        return start_dht(config, validators, dht.membership, client_mode=True, **options)
    places = [f"{relay}/p2p-circuit" for relay in relays]
    logger.info(f"{reason}, and no peer that averages can be reached directly: others reach it through {places[0]}")
    options |= dict(client_mode=False, force_reachability="private", announce_maddrs=places)
    dht = start_dht(config, validators, dht.membership, strict=False, **options)
    dht.run_coroutine(partial(reachability.keep_reservations, relays), return_future=True)
    return dht


def explain_failed_start(config: SwarmConfig, error: str, membership: Membership | None) -> str | None:
    """Return one line for the daemon's error, with the flag to change, or None if one of `initial_peers` answers."""
    last_line = error.strip().splitlines()[-1] if error.strip() else "no reason given"
    if "already taken" in error:
        flag = f"`invite` {config.invite}" if config.invite else f"`identity_path` {config.identity_path}"
        if not (config.invite or config.identity_path):
            return "the key in `output_dir` is in use by a running peer: in a copied folder, remove signing_key and log"
        return f"{flag} is in use by a running peer: pass a separate file to each peer"
    if "address already in use" in error or "failed to listen" in error:
        return f"`host_maddrs` {' '.join(config.host_maddrs)}: the port is in use, choose another or 0 ({last_line})"
    if config.identity_path and (config.identity_path in error or "saving the identity" in error):
        return f"`identity_path` {config.identity_path} cannot be written ({last_line}): pass a file in another folder"
    if config.initial_peers:
        answers, problem = asyncio.run(attestation.contact_initial_peers(config.initial_peers, membership))
        return None if answers else problem
    return f"cannot start the peer-to-peer daemon ({last_line})"
