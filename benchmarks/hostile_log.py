"""The attackers of hostile_peer.py on a run with local steps on the replicated log.

Each is an honest trainer with a few functions of swarm/ replaced, that works honestly until HONEST_EPOCHS epochs of the
log, in which it has become a voter. ATTACKS maps a kind to the function that replaces them.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey
from hostile_strangers import note

import swarm.exchange
import swarm.log_rounds
import swarm.log_steps
from swarm.aggregation import BLOCK, Numbers
from swarm.exchange import Exchange
from swarm.local_steps import list_momenta
from swarm.log import Action, Log
from swarm.log_records import Commit, Key, Offer, Status, Vote, compute_hash, get_signed_part, pack
from swarm.log_records import encode as encode_message
from swarm.log_rounds import MAX_QUEUE, Envelope, Identity
from swarm.log_steps import LogSteps
from swarm.optimizer_state import list_params
from swarm.sparse import decode

HONEST_EPOCHS = 3
DRIP_SECONDS = 0.5  # for each piece
FRESH_KEYS = 40
PEERS: list[LogSteps] = []  # this process's peer


def is_time() -> bool:
    """Return whether this peer attacks by now."""
    log = PEERS[0].rounds.log if PEERS else None
    return log is not None and log.state.epoch - min(entry.state.epoch for entry in log.chain.values()) >= HONEST_EPOCHS


def remember_peer() -> None:
    """Keep this process's LogSteps."""
    begin = LogSteps.__init__

    def remember(self, *args, **kwargs):
        PEERS.append(self)
        begin(self, *args, **kwargs)

    LogSteps.__init__ = remember


# --- false updates ----------------------------------------------------------------------------------------------------


