"""Launch state from environment variables, and launches that accelerate silently changes."""

import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate import PartialState
from tests.forked import ROOT

from recipes_lib.errors import ConfigError
from recipes_lib.training.layouts.launch_environment import (
    Launch,
    Layout,
    configure_vllm,
    disable_accelerate_parallelism,
    expect_launch,
    name_pipeline,
    plan_launch,
    read_launch,
    verify_accelerator,
    verify_engine,
    verify_launch,
    verify_rendezvous,
)


def launch(world_size=1, engine=""):
    return Launch(rank=0, local_rank=0, world_size=world_size, engine=engine)


def test_launch_without_variables_is_one_process(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    assert read_launch() == launch()
    assert read_launch().is_main


def test_launch_is_read_from_variables(monkeypatch):
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "ACCELERATE_USE_FSDP": "true"}.items():
        monkeypatch.setenv(name, value)
    assert read_launch() == Launch(rank=5, local_rank=1, world_size=8, engine="FSDP")
    assert not read_launch().is_main


def test_ranks_of_pipeline_stages():
    """Six processes in three stages: adjacent ranks have the same stage and different rows."""
    layout = Layout(pipeline_stages=3)
    every = [Launch(rank=rank, local_rank=rank, world_size=6, engine="", layout=layout) for rank in range(6)]
    assert [one.part.stage for one in every] == [0, 0, 1, 1, 2, 2]
    assert {one.data_size for one in every} == {2}
    assert [one.data_rank for one in every] == [0, 1, 0, 1, 0, 1]
    assert launch(world_size=6).part is None
    assert launch(world_size=6).data_size == 6


@pytest.mark.parametrize(("schedule", "num_chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_pipeline_is_read_from_variables(schedule, num_chunks):
    variables = {"WORLD_SIZE": "4", "RANK": "3", **name_pipeline(2, schedule)}
    part = read_launch(variables).part
    assert (part.stage, part.num_stages, part.num_chunks) == (1, 2, num_chunks)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PIPELINE_STAGES": "two"}, "PIPELINE_STAGES: 'two' is not a whole number from 1 on"),
        ({"PIPELINE_STAGES": "0"}, "PIPELINE_STAGES: '0' is not a whole number from 1 on"),
        ({"PIPELINE_SCHEDULE": "x"}, "write 1f1b or gpipe or inter"),
        ({"PARALLELISM_CONFIG_CP_SIZE": "-4"}, "CP_SIZE: '-4' is not a whole number from 1 on"),
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "three"}, "ZERO_STAGE: 'three' is not a whole number from 0 on"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "nan"}, "CLIPPING: 'nan' is not a number from 0 on"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "inf"}, "CLIPPING: 'inf' is not a number from 0 on"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "none"}, "CLIPPING: 'none' is not a number from 0 on"),
        ({"ACCELERATE_MIXED_PRECISION": "int8"}, "mixed_precision: there is no precision 'int8'"),
    ],
)
def test_invalid_variable_is_refused(variables, words):
    with pytest.raises(ConfigError, match=words):
        read_launch(variables)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE: is 2, and RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT: 'x' is not a port"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT: '65536' is not a port"),
        ({"RANK": "2"}, "RANK: is 2, and the ranks of 2 processes end at 1"),
        ({"OMP_NUM_THREADS": "abc"}, "OMP_NUM_THREADS: 'abc' is not a whole number from 0 on"),
        ({"OMP_NUM_THREADS": ""}, "OMP_NUM_THREADS: '' is not a whole number from 0 on"),
        ({"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE: 'two' is not a whole number from 0 on"),
    ],
)
def test_incomplete_rendezvous_is_refused(variables, words, monkeypatch):
    complete = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in complete.items():
        monkeypatch.setenv(name, value)
    verify_rendezvous(read_launch())
    for name in complete if variables == {"WORLD_SIZE": "2"} else ():
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        verify_rendezvous(read_launch())
    # A single process needs no rendezvous.
    verify_rendezvous(launch())


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "1"}, "RANK: is 1, and WORLD_SIZE is 1 or not set"),
        ({"RANK": "3", "WORLD_SIZE": "1"}, "RANK: is 3, and WORLD_SIZE is 1 or not set"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK: is 1, and WORLD_SIZE is 1 or not set"),
        ({"LOCAL_RANK": "0", "RANK": "0"}, "LOCAL_RANK: is set, and WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not"),
    ],
)
def test_rank_of_single_process_is_refused(variables, words, monkeypatch):
    """The process would take itself for one of several and write nothing, or accelerate would fail to join others."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        verify_rendezvous(read_launch())
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    verify_rendezvous(read_launch())


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("text", ["-1", "", "one"])
def test_rank_that_is_no_number_is_refused(name, text):
    with pytest.raises(ConfigError, match=f"{name}: '{text}' is not a whole number from"):
        read_launch({name: text})


def test_invalid_number_of_threads_is_refused_before_processes_start(monkeypatch):
    """accelerate's launcher reads the variable too, and fails with a traceback."""
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS: '4,2' is not a whole number"):
        expect_launch(launch(2))


