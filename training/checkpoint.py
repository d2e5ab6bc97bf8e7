"""Write, find and load training states. A state that was not written completely is never loaded.

A checkpoint is a folder `checkpoint-{epoch}` that `from_pretrained` reads: the weights as safetensors, the
configuration and the tokenizer. A large base model of adapters has several files. `training_state.pt` holds the rest of
the state. `training_state.json`, which is written last, holds the epoch and the size and SHA-256 of every other file; a
folder with other files is not loaded. README.md shows how to open the model.

A state is a dictionary with the keys of RuLeanALBERT: model (weights by name), optimizer and scheduler (their
state_dict) and local_epoch. A trainer adds total_samples, counters, scaler, random, arguments and versions.
"""

import contextlib
import json
import logging
import platform
import shutil
import time
from pathlib import Path

import hivemind
import numpy
import torch
import transformers
from safetensors.torch import load_file
from transformers.utils.logging import disable_progress_bar

from arguments import TrainerArguments
from common.console import UserError
from common.files import describe_file, write_whole
from models.build import describe_architecture
from text.tokenizers import tokenizer_fingerprint

logger = logging.getLogger("checkpoint")

CARD = Path(__file__).with_name("card.md")
VERSIONS = {module.__name__: str(module.__version__) for module in (hivemind, torch, transformers, numpy)}
VERSIONS["python"] = platform.python_version()
#: of a file of weights below adapters, unless one tensor is larger. To write a file, safetensors copies all its tensors
#: from a GPU to the host's memory.
MAX_FILE_BYTES = 2 * 10**9


class CheckpointError(Exception):
    """An error that says why a training state is unusable, or that it belongs to a different model."""


def save_model(
    model,
    tokenizer,
    folder: str | Path,
    extra: dict,
    state: dict | None = None,
    extra_files: dict[str, bytes] | None = None,
) -> bool:
    """Write model, tokenizer and `extra` (JSON) to `folder`, atomically, and replace it if it exists.

    A reader, or a restart after a power cut, finds no half of a folder. If the disk is full or missing, this logs a
    warning and returns False, because training matters more than one checkpoint.

    :param state: a training state to write instead of the model's present weights
    :param extra_files: other files by name, which users may edit without making the folder incomplete
    """
    folder = Path(folder).absolute()

    def write(unfinished: Path) -> None:
        for leftover in (*folder.parent.glob(".checkpoint-*.unfinished"), unfinished):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished.mkdir(parents=True)
        disable_progress_bar()  # "Writing model shards" would clutter the log at each checkpoint
        write_weights(model, state and state["model"], unfinished)
        if state is not None:
            weights = state["model"]
            written = load_weights(unfinished).keys()
            stored = {name for name in weights if find_plain_name(name) in written}
            # by address, because safetensors keeps only one of the names of tied weights
            places = {weights[name].data_ptr() for name in stored}
            others = {name: tensor for name, tensor in weights.items() if tensor.data_ptr() not in places}
            with open(unfinished / "training_state.pt", "wb") as file:
                own = {"model": others, "stored": sorted(stored), "tokenizer": tokenizer_fingerprint(tokenizer)}
                torch.save({**state, **own}, file)
        tokenizer.save_pretrained(unfinished)
        names = sorted(str(path.relative_to(unfinished)) for path in unfinished.rglob("*") if path.is_file())
        files = {name: describe_file(unfinished / name) for name in names}
        for name, content in (extra_files or {}).items():
            (unfinished / name).write_bytes(content)
        text = json.dumps({**extra, "files": files}, indent=2)
        (unfinished / "training_state.json").write_text(text + "\n", encoding="utf-8")

    return write_whole(folder, write)


def write_weights(model, weights: dict[str, torch.Tensor] | None, folder: Path) -> None:
    """Write configuration and weights (None: the model's present ones) in the format of from_pretrained.

    transformers renames some weights (mixtures of experts, gpt_neox), omits others, and saves only the adapters of a
    model with adapters.
    """
    weights = model.state_dict() | (weights or {})  # a state lacks those below adapters
    model.save_pretrained(folder, state_dict=dict(weights))  # a copy, because save_pretrained empties it
    if (folder / "adapter_config.json").exists():
        # save the base model along with its adapters, so that the folder is complete
        with torch.device("meta"):
            plain = type(model)._from_config(model.config, dtype=model.dtype)
        adapted = {find_plain_name(name): tensor for name, tensor in weights.items()}
        base = {name: adapted[name] for name in plain.state_dict()}
        plain.save_pretrained(folder, state_dict=base, max_shard_size=MAX_FILE_BYTES)


