"""A network of logs in one process, with a clock of its own: messages are late, lost or doubled, and peers crash."""

import hashlib
import heapq
import random
from dataclasses import replace

from swarm.log import Action, Log, State, make_genesis
from swarm.log_records import Offer
from swarm.log_rounds import GOSSIPED_PEERS

TIMEOUT = 5.0
DIGEST = bytes(32)


def name_peer(index: int) -> bytes:
    return b"peer%02d" % index


class FakeIdentity:
    """Signatures that a test can make for any peer; keys are known once they are added."""

    def __init__(self, peer: bytes, known=()):
        self.peer, self.known = peer, {peer, *known}

    def sign(self, data: bytes) -> bytes:
        return hashlib.sha256(self.peer + data).digest()

    def verify(self, peer: bytes, data: bytes, signature: bytes) -> bool:
        return peer in self.known and hashlib.sha256(peer + data).digest() == signature

    def find_key(self, peer: bytes) -> bytes | None:
        return b"key" + peer if peer in self.known else None

    def add_key(self, peer: bytes, key: bytes) -> None:
        if key == b"key" + peer:
            self.known.add(peer)


class ForgetfulLog(Log):
    """A liar: it forgets its votes, so it votes for any list, and proposes several lists in an attempt."""

    def remember(self, memory) -> None:
        super().remember(replace(memory, choice=()))


