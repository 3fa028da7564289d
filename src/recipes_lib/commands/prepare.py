"""``recipes prepare``, ``preview`` and ``report``: data preparation with the tokenizer, and the report of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recipes_lib.config.loader import add_recipe_flags, split_stage
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prepare(argv: Sequence[str]) -> None:
    """Prepare the data of a run, or find them prepared, in which case no tokenizer is imported.

    Raises:
        ConfigError: The stage has nothing to prepare.
    """
    about = "Tokenise, mask and pack the data of a run, or find them prepared."
    parser = argparse.ArgumentParser(prog="recipes prepare", description=about, allow_abbrev=False)
    add_recipe_flags(parser)
    parser.parse_known_args(argv)
    stage, rest = split_stage(argv)
    if stage == "pretrain":
        from recipes_lib.data.tokens.token_data import main
    elif stage in ("reward", "dpo"):
        from recipes_lib.data.pairs.pair_data import main
    elif stage in ("ppo", "rloo", "grpo"):
        found = "there is nothing to prepare: prompts are tokenised when the run starts"
        raise ConfigError(Problem("--stage", found, "look at them with `recipes check` and `recipes preview`"))
    else:
        from recipes_lib.data.packed.prepared_set import main

    main(stage, rest, _load_tokenizer)


def preview(argv: Sequence[str]) -> None:
    """Show what the model will be trained on, token by token."""
    from recipes_lib.data.packed.preview import main

    main(*split_stage(argv), _load_tokenizer)


def report(argv: Sequence[str]) -> None:
    """Make ``report.html`` from the files of a run, finished or not, and say where it is."""
    parser = argparse.ArgumentParser(prog="recipes report", description=report.__doc__)
    parser.add_argument("output_dir", type=Path, help="output directory of a run")
    options = parser.parse_args(argv)
    from recipes_lib.report.page import build_report

    sys.stdout.write(f"{build_report(options.output_dir)}\n")


def _load_tokenizer(config: RecipeConfig) -> PreTrainedTokenizerBase:
    from recipes_lib.models.loading import load_tokenizer

    return load_tokenizer(config.model, config.tokens)
