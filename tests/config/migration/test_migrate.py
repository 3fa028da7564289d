"""Migration of configuration files line by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes_lib.config.loader import check_text
from recipes_lib.config.migration.legacy_files import SECTIONS
from recipes_lib.config.migration.migrate import migrate
from recipes_lib.config.recipes import read_refused, read_renames
from recipes_lib.config.schema import flatten_config
from recipes_lib.config.table import load_table
from recipes_lib.errors import ConfigError

OLD = """\
# The model
model_name_or_path: owner/base  # a comment that stays
torch_dtype: bfloat16
use_flash_attention_2: true

# Data
dataset_mixer:
  owner/chats: 1.0   # all of it
dataset_splits:
- train_sft
- test_sft
preprocessing_num_workers: 12

# Training
gradient_checkpointing: true   # memory
"gradient_checkpointing_kwargs":
  use_reentrant: False
evaluation_strategy: "no"
max_seq_length: 2048
warmup_ratio: 0.1
learning_rate: 2.0e-05
lr_scheduler_type: cosine
assistant_only_loss: true
packing: true
packing_strategy: wrapped
optim: adamw_hf
output_dir: data/out
overwrite_output_dir: true
hub_token: hf_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
report_to:
- wandb
use_peft: true
lora_target_modules:
- q_proj

# The end
seed: 42
"""
NEW = """\
# The model
model_name_or_path: owner/base  # a comment that stays
dtype: bfloat16
attn_implementation: flash_attention_2

# Data
dataset_name: owner/chats
dataset_train_split: train_sft
dataset_test_split: test_sft

# Training
activation_checkpointing: true   # memory
activation_checkpointing_kwargs:
  use_reentrant: False
eval_strategy: "no"
max_length: 2048
warmup_steps: 0.1
learning_rate: 2.0e-05
lr_scheduler_type: cosine
loss_on: assistant
packing: true
# `packing_strategy` is not needed; packing is best-fit and isolates examples; delete the line; \
`overlong: split` splits examples longer than `max_length`
# packing_strategy: wrapped
optim: adamw_torch
output_dir: data/out
report_to:
- wandb
use_peft: true
lora_target_modules:
- q_proj

