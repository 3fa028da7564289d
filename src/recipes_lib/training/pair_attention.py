"""How the two answers of a pair stand beside each other in a batch, and by which kernel they are computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase, TrainingArguments

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.pair_collator import PairCollator, PairLayout
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.attention import choose_attention, prove_isolation
from recipes_lib.models.shared_prompt import prove_shared_prompt, supports_shared_prompt


@dataclass(frozen=True, slots=True)
class PairAttention:
    """What to load the model with, and how to lay pairs out.

    Attributes:
        implementation: ``attn_implementation``.
        layout: As ``PairCollator``.
        packing: Whether several documents share a row.
        reason: Why prompts are not shared, or pairs not packed; empty where they are, or where that was asked for.
    """

    implementation: str
    layout: PairLayout
    packing: bool = True
    reason: str = ""


def choose_pair_attention(
    config: RecipeConfig, model_config: PreTrainedConfig, args: TrainingArguments, *, max_length: int
) -> PairAttention:
    """Choose the layout that computes least and that the model can take, as far as its configuration tells.

    Args:
        config: The run; ``shared_prompt`` asks for one copy of each prompt or forbids it.
        model_config: Of the model.
        args: Device and precision.
        max_length: Tokens of the longest prompt with one answer.

    Raises:
        ConfigError: ``shared_prompt`` is true and cannot be; or the kernel cannot be had.
    """
    obstacle, reason = "", None
    try:
        choice = choose_attention(config.model, model_config, args, packing=True)
    except ConfigError as error:
        choice = choose_attention(config.model, model_config, args, packing=False)
        obstacle = error.problems[0].found
    is_flat = choice.layout == "flat"
    if config.preference.shared_prompt is not False:
        reason = supports_shared_prompt(model_config, choice.implementation, max_length=max_length)
        if reason is None:
            return PairAttention(choice.implementation, "shared_flat" if is_flat else "shared")
        if config.preference.shared_prompt:
            raise _refuse(config, reason)
    layout: PairLayout = "flat" if is_flat and not obstacle else "separate"
    return PairAttention(choice.implementation, layout, packing=not obstacle, reason=reason or obstacle)


def prove_pair_attention(
    config: RecipeConfig, attention: PairAttention, model: Any, *, max_length: int = 0
) -> PairAttention:
    """Prove on the loaded model that answers and pairs do not see each other; fall back where they do.

    Args:
        config: The run.
        attention: From ``choose_pair_attention``.
        model: As it will be trained, or a reference.
        max_length: Tokens of the longest prompt with one answer, where ``attention`` was chosen for another model.

    Raises:
        ConfigError: ``shared_prompt`` is true and leaks; or documents see each other, and the kernel takes no others.
    """
    if attention.layout.startswith("shared"):
        reason = supports_shared_prompt(model.config, attention.implementation, max_length=max_length)
        reason = reason or prove_shared_prompt(model)
        if reason is None:
            return attention
        if config.preference.shared_prompt:
            raise _refuse(config, reason)
        is_flat = attention.layout == "shared_flat"
        attention = replace(attention, layout="flat" if is_flat else "separate", reason=reason)
    if attention.packing:
        try:
            prove_isolation(model, "flat" if attention.layout == "flat" else "rows")
        except ConfigError as error:
            if attention.layout == "flat":
                where = config.provenance.get("attn_implementation", "attn_implementation")
                raise ConfigError(Problem(where, error.problems[0].found, "use sdpa or eager")) from error
            # Alone in its row, a document has nobody to see.
            attention = replace(attention, packing=False, reason=attention.reason or error.problems[0].found)
    return attention


def build_pair_collator(tokenizer: PreTrainedTokenizerBase, attention: PairAttention) -> PairCollator:
    """Build what makes batches of the proved layout."""
    return PairCollator(pad_token_id=tokenizer.pad_token_id, layout=attention.layout, packing=attention.packing)


def _refuse(config: RecipeConfig, reason: str) -> ConfigError:
    where = config.provenance.get("shared_prompt", "shared_prompt")
    return ConfigError(Problem(where, f"prompts cannot be shared: {reason}", "delete the line, or write false"))