def find_plain_name(name: str) -> str:
    """Return the name of a weight in the files of a model without adapters."""
    return name.replace(".base_layer.", ".")


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in a folder's safetensors files by name."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def save_checkpoint(
    model,
    tokenizer,
    output_dir: str | Path,
    state: dict,
    extra: dict,
    save_total_limit: int,
    extra_files: dict[str, bytes] | None = None,
) -> bool:
    """Save the model to `checkpoint-{epoch}`, then remove the oldest checkpoints beyond the limit. Later checkpoints,
    which exist if the swarm has gone back, are moved away first.

    :param extra_files: see `save_model`; default: the model's card
    """
    output_dir = Path(output_dir)
    epoch = state["local_epoch"]
    try:
        set_aside(output_dir, epoch)
    except OSError as e:
        logger.warning(f"checkpoints beyond epoch {epoch} could not be moved: {e}")
    folder = output_dir / f"checkpoint-{epoch}"
    files = extra_files or {"README.md": write_readme(model, folder)}
    is_saved = save_model(model, tokenizer, folder, {"epoch": epoch, **extra}, state, files)
    if is_saved:
        # not the saved one: later ones may still be there
        for outdated in [path for path in find_checkpoints(output_dir)[:-save_total_limit] if path != folder]:
            # under another name, so that a process that is killed here leaves no half of a checkpoint
            with contextlib.suppress(OSError):
                shutil.rmtree(outdated.rename(outdated.with_name(f".{outdated.name}.unfinished")))
    return is_saved


# --- how to open a model ----------------------------------------------------------------------------------------------


def is_known(model) -> bool:
    """Return whether transformers' Auto classes can open a saved model, because its class or saved code is known."""
    # for another class, the Auto class of its model type would start from a random head
    return hasattr(transformers, type(model).__name__) or model.is_remote_code()


def write_code(model, place: str | Path) -> str:
    """Return Python code that opens the saved model at `place`, and prints a prediction if a pipeline supports it."""
    objective = model.objective
    kind = type(model)
    how = f'"{place}"' + (", trust_remote_code=True" if model.is_remote_code() else "")
    imports = ""
    load = ""
    if not is_known(model):
        imports = f"# in the folder of the training code\nfrom {kind.__module__} import {kind.__name__}\n"
        load = f'\nmodel = {kind.__name__}.from_pretrained("{place}")'
        how = f'model=model, tokenizer="{place}"'
        if objective.kind.has_pairs or (objective.is_causal and not model.can_generate()):
            return imports + load
    ask = f'predict = pipeline("{objective.pipeline}", {how})\nprint(predict({objective.example}))'
    return f"{imports}from transformers import pipeline\n{load}\n{ask}"


def write_readme(model, folder: str | Path) -> bytes:
    """Return the README.md for a model in this folder, from card.md."""
    code = write_code(model, folder)
    card = CARD.read_text(encoding="utf-8")
    return card.format(task=model.objective.pipeline, kind=type(model).__name__, code=code).encode()


# --- find and load states ---------------------------------------------------------------------------------------------


def find_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the folders `checkpoint-{epoch}` in `output_dir` by epoch. Unfinished ones have other names."""
    found = Path(output_dir).glob("checkpoint-*")
    return sorted((path for path in found if path.is_dir() and path.name[11:].isdecimal()), key=read_epoch)


def read_epoch(folder: Path) -> int:
    """Return the epoch in the name of a checkpoint's folder."""
    return int(folder.name.split("-")[1])


def load_state(path: Path) -> dict:
    """Return the training state in a checkpoint's folder, or raise a CheckpointError."""
    check_files(path)
    state = torch.load(path / "training_state.pt", map_location="cpu", weights_only=True)
    weights = load_weights(path)
    # states of earlier versions have no list of stored names: all files' weights count
    stored = {name: weights[find_plain_name(name)] for name in state.pop("stored", weights)}
    state["model"] = stored | state.get("model", {})
    return {**state, "path": path}


