"""Records that peers publish about a run: signatures and validators, metrics and their aggregation.

Each trainer publishes two records: the metrics of its last epoch (`{prefix}_metrics`, LocalMetrics) and the contract
with its settings (`{prefix}_run`, RunContract). Both have its public key as subkey and are signed with the matching
private key, so that no other peer can overwrite them. To print the metrics of a live run:

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
from common.flags import MAX_SHARED, SHARED_FLAGS, USERNAME, list_shared

logger = logging.getLogger("utils")

SHARED_NAMES = list_shared(TRAINER_ARGS)

# Our records and hivemind's are far smaller: signed metrics take about 0.7 KB, a contract 2 KB, hivemind's progress
# 0.6 KB. A whole dictionary of records must fit into one p2pd message (4 MB), or no peer can read it.
MAX_RECORD_BYTES = 16 * 1024
MAX_CONTRACT_BYTES = 9000  # an attestation carries it through a hivemind pipe, which breaks at 16 KB
# Seconds. A record that never expires would count as a peer forever. Ours live for minutes: this is also the maximum of
# --statistics_expiration.
MAX_RECORD_LIFETIME = 3600.0
# Records live for --statistics_expiration, 600 s. A swarm with epochs of 1 s advances 600 epochs in that time, so
# records further apart than this do not belong to one run.
MAX_EPOCH_GAP = 1000
MIN_CONTRIBUTOR_TIMEOUT = 60.0  # seconds without a new epoch of a contributor, until any peer may become one
FETCH_TIMEOUT = 30.0  # seconds
MAX_WORKERS = 64  # contributors that one record may name
WORKER_NAME = 12  # characters at the end of a peer id that name a contributor
MAX_MEAN_LOSS = 1000.0  # nats; a random guess has ln(vocabulary), about 10
MAX_LOSS_DEVIATION = 0.25  # relative to the median; for the mean loss over the few batches of an honest peer

# hivemind's own keys: 2048 bits and the usual exponent. Other keys take long to verify. hivemind's BytesWithPublicKey
# allows text of any length around the key, with which one owner could fill many subkeys.
PUBLIC_KEY = re.compile(rb"\[owner:ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABAQ[A-Za-z0-9+/]{342}\]\Z")
PUBLIC_KEY_LENGTH = 388
PublicKeyBytes = conbytes(regex=PUBLIC_KEY.pattern)


class Evaluation(BaseModel):
    """A peer's newest evaluation on the validation split."""

    epoch: conint(strict=True, ge=0, le=10**9)  # the epoch of the evaluated weights
    loss: confloat(strict=True, ge=0.0, le=MAX_MEAN_LOSS)  # nats per predicted token
    accuracy: confloat(strict=True, ge=0.0, le=1.0)  # share of these tokens that were predicted correctly
    samples: conint(strict=True, ge=1, le=10**9)  # sequences of the split that were used
    unigram_entropy: confloat(strict=True, ge=0.0, le=MAX_MEAN_LOSS) | None = None  # of the split, see text/stored.py


class LocalMetrics(BaseModel):
    """One peer's report after an epoch. Numbers are strict: a float field rejects an int.

    Each field is bounded on both sides, and comparisons with NaN are false, so NaN and infinity are rejected too.
    A record omits optional fields without a value, because older peers reject fields that they do not know.
    """

    epoch: conint(strict=True, ge=0, le=10**9)  # the last finished epoch
    samples_per_second: confloat(strict=True, ge=0.0, le=1e9)
    samples_accumulated: conint(strict=True, ge=0, le=10**9)  # this peer's contribution to that epoch
    loss: confloat(strict=True, ge=0.0, le=1e9)  # nats, the SUM over mini_steps
    mini_steps: conint(strict=True, ge=0, le=10**6)  # number of batches in that sum
    averaged_with: conint(strict=True, ge=0, le=10**6)  # peers in the averaged gradient with this one, or 0
    num_peers: conint(strict=True, ge=0, le=10**6)  # peers in the swarm at that time
    grad_norm: confloat(strict=True, ge=0.0, le=1e30)  # of the averaged gradient, before clipping
    learning_rate: confloat(strict=True, ge=0.0, le=1e6)
    total_samples: conint(strict=True, ge=0, le=10**15)  # this peer's samples so far that reached an optimizer step
    skipped_steps: conint(strict=True, ge=0, le=10**9)  # this peer's steps so far with non-finite loss or gradients
    epoch_seconds: confloat(strict=True, ge=0.0, le=1e9)  # time since this peer finished its previous epoch
    waiting_seconds: confloat(strict=True, ge=0.0, le=1e9)  # part of epoch_seconds spent in matchmaking
    averaging_seconds: confloat(strict=True, ge=0.0, le=1e9)  # part of epoch_seconds spent in all-reduce
    bytes_sent: conint(strict=True, ge=0, le=10**15)  # during epoch_seconds, for rounds and states only
    bytes_received: conint(strict=True, ge=0, le=10**15)
    client_mode: StrictBool  # accepts no incoming connections
    username: constr(strict=True, regex=rf"\A{USERNAME}\Z") | None = None  # in a closed run that of its credential
    evaluation: Evaluation | None = None  # the newest, with --do_eval --eval_steps
    final_epoch: conint(strict=True, ge=0, le=10**9) | None = None  # this peer's last epoch, if not the schedule's
    # The peers in its last averaged gradient, see make_worker_key.
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
    """Flags that all peers of a run share, as typed on the command line. Other flags are never published."""

    @classmethod
    def __get_validators__(cls):
        yield from super().__get_validators__()
        yield cls.check_names

    @classmethod
    def check_names(cls, flags: str) -> str:
        if not set(re.findall(r"--(?:no_)?(\w+)", flags)) <= SHARED_NAMES:
            raise ValueError("only flags that all peers must share may be published")
        return flags


