"""tokenize_wikitext103.py, run as users run it, and its tokenizers and datasets as they are loaded."""

import itertools
import json
import math
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from mains import expect_user_error, refuse, run_main
from processes import ROOT, read_files, run_python
from rows import SPECIAL, make_llama_tokenizer
from transformers import AlbertTokenizer

import tokenize_wikitext103
from arguments import DataArguments, ModelArguments
from common.console import UserError
from common.hub import hub
from experiment import data
from finetune_mlm import load_folder
from text import tokenization
from text.documents import read_documents, read_text
from text.instances import BLOCKS, KINDS, PAIRS, TEXT
from text.stored import load_tokenized_dataset
from text.tokenization import load_hub_splits
from text.tokenizers import load_tokenizer, tokenizer_fingerprint, train_tokenizer
from tokenize_wikitext103 import TokenizeArguments

SCRIPT = str(ROOT / "tokenize_wikitext103.py")
RUSSIAN = "Ёлка и йод. Это был мой старый дом, и он стоял у самой реки. Мы жили в нём долго; потом уехали."


def tokenize(folder: Path, *flags):
    """Run the script; writes folder/dataset and folder/tokenizer."""
    paths = ("--dataset_path", folder / "dataset", "--tokenizer_path", folder / "tokenizer")
    return run_python(SCRIPT, *flags, *paths, cwd=folder, expect=0)


@pytest.fixture(scope="module")
def novel() -> list[str]:
    return read_text(ROOT / "sample_data" / "austen.txt.xz").split("\n")


@pytest.fixture(scope="module")
def written(tmp_path_factory, novel):
    """A folder with 40 documents in documents.jsonl, and their dataset: a vocabulary of 500, 64 tokens."""
    folder = tmp_path_factory.mktemp("written")
    documents = [{"text": "\n".join(novel[start : start + 60])} for start in range(0, 2400, 60)]
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    flags = ("--text_files", "documents.jsonl", "--train_tokenizer", "--vocab_size", 500, "--seq_length", 64)
    result = tokenize(folder, *flags)
    assert "unigram entropy" in result.stdout
    paths = f"--dataset_path {folder / 'dataset'} --tokenizer_path {folder / 'tokenizer'}"
    assert result.stdout.splitlines()[-1] == f"python run_trainer.py {paths} --objective mlm_sop"
    return folder


def test_tokenize_writes_expected_files(written):
    tokenizer = load_tokenizer(written / "tokenizer")
    dataset, corpus = load_tokenized_dataset(written / "dataset", tokenizer)
    assert corpus["vocab_size"] == len(tokenizer) <= 500 and corpus["seq_length"] == 64
    assert corpus["documents"] == {"train": 38, "validation": 2}
    labels = Counter(dataset["train"]["sentence_order_label"])
    assert set(labels) == {0, 1} and 0.4 < labels[1] / labels.total() < 0.6
    splits = tokenization.split_documents(read_documents(written / "documents.jsonl"), TokenizeArguments())
    for name, split in dataset.items():
        assert len(split) == corpus["instances"][name] > 0
        assert sum(map(len, split["input_ids"])) == corpus["tokens"][name]
        rows = []
        for row in split:
            ids, cut = row["input_ids"], row["input_ids"].index(3)
            assert len(ids) <= 64 and ids[0] == 2 and ids[-1] == 3 and ids.count(3) == 2
            assert row["token_type_ids"] == [int(place > cut) for place in range(len(ids))]
            assert row["special_tokens_mask"] == [int(token < 5) for token in ids]
            segments = ids[1:cut], ids[cut + 1 : -1]
            rows.append(sum(segments[::-1] if row["sentence_order_label"] else segments, []))
        # the rows have all text, and each document ends with one
        texts = [sum(tokenizer(d, add_special_tokens=False)["input_ids"], []) for d in splits[name]]
        assert sum(rows, []) == sum(texts, [])
        assert {*itertools.accumulate(map(len, texts))} <= {*itertools.accumulate(map(len, rows))}
    counts = Counter(token for ids in dataset["validation"]["input_ids"] for token in ids if token >= 5)
    shares = [count / counts.total() for count in counts.values()]
    assert corpus["unigram_entropy"] == pytest.approx(-sum(share * math.log(share) for share in shares))
    assert sorted(path.name for path in written.iterdir()) == ["dataset", "documents.jsonl", "tokenizer"]


