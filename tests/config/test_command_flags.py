"""Misspelt and abbreviated flags of commands."""

from __future__ import annotations

from pathlib import Path

import pytest

import recipes_lib
from recipes_lib.cli import main


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("merge --adpter runs/a", "adapter"),  # Not as missing.
        ("runs --hlep", "help"),
        ("eval compare --outptu scores.json runs/a", "output"),
        ("scale plan --flosp 1e20", "flops"),
        ("plan --gpuss 8xH100", "gpus"),
        ("launch --num_proceses=4 --learning_rate 1e-5", "num_processes"),
        ("launch --num_process 4", "num_processes"),  # An abbreviation.
        ("prepare --configg sft.yaml", "config"),
        ("demo --output build", "output_dir"),  # The name in other programs.
    ],
)
def test_misspelt_flag_is_refused_with_the_nearest(command, meant, capsys) -> None:
    words = command.split()
    flag = next(word for word in words if word.startswith("--")).partition("=")[0]
    assert main(words) == 2
    assert capsys.readouterr().err == f"{flag}: is unknown\n    did you mean `--{meant}`?\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("launch --learning_rat 1e-5", "--learning_rat: unknown key `learning_rat`\n    did you mean `learning_rate`?"),
        ("plan --model gpt2", "--model: unknown key `model`\n    did you mean `model_name_or_path`?"),
    ],
)
def test_misspelt_key_is_explained_by_the_loader(command, message, capsys) -> None:
    assert main(command.split()) == 2
    assert message in capsys.readouterr().err


def test_commands_have_one_parser_class() -> None:
    root = Path(recipes_lib.__file__).parent
    users = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if ".ArgumentParser(" in path.read_text()}
    assert users == set()


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("preview --rows 0", "--rows: is 0\n    write a finite number >= 1"),
        ("sample-pairs --output a.jsonl --num_answers 1", "--num_answers: is 1\n    write a finite number >= 2"),
        (
            "eval compare a b --judge j --prompts p --output_dir o --temperature nan --judge_tokens 0",
            "--judge_tokens: is 0\n    write a finite number >= 1\n--temperature: is nan\n"
            "    write a finite number >= 0",
        ),
        ("report a --output b.html", "--output: needs --compare\n    write it too, or remove this one"),
    ],
)
def test_flags_are_verified_together_when_they_are_parsed(command, problem, capsys) -> None:
    assert main(command.split()) == 2
    assert capsys.readouterr().err == f"{problem}\n"


@pytest.mark.parametrize(
    "words", [["export", "", "out"], ["runs", ""], ["report", ""], ["merge", "--adapter", "a", "--output", ""]]
)
def test_empty_path_is_refused(words, capsys) -> None:
    """As of an unset shell variable: it would be the current folder."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "is an empty text" in capsys.readouterr().err
