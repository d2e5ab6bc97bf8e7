#!/usr/bin/env python
"""Train with the swarm: compute gradients on this machine's data, average them with other peers, and step together.

A real run, on a volunteer's machine with a GPU (the monitor prints the address):

    python run_trainer.py --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX --fp16

The same on a laptop's CPU, alone, on the sample corpus:

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python run_trainer.py --experiment_prefix tiny --config_path configs/demo.json --per_device_train_batch_size 32 \\
        --target_batch_size 256 --optim adamw --learning_rate 3e-3 --warmup_steps 15 --total_steps 60 \\
        --matchmaking_time 2 --request_timeout 1 --averaging_timeout 30

Flags that all peers must share are inherited from --initial_peers unless they are set (see swarm/adoption.py). The
model is the same on every peer; the data order depends on the peer id. The same command resumes after any stop or
crash: from the newest complete checkpoint in --output_dir, or from the swarm if that is further ahead
(--resume_from_checkpoint none starts over). With --streaming, text is read on the fly (see text/streams.py), and a
restart continues after the last batch of the last complete epoch. With several GPUs, each has its own process, and
together they are one peer (see machine/ranks.py).
"""

import logging
import math
import platform
import time
from functools import partial
from pathlib import Path

from arguments import TRAINER_ARGS as GROUPS
from arguments import parse_arguments
from support.console import UserError, edge, setup_logging

if __name__ == "__main__":  # before the imports below, which take seconds
    with edge():
        groups = parse_arguments(*GROUPS, description=__doc__)

import hivemind
import torch
import transformers

from callback import CollaborativeCallback
from experiment.data import load_data
from experiment.objectives import compute_losses
from experiment.optimizer import describe_contract, make_optimizer
from machine.checkpoint import choose_state, claim_folders
from machine.devices import make_trial_batch, place_model, read_loss, stop_when_out_of_memory, tune_to_device
from machine.feed import make_feed
from machine.preflight import check_machine, run_preflight, warn_of
from machine.ranks import DeviceGroup, RankLost, list_gradients, start_ranks
from machine.training import make_trained_model, move_batch
from models.build import find_longest_sequence
from support.flags import describe_shared
from swarm.adoption import apply_settings, discover_settings, require_vouched
from swarm.contract import join_run
from swarm.identity import KEY_FILE, keep_identity, make_identity
from swarm.joining import make_dht
from swarm.membership import Membership
from swarm.processes import STOP_REQUESTED, clean_end, handle_stop_signals, shut_down
from swarm.reachability import measure_bandwidth
from text.batches import check_data_arguments, data_seed
from text.shards import ShardedSplit
from text.tokenizers import tokenizer_fingerprint
from viewing.dashboards import require_wandb
from viewing.page import StatusServer

logger = logging.getLogger("trainer")


def main(*groups) -> None:
    """Run the preflight checks or start the ranks, with the settings that the run's peers share.

    :param groups: the parsed command line, one instance per dataclass in GROUPS
    """
    *_, data_args, args = groups
    setup_logging("trainer", args.logging_dir)
    require_wandb(args)
    if args.num_train_epochs and data_args.streaming:
        raise UserError("--num_train_epochs: --streaming has no passes over the data: pass --max_steps instead")
    if args.preflight:
        membership = make_identity(groups[0])
        raise SystemExit(run_preflight(membership, *apply_settings(groups, discover_settings(groups[0], membership))))
    with start_ranks(args) as ranks:
        more = f" and {ranks.count - 1} more" if ranks.count > 1 else ""
        logger.info(
            f"hivemind {hivemind.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
            f"python {platform.python_version()}, {ranks.device}{more}"
        )
        membership, settings = None, []
        if ranks.number == 0:
            membership = make_identity(groups[0], kept_at=Path(args.output_dir) / KEY_FILE)
            settings = discover_settings(groups[0], membership)
        train(ranks, membership, *apply_settings(groups, ranks.share(settings)))


