"""``recipes prepare``, ``recipes preview`` and ``recipes report``: prepared data, its preview, and reports of runs."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.loader import choose_recipe, load_for_command
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.files import explain_write_errors

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedTokenizerBase

    from recipes_lib.data.store import PreparedSet


def _load_tokenizer(config: RecipeConfig) -> PreTrainedTokenizerBase:
    from recipes_lib.models.loading import load_tokenizer

    return load_tokenizer(config.model, config.tokens)


def prepare(argv: Sequence[str]) -> None:
    """Prepare the data of a run; if the prepared set exists, no tokenizer is loaded.

    Raises:
        ConfigError: The configuration is invalid.
        DataError: The data cannot be read or tokenised.
    """
    options, overrides = CommandParser("prepare").parse_known_args(argv)
    config = load_for_command(choose_recipe(options.recipe, options.config), overrides, options.config)
    started = time.monotonic()
    summary, is_new, places = _prepare(config)
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(summary)
    console.print(f"prepared in {time.monotonic() - started:.1f} s" if is_new else "nothing to do: already prepared")
    for place in places:
        console.print(place, soft_wrap=True)


def _prepare(config: RecipeConfig) -> tuple[Table, bool, list[str]]:
    """Return a summary of the prepared sets, whether any of them is new, and their paths."""
    load = functools.cache(lambda: _load_tokenizer(config))  # Once, also for several sets.
    if config.recipe == "pretrain":
        from recipes_lib.data.tokens import token_data

        tokens = token_data.prepare_tokens(config, load, num_tokens=config.pretraining.max_tokens)
        named = tokens.record.get("eval_datasets", {}).values()
        places = [f"{source['name']}: {source['path']}" for source in (*tokens.record["sources"], *named)]
        return token_data.render_summary(tokens), tokens.is_new, places
    if config.recipe in ("ppo", "rloo", "grpo"):
        from recipes_lib.data import prompts

        prepared = prompts.prepare_prompts(config, load)
        return prompts.render_summary(prepared), prepared.is_new, _describe(prepared)
    if config.recipe in ("reward", "dpo"):
        from recipes_lib.data.pairs.preference_sets import prepare_pairs as prepare_rows
        from recipes_lib.data.pairs.preference_sets import render_summary
    else:
        from recipes_lib.data.packed.prepared_set import prepare as prepare_rows
        from recipes_lib.data.packed.prepared_set import render_summary
    from recipes_lib.data.sources.mixtures import derive_eval_configs

    prepared = prepare_rows(config, load)
    sets = {
        name: prepare_rows(derived, load)
        for name, derived in derive_eval_configs(config, prepared.manifest["max_length"]).items()
    }
    places = [*_describe(prepared), *(f"{name}: {found.path}" for name, found in sets.items())]
    return render_summary(prepared), any(found.is_new for found in (prepared, *sets.values())), places


def _describe(prepared: PreparedSet) -> list[str]:
    return [f"key  {prepared.key}", f"path {prepared.path}"]


def preview(argv: Sequence[str]) -> None:
    """Show training rows token by token, with the loss mask; optionally as an HTML page.

    Raises:
        ConfigError: A flag is wrong, or the page cannot be written; as ``build_preview``.
        DataError: As ``build_preview``.
    """
    options, overrides = CommandParser("preview").parse_known_args(argv)
    config = load_for_command(choose_recipe(options.recipe, options.config), overrides, options.config)
    from rich.console import Console

    from recipes_lib.data.packed.preview import build_preview, render_text
    from recipes_lib.report.html_pages import write_page

    rows = build_preview(config, _load_tokenizer(config), options.rows)
    console = Console(highlight=False)
    has_colors = console.color_system is not None and not console.no_color
    for row in rows:
        console.print(render_text(row, has_colors=has_colors), end="\n\n", soft_wrap=True)
    if options.html is not None:
        title = f"{config.data.dataset_name or 'dataset_mixture'}: training rows"
        with explain_write_errors(options.html, "name another file after --html"):
            options.html.parent.mkdir(parents=True, exist_ok=True)
            write_page(options.html, "preview", title=title, rows=rows)
        console.print(f"written to {options.html}", soft_wrap=True)


def report(argv: Sequence[str]) -> None:
    """Write ``report.html`` of each run, ``index.html`` of a folder of runs, or a comparison of runs.

    Raises:
        ConfigError: As ``write_comparison``; or ``--output`` is given without ``--compare``.
        DataError: A folder holds no run.
    """
    options = CommandParser("report").parse_args(argv)
    if options.compare:
        from recipes_lib.report.run_comparison import write_comparison

        sys.stdout.write(f"{write_comparison(options.output_dir, options.output or Path('compare.html'))}\n")
        return
    from recipes_lib.report.overview import write_overview
    from recipes_lib.report.page import build_report
    from recipes_lib.report.run_files import is_run

    for folder in options.output_dir:
        is_many = folder.is_dir() and not is_run(folder)
        sys.stdout.write(f"{write_overview(folder) if is_many else build_report(folder)}\n")
