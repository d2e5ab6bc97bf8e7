"""Train with the swarm: compute gradients on this machine's data, average them with the others, step together.

A real run, on the machine of a volunteer with a GPU (the monitor prints the address):

    python run_trainer.py --experiment_prefix my_albert --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX --fp16

The same on a laptop's CPU, alone, on the sample corpus:

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python run_trainer.py --experiment_prefix tiny --config_path configs/demo.json --per_device_train_batch_size 32 \\
        --target_batch_size 256 --optim adamw --learning_rate 3e-3 --warmup_steps 15 --total_steps 60 \\
        --matchmaking_time 2 --request_timeout 1 --averaging_timeout 30

The model is the same on every peer; the data order is not: it comes from the peer's id. The same command again goes on
where the last one ended, however it ended: from the newest whole checkpoint in --output_dir, or from the swarm if that
is further (--resume_from_checkpoint none starts anew). With --streaming it reads text on the way (see text/streams.py),
and a restart goes on behind the last batch of the last whole epoch. With several GPUs each gets a process of its own,
and all of them together are one peer (see machine/ranks.py).
"""

import json
import logging
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

from arguments import (
    AveragingArguments,
    DataArguments,
    ModelArguments,
    OptimizerArguments,
    SwarmArguments,
    TrainerArguments,
    parse_arguments,
)
from support.console import UserError, edge, log_to_folder, setup_logging

GROUPS = (SwarmArguments, ModelArguments, OptimizerArguments, AveragingArguments, DataArguments, TrainerArguments)

if __name__ == "__main__":  # before the imports below, which take seconds
    with edge():
        groups = parse_arguments(*GROUPS, description=__doc__)

import hivemind
import torch
import transformers

from callback import CollaborativeCallback, find_stream, save_stream
from experiment.data import load_data, make_eval_batches, make_train_batches
from experiment.objectives import compute_losses
from experiment.optimizer import describe_contract, make_optimizer
from machine.checkpoint import CheckpointError, choose_state, save_model
from machine.devices import (
    Feed,
    compile_model,
    explain_out_of_memory,
    find_batch_size,
    is_out_of_memory,
    make_trial_batch,
    place_model,
    set_batch_size,
    stop_when_out_of_memory,
)
from machine.preflight import run_preflight, warn_at_start
from machine.ranks import RankLost, Ranks, list_gradients, start_ranks
from machine.training import evaluate, make_trained_model, move_batch
from models.build import find_longest_sequence
from support.files import lock_folder, write_file
from swarm.addresses import select_for_others
from swarm.contract import join_run
from swarm.joining import make_dht, warn_of_local_addresses
from swarm.processes import STOP_REQUESTED, clean_end, handle_stop_signals, shut_down
from swarm.reachability import measure_bandwidth
from swarm.status import StatusServer
from text.batches import check_data_arguments, data_seed, load_stream_state, sequence_length_at
from text.shards import ShardedSplit
from text.tokenizers import tokenizer_fingerprint
from utils import keep_signing_key, perplexity
from viewing.dashboards import finish_dashboard, require_wandb, start_trainer_dashboard

logger = logging.getLogger("trainer")


def main(*groups) -> None:
    """:param groups: instances of GROUPS"""
    args = groups[-1]
    setup_logging("trainer")
    if args.logging_dir:
        log_to_folder("trainer", args.logging_dir)
    require_wandb(args)
    if args.preflight:  # of those that torchrun starts, one will do
        raise SystemExit(run_preflight(*groups) if os.environ.get("RANK", "0") == "0" else 0)
    ranks = start_ranks(args)
    try:
        if ranks.number == 0:
            train(ranks, *groups)
        else:
            compute_for_rank_0(ranks, *groups)
    except RankLost as e:
        if not STOP_REQUESTED.is_set():
            logger.error(f"{e}; ending")
            raise SystemExit(1) from e
    finally:
        ranks.remove_files()


