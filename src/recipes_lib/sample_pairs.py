"""``recipes sample-pairs``: let a policy answer prompts several times, and keep the best and the worst of each."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes_lib.config.loader import parse_command
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem

if TYPE_CHECKING:
    from recipes_lib.rl.collect import Collector


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: A flag or the configuration is wrong, or the file is of other pairs.
        DataError: The prompts cannot be read.
    """
    parser = argparse.ArgumentParser(prog="recipes sample-pairs", description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="file of the pairs, JSON Lines")
    parser.add_argument("--num_answers", type=int, default=4, help="answers to each prompt (default: 4)")
    parser.add_argument("--config", metavar="F", help="a recipe of PPO; further --key value flags override it")
    options, overrides = parser.parse_known_args(argv)
    if options.num_answers < 2:
        raise ConfigError(Problem("--num_answers", f"a pair takes two answers, not {options.num_answers}"))
    config = parse_command("ppo", [*(["--config", options.config] if options.config else []), *overrides])
    if isinstance(config, str):
        sys.stdout.write(f"{config}\n")
        return
    sys.stdout.write(f"{options.output}: {write_pairs(config, options.output, options.num_answers)}\n")


def write_pairs(config: RecipeConfig, output: Path, num_answers: int) -> str:
    """Write the pairs of a policy to a file, or those that are missing there, and return what it holds, in a line.

    Args:
        config: A recipe of PPO: its model is the policy; prompts, rewards and sampling are as there.
        output: The file.
        num_answers: To each prompt.

    Raises:
        ConfigError: As ``load_policy``, ``load_rewards`` and ``RowFile``.
        DataError: As ``load_prompt_data``.
    """
    from transformers.utils.logging import disable_progress_bar

    from recipes_lib.data.prompts import load_prompt_data
    from recipes_lib.data.row_file import RowFile
    from recipes_lib.data.store import compute_key
    from recipes_lib.models.attention import choose_attention
    from recipes_lib.models.generation import set_stop_tokens
    from recipes_lib.models.loading import load_model_config, load_tokenizer
    from recipes_lib.rl.answering import build_collector, hold_policy
    from recipes_lib.rl.pairs import PairCounts, sample_pairs
    from recipes_lib.rl.rewards import load_rewards
    from recipes_lib.training.arguments import build_training_arguments
    from recipes_lib.training.launch import read_launch
    from recipes_lib.training.policy import load_policy
    from recipes_lib.training.progress import build_progress

    disable_progress_bar()  # type: ignore[no-untyped-call]
    launch = read_launch()
    tokenizer = load_tokenizer(config.model, config.tokens)
    prompts = load_prompt_data(config, tokenizer)
    args = build_training_arguments(config, launch, has_eval=False)
    rewards = load_rewards(config.rewards, device=str(args.device))
    attention = choose_attention(config.model, load_model_config(config.model)[0], args, packing=False)
    policy = load_policy(config, attention.implementation, args, launch)
    stop_ids = set_stop_tokens(policy, tokenizer, prompts.terminators)
    models = hold_policy(policy.to(args.device), stop_ids)
    progress = build_progress(is_main=True)
    collector = build_collector(config, args, models, rewards, tokenizer, progress, lambda: None, prompts.max_length)
    facts = {"prompts": prompts.record["fingerprint"], "num_answers": num_answers, "stop_ids": stop_ids}
    tokens = [prompt.input_ids for prompt in prompts.train]
    key = compute_key({**facts, "tokens": tokens, **describe_sampling(config, collector)})
    file = RowFile(output, key, PairCounts(), what="pairs of another policy, other prompts, rewards or settings")
    file.write(sample_pairs(collector, prompts.train, num_answers, file.counts))
    return file.counts.describe()


def describe_sampling(config: RecipeConfig, collector: Collector) -> dict[str, Any]:
    """Return what decides answers and scores besides the prompts, as JSON values."""
    from recipes_lib.models.scoring import read_reward_statistics
    from recipes_lib.training.arguments import resolve_precision
    from recipes_lib.training.reference import hash_weights

    rewards = collector.rewards
    model = None
    if rewards.model is not None:
        model = [hash_weights(rewards.model.model), read_reward_statistics(rewards.model.model)]
    return {
        "policy": hash_weights(collector.models.policy),
        "reward_model": model,
        "functions": {name: _read_source(function) for name, function in rewards.functions.items()},
        "weights": list(rewards.weights),
        "response_length": config.rewards.response_length,
        "temperature": config.rewards.temperature,
        "seed": collector.seed,
        "precision": resolve_precision(config),
    }


def _read_source(function: Any) -> str:
    """The text of the file that a function is in; its name where it has none."""
    try:
        return inspect.getsource(inspect.getmodule(function) or function)
    except (OSError, TypeError):
        return repr(function)
