"""Edit me: which model is trained. `make_model` is the one function that builds it, for every role.

transformers' Auto classes make any of its language models: see `find_objective`. For one that it does not have, or to
train one in a way of its own, add a class to PRETRAINING_MODELS.

    python -c "from experiment.model import make_model; from arguments import ModelArguments; \\
        print(make_model(ModelArguments(config_path='configs/demo.json'), 1000).num_parameters())"
"""

import contextlib
import hashlib
import inspect
import json
import logging
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterable

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from arguments import ModelArguments, TrainerArguments
from models.lean_albert import LeanAlbertForPreTraining, find_labelled_positions, masked_lm_loss, widen
from support.console import UserError, first_line
from text.fetch import hub
from text.tokenizers import PROBE

logger = logging.getLogger("model")


class AlbertForPreTraining(transformers.AlbertForPreTraining):
    """HF's ALBERT with masked-LM and sentence-order heads, but vocabulary logits only where there is a label.

    About 15 % of the positions carry a label; the logits of the rest are most of a small model's work and memory, and
    nothing reads them. Saves and loads as HF's own AlbertForPreTraining.
    """

    def forward(
        self, input_ids, token_type_ids, labels, sentence_order_label, attention_mask=None, labelled_positions=None
    ) -> dict[str, torch.Tensor]:
        """Losses of one batch.

        :param input_ids: [batch, length] int64, as are token_type_ids, labels (-100: no label) and attention_mask (None
            where there is no padding)
        :param sentence_order_label: [batch] int64, 1 where the two segments were swapped
        :param labelled_positions: [labels] int64 indices into the flattened labels, see `move_batch`; looking for them
            here would make a GPU wait for the host
        :returns: loss (their sum, to train on), mlm_loss and sop_loss, scalars in nats; prediction_logits [labels,
            vocabulary]
        """
        outputs = self.albert(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        mlm_loss, logits = masked_lm_loss(outputs.last_hidden_state, self.predictions, labels, labelled_positions)
        sop_loss = cross_entropy(widen(self.sop_classifier(outputs.pooler_output)), sentence_order_label)
        losses = {"loss": mlm_loss + sop_loss, "mlm_loss": mlm_loss.detach(), "sop_loss": sop_loss.detach()}
        return {**losses, "prediction_logits": logits}


#: by the model_type of a configuration: models whose forward takes a whole batch of data.py, and returns loss (to train
#: on), mlm_loss and sop_loss, and prediction_logits [labels, vocabulary] where labelled_positions are given
PRETRAINING_MODELS = {"albert": AlbertForPreTraining, "lean_albert": LeanAlbertForPreTraining}
AUTO_CLASSES = {"mlm": transformers.AutoModelForMaskedLM, "clm": transformers.AutoModelForCausalLM}
#: by objective, for a checkpoint's card: what the training loss is of, the pipeline that the model opens in, and an
#: example for it
USES_OF = {
    "mlm_sop": ("masked words and sentence order", "fill-mask", 'f"The captain was {predict.tokenizer.mask_token}."'),
    "mlm": ("masked words", "fill-mask", 'f"The captain was {predict.tokenizer.mask_token}."'),
    "clm": ("the next word", "text-generation", '"The captain was", max_new_tokens=20, add_special_tokens=False'),
}


# ---------------------------------------------------------------- which model


def load_config(args: ModelArguments) -> PreTrainedConfig:
    """What --model_name_or_path or --config_path names; a UserError where that is none."""
    flag = "--model_name_or_path" if args.model_name_or_path else "--config_path"
    name = args.model_name_or_path or args.config_path
    if name.endswith(".json") and args.model_name_or_path:
        raise UserError(f"{flag} {name} holds no weights: give a folder or a name on the Hub, or --config_path {name}")
    if name.endswith(".json") and not os.path.isfile(name):
        raise UserError(f"{flag} {name} does not exist: choose one of configs/*.json")
    try:
        with contextlib.nullcontext() if os.path.exists(name) else hub(f"{flag} {name}", "a folder that exists"):
            return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except UserError:
        raise
    except Exception as e:  # of many kinds: each model's configuration looks at its values by itself
        raise UserError(f"{flag} {name} is no model's configuration ({first_line(e)})") from e


def is_text_alone(config: PreTrainedConfig) -> bool:
    """Whether the whole model is one that reads a text: no images or sounds, and no text to translate."""
    try:
        return not config.is_encoder_decoder and config.get_text_config() is config
    except ValueError:  # several parts of it read texts
        return False


def find_objective(args: ModelArguments) -> str:
    """What the model learns: --objective, or the first of mlm_sop, mlm and clm that its type has a class for."""
    config, objectives = load_config(args), []
    if not is_text_alone(config):
        cure = "choose another model, or the part that reads text, where it has a configuration of its own"
        raise UserError(f"the model type {config.model_type} needs more than one text to train on: {cure}")
    is_masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    if config.model_type in PRETRAINING_MODELS:
        objectives.append("mlm_sop")
    if is_masked:
        objectives.append("mlm")
    # where a type has both, is_decoder is what keeps a position from seeing those behind it
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and (not is_masked or hasattr(config, "is_decoder")):
        objectives.append("clm")
    if not objectives:
        raise UserError(
            f"the model type {config.model_type} is no language model of transformers: choose another model"
        )
    if args.objective and args.objective not in objectives:
        raise UserError(f"--objective {args.objective}: the model type {config.model_type} has {', '.join(objectives)}")
    return args.objective or objectives[0]


def make_model(args: ModelArguments, tokenizer: PreTrainedTokenizerBase | int) -> PreTrainedModel:
    """The model at epoch 0, with the same weights on every peer: pretrained, or random ones of the seed.

    Its attribute `objective` is that of `find_objective`; `input_names` are the columns of a batch that it takes, which
    the tokenizer is told; `initial_weights` are described in words, for the contract.

    :param tokenizer: the size of the vocabulary and the special tokens are its own; a number: that size alone
    """
    config, objective = load_config(args), find_objective(args)
    name, rows = args.model_name_or_path or args.config_path, config.vocab_size
    vocab_size = tokenizer if isinstance(tokenizer, int) else len(tokenizer)
    take_over_tokens(config, tokenizer, vocab_size, objective)
    options = {"dtype": torch.float32}  # a GPU's half precision is autocast's affair
    if args.attn_implementation:
        options["attn_implementation"] = args.attn_implementation
    if objective == "mlm_sop":
        model_class = PRETRAINING_MODELS[config.model_type]
        make = model_class._from_config
    else:
        model_class = AUTO_CLASSES[objective]
        make = model_class.from_config
    initial_weights = "random"
    where = f"--attn_implementation {args.attn_implementation}: " if args.attn_implementation else ""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(args.seed)
            if args.model_name_or_path:
                with calm_transformers():
                    options |= dict(config=config, output_loading_info=True, ignore_mismatched_sizes=True)
                    model, report = model_class.from_pretrained(name, trust_remote_code=False, **options)
                if mismatched := [key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]]:
                    raise ValueError(f"its weights have other shapes than its config.json says: {mismatched[0]}")
                initial_weights = f"pretrained {digest_weights(model, report['missing_keys'])}"
                if report["missing_keys"]:
                    missing = ", ".join(sorted(report["missing_keys"]))
                    logger.info(f"{name} lacks these weights, which begin at random: {missing}")
                # rows of a pretrained vocabulary that was rounded up stay
                if vocab_size > rows:
                    model.resize_token_embeddings(vocab_size, mean_resizing=False)
            else:
                config.vocab_size = vocab_size
                model = make(config, **options)
    except Exception as e:  # of many kinds: of files, of values, of what is not installed
        raise UserError(f"{where}the model {name} cannot be made ({first_line(e)})") from e
    model.train()
    model.objective, model.initial_weights = objective, initial_weights
    model.label_distance = 1 if objective == "clm" else 0  # from the place whose logits predict a label
    accepted = inspect.signature(model.forward).parameters
    has_types = objective != "clm" and (getattr(config, "type_vocab_size", None) or 0) > 1
    names = ("input_ids", "token_type_ids", "attention_mask") if has_types else ("input_ids", "attention_mask")
    model.input_names = [name for name in names if name in accepted]
    if objective != "mlm_sop" and (head := model.get_output_embeddings()) is not None:
        head.label_distance = model.label_distance
        head.register_forward_pre_hook(keep_wanted_positions)
    if not isinstance(tokenizer, int):
        tokenizer.model_input_names = list(model.input_names)  # a folder that holds both must open in a pipeline
    return model


