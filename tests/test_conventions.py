"""The conventions of this repository; `make lint` runs these tests."""

import ast
import dataclasses
import functools
import graphlib
import importlib
import inspect
import os
import re

import check_words
from conventions import FILES, FLOORS, MODULES, ORDER, load_groups
from processes import ROOT


@functools.cache
def parse(path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def find_imports(path) -> set[str]:
    """Return our modules that a file imports, at its top or in a function."""
    names = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & MODULES.keys()


def test_imports_run_one_way():
    imports = {module: find_imports(path) for module, path in MODULES.items()}
    for module, imported in imports.items():
        room = module.split(".")[0]
        for other in {name.split(".")[0] for name in imported} - {room}:
            assert FLOORS.get(other, len(ORDER)) < FLOORS.get(room, len(ORDER) + 1), f"{module} imports {other}"
    graphlib.TopologicalSorter(imports).prepare()  # raises a CycleError


def test_code_runs_nothing_from_network():
    """A pickle, or a model with its own code, can run any program."""
    for path in (*FILES, *ROOT.glob("benchmarks/**/*.py")):
        for node in ast.walk(parse(path)):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {getattr(node, "module", None), *(alias.name for alias in node.names)}
                assert not names & {"dill", "cloudpickle", "joblib", "marshal", "shelve"}, where
                assert not isinstance(node, ast.ImportFrom) or node.module != "pickle", where
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
                assert node.attr == "UnpicklingError", where
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                options = {word.arg: ast.unparse(word.value) for word in node.keywords}
                if ast.unparse(node.func) == "torch.load":
                    assert options.get("weights_only") == "True", where
                if node.func.attr in ("from_pretrained", "from_config"):
                    assert options.get("trust_remote_code") == "False", where
                assert options.get("allow_pickle", "False") == "False", where


def test_hivemind_is_patched_only_in_patches():
    """Only swarm/identity.py sets the process-wide key, and no object changes its class."""
    patches = {"swarm/patches.py", "swarm/identity.py"}
    for path in FILES:
        tree, name = parse(path), str(path.relative_to(ROOT))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        theirs = {
            (alias.asname or alias.name).split(".")[0]
            for node in imports
            for alias in node.names
            if (getattr(node, "module", None) or alias.name).split(".")[0] == "hivemind"
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
                target = ast.unparse(node)
                assert not target.endswith(".__class__"), f"{name}: {target}"
                assert target.split(".")[0] not in theirs or name in patches, f"{name}: {target}"


def test_scripts_are_executable():
    for path in ROOT.glob("*.py"):
        if "__main__" in (text := path.read_text()):
            assert text.startswith("#!/usr/bin/env python\n") and os.access(path, os.X_OK), path.name


def test_statements_assign_one_thing():
    """`a, b = x, y` hides the second assignment."""
    for path in FILES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                assert not isinstance(node.targets[0], ast.Tuple), f"{path.name}:{node.lineno}"


def list_swarm() -> list:
    return sorted(path for path in FILES if path.parent == ROOT / "swarm")


def test_swarm_has_no_module_state():
    """A process may hold several peers, so their state is passed on."""
    trees = {path: parse(path) for path in list_swarm()}
    classes = {node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)}
    for path, tree in trees.items():
        for node in tree.body:
            values = [node.value] if isinstance(node, ast.Assign | ast.AnnAssign) and node.value else []
            calls = [part for value in values for part in ast.walk(value) if isinstance(part, ast.Call)]
            assert not {ast.unparse(call.func) for call in calls} & classes, f"{path.name}:{node.lineno}"


def test_swarm_knows_no_flag():
    """It imports common/ and utils only, and its texts name settings in backquotes. Docstrings may show commands."""
    for path in list_swarm():
        rooms = {name.split(".")[0] for name in find_imports(path)}
        assert rooms <= {"common", "utils", "swarm"}, f"{path.name} imports {rooms}"
        text = re.sub(r"^    python .*(\n        .*)*", "", path.read_text(), flags=re.MULTILINE)
        assert not re.search(r"--[a-z_]{3,}|sys\.argv|argparse", text), path.name


def test_words_are_plain():
    assert check_words.check()


def test_check_of_words_finds_each_phrase():
    words = "Whoever comes late.\nWhat nobody knows; where it is so long. "
    rules = list(check_words.measure("", [check_words.Text("file.py", 1, words + "word " * 31)], 3.0))
    assert [len(lines) for *_, lines in rules] == [1] * 6
    assert rules[1][3][0].startswith("file.py:2: What nobody")


def count_lines(paths) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_sizes_stay_within_their_budgets():
    assert count_lines(list_swarm()) <= 9529
    assert count_lines([ROOT / "run_trainer.py"]) <= 158
    assert count_lines([ROOT / "callback.py"]) <= 225
    assert count_lines([ROOT / "utils.py"]) <= 243
    classes = [node for node in parse(ROOT / "swarm/optimizer.py").body if isinstance(node, ast.ClassDef)]
    optimizer = next(cls for cls in classes if cls.name == "CollaborativeOptimizer")
    methods = [node for node in optimizer.body if isinstance(node, ast.FunctionDef)]
    stores = (
        node for node in ast.walk(optimizer) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
    attributes = {node.attr for node in stores if ast.unparse(node.value) == "self"}
    assert len(methods) <= 25 and len(attributes) <= 15


def test_hivemind_overrides_are_few_and_listed():
    """Each is listed in docs/hivemind.md, because a new hivemind may break it."""
    overridden = set()
    for path in list_swarm():
        module = importlib.import_module(f"swarm.{path.stem}")
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                private = {name for name in vars(cls) if re.match("_[a-z]", name)}
                bases = [base for base in cls.__mro__[1:] if base.__module__.startswith("hivemind")]
                overridden |= {f"{base.__name__}.{name}" for base in bases for name in private & vars(base).keys()}
    overridden = {name for name in overridden if not name.endswith("._abc_impl")}
    notes = (ROOT / "docs/hivemind.md").read_text()
    assert len(overridden) <= 8 and not [name for name in overridden if f"| `{name}` |" not in notes]


def test_private_names_of_hivemind_are_few():
    """Names that no class or function of swarm/ defines; a new hivemind may rename them."""
    nodes = [node for path in list_swarm() for node in ast.walk(parse(path))]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and re.match("_[a-z_]*[A-Za-z]", node.attr)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"}
    own.add("_replace")  # of named tuples
    assert len([node for node in attributes if node.attr not in own and not node.attr.startswith("__")]) <= 34


def test_flags_are_few():
    """Ceilings that only come down."""
    names = {
        script: {item.name for group in groups for item in dataclasses.fields(group)}
        for script, groups in load_groups().items()
    }
    assert len(set.union(*names.values())) <= 117
    assert len(names["run_trainer.py"]) <= 83
