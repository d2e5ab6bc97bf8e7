"""The trainers' model and optimizer in a role without gradients, which averages for other peers or archives states.

Roles import this module only if flags say so, because its imports are slow.
"""

from experiment.model import find_objective, make_model
from experiment.optimizer import make_contract, make_optimizer
from monitoring.archive import CheckpointHandler
from swarm.contract import RunContract
from swarm.joining import Swarm
from swarm.optimizer import AveragingHelper
from text.tokenizers import load_tokenizer, tokenizer_fingerprint


def make_auxiliary(
    swarm: Swarm, groups: tuple, assists: bool = False
) -> tuple[AveragingHelper, CheckpointHandler | None, RunContract]:
    """Return an optimizer of the trainers' model, an archive if --store_checkpoints is set, and this peer's contract.

    It starts helper processes.

    :param groups: instances of MONITOR_ARGS or AUX_PEER_ARGS
    :param assists: whether this peer averages for other peers, and passes their states on
    :raises UserError: if live trainers use different settings or the archive's folder cannot be written
    """
    _, _, archive_args, model_args, optimizer_args, averaging_args = groups
    tokenizer = load_tokenizer(model_args.tokenizer_path, find_objective(model_args).kind)
    if assists:
        swarm.measure_bandwidth(averaging_args.bandwidth)
    model = make_model(model_args, tokenizer)
    contract = make_contract(model, tokenizer_fingerprint(tokenizer), optimizer_args, averaging_args)
    swarm.compare_contract(contract)
    optimizer = make_optimizer(model, swarm, optimizer_args, averaging_args, auxiliary=True)
    if assists:
        optimizer.state_averager.serve_state()
    archive = CheckpointHandler(groups, model, tokenizer, optimizer) if archive_args.store_checkpoints else None
    return optimizer, archive, contract