def test_launch_file_for_cpus_reaches_several_processes():
    """accelerate passes ``use_cpu`` on to a single process only: several would train on the GPUs of a machine."""
    with mock.patch.dict(os.environ):
        expect_launch(plan_launch(ROOT / "accelerate_configs" / "cpu_ddp.yaml"))
        assert read_launch().layout.uses_cpu


def test_unconnected_processes_are_refused():
    with pytest.raises(ConfigError, match="each would train its own model"):
        verify_launch(launch(world_size=2), num_processes=1, distributed_type="NO")


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED"])
def test_missing_sharding_engine_is_refused(engine):
    with pytest.raises(ConfigError, match=engine):
        verify_launch(launch(world_size=2, engine=engine), num_processes=2, distributed_type="MULTI_CPU")
    verify_launch(launch(world_size=2, engine=engine), num_processes=2, distributed_type=engine)


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED"])
def test_sharded_launch_without_gpu_names_cpu_launch_file(engine, monkeypatch):
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    with pytest.raises(ConfigError, match=r"finds no GPU(?s:.*)accelerate_configs/cpu_ddp.yaml"):
        verify_accelerator(launch(world_size=8, engine=engine), is_available=False)
    verify_accelerator(launch(world_size=8, engine=engine), is_available=True)
    verify_accelerator(launch(world_size=8), is_available=False)
    # An explicit device is not checked.
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    verify_accelerator(launch(world_size=8, engine=engine), is_available=False)


def test_local_rank_beyond_visible_gpus_is_refused(monkeypatch):
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    last = Launch(rank=5, local_rank=1, world_size=8, engine="")
    with pytest.raises(ConfigError, match=r"LOCAL_RANK: is 1, and this process sees 1 GPU\n.*CUDA_VISIBLE_DEVICES"):
        verify_accelerator(last, is_available=True, num_gpus=1)
    verify_accelerator(last, is_available=True, num_gpus=2)
    verify_accelerator(last, is_available=True)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_srun_or_mpirun_without_world_size_is_refused(name, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(name, "1")
    verify_rendezvous(read_launch())
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match=f"{name}: 2 processes were started without WORLD_SIZE"):
        verify_rendezvous(read_launch())
    monkeypatch.setenv("WORLD_SIZE", "1")
    verify_rendezvous(read_launch())


