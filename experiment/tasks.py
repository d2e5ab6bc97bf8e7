"""Edit me: the tasks for fine-tuning. TASKS maps a name to its data, head and metric.

They are those of RussianSuperGLUE (Shavrina et al., 2020, arXiv:2010.15925) and RuCoLA (Mikhailov et al., 2022,
arXiv:2210.12814). `load_task_file` reads any other classification of sentences or pairs from a small JSON file. A
record is a dictionary with the fields of the Hugging Face Hub's version, from any source.
"""

import json
import os
import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.parquet
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.utils import disable_progress_bars
from safetensors.torch import save_model
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

from common.console import UserError, first_line
from common.hub import hub
from text.documents import read_records

Span = tuple[int, int, int]  # text (0: the first one, 1: the second), first character, character after the last


@dataclass
class Example:
    """A record in the form that a model reads.

    :param texts: one text or pair of texts; with the head "choices", one for each choice
    :param right: the indices of right classes, choices or entities; None if unlabelled
    :param spans: the spans for the head, each with one or more places: two for "spans", or the gap and then each entity
        for "entities"
    :param inputs: the model's inputs for each text or pair, from finetune_mlm.encode
    :param span_tokens: the numbers of each span's tokens, also from there
    """

    record: dict
    texts: list[tuple[str, str | None]]
    right: list[int] | None = None
    spans: list[list[Span]] = field(default_factory=list)
    inputs: list[dict] = field(default_factory=list)
    span_tokens: list[list[int]] = field(default_factory=list)

    def __post_init__(self):
        for text in (text for pair in self.texts for text in pair):
            if not isinstance(text, str | None):
                raise ValueError(f"{text!r} is not text")

    @property
    def label(self) -> int:
        """Return the index of the right answer."""
        return self.right[0]

    @property
    def length(self) -> int:
        """Return the number of tokens of all inputs."""
        return sum(len(inputs["input_ids"]) for inputs in self.inputs)


# ---------------------------------------------------------------- metrics

Measure = Callable[[list[Example], Sequence[int]], dict[str, float]]
SCORES = {
    # the average over classes, without those that are neither in the data nor predicted
    "f1": partial(f1_score, average="macro", zero_division=0),
    "mcc": matthews_corrcoef,
    "accuracy": accuracy_score,
}


def measure_labels(name: str, examples: list[Example], predictions: Sequence[int]) -> dict[str, float]:
    """Compute this score and the accuracy from examples and predicted indices."""
    labels = [example.label for example in examples]
    return {score: SCORES[score](labels, predictions) for score in dict.fromkeys((name, "accuracy"))}


METRICS = {name: partial(measure_labels, name) for name in SCORES}


def measure_domains(examples: list[Example], predictions: Sequence[int]) -> dict[str, float]:
    """Compute RuCoLA's scores of all sentences, and of those in and outside of the training data's domain."""
    metrics = METRICS["mcc"](examples, predictions)
    for domain in dict.fromkeys(example.record["domain"] for example in examples):
        rows = [row for row, example in enumerate(examples) if example.record["domain"] == domain]
        part = METRICS["mcc"]([examples[row] for row in rows], [predictions[row] for row in rows])
        metrics |= {f"{domain}_{name}": value for name, value in part.items()}
    return metrics


def measure_answers(examples: list[Example], predictions: Sequence[int]) -> dict[str, float]:
    """Compute MuSeRC's mean F1 of the paragraphs, and the share of questions with only correct predictions (em)."""
    paragraphs = defaultdict(list)
    questions = defaultdict(list)
    for example, predicted in zip(examples, predictions, strict=True):
        index = example.record["idx"]
        paragraphs[index["paragraph"]].append((example.label, predicted))
        questions[index["paragraph"], index["question"]].append(example.label == predicted)
    scores = [f1_score(*zip(*answers, strict=True), zero_division=0) for answers in paragraphs.values()]
    return {"f1": float(np.mean(scores)), "em": float(np.mean([all(answers) for answers in questions.values()]))}