def test_tokenize_is_independent_of_chunks(written, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenization, "CHUNK_CHARACTERS", 10_000)
    flags = ("--text_files", written / "documents.jsonl", "--tokenizer", written / "tokenizer", "--seq_length", 64)
    paths = ("--dataset_path", tmp_path / "dataset", "--tokenizer_path", tmp_path / "tokenizer")
    run_main(tokenize_wikitext103, *flags, *paths, "--num_proc", 2)
    assert read_files(tmp_path / "dataset") == read_files(written / "dataset")


def test_missing_tokenizer_names_command(tmp_path, written, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    tokenizer, script = load_tokenizer(written / "tokenizer"), "python tokenize_wikitext103.py"
    for wrong in ("data/tokeniser", "./tokenizer", "/no/such/folder"):
        with expect_user_error(f"no tokenizer in {wrong}, which is not a folder: make one with {script}"):
            load_tokenizer(wrong)
    for load in (
        lambda: load_tokenizer(tmp_path),
        lambda: load_tokenized_dataset(tmp_path / "none", tokenizer),
        lambda: load_tokenized_dataset(tmp_path, tokenizer),
    ):
        with expect_user_error(script):
            load()
    with expect_user_error("--objective clm --dataset_path"):
        load_tokenized_dataset(tmp_path / "none", tokenizer, TEXT)
    with expect_user_error(f"{script} --objective clm"):
        load_tokenizer("./none", TEXT)
    # this may also be a name on the Hub
    monkeypatch.setattr("common.hub.is_reachable", lambda _: False)
    with expect_user_error("cannot load the tokenizer tokeniser, which is not a folder here, from the "):
        load_tokenizer("tokeniser")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"a":' + 100_000 * "[" + 100_000 * "]" + "}")
    with expect_user_error("holds no readable tokenizer"):
        load_tokenizer(tmp_path)


def test_tokenizer_code_is_not_run(tmp_path, written, monkeypatch):
    """transformers would ask, and run the code after `y`."""
    monkeypatch.setattr("builtins.input", lambda question: "y")
    folder = shutil.copytree(written / "tokenizer", tmp_path / "tokenizer")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'it_ran')!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for load in (load_tokenizer, lambda path: load_folder(path, f"--checkpoint {path}", "give another")):
        with pytest.raises(UserError, match=r"^[^\n]*custom code[^\n]*not run[^\n]*$"):
            load(folder)
        # also next to a model with custom code
        (folder / "config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}')
    assert not (tmp_path / "it_ran").exists()


def test_fingerprint_differs_between_tokenizers(tmp_path):
    vocabulary = [(token, 0.0) for token in SPECIAL] + [(f"▁{c}", -3.0) for c in "abcdeABCDEMRmr"] + [("▁déjà", -3.0)]
    variants = [AlbertTokenizer(vocab=vocabulary), AlbertTokenizer(vocab=vocabulary[:-1])]
    variants += [AlbertTokenizer(vocab=vocabulary, **it) for it in (dict(do_lower_case=False), dict(keep_accents=True))]
    fingerprints = [tokenizer_fingerprint(variant) for variant in variants]
    assert len(set(fingerprints)) == len(variants)
    for number, variant in enumerate(variants):
        variant.save_pretrained(tmp_path / str(number))
        assert tokenizer_fingerprint(load_tokenizer(tmp_path / str(number))) == fingerprints[number]


@pytest.mark.parametrize("cased, keep_accents", [(False, False), (True, True), (False, True)])
def test_saved_dataset_round_trips(tmp_path, novel, cased, keep_accents):
    lines = [line for line in novel if line.strip()][:1300]
    lines += [f"{line} — {RUSSIAN} ``Été'' naïve １２３ {number}" for number, line in enumerate(lines[:200])]
    trained = train_tokenizer([lines], TokenizeArguments(vocab_size=800, cased=cased, keep_accents=keep_accents))
    trained.save_pretrained(tmp_path / "once")
    loaded = load_tokenizer(tmp_path / "once")
    loaded.save_pretrained(tmp_path / "twice")
    before = [encoding.ids for encoding in trained.backend_tokenizer.encode_batch(lines)]
    for again in (loaded, load_tokenizer(tmp_path / "twice"), AlbertTokenizer.from_pretrained(tmp_path / "twice")):
        assert again(lines, verbose=False)["input_ids"] == before
    assert loaded("one", "two")["token_type_ids"][-1] == 1
    assert (loaded("йод")["input_ids"] == loaded("иод")["input_ids"]) != keep_accents
    assert (loaded("Emma")["input_ids"] == loaded("emma")["input_ids"]) != cased
    assert loaded("naive")["input_ids"].count(loaded.unk_token_id) == 0


def test_few_long_documents_give_twentieth():
    """Of three files, the smallest one would be a quarter of the text."""
    texts = [[f"{name} {number}." for number in range(count)] for name, count in (("a", 30), ("b", 40), ("c", 30))]
    splits = tokenization.split_documents(texts, TokenizeArguments(objective="mlm"))
    assert splits == {"train": [texts[0], texts[1][:35], texts[2]], "validation": [texts[1][35:]]}


@pytest.mark.parametrize("is_wikitext", [False, True])
def test_text_files_in_folder_are_documents(tmp_path, is_wikitext):
    """datasets would make a document of each line."""
    content = " = One = \n\n First . \n\n = Two = \n\n Second . \n" if is_wikitext else "One.\nTwo.\n\nThree."
    (folder := tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text(content)
    _, splits = load_hub_splits([str(folder)], "text", tmp_path / "cache", "", TEXT)
    expected = [["One", "First ."], ["Two", "Second ."]] if is_wikitext else [["One.", "Two.", "", "Three."]]
    assert splits["train"] == expected * 2


def test_single_document_with_special_tokens(written, tmp_path):
    """Its end becomes the validation split, and special tokens in it stay text."""
    (tmp_path / "a.txt").write_text("He wrote [SEP] and [MASK] here. Then [CLS] and nothing.\n\n" * 80)
    result = tokenize(tmp_path, "--text_files", "a.txt", "--tokenizer", written / "tokenizer", "--seq_length", 64)
    assert "the last 4 of 80 parts of the longest document" in result.stdout
    dataset, _ = load_tokenized_dataset(tmp_path / "dataset", load_tokenizer(tmp_path / "tokenizer"))
    assert 0 < len(dataset["validation"]) < 0.2 * len(dataset["train"])
    for split in dataset.values():
        for ids in split["input_ids"]:
            assert (ids.count(2), ids.count(3), ids.count(4)) == (1, 2, 0)


@pytest.fixture(scope="module", params=["mlm", "clm"])
def blocks(request, tmp_path_factory, written):
    """As `written`, in full blocks: (objective, folder, flags)."""
    folder = tmp_path_factory.mktemp(request.param)
    flags = ["--objective", request.param, "--text_files", written / "documents.jsonl", "--seq_length", 64]
    flags += ["--train_tokenizer", "--vocab_size", 500]
    next_command, has_config = tokenize(folder, *flags).stdout.splitlines()[-1], request.param == "clm"
    assert next_command.endswith(" --config_path configs/gpt2-124m.json") == has_config  # the default one is ALBERT
    return request.param, folder, flags


def test_blocks_drop_only_last_incomplete(blocks, written):
    objective, folder, _ = blocks
    tokenizer = load_tokenizer(folder / "tokenizer", KINDS[objective])
    dataset, corpus = load_tokenized_dataset(folder / "dataset", tokenizer, KINDS[objective])
    assert corpus["objective"] == objective and corpus["documents"] == {"train": 38, "validation": 2}
    joint, end = ("\n", tokenizer.eos_token_id) if objective == "clm" else (" ", tokenizer.sep_token_id)
    read = read_documents(written / "documents.jsonl", kind=KINDS[objective])
    for name, documents in tokenization.split_documents(read, TokenizeArguments(objective=objective)).items():
        split, texts = dataset[name], [joint.join(paragraphs) for paragraphs in documents]
        tokens = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
        if objective == "clm":
            assert tokenizer.pad_token_id == end and [tokenizer.decode(ids) for ids in tokens] == texts
        rows = split["input_ids"]
        assert {len(row) for row in rows} == {64} and set(split.column_names) == set(KINDS[objective].columns)
        if objective == "mlm":
            assert all(row[0] == tokenizer.cls_token_id and row[-1] == tokenizer.sep_token_id for row in rows)
            assert all(row["special_tokens_mask"] == [int(token < 5) for token in row["input_ids"]] for row in split)
        ids = sum((list(row[1:-1] if objective == "mlm" else row) for row in rows), [])
        expected = sum(([*text, end] for text in tokens), [])
        assert ids == expected[: len(ids)] and len(expected) - len(ids) < 64, "more than a block was lost"


TWICE = """
import json, sys
import tokenize_wikitext103
for words in json.loads(sys.argv[1]):
    sys.argv = ["tokenize_wikitext103.py", *words]
    tokenize_wikitext103.main()
"""


# mlm shares its tokenizer with pairs, and its blocks with clm
@pytest.mark.parametrize("blocks", ["clm"], indirect=True)
def test_tokenize_is_deterministic_across_processes(blocks, written, tmp_path):
    """The training of a tokenizer iterates over hash tables, whose order differs between runs."""
    _, folder, flags = blocks
    commands = []
    for name, own in (("blocks", flags), ("pairs", flags[2:])):
        paths = ["--dataset_path", tmp_path / name / "dataset", "--tokenizer_path", tmp_path / name / "tokenizer"]
        commands.append([str(word) for word in [*own, *paths, "--num_proc", 2]])
    run_python("-c", TWICE, json.dumps(commands), cwd=ROOT, expect=0, env={"PYTHONHASHSEED": "1"})
    for name, expected in (("blocks", folder), ("pairs", written)):
        for part in ("dataset", "tokenizer"):
            assert read_files(tmp_path / name / part) == read_files(expected / part)


def test_dataset_of_other_objective_is_refused(blocks, written, tmp_path):
    objective, folder, _ = blocks
    tokenizer = load_tokenizer(folder / "tokenizer", KINDS[objective])
    with expect_user_error("tokenize again with --objective mlm_sop"):
        load_tokenized_dataset(folder / "dataset", tokenizer, PAIRS)
    with expect_user_error("another tokenizer"):
        load_tokenized_dataset(folder / "dataset", AlbertTokenizer(vocab=[(piece, 0.0) for piece in SPECIAL]))
    if objective == "mlm":
        pairs, _ = load_tokenized_dataset(written / "dataset", load_tokenizer(written / "tokenizer"), BLOCKS)
        assert set(pairs["train"].column_names) == set(PAIRS.columns) - {"sentence_order_label"}
        tokenizer = load_tokenizer(folder / "tokenizer", TEXT)  # [SEP] may end a text
        assert tokenizer.eos_token == "[SEP]" and tokenizer.pad_token == "<pad>"
    else:
        flags = ("--objective", "mlm", "--corpus", "sample", "--tokenizer", folder / "tokenizer")
        flags += ("--dataset_path", tmp_path / "dataset", "--tokenizer_path", tmp_path / "tokenizer")
        assert "no cls token" in refuse(tokenize_wikitext103, *flags)


def test_clm_documents_begin_as_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr("text.documents.PART_CHARACTERS", 8)  # the longer document is encoded in parts
    make_llama_tokenizer().save_pretrained(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer", TEXT)
    splits = {"train": [["w1 w2 w3", "w4 w5 w6", "w7"], ["w8"]], "validation": [["w9"]]}
    args = TokenizeArguments(objective="clm", seq_length=13, num_proc=1)
    tokenization.make_dataset("", splits, tokenizer, tmp_path / "dataset", args)
    [row] = load_tokenized_dataset(tmp_path / "dataset", tokenizer)[0]["train"]["input_ids"]
    expected = [[*tokenizer("\n".join(document))["input_ids"], 2] for document in splits["train"]]
    assert list(row) == sum(expected, []) and [ids[0] for ids in expected] == [1, 1]
    # versions that left the token out
    corpus = json.loads((tmp_path / "dataset" / "corpus.json").read_text())
    assert corpus.pop("begin_token") == [1]
    (tmp_path / "dataset" / "corpus.json").write_text(json.dumps(corpus))
    with expect_user_error(f"again with --objective clm --tokenizer {tmp_path / 'tokenizer'}"):
        load_tokenized_dataset(tmp_path / "dataset", tokenizer)


@pytest.fixture
def no_hub(monkeypatch):
    """The Hub does not answer."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


def test_trainer_reuses_tokenized_text(written, tmp_path):
    shape = {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
    (tmp_path / "bert.json").write_text(json.dumps(shape))
    model = ModelArguments(str(tmp_path / "bert.json"), tokenizer_path=str(written / "tokenizer"))
    (tmp_path / "text").mkdir()
    file = shutil.copy(written / "documents.jsonl", tmp_path / "text" / "train.jsonl")

    def load(number: int = 1, **changes):
        options = {"train_file": str(file), "max_sequence_length": 48} | changes
        args = DataArguments(dataset_cache_dir=str(tmp_path / f"cache{number}"), **options)
        return data.load_data(model, args, needs_validation=True)[1:]

    def list_times() -> list[int]:
        return [path.stat().st_mtime_ns for path in (tmp_path / "cache1").glob("text-*/corpus.json")]

    splits, corpus = load()
    assert corpus["objective"] == "mlm" and corpus["seq_length"] == 48
    assert corpus["documents"] == {"train": 38, "validation": 2}
    times = list_times()
    others = [load()[0], load(2)[0], load(3, train_file=None, dataset_name=str(tmp_path / "text"))[0]]
    for lock in (tmp_path / "cache1").glob("*.lock"):  # as in a shared cache, whose locks this user cannot open
        lock.unlink()
        lock.mkdir()
    others.append(load()[0])
    lock.rmdir()
    assert list_times() == times and len(times) == 1
    for name in splits:
        assert all(splits[name]["input_ids"] == other[name]["input_ids"] for other in others)
    # a text of its own for validation; other text, other length, other folders
    (tmp_path / "other.txt").write_text("One sentence here.\n\nAnother one there.\n" * 50)
    apart, corpus = load(validation_file=str(tmp_path / "other.txt"))
    assert corpus["documents"] == {"train": 40, "validation": 1} and len(apart["train"]) > len(splits["train"])
    load(max_sequence_length=32)
    load(language="russian")
    file.write_text(file.read_text() + "\n" + json.dumps({"text": "One more. And more."}))
    load()
    assert len(list_times()) == 5


@pytest.mark.parametrize(
    "options, words",
    [
        ({"train_file": "none.txt"}, ["no file none.txt"]),
        ({"train_file": "empty.txt"}, ["no text", "empty.txt"]),
        ({"dataset_name": "."}, ["the dataset . cannot be read"]),
        ({"dataset_name": "cut"}, ["the dataset cut cannot be read (", "JSON"]),
        ({"dataset_name": "columns"}, ["the dataset columns cannot be read (", "column"]),
        ({"dataset_name": "empty"}, ["the dataset empty cannot be read ("]),
        ({"dataset_name": "scripted"}, ["the dataset scripted cannot be read (", "scripts are no longer supported"]),
        ({"dataset_name": "texts", "text_column": "body"}, ["there is text", "--text_column"]),
        ({"dataset_name": "texts", "language": "klingon"}, ["no language klingon", "russian"]),
        ({"dataset_name": "org/none"}, ["org/none", "--train_file"]),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else None,
)
def test_missing_text_is_one_line(written, tmp_path, monkeypatch, no_hub, options, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.jsonl").write_text('{"text": "A b."}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "train.jsonl").touch()
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").touch()
    for name, line in (("cut", '{"text": "C'), ("columns", '{"text": "C d.", "id": 1}')):
        shutil.copytree(tmp_path / "texts", tmp_path / name)
        (tmp_path / name / "train_2.jsonl").write_text(line)
    model = ModelArguments(str(ROOT / "configs" / "demo.json"), tokenizer_path=str(written / "tokenizer"))
    with expect_user_error(*words):
        data.load_data(model, DataArguments(dataset_cache_dir=str(tmp_path / "cache"), **options), True)


ALPHABET = ("".join(map(chr, range(0x4E00, 0x4E80))) + ".\n\nOne. Two.").encode()
FAULTS = {
    "missing": (b"", ["--text_files", "none.txt"], "no file none.txt"),
    "empty": (b" \n\n", ["--text_files", "input.txt"], "no text in input.txt"),
    "encoding": (b"caf\xe9", ["--text_files", "input.txt"], "not UTF-8"),
    "UTF-16": ("Emma slept. She rose.".encode("utf-16-le"), ["--text_files", "input.txt"], "convert it from UTF-16"),
    "tar": (b"a.txt" + bytes(507) + b"Emma slept.", ["--text_files", "input.tar"], "has NUL bytes: unpack it"),
    "gzip": (b"no gzip", ["--text_files", "input.gz"], "damaged or not a .gz"),
    "xz": (b"\xfd7zXZ\x00\x00", ["--text_files", "input.xz"], "damaged or not a .xz"),
    "zstd": (b"", ["--text_files", "input.zst"], ".zst is not supported: unpack or convert it to .jsonl, or name "),
    "folder": (b"", ["--text_files", "."], "is a folder"),
    "no JSON": (b"plain\n", ["--text_files", "input.jsonl"], "line 1 is not JSON"),
    "deep JSON": (b'{"a": ' + 100_000 * b"[", ["--text_files", "input.jsonl"], "line 1 is not JSON"),
    "field": (b'{"body": "x"}\n', ["--text_files", "input.jsonl"], "--text_column"),
    "no text": (b'{"text": 3}\n', ["--text_files", "input.jsonl"], "--text_column"),
    "one sentence": (b"Hello.", ["--text_files", "input.txt"], "give more"),
    "chats": (b"", ["--objective", "sft", "--text_files", "input.jsonl"], "makes no chat template"),
    "flag": (b"", ["--nonsense"], "unknown argument --nonsense"),
    "exists": (b"", ["--corpus", "sample", "--dataset_path", "input.txt"], "already exists"),
    "nested": (b"", ["--dataset_path", "x/y", "--tokenizer_path", "x"], "neither inside the other"),
    "place": (b"A b.\n\nC d.", ["--text_files", "input.txt", "--dataset_path", "input.txt/x"], "cannot write"),
    "no tokenizer": (b"A b. C d.", ["--text_files", "input.txt", "--tokenizer", "."], "no readable tokenizer"),
    "language": (b"", ["--language", "klingon"], "choose one of"),
    "vocabulary": (ALPHABET, ["--text_files", "input.txt", "--vocab_size", "100"], "--vocab_size 100: the text has "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_tokenize_errors_leave_nothing(tmp_path, monkeypatch, fault):
    monkeypatch.chdir(tmp_path)
    content, flags, expected = FAULTS[fault]
    suffix = next((Path(flag).suffix for flag in flags if flag.startswith("input")), ".txt")
    (tmp_path / f"input{suffix}").write_bytes(content)
    paths = ["--dataset_path", "dataset", "--tokenizer_path", "tokenizer"]
    more = [] if "--tokenizer" in flags else ["--train_tokenizer"]
    assert expected in refuse(tokenize_wikitext103, *paths, *more, *flags)
    assert [path.name for path in tmp_path.rglob("*")] == [f"input{suffix}"]


def test_tokenize_without_hub_is_one_line(tmp_path, monkeypatch, no_hub):
    monkeypatch.chdir(tmp_path)
    for flags, cure in (([], "--corpus sample"), (["--corpus", "sample"], "--train_tokenizer")):
        line = refuse(tokenize_wikitext103, *flags, "--cache_dir", tmp_path / "home")
        assert "Hugging Face Hub" in line and cure in line
        assert {path.name for path in tmp_path.iterdir()} <= {"home"}


def test_hub_access_keeps_environment(monkeypatch, no_hub):
    """HF_HUB_OFFLINE=0 would override TRANSFORMERS_OFFLINE."""
    for variable in ("0", None):
        if variable is None:
            monkeypatch.delenv("HF_HUB_OFFLINE")
        with hub("it", "another"):
            assert huggingface_hub.constants.HF_HUB_OFFLINE
            assert os.environ.get("HF_HUB_OFFLINE") == variable
        assert os.environ.get("HF_HUB_OFFLINE") == variable and not huggingface_hub.constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_tokenize_interrupt_leaves_nothing(start, written, tmp_path, number, code):
    flags = ["--corpus", "sample", "--tokenizer", written / "tokenizer", "--num_proc", 2]
    flags += ["--dataset_path", "deep/er/dataset", "--tokenizer_path", "deep/tokenizer"]
    (folder := tmp_path / "work").mkdir()
    script = start("script", SCRIPT, *flags, cwd=folder)
    script.wait_for("tokenizing")  # the progress bar: work has begun
    os.killpg(script.session, number)
    script.assert_clean_end(code=code)
    assert list(folder.iterdir()) == []


INTERRUPTED_PACKING = """
import runpy, signal, sys, threading
import text.fetch

def pack(*_):
    signal.raise_signal(signal.SIGINT)
    threading.Event().wait()

text.fetch.pack = pack
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_tokenize_interrupted_packing_keeps_dataset(written, tmp_path):
    flags = ["--text_files", written / "documents.jsonl", "--tokenizer", written / "tokenizer", "--seq_length", 64]
    flags += ["--dataset_path", tmp_path / "dataset", "--tokenizer_path", tmp_path / "tokenizer"]
    words = [SCRIPT, *flags, "--archive", tmp_path / "data.tar"]
    result = run_python("-c", INTERRUPTED_PACKING, *words, cwd=ROOT, expect=130)
    expected = "interrupted: each of dataset, tokenizer and archive is complete or does not exist"
    assert result.stderr.splitlines()[-1] == expected
    assert read_files(tmp_path / "dataset") == read_files(written / "dataset")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset", "tokenizer"]


def test_tokenize_worker_errors_reach_parent(written, monkeypatch):
    """An error of the user is one line; a bug has a traceback."""

    def fail(*_):
        raise RuntimeError("a bug")

    splits, tokenizer = {"train": [["One sentence."]]}, load_tokenizer(written / "tokenizer")
    with expect_user_error("no language klingon: choose one of "):
        tokenization.tokenize_splits(splits, tokenizer, TokenizeArguments(language="klingon", num_proc=2))
    monkeypatch.setattr(tokenization, "make_instances", fail)
    with pytest.raises(RuntimeError, match="(?s)Original Traceback.*a bug"):
        tokenization.tokenize_splits(splits, tokenizer, TokenizeArguments(num_proc=2))
