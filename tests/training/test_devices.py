"""Devices and ranks: several processes that are one peer, precision, the compiler, memory, and the batch size."""

import contextlib
import json
import logging
import math
import statistics

import psutil
import pytest
import torch
from file_server import FileServer
from processes import make_prefix, run_python, wait_for_end, wait_until
from swarms import TINY, flags, history, stop
from transformers import AlbertForPreTraining

from arguments import DataArguments, ModelArguments, TrainerArguments
from common.console import UserError
from experiment.data import load_data
from experiment.model import make_model
from experiment.objectives import compute_losses
from training import devices
from training.model import move_batch
from training.ranks import NUMBER_VARIABLE, join_ranks

CPU = torch.device("cpu")
PACE = 0.15  # seconds of a batch, in which the cores are free for the others


@pytest.fixture
def words(tmp_path, tiny_data) -> list:
    """Flags of a trainer in a run of its own, which may be overridden."""
    own = {"--per_device_train_batch_size": 8, "--dataloader_num_workers": 1, "--experiment_prefix": make_prefix()}
    return [*TINY, *flags(tiny_data, own, {"--device": "cpu", "--output_dir": tmp_path / "out"})]


def read_summary(folder) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(
    "config, kinds",
    [
        ("demo", ["whole", "sharded"]),  # tied embeddings, and a layer that is called several times
        pytest.param("lean-demo", ["sharded"], marks=pytest.mark.slow),  # layers that share matrices
    ],
)
def test_two_ranks_match_one_rank(tmp_path, tiny_data, config, kinds):
    """While rank 0 is busy, the other rank uses no processor time."""
    paths = tiny_data["--tokenizer_path"], tiny_data["--dataset_path"], tmp_path, f"configs/{config}.json"
    run_python("-m", "tests.programs.steps_of_ranks", *paths, *kinds, expect=0)
    alone = torch.load(tmp_path / "alone.pt")
    for kind in kinds:
        first, second = (torch.load(tmp_path / f"{kind}{number}.pt") for number in (0, 1))
        assert second["losses"] == first["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(first["weights"][name], weight, atol=1e-6, rtol=0)
            assert second["weights"][name].equal(first["weights"][name]), name
        assert second["told"] == {"told": 5}
        # sharded, each rank holds a half of the model
        total = sum(weight.numel() for weight in alone["weights"].values()) / (2 if kind == "sharded" else 1)
        assert [first["elements"], second["elements"]] == pytest.approx([total, total], rel=0.01)
        assert second["waited"] > 2.5 and second["used"] < 0.5


@pytest.mark.slow
def test_two_ranks_train_with_half_precision_peer(tmp_path, start, words):
    """An overflow costs one step of one peer."""
    words += ["--device", "auto", "--max_steps", 12, "--target_batch_size", 160, "--average_state_every", 1]

    def start_changed(name: str, change: str, *more: object):
        folder = tmp_path / name
        folder.mkdir()
        program = "-m", "tests.programs.changed_trainer", change, PACE, folder
        return start(name, *program, *words, "--output_dir", folder, *more)

    half = start_changed("half", "half", "--fp16")
    address = half.wait_for(r"--initial_peers (\S+)")[1]
    start_changed("two", "observed", "--num_devices", 2, "--initial_peers", address).assert_clean_end(150)
    half.assert_clean_end(60)
    first, second, other = (torch.load(tmp_path / path) for path in ("two/rank0.pt", "two/rank1.pt", "half/rank0.pt"))
    for name, weight in first["weights"].items():
        # an averaging of parameters may end after the last step
        torch.testing.assert_close(second["weights"][name], weight, atol=5e-5, rtol=0)
        torch.testing.assert_close(other["weights"][name], weight, atol=5e-5, rtol=0)
    # each rank has data of its own, and each step counts the samples of both
    begin, other_begin = set(first["rows"][:400]), set(second["rows"][:400])
    assert len(begin & other_begin) < 0.5 * len(begin) and len(first["rows"]) > 64
    lines = [*history(tmp_path, "two").values()]
    assert all(line["samples_accumulated"] % 16 == 0 and line["mini_steps"] % 2 == 0 for line in lines)
    assert lines[-1]["computed_samples"] == sum(line["mini_steps"] * 8 for line in lines)
    shares = [line["data_wait_share"] for line in lines]
    assert min(shares) >= 0 and 0 < max(shares) <= 1
    two, half = (read_summary(tmp_path / name) for name in ("two", "half"))
    assert two["epochs_averaged"] >= 2 and half["epochs_averaged"] >= 2 and half["samples"] > 0
    assert two["skipped_steps"] == 0 and half["skipped_steps"] >= 2
    assert "trainer rank" not in (tmp_path / "two.log").read_text()  # other ranks log nothing


def start_until_epoch_2(start, *words: object):
    script = start("trainer", "run_trainer.py", *words)
    script.wait_for("epoch 2/", 120)
    return script, psutil.Process(script.session).children(recursive=True)


def assert_saved_in_order(script, code: int, line: str, folder) -> None:
    """Wait for the end by an error, with this line and the state of the second epoch or a later one."""
    assert script.wait(60) == code and "Traceback" not in script.text, script.text
    assert script.text.count(f"{line}; saving the state") == 1
    assert list(folder.glob("checkpoint-*")) and read_summary(folder)["epoch"] >= 2, script.text


def test_killed_data_worker_keeps_state(tmp_path, start, words):
    script, _ = start_until_epoch_2(start, *words)
    # the last one that the trainer has forked
    max(psutil.Process(script.session).children(), key=psutil.Process.create_time).kill()
    assert_saved_in_order(script, 2, "lower --dataloader_num_workers (now 1)", tmp_path / "out")


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(tmp_path, start, words):
    script, processes = start_until_epoch_2(start, *words, "--num_devices", 2)
    stop(script)
    wait_for_end(processes, 60)
    assert read_summary(tmp_path / "out")["samples"] % 16 == 0  # a step of both ranks


def test_ctrl_c_ends_ranks_without_data(tmp_path, start, words):
    """A server stalls after the sample that each rank reads at its start, so both wait for their first batch."""
    (tmp_path / "far.jsonl").write_text("".join(f'{{"text": "Text {number}."}}\n' for number in range(9000)))
    with FileServer(tmp_path) as server:
        server.cuts["/far.jsonl"], server.is_stalling = [10**7] * 2 + [100] * 9, True
        (tmp_path / "sources.json").write_text(json.dumps([{"path": f"{server.url}/far.jsonl"}]))
        at = words.index("--dataset_path")
        words[at : at + 2] = ["--streaming", "--sources", tmp_path / "sources.json", "--max_sequence_length", 32]
        script = start("trainer", "run_trainer.py", *words, "--num_devices", 2)
        wait_until(lambda: [count for _, count in server.sent].count(100) >= 2, 120, "both ranks wait")
        stop(script)


@pytest.mark.slow
def test_sharded_peer_resumes_and_saves(tmp_path, start, words):
    """Rank 0 evaluates, saves and loads its copy in host memory."""
    folder = tmp_path / "out"
    words += ["--num_devices", 2, "--sharded", "--do_eval", "--max_steps"]
    for steps in (3, 6):
        start(f"until {steps}", "run_trainer.py", *words, steps).assert_clean_end(150)
        assert read_summary(folder)["epoch"] == steps
    saved = [AlbertForPreTraining.from_pretrained(path) for path in (folder / "checkpoint-6", folder / "model")]
    for one, other in zip(*(model.parameters() for model in saved), strict=True):
        assert one.equal(other)
    summary = read_summary(folder)
    assert summary["computed_samples"] >= 6 * 64 and summary["final_loss"] < summary["start_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--per_device_train_batch_size", "auto"], ["--sharded"]])
