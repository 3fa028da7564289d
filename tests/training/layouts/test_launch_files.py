"""Launch files, compared with the environment that accelerate gives to its processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.test_accelerate_configs import FILES, read_environment

from recipes_lib.errors import ConfigError, UserError
from recipes_lib.training.layouts.launch_environment import (
    Launch,
    name_variables,
    plan_launch,
    read_launch,
    read_launch_file,
)

MULTI_GPU = {
    "distributed_type": "FSDP",
    "num_machines": 1,
    "num_processes": 4,
    "mixed_precision": "bf16",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_activation_checkpointing": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    },
    "parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 2},
}
DEEPSPEED = {
    "distributed_type": "DEEPSPEED",
    "num_machines": 1,
    "num_processes": 2,
    "deepspeed_config": {
        "zero_stage": 3,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "offload_optimizer_device": "cpu",
        "zero3_save_16bit_model": True,
    },
}


def compare(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    theirs = read_environment(file, "--machine_rank", "0", "--main_process_ip", "127.0.0.1")
    ours = name_variables(read_launch_file(file))
    # torch's launcher sets WORLD_SIZE in each process; ``use_cpu`` is in no variable of accelerate.
    theirs |= {"WORLD_SIZE": ours["WORLD_SIZE"], "ACCELERATE_USE_CPU": ours["ACCELERATE_USE_CPU"]}
    assert read_launch(ours) == read_launch(theirs)


@pytest.mark.parametrize("file", [file for file in FILES if file.stem != "fp8"], ids=lambda file: file.stem)
def test_shipped_launch_file_is_read_as_by_accelerate(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(file, monkeypatch)


@pytest.mark.parametrize("document", [MULTI_GPU, DEEPSPEED], ids=["FSDP", "DEEPSPEED"])
def test_complete_launch_file_is_read_as_by_accelerate(document, tmp_path, monkeypatch) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(document))
    compare(file, monkeypatch)
    launch = read_launch(name_variables(document))
    assert launch.engine == document["distributed_type"]
    if launch.engine == "FSDP":
        assert launch.layout.fsdp_version == 2
        assert (launch.layout.recomputes, launch.layout.sizes) == (True, {"dp_shard": 2, "tp": 2})
    else:
        assert (launch.layout.zero_stage, launch.layout.gathers_on_save) == (3, True)
        assert (launch.layout.accumulation, launch.layout.clipping) == (4, 0.5)
        assert launch.layout.offloads_optimizer


def test_fsdp_keys_without_prefix_are_read_as_by_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {**MULTI_GPU, "fsdp_config": {"version": 2, "offload_params": True}}
    file = tmp_path / "old.yaml"
    file.write_text(yaml.safe_dump(document))
    compare(file, monkeypatch)
    layout = read_launch(name_variables(document)).layout
    assert (layout.fsdp_version, layout.offloads_weights) == (2, True)


@pytest.mark.parametrize(
    ("keys", "is_fsdp1"),
    [
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, True),
        ({"fsdp_sharding_strategy": 2}, True),
        ({"fsdp_reshard_after_forward": "FULL_SHARD"}, True),
        ({"fsdp_sharding_strategy": "full_shard", "fsdp_reshard_after_forward": False}, False),
        ({"fsdp_sharding_strategy": 1, "fsdp_reshard_after_forward": "True"}, False),
        ({"fsdp_sharding_strategy": None}, False),
    ],
)
def test_sharding_strategy_of_fsdp1_is_recognised(keys: dict[str, Any], is_fsdp1: bool) -> None:
    """FSDP2 shards as with ``FULL_SHARD``, the default in accelerate's variables, whatever the strategy."""
    document = {**MULTI_GPU, "fsdp_config": {"fsdp_version": 2, **keys}}
    assert read_launch(name_variables(document)).layout.has_strategy is is_fsdp1


@pytest.mark.parametrize("backend", ["NO", False, None, "INDUCTOR"])
def test_dynamo_backend_of_launch_file_is_refused(backend: str | bool | None) -> None:
    variables = name_variables({**MULTI_GPU, "dynamo_config": {"dynamo_backend": backend}})
    if backend != "INDUCTOR":
        assert read_launch(variables) == read_launch(name_variables(MULTI_GPU))
        return
    with pytest.raises(ConfigError, match="torch_compile: true"):
        read_launch(variables)


STAGE_3: dict[str, Any] = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "overlap_comm": True,
    "reduce_bucket_size": "auto",
    "stage3_gather_16bit_weights_on_model_save": True,
}


def read_deepspeed(content: Any, folder: Path) -> Launch:
    file = folder / "ds config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    document = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(file)}}
    return read_launch(name_variables(document))