def check_files(folder: Path) -> None:
    """Raise a CheckpointError if the folder's files differ from those that `save_model` wrote."""
    try:
        files = json.loads((folder / "training_state.json").read_text(encoding="utf-8"))["files"]
        for name, description in files.items():
            if describe_file(folder / name) != description:
                raise CheckpointError(f"{folder} is not intact: {name} is truncated or changed")
    except OSError as e:
        raise CheckpointError(f"{folder} is not intact: {Path(e.filename or folder).name}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{folder} is not intact: training_state.json has no list of its files") from e
    if "training_state.pt" not in files:
        raise CheckpointError(f"{folder} holds a model but no training state")


def choose_state(args: TrainerArguments, model: torch.nn.Module, experiment_prefix: str, tokenizer: str) -> Path | None:
    """Return the path of the state to resume from, or None to start at epoch 0.

    A command with --resume_from_checkpoint PATH that is started again resumes from its own newest checkpoint.

    The result is a path because helper processes, which are forked later, would keep the memory of a loaded state.
    Checkpoints of later epochs are moved away, because a later restart would resume from the newest one.

    :param tokenizer: its fingerprint
    :raises UserError: if the state belongs to a different model, tokenizer or run, the given path holds no state, or
        checkpoints cannot be moved
    """
    output_dir = Path(args.output_dir)
    source = args.resume_from_checkpoint
    state = None if source == "none" else find_newest_state(output_dir)
    used = state.get("arguments", {}) if state else {}
    found = used.get("experiment_prefix", experiment_prefix)
    try:
        if source is None and found != experiment_prefix:
            raise CheckpointError(f"{state['path']} belongs to a different run, {found}")
        is_restart = found == experiment_prefix and source == used.get("resume_from_checkpoint")
        if source not in (None, "none") and not is_restart:
            state = load_state(Path(source))
        if state:
            check_weights(state, model)
            if state.get("tokenizer", tokenizer) != tokenizer:
                raise CheckpointError(f"{state['path']} belongs to a different tokenizer (see --tokenizer_path)")
    except CheckpointError as e:
        raise UserError(
            f"cannot resume: {e}. Give --resume_from_checkpoint PATH to continue from another state, another "
            "--output_dir to keep it, or --resume_from_checkpoint none to start over"
        ) from e
    try:
        set_aside(output_dir, state["local_epoch"] if state else -1)
    except OSError as e:
        raise UserError(f"--output_dir: checkpoints cannot be moved ({e}): choose another folder") from e
    if state is None:
        return None
    logger.info(f"resuming from {state['path']}, epoch {state['local_epoch']}")
    if args.overwrite_output_dir:
        logger.info("--overwrite_output_dir is ignored: use --resume_from_checkpoint none to start over")
    return state["path"]


def set_aside(output_dir: Path, epoch: int) -> None:
    """Move checkpoints beyond this epoch, which belong to another history of the run, to a separate folder."""
    if beyond := [path for path in find_checkpoints(output_dir) if read_epoch(path) > epoch]:
        aside = output_dir / time.strftime("set-aside-%Y%m%d-%H%M%S")
        aside.mkdir(exist_ok=True)
        for path in beyond:
            path.rename(aside / path.name)
        logger.info(f"moved {', '.join(path.name for path in beyond)} to {aside}")


def find_newest_state(output_dir: Path) -> dict | None:
    """Return the state of the newest complete checkpoint, and log a warning for each newer one."""
    for path in find_checkpoints(output_dir)[::-1]:
        try:
            return load_state(path)
        except CheckpointError as e:
            logger.warning(f"skipped a training state: {e}")
    return None


