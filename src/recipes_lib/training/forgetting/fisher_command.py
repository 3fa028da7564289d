"""``recipes fisher``: the diagonal Fisher information of a trained model on its own data, for `ewc_lambda`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.loader import choose_recipe, load_for_command
from recipes_lib.config.schema import ForgettingConfig, ModelConfig, RecipeConfig
from recipes_lib.errors import ConfigError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECIPE_NAMES: Final = ("sft", "pretrain")


def main(argv: Sequence[str]) -> None:
    """Compute the Fisher information on the first training documents of a run, and write it to its output directory.

    The model is that of the output directory, or, if there is none, the start model, which the record then names.

    Raises:
        ConfigError: The recipe is not one of ``RECIPE_NAMES``, or its model cannot be loaded.
        DataError: The data cannot be read, or have no targets.
    """
    options, overrides = CommandParser("fisher").parse_known_args(argv)
    recipe = choose_recipe(options.recipe, options.config)
    if recipe not in RECIPE_NAMES:
        raise ConfigError(
            Problem("--recipe", f"`{recipe}` is not one of {', '.join(RECIPE_NAMES)}", "name such a recipe")
        )
    config = load_for_command(recipe, overrides, options.config)
    compute(config, num_documents=options.num_documents, labels=options.labels)


def compute(config: RecipeConfig, *, num_documents: int, labels: Any) -> None:
    """Compute and write the Fisher information of a run; every process of a launch must call.

    Raises:
        ConfigError: The model cannot be loaded.
        DataError: The data cannot be read, or have no targets.
    """
    from recipes_lib.data.packed.collators import PackedCollator
    from recipes_lib.data.packed.encoding import read_seed
    from recipes_lib.models.attention.kernels import choose_attention
    from recipes_lib.models.heads.loss_head import add_loss_head, verify_loss_head
    from recipes_lib.models.loading import load_causal_lm, load_tokenizer
    from recipes_lib.training.forgetting.fisher import FISHER_FILE, compute_fisher, take_documents, write_fisher
    from recipes_lib.training.layouts.launch_environment import read_launch
    from recipes_lib.training.monitoring.progress import build_progress
    from recipes_lib.training.trainers.arguments import build_autocast, build_training_arguments
    from recipes_lib.training.trainers.reference import hash_weights
    from recipes_lib.training.trainers.trained_model import load_verified_config

    output_dir, launch = Path(config.training["output_dir"]), read_launch()
    chosen = choose_model(config, output_dir)
    config = replace(config, model=chosen, forgetting=ForgettingConfig())  # Without replayed data of earlier runs.
    tokenizer = load_tokenizer(config.model, config.tokens)
    documents = take_documents(read_rows(config, tokenizer, launch.local_rank), num_documents)
    args = build_training_arguments(config, launch, has_eval=False)
    model_config = load_verified_config(config, tokenizer, max(len(each["input_ids"]) for each in documents))
    attention = choose_attention(config.model, model_config, args, packing=False)
    model: Any = load_causal_lm(config.model, attention.implementation)
    weights = hash_weights(model)
    model.to(args.device)
    add_loss_head(model)
    verify_loss_head(model)
    progress = build_progress(is_main=launch.is_main)
    collate = PackedCollator(pad_token_id=tokenizer.pad_token_id, layout=attention.layout)
    with build_autocast(args)():
        fisher = compute_fisher(model, documents, collate, labels=labels, seed=read_seed(config), progress=progress)
    progress.stop()
    if launch.is_main:
        is_here = chosen.model_name_or_path == str(output_dir)
        where = {"model_name_or_path": None if is_here else chosen.model_name_or_path}
        facts = {**where, "model_revision": chosen.model_revision, "labels": labels, "seed": read_seed(config)}
        write_fisher(output_dir, fisher, weights=weights, **facts)
        mean = sum(float(value.sum()) for value in fisher.diagonal.values()) / sum(
            value.numel() for value in fisher.diagonal.values()
        )
        sys.stdout.write(
            f"{fisher.num_documents:,} documents, {fisher.num_tokens:,} {labels} targets; mean {mean:.3e}\n"
            f"path {output_dir / FISHER_FILE}\n"
        )


def choose_model(config: RecipeConfig, output_dir: Path) -> ModelConfig:
    """Return the trained model of a run with its tokenizer, or its start model.

    Raises:
        ConfigError: The run has neither.
    """
    if (output_dir / "config.json").is_file():
        return replace(
            config.model,
            model_name_or_path=str(output_dir),
            model_config=None,
            model_revision=None,
            tokenizer_name_or_path=None,
            tokenizer_revision=None,
        )
    if config.model.model_name_or_path is None:
        where = config.locate("output_dir")
        raise ConfigError(Problem(where, f"{output_dir} has no model yet", "run the recipe first"))
    return config.model


def read_rows(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, local_rank: int) -> Iterable[Mapping[str, Any]]:
    """Return the packed training rows of a run in the order of its first epoch; streams in their own order."""
    if config.recipe == "pretrain":
        from recipes_lib.data.tokens.token_data import prepare_tokens
        from recipes_lib.planning.schedule import count_run_tokens
        from recipes_lib.training.trainers.pretraining_rows import build_rows

        tokens = prepare_tokens(
            config, lambda: tokenizer, local_rank=local_rank, num_tokens=count_run_tokens(config, 1)
        )
        rows = build_rows(config, tokens, 1).train
        return (rows[number] for number in range(len(rows)))
    from recipes_lib.data.packed.training_data import build_train_stream, load_training_data
    from recipes_lib.data.sources.replay_dataset import EpochOrder, read_order_seed

    if config.data.dataset_streaming:
        return build_train_stream(config, tokenizer, epochs=range(1))  # type: ignore[no-any-return]
    import numpy as np

    train: Any = load_training_data(config, tokenizer, local_rank=local_rank).train
    numbers = EpochOrder(len(train), read_order_seed(config)).locate(np.arange(len(train)))
    return (train[int(number)] for number in numbers)