def measure_entities(examples: list[Example], predictions: Sequence[int]) -> dict[str, float]:
    """Compute RuCoS's F1 of words and exact match (em) with the best right entity, like ReCoRD (arXiv:1810.12885)."""
    f1 = []
    matches = []
    for example, predicted in zip(examples, predictions, strict=True):
        chosen = normalize_answer(example.record["entities"][predicted])
        answers = [normalize_answer(answer) for answer in example.record["answers"]]
        f1.append(max((overlap(chosen, answer) for answer in answers), default=0.0))
        matches.append(chosen in answers)
    return {"f1": float(np.mean(f1)), "em": float(np.mean(matches))}


def normalize_answer(text: str) -> list[str]:
    """Return the words of an answer, without case and punctuation."""
    return text.lower().translate(str.maketrans("", "", string.punctuation)).split()


def overlap(words: list[str], others: list[str]) -> float:
    """Return the F1 of two lists of words."""
    common = sum((Counter(words) & Counter(others)).values())
    return 2 * common / (len(words) + len(others)) if common else 0.0


# ---------------------------------------------------------------- from a record to an example


def find_label(record: dict, task: "Task") -> list[int] | None:
    """Return [index] of a record's label, which is an index (on the Hub; -1: none), a truth value or a text."""
    value = record.get(task.label_column)
    labels = [str(label) for label in task.labels]
    if str(value) in labels:
        return [labels.index(str(value))]
    spellings = [label.lower() for label in labels]
    if str(value).lower() in spellings:
        return [spellings.index(str(value).lower())]
    if value is None or value == "" or value == -1:
        return None
    # an index only if no label is a number: 0 is not the first of the labels 1, 2 and 3
    has_numbers = any(spelling.lstrip("-").isdigit() for spelling in spellings) and not isinstance(value, bool)
    if isinstance(value, int) and 0 <= value < len(task.labels) and not has_numbers:
        return [int(value)]
    raise ValueError(f"{task.label_column} {value!r} is not one of {', '.join(map(str, task.labels))}")


def read_texts(record: dict, task: "Task") -> Example:
    """Return the example for a text in one column or a pair in two, whose texts are the spans for that head."""
    first, second = (*(record[column] for column in task.columns), None)[:2]
    spans = [[(i, 0, len(text))] for i, text in enumerate((first, second))] if task.head == "spans" else []
    return Example(record, [(first, second)], find_label(record, task), spans)


def read_choices(record: dict, task: "Task") -> Example:
    """Return a PARus example: a pair of each choice and the premise, the cause before the effect."""
    is_cause = record["question"] == "cause"
    choices = [record["choice1"], record["choice2"]]
    texts = [(choice, record["premise"]) if is_cause else (record["premise"], choice) for choice in choices]
    return Example(record, texts, find_label(record, task))


def read_answer(record: dict, task: "Task") -> Example:
    """Return a MuSeRC example: a paragraph, and a question followed by one answer."""
    require(record["idx"], ("paragraph", "question", "answer"))
    texts = [(record["paragraph"], f"{record['question']} {record['answer']}")]
    return Example(record, texts, find_label(record, task))


def read_word_senses(record: dict, task: "Task") -> Example:
    """Return a RUSSE example: the places of a word in two sentences."""
    texts = (record["sentence1"].replace("\xa0", " "), record["sentence2"].replace("\xa0", " "))
    spans = []
    for number, text in enumerate(texts):
        start = int(record[f"start{number + 1}"])
        end = int(record[f"end{number + 1}"])
        spans.append([(number, *find_word(text, start, end, record["word"]))])
    return Example(record, [texts], find_label(record, task), spans)


def find_word(text: str, start: int, end: int, word: str) -> tuple[int, int]:
    """Return the place of the whole word at these characters, or of the nearest word with the longest common prefix.

    Some places in RUSSE contain a space, end inside a word, or belong to another word.
    """
    words = [match.span() for match in re.finditer(r"\w+(?:-\w+)*", text)] or [(0, len(text))]

    def count_common_prefix(place: tuple[int, int]) -> int:
        return len(os.path.commonprefix([text[slice(*place)].lower(), word.lower()]))

    touched = [place for place in words if place[0] < end and start < place[1]]
    # half of the word is enough, because inflected forms differ in their ends
    if any(2 * count_common_prefix(place) >= len(word) for place in touched):
        return max(touched, key=count_common_prefix)
    return max(words, key=lambda place: (count_common_prefix(place), -abs(place[0] - start)))


