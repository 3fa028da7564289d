"""The migration page says what migration does: of every key, and of files of the shapes that were published."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes_lib.config.generate import describe_fate, format_migration
from recipes_lib.config.loader import check_text
from recipes_lib.config.migration.migrate import migrate
from recipes_lib.config.recipes import read_renames
from recipes_lib.config.table import load_table

FILES = {
    # alignment-handbook, the later shape: a list of datasets with columns, the chat template in the file.
    "handbook sft": (
        "sft",
        """\
model_name_or_path: owner/base
model_revision: main
torch_dtype: bfloat16
attn_implementation: sdpa
chat_template: "{% for m in messages %}{{ m.content }}{% endfor %}"
dataset_mixture:
  datasets:
    - id: owner/chats
      config: default
      split: train_sft
      columns:
        - messages
      weight: 1.0
    - id: owner/others
      config: all
      split: train
      columns:
        - messages
      weight: 0.5
  test_split_size: 1000
  seed: 0
dataset_num_proc: 12
bf16: true
do_eval: true
eval_strategy: epoch
gradient_accumulation_steps: 1
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: False
hub_strategy: every_save
learning_rate: 2.0e-05
log_level: info
logging_steps: 5
logging_strategy: steps
lr_scheduler_type: cosine
max_seq_length: 2048
max_steps: -1
num_train_epochs: 1
output_dir: data/out
overwrite_output_dir: true
per_device_train_batch_size: 16
remove_unused_columns: true
report_to:
- tensorboard
save_strategy: "steps"
save_steps: 100
save_total_limit: 1
seed: 42
warmup_ratio: 0.1
""",
        {"chat_template": None, "warmup_steps": 0.1, "max_length": 2048, "activation_checkpointing": True},
    ),
    # alignment-handbook, the earlier shape, with an adapter.
    "handbook dpo": (
        "dpo",
        """\
model_name_or_path: owner/sft
torch_dtype: float32
use_peft: true
load_in_4bit: true
lora_r: 16
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules:
- q_proj
- k_proj
dataset_mixer:
  owner/pairs: 1.0
dataset_splits:
- train_prefs
- test_prefs
preprocessing_num_workers: 12
bf16: true
beta: 0.01
do_eval: true
evaluation_strategy: steps
eval_steps: 100
gradient_accumulation_steps: 4
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
learning_rate: 5.0e-6
log_level: info
lr_scheduler_type: cosine
max_length: 1024
max_prompt_length: 512
num_train_epochs: 1
optim: paged_adamw_32bit
output_dir: data/out
per_device_train_batch_size: 4
save_strategy: "steps"
save_steps: 100
seed: 42
warmup_ratio: 0.1
""",
        {"dataset_name": "owner/pairs", "dataset_test_split": "test_prefs", "max_prompt_length": None, "beta": 0.01},
    ),
    # TRL's command line: `trl sft --config`.
    "trl sft": (
        "sft",
        """\
model_name_or_path: owner/base
dataset_name: owner/chats
dataset_text_field: text
use_liger: false
max_seq_length: 1024
packing: true
eval_packing: false
assistant_only_loss: true
learning_rate: 2.0e-4
num_train_epochs: 1
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
evaluation_strategy: "no"
logging_steps: 25
output_dir: out
report_to: none
""",
        {"max_length": 1024, "loss_on": "assistant", "eval_strategy": "no", "use_liger": None},
    ),
    "trl reward": (
        "reward",
        """\
model_name_or_path: owner/base
dataset_name: owner/pairs
torch_dtype: float32
center_rewards_coefficient: 0.01
disable_dropout: true
learning_rate: 1.0e-5
max_length: 2048
per_device_train_batch_size: 8
num_train_epochs: 1
gradient_checkpointing: true
logging_steps: 25
eval_strategy: steps
eval_steps: 50
output_dir: out
""",
        {"center_rewards_coefficient": 0.01, "dtype": "float32", "activation_checkpointing": True},
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_published_shape_loads_once_it_is_migrated(name, write) -> None:
    recipe, old, expected = FILES[name]
    text, *_ = migrate(write(old), recipe)
    config = check_text(recipe, text, Path("new.yaml"))
    kept = {line.split(":")[0] for line in text.splitlines() if not line.startswith(("#", " ", "-"))}
    assert kept <= load_table(recipe).keys.keys()
    for key, value in expected.items():
        if value is None:
            assert key not in kept
        else:
            found = {**config.training, **vars(config.tokens), **vars(config.data), **vars(config.model)}
            assert found[key] == value, key
    again, more, *_ = migrate(write(text), recipe)
    assert again == text
    assert not [change for change in more if change.line]


NAMED = {**read_renames().elsewhere, **read_renames().retired}


@pytest.mark.parametrize("key", sorted(NAMED.keys() - load_table("sft").keys.keys()))
def test_a_row_of_the_page_is_what_migration_does(key, write, sound: str) -> None:
    retired = NAMED[key]
    fate = describe_fate(key, retired)
    recipe = "sft" if retired.new is None or retired.new in load_table("sft").keys else "ppo"
    text, changes, *_ = migrate(write(f"{sound}{key}: some value of nobody's\n"), recipe)
    change = next(change for change in changes if change.line)
    lines = text.splitlines()
    if retired.new and f"{retired.new}:" in sound:
        assert change.by_hand
        assert not any(key in line.split(":")[0] for line in lines)
    elif fate == "is deleted":
        assert not change.by_hand
        assert not any(key in line.split(":")[0] for line in lines)
    elif "you decide" in fate:
        assert change.by_hand
        assert any(line.startswith(f"# {key}:") for line in lines)
    else:
        assert fate == f"becomes `{retired.new}`"
        assert f"{retired.new}: some value of nobody's" in lines


def test_every_key_is_on_the_page_once() -> None:
    page = format_migration()
    first = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    for key in NAMED:
        assert sum(f"`{key}`" in cell for cell in first) >= 1, key