def spoil(what: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Offer a function of the update, as one vector."""
    encode = swarm.log_steps.encode

    def encode_spoiled(update: Numbers, residual: Numbers, codec) -> list[bytes]:
        if is_time():
            flat = torch.cat([update.read(block) for block in range(update.num_blocks)])
            update, residual = Numbers([change(flat)]), Numbers([torch.zeros_like(flat)])
            note(f"offers {what}")
        return encode(update, residual, codec)

    swarm.log_steps.encode = encode_spoiled


def avoid_others() -> None:
    """Offer the reversed update once those of most voters are here, without the positions of these: no cosine shows
    it. And claim many samples."""

    def list_others() -> list[Offer]:
        steps = PEERS[0]
        with steps.rounds._lock:
            log = steps.rounds.log
            offers = [it for it in log.select(Offer) if it.base == steps.head and steps.rounds.store.has(it.blob)]
            return [it for it in offers if it.peer != log.me]

    def reverse_rest(update: torch.Tensor) -> torch.Tensor:
        reverse = -update
        for offer in list_others():
            for block, data in enumerate(PEERS[0].rounds.store.open(offer.blob)):
                part = reverse[block * BLOCK : (block + 1) * BLOCK]
                part[torch.from_numpy(decode(data, len(part))[0])] = 0
        return reverse

    offer = LogSteps.offer

    def offer_last(self) -> None:
        if not is_time() or 2 * len(list_others()) >= len(self.rounds.log.state.voters):
            offer(self)

    LogSteps.offer = offer_last
    spoil("the reversed update where no other has a number", reverse_rest)
    change_offer(samples=lambda _: 2**40)


def read_momentum(_: torch.Tensor) -> torch.Tensor:
    return torch.cat([momentum.flatten() for momentum in list_momenta(PEERS[0].optimizer.opt)])


def make_fixed(update: torch.Tensor) -> torch.Tensor:
    """Return the same direction each time, of the norm of the update."""
    fixed = torch.randn(len(update), generator=torch.Generator().manual_seed(0))
    return fixed * (update.norm() / fixed.norm())


def change_offer(**fields) -> None:
    """Sign offers with other fields, which are functions of the true one."""
    sign = Log.sign

    def sign_changed(self, kind, *values):
        record = sign(self, kind, *values)
        if kind is Offer and is_time():
            record = replace(record, **{name: change(record) for name, change in fields.items()})
            record = replace(record, signature=self.identity.sign(get_signed_part(record)))
            note(f"offers {', '.join(f'{getattr(record, name)} {name}' for name in fields)}")
        return record

    Log.sign = sign_changed


def copy_offer() -> None:
    """Offer the update of another peer, and compute nothing."""
    offer = LogSteps.offer

    def offer_copy(self) -> None:
        if not is_time():
            offer(self)
            return
        with self.rounds._lock:
            log, me = self.rounds.log, self.tracker.dht.peer_id.to_bytes()
            others = [it for it in log.select(Offer) if it.base == self.head and self.rounds.store.has(it.blob)]
            is_done = self.head != log.state.head or any(it.peer == me for it in others)
            others = [it for it in others if it.peer != me]
        if others and not is_done:
            other = max(others, key=lambda it: it.samples)
            self.rounds.add_offer(
                self.head, other.digest, other.samples, list(self.rounds.store.open(other.blob)), set()
            )
            self.optimizer.grad_averager.samples = 0
            note("offers a copy", of=str(PeerID(other.peer))[-6:])

    LogSteps.offer = offer_copy


# --- updates that do not arrive ---------------------------------------------------------------------------------------


def withhold() -> None:
    serve = Exchange._serve_blocks

    async def serve_none(self, peer, blob, numbers, writer) -> None:
        if is_time():
            note("withholds a blob")
            await asyncio.sleep(3600)
        await serve(self, peer, blob, numbers, writer)

    Exchange._serve_blocks = serve_none


def relay_nothing() -> None:
    """Claim the fastest uplink, so that blocks of others come from this peer, and send none of them."""
    change_offer(mbits=lambda _: 1e9)
    serve = Exchange._serve_blocks

    async def serve_own(self, peer, blob, numbers, writer) -> None:
        if is_time() and not any(it.blob == blob for it in PEERS[0].rounds.log.own.values()):
            note("relays nothing")
            await asyncio.sleep(3600)
        await serve(self, peer, blob, numbers, writer)

    Exchange._serve_blocks = serve_own


def drip() -> None:
    send_block = Exchange._send_block

    async def send_slowly(self, peer, number, data, writer) -> None:
        if not is_time():
            await send_block(self, peer, number, data, writer)
            return
        note("drips a block")
        data = swarm.exchange.HEADER.pack(number, len(data)) + data
        for at in range(0, len(data), 256):
            writer.write(data[at : at + 256])
            await writer.drain()
            await asyncio.sleep(DRIP_SECONDS)

    Exchange._send_block = send_slowly


# --- the choice of a commit -------------------------------------------------------------------------------------------


def propose_alone() -> None:
    """As a leader, propose this peer's offer only, at once."""
    make_list, update_ready_time = Log.make_list, Log.update_ready_time

    def make_own_list(self) -> Commit | None:
        commit = make_list(self)
        if commit and is_time():
            own = tuple(offer for offer in commit.offers if offer.peer == self.me)
            note("proposes its own offer only", offers=len(own))
            return replace(commit, offers=own) if own else None
        return commit

    def take_times_early(self) -> None:
        update_ready_time(self)
        if is_time():
            self.ready_time = min(self.ready_time, self.now)

    Log.make_list, Log.update_ready_time = make_own_list, take_times_early


def lead_never() -> None:
    """Do nothing as a leader."""
    lead = Log.lead

    def lead_honestly(self) -> None:
        if not is_time():
            lead(self)
        elif self.state.find_leader(self.memory.promised) == self.me and self.ready_time <= self.now:
            note("does not lead")

    Log.lead = lead_honestly


def offer_late() -> None:
    """Publish each offer only after the commit that should have it: the next one counts it."""
    add_offer = Log.add_offer

    def keep_offer(self, now: float, offer: Offer) -> list[Action]:
        if not is_time():
            return add_offer(self, now, offer)
        self.now = now
        self.own[offer.key] = offer
        note("keeps an offer back")
        return self.finish()

    Log.add_offer = keep_offer


def omit_offers() -> None:
    """As a leader, omit as many offers of other peers as the rules allow."""
    make_list = Log.make_list

    def make_small_list(self) -> Commit | None:
        commit = make_list(self)
        if commit and is_time():
            for offer in [it for it in commit.offers if it.peer != self.me]:
                smaller = replace(commit, offers=tuple(it for it in commit.offers if it != offer))
                if smaller.offers and self.is_fair(smaller):
                    note("omits an offer")
                    commit = smaller
        return commit

    Log.make_list = make_small_list


def vote_twice() -> None:
    """Send another vote for a list that does not exist."""
    send_vote = Log.send_vote

    def send_two(self, attempt: int, last: int, proposal: bytes) -> None:
        send_vote(self, attempt, last, proposal)
        if is_time() and proposal:
            self.send(self.sign(Vote, self.state.head, attempt, last, bytes(32), self.me))
            note("votes twice", attempt=attempt)

    Log.send_vote = send_two


# --- many identities --------------------------------------------------------------------------------------------------


def offer_with_fresh_keys(count: int = FRESH_KEYS, is_fleeting: bool = False, digest: bytes | None = None) -> None:
    """After each commit, make an offer of noise for each of many keys at once, and vouch for all of them.

    :param is_fleeting: whether the keys are others each time, so that lists wait for the last ones
    :param digest: the state that the offers name; default: the true one
    """
    offer, identities, done = LogSteps.offer, [], set()

    def offer_many(self) -> None:
        if is_time() and self.head not in done:
            done.add(self.head)
            if is_fleeting:
                identities.clear()
            identities.extend(Identity(RSAPrivateKey()) for _ in range(count - len(identities)))
            for number, identity in enumerate(identities):
                offer_noise(self, identity, number, digest)
            note(f"offers noise with {count} keys")
        offer(self)

    LogSteps.offer = offer_many


def offer_noise(steps: LogSteps, identity: Identity, seed: int, digest: bytes | None) -> None:
    """Send an offer that another key has signed."""
    rounds, size = steps.rounds, sum(momentum.numel() for momentum in list_momenta(steps.optimizer.opt))
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 1e-3
    blocks = swarm.log_steps.encode(Numbers([noise]), Numbers([torch.zeros_like(noise)]), steps.codec)
    opt = steps.optimizer.opt
    state = Numbers(list_params(opt)), Numbers(list_momenta(opt))
    digest, blob = digest or swarm.log_steps.compute_digest(*state), rounds.store.add(blocks)
    with rounds._lock:
        rounds.identity.public_keys |= identity.public_keys
        offer = Offer(steps.head, digest, identity.peer, 100, blob, sum(map(len, blocks)), (), True, 1000.0, b"")
        offer = replace(offer, signature=identity.sign(get_signed_part(offer)))
        for peer in rounds._list_members():
            rounds._outbox[peer].append(encode_message(offer))
        rounds._wake.set()


def offer_phantoms(count: int = 280) -> None:
    """After each commit, offer updates that no peer has, each with another key that comes before all earlier ones."""
    offer, identities, done = LogSteps.offer, [], set()

    def make_keys() -> None:
        identities.extend(Identity(RSAPrivateKey()) for _ in range(count))

    def offer_many(self) -> None:
        if is_time() and len(identities) == count and self.head not in done:
            done.add(self.head)
            identities.sort(key=lambda it: compute_hash(self.head, it.peer), reverse=True)
            messages = [make_phantom(self.head, identity) for identity in identities]
            rounds = self.rounds
            for start in range(0, count, MAX_QUEUE):
                envelope = Envelope(rounds.log_id, rounds.epoch, messages=tuple(messages[start : start + MAX_QUEUE]))
                for peer in rounds.log.state.voters:
                    rounds.exchange.send(PeerID(peer), pack(envelope))
            note(f"offers {count} phantoms")
        offer(self)

    threading.Thread(target=make_keys, daemon=True).start()
    LogSteps.offer = offer_many


def make_phantom(head: bytes, identity: Identity) -> bytes:
    """Return a message that makes a peer ask for a key, learn it, and accept an offer of it."""
    offer = Offer(head, bytes(32), identity.peer, 100, os.urandom(32), 10**4, (), True, 1000.0, b"")
    offer = replace(offer, signature=identity.sign(get_signed_part(offer)))
    return encode_message(offer, Key(identity.peer, identity.public_keys[identity.peer]), offer)


def ask_for_all(count: int = 20) -> None:
    """Ask all members for all commits, this many times in each tick."""
    tick = Log.tick

    def tick_and_ask(self, now: float) -> list[Action]:
        actions = tick(self, now)
        if is_time():
            note(f"asks {count} times for all commits")
            status = encode_message(Status((next(iter(self.chain)),), (), (), True))
            actions += [Action("send", status)] * count
        return actions

    Log.tick = tick_and_ask


ATTACKS = {
    "log_flip": lambda: spoil("-10 times its update", lambda update: -10 * update),
    "log_momentum": lambda: spoil("the momentum", read_momentum),
    "log_shuffle": lambda: spoil("a shuffled update", lambda update: update[torch.randperm(len(update))]),
    "log_direction": lambda: spoil("a fixed direction", make_fixed),
    "log_avoid": avoid_others,
    "log_copy": copy_offer,
    "log_samples": lambda: change_offer(samples=lambda _: 2**40),
    "log_none": lambda: None,
    "log_withhold": withhold,
    "log_drip": drip,
    "log_alone": propose_alone,
    "log_omit": omit_offers,
    "log_mute": lead_never,
    "log_late": offer_late,
    "log_votes": vote_twice,
    "log_keys": offer_with_fresh_keys,
    "log_digest": lambda: offer_with_fresh_keys(13, digest=bytes(32)),
    "log_ghosts": lambda: offer_with_fresh_keys(2, is_fleeting=True),
    "log_relay": relay_nothing,
    "log_phantoms": offer_phantoms,
    "log_statuses": ask_for_all,
}


def attack(kind: str) -> None:
    """Replace the functions of an attack."""
    remember_peer()
    ATTACKS[kind]()