def read_gap(record: dict, task: "Task") -> Example:
    """Return a RuCoS example: the places of the gap in the query and of all entities in the passage."""
    require(record["idx"], ("passage", "query"))
    # each entity once, because a passage may name it several times
    entities, answers = (
        list(dict.fromkeys(filter(None, map(strip_entity, record.get(name) or ())))) for name in ("entities", "answers")
    )
    record = record | {"entities": entities, "answers": answers}
    gap = record["query"].find("@placeholder")
    if gap < 0:
        raise ValueError("the query has no @placeholder")
    if not entities:
        raise ValueError("there are no entities to choose from")
    spans = [[(1, gap, gap + len("@placeholder"))]]
    for entity in entities:
        spans.append([(0, *match.span()) for match in re.finditer(re.escape(entity), record["passage"])])
    right = [number for number, entity in enumerate(entities) if entity in answers]
    return Example(record, [(record["passage"], record["query"])], right if answers else None, spans)


def strip_entity(entity: str) -> str:
    """Strip whitespace and punctuation, which no metric counts; the Hub has "Абхазии " and "Спартак»"."""
    entity = entity.strip(string.whitespace + string.punctuation)
    return entity if "«" in entity else entity.rstrip("»")


# ---------------------------------------------------------------- lines of the benchmark's files, as the Hub's records


def split_answers(line: dict) -> list[dict]:
    """Return a record for each answer of a MuSeRC paragraph."""
    passage = line["passage"]
    return [
        {"paragraph": passage["text"], "question": question["question"], "answer": answer["text"]}
        | {"idx": {"paragraph": line["idx"], "question": question["idx"], "answer": answer["idx"]}}
        | {"label": answer.get("label")}
        for question in passage["questions"]
        for answer in question["answers"]
    ]


def split_queries(line: dict) -> list[dict]:
    """Return a record for each query of a RuCoS passage."""
    text = line["passage"]["text"]
    entities = [text[place["start"] : place["end"]] for place in line["passage"]["entities"]]
    return [
        {"passage": text, "entities": entities, "query": question["query"]}
        | {"idx": {"passage": line["idx"], "query": question["idx"]}}
        | {"answers": [answer["text"] for answer in question.get("answers") or []]}
        for question in line["qas"]
    ]


# ---------------------------------------------------------------- the tasks


