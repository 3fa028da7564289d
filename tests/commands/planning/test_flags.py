"""Flags of planning commands: amounts with units."""

from __future__ import annotations

import pytest

from recipes_lib.config.command_flags import FLAGS, CommandParser, add_flags


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("budget", "500", 500),
        ("budget", "$500", 500),
        ("budget", "500USD", 500),
        ("budget", "500 eur", 500),
        ("budget", "€0.5k", 500),
        ("budget", " 1,000 ", 1000),
        ("deadline", "12", 12),
        ("deadline", "12h", 12),
        ("deadline", "2 days", 48),
        ("deadline", "90min", 1.5),
        ("mfu", "0.4", 0.4),
        ("mfu", "40%", 0.4),
        ("num_rows", "1e4", 10_000),
        ("price_per_gpu_hour", "$2.50", 2.5),
    ],
)
def test_quantity_of_plan_has_optional_unit(flag: str, text: str, value: float) -> None:
    add_flags(parser := CommandParser("plan"), FLAGS["planning"])
    assert getattr(parser.parse_args([f"--{flag}", text]), flag) == pytest.approx(value)


def test_counts_of_scale_have_optional_suffix() -> None:
    options = CommandParser("scale").parse_args(["predict", "--parameters", "7B", "--tokens", "1_000.5M"])
    assert (options.parameters, options.tokens) == (7e9, 1000.5e6)
    assert CommandParser("scale").parse_args(["plan", "--flops", "5.76e23"]).flops == 5.76e23


@pytest.mark.parametrize(
    ("flag", "text"), [("budget", "much"), ("deadline", "2 fortnights"), ("mfu", "1k"), ("mfu", "")]
)
def test_quantity_without_number_or_with_unknown_unit_is_an_error(flag: str, text: str, recipes) -> None:
    assert f"argument --{flag}: {text!r} is not a number" in recipes("plan", f"--{flag}", text, code=2)
