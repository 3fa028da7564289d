"""One command for any number of machines: what it composes, what it refuses, and that what it starts is held to it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest
from accelerate.commands.launch import launch_command_parser
from tests.faults import recipe_runs
from tests.forked import ROOT

from recipes_lib.commands import launch as launching
from recipes_lib.commands.launch import Machines, find_first_host, find_machines
from recipes_lib.errors import EXIT_USER, ConfigError
from recipes_lib.training.layouts.launch_environment import expect_launch, read_launch, verify_expected

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


@pytest.fixture
def compose(monkeypatch, capsys):
    """The command for a machine with eight GPUs, as accelerate's own parser reads it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("recipes_lib.hardware.count_accelerators", lambda: 8)

    def compose(*flags, environment=None):
        for name, value in (environment or {}).items():
            monkeypatch.setenv(name, value)
        assert launching.main(["--config", CONFIG, "--dry_run", *flags]) == 0
        command = shlex.split(capsys.readouterr().err.splitlines()[1])
        assert command[:4] == [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
        return launch_command_parser().parse_args(command[4:])

    return compose


def test_one_machine_has_a_process_for_each_gpu(compose):
    args = compose("--learning_rate", "2e-5")
    assert (args.config_file, args.num_processes, args.num_machines) == ("accelerate_configs/ddp.yaml", 8, 1)
    assert args.training_script == "recipes/sft.py"
    assert compose("--hardware", "cpu_ddp").num_processes == 2, "as the file says"
    assert args.training_script_args == ["--config", CONFIG, "--learning_rate", "2e-5"]


def test_slurm_needs_no_flag_more(compose):
    args = compose("--hardware", "fsdp2", environment=STEP)
    assert (args.num_processes, args.num_machines, args.machine_rank) == (32, 4, 2)
    assert (args.main_process_ip, args.main_process_port) == ("gpu-017", 24567)


@pytest.mark.parametrize(
    ("environment", "machines"),
    [
        ({"PATH": "/bin"}, Machines()),
        (STEP, Machines(4, 2, "gpu-017", 24567, "SLURM, 4 nodes")),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}, Machines(source="SLURM, one node")),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "head", "PET_MASTER_PORT": "1234"},
            Machines(2, 1, "head", 1234, "torchrun's variables (PET_...)"),
        ),
    ],
)
def test_the_environment_says_which_machine_this_is_and_where_the_first_one_is(environment, machines):
    assert find_machines(environment) == machines


def test_a_batch_script_on_several_nodes_would_start_one_of_them():
    script = {name: value for name, value in STEP.items() if "STEP" not in name}
    with pytest.raises(ConfigError, match=r"job has 4 nodes[\s\S]*srun --ntasks-per-node=1"):
        find_machines(script)


@pytest.mark.parametrize("tasks", ["8(x4)", "2", "1(x3),8"])
def test_several_tasks_on_a_node_would_start_as_many_launchers(tasks):
    with pytest.raises(ConfigError, match="tasks on a node"):
        find_machines(STEP | {"SLURM_STEP_TASKS_PER_NODE": tasks})


@pytest.mark.parametrize("name", ["PET_NNODES", "PET_NODE_RANK", "PET_MASTER_PORT", "MASTER_PORT"])
@pytest.mark.parametrize("text", ["1:4", "", "two"])
def test_a_variable_that_is_no_number_is_named(name, text):
    with pytest.raises(ConfigError, match=f"{name}: '{text}' is not a whole number"):
        find_machines({"PET_NNODES": "2", name: text})
    with pytest.raises(ConfigError, match=f"SLURM_NODEID: '{text}' is not a whole number"):
        find_machines(STEP | {"SLURM_NODEID": text})


def test_a_started_process_starts_no_others():
    with pytest.raises(ConfigError, match="process 5 of an existing launch"):
        find_machines({"LOCAL_RANK": "1", "RANK": "5"} | STEP)


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
def test_the_first_host_of_a_list(nodes, first):
    assert find_first_host(nodes) == first


