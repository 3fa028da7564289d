"""``recipes plan`` of fine-tuning: a process holds what closed forms say, by layout; a step is what it counts."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from recipes_lib.cli import main
from recipes_lib.commands import plan_tuning
from recipes_lib.commands.plan_tuning import count_kept, count_memory, count_step
from recipes_lib.config.loader import load_config
from recipes_lib.planning.compute import compute_flops_per_token

KEYS: dict[str, Any] = {
    "dataset_name": "owner/rows",
    "output_dir": "out",
    "max_length": 64,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "activation_checkpointing": True,
}


@pytest.fixture
def write(tiny_model_dir: Path, tmp_path: Path):
    """Write a recipe of a stage with changes, and return its path."""

    def write(stage: str, **changes: Any) -> Path:
        path = tmp_path / f"{stage}.yaml"
        keys = KEYS | {"model_name_or_path": str(tiny_model_dir)} | changes
        path.write_text(yaml.safe_dump({key: value for key, value in keys.items() if value is not None}))
        return path

    return write


@pytest.fixture
def count(write, tiny_model_dir: Path):
    """The terms of a process, by name."""

    def count(stage: str, num_processes: int = 1, *, is_sharded: bool = False, **changes: Any) -> dict[str, int]:
        config = load_config(stage, ["--config", str(write(stage, **changes))])
        model_config = AutoConfig.from_pretrained(tiny_model_dir)
        return dict(
            count_memory(config, model_config, num_processes, count_kept(config, model_config), is_sharded=is_sharded)
        )

    return count


@pytest.fixture(scope="module")
def num_parameters(tiny_model_dir: Path) -> int:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir).num_parameters()


@pytest.mark.parametrize(("optim", "state_bytes"), [("adamw_torch_fused", 8), ("sgd", 0)])
def test_full_training_holds_weights_gradients_and_states(count, num_parameters, optim, state_bytes) -> None:
    terms = count("sft", optim=optim)
    assert terms["trained weights"] == terms["gradients"] == 4 * num_parameters
    assert terms.get("optimizer states", 0) == state_bytes * num_parameters
    assert terms["16-bit copies of the weights in a pass"] == 2 * num_parameters
    assert "frozen weights" not in terms


@pytest.mark.parametrize(("optim", "state_bytes"), [("adamw_torch_fused", 4), ("adamw_8bit", 2.3)])
def test_states_have_the_type_of_the_weights_but_where_an_optimizer_has_its_own(
    count, num_parameters, optim, state_bytes
) -> None:
    terms = count("sft", optim=optim, dtype="bfloat16")
    assert terms["trained weights"] == 2 * num_parameters
    assert terms["optimizer states"] == pytest.approx(state_bytes * num_parameters, abs=1)


def test_processes_that_share_hold_their_share_and_those_that_do_not_sum_gradients(count, num_parameters) -> None:
    copied, shared = count("sft", 4), count("sft", 4, is_sharded=True)
    assert copied["buckets in which gradients are summed"] == copied["gradients"] == 4 * num_parameters
    for name in ("trained weights", "gradients", "optimizer states"):
        assert shared[name] == copied[name] // 4
    # Two layers are the whole of this model, with the ends.
    assert shared["gathered: two layers and the two ends"] == 2 * num_parameters
    assert shared["activations of a micro-batch"] == copied["activations of a micro-batch"]
    assert "16-bit copies of the weights in a pass" not in shared


def test_an_adapter_leaves_its_trunk_frozen(count, num_parameters) -> None:
    terms = count("lora", lora_r=4, dtype="bfloat16")
    # With what rotates positions.
    assert terms["frozen weights"] == pytest.approx(2 * num_parameters, rel=1e-3)
    # Rank 4 on seven linear layers of two decoder layers: in and out features of each.
    features = 4 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    assert terms["trained weights"] == 4 * features
    assert terms["optimizer states"] == 8 * features


def test_a_trunk_in_few_bits_takes_as_many(count, tiny_model_dir) -> None:
    whole, quarter = (count("lora", lora_r=4, dtype="bfloat16", load_in_4bit=bits) for bits in (False, True))
    linear = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    saved = whole["frozen weights"] - quarter["frozen weights"]
    assert saved == pytest.approx(2 * linear - (0.5 + (1 + 4 / 256) / 64) * linear, rel=1e-3)


def test_who_is_read_beside_the_student_counts(count, tiny_model_dir, num_parameters) -> None:
    assert count("distill", teacher_model_name_or_path=str(tiny_model_dir))["teacher"] == pytest.approx(
        4 * num_parameters, rel=1e-3
    )
    assert count("dpo", precompute_ref_log_probs=False)["reference"] == pytest.approx(4 * num_parameters, rel=1e-3)
    assert "reference" not in count("dpo")


def test_what_a_long_model_keeps_follows_from_two_short_ones(write, tiny_model_dir) -> None:
    for stage, checkpointed in (("sft", True), ("lora", True), ("sft", False)):
        config = load_config(stage, ["--config", str(write(stage, activation_checkpointing=checkpointed))])
        model_config = AutoConfig.from_pretrained(tiny_model_dir, num_hidden_layers=5)
        assert count_kept(config, model_config) == plan_tuning._count_kept(config, model_config)


def test_a_pair_is_two_rows(count) -> None:
    one, two = (count("dpo", per_device_train_batch_size=rows)["activations of a micro-batch"] for rows in (1, 2))
    as_rows = count("sft", per_device_train_batch_size=2)["activations of a micro-batch"]
    assert one == as_rows
    assert two == pytest.approx(2 * one, rel=0.01)


def test_a_step_counts_its_rows_and_the_passes_that_it_needs(write, tiny_model_dir) -> None:
    model_config = AutoConfig.from_pretrained(tiny_model_dir)
    flops = compute_flops_per_token(model_config, 64)
    whole = flops.body + flops.head

    def step(stage: str, **changes: Any):
        return count_step(load_config(stage, ["--config", str(write(stage, **changes))]), model_config, 4)

    assert dataclasses.astuple(step("sft")) == (24, 64, pytest.approx(whole * 24 * 64))
    frozen = compute_flops_per_token(model_config, 64, is_frozen=True)
    assert step("lora").num_flops == pytest.approx((frozen.body + frozen.head) * 24 * 64)
    assert dataclasses.astuple(step("dpo")) == (48, 64, pytest.approx(whole * 48 * 64))
    assert step("dpo", precompute_ref_log_probs=False).num_flops == pytest.approx(whole * 48 * 64 * 4 / 3)
    assert step("reward").num_flops == pytest.approx(flops.body * 48 * 64)
    taught = step("distill", teacher_model_name_or_path=str(tiny_model_dir))
    assert taught.num_flops == pytest.approx(whole * 24 * 64 * 4 / 3)


def test_the_command_tells_time_layouts_and_verdict(write, capsys) -> None:
    path = str(write("sft", max_steps=1000))
    assert main(["plan", "--config", path, "--num_processes", "4", "--gpu", "H100", "--mfu", "0.5"]) == 0
    told = capsys.readouterr().out
    assert "a step: 24 rows of 64 tokens, 1,536 in all" in told
    assert re.search(r"4 GPUs x 9\.89e\+14 FLOP/s x 0\.5 MFU", told)
    assert "hours for 1,000 steps" in told
    assert "cost" not in told
    assert "accelerate_configs/ddp.yaml: a copy" in told
    assert "accelerate_configs/fsdp2.yaml: shared by 4" in told
    for part in told.split("accelerate_configs/")[1:]:
        terms = [float(size) for size in re.findall(r"([\d.]+) GB  ", part)]
        assert float(re.search(r"([\d.]+) GB with all", part)[1]) == pytest.approx(sum(terms), abs=0.1)
        assert "fits H100" in part


def test_a_price_makes_a_cost_of_the_time(write, capsys) -> None:
    path = str(write("sft", device_hour_price=2))
    assert main(["plan", "--config", path, "--num_processes", "4", "--gpu", "H100"]) == 0
    told = capsys.readouterr().out
    cost = float(re.search(r"cost: ([\d.]+) for 1,000,000,000 tokens of rows, at 2 for a device hour", told)[1])
    seconds, tokens = float(re.search(r"operations: ([\d.e+]+) a step", told)[1]) / (9.89e14 * 0.4), 24 * 64
    assert cost == pytest.approx(seconds / 3600 * 2 / tokens * 1e9, abs=0.01)


@pytest.mark.parametrize(
    ("stage", "flags", "changes", "words"),
    [
        ("sft", ["--num_processes", "0"], {}, "write 1 or more"),
        ("sft", ["--mfu", "2"], {}, "0.4 is usual"),
        ("sft", ["--gpu", "Abacus"], {}, "'Abacus' in bfloat16 is not known"),
        ("sft", ["--num_gpus", "8"], {}, "write --num_processes"),
        ("sft", ["--num_gpus=8"], {}, "write --num_processes"),
        ("sft", [], {"max_length": None}, "write `max_length: ...`"),
        ("grpo", [], {"reward_funcs": ["a.b:c"], "max_length": 64, "activation_checkpointing": None}, "plan one of"),
    ],
)
def test_what_makes_no_sense_is_refused(write, capsys, stage, flags, changes, words) -> None:
    assert main(["plan", "--config", str(write(stage, **changes)), *flags]) == 2
    assert words in capsys.readouterr().err


def test_nothing_of_it_takes_memory(write, tiny_model_dir) -> None:
    config = load_config("sft", ["--config", str(write("sft"))])
    large = AutoConfig.from_pretrained(tiny_model_dir, hidden_size=65536, intermediate_size=262144, head_dim=16384)
    terms = count_memory(config, large, 1, count_kept(config, large), is_sharded=False)
    assert terms["trained weights"] > 2e11
    assert torch.get_default_device().type == "cpu"
