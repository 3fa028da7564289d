"""Devices and processes of a run: reported and verified at its start, a CPU beside a GPU, a killed loader worker."""

import dataclasses
import errno
import json
import os
import platform
import signal
import socket
from pathlib import Path

import pytest
import torch
from tests.training.test_run import BATCH, ONE, TWO, finish, make_config, write_checkpoint
from torch.distributed import TCPStore
from torch.utils.data import DataLoader

from recipes_lib.errors import ConfigError, DataError, LostPeerError, Problem
from recipes_lib.processes import explain_lost_connection, read_failure_code, tell_other_machines
from recipes_lib.stopping import STOP
from recipes_lib.training import run as run_module
from recipes_lib.training.layouts.launch_environment import Launch, Layout
from recipes_lib.training.run import describe_process, start_run


@pytest.fixture(autouse=True)
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the rendezvous variables of a launcher, which runs of two processes need."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")


def test_each_process_reports_rank_and_host_at_start(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert describe_process(Launch(3, 1, 16, "FSDP")) == f"process 3 of 16: {socket.gethostname()}, cpu, FSDP"
    start_run(make_config(tmp_path / "several"), TWO)
    assert capsys.readouterr().err.startswith(f"process 0 of 2: {socket.gethostname()}, cpu\n")
    monkeypatch.setenv("RECIPES_LAUNCHED", "4 ")
    with pytest.raises(ConfigError, match="expected 4 processes with no sharding"):
        start_run(make_config(tmp_path / "another"), TWO)
    assert "process 0 of 2" in capsys.readouterr().err
    monkeypatch.delenv("RECIPES_LAUNCHED")
    start_run(make_config(tmp_path / "alone"), ONE)
    assert "process 0" not in capsys.readouterr().err
    # One process on a machine with eight GPUs.
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H100")
    begin, idle = f"process 0 of 1: {socket.gethostname()}, ", "one of 8 GPUs; the others are idle"
    assert describe_process(ONE) == f"{begin}cuda:0 (NVIDIA H100), {idle} (`recipes launch` uses all)"
    for name, by_recipe in (("by recipe", True), ("by launch file", False)):
        launch = dataclasses.replace(ONE, layout=Layout(uses_cpu=not by_recipe))
        start_run(make_config(tmp_path / name, use_cpu=by_recipe), launch)
        assert (logged := capsys.readouterr().err).startswith(f"{begin}cpu")
        assert "idle" not in logged


@pytest.mark.parametrize(
    ("launch", "keys", "found"),
    [
        (dataclasses.replace(TWO, rank=2), {}, "the ranks of 2 processes end at 1"),
        (dataclasses.replace(ONE, precision="fp16"), {"bf16": True}, "they contradict each other"),
        (ONE, {"optim": "lomo"}, "during the backward pass"),
    ],
    ids=["launcher", "launch file", "optimizer"],
)
def test_what_fails_late_is_refused_before_the_directory_is_opened(tmp_path, launch, keys, found):
    with pytest.raises(ConfigError, match=found):
        start_run(make_config(tmp_path / "out", **keys), launch)
    assert not (tmp_path / "out").exists()


def test_checkpoint_of_deepspeed_is_refused_without_it(tmp_path):
    start_run(make_config(tmp_path, **BATCH), ONE)
    write_checkpoint(tmp_path, 5, **BATCH, engine="DEEPSPEED")
    with pytest.raises(ConfigError, match="checkpoint-5: was written under DEEPSPEED"):
        start_run(make_config(tmp_path, **BATCH), ONE)


@pytest.mark.parametrize("finished", [True, False])
def test_main_process_decides_for_machines_with_disks_of_their_own(tmp_path, finished, monkeypatch):
    """Otherwise some of them would end, and the others wait for them."""
    if not finished:  # This machine was the main one of an earlier run.
        finish(make_config(tmp_path, **BATCH))
    for name, value in {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run_module, "is_true_on_main", lambda own: not own)
    config = make_config(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    assert start_run(config, Launch(rank=1, local_rank=0, world_size=2, engine="")).finished is finished


@pytest.mark.parametrize("is_training", [False, True])
def test_run_ends_with_a_machine_that_fails_before_training(tmp_path, monkeypatch, is_training):
    """It would wait for the processes of that machine until a timeout."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # As the launcher's.
    run, left = start_run(make_config(tmp_path), ONE), []
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in (variables | {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2", "RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    for error in (DataError(Problem("rows\udcff.jsonl:3", "invalid JSON")), LostPeerError("rank 1 ended")):
        tell_other_machines(error, error.exit_code)
    monkeypatch.setattr(run_module, "SECONDS_TO_UNWIND", 0)
    monkeypatch.setattr(run_module, "leave", lambda *given: left.append(given))
    monkeypatch.setattr(STOP, "is_deferred", is_training)
    found = f"rank 1 on {platform.node()} ended: DataError: rows\\udcff.jsonl:3: invalid JSON"
    assert (explain_lost_connection(RuntimeError("Broken pipe"), 0), read_failure_code()) == (found, 2)
    run._end_with_other_machines()  # Last: it would wait for a year.
    assert left == ([] if is_training else [(1, f"rank 0 exits: {found}")])
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["status"], record["error"]) == (("running", None) if is_training else ("refused", found))


@pytest.mark.parametrize(("use_cpu", "warns"), [(False, True), (True, False)])
def test_run_on_cpu_beside_unusable_gpu_warns(tmp_path, monkeypatch, capsys, use_cpu, warns) -> None:
    monkeypatch.setattr(run_module, "find_gpu_obstacle", lambda _: "the driver is too old")
    start_run(make_config(tmp_path / "run", use_cpu=use_cpu), ONE)
    assert ("torch cannot use the GPU: the driver is too old" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    ("precision", "has_bf16", "warns"), [("bf16", False, True), ("bf16", True, False), ("fp16", False, False)]
)
def test_emulated_bf16_warns(tmp_path, monkeypatch, capsys, precision, has_bf16, warns) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    # Its default counts devices in a CUDA build, which would then initialise the driver.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA T4")
    monkeypatch.setattr(run_module, "supports_bf16", lambda: has_bf16)
    start_run(make_config(tmp_path / "run"), dataclasses.replace(ONE, precision=precision))
    assert ("emulates it slowly: write `mixed_precision: fp16`" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    ("precision", "use_cpu", "warns"), [("bf16", False, True), ("bf16", True, False), ("no", False, False)]
)
def test_launch_file_for_gpus_without_one_warns(tmp_path, capsys, precision, use_cpu, warns) -> None:
    start_run(make_config(tmp_path / "run", use_cpu=use_cpu), dataclasses.replace(ONE, precision=precision))
    assert ("asks for bf16, and there is no GPU: in a container" in capsys.readouterr().err) == warns


def test_launch_file_for_cpus_is_kept_beside_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would choose the GPU for batches, and accelerate the CPU for the model."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    one = Launch(rank=0, local_rank=0, world_size=1, engine="", layout=Layout(uses_cpu=True))
    run = start_run(make_config(tmp_path / "run"), one)
    record = json.loads((run.output_dir / "run.json").read_text())
    assert run.config.training["use_cpu"] is True
    assert "use_cpu" not in record["config"], "a run of the recipe without a GPU can be resumed"
    assert "H100" not in record["hardware"]["device"]
    assert record["planned"] is None


def test_killed_data_loader_worker_is_named(tmp_path):
    run = start_run(make_config(tmp_path), ONE)
    begun, begins = os.pipe()

    class Rows(list[int]):
        def __getitem__(self, index):
            # A process that is killed inside of the loader may hold a lock, for which this one would wait for ever.
            os.write(begins, b"1")
            signal.pause()

    # Forked, as those of a run on Linux, which is not the default of Python 3.14.
    rows = iter(DataLoader(Rows([1, 2]), num_workers=1, multiprocessing_context="fork"))
    assert os.read(begun, 1)

    def receive() -> None:
        os.kill(rows._workers[0].pid, signal.SIGKILL)
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    found = "a process that loads data has ended: DataLoader worker"
    with pytest.raises(ConfigError, match=found), run.recording_its_end():
        receive()
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "refused"


def test_key_at_its_default_is_the_same_as_an_unset_one(tmp_path):
    start_run(make_config(tmp_path, weight_decay=0.0), ONE)
    write_checkpoint(tmp_path, 5)
    for keys in ({}, {"weight_decay": 0.0, "adam_beta2": 0.999}, {"use_cpu": False}):
        assert start_run(make_config(tmp_path, **keys), ONE).resume_from


@pytest.mark.parametrize("switch", ["bf16", "fp16", "torch_compile", "use_liger_kernel"])
def test_switch_that_hardware_or_launch_file_decides_is_not_the_same_as_its_default(tmp_path, switch):
    start_run(make_config(tmp_path), ONE)
    write_checkpoint(tmp_path, 5)
    with pytest.raises(ConfigError, match=f"{switch} was None in the run"):
        start_run(make_config(tmp_path, **{switch: False}), ONE)