# The end
seed: 42
"""


def test_old_file_is_rewritten_line_by_line(write) -> None:
    text, changes, *_ = migrate(write(OLD))
    assert text == NEW
    config = check_text("lora", text, Path("new.yaml"))
    assert config.data.dataset_name == "owner/chats"
    assert config.training["warmup_steps"] == 0.1
    by_line = {change.line: change for change in changes}
    assert by_line[3].what == "`torch_dtype` became `dtype`"
    assert by_line[29].by_hand
    assert "hf_" not in str(changes)
    undecided = [
        OLD.splitlines()[change.line - 1].split(":")[0] for change in changes if change.by_hand and change.line
    ]
    assert undecided == ["packing_strategy", "hub_token"]


def test_migration_is_idempotent(write) -> None:
    text, *_ = migrate(write(OLD))
    again, changes, *_ = migrate(write(text))
    assert again == text
    assert not [change for change in changes if change.line]


def test_changed_meaning_is_reported(write) -> None:
    _, changes, *_ = migrate(write("model_name_or_path: a/b\ndataset_name: c/d\noutput_dir: o\nmax_seq_length: 512\n"))
    remarks = " ".join(change.what for change in changes if change.by_hand)
    assert "loss_on: all" in remarks
    assert "overlong: truncate" in remarks


def test_remaining_problems_are_reported(write) -> None:
    _, changes, *_ = migrate(write("model_name_or_path: a/b\noutput_dir: o\nmax_steps: ten\nlearning_rte: 1\n"))
    remarks = [change.what for change in changes if change.by_hand]
    assert any("dataset_name" in remark for remark in remarks)
    assert any("'ten'" in remark for remark in remarks)
    assert any("did you mean `learning_rate`" in remark for remark in remarks)


def test_revision_that_looks_like_a_number_is_kept(write, minimal_text: str) -> None:
    old = minimal_text + "model_revision: 20240101\n"
    assert migrate(write(old)).text == old


def test_existing_successor_key_takes_precedence(write, minimal_text: str) -> None:
    text, changes, *_ = migrate(write(minimal_text + "warmup_steps: 5\nwarmup_ratio: 0.1\n"))
    assert text == minimal_text + "warmup_steps: 5\n"
    assert [change.line for change in changes if change.by_hand and change.line] == [6]


@pytest.mark.parametrize(
    ("old", "loss_on", "by_hand"),
    [
        ("assistant_only_loss: false\ncompletion_only_loss: true\n", "completion", False),
        ("completion_only_loss: true\nassistant_only_loss: false\n", "completion", False),
        ("completion_only_loss: false\nassistant_only_loss: true\n", "assistant", False),
        ("assistant_only_loss: false\ncompletion_only_loss: false\n", "all", False),
        ("assistant_only_loss: false\n", None, True),
        ("completion_only_loss: null\n", None, True),
    ],
)
def test_loss_on_follows_trl_loss_keys(write, minimal_text: str, old: str, loss_on: str | None, by_hand: bool) -> None:
    text, changes, *_ = migrate(write(minimal_text + old))
    assert check_text("sft", text, Path("new.yaml")).tokens.loss_on == loss_on
    # For chats, an unset upstream key has a different default here, which needs review.
    assert any(change.by_hand and "loss_on" in change.what for change in changes) is by_hand


@pytest.mark.parametrize("steps", ["0", "null"])
@pytest.mark.parametrize("order", [1, -1])
def test_warmup_ratio_replaces_zero_warmup_steps(write, minimal_text: str, steps: str, order: int) -> None:
    text, *_ = migrate(write(minimal_text + "".join([f"warmup_steps: {steps}\n", "warmup_ratio: 0.1\n"][::order])))
    assert check_text("sft", text, Path("new.yaml")).training["warmup_steps"] == 0.1


@pytest.mark.parametrize("ratio", ["", "warmup_ratio: null\n"])
def test_zero_warmup_steps_without_ratio_are_kept(write, minimal_text: str, ratio: str) -> None:
    """The default here is not zero."""
    text, *_ = migrate(write(f"{minimal_text}warmup_steps: 0\n{ratio}"))
    assert check_text("sft", text, Path("new.yaml")).training["warmup_steps"] == 0


@pytest.mark.parametrize(
    "warmup", ["warmup_ratio: 0.03\n", "warmup_steps: 10\n", "warmup_ratio: 0.03\nwarmup_steps: 5\n"]
)
@pytest.mark.parametrize(("schedule", "is_kept"), [("constant", False), ("constant_with_warmup", True)])
def test_warmup_without_effect_is_deleted(write, minimal_text: str, warmup: str, schedule: str, is_kept: bool) -> None:
    text, _, _, is_ready = migrate(write(f"{minimal_text}lr_scheduler_type: {schedule}\n{warmup}"))
    assert is_ready
    assert ("warmup_" in text.replace("constant_with_warmup", "")) == is_kept


@pytest.mark.parametrize(
    ("names", "model", "tokenizer"),
    [
        ("sft_model_path: a/policy\nmodel_name_or_path: a/base\n", "a/policy", "a/base"),
        ("model_name_or_path: a/base\nsft_model_path: a/policy\n", "a/policy", "a/base"),
        ("model_name_or_path: a/base\nsft_model_path: a/policy\ntokenizer: a/words\n", "a/policy", "a/words"),
        ("model_name_or_path: a/policy\nsft_model_path: a/policy\n", "a/policy", None),
        ("model_name_or_path: a/policy\n", "a/policy", None),
        ("sft_model_path: a/policy\n", "a/policy", None),
    ],
)
def test_ppo_policy_and_tokenizer_paths_are_mapped(write, names: str, model: str, tokenizer: str | None) -> None:
    text, *_ = migrate(write(names + "dataset_name: a/b\noutput_dir: o\nreward_model_path: a/reward\n"), "ppo")
    loaded = check_text("ppo", text, Path("new.yaml")).model
    assert (loaded.model_name_or_path, loaded.tokenizer_name_or_path) == (model, tokenizer)


OFFLOADED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}}
AXOLOTL = """\
base_model: a/b
adapter: lora
sequence_len: 2048
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
fp16:
warmup: {a: b}
max_steps: 3
output_dir: out
datasets:
  - path: c/d
    type: alpaca
