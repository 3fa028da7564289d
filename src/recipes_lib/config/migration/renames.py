"""Upstream keys that are retired, belong to another file, or differ in meaning here.

Renamed or removed are those from transformers 4.40 to 5.23 and TRL 0.8 to 1.16. A version is the first
minor release without the old spelling, read from the released wheels.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from recipes_lib.config.recipes import read_refused
from recipes_lib.config.table import RECIPE_NAMES, Retired, dropped, dropped_at, each, load_table, renamed, undecided

_GONE_5 = "was removed in transformers 5.0"
_LAUNCH = undecided("is hardware, which is not in a recipe", "put it into the accelerate YAML (accelerate_configs/)")
_PREPARED = dropped("belonged to an old data preparation", "delete the line; `recipes prepare` needs no such setting")
_HALF = dropped(_GONE_5, "delete the line; mixed precision is `bf16: true` or `fp16: true`")
_TPU = dropped_at((False, None), _GONE_5, "delete the line")
_PREFERENCE = dropped_at(
    (False, None), "was removed from TRL's DPOConfig", "delete the line; losses are named by `loss_type`"
)
_REMOTE_CODE = undecided("is not read", "pin the model with `model_revision`")
_NAMED: Final = re.compile(r"`(\w+)[`:]")
_MIXTURE = "an entry of `dataset_mixture` is {name, weight, repeat, config, revision, split, format}"

RETIRED: Final[Mapping[str, Retired]] = {
    # transformers
    "evaluation_strategy": renamed("eval_strategy", "transformers 4.51"),
    "warmup_ratio": Retired(
        "was removed in transformers 5.15", "write `warmup_steps: 0.1` for a tenth of the run", "warmup_steps"
    ),
    "no_cuda": renamed("use_cpu", "transformers 5.0"),
    "per_gpu_train_batch_size": renamed("per_device_train_batch_size", "transformers 5.0"),
    "per_gpu_eval_batch_size": renamed("per_device_eval_batch_size", "transformers 5.0"),
    "push_to_hub_model_id": renamed("hub_model_id", "transformers 5.0"),
    "push_to_hub_organization": undecided(_GONE_5, "write `hub_model_id: organization/name`"),
    "torchdynamo": renamed("torch_compile_backend", "transformers 5.0"),
    "adafactor": Retired(
        _GONE_5, "write `optim: adafactor`", "optim", {True: {"optim": "adafactor"}, False: {}, None: {}}
    ),
    "overwrite_output_dir": dropped(
        _GONE_5,
        "delete the line; the same command resumes in `output_dir`, another configuration needs another directory",
    ),
    "logging_dir": dropped(
        "was removed in transformers 5.15", "delete the line; set the environment variable TENSORBOARD_LOGGING_DIR"
    ),
    "save_safetensors": dropped(_GONE_5, "delete the line; everything is saved as safetensors"),
    "group_by_length": dropped("was removed in transformers 5.2", "delete the line; packed rows are all of one length"),
    "include_inputs_for_metrics": dropped(_GONE_5, "delete the line; metrics read the samples (`metrics`)"),
    "include_tokens_per_second": dropped(_GONE_5, "delete the line; metrics.jsonl has tokens_per_second"),
    **each("fp16_backend half_precision_backend fp16_opt_level", _HALF),
    **each("jit_mode_eval use_legacy_prediction_loop past_index", dropped(_GONE_5)),
    "use_ipex": dropped("was removed after transformers 4.51"),
    "use_mps_device": dropped(_GONE_5, "delete the line; an accelerator is used where there is one"),
    "ray_scope": dropped(_GONE_5, "delete the line; set the environment variable RAY_SCOPE"),
    **each("tpu_num_cores tpu_metrics_debug", _TPU),
    **each("fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap mp_parameters tp_size _n_gpu", _LAUNCH),
    "dispatch_batches": dropped("was removed in transformers 4.51"),
    "split_batches": dropped_at(
        (False, None), "was removed in transformers 4.51", "set `per_device_train_batch_size` for one device"
    ),
    # TRL
    "max_seq_length": renamed("max_length", "TRL 0.20"),
    "torch_dtype": renamed("dtype", "TRL 0.27"),
    "use_liger": dropped_at((False, None), "was removed in TRL 0.18", "delete the line; the loss is already chunked"),
    "dataset_train_name": renamed("dataset_train_split", "TRL 0.9"),
    "dataset_test_name": renamed("dataset_test_split", "TRL 0.9"),
    "streaming": renamed("dataset_streaming", "TRL spells it so beside `datasets`"),
    "gradient_checkpointing_use_reentrant": Retired(
        "was removed in TRL 0.27",
        "write `activation_checkpointing_kwargs: {use_reentrant: false}`",
        "activation_checkpointing_kwargs",
        {flag: {"activation_checkpointing_kwargs": {"use_reentrant": flag}} for flag in (True, False)},
    ),
    **each("dataset_batch_size num_of_sequences chars_per_token", _PREPARED),
    "ignore_bias_buffers": dropped_at((False,), "was a debugging switch of DDP", "delete the line"),
    "datasets": Retired("is `dataset_mixture` here", _MIXTURE, "dataset_mixture", {}),
    # alignment-handbook
    "dataset_mixer": Retired("is `dataset_mixture` here", _MIXTURE, "dataset_mixture", {}),
    "dataset_mixer_list": Retired("is `dataset_mixture` here", _MIXTURE, "dataset_mixture", {}),
    "dataset_splits": undecided(
        "is two keys here", "write `dataset_train_split` and `dataset_test_split`, or `split` in the mixture's entries"
    ),
    "dataset_configs": undecided("is `dataset_config` here", "write it, or `config` in the mixture's entries"),
    "tokenizer": renamed("tokenizer_name_or_path", "the name says what it takes"),
    "tokenizer_name": renamed("tokenizer_name_or_path", "the name says what it takes"),
    "hub_model_revision": renamed("hub_revision", "upstream's spelling"),
    "use_flash_attention_2": Retired(
        "was replaced by `attn_implementation`",
        "write `attn_implementation: flash_attention_2`",
        "attn_implementation",
        {True: {"attn_implementation": "flash_attention_2"}, False: {}, None: {}},
    ),
    "chat_template": undecided(
        "is a file here", "save the template as chat_template.jinja and write `chat_template_path: chat_template.jinja`"
    ),
    "preprocessing_num_workers": _PREPARED,
    "text_column": dropped_at(("text", None), "is not needed", "write `dataset_columns: {text: NAME}`"),
    "truncation_side": dropped_at((None, "right"), "is `overlong` here", "`overlong: truncate` keeps the start"),
    "auto_insert_empty_system_msg": dropped_at(
        (False,), "changed the rows in silence", "put system messages into the rows, or into the chat template"
    ),
    **each("base_model_revision model_code_revision", _REMOTE_CODE),
    # adapters and preferences
    "lora_task_type": dropped("follows from the recipe"),
    "bnb_4bit_quant_storage": dropped("follows from the launch file and the precision"),
    "lora_target_parameters": dropped_at((None,), "is not done here", "name layers with `lora_target_modules`"),
    **each(
        "max_prompt_length max_completion_length max_target_length",
        dropped("was removed in TRL 0.28", "delete the line; `max_length` counts the prompt and its longer answer"),
    ),
    **each(
        "generate_during_eval is_encoder_decoder reference_free rpo_alpha label_pad_token_id model_adapter_name "
        "ref_adapter_name force_use_ref_model base_model_attribute_name",
        _PREFERENCE,
    ),
    # TRL's PPO, which it removed in 1.13
    "reward_model_path": renamed("reward_model_name_or_path", "TRL's GRPO spells it so"),
    "local_rollout_forward_batch_size": renamed("per_device_eval_batch_size", "one number for what needs no gradient"),
    "sft_model_path": renamed("model_name_or_path", "the policy starts from it, and the reference is its copy"),
    "vf_coef": dropped("has no effect: the critic has an optimizer of its own", "write `critic_learning_rate`"),
    "kl_estimator": dropped_at(
        ("k1",), "is k1 here: as a reward, k3 and k2 have not the gradient of KL", "delete the line"
    ),
    **each(
        "stop_token stop_token_id",
        dropped("is not needed: every stop token of model, tokenizer and chat template ends an answer"),
    ),
    "total_episodes": undecided("counts answers", "write `num_train_epochs`, or `max_steps` in optimizer steps"),
    "num_sample_generations": dropped("is not needed", "write `num_sample_prompts` and `eval_steps`"),
    "ds3_gather_for_generation": dropped("is not needed: weights are whole, or gathered while answers are sampled"),
}
"""Old spelling -> its replacement."""

RETIRED_VALUES: Final[Mapping[tuple[str, str], str]] = {
    ("optim", "adamw_hf"): "adamw_torch",
    ("optim", "adamw_apex_fused"): "adamw_torch_fused",
    ("train_sampling_strategy", "group_by_length"): "random",
    ("train_sampling_strategy", "batch_rebalance"): "random",
}
"""(key, removed value) -> the value that takes its place."""

MIXTURE_RENAMED: Final[Mapping[str, str]] = {
    "id": "name",
    "path": "name",
    "dataset_name": "name",
    "fraction": "repeat",
    "dataset_config": "config",
    "dataset_revision": "revision",
}
"""Other spellings of the keys of a ``dataset_mixture`` entry."""


def _of_recipe(recipe: str) -> Retired:
    return undecided("is not a key of this recipe", f"use the `{recipe}` recipe, or delete the line")


_ACCELERATE = undecided("is a key of the accelerate YAML", "put it there: accelerate launch --config_file F")
_IN_MIXTURE = undecided("is a key of a `dataset_mixture` entry", "put it inside the entry, next to its `name`")

_OF_DPO = (
    "beta loss_weights f_divergence_type f_alpha_divergence_coef discopop_tau ld_alpha use_weighting "
    "precompute_ref_log_probs precompute_ref_batch_size sync_ref_model ref_model_mixup_alpha ref_model_sync_steps "
    "disable_dropout"
)
_OF_GROUPS = "num_generations steps_per_generation num_iterations scale_rewards epsilon epsilon_high"
_OF_DISTILLATION = "teacher_model_name_or_path teacher_model_revision teacher_model_init_kwargs"
_OF_ACCELERATE = (
    "mixed_precision num_processes num_machines machine_rank main_process_ip main_process_port distributed_type "
    "compute_environment deepspeed_config fsdp_version dynamo_config downcast_bf16 gpu_ids same_network rdzv_backend "
    "accelerate_config"
)

ELSEWHERE: Final[Mapping[str, Retired]] = {
    **each(_OF_DPO, _of_recipe("dpo")),
    **each("center_rewards_coefficient", _of_recipe("reward")),
    **each(_OF_GROUPS, _of_recipe("grpo")),
    **each(_OF_DISTILLATION, _of_recipe("distill")),
    **each(_OF_ACCELERATE, _ACCELERATE),
    **each("weight repeat split revision format", _IN_MIXTURE),
}
"""Keys that belong to another recipe, another file or another level of the file."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """A difference in meaning that a file does not show.

    Attributes:
        where: Affected part of the file.
        there: Previous meaning.
        here: Meaning here.
        advice: What to write for what it was, as a clause; ``None`` where there is nothing to decide.
        keys: It concerns files with one of these keys; none: all files.
        unless: It is settled where one of these is set.
        decisive: A key of the recipes that it concerns.
    """

    where: str
    there: str
    here: str
    advice: str | None = None
    keys: AbstractSet[str] = frozenset()
    unless: AbstractSet[str] = frozenset()
    decisive: str = "output_dir"

    def concerns(self, present: AbstractSet[str], known: AbstractSet[str]) -> bool:
        """Return whether a file with the keys ``present`` leaves it open to a recipe with the keys ``known``."""
        is_there = not self.keys or bool(self.keys & present)
        return self.advice is not None and self.decisive in known and is_there and not self.unless & present

    def __str__(self) -> str:
        return f"{self.where}: {self.here} here, {self.there}; {self.advice}"


_LENGTH: Final = frozenset({"max_length", "max_seq_length"})

MEANINGS: Final = (
    Meaning(
        "chats without `assistant_only_loss`",
        there="older TRL trained on all tokens",
        here="only the assistant's turns are trained on",
        advice="`loss_on: all` does that",
        unless=frozenset({"loss_on"}),
        decisive="loss_on",
    ),
    Meaning(
        "`max_length`, `max_seq_length`",
        there="TRL cut longer examples",
        here="a longer example is an error",
        advice="`overlong: truncate` does that",
        keys=_LENGTH,
        unless=frozenset({"overlong"}),
        decisive="loss_on",
    ),
    Meaning(
        "`max_length`, `max_prompt_length` of pairs",
        there="TRL cut prompts and answers, each to a length of its own",
        here="a prompt with its longer answer has to fit, and is an error if it does not",
        advice="`overlong: drop` leaves such pairs out and counts them",
        keys=_LENGTH | {"max_prompt_length"},
        unless=frozenset({"overlong"}),
        decisive="simpo_gamma",
    ),
    Meaning(
        "`packing: true`",
        there="documents in a row could see each other, by kernel and version",
        here="they never do",
        keys=frozenset({"packing"}),
        decisive="loss_on",
    ),
    Meaning(
        "`gradient_accumulation_steps`",
        there="some versions averaged the losses of micro-batches of unequal length",
        here="a step's loss is the mean over its targets, however it is cut",
        keys=frozenset({"gradient_accumulation_steps"}),
        decisive="loss_on",
    ),
)
"""Differences in meaning that migration reports."""


@functools.cache
def read_known(recipe: str) -> Mapping[str, Retired]:
    """Return all retired spellings of a recipe, with their messages; a corpus has none."""
    if recipe not in RECIPE_NAMES:
        return {}
    keys = load_table(recipe).keys
    known = {key: retired for key, retired in ELSEWHERE.items() if key not in keys} | {
        **RETIRED,
        **read_refused(recipe),
    }
    # A successor that the recipe has not says itself what to do; and no remedy names a key that is refused in turn.
    led = {key: known.get(retired.new or "", retired) for key, retired in known.items()}
    return {
        key: replace(retired, remedy="delete the line") if known.keys() & _NAMED.findall(retired.remedy) else retired
        for key, retired in led.items()
    }
