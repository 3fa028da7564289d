"""``recipes demo``: train a small assistant from random weights on the docstrings of this Python, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

from recipes_lib.config.command_flags import CommandParser
from recipes_lib.shipped import RECIPES, find_shipped


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code of the first stage that fails.

    Raises:
        ConfigError: As ``run_demo``.
        DataError: As ``run_demo``.
    """
    options = CommandParser("demo").parse_args(argv)
    from recipes_lib.demo.walkthrough import run_demo  # Imports torch, which `--help` does not need.

    return run_demo(find_shipped(RECIPES / "pipelines" / "demo.yaml").resolve(), options.output_dir)
