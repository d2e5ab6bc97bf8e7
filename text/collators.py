"""Collators that make a padded batch with labels of sequences, with a new mask at each call."""

import numpy as np
import torch

from common.console import UserError
from text.documents import count_within
from text.instances import IGNORED_LABEL, Columns, Sequences
from text.tokenizers import find_word_beginnings


def number_words(begins_word: np.ndarray, is_ordinary: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the number of each token's word, from 1 on and 0 for special tokens, and the count of words.

    :param begins_word: find_word_beginnings' values, changed in place: a token after a special token begins a word too
    """
    begins_word[1:] |= ~is_ordinary[:-1]
    begins_word[np.cumsum(lengths) - lengths] = True
    words = np.cumsum(begins_word & is_ordinary)
    return words * is_ordinary, int(words[-1])


def cut_rows(flat: Columns, lengths: np.ndarray, sequence_length: float) -> Sequences:
    """Truncate rows to sequence_length; return their columns, joined end to end, and their lengths.

    [CLS] A [SEP] B [SEP] keeps this form: each segment keeps its first tokens and its [SEP], and the longer segment is
    cut first. If the end of A were kept, text would continue from A to B only in pairs that are not swapped, which
    would reveal the label. A block keeps its first tokens, and its [SEP] if it has one.
    """
    if lengths.max() <= sequence_length:
        return flat, lengths
    sizes = lengths[:, None]
    kept = np.minimum(lengths, sequence_length)[:, None]
    if "token_type_ids" in flat:
        second = np.add.reduceat(flat["token_type_ids"], np.cumsum(lengths) - lengths)
        first = lengths - second
        kept_second = np.minimum(second, np.maximum(sequence_length // 2, sequence_length - first))
        kept_first = np.minimum(first, sequence_length - kept_second)
        sizes = np.stack([first, second], axis=1)
        kept = np.stack([kept_first, kept_second], axis=1)
    sizes = sizes.ravel()
    last = int("special_tokens_mask" in flat)
    positions = count_within(sizes)
    is_kept = (positions < (kept.ravel() - last).repeat(sizes)) | (last * (positions + 1) == sizes.repeat(sizes))
    flat = {name: values if name == "sentence_order_label" else values[is_kept] for name, values in flat.items()}
    return flat, kept.sum(axis=1)


def take_rows(flat: Columns, lengths: np.ndarray, rows: np.ndarray) -> Sequences:
    """Return some of the rows that are joined end to end: their columns, as int64, and their lengths."""
    taken = lengths[rows]
    places = (np.cumsum(lengths) - lengths)[rows].repeat(taken) + count_within(taken)
    chosen = {name: rows if name == "sentence_order_label" else places for name in flat}
    return {name: values[chosen[name]].astype(np.int64) for name, values in flat.items()}, taken


class DataCollator:
    """The base class of the collators, which make a padded batch with labels for every kind of data."""

    def __init__(self, tokenizer, pad_to_multiple_of: int = 1):
        self.padding = {"input_ids": tokenizer.pad_token_id, "labels": IGNORED_LABEL}  # value of each column
        self.pad_to_multiple_of = pad_to_multiple_of

    def collate(
        self, flat: Columns, lengths: np.ndarray, generator: np.random.Generator, longest: float
    ) -> dict[str, torch.Tensor]:
        """Return the batch of rows joined end to end; see `cut_rows`, `add_labels` and `pad`."""
        flat, lengths = cut_rows(flat, lengths, longest)
        return self.pad(self.add_labels(flat, lengths, generator), lengths, longest)

    def pad(self, flat: Columns, lengths: np.ndarray, longest: float) -> dict[str, torch.Tensor]:
        """Return int64 tensors [rows, width]; width is the longest row's length, rounded up to pad_to_multiple_of."""
        width = int(min(-(-lengths.max() // self.pad_to_multiple_of) * self.pad_to_multiple_of, longest))
        is_filled = np.arange(width) < lengths[:, None]
        batch = {"attention_mask": is_filled.astype(np.int64)}
        if "sentence_order_label" in flat:
            batch["sentence_order_label"] = flat["sentence_order_label"]
        for name, value in self.padding.items():
            batch[name] = np.full(is_filled.shape, value, dtype=np.int64)
            batch[name][is_filled] = flat.get(name, value)
        return {name: torch.from_numpy(array) for name, array in batch.items()}


class DataCollatorForCausalLM(DataCollator):
    """A collator whose labels are the tokens of a document without its first; transformers' models shift labels.

    An end token ends a document. Padding is at position 0. Conversations have labels and position_ids already.
    """

    def __init__(self, tokenizer, pad_to_multiple_of: int = 1):
        super().__init__(tokenizer, pad_to_multiple_of)
        self.padding["position_ids"] = 0
        self.end_id = tokenizer.eos_token_id

    def add_labels(self, flat: Columns, lengths: np.ndarray, generator: np.random.Generator) -> Columns:
        """Add labels to rows joined end to end, and position_ids, which restart at each document."""
        if "labels" in flat:
            return flat
        begins = np.roll(flat["input_ids"] == self.end_id, 1)
        begins[np.cumsum(lengths) - lengths] = True
        positions = count_within(np.diff(np.flatnonzero(begins), append=len(begins)))
        return {**flat, "position_ids": positions, "labels": np.where(begins, IGNORED_LABEL, flat["input_ids"])}


class DataCollatorForWholeWordMask(DataCollator):
    """A collator with BERT's masking (arxiv.org/abs/1810.04805, section 3.1), of whole words as in its later models.

    Each word is chosen with mlm_probability at any length, and so is each token. As in BERT's code, the fate of each
    chosen token is independent: 80 % become [MASK], 10 % a random token, 10 % stay. Special tokens are never chosen,
    and end a word. At least one word of a batch is chosen, because the loss would be undefined otherwise.
    """

    def __init__(
        self, tokenizer, mlm_probability: float = 0.15, pad_to_multiple_of: int = 1, whole_word_mask: bool = True
    ):
        super().__init__(tokenizer, pad_to_multiple_of)
        self.padding["token_type_ids"] = 0
        self.mlm_probability = mlm_probability
        self.mask_id = tokenizer.mask_token_id
        self.is_special = np.isin(np.arange(len(tokenizer)), tokenizer.all_special_ids)
        self.ordinary_ids = np.flatnonzero(~self.is_special)
        self.begins_word = find_word_beginnings(tokenizer) if whole_word_mask else np.ones(len(tokenizer), dtype=bool)
        if self.begins_word is None:
            raise UserError(
                f"the tokens of the tokenizer {tokenizer.name_or_path} do not show where words begin: add "
                "--no_whole_word_mask, or use a tokenizer of ALBERT or BERT"
            )

    def add_labels(self, flat: Columns, lengths: np.ndarray, generator: np.random.Generator) -> Columns:
        """Mask the input_ids of rows joined end to end, and add the labels: IGNORED_LABEL for tokens not chosen."""
        input_ids = flat["input_ids"].copy()
        words, count = number_words(self.begins_word[input_ids], ~self.is_special[input_ids], lengths)
        is_chosen_word = generator.random(count + 1) < self.mlm_probability
        is_chosen_word[0] = False
        if count and not is_chosen_word.any():
            is_chosen_word[generator.integers(1, count + 1)] = True
        is_chosen = is_chosen_word[words]
        labels = np.where(is_chosen, input_ids, IGNORED_LABEL)
        chosen = np.flatnonzero(is_chosen)
        fate = generator.random(len(chosen))
        input_ids[chosen[fate < 0.8]] = self.mask_id
        replaced = chosen[fate >= 0.9]
        input_ids[replaced] = generator.choice(self.ordinary_ids, len(replaced))
        return {**flat, "input_ids": input_ids, "labels": labels}
