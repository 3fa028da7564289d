"""Every command of the README, in order, in a fresh clone with a new environment.

Hub models and datasets are replaced by small ones on disk, and trainings make two steps. Commands with a launch file
for GPUs must fail with the message for machines without one, and are then launched on two CPU processes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forked import ROOT
from tests.recipes.test_real_models import build_jobs
from tests.test_docs import FENCE

from recipes_lib.errors import EXIT_DONE

README = (ROOT / "README.md").read_text(encoding="utf-8")
GPT2: Mapping[str, Any] = {
    "model_config": '{"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 128}',
    "max_length": 128,
    "max_tokens": 1024,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "warmup_steps": 1,
    "bf16": "false",
}
"""Keys that replace those of the GPT-2 pretraining: a small model, the trained tokenizer and local texts."""
CONFIG = re.compile(r"--config recipes/configs/(\S+)\.yaml")


def read_commands() -> Iterator[str]:
    """Yield the command lines of the README's console blocks."""
    for _, language, body in FENCE.findall(README):
        if language == "console":
            yield from (line.removeprefix("$ ") for line in body.splitlines() if line.startswith("$ "))


def write_corpus(folder: Path) -> None:
    """Copy Python's standard library as texts, which suffice for the README's vocabulary."""
    folder.mkdir()
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if not {"site-packages", "test", "idlelib"} & set(source.parts) and "test" not in source.stem:
            shutil.copy(source, folder / f"{source.parent.name}_{source.stem}.txt")


def shrink(command: str, stand_in_folder: Path) -> str:
    """Add keys with which a command finishes on a laptop without network; other commands are unchanged."""
    found = CONFIG.search(command)
    if found is None or command.startswith("recipes plan"):
        return command
    name = found[1]
    if name == "gpt2-124m/pretrain":
        # Repeated flags are errors.
        given = "|".join(GPT2)
        return f"{re.sub(rf' --({given}) [^ ]+', '', command)} {_spell(GPT2)}"
    ((_, job),) = build_jobs(stand_in_folder, [name])
    return f"{command} {_spell({key: value for key, value in job['keys'].items() if key != 'config'})}"


def _spell(keys: Mapping[str, Any]) -> str:
    return " ".join(shlex.quote(f"--{key}={value}") for key, value in keys.items())


def run(command: str, clone: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=clone, env=environment, capture_output=True, text=True, check=False, timeout=3600
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the message for machines without a GPU")
def test_commands_of_readme_run_in_order(tmp_path) -> None:
    clone = tmp_path / "a clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    write_corpus(clone / "corpus")
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path)}
    activation = ""
    commands = list(read_commands())
    assert len(commands) > 10
    for command in commands:
        # The clone exists already, and `make test` would run the whole suite.
        if command.startswith(("git clone ", "cd ")) or command == "make test":
            continue
        if "activate" in command:
            # Activation applies to the shell of all later commands.
            activation = f"{command} && "
            continue
        runnable = shrink(command, tmp_path / "stand-ins")
        if "/fsdp2.yaml" in command:
            done = run(activation + command, clone, environment)
            assert done.returncode != EXIT_DONE
            assert "finds no GPU" in done.stderr, done.stderr[-3000:]
        runnable = re.sub(r"accelerate_configs/\w+\.yaml", "accelerate_configs/cpu_ddp.yaml", runnable)
        done = run(activation + runnable, clone, environment)
        sys.stdout.write(f"{done.returncode} {command}\n")
        assert done.returncode == EXIT_DONE, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
