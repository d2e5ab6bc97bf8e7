"""Small data in the schemas of RussianSuperGLUE and RuCoLA, toy tasks that a tiny model can learn, and that model."""

import itertools
import json
import random
from pathlib import Path

import torch

from models.lean_albert import LeanAlbertConfig, LeanAlbertForPreTraining
from text.tokenizers import train_tokenizer
from tokenize_wikitext103 import TokenizeArguments


def place(text: str, word: str) -> dict[str, int]:
    """Return the position of a word."""
    return {"start": text.index(word), "end": text.index(word) + len(word)}


LEAVES = "Осенью с клёна падают листья. Дворник Фёдор их метёт."
NEWS = "Анна Лебедева живёт в Омске. В Омске Анна Лебедева встретила Егора."
QUERY = "Теперь Егор и @placeholder ищут квартиру."
BOW, ONION = "Охотник взял лук и стрелы.", "На кухне резали лук."
SOUP, READY, MAPLE = "Мать сказала, что суп готов.", "Суп готов.", "Падают ли листья с клёна?"
RAIN, DRY = "Дождь шёл всю ночь.", "Ночь была сухой."
ANSWERS = [{"idx": 7, "text": "Фёдор", "label": 1}, {"idx": 8, "text": "Клён", "label": 0}]
ASKED = {"idx": 2, "question": "Кто метёт листья?", "answers": ANSWERS}
OMSK = [place(NEWS, "Омске"), {"start": 31, "end": 36}]  # twice


def alike(right: int, texts: list[tuple], *spans: list[str], **line) -> tuple:
    """Return the records of a task whose record on the Hub differs from the benchmark's line in its label alone."""
    return line | {"idx": 4}, [line | {"idx": 4, "label": right}], [(texts, [right], list(spans))]


PARUS = {"premise": "Чашка упала.", "choice1": "Её задел кот.", "choice2": "Она совсем красная.", "question": "cause"}
RUSSE = {"word": "лук", "sentence1": BOW, "sentence2": ONION, "start1": 13, "end1": 16, "start2": 16, "end2": 19}
#: task -> (a line of the benchmark's own file, records of the Hub, (texts, right, texts at the spans) of each)
RECORDS = {
    "rcb": alike(0, [(SOUP, READY)], premise=SOUP, hypothesis=READY, label="entailment", verb="сказать"),
    "terra": alike(1, [(RAIN, DRY)], premise=RAIN, hypothesis=DRY, label="not_entailment"),
    "danetqa": alike(1, [(LEAVES, MAPLE)], question=MAPLE, passage=LEAVES, label=True),
    # the cause stands before the effect
    "parus": alike(0, [(PARUS[name], PARUS["premise"]) for name in ("choice1", "choice2")], **PARUS, label=0),
    "muserc": (
        {"idx": 4, "passage": {"text": LEAVES, "questions": [ASKED]}},
        [
            {"paragraph": LEAVES, "question": "Кто метёт листья?", "answer": answer, "label": label}
            | {"idx": {"paragraph": 4, "question": 2, "answer": number}}
            for answer, label, number in (("Фёдор", 1, 7), ("Клён", 0, 8))
        ],
        [([(LEAVES, "Кто метёт листья? Фёдор")], [1], []), ([(LEAVES, "Кто метёт листья? Клён")], [0], [])],
    ),
    "russe": alike(0, [(BOW, ONION)], ["лук"], ["лук"], **RUSSE, label=False),
    "rucos": (
        {"idx": 4, "passage": {"text": NEWS, "entities": [place(NEWS, "Анна Лебедева"), *OMSK, place(NEWS, "Егора")]}}
        | {"qas": [{"idx": 9, "query": QUERY, "answers": [{"start": 0, "end": 13, "text": "Анна Лебедева"}]}]},
        # the Hub's entities include the next character
        [
            {"passage": NEWS, "query": QUERY, "entities": ["Анна Лебедева ", "Омске.", "Омске ", "Егора."]}
            | {"answers": ["Анна Лебедева"], "idx": {"passage": 4, "query": 9}}
        ],
        [([(NEWS, QUERY)], [0], [["@placeholder"], ["Анна Лебедева"] * 2, ["Омске"] * 2, ["Егора"]])],
    ),
    "lidirus": alike(0, [(RAIN, DRY)], sentence1=RAIN, sentence2=DRY, label="entailment"),
}

