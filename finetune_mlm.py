#!/usr/bin/env python
"""Fine-tune a trained model on a task, with several seeds: RussianSuperGLUE, RuCoLA, or any classification.

The model of a run, and a model from the Hub or any folder, on the same task:

    python finetune_mlm.py -t terra --checkpoint outputs/trainer/model --data-dir . --batch-size 32 \\
        --grad-acc-steps 1 --dropout 0.1 --weight-decay 0.01 --num-seeds 3
    python finetune_mlm.py -t terra --model-name ruroberta-large --data-dir . --bf16

A tiny run on your own task on a CPU (experiment/tasks.py describes the file):

    python finetune_mlm.py --task_file my.json --checkpoint demo_output/trainer1/model --num_train_epochs 3

After each epoch it measures the validation data; the best epoch counts. It writes results.json to --output_dir, and the
predictions for the leaderboard (TERRa.jsonl, RuCoLA.csv, ...) and model/ of the best seed. Running the same command
again resumes with the first seed that is not in results.json.
"""

import hashlib
import json
import logging
import math
import statistics
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from arguments import MIN_SEQUENCE_LENGTH, PrecisionArguments, parse_arguments
from common.console import UserError, edge, setup_logging, suggest
from common.flags import flag


@dataclass
class FinetuneArguments(PrecisionArguments):
    """Fine-tuning of a trained model. Names and defaults are RuLeanALBERT's."""

    task: str | None = flag(
        None, "RussianSuperGLUE task: rcb, terra, danetqa, parus, muserc, russe, rucos; or rucola.", aliases=["-t"]
    )
    task_file: str | None = flag(
        None,
        "Your own task instead: a JSON file that names CSV, TSV or JSON-lines files and their columns, e.g. "
        '{"train": "a.csv", "validation": "b.csv", "text": "body", "label": "is_spam"}; experiment/tasks.py lists all '
        "fields.",
    )
    checkpoint: str | None = flag(
        None, "Folder of a trained model, or a state.pth next to config.json and tokenizer/.", aliases=["-c"]
    )
    model_name: str | None = flag(
        None, "Another model instead: ruroberta-large, an id on the Hugging Face Hub, or a folder.", aliases=["-m"]
    )
    data_dir: str = flag(
        ".",
        "Folder with the benchmark's files (TERRa/train.jsonl, ...); absent folders, except RuCoLA, come from the Hub.",
        aliases=["-d"],
    )
    output_dir: str | None = flag(None, "Folder for results.json, predictions, model. Default: outputs/finetune/TASK.")
    num_seeds: int = flag(1, "Train N times, with the seeds 0, 1, ...", ge=1)
    num_train_epochs: int = flag(40, "Passes over the training data; the best one counts.", ge=1)
    batch_size: int = flag(32, "Samples per forward pass, as many as fit into memory.", ge=1)
    grad_acc_steps: int = flag(1, "Batches, not epochs, per optimizer step.", ge=1)
    learning_rate: float = flag(1e-5, "Peak learning rate; raise it for models much smaller than BERT.", gt=0, le=1e3)
    warmup_ratio: float = flag(0.1, "Share of the steps with a rising learning rate.", ge=0, lt=1)
    weight_decay: float = flag(0.01, "Weight decay of AdamW, on all weights except biases and norms.", ge=0, lt=1)
    max_grad_norm: float = flag(1.0, "Upper bound of the gradient's norm.", gt=0)
    dropout: float = flag(0.1, "Dropout of the whole model; in LeanALBERT only before the head.", ge=0, lt=1)
    max_length: int = flag(512, "Maximum tokens of a text or pair; longer ones are truncated.", ge=MIN_SEQUENCE_LENGTH)

    def __post_init__(self):
        super().__post_init__()
        if (self.task is None) == (self.task_file is None):
            raise UserError("give either --task or --task_file")
        if (self.checkpoint is None) == (self.model_name is None):
            raise UserError("give either --checkpoint FOLDER or --model-name NAME")


GROUPS = (FinetuneArguments,)

if __name__ == "__main__":  # before the imports below, which take seconds
    with edge(interrupted="nothing was written"):
        groups = parse_arguments(*GROUPS, description=__doc__)

import numpy as np
import torch
import transformers
from torch.nn.functional import log_softmax
from tqdm import tqdm
from transformers import AutoModel, AutoModelForSequenceClassification