def take_over_tokens(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | int, vocab_size: int, objective: str
) -> None:
    """Have a configuration name the tokenizer's special tokens: RoBERTa, for one, counts positions by its padding."""
    if objective == "clm" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    names = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id")
    for name in [name for name in names if hasattr(config, name)]:
        if not isinstance(tokenizer, int):
            value = getattr(tokenizer, name)
        else:
            value = getattr(config, name)
            value = None if isinstance(value, int) and value >= vocab_size else value
        if name == "pad_token_id" and objective == "clm" and value == getattr(config, "eos_token_id", None):
            value = None  # the token of padding gets no gradient, and the end of a text needs one
        try:
            setattr(config, name, value)
        except StrictDataclassError:  # it must be a number
            setattr(config, name, getattr(tokenizer, "eos_token_id", None) or 0)


@contextlib.contextmanager
def calm_transformers():
    """Without its progress bars and its table of weights that were not found."""
    log, verbosity = transformers.utils.logging, transformers.utils.logging.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)


def digest_weights(model: PreTrainedModel, left_out: Iterable[str]) -> str:
    """A short hash of the weights but those that are random: these may differ in their last bits between machines."""
    total, left_out = hashlib.sha256(), set(left_out)
    for name, param in model.named_parameters():
        if name not in left_out:
            total.update(param.detach().contiguous().numpy().data)
    return total.hexdigest()[:12]


