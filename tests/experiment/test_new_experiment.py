"""docs/new_experiment.md: each recipe, applied to a fresh copy that then trains; `experiment.show`; and chat tuning
(--objective sft): labels, packing, bad input, and swarms that run the guide's command."""

import ast
import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path
from statistics import mean

import pytest
import torch
import transformers
from mains import expect_user_error, refuse, run_main
from processes import LOOPBACK, ROOT, make_prefix, run_python, wait_until
from swarms import SHARED, TRAINER, choose_trainer, flags, history, run_card, stop

import tokenize_wikitext103
from arguments import AveragingArguments, DataArguments, ModelArguments, OptimizerArguments
from experiment.data import load_data, make_eval_batches
from experiment.model import make_model
from experiment.objectives import compute_losses
from experiment.optimizer import make_contract, make_local_optimizer, make_param_groups, make_scheduler
from experiment.samples import sample_texts
from text.collators import DataCollatorForCausalLM
from text.documents import encode_conversations, pack_conversations, read_documents
from text.instances import CHAT
from text.stored import load_tokenized_dataset
from text.tokenizers import load_tokenizer
from training.checkpoint import find_checkpoints
from training.evaluation import evaluate
from training.model import move_batch

GUIDE = (ROOT / "docs" / "new_experiment.md").read_text()
ROOMS = ["experiment", "training", "models", "common", "swarm", "text"]
RECIPES = {diff[1]: diff[2] for diff in re.finditer(r"```diff\n--- (\S+)\n(.*?)```", GUIDE, re.DOTALL)}


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the files of an experiment."""
    for name in [*ROOMS, "configs"]:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("arguments.py", "utils.py", "tokenize_wikitext103.py"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def apply_recipe(copy: Path, name: str) -> None:
    """Apply each part of the diff to its file; there is one diff for each file, and no other."""
    assert GUIDE.count("```diff") == len(RECIPES) == 3
    text = (copy / name).read_text()
    parts = [part.splitlines() for part in RECIPES[name].split("@@\n") if part]
    assert sum(line[:1] in ("+", "-") for part in parts for line in part) <= 30
    for part in parts:
        before, after = ("\n".join(line[1:] for line in part if line[:1] in kept) + "\n" for kept in (" -", " +"))
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (copy / name).write_text(text)


def run(copy: Path, program: str, *words: object, **options) -> dict:
    """Run a program in the copy, and return its output."""
    result = run_python(ROOT / "tests" / "programs" / program, *words, cwd=copy, timeout=180, expect=0, **options)
    return json.loads(result.stdout.splitlines()[-1])


STEPS = ("--optim", "adamw", "--learning_rate", "3e-3", "--warmup_steps", "0")


def test_recipe_custom_head_trains_and_opens(copy, tiny_data):
    apply_recipe(copy, "experiment/model.py")
    (copy / "bert-4.json").write_text(re.search(r"```json\n(.*?)```", GUIDE, re.DOTALL)[1])
    model, lines = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (copy / "experiment" / "wide_bert.py").write_text(model)
    words = [*STEPS, "--config_path", "bert-4.json", *sum(tiny_data.items(), ())]
    facts = run(copy, "few_steps.py", *words)
    assert (facts["model"], facts["objective"], facts["layers"]) == ("BertWithWideHead", "mlm", 4)
    assert mean(facts["losses"][-5:]) < mean(facts["losses"][:5]) - 0.2

    # in another folder, without our code: by the guide's lines and by those of the saved folder
    shutil.copytree(copy / "outputs", copy / "elsewhere" / "outputs")
    card = re.search(r"```python\n(.*?)```", (copy / "outputs/trainer/model/README.md").read_text(), re.DOTALL)[1]
    options = dict(cwd=copy / "elsewhere", timeout=180, env={"HF_HOME": str(copy / "cache")})
    result = run_python("-c", f"{lines}\n{card}", expect=0, is_real=True, **options)
    answer, (best, *_) = map(ast.literal_eval, result.stdout.splitlines())
    assert answer == best and answer["token_str"] == facts["answer"]
    assert answer["score"] == pytest.approx(facts["score"], rel=1e-4) and answer["score"] > 5 / 500
    assert "MISSING" not in result.stderr and "UNEXPECTED" not in result.stderr
    assert facts["frequency"] > len(facts["texts"]) / 4


def test_custom_objective_reuses_a_kind(copy, tiny_data):
    """CONTRIBUTING.md describes the steps: an entry, and its name in the flag's type."""
    for name, before, more in (
        ("arguments.py", 'OBJECTIVES = Literal["mlm", ', '"mine", '),
        ("experiment/objectives.py", '    "mlm": ', '"mine": Objective("mine", BLOCKS, find_masked_class, "words"), '),
    ):
        text, place = (copy / name).read_text(), before.index('"mlm"')
        assert text.count(before) == 1
        (copy / name).write_text(text.replace(before, before[:place] + more + before[place:]))
    (copy / "a.txt").write_text("A first line of text.\n\nAnd one more of the lines here.\n\n" * 100)
    (copy / "bert.json").write_text(re.search(r"```json\n(.*?)```", GUIDE, re.DOTALL)[1])
    words = [*STEPS, "--config_path", "bert.json", "--objective", "mine", "--train_file", "a.txt"]
    words += ["--max_sequence_length", 32, "--dataset_cache_dir", "cache"]
    facts = run(copy, "few_steps.py", *words, "--tokenizer_path", tiny_data["--tokenizer_path"])
    assert facts["objective"] == "mine" and mean(facts["losses"][-5:]) < mean(facts["losses"][:5])


