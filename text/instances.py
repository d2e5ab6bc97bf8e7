"""The kinds of training instances: pairs of segments, blocks of text, for masking or not, and packed conversations."""

from dataclasses import dataclass

import numpy as np

Documents = list[list[str]]  # each is a list of paragraphs; those of a conversation are its messages, as JSON
Columns = dict[str, np.ndarray]  # the columns of sequences, joined end to end
Sequences = tuple[Columns, np.ndarray]  # with the lengths of the sequences
IGNORED_LABEL = -100  # the default ignore_index of torch's cross_entropy


@dataclass(frozen=True)
class InstanceKind:
    """A kind of instance: its name, for --objective and corpus.json, and the columns of its datasets."""

    name: str
    columns: tuple[str, ...]

    @property
    def has_pairs(self) -> bool:
        """Return whether instances have two segments, which are swapped in half of them."""
        return "sentence_order_label" in self.columns

    @property
    def is_masked(self) -> bool:
        """Return whether instances have [CLS] and [SEP], for masking; otherwise an end token follows each document."""
        return "special_tokens_mask" in self.columns

    @property
    def has_turns(self) -> bool:
        """Return whether instances are whole conversations, in which only the assistant's tokens have labels."""
        return "labels" in self.columns


PAIRS = InstanceKind("mlm_sop", ("input_ids", "token_type_ids", "special_tokens_mask", "sentence_order_label"))
BLOCKS = InstanceKind("mlm", ("input_ids", "special_tokens_mask"))
TEXT = InstanceKind("clm", ("input_ids",))
CHAT = InstanceKind("sft", ("input_ids", "labels", "position_ids"))
KINDS = {kind.name: kind for kind in (PAIRS, BLOCKS, TEXT, CHAT)}