def test_failed_rank_ends_others_in_order(tmp_path, start, words, options):
    script, processes = start_until_epoch_2(start, *words, "--num_devices", 2, *options)
    # its forked data workers have the same variables
    ranks = [process for process in processes if NUMBER_VARIABLE in process.environ()]
    min(ranks, key=psutil.Process.create_time).kill()
    assert_saved_in_order(script, 1, "rank 1 of this machine has ended (exit code -9)", tmp_path / "out")
    wait_for_end(processes, 60)


@pytest.mark.slow
def test_killed_rank_0_leaves_no_process(start, words):
    script, processes = start_until_epoch_2(start, *words, "--num_devices", 2)
    script.process.kill()
    wait_for_end(processes, 60)
    assert "Traceback" not in script.text


@pytest.mark.slow
def test_killed_rank_0_ends_starting_rank(start, words):
    """Rank 1 would wait for it for a year."""
    script = start("ranks", "run_trainer.py", *words, "--num_devices", 2)

    def find_rank() -> psutil.Process | None:
        children = psutil.Process(script.session).children()
        return next((child for child in children if "run_trainer.py" in child.cmdline()[1:2]), None)

    rank = wait_until(find_rank, 60, "rank 1")
    rank.suspend()  # in its imports, which take seconds
    script.process.kill()
    rank.resume()
    wait_for_end([rank], 60)


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_out_of_memory_keeps_state(tmp_path, start, words, num_devices):
    """The slow data loader is also measured and reported."""
    words += ["--do_eval", "--num_devices", num_devices, "--dataloader_num_workers", 0]
    script = start("greedy", "-m", "tests.programs.changed_trainer", "greedy", *words)
    assert script.wait(120) == 2 and "Traceback" not in script.text
    assert script.text.count(" error: ") == 1
    # ALBERT has no --gradient_checkpointing
    cures = "a smaller --per_device_train_batch_size (now 8), or --bf16 (old GPUs: --fp16), or shorter sequences"
    assert script.text.count(f"out of memory on cpu: try {cures}") == 1 and not script.left_processes()
    # 8 steps of 8 are an epoch; the 42nd pass was too much
    summary, epoch = read_summary(tmp_path / "out"), 41 * num_devices // 8
    lines = history(tmp_path, "out").values()
    # the tracker may end an epoch with fewer samples than 64, if this machine slows down
    assert summary["epoch"] == epoch and 0 <= 64 * epoch - summary["samples"] < 64
    assert summary["samples"] == sum(line["samples_accumulated"] for line in lines)
    assert (tmp_path / "out" / f"checkpoint-{epoch}").is_dir()
    assert statistics.median(line["data_wait_share"] for line in lines) > 0.1, lines
    assert script.text.count("raise --dataloader_num_workers (now 0)") == 1


