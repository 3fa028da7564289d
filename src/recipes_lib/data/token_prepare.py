"""``recipes prepare`` for pretraining: tokenise every source once, and say what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from recipes_lib.config.loader import parse_command
from recipes_lib.data.encoding import TokenizerLoader
from recipes_lib.data.token_data import TokenData, prepare_tokens


def main(stage: str, argv: Sequence[str], load_tokenizer: TokenizerLoader) -> None:
    """Prepare the tokens of a run and say what is in them.

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
    tokens = prepare_tokens(parsed, load_tokenizer, num_tokens=parsed.pretraining.max_tokens)
    console = Console()
    console.print(render_summary(tokens))
    state = f"prepared in {time.monotonic() - started:.1f} s" if tokens.is_new else "nothing to do: already prepared"
    console.print(state, highlight=False)
    for source in tokens.record["sources"]:
        console.print(f"{source['name']}: {source['path']}", soft_wrap=True, markup=False, highlight=False)


def render_summary(tokens: TokenData) -> Table:
    """What is in the tokens of a run, one line for each source and side."""
    table = Table("source", "share", "documents", "tokens", title="tokens to train on")
    for source, weight in zip(tokens.train, tokens.weights, strict=True):
        table.add_row(source.name, f"{weight:.1%}", f"{source.num_documents:,}", f"{source.num_tokens:,}")
    for name, source in tokens.eval.items():
        table.add_row(f"held out of {name}", "", f"{source.num_documents:,}", f"{source.num_tokens:,}")
    return table