@dataclass(frozen=True)
class Task:
    """A task for fine-tuning.

    :param name: the leaderboard's name, also of the data folder and the file with predictions
    :param columns: the required fields of each record
    :param labels: the labels of the classes, as the leaderboard spells them
    :param head: the prediction: "classes" of a text or pair, one of several "choices", the class of two "spans", or
        one of the text's "entities"
    :param measure: a function of examples and predicted indices that returns metrics between 0 and 1 (Matthews
        correlation: from -1), of which the first one selects the best epoch
    :param make_example: a function that makes an Example of a record and its task
    :param restructure: a function that turns a line of the benchmark's files into records with the Hub's fields
    """

    name: str
    columns: tuple[str, ...]
    labels: tuple[str | int, ...] = ()
    head: Literal["classes", "choices", "spans", "entities"] = "classes"
    measure: Measure = METRICS["accuracy"]
    make_example: Callable[[dict, "Task"], Example] = read_texts
    restructure: Callable[[dict], list[dict]] | None = None
    label_column: str = "label"
    id_column: str | None = "idx"  # None: the number of the record
    files: dict[str, str] = field(
        default_factory=lambda: {"train": "train.jsonl", "validation": "val.jsonl", "test": "test.jsonl"}
    )
    folder: Path | None = None  # of a task file; None: search for it
    address: str = "https://russiansuperglue.com/tasks/"
    hub: str = "RussianNLP/russian_super_glue"


ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    "rcb": Task("RCB", ("premise", "hypothesis"), ("entailment", "contradiction", "neutral"), measure=METRICS["f1"]),
    "terra": Task("TERRa", ("premise", "hypothesis"), ENTAILMENT),
    "danetqa": Task("DaNetQA", ("passage", "question"), ("false", "true")),
    "parus": Task("PARus", ("premise", "choice1", "choice2", "question"), (0, 1), "choices", make_example=read_choices),
    "muserc": Task(
        "MuSeRC",
        ("paragraph", "question", "answer", "idx"),
        (0, 1),
        measure=measure_answers,
        make_example=read_answer,
        restructure=split_answers,
    ),
    "russe": Task(
        "RUSSE",
        ("word", "sentence1", "sentence2", "start1", "end1", "start2", "end2"),
        ("false", "true"),
        head="spans",
        make_example=read_word_senses,
    ),
    "rucos": Task(
        "RuCoS",
        ("passage", "query", "entities", "idx"),
        head="entities",
        measure=measure_entities,
        make_example=read_gap,
        restructure=split_queries,
        label_column="answers",
    ),
    "lidirus": Task(
        "LiDiRus", ("sentence1", "sentence2"), ENTAILMENT, measure=METRICS["mcc"], files={"test": "LiDiRus.jsonl"}
    ),
    "rucola": Task(
        "RuCoLA",
        ("sentence",),
        (0, 1),
        measure=measure_domains,
        label_column="acceptable",
        id_column="id",
        files={
            "train": "in_domain_train.csv",
            "in_domain": "in_domain_dev.csv",
            "out_of_domain": "out_of_domain_dev.csv",
            "test": "test.csv",
        },
        address="https://github.com/RussianNLP/RuCoLA/tree/main/data",
        hub="",
    ),
}

# ---------------------------------------------------------------- reading


def load_examples(task: Task, data_dir: str | Path) -> dict[str, list[Example]]:
    """Return the examples by split: train, validation and, if it exists, test.

    They come from the folder of the task's name in `data_dir`, or from the Hugging Face Hub. If data are missing or
    malformed, a UserError says so.
    """
    folder = task.folder or Path(data_dir, task.name)
    if folder.is_dir():
        files = {split: folder / name for split, name in task.files.items()}
        if not task.folder and len(files) > 1 and not files["test"].exists():
            del files["test"]  # its unlabelled texts are not needed to evaluate a model
        records = {split: read_file(task, path) for split, path in files.items()}
    else:
        records = load_from_hub(task, data_dir)
    examples = {split: make_examples(task, rows) for split, rows in records.items()}
    for domain in [split for split in examples if split.endswith("_domain")]:  # of RuCoLA
        for example in examples[domain]:
            example.record["domain"] = domain
        examples.setdefault("validation", []).extend(examples.pop(domain))
    for split, part in examples.items():
        where = f"the {split} data of {task.name}"
        if not part and (split != "test" or len(examples) == 1):
            raise UserError(f"{where} is empty: get it from {task.address}")
        for example in part:
            if example.right is None and split != "test":
                names = ", ".join(map(str, example.record))
                raise UserError(f"{where} has a record without {task.label_column}, with {names}: is it the test data?")
    return examples


def read_file(task: Task, path: Path) -> list[tuple[str, object]]:
    """Return the records of a .csv, .tsv or JSON-lines file, each with its position."""
    try:
        return [(f"{path}, line {number}", record) for number, record in read_records(path, is_strict=True)]
    except UserError as e:
        raise UserError(f"{e}; or get it from {task.address}") from e


def make_examples(task: Task, records: list[tuple[str, object]]) -> list[Example]:
    """Return the examples of records with their positions, or raise a UserError that names a malformed record."""
    examples = []
    for where, record in records:
        try:
            # a line of the benchmark, or a record with the Hub's fields
            is_nested = task.restructure and not record.keys() >= set(task.columns)
            for part in task.restructure(record) if is_nested else [record]:
                require(part, task.columns)
                examples.append(task.make_example(part, task))
        except (ValueError, TypeError, LookupError, AttributeError) as e:
            problem = e if isinstance(e, ValueError) else f"{e!r} in {record!r:.100}"
            raise UserError(f"{where} is not a record of {task.name} ({problem}): get it from {task.address}") from e
    return examples


