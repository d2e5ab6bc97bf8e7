"""Reads batches of a stream until Ctrl-C."""

import signal
import sys
import threading

from arguments import DataArguments
from experiment import data
from text.tokenizers import load_tokenizer

stop = threading.Event()
signal.signal(signal.SIGINT, lambda *_: stop.set())
tokenizer = load_tokenizer(sys.argv[1])
dataset = data.make_training_dataset(
    tokenizer, DataArguments(streaming=True, sources=sys.argv[2], max_sequence_length=64)
)
print("ready", flush=True)
options = dict(batch_size=8, seed=1, num_workers=2, stop=stop)
for _ in data.make_train_batches(dataset, tokenizer, DataArguments(), **options):
    pass
print("ended well", flush=True)