def test_out_of_memory_before_first_step_is_one_line(start, words):
    script = start("crowded", "-m", "tests.programs.changed_trainer", "crowded", *words)
    script.assert_user_error("out of memory on cpu: try a smaller --per_device_train_batch_size", 120)


@pytest.mark.parametrize("scale", [2.0**16, 0.0])
def test_loss_scale_survives_skipped_steps(scale):
    """After 200 bad steps in a row, or with the scale of 0 that an earlier version has saved, a good one counts."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _, scaler = devices.place_model(model, CPU, TrainerArguments(fp16=True))
    scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
    for factor in [math.nan] * 200 + [1.0]:
        before = model.bias.item()
        scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert (scaler.get_scale(), model.bias.item()) == (1.0, pytest.approx(before - 1))


@pytest.fixture
def trial(tiny_data):
    model_args = ModelArguments("configs/demo.json", tokenizer_path=str(tiny_data["--tokenizer_path"]))
    data_args = DataArguments(str(tiny_data["--dataset_path"]))
    tokenizer, dataset, corpus = load_data(model_args, data_args, needs_validation=False)
    model = make_model(model_args, len(tokenizer))
    batch = devices.make_trial_batch(model, dataset["train"], tokenizer, corpus, data_args, seed=1)
    assert batch["input_ids"].shape == (1, 32) and batch["attention_mask"].all() and (batch["labels"] >= 0).any()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    return model, batch


def test_flop_of_gpt2_match_formula(tmp_path):
    """Per token: 6 per weight in a product, 4 if frozen, and 12 x length x width per layer of attention, without those
    that gradient checkpointing repeats."""
    layers, width, length = 3, 128, 256
    sizes = dict(model_type="gpt2", n_layer=layers, n_embd=width, n_head=4, n_positions=length)
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    model = make_model(ModelArguments(str(tmp_path / "config.json")), 1000)
    weights = model.num_parameters() - length * width  # the head shares the word embeddings, and positions are added
    model.compile(backend="aot_eager")  # counts as before
    batch = make_batch(model, 1, length, 0)
    flop = devices.count_flop(model, batch, CPU)
    assert flop == pytest.approx(length * (6 * weights + 12 * layers * length * width), rel=0.1)
    model.activation_checkpointing_enable()
    assert flop == devices.count_flop(model, batch, CPU)
    model.transformer.h.requires_grad_(False)
    frozen = sum(param.numel() for param in model.transformer.h.parameters() if param.dim() == 2)
    assert flop - devices.count_flop(model, batch, CPU) == 2 * length * frozen
    assert not any(param.grad.any() for param in model.parameters() if param.grad is not None)


def test_flop_count_keeps_no_frozen_copies(tmp_path):
    """With weights in bfloat16, and the default precision of a GPU's autocast."""
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    model = make_model(ModelArguments(str(tmp_path / "config.json")), 1000).bfloat16()
    model.model.layers.requires_grad_(False)
    own = {param.data_ptr() for param in model.parameters()}
    frozen = {param.numel() for param in model.model.layers.parameters() if param.dim() == 2}
    batch = make_batch(model, 1, 25, 0)  # no activation has the size of a matrix
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() in frozen:
            kept.append(tensor)
        return tensor

    default = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            devices.count_flop(model, batch, CPU)
    finally:
        torch.set_autocast_dtype("cpu", default)
    assert len(kept) == 14 and {tensor.data_ptr() for tensor in kept} <= own  # seven matrices per layer


