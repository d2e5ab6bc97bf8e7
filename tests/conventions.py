"""The modules of the repository, and the order of their imports."""

from processes import ROOT

# from the bottom to the top; packages on one line do not import each other. All other files are scripts.
ORDER = ["common", "arguments", "utils", "swarm text models", "experiment", "training", "monitoring", "callback"]
FLOORS = {name: floor for floor, names in enumerate(ORDER) for name in names.split()}
FILES = [path for pattern in ("*.py", *(f"{name}/*.py" for name in FLOORS)) for path in ROOT.glob(pattern)]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
