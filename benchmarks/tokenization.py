"""Compare our tokenization into sentence-order instances with the usual one: tokens per second on one core.

    python benchmarks/tokenization.py

The usual one, of hivemind's ALBERT example, tokenizes each sentence to learn its length, and then the joined text of
both segments again. Ours tokenizes every sentence once, in one batch, and joins ids. The runs alternate in one process,
without the tokenizer's threads, and the medians of CPU seconds are compared. Both start with paragraphs; the usual one
ends with lists of ids, ours with the columns that are written to disk. "without sentence splitting" excludes the time
of Punkt, which is the same for both.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tokenize_wikitext103
from text.documents import make_document_random, read_text, split_chapters, split_sentences
from text.instances import PAIRS
from text.tokenization import ChunkEncoder
from text.tokenizers import load_tokenizer, train_tokenizer

RUNS, CHAPTERS, SEQ_LENGTH = 5, 40, 512


def tokenize_twice(tokenizer, documents: list[list[str]]) -> int:
    """Tokenize documents, which are lists of sentences, in the usual way, and return the number of tokens."""
    tokens = 0
    for index, sentences in enumerate(documents):
        generator = make_document_random(0, "train", index)
        chunk, length = [], 0
        for number, sentence in enumerate(sentences):
            chunk.append(sentence)
            length += len(tokenizer.tokenize(sentence))
            if length >= SEQ_LENGTH or number == len(sentences) - 1:
                if len(chunk) > 1:
                    cut = generator.randint(1, len(chunk) - 1)
                    first, second = " ".join(chunk[:cut]), " ".join(chunk[cut:])
                    if generator.random() < 0.5:
                        first, second = second, first
                    instance = tokenizer(
                        first,
                        second,
                        truncation="longest_first",
                        max_length=SEQ_LENGTH,
                        return_special_tokens_mask=True,
                    )
                    tokens += len(instance["input_ids"])
                chunk, length = [], 0
    return tokens


def main():
    chapters = split_chapters(read_text(tokenize_wikitext103.SAMPLE_CORPUS))[:CHAPTERS]
    speeds: dict[str, list[float]] = {}

    def note(run: int, way: str, seconds: float, splitting: float, tokens: int):
        speeds.setdefault(f"{way}, whole", []).append(tokens / seconds)
        speeds.setdefault(f"{way}, without sentence splitting", []).append(tokens / (seconds - splitting))
        print(f"run {run}: {way} {tokens / seconds:,.0f} tokens/s, {splitting:.2f} of {seconds:.2f} s in splitting")

    with tempfile.TemporaryDirectory() as folder:
        args = tokenize_wikitext103.TokenizeArguments(vocab_size=8000, seq_length=SEQ_LENGTH)
        train_tokenizer(chapters, args).save_pretrained(folder)
        tokenizer = load_tokenizer(folder)
        encoder = ChunkEncoder(tokenizer, PAIRS, SEQ_LENGTH, args.seed)
        for run in range(1, RUNS + 1):
            start = time.process_time()
            documents = [split_sentences(paragraphs) for paragraphs in chapters]
            splitting = time.process_time() - start
            tokens = tokenize_twice(tokenizer, documents)
            note(run, "twice", time.process_time() - start, splitting, tokens)

            start = time.process_time()
            _, lengths = encoder["train", [(number, text, "english") for number, text in enumerate(chapters)]]
            tokens = int(lengths.sum())
            note(run, "once", time.process_time() - start, splitting, tokens)
    for part in ("whole", "without sentence splitting"):
        ours, usual = (statistics.median(speeds[f"{way}, {part}"]) for way in ("once", "twice"))
        print(f"ratio, {part}: {ours / usual:.2f} ({ours:,.0f} against {usual:,.0f} tokens/s)")


if __name__ == "__main__":
    main()
