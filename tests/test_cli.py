"""The ``recipes`` command: dispatch to subcommands, help, exit codes, imports on demand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes_lib import __version__, cli
from recipes_lib.config.table import RECIPE_NAMES
from recipes_lib.errors import ConfigError, Problem

HEAVY = ("torch", "transformers", "trl", "datasets", "accelerate", "peft", "numpy", "rich", "yaml")


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a subcommand ``echo`` that prints its arguments; ``fail`` raises, ``preempt`` returns 75."""
    (tmp_path / "echo_command.py").write_text(
        "from recipes_lib.errors import ConfigError, Problem\n"
        "def main(arguments):\n"
        "    print(arguments)\n"
        "    if 'fail' in arguments: raise ConfigError(Problem('here', 'wrong'))\n"
        "    return 75 if 'preempt' in arguments else None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, "echo", cli.Command("echo_command:main", "print the arguments"))


@pytest.mark.parametrize("flag", ["-h", "--help", "help"])
def test_help_lists_every_command(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([flag]) == 0
    output = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in output
        assert command.summary in output


def test_help_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help"]) == 0
    assert capsys.readouterr().out == cli.format_help()
    with pytest.raises(SystemExit, match="0"):
        cli.main(["help", "doctor"])
    assert capsys.readouterr().out.startswith("usage: recipes doctor")
    assert cli.main(["help", "docter"]) == 2
    assert "did you mean `recipes doctor`?" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_into_closed_pipe_ends_without_message(flag: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "recipes_lib.cli", flag]
    with os.fdopen(writer, "wb") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (141, b"")


def test_missing_command_prints_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == cli.format_help()


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version_is_package_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([flag]) == 0
    assert capsys.readouterr().out == f"recipes {__version__}\n"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("chekc", "did you mean `recipes check`?"),
        ("docter", "did you mean `recipes doctor`?"),
        ("xyz", "the commands are: "),
    ],
)
def test_unknown_command_suggests_nearest_name(typed: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([typed]) == 2
    error = capsys.readouterr().err
    assert repr(typed) in error
    assert message in error


def test_help_of_commands_is_no_docstring_and_does_not_import_torch() -> None:
    code = (
        "import contextlib, io, json, sys\n"
        "from recipes_lib import cli\n"
        "slow = []\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.suppress(SystemExit):\n"
        "        cli.main([name, '--help'])\n"
        "    assert 'usage' in stdout.getvalue(), name\n"
        "    assert '\\n``' not in stdout.getvalue() and 'Raises' not in stdout.getvalue(), name\n"
        "    if {'torch', 'transformers', 'datasets', 'pyarrow', 'scipy', 'matplotlib'} & sys.modules.keys():\n"
        "        slow.append(name)\n"
        "        break\n"
        "print(json.dumps(slow))\n"
    )
    names = sorted(cli.COMMANDS)
    done = subprocess.run([sys.executable, "-c", code, json.dumps(names)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_missing_configuration_is_an_error_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from recipes_lib import cli\n"
        "for name in ('check', 'plan', 'launch', 'prepare', 'preview', 'clean', 'eval', 'fisher', 'distill-store'):\n"
        "    assert cli.main([name, '--config', 'gone.yaml']) == 2, name\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("gone.yaml: there is no such file") == 9


def test_arguments_and_exit_code_are_passed_through(echo: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["echo", "--config", "a b.yaml"]) == 0
    assert capsys.readouterr().out == "['--config', 'a b.yaml']\n"
    assert cli.main(["echo", "preempt"]) == 75


def test_flags_may_have_dashes(echo: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["echo", "--dry-run", "--a-b=c-d", "x-y", "-z-", "--", "--k-v"]) == 0
    assert capsys.readouterr().out == "['--dry_run', '--a_b=c-d', 'x-y', '-z-', '--', '--k-v']\n"


def test_repeated_config_is_refused(echo: None, capsys: pytest.CaptureFixture[str]) -> None:
    """argparse, by which most commands read ``--config``, would silently use the last one."""
    assert cli.main(["echo", "--config", "a.yaml", "--config=b.yaml"]) == 2
    assert capsys.readouterr().err == "--config: is repeated\n    keep one of the two\n"
    assert cli.main(["echo", "--config", "a.yaml", "--", "--config", "b.yaml"]) == 0


@pytest.mark.parametrize("arguments", [["--token", "TOKEN"], ["--a=TOKEN"], ["--TOKEN"], ["https://me:TOKEN@host"]])
def test_access_token_is_not_repeated(arguments: list[str], echo: None, capsys: pytest.CaptureFixture[str]) -> None:
    token = "hf_" + "a1" * 17
    assert cli.main(["echo", *(word.replace("TOKEN", token) for word in arguments)]) == 2
    captured = capsys.readouterr()
    assert "an argument looks like an access token" in captured.err
    assert token not in captured.out + captured.err


def test_help_of_command_is_that_of_its_flag(echo: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "echo"]) == 0
    assert capsys.readouterr().out == "['--help']\n"


def test_names_of_recipes_are_known() -> None:
    assert set(cli.RECIPES) == set(RECIPE_NAMES)


@pytest.mark.parametrize(
    ("typed", "recipe"),
    [
        (["launch", "sft_long.yaml"], "sft"),
        (["launch", "dpo", "sft_long.yaml"], "dpo"),
        (["launch", "dpo", "--config=sft_long.yaml"], "dpo"),
        (["dpo", "sft_long.yaml"], "dpo"),
        (["train", "sft_long.yaml"], "sft"),
    ],
)
def test_recipe_and_file_may_be_written_without_their_flags(
    typed: list[str], recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sft_long.yaml").write_text("{model_name_or_path: a/b, dataset_name: c/d, output_dir: out}")
    assert cli.main([*typed, "--dry-run", "--learning-rate", "1e-5"]) == 0
    command = capsys.readouterr().err.replace("=", " ")
    assert command.endswith(f"{recipe}.py --config sft_long.yaml --learning_rate 1e-5\n")


@pytest.mark.parametrize("rest", [["--learning_rate", "1e-5", "a.yaml"], ["a.yaml", "b.yaml"]])
def test_only_leading_file_is_taken_as_configuration(rest: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *rest]) == 2
    assert f"{rest[-1]}: is not a flag\n    write `--config FILE`" in capsys.readouterr().err


def test_command_error_is_printed_with_exit_code_2(echo: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["echo", "fail"]) == 2
    assert capsys.readouterr().err == str(ConfigError(Problem("here", "wrong"))) + "\n"


def test_help_does_not_import_heavy_packages() -> None:
    code = (
        "import json, sys; from recipes_lib.cli import main; code = main(['--help']);"
        f"print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]


def test_closed_pipe_ends_command_without_message(tmp_path: Path) -> None:
    (tmp_path / "verbose_command.py").write_text("def main(arguments):\n    print('word ' * 100_000)\n")
    code = (
        "import sys; from recipes_lib import cli;"
        "cli.COMMANDS['verbose'] = cli.Command('verbose_command:main', ''); sys.exit(cli.main(['verbose']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with os.fdopen(writer, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=output, stderr=subprocess.PIPE, check=False, env=environment
        )
    assert done.returncode == 141
    assert done.stderr == b""
    if Path("/dev/full").exists():
        with Path("/dev/full").open("wb") as output:
            done = subprocess.run(
                [sys.executable, "-c", code], stdout=output, stderr=subprocess.PIPE, check=False, env=environment
            )
        assert done.returncode == 2
        assert done.stderr.startswith(b"standard output: cannot be written: No space left on device")


def test_every_command_is_in_one_group_of_help() -> None:
    assert sorted(name for names in cli.GROUPS.values() for name in names) == sorted(cli.COMMANDS)
