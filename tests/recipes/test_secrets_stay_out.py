"""Secrets in environment variables appear neither in the output nor in any file of a run."""

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


def find_leaks(folder: Path, *output: str) -> list[str]:
    """Return where the first half of a secret occurs: in file names, file contents or texts."""
    texts = [("output", text.encode()) for text in output]
    texts += [(str(path), str(path).encode() + path.read_bytes()) for path in folder.rglob("*") if path.is_file()]
    return [
        where for where, text in texts for secret in SECRETS.values() if secret[: len(secret) // 2].encode() in text
    ]


@pytest.mark.parametrize(
    ("ending", "keys", "code"),
    [
        ("done", {}, 0),
        # The cosine of infinity, which only the scheduler notices, ends in a traceback.
        ("failed", {"lr_scheduler_kwargs": '{"num_cycles": 1e308}'}, 1),
        ("refused", {"run_name": SECRETS["WANDB_API_KEY"]}, 2),
    ],
)
def test_secrets_are_neither_printed_nor_written(inputs, tmp_path, ending, keys, code):
    keys |= {"max_steps": 2, "report_to": "tensorboard", "output_dir": tmp_path / "run"}
    variables = SECRETS | {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "tracker")}
    keys = recipe_runs.make_keys(inputs, "sft", **keys)
    done = run_script(ROOT / "recipes" / "sft.py", keys, variables=variables, code=code)
    assert ("Traceback" in done.stderr) == (ending == "failed")
    assert find_leaks(tmp_path, done.stdout, done.stderr) == []
    assert (tmp_path / "run" / "run.json").exists() == (ending != "refused")
    if ending == "done":
        assert (tmp_path / "run" / "README.md").exists()
        assert list((tmp_path / "tracker").rglob("events.*"))
        (tmp_path / "run" / "note.txt").write_text(SECRETS["HF_TOKEN"])
        assert len(find_leaks(tmp_path)) == 1  # Control: a planted secret is found.