def test_peak_is_found_by_name():
    peaks = {"NVIDIA H100 PCIe": 756e12, "NVIDIA A100-SXM4-80GB": 312e12, "Tesla V100-PCIE-16GB": 125e12}
    peaks |= {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA L4": 121e12, "NVIDIA GeForce RTX 3060 Ti": 32.4e12}
    others = "", "NVIDIA L40S", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    peaks |= dict.fromkeys(others)
    assert {name: devices.find_peak(name, is_half=True) for name in peaks} == peaks
    assert devices.find_peak("Tesla T4", is_half=False) == 8.1e12


def test_batch_size_search_leaves_nothing(trial, caplog):
    model, batch = trial
    weights = [param.clone() for param in model.parameters()]
    gradients, random = [param.grad for param in model.parameters()], torch.get_rng_state()
    size, count = devices.find_batch_size(model, batch, CPU, contextlib.nullcontext(), largest_step=64)
    assert size in (1, 2, 4, 8, 16, 32, 64) and 1 <= count <= 64 // size  # which of them, the machine's speed decides
    assert all(param.grad is gradient for param, gradient in zip(model.parameters(), gradients, strict=True))
    assert not any(gradient.any() for gradient in gradients)
    assert all(map(torch.equal, model.parameters(), weights)) and torch.get_rng_state().equal(random)

    # only one sample fits into memory
    def allocate(module, inputs):
        if len(inputs[0]) > 1:
            torch.empty(2**60, dtype=torch.uint8)

    model.albert.encoder.register_forward_pre_hook(allocate)
    with caplog.at_level(logging.INFO):
        size, count = devices.find_batch_size(model, batch, CPU, contextlib.nullcontext(), largest_step=64)
    assert size == 1 and "2 samples: too much for this device's memory" in caplog.text


def test_gpu_memory_is_read_by_old_torch(monkeypatch):
    """A notebook keeps its torch: that of 2.9 has no torch.accelerator.get_memory_info."""
    monkeypatch.delattr(torch.accelerator, "get_memory_info")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 4))
    assert devices.measure_memory(torch.device("cuda", 0)) == 0.75


@pytest.mark.slow
def test_failing_compiler_is_one_line(trial):
    model, batch = trial
    broken = torch._inductor.config.patch({"cpp.cxx": (None, "/no/such/compiler"), "force_disable_caches": True})
    with broken, pytest.raises(UserError, match="--torch_compile: the compiler failed .*compiler.*: omit the flag"):
        devices.compile_model(model, batch, CPU, contextlib.nullcontext())


SIZES = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
COMPILED = {
    "albert": dict(embedding_size=16, classifier_dropout_prob=0, hidden_dropout_prob=0, attention_probs_dropout_prob=0),
    "lean_albert": dict(embedding_size=16),
    "bert": dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0),
    "gpt2": dict(n_embd=32, n_layer=1, n_head=2, n_inner=64, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0),
}


