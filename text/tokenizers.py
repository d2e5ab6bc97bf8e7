"""Load tokenizers, check that they suit the objective, compute their fingerprints, and train them.

    python -c "from text.tokenizers import load_tokenizer; \
        print(load_tokenizer('data/tokenizer').tokenize('It was a truth universally acknowledged'))"
"""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from arguments import DEFAULT_TOKENIZER_PATH
from common.console import UserError, first_line
from common.hub import hub
from text.instances import PAIRS, Documents, InstanceKind

logger = logging.getLogger("tokenizers")

# a text that tokenizers treat differently: capitals, accents, quotes, digits, Cyrillic, Chinese
PROBE = "``Déjà vu'', said MR. O'Neill\u2019s 2nd  friend\u2014Ёлка, йод\u0306, 3.14 \uff21 漢字 [MASK] unbelievably"


def load_tokenizer(
    path: str | Path,
    kind: InstanceKind = PAIRS,
    cache_dir: str | None = None,
    alternative: str = "a folder that exists",
):
    """Load a tokenizer from a folder or the Hub; raise a UserError if it lacks special tokens of these instances.

    Text without masks needs an end token, which also serves as padding if the tokenizer has no other token for it.

    :param alternative: the error text's alternative to the Hub
    """
    from transformers import AutoTokenizer

    is_folder = Path(path).is_dir()
    # a name on the Hub is NAME or ORG/NAME; but if there is a folder data, data/tokeniser means a folder in it
    is_name = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(path)) and not os.path.isdir(os.path.dirname(path))
    if not is_folder and (str(path) == DEFAULT_TOKENIZER_PATH or not is_name):
        raise UserError(
            f"no tokenizer in {path}, which is not a folder: make one with python tokenize_wikitext103.py --objective "
            f"{kind.name} (--help shows how)"
        )
    try:
        what = f"the tokenizer {path}, which is not a folder here,"
        with contextlib.nullcontext() if is_folder else hub(what, alternative):
            options = dict(cache_dir=cache_dir, local_files_only=is_folder)
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError, RecursionError) as e:
        raise UserError(
            f"{path} holds no readable tokenizer ({first_line(e)}): make one with python tokenize_wikitext103.py"
        ) from e
    if not kind.is_masked:
        tokenizer.eos_token = tokenizer.eos_token or tokenizer.sep_token
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    needed = ("cls", "sep", "mask", "pad", "unk") if kind.is_masked else ("eos", "pad")
    lacking = [token for token in needed if getattr(tokenizer, f"{token}_token_id") is None]
    if lacking or not tokenizer.is_fast:
        flaw = f"no {lacking[0]} token" if lacking else "no tokenizer.json"
        cure = "that of ALBERT or BERT" if kind.is_masked else "that of GPT-2 or Llama"
        raise UserError(f"the tokenizer {path} has {flaw}: use {cure}, or --train_tokenizer (--objective {kind.name})")
    if not kind.is_masked and tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]:
        # in training, the end token follows whole documents only
        logger.warning(f"the tokenizer {path} also ends prompts: generate text with add_special_tokens=False")
    if kind.has_turns and not re.search(r"{%-?\s*generation\s*-?%}", str(tokenizer.chat_template)):
        problem = "a chat template without {% generation %} marks" if tokenizer.chat_template else "no chat template"
        cure = "write chat_template.jinja in its folder, see docs/new_experiment.md#chat-tuning"
        raise UserError(f"the tokenizer {path} has {problem}: {cure} (--objective {kind.name})")
    if (last := max(tokenizer.get_vocab().values())) >= len(tokenizer):
        raise UserError(f"the tokenizer {path} has {len(tokenizer)} tokens, but ids up to {last}: use one without gaps")
    if kind.has_pairs:
        # transformers 5 omits ALBERT's token_type_ids, which distinguish A from B in fine-tuning
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


