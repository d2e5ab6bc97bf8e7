"""What peers tell each other about a run: signed records and their validators, metrics and their aggregation.

Every trainer publishes two records, each under its own public key as subkey and signed with the matching private key,
so that nobody can overwrite another's: its metrics of the epoch just finished (`{prefix}_metrics`, LocalMetrics) and
the contract that it trains by (`{prefix}_run`, RunContract). To look at the metrics of a live run:

    python -c "import hivemind, utils; dht = hivemind.DHT(initial_peers=['/ip4/127.0.0.1/tcp/31337/p2p/XXXX'], \
        start=True, record_validators=utils.make_validators('my_albert')[0]); \
        print(utils.aggregate_metrics(utils.fetch_metrics(dht, 'my_albert')))"
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import logging
import math
import re
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

import multihash
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hivemind import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.schema import SchemaValidator, conbytes
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
from hivemind.utils.serializer import MSGPackSerializer

# hivemind 1.1.12's SchemaValidator takes models of pydantic's first version only
from pydantic.v1 import BaseModel, StrictBool, ValidationError, confloat, conint, conlist, constr, root_validator

from arguments import TRAINER_ARGS
from support.flags import MAX_SHARED, SHARED_FLAGS, USERNAME, list_shared

logger = logging.getLogger("utils")

SHARED_NAMES = list_shared(TRAINER_ARGS)

# What we and hivemind store is far smaller: metrics with their signature take about 0.7 KB, a contract 2 KB, hivemind's
# progress 0.6 KB. A whole dictionary of records must fit into one message of p2pd (4 MB), or nobody can read it.
MAX_RECORD_BYTES = 16 * 1024
MAX_CONTRACT_BYTES = 9000  # who vouches for it passes it through a pipe of hivemind's, which breaks at 16 KB
# A record that never expires would count as a peer forever. Ours live minutes: --statistics_expiration and
# --metadata_expiration allow no more than this.
MAX_RECORD_LIFETIME = 3600.0
# Records live for --statistics_expiration, 600 s, in which a swarm with epochs of 1 s advances 600 epochs: records
# further apart than this do not belong to one run.
MAX_EPOCH_GAP = 1000
WORKER_PATIENCE = 60.0  # seconds, at least, without an epoch of those that have worked
FETCH_TIMEOUT = 30.0
MAX_WORKERS = 64  # that one peer names
WORKER_NAME = 12  # characters of a peer's id, its last ones
MAX_MEAN_LOSS = 1000.0  # nats; a model that guesses has ln(vocabulary), about 10
MAX_ODD_LOSS = 0.25  # of the median: by how much the mean loss of an honest peer's few batches may differ from it

# Of 2048 bits and the usual exponent, as hivemind makes them: others take long to verify. hivemind's
# BytesWithPublicKey lets one owner add text of any length around its key, and so fill many subkeys.
PUBLIC_KEY = re.compile(rb"\[owner:ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABAQ[A-Za-z0-9+/]{342}\]\Z")
PUBLIC_KEY_LENGTH = 388
PublicKeyBytes = conbytes(regex=PUBLIC_KEY.pattern)


class Evaluation(BaseModel):
    """What one peer has measured last on the validation split."""

    epoch: conint(strict=True, ge=0, le=10**9)  # of the swarm, whose weights these were
    loss: confloat(strict=True, ge=0.0, le=MAX_MEAN_LOSS)  # nats per predicted token
    accuracy: confloat(strict=True, ge=0.0, le=1.0)  # share of these tokens that were predicted
    samples: conint(strict=True, ge=1, le=10**9)  # rows of the split that were used
    unigram_entropy: confloat(strict=True, ge=0.0, le=MAX_MEAN_LOSS) | None = None  # of the split, see text/stored.py


class LocalMetrics(BaseModel):
    """What one peer reports after an epoch. Numbers are strict: an int where a float is expected is refused.

    Every field is bounded on both sides, and comparisons with NaN are false, so that NaN and infinity are refused too.
    Those that are optional are left out of a record where there is nothing to say: older peers refuse what they do
    not know.
    """

    epoch: conint(strict=True, ge=0, le=10**9)  # the epoch just finished
    samples_per_second: confloat(strict=True, ge=0.0, le=1e9)
    samples_accumulated: conint(strict=True, ge=0, le=10**9)  # samples this peer gave to that epoch
    loss: confloat(strict=True, ge=0.0, le=1e9)  # nats, the SUM over mini_steps
    mini_steps: conint(strict=True, ge=0, le=10**6)  # batches behind that sum
    averaged_with: conint(strict=True, ge=0, le=10**6)  # peers in the averaged gradient, this one included; 0: none
    num_peers: conint(strict=True, ge=0, le=10**6)  # peers that the swarm showed at that time
    grad_norm: confloat(strict=True, ge=0.0, le=1e30)  # of the averaged gradient, before clipping
    learning_rate: confloat(strict=True, ge=0.0, le=1e6)
    total_samples: conint(strict=True, ge=0, le=10**15)  # of this peer, so far, that reached an optimizer step
    skipped_steps: conint(strict=True, ge=0, le=10**9)  # of this peer, so far, whose loss or gradient was not finite
    epoch_seconds: confloat(strict=True, ge=0.0, le=1e9)  # from this peer's epoch before to this one
    waiting_seconds: confloat(strict=True, ge=0.0, le=1e9)  # of these, spent while a group formed
    averaging_seconds: confloat(strict=True, ge=0.0, le=1e9)  # of these, spent while gradients were averaged
    bytes_sent: conint(strict=True, ge=0, le=10**15)  # in that time, of rounds and states; small talk is not counted
    bytes_received: conint(strict=True, ge=0, le=10**15)
    client_mode: StrictBool  # accepts no incoming connection
    username: constr(strict=True, regex=rf"\A{USERNAME}\Z") | None = None  # in a closed run, that of its pass
    evaluation: Evaluation | None = None  # the newest one, of a peer with --do_eval --eval_steps
    final_epoch: conint(strict=True, ge=0, le=10**9) | None = None  # at which this peer ends, if not with the schedule
    # whose gradients it has seen in the last average, see make_worker_key
    partners: (
        conlist(constr(strict=True, min_length=WORKER_NAME, max_length=WORKER_NAME), max_items=MAX_WORKERS) | None
    ) = None

    def dict(self, **options) -> dict:
        return super().dict(**{**options, "exclude_none": True})

    @root_validator(skip_on_failure=True)
    def validate_consistency(cls, values: dict) -> dict:
        if values["evaluation"] and values["evaluation"].epoch > values["epoch"]:
            raise ValueError("an evaluation must not be newer than the record")
        if values["loss"] > MAX_MEAN_LOSS * values["mini_steps"]:
            raise ValueError(f"the mean loss must not exceed {MAX_MEAN_LOSS:g} nats")
        return values


class Flags(constr(strict=True, max_length=MAX_SHARED, regex=rf"\A{SHARED_FLAGS.pattern}\Z")):
    """Those that all peers of a run share, as they are typed; others are told of no other ones."""

    @classmethod
    def __get_validators__(cls):
        yield from super().__get_validators__()
        yield cls.check_names

    @classmethod
    def check_names(cls, flags: str) -> str:
        if not set(re.findall(r"--(?:no_)?(\w+)", flags)) <= SHARED_NAMES:
            raise ValueError("others are told only of flags that all peers must share")
        return flags


class RunContract(BaseModel):
    """What one peer trains by: a map of names to texts, so that a later version may add a name and still be read."""

    joined: confloat(strict=True, ge=0.0, le=1e11)  # Unix time at which this peer published its contract first
    contract: dict[constr(strict=True, min_length=1, max_length=64), constr(strict=True, max_length=200)]
    flags: Flags = ""  # that made it

    @root_validator(skip_on_failure=True)
    def bound_entries(cls, values: dict) -> dict:
        if len(values["contract"]) > 32:
            raise ValueError("a contract has 32 entries at most")
        texts = "".join(text for entry in values["contract"].items() for text in entry)
        if len(texts.encode()) > MAX_CONTRACT_BYTES:
            raise ValueError(f"a contract has {MAX_CONTRACT_BYTES:,} bytes at most")
        if not texts.isprintable():
            raise ValueError("a contract is shown to others: no line breaks, and nothing that a terminal obeys")
        return values


class MetricSchema(BaseModel):
    """The keys `{prefix}_metrics` and `{prefix}_run`, each a dictionary from a peer's public key to its record."""

    metrics: dict[PublicKeyBytes, LocalMetrics]
    run: dict[PublicKeyBytes, RunContract | None]


