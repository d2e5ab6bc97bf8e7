"""What an instance of a dataset is: a pair of segments, a block between special tokens, or a block of plain text."""

from dataclasses import dataclass


@dataclass(frozen=True)
class InstanceKind:
    """Its name is a value of --objective and stands in corpus.json; its columns are those of the dataset."""

    name: str
    columns: tuple[str, ...]

    @property
    def has_pairs(self) -> bool:
        """Whether it has two segments, in half of the instances swapped."""
        return "sentence_order_label" in self.columns

    @property
    def is_masked(self) -> bool:
        """Whether it has [CLS] and [SEP], and tokens are to be masked; else it is text, with an end token behind each
        document, as a model that predicts the next word reads it."""
        return "special_tokens_mask" in self.columns


PAIRS = InstanceKind("mlm_sop", ("input_ids", "token_type_ids", "special_tokens_mask", "sentence_order_label"))
BLOCKS = InstanceKind("mlm", ("input_ids", "special_tokens_mask"))
TEXT = InstanceKind("clm", ("input_ids",))
KINDS = {kind.name: kind for kind in (PAIRS, BLOCKS, TEXT)}
