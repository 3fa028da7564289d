"""Sections of ``recipes check``: facts, problems, and dependencies on earlier sections."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console
from tests.training.pretraining import build_config

from recipes_lib.errors import DataError, Problem
from recipes_lib.inspection.recipe_checks import PretrainInspection
from recipes_lib.training.layouts.launch_environment import plan_launch


def test_section_prints_facts_or_problems_or_nothing(tmp_path, tiny_tokenizer_dir) -> None:
    output = io.StringIO()
    config = build_config(tmp_path, tiny_tokenizer_dir)
    inspection = PretrainInspection(config, plan_launch(None, 1), Console(file=output, width=200, highlight=False))
    with inspection.section("silent"):
        pass
    with inspection.section("sound") as report:
        report("a fact")
    problem = Problem("file:3", "wrong", "fix it")
    with inspection.section("broken") as report:
        report("another fact")
        raise DataError(problem)
    text = output.getvalue()
    assert "silent" not in text
    assert "✓ sound\n    a fact" in text
    assert "✗ broken\n    another fact\n    file:3: wrong" in text
    assert inspection.problems == [problem]


def test_section_after_failed_requirement_is_silent(tmp_path, tiny_tokenizer_dir) -> None:
    output = io.StringIO()
    config = build_config(tmp_path, tiny_tokenizer_dir, tokenizer_name_or_path=tmp_path)
    inspection = PretrainInspection(config, plan_launch(None, 1), Console(file=output, width=200, highlight=False))
    inspection.run()
    assert [problem.where for problem in inspection.problems] == ["tokenizer_name_or_path"]
    assert "data\n" not in output.getvalue()


def test_key_of_file_named_derived_counts_as_given(tmp_path, tiny_tokenizer_dir) -> None:
    config = build_config(tmp_path, tiny_tokenizer_dir)
    places = {"seed": "derived/sft.yaml:3", "bf16": "--bf16", "eval_steps": "derived: why", "optim": "default"}
    inspection = PretrainInspection(replace(config, provenance=places), plan_launch(None, 1), Console())
    lines: list[str] = []
    inspection.check_keys(lines.append)
    assert "2 keys given, 4 in effect" in lines[0]