@functools.lru_cache(maxsize=4096)
def find_peer_id(public_key: bytes) -> bytes:
    """The id of the peer that has this key: whoever connects under that id has to prove it.

    :raises ValueError: it is no public key
    """
    if not PUBLIC_KEY.match(public_key):
        raise ValueError("no public key")
    key = RSAPublicKey.from_bytes(public_key[len(b"[owner:") : -1])._public_key
    data = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    encoded = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=data).SerializeToString()
    return multihash.encode(hashlib.sha256(encoded).digest(), "sha2-256")


def find_subkey_owner(subkey: bytes) -> bytes:
    """The id of the peer whose records have this subkey: its public key or that id itself."""
    return find_peer_id(subkey) if PUBLIC_KEY.match(subkey) else subkey


class RecordValidator(RSASignatureValidator):
    """Under every key, only records that hivemind can decode, that are small and expire soon, and that their owner has
    signed, whose public key or peer id is the subkey; they speak for no other peer.

    One value that is not msgpack makes `dht.get` time out for every reader of its key (hivemind decodes in a callback
    that nobody watches); one without a subkey takes the place of all others; and hivemind signs nothing that is under
    a peer's id: anybody could say there that it looks for no group (note 73).
    """

    def __init__(self, private_key: RSAPrivateKey | None = None):
        super().__init__(private_key)
        self.own_id = MSGPackSerializer.dumps(find_peer_id(self.local_public_key))

    def sign_value(self, record: DHTRecord) -> bytes:
        if record.subkey != self.own_id:
            return super().sign_value(record)
        record = dataclasses.replace(record, subkey=MSGPackSerializer.dumps(self.local_public_key))
        return super().sign_value(record) + self.local_public_key  # of which the id is only a digest

    def validate(self, record: DHTRecord) -> bool:
        try:
            # NaN fails every comparison
            is_short_lived = 0 <= record.expiration_time <= get_dht_time() + MAX_RECORD_LIFETIME
            if not is_short_lived or len(record.value) + len(record.subkey) > MAX_RECORD_BYTES:
                return False
            subkey, value = map(MSGPackSerializer.loads, (record.subkey, self.strip_value(record)))
            # in other bytes than readers', the signature would not fit there: they would drop the whole dictionary
            if MSGPackSerializer.dumps(subkey) != record.subkey or len(record.key) != DHTID.HASH_NBYTES:
                return False
            owner = subkey if PUBLIC_KEY.match(subkey) else record.value[-PUBLIC_KEY_LENGTH:]
            peer_id = find_peer_id(owner)
            if subkey == peer_id:
                signed = record.value[:-PUBLIC_KEY_LENGTH]
                record = dataclasses.replace(record, subkey=MSGPackSerializer.dumps(owner), value=signed)
            is_own = not isinstance(value, dict) or value.get("peer_id", peer_id) == peer_id
            return is_own and subkey in (owner, peer_id) and super().validate(record)
        except Exception as e:  # hostile bytes: the decoder, and the extension types it calls, raise whatever they like
            logger.debug(f"refused a record that cannot be read: {e!r}")
            return False

    def strip_value(self, record: DHTRecord) -> bytes:
        return PUBLIC_KEY.sub(b"", super().strip_value(record))


