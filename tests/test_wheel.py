"""Installed wheel outside a clone: recipes, configurations, pipelines and launch files are in the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.forked import ROOT


@pytest.mark.slow
def test_installed_wheel_runs_from_empty_folder(tmp_path: Path, tiny_model_dir: Path) -> None:
    clone, wheels, site, here = (tmp_path / name for name in ("clone", "wheels", "site", "empty"))
    here.mkdir()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", str(wheels), str(clone)], check=True)
    (wheel,) = wheels.iterdir()
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=here, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout + done.stderr

    def recipes(*words: str) -> str:
        return run("-m", "recipes_lib.cli", *words)

    assert str(site) in run("-c", "import recipes_lib; print(recipes_lib.__file__)")
    # A configuration of the package, with its chat template, and a launch file.
    config = ["--config", "recipes/configs/qwen3-0.6b/sft.yaml"]
    assert "chat_template_path" in recipes("check", *config, "--print-config")
    listed = recipes("run", "recipes/pipelines/iterated_dpo.yaml", "--list")
    assert f"{site}/recipes_lib/share/recipes/dpo.py" in listed
    assert "share/accelerate_configs/fsdp2.yaml" in recipes(
        "launch", *config, "--hardware", "fsdp2", "--num_processes", "1", "--dry_run"
    )
    (here / "chats.jsonl").write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": f"{n}."}]})
            + "\n"
            for n in range(8)
        )
    )
    keys = {
        "model_name_or_path": str(tiny_model_dir), "dataset_name": "chats.jsonl", "max_length": 64, "max_steps": 1,
        "bf16": False, "use_cpu": True, "per_device_train_batch_size": 2, "eval_strategy": "no", "report_to": "none",
    }  # fmt: skip
    stages = {"sft": {"recipe": "sft", "launch": "cpu", "set": keys}}
    (here / "p.yaml").write_text(json.dumps({"output_dir": "out", "stages": stages}))
    assert "done" in recipes("run", "p.yaml")
    script = "from recipes_lib import load_run; print(load_run('out/sft').facts['status'])"
    assert run("-c", script).strip().endswith("done")
    assert {path.name for path in (here / "out").iterdir()} >= {"index.html", "pipeline.json", "sft"}