from common.files import hash_file, lock_folder, write_file
from experiment.optimizer import make_param_groups
from experiment.tasks import (
    TASKS,
    Example,
    SpanModel,
    Task,
    format_predictions,
    load_examples,
    load_task_file,
    predict_majority,
)
from models.build import find_longest_sequence
from models.pretrained import Pretrained, check_tokenizer, load_folder, load_old_checkpoint, load_weights
from text.batches import group_by_length
from training.checkpoint import save_model
from training.devices import is_out_of_memory, place_model

logger = logging.getLogger("finetune")

PADDING = 8  # tokens; batches are padded to a multiple of it
#: short names in older commands
MODEL_NAMES = {"ruroberta-large": "ai-forever/ruRoberta-large"}


# ---------------------------------------------------------------- model


def load_pretrained(args: FinetuneArguments) -> Pretrained:
    """Load the config and tokenizer of --checkpoint or --model-name, or raise a UserError."""
    name = args.checkpoint or MODEL_NAMES.get(args.model_name, args.model_name)
    path = Path(name)
    state = path / "state.pth" if path.is_dir() else path
    if state.is_file():
        return load_old_checkpoint(state)
    if args.checkpoint and not (path / "config.json").is_file():
        raise UserError(
            f"--checkpoint {path} has no config.json: give a folder with a model, as outputs/trainer/model or a "
            "checkpoint-N, or a state.pth next to config.json and tokenizer/"
        )
    if (path / "adapter_config.json").is_file():  # transformers would freeze all weights
        raise UserError(f"{path} has adapters: python -m experiment.merge {path} MERGED, and give the folder MERGED")
    cure = "give the id of a model on the Hub, or a folder with a model and its tokenizer"
    return load_folder(name, f"--{'checkpoint' if args.checkpoint else 'model-name'} {name}", cure)


def make_task_model(pretrained: Pretrained, task: Task, dropout: float) -> torch.nn.Module:
    """Return the pretrained encoder with a new head, initialized by torch's generator, or raise a UserError."""
    config = pretrained.config
    has_span_head = task.head in ("spans", "entities")
    config.pad_token_id = pretrained.tokenizer.pad_token_id
    if getattr(config, "is_decoder", False):
        # a BERT trained with --objective clm: its first token, which the head reads, must attend to all others
        config.is_decoder = False
    config.num_labels = 1 if task.head == "choices" else len(task.labels)
    if task.head == "classes":
        config.id2label = dict(enumerate(map(str, task.labels)))
        config.label2id = {label: i for i, label in config.id2label.items()}
    for name, value in config.to_dict().items():
        if name.endswith(("dropout", "dropout_prob", "pdrop")) and isinstance(value, int | float):
            setattr(config, name, dropout)
    auto_class = AutoModel if has_span_head else AutoModelForSequenceClassification
    if pretrained.encoder is None:
        model = load_weights(auto_class, pretrained)
    else:
        model = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=False)
        model.base_model.load_state_dict(pretrained.encoder.state_dict())
    return SpanModel(model, None if task.head == "entities" else len(task.labels), dropout) if has_span_head else model


# ---------------------------------------------------------------- batches


