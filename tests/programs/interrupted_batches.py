"""Reads batches of two workers until Ctrl-C, and then some more, or ends at once."""

import signal
import sys

from datasets import load_from_disk
from transformers import AlbertTokenizer

from arguments import DataArguments
from experiment import data

special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
tokenizer = AlbertTokenizer(vocab=[(t, 0.0) for t in [*special, *(f"▁word{number}" for number in range(195))]])
signals = []
is_patient = sys.argv[2] == "finish"  # a trainer that notes the signal and finishes its step
# a shell makes background processes ignore it
signal.signal(signal.SIGINT, (lambda number, _: signals.append(number)) if is_patient else signal.default_int_handler)
options = dict(batch_size=8, seed=1, num_workers=2)
batches = iter(data.make_train_batches(load_from_disk(sys.argv[1]), tokenizer, DataArguments(), **options))
next(batches)
try:
    print("ready", flush=True)
    while not signals:
        next(batches)
    for _ in range(50):
        next(batches)
except KeyboardInterrupt:
    pass
print("ended well", flush=True)