def tokenizer_fingerprint(tokenizer) -> str:
    """Return a sha256 of a tokenizer's vocabulary, special tokens and ids of PROBE, the same in any library version."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    special = {name: tokenizer.convert_tokens_to_ids(str(it)) for name, it in tokenizer.special_tokens_map.items()}
    definition = [vocabulary, sorted(special.items()), tokenizer(PROBE, verbose=False)["input_ids"]]
    return hashlib.sha256(json.dumps(definition).encode()).hexdigest()


def find_word_beginnings(tokenizer) -> np.ndarray | None:
    """Return, as bool [vocabulary], whether each token begins a word; None if the tokens do not show it.

    Such tokens start with "▁" in SentencePiece, with "Ġ" in byte-level BPE, and without "##" in WordPiece.
    """
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    if prefix := getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None):
        return np.array([not piece.startswith(prefix) for piece in pieces])
    for mark in "▁Ġ":
        begins_word = np.array([piece.startswith(mark) for piece in pieces])
        # a few tokens with the mark prove nothing: it may be a character of the text, or the language has no spaces
        if begins_word.mean() > 0.01:
            return begins_word
    return None


def train_tokenizer(documents: Documents, args):
    """Train an ALBERT-style Unigram tokenizer; from a small text, it has fewer tokens than requested."""
    from transformers import AlbertTokenizer

    text = " ".join(itertools.islice(itertools.chain.from_iterable(documents), 10_000))
    letters = [character for character in text if character.isalpha()]
    marked = sum(len(unicodedata.normalize("NFKD", character)) > 1 for character in letters)
    if not args.keep_accents and marked > 0.01 * len(letters):
        print(f"{marked / len(letters):.1%} of the letters lose their accents (short i becomes i): see --keep_accents")

    flags = {"do_lower_case": not args.cased, "keep_accents": args.keep_accents}
    trained = train_like(AlbertTokenizer(**flags), itertools.chain.from_iterable(documents), args)
    vocabulary = json.loads(trained.backend_tokenizer.to_str())["model"]["vocab"]
    pieces = vocabulary[5:]  # without the special tokens
    if not pieces:
        raise UserError("too little text to train a tokenizer: give more text, or use --tokenizer")

    # Peers that tokenize the same text need the same tokenizer. But the trainer (tokenizers 0.23) iterates over hash
    # tables, so single characters that it must include get other scores in each run, 1e-4 apart above the lowest one,
    # and sums differ in their last digits. The order of the scores determines the ids.
    lowest = min(score for _, score in pieces)
    highest_filler = lowest + 1e-4 * sum(len(piece) == 1 for piece, _ in pieces)
    pieces = [(p, round(lowest if len(p) == 1 and score <= highest_filler else score, 4)) for p, score in pieces]
    pieces.sort(key=lambda piece: (-piece[1], piece[0]))
    vocabulary = [(token, 0.0) for token, _ in vocabulary[:5]] + pieces
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return AlbertTokenizer(vocab=vocabulary, model_input_names=names, model_max_length=args.seq_length, **flags)


def train_byte_tokenizer(documents: Documents, args):
    """Train a tokenizer like GPT-2's: byte-level BPE, with one special token that follows documents."""
    from transformers import GPT2Tokenizer

    empty = GPT2Tokenizer(vocab={"<|endoftext|>": 0}, merges=[], model_max_length=args.seq_length)
    return train_like(empty, ("\n".join(document) for document in documents), args)


def train_like(tokenizer, texts: Iterable[str], args):
    """Return a tokenizer of the same kind with a vocabulary from these texts."""
    print(f"training a tokenizer of {args.vocab_size:,} tokens", flush=True)
    try:
        return tokenizer.train_new_from_iterator(texts, args.vocab_size, show_progress=sys.stderr.isatty())
    except Exception as e:  # tokenizers has no type of its own
        if "not large enough to contain all chars" not in str(e):
            raise
        raise UserError(f"--vocab_size {args.vocab_size}: the text has more different characters: raise it") from e
