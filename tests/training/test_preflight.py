"""The preflight: its findings by numbers, its table as users see it, and wrong input at a start."""

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import socket
import subprocess
from types import SimpleNamespace

import pytest
import torch
from mains import expect_user_error, refuse
from processes import LOOPBACK, ROOT, run_python
from swarms import TINY, TRAINER, flags, start_monitor, stop
from torch.utils._python_dispatch import TorchDispatchMode

import run_trainer
from arguments import AveragingArguments, ModelArguments, TrainerArguments
from common.files import make_folder
from experiment.model import make_model
from swarm.attestation import contact_initial_peers
from swarm.config import AveragingConfig, make_config
from swarm.uplink import Uplink
from training.checks import check_disk, check_epoch_time, check_machine, check_shared_memory, check_step_time, warn_of
from training.model import PRODUCTS, try_out
from training.preflight import check_bandwidth, check_connection

PEER = "12D3KooWBadDR5ZTXD5kbXn8YbWYpzJk1VHokKJDVpj8dN7CipHr"


def make_sizes(trained: int, frozen: int = 0) -> SimpleNamespace:
    """Return the sizes of a model: its trained parameters and the bytes of all others."""
    others = [torch.empty(frozen, dtype=torch.uint8, device="meta")]
    return SimpleNamespace(num_parameters=lambda only_trainable: trained, parameters=lambda: others)


def test_preflight_compares_bandwidth_with_round():
    """In a large group, each peer sends its gradients and as many averages."""
    model = make_model(ModelArguments(str(ROOT / "configs/demo.json")), 1000)
    count, uplink = sum(param.numel() for param in model.parameters()), Uplink()
    uplink.set_bandwidth(count * 1e-5, is_fixed=True)
    options = make_config(AveragingConfig, AveragingArguments())
    for config, seconds in ((options, 3.2), (dataclasses.replace(options, compression="none"), 6.4)):
        assert f"about {seconds} s" in check_bandwidth(model, config, uplink).message


def test_preflight_compares_epoch_with_matchmaking():
    assert check_epoch_time(2.0, peers=3, matchmaking_time=15).level == "warning"
    assert check_epoch_time(60.0, peers=3, matchmaking_time=15).level == "ok"
    # a single peer looks for no group
    assert check_epoch_time(2.0, peers=1, matchmaking_time=15).level == "ok"


def test_preflight_separates_errors_and_warnings(tmp_path):
    assert [check_step_time(seconds, 8).level for seconds in (0.1, 0.5, 10, 11)] == ["warning", "ok", "ok", "warning"]
    seen = [(True, False), (False, True), (False, False), (None, False)]
    place = f"/ip4/11.0.0.1/tcp/1/p2p/{PEER}"
    checks = [check_connection([place], ["11.0.0.1"], *facts) for facts in seen]
    assert [check.level for check in checks] == ["ok", "warning", "warning", "warning"]
    assert all("--host_maddrs" in check.hint and "--client_mode" not in check.hint for check in checks[1:])
    through_relay = [f"{place}/p2p-circuit/p2p/{PEER}"], ["11.0.0.1"], False
    relayed = check_connection(*through_relay, is_client=False)
    assert relayed.level == "ok" and place in relayed.message
    assert check_connection(*through_relay, is_client=True).level == "warning"
    parameters = int(shutil.disk_usage("/tmp").free / (12 * 10 + 4))  # room for nine of ten states and one more
    assert check_disk("/tmp", parameters, 10, 12, 0).level == "warning"
    args = TrainerArguments(output_dir=str(tmp_path / "not" / "there"))
    parameters = int(shutil.disk_usage(tmp_path).free / 20)  # a model takes 4 bytes, a state 12 or 24
    for size, local_steps, level in ((1000, 1, "ok"), (parameters, 1, "warning"), (parameters, 25, "fatal")):
        assert {it.what: it.level for it in check_machine(make_sizes(size), args, local_steps)}["disk"] == level
    # of memory
    assert [check_machine(make_sizes(size), args, 1)[1].level for size in (1000, 10**14)] == ["ok", "fatal"]
    # frozen weights have no gradients, no moments, and no copies that peers exchange
    assert [it.level for it in check_machine(make_sizes(1000, 4 * parameters), args, 1)[2:]] == ["ok"] * 2
    assert {check_machine(make_sizes(1000, 10**14), args, 1)[place].level for place in (1, 2)} == {"fatal"}


def test_short_shared_memory_is_one_line():
    """torch would fail with a traceback, or a bus error end a process."""
    warn_of(check_shared_memory(1000))
    with expect_user_error("/dev/shm has", "needed: docker run --shm-size"):
        warn_of(check_shared_memory(10**14))


