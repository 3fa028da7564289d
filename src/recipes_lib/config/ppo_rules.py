"""What must hold between the keys of the stages that learn from answers of their own: PPO, RLOO, GRPO."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Final

from recipes_lib.config.schema import EngineConfig
from recipes_lib.config.settings import Settings
from recipes_lib.errors import Problem

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

_CLIPPED: Final = ("grpo", "dr_grpo", "dapo", "bnpo", "luspo")
_LOSS_OPTIONS: Final = {
    "delta": _CLIPPED,
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), ("sapo",)),
    **dict.fromkeys(("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"), ("vespo",)),
}
"""Options of GRPO's losses, and the losses that read them."""
_ENTROPY_OPTIONS: Final = ("entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target")


def check_rewards(settings: Settings) -> Iterator[Problem]:
    """There is a reward, each has one weight, and answers fit the row; nothing that is compared is random."""
    functions, has_model = settings["reward_funcs"] or [], settings.gives("reward_model_name_or_path")
    num_rewards = len(functions) + has_model
    is_told = any(settings.broken(key) for key in ("reward_funcs", "reward_model_name_or_path"))
    if not num_rewards and not is_told:
        found = "nothing scores the answers: neither `reward_funcs` nor `reward_model_name_or_path` is set"
        yield Problem(settings.name, found, "write `reward_funcs: [package.module:function]`, or name a reward model")
    for function in functions:
        if not _FUNCTION.fullmatch(function):
            found = f"a reward function is not an import path: {function[:60]!r}"
            yield Problem(settings.where("reward_funcs"), found, "write package.module:function")
    weights = settings["reward_weights"]
    if weights is not None and num_rewards and len(weights) != num_rewards:
        found = f"`reward_weights` has {len(weights)} numbers for {num_rewards} rewards"
        remedy = f"write {num_rewards}: the functions in their order, then the reward model"
        yield Problem(settings.where("reward_weights"), found, remedy)
    if settings.gives("reward_model_revision") and not has_model:
        found = "`reward_model_revision` has no effect without `reward_model_name_or_path`"
        yield Problem(settings.where("reward_model_revision"), found, "delete the line, or name the model")
    length, room = settings["response_length"], settings["max_length"]
    if room is not None and room <= length:
        found = f"`max_length` ({room}) leaves no room for a prompt before `response_length` ({length})"
        yield Problem(settings.where("max_length"), found, "raise it: it counts the prompt and its answer")
    if settings["overlong"] in ("truncate", "split"):
        found = f"`overlong: {settings['overlong']}` would ask half a question"
        yield Problem(settings.where("overlong"), found, "write `overlong: drop`, or a larger `max_length`")


def check_ppo(settings: Settings) -> Iterator[Problem]:
    """Options of an adaptive price need its target, and a policy under an adapter is its own critic."""
    if settings.gives("kl_horizon") and not settings.gives("kl_target_per_sequence"):
        found = "`kl_horizon` has no effect: `kl_coef` is fixed"
        yield Problem(settings.where("kl_horizon"), found, "write `kl_target_per_sequence: ...`, or delete the line")
    if settings["push_to_hub"] and settings["hub_strategy"] not in (None, "end"):
        found = f"`hub_strategy: {settings['hub_strategy']}` publishes checkpoints, and those of PPO are no models"
        yield Problem(settings.where("hub_strategy"), found, "write `hub_strategy: end`")
    if settings["use_peft"] and settings["save_critic"]:
        found = "`save_critic` has no effect: the critic is an adapter on the policy's own weights"
        yield Problem(settings.where("save_critic"), found, "delete the line, or train without adapters")


def check_own_reference(settings: Settings) -> Iterator[Problem]:
    """Without its adapter a policy is its own reference."""
    if not settings["use_peft"]:
        return
    if settings["lora_dropout"]:
        found = "`lora_dropout` makes log-probabilities random, and they are compared"
        yield Problem(settings.where("lora_dropout"), found, "write `lora_dropout: 0`")
    if settings["init_lora_weights"] in ("pissa", "olora"):
        found = f"`init_lora_weights: {settings['init_lora_weights']}` leaves no base that could be the reference"
        yield Problem(settings.where("init_lora_weights"), found, "write `init_lora_weights: default`")
    for key in ("adapter_name_or_path", "lora_modules_to_save", "loraplus_lr_ratio"):
        if settings.gives(key):
            found = f"`{key}` is not done in this stage"
            yield Problem(settings.where(key), found, "delete the line; `recipes merge` merges an adapter first")


def check_engine(settings: Settings) -> Iterator[Problem]:
    """One engine samples, its settings are of use, and it can read the policy."""
    engines = {"use_vllm": "vllm_", "use_transformers_continuous_batching": "transformers_continuous_batching_"}
    if all(settings[name] for name in engines):
        found = "`use_vllm` and `use_transformers_continuous_batching` both ask for an engine"
        yield Problem(settings.where("use_vllm"), found, "delete one of the lines")
    for name, prefix in engines.items():
        for key in (field.name for field in dataclasses.fields(EngineConfig) if field.name.startswith(prefix)):
            if settings.gives(key) and not settings[name]:
                found = f"`{key}` has no effect without `{name}: true`"
                yield Problem(settings.where(key), found, "write that line too, or delete this one")
    if settings["use_transformers_continuous_batching"] and settings["attn_implementation"] == "varlen":
        found = "`attn_implementation: varlen` is not known to transformers' continuous batching"
        yield Problem(settings.where("attn_implementation"), found, "write sdpa, or flash_attention_2")
    if settings["use_vllm"] and (settings["load_in_4bit"] or settings["load_in_8bit"]):
        found = "`use_vllm` would merge the adapter into weights of few bits"
        remedy = "train the adapter on full weights, or write `use_transformers_continuous_batching: true` instead"
        yield Problem(settings.where("use_vllm"), found, remedy)


def check_group_loss(settings: Settings) -> Iterator[Problem]:
    """Options of one loss need that loss, and those of an adaptive entropy bonus need it."""
    loss = settings["loss_type"]
    for key, users in _LOSS_OPTIONS.items():
        if settings.gives(key) and loss not in users and not settings.broken("loss_type"):
            found = f"`{key}` has no effect: it belongs to `loss_type: {' or '.join(users)}`"
            yield Problem(settings.where(key), found, "delete the line, or choose that loss")
    for key in _ENTROPY_OPTIONS:
        if settings.gives(key) and not settings["use_adaptive_entropy"]:
            found = f"`{key}` has no effect without `use_adaptive_entropy: true`"
            yield Problem(settings.where(key), found, "write that line too, or delete this one")
