"""`recipes completion`: what a shell offers on Tab, asked of the shell itself."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from recipes_lib.commands import completion

ASK = """
COMP_WORDS=({words}); COMP_CWORD={last}; _recipes; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def complete(capsys, *words):
    completion.main(["bash"])
    quoted = " ".join(f"'{word}'" for word in words)
    script = capsys.readouterr().out + ASK.format(words=quoted, last=len(words) - 1)
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    return found.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("recipes", "pub"), ["publish"]),
        (("recipes", "launch", "--recipe", "gr"), ["grpo"]),
        (("recipes", "check", "--gradient_acc"), ["--gradient_accumulation_steps"]),
        (("recipes", "check", "--config", "mine"), []),
    ],
)
def test_bash_completes_commands_recipes_and_keys_and_leaves_the_rest_to_files(capsys, words, found):
    assert complete(capsys, *words) == found


@pytest.mark.parametrize("shell", completion.SCRIPTS)
def test_every_shell_has_a_script_of_all_commands(capsys, shell):
    completion.main([shell])
    script = capsys.readouterr().out
    assert {"check", "score", "distill-store"} <= set(script.replace('"', " ").split())
    assert ("bashcompinit" in script) == (shell == "zsh")
