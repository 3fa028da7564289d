"""PPO, RLOO and GRPO on two ranks with answers of unequal length, replicated and sharded, compared with one process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed import sharding
from tests.distributed.cells import (
    FULL_PRECISION,
    assert_exported,
    assert_resumed,
    measure_weight_gap,
    read_weights,
    resume,
)
from tests.forked import run_forked
from tests.rl import keys_task
from tests.rl.reward_adapters import write_reward_adapter
from tests.rows import read_events, read_rows
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    MistralConfig,
    MistralForSequenceClassification,
)

SHORT: dict[str, Any] = {
    "max_steps": 12,
    "per_device_eval_batch_size": 3,
    "save_strategy": "steps",
    "save_steps": 4,
    "num_sample_prompts": 3,
    "learning_rate": 3e-4,
}
RUNS: dict[str, dict[str, Any]] = {
    # An adaptive KL coefficient, and a limit of the KL divergence that only some minibatches stay below.
    "models": SHORT
    | {"max_steps": 8, "kl_target_per_sequence": 0.5, "kl_horizon": 100, "target_kl": 1e-4, "num_ppo_epochs": 3},
    "adapters": SHORT
    | {"use_peft": True, "max_steps": 4, "save_steps": 2, "num_ppo_epochs": 1}
    | {"reward_funcs": "[tests.rl.keys_task:score_and_report]"},
    # Groups of three; uninformative groups are sampled again.
    "dynamic": SHORT
    | {"num_generations": 3, "steps_per_generation": 3, "num_iterations": 1, "max_steps": 6, "save_steps": 3}
    | {"reward_funcs": "[tests.rl.test_methods:score_half]", "max_num_gen_batches": 10},
}
CLOCKS = ("time/", "_per_s", "seconds", "memory")


@pytest.mark.multiprocess
def test_two_processes_match_one(tmp_path: Path) -> None:
    policy = keys_task.write_policy(tmp_path / "policy", 0, num_steps=30)
    prompts = keys_task.write_prompts(tmp_path / "prompts.jsonl", 100, seed=5)

    def build(name: str, place: str, batch_size: int) -> tuple[str, list[str]]:
        keys = {**RUNS[name], "per_device_train_batch_size": batch_size}
        recipe, build_flags = (
            ("grpo", keys_task.build_group_flags) if name == "dynamic" else ("ppo", keys_task.build_flags)
        )
        return recipe, build_flags(policy, tmp_path / place / name, prompts, **keys)

    jobs = [*(build(name, "two", 4) for name in RUNS), build("adapters", "stopped", 4)]
    said = run_forked("tests.rl.keys_task", json.dumps(jobs), 1)
    # Sample prompts are divided too: three over two processes, of which the second repeats the last one.
    assert {int(size) for size in re.findall(r"scores (\d+) answers", said)} == {2, 8}
    assert all(f"process {rank} scores 2 answers" in said for rank in range(2))

    for name in RUNS:
        recipe, flags = build(name, "one", 8)
        keys_task.train(flags, recipe)
        one, two = (tmp_path / place / name for place in ("one", "two"))
        for kind in ("train", "eval"):
            for expected, got in zip(read_events(one, kind), read_events(two, kind), strict=True):
                assert expected.keys() == got.keys()
                for figure, value in expected.items():
                    if figure != "kind" and not any(part in figure for part in CLOCKS):
                        assert got[figure] == pytest.approx(value, rel=1e-3, abs=1e-4), f"{name}: {figure}"
        last = max(event["step"] for event in read_events(one))
        for learner in ("policy",) if recipe == "grpo" else ("policy", "critic"):
            weights = [load_file(run / f"checkpoint-{last}" / f"{learner}.safetensors") for run in (one, two)]
            for key, value in weights[0].items():
                torch.testing.assert_close(weights[1][key], value, rtol=1e-3, atol=1e-5)
    # Rank 1 alone was preempted in the second iteration, after the checkpoint of the first; the resume is exact.
    stopped, two = (tmp_path / place / "adapters" for place in ("stopped", "two"))
    assert json.loads((stopped / "run.json").read_text())["resumed_from"] == "checkpoint-2"
    for learner in ("policy", "critic"):
        weights = [load_file(run / "checkpoint-4" / f"{learner}.safetensors") for run in (two, stopped)]
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    batches = [event["rollout/num_gen_batches"] for event in read_events(tmp_path / "one" / "dynamic")]
    assert max(batches) > 1
    updates = [event["policy/num_updates"] for event in read_events(tmp_path / "one" / "models")]
    assert 0 < min(updates) < 6


# Sixteen answers of unequal length per iteration of two steps, in batches of three, to prompts of three to six tokens.
SHARDED: dict[str, Any] = SHORT | {
    "max_steps": 4,
    "save_steps": 2,
    "eval_steps": 2,
    "num_ppo_epochs": 1,
    "logging_steps": 1,
    "kl_target_per_sequence": 0.5,
    "kl_horizon": 100,
    "reward_weights": "[1.0, 0.1]",
    "save_critic": True,
    "save_total_limit": 10,
}


def build_sharded(inputs: Path, num_processes: int, **more: Any) -> sharding.Job:
    """Build a PPO job with the same answers per iteration for any world size."""
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4 // num_processes}
    reward = {"reward_model_name_or_path": inputs / "reward"}
    flags = keys_task.build_flags(
        inputs / "policy", inputs, inputs / "prompts.jsonl", **SHARDED | reward | batch | more
    )
    return sharding.build_job("ppo", flags)


def build_groups(inputs: Path, num_processes: int, **more: Any) -> sharding.Job:
    """Build a job of GRPO with groups of four answers."""
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4 // num_processes}
    own = ("num_ppo_epochs", "kl_target_per_sequence", "kl_horizon", "save_critic", "reward_weights")
    flags = keys_task.build_group_flags(
        inputs / "policy", inputs, inputs / "prompts.jsonl",
        **{name: value for name, value in SHARDED.items() if name not in own} | batch | more,
        steps_per_generation=8 // num_processes,
        num_iterations=1,
    )  # fmt: skip
    return sharding.build_job("grpo", flags)


def write_other_reward_model(policy: Path, folder: Path) -> Path:
    """Write a reward model of another architecture with the tokens of the policy."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MistralConfig(vocab_size=keys_task.VOCABULARY, num_key_value_heads=2, num_labels=1, **sizes)
    config.pad_token_id, config.reward_mean, config.reward_std = keys_task.PAD, 0.1, 0.5
    MistralForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with policy, reward model, reward adapter and prompts."""
    folder = tmp_path_factory.mktemp("sharded")
    policy = keys_task.write_policy(folder / "policy", 0, num_steps=30)
    write_other_reward_model(policy, folder / "reward")
    write_reward_adapter(policy, folder / "reward adapter")
    keys_task.write_prompts(folder / "prompts.jsonl", 100, seed=5)
    return folder


def build_adapter_keys(models: Path) -> dict[str, Any]:
    """The reward model is a third adapter of the trunk. A critic with its large weights would amplify rounding."""
    rates = {"learning_rate": 3e-3, "critic_learning_rate": 3e-3}
    places = {"critic_model_name_or_path": "policy", "reward_model_name_or_path": "reward adapter"}
    return {"use_peft": True, "save_critic": False, **rates, **{key: models / name for key, name in places.items()}}


@pytest.fixture(scope="module")
def sharded(models: Path) -> tuple[Path, dict[str, Any]]:
    """Folder of runs in one and two processes; RLOO and adapters of GRPO are rows of the matrix."""
    adapter_keys = build_adapter_keys(models)
    alone, jobs = (
        {
            "ppo": build_sharded(models, size),
            "grpo": build_groups(models, size),
            "ppo adapters": build_sharded(models, size, **adapter_keys),
        }
        for size in (1, 2)
    )
    jobs["preempted while sampling"] = {**jobs["ppo"], "fault": "preempted while sampling"}
    jobs["ppo adapters killed"] = resume(jobs["ppo adapters"], models / "two" / "ppo adapters", 2)
    two = sharding.run_jobs(jobs, models / "two", "fsdp2", *FULL_PRECISION)
    sharding.run_jobs(alone, models / "one")
    return models, two["codes"]


def assert_same_figures(one: Path, two: Path, *, tolerance: float) -> None:
    for expected, got in zip(*(read_rows(run / "metrics.jsonl") for run in (one, two)), strict=True):
        assert expected.keys() == got.keys()
        for figure, value in expected.items():
            if isinstance(value, int | float) and not any(part in figure for part in CLOCKS):
                assert got[figure] == pytest.approx(value, rel=tolerance, abs=tolerance), figure


@pytest.mark.multiprocess
def test_sharded_models_match_one_process(sharded: tuple[Path, dict[str, Any]]) -> None:
    """Answers, rewards, losses, gradient norms and weights."""
    folder, _ = sharded
    one, two = folder / "one" / "ppo", folder / "two" / "ppo"
    assert_same_figures(one, two, tolerance=1e-5)
    assert (one / "samples.jsonl").read_text() == (two / "samples.jsonl").read_text()
    train = read_events(two)
    assert [event["step"] for event in train] == [2, 4]
    assert all(event["policy/num_updates"] == 2 for event in train)
    for place in (".", "critic"):
        assert measure_weight_gap(one / place, two / place) <= 1e-5
        assert (two / place / "config.json").read_text() == (one / place / "config.json").read_text()


@pytest.mark.multiprocess
@pytest.mark.parametrize("recipe", ["grpo", "ppo adapters"])
def test_sharded_groups_and_adapters_match_one_process(sharded: tuple[Path, dict[str, Any]], recipe: str) -> None:
    folder, _ = sharded
    one, two = folder / "one" / recipe, folder / "two" / recipe
    assert (two / "checkpoint-2" / "policy" / "model_shards").is_dir()
    assert_same_figures(one, two, tolerance=1e-5)
    assert measure_weight_gap(one, two) <= 1e-5


def assert_adapters_resumed(straight: Path, resumed: Path, tolerance: float) -> None:
    """Compare weights and ``value/explained_var``, which shows that the critic was resumed too."""
    assert_resumed(straight, resumed, tolerance, step=2)
    values = [read_events(run)[-1]["value/explained_var"] for run in (straight, resumed)]
    assert values[1] == pytest.approx(values[0], rel=tolerance, abs=tolerance)


@pytest.mark.multiprocess
def test_sharded_adapters_resume_exactly(sharded: tuple[Path, dict[str, Any]]) -> None:
    two = sharded[0] / "two"
    assert sharded[1]["ppo adapters killed"] == 0
    assert_adapters_resumed(two / "ppo adapters", two / "ppo adapters killed", 0.0)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_sharded_adapters_resume_on_one_process(sharded: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    straight = sharded[0] / "two" / "ppo adapters"
    job = build_sharded(sharded[0], 1, **build_adapter_keys(sharded[0]))
    sharding.run_jobs({"killed": resume(job, straight, 2)}, tmp_path)
    assert_adapters_resumed(straight, tmp_path / "killed", 1e-5)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_resumed_sharded_groups_reproduce_weights(sharded: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    straight = sharded[0] / "two" / "grpo"
    job = build_groups(sharded[0], 2)
    sharding.run_jobs({"killed": resume(job, straight, 2)}, tmp_path, "fsdp2", *FULL_PRECISION)
    assert_resumed(straight, tmp_path / "killed", step=2)


@pytest.mark.multiprocess
def test_final_models_are_whole_and_load_in_transformers(sharded: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = sharded
    run = folder / "two" / "ppo"
    for auto, place in ((AutoModelForCausalLM, run), (AutoModelForSequenceClassification, run / "critic")):
        model, report = auto.from_pretrained(place, output_loading_info=True)
        assert not any(report.values())
        assert not type(model).__name__.startswith("FSDP")
        assert AutoTokenizer.from_pretrained(place).pad_token == "<pad>"


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["ppo", "ppo adapters"])
def test_exported_sharded_checkpoint_is_final_policy(sharded, name, tmp_path) -> None:
    assert_exported(sharded[0] / "two" / name, 4, tmp_path / "exported")


@pytest.mark.multiprocess
def test_checkpoint_contains_shards_of_both_learners(sharded: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = sharded
    checkpoint = folder / "two" / "ppo" / "checkpoint-2"
    assert json.loads((checkpoint / "COMPLETE.json").read_text())["engine"] == "FSDP"
    assert not list(checkpoint.glob("*.safetensors"))
    for learner in ("policy", "critic"):
        first, second = sorted((checkpoint / learner / "model_shards").iterdir())
        shards = [load_file(file)["model.layers.0.mlp.up_proj.weight"] for file in (first, second)]
        whole = read_weights(folder / "two" / "ppo" / ("critic" if learner == "critic" else "."))
        rows, columns = whole["model.layers.0.mlp.up_proj.weight"].shape
        assert [shard.shape for shard in shards] == [(rows // 2, columns)] * 2


def assert_resumed_exactly(straight: Path, stopped: Path) -> None:
    assert_resumed(straight, stopped, step=2)
    assert measure_weight_gap(straight / "critic", stopped / "critic") == 0
    states = [json.loads((run / "checkpoint-4" / "ppo_state.json").read_text()) for run in (straight, stopped)]
    assert states[0]["kl_coef"] == states[1]["kl_coef"] != 0.02


@pytest.mark.multiprocess
def test_resumed_sharded_run_reproduces_weights(sharded: tuple[Path, dict[str, Any]]) -> None:
    """Rank 1 alone is preempted, between two tokens."""
    folder, codes = sharded
    assert codes["preempted while sampling"] == [75, 0]
    assert_resumed_exactly(folder / "two" / "ppo", folder / "two" / "preempted while sampling")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_preemption_in_evaluation_bf16_and_other_world_size(sharded, tmp_path) -> None:
    folder, _ = sharded
    preempted = {**build_sharded(folder, 2), "fault": "preempted in evaluation"}
    half = {n: build_sharded(folder, n, bf16=True, max_steps=2) for n in (1, 2)}
    result = sharding.run_jobs({"preempted": preempted, "bf16": half[2]}, tmp_path / "two", "fsdp2", *FULL_PRECISION)
    fewer = resume(build_sharded(folder, 1), folder / "two" / "ppo", 2)
    sharding.run_jobs({"fewer": fewer, "bf16": half[1]}, tmp_path / "one")
    assert result["codes"]["preempted"] == [75, 0]
    assert_resumed_exactly(folder / "two" / "ppo", tmp_path / "two" / "preempted")
    assert measure_weight_gap(folder / "two" / "ppo", tmp_path / "one" / "fewer") <= 1e-5
    # FSDP2's bf16 matches autocast up to rounding.
    one, two = (read_events(tmp_path / n / "bf16")[0] for n in ("one", "two"))
    for figure in ("objective/score", "value/loss", "policy/entropy"):
        assert two[figure] == pytest.approx(one[figure], rel=0.005), figure