def choose_length(model: torch.nn.Module, wanted: int) -> int:
    """Return the maximum tokens of a text: `wanted`, or fewer if the model's position table is shorter."""
    longest = find_longest_sequence(model)
    return int(min(wanted, longest if longest == math.inf else longest // PADDING * PADDING))


def encode(examples: list[Example], pretrained: Pretrained, max_length: int) -> int:
    """Tokenize examples, and return the number of texts truncated to `max_length` tokens."""
    has_types = (getattr(pretrained.config, "type_vocab_size", 0) or 0) > 1
    options = dict(truncation="longest_first", max_length=max_length, return_token_type_ids=has_types)
    cut = 0
    for example in examples:
        firsts, seconds = map(list, zip(*example.texts, strict=True))
        encoded = pretrained.tokenizer(firsts, None if seconds[0] is None else seconds, **options)
        cut += sum(bool(encoding.overflowing) for encoding in encoded.encodings)
        example.inputs = [{name: values[i] for name, values in encoded.items()} for i in range(len(firsts))]
        for inputs in [inputs for inputs in example.inputs if not inputs["input_ids"]]:
            # an empty text, to which GPT-2's tokenizer adds no special token
            inputs |= {"input_ids": [pretrained.tokenizer.pad_token_id], "attention_mask": [1]}
        # char_to_token returns one token per character, but the tokens "▁" and "а" may both start at the letter
        text_of = np.array(encoded.sequence_ids(0), dtype=float)  # nan: a special token
        begins, ends = np.array(encoded.encodings[0].offsets, dtype=int).reshape(-1, 2).T
        example.span_tokens = []
        for places in example.spans:
            found = [(text_of == text) & (begins < end) & (ends > start) for text, start, end in places]
            example.span_tokens.append(np.flatnonzero(np.any(found, axis=0)).tolist())
    return cut


def collate(examples: list[Example], task: Task, tokenizer, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a batch of encoded examples on the device.

    :returns: the model's inputs, each [texts, length]; for heads that look at spans `span_weights` [examples, spans,
        length], which average the tokens of each; `right` and `possible` [examples, answers]: whether an answer is
        right, and is one at all
    """
    inputs = [inputs for example in examples for inputs in example.inputs]
    batch = dict(tokenizer.pad(inputs, return_tensors="pt", pad_to_multiple_of=PADDING, padding_side="right"))
    num_spans = max(len(example.span_tokens) for example in examples)
    answers = num_spans - 1 if task.head == "entities" else len(task.labels)
    batch["right"] = torch.zeros(len(examples), answers, dtype=torch.bool)
    batch["possible"] = torch.ones(len(examples), answers, dtype=torch.bool)
    if task.head in ("spans", "entities"):
        weights = batch["span_weights"] = torch.zeros(len(examples), num_spans, batch["input_ids"].shape[1])
        for number, example in enumerate(examples):
            for span, tokens in enumerate(example.span_tokens):
                weights[number, span, tokens] = 1 / max(1, len(tokens))
        if task.head == "entities":  # a truncated entity cannot be chosen
            batch["possible"] = weights[:, 1:].any(dim=2)
    for number, example in enumerate(examples):
        batch["right"][number, example.right or []] = True
    batch["right"] &= batch["possible"]
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def compute_logits(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits [examples, answers] in fp32, and `right`."""
    inputs = dict(batch)
    right = inputs.pop("right")
    possible = inputs.pop("possible")
    logits = model(**inputs).logits.float().view(right.shape)
    return logits.masked_fill(~possible, torch.finfo(torch.float32).min), right


def compute_losses(logits: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the negative log probability of all right answers together, [examples], or 0 if none is left."""
    # not -inf, because a row of -inf has no gradient
    masked = log_softmax(logits, dim=1).masked_fill(~right, torch.finfo(logits.dtype).min)
    return -masked.logsumexp(dim=1).masked_fill(~right.any(dim=1), 0.0)


@torch.inference_mode()
def predict(
    model: torch.nn.Module, examples: list[Example], task: Task, tokenizer, batch_size: int, device: torch.device
) -> list[int]:
    """Return the index of the most probable answer of each example."""
    model.eval()
    predictions = np.zeros(len(examples), dtype=int)
    order = sorted(range(len(examples)), key=lambda number: examples[number].length)
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        logits, _ = compute_logits(model, collate([examples[i] for i in numbers], task, tokenizer, device))
        predictions[numbers] = logits.argmax(dim=1).tolist()
    return predictions.tolist()


# ---------------------------------------------------------------- training


def tune(
    args: FinetuneArguments,
    task: Task,
    pretrained: Pretrained,
    examples: dict[str, list[Example]],
    seed: int,
    device: torch.device,
) -> tuple[dict, torch.nn.Module, AbstractContextManager]:
    """Train with one seed, and return its entry of results.json, the model of its best epoch, and the context of the
    model's precision."""
    started = time.monotonic()
    torch.manual_seed(seed)
    generator = np.random.default_rng(seed)
    model = make_task_model(pretrained, task, args.dropout)
    autocast, scaler = place_model(model, device, args)
    decay = args.weight_decay
    groups = make_param_groups(model)
    groups = [{"params": it["params"], "weight_decay": decay if it["decayed"] else 0.0} for it in groups]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    train = examples["train"]
    validation = examples["validation"]
    padded_lengths = np.array([-(-example.length // PADDING) for example in train])
    total = args.num_train_epochs * math.ceil(len(train) / (args.batch_size * args.grad_acc_steps))
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, int(args.warmup_ratio * total), total)
    result = {"seed": seed, "best_epoch": 0, "metrics": {}, "history": []}
    best_state = {}

    with tqdm(total=total, desc=f"{task.name}, seed {seed}", unit="step", disable=None, leave=False) as bar:
        for epoch in range(1, args.num_train_epochs + 1):
            model.train()
            batches = group_by_length(padded_lengths, args.batch_size, generator, keep_rest=True)
            # kept on the device to avoid a synchronization in each step
            loss_sum = torch.zeros((), device=device)
            right_sum = torch.zeros((), device=device)
            for start in range(0, len(batches), args.grad_acc_steps):
                group = batches[start : start + args.grad_acc_steps]
                samples = sum(map(len, group))
                for numbers in group:
                    batch = collate([train[i] for i in numbers], task, pretrained.tokenizer, device)
                    with autocast:
                        logits, right = compute_logits(model, batch)
                    losses = compute_losses(logits, right)
                    scaler.scale(losses.sum() / samples).backward()
                    loss_sum += losses.detach().sum()
                    right_sum += right.gather(1, logits.argmax(dim=1, keepdim=True)).sum()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
                bar.update()

            with autocast:
                predictions = predict(model, validation, task, pretrained.tokenizer, args.batch_size, device)
            metrics = {name: float(value) for name, value in task.measure(validation, predictions).items()}
            score = next(iter(metrics.values()))
            loss, accuracy = (total.item() / len(train) for total in (loss_sum, right_sum))
            result["history"].append({"epoch": epoch, "train_loss": loss, "train_accuracy": accuracy, **metrics})
            bar.set_postfix({"loss": f"{loss:.3f}", next(iter(metrics)): f"{score:.3f}"})
            if not best_state or score > next(iter(result["metrics"].values())):
                result |= {"best_epoch": epoch, "metrics": metrics}
                best_state = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    model.load_state_dict(best_state)
    result["seconds"] = round(time.monotonic() - started, 1)
    return result, model, autocast


# ---------------------------------------------------------------- results


def describe_settings(args: FinetuneArguments, examples: dict[str, list[Example]]) -> dict:
    """Return the settings that must match to add seeds to results, with hashes of the data and of the model's files."""
    settings = {name: value for name, value in asdict(args).items() if name not in ("num_seeds", "output_dir")}
    if args.task_file:
        settings["task_file"] = json.loads(Path(args.task_file).read_text(encoding="utf-8"))
    data = [(it.texts, it.right, it.spans) for split in ("train", "validation") for it in examples[split]]
    settings["data"] = hashlib.sha256(json.dumps(data).encode()).hexdigest()
    path = Path(args.checkpoint or args.model_name)  # the same path may have another model after more training
    files = path.iterdir() if path.is_dir() else [path] if path.is_file() else []
    settings["model"] = [hash_file(it) for it in sorted(files) if it.suffix in (".safetensors", ".bin", ".pth")]
    return settings


def load_results(settings: dict, file: Path) -> list[dict]:
    """Return the seeds in results.json, or raise a UserError if it is broken or has other settings."""
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        saved = dict(results["settings"])
        format_table(results)  # checks the fields of each seed
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise UserError(f"{file} cannot be read ({e!r}): remove it, or choose another --output_dir") from e
    # earlier versions saved fewer settings
    if different := [name for name in settings if saved.get(name, settings[name]) != settings[name]]:
        raise UserError(
            f"{file} was made with a different {', '.join(different)}: choose another --output_dir, or remove it"
        )
    return results["seeds"]


def summarize(task: Task, seeds: list[dict], majority: dict, **content) -> dict:
    """Return results.json, of the counts and settings in `content` and the scores of the most frequent answer."""
    names = list(seeds[0]["metrics"])
    values = {name: [seed["metrics"][name] for seed in seeds] for name in names}
    return {
        "task": task.name,
        "metric": names[0],
        "mean": {name: statistics.mean(values[name]) for name in names},
        "standard_deviation": {name: statistics.stdev(values[name]) if len(seeds) > 1 else None for name in names},
        "majority": majority,
        "best_seed": max(seeds, key=lambda seed: seed["metrics"][names[0]])["seed"],
        **content,
        "seeds": seeds,
    }


def format_table(results: dict) -> str:
    """Format each metric's mean and spread, the score of the most frequent answer, and then the seeds."""
    layout = "{:24}{:>7}{:>12}{:>9}{:>10}{:>23}"
    title = f"{results['task']}, validation"
    lines = [layout.format(title, "mean", "deviation", "lowest", "highest", "most frequent answer")]
    for name, mean in results["mean"].items():
        values = [seed["metrics"][name] for seed in results["seeds"]]
        row = (mean, results["standard_deviation"][name], min(values), max(values), results["majority"].get(name))
        lines.append(layout.format(name, *("-" if value is None else f"{value:.3f}" for value in row)))
    for seed in results["seeds"]:
        epochs = f"epoch {seed['best_epoch']} of {len(seed['history'])}"
        score = seed["metrics"][results["metric"]]
        lines.append(f"seed {seed['seed']}: {results['metric']} {score:.3f} in {epochs}, {seed['seconds']:,.0f} s")
    return "\n".join(lines)


def main(args: FinetuneArguments) -> None:
    """Tune a model with each seed, and write and print the results."""
    setup_logging("finetune")
    if args.task is not None and args.task not in TASKS:
        known = f"tasks: {', '.join(TASKS)}; --task_file: your own"
        raise UserError(f"--task {args.task} is unknown{suggest(args.task, TASKS)} ({known})")
    task = load_task_file(args.task_file) if args.task_file else TASKS[args.task]
    if "train" not in task.files:
        raise UserError(
            f"{task.name} has no training data: tune for TERRa (-t terra), then python predict_on_lidirus.py -m FOLDER"
        )
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if args.fp16 and device.type != "cuda":
        raise UserError("--fp16 needs a CUDA GPU, and there is none here: omit it or use --bf16")
    examples = load_examples(task, args.data_dir)
    pretrained = load_pretrained(args)
    check_tokenizer(pretrained)
    # errors of the model must appear before anything is written
    max_length = choose_length(make_task_model(pretrained, task, args.dropout), args.max_length)
    folder = Path(args.output_dir or f"outputs/finetune/{task.name}")
    lock_folder("--output_dir", folder)
    settings = describe_settings(args, examples)
    seeds = load_results(settings, folder / "results.json")

    counts = {split: len(part) for split, part in examples.items()}
    cut = {split: encode(part, pretrained, max_length) for split, part in examples.items()}
    content = {"examples": counts, "texts_cut": cut, "settings": settings}
    sizes = ", ".join(f"{count:,} {split}" for split, count in counts.items())
    lengths = f"{sum(cut.values()):,} texts are longer than {max_length} tokens and were cut"
    missing = "" if "test" in examples else "; no test data, so no predictions"
    logger.info(f"{task.name}: {sizes}; {lengths}; {device}{missing}")
    majority = predict_majority(task, examples)

    for seed in range(args.num_seeds):
        if any(done["seed"] == seed for done in seeds):
            logger.info(f"seed {seed} is in {folder / 'results.json'}")
            continue
        try:
            result, model, autocast = tune(args, task, pretrained, examples, seed, device)
        except (RuntimeError, MemoryError) as e:
            if not is_out_of_memory(e):
                raise
            cures = f"lower --batch_size (now {args.batch_size}) and raise --grad_acc_steps, or lower --max_length"
            raise UserError(f"out of memory on {device}: {cures}") from e
        seeds = sorted([*seeds, result], key=lambda done: done["seed"])
        results = summarize(task, seeds, majority, **content)
        is_saved = True
        if results["best_seed"] == seed:
            extra = {"task": task.name, "seed": seed}
            is_saved = save_model(model, pretrained.tokenizer, folder / "model", extra)
            if "test" in examples:
                with autocast:
                    predictions = predict(model, examples["test"], task, pretrained.tokenizer, args.batch_size, device)
                name, text = format_predictions(task, examples["test"], predictions)
                is_saved &= write_file(folder / name, text)
        del model  # the next seed needs its memory
        # written last, because a seed in results.json is finished
        text = json.dumps(results, indent=2, ensure_ascii=False) + "\n"
        if not (is_saved and write_file(folder / "results.json", text)):
            raise UserError(f"seed {seed} could not be written, see above: free some space, and run this again")
    print(format_table(summarize(task, seeds, majority, **content)))
    print(f"model, predictions and results.json: {folder}")


if __name__ == "__main__":
    with edge(interrupted="the same command resumes with the unfinished seed"):
        main(*groups)
