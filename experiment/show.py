"""Print batches as the model will see them.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python -m experiment.show

prints some batches as text, with the tokens that are padding or to be predicted. It takes a trainer's flags for data,
such as --dataset_path, --tokenizer_path, --no_whole_word_mask and --max_sequence_length.
"""

import itertools
import math
import shutil
import signal
import sys
import textwrap

from arguments import DataArguments, ModelArguments, parse_arguments
from common.console import edge, make_printable

if __name__ == "__main__":  # before the imports below, which take seconds
    with edge():
        groups = parse_arguments(ModelArguments, DataArguments, description=__doc__)

import numpy as np

from experiment.data import load_data, make_train_batches
from experiment.model import find_objective
from text.batches import check_data_arguments, sequence_length_at
from text.collators import IGNORED_LABEL
from text.tokenizers import find_word_beginnings

BATCH_SIZE = 4
SHOWN_ROWS = 2
SHOWN_BATCHES = 3


def format_row(ids: np.ndarray, labels: np.ndarray, tokenizer) -> str:
    """Return a sequence without padding as text, with a label in brackets behind each token to predict."""
    begins_word = find_word_beginnings(tokenizer)
    special = tokenizer.all_special_ids
    text = ""
    previous = special[0]
    for seen, label in zip(ids.tolist(), labels.tolist(), strict=True):
        true = seen if label == IGNORED_LABEL else label
        pieces = [token.lstrip("▁Ġ").removeprefix("##") for token in tokenizer.convert_ids_to_tokens([seen, true])]
        is_apart = true in special or previous in special
        text += " " if is_apart or begins_word is None or begins_word[true] else ""
        text += pieces[0] if label == IGNORED_LABEL else f"{pieces[0]}⟦{pieces[1]}⟧"
        previous = true
    return text.strip()


def main(model_args: ModelArguments, args: DataArguments) -> None:
    """Print batches."""
    objective = find_objective(model_args)
    tokenizer, dataset, corpus = load_data(model_args, args, needs_validation=False)
    check_data_arguments(args, tokenizer, corpus, math.inf)
    batches = make_train_batches(dataset["train"], tokenizer, args, batch_size=BATCH_SIZE, seed=model_args.seed)
    batches.sequence_length = sequence_length_at(0, args)
    stored = "" if args.streaming else f"{len(dataset['train']):,} sequences for training, "
    source = args.sources if args.streaming else args.train_file or args.dataset_name or args.dataset_path
    print(f"{source}: {stored}{len(tokenizer):,} tokens, objective {objective.name}")
    what = f"it predicts {objective.description}" if objective.is_causal else "labels follow in brackets"
    print(f"Batches as the model sees them; {what}:")
    for number, batch in enumerate(itertools.islice(batches, SHOWN_BATCHES), start=1):
        for row in range(SHOWN_ROWS):
            length = int(batch["attention_mask"][row].sum())
            ids, labels = (batch[name][row, :length].numpy() for name in ("input_ids", "labels"))
            facts = [f"{length} tokens, {batch['attention_mask'].shape[1] - length} of padding"]
            if "sentence_order_label" in batch:
                facts.append("swapped" if batch["sentence_order_label"][row] else "in order")
            facts.append(f"{(labels != IGNORED_LABEL).sum()} to be predicted")
            print(f"\nbatch {number}, row {row + 1} of {BATCH_SIZE}: {', '.join(facts)}")
            text = tokenizer.decode(ids) if objective.is_causal else format_row(ids, labels, tokenizer)
            width = min(120, shutil.get_terminal_size().columns) - 4
            lines = textwrap.wrap(make_printable(" ".join(text.split())), width, break_on_hyphens=False)
            text = textwrap.indent("\n".join(lines), "    ")
            if sys.stdout.isatty():
                text = text.replace("⟦", "\033[33m⟦").replace("⟧", "⟧\033[0m")
            print(text, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    with edge():
        main(*groups)