def test_preflight_counts_weights_below_adapters(monkeypatch):
    """A GPU's are in the host's memory only while a checkpoint is written, file by file."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    model = make_sizes(10**6, 16 * 10**9)
    model.peft_config = {}
    for changes, size in (
        ({"device": "cpu"}, "16.1 GB needed for 1,000,000 trained parameters and all others"),
        ({"device": "cuda"}, "2.1 GB needed for 1,000,000 trained parameters and a file of the others"),
        ({"device": "cuda", "sharded": True}, "16.1 GB needed"),
    ):
        assert size in check_machine(model, TrainerArguments(**changes), 1)[1].message
    del model.peft_config  # each training state holds copies of other frozen weights
    assert "16.1 GB needed" in check_machine(model, TrainerArguments(device="cuda"), 1)[1].message


@pytest.mark.parametrize("capability", ["AVX512", "AVX2"])
def test_trial_avoids_slow_products(monkeypatch, capability):
    """Without AVX-512, a backward pass in bfloat16 takes minutes for a large model."""
    types = set()

    class Observer(TorchDispatchMode):
        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
            if func.overloadpacket in PRODUCTS:
                types.update(value.dtype for value in args if torch.is_tensor(value))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    model = make_model(ModelArguments(str(ROOT / "configs/gpt-demo.json")), 300).bfloat16()
    gradients = []
    model.get_input_embeddings().weight.register_hook(lambda gradient: gradients.append(gradient.dtype))
    with Observer():
        try_out(model, "")
    assert (torch.bfloat16 in types) == (capability == "AVX512") and gradients == [torch.bfloat16]


def test_disk_check_passes_hidden_folder(tmp_path):
    """The error comes from the attempt to make the folder."""
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        assert check_disk(str(hidden / "out"), 1000, 2, 12, 0).what == "disk"
        with expect_user_error("--output_dir", "cannot be written"):
            make_folder("--output_dir", hidden / "out")
    finally:
        if is_root:
            os.seteuid(0)


def test_file_limit_is_raised_if_allowed():
    code = "import resource; from arguments import TrainerArguments; from training.checks import check_machine\n"
    code += "from types import SimpleNamespace\n"
    code += "model = SimpleNamespace(num_parameters=lambda only_trainable: 1, parameters=list)\n"
    code += "for hard in (resource.getrlimit(resource.RLIMIT_NOFILE)[1], 256):\n"
    code += "    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
    code += "    level = check_machine(model, TrainerArguments(), 1)[0].level\n"
    code += "    print(level, *resource.getrlimit(resource.RLIMIT_NOFILE))"
    level, limit, _, *hard = run_python("-c", code, expect=0).stdout.split()
    assert level == "ok" and int(limit) >= 4096
    assert hard == ["warning", "256", "256"]


def test_preflight_explains_silent_peers():
    async def diagnose(*places: str) -> list[str | None]:
        contacts = (contact_initial_peers([f"{place}/p2p/{PEER}"], None) for place in places)
        return [problem for _, problem in await asyncio.gather(*contacts)]

    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        silent = f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}"
        reasons = asyncio.run(diagnose(silent, "/dns4/localhost/tcp/9", "/dns4/no.such.host.invalid/tcp/1", ""))
    assert "is not a hivemind peer" in reasons[0] and "nothing listens on its port 9" in reasons[1]
    assert "does not resolve" in reasons[2] and reasons[3] is None


def test_preflight_explains_missing_route():
    alone = ["unshare", "--net"]
    if not shutil.which(alone[0]) or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("needs a network namespace")
    code = "import asyncio, sys; from swarm.attestation import contact_initial_peers\n"
    code += "print(asyncio.run(contact_initial_peers(sys.argv[1:], None))[1])"
    result = run_python("-c", code, f"/ip4/203.0.113.1/tcp/31337/p2p/{PEER}", expect=0, prefix=alone)
    assert "this machine has no route there: is it online" in result.stdout


def test_preflight_interrupted_exits_with_130(start, tiny_data, prefix):
    """Code 0 would mean that this machine is ready to train."""
    words = ["run_trainer.py", "--preflight", *TINY, *flags(tiny_data), "--experiment_prefix", prefix]
    early = start("early", "-X", "importtime", *words)
    early.wait_for("import time:.*torch")
    early.interrupt()
    preflight = start("preflight", *words)
    preflight.wait_for("preflight of run")
    preflight.interrupt()
    for script in (early, preflight):
        script.assert_clean_end(code=130)
        assert "interrupted: the checks are not complete" in script.text


def test_starts_of_trainers_say_what_is_wrong(start, tmp_path, tiny_data, prefix):
    """Real starts of trainers leave no process, and the preflight tells if a peer may train."""
    monitor, peers = start_monitor(start, prefix, tmp_path / "monitor")
    place, _, peer_id = peers.rpartition("/p2p/")
    own = {**TRAINER, **tiny_data, "--experiment_prefix": prefix, LOOPBACK[0]: LOOPBACK[1]}
    alone = {"--output_dir": tmp_path / "alone", "--announce_maddrs": "/ip4/11.0.0.1/tcp/0"}
    assert "--announce_maddrs" in refuse(run_trainer, *flags(own, alone))
    wrong_id = {"--initial_peers": f"{place}/p2p/{PEER}", "--output_dir": tmp_path / "id"}
    used_port = {"--initial_peers": peers, "--host_maddrs": place, "--output_dir": tmp_path / "port"}
    kinds = {f"its id is {peer_id}": wrong_id, "--host_maddrs": used_port}
    scripts = [start(it["--output_dir"].name, "run_trainer.py", *flags(own, it)) for it in kinds.values()]
    for words, script in zip(kinds, scripts, strict=True):
        script.assert_user_error(words, seconds=90)
    del own["--bandwidth"]  # it is measured
    right = {"--initial_peers": peers, "--output_dir": tmp_path / "out"}
    good = start("good", "run_trainer.py", "--preflight", *flags(own, right))
    good.assert_clean_end(90)
    table = {line[8:23].strip(): line[:8].strip() for line in good.text.splitlines() if line[:1] not in (" ", "")}
    for what in ("open files", "tokenizer", "dataset", "memory", "disk", "peer", "connection", "settings"):
        assert table[what] == "ok", good.text
    assert {"step time", "epoch time", "bandwidth", "own addresses"} < set(table), good.text
    assert re.search("bandwidth: measured .* Mbit/s up", good.text), good.text
    assert good.text.splitlines()[-1].startswith("ready to train")
    assert not (tmp_path / "out").exists()  # it trains and writes nothing
    stop(monitor)
