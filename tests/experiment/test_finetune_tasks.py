"""experiment/tasks.py: each task's records in both schemas, metrics against hand-computed figures, files to hand in."""

import io
import json
import math

import datasets
import huggingface_hub
import numpy as np
import pytest
import torch
from finetune_data import BOW, RECORDS, write_lines
from hub_server import Commit, HubServer
from mains import expect_user_error
from torch.nn.functional import cross_entropy
from transformers import AlbertTokenizer, GPT2Config
from transformers.modeling_outputs import SequenceClassifierOutput

import finetune_mlm
from experiment import tasks
from experiment.tasks import TASKS, Example, load_examples, load_task_file, make_examples
from finetune_mlm import FinetuneArguments, collate, compute_logits, compute_losses, encode, load_pretrained
from models.pretrained import Pretrained
from text.batches import group_by_length
from text.tokenizers import train_byte_tokenizer
from tokenize_wikitext103 import TokenizeArguments

CPU = torch.device("cpu")


def spell(example: Example) -> tuple:
    """Return the texts, the right answers, and the words of each span."""
    places = [[example.texts[0][text][start:end] for text, start, end in span] for span in example.spans]
    return example.texts, example.right, places


def parse(name: str, *records: dict) -> list[Example]:
    """Return the examples of these records, as on the Hub."""
    return make_examples(TASKS[name], [("the Hub", record) for record in records])


@pytest.mark.parametrize("name", RECORDS)
def test_tasks_parse_both_schemas(name, tmp_path):
    task, (line, records, expected) = TASKS[name], RECORDS[name]
    for file in task.files.values():
        write_lines(tmp_path / task.name / file, [line])
    for split, examples in load_examples(task, tmp_path).items():
        assert [spell(example) for example in examples] == expected, split
    assert [spell(example) for example in parse(name, *records)] == expected

    # a test split without labels
    label, missing = ("answers", []) if name == "rucos" else ("label", -1)
    bare = json.loads(json.dumps(line), object_hook=lambda part: {k: part[k] for k in part if k != label})
    write_lines(tmp_path / task.name / task.files["test"], [bare])
    examples = load_examples(task, tmp_path)["test"]
    assert [(example.texts, example.right) for example in examples] == [(texts, None) for texts, _, _ in expected]
    examples = parse(name, *(record | {label: missing} for record in records))
    assert [example.right for example in examples] == [None] * len(expected)


def test_rucola_parses(tmp_path):
    (tmp_path / "RuCoLA").mkdir()
    header = "id,sentence,acceptable,error_type,detailed_source\n"
    for name, text in (
        ("in_domain_train", header + '0,"Кот спит, а пёс нет.",1,0,Book\n1,Кот спят.,0,Syntax,Book\n'),
        ("in_domain_dev", header + "0,Идёт дождь.,1,0,Book\n"),
        # some files begin with a byte order mark
        ("out_of_domain_dev", "\ufeff" + header + "0,Дождь идут.,0,Syntax,Web\n"),
        ("test", "id,sentence\n7,Снег идёт.\n"),
    ):
        (tmp_path / "RuCoLA" / f"{name}.csv").write_text(text)
    examples = load_examples(TASKS["rucola"], tmp_path)
    assert {split: [spell(example) for example in part] for split, part in examples.items()} == {
        "train": [([("Кот спит, а пёс нет.", None)], [1], []), ([("Кот спят.", None)], [0], [])],
        "validation": [([("Идёт дождь.", None)], [1], []), ([("Дождь идут.", None)], [0], [])],
        "test": [([("Снег идёт.", None)], None, [])],
    }
    assert [example.record["domain"] for example in examples["validation"]] == ["in_domain", "out_of_domain"]


def test_russe_repairs_known_defects():
    # a no-break space, as in some sentences
    text = BOW.replace(" лук", "\xa0лук")
    # with spaces, ending inside the word, at another word, ending behind the text, or behind it
    for start, end in ((12, 17), (13, 15), (8, 12), (13, 99), (80, 90)):
        record = RECORDS["russe"][1][0] | {"sentence1": text, "start1": start, "end1": end}
        [example] = parse("russe", record)
        assert spell(example)[2] == [["лук"], ["лук"]] and example.texts[0][0] == BOW
    text = "Духи и духами, духота"
    assert text[slice(*tasks.find_word(text, 7, 13, "духи"))] == "духами"
    assert text[slice(*tasks.find_word(text, 0, 4, "дух"))] == "Духи"
    # the most similar word of the text, and the nearest one of equal words
    assert tasks.find_word("лук и лук и лук", 10, 11, "лук") == (12, 15)
    assert tasks.find_word("лук и лук и лук", 4, 5, "лук") == (6, 9)
    assert tasks.find_word("...", 0, 1, "лук") == (0, 3)


