#!/usr/bin/env python
"""Train with the swarm: compute gradients on this machine's data, average them with other peers, and step together.

A real run, on a volunteer's machine with a GPU (the monitor prints the address):

    python run_trainer.py --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX --fp16

The same on a laptop's CPU, alone, on the sample corpus:

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python run_trainer.py --experiment_prefix tiny --config_path configs/demo.json --per_device_train_batch_size 32 \\
        --target_batch_size 256 --optim adamw --learning_rate 3e-3 --warmup_steps 15 --total_steps 60 \\
        --matchmaking_time 2

Flags that all peers must share are inherited from --initial_peers unless they are set (training/settings.py). The same
command resumes after any stop or crash: from the newest checkpoint in --output_dir, or from the swarm if that is ahead.
With several GPUs, each has its own process, a rank, and together they are one peer (training/ranks.py).
"""

import math
import sys
from functools import partial
from itertools import islice
from pathlib import Path

from arguments import TRAINER_ARGS as GROUPS
from arguments import parse_arguments
from common.console import edge, setup_logging

if __name__ == "__main__":  # before the imports below, which take seconds
    with edge("the checks are not complete" if "--preflight" in sys.argv else None):
        groups = parse_arguments(*GROUPS, description=__doc__)

import torch

from callback import CollaborativeCallback
from common.console import clean_end, handle_stop_signals
from common.flags import describe_shared
from experiment.data import load_data
from experiment.objectives import compute_losses
from experiment.optimizer import make_contract, make_optimizer
from monitoring.page import open_page
from swarm.identity import KEY_FILE
from swarm.joining import Swarm
from text.batches import count_labels, data_seed
from text.tokenizers import tokenizer_fingerprint
from training.checks import prepare_start
from training.devices import make_trial_batch, place_model, read_loss, stop_when_out_of_memory, tune_to_device
from training.evaluation import Evaluator
from training.model import make_trainable_model, move_batch
from training.prefetch import make_feed
from training.preflight import run_preflight
from training.progress import ProgressDisplay
from training.ranks import join_ranks, list_gradients
from training.settings import begin, make_swarm_config, require_attested
from training.state import TrainerState


def main(*groups) -> None:
    """Run the preflight checks, or train; `groups` are instances of GROUPS. Only rank 0 talks to the swarm."""
    *_, args = groups
    setup_logging("trainer", args.logging_dir)
    if args.preflight:
        raise SystemExit(run_preflight(*begin(groups)))
    ranks = join_ranks(args)
    optimizer = None
    if ranks.is_main:
        membership, groups = begin(groups, kept_at=Path(args.output_dir) / KEY_FILE)
    swarm_args, model_args, optimizer_args, averaging_args, data_args, args = groups

    # data and model
    tokenizer, dataset, corpus = load_data(model_args, data_args, needs_validation=args.do_eval)
    model = make_trainable_model(model_args, args, tokenizer)

    # swarm and optimizer
    if ranks.is_main:
        saved_state = prepare_start(groups, model, tokenizer, corpus)
        flags = describe_shared(groups)
        ranks.start_others(swarm_args, flags)
        page = open_page(swarm_args)
        # hivemind forks its helpers. This must precede any CUDA context and the data loader's workers (note 38).
        swarm = Swarm.join(make_swarm_config(swarm_args), membership)
        require_attested(swarm, groups)
        contract = make_contract(model, tokenizer_fingerprint(tokenizer), optimizer_args, averaging_args, flags)
        swarm.agree_on(contract)
        swarm.measure_bandwidth(averaging_args.bandwidth)
        optimizer = make_optimizer(model, swarm, optimizer_args, averaging_args, folder=Path(args.output_dir) / "log")
    ranks.connect()

    # device
    device = ranks.device
    trial = partial(make_trial_batch, model, dataset["train"], tokenizer, corpus, data_args, model_args.seed)
    with stop_when_out_of_memory(args, device, model):
        worker = ranks.distribute(model)  # the model that computes
        autocast, scaler = place_model(worker, device, args)
        averaging = averaging_args if ranks.is_main else None
        args = tune_to_device(worker, trial, args, device, autocast, averaging, ranks.count)

    # the loop
    start = None
    if ranks.is_main:
        groups = *groups[:-1], args
        state = TrainerState(swarm, optimizer, model, tokenizer, dataset, corpus, scaler, groups, ranks.count)
        callback = CollaborativeCallback(state, Evaluator(state, autocast), ProgressDisplay(args), page)
        with stop_when_out_of_memory(args, device, model):
            callback.on_train_begin(saved_state)
        handle_stop_signals(unsaved="this peer's work since its last checkpoint")
        start = args, str(swarm.dht.peer_id), state.final_epoch
    args, peer_id, final_epoch = ranks.broadcast(start)  # all ranks use the batch size that suits rank 0
    epoch = ranks.broadcast_state(model, optimizer.local_epoch if optimizer else 0, scaler)
    seed = data_seed(f"{peer_id} rank {ranks.number}", model_args.seed, epoch)
    feed = make_feed(dataset["train"], tokenizer, data_args, args, seed=seed, rank=ranks.number, device=device)
    with ranks.catch_failure(), stop_when_out_of_memory(args, device, model):
        while epoch < final_epoch:
            feed.begin_epoch(epoch)
            loss = accumulate_gradients(worker, ranks, feed, args, device, autocast, scaler)
            if not ranks.all_continue(loss is not None):
                break
            loss = ranks.average_gradients(model, loss)
            if ranks.is_main:
                scaler.unscale_(optimizer)
                # The host waits for the device here, else only for masks, because non-finite gradients must not spread.
                loss = read_loss(loss, list_gradients(model))
                optimizer.step(batch_size=state.samples_per_step if math.isfinite(loss) else 0)
                scaler.update()
                optimizer.zero_grad()
                callback.on_step_end(loss, **feed.take_counts())
            else:
                model.zero_grad()
            epoch = ranks.broadcast_state(model, optimizer.local_epoch if optimizer else 0, scaler)
    feed.save_position()

    # saving
    if ranks.is_main:
        callback.on_train_end()
        ranks.end()
        swarm.leave(optimizer)
        is_saved = callback.save_results(with_evaluation=not ranks.exit_code)
        raise SystemExit(ranks.exit_code or not is_saved)


def accumulate_gradients(model, ranks, feed, args, device, autocast, scaler) -> torch.Tensor | None:
    """Run one step's forward and backward passes; return the mean loss on the device, or None if it is time to stop."""
    count = args.gradient_accumulation_steps
    batches = list(islice(feed, count))
    labels_per_batch = ranks.average_number(count_labels(batches) / count)  # so all labels of the step weigh the same
    losses = []
    for batch in ranks.align(batches):
        with autocast:
            loss = compute_losses(model, move_batch(batch, device), labels_per_batch)["loss"] / count
        scaler.scale(loss).backward()
        losses.append(loss.detach())
    return sum(losses) if len(losses) == count else None


if __name__ == "__main__":
    with clean_end("the checks are not complete" if groups[-1].preflight else None):
        main(*groups)