def test_flags_win(compose):
    args = compose("--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "head", "--num_processes", "4")
    assert (args.num_processes, args.num_machines, args.machine_rank) == (4, 2, 1)
    assert (args.main_process_ip, args.main_process_port) == ("head", 29500)


@pytest.mark.parametrize(("num", "name"), [(0, "cpu"), (1, "single_gpu"), (2, "ddp")])
def test_the_machine_decides_where_nobody_else_does(num, name, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("recipes_lib.hardware.count_accelerators", lambda: num)
    assert launching.choose_for_this_machine() == name
    assert launching.choose_for_this_machine(2) == ("ddp" if num else "cpu_ddp")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--hardware", "fsdp3"], r"no launch file accelerate_configs/fsdp3\.yaml\n    write one of cpu, "),
        (["--hardware", "fsdp2"], "this machine has none"),
        (["--num_machines", "2"], "without --machine_rank and --main_process_ip"),
        (
            ["--num_machines", "2", "--machine_rank", "2", "--main_process_ip", "a"],
            "--machine_rank: is 2, with",
        ),
        (
            ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "a", "--hardware", "single_gpu"],
            "each of 2 machines would train a separate model",
        ),
        (
            ["--num_machines", "3", "--machine_rank", "1", "--main_process_ip", "a"],
            "2 processes cannot be divided equally among 3 machines",
        ),
        (["--learning_rat", "1"], "learning_rate"),
        (["--hardware", "fsdp2", "--num_processes", "8", "--optim", "adafactor"], "sharded"),
        ([*PIPELINE, "--pipeline_stages", "3"], "do not divide the number of processes"),
        ([*PIPELINE, "--pipeline_stages", "4", "--pipeline_schedule", "1f2b"], "no schedule '1f2b'"),
        ([*PIPELINE, "--pipeline_stages", "4", "--gradient_accumulation_steps", "2"], "too few micro-batches to fill"),
        ([*PIPELINE, "--pipeline_stages", "-1"], "'-1' is not a whole number from 1 on"),
    ],
)
def test_what_cannot_be_is_told_before_a_process_starts(flags, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("recipes_lib.hardware.count_accelerators", lambda: 0)
    with pytest.raises(ConfigError, match=words):
        launching.main(["--config", CONFIG, "--dry_run", *flags])


def test_the_processes_are_held_to_what_was_asked_for(monkeypatch):
    monkeypatch.setenv("RECIPES_LAUNCHED", "")
    expect_launch(2, "FSDP")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="expected 2 processes with FSDP; this process is one of 2 with no sharding"):
        verify_expected(read_launch())
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    verify_expected(read_launch())
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="one of 1 with FSDP"):
        verify_expected(read_launch())


def test_memory_of_the_gpu_and_what_a_timeout_writes_down_are_set_unless_the_user_did(monkeypatch):
    names = ("RECIPES_LAUNCHED", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "mine")
    expect_launch(2, "FSDP")
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    expect_launch(2, "FSDP")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("by", ["flags", "variables"])
def test_the_processes_are_told_of_a_pipeline(by, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for name in ("RECIPES_LAUNCHED", "PIPELINE_STAGES", "PIPELINE_SCHEDULE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("os.execv", lambda *_: (_ for _ in ()).throw(InterruptedError))
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


@pytest.mark.multiprocess
@pytest.mark.parametrize("is_refused", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["refused", "trains"])
def test_what_it_starts_is_the_recipe_and_its_exit_code_that_of_the_recipe(tmp_path, is_refused):
    recipe_runs.write_inputs(tmp_path)
    keys = recipe_runs.make_keys(tmp_path, "sft", output_dir=tmp_path / "out", max_steps=1, num_sample_prompts=0)
    flags = [f"--{name}={value}" for name, value in keys.items() if name != "num_sample_prompts"]
    (tmp_path / "sft.yaml").write_text("num_sample_prompts: 0\n")
    flags += ["--config", str(tmp_path / "sft.yaml")]
    if is_refused:
        # A run of another configuration in the same output directory, which only the recipe itself can find out.
        (tmp_path / "out").mkdir()
        record = {"status": "done", "config": {"weight_decay": 0.3}}
        (tmp_path / "out" / "run.json").write_text(json.dumps(record))
    start = "from recipes_lib.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", start, "launch", *flags, "--hardware", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == (EXIT_USER if is_refused else 0), done.stderr[-3000:]
    assert ("choose another output_dir" in done.stderr) == is_refused
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists() == (not is_refused)