def make_validators(prefix: str, private_key: RSAPrivateKey | None = None) -> tuple[list[RecordValidatorBase], bytes]:
    """The validators that every peer of the run gives to its DHT, and this peer's public key: its subkey in records.

    Without `private_key` the process has one key of its own, the same that hivemind signs its progress with. Readers
    without these validators can read nothing: the signature stays on the value (hivemind/dht/crypto.py).
    """
    signature = RecordValidator(private_key)
    return [SchemaValidator(MetricSchema, prefix=prefix), signature], signature.local_public_key


def name_peer(label: str, username: str | None) -> str:
    """For people: who it says that it is, which in a closed run its invitation says, and its label."""
    return f"{username} {label}" if username else label


def peer_label(public_key: bytes) -> str:
    """A short name for a peer, the same in every process that sees its key: eight hexadecimal digits of SHA-256."""
    return hashlib.sha256(public_key).hexdigest()[:8]


def fetch_dictionary(dht: DHT, key: str, timeout: float, latest: bool = True) -> dict[bytes, ValueWithExpiration]:
    """The records under this key by their subkeys; empty when the DHT does not answer.

    :param timeout: seconds to wait for the DHT
    :param latest: ask other peers, also if this one holds some
    """
    try:
        entry = dht.get(key, latest=latest, return_future=True).result(timeout=timeout)
    except (concurrent.futures.TimeoutError, OSError) as e:
        logger.warning(f"The DHT did not answer within {timeout:g} s ({type(e).__name__}), will ask again")
        return {}
    return entry.value if entry is not None and isinstance(entry.value, dict) else {}


