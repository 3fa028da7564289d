"""The ``recipes`` command: dispatch to subcommands, help, exit codes, imports on demand."""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.forked import run_python

from recipes_lib import __version__, cli
from recipes_lib.config.table import RECIPE_NAMES
from recipes_lib.errors import ConfigError, Problem

HEAVY = {"torch", "transformers", "trl", "datasets", "accelerate", "peft", "numpy", "rich", "yaml"}


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


INTERRUPTED = """import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "recipes_lib.{}":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize(
    ("module", "command", "printed"),
    [
        ("processes", "from recipes_lib.cli import main", ""),
        ("config.loader", "from recipes_lib.boundary import parse_or_exit; parse_or_exit('sft', [])", "interrupted\n"),
    ],
)
def test_interrupt_during_imports_has_no_traceback(module: str, command: str, printed: str) -> None:
    code = INTERRUPTED.format(module) + command
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, printed)


def test_deleted_working_directory_is_an_error(echo, tmp_path, recipes, monkeypatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "working directory: was deleted" in recipes("echo", code=2)


@pytest.mark.parametrize("flag", ["-h", "--help", "help"])
def test_help_lists_every_command(flag: str, recipes) -> None:
    output = recipes(flag)
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in output
        assert command.summary in output
    assert [line.strip() for line in output.splitlines() if line.startswith("  recipes ")] == [*cli.EXAMPLES]
    assert "recipes COMMAND --help" in output


def test_help_command_shows_help(recipes) -> None:
    assert recipes("help") == cli.format_help()
    assert recipes("help", "doctor").startswith("usage: recipes doctor")
    assert "did you mean `recipes doctor`?" in recipes("help", "docter", code=2)


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_into_closed_pipe_ends_without_message(flag: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "recipes_lib.cli", flag]
    with os.fdopen(writer, "wb") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (141, b"")


def test_missing_command_prints_help_to_stderr_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert capsys.readouterr() == ("", cli.format_help())


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version_is_package_version(flag: str, recipes) -> None:
    assert recipes(flag) == f"recipes {__version__}\n"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("chekc", "did you mean `recipes check`?"),
        ("serve", "load the model of a run: docs/serving.md"),
        ("xyz", "the commands are: "),
    ],
)
def test_unknown_command_suggests_nearest_name(typed: str, message: str, recipes) -> None:
    error = recipes(typed, code=2)
    assert repr(typed) in error
    assert message in error


def test_help_of_commands_is_no_docstring_and_does_not_import_torch() -> None:
    code = (
        "import argparse, contextlib, io, sys\n"
        "from recipes_lib import cli\n"
        "add_argument = argparse._ActionsContainer.add_argument\n"
        "def add_checked(container, *names, **given):\n"
        "    action = add_argument(container, *names, **given)\n"
        "    if action.help: argparse.HelpFormatter('')._expand_help(action)\n"
        "    return action\n"
        # As Python 3.14, which formats the help of a flag when the flag is added.
        "argparse._ActionsContainer.add_argument = add_checked\n"
        "for name in sys.argv[1:]:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.suppress(SystemExit):\n"
        "        cli.main([*name.split(), '--help'])\n"
        "    assert f'usage: recipes {name}' in stdout.getvalue(), name\n"
        "    described = stdout.getvalue().split('\\n\\n')[1]\n"
        "    assert not described.startswith(('options', 'positional')), name\n"
        "    assert '\\n``' not in stdout.getvalue() and 'Raises' not in stdout.getvalue(), name\n"
        "    heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'scipy', 'matplotlib'}\n"
        "    assert not heavy & sys.modules.keys(), name\n"
    )
    run_python(code, *sorted(cli.COMMANDS), "scale fit", "scale predict")


def test_invalid_arguments_are_an_error_before_torch_is_imported() -> None:
    readers = ("check", "plan", "launch", "prepare", "preview", "clean", "eval", "fisher", "distill-store")
    invalid = {f"{name} --config gone.yaml": "gone.yaml: there is no such file" for name in readers}
    invalid |= {
        "plan --recipe stf": "there is no recipe 'stf'",
        "scale predict --parameters many": "'many' is not a number",
        "scale fit": "the following arguments are required",
    }
    code = (
        "import contextlib, io, json, sys\n"
        "from recipes_lib import cli\n"
        "for words, message in json.loads(sys.argv[1]).items():\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as stderr:\n"
        "        try: assert cli.main(words.split()) == 2, words\n"
        "        except SystemExit as ended: assert ended.code == 2, words\n"
        "    assert message in stderr.getvalue(), stderr.getvalue()\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    run_python(code, json.dumps(invalid))


def test_arguments_and_exit_code_are_passed_through(echo: None, recipes) -> None:
    assert recipes("echo", "a.yaml", "--config", "a b.yaml") == "['a.yaml', '--config', 'a b.yaml']\n"
    recipes("echo", "preempt", code=75)


def test_flags_may_have_dashes(echo: None, recipes) -> None:
    words = ["--dry_run", "--a_b=c-d", "x-y", "-z-", "--", "--k-v"]
    assert recipes("echo", "--dry-run", "--a-b=c-d", *words[2:]) == f"{words}\n"


def test_repeated_config_is_refused(echo: None, recipes) -> None:
    """argparse, by which most commands read ``--config``, would silently use the last one."""
    message = "--config: is repeated\n    keep one of the two\n"
    assert recipes("echo", "--config", "a.yaml", "--config=b.yaml", code=2) == message
    recipes("echo", "--config", "a.yaml", "--", "--config", "b.yaml")


@pytest.mark.parametrize("arguments", [["--token", "TOKEN"], ["--a=TOKEN"], ["--TOKEN"], ["https://me:TOKEN@host"]])
def test_access_token_is_not_repeated(arguments: list[str], echo: None, recipes) -> None:
    token = "hf_" + "a1" * 17
    message = recipes("echo", *(word.replace("TOKEN", token) for word in arguments), code=2)
    assert "an argument looks like an access token" in message
    assert token not in message


def test_help_of_command_is_that_of_its_flag(echo: None, recipes) -> None:
    assert recipes("help", "echo") == "['--help']\n"


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
def test_recipe_and_file_may_be_written_without_their_flags(typed, recipe, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sft_long.yaml").write_text("{model_name_or_path: a/b, dataset_name: c/d, output_dir: out}")
    assert cli.main([*typed, "--dry-run", "--learning-rate", "1e-5"]) == 0
    # Split like a shell: the path of a clone may contain characters that are quoted.
    script, *flags = shlex.split(capsys.readouterr().err.replace("=", " "))[-5:]
    assert (Path(script).name, flags) == (f"{recipe}.py", ["--config", "sft_long.yaml", "--learning_rate", "1e-5"])


def test_misspelt_recipe_is_the_only_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "sfft", "a.yaml"]) == 2
    assert capsys.readouterr().err == "--recipe: there is no recipe 'sfft'\n    did you mean `sft`?\n"


@pytest.mark.parametrize("rest", [["--learning_rate", "1e-5", "a.yaml"], ["a.yaml", "b.yaml"], ["a.txt"]])
def test_only_leading_file_is_taken_as_configuration(rest: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *rest]) == 2
    assert f"{rest[-1]}: is not a flag" in capsys.readouterr().err


def test_command_error_is_printed_with_exit_code_2(echo: None, recipes) -> None:
    assert recipes("echo", "fail", code=2).endswith(f"\n{ConfigError(Problem('here', 'wrong'))}\n")


def test_help_does_not_import_heavy_packages() -> None:
    run_python(
        f"import sys; from recipes_lib.cli import main; main(['--help']); assert not {HEAVY} & sys.modules.keys()"
    )


def test_closed_pipe_ends_command_without_message(tmp_path: Path) -> None:
    (tmp_path / "verbose_command.py").write_text("def main(arguments):\n    print('word ' * 100_000)\n")
    code = (
        "import sys; from recipes_lib import cli;"
        "cli.COMMANDS['verbose'] = cli.Command('verbose_command:main', ''); sys.exit(cli.main(['verbose']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    run = functools.partial(subprocess.run, [sys.executable, "-c", code], stderr=subprocess.PIPE, check=False)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with os.fdopen(writer, "wb") as output:
        done = run(stdout=output, env=environment)
    assert (done.returncode, done.stderr) == (141, b"")
    if Path("/dev/full").exists():
        with Path("/dev/full").open("wb") as output:
            done = run(stdout=output, env=environment)
        assert done.returncode == 2
        assert done.stderr.startswith(b"standard output: cannot be written: No space left on device")


def test_every_command_is_in_one_group_of_help() -> None:
    assert sorted(name for names in cli.GROUPS.values() for name in names) == sorted(cli.COMMANDS)
