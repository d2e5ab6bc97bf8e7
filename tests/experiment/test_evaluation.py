"""Evaluation during training, and the end of a run: the numbers against those computed by hand, and their displays."""

import contextlib
import json
import math
import re
from types import SimpleNamespace

import matplotlib.image
import numpy
import pytest
import torch
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer, get_dht_time
from mains import expect_user_error
from processes import ROOT, make_prefix, wait_until
from records import ask, make_metrics, run_dhts, run_trackers
from rows import make_llama_tokenizer
from swarms import TINY, history, read_epochs, start_monitor, stop
from transformers import AutoModelForPreTraining

from arguments import TRAINER_ARGS, DataArguments, ModelArguments, parse_arguments
from experiment.data import make_eval_batches
from experiment.model import make_model
from experiment.samples import PROMPTS, SENTENCES, sample_texts
from monitoring.curves import draw_learning_curve
from monitoring.history import History
from swarm.local_steps import LocalSteps
from text.documents import read_text
from text.instances import PAIRS, TEXT
from text.stored import load_tokenized_dataset
from text.tokenizers import load_tokenizer, train_byte_tokenizer
from tokenize_wikitext103 import TokenizeArguments
from training.evaluation import Evaluator, count_bytes, evaluate
from training.figures import TrainingSchedule, find_evaluation, perplexity
from training.progress import measure_progress
from utils import LocalMetrics, make_validators

GOOD = {"epoch": 3, "loss": 5.25, "accuracy": 0.125, "samples": 64}