def test_recipe_json_lines_trains(copy, tiny_data):
    apply_recipe(copy, "experiment/data.py")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    talks = [[f"I say {one} and then {two}.", f"You say {two}, not {one}."] for one in words for two in words]
    lines = [{"turns": [{"speaker": n, "text": text} for n, text in enumerate(talk)]} for talk in talks]
    (copy / "talks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    # the guide's flags, because the model takes no longer sequences
    where = re.search(r"`(--train_file talks.jsonl .*?)` names", GUIDE)[1].split() + ["--dataset_cache_dir", "cache"]
    tokenizer = ["--tokenizer_path", tiny_data["--tokenizer_path"]]
    facts = run(copy, "few_steps.py", *STEPS, "--config_path", "configs/demo.json", *where, *tokenizer)
    # 5 of 100 conversations are for validation; each of the others is one pair of turns
    assert (facts["source"], facts["instances"]) == ("talks.jsonl", 95)
    turns = {turn.lower() for talk in talks for turn in talk}
    seen = re.findall(r"(?:i|you) say .*?\.", " ".join(facts["texts"]).replace(" ,", ",").replace(" .", "."))
    assert len(seen) == 2 * len(facts["texts"]) and set(seen) <= turns
    assert mean(facts["losses"][-5:]) < mean(facts["losses"][:5]) - 0.2


MUON = "muon, beta 0.9 0.999, epsilon 1e-06, decay 0.5, clip 1"


@pytest.mark.parametrize(
    "optim, rate, terms, kinds",
    [
        ("adamw", 0.1, "sgd, momentum 0.9, decay 0.5, clip 1", {"momentum_buffer": 32}),  # by the recipe
        pytest.param("muon", 0.01, MUON, {"momentum_buffer": 10, "exp_avg": 22}, marks=pytest.mark.slow),
    ],
)
def test_recipe_optimizer_trains_and_transfers(copy, optim, rate, terms, kinds):
    """The moments start at zero, without weight decay, and a joining peer loads all of them."""
    apply_recipe(copy, "experiment/optimizer.py")
    facts = run(copy, "shared_momentum.py", make_prefix(), optim, rate)
    assert facts["contract"] == terms and facts["kinds"] == kinds
    assert not any(facts["before"]) and facts["losses"][-1] < facts["losses"][0]
    assert facts["loaded"] and facts["epochs"] == [4, 4]
    assert sum(size > 1e-3 for size in facts["sizes"]) > len(facts["sizes"]) / 2
    assert facts["same_state"] and all(facts["same_weights"])


@pytest.mark.parametrize("objective", ["mlm", "clm"])
def test_show_prints_each_batch_kind(tmp_path, tiny_data, objective):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert" if objective == "mlm" else "gpt2"}))
    (tmp_path / "a.txt").write_text("A first line of text.\n\nAnd one more of the lines here.\n\n" * 100)
    words = ["-m", "experiment.show", "--config_path", tmp_path / "config.json", "--max_sequence_length", 32]
    words += ["--train_file", tmp_path / "a.txt", "--dataset_cache_dir", tmp_path]
    run = run_python(*words, "--tokenizer_path", tiny_data["--tokenizer_path"], expect=0)
    assert f"objective {objective}" in run.stdout and "more of the lines" in run.stdout.replace("\n   ", "")
    assert ("⟦" in run.stdout) == (objective == "mlm") and "swapped" not in run.stdout
    rows = re.findall(r"row \d of 4: (\d+) tokens, \d+ of padding, (\d+) to be predicted\n((?: {4}.*\n)+)", run.stdout)
    assert len(rows) == 6 and all(int(length) <= 32 for length, *_ in rows)
    assert objective == "clm" or all(row.count("⟦") == int(count) for _, count, row in rows)


TEMPLATE = re.search(r"```jinja\n(.*?)```", GUIDE, re.DOTALL)[1]
CHAT_GUIDE = GUIDE.split("## Chat tuning")[1]
COMMAND = shlex.split(re.search(r"python run_trainer.py (.*?)\n\n", CHAT_GUIDE, re.DOTALL)[1].replace("\\\n", ""))
ANSWERS = ["Emma was handsome.", "She was clever, and rich.", "With a happy home.", "Twenty-one years."]
CPU, RATE = torch.device("cpu"), 5e-3  # above the guide's rate, for visible steps


def make_chat(*turns: str) -> dict:
    """A conversation in which user and assistant take turns."""
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]}