def test_fsdp_is_multi_gpu_before_accelerate_shards(monkeypatch):
    """Under an FSDP launch file, the state of ``TrainingArguments`` is still ``MULTI_GPU``."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _, distributed_type = PartialState._prepare_backend(SimpleNamespace(), cpu=False)
    assert distributed_type == "MULTI_GPU"
    verify_launch(launch(world_size=2, engine="FSDP"), num_processes=2, distributed_type=distributed_type)
    with pytest.raises(ConfigError, match="DEEPSPEED"):
        verify_launch(launch(world_size=2, engine="DEEPSPEED"), num_processes=2, distributed_type=distributed_type)


@pytest.mark.parametrize(
    ("engine", "distributed_type"), [("FSDP", "MULTI_GPU"), ("", "FSDP"), ("DEEPSPEED", "FSDP"), ("FSDP", "NO")]
)
def test_engine_of_accelerate_must_equal_launch(engine, distributed_type):
    with pytest.raises(ConfigError, match=f"was launched and accelerate is running {distributed_type}"):
        verify_engine(launch(world_size=2, engine=engine), distributed_type)
    verify_engine(launch(world_size=2, engine=engine), engine or "MULTI_CPU")


def test_data_ranks_under_tensor_and_context_parallelism():
    cut = Launch(rank=0, local_rank=0, world_size=8, engine="FSDP", layout=Layout(sizes={"tp": 4, "dp_shard": 2}))
    assert (cut.tensor_size, cut.data_size) == (4, 2)
    assert (launch(world_size=8).tensor_size, launch(world_size=8).data_size) == (1, 8)
    for kind in ("cp", "sp"):
        layout = Layout(sizes={kind: 4, "dp_shard": 2})
        shared = [Launch(rank=rank, local_rank=0, world_size=8, engine="", layout=layout) for rank in range(8)]
        assert {(each.context_size, each.data_size, each.shares_by_heads) for each in shared} == {(4, 2, kind == "sp")}
        assert [each.data_rank for each in shared] == [0] * 4 + [1] * 4
        assert [each.context_rank for each in shared] == [*range(4), *range(4)]


def test_missing_tensor_parallelism_is_refused():
    """accelerate would silently train a whole model on every rank."""
    cut = Launch(rank=0, local_rank=0, world_size=2, engine="FSDP", layout=Layout(sizes={"tp": 2}))
    verify_engine(cut, "MULTI_GPU", tensor_size=2, is_in_shards=True)
    with pytest.raises(ConfigError, match="expected 2 tensor-parallel ranks, and the model has 1"):
        verify_engine(cut, "MULTI_GPU", tensor_size=1)
    with pytest.raises(ConfigError, match="expected 1 tensor-parallel ranks, and the model has 2"):
        verify_engine(launch(world_size=2, engine="FSDP"), "FSDP", tensor_size=2)


def test_unsharded_pipeline_stage_is_refused():
    shared = Launch(rank=0, local_rank=0, world_size=4, engine="FSDP", layout=Layout(pipeline_stages=2))
    verify_engine(shared, "MULTI_GPU", is_in_shards=True)
    with pytest.raises(ConfigError, match="FSDP was launched and accelerate is running MULTI_GPU"):
        verify_engine(shared, "MULTI_GPU", is_in_shards=False)


@pytest.mark.parametrize(
    ("engine", "variable", "shards"),
    [
        ("FSDP", "PARALLELISM_CONFIG_TP_SIZE", "false"),
        ("FSDP", "PIPELINE_STAGES", "false"),
        ("FSDP", "PARALLELISM_CONFIG_CP_SIZE", "true"),
        ("DEEPSPEED", "PARALLELISM_CONFIG_SP_SIZE", "true"),
    ],
)
def test_accelerate_parallelism_is_disabled_for_own_layouts(engine, variable, shards, monkeypatch):
    is_used, is_meshed = f"ACCELERATE_USE_{engine}", "ACCELERATE_USE_PARALLELISM_CONFIG"
    for name, value in {"WORLD_SIZE": "2", is_used: "true", is_meshed: "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RECIPES_SHARDED_WHEN_LOADED", "false")
    disable_accelerate_parallelism(read_launch())
    assert os.environ[is_used] == os.environ[is_meshed] == "true"
    monkeypatch.setenv(variable, "2")
    before = read_launch()
    disable_accelerate_parallelism(before)
    assert (os.environ[is_used], os.environ[is_meshed]) == (shards, "false")
    assert read_launch() == before


@pytest.mark.parametrize(
    ("allocator", "of_user", "expected"),
    [
        ("expandable_segments:True", None, "expandable_segments:True"),
        ("expandable_segments:True", "max_split_size_mb:64", "max_split_size_mb:64"),
        (None, None, None),
    ],
)
def test_vllm_finds_allocator_settings_under_former_name(allocator, of_user, expected, monkeypatch):
    variables = {"PYTORCH_ALLOC_CONF": allocator, "PYTORCH_CUDA_ALLOC_CONF": of_user}
    for name in (*variables, "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, variables.get(name) or "")
        if variables.get(name) is None:
            monkeypatch.delenv(name)
    configure_vllm(tf32=False)
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == expected


@pytest.mark.parametrize(
    ("tf32", "of_user", "expected"), [(True, None, "high"), (True, "highest", "highest"), (False, None, None)]
)
def test_vllm_keeps_tf32_of_training(tf32, of_user, expected, monkeypatch):
    variable = "VLLM_FLOAT32_MATMUL_PRECISION"
    for name in (variable, "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, of_user or "")
    if of_user is None:
        monkeypatch.delenv(variable)
    configure_vllm(tf32=tf32)
    assert os.environ.get(variable) == expected
