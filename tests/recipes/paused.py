"""Runs a recipe that pauses in a phase: ``python paused.py FOLDER PHASE CALL RANK RECIPE ARGUMENTS...``.

Before the given call of the phase's function, counted from 1, that rank creates ``FOLDER/reached`` and waits for
``FOLDER/go``, so that a test can send a signal at a known moment. The report has no charts, to save time.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

from recipes_lib.report import page

WHERE = {
    # Not ``compute_loss``, which start checks also call.
    "step": ("recipes_lib.training.trainers.recipe_trainer:RecipeTrainer", "training_step"),
    "pairs": ("recipes_lib.training.trainers.recipe_trainer:RecipeTrainer", "training_step"),
    "evaluation": ("recipes_lib.training.evaluation.held_out:EvaluateLoss", "_score"),
    "generation": ("recipes_lib.training.evaluation.samples:_StopTogether", "__call__"),
    "saving": ("recipes_lib.training.trainers.recipe_trainer:RecipeTrainer", "_save_checkpoint"),
    "loading": ("recipes_lib.models.loading", "load_tokenizer"),
    "preparation": ("recipes_lib.data.packed.prepared_set", "_build"),
    "export": ("recipes_lib.publish.final_model", "verify_weights"),
    "adapter export": ("recipes_lib.publish.final_model", "verify_adapter_export"),
    "reference": ("recipes_lib.training.trainers.dpo_trainer", "compute_answer_logps"),
    "sampling": ("recipes_lib.models.generation:SampleByUniforms", "__call__"),
    "scoring": ("recipes_lib.rl.rewards:Rewards", "score"),
    "reading": ("recipes_lib.rl.collect", "Sequences"),
    "policy update": ("recipes_lib.rl.update:Updater", "_compute_policy_loss"),
    "critic update": ("recipes_lib.rl.update:Updater", "_compute_value_loss"),
    "ppo saving": ("recipes_lib.rl.trainer", "stage_state"),
    "ppo samples": ("recipes_lib.rl.monitor", "Sample"),
}


def act_at(phase: str, call: int, act: Callable[[], object]) -> None:
    """Call ``act`` before one call of the phase's function, counted from 1."""
    module, _, kind = WHERE[phase][0].partition(":")
    owner, name = importlib.import_module(module), WHERE[phase][1]
    owner = getattr(owner, kind) if kind else owner
    function = getattr(owner, name)
    num_calls = 0

    def acting(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            act()
        return function(*args, **kwargs)

    setattr(owner, name, acting)


def pause_at(folder: Path, phase: str, call: int) -> None:
    """Pause before one call of the phase's function."""

    def wait() -> None:
        (folder / "reached").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)

    act_at(phase, call, wait)


def main() -> None:
    """Install the pause on the given rank, and run the recipe."""
    folder, phase, call, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    sys.argv = sys.argv[5:]
    if os.environ.get("RANK", "0") == rank:
        pause_at(folder, phase, call)
    page.draw_charts = lambda run, folder: []
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