CHATS = [make_chat(f"Question {n}?", ANSWERS[n % 4], "And then?", ANSWERS[(n + 1) % 4]) for n in range(5)]
CHATS += [make_chat(f"{n}: who was she?", ANSWERS[n % 4]) for n in range(15)]


@pytest.fixture
def files(tmp_path, text_data, monkeypatch):
    """The files that the guide's command names, in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(text_data["--tokenizer_path"], "chat_tokenizer")
    (tmp_path / "chat_tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    write_chats("chats.jsonl", CHATS)
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    (tmp_path / "llama.json").write_text(json.dumps(shape | {"model_type": "llama", "max_position_embeddings": 512}))
    model = make_model(ModelArguments("llama.json"), load_tokenizer("chat_tokenizer", CHAT))
    model.save_pretrained("gpt2")  # a model in a folder of this name
    return tmp_path


def write_chats(path: str, chats: list) -> None:
    Path(path).write_text("".join(json.dumps(chat) + "\n" for chat in chats))


ARGS = ModelArguments(model_name_or_path="gpt2", tokenizer_path="chat_tokenizer", objective="sft")


def load(**changes) -> tuple:
    """Load the data of the guide's command."""
    options = dict(train_file="chats.jsonl", max_sequence_length=128, dataset_cache_dir="cache") | changes
    return load_data(ARGS, DataArguments(**options), needs_validation=True)


def test_only_assistant_tokens_have_labels(files, capsys):
    write_chats("chats.jsonl", [*CHATS, make_chat("Nobody answers."), make_chat("A long question. " * 50, "Yes.")])
    write_chats("validation.jsonl", CHATS[:2])
    tokenizer, splits, corpus = load(validation_file="validation.jsonl")
    output = capsys.readouterr().out
    assert "train: dropped 2 conversations without an assistant's turn in their first 128 tokens" in output
    assert corpus["documents"]["train"] == 22 and 0 < corpus["unigram_entropy"] < 5
    texts, answers = [], []
    for row in splits["train"]:
        assert len(row["input_ids"]) <= 128
        begins = [place for place, position in enumerate(row["position_ids"]) if position == 0]
        for begin, end in zip(begins, [*begins[1:], None], strict=True):
            texts.append(tokenizer.decode(row["input_ids"][begin:end]))
            answers.append(tokenizer.decode([label for label in row["labels"][begin:end] if label != -100]))
    assert texts == [tokenizer.apply_chat_template(chat["messages"], tokenize=False) for chat in CHATS]
    said = [[turn["content"] for turn in chat["messages"] if turn["role"] == "assistant"] for chat in CHATS]
    assert answers == ["".join(f"{text}<|endoftext|>" for text in turns) for turns in said]
    assert len(splits["train"]) < len(CHATS)
    [batch, *_] = make_eval_batches(splits["validation"], tokenizer, DataArguments(), batch_size=8)
    assert (batch["labels"] == batch["input_ids"])[batch["labels"] != -100].all()