class Trainer:
    """A peer that makes an offer some seconds after each commit. Its samples are numbers of their own."""

    def __init__(self, network: "Network", peer: bytes, genesis: State, kind=Log):
        self.network, self.peer, self.kind = network, peer, kind
        self.genesis, self.memory = genesis, b""
        self.store: set[bytes] = set()
        self.start()

    def start(self) -> None:
        """Start the process at the beginning of the log."""
        network, holds = self.network, self.store.__contains__
        identity = FakeIdentity(self.peer, network.names)
        self.log = self.kind(self.genesis, identity, TIMEOUT, holds, network.now, self.memory)
        self.state = self.genesis.head  # stands for the model
        self.pending: set[int] = set()  # samples in the residual
        self.offer_time: float | None = network.now + network.random.uniform(1, network.pace)
        self.is_alive, self.is_loading = True, False

    def crash(self) -> None:
        self.is_alive = False
        if self.network.forgets:
            self.memory = None
        self.network.lost |= self.pending | {s for o in self.log.own.values() for s in self.network.samples[o.blob]}

    def restart(self) -> None:
        """Start with all commits that this peer had, or with fewer if another peer has them."""
        network, commits = self.network, [entry.commit for entry in self.log.list_entries(-1)]
        others = [it.log for it in network.trainers.values() if it.is_alive]
        if any(self.log.state.head in log.list_path() for log in others):
            commits = commits[: network.random.randint(0, len(commits))]
        self.start()
        for commit in commits:
            self.log.take_commit(commit)
        self.run(self.log.tick(network.now))

    def make_offer(self) -> None:
        network = self.network
        fresh = {network.count_sample() for _ in range(network.random.randint(1, 3))}
        samples, self.pending = self.pending | fresh, set()
        blob = hashlib.sha256(repr((self.peer, sorted(samples))).encode()).digest()
        network.samples[blob] = samples
        self.store.add(blob)
        self.offer_time = None
        accepts = self.peer not in network.clients
        offer = self.log.sign(Offer, self.state, DIGEST, self.peer, len(samples), blob, 1000, (), accepts, 20.0)
        self.run(self.log.add_offer(network.now, offer))

    def run(self, actions: list[Action]) -> None:
        """Do what the log says."""
        network = self.network
        for kind, content, peers in actions:
            if kind == "gossip":
                for peer in peers or network.random.sample(network.names, min(GOSSIPED_PEERS, len(network.names))):
                    network.post(self.peer, peer, content)
            elif kind == "send":
                is_lie = self.kind is ForgetfulLog and not peers  # half of the peers see half of its lists
                for peer in (
                    network.random.sample(network.names, len(network.names) // 2) if is_lie else peers or network.names
                ):
                    network.post(self.peer, peer, content)
            elif kind == "save":
                self.memory = content
            elif kind == "fetch":
                network.post(self.peer, self.peer, content)
        for offer in self.log.returned:
            self.pending |= network.samples[offer.blob]
        self.log.returned.clear()
        while commit := self.log.find_next():
            network.check_apply(self, commit)
            self.set_state(commit.hash, network.random.uniform(1, network.pace))
        if self.state not in self.log.list_path() and not self.is_loading:
            self.is_loading = True
            network.forks += 1
            network.post(self.peer, self.peer, self.log.state.head)

    def set_state(self, head: bytes, seconds: float) -> None:
        """Continue with this state, and make an offer after these seconds."""
        self.state = self.log.model = head
        self.offer_time, self.is_loading = self.network.now + seconds, False


class Network:
    """Trainers, and the messages between them."""

    def __init__(self, seed: int, num_peers: int, clients=(), liars=(), members=None, pace=15.0):
        self.random, self.now, self.pace = random.Random(seed), 1e6, pace
        self.names = [name_peer(index) for index in range(num_peers)]
        self.clients, self.queue, self.order = {name_peer(index) for index in clients}, [], 0
        self.withholders: set[bytes] = set()  # peers that serve no blob
        self.samples: dict[bytes, set[int]] = {}
        self.num_samples, self.lost, self.forks = 0, set(), 0
        self.loss, self.copies, self.delay, self.groups = 0.0, 0.0, 0.5, {}
        self.applied: dict[int, bytes] = {}
        self.is_safe = not liars  # whether two commits at one height are an error
        self.forgets = False  # whether a crashed peer loses its votes
        genesis = make_genesis("run", 0, DIGEST, tuple(self.names[: members or num_peers]))
        self.trainers = {
            name: Trainer(self, name, genesis, ForgetfulLog if index in liars else Log)
            for index, name in enumerate(self.names)
        }
        self.honest = [it for index, it in enumerate(self.trainers.values()) if index not in liars]

    def count_sample(self) -> int:
        self.num_samples += 1
        return self.num_samples

    def check_apply(self, trainer: Trainer, commit) -> None:
        if self.is_safe:
            assert self.applied.setdefault(commit.epoch, commit.hash) == commit.hash, f"a fork at {commit.epoch}"
        assert commit.parent == trainer.state
        assert all(offer.blob in trainer.store for offer in commit.offers)

    def is_connected(self, one: bytes, other: bytes) -> bool:
        alive = self.trainers[one].is_alive and self.trainers[other].is_alive
        return alive and self.groups.get(one, 0) == self.groups.get(other, 0)

    def post(self, sender: bytes, receiver: bytes, content) -> None:
        """Deliver later. A client cannot be called: its messages come as responses, here within the same delay."""
        if sender == receiver and isinstance(content, bytes) and len(content) > 32:
            return
        if sender != receiver and {sender, receiver} <= self.clients:
            return
        is_lost = sender != receiver and self.random.random() < self.loss
        for _ in range(1 + (self.random.random() < self.copies)):
            if not is_lost:
                self.order += 1
                time = self.now + self.random.uniform(0, self.delay)
                heapq.heappush(self.queue, (time, self.order, sender, receiver, content))

    def deliver(self, sender: bytes, receiver: bytes, content) -> None:
        trainer = self.trainers[receiver]
        if not self.is_connected(sender, receiver):
            return
        if isinstance(content, Offer):  # of which this peer fetches the blob
            peers = {peer for peer in self.names if self.is_connected(peer, receiver)} - self.withholders
            if any(content.blob in self.trainers[peer].store for peer in peers) and self.random.random() >= self.loss:
                trainer.store.add(content.blob)
                trainer.run(trainer.log.receive(self.now, trainer.log.me))
            elif content.blob in trainer.log.fetching:
                self.order += 1
                heapq.heappush(self.queue, (self.now + 1, self.order, sender, receiver, content))
        elif sender == receiver:  # a downloaded state
            if content in trainer.log.chain:
                trainer.set_state(content, 5)
                trainer.run([])
        else:
            trainer.run(trainer.log.receive(self.now, sender, content))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self.now < end:
            tick = self.now + 1.0
            while self.queue and self.queue[0][0] <= tick:
                self.now, _, sender, receiver, content = heapq.heappop(self.queue)
                self.deliver(sender, receiver, content)
            self.now = tick
            for trainer in self.trainers.values():
                if trainer.is_alive:
                    is_time = trainer.offer_time is not None and self.now >= trainer.offer_time
                    if is_time and not trainer.log.is_leaving and trainer.log.has_turn():
                        trainer.make_offer()
                    trainer.run(trainer.log.tick(self.now))

    def heal(self) -> None:
        """End all faults, and start all peers."""
        self.loss, self.copies, self.delay, self.groups = 0.0, 0.0, 0.3, {}
        for trainer in self.trainers.values():
            if not trainer.is_alive:
                trainer.restart()

    def check_samples(self) -> None:
        """Each sample counts once, or waits with its owner, or is lost with its process."""
        best = max((trainer.log for trainer in self.honest), key=lambda log: log.state.epoch)
        offers = [offer for entry in best.list_entries(-1) for offer in entry.commit.offers]
        counted = [sample for offer in offers for sample in self.samples[offer.blob]]
        assert len(counted) == len(set(counted)), "a sample counts twice"
        waiting = set()
        for trainer in self.trainers.values():
            waiting |= trainer.pending.union(*(self.samples[offer.blob] for offer in trainer.log.own.values()))
        assert set(range(1, self.num_samples + 1)) <= waiting | self.lost | set(counted), "a sample is missing"

    def add_fault(self) -> None:
        """Cause one of the faults that a network has without liars."""
        choice, trainers = self.random, list(self.trainers.values())
        kind = choice.choice(["loss", "delay", "partition", "crash", "restart", "heal"])
        if kind == "loss":
            self.loss, self.copies = choice.uniform(0, 0.5), choice.uniform(0, 0.5)
        elif kind == "delay":
            self.delay = choice.choice([0.1, 2.0, 10.0, 30.0])
        elif kind == "partition":
            self.groups = {name: choice.randint(0, 1) for name in self.names}
        elif kind == "heal":
            self.heal()
        for trainer in trainers if kind == "restart" else [choice.choice(trainers)] if kind == "crash" else []:
            if trainer.is_alive:
                trainer.crash()
            if kind == "restart":
                trainer.restart()


def run_schedule(seed: int, has_liar: bool = False, forgets: bool = False, withholds: bool = False) -> Network:
    """Run 3 to 7 peers through random faults; then they must agree, and commit unless peers have lost their votes."""
    choice = random.Random(seed)
    num_peers = choice.randint(3, 7)
    clients = choice.sample(range(num_peers), choice.randint(0, num_peers // 2))
    liars = [choice.randrange(num_peers)] if has_liar else []
    network = Network(seed, num_peers, clients, liars)
    network.forgets = forgets
    network.withholders = set(choice.sample(network.names, 1)) if withholds else set()
    for _ in range(choice.randint(2, 8)):
        network.add_fault()
        network.run(choice.choice([5, 20, 60, 150]))
    network.heal()
    network.run(120)
    epoch = max(trainer.log.state.epoch for trainer in network.honest)
    network.run(120)
    logs = [trainer.log for trainer in network.honest]
    lowest = min(logs, key=lambda log: log.state.epoch)
    assert lowest.state.epoch > epoch or forgets, "no commit since the network healed"
    assert all(lowest.state.head in log.list_path() for log in logs), "the chains differ"
    if network.is_safe:
        network.check_samples()
    assert has_liar or not lowest.state.banned
    return network