def test_rucos_lists_candidate_answers():
    record = RECORDS["rucos"][1][0]
    # the second answer is not among the entities: there is nothing to learn, and each choice is wrong
    for answers, right in ((["Егора", "Омске"], [1, 2]), (["Москве"], [])):
        [example] = parse("rucos", record | {"answers": answers})
        assert (example.record["entities"], example.right) == (["Анна Лебедева", "Омске", "Егора"], right)
    # at the passage's end the Hub's entity has nothing behind it; a quotation mark may be part of it
    club = record | {"passage": "Победил «Луч». Ликует вся партия «Завод» и Тула", "answers": ["Луч"]}
    [example] = parse("rucos", club | {"entities": ["Луч»", "партия «Завод» ", "Тула"]})
    assert (example.record["entities"], example.right) == (["Луч", "партия «Завод»", "Тула"], [0])


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("terra", {"label": "perhaps"}, ["'perhaps'", "entailment, not_entailment"]),
        ("terra", {"label": 2}, ["2", "entailment, not_entailment"]),
        ("terra", {"premise": None}, ["no premise among premise, hypothesis"]),
        ("terra", {"premise": 7}, ["7", "is not text"]),
        ("russe", {"start1": "here"}, ["here"]),
        ("muserc", {"idx": 3}, ["not a record of MuSeRC (AttributeError"]),
        ("rucos", {"query": "Где?"}, ["@placeholder"]),
        ("rucos", {"entities": []}, ["entities"]),
        ("rucos", {"idx": {"passage": 1}}, ["no query among passage"]),
    ],
    ids=str,
)
def test_invalid_record_is_one_line(name, change, words):
    with expect_user_error("row 3", *words):
        make_examples(TASKS[name], [("row 3", RECORDS[name][1][0] | change)])


def label_examples(*labels: int, records: list[dict] | None = None) -> list[Example]:
    return [Example(records[i] if records else {}, [], [label]) for i, label in enumerate(labels)]


PLACES = [(0, 0), (0, 0), (0, 1), (1, 0), (1, 0), (2, 0)]
PARAGRAPHS = [{"idx": {"paragraph": p, "question": q, "answer": i}} for i, (p, q) in enumerate(PLACES)]
DOMAINS = [{"domain": "in_domain"}] * 4 + [{"domain": "out_of_domain"}] * 2
DOMAIN_METRICS = {"in_domain_mcc": 2 / math.sqrt(12), "in_domain_accuracy": 3 / 4}
DOMAIN_METRICS |= {"out_of_domain_mcc": -1, "out_of_domain_accuracy": 0}
# task, labels, predictions, metrics, of which the first decides, and records
METRICS = [
    # class 0: 1 right, 1 too many, 1 missed: 2 / (2 + 1 + 1) = 1/2
    # class 1: 2 right, 1 too many:           4 / (4 + 1) = 4/5
    # class 2: 1 right, 1 missed:             2 / (2 + 1) = 2/3
    ("rcb", (0, 0, 1, 1, 2, 2), [0, 1, 1, 1, 2, 0], {"f1": (1 / 2 + 4 / 5 + 2 / 3) / 3, "accuracy": 4 / 6}, None),
    *((name, (0, 1, 1, 0), [0, 1, 0, 0], {"accuracy": 0.75}, None) for name in ("terra", "danetqa", "parus", "russe")),
    # 3 true positives, 2 true negatives, 1 false positive, 2 false negatives:
    # (3 x 2 - 1 x 2) / sqrt((3 + 1) (3 + 2) (2 + 1) (2 + 2)) = 4 / sqrt(240)
    ("lidirus", [1] * 3 + [0] * 3 + [1] * 2, [1, 1, 1, 0, 0, 1, 0, 0], {"mcc": 4 / 240**0.5, "accuracy": 5 / 8}, None),
    ("lidirus", (1, 0), [1, 1], {"mcc": 0, "accuracy": 0.5}, None),
    # paragraph 0: labels 1 0 | 1, judged 1 1 | 1: 2 right, 1 too many: F1 4/5; of its questions the second is whole
    # paragraph 1: labels 1 1, judged 1 0: 1 right, 1 missed: F1 2/3; its question is not whole
    # paragraph 2: label 0, judged 0: nothing to find: F1 0; its question is whole
    ("muserc", (1, 0, 1, 1, 1, 0), [1, 1, 1, 1, 0, 0], {"f1": (4 / 5 + 2 / 3) / 3, "em": 2 / 4}, PARAGRAPHS),
    # in-domain: 2 true positives, 1 true negative, 1 false positive: (2 x 1 - 1 x 0) / sqrt(3 x 2 x 2 x 1) = 2/sqrt(12)
    # out-of-domain: all wrong: -1; together 2 tp, 1 tn, 2 fp, 1 fn: (2 x 1 - 2 x 1) / ... = 0
    ("rucola", (1, 1, 0, 0, 1, 0), [1, 1, 0, 1, 0, 1], {"mcc": 0, "accuracy": 3 / 6} | DOMAIN_METRICS, DOMAINS),
]