def test_bits_per_byte_is_independent_of_tokenizer():
    """A model that gives each byte of a text a probability of 1/256 has 8 bits per byte by any tokenizer."""
    text, results = read_text(ROOT / "sample_data" / "austen.txt.xz")[:60_000], []
    for size in (300, 1000):
        tokenizer = train_byte_tokenizer([[text]], TokenizeArguments(objective="clm", vocab_size=size))
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
        rows = ids[: len(ids) // 64 * 64].reshape(-1, 64)
        nats = sum(len(tokenizer.decode([token]).encode()) for token in rows.flatten()) * math.log(256)
        results.append(nats / math.log(2) / count_bytes(rows, tokenizer))
    assert results == pytest.approx([8, 8], rel=0.02)
    word = tokenizer("Emma")["input_ids"]
    assert count_bytes(torch.tensor([[-100, *word], [-100] * (1 + len(word))]), tokenizer) == 4


@pytest.mark.parametrize("config, kind", [("demo", PAIRS), ("lean-demo", PAIRS), ("gpt-demo", TEXT)])
def test_sample_texts_are_repeatable_and_fill_prompts(tiny_data, text_data, config, kind):
    tokenizer = load_tokenizer((text_data if kind is TEXT else tiny_data)["--tokenizer_path"], kind)
    model = make_model(ModelArguments(config_path=f"configs/{config}.json"), tokenizer)
    texts, state = sample_texts(model, tokenizer), torch.get_rng_state()
    assert texts == sample_texts(model, tokenizer) and model.training and state.equal(torch.get_rng_state())
    gaps = [sentence.replace("___", "[___]").split("___") for sentence in SENTENCES]
    parts = gaps if kind is PAIRS else [(prompt, "") for prompt in PROMPTS]
    for text, (before, after) in zip(texts, parts, strict=True):
        assert text.startswith(before) and text.endswith(after) and len(text) > len(before + after)


def test_sample_prompts_begin_as_tokenizer(monkeypatch):
    tokenizer = make_llama_tokenizer()
    model = make_model(ModelArguments(config_path="configs/gpt-demo.json"), tokenizer)
    prompts = []
    monkeypatch.setattr(model, "generate", lambda ids, **_: prompts.append(ids[0].tolist()) or ids)
    sample_texts(model, tokenizer)
    assert prompts == tokenizer(list(PROMPTS))["input_ids"] and prompts[0][0] == tokenizer.bos_token_id


def test_model_without_samples_is_evaluated(tiny_data, monkeypatch, caplog):
    """A model of the user's own class may be unable to generate text."""
    tokenizer = load_tokenizer(tiny_data["--tokenizer_path"])
    model = make_model(ModelArguments(config_path="configs/demo.json"), tokenizer)
    monkeypatch.setattr(model, "forward", None)
    assert sample_texts(model, tokenizer) == [] and model.training and "no sample texts" in caplog.text


@pytest.mark.parametrize("has_local_steps", [False, True])
def test_unchanged_weights_are_evaluated_once(monkeypatch, has_local_steps):
    """With local steps, an evaluation sets the model to the swarm's parameters, and back."""
    model = torch.nn.Linear(2, 2)
    model.device = torch.device("cpu")
    local = LocalSteps(list(model.parameters()), None, None) if has_local_steps else None
    tracker = SimpleNamespace(suspend_participation=contextlib.nullcontext)
    state = SimpleNamespace(model=model, tokenizer=None, data_args=None, dataset={"validation": None})
    state.args = SimpleNamespace(do_eval=True, per_device_train_batch_size=1, max_eval_samples=None)
    state.optimizer = SimpleNamespace(local=local, local_epoch=3, tracker=tracker)
    state.corpus = {"unigram_entropy": 1.0}
    result = {name: GOOD[name] for name in ("loss", "accuracy", "samples")}
    for name, value in (("make_eval_batches", []), ("evaluate", result), ("sample_texts", [])):
        monkeypatch.setattr(f"training.evaluation.{name}", lambda *_, value=value, **__: value)
    evaluator = Evaluator(state, contextlib.nullcontext())
    first = evaluator.measure()
    assert first.loss == GOOD["loss"] and evaluator.measure() is first
    with torch.no_grad():
        model.bias.add_(1.0)
    assert evaluator.measure() is not first


def test_metrics_record_bounds_its_evaluation():
    (schema, _), subkey = make_validators("run")
    key, subkey = DHTID.generate(source="run_metrics").to_bytes(), MSGPackSerializer.dumps(subkey)
    assert "evaluation" not in make_metrics(3).dict()

    def is_accepted(**change) -> bool:
        value = MSGPackSerializer.dumps(make_metrics(3).dict() | change)
        return schema.validate(DHTRecord(key, subkey, value, get_dht_time() + 60))

    extreme = {"evaluation": {**GOOD, "loss": 0.0, "accuracy": 1.0}, "final_epoch": 10**9}
    for change in ({}, {"evaluation": GOOD}, extreme):
        record = make_metrics(3, **change).dict()
        assert is_accepted(**change) is True and LocalMetrics.parse_obj(record).dict() == record
        assert record.get("evaluation") == change.get("evaluation")
    wrong = {"loss": 1000.5}, {"loss": math.nan}, {"accuracy": -0.01}, {"samples": 10**9 + 1}, {"epoch": 3.0}
    wrong += {"epoch": 4}, {"more": 1}  # newer than the record, and unknown
    # left out if there is none
    for evaluation in (None, {"epoch": 3, "loss": 5.25}, *({**GOOD, **it} for it in wrong)):
        assert is_accepted(evaluation=evaluation) is False, evaluation
    assert is_accepted(final_epoch=-1) is is_accepted(final_epoch=1.5) is False


def test_aggregation_takes_median_of_newest_evaluations():
    def report(epoch: int, at: int, loss: float) -> tuple[str, LocalMetrics]:
        return "peer", make_metrics(epoch, evaluation={**GOOD, "epoch": at, "loss": loss})

    assert find_evaluation([("peer", make_metrics(9))]) is None
    records = [report(9, 8, 4.0), report(9, 4, 1.0), report(8, 8, 5.0), report(9, 8, 900.0), ("peer", make_metrics(9))]
    assert (find_evaluation(records).epoch, find_evaluation(records).loss) == (8, 5.0)
    assert math.isfinite(perplexity(1000.0))


def test_progress_shows_samples_and_expected_end():
    progress = measure_progress(40, 100, TrainingSchedule(1024), [(37, 10.0), (38, 12.0), (39, 500.0), (40, 0.0)])
    assert progress == dict(target_batch_size=1024, swarm_samples=40 * 1024, final_epoch=100, seconds_left=60 * 12.0)
    assert measure_progress(40, None, TrainingSchedule(), [(40, 1.0)]) == {}
    assert measure_progress(120, 100, TrainingSchedule(), [(9, 1.0)]) == {"final_epoch": 100, "seconds_left": 0.0}
    # an epoch with local steps has 25 times as many samples
    schedule = TrainingSchedule(64, local_steps=25, local_steps_from=50)
    assert measure_progress(40, 100, schedule, [(40, 2.0)])["seconds_left"] == pytest.approx((10 + 50 * 25) * 2.0)
    assert measure_progress(60, 100, schedule, [(60, 50.0)])["seconds_left"] == pytest.approx(40 * 50.0)
    invalid = TrainingSchedule(64, local_steps=0)  # of an untrusted peer's contract
    assert measure_progress(60, 100, invalid, [(60, 2.0)])["seconds_left"] == pytest.approx(40 * 2.0)


def test_history_and_curve_include_evaluations(tmp_path):
    history = History()
    for epoch in range(1, 41):
        values = {"alive_peers": 1, "samples_per_second": 10.0, "loss": 9 / epoch**0.2, "epoch": epoch}
        history.add(values)
        if epoch % 10 == 0:  # comes late, for the epoch before
            late = {"epoch": epoch - 1, "loss": 7 / epoch**0.2, "perplexity": 2.0, "accuracy": 0.5}
            history.add(values | {f"validation_{name}": value for name, value in late.items()})
    assert [entry["epoch"] for entry in history] == list(range(1, 41))
    assert [values["validation_epoch"] for values in history.validation] == [9, 19, 29, 39]
    assert draw_learning_curve(history, "run", tmp_path / "curve.png")
    picture = matplotlib.image.imread(tmp_path / "curve.png")
    line = numpy.abs(picture[:, :, :3] - numpy.array([0xB3, 0x36, 0x7D]) / 255).max(axis=2) < 0.05
    assert line.sum() > 500
    history.forget_from(25)
    assert [values["validation_epoch"] for values in history.validation] == [9, 19]


def test_suspended_peer_is_not_awaited():
    periods = dict(min_refresh_period=0.2, default_refresh_period=0.2, max_refresh_period=0.5)
    with run_dhts([], []) as dhts, run_trackers(dhts, 1000, **periods) as (one, other):
        one_id = dhts[0].peer_id.to_bytes()
        for tracker in (one, other):
            tracker.report_local_progress(5, 30)

        def other_counts(samples: int, is_in_step: bool) -> bool:
            seen = other.view.epoch, other.view.samples, other.view.num_peers, one_id in other.peers_at_epoch
            return seen == (5, samples, 1 + is_in_step, is_in_step)

        wait_until(lambda: other_counts(60, True) and one.present, 20, "both together")
        speed = one.performance_ema.samples_per_second
        with one.suspend_participation():
            wait_until(lambda: other_counts(30, False), 20, "one aside")
            assert one_id in other.present
        wait_until(lambda: other_counts(60, True), 20, "both together again")
        assert one.local_progress.epoch == 5 and one.performance_ema.samples_per_second == speed


def test_new_peer_in_evaluation_is_not_awaited():
    """At epochs 0 and 1 it publishes nothing, because no epoch would count as outdated."""
    with run_dhts([], []) as dhts, run_trackers(dhts, 1000) as (one, other):
        other.report_local_progress(0, 30)
        for epoch in (0, 1):
            one.report_local_progress(epoch, 0)
            one.schedule_refresh(0.0)
            wait_until(lambda: one.present, 20, "it has seen the other")
            with one.suspend_participation():
                pass
            # stored after anything that it may have published
            assert dhts[0].store(f"{one.key}_mark", epoch, get_dht_time() + 60)
            records = dhts[1].get(one.key, latest=True).value
            assert len(records) == 1, records


def test_trainer_evaluates_and_monitor_shows_it(start, tmp_path, tiny_data):
    prefix, output_dir, page = make_prefix(), tmp_path / "out", {}
    monitor, address = start_monitor(start, prefix, tmp_path / "monitor", "--status_port", 0)
    port = int(monitor.wait_for(r"status page: http://\S+:(\d+)/").group(1))
    words = [*TINY, *sum(tiny_data.items(), ()), "--experiment_prefix", prefix, "--initial_peers", address]
    words += ["--output_dir", output_dir, "--max_steps", 5, "--logging_steps", 5, "--matchmaking_time", 1]
    trainer = start("trainer", "run_trainer.py", *words, "--do_eval", "--eval_steps", 2, "--max_eval_samples", 40)
    trainer.assert_clean_end(120)
    epochs = history(tmp_path, "out")
    evaluated = {epoch: line for epoch, line in epochs.items() if "validation_loss" in line}
    assert list(evaluated) == [2, 4, 5]
    for epoch, line in evaluated.items():
        assert line["validation_epoch"] == epoch
        assert line["validation_perplexity"] == pytest.approx(math.exp(line["validation_loss"]))
    summary, last = json.loads((output_dir / "summary.json").read_text()), epochs[5]
    assert last["validation_loss"] < evaluated[2]["validation_loss"] < summary["start_loss"]
    assert [last[name] for name in ("final_epoch", "target_batch_size", "swarm_samples")] == [5, 64, 320]
    assert last["seconds_left"] == 0 and epochs[2]["seconds_left"] > 0

    # the last evaluation is of the saved model
    tokenizer = load_tokenizer(tiny_data["--tokenizer_path"])
    dataset, _ = load_tokenized_dataset(tiny_data["--dataset_path"], tokenizer)
    saved = make_model(ModelArguments("configs/demo.json"), tokenizer)
    saved.load_state_dict(AutoModelForPreTraining.from_pretrained(output_dir / "model").state_dict())
    batches = make_eval_batches(dataset["validation"], tokenizer, DataArguments(), batch_size=8, max_samples=40)
    result = evaluate(saved, batches, torch.device("cpu"))
    for values, name in ((summary, "final"), (last, "validation")):
        assert values[f"{name}_loss"] == pytest.approx(result["loss"], rel=1e-4)
        assert values[f"{name}_accuracy"] == pytest.approx(result["accuracy"], abs=1e-6)

    def read_page() -> dict:
        page.update(json.loads(ask(port)[2]))
        return page

    wait_until(lambda: read_page().get("validation_epoch") == 5, 20, f"the last evaluation\n{monitor.text[-2000:]}")
    assert page["validation_loss"] == last["validation_loss"]
    assert (page["final_epoch"], page["epoch"], page["swarm_samples"], page["seconds_left"]) == (5, 5, 320, 0)
    wait_until(lambda: read_page()["ended"], 40, f"the end\n{monitor.text[-2000:]}")
    assert (page["peers"], page["samples_per_second"], page["validation_loss"]) == (0, 0, last["validation_loss"])
    assert abs(page["ended"] - last["time"]) < 10
    stop(monitor)
    seen = {it["validation_epoch"]: it for it in read_epochs(tmp_path / "monitor") if "validation_loss" in it}
    # the monitor may have missed one in between
    assert {5} <= seen.keys() <= {0, 2, 4, 5}
    for epoch in seen.keys() - {0}:
        values = {name: value for name, value in seen[epoch].items() if name.startswith("validation_")}
        assert len(values) == 5 and values.items() <= evaluated[epoch].items()
    assert re.search(rf"validation loss {last['validation_loss']:.4f} nats, .* at epoch 5\b", monitor.text)
    assert all(re.search(r"epoch 5/5  loss \d\.\d{4}  peers 1/1  ", script.text) for script in (monitor, trainer))
    saved_summary = json.loads((tmp_path / "monitor" / "summary.json").read_text())
    assert saved_summary["validation_loss"] == last["validation_loss"]


def test_ctrl_c_in_evaluation_saves_first(start, tmp_path, tiny_data):
    """A notebook or systemd kills the trainer after 90 s. Another Ctrl-C ends the evaluation at the end alone."""
    words = [*TINY, *sum(tiny_data.items(), ()), "--experiment_prefix", make_prefix(), "--output_dir", tmp_path / "out"]
    words += ["--do_eval", "--eval_steps", 2, "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 16]
    trainer = start("trainer", "-m", "tests.programs.changed_trainer", "slowly_evaluated", *words)
    trainer.wait_for("evaluating", 120)
    counts = [trainer.text.count("evaluating")]
    trainer.interrupt()
    wait_until((tmp_path / "out" / "checkpoint-2" / "training_state.json").exists, 60, "the checkpoint")
    summary = tmp_path / "out" / "summary.json"
    wait_until(summary.exists, 60, "the summary")
    counts.append(trainer.text.count("evaluating"))
    wait_until(lambda: trainer.text.count("evaluating") > counts[1] + 1, 60, "the evaluation at the end")
    counts.append(trainer.text.count("evaluating"))
    trainer.interrupt()
    trainer.assert_clean_end(60)
    counts.append(trainer.text.count("evaluating"))
    # a line takes half a second, and a whole evaluation has 203
    assert counts[1] - counts[0] < 30 and counts[3] - counts[2] < 30, counts
    assert "model and state are in" in trainer.text and "final_loss" not in json.loads(summary.read_text())


def test_trainer_stops_after_num_train_epochs(start, tmp_path, tiny_data, monkeypatch):
    tokenizer = load_tokenizer(tiny_data["--tokenizer_path"])
    size = len(load_tokenized_dataset(tiny_data["--dataset_path"], tokenizer)[0]["train"])
    command = ["run_trainer.py", *TINY, *sum(tiny_data.items(), ()), "--output_dir", tmp_path / "out"]
    command += ["--experiment_prefix", make_prefix(), "--num_train_epochs", 328 / size]
    for name in ("first", "again"):  # a restart has nothing to do
        trainer = start(name, *command)
        trainer.assert_clean_end(90)
        assert "passes over" in trainer.text
        # steps of 16 samples
        assert json.loads((tmp_path / "out" / "summary.json").read_text())["computed_samples"] == 336
    assert (tmp_path / "out" / "checkpoint-5").is_dir() and (tmp_path / "out" / "model").is_dir()
    monkeypatch.setattr("sys.argv", [str(word) for word in [*command, "--streaming"]])
    with expect_user_error("--num_train_epochs: ", " pass --max_steps instead"):
        parse_arguments(*TRAINER_ARGS)