special_tokens: {pad_token: x}
"""


def test_keys_of_axolotl_are_renamed(write) -> None:
    migration = migrate(write(AXOLOTL))
    assert migration.recipe == "lora"
    assert migration.is_ready
    loaded = check_text("lora", migration.text, Path("new.yaml"))
    assert (loaded.model.model_name_or_path, loaded.tokens.max_length) == ("a/b", 2048)
    assert loaded.training["per_device_train_batch_size"] == 2
    assert (loaded.training["optim"], loaded.training["lr_scheduler_type"]) == ("adamw_bnb_8bit", "cosine")
    assert "# warmup: {a: b}" in migration.text
    assert (loaded.adapter.use_peft, loaded.data.dataset_name) == (True, "c/d")
    assert loaded.tokens.pad_token == "x"
    assert not any("same meaning" in change.what for change in migration.changes)
    # `num_epochs` has no effect beside `max_steps`.
    assert "epochs" not in migration.text


@pytest.mark.parametrize(("old", "new"), [("lr: 1e-4", "learning_rate: 1e-4"), ("optimizer: muon", "optim: muon")])
def test_synonym_is_marked_for_review(write, old: str, new: str) -> None:
    text = "model_config: {model_type: llama}\ntokenizer_name_or_path: a/b\ndataset_name: c/d\noutput_dir: o\n"
    migration = migrate(write(text + old), "pretrain")
    assert new in migration.text
    assert any(change.by_hand and "same meaning" in change.what for change in migration.changes)


def test_prompts_of_open_r1_become_chats_with_a_system_message(write) -> None:
    old = "model_name_or_path: a/b\ndataset_name: c/d\nreward_funcs: [m:f]\nnum_generations: 4\noutput_dir: o\n"
    migration = migrate(write(f"{old}dataset_prompt_column: task\nsystem_prompt: Think.\n"), "grpo")
    loaded = check_text("grpo", migration.text, Path("new.yaml"))
    assert (loaded.data.dataset_columns, loaded.chat.system_prompt) == ({"question": "task"}, "Think.")


@pytest.mark.parametrize(
    ("recipe", "old", "new"),
    [
        ("dpo", "adapter: qlora\nload_in_4bit: true", {"use_peft": True, "load_in_4bit": True}),
        ("lora", "adapter: lora\nlora_target_linear: true", {"use_peft": True}),
        ("lora", "adapter: lora\nlora_target_linear: true\nlora_target_modules: [q_proj]", {"use_peft": True}),
        ("lora", "finetuning_type: lora\nlora_target: all", {"use_peft": True, "lora_r": 8, "lora_alpha": 16}),
        ("dpo", "finetuning_type: lora\nlora_rank: 4", {"use_peft": True, "lora_r": 4, "lora_alpha": 8}),
        ("lora", "finetuning_type: lora\nlora_alpha: 9", {"use_peft": True, "lora_alpha": 9}),
        ("sft", "finetuning_type: full", {}),
        ("dpo", "pref_loss: ipo", {"loss_type": "ipo"}),
        ("sft", "dataset_config_name: x", {"dataset_config": "x"}),
        ("sft", "train_on_inputs: true", {"loss_on": "all"}),
        ("sft", "train_on_prompt: false\nmask_history: true", {"loss_on": "last_assistant"}),
        ("lora", "tuner_type: lora\ntarget_modules: all-linear", {"use_peft": True}),
        ("lora", "tuner_type: lora\nquant_bits: 4", {"use_peft": True, "load_in_4bit": True}),
        ("lora", "tuner_type: lora\nquantization_bit: 8", {"use_peft": True, "load_in_8bit": True}),
        ("sft", "flash_attn: sdpa", {"attn_implementation": "sdpa"}),
        ("sft", "saves_per_epoch: 1\nevals_per_epoch: 0", {"save_strategy": "epoch", "eval_strategy": "no"}),
        ("dpo", "loss_type: orpo\norpo_alpha: 0.2", {"loss_type": "orpo", "beta": 0.2}),
        ("lora", "pissa_init: true", {"init_lora_weights": "pissa"}),
        ("sft", "enable_liger_kernel: true", {"use_liger_kernel": True}),
        ("dpo", "dpo_label_smoothing: 0.1\nloss_type: robust", {"label_smoothing": 0.1, "loss_type": "robust"}),
        ("sft", "val_set_size: 0.0\nlora_model_dir:\nxformers_attention: null", {}),
        ("sft", "val_set_size: 0.1", {"test_split_size": 0.1}),
        ("sft", "dataset_prepared_path: last_run_prepared", {"prepared_dir": "last_run_prepared"}),
        # torchtune and transformers do not clip at null; the default clips at 1.
        ("sft", "clip_grad_norm: null", {"max_grad_norm": 0}),
        ("sft", "max_grad_norm: null", {"max_grad_norm": 0}),
        ("sft", "max_grad_norm: 0.5\nclip_grad_norm: null", {"max_grad_norm": 0.5}),
        ("sft", "checkpointing_steps: 50\nkeep_last_n_checkpoints: 2", {"save_steps": 50, "save_total_limit": 2}),
        ("sft", "shuffle: true\ndisable_shuffling: false\nuse_slow_tokenizer: true", {}),
        ("dpo", "shuffle: false", {"train_sampling_strategy": "sequential"}),
        ("sft", "disable_shuffling: true", {"train_sampling_strategy": "sequential"}),
        ("sft", "curriculum_sampling: true", {"train_sampling_strategy": "sequential"}),
        ("sft", "evals_per_epoch: 4\nnum_epochs: 2", {"eval_steps": 0.125, "num_train_epochs": 2}),
        ("sft", "saves_per_epoch: 4", {"save_steps": 0.25}),
        ("sft", "pure_bf16: true", {"bf16": True, "dtype": "bfloat16"}),
        ("sft", "disable_gradient_checkpointing: true", {"activation_checkpointing": False}),
        ("reward", "reward_model: true\nnum_labels: 1", {}),
        ("sft", "special_tokens: {eos_token: a, pad_token: b}", {"eos_token": "a", "pad_token": "b"}),
        ("sft", "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rope: true\ncut_cross_entropy: true", {}),
        ("dpo", "stage: dpo\nfinetuning_type: full", {}),
        ("dpo", "sample_packing: true", {}),
        ("sft", "gradient_checkpointing: offload", OFFLOADED),
        ("lora", "gradient_checkpointing: true\nactivation_offloading: true", OFFLOADED),
        ("sft", "enable_activation_offloading: true", OFFLOADED),
        ("sft", "enable_activation_offloading: false", {}),
        ("sft", "default_system: Be brief.", {"system_prompt": "Be brief."}),
        ("grpo", "reward_funcs: [a:b]\ntop_k: -1\nmin_p: 0.0\ntop_p: 1.0", {"reward_funcs": ["a:b"]}),
    ],
)
def test_keys_of_other_programs_keep_their_meaning(write, minimal_text: str, recipe, old, new) -> None:
    migration = migrate(write(f"{minimal_text}{old}\n"), recipe)
    assert yaml.safe_load(migration.text) == yaml.safe_load(minimal_text) | new
    assert migration.is_ready
    assert "#" not in migration.text


@pytest.mark.parametrize(
    ("recipe", "old"),
    [
        ("sft", "validation_split_percentage: 5"),
        # SimPO's own files have the margin divided by beta, and axolotl the step at which a cosine ends.
        ("dpo", "gamma_beta_ratio: 0.3\nloss_type: simpo"),
        ("pretrain", "cosine_constant_lr_ratio: 0.8\nmax_length: 64"),
        ("pretrain", "shuffle: false\nmax_length: 64"),
        ("sft", "plugins: [axolotl.integrations.kd.KDPlugin]"),
    ],
)
def test_key_of_another_program_without_equivalent_is_a_comment(write, minimal_text: str, recipe, old) -> None:
    migration = migrate(write(f"{minimal_text}{old}\n"), recipe)
    assert migration.is_ready
    lost = {line.partition(":")[0] for line in old.split("\n")} - yaml.safe_load(migration.text).keys()
    assert lost >= {old.partition(":")[0]}
    for key in lost:
        assert f"\n# {key}: " in migration.text
        assert any(change.by_hand and f"`{key}`" in change.what for change in migration.changes)


@pytest.mark.parametrize("indent", [None, 4, "\t"])
def test_json_is_migrated(write, indent) -> None:
    old = {
        "model_name_or_path": "a/b",
        "dataset_name": "c/d",
        "learning_rate": 1e-5,
        "fp16": "auto",
        "warmup_ratio": 0.1,
    }
    text = json.dumps(old, indent=indent)
    if indent == "\t":
        with pytest.raises(ConfigError, match="spaces instead of tabs"):
            migrate(write(text))
        return
    migration = migrate(write(text))
    loaded = check_text("sft", migration.text, Path("new.yaml"))
    assert migration.is_ready
    assert (loaded.training["learning_rate"], loaded.training["warmup_steps"]) == (1e-5, 0.1)
    assert not [change for change in migration.changes if change.line]


def test_ineffective_synonym_is_deleted(write, minimal_text: str) -> None:
    migration = migrate(write(f"{minimal_text}max_steps: 5\nepochs: 2\n"), "sft")
    assert migration.is_ready
    assert "epochs" not in migration.text


SECTIONS_OF_OTHERS = """\
output_dir: runs/a
model:
  model_name: a/b
  lora_alpha: 8