@pytest.mark.parametrize("name, labels, predictions, expected, records", METRICS)
def test_metrics_match_figures_by_hand(name, labels, predictions, expected, records):
    metrics = TASKS[name].measure(label_examples(*labels, records=records), predictions)
    assert metrics == pytest.approx(expected) and next(iter(metrics)) == next(iter(expected))


def test_rucos_scores_entities():
    def answer(*answers: str) -> Example:
        return Example({"entities": ["анна лебедева!", "Лебедева", "Егор"], "answers": list(answers)}, [], [0])

    # case and punctuation apart the same text: 1; one of two words: 2 x 1 / (1 + 2) = 2/3; nothing in common: 0;
    # the best of several answers: 1
    metrics = TASKS["rucos"].measure([*[answer("Анна Лебедева")] * 3, answer("Анна", "Егор")], [0, 1, 2, 2])
    assert metrics == pytest.approx({"f1": (1 + 2 / 3 + 0 + 1) / 4, "em": 2 / 4})


def test_majority_baseline_predicts_commonest_label():
    examples = {"train": label_examples(1, 2, 1, 0), "validation": label_examples(1, 1, 1, 0)}
    # always 1: class 1 has 2 x 3 / (2 x 3 + 1) = 6/7, class 0 nothing; class 2 does not occur
    assert tasks.predict_majority(TASKS["rcb"], examples) == pytest.approx({"f1": 6 / 7 / 2, "accuracy": 3 / 4})
    assert tasks.predict_majority(TASKS["rucos"], examples) == {}


SUBMISSIONS = {
    "rcb": ([2, 1], ("neutral", "contradiction")),
    "terra": ([0, 1], ("entailment", "not_entailment")),
    "lidirus": ([1, 0], ("not_entailment", "entailment")),
    "danetqa": ([1, 0], ("true", "false")),
    "russe": ([1, 0], ("true", "false")),
    "parus": ([1, 0], (1, 0)),
}


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_submission_has_expected_rows(name):
    predictions, (first, second) = SUBMISSIONS[name]
    examples = parse(name, *(RECORDS[name][1][0] | {"idx": idx, "label": -1} for idx in (4, 5)))
    expected = "".join(json.dumps({"idx": idx, "label": label}) + "\n" for idx, label in ((4, first), (5, second)))
    assert tasks.format_predictions(TASKS[name], examples, predictions) == (f"{TASKS[name].name}.jsonl", expected)


def test_submission_nests_muserc_and_rucos():
    first, second = RECORDS["muserc"][1]
    others = [first | {"idx": first["idx"] | change} for change in ({"question": 3}, {"paragraph": 6})]
    name, text = tasks.format_predictions(TASKS["muserc"], parse("muserc", first, second, *others), [1, 0, 0, 1])
    assert name == "MuSeRC.jsonl"
    assert text == (
        '{"idx": 4, "passage": {"questions": [{"idx": 2, "answers": [{"idx": 7, "label": 1}, {"idx": 8, "label": 0}]}, '
        '{"idx": 3, "answers": [{"idx": 7, "label": 0}]}]}}\n'
        '{"idx": 6, "passage": {"questions": [{"idx": 2, "answers": [{"idx": 7, "label": 1}]}]}}\n'
    )
    examples = parse("rucos", *RECORDS["rucos"][1])
    assert tasks.format_predictions(TASKS["rucos"], examples, [2]) == ("RuCoS.jsonl", '{"idx": 4, "label": "Егора"}\n')
    examples = parse("rucola", *({"id": idx, "sentence": "Снег."} for idx in "79"))
    assert tasks.format_predictions(TASKS["rucola"], examples, [1, 0]) == ("RuCoLA.csv", "id,acceptable\n7,1\n9,0\n")


