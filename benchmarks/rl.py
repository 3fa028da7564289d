"""RLOO and GRPO on this library's loop against TRL's own trainers: what they learn, seconds and memory.

python benchmarks/rl.py [--rounds 8] [--steps 160] [--output build/rl.json]

A tiny policy answers with one of two keys, and the first is rewarded (``tests/rl/keys_task.py``): 64 answers at a time,
in groups of four, two passes of two steps; a round is a seed.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import build_parser, compare, run_interleaved, spread, write_results

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.rl import keys_task
from tests.rows import read_events

RECIPE_NAMES = ("rloo", "grpo")


def train_ours(recipe: str, policy: Path, folder: Path, steps: int, seed: int) -> list[float]:
    """Train as the recipe does; return the mean score of each generation."""
    keys = {"max_steps": steps, "seed": seed, "logging_steps": 1, "eval_strategy": "no"}
    keys_task.train(keys_task.build_group_flags(policy, folder / "run", folder / "prompts.jsonl", **keys), recipe)
    return [event["objective/score"] for event in read_events(folder / "run")]


def train_trl(recipe: str, policy: Path, folder: Path, steps: int, seed: int) -> list[float]:
    """As ``train_ours``, by TRL's trainer."""
    import trl
    from datasets import load_dataset

    scores: list[float] = []

    def reward(*, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        found = keys_task.score_first_key(prompts=prompts, completion_ids=completion_ids)
        scores.append(statistics.mean(found))
        return [score - (ids[-1] != keys_task.EOS) for score, ids in zip(found, completion_ids, strict=True)]

    config, trainer = {"rloo": (trl.RLOOConfig, trl.RLOOTrainer), "grpo": (trl.GRPOConfig, trl.GRPOTrainer)}[recipe]
    args = config(
        output_dir=str(folder / "run"), max_steps=steps, seed=seed, per_device_train_batch_size=32, num_generations=4,
        steps_per_generation=2, num_iterations=2, beta=0.02, max_completion_length=keys_task.MAX_ANSWER,
        learning_rate=1e-3, lr_scheduler_type="constant", adam_beta2=0.95, disable_dropout=True, bf16=False,
        use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    rows = load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train")
    trainer(
        model=str(policy), reward_funcs=[reward], args=args, train_dataset=rows,
        processing_class=keys_task.build_tokenizer(),
    ).train()  # fmt: skip
    return scores


def measure(variant: str, recipe: str, steps: int, seed: int) -> dict[str, float]:
    """Train once; the score is the mean of the last quarter of the generations."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = keys_task.write_policy(folder / "policy", seed)
        keys_task.write_prompts(folder / "prompts.jsonl", 2000, seed=77 + seed)
        began = time.perf_counter()
        scores = (train_ours if variant == "ours" else train_trl)(recipe, policy, folder, steps, seed)
        seconds = time.perf_counter() - began
    last = scores[-(len(scores) // 4) :]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"score": statistics.mean(last), "seconds": seconds, "memory": memory}


def main() -> None:
    """Compare, or measure one."""
    parser = build_parser(__doc__, rounds=8)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--measure", nargs=3, metavar=("VARIANT", "RECIPE", "SEED"))
    options = parser.parse_args()
    if options.measure:
        variant, recipe, seed = options.measure
        print(json.dumps(measure(variant, recipe, options.steps, int(seed))))
        return
    common = [sys.executable, __file__, "--steps", str(options.steps), "--measure"]
    names = {(variant, recipe): f"{recipe}, {variant}" for recipe in RECIPE_NAMES for variant in ("ours", "TRL")}
    commands = {name: [*common, variant, recipe, "{round}"] for (variant, recipe), name in names.items()}
    results = run_interleaved(commands, options.rounds)
    table = [
        ["method", "score at the end", "ours less TRL's, mean ± standard error", "seconds", "TRL / ours", "peak GB"]
    ]
    for (variant, recipe), name in names.items():
        ours, theirs = (results[names[one, recipe]] for one in ("ours", "TRL"))
        gaps = [one["score"] - other["score"] for one, other in zip(ours, theirs, strict=True)]
        error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
        told = (f"{statistics.mean(gaps):+.3f} ± {error:.3f}", "1") if variant == "ours" else ("", "")
        ratio = compare(results, "seconds", names["ours", recipe], name) if variant == "TRL" else told[1]
        row = [name, spread(results[name], "score"), told[0], spread(results[name], "seconds", 1), ratio]
        table.append([*row, spread(results[name], "memory")])
    write_results(options.output, "RLOO and GRPO", table, results)


if __name__ == "__main__":
    main()
