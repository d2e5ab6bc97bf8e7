"""Reads batches of two workers until Ctrl-C: of a stream; or of a dataset, and then some more, or ends at once.

python -m tests.programs.interrupted_batches stream|finish|at_once TOKENIZER SOURCES|DATASET
"""

import signal
import sys
import threading

from datasets import load_from_disk

from arguments import DataArguments
from experiment import data
from text.tokenizers import load_tokenizer

way, tokenizer, source = sys.argv[1], load_tokenizer(sys.argv[2]), sys.argv[3]
stop, options = threading.Event(), dict(batch_size=8, seed=1, num_workers=2)
# a shell makes background processes ignore it; a trainer notes the signal and finishes its step
signal.signal(signal.SIGINT, signal.default_int_handler if way == "at_once" else lambda *_: stop.set())
if way == "stream":
    args = DataArguments(streaming=True, sources=source, max_sequence_length=64)
    batches = data.make_train_batches(
        data.make_training_dataset(tokenizer, args), tokenizer, args, **options, stop=stop
    )
else:
    batches = data.make_train_batches(load_from_disk(source), tokenizer, DataArguments(), **options)
batches = iter(batches)
try:
    for number, _ in enumerate(batches):
        if number == 0:
            print("ready", flush=True)
        if way == "finish" and stop.is_set():
            break
    for _ in range(50 if way == "finish" else 0):
        next(batches)
except KeyboardInterrupt:
    pass
print("ended well", flush=True)
