"""``recipes launch``: detected machines, the accelerate command against its own parser, and launch verification."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from unittest import mock

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from tests import forked
from tests.faults import recipe_runs
from tests.forked import ROOT, run_script
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from recipes_lib.commands import launch as launching
from recipes_lib.commands.launch import Machines, find_first_host, find_machines
from recipes_lib.errors import EXIT_BUG, EXIT_DIVERGED, EXIT_PREEMPTED, EXIT_USER, ConfigError
from recipes_lib.stopping import STOP_SIGNALS
from recipes_lib.training.layouts.launch_environment import Launch, expect_launch, read_launch, verify_expected

CONFIG = "recipes/configs/llama3-8b/sft.yaml"
PIPELINE = ["--config", "recipes/configs/llama2-7b/pretrain.yaml", "--hardware", "cpu_ddp", "--num_processes", "8"]
STEP = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_NODELIST": "gpu-[017-019,031]",
    "SLURM_NODEID": "2",
}


@pytest.fixture(autouse=True)
def environment():
    """Restore the environment variables, which the command sets for the process that it becomes."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def compose(monkeypatch, capsys):
    """Return the accelerate command on a machine with eight GPUs, parsed by accelerate itself."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("recipes_lib.hardware.count_accelerators", lambda: 8)

    def compose(*flags, environment=None):
        for name, value in (environment or {}).items():
            monkeypatch.setenv(name, value)
        assert launching.main(["--config", CONFIG, "--dry_run", *flags]) == 0
        command = shlex.split(capsys.readouterr().err.splitlines()[1])
        assert command[:5] == [sys.executable, "-P", "-m", "accelerate.commands.accelerate_cli", "launch"]
        return launch_command_parser().parse_args(command[5:])

    return compose


def test_one_machine_has_one_process_per_gpu(compose):
    args = compose("--learning_rate", "2e-5")
    assert (args.config_file, args.num_processes, args.num_machines) == ("accelerate_configs/ddp.yaml", 8, 1)
    assert args.training_script == "recipes/sft.py"
    assert compose("--hardware", "cpu_ddp").num_processes == 2, "the number in the launch file"
    assert args.training_script_args == ["--config", CONFIG, "--learning_rate", "2e-5"]


def test_configuration_is_printed_instead_of_a_launch(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match=r"^0$"):
        launching.main(["--config", CONFIG, "--hardware", "cpu_ddp", "--dry_run", "--print-config"])
    printed = capsys.readouterr()
    assert printed.out.count("\nlearning_rate:") == 1
    assert printed.err == ""


def test_slurm_variables_replace_flags(compose):
    args = compose("--hardware", "fsdp2", environment=STEP)
    assert (args.num_processes, args.num_machines, args.machine_rank) == (32, 4, 2)
    assert (args.main_process_ip, args.main_process_port) == ("gpu-017", 24567)


@pytest.mark.parametrize(
    ("environment", "machines"),
    [
        ({"PATH": "/bin"}, Machines()),
        (STEP, Machines(4, 2, "gpu-017", 24567, "SLURM, 4 nodes")),
        # Another job on the same node must not have its port.
        (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"},
            Machines(main_process_port=20007, source="SLURM, one node"),
        ),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "head", "PET_MASTER_PORT": "1234"},
            Machines(2, 1, "head", 1234, "torchrun's variables (PET_...)"),
        ),
    ],
)
def test_machines_are_read_from_environment(environment, machines):
    assert find_machines(environment) == machines


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({key: value for key, value in STEP.items() if "STEP" not in key}, r"4 nodes[\s\S]*srun --ntasks-per-node=1"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, "tasks on a node"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2"}, "tasks on a node"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "1(x3),8"}, "tasks on a node"),
        (STEP | {"LOCAL_RANK": "1", "RANK": "5"}, "process 5 of an existing launch"),
    ],
    ids=["batch script", "several tasks per node", "two tasks", "tasks of different nodes", "nested launch"],
)
def test_start_by_wrong_process_is_rejected(environment, message):
    with pytest.raises(ConfigError, match=message):
        find_machines(environment)


@pytest.mark.parametrize("name", ["PET_NNODES", "PET_NODE_RANK", "PET_MASTER_PORT", "MASTER_PORT"])
@pytest.mark.parametrize("text", ["1:4", "", "two"])
def test_non_numeric_variable_is_named(name, text):
    with pytest.raises(ConfigError, match=f"{name}: '{text}' is not a whole number"):
        find_machines({"PET_NNODES": "2", name: text})
    with pytest.raises(ConfigError, match=f"SLURM_NODEID: '{text}' is not a whole number"):
        find_machines(STEP | {"SLURM_NODEID": text})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("login,gpu-[1-2]", "login"),
        ("gpu-[017-020,031],login", "gpu-017"),
        ("gpu-[5]", "gpu-5"),
        ("a[1,3]b,c", "a1b"),
        ("a[08-09]-ib", "a08-ib"),
        ("rack[1-2]node[03-16,20],login", "rack1node03"),
    ],
)
def test_first_host_of_node_list(nodes, first):
    assert find_first_host(nodes) == first


def test_flags_override_environment(compose):
    args = compose("--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "head", "--num_processes", "4")
    assert (args.num_processes, args.num_machines, args.machine_rank) == (4, 2, 1)
    assert (args.main_process_ip, args.main_process_port) == ("head", 29500)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SKYPILOT_NUM_NODES"])
def test_launchers_that_do_not_know_each_other_are_refused(name, compose):
    """As in a PyTorchJob, under mpirun or on SkyPilot: each of them would train a separate model."""
    with pytest.raises(ConfigError, match=f"{name}: is 2[\\s\\S]*--machine_rank"):
        compose(environment={name: "2"})
    assert compose("--num_machines", "1").num_machines == 1
    flags = ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "head"]
    assert compose(*flags).num_machines == 2
    # A single pod of Kubeflow, where WORLD_SIZE counts its processes.
    assert compose(environment={"PET_NNODES": "1"}).num_machines == 1


def test_no_machine_starts_deepspeed_processes_of_others(compose, tmp_path):
    """Without the flag, accelerate runs DeepSpeed's launcher, which connects to all machines by ssh."""
    file = tmp_path / "mine.yaml"
    for launcher in ("", "\n  deepspeed_multinode_launcher: pdsh"):
        file.write_text(f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2{launcher}\n")
        args, defaults, _ = _validate_launch_command(compose("--hardware", str(file), environment=STEP))
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        command, _ = prepare_deepspeed_cmd_env(args)
        assert (command, args.nnodes, args.node_rank, args.nproc_per_node) == (None, "4", 2, "8")


def test_launch_file_of_accelerate_config_is_followed(compose, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\ngpu_ids: 0,3\nnum_processes: 2\n")
    assert compose("--hardware", str(file)).num_processes == 2
    file.write_text("distributed_type: MULTI_GPU\nnum_machines: 2\nmachine_rank: 1\nnum_processes: 16\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml is for 2 machines: each would train a separate"):
        compose("--hardware", str(file))
    assert compose("--hardware", str(file), "--num_machines", "1").num_processes == 8


@pytest.mark.parametrize(
    ("flags", "environment", "port"),
    [
        ([], {}, 29600),
        (["--main_process_port", "29500"], {}, 29500),
        ([], {"PET_NNODES": "2", "PET_MASTER_ADDR": "head", "PET_MASTER_PORT": "29700"}, 29700),
        ([], STEP, 24567),
    ],
    ids=["file", "flag", "torchrun", "SLURM"],
)
def test_port_of_launch_file_is_the_default(compose, tmp_path, flags, environment, port):
    file = tmp_path / "mine.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 8\nmain_process_port: 29600\n")
    assert compose("--hardware", str(file), *flags, environment=environment).main_process_port == port
    assert compose("--hardware", str(file), environment=STEP).num_machines == 4


@pytest.mark.parametrize(("num", "name"), [(0, "cpu"), (1, "single_gpu"), (2, "ddp")])
def test_default_launch_file_depends_on_accelerators(num, name, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("recipes_lib.hardware.count_accelerators", lambda: num)
    assert launching.choose_for_this_machine() == name
    assert launching.choose_for_this_machine(2) == ("ddp" if num else "cpu_ddp")


def test_default_launch_file_is_for_the_requested_processes(compose, monkeypatch):
    monkeypatch.setattr("recipes_lib.hardware.count_accelerators", lambda: 0)
    assert compose("--num_processes", "3").config_file.endswith("cpu_ddp.yaml")
    assert compose("--num_processes", "1").config_file.endswith("cpu.yaml")


def test_default_of_cpus_beside_unusable_gpu_warns(monkeypatch, capsys):
    monkeypatch.setattr("recipes_lib.hardware.count_accelerators", lambda: 0)
    monkeypatch.setattr("recipes_lib.hardware.find_gpu_obstacle", lambda _: "the driver is too old")
    assert launching.choose_for_this_machine() == "cpu"
    assert "warning: CPUs are used, for torch cannot use the GPU: the driver is too old" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--hardware", "fsdp3"], r"no launch file accelerate_configs/fsdp3\.yaml\n    write one of cpu, "),
        (["--num_machines", "2"], "without --machine_rank and --main_process_ip"),
        (["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", ""], "without --machine_rank and --main"),
        (["--num_machines", "2", "--machine_rank", "2", "--main_process_ip", "a"], "--machine_rank: is 2, with"),
        (
            ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "a", "--hardware", "single_gpu"],
            "single_gpu.yaml is for one process, not for 2",
        ),
        (["--hardware", "cpu", "--num_processes", "3"], "cpu.yaml is for one process, not for 3"),
        (
            ["--num_machines", "3", "--machine_rank", "1", "--main_process_ip", "a"],
            "2 processes cannot be divided equally among 3 machines",
        ),
        (["--num_machines", "0"], "--num_machines: is 0"),
        (["--main_process_port", "65536"], "--main_process_port: is 65536"),
        (["--recipe", "corpus"], "--config: is for corpus, which does not train\n    run `recipes clean`"),
        (["--config", "recipes/configs/gpt2-124m/eval.yaml"], "--config: is for eval, .*\n    run `recipes eval`"),
        (["--learning_rat", "1"], "learning_rate"),
        (["--hardware", "fsdp2", "--num_processes", "8", "--optim", "adafactor"], "sharded"),
        ([*PIPELINE, "--pipeline_stages", "3"], "do not divide the number of processes"),
        ([*PIPELINE, "--pipeline_stages", "4", "--pipeline_schedule", "1f2b"], "no schedule '1f2b'"),
        ([*PIPELINE, "--pipeline_stages", "4", "--gradient_accumulation_steps", "2"], "too few micro-batches to fill"),
        ([*PIPELINE, "--pipeline_stages", "-1"], "'-1' is not a whole number from 1 on"),
    ],
)
def test_invalid_launch_is_rejected_before_start(flags, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("recipes_lib.hardware.count_accelerators", lambda: 0)
    with pytest.raises(ConfigError, match=words):
        launching.main([*([] if "--config" in flags else ["--config", CONFIG]), "--dry_run", *flags])


@pytest.mark.parametrize(
    ("num_gpus", "flags", "words"),
    [
        (0, ["--hardware", "fsdp2"], "asks for FSDP, and torch finds no GPU"),
        (0, ["--hardware", "zero2"], "asks for DEEPSPEED, and torch finds no GPU"),
        (1, ["--hardware", "ddp"], "2 processes on this machine, where torch finds 1 GPU"),
        (1, ["--hardware", "ddp", "--use_cpu", "true"], None),
        (1, ["--hardware", "cpu_ddp"], None),
        (2, ["--hardware", "fsdp2"], None),
    ],
)
def test_missing_gpus_are_found_before_start(num_gpus, flags, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("recipes_lib.hardware.count_accelerators", lambda: num_gpus)
    monkeypatch.setattr("os.execv", mock.Mock(side_effect=InterruptedError))
    with pytest.raises(ConfigError if words else InterruptedError, match=words):
        launching.main(["--config", CONFIG, "--num_processes", "2", *flags])


def test_dry_run_without_gpus_has_the_processes_of_the_launch_file(compose, monkeypatch):
    monkeypatch.setattr("recipes_lib.hardware.count_accelerators", lambda: 0)
    assert compose("--hardware", "fsdp2").num_processes == 8
    four = ("--num_machines", "4", "--machine_rank", "0", "--main_process_ip", "a")
    assert compose("--hardware", "fsdp2", *four).num_processes == 32
    with pytest.raises(ConfigError, match="needs GPUs, and this machine has none"):
        launching.main(["--config", CONFIG, "--hardware", "fsdp2"])


def test_fp8_is_verified_before_accelerate_refuses_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("accelerate has started the recipe"))
    with pytest.raises(ConfigError, match=r"fp8 needs a GPU of compute capability 8\.9 or higher"):
        launching.main(["--config", "recipes/configs/llama2-70b/pretrain.yaml", "--hardware", "fp8"])


def test_processes_verify_expected_launch(monkeypatch):
    monkeypatch.setenv("RECIPES_LAUNCHED", "")
    expect_launch(Launch(rank=0, local_rank=0, world_size=2, engine="FSDP"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="expected 2 processes with FSDP; this process is one of 2 with no sharding"):
        verify_expected(read_launch())
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    verify_expected(read_launch())
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="one of 1 with FSDP"):
        verify_expected(read_launch())


def test_default_variables_do_not_override_users(monkeypatch):
    for name in ("RECIPES_LAUNCHED", "PYTORCH_ALLOC_CONF", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "mine")
    expect_launch(Launch(rank=0, local_rank=0, world_size=2, engine="FSDP"))
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    expect_launch(Launch(rank=0, local_rank=0, world_size=2, engine="FSDP"))
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("by", ["flags", "variables"])
def test_pipeline_layout_is_passed_to_processes(by, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for name in ("RECIPES_LAUNCHED", "PIPELINE_STAGES", "PIPELINE_SCHEDULE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.execv", mock.Mock(side_effect=InterruptedError))
    flags = ["--pipeline_stages", "4", "--pipeline_schedule", "gpipe"]
    if by == "variables":
        monkeypatch.setenv("PIPELINE_STAGES", "4")
        monkeypatch.setenv("PIPELINE_SCHEDULE", "gpipe")
        flags = []
    with pytest.raises(InterruptedError):
        launching.main([*PIPELINE, *flags])
    assert "\nPIPELINE_STAGES=4 PIPELINE_SCHEDULE=gpipe " in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "8")
    launch = read_launch()
    assert (launch.layout.pipeline_stages, launch.layout.schedule, launch.data_size) == (4, "gpipe", 2)


def write_keys(folder):
    recipe_runs.write_inputs(folder)
    keys = recipe_runs.make_keys(folder, "sft", output_dir=folder / "out", max_steps=1, num_sample_prompts=None)
    flags = [f"--{name}={value}" for name, value in keys.items()]
    (folder / "sft.yaml").write_text("num_sample_prompts: 0\n")
    return [*flags, "--config", str(folder / "sft.yaml"), "--hardware", "cpu"]


@pytest.mark.multiprocess
def test_single_process_launch_becomes_recipe(tmp_path, monkeypatch):
    """The recipe that ``exec`` would start rejects another configuration in the same output directory."""
    executed = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("os.execve", lambda *arguments: executed.extend(arguments) or 1 / 0)
    flags = write_keys(tmp_path)
    (tmp_path / "out").mkdir()
    record = {"status": "done", "config": {"weight_decay": 0.3}}
    (tmp_path / "out" / "run.json").write_text(json.dumps(record))
    with pytest.raises(ZeroDivisionError):
        launching.main(flags)
    program, (_, script, *arguments), environment = executed
    assert program == sys.executable
    ended = run_script(ROOT / script, *arguments, variables=environment, code=EXIT_USER)
    assert "choose another output_dir" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.multiprocess
def test_launch_trains_and_returns_exit_code_of_recipe(tmp_path):
    command = [sys.executable, "-m", "recipes_lib.cli", "launch", *write_keys(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out" / "model.safetensors").exists()
    # Only the recipe itself detects another configuration in its output directory.
    done = subprocess.run([*command, "--weight_decay=0.3"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == EXIT_USER


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("ends", "code", "message"),
    [
        pytest.param(["sys.exit(0)"] * 2, 0, "", id="success"),
        pytest.param(["sys.exit(75)"] * 2, EXIT_PREEMPTED, "", id="preempted"),
        # The others are ended by SIGTERM, and might save a checkpoint.
        pytest.param(["save()", "sys.exit(1)"], 1, "", id="bug"),
        pytest.param(["save()", "sys.exit(3)"], EXIT_DIVERGED, "", id="cause of one rank"),
        pytest.param(["save()", "os.kill(os.getpid(), 9)"], 137, "rank 1 .* was ended by SIGKILL", id="killed"),
        pytest.param(["os.kill(os.getppid(), 15); save()", "save()"], EXIT_PREEMPTED, "", id="launcher signalled"),
    ],
)
def test_several_processes_end_with_code_of_cause(tmp_path, ends, code, message):
    script = tmp_path / "recipe.py"
    script.write_text(
        "import os, signal, sys\n"
        "launcher = os.getppid()\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        # A launcher that is signalled while it starts processes ends without them, which a recipe detects, too.
        "def save():\n    while os.getppid() == launcher: signal.sigtimedwait([signal.SIGUSR1], 0.1)\n"
        f"exec({ends}[int(os.environ['RANK'])])\n"
    )
    flags = ["--config_file", "accelerate_configs/cpu_ddp.yaml", "--num_processes", "2", "--main_process_port", "0"]
    done = forked.Launch(launching.__name__, *flags, script).finish()
    assert done.returncode == code, done.stderr
    assert re.search(message, done.stderr)
    assert "Traceback" not in done.stderr
    assert "torch/distributed/elastic" not in done.stderr or code == EXIT_PREEMPTED


def meet_at(port, rank):
    """Start one of two machines, which waits a second for the other; return the exit code."""
    machines = ["--num_machines", "2", "--machine_rank", str(rank), "--main_process_ip", "127.0.0.1"]
    file = ["--config_file", str(ROOT / "accelerate_configs" / "cpu_ddp.yaml"), "--num_processes", "2"]
    flags = [*file, *machines, "--main_process_port", str(port), "--rdzv_conf", "timeout=1"]
    return launching.run_processes([*flags, "recipe.py"])


@pytest.mark.parametrize("rank", [0, 1])
def test_machine_that_waits_in_vain_is_no_traceback(rank, capfd):
    assert meet_at(port := forked.find_free_port(), rank) == EXIT_BUG
    error = capfd.readouterr().err
    assert f"recipes launch: not all machines came to 127.0.0.1:{port}: " in error
    assert "Traceback" not in error


def test_used_port_of_first_machine_is_refused(capfd):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        assert meet_at(port, 0) == EXIT_USER
    assert capfd.readouterr().err == (
        f"--main_process_port: another process uses port {port}\n    write another one, on every machine\n"
    )


@pytest.mark.parametrize(("codes", "code"), [((1, 3), 3), ((1, 2), 2), ((1, 4), 4), ((1, -9), 1), ((75, 1), 75)])
def test_cause_is_found_among_simultaneous_failures(monkeypatch, codes, code):
    """A process that has lost another one may be the first that the launcher sees."""
    failures = {rank: ProcessFailure(rank, pid=1, exitcode=code, error_file="") for rank, code in enumerate(codes)}
    raised = mock.Mock(side_effect=ChildFailedError("recipe.py", failures))
    monkeypatch.setattr("accelerate.commands.launch.launch_command", raised)
    assert launching.run_processes(["recipe.py"]) == code


def test_signals_after_the_first_do_not_change_the_exit_code(monkeypatch):
    raised = mock.Mock(side_effect=SignalException("Ctrl-C", signal.SIGINT))
    monkeypatch.setattr("accelerate.commands.launch.launch_command", raised)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        assert launching.run_processes(["recipe.py"]) == EXIT_PREEMPTED
        assert {signal.getsignal(number) for number in STOP_SIGNALS} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