def train(
    ranks: Ranks,
    swarm: SwarmArguments,
    model_args: ModelArguments,
    optimizer_args: OptimizerArguments,
    averaging_args: AveragingArguments,
    data_args: DataArguments,
    args: TrainerArguments,
) -> None:
    """The trainer's life from its first look at the data to the saved model. Of several ranks, that of rank 0."""
    device = ranks.device
    max_epoch = optimizer_args.total_steps if args.max_steps is None else args.max_steps
    logger.info(
        f"hivemind {hivemind.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"python {platform.python_version()}, {device}{f' and {ranks.count - 1} more' if ranks.count > 1 else ''}"
    )

    if args.num_train_epochs and data_args.streaming:
        raise UserError(
            "--num_train_epochs: --streaming reads text without end, in no passes: give --max_steps instead"
        )
    tokenizer, dataset, corpus = load_data(model_args, data_args, needs_validation=args.do_eval)
    model = make_trained_model(model_args, args, tokenizer)
    check_data_arguments(data_args, tokenizer, corpus, find_longest_sequence(model))
    for flag, folder in (("--output_dir", args.output_dir), ("--state_path", os.path.dirname(args.state_path or ""))):
        try:
            os.makedirs(folder or ".", exist_ok=True)
        except OSError as e:
            raise UserError(f"{flag}: {folder} cannot be written ({e.strerror}): choose another folder") from e
    lock_folder("--output_dir", args.output_dir)
    keep_signing_key(Path(args.output_dir) / "signing_key")
    saved_state = choose_state(args, model, swarm.experiment_prefix)
    stream_state = None
    if data_args.streaming and args.resume_from_checkpoint != "none":
        stream_state = load_stream_state(find_stream(args.output_dir, 0))

    warn_at_start(model, args)
    ranks.announce("is well")
    ranks.wait_for("is ready", ranks.others)
    page = StatusServer(swarm.status_port, swarm.experiment_prefix) if swarm.status_port is not None else None
    # hivemind forks its helpers: all of them before any CUDA context and before the data loader's workers (note 38)
    dht, public_key = make_dht(swarm)
    if isinstance(dataset["train"], ShardedSplit):
        # now: the order comes from the peer's id, and a peer that has joined should not keep others waiting
        dataset["train"].begin(data_seed(str(dht.peer_id), model_args.seed))
    contract = describe_contract(model, tokenizer_fingerprint(tokenizer), optimizer_args, averaging_args)
    contract = join_run(dht, swarm.experiment_prefix, public_key, contract, averaging_args.metadata_expiration)
    averaging_args = measure_bandwidth(dht, averaging_args)
    optimizer = make_optimizer(model, dht, swarm, optimizer_args, averaging_args, client_mode=dht.client_mode)
    stop = handle_stop_signals()
    ranks.connect()
    with stop_when_out_of_memory(args, device, model):
        autocast, scaler = place_model(model, device, args)
    optimizer.accumulate_on(device)
    seed = data_seed(str(dht.peer_id), model_args.seed)
    if args.torch_compile or args.per_device_train_batch_size == "auto":
        trial = make_trial_batch(model, dataset["train"], tokenizer, corpus, data_args, seed)
    if args.torch_compile:
        with stop_when_out_of_memory(args, device, model):
            compile_model(model, trial, device, autocast)
    if args.per_device_train_batch_size == "auto":
        largest_step = averaging_args.target_batch_size // (8 * ranks.count)
        args = set_batch_size(args, find_batch_size(model, trial, device, autocast, largest_step, ranks.count))
    batch_size_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks.count
    groups = (swarm, model_args, optimizer_args, averaging_args, data_args, args)
    arguments = {name: value for group in groups for name, value in asdict(group).items()}
    callback = CollaborativeCallback(
        dht,
        optimizer,
        swarm,
        args,
        public_key,
        contract,
        model=model,
        tokenizer=tokenizer,
        scaler=scaler,
        arguments=arguments,
        num_devices=ranks.count,
    )
    try:
        callback.resume(saved_state)
    except CheckpointError as e:
        raise UserError(f"cannot resume: {e}; --resume_from_checkpoint none starts anew") from e
    callback.dashboard = start_trainer_dashboard(args, swarm.experiment_prefix, arguments, saved_state is not None)
    logger.info(
        f"run {swarm.experiment_prefix} until epoch {max_epoch}, {model.num_parameters():,} parameters, "
        f"peer {dht.peer_id}{' in client mode' if dht.client_mode else ''}"
    )
    if not dht.client_mode:
        logger.info(f"others may join through --initial_peers {select_for_others(dht.get_visible_maddrs())[0]}")
    warn_of_local_addresses(dht, swarm)
    if page:
        page.serve(dht, callback.read_progress)

    def measure() -> dict:
        """Loss and accuracy on the validation split, see utils.Evaluation."""
        options = dict(batch_size=args.per_device_eval_batch_size, max_samples=args.max_eval_samples)
        batches = make_eval_batches(dataset["validation"], tokenizer, data_args, **options)
        with autocast:
            result = evaluate(model, batches, device)
        samples = sum(len(batch["input_ids"]) for batch in batches)
        return {"epoch": optimizer.local_epoch, "samples": samples, **result}

    summary = {"unigram_entropy": corpus["unigram_entropy"], "peer_id": str(dht.peer_id)}
    if args.do_eval:
        callback.evaluate = measure
        if callback.measure():
            summary["start_loss"] = callback.evaluation["loss"]
            logger.info(f"unigram entropy {corpus['unigram_entropy']:.3f} nats")

    callback.on_train_begin()
    if optimizer.local_epoch >= max_epoch:
        logger.info(f"epoch {max_epoch} is reached: raise --max_steps, or --resume_from_checkpoint none starts anew")
    batches = make_train_batches(
        dataset["train"],
        tokenizer,
        data_args,
        batch_size=args.per_device_train_batch_size,
        seed=data_seed(str(dht.peer_id), model_args.seed, optimizer.local_epoch),
        num_workers=args.dataloader_num_workers,
        stop=stop,
        state=stream_state,
    )
    callback.stream = batches if data_args.streaming else None
    batches.set_sequence_length(sequence_length_at(optimizer.local_epoch, data_args))
    callback.feed = feed = Feed(batches, device)
    sizes = (args.per_device_train_batch_size, args.gradient_accumulation_steps)
    ranks.share((str(dht.peer_id), optimizer.local_epoch, sizes, tokenizer_fingerprint(tokenizer)))
    ranks.follow(model, optimizer.local_epoch, scaler)

    if args.num_train_epochs:
        callback.most_samples = args.num_train_epochs * len(dataset["train"])
    failure, exit_code = None, 0
    try:
        while optimizer.local_epoch < max_epoch:
            if callback.has_read_all():
                logger.info(f"{args.num_train_epochs:g} passes over {len(dataset['train']):,} samples are done: ending")
                callback.evaluate_for_others()
                stop.set()
            loss = accumulate_gradients(model, feed, args, device, autocast, scaler, stop)
            if not ranks.agree(loss is not None):
                # who stops all of them tells one after the other
                if loss is not None and not stop.wait(1.0):
                    failure, exit_code = "another rank of this machine was stopped; the state is saved", 1
                break
            ranks.average([*list_gradients(model), loss])
            scaler.unscale_(optimizer)
            # the one point of a step where the host waits for the device: what is not finite must not be contributed
            is_finite = all_finite([*list_gradients(model), loss])
            if is_finite:
                callback.add_loss(loss)
                optimizer.step(batch_size=batch_size_per_step)
            else:
                callback.skip_step()
            scaler.update()
            optimizer.zero_grad()
            callback.on_step_end(samples=batch_size_per_step * is_finite)
            ranks.follow(model, optimizer.local_epoch, scaler)
            batches.set_sequence_length(sequence_length_at(optimizer.local_epoch, data_args))
    except RankLost as e:
        ranks.kill_others()
        if not stop.is_set():
            failure, exit_code = f"{e}; the state is saved", 1
    except (RuntimeError, MemoryError) as e:
        if not is_out_of_memory(e):
            raise
        ranks.kill_others()
        cure = explain_out_of_memory(args, device, model)
        failure, exit_code = f"{cure}. The state is saved: the same command goes on from there", 2
    if failure:
        logger.error(failure)

    # rounds that run in the background still change the parameters
    optimizer.state_averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)
    callback.on_train_end()
    finish_dashboard(callback.dashboard)
    summary |= {
        "epoch": optimizer.local_epoch,
        "samples": optimizer.total_samples,
        "epochs_here": callback.epochs,
        "epochs_averaged": callback.averaged_epochs,
        "failed_rounds": optimizer.failed_rounds,
        "skipped_steps": callback.skipped_steps,
        "computed_samples": callback.samples_before + callback.computed_samples,
    }
    if data_args.streaming:
        summary["sources"] = dataset["train"].count_records()
        for name, counts in summary["sources"].items():
            logger.info(f"source {name}: {counts['documents']:,} documents read, {counts['broken']:,} broken records")
    ranks.end()
    shut_down(dht, optimizer)
    saved = save_model(model, tokenizer, os.path.join(args.output_dir, "model"), extra={"epoch": optimizer.local_epoch})
    if args.do_eval and not failure and callback.measure():
        final = callback.evaluation
        summary |= {"final_loss": final["loss"], "final_perplexity": perplexity(final["loss"])}
        summary["final_accuracy"] = final["accuracy"]
        logger.info(f"validation loss {final['loss']:.3f}, unigram entropy {corpus['unigram_entropy']:.3f} nats")
    summary_text = json.dumps(summary, indent=2) + "\n"
    write_file(os.path.join(args.output_dir, "summary.json"), lambda file: file.write(summary_text.encode()))
    logger.info(
        f"epoch {summary['epoch']}, contributed {summary['samples']:,} samples, averaged with others in "
        f"{summary['epochs_averaged']} of {summary['epochs_here']} epochs; the model is "
        + (f"in {args.output_dir}" if saved else "NOT SAVED, see the warning above")
    )
    if exit_code:
        raise SystemExit(exit_code)