def make_worker_key(peer_id: bytes) -> str:
    """How peers' metrics name those that they average with: no stranger can make itself an id that ends so."""
    return str(PeerID(peer_id))[-WORKER_NAME:]


class ContributorRegistry:
    """Which peers have worked for a run: others that have worked name them as partners in their averages. What
    strangers publish, be it under 10,000 keys, counts for nothing.

    At first all count who publish metrics, and whenever none of the others has made an epoch for a while.
    """

    def __init__(self, ids: Iterable[bytes] = ()):
        """:param ids: of peers that are known to have worked"""
        #: ids of those that have
        self.ids = set(ids)
        #: of these, those whose metrics are there
        self.present: set[bytes] = set()
        self.epochs: dict[bytes, int] = {}
        self.named_by: dict[bytes, set[bytes]] = {}
        self.until = 0.0  # when those are forgotten, if none of them makes an epoch

    def select(self, records: dict[bytes, LocalMetrics]) -> set[bytes]:
        """The ids of those that count.

        :param records: the newest of each peer, by its id
        """
        now, epochs = time.monotonic(), {peer_id: metrics.epoch for peer_id, metrics in records.items()}
        present = self.ids & epochs.keys()
        has_epoch = any(epochs[peer_id] != self.epochs.get(peer_id) for peer_id in present)
        if not has_epoch and now >= self.until:
            self.ids = present = set(epochs)
        if present and (has_epoch or now >= self.until):
            seconds = statistics.median(records[peer_id].epoch_seconds for peer_id in present)
            self.until = now + max(WORKER_PATIENCE, 3 * seconds)
        self.epochs = epochs
        newest = statistics.median(epochs[peer_id] for peer_id in present) if present else 0
        current = [peer_id for peer_id in present if epochs[peer_id] >= newest - 1]
        names = {make_worker_key(peer_id): peer_id for peer_id in epochs}
        self.named_by = {peer_id: self.named_by.get(peer_id, set()) for peer_id in epochs}
        for peer_id in current:
            for partner in filter(None, map(names.get, records[peer_id].partners or ())):
                self.named_by[partner].add(peer_id)
        # one of them alone, of several, may be a liar that names others of its keys
        enough = max(1, min(2, len(current)))
        self.ids |= {peer_id for peer_id, by in self.named_by.items() if len(by - {peer_id}) >= enough}
        self.present = self.ids & epochs.keys()
        return self.present


