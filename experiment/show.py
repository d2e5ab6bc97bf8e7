"""Print batches as the model will see them.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python -m experiment.show

prints some masked batches as text and statistics of their masks. It takes a trainer's flags for data, such as
--dataset_path, --tokenizer_path, --no_whole_word_mask and --max_sequence_length.
"""

import itertools
import math
import shutil
import signal
import sys
import textwrap
from collections import Counter

from arguments import DataArguments, ModelArguments, parse_arguments
from common.console import edge, make_printable

if __name__ == "__main__":  # before the imports below, which take seconds
    with edge():
        groups = parse_arguments(ModelArguments, DataArguments, description=__doc__)

import numpy as np

from experiment.data import load_data, make_train_batches
from experiment.model import find_objective
from experiment.objectives import Objective
from text.batches import check_data_arguments, sequence_length_at
from text.collators import IGNORED_LABEL, number_words
from text.tokenizers import find_word_beginnings

BATCH_SIZE, SHOWN_ROWS, SHOWN_BATCHES, MEASURED_BATCHES = 4, 2, 3, 250


class BatchStatistics:
    """Statistics of masking and padding in batches."""

    def __init__(self, tokenizer, objective: Objective):
        self.tokenizer, self.counts = tokenizer, Counter()
        self.is_causal, self.has_pairs = objective.is_causal, objective.kind.has_pairs
        self.is_special = np.isin(np.arange(len(tokenizer)), tokenizer.all_special_ids)
        begins_word = find_word_beginnings(tokenizer)
        self.begins_word = np.ones(len(tokenizer), dtype=bool) if begins_word is None else begins_word

    def add(self, batch: dict) -> None:
        """Count the tokens and words of a batch."""
        is_filled = batch["attention_mask"].numpy() == 1
        ids, labels = (batch[name].numpy()[is_filled] for name in ("input_ids", "labels"))
        is_chosen = labels != IGNORED_LABEL
        true = np.where(is_chosen, labels, ids)
        words, count = number_words(self.begins_word[true], ~self.is_special[true], is_filled.sum(axis=1))
        sizes, chosen = np.bincount(words, minlength=count + 1), np.bincount(words[is_chosen], minlength=count + 1)
        is_mask = ids == self.tokenizer.mask_token_id
        self.counts.update(
            rows=len(is_filled),
            swapped=int(batch["sentence_order_label"].sum()) if "sentence_order_label" in batch else 0,
            places=is_filled.size,
            padding=int((~is_filled).sum()),
            tokens=int((words > 0).sum()),
            chosen=int(is_chosen.sum()),
            masked=int((is_chosen & is_mask).sum()),
            kept=int((is_chosen & (ids == true)).sum()),
            words=count,
            chosen_words=int((chosen == sizes)[1:].sum()),
            divided_words=int(((chosen > 0) & (chosen < sizes))[1:].sum()),
        )

    def describe(self) -> str:
        """Return the statistics as text."""
        c = self.counts
        padding = f"{c['padding'] / c['places']:.1%} of the batches is padding"
        if self.is_causal:
            return f"{c['rows']:,} sequences of {c['places'] / c['rows']:.0f} tokens; {padding}"
        other = c["chosen"] - c["masked"] - c["kept"]
        fates = [count / max(1, c["chosen"]) for count in (c["masked"], other, c["kept"])]
        return (
            f"{c['rows']:,} sequences: mask rate {c['chosen'] / max(1, c['tokens']):.1%} of the tokens; of these "
            f"{fates[0]:.1%} are [MASK], {fates[1]:.1%} another token, {fates[2]:.1%} unchanged\n{c['words']:,} "
            f"words: {c['chosen_words'] / max(1, c['words']):.1%} to be predicted completely, "
            f"{c['divided_words'] / max(1, c['words']):.1%} in part\n"
            + padding
            + (f", {c['swapped'] / c['rows']:.1%} of the pairs are swapped" if self.has_pairs else "")
        )

    def format_row(self, ids: np.ndarray, labels: np.ndarray) -> str:
        """Return a sequence without padding as text, with a masked model's labels in brackets."""
        if self.is_causal:
            return " ".join(self.tokenizer.decode(ids).split())
        is_chosen = labels != IGNORED_LABEL
        true = np.where(is_chosen, labels, ids)
        words, _ = number_words(self.begins_word[true], ~self.is_special[true], np.array([len(ids)]))
        begins = (words == 0) | (np.diff(words, prepend=0) != 0)
        begins_part = begins | (np.diff(is_chosen, prepend=False))
        text = ""
        for part in np.split(np.arange(len(ids)), np.flatnonzero(begins_part)[1:]):
            seen, expected = (
                "".join(piece.removeprefix("▁").removeprefix("Ġ").removeprefix("##") for piece in pieces)
                for pieces in (self.tokenizer.convert_ids_to_tokens(values[part].tolist()) for values in (ids, true))
            )
            text += " " * bool(begins[part[0]]) + seen + (f"⟦{expected}⟧" if is_chosen[part[0]] else "")
        return text.strip()


def main(model_args: ModelArguments, args: DataArguments) -> None:
    """Print batches and their statistics."""
    objective = find_objective(model_args)
    tokenizer, dataset, corpus = load_data(model_args, args, needs_validation=False)
    check_data_arguments(args, tokenizer, corpus, math.inf)
    batches = make_train_batches(dataset["train"], tokenizer, args, batch_size=BATCH_SIZE, seed=model_args.seed)
    batches.set_sequence_length(sequence_length_at(0, args))
    statistics = BatchStatistics(tokenizer, objective)
    stored = "" if args.streaming else f"{len(dataset['train']):,} sequences for training, "
    source = args.sources if args.streaming else args.train_file or args.dataset_name or args.dataset_path
    print(f"{source}: {stored}{len(tokenizer):,} tokens, objective {objective.name}")
    what = f"it predicts {objective.description}" if objective.is_causal else "labels follow in brackets"
    print(f"Batches as the model sees them; {what}:")
    for number, batch in enumerate(itertools.islice(batches, MEASURED_BATCHES), start=1):
        statistics.add(batch)
        for row in range(SHOWN_ROWS * (number <= SHOWN_BATCHES)):
            length, width = int(batch["attention_mask"][row].sum()), batch["attention_mask"].shape[1]
            ids, labels = (batch[name][row, :length].numpy() for name in ("input_ids", "labels"))
            facts = [f"{length} tokens, {width - length} of padding"]
            if "sentence_order_label" in batch:
                facts.append("swapped" if batch["sentence_order_label"][row] else "in order")
            facts.append(f"{(labels != IGNORED_LABEL).sum()} to be predicted")
            print(f"\nbatch {number}, row {row + 1} of {BATCH_SIZE}: {', '.join(facts)}")
            width = min(120, shutil.get_terminal_size().columns)
            lines = textwrap.wrap(make_printable(statistics.format_row(ids, labels)), width - 4, break_on_hyphens=False)
            text = textwrap.indent("\n".join(lines), "    ")
            if sys.stdout.isatty():
                text = text.replace("⟦", "\033[33m⟦").replace("⟧", "⟧\033[0m")
            print(text, flush=True)
    print(f"\n{statistics.describe()}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    with edge():
        main(*groups)