def compute_for_rank_0(
    ranks: Ranks,
    swarm: SwarmArguments,
    model_args: ModelArguments,
    optimizer_args: OptimizerArguments,
    averaging_args: AveragingArguments,
    data_args: DataArguments,
    args: TrainerArguments,
) -> None:
    """The life of another rank: gradients of its own data for rank 0, which speaks to the swarm and to the user."""
    setup_logging(f"trainer rank {ranks.number}")
    if args.logging_dir:
        log_to_folder(f"trainer rank {ranks.number}", args.logging_dir)
    logging.getLogger().setLevel(logging.WARNING)
    device = ranks.device
    max_epoch = optimizer_args.total_steps if args.max_steps is None else args.max_steps
    # what is wrong with data or flags, rank 0 has said
    ranks.wait_for("is well", [0])
    tokenizer, dataset, corpus = load_data(model_args, data_args, needs_validation=args.do_eval)
    model = make_trained_model(model_args, args, tokenizer)
    stream_state = None
    if data_args.streaming and args.resume_from_checkpoint != "none":
        stream_state = load_stream_state(find_stream(args.output_dir, ranks.number))
    ranks.announce("is ready")
    ranks.connect()
    stop = handle_stop_signals()
    with stop_when_out_of_memory(args, device, model):
        autocast, scaler = place_model(model, device, args)
        if args.torch_compile:  # while rank 0 does
            trial = make_trial_batch(model, dataset["train"], tokenizer, corpus, data_args, model_args.seed)
            compile_model(model, trial, device, autocast)
    peer_id, epoch, sizes, fingerprint = ranks.share()
    if fingerprint != tokenizer_fingerprint(tokenizer):
        raise UserError(
            f"{tokenizer.name_or_path} has changed while the ranks of this machine started: start them again"
        )
    args = set_batch_size(args, sizes)
    seed = data_seed(f"{peer_id} rank {ranks.number}", model_args.seed, epoch)
    batches = make_train_batches(
        dataset["train"],
        tokenizer,
        data_args,
        batch_size=args.per_device_train_batch_size,
        seed=seed,
        num_workers=args.dataloader_num_workers,
        stop=stop,
        state=stream_state,
    )
    stream = batches if data_args.streaming else None
    feed = Feed(batches, device)
    epoch = ranks.follow(model, epoch, scaler)
    batches.set_sequence_length(sequence_length_at(epoch, data_args))
    try:
        while epoch < max_epoch:
            loss = accumulate_gradients(model, feed, args, device, autocast, scaler, stop)
            if not ranks.agree(loss is not None):
                break
            ranks.average([*list_gradients(model), loss])
            model.zero_grad()
            last_epoch, epoch = epoch, ranks.follow(model, epoch, scaler)
            if epoch != last_epoch:
                save_stream(stream, args.output_dir, ranks.number)
            batches.set_sequence_length(sequence_length_at(epoch, data_args))
    except (RuntimeError, MemoryError) as e:
        if not is_out_of_memory(e):
            raise
        logger.error(explain_out_of_memory(args, device, model))
        raise SystemExit(2) from e


def accumulate_gradients(
    model: torch.nn.Module,
    feed: Iterator[dict[str, torch.Tensor]],
    args: TrainerArguments,
    device: torch.device,
    autocast: AbstractContextManager,
    scaler: torch.amp.GradScaler,
    stop: threading.Event,
) -> torch.Tensor | None:
    """One step's forward and backward passes; their mean loss on the device, or None when it is time to stop."""
    mean_loss = torch.zeros((), device=device)
    for _ in range(args.gradient_accumulation_steps):
        batch = None if stop.is_set() else next(feed, None)
        if batch is None:
            return None
        with autocast:
            losses = compute_losses(model, move_batch(batch, device))
        loss = losses["loss"] / args.gradient_accumulation_steps
        scaler.scale(loss).backward()
        mean_loss += loss.detach()
    return mean_loss


def all_finite(tensors: list[torch.Tensor]) -> bool:
    """Whether these are finite numbers throughout; waits for the device."""
    return bool(torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]).isfinite().all())


if __name__ == "__main__":
    with clean_end():
        main(*groups)
