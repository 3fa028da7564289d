"""``recipes prepare`` for pairs: tokenise both answers of each once, and say what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from recipes_lib.config.loader import parse_command
from recipes_lib.data.encoding import TokenizerLoader
from recipes_lib.data.pair_audit import PairAudit
from recipes_lib.data.pair_sets import prepare_pairs
from recipes_lib.data.store import PreparedSet


def main(stage: str, argv: Sequence[str], load_tokenizer: TokenizerLoader) -> None:
    """Prepare the pairs of a run and say what is in them.

    Args:
        stage: Name of the recipe.
        argv: Arguments after the command, as the run's script takes them.
        load_tokenizer: Called only when something has to be tokenised.
    """
    parsed = parse_command(stage, argv)
    if isinstance(parsed, str):
        sys.stdout.write(parsed)
        return
    started = time.monotonic()
    prepared = prepare_pairs(parsed, load_tokenizer)
    console = Console()
    console.print(render_summary(prepared))
    state = f"prepared in {time.monotonic() - started:.1f} s" if prepared.is_new else "nothing to do: already prepared"
    console.print(f"{state}\nkey  {prepared.key}\npath {prepared.path}", soft_wrap=True, markup=False, highlight=False)


def render_summary(prepared: PreparedSet) -> Table:
    """What is in a set of pairs, one column for each split."""
    manifest = prepared.manifest
    splits = [name for name in ("train", "eval") if name in manifest]
    audits = [PairAudit(**manifest[split]) for split in splits]
    table = Table("", *splits, title=f"pairs of up to {manifest['max_length']:,} tokens")
    for label, values in (
        ("pairs", [audit.num_pairs for audit in audits]),
        ("prompts", [audit.num_prompts for audit in audits]),
        ("tokens of the prompts", [audit.num_prompt_tokens for audit in audits]),
        ("tokens of the answers", [audit.num_chosen_tokens + audit.num_rejected_tokens for audit in audits]),
        ("longest pair", [audit.length_max for audit in audits]),
        ("left out, too long", [manifest["dropped"].get(split, {}).get("num_overlong", 0) for split in splits]),
    ):
        table.add_row(label, *(f"{value:,}" for value in values))
    for finding in manifest["findings"]:
        if finding["severity"] != "ok":
            table.add_section()
            table.add_row(finding["severity"], "; ".join(filter(None, (finding["found"], finding["remedy"]))))
    return table