#: fields of a configuration that do not decide what the weights compute, or that the contract has elsewhere: the
#: vocabulary is the tokenizer's
NOT_ARCHITECTURE = {
    *("architectures", "auto_map", "_name_or_path", "transformers_version", "dtype", "torch_dtype", "model_type"),
    *("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id"),
    *("use_cache", "gradient_checkpointing", "initializer_range", "output_attentions", "output_hidden_states"),
    *("return_dict", "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params"),
    *("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout", "qa_dropout"),
}


def describe_architecture(model: PreTrainedModel) -> str:
    """What peers must agree on beside the shapes of the weights: 4 layers and 12 may share the same ones.

    Of the configuration all that its own class has another default for: a later version of transformers may add fields.
    A model from a pretrained folder and one from its configuration alone are the same architecture.
    """
    config, defaults = model.config, type(model.config)().to_dict()
    fields = {
        name: value
        for name, value in config.to_dict().items()
        if name not in NOT_ARCHITECTURE and value != defaults.get(name)
    }
    sizes = [getattr(config, name, "?") for name in ("num_hidden_layers", "num_attention_heads")]
    text = json.dumps(fields, sort_keys=True, default=str)
    return f"{config.model_type} {model.objective}, {sizes[0]} layers, {sizes[1]} heads, {digest(text)}"


