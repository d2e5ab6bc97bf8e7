"""Edit me: parameter groups, optimizer, schedule. `make_optimizer` is the one function that builds them for all roles.

Peers exchange optimizer states by position (hivemind/optim/state_averager.py), so one differing name or group sends
tensors to the wrong place: never build a peer's optimizer by other means. `describe_contract` puts into words what all
peers must agree on; it is published and compared when a peer joins.

    python -c "from experiment.optimizer import *; from experiment.model import *; \\
        print(make_param_groups(make_model(ModelArguments('configs/demo.json'), 1000))[1]['names'])"
"""

from functools import partial

import torch
from hivemind import DHT
from hivemind.compression import (
    Float16Compression,
    NoCompression,
    RoleAdaptiveCompression,
    SizeAdaptiveCompression,
    Uniform8BitQuantization,
)
from torch import nn

from arguments import AveragingArguments, OptimizerArguments, SwarmArguments
from experiment.model import describe_architecture, digest
from models.lamb_8bit import Lamb8bit
from models.state_codecs import MatrixMoments8bit, Scaled16bit
from swarm.optimizer import Optimizer, initialize_optimizer_state_
from swarm.rounds import GradientAverager
from swarm.states import StateAverager, list_params

COMPRESSIONS = {
    "none": NoCompression(),
    "float16": Float16Compression(),
    # 8 bits need a codebook per tensor, which small tensors are not worth: those of up to 2**16 numbers
    "8bit": SizeAdaptiveCompression(
        threshold=2**16 + 1, less=Float16Compression(), greater_equal=Uniform8BitQuantization()
    ),
}

# how a state comes to a peer that joins, and a step to one that has missed it
LOAD_STATE_COMPRESSIONS = {
    "none": NoCompression(),
    "float16": RoleAdaptiveCompression(parameter=Scaled16bit(), gradient=Scaled16bit()),
    "8bit": RoleAdaptiveCompression(
        parameter=Scaled16bit(), gradient=MatrixMoments8bit(), optimizer=MatrixMoments8bit()
    ),
}


def make_param_groups(model: nn.Module) -> list[dict]:
    """Two groups, with weight decay and without, each in the order of `model.named_parameters()`.

    Norms, biases and whatever else is no matrix are not decayed, decided by what they are: ALBERT's
    `full_layer_layer_norm.weight` escapes the lists of names that are copied from script to script.
    """
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {
            "params": [param for _, param in named if (param.ndim >= 2) is decayed],
            "names": [name for name, param in named if (param.ndim >= 2) is decayed],
            "decayed": decayed,
        }
        for decayed in (True, False)
    ]


def learning_rate_factor(epoch: int, warmup_steps: int, total_steps: int, floor: float = 0.0) -> float:
    """Share of the peak learning rate that the step from this epoch to the next one uses: up to 1, then down to the
    floor, where it remains."""
    if epoch < warmup_steps:
        return (epoch + 1) / (warmup_steps + 1)
    return floor + (1 - floor) * max(0.0, (total_steps - epoch) / max(1, total_steps - warmup_steps))


