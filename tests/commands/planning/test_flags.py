"""Flags are read before anything heavy is imported, and hand on what was asked."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
from recipes_lib import cli
code = cli.main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""


@pytest.mark.parametrize(
    "typed",
    [["plan", "--recipe", "stf"], ["scale", "predict", "--parameters", "many"], ["scale", "fit"]],
    ids=["a recipe that is none", "no number", "no runs"],
)
def test_a_wrong_flag_is_told_without_torch(typed: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, *typed], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
