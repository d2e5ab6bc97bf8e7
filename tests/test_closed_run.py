"""Closed runs from the first invitation to the last revocation, with the scripts that users run."""

import json
import re

import pytest
from members import make_invitation, secret_parts
from processes import LOOPBACK, make_prefix, run_python, wait_until
from swarms import SHARED, TRAINER, flags, history, list_joint_epochs, start_monitor, start_trainer

from training.checkpoint import find_checkpoints, load_state


@pytest.mark.slow
def test_closed_run_clients_average_through_aux_peer(start, tmp_path, tiny_data):
    """Two clients average through an auxiliary peer; one of them is revoked, and the other one continues."""
    prefix, key = make_prefix(), tmp_path / "authority.pem"
    closed = ("--authorize", "--authority_key", key)
    monitor, peers = start_monitor(start, prefix, tmp_path / "monitor", *closed)
    invited = {name: {"--invite": make_invitation(tmp_path, prefix, name)} for name in ("aux", "ada", "bob")}
    own = {name: TRAINER[name] for name in (*SHARED, "--target_batch_size")} | invited["aux"]
    own |= {"--tokenizer_path": tiny_data["--tokenizer_path"], "--initial_peers": peers, "--assist_in_averaging": []}
    own |= {"--refresh_period": 0.5, "--output_dir": tmp_path / "aux", "--store_checkpoints": []}
    aux = start("aux", "run_aux_peer.py", *LOOPBACK, *flags(own), "--save_checkpoint_step_interval", 2)
    aux.wait_for("others may join", 300)
    clients, own = {}, {"--client_mode": [], "--save_steps": 2, "--metadata_expiration": 30, **tiny_data}
    for name in ("ada", "bob"):
        clients[name] = start_trainer(start, tmp_path, name, prefix, peers, own, invited[name], pace=0.2)
    wait_until(lambda: len(list_joint_epochs(tmp_path, ["ada", "bob"])) >= 5, 400, "5 joint epochs")
    # the invitation sets the name, also in the monitor's table
    assert {history(tmp_path, name)[max(history(tmp_path, name))]["username"] for name in clients} == {"ada", "bob"}

    own = {"--initial_peers": peers, "--output_dir": tmp_path / "intruder", **tiny_data}
    intruder = run_python("run_trainer.py", *LOOPBACK, *flags(own), timeout=300, expect=2)
    cure = "its run is closed: ask its organizer for an invitation, and add --invite FILE"
    assert "Traceback" not in intruder.stderr and cure in intruder.stderr.splitlines()[-1]

    done = run_python("invite.py", "--authority_key", key, "--revoke", "bob", expect=0, timeout=300)
    assert done.stdout == "bob: 1 invitation revoked\n"
    assert clients["bob"].wait(180) == 2
    assert "the credential in --invite has been revoked" in clients["bob"].text
    assert (tmp_path / "bob" / "summary.json").exists()  # it stopped cleanly
    last = max(history(tmp_path, "ada"))
    wait_until(lambda: max(history(tmp_path, "ada")) >= last + 3, 240, "ada's epochs without bob")
    for script in (clients["ada"], aux, monitor):
        script.interrupt()
        script.assert_clean_end(180)
    assert load_state(find_checkpoints(tmp_path / "aux")[-1])["local_epoch"] > 0
    peers_shown = json.loads((tmp_path / "monitor" / "summary.json").read_text())["peers"]
    assert {peer["username"] for peer in peers_shown.values()} == {"ada", "bob"}
    assert re.search(r"peer ada [0-9a-f]{8} contributed [\d,]+ samples", monitor.text)
    assert len(re.findall(r"refused \d+ calls?, the last of peer", monitor.text)) == 1
    # only the invitations contain keys and credentials
    secrets = [part for path in tmp_path.glob("*.invite") for part in secret_parts(path.read_text())]
    secrets += key.read_text().splitlines()[1:2]
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path not in (key, *tmp_path.glob("*.invite"))]
    assert any("model.safetensors" in path.name for path in written)
    for path in written:
        text = path.read_bytes().decode(errors="replace")
        assert not [part for part in secrets if part in text], path