def describe(folder, **changes) -> str:
    description = {"train": "a.jsonl", "validation": "b.jsonl", "text": "body", "label": "topic"} | changes
    path = folder / "mine.json"
    path.write_text(json.dumps({name: value for name, value in description.items() if value is not None}))
    return str(path)


def test_task_file_collects_labels(tmp_path):
    numbers = [{"body": "раз", "topic": 1}, {"body": "два", "topic": 2}, {"body": "три", "topic": 3}]
    truths = [{"body": "раз", "topic": True}, {"body": "два", "topic": 0}]
    grades = [{"body": "раз", "topic": "A"}, {"body": "два", "topic": "c"}, {"body": "три", "topic": "a"}]
    for records, changes, expected in (
        (numbers, {}, [[0], [1], [2]]),
        (numbers, {"labels": [3, 2, 1]}, [[2], [1], [0]]),
        (truths, {"labels": ["no", "yes"]}, [[1], [0]]),
        (grades, {}, [[0], [2], [1]]),
        (grades, {"labels": ["c", "A", "b"]}, [[1], [0], [1]]),
    ):
        for name in ("a", "b"):
            write_lines(tmp_path / f"{name}.jsonl", records)
        task = load_task_file(describe(tmp_path, **changes))
        assert [example.right for example in load_examples(task, ".")["train"]] == expected


