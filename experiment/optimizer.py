"""Edit me: parameter groups, optimizer and schedule. All roles build them by `make_optimizer`.

Peers exchange optimizer states by position (hivemind/optim/state_averager.py). A different name or group would send
tensors to the wrong place, so never build a peer's optimizer in another way. `make_contract` describes the settings
that must match on all peers. Peers publish it and compare it when they join.

    python -c "from experiment.optimizer import *; from experiment.model import *; \\
        print(make_param_groups(make_model(ModelArguments('configs/demo.json'), 1000))[1]['names'])"
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from hivemind.utils import get_dht_time
from torch import nn

from arguments import AveragingArguments, OptimizerArguments
from common.console import UserError, first_line
from models.build import describe_architecture, digest
from models.lamb_8bit import Lamb8bit
from models.state_codecs import COMPRESSIONS, LOAD_STATE_COMPRESSIONS, keep_parameters_exact
from swarm.config import AveragingConfig, count_batches, make_config
from swarm.contract import RunContract
from swarm.joining import Swarm
from swarm.optimizer import AveragingHelper, CollaborativeOptimizer
from swarm.optimizer_state import initialize_optimizer_state_, list_params
from swarm.sparse import TopKCompression

logger = logging.getLogger("trainer")

ADAM_BETA1 = 0.9  # decay of the first moment
ADAM_EPSILON = 1e-6  # added to the root of the second moment
MUON_MOMENTUM = 0.95  # decay of the mean of the gradients


def make_param_groups(model: nn.Module, separate_hidden: bool = False) -> list[dict]:
    """Return the groups with and without weight decay, each in the order of `model.named_parameters()`.

    Only matrices are decayed. The shape decides, because the usual list of names for norms and biases misses ALBERT's
    `full_layer_layer_norm.weight`.

    :param separate_hidden: whether hidden matrices have a group of their own before these two, as Muon needs: all
        matrices except those of embeddings and of the output layer
    """
    others = set()
    if separate_hidden:
        layers = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        others = {layer.weight for layer in [*layers, model.get_output_embeddings()] if layer is not None}
    groups = {kind: {"params": [], "names": [], "decayed": kind != "flat"} for kind in ("hidden", "matrix", "flat")}
    for name, param in model.named_parameters():
        if param.requires_grad:
            is_hidden = separate_hidden and param.ndim == 2 and param not in others
            group = groups["hidden" if is_hidden else "matrix" if param.ndim >= 2 else "flat"]
            group["params"].append(param)
            group["names"].append(name)
    if not separate_hidden:
        del groups["hidden"]
    elif not groups["hidden"]["params"]:
        raise UserError("--optim muon: the model has no hidden matrices that are trained: choose --optim adamw")
    return list(groups.values())


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with the singular vectors of this one, and singular values of about 1.

    It runs the Newton-Schulz iterations of torch.optim.Muon, which always uses bfloat16. The host uses float32, because
    many processors emulate bfloat16: an AVX2 core takes 18 to 46 times as long.
    """
    is_tall = len(matrix) > matrix.shape[1]
    wide = matrix.T if is_tall else matrix  # its product with its transpose is the smaller one
    wide = wide.to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), wide, beta=3.4445)
    return wide.T if is_tall else wide