def fetch_records(
    dht: DHT,
    prefix: str,
    timeout: float = FETCH_TIMEOUT,
    workers: ContributorRegistry | None = None,
    latest: bool = True,
) -> dict[str, tuple[LocalMetrics, float]]:
    """All peers' newest metrics by label, each with its expiration time, which tells a newer record from an older one.

    :param timeout: seconds to wait for the DHT; the result is empty when it does not answer
    :param workers: learns from all of them who has worked; the result is theirs alone
    :param latest: ask other peers, also if this one holds some
    """
    records = {}
    for public_key, item in fetch_dictionary(dht, f"{prefix}_metrics", timeout, latest).items():
        try:
            records[public_key] = LocalMetrics.parse_obj(item.value), item.expiration_time
        except (ValidationError, TypeError) as e:  # validated on arrival; what comes here is a defect, not an attack
            logger.debug(f"ignored a malformed record: {e}")
    if workers:
        of_workers = workers.select({find_peer_id(public_key): metrics for public_key, (metrics, _) in records.items()})
        records = {key: record for key, record in records.items() if find_peer_id(key) in of_workers}
    return dict(sorted({peer_label(public_key): record for public_key, record in records.items()}.items()))


def fetch_metrics(
    dht: DHT, prefix: str, timeout: float = FETCH_TIMEOUT, workers: ContributorRegistry | None = None
) -> list[tuple[str, LocalMetrics]]:
    """The same as (peer label, metrics), in the order of labels."""
    return [(label, metrics) for label, (metrics, _) in fetch_records(dht, prefix, timeout, workers).items()]


def fetch_progress(dht: DHT, prefix: str, timeout: float = FETCH_TIMEOUT) -> dict[str, LocalTrainingProgress]:
    """What the run's trainers have told hivemind last of the epoch that they work at, by peer label.

    :param timeout: seconds to wait for the DHT; the result is empty when it does not answer
    """
    reports = {}
    for public_key, item in fetch_dictionary(dht, f"{prefix}_progress", timeout).items():
        with contextlib.suppress(ValidationError, TypeError):
            reports[peer_label(public_key)] = LocalTrainingProgress.parse_obj(item.value)
    return reports


@dataclass
class SwarmMetrics:
    """The swarm's state at its newest epoch."""

    epoch: int
    loss: float  # nats per batch, the mean over all peers' batches
    alive_peers: int  # peers that reported this epoch or the one before
    samples: int  # that these peers gave to it
    samples_per_second: float  # of these peers together
    epoch_seconds: float  # median over these peers, as the parts that it divides into:
    compute_seconds: float  # what the other two leave
    waiting_seconds: float
    averaging_seconds: float
    bytes_sent: int  # by these peers together, for this epoch
    bytes_received: int
    averaged_with: int  # peers in the averaged gradient: the smallest number that any of these peers reports
    grad_norm: float  # median over these peers
    learning_rate: float  # median over these peers
    skipped_steps: int  # of these peers, so far


def filter_plausible_records(records: list[tuple[str, LocalMetrics]], last_epoch: int | None = None) -> list:
    """The records that belong to one run, without those whose epoch is absurd: all others' would look stale beside it.

    Anybody may sign "epoch 10**9" with a fresh key. The records are split where neighbouring epochs lie more than
    MAX_EPOCH_GAP apart, and the largest part is kept: a minority cannot move the swarm's epoch. Of two parts of one
    size the one that holds `last_epoch` (within MAX_EPOCH_GAP) is kept, or else the newer one.
    """
    parts: list[list[tuple[str, LocalMetrics]]] = []
    for record in sorted(records, key=lambda record: record[1].epoch):
        if not parts or record[1].epoch - parts[-1][-1][1].epoch > MAX_EPOCH_GAP:
            parts.append([])
        parts[-1].append(record)

    def rank(part: list) -> tuple:
        first, newest = part[0][1].epoch, part[-1][1].epoch
        is_known = last_epoch is not None and first - MAX_EPOCH_GAP <= last_epoch <= newest + MAX_EPOCH_GAP
        return len(part), is_known, newest

    return max(parts, key=rank) if parts else []


