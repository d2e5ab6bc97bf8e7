"""Documents from files, and sentence-order pairs from documents."""

import gzip
import itertools
import lzma
import random

import numpy as np
import pytest
from processes import ROOT

from text import documents


def test_paragraphs_join_wrapped_lines():
    assert documents.split_paragraphs("One line\nof two.\n\n  \nNext\n") == ["One line of two.", "Next"]
    long_lines = ["word " * 60, "another " * 60]
    assert documents.split_paragraphs("\n".join(long_lines)) == [line.strip() for line in long_lines]


def test_sample_corpus_splits_by_chapter():
    text = documents.read_text(ROOT / "sample_data" / "austen.txt.xz")
    chapters = documents.split_chapters(text)
    assert len(chapters) == 270  # 269 chapters and the advertisement before Northanger Abbey
    assert " ".join(paragraph for chapter in chapters for paragraph in chapter) == " ".join(text.split())
    headings = [[p for p in chapter if documents.SAMPLE_CHAPTER.fullmatch(p)] for chapter in chapters]
    assert sorted(map(len, headings)) == [0] + [1] * 269
    for chapter in chapters:
        titles = [place for place, p in enumerate(chapter) if documents.SAMPLE_TITLE.fullmatch(p)]
        assert all(place < 4 for place in titles), "the title of a novel ended up behind the text of another"


def test_wikitext_splits_by_article():
    text = "\n = First = \n\n A red @-@ hot 1 @,@ 000 . \n = 5 = \n = = Part = = \n More . \n"
    text += "\n = Second ( = film ) = \n\n Text . \n"
    expected = [["First", "A red-hot 1,000 .", "5", "Part", "More ."], ["Second ( = film )", "Text ."]]
    assert documents.split_articles(text.splitlines(keepends=True)) == expected


@pytest.mark.parametrize("suffix, pack", [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_text_files_plain_and_packed_match(tmp_path, suffix, pack):
    (tmp_path / f"a.txt{suffix}").write_bytes(pack("\ufeffÉtude.\r\n\r\nZwei".encode()))
    assert documents.read_documents(tmp_path / f"a.txt{suffix}") == [["Étude.", "Zwei"]]
    (tmp_path / f"a.jsonl{suffix}").write_bytes(pack(b'{"body": "One."}\n\n{"body": ""}\n{"body": "a \\ud800 b"}\n'))
    assert documents.read_documents(tmp_path / f"a.jsonl{suffix}", "body") == [["One."], ["a ? b"]]
    for name, comma in (("a.csv", ","), ("a.TSV", "\t")):
        rows = [["id", "body"], ["1", '"One, two.\r\n\r\nThree ""four""."'], ["2", ""], ["3", "long " * 30_000]]
        (tmp_path / f"{name}{suffix}").write_bytes(pack("\r\n".join(map(comma.join, rows)).encode()))
        expected = [["One, two.", 'Three "four".'], ["long " * 29_999 + "long"]]
        assert documents.read_documents(tmp_path / f"{name}{suffix}", "body") == expected


def test_records_replace_half_of_surrogate_pair(tmp_path):
    """Tokenizers refuse it; a whole pair is one character."""
    (tmp_path / "a.jsonl").write_text('{"a": "x \\ud83d y", "b": ["\\uD83D\\uDE00", 1]}\n{"a": "\\u00e9"}\n')
    records = documents.read_records(tmp_path / "a.jsonl", is_strict=True)
    assert list(records) == [(1, {"a": "x ? y", "b": ["\U0001f600", 1]}), (2, {"a": "é"})]


def test_sentences_stay_in_their_paragraph():
    sentences = documents.split_sentences(["Dr. Smith went home. He slept", "Then"])
    assert sentences == ["Dr. Smith went home.", "He slept", "Then"]
    paragraph = ["И. П. Павлов жил в Рязани и т. д. Он был физиологом. Это стоило 5 тыс. руб. за шт. Все."]
    sentences = documents.split_sentences(paragraph, "russian")
    assert sentences[:2] == ["И. П. Павлов жил в Рязани и т. д.", "Он был физиологом."]
    assert documents.split_sentences(paragraph)[0] != sentences[0]


@pytest.mark.parametrize("seq_length, longest", [(32, 10), (32, 100), (512, 60), (8, 9)])
def test_sentence_pairs_keep_text_in_order(seq_length, longest):
    lengths = random.Random(0)
    ids = itertools.count(10)
    sentences = [list(itertools.islice(ids, lengths.randint(1, longest))) for _ in range(2000)]
    pairs = documents.make_sentence_pairs(sentences, seq_length, random.Random(1))
    restored = [segments[::-1] if label else segments for *segments, label in pairs]
    assert [token for first, second in restored for token in first + second] == list(itertools.chain(*sentences))
    assert all(first and second and len(first) + len(second) <= seq_length - 3 for first, second in restored)
    assert 0.4 < np.mean([label for *_, label in pairs]) < 0.6
    if longest <= (seq_length - 3) // 2:
        begins = {sentence[0] for sentence in sentences}
        assert all(first[0] in begins and second[0] in begins for first, second in restored)
        # the next sentence would not have fitted
        sizes = {sentence[0]: len(sentence) for sentence in sentences}
        for (first, second), (following, _) in zip(restored[:-2], restored[1:-1], strict=True):
            assert len(first) + len(second) + sizes[following[0]] > seq_length - 3


def test_sentence_pairs_depend_on_document():
    sentences = [[number] * 5 for number in range(100)]

    def make(seed, split, index):
        return documents.make_sentence_pairs(sentences, 64, documents.make_document_random(seed, split, index))

    assert make(1, "train", 0) == make(1, "train", 0)
    keys = ((1, "train", 0), (2, "train", 0), (1, "validation", 0), (1, "train", 1))
    assert len({str(make(*key)) for key in keys}) == 4


def test_sentence_pair_cut_reaches_every_sentence():
    sentences, cuts = [[number] for number in range(5)], set()
    for index in range(200):
        [(first, second, label)] = documents.make_sentence_pairs(sentences, 64, random.Random(index))
        cuts.add(len(second if label else first))
    assert cuts == {1, 2, 3, 4}


@pytest.mark.parametrize("sentences, count", [([], 0), ([[]], 0), ([[7]], 0), ([[7, 8]], 1), ([[7], [8]], 1)])
def test_sentence_pairs_of_tiny_documents(sentences, count):
    assert len(documents.make_sentence_pairs(sentences, 64, random.Random(0))) == count