def make_scheduler(args: OptimizerArguments, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up and decay, counted in collaborative epochs."""
    floor = args.min_learning_rate / args.learning_rate
    options = dict(warmup_steps=args.warmup_steps, total_steps=args.total_steps, floor=floor)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate_factor, **options))


def make_local_optimizer(args: OptimizerArguments, param_groups: list[dict]) -> torch.optim.Optimizer:
    """LAMB, 8-bit LAMB or AdamW on these groups, which clips the (averaged) gradient before it steps and notes its
    norm.

    :returns: its attribute `grad_norm` is the norm of the last gradient before clipping
    """
    groups = [{"params": g["params"], "weight_decay": args.weight_decay if g["decayed"] else 0.0} for g in param_groups]
    options = dict(lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)
    if args.optim == "lamb":
        from torch_optimizer import Lamb

        optimizer = Lamb(groups, clamp_value=args.clamp_value, debias=True, **options)
    elif args.optim == "lamb_8bit":
        optimizer = Lamb8bit(groups, clamp_value=args.clamp_value, min_8bit_size=args.min_8bit_size, **options)
    else:
        # one pass over memory: on a CPU, where the offloaded parameters are, it takes a fourth of the time
        optimizer = torch.optim.AdamW(groups, fused=True, **options)

    def clip(optimizer: torch.optim.Optimizer, *_) -> None:
        optimizer.grad_norm = torch.nn.utils.clip_grad_norm_(list_params(optimizer), args.max_grad_norm).item()

    initialize_optimizer_state_(optimizer)
    optimizer.grad_norm = 0.0
    optimizer.register_step_pre_hook(clip)
    return optimizer


def make_optimizer(
    model: nn.Module,
    dht: DHT,
    swarm: SwarmArguments,
    args: OptimizerArguments,
    averaging: AveragingArguments,
    *,
    client_mode: bool = False,
    auxiliary: bool = False,
) -> Optimizer:
    """The collaborative optimizer: gathers gradients, averages them with the swarm, clips, steps.

    Starts helper processes: build it before any CUDA context and before DataLoader workers, on the CPU model, with its
    weights loaded; then move the model and call `optimizer.accumulate_on(device)`.

    :param client_mode: accept no incoming connection
    :param auxiliary: a role that computes no gradients (the monitor)
    """
    param_groups = make_param_groups(model)
    averager_options = dict(
        target_group_size=averaging.target_group_size,
        min_vector_size=averaging.min_vector_size,
    )
    return Optimizer(
        dht=dht,
        run_id=swarm.experiment_prefix,
        params=param_groups,
        optimizer=partial(make_local_optimizer, args),
        scheduler=partial(make_scheduler, args),
        target_batch_size=averaging.target_batch_size - averaging.batch_size_lead,
        matchmaking_time=averaging.matchmaking_time,
        request_timeout=averaging.request_timeout,
        averaging_timeout=averaging.averaging_timeout,
        next_chunk_timeout=averaging.next_chunk_timeout,
        average_state_every=averaging.average_state_every,
        offload_optimizer=True,
        delay_optimizer_step=averaging.delay_optimizer_step,
        delay_grad_averaging=averaging.delay_grad_averaging,
        client_mode=client_mode,
        auxiliary=auxiliary,
        grad_compression=COMPRESSIONS[averaging.compression],
        state_averaging_compression=COMPRESSIONS[averaging.state_compression],
        load_state_compression=LOAD_STATE_COMPRESSIONS[averaging.load_state_compression],
        averager_opts=averager_options,
        # hivemind passes averager_opts to the state averager alone (note 39)
        grad_averager_factory=partial(GradientAverager, **averager_options),
        tracker_opts=dict(
            min_refresh_period=averaging.min_refresh_period,
            max_refresh_period=averaging.max_refresh_period,
            default_refresh_period=averaging.default_refresh_period,
            expected_drift_peers=averaging.expected_drift_peers,
            expected_drift_rate=averaging.expected_drift_rate,
            metadata_expiration=averaging.metadata_expiration,
        ),
        performance_ema_alpha=averaging.performance_ema_alpha,
    )


def describe_contract(
    model: nn.Module, tokenizer_fingerprint: str, args: OptimizerArguments, averaging: AveragingArguments
) -> dict[str, str]:
    """What all peers of a run must agree on, in words short enough for one line of an error message."""
    decayed, undecayed = make_param_groups(model)
    names = decayed["names"] + undecayed["names"]
    shapes = [tuple(param.shape) for group in (decayed, undecayed) for param in group["params"]]
    optimizer_options = f"beta {args.adam_beta1:g} {args.adam_beta2:g}, epsilon {args.adam_epsilon:g}"
    return {
        "model": describe_architecture(model),
        "initial weights": model.initial_weights,
        "model shapes": f"{sum(map(torch.Size.numel, map(torch.Size, shapes))):,} parameters {digest(shapes)}",
        "parameter order": f"{len(names)} tensors {digest(names)}",
        "parameter groups": f"{len(decayed['names'])} with decay {digest(decayed['names'])}",
        "tokenizer": tokenizer_fingerprint[:12],
        "optimizer": f"{args.optim}, {optimizer_options}, decay {args.weight_decay:g}, clip {args.max_grad_norm:g}"
        + (f", clamp {args.clamp_value:g}" if args.optim != "adamw" else "")
        + (f", 8 bits from {args.min_8bit_size} numbers" if args.optim == "lamb_8bit" else ""),
        "schedule": f"peak {args.learning_rate:g}, floor {args.min_learning_rate:g}, warm-up {args.warmup_steps}, "
        f"total {args.total_steps}",
        # the whole batch, before batch_size_lead: each peer may look for its group as early as it needs
        "target_batch_size": str(averaging.target_batch_size),
        "compression": f"gradients {averaging.compression}, state {averaging.state_compression}, "
        f"loaded {averaging.load_state_compression}",
        "averaging": f"groups of {averaging.target_group_size}, vectors of {averaging.min_vector_size}, "
        f"state every {averaging.average_state_every}, delays {averaging.delay_optimizer_step:d}"
        f"{averaging.delay_grad_averaging:d}, {GradientAverager.__name__} {StateAverager.__name__}",
    }