def average_loss(records: list[LocalMetrics]) -> float:
    """Of the batches of all peers, of which one may lie: of three and more, whose mean is far from the median's does
    not count, and nobody for more than twice as many batches as the median."""
    losses = [(metrics.loss / metrics.mini_steps, metrics.mini_steps) for metrics in records if metrics.mini_steps]
    if len(losses) > 2:
        middle, most = (statistics.median_low(column) for column in zip(*losses, strict=True))
        losses = [(loss, min(count, 2 * most)) for loss, count in losses if abs(loss - middle) <= MAX_ODD_LOSS * middle]
    return math.fsum(loss * count for loss, count in losses) / sum(count for _, count in losses)


def aggregate_metrics(records: list[tuple[str, LocalMetrics]], last_epoch: int | None = None) -> SwarmMetrics | None:
    """The swarm's newest epoch from all peers' records; None when no peer has reported a batch.

    The newest epoch is the largest among the plausible records (see filter_plausible_records). Only peers at that epoch
    or the one before count, because peers report one after the other: older records belong to peers that left.

    :param last_epoch: the epoch of the aggregation before, if any
    """
    believable = [metrics for _, metrics in filter_plausible_records(records, last_epoch)]
    if not believable:
        return None
    newest_epoch = max(metrics.epoch for metrics in believable)
    current = [metrics for metrics in believable if metrics.epoch >= newest_epoch - 1]
    if not any(metrics.mini_steps for metrics in current):
        return None
    summed = ("bytes_sent", "bytes_received", "skipped_steps")
    median = ("epoch_seconds", "waiting_seconds", "averaging_seconds", "grad_norm", "learning_rate")
    medians = {name: statistics.median(getattr(metrics, name) for metrics in current) for name in median}
    return SwarmMetrics(
        epoch=newest_epoch,
        loss=average_loss(current),
        alive_peers=len(current),
        samples=sum(metrics.samples_accumulated for metrics in current),
        samples_per_second=math.fsum(metrics.samples_per_second for metrics in current),
        compute_seconds=compute_seconds(medians),
        averaged_with=min(metrics.averaged_with for metrics in current),
        **{name: sum(getattr(metrics, name) for metrics in current) for name in summed},
        **medians,
    )


def find_evaluation(records: list[tuple[str, LocalMetrics]]) -> Evaluation | None:
    """The newest evaluation among believable records; of several peers' of one epoch, that of median loss."""
    evaluations = [metrics.evaluation for _, metrics in records if metrics.evaluation]
    newest = max((evaluation.epoch for evaluation in evaluations), default=0)
    evaluations = sorted((e for e in evaluations if e.epoch == newest), key=lambda evaluation: evaluation.loss)
    return evaluations[(len(evaluations) - 1) // 2] if evaluations else None


def describe_evaluation(evaluation: Evaluation) -> dict[str, float]:
    """For files and dashboards; the perplexity, e to the loss, is that of the predicted tokens alone."""
    return {
        "validation_epoch": evaluation.epoch,
        "validation_loss": evaluation.loss,
        "validation_perplexity": perplexity(evaluation.loss),
        "validation_accuracy": evaluation.accuracy,
        **({"validation_unigram_entropy": evaluation.unigram_entropy} if evaluation.unigram_entropy else {}),
    }


def format_evaluation(evaluation: Evaluation) -> str:
    """`loss 5.2500 nats, perplexity 190.6, accuracy 12.5% at epoch 1,000`."""
    return (
        f"loss {evaluation.loss:.4f} nats, perplexity {perplexity(evaluation.loss):,.1f}, accuracy "
        f"{evaluation.accuracy:.1%} at epoch {evaluation.epoch:,}"
    )


def perplexity(loss: float) -> float:
    """e to the loss in nats, or what comes next to infinity."""
    return math.exp(min(loss, 700.0))


def compute_seconds(seconds: dict[str, float]) -> float:
    """What waiting and averaging leave of an epoch's seconds."""
    return max(0.0, seconds["epoch_seconds"] - seconds["waiting_seconds"] - seconds["averaging_seconds"])