def require(record: dict, names: Iterable[str]) -> None:
    """Raise a ValueError if a record lacks one of these fields."""
    if missing := [name for name in names if record.get(name) is None]:
        raise ValueError(f"no {', '.join(missing)} among {', '.join(map(str, record)) or 'no fields'}")


def load_from_hub(task: Task, data_dir: str | Path) -> dict[str, list[tuple[str, dict]]]:
    """Return the records of the Hub's Parquet conversion, because the Hub no longer runs the dataset's script."""
    here = Path(data_dir) / task.name
    name = task.name.lower()
    files = f"{', '.join(str(here / file) for file in task.files.values())} from {task.address} (or give --data_dir)"
    if not task.hub:
        raise UserError(f"no folder {here}: get {files}")
    records = {split: [] for split in task.files}
    disable_progress_bars()
    with hub(f"the dataset {task.hub}", files):
        options = dict(repo_type="dataset", revision="refs/convert/parquet", allow_patterns=f"{name}/*")
        folder = Path(snapshot_download(task.hub, **options), name)
        # NAME/train/0000.parquet, or NAME/russian_super_glue-train.parquet
        for path in sorted(folder.rglob("*.parquet")):
            for split in [split for split in records if split in str(path.relative_to(folder))]:
                records[split] += pyarrow.parquet.read_table(path).to_pylist()
        if missing := [split for split in task.files if not records[split]]:
            raise ValueError(f"no {' and '.join(missing)} data of {name}")
    return {
        split: [(f"{task.hub}, {split}, row {row}", record) for row, record in enumerate(rows)]
        for split, rows in records.items()
    }


# ---------------------------------------------------------------- tasks of a user

TASK_FILE_FIELDS = "name, train, validation, test, text, text_pair, label, labels, metric, id, head"


