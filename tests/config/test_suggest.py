"""Suggestions for unknown, renamed and refused keys."""

from __future__ import annotations

import re

import pytest

from recipes_lib.config.loader import load_config
from recipes_lib.config.recipes import read_known
from recipes_lib.config.table import RECIPE_NAMES, load_table


@pytest.mark.parametrize(
    ("line", "found", "remedy"),
    [
        ("learning_rte: 1", "unknown key", "did you mean `learning_rate`?"),
        ("Learning-Rate: 1", "unknown key", "did you mean `learning_rate`?"),
        ("max_seq_lenght: 1", "unknown key", "did you mean `max_length`?"),
        ("zzz: 1", "unknown key", "docs/configs/sft.md"),
        ("no_packing: true", "unknown key", "`packing: false`"),
        ("max_seq_length: 512", "renamed to `max_length`", "write `max_length`"),
        ("warmup_ratio: 0.1", "removed in transformers 5.15", "warmup_steps"),
        ("fsdp: true", "hardware", "accelerate"),
        ("use_peft: true", "not a key of this recipe", "lora"),
        ("beta: 0.1", "not a key of this recipe", "dpo"),
        ("mixed_precision: bf16", "accelerate YAML", "accelerate"),
        ("hardware: fsdp2", "is a flag of", "start `recipes launch --hardware NAME`"),
        ("weight: 2", "`dataset_mixture` entry", "inside the entry"),
        ("training:\n  max_steps: 3", "keys are flat", "move max_steps to the left margin"),
        ("optimizer:\n  fused: true\n  lr: 3e-4", "keys are flat", "move lr to the left margin"),
        ("assistant_only_loss: true", "`loss_on`", "loss_on: assistant"),
        ("packing_strategy: bfd", "not needed", "overlong: split"),
        ("packing_stratgy: bfd", "unknown key", "did you mean `overlong`?"),
        ("remove_unused_colums: x", "unknown key", "docs/configs/sft.md"),
        ("reward_model_path: a/b", "is a key of PPO", "use the `ppo` recipe"),
        ("batch_size: 4", "unknown key", "did you mean `per_device_train_batch_size`?"),
        ("peft_config: x", "unknown key", "use the `lora` recipe"),
        # Keys of other programs, for which the nearest spelling would mislead.
        ("max_samples: 1000", "is not supported", "a smaller file"),
        ("stage: sft", "name of the recipe", "run recipes/sft.py"),
        # Of several machines, the others saved checkpoints without weights, and failed at the end.
        ("save_on_each_node: true", "on every machine", "delete the line"),
        # As a flag by the launcher of DeepSpeed.
        ("local_rank: 0", "set by the launcher", "start by `recipes launch` or torchrun"),
        ("dataset_dir: data", "is not supported", "write `dataset_name: "),
        ("mix_strategy: concat", "unknown key", "did you mean `dataset_mixture`?"),
        ("strategy: ddp", "hardware", "accelerate YAML"),
        ("evals_per_epoch: 4", "is not supported", "`eval_steps`"),
        ("default_system: x", "unknown key", "did you mean `system_prompt`?"),
        ("dataset_splits: [train, test]", "two keys", "`dataset_test_split`"),
        # The remedy names keys of another recipe.
        ("kd_ratio: 0.5", "`distillation_alpha`", "use the `distill` recipe"),
        ("lora_target: q_proj", "`lora_target_modules`", "use the `lora` recipe"),
        ("pad_to_sequence_len: true", "no counterpart", "delete the line"),
        ("bf16: auto", "another program's value", "write null"),
        ("max_steps: 1,000", "is '1,000'", "write 1000"),
        ("l\u0435arning_rat\u0435: 1", "unknown key `l\\u0435arning_rat\\u0435`", "did you mean `learning_rate`?"),
        ("\uff53eed: 1", "unknown key `\\uff53eed`", "did you mean `seed`?"),
        ("\u200bseed: 1", "unknown key `\\u200bseed`", "did you mean `seed`?"),
        ("seed:", "has no value", "or delete the line"),
        ("dtype: bf16", "another program's value", "write bfloat16"),
        ("shuffle: true", "`train_sampling_strategy`", "delete the line"),
        ("device: cuda", "hardware", "accelerate YAML"),
        ("liger_rms_norm: true", "`use_liger_kernel` here", "delete the line"),
        ("wandb_project: x", "W&B", "the environment variable WANDB_PROJECT"),
    ],
)
def test_unknown_key_suggests_replacement(problems_of, line: str, found: str, remedy: str) -> None:
    (problem,) = problems_of(line + "\n")
    assert problem.where == "recipe.yaml:5"
    assert found in problem.found
    assert remedy in problem.remedy


def test_renamed_key_next_to_its_successor_is_to_be_deleted(problems_of) -> None:
    (problem,) = problems_of("warmup_steps: 10\nwarmup_ratio: 0.1\n")
    assert problem.where == "recipe.yaml:6"
    assert "delete the line" in problem.remedy
    assert "warmup_steps" in problem.remedy


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("model_name_or_path: a/b\noutput_dir: o\ndataset_mixer:\n  a/b: 1.0\n", [3]),
        ("base_model: a/b\noutput_dir: o\ndataset: c/d\n", [1, 3]),
        ("model-name-or-path: a/b\noutput_dir: o\nDATASET_NAME: c/d\n", [1, 3]),
        ("model:\n  model_name_or_path: a/b\ndata:\n  dataset_name: c/d\noutput_dir: o\n", [1, 3]),
    ],
)
def test_misspelt_required_key_is_not_also_reported_missing(problems_of, text: str, lines: list[int]) -> None:
    assert [problem.where for problem in problems_of(text=text)] == [f"recipe.yaml:{line}" for line in lines]


@pytest.mark.parametrize("lines", ["dataset_name: null\n", "dataset_name:\ndataset_mixture: ~\n"])
def test_null_dataset_is_reported_missing(problems_of, lines: str) -> None:
    (problem,) = problems_of(text=f"model_name_or_path: a/b\noutput_dir: o\n{lines}")
    assert problem.found == "`dataset_name` is missing"


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_remedy_names_no_refused_key(recipe: str) -> None:
    known = read_known(recipe)
    named = {key: set(re.findall(r"`(\w+)[`:]", retired.remedy)) for key, retired in known.items()}
    assert not {key: names & known.keys() for key, names in named.items() if names & known.keys()}
    assert {retired.new for retired in known.values()} <= {None, *load_table(recipe).keys}


# One recipe of each family: supervised, preference, and RL.
@pytest.mark.parametrize("recipe", ["sft", "dpo", "ppo"])
def test_suggested_name_is_a_key_of_the_recipe(problems_of, recipe: str) -> None:
    known = sorted(read_known(recipe))
    # In parts, because only so many unknown keys are explained.
    for start in range(0, len(known), 50):
        flags = [part for key in known[start : start + 50] for part in (f"--{key}x", "1")]
        for problem in problems_of(flags=flags, recipe=recipe):
            for name in re.findall(r"did you mean `(\w+)`", problem.remedy):
                assert name in load_table(recipe).keys


@pytest.mark.parametrize("value", ["all-linear", "[all-linear]"])
def test_all_linear_equals_unset_target_modules(recipes, value: str) -> None:
    config = load_config("lora", ["--config", str(recipes["lora"]), "--lora_target_modules", value])
    assert config.adapter.lora_target_modules is None
