"""The commands on our pages parse, older spellings of flags work, and links and notes lead somewhere."""

import dataclasses
import re
import shlex

import pytest
from conventions import load_groups
from hivemind.p2p import PeerID
from mains import parse
from processes import ROOT

from arguments import SwarmArguments
from utils import find_peer_id, make_validators

GROUPS = load_groups()


@pytest.mark.parametrize(
    "command, name, value",
    [  # words of the guides that volunteers followed elsewhere, the flag that they set, and its value
        ("run_training_monitor.py --dht_listen_on '[::]:*'", "host_maddrs", ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"]),
        ("run_training_monitor.py --wandb_project Demo-run", "wandb_project", "Demo-run"),
        ("run_training_monitor.py --save_checkpoint_step_interval 20", "save_steps", 20),
        ("run_training_monitor.py --model_config_path configs/demo.json", "config_path", "configs/demo.json"),
        ("run_aux_peer.py --save_checkpoint_epoch_interval 10", "save_steps", 10),
        ("run_aux_peer.py --store_checkpoints --repo_path ./repo", "local_path", "./repo"),
        ("run_trainer.py --averaging_expiration 10", "matchmaking_time", 10),
        ("run_trainer.py --tokenizer ./tokenizer", "tokenizer_path", "./tokenizer"),
        ("run_trainer.py --gradient_checkpoints", "gradient_checkpointing", True),
        ("run_trainer.py --authorize False", "authorize", False),
        ("run_trainer.py --grad_compression 8bit", "compression", "8bit"),
    ],
)
def test_older_spellings_set_flags(command, name, value):
    words = shlex.split(command)
    groups = parse(GROUPS[words[0]], *words, "--run_id", "E")
    values = {name: value for group in groups for name, value in vars(group).items()}
    assert values[name] == value and values["experiment_prefix"] == "E"


GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in GUIDES}
# scripts with a parser in main(): only the names of their flags are checked
SIMPLE = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "demo.py", *ROOT.glob("benchmarks/*.py"))}
SIMPLE["experiment.merge"] = ROOT / "experiment" / "merge.py"


def find_commands(page: str) -> set[tuple[str, str]]:
    """Return the script or module and the flags of each command in blocks and between backticks."""
    text = re.sub(r"\\\n\s*", "", PAGES[page])
    blocks = re.findall(r"(?ms)^ *```\w*$.*?^ *```$", text)
    for block in blocks:
        text = text.replace(block, "")
    lines = [line for part in blocks for line in part.splitlines()] + re.findall(r"(?m)^    (.*)", text)
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    command = r"(?:^|[ '/=])python (?:-m )?(\S+)(.*)|^(?:torchrun .*?)?(\w+\.py)( -.*)"
    found = [re.search(command, line) for line in lines]
    return {(match[1] or match[3], match[2] or match[4] or "") for match in found if match}


@pytest.mark.parametrize(
    "page, script, flags", [(page, *found) for page in PAGES for found in sorted(find_commands(page))]
)
def test_guide_commands_parse(page, script, flags):
    if script in SIMPLE:
        assert all(re.search(rf"\b{name}\b", SIMPLE[script].read_text()) for name in re.findall(r"--(\w+)", flags))
        return
    flags = re.sub(r"\b[0-9a-f]+\.\.\.", "0" * 64, flags.rstrip("'"))  # a sha256 that is cut
    # variables and placeholders of docs/forerunners.md, which test_forerunners.py runs
    flags = re.sub(r"\$\w+_ON\b", "/ip4/11.0.0.1/tcp/1", flags)
    flags = re.sub(r"\$\w+|\bBATCH_SIZE\w+", "1", flags)
    words = [word for word in shlex.split(flags, comments=True) if word not in ("...", "--help", "--help_all")]
    if SwarmArguments in GROUPS[script] and "--experiment_prefix" not in words:
        words += ["--experiment_prefix", "E"]
    parse(GROUPS[script], script, *words)


def test_readme_shows_peer_ids_of_this_version():
    own_id = str(PeerID(find_peer_id(make_validators("run")[1])))
    shown = re.findall(r"/p2p/(\w{20,})", PAGES["README.md"])
    assert shown and all((name[:2], len(name)) == (own_id[:2], len(own_id)) for name in shown)


@pytest.mark.parametrize("script", GROUPS)
def test_short_help_lists_the_flags_of_the_readme(script, capsys):
    with pytest.raises(SystemExit):
        parse(GROUPS[script], script, "--help")
    listed = set(re.findall(r"(?m)^  --(\w+)", capsys.readouterr().out))
    commands = " ".join(flags for other, flags in find_commands("README.md") if other == script)
    own = {field.name for group in GROUPS[script] for field in dataclasses.fields(group)}
    # also flags that the text names
    used = {*re.findall(r"--(\w+)", commands)} | {*re.findall(r"`[^`]*--(\w+)", PAGES["README.md"])} & own
    assert used - {"help", "help_all"} <= listed


def test_links_and_notes_resolve():
    anchors = {}
    for page, text in PAGES.items():
        titles = re.findall(r"(?m)^#+ (.*)", text)
        anchors[page] = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
        anchors[page] |= {*re.findall(r'id="([^"]+)"', text)}
    for page, text in PAGES.items():
        for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
            target = ((ROOT / page).parent / path if path else ROOT / page).resolve()
            assert target.exists(), f"{page}: {path}"
            name = target.relative_to(ROOT.resolve()).as_posix()
            assert not anchor or anchor in anchors[name], f"{page}: {anchor}"
    code = {path: path.read_text() for pattern in ("*.py", "[a-z]*/**/*.py") for path in ROOT.glob(pattern)}
    for path, text in code.items():
        for number in re.findall(r"\bnotes? (\d+)", text, re.IGNORECASE):
            assert f"note-{number}" in anchors["docs/hivemind.md"], f"{path}: note {number}"
    tests = set(re.findall(r"def (test_\w+)", "\n".join(code.values())))
    assert set(re.findall(r"`(test_\w+)`", PAGES["docs/hivemind.md"])) <= tests


def test_guide_flags_exist():
    known = {"help", "help_all", "reuse_grad_buffers"}  # that there is none of the latter is said
    known |= {"include_path", "model_args", "tasks"}  # lm_eval's
    # of pip, systemctl, and torchrun
    known |= {"index-url", "now", "nproc_per_node", "standalone"}
    for field in (field for groups in GROUPS.values() for group in groups for field in dataclasses.fields(group)):
        known |= {field.name, f"no_{field.name}", *(name.lstrip("-") for name in field.metadata.get("aliases", []))}
    for path in SIMPLE.values():
        known |= set(re.findall(r'"(?:--)?(\w+)"', path.read_text()))
    for page, text in PAGES.items():
        named = set(re.findall(r"--([a-z][\w-]+)", text))
        assert all(name in known or name.replace("-", "_") in known for name in named), (page, named - known)
