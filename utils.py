"""Metrics that peers publish: their schema, and the signatures and validators of all records.

Each trainer publishes the metrics of its last epoch under `{prefix}_metrics`. The subkey is its public key. It signs
the record with the private key, so that no other peer can overwrite it.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import logging
import re
from collections.abc import Collection

import multihash
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hivemind import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.schema import SchemaValidator, conbytes
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
from pydantic.v1 import BaseModel, StrictBool, ValidationError, confloat, conint, conlist, constr, root_validator

from arguments import MAX_RECORD_LIFETIME, TRAINER_ARGS
from common.flags import MAX_SHARED, SHARED_FLAGS, USERNAME, UnknownFlagError, list_shared

logger = logging.getLogger("utils")

# A whole dictionary must fit into one p2pd message (4 MB). Searches for a group often load one without a schema.
MAX_RECORD_BYTES = 16 * 1024
MAX_BYTES_WITHOUT_SCHEMA = 2 * 1024
MAX_EPOCH_GAP = 1000  # between the records of one run, which live for 600 s; no epoch takes less than a second
FETCH_TIMEOUT = 30.0  # seconds
MAX_WORKERS = 64  # contributors that one record may name
WORKER_NAME = 12  # characters at the end of a peer id that name a contributor
MAX_MEAN_LOSS = 1000.0  # nats; a random guess has ln(vocabulary), about 10

# hivemind's own keys: 2048 bits and the usual exponent. Other keys take long to verify, and text around the key, which
# hivemind allows, would give one owner many subkeys.
PUBLIC_KEY = re.compile(rb"\[owner:ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABAQ[A-Za-z0-9+/]{342}\]\Z")
PUBLIC_KEY_LENGTH = 388
PublicKeyBytes = conbytes(regex=PUBLIC_KEY.pattern)

# hivemind's SchemaValidator needs pydantic's first version. Numbers are strict, and two bounds reject NaN as well.
Count = conint(strict=True, ge=0, le=10**9)
Peers = conint(strict=True, ge=0, le=10**6)
Total = conint(strict=True, ge=0, le=10**15)
Amount = confloat(strict=True, ge=0.0, le=1e9)
Nats = confloat(strict=True, ge=0.0, le=MAX_MEAN_LOSS)
WorkerKey = constr(strict=True, min_length=WORKER_NAME, max_length=WORKER_NAME)


class Evaluation(BaseModel):
    """A peer's newest evaluation on the validation split."""

    epoch: Count  # the epoch of the evaluated weights
    loss: Nats  # per predicted token
    accuracy: confloat(strict=True, ge=0.0, le=1.0)  # share of these tokens that were predicted correctly
    samples: conint(strict=True, ge=1, le=10**9)  # sequences of the split that were used
    unigram_entropy: Nats | None = None  # of the split, see text/stored.py
    bits_per_byte: Nats | None = None  # of causal models; their loss for any tokenizer