class RunContract(BaseModel):
    """The settings that one peer trains with, as a map of names to texts, so that later versions can add names."""

    joined: confloat(strict=True, ge=0.0, le=1e11)  # Unix time of this peer's first publication of its contract
    contract: dict[constr(strict=True, min_length=1, max_length=64), constr(strict=True, max_length=200)]
    flags: Flags = ""  # the flags that define the contract

    @root_validator(skip_on_failure=True)
    def bound_entries(cls, values: dict) -> dict:
        if len(values["contract"]) > 32:
            raise ValueError("a contract must not have more than 32 entries")
        texts = "".join(text for entry in values["contract"].items() for text in entry)
        if len(texts.encode()) > MAX_CONTRACT_BYTES:
            raise ValueError(f"a contract must not exceed {MAX_CONTRACT_BYTES:,} bytes")
        # Other peers print contracts.
        if not texts.isprintable():
            raise ValueError("a contract must not contain line breaks or terminal control characters")
        return values


class MetricSchema(BaseModel):
    """The schema of the keys `{prefix}_metrics` and `{prefix}_run`: dictionaries of records by public key."""

    metrics: dict[PublicKeyBytes, LocalMetrics]
    run: dict[PublicKeyBytes, RunContract | None]


@functools.lru_cache(maxsize=4096)
def find_peer_id(public_key: bytes) -> bytes:
    """Return the id of the peer with this public key; a connection under that id proves that the peer owns the key.

    :raises ValueError: if the bytes are not a public key
    """
    if not PUBLIC_KEY.match(public_key):
        raise ValueError("not a public key")
    key = RSAPublicKey.from_bytes(public_key[len(b"[owner:") : -1])._public_key
    data = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    encoded = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=data).SerializeToString()
    return multihash.encode(hashlib.sha256(encoded).digest(), "sha2-256")


def find_subkey_owner(subkey: bytes) -> bytes:
    """Return the id of the peer whose records have this subkey, which is its public key or the id itself."""
    return find_peer_id(subkey) if PUBLIC_KEY.match(subkey) else subkey


