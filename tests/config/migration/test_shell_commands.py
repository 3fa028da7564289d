"""Migration of commands in the form of TRL's documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from recipes_lib.config.loader import check_text
from recipes_lib.config.migration.legacy_files import is_command, parse_command_text
from recipes_lib.config.migration.migrate import migrate
from recipes_lib.config.schema import flatten_config
from recipes_lib.errors import ConfigError

DPO = "python trl/scripts/dpo.py --dataset_name a/pairs --model_name_or_path a/b"
COMMANDS = {
    "trl sft --model_name_or_path a/b --dataset_name c/d": ("sft", {"output_dir": "trainer_output"}),
    "trl reward --model_name_or_path a/b --dataset_name c/d --output_dir o": ("reward", {"output_dir": "o"}),
    "trl grpo --model_name_or_path a/b --dataset_name c/d --reward_funcs accuracy_reward mine.rewards.brief": (
        "grpo",
        {"reward_funcs": ["trl.rewards:accuracy_reward", "mine.rewards:brief"]},
    ),
    "python -m trl.scripts.rloo --dataset_name c/d --reward_model_name_or_path a/r --model_name_or_path a/b": (
        "rloo",
        {"reward_model_name_or_path": "a/r"},
    ),
    f"{DPO} --learning_rate 5.0e-7 --num_train_epochs 1 --max_steps 1000 --no_remove_unused_columns": (
        "dpo",
        {"learning_rate": 5e-7, "max_steps": 1000},
    ),
    f"{DPO} --use_peft --lora_r 32 --lora_alpha 16 --lora_target_modules=all-linear": (
        "dpo",
        {"use_peft": True, "lora_r": 32, "lora_target_modules": None},
    ),
    f"{DPO} --loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0": (
        "dpo",
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    ),
    "accelerate launch examples/scripts/orpo.py --model_name_or_path a/b --dataset_name c/d --output_dir o": (
        "dpo",
        {"loss_type": ["orpo"]},
    ),
    "uv run 'https://host/trl/scripts/sft.py' --model_name_or_path a/b --dataset_name c/d --eval_strategy no "
    "--packing --use_peft --lora_target_modules q_proj, v_proj --eos_token '<|im_end|>'": (
        "lora",
        {"eval_strategy": "no", "lora_target_modules": ["q_proj", "v_proj"], "eos_token": "<|im_end|>"},
    ),
    "# a comment\nCUDA_VISIBLE_DEVICES=0 python trl/scripts/sft.py \\\n  --model_name_or_path a/b \\\n"
    "  --dataset_name c/d \\\n  --load_in_4bit --use_peft --lr_scheduler_kwargs '{\"num_cycles\": 2}'": (
        "lora",
        {"load_in_4bit": True, "lr_scheduler_kwargs": {"num_cycles": 2}},
    ),
    "python ppo_tldr.py --dataset_name c/d --model_name_or_path a/base --sft_model_path a/policy "
    "--reward_model_path a/reward --missing_eos_penalty 1.0 --stop_token eos --response_length 53": (
        "ppo",
        {"model_name_or_path": "a/policy", "tokenizer_name_or_path": "a/base", "response_length": 53},
    ),
    "python mason.py --gpus 8 -- source setup.sh \\&\\& accelerate launch open_instruct/dpo_tune_cache.py "
    "--model_name_or_path a/b --dataset_mixer_list c/d 1.0 --beta 5": ("dpo", {"dataset_name": "c/d", "beta": 5}),
    "swift pt --model a/b --output_dir o --max_length 64 --dataset_name c/d": ("pretrain", {"max_length": 64}),
    "swift rlhf --model a/b --output_dir o --dataset_name c/d": ("dpo", {"output_dir": "o"}),
    "swift rlhf --rlhf_type rm --model a/b --dataset_name c/d": ("reward", {"output_dir": "trainer_output"}),
    "python gkd.py --model_name_or_path a/b --teacher_model_name_or_path a/t --dataset_name c/d": (
        "distill",
        {"teacher_model_name_or_path": "a/t"},
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_trl_command_migrates_to_loadable_recipe(command: str, tmp_path: Path) -> None:
    recipe, expected = COMMANDS[command]
    path = tmp_path / "run.sh"
    path.write_text(f"{command}\n")
    migration = migrate(path)
    assert (migration.recipe, migration.is_ready) == (recipe, True), migration.changes
    found = flatten_config(check_text(recipe, migration.text, path))
    assert {key: found[key] for key in expected} == expected
    # A command has no line numbers.
    assert not [change for change in migration.changes if change.line]


@pytest.mark.parametrize(
    ("flags", "micro"),
    [
        ("--pretrain a/b --max_len 64 --train_batch_size 256 --micro_train_batch_size 2", "micro_train_batch_size"),
        (
            "--model.model_name_or_path a/b --data.max_len 64 --train.batch_size 256 --train.micro_batch_size 2",
            "micro_batch_size",
        ),
    ],
)
def test_command_of_openrlhf_is_read(flags: str, micro: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"deepspeed --module openrlhf.cli.train_dpo --dataset c/d {flags}\n")
    migration = migrate(path)
    assert migration.recipe == "dpo"
    assert "dataset_name: c/d\nmodel_name_or_path: a/b\nmax_length: 64\n" in migration.text
    # The global batch follows from that of a device.
    total = micro.replace("micro_", "")
    assert f"\n# {total}: 256\nper_device_train_batch_size: 2\n" in migration.text
    assert f"\n# `{total}` follows from other keys; " in migration.text


VERL = r"""
# GRPO of a small model
set -x
MODEL=a/b
export N=${ANSWERS:-5} RUN="$MODEL #1"
LENGTH=$(( 512 * 2 ))  # tokens
python3 -m verl.trainer.main_ppo --config-name='ppo_trainer' \
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
    data.max_response_length=${LENGTH} algorithm.a=$(((LENGTH + 8) * 2)) \
    data.train_files="$HOME/train.parquet" \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.rollout.n=${N} \
    trainer.experiment_name="$RUN" \
    actor_rollout_ref.rollout.top_k=-1 actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    +trainer.total_epochs=15 "$@" 2>&1 | tee log.txt
