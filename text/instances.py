"""The kinds of training instances: pairs of segments, blocks between special tokens, and blocks of plain text."""

from dataclasses import dataclass


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


PAIRS = InstanceKind("mlm_sop", ("input_ids", "token_type_ids", "special_tokens_mask", "sentence_order_label"))
BLOCKS = InstanceKind("mlm", ("input_ids", "special_tokens_mask"))
TEXT = InstanceKind("clm", ("input_ids",))
KINDS = {kind.name: kind for kind in (PAIRS, BLOCKS, TEXT)}