class RecordValidator(RSASignatureValidator):
    """A validator for all keys of the DHT. It accepts small, decodable records that expire soon and that their owner
    signed. The subkey is the owner's public key or peer id, and the value must not name another peer.

    Without it, a value that is not msgpack makes `dht.get` time out for all readers of its key, because hivemind
    decodes in a callback that ignores exceptions. A record without a subkey replaces all others. hivemind does not sign
    records under a peer id, so any peer could declare there that this one is not looking for a group (note 73).
    """

    def __init__(self, private_key: RSAPrivateKey | None = None):
        super().__init__(private_key)
        self.own_id = MSGPackSerializer.dumps(find_peer_id(self.local_public_key))

    def sign_value(self, record: DHTRecord) -> bytes:
        if record.subkey != self.own_id:
            return super().sign_value(record)
        record = dataclasses.replace(record, subkey=MSGPackSerializer.dumps(self.local_public_key))
        return super().sign_value(record) + self.local_public_key  # the subkey is only a digest of the key

    def validate(self, record: DHTRecord) -> bool:
        try:
            # This form also rejects NaN, for which all comparisons are false.
            is_short_lived = 0 <= record.expiration_time <= get_dht_time() + MAX_RECORD_LIFETIME
            if not is_short_lived or len(record.value) + len(record.subkey) > MAX_RECORD_BYTES:
                return False
            subkey, value = map(MSGPackSerializer.loads, (record.subkey, self.strip_value(record)))
            # Readers serialize the subkey again to check the signature. If their bytes differed, the check would fail,
            # and they would drop the whole dictionary.
            if MSGPackSerializer.dumps(subkey) != record.subkey or len(record.key) != DHTID.HASH_NBYTES:
                return False
            owner = subkey if PUBLIC_KEY.match(subkey) else record.value[-PUBLIC_KEY_LENGTH:]
            peer_id = find_peer_id(owner)
            if subkey == peer_id:
                signed = record.value[:-PUBLIC_KEY_LENGTH]
                record = dataclasses.replace(record, subkey=MSGPackSerializer.dumps(owner), value=signed)
            is_own = not isinstance(value, dict) or value.get("peer_id", peer_id) == peer_id
            return is_own and subkey in (owner, peer_id) and super().validate(record)
        except Exception as e:  # for malicious bytes, the decoder and its extension types may raise any exception
            logger.debug(f"rejected an unreadable record: {e!r}")
            return False

    def strip_value(self, record: DHTRecord) -> bytes:
        return PUBLIC_KEY.sub(b"", super().strip_value(record))


def make_validators(prefix: str, private_key: RSAPrivateKey | None = None) -> tuple[list[RecordValidatorBase], bytes]:
    """Return the validators that each peer of a run passes to its DHT, and this peer's public key (its subkey).

    Readers without these validators cannot read records, because the signature stays on the value
    (hivemind/dht/crypto.py).

    :param private_key: the signing key; by default the process-wide key, with which hivemind signs its progress
    """
    signature = RecordValidator(private_key)
    return [SchemaValidator(MetricSchema, prefix=prefix), signature], signature.local_public_key


def name_peer(label: str, username: str | None) -> str:
    """Return a peer's name for people: its user name, which in a closed run its invitation proves, and its label."""
    return f"{username} {label}" if username else label


def peer_label(public_key: bytes) -> str:
    """Return a short name for a peer: eight hexadecimal digits of its key's SHA-256, the same in each process."""
    return hashlib.sha256(public_key).hexdigest()[:8]


def fetch_dictionary(dht: DHT, key: str, timeout: float, latest: bool = True) -> dict[bytes, ValueWithExpiration]:
    """Return the records under this key by their subkeys; if the DHT does not answer, the result is empty.

    :param timeout: seconds to wait for the DHT
    :param latest: whether to ask other peers even if this one stores some records
    """
    try:
        entry = dht.get(key, latest=latest, return_future=True).result(timeout=timeout)
    except (concurrent.futures.TimeoutError, OSError) as e:
        logger.warning(f"the DHT did not answer within {timeout:g} s ({type(e).__name__}), retrying later")
        return {}
    return entry.value if entry is not None and isinstance(entry.value, dict) else {}


def make_worker_key(peer_id: bytes) -> str:
    """Return the short name of a peer in `LocalMetrics.partners`; the end of an id is infeasible to forge."""
    return str(PeerID(peer_id))[-WORKER_NAME:]