def digest(value: object) -> str:
    """A short hash that is the same on every machine, unlike Python's hash()."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def find_longest_sequence(model: PreTrainedModel) -> float:
    """Tokens that the model takes at most: the size of its table of positions, or infinite without one."""
    if getattr(model.config, "position_embedding_type", "absolute") == "rotary":
        return math.inf
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    if longest <= 0:
        return math.inf
    # RoBERTa and its like count from behind the number of the token of padding
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    offsets = [table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None]
    return longest - max(offsets, default=0)


# ---------------------------------------------------------------- training


def make_trained_model(
    args: ModelArguments, trainer_args: TrainerArguments, tokenizer: PreTrainedTokenizerBase | int
) -> PreTrainedModel:
    """The model as a trainer uses it: with --gradient_checkpointing, it keeps less for the backward pass. A
    UserError where it cannot be trained so, or not be saved, before any other peer has seen this one."""
    model = make_model(args, tokenizer)
    if not isinstance(tokenizer, int):
        check_saved_tokenizer(model, tokenizer)
    if trainer_args.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UserError(
                f"--gradient_checkpointing: the model {model.config.model_type} has none: leave it away, or train a "
                "LeanALBERT (--config_path configs/lean-albert.json)"
            )
        model.activation_checkpointing_enable()
    if "flash" not in (args.attn_implementation or ""):  # which no CPU has
        flags = ["--gradient_checkpointing"] * trainer_args.gradient_checkpointing
        flags += [f"--attn_implementation {args.attn_implementation}"] if args.attn_implementation else []
        try_out(model, " ".join(flags) + ": " if flags else "")
    return model


def check_saved_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Whether it comes back from a folder with this model: some model types, Qwen2's for one, have AutoTokenizer take a
    class of their own for whichever tokenizer is there."""
    with tempfile.TemporaryDirectory() as folder, calm_transformers():
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        again = transformers.AutoTokenizer.from_pretrained(folder)
    if again(PROBE, verbose=False)["input_ids"] != tokenizer(PROBE, verbose=False)["input_ids"]:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} becomes another one when it is saved with a model of type "
            f"{model.config.model_type}: take one of that model's kind"
        )


def try_out(model: PreTrainedModel, where: str = "") -> None:
    """One forward and backward pass of a tiny batch, or a UserError. hivemind averages parameters and their
    gradients: those that no gradient reaches count as zero, which is right; statistics that a forward pass gathers
    would be each peer's own.

    :param where: the flags to blame
    """
    kind, cpu = model.config.model_type, torch.device("cpu")
    ids = model.config.vocab_size - 1 - torch.arange(16).reshape(2, 8)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    batch |= {"labels": torch.where(torch.arange(8) > 0, ids, -100), "sentence_order_label": torch.tensor([0, 1])}
    buffers = {name: value.clone() for name, value in dict(model.named_buffers()).items() if name in model.state_dict()}
    try:
        with torch.random.fork_rng(devices=[]):
            compute_losses(model.train(), move_batch(batch, cpu))["loss"].backward()
            if model.objective == "clm":
                with torch.no_grad():
                    before, after = (model.eval()(ids[:, :end], use_cache=False).logits[:, :4] for end in (5, 8))
    except Exception as e:  # whatever a model comes up with that wants more than text, or has no loss
        raise UserError(
            f"{where}the model {kind} cannot be trained on text alone ({type(e).__name__}: {first_line(e)})"
        ) from e
    if model.objective == "clm" and not torch.allclose(before, after, atol=1e-3):
        raise UserError(f"the model {kind} sees the words that it is to predict: it is none for --objective clm")
    if changed := [name for name, value in model.named_buffers() if name in buffers and not value.equal(buffers[name])]:
        raise UserError(
            f"the model {kind} gathers statistics ({changed[0]}), which peers do not average: use layer norms instead"
        )
    unused = [name for name, param in model.named_parameters() if param.requires_grad and param.grad is None]
    if unused:  # or, of a mixture of experts, those that this batch did not ask
        more = f" and {len(unused) - 2} more" if len(unused) > 2 else ""
        logger.info(
            f"no gradient has reached {', '.join(unused[:2])}{more}: where none ever does, weight decay shrinks them"
        )
    model.train().zero_grad()


