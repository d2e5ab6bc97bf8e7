#!/usr/bin/env python
"""Collaborative language-model training in one file, on plain hivemind 1.1.12: read this before anything else here.

Each peer computes gradients on its own data. Once all peers together have `--target_batch_size` samples, they average
their gradients and make the same optimizer step. That is one *epoch*. Peers find each other through a DHT, so there is
no central server. Here they learn to predict the next byte of six novels by Jane Austen (sample_data/austen.txt.xz).

    python examples/minimal_trainer.py
    python examples/minimal_trainer.py --initial_peers ADDRESS

The first command prints its address. The second one, in another terminal or on another machine of the same network,
joins with that address, and so does every further peer. A CPU is enough: two peers on two cores make an epoch in about
five seconds. The loss starts at 5.8, and 3.09 is the best that byte frequencies alone can reach. After 45 epochs, or
four minutes, it is near 2.5. Ctrl-C ends a peer; the others continue.

This is the idea that hivemind's ALBERT example had, and the rest of this repository is what a run over the internet
needs beyond it. This file imports none of that:

    this example                                              the answer here
    --------------------------------------------------------  ------------------------------------------
    loses the gradients of a failed round                     swarm/optimizer.py, swarm/gradients.py
    waits in each round for a peer that died                  swarm/matchmaking.py, swarm/progress.py
    waits for the slowest uplink in each round                swarm/uplink.py, swarm/allreduce.py
    sends whole gradients in each epoch                       swarm/log_steps.py, swarm/sparse.py
    cannot connect two peers behind routers                   swarm/reachability.py
    lets one malicious or broken peer spoil all weights       swarm/guard.py, swarm/trust.py
    mixes peers whose model or settings differ                swarm/contract.py
    takes the state from one donor, unchecked                 swarm/state_download.py
    needs epochs longer than its matchmaking time             swarm/matchmaking.py
    leaves helper processes behind after kill -9              swarm/processes.py
    saves no checkpoint and cannot resume                     training/checkpoint.py
    shows the loss of one peer, not of the swarm              run_training_monitor.py

run_trainer.py is the same loop with all of these. docs/hivemind.md has the details by number.
"""

import argparse
import logging
import lzma
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import hivemind
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

CORPUS = Path(__file__).parent.parent / "sample_data" / "austen.txt.xz"
# All peers must agree on everything from here to LEARNING_RATE, and nothing checks that they do.
RUN_ID = "minimal"  # the prefix of the run's keys in the DHT
SEQUENCE_LENGTH = 64  # bytes
VOCAB_SIZE = 256  # a token is a byte, so there is no tokenizer to train or download
MODEL = GPT2Config(
    vocab_size=VOCAB_SIZE,
    n_positions=SEQUENCE_LENGTH,
    n_embd=128,
    n_layer=2,
    n_head=4,
    # With GPT-2's own 0.02, a model this small takes hundreds of steps to learn more than byte frequencies.
    initializer_range=0.06,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=None,
    eos_token_id=None,
)
LEARNING_RATE = 3e-3

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--initial_peers", nargs="+", default=[], help="addresses of peers to join; none: start a run")
parser.add_argument("--host_maddrs", nargs="+", default=["/ip4/0.0.0.0/tcp/0"], help="where this peer listens")
parser.add_argument("--batch_size", type=int, default=32, help="samples in a batch of this peer")
parser.add_argument("--target_batch_size", type=int, default=512, help="samples in an epoch; must match on all peers")
parser.add_argument("--verbose", action="store_true", help="log what the optimizer does")


def detach_helper() -> None:
    """Detach a helper process of hivemind from the terminal; called in the helper when it starts."""
    os.setpgrp()  # Ctrl-C goes to a whole process group, but this peer needs its helpers to say goodbye
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # they log a traceback for each failed round and departed peer


def main() -> None:
    args = parser.parse_args()
    torch.set_num_threads(max(1, os.cpu_count() // 2))  # leaves room for a second peer on this machine
    # hivemind runs the DHT and two averagers in helper processes, which must inherit what they share with this one.
    multiprocessing.set_start_method("fork", force=True)
    os.register_at_fork(after_in_child=detach_helper)
    stop_requested = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop_requested.set())

    with lzma.open(CORPUS) as corpus:
        text = torch.frombuffer(bytearray(corpus.read()), dtype=torch.uint8)
    torch.manual_seed(0)  # all peers start from the same weights
    model = GPT2LMHeadModel(MODEL)

    # wait_timeout: seconds; hivemind drops a peer that answers later once, and its own 3 s are short on a busy CPU.
    dht = hivemind.DHT(initial_peers=args.initial_peers, host_maddrs=args.host_maddrs, wait_timeout=10, start=True)
    print("join with: --initial_peers", *dht.get_visible_maddrs(), flush=True)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id=RUN_ID,
        batch_size_per_step=args.batch_size,
        target_batch_size=args.target_batch_size,
        params=model.parameters(),
        # hivemind lets it make a step with zero gradients first (docs/hivemind.md, note 8), the same on all peers.
        optimizer=lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE),
        matchmaking_time=4.0,  # seconds to form a group; must exceed hivemind's request timeout of 3 s
        averaging_timeout=30.0,  # seconds until a round has failed
        average_state_every=5,  # epochs; peers also average their parameters, which drift apart when rounds fail
        verbose=args.verbose,
    )
    # A flag ends the loop, because an exception could strike in the middle of a round. SIGINT is in the list once more
    # because the optimizer has made this process ignore it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop_requested.set())

    if args.initial_peers:
        optimizer.load_state_from_peers()  # step() does the same for a peer that falls behind
    # Seeded by the peer id, so that no two peers read the same batches.
    generator = torch.Generator().manual_seed(int.from_bytes(dht.peer_id.to_bytes()[-8:], "big"))
    epoch, losses = optimizer.local_epoch, []
    while not stop_requested.is_set():
        starts = torch.randint(len(text) - SEQUENCE_LENGTH, (args.batch_size, 1), generator=generator)
        batch = text[starts + torch.arange(SEQUENCE_LENGTH)].long()
        logits = model(batch).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        # Adds this gradient to those of the epoch. If the swarm has enough samples, averages and updates the model.
        optimizer.step()
        losses.append(loss.item())
        if optimizer.local_epoch != epoch:
            epoch, mean, samples = optimizer.local_epoch, sum(losses) / len(losses), len(losses) * args.batch_size
            peers = optimizer.tracker.global_progress.num_peers
            print(f"epoch={epoch} loss={mean:.3f} peers={peers} samples={samples}", flush=True)
            losses = []

    logging.disable()
    optimizer.shutdown()  # withdraws this peer's record, and ends its part in a round that has begun
    # dht.shutdown() may wait for averagers that have ended, and then leave its daemon running.
    os.killpg(dht.pid, signal.SIGTERM)


if __name__ == "__main__":
    main()
