"""Every way a command can end has its exit code and its words."""

from __future__ import annotations

import pytest

from recipes_lib.boundary import run_command
from recipes_lib.errors import ConfigError, DataError, DivergedError, Problem


def raising(error: BaseException):
    def command() -> int | None:
        raise error

    return command


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (75, 75)])
def test_what_a_command_returns_is_the_exit_code(returned: int | None, code: int) -> None:
    assert run_command(lambda: returned) == code


@pytest.mark.parametrize("kind", [ConfigError, DataError])
def test_every_problem_of_a_user_error_is_told_without_a_traceback(kind, capsys: pytest.CaptureFixture[str]) -> None:
    problems = [Problem("sft.yaml:3", "unknown key", "write learning_rate"), Problem("--seed", "not a number")]
    assert run_command(raising(kind(*problems))) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "sft.yaml:3: unknown key\n    write learning_rate\n--seed: not a number\n"


@pytest.mark.parametrize(("error", "code"), [(DivergedError("loss is nan at step 7"), 3), (KeyboardInterrupt(), 130)])
def test_a_stopped_run_says_why_without_a_traceback(error, code, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(raising(error)) == code
    told = capsys.readouterr().err
    assert (str(error) or "interrupted") in told
    assert "Traceback" not in told


def test_anything_else_is_a_bug_and_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(raising(IndexError("list index out of range"))) == 1
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "IndexError: list index out of range" in told
    assert "This is a bug" in told.splitlines()[-1]


def test_a_parser_may_exit_by_itself() -> None:
    with pytest.raises(SystemExit) as exit_:
        run_command(raising(SystemExit(0)))
    assert exit_.value.code == 0