def test_task_file_without_id_numbers_records(tmp_path):
    """pandas writes an index column without a name, which is not an id."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text(",body,topic\n70,one,x\n80,two,y\n")
    task = load_task_file(describe(tmp_path, train="a.csv", validation="b.csv"))
    examples = load_examples(task, ".")["validation"]
    _, text = tasks.format_predictions(task, examples, [0, 1])
    assert "70" not in text and [json.loads(line)["idx"] for line in text.splitlines()] == [0, 1]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"label": None}, ["no 'label'", "fields are name, train"]),
        ({"trian": "a.jsonl"}, ["unknown field trian"]),
        ({"metric": "bleu"}, ["bleu", "metric"]),
        ({"labels": "yes"}, ["labels", "list"]),
        ({"head": "spans"}, ["the head spans is not classes, or spans with a text_pair"]),
        ({"text": 3}, ["a.jsonl, line 1"]),
        ({"text": None, "text_pair": "body"}, ["no 'text'"]),
        ({"validation": 3}, ["not the description of a task", "int"]),
        ({"test": "gone.csv"}, ["gone.csv"]),
        ({"label": "subject"}, ["without subject", "body, topic"]),
        ({"label": "subject", "labels": ["x", "y"]}, ["without subject", "body, topic"]),
        ({"labels": [3, 4]}, ["a.jsonl, line 1", "3, 4"]),
        ({"text": "title"}, ["a.jsonl, line 1", "no title among body, topic"]),
        ({"train": "broken.jsonl"}, ["broken.jsonl, line 2 is not JSON: fix it; or get it from where"]),
        ({"train": "list.jsonl"}, ["list.jsonl"]),
        ({"train": "empty.csv"}, ["topic 1 is not one of"]),
        ({"train": "lists.jsonl"}, ["lists.jsonl has [1] as its only topic"]),
        ({"train": "ragged.csv"}, ["ragged.csv, line 2", "2 columns"]),
        ({"train": "ragged.tsv"}, ["ragged.tsv cannot be read after line 2", "quotation marks"]),
    ],
    ids=str,
)
def test_invalid_task_file_is_one_line(changes, words, tmp_path):
    for name in ("a", "b"):
        write_lines(tmp_path / f"{name}.jsonl", [{"body": "раз", "topic": 1}, {"body": "два", "topic": 2}])
    (tmp_path / "broken.jsonl").write_text('{"body": "раз", "topic": 1}\n{"body": \n')
    (tmp_path / "list.jsonl").write_text('["раз", 1]\n')
    (tmp_path / "lists.jsonl").write_text('{"body": "раз", "topic": [1]}\n')
    (tmp_path / "empty.csv").write_text("body,topic\n")
    (tmp_path / "ragged.csv").write_text("body,topic\nраз, два и три,1\n")
    (tmp_path / "ragged.tsv").write_text('body\ttopic\nраз\t1\n"два" и три\t2\n')
    with expect_user_error(*words):
        load_examples(load_task_file(describe(tmp_path, **changes)), ".")


def test_task_losses_match_torch():
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0], [1.0, 1.0, 1.0]], requires_grad=True)
    right = torch.tensor([[True, False, False], [False, False, True], [False, True, False]])
    expected = cross_entropy(logits, torch.tensor([0, 2, 1]), reduction="none")
    torch.testing.assert_close(compute_losses(logits, right), expected)
    # two right answers: minus the logarithm of what they have together; none: nothing, and no gradient
    losses = compute_losses(logits, torch.tensor([[True, True, False], [False, False, False], [True, True, True]]))
    together = math.exp(1) + math.exp(2)
    assert losses.tolist() == pytest.approx([-math.log(together / (together + math.exp(0.5))), 0, 0], abs=1e-6)
    losses.sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[1].eq(0).all() and logits.grad[0].ne(0).any()


def test_truncated_span_gets_no_gradient():
    examples = [
        Example({}, [], [0, 1], [], [{"input_ids": [5] * 9, "attention_mask": [1] * 9}], [[8], [2, 3], [], [5]]),
        Example({}, [], [0], [], [{"input_ids": [5] * 4, "attention_mask": [1] * 4}], [[3], []]),
    ]
    batch = collate(examples, TASKS["rucos"], AlbertTokenizer(), CPU)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 16)
    assert batch["attention_mask"].sum(dim=1).tolist() == [9, 4]
    expected = torch.zeros(2, 4, 16)
    expected[0, 0, 8] = expected[0, 3, 5] = expected[1, 0, 3] = 1
    expected[0, 1, 2:4] = 1 / 2
    assert batch["span_weights"].equal(expected)
    assert batch["possible"].tolist() == [[True, False, True], [False, False, False]]
    assert batch["right"].tolist() == [[True, False, False], [False, False, False]]

    scores = torch.tensor([[0.0, 9.0, 1.0], [1.0, 2.0, 3.0]], requires_grad=True)
    logits, right = compute_logits(lambda **_: SequenceClassifierOutput(logits=scores), batch)
    assert logits.argmax(dim=1)[0] == 2
    losses = compute_losses(logits, right)
    assert losses.tolist() == pytest.approx([math.log(1 + math.e), 0])
    losses.sum().backward()
    assert scores.grad.isfinite().all() and scores.grad[0, 1] == 0 and scores.grad[1].eq(0).all()


def test_finetune_batches_group_similar_lengths():
    lengths = np.random.default_rng(1).integers(5, 500, 1000)

    def order(seed: int) -> list[list[int]]:
        padded = -(-lengths // finetune_mlm.PADDING)
        return [batch.tolist() for batch in group_by_length(padded, 16, np.random.default_rng(seed), keep_rest=True)]

    batches = order(0)
    assert sorted(sum(batches, [])) == list(range(1000)) and max(map(len, batches)) == 16 and len(batches) == 63
    assert batches == order(0) != order(1)
    # the batch of 8 rows has any length
    shorter = [lengths[batch].mean() for seed in range(30) for batch in order(seed) if len(batch) < 16]
    assert len(shorter) == 30 and min(shorter) < 100 and 200 < sum(shorter) / 30 < 300


def test_encode_matches_tokenizer(toy_model):
    pretrained = load_pretrained(FinetuneArguments(task="rucos", checkpoint=str(toy_model)))
    tokenizer, [example] = pretrained.tokenizer, parse("rucos", *RECORDS["rucos"][1])
    assert encode([example], pretrained, 512) == 0
    pieces = tokenizer.convert_ids_to_tokens(example.inputs[0]["input_ids"])
    spelled = ["".join(pieces[token] for token in span).replace("▁", " ").split() for span in example.span_tokens]
    # the tokenizer has small letters only
    assert spelled[1:] == [["анна", "лебедева"] * 2, ["омске"] * 2, ["егора"]]
    # the gap: behind "и", before "ищут"
    start, *_, end = gap = example.span_tokens[0]
    assert "".join(pieces[:start]).endswith("▁и") and "".join(pieces[end + 1 :]).startswith("▁и")
    assert gap == [*range(start, end + 1)]
    assert set(example.inputs[0]["token_type_ids"]) == {0, 1} and example.length == len(pieces)

    assert encode([example], pretrained, example.length - 10) == 1 and example.length == len(pieces) - 10
    assert collate([example], TASKS["rucos"], tokenizer, CPU)["possible"].tolist() == [[True, True, False]]

    # both texts of a choice are truncated and counted separately
    [example] = parse("parus", *RECORDS["parus"][1])
    encode([example], pretrained, 512)
    lengths = [len(inputs["input_ids"]) for inputs in example.inputs]
    assert len(lengths) == 2 and example.length == sum(lengths) and lengths[0] != lengths[1]
    assert encode([example], pretrained, min(lengths)) == 1
    batch = collate([example] * 2, TASKS["parus"], tokenizer, CPU)
    assert batch["input_ids"].shape[0] == 4 and batch["right"].tolist() == [[True, False]] * 2


def test_encode_gives_empty_text_one_token():
    """GPT-2's tokenizer adds no special tokens, so an empty text has none of its own."""
    tokenizer = train_byte_tokenizer([["A text."]], TokenizeArguments(vocab_size=300))
    tokenizer.pad_token = tokenizer.eos_token
    examples = [Example({}, [("", None)], [0]), Example({}, [("", "")], [1]), Example({}, [("A text.", None)], [0])]
    assert encode(examples, Pretrained("gpt2", GPT2Config(), tokenizer), 512) == 0
    pad = tokenizer.pad_token_id
    assert [example.inputs for example in examples[:2]] == [[{"input_ids": [pad], "attention_mask": [1]}]] * 2
    assert examples[2].inputs[0]["input_ids"] == tokenizer("A text.")["input_ids"]
    batch = collate(examples[:2], TASKS["rcb"], tokenizer, CPU)
    assert batch["input_ids"].tolist() == [[pad] * 8] * 2 and batch["attention_mask"].sum(1).tolist() == [1, 1]