class MuonWithAdamW(torch.optim.Optimizer):
    """An optimizer that uses Muon for the first parameter group, the hidden matrices, and AdamW for all others.

    Both share this optimizer's groups and state, which peers exchange by position. Muon's steps
    (kellerjordan.github.io/posts/muon) are scaled to the size of AdamW's (arxiv.org/abs/2502.16982), so that one
    learning rate and one schedule suit both.

    The swarm keeps parameters and state in host memory. Muon's step of a matrix takes 15 products of matrices, so the
    model's device computes them. AdamW's step takes no longer than the copies would.
    """

    def __init__(self, param_groups: list[dict], find_device: Callable[[], torch.device] | None = None, **options):
        """
        :param find_device: a function that returns the model's device, for Muon's steps; default: the parameters' own
        :param options: the options of AdamW
        """
        super().__init__(param_groups, {"lr": options["lr"]})
        self.find_device = find_device
        # it adds its own options to the groups
        self.adamw = torch.optim.AdamW(self.param_groups[1:], fused=True, **options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Make a step of both optimizers. If the device fails, as when out of memory, the host computes the rest."""
        params = self.param_groups[0]["params"]
        device = self.find_device() if self.find_device else params[0].device
        for param in [param for param in params if param.grad is not None]:
            try:
                self.step_matrix(param, device)
            except RuntimeError as e:  # without memory, torch and CUDA's libraries raise different subclasses
                if device == param.device:
                    raise
                logger.warning(f"a step of Muon failed on {device} ({first_line(e)}): continuing it on the host")
                device = param.device
                self.step_matrix(param, device)
        # after Muon: the first step creates the states in the order in which peers exchange them
        self.adamw.state = self.state  # load_state_dict replaces these two
        self.adamw.param_groups = self.param_groups[1:]
        self.adamw.step()

    def step_matrix(self, param: torch.Tensor, device: torch.device) -> None:
        """Make Muon's step of a matrix on this device; if another device fails, matrix and state stay as before.

        :raises RuntimeError: the device is out of memory, or cannot compute the step
        """
        state = self.state[param]
        group = self.param_groups[0]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        gradient = param.grad.to(device)
        momentum = state["momentum_buffer"].to(device).lerp(gradient, 1 - MUON_MOMENTUM)
        update = orthogonalize(gradient.lerp(momentum, MUON_MOMENTUM)).to(param)
        state["momentum_buffer"].copy_(momentum)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(update, alpha=-0.2 * math.sqrt(max(param.shape)) * group["lr"])


def choose_optimizer(
    args: OptimizerArguments, find_device: Callable[[], torch.device] | None = None
) -> tuple[Callable[[list[dict]], torch.optim.Optimizer], str]:
    """Return a function that makes the optimizer of parameter groups, and its settings that must match on all peers."""
    options = dict(lr=args.learning_rate, betas=(ADAM_BETA1, args.adam_beta2), eps=ADAM_EPSILON)
    terms = f"{args.optim}, beta {ADAM_BETA1:g} {args.adam_beta2:g}, epsilon {ADAM_EPSILON:g}, "
    terms += f"decay {args.weight_decay:g}, clip {args.max_grad_norm:g}"
    if args.optim == "muon":
        return partial(MuonWithAdamW, find_device=find_device, **options), terms
    if args.optim == "adamw":
        # a fused step takes a fourth of the time on a CPU, which holds the offloaded parameters
        return partial(torch.optim.AdamW, fused=True, **options), terms
    options["clamp_value"] = args.clamp_value
    terms = f"{terms}, clamp {args.clamp_value:g}"
    if args.optim == "lamb":
        from torch_optimizer import Lamb

        return partial(Lamb, debias=True, **options), terms
    terms += f", 8 bits from {args.min_8bit_size} numbers"
    return partial(Lamb8bit, min_8bit_size=args.min_8bit_size, **options), terms


def make_local_optimizer(
    args: OptimizerArguments, param_groups: list[dict], find_device: Callable[[], torch.device] | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of these groups, which clips the (averaged) gradient before each step.

    Its attribute `grad_norm` is the norm of the last gradient before clipping.
    """

    def clip(optimizer: torch.optim.Optimizer, *_) -> None:
        optimizer.grad_norm = torch.nn.utils.clip_grad_norm_(list_params(optimizer), args.max_grad_norm).item()

    make, _ = choose_optimizer(args, find_device)
    decay = args.weight_decay
    optimizer = make([{"params": it["params"], "weight_decay": decay if it["decayed"] else 0.0} for it in param_groups])
    initialize_optimizer_state_(optimizer)
    optimizer.grad_norm = 0.0
    optimizer.register_step_pre_hook(clip)
    return optimizer


def learning_rate_factor(epoch: int, args: OptimizerArguments, count: Callable[[int], int] = int) -> float:
    """Return the share of the peak learning rate for this epoch's step: a rise to 1, then a decay to the floor.

    transformers' schedules start their warm-up at 0, which wastes the first epoch, and have no floor for linear decay.

    :param count: a function that returns the batches before an epoch, over which the rate decays; default: one each
    """
    if epoch < args.warmup_steps:
        return (epoch + 1) / (args.warmup_steps + 1)
    if args.lr_scheduler_type == "constant":
        return 1.0
    start = count(args.warmup_steps)
    total = count(args.total_steps)
    if args.lr_scheduler_type == "wsd":
        start = max(start, total - total // 5)
    progress = min(1.0, max(0, count(epoch) - start) / max(1, total - start))
    share = (1 + math.cos(math.pi * progress)) / 2 if args.lr_scheduler_type == "cosine" else 1 - progress
    floor = args.min_learning_rate / args.learning_rate
    return floor + (1 - floor) * share


def make_scheduler(
    args: OptimizerArguments, optimizer: torch.optim.Optimizer, count: Callable[[int], int] = int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the learning rate's schedule, in epochs of the swarm. Because peers join late, its `step(epoch)` must be
    able to jump to any epoch. torch's SequentialLR, for example, cannot do so."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate_factor, args=args, count=count))


def make_optimizer(
    model: nn.Module,
    swarm: Swarm,
    args: OptimizerArguments,
    averaging: AveragingArguments,
    *,
    folder: Path | None = None,
    auxiliary: bool = False,
) -> CollaborativeOptimizer:
    """Return the collaborative optimizer, which averages gradients with the swarm, clips them and steps.

    It starts helper processes. Build it before any CUDA context and DataLoader worker, for the CPU model with loaded
    weights. Then move the model and call `optimizer.accumulate_on(device)`.

    :param folder: a folder that belongs to this peer's key, for the updates and votes of local steps
    :param auxiliary: whether the role computes no gradients (a monitor or aux peer)
    """
    config = make_config(AveragingConfig, averaging)
    has_log = config.local_steps > 1
    count = partial(count_batches, local_steps=config.local_steps, local_steps_from=config.local_steps_from)
    load_state = LOAD_STATE_COMPRESSIONS[config.load_state_compression]
    kind = AveragingHelper if auxiliary else CollaborativeOptimizer
    if has_log:
        logger.info(f"local steps from epoch {config.local_steps_from} on (--local_steps_from)")
    return kind(
        swarm.dht,
        swarm.prefix,
        config,
        params=make_param_groups(model, separate_hidden=args.optim == "muon"),
        # a function, because the model moves to its device later
        optimizer=partial(make_local_optimizer, args, find_device=lambda: model.device),
        scheduler=partial(make_scheduler, args, count=count),
        folder=folder,
        gradients=COMPRESSIONS[config.compression],
        local_steps=TopKCompression(config.density) if has_log else None,
        state_averaging=COMPRESSIONS[config.state_compression],
        # states after the same commits have the same bits, apart from the moments
        load_state=keep_parameters_exact(load_state) if has_log else load_state,
    )


def describe_averaging(averaging: AveragingConfig) -> dict[str, str]:
    """Return the terms of a run's contract that concern averaging."""
    terms = {
        # The whole batch, without `batch_size_lead`, because each peer may start matchmaking as early as it needs.
        "target_batch_size": str(averaging.target_batch_size),
        "compression": f"gradients {averaging.compression}, state {averaging.state_compression}, "
        f"loaded {averaging.load_state_compression}",
        "averaging": f"groups of {averaging.target_group_size}, vectors of {averaging.min_vector_size}, "
        f"state every {averaging.average_state_every}, overlap {averaging.overlap:d}",
    }
    if averaging.local_steps > 1:
        terms["local_steps"] = str(averaging.local_steps)
        terms["local_steps_from"] = str(averaging.local_steps_from)
        terms["outer step"] = (
            f"rate {averaging.outer_lr:g}, momentum {averaging.outer_momentum:g}, density {averaging.density:g}"
        )
    return terms


def make_contract(
    model: nn.Module,
    tokenizer_fingerprint: str,
    args: OptimizerArguments,
    averaging: AveragingArguments,
    flags: str = "",
) -> RunContract:
    """Describe the settings that must match on all peers, each short enough for one line of an error."""
    groups = make_param_groups(model, separate_hidden=args.optim == "muon")
    names = [name for group in groups for name in group["names"]]
    frozen = sum(not param.requires_grad for param in model.parameters())
    shapes = [tuple(param.shape) for group in groups for param in group["params"]]
    # the last group is the rest
    kinds = [
        f"{len(group['names'])} {'with' if group['decayed'] else 'without'} decay {digest(group['names'])}"
        for group in groups[:-1]
    ]
    schedule = f"peak {args.learning_rate:g}, floor {args.min_learning_rate:g}, warm-up {args.warmup_steps}"
    decay = f"{args.lr_scheduler_type} over batches" if averaging.local_steps > 1 else args.lr_scheduler_type
    terms = {
        "model": describe_architecture(model),
        # peers send no frozen weights, so these must match from the start
        "initial weights": model.initial_weights + (f", {frozen} frozen, of seed {model.seed}" if frozen else ""),
        "model shapes": f"{sum(map(torch.Size.numel, map(torch.Size, shapes))):,} parameters {digest(shapes)}",
        "parameter order": f"{len(names)} tensors {digest(names)}",
        "parameter groups": ", ".join(kinds),
        "tokenizer": tokenizer_fingerprint[:12],
        "optimizer": choose_optimizer(args)[1],
        "schedule": f"{schedule}, {decay}",
        "total_steps": str(args.total_steps),
        **describe_averaging(make_config(AveragingConfig, averaging)),
    }
    if model.objective.is_causal and model.keeps_documents_apart:  # versions that joined documents name none
        terms["documents"] = "apart"
    if model.objective.kind.has_turns:
        terms["chat template"] = model.chat_template
    return RunContract(joined=get_dht_time(), contract=terms, flags=flags)