def train(ranks: DeviceGroup, membership: Membership | None, *groups) -> None:
    """Train from loading the data to saving the model.

    With several devices, each runs this in its own process, called a rank. Only rank 0 talks to the swarm and the user.
    """
    swarm, model_args, optimizer_args, averaging_args, data_args, args = groups
    is_main, device = ranks.number == 0, ranks.device

    # data and model
    with ranks.main_first():  # so that rank 0 reports errors in the data or flags for all ranks
        tokenizer, dataset, corpus = load_data(model_args, data_args, needs_validation=args.do_eval)
        model = make_trained_model(model_args, args, tokenizer)
        if is_main:
            check_data_arguments(data_args, tokenizer, corpus, find_longest_sequence(model))
            warn_of(check_machine(model.num_parameters(), args))
            claim_folders(args)
            keep_identity(swarm, Path(args.output_dir) / KEY_FILE)
            saved_state = choose_state(args, model, swarm.experiment_prefix)

    # swarm and optimizer
    optimizer = callback = None
    if is_main:
        page = StatusServer(swarm.status_port, swarm.experiment_prefix) if swarm.status_port is not None else None
        # hivemind forks its helpers. This must precede any CUDA context and the data loader's workers (note 38).
        dht, public_key = make_dht(swarm, membership)
        require_vouched(dht.vouched, groups)
        if isinstance(dataset["train"], ShardedSplit):
            # Download now, because other peers wait for a peer that has joined. A restart begins with another shard.
            dataset["train"].begin(data_seed(f"{dht.peer_id} {time.time()}", model_args.seed))
        contract = describe_contract(model, tokenizer_fingerprint(tokenizer), optimizer_args, averaging_args)
        contract = join_run(dht, public_key, contract, swarm, averaging_args, describe_shared(groups))
        averaging_args = measure_bandwidth(dht, averaging_args)
        optimizer = make_optimizer(model, dht, swarm, optimizer_args, averaging_args, client_mode=dht.client_mode)
    ranks.connect()
    ranks.require_same(tokenizer.name_or_path, tokenizer_fingerprint(tokenizer))
    reader = ranks.broadcast(str(dht.peer_id) if is_main else None) + ("" if is_main else f" rank {ranks.number}")

    # device
    seed = data_seed(reader, model_args.seed)
    make_trial = partial(make_trial_batch, model, dataset["train"], tokenizer, corpus, data_args, seed)
    with stop_when_out_of_memory(args, device, model):
        autocast, scaler = place_model(model, device, args)
        if is_main:
            optimizer.accumulate_on(device)
        target_batch_size = averaging_args.target_batch_size if is_main else None
        args = tune_to_device(model, make_trial, args, device, autocast, target_batch_size, ranks.count)
    args = ranks.broadcast(args)  # all ranks use the batch size that suits rank 0

    # the loop
    if is_main:
        callback = CollaborativeCallback(
            dht,
            optimizer,
            (swarm, model_args, optimizer_args, averaging_args, data_args, args),
            public_key,
            contract,
            model=model,
            tokenizer=tokenizer,
            dataset=dataset,
            corpus=corpus,
            autocast=autocast,
            scaler=scaler,
            num_devices=ranks.count,
            page=page,
        )
        callback.on_train_begin(saved_state)
    epoch = ranks.broadcast_state(model, optimizer.local_epoch if is_main else 0, scaler)
    seed = data_seed(reader, model_args.seed, epoch)
    feed = make_feed(dataset["train"], tokenizer, data_args, args, seed=seed, rank=ranks.number, device=device)
    max_epoch = optimizer_args.total_steps if args.max_steps is None else args.max_steps
    failure = None
    handle_stop_signals(unsaved="this peer's work since its last checkpoint")
    try:
        with stop_when_out_of_memory(args, device, model):
            run_steps(ranks, model, feed, args, autocast, scaler, optimizer, callback, epoch, max_epoch)
    except (RankLost, UserError) as e:
        if not is_main:
            raise
        ranks.kill_others()
        if not STOP_REQUESTED.is_set():
            failure = e
            logger.error(f"{e}; the state is saved: the same command continues from there")
    feed.save_position()
    if is_main:
        callback.on_train_end()
        ranks.end()
        shut_down(dht, optimizer)
        is_saved = callback.save_results(with_evaluation=not failure)
        if failure or not is_saved:
            raise SystemExit(2 if isinstance(failure, UserError) else 1)


def run_steps(ranks, model, feed, args, autocast, scaler, optimizer, callback, epoch: int, max_epoch: int) -> None:
    """Run the training loop: each rank computes gradients of its own data, and rank 0 steps with their mean.

    :param optimizer, callback: the swarm optimizer and the callback on rank 0, None on other ranks
    :param epoch: the epoch at which the loop starts
    :param max_epoch: the epoch at which it stops
    """
    while epoch < max_epoch:
        feed.begin_epoch(epoch)
        loss = accumulate_gradients(model, feed, args, ranks.device, autocast, scaler)
        if not ranks.all_continue(loss is not None):
            # A signal to all ranks, such as Ctrl-C, may reach this one last. If none comes, another rank stopped alone.
            if ranks.number == 0 and loss is not None and not STOP_REQUESTED.wait(1.0):
                raise RankLost("another rank of this machine was stopped")
            break
        ranks.average([*list_gradients(model), loss])
        if ranks.number == 0:
            scaler.unscale_(optimizer)
            # This is the only point of a step where the host waits for the device: non-finite gradients must not be
            # contributed.
            loss = read_loss(loss, list_gradients(model))
            if math.isfinite(loss):
                optimizer.step(batch_size=callback.batch_size)
            scaler.update()
            optimizer.zero_grad()
            callback.on_step_end(loss, feed.take_seconds_waited())
            epoch = optimizer.local_epoch
        else:
            model.zero_grad()
        epoch = ranks.broadcast_state(model, epoch, scaler)


def accumulate_gradients(model, feed, args, device, autocast, scaler) -> torch.Tensor | None:
    """Run the forward and backward passes of one step.

    :returns: the mean loss, a scalar tensor on the device, or None if it is time to stop
    """
    mean_loss = torch.zeros((), device=device)
    for _ in range(args.gradient_accumulation_steps):
        batch = next(feed, None)
        if batch is None:
            return None
        with autocast:
            losses = compute_losses(model, move_batch(batch, device))
        loss = losses["loss"] / args.gradient_accumulation_steps
        scaler.scale(loss).backward()
        mean_loss += loss.detach()
    return mean_loss


if __name__ == "__main__":
    with clean_end():
        main(*groups)