HUB_LABELS = {"rcb": ["entailment", "contradiction", "neutral"], "parus": ["choice1", "choice2"]}
HUB_LABELS |= dict.fromkeys(("terra", "lidirus"), ["entailment", "not_entailment"])
HUB_LABELS |= dict.fromkeys(("danetqa", "muserc", "russe"), ["False", "True"])


def make_parquet(name: str, records: list[dict]) -> bytes:
    """Return a file like those of the Hub's conversion: labels are numbers, with their names in the metadata."""
    dataset, file = datasets.Dataset.from_list(records), io.BytesIO()
    if name in HUB_LABELS:
        dataset = dataset.cast_column("label", datasets.ClassLabel(names=HUB_LABELS[name]))
    dataset.to_parquet(file)
    return file.getvalue()


def test_tasks_load_from_hub(tmp_path, monkeypatch):
    files, expected = {"README.md": b"# RussianSuperGLUE"}, {}
    for number, (name, (_, records, _)) in enumerate(RECORDS.items()):
        unlabelled = [record | ({"answers": []} if name == "rucos" else {"label": -1}) for record in records]
        for split in TASKS[name].files:
            part = unlabelled if split == "test" and name != "lidirus" else records
            # the newer and the older layout
            path = f"{split}/0000.parquet" if number % 2 == 0 else f"russian_super_glue-{split}.parquet"
            files[f"{name}/{path}"] = make_parquet(name, part)
            expected[name, split] = [(e.texts, e.right, e.spans) for e in parse(name, *part)]

    def set_hub(endpoint: str, cache: str) -> None:
        values = {"ENDPOINT": endpoint, "HF_HUB_CACHE": str(tmp_path / cache), "HF_HUB_OFFLINE": False}
        values |= {"HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}"}
        for name, value in (values | {"HF_HUB_DISABLE_XET": True}).items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)

    with HubServer() as hub:
        hub.repositories["RussianNLP/russian_super_glue"] = [Commit("conversion", files)]
        set_hub(hub.endpoint, "hub")
        found = {
            (name, split): [(e.texts, e.right, e.spans) for e in examples]
            for name in RECORDS
            for split, examples in load_examples(TASKS[name], tmp_path).items()
        }
        assert found == expected
        assert any(path.endswith("/revision/refs/convert/parquet") for _, path, _ in hub.requests)
    # without a server and without a cache
    set_hub("http://127.0.0.1:1", "empty")
    with expect_user_error("cannot load the dataset RussianNLP", "no connection", "TERRa/train.jsonl"):
        load_examples(TASKS["terra"], tmp_path)