def test_deepspeed_file_is_read_as_by_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of transformers' documentation without its optimizer, compared with accelerate's plugin."""
    plugins = pytest.importorskip("accelerate.utils")
    content = {
        "zero_optimization": STAGE_3,
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.5,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    launch = read_deepspeed(content, tmp_path)
    plugin = plugins.DeepSpeedPlugin(hf_ds_config=str(tmp_path / "ds config.json"))
    assert (launch.engine, launch.precision, launch.layout.accumulation) == ("DEEPSPEED", "no", None)
    assert launch.layout.zero_stage == plugin.zero_stage == 3
    assert launch.layout.clipping == plugin.deepspeed_config["gradient_clipping"] == 0.5
    assert launch.layout.gathers_on_save is plugin.zero3_save_16bit_model is True
    assert launch.layout.offloads_optimizer is (plugin.offload_optimizer_device == "cpu") is True
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds config.json"))
    assert read_launch().layout == launch.layout


def test_deepspeed_file_defaults(tmp_path: Path) -> None:
    launch = read_deepspeed({"zero_optimization": {}, "fp16": {"enabled": True}}, tmp_path)
    layout = launch.layout
    assert (launch.precision, layout.zero_stage, layout.accumulation, layout.clipping) == ("fp16", 0, 1, 0.0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "`deepspeed_config_file` of the launch file"),
        ("[]", "is a list instead of an object"),
        ({"fp16": {"enabled": True}}, "`zero_optimization` is"),
        ({"zero_optimization": 3}, "`zero_optimization` is"),
        ({"zero_optimization": STAGE_3, "fp16": True}, "`fp16` is"),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, "`offload_optimizer` is"),
        ({"zero_optimization": STAGE_3, "optimizer": {"type": "AdamW"}}, "delete `optimizer` from the file"),
        ({"zero_optimization": STAGE_3, "scheduler": {"type": "WarmupLR"}}, "delete `scheduler` from the file"),
        ({"zero_optimization": STAGE_3, "train_batch_size": 32}, "delete `train_batch_size` from the file"),
        ({"zero_optimization": STAGE_3, "tensor_parallel": {"autotp_size": 2}}, "delete `tensor_parallel`"),
    ],
)
def test_unsupported_deepspeed_file_is_refused(content: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ds config\.json") as caught:
        read_deepspeed(content, tmp_path)
    assert words in str(caught.value)


def test_num_processes_overrides_launch_file() -> None:
    assert read_launch(name_variables(MULTI_GPU, 16)).world_size == 16
    assert read_launch(name_variables(MULTI_GPU)).world_size == 4


@pytest.mark.parametrize("text", ["learning_rate: 1.0e-5\n", json.dumps({"zero_optimization": STAGE_3})])
def test_recipe_or_deepspeed_file_as_launch_file_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"no `distributed_type`.*`deepspeed_config_file`\n.*accelerate_configs/"):
        read_launch_file(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("  : [", "mine.yaml:2"),
        ("num_processes: 1\nnum_processes: 2", "`num_processes` is repeated"),
        ("fp16: " + "[" * 100, "levels deep"),
        ("fp16: 2026-13-45", "is not plain YAML: month must be in 1..12"),
        ("num_processes: many", "num_processes: 'many' is not a number of processes"),
        ("num_processes: 0", "num_processes: 0 is not a number"),
        ("num_processes: true", "num_processes: True is not a number"),
        ("num_machines: '2'", "num_machines: '2' is not a number of machines"),
        ("gpu_ids: 0", "gpu_ids: 0 is not a string"),
        ("fsdp_config: [fsdp_version]", "fsdp_config: it is not a mapping"),
        ("dynamo_config: inductor", "dynamo_config: it is not a mapping"),
        ("num_procesess: 2", "has no such key\n    did you mean `num_processes`?"),
        ("fsdp_config: {fsdp_offload_param: true}", "did you mean `fsdp_offload_params`"),
        ("parallelism_config: {tp_size: 2}", "tp_size: the installed accelerate has no such key"),
    ],
)
def test_malformed_launch_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"distributed_type: FSDP\n{text}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml") as caught:
        read_launch_file(file)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("MULTI_CPU", "take accelerate_configs/cpu_ddp.yaml"),
        ("fsdp", "did you mean FSDP"),
        ("XLA", "write one of NO, MULTI_GPU"),
        ("None", "did you mean NO"),
    ],
)
def test_unsupported_distributed_type_is_refused(kind: str, remedy: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"distributed_type: {kind}\n")
    with pytest.raises(ConfigError, match=f"distributed_type: '{kind}' is not supported\n    {remedy}"):
        read_launch_file(file)


@pytest.mark.parametrize("name", ["distributed_type", "mixed_precision"])
@pytest.mark.parametrize(("value", "is_valid"), [("NO", False), ("no", False), ("'NO'", True)])
def test_unquoted_no_is_refused(name: str, value: str, is_valid: bool, tmp_path: Path) -> None:
    """accelerate ends with a traceback at a precision of false."""
    file = tmp_path / "mine.yaml"
    other = "mixed_precision: bf16" if name == "distributed_type" else "distributed_type: MULTI_GPU"
    file.write_text(f"{name}: {value}\n{other}\n")
    if is_valid:
        assert read_launch(name_variables(read_launch_file(file))).engine == ""
    else:
        with pytest.raises(ConfigError, match=rf"mine\.yaml: {name}: .*\s+quote it: {name}: 'NO'"):
            read_launch_file(file)


@pytest.mark.parametrize("count", [0, -3])
def test_non_positive_num_processes_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"--num_processes: is {count}"):
        plan_launch(None, count)


@pytest.mark.parametrize(("count", "given"), [(2, None), (1, 2)])
def test_several_processes_of_a_file_for_one_are_refused(count: int, given: int | None, tmp_path: Path) -> None:
    """accelerate would start one process, whatever ``num_processes`` says."""
    file = tmp_path / "mine.yaml"
    file.write_text(f"distributed_type: 'NO'\nnum_processes: {count}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml is for one process, not for 2\s+for one, use `--num_proc"):
        plan_launch(file, given)
    assert plan_launch(file, 1).world_size == 1


def test_values_of_none_are_read_as_by_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.yaml"
    keys = dict.fromkeys(("offload_optimizer_device", "gradient_clipping", "gradient_accumulation_steps"))
    file.write_text(yaml.safe_dump(DEEPSPEED | {"mixed_precision": None, "deepspeed_config": keys | {"zero_stage": 3}}))
    compare(file, monkeypatch)
    assert not plan_launch(file).layout.offloads_optimizer


def test_empty_sections_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("distributed_type: FSDP\nfsdp_config:\nparallelism_config:\n")
    assert read_launch(name_variables(read_launch_file(file))).engine == "FSDP"
