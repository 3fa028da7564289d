"""Every file and command of a tutorial, in its order, with a small stand-in for its model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.forked import ROOT

STEP = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
NAMES = {"csv": "mine.csv", "yaml": "mine.yaml"}


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "tutorials").glob("*.md")), ids=lambda path: path.stem)
def test_the_page_is_followed_step_by_step(page: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    text = textwrap.dedent(page.read_text(encoding="utf-8").replace("\n   ", "\n"))
    steps = STEP.findall(re.sub(r"HuggingFaceTB/[\w.-]+", str(tiny_model_dir), text))
    assert len(steps) > 3
    for language, body in steps:
        if language in NAMES:
            (tmp_path / NAMES[language]).write_text(body, encoding="utf-8")
            continue
        commands = [line.removeprefix("$ ") for line in body.splitlines()] if language == "console" else []
        calls = [[sys.executable, "-m", "recipes_lib.cli", *shlex.split(line)[1:]] for line in commands]
        for call in calls or [[sys.executable, "-c", body]]:
            if "--config" in call:
                call += ["--bf16", "false", "--use_cpu", "true"]
            done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{shlex.join(call)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