class LocalMetrics(BaseModel):
    """One peer's report after an epoch."""

    epoch: Count  # the last finished epoch
    samples_per_second: Amount
    samples_accumulated: Count  # this peer's contribution to that epoch
    loss: Amount  # nats, the SUM over mini_steps
    mini_steps: conint(strict=True, ge=0, le=10**6)  # number of batches in that sum
    averaged_with: Peers  # peers in the averaged gradient, this one included, or owners in the commit
    num_peers: Peers  # peers in the swarm at that time
    grad_norm: confloat(strict=True, ge=0.0, le=1e30)  # of the averaged gradient, unclipped, or the outer momentum
    learning_rate: confloat(strict=True, ge=0.0, le=1e6)
    total_samples: Total  # this peer's samples so far that reached an optimizer step
    skipped_steps: Count  # this peer's steps so far with non-finite loss or gradients
    epoch_seconds: Amount  # time since this peer finished its previous epoch
    waiting_seconds: Amount  # part of epoch_seconds spent in matchmaking
    averaging_seconds: Amount  # part of epoch_seconds spent in all-reduce
    bytes_sent: Total  # during epoch_seconds, by rounds, states and the log
    bytes_received: Total
    client_mode: StrictBool  # accepts no incoming connections
    username: constr(strict=True, regex=rf"\A{USERNAME}\Z") | None = None  # in a closed run that of its credential
    evaluation: Evaluation | None = None  # the newest, with --do_eval --eval_steps
    final_epoch: Count | None = None  # this peer's last epoch, if not the schedule's
    partners: conlist(WorkerKey, max_items=MAX_WORKERS) | None = None  # the peers in its last averaged gradient
    # with local steps: by `peer_label`, the share of each owner's last updates that counted
    counted: dict[constr(strict=True, min_length=8, max_length=8), confloat(strict=True, ge=0.0, le=1.0)] | None = None

    def dict(self, **options) -> dict:
        """Return the fields that have a value, because older peers reject fields that they do not know."""
        return super().dict(**{**options, "exclude_none": True})

    @root_validator(skip_on_failure=True)
    def validate_consistency(cls, values: dict) -> dict:
        """Compare fields with each other."""
        if values["evaluation"] and values["evaluation"].epoch > values["epoch"]:
            raise ValueError("an evaluation must not be newer than the record")
        if values["loss"] > MAX_MEAN_LOSS * values["mini_steps"]:
            raise ValueError(f"the mean loss must not exceed {MAX_MEAN_LOSS:g} nats")
        return values


class Flags(constr(strict=True, max_length=MAX_SHARED, regex=rf"\A{SHARED_FLAGS.pattern}\Z")):
    """Flags that all peers of a run share, as typed on the command line. Other flags are never published."""

    @classmethod
    def validate(cls, flags: str) -> str:
        """Reject flags that peers do not share."""
        if not set(re.findall(r"--(\w+)", flags)).issubset(list_shared(TRAINER_ARGS)):
            raise UnknownFlagError("only flags that all peers must share may be published")
        return super().validate(flags)


class MetricSchema(BaseModel):
    """The schema of the key `{prefix}_metrics`: a dictionary of records by public key."""

    metrics: dict[PublicKeyBytes, LocalMetrics]


@functools.lru_cache(maxsize=4096)
def find_peer_id(public_key: bytes) -> bytes:
    """Return the id of the peer with this public key, which a connection proves, or raise a ValueError."""
    key = PUBLIC_KEY.match(public_key) and RSAPublicKey.from_bytes(public_key[len(b"[owner:") : -1])._public_key
    if not key or key.key_size != 2048:  # libp2p's; others cost nothing to make
        raise ValueError("not a public key")
    data = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    encoded = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=data).SerializeToString()
    return multihash.encode(hashlib.sha256(encoded).digest(), "sha2-256")


def find_subkey_owner(subkey: bytes) -> bytes:
    """Return the id of the peer whose records have this subkey, which is its public key or the id itself."""
    return find_peer_id(subkey) if PUBLIC_KEY.match(subkey) else subkey


def make_worker_key(peer_id: bytes) -> str:
    """Return the short name of a peer in `LocalMetrics.partners`; the end of an id is infeasible to forge."""
    return str(PeerID(peer_id))[-WORKER_NAME:]


