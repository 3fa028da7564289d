"""The training method of a file of TRL or alignment-handbook: from its keys, and from the words in its names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from recipes_lib.config.recipes import PREFERENCE_LOSSES
from recipes_lib.config.table import STAGES, load_table
from recipes_lib.errors import ConfigError, Problem

_OF_TEXT: Final = ("sft", "lora", "distill", "pretrain")
_OF_GROUPS: Final = ("grpo", "rloo")
_OF_PPO: Final = ("ppo", "rloo")
_OF_DPO: Final = ("dpo",)

_STAGES_OF_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("teacher_model_name_or_path", "lmbda", "seq_kd"), ("distill",)),
    **dict.fromkeys(("rloo_k", "reward_clip_range"), ("rloo",)),
    **dict.fromkeys(("num_ppo_epochs", "kl_coef", "cliprange", "whiten_rewards", "total_episodes"), _OF_PPO),
    **dict.fromkeys(("vf_coef", "cliprange_value", "value_model_path"), ("ppo",)),
    **dict.fromkeys(("num_generations", "steps_per_generation", "num_iterations", "scale_rewards"), _OF_GROUPS),
    **dict.fromkeys(("reward_funcs", "reward_model_path", "reward_model_name_or_path"), (*_OF_GROUPS, "ppo")),
    **dict.fromkeys(("precompute_ref_log_probs", "f_divergence_type", "rpo_alpha", "reference_free"), _OF_DPO),
    **dict.fromkeys(("ref_model_name_or_path", "use_weighting", "ld_alpha", "loss_weights"), _OF_DPO),
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), _OF_DPO),
    "center_rewards_coefficient": ("reward",),
    "beta": ("dpo", *_OF_GROUPS, "distill"),
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss", "dataset_text_field", "packing"), _OF_TEXT),
}
"""Key -> the stages that it may belong to, the likeliest first."""
_ADAPTER_KEYS: Final = ("use_peft", "load_in_4bit", "load_in_8bit")
_NAMES_OF_RUNS: Final = ("output_dir", "hub_model_id", "run_name")

_STAGE_OF_WORDS: Final[Mapping[str, str]] = {
    **{stage: stage for stage in STAGES if stage != "lora"},
    **dict.fromkeys(("cpt", "pretraining"), "pretrain"),
    **dict.fromkeys(("orpo", "simpo", "kto"), "dpo"),
    **dict.fromkeys(("gkd", "distillation"), "distill"),
    "rm": "reward",
    "gspo": "grpo",
}
_LOSSES: Final = ("orpo", "simpo", "kto")
"""Words that name a loss of DPO."""
_NOT_HERE: Final = {
    *("bco", "cpo", "gold", "nash", "online", "prm", "sdft", "sdpo", "ssd", "tpo", "xpo"),
    *(set(_LOSSES) - set(PREFERENCE_LOSSES)),
}
"""Methods of TRL that no recipe trains."""


class Method(NamedTuple):
    """What a file trains.

    Attributes:
        stage: The recipe that does.
        loss_type: The loss that its name asks for where its keys say nothing.
        why: What says so; empty if nothing does.
        doubt: What the stage would make of it that it is not; empty if all goes together.
    """

    stage: str
    loss_type: str | None
    why: str
    doubt: str


def infer_method(names: Sequence[str], values: Mapping[str, Any], stage: str | None = None) -> Method:
    """Return the method of a file.

    Keys decide; where they leave several stages possible, the words of its names do.

    Args:
        names: Of the file and its folder, the most telling first.
        values: Its keys and plain values.
        stage: What the user says it is; ``None`` to infer it.

    Raises:
        ConfigError: It is a method that no recipe trains, and the user does not say what to make of it.
    """
    runs = [str(values[key]).rstrip("/").rpartition("/")[2] for key in _NAMES_OF_RUNS if values.get(key)]
    told = [(name, word) for name in (*names, *runs) for word in re.split("[^a-z]+", name.lower())]
    named = [(name, word) for name, word in told if word in _STAGE_OF_WORDS or (word in _NOT_HERE and name in names)]
    unknown = next((word for name, word in named if name == named[0][0] and word in _NOT_HERE), None)
    if unknown and stage is None:
        found = f"the name {named[0][0]!r} says {unknown.upper()}, which no recipe trains"
        raise ConfigError(Problem("--migrate", found, "write `--stage` if the file is of another method all the same"))
    keys, possible = _narrow(values)
    name, word = next((pair for pair in named if _STAGE_OF_WORDS.get(pair[1]) in possible), ("", ""))
    inferred = _STAGE_OF_WORDS[word] if word else possible[0] if keys else "sft"
    adapters = [key for key in _ADAPTER_KEYS if values.get(key) is True]
    if inferred == "sft" and (adapters or {"lora", "qlora"} & {word for _, word in told}):
        inferred = "lora"
    why = [repr(name)] * bool(name) + [f"`{key}`" for key in (keys + adapters)[:3]]
    loss = word if word in _LOSSES and (stage or inferred) == "dpo" and not values.get("loss_type") else None
    return Method(stage or inferred, loss, ", ".join(why), _doubt(stage or inferred, keys, possible, adapters))


def _narrow(values: Mapping[str, Any]) -> tuple[list[str], Sequence[str]]:
    """Return the keys that tell the stage, and the stages that they leave possible, the likeliest first."""
    telling = {key: stages for key, stages in _STAGES_OF_KEYS.items() if values.get(key) is not None}
    losses = values.get("loss_type")
    for loss in losses if isinstance(losses, list) else [losses]:
        if loss in PREFERENCE_LOSSES:
            telling["loss_type"] = ("dpo",)
        elif loss in load_table("grpo").keys["loss_type"].schema["enum"]:
            telling["loss_type"] = _OF_GROUPS
    keys: list[str] = []
    possible: Sequence[str] = STAGES
    for key, stages in telling.items():
        both = [stage for stage in (possible if keys else stages) if stage in stages]
        if both:
            keys, possible = [*keys, key], both
    return keys, possible


def _doubt(stage: str, keys: Sequence[str], possible: Sequence[str], adapters: Sequence[str]) -> str:
    if keys and stage not in possible:
        told = ", ".join(f"`{key}`" for key in keys[:3])
        return f"{told} belong to {' or '.join(possible)}, and the stage is {stage}: it would be another method"
    if adapters and "use_peft" not in load_table(stage).keys:
        return f"`{adapters[0]}` trains an adapter, and the stage {stage} has none: it would be another method"
    return ""
