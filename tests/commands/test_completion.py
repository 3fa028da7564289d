"""``recipes completion``: candidates that bash computes, and the scripts of all shells."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from recipes_lib.commands import completion

COMPLETE = """
COMP_WORDS=({words}); COMP_CWORD={last}; _recipes; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def complete(capsys, *words):
    completion.main(["bash"])
    quoted = " ".join(f"'{word}'" for word in words)
    script = capsys.readouterr().out + COMPLETE.format(words=quoted, last=len(words) - 1)
    output = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    return output.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "candidates"),
    [
        (("recipes", "pub"), ["publish"]),
        (("recipes", "gr"), ["grpo"]),
        (("recipes", "tr"), ["train"]),
        (("recipes", "check", "--recipe", "cor"), ["corpus"]),
        (("recipes", "clean", "--decontamination_a"), ["--decontamination_action"]),
        (("recipes", "launch", "--recipe", "gr"), ["grpo"]),
        (("recipes", "check", "--gradient_acc"), ["--gradient_accumulation_steps"]),
        (("recipes", "launch", "--hardw"), ["--hardware"]),
        (("recipes", "plan", "--dead"), ["--deadline"]),
        (("recipes", "completion", "--shel"), []),
        (("recipes", "check", "--config", "mine"), []),
    ],
)
def test_bash_completes_commands_recipes_and_keys(capsys, words, candidates):
    assert complete(capsys, *words) == candidates


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_of_each_shell_lists_all_commands(capsys, shell):
    completion.main([shell])
    script = capsys.readouterr().out
    assert {"check", "score", "distill-store"} <= set(script.replace('"', " ").split())
    assert script.startswith("(( $+functions[compdef] )) || { autoload -U compinit") == (shell == "zsh")
    assert ("bashcompinit" in script) == (shell == "zsh")
    with pytest.raises(SystemExit):
        completion.main(["--help"])
    assert f"recipes completion {shell}" in " ".join(capsys.readouterr().out.split())
