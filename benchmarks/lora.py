"""LoRA training: supervised tokens per second and peak memory, compared with PEFT in TRL's trainer.

All variants train the same adapter on the same model and chats, and stop at the same number of supervised tokens.

``python benchmarks/lora.py [--data FILE] [--rounds 3] [--targets 30000] [--output build/lora.json]``
"""

from __future__ import annotations

import json
import math
import resource
import tempfile
from pathlib import Path
from typing import Any

import training
from harness import build_parser, compare, run_script, spread, write_results
from training import MAX_LENGTH, SHARED, TRL_DEFAULTS, TRL_TUNED, build_meter
from workload import add_workload, build_workload

RANK = 16


def measure_ours(folder: Path, output_dir: str, meter: Any, **changes: Any) -> None:
    """Train with this library's trainer and its adapter checks; eight rows of 512 tokens per step."""
    from recipes_lib.config.loader import load_config
    from recipes_lib.data.packed.collators import PackedCollator
    from recipes_lib.data.packed.prepared_set import prepare
    from recipes_lib.models.attention.kernels import choose_attention
    from recipes_lib.models.loading import load_model_config, load_tokenizer
    from recipes_lib.training.guards.start_checks import AdapterChecks
    from recipes_lib.training.layouts.launch_environment import read_launch
    from recipes_lib.training.monitoring.callbacks import Observer
    from recipes_lib.training.monitoring.metrics import StepCounter
    from recipes_lib.training.monitoring.progress import build_progress
    from recipes_lib.training.trainers.arguments import build_training_arguments
    from recipes_lib.training.trainers.next_token_trainer import SFTTrainer
    from recipes_lib.training.trainers.trained_model import load_policy

    keys = SHARED | {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "chats.jsonl",
        "output_dir": output_dir,
        "prepared_dir": f"{output_dir}/prepared",
        "max_length": MAX_LENGTH,
        "overlong": "truncate",
        "per_device_train_batch_size": 8,
        "save_strategy": "no",
        "lora_r": RANK,
        **changes,
    }
    config = load_config("lora", [f"--{name}={value}" for name, value in keys.items()])
    tokenizer = load_tokenizer(config.model, config.tokens)
    data = prepare(config, lambda: tokenizer)
    args, launch = build_training_arguments(config, read_launch(), has_eval=False), read_launch()
    model_config, _ = load_model_config(config.model)
    attention = choose_attention(config.model, model_config, args, packing=True)
    model = load_policy(config, attention.implementation, args, launch)
    # The meter counts only batches of training; the checks run two forward passes before.
    checks = AdapterChecks(config.adapter, say=lambda line: None)
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=data.train,
        data_collator=PackedCollator(pad_token_id=tokenizer.pad_token_id, layout=attention.layout),
        processing_class=tokenizer,
        observer=Observer(StepCounter(), [], [checks, meter], build_progress(is_main=False)),
    )
    trainer.train()


def measure_trl(folder: Path, output_dir: str, meter: Any, keys: dict[str, Any]) -> None:
    """Train PEFT's adapter in TRL's trainer on the same chats."""
    from peft import LoraConfig

    adapter = LoraConfig(r=RANK, lora_alpha=32, task_type="CAUSAL_LM", target_modules="all-linear")
    training.measure_trl(folder, output_dir, meter, keys, peft_config=adapter)


VARIANTS = {
    "ours": lambda *args: measure_ours(*args),
    # The micro-batch of TRL tuned by hand, for a fair comparison of memory.
    "ours, row by row": lambda *args: measure_ours(*args, per_device_train_batch_size=1, gradient_accumulation_steps=8),
    "PEFT + TRL, tuned by hand": lambda *args: measure_trl(*args, TRL_TUNED),
    "PEFT + TRL, script defaults": lambda *args: measure_trl(*args, TRL_DEFAULTS),
}


def measure(name: str, folder: Path, num_targets: int) -> dict[str, float]:
    """Train one variant in this process; return its throughput, seconds per step, and peak memory in GB."""
    meter = build_meter(num_targets)
    with tempfile.TemporaryDirectory() as output_dir:
        VARIANTS[name](folder, output_dir, meter)
    report = meter.report()
    assert math.isfinite(report["targets_per_second"])
    seconds = report["num_targets"] / report["num_steps"] / report["targets_per_second"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return report | {"seconds_per_step": seconds, "peak_gb": peak}


def main() -> None:
    """Measure each variant in its own process; the first steps are not timed."""
    parser = build_parser(__doc__, rounds=3)
    add_workload(parser)
    parser.add_argument("--targets", type=int, default=30_000)
    parser.add_argument("--measure", choices=VARIANTS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.workload, options.targets)))
        return
    build_workload(options.data, options.workload)
    results = run_script(VARIANTS, options.rounds, workload=options.workload, targets=options.targets)
    table = [["variant", "supervised tokens/s", "ours / this", "seconds a step", "peak GB", "this / ours", "steps"]]
    for name in VARIANTS:
        table.append(
            [
                name,
                spread(results[name], "targets_per_second", 0),
                compare(results, "targets_per_second", name, "ours"),
                spread(results[name], "seconds_per_step"),
                spread(results[name], "peak_gb"),
                compare(results, "peak_gb", "ours", name),
                spread(results[name], "num_steps", 0),
            ]
        )
    write_results(options.output, "Adapters", table, results)


if __name__ == "__main__":
    main()