def load_task_file(path: str | Path) -> Task:
    """Return the task that a JSON file describes, a classification of texts or pairs.

        {"name": "spam", "train": "train.csv", "validation": "dev.csv", "test": "test.csv", "text": "subject",
         "text_pair": "body", "label": "is_spam", "labels": ["no", "yes"], "metric": "f1", "id": "number"}

    The files are in the same folder and end in .csv, .tsv or .jsonl. `train`, `validation`, `text` and `label` are
    required. Without `labels`, these are those of the training data; without `id`, it is the number of the record. The
    head "spans" compares the averages of a pair's two texts, and needs fewer examples to learn their similarity. The
    default head uses the first token, like BERT.
    """
    what = f"--task_file {path} is not the description of a task"
    try:
        facts = json.loads(Path(path).read_text(encoding="utf-8"))
        if unknown := facts.keys() - {*TASK_FILE_FIELDS.split(", ")}:
            raise ValueError(f"unknown field {unknown.pop()}")
        head = facts.get("head", "classes")
        splits = {name: facts[name] for name in ("train", "validation")}
        if head not in ("classes", "spans") or (head == "spans" and not facts.get("text_pair")):
            raise ValueError(f"the head {head} is not classes, or spans with a text_pair")
        if not isinstance(facts.get("labels", []), list):
            raise ValueError("labels is not a list")
        task = Task(
            facts.get("name", Path(path).stem).replace("/", "_"),  # part of file and folder names
            (facts["text"], *filter(None, [facts.get("text_pair")])),
            tuple(facts.get("labels", ())),
            head,
            METRICS[facts.get("metric", "accuracy")],
            label_column=facts["label"],
            id_column=facts.get("id"),
            files=splits | ({"test": facts["test"]} if facts.get("test") else {}),
            folder=Path(path).parent,
            address=f"where {path} says",
            hub="",
        )
        paths = {split: task.folder / name for split, name in task.files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        reason = f"no {e}" if isinstance(e, KeyError) else first_line(e)
        raise UserError(f"{what} ({reason}): the fields are {TASK_FILE_FIELDS}, see docs/finetuning.md") from e
    if not task.labels:
        records = [record for _, record in read_file(task, paths["train"]) if isinstance(record, dict)]
        values = [record.get(task.label_column) for record in records]
        labels = sorted({str(label) for label in values if label not in (None, "")})
        if len(labels) == 1:
            raise UserError(f"{paths['train']} has {labels[0]} as its only {task.label_column}: two labels are needed")
        task = replace(task, labels=tuple(labels))
    return task


# ---------------------------------------------------------------- submission


def format_predictions(task: Task, examples: list[Example], predictions: Sequence[int]) -> tuple[str, str]:
    """Return the name and content of the file with predictions in the leaderboard's format."""
    numbers = [example.record.get(task.id_column, row) for row, example in enumerate(examples)]
    if task.head == "entities":
        labels = [example.record["entities"][place] for example, place in zip(examples, predictions, strict=True)]
    else:
        labels = [task.labels[predicted] for predicted in predictions]
    if task is TASKS["rucola"]:
        lines = [f"{number},{label}" for number, label in zip(numbers, labels, strict=True)]
        return "RuCoLA.csv", "\n".join(["id,acceptable", *lines]) + "\n"
    if task is TASKS["muserc"]:
        paragraphs = defaultdict(lambda: defaultdict(list))
        for index, label in zip(numbers, labels, strict=True):
            paragraphs[index["paragraph"]][index["question"]].append({"idx": index["answer"], "label": label})
        rows = [
            {"idx": number, "passage": {"questions": [{"idx": n, "answers": a} for n, a in questions.items()]}}
            for number, questions in paragraphs.items()
        ]
    else:
        if task is TASKS["rucos"]:
            numbers = [index["passage"] for index in numbers]
        rows = [{"idx": number, "label": label} for number, label in zip(numbers, labels, strict=True)]
    return f"{task.name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def predict_majority(task: Task, examples: dict[str, list[Example]]) -> dict[str, float]:
    """Return the validation metrics of always predicting the most frequent answer of the training data."""
    if task.head == "entities":
        return {}
    commonest = Counter(example.label for example in examples["train"]).most_common(1)[0][0]
    return task.measure(examples["validation"], [commonest] * len(examples["validation"]))


# ---------------------------------------------------------------- heads for places in a text


class SpanModel(nn.Module):
    """An encoder, and a head over the average hidden states of spans.

    With `num_labels`, it classifies two spans by both, their difference and product, and the first token, similar to
    Sentence-BERT (Reimers and Gurevych, 2019, arXiv:1908.10084). Without it, it chooses the span that fills the first
    one, a gap, and scores each by both and their product.
    """

    def __init__(self, encoder: nn.Module, num_labels: int | None, dropout: float):
        super().__init__()
        self.encoder = encoder
        self.config = encoder.config
        self.is_choice = num_labels is None
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear((3 if self.is_choice else 5) * encoder.config.hidden_size, num_labels or 1)
        nn.init.normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, span_weights: torch.Tensor, **inputs) -> SequenceClassifierOutput:
        """Return logits [rows, labels], or [rows, spans - 1, 1] to choose a span.

        :param span_weights: [rows, spans, length], see finetune_mlm.collate
        """
        hidden = self.encoder(**inputs).last_hidden_state
        spans = span_weights.to(hidden.dtype) @ hidden
        if self.is_choice:
            first = spans[:, :1].expand(-1, spans.shape[1] - 1, -1)
            second = spans[:, 1:]
            features = [first, second, first * second]
        else:
            first = spans[:, 0]
            second = spans[:, 1]
            features = [hidden[:, 0], first, second, (first - second).abs(), first * second]
        return SequenceClassifierOutput(logits=self.classifier(self.dropout(torch.cat(features, dim=-1))))

    def save_pretrained(self, folder: str | Path, **_) -> None:
        """Save the encoder's present weights in the format of from_pretrained, and the head in head.safetensors."""
        self.encoder.save_pretrained(folder)
        save_model(self.classifier, str(Path(folder) / "head.safetensors"))