class RecordValidator(RSASignatureValidator):
    """A validator for all keys of the DHT (notes 34 and 73), of small records that expire soon and that their owner
    signed. The subkey is the owner's public key or peer id, and the value must not name another peer."""

    def __init__(self, private_key: RSAPrivateKey | None = None, keys: Collection[bytes] = ()):
        super().__init__(private_key)
        self.keys = keys  # whose records have a schema
        self.own_id = MSGPackSerializer.dumps(find_peer_id(self.local_public_key))

    def sign_value(self, record: DHTRecord) -> bytes:
        """Sign a record under this peer's id with its key; hivemind signs records under the key only."""
        if record.subkey != self.own_id:
            return super().sign_value(record)
        record = dataclasses.replace(record, subkey=MSGPackSerializer.dumps(self.local_public_key))
        return super().sign_value(record) + self.local_public_key  # the subkey is only a digest of the key

    def validate(self, record: DHTRecord) -> bool:
        """Return whether a record is small, short-lived and signed by its owner."""
        try:
            is_short_lived = 0 <= record.expiration_time <= get_dht_time() + MAX_RECORD_LIFETIME + 10  # False for NaN
            limit = MAX_RECORD_BYTES if record.key in self.keys else MAX_BYTES_WITHOUT_SCHEMA
            if not is_short_lived or len(record.value) + len(record.subkey) > limit:
                return False
            subkey, value = map(MSGPackSerializer.loads, (record.subkey, self.strip_value(record)))
            # Readers serialize the subkey again. If their bytes differed, they would drop the whole dictionary.
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
        """Return the value without signature and key."""
        return PUBLIC_KEY.sub(b"", super().strip_value(record))


def make_validators(
    prefix: str, private_key: RSAPrivateKey | None = None, schema: type[BaseModel] = MetricSchema
) -> tuple[list[RecordValidatorBase], bytes]:
    """Return the validators that each peer of a run passes to its DHT, and this peer's public key (its subkey). A
    reader without them cannot read records (note 33). `RunSchema` in swarm/contract.py adds the contracts.

    :param private_key: the signing key; by default the process-wide key, with which hivemind signs its progress
    """
    keys = {DHTID.generate(f"{prefix}_{name}").to_bytes() for name in (*schema.__fields__, "progress")}
    signature = RecordValidator(private_key, keys)
    return [SchemaValidator(schema, prefix=prefix), signature], signature.local_public_key


def peer_label(public_key: bytes) -> str:
    """Return a short name for a peer: eight hexadecimal digits of its key's SHA-256, the same in each process."""
    return hashlib.sha256(public_key).hexdigest()[:8]


def fetch_dictionary(
    dht: DHT, key: str, schema: type[BaseModel], timeout: float = FETCH_TIMEOUT, latest: bool = True
) -> dict[bytes, tuple[BaseModel, float]]:
    """Return the records under this key by their subkeys, each with its expiration time, which grows with each update;
    none if the DHT does not answer in time. With `latest`, other peers are asked even if this one stores some."""
    try:
        entry = dht.get(key, latest=latest, return_future=True).result(timeout=timeout)
    except (concurrent.futures.TimeoutError, OSError) as e:
        logger.warning(f"the DHT did not answer within {timeout:g} s ({type(e).__name__}), retrying later")
        return {}
    records = {}
    for subkey, item in entry.value.items() if entry and isinstance(entry.value, dict) else ():
        with contextlib.suppress(ValidationError, TypeError):  # withdrawn, or a bug: validators have checked it
            records[subkey] = schema.parse_obj(item.value), item.expiration_time
    return records


def filter_plausible_records(records: list[tuple[str, LocalMetrics]], last_epoch: int | None = None) -> list:
    """Return the records without those of an implausible epoch: any peer can sign "epoch 10**9" with a new key. They
    are split at gaps of more than MAX_EPOCH_GAP epochs, and the largest part is kept. Of two parts of the same size,
    this is the one that includes `last_epoch`, or else the newer one.
    """
    parts: list[list[tuple[str, LocalMetrics]]] = []
    for record in sorted(records, key=lambda record: record[1].epoch):
        if not parts or record[1].epoch - parts[-1][-1][1].epoch > MAX_EPOCH_GAP:
            parts.append([])
        parts[-1].append(record)

    def rank(part: list) -> tuple:
        first = part[0][1].epoch
        newest = part[-1][1].epoch
        fits_last = last_epoch is not None and first - MAX_EPOCH_GAP <= last_epoch <= newest + MAX_EPOCH_GAP
        return len(part), fits_last, newest

    return max(parts, key=rank) if parts else []
