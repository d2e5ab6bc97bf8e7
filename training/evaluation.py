"""Evaluation of a model in training on the validation split."""

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import takewhile

import torch
from pydantic.v1 import ValidationError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.console import handle_stop_signals
from common.signals import STOP_REQUESTED
from experiment.data import make_eval_batches
from experiment.objectives import compute_losses
from experiment.samples import sample_texts
from swarm.local_steps import at_anchor
from training.devices import is_out_of_memory
from training.figures import format_evaluation, perplexity
from training.model import move_batch
from training.state import TrainerState
from utils import Evaluation

logger = logging.getLogger("trainer")


def count_bytes(labels: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of bytes (UTF-8) of the text that these labels [batch, length] predict; -100 is no label."""
    texts = tokenizer.batch_decode([row[row != -100] for row in labels], skip_special_tokens=True)
    return sum(len(text.encode()) for text in texts)


@torch.no_grad()
def evaluate(
    model: PreTrainedModel,
    batches: Iterable[dict[str, torch.Tensor]],
    device: torch.device,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> dict[str, float]:
    """Return the loss (nats per predicted token), the accuracy over these tokens, and the number of samples.

    :param tokenizer: for a causal model, whose result then has bits_per_byte too: these compare different tokenizers
    """
    has_bytes = tokenizer is not None and model.objective.is_causal
    model.eval()
    sums = Counter()
    try:
        for batch in batches:
            if has_bytes:
                sums["bytes"] += count_bytes(batch["labels"], tokenizer)
            batch = move_batch(batch, device)
            losses = compute_losses(model, batch)
            labels = len(batch["labelled_positions"])
            sums["loss"] += losses["token_loss"] * labels
            sums["correct"] += losses["correct"]
            sums["labels"] += labels
            sums["samples"] += len(batch["input_ids"])
    finally:  # training continues if the evaluation runs out of memory
        model.train()
    loss = float(sums["loss"])
    labels = max(1, sums["labels"])
    more = {"bits_per_byte": loss / math.log(2) / max(1, sums["bytes"])} if has_bytes else {}
    return {"loss": loss / labels, "accuracy": float(sums["correct"]) / labels, "samples": sums["samples"], **more}


class Evaluator:
    """The evaluations of a trainer's model on the validation split, and the newest result."""

    def __init__(self, state: TrainerState, autocast: AbstractContextManager):
        self.state = state
        self.autocast = autocast
        #: the newest evaluation, unless it failed
        self.last: Evaluation | None = None
        #: continuations or filled blanks by the evaluated weights, see experiment/samples.py
        self.texts: list[str] = []
        #: versions of the parameters after the last evaluation
        self.versions: list[int] = []

    def compute(self) -> dict[str, float] | None:
        """Return the result of `evaluate` on the validation split, with the swarm's parameters; or None if a stop is
        requested."""
        state = self.state
        args = self.state.args
        options = dict(batch_size=args.per_device_train_batch_size, max_samples=args.max_eval_samples)
        batches = make_eval_batches(state.dataset["validation"], state.tokenizer, state.data_args, **options)
        batches = takewhile(lambda _: not STOP_REQUESTED.is_set(), batches)
        with self.autocast, at_anchor(state.optimizer.local):
            result = evaluate(state.model, batches, state.model.device, state.tokenizer)
            if STOP_REQUESTED.is_set():
                return None
            # sampling from NaN probabilities can end the process on a GPU
            self.texts = sample_texts(state.model, state.tokenizer) if math.isfinite(result["loss"]) else []
        return result

    def measure(self) -> Evaluation | None:
        """Return an evaluation if --do_eval is set, None if it failed or a stop is requested; unchanged weights are not
        evaluated again."""
        versions = [param._version for param in self.state.model.parameters()]
        if not self.state.args.do_eval or versions == self.versions:
            return self.last
        evaluation = None
        start = time.monotonic()
        epoch = self.state.optimizer.local_epoch
        entropy = self.state.corpus["unigram_entropy"]
        try:
            with self.state.optimizer.tracker.suspend_participation():
                result = self.compute()
            if result is None:
                return None
            evaluation = Evaluation(epoch=epoch, unigram_entropy=entropy, **result)
        except ValidationError as e:
            logger.warning(f"the evaluation of epoch {epoch} failed: {e}")
        except (RuntimeError, MemoryError) as e:
            if not is_out_of_memory(e):
                raise
            size = self.state.args.per_device_train_batch_size
            logger.warning(f"out of memory in evaluation, skipped: lower --per_device_train_batch_size (now {size})")
        else:
            text = f"{format_evaluation(evaluation)}, unigram entropy {entropy:.4f} nats"
            logger.info(f"validation {text}, measured in {time.monotonic() - start:.1f} s")
            for line in self.texts:
                logger.info(f"sample text: {line}")
        self.last = evaluation
        # not those from before, because at_anchor has written the same values again
        self.versions = [param._version for param in self.state.model.parameters()]
        return evaluation

    def measure_final(self) -> dict[str, float]:
        """Return the figures of an evaluation after training, or nothing if there is none.

        Model and state are saved by then. So the evaluation also takes place after a stop request, and the next one
        ends it.
        """
        STOP_REQUESTED.clear()
        handle_stop_signals()
        if not (evaluation := self.measure()):
            return {}
        loss = evaluation.loss
        return {"final_loss": loss, "final_perplexity": perplexity(loss), "final_accuracy": evaluation.accuracy}
