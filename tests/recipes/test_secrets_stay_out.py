"""Secrets of the environment are nowhere afterwards: not in what is told, nor in any file that a run leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults import recipe_runs
from tests.forked import ROOT, run_script

SECRETS = {
    "HF_TOKEN": "hf_" + "CanaryOfTheHub" * 3,
    "WANDB_API_KEY": "ca9a12" * 6 + "beef",
    "AWS_SECRET_ACCESS_KEY": "CanaryOfAmazon/+" * 2 + "CanaryEn",
    "OPENAI_API_KEY": "sk-" + "CanaryOfOpenAI" * 3,
    "GITHUB_TOKEN": "ghp_" + "CanaryGitHub" * 3,
}


def run(inputs, tmp_path, *flags):
    keys = recipe_runs.make_keys(inputs, "sft", max_steps=2, report_to="tensorboard", output_dir=tmp_path / "run")
    flags = (*(f"--{name}={value}" for name, value in keys.items()), *flags)
    variables = SECRETS | {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "tracker")}
    return run_script(ROOT / "recipes" / "sft.py", *flags, variables=variables)


def find_leaks(folder: Path, *told: str) -> list[str]:
    """Where a secret stands, in a file's name or bytes or in a text; half of one is one too."""
    texts = [("what was told", text.encode()) for text in told]
    texts += [(str(path), str(path).encode() + path.read_bytes()) for path in folder.rglob("*") if path.is_file()]
    return [
        where for where, text in texts for secret in SECRETS.values() if secret[: len(secret) // 2].encode() in text
    ]


@pytest.mark.parametrize("ending", ["done", "failed", "refused"])
def test_no_secret_is_told_or_written(inputs, tmp_path, ending):
    flags = {
        "done": [],
        # Arguments that only the trainer can know to be wrong end in a traceback.
        "failed": ['--lr_scheduler_kwargs={"num_cycles": "many"}'],
        "refused": [f"--run_name={SECRETS['WANDB_API_KEY']}"],
    }[ending]
    done = run(inputs, tmp_path, *flags)
    assert done.returncode == {"done": 0, "failed": 1, "refused": 2}[ending], done.stderr[-3000:]
    assert ("Traceback" in done.stderr) == (ending == "failed")
    assert find_leaks(tmp_path, done.stdout, done.stderr) == []
    assert (tmp_path / "run" / "run.json").exists() == (ending != "refused")
    if ending == "done":
        assert (tmp_path / "run" / "README.md").exists()
        assert list((tmp_path / "tracker").rglob("events.*"))
        (tmp_path / "run" / "note.txt").write_text(SECRETS["HF_TOKEN"])
        assert len(find_leaks(tmp_path)) == 1  # What is looked for can be found.
