"""Prompt files and their rendering."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes_lib.errors import ConfigError
from recipes_lib.evaluation.prompt_files import load_prompt_file, render_prompt

FIELDS = {"user": str, "scale": list}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("user: [", "while parsing a flow node, expected the node content"),
        ("- a", "not a mapping"),
        ("", "not a mapping"),
        ("user: 2026-13-45", "is not plain YAML"),
        ("user: x\nusr: y", "unknown field `usr`"),
        ("user: 3", "`user` is a int"),
    ],
)
def test_invalid_prompt_file_is_refused(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "a prompt.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=found) as caught:
        load_prompt_file(path, FIELDS)
    assert caught.value.problems[0].where.startswith(str(path))


def test_missing_prompt_fields_are_none(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("user: é")
    assert load_prompt_file(tmp_path / "p.yaml", FIELDS) == {"user": "é", "scale": None}
    with pytest.raises(ConfigError, match="there is no such file"):
        load_prompt_file(tmp_path / "absent.yaml", FIELDS)


def test_prompt_values_are_not_rendered_as_templates() -> None:
    assert render_prompt("say {{ it }}", "w", {"it": "{{ 7 * 7 }} {% raise %}"}) == "say {{ 7 * 7 }} {% raise %}"
    for template in (
        "{{ absent }}",
        "{{ it",
        "{{ it + 1 }}",
        "{{ 1 / 0 }}",
        "{{ it.__class__.__mro__[1].__subclasses__() }}",
    ):
        with pytest.raises(ConfigError, match="its template fails"):
            render_prompt(template, "w", {"it": "x"})