training:
  output_dir: runs/b
  num_train_epochs: 1
  lr_scheduler_type: cosine_with_restarts
  lr_scheduler_kwargs: {num_cycles: 2}
optimizer:
  _component_: torch.optim.AdamW
  lr: 3e-4
profiler: {warmup_steps: 3}
dataset: {split: train}
lr_scheduler: {num_warmup_steps: 100}
dataset_name: c/d
"""


def test_keys_in_sections_of_other_programs_are_keys(write) -> None:
    migration = migrate(write(SECTIONS_OF_OTHERS), "lora")
    assert yaml.safe_load(migration.text) == {
        "output_dir": "runs/a",
        "model_name_or_path": "a/b",
        "lora_alpha": 8,
        "num_train_epochs": 1,
        "lr_scheduler_type": "cosine_with_restarts",
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "learning_rate": 3e-4,
        "warmup_steps": 100,
        "dataset_name": "c/d",
    }
    # A key of a section that the file also has outside, and one that is not known.
    assert "\n# training.output_dir: runs/b\n" in migration.text
    assert "\n# optimizer._component_: torch.optim.AdamW\n" in migration.text
    assert "`dataset.split`; did you mean `dataset_train_split`?" in migration.text


@pytest.mark.parametrize("value", ["true", "null", "text", "{a: b}"])
def test_retired_keys_are_removed_for_any_value(write, minimal_text: str, value: str) -> None:
    # The keys of sections are moved to the top of a new file.
    sections = SECTIONS if value == "{a: b}" else ()
    keys = sorted({*read_renames().retired, *read_refused("sft"), *read_renames().elsewhere}.difference(sections))
    given = "".join(f"{key}: {value}\n" for key in keys)
    text, changes, *_ = migrate(write(f"# head\n{minimal_text}{given}seed: 1  # tail\n"), "sft")
    lines = text.splitlines()
    assert {line.partition(":")[0] for line in lines}.isdisjoint(keys)
    assert lines[0] == "# head"
    assert "seed: 1  # tail" in lines
    assert {change.line for change in changes} >= set(range(6, 6 + len(keys)))


@pytest.mark.parametrize("text", ["? max_seq_length\n: 3\n", "a: 1\na: 2\n", ""])
def test_file_not_editable_by_line_is_refused(write, text: str) -> None:
    with pytest.raises(ConfigError):
        migrate(write(text))


TEMPLATE = "{% for m in messages %}{{ m.content + '\\n' }}{% endfor %}"


def test_chat_template_file_is_never_overwritten(write, minimal_text: str) -> None:
    path = write(minimal_text + f"chat_template: {json.dumps(TEMPLATE)}\n")
    for _ in range(2):
        config = check_text("sft", migrate(path, "sft").text, path)
        assert Path(config.tokens.chat_template_path).read_text(encoding="utf-8") == TEMPLATE
    Path(config.tokens.chat_template_path).write_text("another")
    with pytest.raises(ConfigError, match="move it away"):
        migrate(path, "sft")
    assert Path(config.tokens.chat_template_path).read_text(encoding="utf-8") == "another"


OVERLONG = "max_completion_len=1280, soft_punish_cache=256"
REWARDED = "reward_weights: [1, 2, 3]\nreward_funcs: [a.b, c.d]\nreward_model_name_or_path: e/f"


@pytest.mark.parametrize(
    ("recipe", "old", "new"),
    [
        ("sft", "torch_dtype: null", ("dtype", "float32")),
        ("sft", "packing: null", ("packing", True)),
        ("sft", "max_steps: 10\nnum_train_epochs: 3", ("max_steps", 10)),
        ("sft", "eval_strategy: 'no'\neval_steps: 100", ("eval_strategy", "no")),
        ("sft", "trust_remote_code: true\nmodel_revision: main", ("trust_remote_code", False)),
        ("sft", f"trust_remote_code: true\nmodel_revision: {'ab' * 20}", ("trust_remote_code", True)),
        ("dpo", "use_peft: true\nlora_dropout: 0.05", ("lora_dropout", 0)),
        ("lora", "lora_dropout: 0.05", ("lora_dropout", 0.05)),
        ("grpo", "reward_funcs: think_format_reward", ("reward_funcs", ["trl.rewards:think_format_reward"])),
        (
            "grpo",
            "reward_funcs: [get_soft_overlong_punishment]",
            ("reward_funcs", [f"trl.rewards:get_soft_overlong_punishment({OVERLONG})"]),
        ),
        # TRL's scripts put the reward model first, and the functions after it.
        ("rloo", REWARDED, ("reward_weights", [2.0, 3.0, 1.0])),
        ("rloo", "\n".join(sorted(REWARDED.split("\n"))), ("reward_weights", [2.0, 3.0, 1.0])),
        ("rloo", REWARDED.replace("a.b, c.d", "'a:b', 'c:d'"), ("reward_weights", [1.0, 2.0, 3.0])),
        (
            "rloo",
            REWARDED.replace("reward_model_name_or_path: e/f", "").replace("1, ", ""),
            ("reward_weights", [2.0, 3.0]),
        ),
    ],
)
def test_effective_upstream_value_is_written(write, minimal_text: str, recipe: str, old: str, new: tuple) -> None:
    migration = migrate(write(f"{minimal_text}{old}\n"), recipe)
    assert migration.is_ready, migration.changes
    assert flatten_config(check_text(recipe, migration.text, Path("new.yaml")))[new[0]] == new[1]


@pytest.mark.parametrize(
    ("recipe", "old", "remarked"),
    [
        ("sft", "", {"lr_scheduler_type", "warmup_steps"}),
        ("sft", "lr_scheduler_type: linear", {"warmup_steps"}),
        ("dpo", "warmup_ratio: 0.1", {"lr_scheduler_type", "num_train_epochs"}),
        ("dpo", "warmup_ratio: 0.1\nmax_steps: 10", {"lr_scheduler_type"}),
        ("sft", "lr_scheduler_type: constant", set()),
        ("sft", "lr_scheduler: linear\nwarmup_steps: 0", set()),
        ("reward", "lr_scheduler_type: constant\nmax_steps: 10", {"center_rewards_coefficient"}),
        ("reward", "lr_scheduler_type: constant\nmax_steps: 10\ncenter_rewards_coefficient: 0", set()),
    ],
)
def test_absent_keys_of_other_defaults_are_reported(write, minimal_text: str, recipe: str, old: str, remarked) -> None:
    changes = migrate(write(f"{minimal_text}{old}\n"), recipe).changes
    remark = "".join(change.what for change in changes if "defaults, here and upstream" in change.what)
    keys = load_table(recipe).keys.values()
    assert {key.name for key in keys if f"`{key.name}`" in remark} == remarked


@pytest.mark.parametrize(
    ("recipe", "old", "kept"),
    [
        ("dpo", "use_peft: true\nlora_dropout: 0.05\ndisable_dropout: false", "lora_dropout: 0.05"),
        ("grpo", "reward_funcs: [{a: 1}]", "reward_funcs: [{a: 1}]"),
        ("sft", "max_steps: [1]\nnum_train_epochs: 2", "num_train_epochs: 2"),
        ("sft", "max_steps: {a: 1}\nnum_train_epochs: 2", "num_train_epochs: 2"),
        ("sft", "max_steps: many\nnum_train_epochs: 2", "num_train_epochs: 2"),
    ],
)
def test_value_without_equivalent_needs_review(write, minimal_text: str, recipe: str, old: str, kept: str) -> None:
    migration = migrate(write(f"{minimal_text}{old}\n"), recipe)
    assert not migration.is_ready
    assert kept in migration.text


BLOCKS = [
    "torch_dtype: bfloat16",
    "dataset_mixer:\n  a/b: 1.0",
    "dataset_splits: [train, test]",
    "chat_template: |\n  {{ x }}\n\n  y",
    "max_seq_length: 2048 # why",
    "run_name: >-\n  a\n  b",
    "lora_r: 16",
    "# comment",
    "",
    "warmup_ratio: 0.1",
    "do_eval: true",
    "report_to:\n- wandb\n# after",
    "'tokenizer': a/b",
    "datasets:\n  - path: a/b\n    split: x",
    "seed: 1",
    "zzz: [1,\n  2]",
]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(BLOCKS), unique=True, max_size=8))
def test_migrated_file_has_only_known_keys(tmp_path_factory, blocks: list[str]) -> None:
    path = tmp_path_factory.mktemp("migrate") / "old.yaml"
    path.write_text("model_name_or_path: a/b\noutput_dir: o\n" + "\n".join(blocks) + "\n", encoding="utf-8")
    text, *_ = migrate(path, "sft")
    path.write_text(text, encoding="utf-8")
    problems: list[str] = []
    try:
        check_text("sft", text, path)
    except ConfigError as error:
        problems = [problem.found for problem in error.problems]
    assert all(problem == "`dataset_name` is missing" for problem in problems), text
