"""The modules of the repository, and the order of their imports."""

from processes import ROOT

# from the bottom to the top; packages on one line do not import each other. All other files are scripts.
ORDER = ["common", "arguments", "utils", "swarm text models", "experiment", "training", "monitoring", "callback"]
FLOORS = {name: floor for floor, names in enumerate(ORDER) for name in names.split()}
FILES = [path for pattern in ("*.py", *(f"{name}/*.py" for name in FLOORS)) for path in ROOT.glob(pattern)]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


def load_groups() -> dict[str, tuple[type, ...]]:
    """Return the dataclasses of flags of each script or module with a command line."""
    import arguments
    import finetune_mlm
    import invite
    import predict_on_lidirus
    import tokenize_wikitext103

    return {
        "run_trainer.py": arguments.TRAINER_ARGS,
        "run_training_monitor.py": arguments.MONITOR_ARGS,
        "run_aux_peer.py": arguments.AUX_PEER_ARGS,
        "invite.py": (invite.InviteArguments,),
        "tokenize_wikitext103.py": (tokenize_wikitext103.TokenizeArguments,),
        "finetune_mlm.py": (finetune_mlm.FinetuneArguments,),
        "predict_on_lidirus.py": (predict_on_lidirus.PredictArguments,),
        "experiment.show": (arguments.ModelArguments, arguments.DataArguments),
    }
