"""examples/minimal_trainer.py, run as its docstring says: two peers of plain hivemind learn together."""

import ast
import re

import pytest
from conventions import MODULES
from processes import LOOPBACK, ROOT, Script, wait_until
from swarms import stop

EXAMPLE = ROOT / "examples" / "minimal_trainer.py"
ROUND = "Averaged gradients with 2 peers"


def read_epochs(peer: Script) -> dict[int, dict]:
    """Return what a peer has printed of each epoch: loss, peers and samples."""
    lines = re.findall(r"(?m)^epoch=(\d+) loss=(\S+) peers=(\d+) samples=(\d+)$", peer.text)
    return {int(e): {"loss": float(loss), "peers": int(p), "samples": int(n)} for e, loss, p, n in lines}


@pytest.mark.slow
def test_example_peers_learn_together(start):
    first = start("first", EXAMPLE, *LOOPBACK, "--verbose")
    address = first.wait_for(r"(?m)^join with: --initial_peers (/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+)$")[1]
    second = start("second", EXAMPLE, *LOOPBACK, "--verbose", "--initial_peers", address)

    def find_joint_epochs() -> list[int]:
        epochs = [read_epochs(peer) for peer in (first, second)]
        return sorted(e for e in epochs[0].keys() & epochs[1] if all(own[e]["peers"] == 2 for own in epochs))

    wait_until(lambda: len(find_joint_epochs()) >= 4, 120, f"four joint epochs:\n{first.text}\n{second.text}")
    stop(first, second)

    joint, (one, two) = find_joint_epochs(), (read_epochs(first), read_epochs(second))
    # Ctrl-C may interrupt one peer's last epoch
    assert abs(max(one) - max(two)) <= 1
    # both have the same model, and similar data
    assert abs(one[joint[-1]]["loss"] - two[joint[-1]]["loss"]) < 0.3, (one, two)
    assert 5.5 < one[1]["loss"] < 6 and one[joint[-1]]["loss"] < one[1]["loss"] - 1.5, one
    # on a loaded machine, single rounds fail
    assert all(peer.text.count(ROUND) >= len(joint) - 1 for peer in (first, second)), first.text + second.text


def test_example_is_short_and_standalone():
    text = EXAMPLE.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 150
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in imported} & {name.split(".")[0] for name in MODULES}
    # the files that its docstring names
    named = re.findall(r"\b(?:\w+/)?\w+\.(?:py|md)\b", ast.get_docstring(tree))
    assert len(named) > 15 and all((ROOT / name).exists() for name in named)
