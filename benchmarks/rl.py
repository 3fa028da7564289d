"""PPO, RLOO and GRPO in this library's loop; RLOO and GRPO compared with TRL's trainers: scores, time and memory.

python benchmarks/rl.py [--rounds 8] [--steps 160] [--wide] [--output build/rl.json]

A tiny policy answers with one of two keys, and the first is rewarded (``tests/rl/keys_task.py``): 64 answers per
iteration, in groups of four except in PPO, two epochs of two steps; each round is a seed. The first iteration is not
timed. ``--wide``: a random policy with a vocabulary of 32,768 samples 32 answers of 256 tokens per iteration, to
compare memory; without continuous batching, which takes minutes per iteration on a CPU.
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
BATCHING = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": "{num_blocks: 64, page_size: 16, max_batch_tokens: 256}",
}
ENGINES: dict[str, dict[str, Any]] = {"ours": {}, "ours, continuous batching": BATCHING}
WIDE_POLICY = {"vocab_size": 32_768, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
WIDE_ANSWER = 256
WIDE: dict[str, Any] = {
    "response_length": WIDE_ANSWER,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 16,
    # A random policy has no reward, which would end the run.
    "max_zero_std_rollouts": "null",
}
Trained = dict[str, list[float]]
"""Per iteration: mean ``score``, ``end`` in seconds, and for our loop ``tokens_per_s`` of sampling."""


def train_ours(recipe: str, policy: Path, folder: Path, steps: int, seed: int, **more: Any) -> Trained:
    """Train with this library's recipe."""
    keys = {"max_steps": steps, "seed": seed, "logging_steps": 1, "eval_strategy": "no", **more}
    build = keys_task.build_flags if recipe == "ppo" else keys_task.build_group_flags
    keys_task.train(build(policy, folder / "run", folder / "prompts.jsonl", **keys), recipe)
    events = read_events(folder / "run")
    figures = {"score": "objective/score", "end": "seconds", "tokens_per_s": "rollout/tokens_per_s"}
    return {name: [event[figure] for event in events] for name, figure in figures.items()}


def train_trl(recipe: str, policy: Path, folder: Path, steps: int, seed: int, **more: Any) -> Trained:
    """Train with TRL's trainer; returns the same as ``train_ours``."""
    import trl
    from datasets import load_dataset

    scores: list[float] = []
    ends: list[float] = []

    def reward(*, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        found = keys_task.score_first_key(prompts=prompts, completion_ids=completion_ids)
        scores.append(statistics.mean(found))
        ends.append(time.perf_counter())
        return [score - (ids[-1] != keys_task.EOS) for score, ids in zip(found, completion_ids, strict=True)]

    config, trainer = {"rloo": (trl.RLOOConfig, trl.RLOOTrainer), "grpo": (trl.GRPOConfig, trl.GRPOTrainer)}[recipe]
    args = config(
        output_dir=str(folder / "run"), max_steps=steps, seed=seed, num_generations=4,
        per_device_train_batch_size=more.get("per_device_train_batch_size", 32),
        steps_per_generation=2, num_iterations=2, beta=0.02,
        max_completion_length=more.get("response_length", keys_task.MAX_ANSWER), learning_rate=1e-3,
        lr_scheduler_type="constant", adam_beta2=0.95, disable_dropout=True, bf16=False, gradient_checkpointing=False,
        use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    rows = load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train")
    trainer(
        model=str(policy), reward_funcs=[reward], args=args, train_dataset=rows,
        processing_class=keys_task.build_tokenizer(),
    ).train()  # fmt: skip
    return {"score": scores, "end": ends}


def measure(variant: str, recipe: str, steps: int, seed: int, *, is_wide: bool) -> dict[str, float]:
    """Train one variant; the score is the mean over the last quarter of the iterations."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = WIDE if is_wide else {}
        sizes = {"num_steps": 0, "max_position_embeddings": 2 * WIDE_ANSWER, **WIDE_POLICY} if is_wide else {}
        policy = keys_task.write_policy(folder / "policy", seed, **sizes)
        keys_task.write_prompts(folder / "prompts.jsonl", 2000, seed=77 + seed)
        if variant == "TRL":
            found = train_trl(recipe, policy, folder, steps, seed, **keys)
        else:
            found = train_ours(recipe, policy, folder, steps, seed, **ENGINES[variant] | keys)
    scores, ends = found["score"], found["end"]
    return {
        "score": statistics.mean(scores[-(len(scores) // 4) :]),
        "seconds": (ends[-1] - ends[0]) / (len(ends) - 1),
        "tokens_per_s": statistics.median(found.get("tokens_per_s", [0.0])),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def main() -> None:
    """Compare all variants, or measure one in this process."""
    parser = build_parser(__doc__, rounds=8)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--measure", nargs=3, metavar=("VARIANT", "RECIPE", "SEED"))
    options = parser.parse_args()
    if options.measure:
        variant, recipe, seed = options.measure
        print(json.dumps(measure(variant, recipe, options.steps, int(seed), is_wide=options.wide)))
        return
    common = [sys.executable, __file__, "--steps", str(options.steps), *(["--wide"] if options.wide else [])]
    common += ["--measure"]
    variants = ("ours", "TRL") if options.wide else (*ENGINES, "TRL")
    names = {(variant, recipe): f"{recipe}, {variant}" for recipe in RECIPE_NAMES for variant in variants}
    names = {("ours", "ppo"): "ppo, ours", **names}
    commands = {name: [*common, variant, recipe, "{round}"] for (variant, recipe), name in names.items()}
    results = run_interleaved(commands, options.rounds)
    head = ["method", "score at the end", "less TRL's, mean ± standard error", "seconds an iteration", "this / ours"]
    table = [[*head, "peak GB", "this / ours", "tokens/s of sampling"]]
    for (_, recipe), name in names.items():
        ours, own = f"{recipe}, ours", results[name]
        told = ""
        if (theirs := results.get(f"{recipe}, TRL", own)) is not own:
            gaps = [one["score"] - other["score"] for one, other in zip(own, theirs, strict=True)]
            error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
            told = f"{statistics.mean(gaps):+.3f} ± {error:.3f}"
        times = [spread(own, "seconds"), compare(results, "seconds", ours, name)]
        memory = [spread(own, "memory"), compare(results, "memory", ours, name)]
        speed = spread(own, "tokens_per_s", 0) if own[0]["tokens_per_s"] else ""
        table.append([name, spread(own, "score"), told, *times, *memory, speed])
    write_results(options.output, "PPO, RLOO and GRPO", table, results)


if __name__ == "__main__":
    main()
