"""Measure the gain of pretraining: a task of the sample corpus, for pretrained models and for random weights.

    python demo.py --config_path configs/lean-demo.json
    python benchmarks/finetuning.py --models demo_output/trainer1/model

The task: sentence B follows sentence A in a novel, or comes from another novel. Training and validation use different
chapters. finetune_mlm.py tunes each model, and its twin with random weights and the same shape and tokenizer.
"""

import argparse
import csv
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import lean_albert  # noqa: F401  make_twin opens its models
from text.documents import load_sentence_splitter, read_text, split_chapters

ROOT = Path(__file__).resolve().parents[1]
CHARACTERS = 200  # maximum length of a sentence


def read_novels() -> list[list[list[str]]]:
    """Return the novels of the sample corpus as lists of chapters, which are lists of sentences."""
    novels = []
    find_sentences = load_sentence_splitter("english")
    for chapter in split_chapters(read_text(ROOT / "sample_data" / "austen.txt.xz")):
        if not novels or "jane austen" in " ".join(chapter[:3]).lower():
            novels.append([])
        novels[-1].append([sentence for paragraph in chapter for sentence in find_sentences(paragraph)])
    return novels


def write_task(folder: Path, train_size: int, validation_size: int, seed: int) -> Path:
    """Write the task's two CSV files and the JSON file that describes it, and return the path of the latter."""
    generator = random.Random(seed)
    pairs = {"train": [], "validation": []}
    novels = read_novels()
    parts = [set(generator.sample(range(len(novel)), len(novel) // 5)) for novel in novels]
    for split, rows in pairs.items():
        chapters = [
            [chapter for i, chapter in enumerate(novel) if (i in held_out) == (split == "validation")]
            for novel, held_out in zip(novels, parts, strict=True)
        ]
        for number, novel in enumerate(chapters):
            others = [s for other, part in enumerate(chapters) if other != number for chapter in part for s in chapter]
            for first, second in (pair for chapter in novel for pair in itertools.pairwise(chapter)):
                follows = generator.random() < 0.5
                second = second if follows else generator.choice(others)
                # long sentences are cut at their far ends
                rows.append((first[-CHARACTERS:], second[:CHARACTERS], int(follows)))
        generator.shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    for (split, rows), size in zip(pairs.items(), (train_size, validation_size), strict=True):
        with open(folder / f"{split}.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("first", "second", "follows"))
            writer.writerows(rows[:size])
    description = {"name": "follows", "train": "train.csv", "validation": "validation.csv", "text": "first"}
    description |= {"text_pair": "second", "label": "follows", "labels": [0, 1], "metric": "accuracy", "head": "spans"}
    (folder / "task.json").write_text(json.dumps(description, indent=2) + "\n")
    return folder / "task.json"


def make_twin(model: Path, folder: Path) -> None:
    """Save a model of the same shape and tokenizer with random weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
    transformers.AutoModel.from_config(config, trust_remote_code=False).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=False).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="folders of pretrained models")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/finetuning"))
    parser.add_argument("--train_size", type=int, default=6000)
    parser.add_argument("--validation_size", type=int, default=3000)
    parser.add_argument("--num_seeds", type=int, default=3)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--learning_rates", type=float, nargs="+", default=[3e-4], help="one for each model")
    args = parser.parse_args()
    task = write_task(args.output_dir / "task", args.train_size, args.validation_size, seed=0)
    rates = args.learning_rates * len(args.models) if len(args.learning_rates) == 1 else args.learning_rates
    for number, (model, rate) in enumerate(zip(args.models, rates, strict=True)):
        twin = args.output_dir / f"twin{number}"
        make_twin(model, twin)
        for name, folder in (("pretrained", model), ("from scratch", twin)):
            print(f"\n{folder}, {name}:", flush=True)
            command = [sys.executable, ROOT / "finetune_mlm.py", "--task_file", task, "--model-name", folder]
            command += ["--num_seeds", args.num_seeds, "--num_train_epochs", args.num_train_epochs]
            command += ["--batch-size", 16, "--learning_rate", rate]
            command += ["--output_dir", args.output_dir / f"{name.split()[-1]}{number}"]
            subprocess.run([str(word) for word in command], check=True)


if __name__ == "__main__":
    main()
