"""PPO compared with RLOO and GRPO at equal numbers of answers and optimizer steps: held-out reward and seconds.

All three are this project's recipes, each in its own process, with the same policy, prompts, rewards, learning rate and
seed. PPO samples one answer to each of ``BATCH`` prompts; the others four answers to each of ``BATCH / 4``. Each makes
four optimizer steps per iteration. The KL coefficients are equal but not comparable: PPO subtracts k1 from the reward
of each token, RLOO from the reward of the answer, GRPO adds k3 to the loss.

python benchmarks/neighbours.py --policy DIR --prompts F --held_out F --reward module:function [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import spread, write_results

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
BATCH = 64
STEPS_PER_BATCH = 4
RECIPE_NAMES: Mapping[str, Mapping[str, Any]] = {
    "ppo": {"num_mini_batches": 2, "num_ppo_epochs": 2, "target_kl": "null", "kl_coef": 0.05},
    "rloo": {"num_generations": 4, "steps_per_generation": 2, "num_iterations": 2, "beta": 0.05},
    "grpo": {"num_generations": 4, "steps_per_generation": 2, "num_iterations": 2, "beta": 0.05},
}
SHARED: Mapping[str, Any] = {
    "per_device_train_batch_size": BATCH // 2,
    "lr_scheduler_type": "constant",
    "adam_beta2": 0.95,
    "num_sample_prompts": 200,
    "eval_steps": 1_000_000,
    "save_strategy": "no",
}


def measure(recipe: str, *, num_answers: int, seed: int, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Train with one recipe on ``num_answers`` answers.

    Args:
        recipe: One of ``RECIPE_NAMES``.
        num_answers: Number of sampled answers, a multiple of ``BATCH``.
        seed: Seed of the run.
        flags: Keys of all recipes: policy, prompts, rewards and others.

    Returns:
        The held-out reward ``before`` and ``after`` training, with the same random numbers, and the ``seconds`` of
        training, without loading and evaluation.
    """
    with tempfile.TemporaryDirectory() as folder:
        steps = num_answers // BATCH * STEPS_PER_BATCH
        given = {**SHARED, **RECIPE_NAMES[recipe], "max_steps": steps, "seed": seed, "output_dir": folder, **flags}
        command = [
            sys.executable,
            str(RECIPES / f"{recipe}.py"),
            *(f"--{name}={value}" for name, value in given.items()),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        record = json.loads((Path(folder) / "run.json").read_text(encoding="utf-8"))
    events = [json.loads(line) for line in lines]
    rewards = [event["eval_reward"] for event in events if "eval_reward" in event]
    seconds = [event["seconds"] for event in events if event["kind"] == "train"]
    figures = {"before": rewards[0], "after": rewards[-1], "seconds": seconds[-1]}
    steps = events[-1]["step"]
    sampled = events[-1].get("num_answers") or record["answers_per_generation"] * steps // STEPS_PER_BATCH
    return {"stage": recipe, "seed": seed, "num_answers": sampled, "num_steps": steps, **figures}


def compare_recipes(
    *, num_answers: int, seeds: Sequence[int], flags: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Train with every recipe once per seed, interleaved; return the runs of each recipe."""
    results: dict[str, list[dict[str, Any]]] = {recipe: [] for recipe in RECIPE_NAMES}
    for seed in seeds:
        for recipe, runs in results.items():
            runs.append(measure(recipe, num_answers=num_answers, seed=seed, flags=flags))
    return results


def main() -> None:
    """Train all recipes and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True, help="folder of the fine-tuned model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--held_out", type=Path, required=True)
    parser.add_argument("--reward", required=True, help="module:function")
    parser.add_argument("--answers", type=int, default=4096, help="answers of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--response_length", type=int, default=256)
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    parser.add_argument("--output", type=Path)
    parser.add_argument("keys", nargs="*", help="KEY=VALUE for all three recipes")
    options = parser.parse_args()
    flags = {
        "model_name_or_path": options.policy,
        "dataset_name": options.prompts,
        "dataset_test_split": options.held_out,
        "reward_funcs": f"[{options.reward}]",
        "response_length": options.response_length,
        "learning_rate": options.learning_rate,
        **dict(key.split("=", 1) for key in options.keys),
    }
    results = compare_recipes(num_answers=options.answers, seeds=options.seeds, flags=flags)
    table = [["", "reward before", "after", "seconds"]]
    table += [
        [recipe, *(spread(runs, name) for name in ("before", "after", "seconds"))] for recipe, runs in results.items()
    ]
    write_results(options.output, f"{options.answers:,} answers each, minimum / median / maximum", table, results)


if __name__ == "__main__":
    main()