def test_packed_conversations_match_conversations_alone(files):
    tokenizer = load_tokenizer("chat_tokenizer", CHAT)
    model = make_model(ARGS, tokenizer)
    collator, documents = DataCollatorForCausalLM(tokenizer), read_documents("chats.jsonl", kind=CHAT)

    def measure(groups: list) -> dict:
        packed = [pack_conversations(*encode_conversations(group, tokenizer), 128)[:2] for group in groups]
        return evaluate(model, [collator.collate(*rows, None, 128) for rows in packed], CPU, tokenizer)

    together, alone = measure([documents]), measure([[document] for document in documents])
    assert together.pop("samples") < alone.pop("samples") == len(CHATS)
    assert together == pytest.approx(alone, rel=1e-5)
    assert sample_texts(model, tokenizer)[0].startswith("<user> The captain was <assistant>")


def test_conversations_of_folder_and_archive(files):
    (files / "chats").mkdir()
    shutil.copy("chats.jsonl", "chats/train.jsonl")
    expected = load()[1]["train"]["input_ids"]
    assert load(train_file=None, dataset_name="chats")[1]["train"]["input_ids"] == expected
    words = ["--objective", "sft", "--text_files", "chats.jsonl", "--tokenizer", "chat_tokenizer", "--seq_length", 128]
    run_main(tokenize_wikitext103, *words, "--tokenizer_path", "copy", "--dataset_path", "data")
    splits, _ = load_tokenized_dataset("data", load_tokenizer("copy", CHAT), CHAT)
    assert splits["train"]["input_ids"] == expected
    assert "give --text_files" in refuse(tokenize_wikitext103, "--objective", "sft", "--corpus", "sample")


def test_chat_template_is_in_contract_and_cache(files):
    contracts = []
    for template in (TEMPLATE, TEMPLATE.replace("message.role }}>", "message.role }}:")):
        (files / "chat_tokenizer" / "chat_template.jinja").write_text(template)
        model = make_model(ARGS, load()[0])
        contracts.append(make_contract(model, "a", OptimizerArguments(), AveragingArguments()).contract)
    assert {name for name in contracts[0] if contracts[0][name] != contracts[1][name]} == {"chat template"}
    assert len(list((files / "cache").glob("text-*/corpus.json"))) == 2