def make_batch(model, rows: int, length: int, padding: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(rows)
    ids = torch.randint(5, 300, (rows, length), generator=random)
    has_label = torch.rand(ids.shape, generator=random) < (1.0 if model.objective.is_causal else 0.3)
    has_label[:, 0] = False
    batch = {"input_ids": ids, "labels": torch.where(has_label, ids, -100), "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][:, length - padding :] = 0
    # two documents in a row with padding
    positions = torch.arange(length).expand(rows, -1) % (length // 2 if padding else length)
    is_causal = model.objective.is_causal
    batch |= {"position_ids": positions} if is_causal else {"token_type_ids": torch.zeros_like(ids)}
    return batch | ({"sentence_order_label": torch.arange(rows) % 2} if model.objective.kind.has_pairs else {})


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_model_matches_for_all_sizes(tmp_path, kind):
    config = {"model_type": kind, **({} if kind == "gpt2" else SIZES), **COMPILED[kind]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = make_model(ModelArguments(str(tmp_path / "config.json")), 300)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    names = [name for name, _ in model.named_parameters()]
    batches = [make_batch(model, *sizes) for sizes in [(4, 32, 0), (5, 20, 0), (6, 32, 5), (7, 31, 2), (3, 40, 0)]]

    def compute() -> list:
        results = []
        for batch in batches:
            model.zero_grad(set_to_none=False)
            loss = compute_losses(model, move_batch(batch, CPU))["loss"]
            loss.backward()
            results.append((loss.detach(), [param.grad.clone() for param in model.parameters()]))
        return results

    before = compute()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    devices.compile_model(model, make_batch(model, 1, 32, 0), CPU, contextlib.nullcontext())
    assert devices.find_blocks(model) and all(block._compiled_call_impl for block in devices.find_blocks(model))
    after = compute()
    # layers with an attention mask and without, and the loss
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    for (loss, gradients), (expected, others) in zip(after, before, strict=True):
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients, others, rtol=1e-3, atol=1e-5)
    assert [name for name, _ in model.named_parameters()] == names


def test_device_that_fails_is_one_line():
    """No number can be read from torch's device meta; an old driver fails in other words."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="meta does not work with torch .*: update its driver, .* --device cpu"):
        devices.place_model(model, torch.device("meta"), TrainerArguments())
    assert model.weight.device == CPU
    devices.place_model(model, CPU, TrainerArguments())


def test_device_choice_needs_no_cuda_context():
    code = "import torch; from arguments import TrainerArguments; from training.ranks import join_ranks\n"
    code += "ranks = join_ranks(TrainerArguments()); print(ranks.count, ranks.device, torch.cuda.is_initialized())"
    result = run_python("-c", code, env={"CUDA_VISIBLE_DEVICES": "0"})
    expected = "1 cuda:0 False" if torch.cuda.is_available() else "1 cpu False"
    assert result.stdout.strip() == expected, result.stderr[-2000:]


def test_device_flags_set_ranks_and_size(monkeypatch):
    assert devices.choose_devices(TrainerArguments(device="cpu", num_devices=3)) == [CPU] * 3
    assert devices.choose_devices(TrainerArguments(device="cpu")) == [CPU]
    sizes = [TrainerArguments(per_device_train_batch_size=size).per_device_train_batch_size for size in ("16", "auto")]
    assert sizes == [16, "auto"]
    for options, words in (
        (dict(device="cuda:9"), "--device cuda:9.*nvidia-smi"),
        (dict(device="mps"), "--device mps:"),
        (dict(device="mps", num_devices=2), "--device mps --num_devices 2:"),
        (dict(device="cpu", fp16=True), "--fp16 needs a CUDA GPU.*--bf16"),
        (dict(device="cpu", sharded=True), "--sharded needs several devices"),
        (dict(device="gpu"), "--device gpu"),
        (dict(device="cuda:07"), "--device cuda:07: not supported"),
        (dict(device="xla"), "--device xla: not supported"),
        (dict(per_device_train_batch_size="many"), "--per_device_train_batch_size"),
        (dict(per_device_train_batch_size="0"), "--per_device_train_batch_size"),
        (dict(per_device_train_batch_size="auto", sharded=True), "--sharded"),
    ):
        with pytest.raises(UserError, match=words):
            join_ranks(TrainerArguments(**options))
    with pytest.raises(UserError, match="--sharded needs several devices"):  # in a preflight
        devices.choose_devices(TrainerArguments(device="cpu", sharded=True))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UserError, match="omit torchrun"):
        join_ranks(TrainerArguments())


def test_out_of_memory_errors_are_recognized():
    names = ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"]
    names += ["CUDA out of memory. Tried to allocate 2.00 GiB.", "DefaultCPUAllocator: can't allocate memory"]
    assert all(devices.is_out_of_memory(RuntimeError(name)) for name in names)
    assert devices.is_out_of_memory(MemoryError())
    assert not devices.is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
