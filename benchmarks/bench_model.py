"""Measure the memory and time of a step: LeanALBERT compared with transformers' ALBERT.

    python benchmarks/bench_model.py                            # the yardstick, a minute on two cores
    python benchmarks/bench_model.py --shape albert-large --batch_size 1
    python benchmarks/bench_model.py --models transformers_sdpa lean --compile

A step is a forward and a backward pass over random tokens without padding, of which 15 % have a label. The models take
turns; times are medians, and ratios to the first model are medians of the ratios within a turn. "kept" is the size of
all tensors that autograd holds after the forward pass, without parameters. gpu_bench.py measures a GPU.
"""

import argparse
import contextlib
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models.lean_albert import LeanAlbertConfig, LeanAlbertForPreTraining

SHAPES = {
    "yardstick": dict(
        hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048, vocab_size=8000
    ),
    "albert-large": dict(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, vocab_size=30000
    ),
}
LENGTH = 512
NO_DROPOUT = dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0, classifier_dropout_prob=0)


def make_albert(shape: dict, attention: str) -> torch.nn.Module:
    config = transformers.AlbertConfig(**shape, **NO_DROPOUT, embedding_size=128, max_position_embeddings=LENGTH)
    config._attn_implementation = attention
    return transformers.AlbertForPreTraining(config)


def make_lean(shape: dict, checkpointing: bool = False, **options) -> torch.nn.Module:
    model = LeanAlbertForPreTraining(
        LeanAlbertConfig(**shape, num_hidden_groups=1, classifier_dropout_prob=0, **options)
    )
    if checkpointing:
        model.activation_checkpointing_enable()
    return model


MODELS = {
    "transformers_sdpa": lambda shape: make_albert(shape, "sdpa"),
    "transformers_eager": lambda shape: make_albert(shape, "eager"),
    "lean": make_lean,
    "lean_checkpointing": lambda shape: make_lean(shape, checkpointing=True),
    "lean_gated_sandwich": lambda shape: make_lean(shape, hidden_act_gated=True, sandwich_norm=True),
}


def make_batch(vocab_size: int, batch_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, vocab_size, (batch_size, LENGTH), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.15, ids, -100)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (torch.arange(LENGTH) >= LENGTH // 2).long().expand(batch_size, -1).contiguous(),
        "labels": labels,
        "sentence_order_label": torch.arange(batch_size) % 2,
    }


def measure_kept(run_forward, model: torch.nn.Module) -> int:
    """Return the bytes that autograd keeps after a forward pass, without parameters."""
    parameters = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = run_forward()
        total = sum(kept.values())
    del loss
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="yardstick")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch_size", type=int, default=4, help="sequences of 512 tokens")
    parser.add_argument("--turns", type=int, default=9, help="steps of each model")
    parser.add_argument("--bf16", action="store_true", help="autocast")
    parser.add_argument("--compile", action="store_true", help="torch.compile each model")
    args = parser.parse_args()

    shape = SHAPES[args.shape]
    batch = make_batch(shape["vocab_size"], args.batch_size)
    models, steps, kept = {}, {}, {}
    for name in args.models:
        torch.manual_seed(0)
        models[name] = model = MODELS[name](shape).train()
        call = torch.compile(model) if args.compile else model

        def run_forward(call=call):
            with torch.autocast("cpu", torch.bfloat16) if args.bf16 else contextlib.nullcontext():
                return call(**batch)["loss"]

        def step(model=model, run_forward=run_forward):
            run_forward().backward()
            for param in model.parameters():
                param.grad = None

        step()  # first use: allocation, compilation
        steps[name], kept[name] = step, measure_kept(run_forward, model)

    times = {name: [] for name in models}
    for _ in range(args.turns):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)

    first, tokens = args.models[0], args.batch_size * LENGTH
    precision = "bf16" if args.bf16 else "fp32"
    print(f"{args.shape}, {args.batch_size} x {LENGTH} tokens, {precision}, {torch.get_num_threads()} CPU threads")
    print(f"{'model':20} {'kept MiB':>8} {'ms/step':>8} {'ratio':>6} {'tokens/s':>9}")
    for name in models:
        median = statistics.median(times[name])
        ratio = statistics.median(a / b for a, b in zip(times[name], times[first], strict=True))
        print(f"{name:20} {kept[name] / 2**20:8.0f} {median * 1e3:8.0f} {ratio:6.2f} {tokens / median:9,.0f}")


if __name__ == "__main__":
    main()