def keep_wanted_positions(head: torch.nn.Module, inputs: tuple) -> tuple | None:
    """Have a model's last layer compute only the logits that `compute_losses` wants: [labels, vocabulary]."""
    labelled = getattr(head, "labelled_positions", None)
    return None if labelled is None else (inputs[0].flatten(0, 1)[labelled - head.label_distance], *inputs[1:])


def compute_losses(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of one batch, scalars in nats: loss, to train on; and without gradient mlm_loss and sop_loss, mlm_loss, or
    lm_loss, as the objective is, which are means over the labels or rows. In evaluation also `correct`: how many labels
    were predicted.

    Vocabulary logits are computed only where there is a label, except by models whose last layer is none of the kind.

    :param batch: as `move_batch` returns it
    """
    positions = batch["labelled_positions"]
    targets = batch["labels"].flatten()[positions]
    if model.objective == "mlm_sop":
        outputs = model(**batch)
        losses = {name: outputs[name] for name in ("loss", "mlm_loss", "sop_loss")}
        logits = outputs["prediction_logits"]
    else:
        inputs = {name: batch[name] for name in model.input_names if name in batch}
        if model.objective == "clm":
            inputs["use_cache"] = False
        head = model.get_output_embeddings()  # None where the model does not say which layer that is
        if head is not None:
            head.labelled_positions = positions
        try:
            outputs = model(**inputs)
        finally:
            if head is not None:
                head.labelled_positions = None
        logits = outputs.logits
        if logits.dim() == 3:
            logits = logits.flatten(0, 1)[positions - model.label_distance]
        # sum / count: the mean over no label at all would be 0 / 0
        loss = cross_entropy(widen(logits), targets, reduction="sum") / max(1, len(positions))
        losses = {"loss": loss, "lm_loss" if model.objective == "clm" else "mlm_loss": loss.detach()}
        if getattr(outputs, "aux_loss", None) is not None:  # of a mixture of experts, that none of them lies idle
            losses["loss"] = loss + model.config.router_aux_loss_coef * outputs.aux_loss
    if not model.training:
        losses["correct"] = (logits.argmax(-1) == targets).sum()
    return losses


def move_batch(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The model's inputs on the device. What would make a GPU wait for the host is found out here, on the host: where
    the labels are; and whether there is no padding, so that attention needs no mask and takes its fastest way."""
    positions = find_labelled_positions(batch["labels"])
    if device.type == "cuda":  # as feed.Feed does with the rest: from other memory the host waits for the copy
        positions = positions.pin_memory()
    batch = dict(batch, labelled_positions=positions)
    if batch["attention_mask"].all():
        del batch["attention_mask"]
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, batches: Iterable[dict[str, torch.Tensor]], device: torch.device
) -> dict[str, float]:
    """Means over all batches: loss, in nats per token to be predicted; accuracy, the share of these that was; and
    sop_loss where the model has one, in nats per row. The device is waited for once."""
    model.eval()
    sums, labels, rows = Counter(), 0, 0
    try:
        for batch in batches:
            batch = move_batch(batch, device)
            losses = compute_losses(model, batch)
            count, size = len(batch["labelled_positions"]), len(batch["input_ids"])
            sums["loss"] += losses["lm_loss" if model.objective == "clm" else "mlm_loss"] * count
            sums["correct"] += losses["correct"]
            if "sop_loss" in losses:
                sums["sop_loss"] += losses["sop_loss"] * size
            labels, rows = labels + count, rows + size
    finally:  # training goes on where memory was short here
        model.train()
    result = {"loss": float(sums["loss"]) / max(1, labels), "accuracy": float(sums["correct"]) / max(1, labels)}
    return result | ({"sop_loss": float(sums["sop_loss"]) / max(1, rows)} if "sop_loss" in sums else {})