"""
SAME_AS_FILE = """
algorithm: {adv_estimator: grpo, use_kl_in_reward: false, a: $(((LENGTH+8)*2))}
data:
  max_response_length: 1024
  train_files: $HOME/train.parquet
actor_rollout_ref:
  model: {path: a/b}
  actor: {optim: {lr: 1e-6}}
  rollout: {n: 5, top_k: -1, gpu_memory_utilization: 0.6}
trainer: {experiment_name: "a/b #1", total_epochs: 15}
"""


@pytest.mark.parametrize(("name", "text"), [("run.sh", VERL), ("mine.yaml", SAME_AS_FILE)])
def test_overrides_and_sections_of_verl_are_read(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    migration = migrate(tmp_path / name)
    assert migration.recipe == "grpo"
    assert yaml.safe_load(migration.text) == {
        "response_length": 1024,
        "model_name_or_path": "a/b",
        "learning_rate": 1e-6,
        "num_generations": 5,
        "vllm_gpu_memory_utilization": 0.6,
        "run_name": "a/b #1",
        "num_train_epochs": 15,
        "output_dir": "trainer_output",
    }
    assert "\n# data.train_files: $HOME/train.parquet\n" in migration.text


def test_script_of_ms_swift_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        "# 22GB\nCUDA_VISIBLE_DEVICES=0 \\\nswift rlhf \\\n --rlhf_type simpo \\\n --model a/b --tuner_type lora \\\n"
        " --lora_rank 8 --output_dir runs/a#1 --split_dataset_ratio 0.01 --dataset 'c/d#500' e/f\necho done\n"
    )
    migration = migrate(path)
    assert migration.recipe == "dpo"
    assert yaml.safe_load(migration.text) == {
        "model_name_or_path": "a/b",
        "use_peft": True,
        "lora_r": 8,
        "output_dir": "runs/a#1",
        "test_split_size": 0.01,
        "loss_type": "simpo",
    }


def test_launcher_flags_are_left_to_the_launch_file(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"accelerate launch --config_file zero3.yaml {DPO.removeprefix('python ')}\n")
    remarks = [change.what for change in migrate(path).changes if change.by_hand]
    assert any("--config_file zero3.yaml" in what and "recipes launch" in what for what in remarks)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("trl sft --config sft.yaml\n", "also reads a file: sft.yaml"),
        ("python run.py 'a\n", "not a shell command"),
        ("python run.py a --b c\n", "'a' is not a flag"),
        ("python\n -c pass\n", "not one command"),
        ("python a.py --b c\npython d.py --e f\n", "not one command"),
        ("python a.py --b c && python d.py --e f\n", "not one command"),
        ("python -m verl.trainer.main_ppo a.b=1 c\n", "'c' is not a flag"),
        ("echo trl\n", "not one command"),
        ("trl vllm-serve --model a/b\n", "not one command"),
        ("swift infer --adapters a/b\n", "not one command"),
        ("python examples/scripts/cpo.py --model_name_or_path a/b\n", "CPO"),
    ],
)
def test_invalid_command_is_refused(text: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(ConfigError) as caught:
        migrate(tmp_path / "run.sh")
    assert found in str(caught.value)


@pytest.mark.parametrize("text", ["from trl import SFTConfig\nargs = SFTConfig(output_dir='a')\n", "x = 'a\n"])
def test_python_script_is_named_as_such(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(ConfigError, match="is a Python script"):
        migrate(tmp_path / "train.py")


@pytest.mark.parametrize("text", ["model_name_or_path: trl/sft\n", "python: 3\n", "# trl sft\nseed: 1\n", ""])
def test_config_text_is_not_a_command(text: str) -> None:
    assert not is_command(text)


def test_command_is_recognised_in_a_file_of_any_name(tmp_path: Path) -> None:
    path = tmp_path / "run.txt"
    path.write_text("$ OMP_NUM_THREADS=1 \\\n  trl sft --model_name_or_path a/b --dataset_name c/d\n")
    assert yaml.safe_load(migrate(path).text)["model_name_or_path"] == "a/b"


def test_command_values_keep_types_and_lists() -> None:
    script, values, _ = parse_command_text("python a/sft.py --a=1 --b 2e-5 x --c --no_d --e-f true", "run.sh")
    assert script == "sft"
    assert values == {"a": 1, "b": [2e-5, "x"], "c": True, "d": False, "e_f": True}