def collect_state(
    model: torch.nn.Module, optimizer, arguments: dict, scaler=None, counters: dict | None = None
) -> dict:
    """Return a copy, in host memory, of the state that a process needs to continue from here."""
    state = optimizer.training_state()
    masters = zip(optimizer.state_averager.main_parameters, state.pop("parameters"), strict=True)
    copies = {id(param): master for param, master in masters}
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if is_below_adapters(model, tensor):
            continue
        # tied weights stay one tensor; frozen weights come from the model
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().to("cpu", copy=True)
        weights[name] = copies[id(tensor)]
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {
        "model": weights,
        "architecture": describe_architecture(model),
        "base": describe_base(model),
        **state,
        "counters": counters or {},
        "scaler": scaler.state_dict() if scaler else {},
        "random": {"torch": torch.get_rng_state(), "cuda": cuda},
        "arguments": arguments,
        "versions": VERSIONS,
    }


def apply_state(state: dict, model: torch.nn.Module, optimizer, scaler=None) -> None:
    """Load a state, or raise a CheckpointError before any change if it does not fit this model and optimizer."""
    own = model.state_dict(keep_vars=True)
    saved = check_weights(state, model)
    trained = optimizer.state_averager.main_parameters
    name_of = {id(tensor): name for name, tensor in own.items()}
    parameters = [saved[name_of[id(param)]] for param in trained]
    try:
        optimizer.load_training_state({"total_samples": 0, **state, "parameters": parameters})
    except ValueError as e:
        raise CheckpointError(f"{state.get('path', 'the backup')} belongs to a different run: {e}") from e
    with torch.no_grad():
        for name, tensor in own.items():
            if name in saved and not any(tensor is param for param in trained):
                tensor.copy_(saved[name])
    if scaler and state.get("scaler"):
        scaler.load_state_dict(state["scaler"])
    if randomness := state.get("random"):
        torch.set_rng_state(randomness["torch"])
        if randomness["cuda"] is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(randomness["cuda"])


def describe_base(model: torch.nn.Module) -> str:
    """Describe the weights below adapters: they are pretrained, but for a head that the base model may lack."""
    return f"{model.initial_weights}, seed {model.seed}"


def is_below_adapters(model: torch.nn.Module, tensor: torch.Tensor) -> bool:
    """Return whether this tensor of a model is a weight of the base model of its adapters, which never changes."""
    return hasattr(model, "peft_config") and isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def check_weights(state: dict, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the state's weights by all names of the model, or raise a CheckpointError if they do not fit it.

    Weights below adapters are left out.
    """
    own = model.state_dict(keep_vars=True)
    # safetensors keeps only one of the names of tied weights
    found = {id(own[name]): tensor for name, tensor in state["model"].items() if name in own}
    problem = f"{state.get('path', 'the backup')} belongs to a different model"
    base = state.get("base")  # states of earlier versions have the weights instead
    if hasattr(model, "peft_config") and base not in (None, describe_base(model)):
        raise CheckpointError(f"{problem} (see --model_name_or_path): {base} there, {describe_base(model)} here")
    own = {name: it for name, it in own.items() if id(it) in found or not base or not is_below_adapters(model, it)}
    for name, tensor in own.items():
        if id(tensor) not in found:
            raise CheckpointError(f"{problem}: it has no {name}")
        shape = list(tensor.shape)
        saved_shape = list(found[id(tensor)].shape)
        if shape != saved_shape:
            reason = f"{name} is {saved_shape} there, {shape} here"
            raise CheckpointError(f"{problem} (see --config_path, --tokenizer_path): {reason}")
        # peers exchange only trained weights, so frozen ones must match those that all peers start from
        is_frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
        if is_frozen and not torch.allclose(tensor.cpu(), found[id(tensor)].to(tensor.dtype), rtol=1e-3, atol=1e-5):
            reason = f"its values of {name}, which is not trained, are different"
            raise CheckpointError(f"{problem} (see --seed, --model_name_or_path): {reason}")
    if unknown := sorted(state["model"].keys() - own.keys()):
        raise CheckpointError(f"{problem}: it has {unknown[0]}")
    saved = state.get("architecture")
    ours = describe_architecture(model)
    # states of earlier versions have no objective after the model's type, and a digest of other fields
    is_old = saved is None or " " not in saved.split(",")[0]
    if not is_old and saved != ours:
        raise CheckpointError(f"{problem} (see --config_path): {saved} there, {ours} here")
    return {name: found[id(tensor)] for name, tensor in own.items()}