class ContributorRegistry:
    """The peers that have contributed to a run.

    Contributors name the peers with which they averaged, which makes these contributors too. Metrics of untrusted peers
    do not count, even under 10,000 keys. All peers that publish metrics count at the start, and again if no contributor
    has finished an epoch for a while.
    """

    def __init__(self, ids: Iterable[bytes] = ()):
        """:param ids: the ids of peers that have contributed, according to a trusted source"""
        #: ids of all contributors
        self.ids = set(ids)
        #: ids of the contributors with live metrics
        self.present: set[bytes] = set()
        self.epochs: dict[bytes, int] = {}
        self.named_by: dict[bytes, set[bytes]] = {}
        self.until = 0.0  # time at which the contributors are dropped unless one of them finishes an epoch

    def select(self, records: dict[bytes, LocalMetrics]) -> set[bytes]:
        """Update the contributors and return the ids of those with live metrics.

        :param records: the newest metrics of each peer by its id
        """
        now = time.monotonic()
        epochs = {peer_id: metrics.epoch for peer_id, metrics in records.items()}
        present = self.ids & epochs.keys()
        has_epoch = any(epochs[peer_id] != self.epochs.get(peer_id) for peer_id in present)
        if not has_epoch and now >= self.until:
            self.ids = present = set(epochs)
        if present and (has_epoch or now >= self.until):
            seconds = statistics.median(records[peer_id].epoch_seconds for peer_id in present)
            self.until = now + max(MIN_CONTRIBUTOR_TIMEOUT, 3 * seconds)
        self.epochs = epochs
        newest = statistics.median(epochs[peer_id] for peer_id in present) if present else 0
        current = [peer_id for peer_id in present if epochs[peer_id] >= newest - 1]
        names = {make_worker_key(peer_id): peer_id for peer_id in epochs}
        self.named_by = {peer_id: self.named_by.get(peer_id, set()) for peer_id in epochs}
        for peer_id in current:
            for partner in filter(None, map(names.get, records[peer_id].partners or ())):
                self.named_by[partner].add(peer_id)
        # A single malicious contributor could name its other keys, so two must name a peer if there are two or more.
        quorum = max(1, min(2, len(current)))
        self.ids |= {peer_id for peer_id, by in self.named_by.items() if len(by - {peer_id}) >= quorum}
        self.present = self.ids & epochs.keys()
        return self.present


def fetch_records(
    dht: DHT,
    prefix: str,
    timeout: float = FETCH_TIMEOUT,
    workers: ContributorRegistry | None = None,
    latest: bool = True,
) -> dict[str, tuple[LocalMetrics, float]]:
    """Return all peers' newest metrics by label, each with its expiration time, which increases with newer records.

    :param timeout: seconds to wait for the DHT; if it does not answer, the result is empty
    :param workers: the registry to update; with it, only the records of contributors are returned
    :param latest: whether to ask other peers even if this one stores some records
    """
    records = {}
    for public_key, item in fetch_dictionary(dht, f"{prefix}_metrics", timeout, latest).items():
        try:
            records[public_key] = LocalMetrics.parse_obj(item.value), item.expiration_time
        except (ValidationError, TypeError) as e:  # records are validated on arrival, so this is a bug, not an attack
            logger.debug(f"ignored a malformed record: {e}")
    if workers:
        of_workers = workers.select({find_peer_id(public_key): metrics for public_key, (metrics, _) in records.items()})
        records = {key: record for key, record in records.items() if find_peer_id(key) in of_workers}
    return dict(sorted({peer_label(public_key): record for public_key, record in records.items()}.items()))


def fetch_metrics(
    dht: DHT, prefix: str, timeout: float = FETCH_TIMEOUT, workers: ContributorRegistry | None = None
) -> list[tuple[str, LocalMetrics]]:
    """Return the result of `fetch_records` as (peer label, metrics), sorted by label."""
    return [(label, metrics) for label, (metrics, _) in fetch_records(dht, prefix, timeout, workers).items()]


def fetch_progress(dht: DHT, prefix: str, timeout: float = FETCH_TIMEOUT) -> dict[str, LocalTrainingProgress]:
    """Return the newest progress records of hivemind's tracker in the run's trainers, by peer label.

    :param timeout: seconds to wait for the DHT; if it does not answer, the result is empty
    """
    reports = {}
    for public_key, item in fetch_dictionary(dht, f"{prefix}_progress", timeout).items():
        with contextlib.suppress(ValidationError, TypeError):
            reports[peer_label(public_key)] = LocalTrainingProgress.parse_obj(item.value)
    return reports


@dataclass
class SwarmMetrics:
    """The swarm's metrics at its newest epoch."""

    epoch: int
    loss: float  # nats per batch, the mean over all peers' batches
    alive_peers: int  # peers whose last report is for this epoch or the previous one
    samples: int  # contributions of these peers
    samples_per_second: float  # total of these peers
    epoch_seconds: float  # median over these peers, as are the parts that it consists of:
    compute_seconds: float  # the rest after waiting and averaging
    waiting_seconds: float
    averaging_seconds: float
    bytes_sent: int  # total of these peers in this epoch
    bytes_received: int
    averaged_with: int  # peers in the averaged gradient: the smallest number that any of these peers reports
    grad_norm: float  # median over these peers
    learning_rate: float  # median over these peers
    skipped_steps: int  # total of these peers so far


