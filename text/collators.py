"""Instances to a padded batch with labels, masked anew each time."""

import math

import numpy as np

from support.console import UserError
from text.tokenizers import find_word_beginnings

IGNORED_LABEL = -100  # what torch's cross_entropy leaves out by default


def number_words(begins_word: np.ndarray, is_ordinary: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """(number of each token's word, from 1 on, or 0 for special tokens; number of words), of rows joined end to end.

    :param begins_word: what find_word_beginnings says of each token; what follows a special token begins one as well
    """
    begins_word = begins_word.copy()
    begins_word[1:] |= ~is_ordinary[:-1]
    begins_word[np.cumsum(lengths) - lengths] = True
    words = np.cumsum(begins_word & is_ordinary)
    return words * is_ordinary, int(words[-1])


class DataCollator:
    """From instances to a padded batch with labels: the one place where that is done, for every kind of data.

    :param pad_to_multiple_of: round the width of batches up to a multiple of this
    """

    def __init__(self, tokenizer, pad_to_multiple_of: int | None = None):
        #: by the column of a batch, what fills it up where a row has no more
        self.padding = {"input_ids": tokenizer.pad_token_id, "labels": IGNORED_LABEL}
        self.pad_to_multiple_of = pad_to_multiple_of or 1

    def __call__(self, instances: list[dict], seed: int | list[int] | None = None, longest: float = math.inf) -> dict:
        """The batch, as tensors (see make_train_batches), of instances with input_ids and, if they have them,
        token_type_ids, special_tokens_mask and sentence_order_label: lists, arrays or tensors.

        :param seed: of the masks; without, they come from torch's own generator
        :param longest: width beyond which nothing is padded: a model may have no position for it
        """
        import torch

        if seed is None:
            seed = int(torch.randint(2**63 - 1, ()))
        lengths = np.array([len(instance["input_ids"]) for instance in instances])
        flat = {
            name: np.concatenate([np.asarray(instance[name]) for instance in instances]).astype(np.int64)
            for name in ("input_ids", "token_type_ids", "special_tokens_mask")
            if name in instances[0]
        }
        if "sentence_order_label" in instances[0]:
            flat["sentence_order_label"] = np.array([int(instance["sentence_order_label"]) for instance in instances])
        return to_tensors(self.collate(flat, lengths, np.random.default_rng(seed), longest))

    def collate(self, flat: dict, lengths: np.ndarray, generator: np.random.Generator, longest: float) -> dict:
        """The batch, as arrays, of rows whose columns are joined end to end; see `add_labels` and `pad`."""
        return self.pad(self.add_labels(flat, lengths, generator), lengths, longest)

    def pad(self, flat: dict[str, np.ndarray], lengths: np.ndarray, longest: float) -> dict[str, np.ndarray]:
        """Arrays [rows, width] of int64; width is the longest row's length, rounded up to pad_to_multiple_of.

        :param longest: but no more than this: a model may have no position for it
        """
        width = int(min(-(-lengths.max() // self.pad_to_multiple_of) * self.pad_to_multiple_of, longest))
        is_filled = np.arange(width) < lengths[:, None]
        batch = {"attention_mask": is_filled.astype(np.int64)}
        if "sentence_order_label" in flat:
            batch["sentence_order_label"] = flat["sentence_order_label"]
        for name, value in self.padding.items():
            batch[name] = np.full(is_filled.shape, value, dtype=np.int64)
            batch[name][is_filled] = flat.get(name, value)
        return batch


class DataCollatorForCausalLM(DataCollator):
    """Labels are the tokens themselves, as transformers' models take them: they shift them. All are to be predicted but
    the first of a row, which nothing is before."""

    def add_labels(
        self, flat: dict[str, np.ndarray], lengths: np.ndarray, generator: np.random.Generator
    ) -> dict[str, np.ndarray]:
        """Rows joined end to end with the labels: IGNORED_LABEL where there is none."""
        labels = flat["input_ids"].copy()
        labels[np.cumsum(lengths) - lengths] = IGNORED_LABEL
        return {**flat, "labels": labels}


class DataCollatorForWholeWordMask(DataCollator):
    """BERT's masking (arxiv.org/abs/1810.04805, section 3.1), of whole words as in its later models.

    Each word is chosen with mlm_probability, whatever its length, so that each token is, too. What becomes of the
    chosen tokens is drawn for each by itself, as in BERT's code: 80 % become [MASK], 10 % a random token, 10 % stay.
    Special tokens are never chosen, and end a word. At least one word of a batch is chosen, or its loss had no value.

    :param whole_word_mask: False chooses tokens, each by itself
    """

    def __init__(
        self,
        tokenizer,
        mlm_probability: float = 0.15,
        pad_to_multiple_of: int | None = None,
        whole_word_mask: bool = True,
    ):
        super().__init__(tokenizer, pad_to_multiple_of)
        self.padding["token_type_ids"] = 0
        self.mlm_probability, self.mask_id = mlm_probability, tokenizer.mask_token_id
        self.is_special = np.isin(np.arange(len(tokenizer)), tokenizer.all_special_ids)
        self.ordinary_ids = np.flatnonzero(~self.is_special)
        self.begins_word = find_word_beginnings(tokenizer) if whole_word_mask else np.ones(len(tokenizer), dtype=bool)
        if self.begins_word is None:
            raise UserError(
                f"where words begin cannot be told from the pieces of the tokenizer {tokenizer.name_or_path}: add "
                "--no_whole_word_mask, or use one of ALBERT or BERT"
            )

    def add_labels(
        self, flat: dict[str, np.ndarray], lengths: np.ndarray, generator: np.random.Generator
    ) -> dict[str, np.ndarray]:
        """Rows joined end to end with masked input_ids, and the labels: IGNORED_LABEL where nothing was chosen."""
        input_ids = flat["input_ids"].copy()
        special = flat["special_tokens_mask"] if "special_tokens_mask" in flat else self.is_special[input_ids]
        words, count = number_words(self.begins_word[input_ids], special == 0, lengths)
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


def to_tensors(batch: dict[str, np.ndarray]) -> dict:
    import torch

    return {name: torch.from_numpy(array) for name, array in batch.items()}
