"""Measure the gain of pretraining: a task of the sample corpus, for pretrained models and for random weights.

    python demo.py --config_path configs/lean-demo.json
    python benchmarks/finetuning.py --models demo_output/trainer1/model

The task: sentence B follows sentence A in a novel, or comes from another novel. Training and validation use different
chapters. finetune_mlm.py tunes each model, and its twin with random weights and the same shape and tokenizer.
"""

import argparse
import csv
import itertools
import random
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import finetune_mlm
from experiment.tasks import TASKS, Task
from finetune_mlm import FinetuneArguments
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


def write_task(folder: Path, train_size: int, validation_size: int, seed: int) -> None:
    """Write the task's two CSV files."""
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
    write_task(args.output_dir / "follows", args.train_size, args.validation_size, seed=0)
    files = {split: f"{split}.csv" for split in ("train", "validation")}
    own = Task("follows", ("first", "second"), (0, 1), "spans", label_column="follows", files=files, hub="")
    TASKS["follows"] = own
    rates = args.learning_rates * len(args.models) if len(args.learning_rates) == 1 else args.learning_rates
    for number, (model, rate) in enumerate(zip(args.models, rates, strict=True)):
        twin = args.output_dir / f"twin{number}"
        make_twin(model, twin)
        for name, folder in (("pretrained", model), ("from scratch", twin)):
            print(f"\n{folder}, {name}:", flush=True)
            flags = FinetuneArguments(
                task="follows",
                model_name=str(folder),
                data_dir=str(args.output_dir),
                output_dir=str(args.output_dir / f"{name.split()[-1]}{number}"),
                num_seeds=args.num_seeds,
                num_train_epochs=args.num_train_epochs,
                batch_size=16,
                learning_rate=rate,
            )
            finetune_mlm.main(flags)


if __name__ == "__main__":
    main()