BAD = {
    "no template": (None, CHATS, {}, "has no chat template: write chat_template.jinja in its folder"),
    "no marks": (re.sub("{% (end)?generation %}", "", TEMPLATE), CHATS, {}, "without {% generation %} marks: write"),
    "strict": ("{{ raise_exception('no') }}{% generation %}{% endgeneration %}", CHATS, {}, "rejects a conversation"),
    "no answer": (TEMPLATE, [make_chat("Hello?")] * 30, {}, "all conversations of the train split are without"),
    "one": (TEMPLATE, CHATS[:1], {}, "there is a single conversation"),
    "text": (TEMPLATE, [{"text": "Hello."}], {}, "chats.jsonl, line 1 has no list of messages: see docs/data.md"),
    "parts": (TEMPLATE, [{"messages": [{"role": "user", "content": []}]}], {}, "whose role or content is not text"),
    "no lines": (TEMPLATE, CHATS, {"train_file": "chats.txt"}, "needs JSON lines"),
    "stream": (TEMPLATE, CHATS, {"train_file": None, "streaming": True}, "--streaming reads no conversations"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_conversations_are_one_line(files, name):
    template, chats, options, words = BAD[name]
    path = files / "chat_tokenizer" / "chat_template.jinja"
    path.unlink() if template is None else path.write_text(template)
    write_chats("chats.jsonl", chats)
    with expect_user_error(words):
        load(**options)


def train_alone(files, rows: int, steps: int, lora_r: int | None) -> list[dict[str, torch.Tensor]]:
    """Return the weights after each step of one process, of which each batch is the whole train split."""
    options = OptimizerArguments(optim="adamw", learning_rate=RATE, warmup_steps=5, total_steps=100)
    tokenizer, splits, _ = load(max_sequence_length=512)
    model = make_model(dataclasses.replace(ARGS, lora_r=lora_r), tokenizer)
    optimizer = make_local_optimizer(options, make_param_groups(model))
    scheduler, states = make_scheduler(options, optimizer), []
    [batch] = make_eval_batches(splits["train"], tokenizer, DataArguments(max_sequence_length=512), batch_size=rows)
    for _ in range(steps):
        optimizer.zero_grad()
        compute_losses(model, move_batch(batch, CPU))["loss"].backward()
        optimizer.step()
        scheduler.step()
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return states


def open_weights(folder) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def find_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("lora_r", [None, 4], ids=["weights", "adapters"])
def test_chat_swarm_matches_single_process(start, files, lora_r):
    """Two trainers, one of which restarts, a late trainer, and an auxiliary peer that archives.

    An epoch takes one trainer twelve seconds, so that both compute gradients of the same weights.
    """
    rows, prefix, archive = len(load(max_sequence_length=512)[1]["train"]), make_prefix(), files / "archive"
    words = [str(files / word) if (files / word).exists() else word for word in COMMAND]
    shared = {name: TRAINER[name] for name in SHARED if name != "--config_path"}
    shared |= {"--model_name_or_path": files / "gpt2", "--tokenizer_path": files / "chat_tokenizer"}
    shared |= {"--objective": "sft", "--learning_rate": RATE, "--target_batch_size": 60 * rows}
    shared |= {"--load_state_compression": "none", "--target_group_size": 3} | ({"--lora_r": lora_r} if lora_r else {})
    own = {"--refresh_period": 0.3, "--output_dir": archive, "--store_checkpoints": []}
    own |= {"--experiment_prefix": prefix, "--save_checkpoint_step_interval": 2}
    aux = start("aux", "run_aux_peer.py", *LOOPBACK, *flags(shared, own))
    peers = aux.wait_for(r"--initial_peers (/ip4/\S+)", 60).group(1)

    def begin(name: str, last: int):
        run = {"--experiment_prefix": prefix, "--initial_peers": peers, "--output_dir": files / name}
        run |= {"--per_device_train_batch_size": rows, "--gradient_accumulation_steps": 1, "--max_steps": last}
        run |= {"--dataloader_num_workers": 0, "--dataset_cache_dir": files / "cache", "--do_eval": []}
        return start(name, *choose_trainer(0.2), *words, *LOOPBACK, *flags(shared, run))

    trainers = [begin(name, 4) for name in ("first", "second")]
    for trainer in trainers:
        trainer.assert_clean_end(180)
    alone = train_alone(files, rows, 4, lora_r)
    for name in ("first", "second"):
        assert find_difference(alone[3], open_weights(files / name / "model")) < 1e-5, trainers[0].text[-3000:]
    assert find_difference(alone[3], alone[0]) > 1e-3
    summary = json.loads((files / "first" / "summary.json").read_text())
    assert summary["final_loss"] < summary["start_loss"] - 0.02 and summary["epochs_averaged"] == 4

    before = open_weights(files / "first" / "model")
    begin("first", 4).assert_clean_end(60)  # it has nothing to do
    assert find_difference(before, open_weights(files / "first" / "model")) == 0
    trainers = [begin("first", 7)]
    wait_until(lambda: history(files, "first").get(5), 120, "epoch 5")
    trainers.append(begin("late", 7))
    for trainer in trainers:
        trainer.assert_clean_end(180)
    first, late = (open_weights(files / name / "model") for name in ("first", "late"))
    assert find_difference(first, late) < 1e-5 and min(history(files, "late")) >= 6

    stop(aux)
    folder = find_checkpoints(archive)[-1]
    assert open_weights(folder).keys() == first.keys()
    answer = run_card(folder)
    assert "Who was the captain?" in answer and "'role': 'assistant'" in answer
