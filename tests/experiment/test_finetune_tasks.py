"""experiment/tasks.py: each task's records in both schemas, metrics against hand-computed figures, files to hand in."""

import io
import json
import math

import datasets
import huggingface_hub
import numpy as np
import pytest
import torch
from finetune_data import BOW, QUERY, RECORDS, write_lines
from hub_server import Commit, HubServer
from mains import expect_user_error
from torch.nn.functional import cross_entropy
from transformers import AlbertTokenizer, GPT2Config
from transformers.modeling_outputs import SequenceClassifierOutput

import finetune_mlm
from common.console import UserError
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


def drop_labels(value):
    """Remove the labels, as in the test data."""
    if isinstance(value, dict):
        return {name: drop_labels(part) for name, part in value.items() if name != "label"}
    return [drop_labels(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", RECORDS)
def test_tasks_parse_both_schemas(name, tmp_path):
    task = TASKS[name]
    line, records, expected = RECORDS[name]
    for file in task.files.values():
        write_lines(tmp_path / task.name / file, [line])
    for split, examples in load_examples(task, tmp_path).items():
        assert [spell(example) for example in examples] == expected, split
    assert [spell(example) for example in make_examples(task, [("the Hub", record) for record in records])] == expected

    # a test split without labels
    if name == "rucos":
        bare = line | {"qas": [{"idx": 9, "query": QUERY}]}
        records = [record | {"answers": []} for record in records]
    else:
        bare = drop_labels(line)
        records = [record | {"label": -1} for record in records]
    write_lines(tmp_path / task.name / task.files["test"], [bare])
    examples = load_examples(task, tmp_path)["test"]
    assert [(example.texts, example.right) for example in examples] == [(texts, None) for texts, _, _ in expected]
    assert [e.right for e in make_examples(task, [("the Hub", record) for record in records])] == [None] * len(expected)


def test_rucola_parses(tmp_path):
    folder = tmp_path / "RuCoLA"
    folder.mkdir()
    header = "id,sentence,acceptable,error_type,detailed_source\n"
    (folder / "in_domain_train.csv").write_text(
        header + '0,"Кот спит, а пёс нет.",1,0,Book\n1,Кот спят.,0,Syntax,Book\n'
    )
    (folder / "in_domain_dev.csv").write_text(header + "0,Идёт дождь.,1,0,Book\n")
    # some files begin with a byte order mark
    (folder / "out_of_domain_dev.csv").write_text("\ufeff" + header + "0,Дождь идут.,0,Syntax,Web\n")
    (folder / "test.csv").write_text("id,sentence\n7,Снег идёт.\n")
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
        [example] = make_examples(TASKS["russe"], [("here", record)])
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
    [example] = make_examples(TASKS["rucos"], [("here", record | {"answers": ["Егора", "Омске"]})])
    assert example.right == [1, 2]
    assert example.record["entities"] == ["Анна Лебедева", "Омске", "Егора"]
    # the answer is not among the entities: there is nothing to learn, and each choice is wrong
    [example] = make_examples(TASKS["rucos"], [("here", record | {"answers": ["Москве"]})])
    assert example.right == []
    # at the passage's end the Hub's entity has nothing behind it; a quotation mark may be part of it
    club = record | {"passage": "Победил «Луч». Ликует вся партия «Завод» и Тула", "answers": ["Луч"]}
    [example] = make_examples(TASKS["rucos"], [("here", club | {"entities": ["Луч»", "партия «Завод» ", "Тула"]})])
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


def test_macro_f1_averages_three_classes():
    # class 0: 1 right, 1 too many, 1 missed: 2 / (2 + 1 + 1) = 1/2
    # class 1: 2 right, 1 too many:           4 / (4 + 1) = 4/5
    # class 2: 1 right, 1 missed:             2 / (2 + 1) = 2/3
    metrics = TASKS["rcb"].measure(label_examples(0, 0, 1, 1, 2, 2), [0, 1, 1, 1, 2, 0])
    assert metrics == pytest.approx({"f1": (1 / 2 + 4 / 5 + 2 / 3) / 3, "accuracy": 4 / 6})
    assert next(iter(metrics)) == "f1"  # which decides
    for name in ("terra", "danetqa", "parus", "russe"):
        assert TASKS[name].measure(label_examples(0, 1, 1, 0), [0, 1, 0, 0]) == {"accuracy": 0.75}


def test_matthews_correlation():
    # 3 true positives, 2 true negatives, 1 false positive, 2 false negatives:
    # (3 x 2 - 1 x 2) / sqrt((3 + 1) (3 + 2) (2 + 1) (2 + 2)) = 4 / sqrt(240)
    labels, predictions = [1, 1, 1, 0, 0, 0, 1, 1], [1, 1, 1, 0, 0, 1, 0, 0]
    metrics = TASKS["lidirus"].measure(label_examples(*labels), predictions)
    assert metrics == pytest.approx({"mcc": 4 / math.sqrt(240), "accuracy": 5 / 8})
    assert TASKS["lidirus"].measure(label_examples(1, 0), [1, 1])["mcc"] == 0


def test_muserc_scores_answers():
    # paragraph 0: labels 1 0 | 1, judged 1 1 | 1: 2 right, 1 too many: F1 4/5; of its questions the second is whole
    # paragraph 1: labels 1 1, judged 1 0: 1 right, 1 missed: F1 2/3; its question is not whole
    # paragraph 2: label 0, judged 0: nothing to find: F1 0; its question is whole
    places = [(0, 0), (0, 0), (0, 1), (1, 0), (1, 0), (2, 0)]
    records = [{"idx": {"paragraph": p, "question": q, "answer": i}} for i, (p, q) in enumerate(places)]
    metrics = TASKS["muserc"].measure(label_examples(1, 0, 1, 1, 1, 0, records=records), [1, 1, 1, 1, 0, 0])
    assert metrics == pytest.approx({"f1": (4 / 5 + 2 / 3 + 0) / 3, "em": 2 / 4})


def test_rucos_scores_entities():
    def answer(*answers: str) -> Example:
        return Example({"entities": ["анна лебедева!", "Лебедева", "Егор"], "answers": list(answers)}, [], [0])

    # case and punctuation apart the same text: 1; one of two words: 2 x 1 / (1 + 2) = 2/3; nothing in common: 0;
    # the best of several answers: 1
    examples = [answer("Анна Лебедева"), answer("Анна Лебедева"), answer("Анна Лебедева"), answer("Анна", "Егор")]
    metrics = TASKS["rucos"].measure(examples, [0, 1, 2, 2])
    assert metrics == pytest.approx({"f1": (1 + 2 / 3 + 0 + 1) / 4, "em": 2 / 4})


def test_rucola_scores_domains():
    # in-domain: 2 true positives, 1 true negative, 1 false positive: (2 x 1 - 1 x 0) / sqrt(3 x 2 x 2 x 1) = 2/sqrt(12)
    # out-of-domain: all wrong: -1; together 2 tp, 1 tn, 2 fp, 1 fn: (2 x 1 - 2 x 1) / ... = 0
    records = [{"domain": "in_domain"}] * 4 + [{"domain": "out_of_domain"}] * 2
    metrics = TASKS["rucola"].measure(label_examples(1, 1, 0, 0, 1, 0, records=records), [1, 1, 0, 1, 0, 1])
    assert metrics == pytest.approx(
        {"mcc": 0, "accuracy": 3 / 6}
        | {"in_domain_mcc": 2 / math.sqrt(12), "in_domain_accuracy": 3 / 4}
        | {"out_of_domain_mcc": -1, "out_of_domain_accuracy": 0}
    )


def test_majority_baseline_predicts_commonest_label():
    examples = {"train": label_examples(1, 2, 1, 0), "validation": label_examples(1, 1, 1, 0)}
    # always 1: class 1 has 2 x 3 / (2 x 3 + 1) = 6/7, class 0 nothing; class 2 does not occur
    assert tasks.predict_majority(TASKS["rcb"], examples) == pytest.approx({"f1": 6 / 7 / 2, "accuracy": 3 / 4})
    assert tasks.predict_majority(TASKS["rucos"], examples) == {}


SUBMISSIONS = {
    "rcb": ([2, 1], '{"idx": 4, "label": "neutral"}\n{"idx": 5, "label": "contradiction"}\n'),
    "terra": ([0, 1], '{"idx": 4, "label": "entailment"}\n{"idx": 5, "label": "not_entailment"}\n'),
    "lidirus": ([1, 0], '{"idx": 4, "label": "not_entailment"}\n{"idx": 5, "label": "entailment"}\n'),
    "danetqa": ([1, 0], '{"idx": 4, "label": "true"}\n{"idx": 5, "label": "false"}\n'),
    "russe": ([1, 0], '{"idx": 4, "label": "true"}\n{"idx": 5, "label": "false"}\n'),
    "parus": ([1, 0], '{"idx": 4, "label": 1}\n{"idx": 5, "label": 0}\n'),
}


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_submission_has_expected_rows(name):
    task, (predictions, expected) = TASKS[name], SUBMISSIONS[name]
    records = [("here", RECORDS[name][1][0] | {"idx": idx, "label": -1}) for idx in (4, 5)]
    assert tasks.format_predictions(task, make_examples(task, records), predictions) == (f"{task.name}.jsonl", expected)


def test_submission_nests_muserc_and_rucos():
    records = [("here", record) for record in RECORDS["muserc"][1]]
    records += [("here", record | {"idx": record["idx"] | {"question": 3}}) for _, record in records[:1]]
    records += [("here", record | {"idx": record["idx"] | {"paragraph": 6}}) for _, record in records[:1]]
    name, text = tasks.format_predictions(TASKS["muserc"], make_examples(TASKS["muserc"], records), [1, 0, 0, 1])
    assert name == "MuSeRC.jsonl"
    assert text == (
        '{"idx": 4, "passage": {"questions": [{"idx": 2, "answers": [{"idx": 7, "label": 1}, {"idx": 8, "label": 0}]}, '
        '{"idx": 3, "answers": [{"idx": 7, "label": 0}]}]}}\n'
        '{"idx": 6, "passage": {"questions": [{"idx": 2, "answers": [{"idx": 7, "label": 1}]}]}}\n'
    )
    examples = make_examples(TASKS["rucos"], [("here", record) for record in RECORDS["rucos"][1]])
    assert tasks.format_predictions(TASKS["rucos"], examples, [2]) == ("RuCoS.jsonl", '{"idx": 4, "label": "Егора"}\n')
    examples = make_examples(TASKS["rucola"], [("here", {"id": str(i), "sentence": "Снег."}) for i in (7, 9)])
    assert tasks.format_predictions(TASKS["rucola"], examples, [1, 0]) == ("RuCoLA.csv", "id,acceptable\n7,1\n9,0\n")


def describe(folder, **changes) -> str:
    description = {"train": "a.jsonl", "validation": "b.jsonl", "text": "body", "label": "topic"} | changes
    path = folder / "mine.json"
    path.write_text(json.dumps({name: value for name, value in description.items() if value is not None}))
    return str(path)


def test_task_file_collects_labels(tmp_path):
    records = [{"body": "раз", "topic": 1}, {"body": "два", "topic": 2}, {"body": "три", "topic": 3}]
    for name in ("a", "b"):
        write_lines(tmp_path / f"{name}.jsonl", records)
    task = load_task_file(describe(tmp_path))
    assert [example.right for example in load_examples(task, ".")["train"]] == [[0], [1], [2]]
    task = load_task_file(describe(tmp_path, labels=[3, 2, 1]))
    assert [example.right for example in load_examples(task, ".")["train"]] == [[2], [1], [0]]
    write_lines(tmp_path / "a.jsonl", [{"body": "раз", "topic": True}, {"body": "два", "topic": 0}])
    task = load_task_file(describe(tmp_path, validation="a.jsonl", labels=["no", "yes"]))
    assert [example.right for example in load_examples(task, ".")["train"]] == [[1], [0]]


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
    right = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    losses = compute_losses(logits, right)
    together = math.exp(1) + math.exp(2)
    assert losses[0].item() == pytest.approx(-math.log(together / (together + math.exp(0.5))))
    assert losses[1:].tolist() == pytest.approx([0, 0], abs=1e-6)
    losses.sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[1].eq(0).all() and logits.grad[0].ne(0).any()


def test_truncated_span_gets_no_gradient():
    task = TASKS["rucos"]
    examples = [
        Example({}, [], [0, 1], [], [{"input_ids": [5] * 9, "attention_mask": [1] * 9}], [[8], [2, 3], [], [5]]),
        Example({}, [], [0], [], [{"input_ids": [5] * 4, "attention_mask": [1] * 4}], [[3], []]),
    ]
    batch = collate(examples, task, AlbertTokenizer(), CPU)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 16)
    assert batch["attention_mask"].sum(dim=1).tolist() == [9, 4]
    expected = torch.zeros(2, 4, 16)
    expected[0, 0, 8] = expected[0, 3, 5] = expected[1, 0, 3] = 1
    expected[0, 1, 2:4] = 1 / 2
    assert batch["span_weights"].equal(expected)
    assert batch["possible"].tolist() == [[True, False, True], [False, False, False]]
    assert batch["right"].tolist() == [[True, False, False], [False, False, False]]

    scores = torch.tensor([[0.0, 9.0, 1.0], [1.0, 2.0, 3.0]], requires_grad=True)

    def model(**inputs):
        return SequenceClassifierOutput(logits=scores)

    logits, right = compute_logits(model, batch)
    assert logits.argmax(dim=1)[0] == 2
    losses = compute_losses(logits, right)
    assert losses.tolist() == pytest.approx([math.log(1 + math.e), 0])
    losses.sum().backward()
    assert scores.grad.isfinite().all() and scores.grad[0, 1] == 0 and scores.grad[1].eq(0).all()


def test_finetune_batches_group_similar_lengths():
    lengths = np.random.default_rng(1).integers(5, 500, 1000)
    padded = -(-lengths // finetune_mlm.PADDING)

    def order(seed: int) -> list[list[int]]:
        batches = group_by_length(padded, 16, np.random.default_rng(seed), keep_rest=True)
        return [batch.tolist() for batch in batches]

    batches = order(0)
    assert sorted(row for batch in batches for row in batch) == list(range(1000))
    assert all(len(batch) <= 16 for batch in batches) and len(batches) == 63
    assert batches == order(0) != order(1)
    # the batch of 8 rows has any length
    shorter = [lengths[batch].mean() for seed in range(30) for batch in order(seed) if len(batch) < 16]
    assert len(shorter) == 30 and min(shorter) < 100 and 200 < sum(shorter) / 30 < 300


def test_encode_matches_tokenizer(toy_model):
    pretrained = load_pretrained(FinetuneArguments(task="rucos", checkpoint=str(toy_model)))
    tokenizer = pretrained.tokenizer
    examples = make_examples(TASKS["rucos"], [("here", record) for record in RECORDS["rucos"][1]])
    [example] = examples
    assert encode(examples, pretrained, 512) == 0
    pieces = tokenizer.convert_ids_to_tokens(example.inputs[0]["input_ids"])
    spelled = ["".join(pieces[token] for token in span).replace("▁", " ").split() for span in example.span_tokens]
    # the tokenizer has small letters only
    assert spelled[1:] == [["анна", "лебедева"] * 2, ["омске"] * 2, ["егора"]]
    # the gap: behind "и", before "ищут"
    gap = example.span_tokens[0]
    start, end = gap[0], gap[-1] + 1
    assert "".join(pieces[:start]).endswith("▁и") and "".join(pieces[end:]).startswith("▁и")
    assert end - start == len(gap)
    assert set(example.inputs[0]["token_type_ids"]) == {0, 1} and example.length == len(pieces)

    assert encode(examples, pretrained, example.length - 10) == 1
    assert example.length == len(pieces) - 10
    batch = collate(examples, TASKS["rucos"], tokenizer, CPU)
    assert batch["possible"].tolist() == [[True, True, False]]

    # both texts of a choice are truncated and counted separately
    task = TASKS["parus"]
    examples = make_examples(task, [("here", record) for record in RECORDS["parus"][1]])
    encode(examples, pretrained, 512)
    lengths = [len(inputs["input_ids"]) for inputs in examples[0].inputs]
    assert len(lengths) == 2 and examples[0].length == sum(lengths) and lengths[0] != lengths[1]
    assert encode(examples, pretrained, min(lengths)) == 1
    batch = collate(examples * 2, task, tokenizer, CPU)
    assert batch["input_ids"].shape[0] == 4 and batch["right"].tolist() == [[True, False]] * 2


def test_encode_gives_empty_text_one_token():
    """GPT-2's tokenizer adds no special tokens, so an empty text has none of its own."""
    tokenizer = train_byte_tokenizer([["A text."]], TokenizeArguments(vocab_size=300))
    tokenizer.pad_token = tokenizer.eos_token
    pretrained = Pretrained("gpt2", GPT2Config(), tokenizer)
    examples = [Example({}, [("", None)], [0]), Example({}, [("", "")], [1]), Example({}, [("A text.", None)], [0])]
    assert encode(examples, pretrained, 512) == 0
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
    features = datasets.Dataset.from_list(records).features
    if name in HUB_LABELS:
        features["label"] = datasets.ClassLabel(names=HUB_LABELS[name])
    file = io.BytesIO()
    datasets.Dataset.from_list(records, features=features).to_parquet(file)
    return file.getvalue()


def test_tasks_load_from_hub(tmp_path, monkeypatch):
    files, expected = {"README.md": b"# RussianSuperGLUE"}, {}
    for number, (name, (_, records, _)) in enumerate(RECORDS.items()):
        unlabelled = [record | ({"answers": []} if name == "rucos" else {"label": -1}) for record in records]
        expected[name] = {}
        for split in TASKS[name].files:
            part = unlabelled if split == "test" and name != "lidirus" else records
            # the newer and the older layout
            path = f"{split}/0000.parquet" if number % 2 == 0 else f"russian_super_glue-{split}.parquet"
            files[f"{name}/{path}"] = make_parquet(name, part)
            expected[name][split] = make_examples(TASKS[name], [("", record) for record in part])

    def set_hub(**values) -> None:
        for name, value in values.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)

    set_hub(HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE=False, HF_HUB_DISABLE_XET=True)
    with HubServer() as hub:
        hub.repositories["RussianNLP/russian_super_glue"] = [Commit("conversion", files)]
        files_at = "/{repo_id}/resolve/{revision}/{filename}"
        set_hub(ENDPOINT=hub.endpoint, HUGGINGFACE_CO_URL_TEMPLATE=hub.endpoint + files_at)
        for name in RECORDS:
            found = load_examples(TASKS[name], tmp_path)
            assert found.keys() == expected[name].keys()
            for split, examples in found.items():
                pairs = zip(examples, expected[name][split], strict=True)
                assert all((a.texts, a.right, a.spans) == (b.texts, b.right, b.spans) for a, b in pairs)
        assert any(path.endswith("/revision/refs/convert/parquet") for _, path, _ in hub.requests)
    # without a server and without a cache
    set_hub(ENDPOINT="http://127.0.0.1:1", HF_HUB_CACHE=str(tmp_path / "empty"))
    with pytest.raises(UserError, match="cannot load the dataset RussianNLP.*no connection.*TERRa/train.jsonl"):
        load_examples(TASKS["terra"], tmp_path)
