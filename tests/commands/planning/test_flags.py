"""Flags of planning commands: errors without importing torch, amounts with units."""

from __future__ import annotations

import subprocess
import sys

import pytest

from recipes_lib.commands.planning.flags import _build_plan_parser

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
    ids=["unknown_recipe", "not_a_number", "no_runs"],
)
def test_invalid_flag_does_not_import_torch(typed: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, *typed], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr


@pytest.mark.parametrize(
    ("typed", "number"), [("500", 500), ("500USD", 500), ("$500", 500), ("12h", 12), (" 1e3 ", 1000)]
)
def test_amount_with_unit(typed: str, number: float) -> None:
    assert _build_plan_parser().parse_args(["--budget", typed, "--deadline", typed]).budget == number


def test_amount_without_number_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _build_plan_parser().parse_args(["--budget", "much"])
    assert "--budget" in capsys.readouterr().err