def filter_plausible_records(records: list[tuple[str, LocalMetrics]], last_epoch: int | None = None) -> list:
    """Return the records without those whose epoch is implausible, next to which all others would look stale.

    Any peer can sign "epoch 10**9" with a new key. The records are split where neighboring epochs are more than
    MAX_EPOCH_GAP apart, and the largest part is kept, so that a minority cannot move the swarm's epoch. Of two parts of
    the same size, the one that includes `last_epoch` (within MAX_EPOCH_GAP) is kept, or else the newer one.
    """
    parts: list[list[tuple[str, LocalMetrics]]] = []
    for record in sorted(records, key=lambda record: record[1].epoch):
        if not parts or record[1].epoch - parts[-1][-1][1].epoch > MAX_EPOCH_GAP:
            parts.append([])
        parts[-1].append(record)

    def rank(part: list) -> tuple:
        first, newest = part[0][1].epoch, part[-1][1].epoch
        fits_last = last_epoch is not None and first - MAX_EPOCH_GAP <= last_epoch <= newest + MAX_EPOCH_GAP
        return len(part), fits_last, newest

    return max(parts, key=rank) if parts else []


def average_loss(records: list[LocalMetrics]) -> float:
    """Return the mean loss over all peers' batches, in nats, robust to one malicious peer of at least three.

    Peers whose mean loss is far from the median are excluded. The weight of a peer is its number of batches, limited to
    twice the median.
    """
    losses = [(metrics.loss / metrics.mini_steps, metrics.mini_steps) for metrics in records if metrics.mini_steps]
    if len(losses) > 2:
        median_loss, median_count = (statistics.median_low(column) for column in zip(*losses, strict=True))
        limit = MAX_LOSS_DEVIATION * median_loss
        losses = [(loss, min(count, 2 * median_count)) for loss, count in losses if abs(loss - median_loss) <= limit]
    return math.fsum(loss * count for loss, count in losses) / sum(count for _, count in losses)


def aggregate_metrics(records: list[tuple[str, LocalMetrics]], last_epoch: int | None = None) -> SwarmMetrics | None:
    """Aggregate all peers' records into the metrics of the swarm's newest epoch.

    The newest epoch is the largest among the plausible records (see `filter_plausible_records`). Peers do not report
    at the same time, so the previous epoch counts too. Older records belong to peers that left.

    :param last_epoch: the epoch of the previous aggregation, if any
    :returns: None if no peer has reported a batch
    """
    plausible = [metrics for _, metrics in filter_plausible_records(records, last_epoch)]
    if not plausible:
        return None
    newest_epoch = max(metrics.epoch for metrics in plausible)
    current = [metrics for metrics in plausible if metrics.epoch >= newest_epoch - 1]
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
    """Return the newest evaluation in the records; of several for one epoch, the one with the median loss."""
    evaluations = [metrics.evaluation for _, metrics in records if metrics.evaluation]
    newest = max((evaluation.epoch for evaluation in evaluations), default=0)
    evaluations = sorted((e for e in evaluations if e.epoch == newest), key=lambda evaluation: evaluation.loss)
    return evaluations[(len(evaluations) - 1) // 2] if evaluations else None


def describe_evaluation(evaluation: Evaluation) -> dict[str, float]:
    """Return an evaluation's metrics for files and dashboards; the perplexity is over the predicted tokens only."""
    return {
        "validation_epoch": evaluation.epoch,
        "validation_loss": evaluation.loss,
        "validation_perplexity": perplexity(evaluation.loss),
        "validation_accuracy": evaluation.accuracy,
        **({"validation_unigram_entropy": evaluation.unigram_entropy} if evaluation.unigram_entropy else {}),
    }


def format_evaluation(evaluation: Evaluation) -> str:
    """Return e.g. `loss 5.2500 nats, perplexity 190.6, accuracy 12.5% at epoch 1,000`."""
    return (
        f"loss {evaluation.loss:.4f} nats, perplexity {perplexity(evaluation.loss):,.1f}, accuracy "
        f"{evaluation.accuracy:.1%} at epoch {evaluation.epoch:,}"
    )


def perplexity(loss: float) -> float:
    """Return e to the loss in nats, limited to stay finite."""
    return math.exp(min(loss, 700.0))


def compute_seconds(seconds: dict[str, float]) -> float:
    """Return the seconds of an epoch without those spent waiting and averaging."""
    return max(0.0, seconds["epoch_seconds"] - seconds["waiting_seconds"] - seconds["averaging_seconds"])
