"""Failure of one rank in a sharded step: the others, which wait for its shards, exit at once with the reason."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.distributed import failing
from tests.distributed.sharding import ROOT
from tests.faults import recipe_runs


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("place", "recipe", "reason"),
    [
        *((place, "sft", f"ArithmeticError: {failing.WORDS}") for place in ("forward", "backward", "update")),
        ("scores", "dpo", f"DivergedError: {failing.WORDS}"),
    ],
)
def test_failure_of_one_rank_in_sharded_step_ends_all(place, recipe, reason, tmp_path) -> None:
    """Otherwise the launcher would kill the other rank after 30 seconds, without a reason."""
    recipe_runs.write_inputs(tmp_path)
    keys = recipe_runs.make_keys(tmp_path, recipe, 2, max_steps=3)
    keys["output_dir"] = tmp_path / "run"
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    command += ["--config_file", str(ROOT / "accelerate_configs" / "fsdp2.yaml"), "--num_processes", "2"]
    command += ["--mixed_precision", "no", "--module", failing.__name__, place, str(ROOT / "recipes" / f"{recipe}.py")]
    command += [f"--{name}={value}" for name, value in keys.items()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=ROOT)
    output = done.stderr + done.stdout
    assert done.returncode == 1, output
    ends_too = f"rank 0 exits: process 1 of this machine ended: {reason}"
    assert ends_too in output, output
    before = output[: output.index(ends_too)]
    assert failing.WORDS in before
    # Only an unexpected exception has a traceback, and only on its rank.
    assert before.count("Traceback") == before.count(", in fail\n") == (recipe == "sft")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], failing.WORDS in record["error"]) == ("failed" if recipe == "sft" else "diverged", True)