NAMES = ["Анна", "Борис", "Вера", "Глеб", "Дарья", "Егор", "Жанна", "Захар"]
PLACES = ["школе", "лесу", "городе", "театре"]


def write_lines(path: Path, records: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def write_toy_task(folder: Path, name: str, records: list[dict], label: str = "label") -> None:
    """Write files like the benchmark's own; the validation split is the training data."""
    for split in ("train", "val"):
        write_lines(folder / name / f"{split}.jsonl", records)
    write_lines(folder / name / "test.jsonl", [{k: v for k, v in record.items() if k != label} for record in records])


def make_toy_pairs() -> list[dict]:
    """Make 32 records in TERRa's schema, in which the hypothesis follows unless it has a negation."""
    return [
        {"premise": f"{name} сегодня в {where}.", "hypothesis": f"{name} {'не ' * denied}в {where}."}
        | {"label": "not_entailment" if denied else "entailment", "idx": 2 * number + denied}
        for number, (name, where) in enumerate(itertools.product(NAMES[:4], PLACES))
        for denied in (False, True)
    ]


def make_toy_choices() -> list[dict]:
    """Make 32 records in PARus's schema: the right choice is that a person in the rain is wet."""
    return [
        {"premise": f"{name} под дождём в {where}.", "question": "effect", "label": number % 2, "idx": number}
        | dict(zip(("choice1", "choice2") if number % 2 == 0 else ("choice2", "choice1"), outcomes, strict=True))
        for number, (name, where) in enumerate(itertools.product(NAMES, PLACES))
        for outcomes in [(f"{name} весь мокрый.", f"{name} весь сухой.")]
    ]


def make_toy_spans() -> list[dict]:
    """Make 32 records in RUSSE's schema: each text has cat and dog, and only the span selects one."""
    records = []
    for name, where in itertools.product(NAMES[:4], PLACES):
        texts = {"sentence1": f"кот и пёс живут в {where}.", "sentence2": f"пёс и кот знают, где {name}."}
        for word in ("кот", "пёс"):
            places = [place(text, word) for text in texts.values()]
            spans = {f"{edge}{number}": found[edge] for number, found in enumerate(places, 1) for edge in found}
            records.append(texts | spans | {"word": word, "label": word == "кот", "idx": len(records)})
    return records


def make_toy_gaps() -> list[dict]:
    """Make 32 records in RuCoS's schema, in which the place is always the right entity."""
    records = []
    for number, (name, where) in enumerate(itertools.product(NAMES, PLACES)):
        text = f"{name} сегодня в {where}." if number % 2 else f"Сегодня в {where} {name}."
        places = sorted((place(text, word) for word in (name, where)), key=lambda found: found["start"])
        records.append(
            {"idx": number, "passage": {"text": text, "entities": places}}
            | {"qas": [{"idx": number, "query": "Завтра тоже в @placeholder.", "answers": [{"text": where}]}]}
        )
    return records


def write_lidirus(folder: Path) -> list[dict]:
    """Write pairs in LiDiRus's schema, a quarter with a wrong label."""
    other, draw, records = {"entailment": "not_entailment", "not_entailment": "entailment"}, random.Random(0), []
    for number, pair in enumerate(make_toy_pairs()):
        label = pair["label"] if draw.random() < 0.75 else other[pair["label"]]
        names = {"sentence1": pair["premise"], "sentence2": pair["hypothesis"]}
        records.append(names | {"label": label, "idx": number, "logic": "Negation"})
    write_lines(folder / "LiDiRus" / "LiDiRus.jsonl", records)
    return records


def write_model(folder: Path, texts: list[str], pieces: int = 300, hidden: int = 64, **options) -> None:
    """Save an untrained LeanALBERT of two layers, and a tokenizer trained on these texts."""
    wanted = TokenizeArguments(train_tokenizer=True, vocab_size=pieces, keep_accents=True)
    tokenizer = train_tokenizer([texts], wanted)
    torch.manual_seed(0)
    shape = dict(hidden_size=hidden, embedding_size=hidden, intermediate_size=2 * hidden, num_attention_heads=4)
    config = LeanAlbertConfig(vocab_size=len(tokenizer), num_hidden_layers=2, **shape, **options)
    LeanAlbertForPreTraining(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
