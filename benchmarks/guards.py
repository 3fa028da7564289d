"""Overhead of guards and metrics per step: the same training with both, with metrics only, and with neither.

CPU seconds, because other load on the machine changes them less than wall-clock time. The time inside the code of
guards and metrics is also measured directly.

``python benchmarks/guards.py [--data FILE] [--rounds 3] [--steps 16] [--output build/guards.json]``
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import build_parser, compare, run_script, spread, write_results
from workload import add_workload, build_workload

MAX_LENGTH = 512
NUM_UNTIMED_STEPS = 3
VARIANTS = ("neither", "metrics", "guards and metrics")


def build_meter() -> Any:
    """Return a callback that times optimizer steps, logging and guards included."""
    from transformers import TrainerCallback

    class Meter(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.begins: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begins.append(time.process_time())

        def report(self) -> dict[str, float]:
            seconds = [stop - start for start, stop in zip(self.begins, self.begins[1:], strict=False)]
            return {"seconds": statistics.median(seconds[NUM_UNTIMED_STEPS:])}

    return Meter()


def build_trainer_class(*, guarded: bool) -> Any:
    """Return our trainer, or a subclass with upstream's handling of losses and gradient norms."""
    from transformers import Trainer

    from recipes_lib.training.trainers.next_token_trainer import SFTTrainer

    if guarded:
        return SFTTrainer

    class Unguarded(SFTTrainer):
        _clip_grad_norm = Trainer._clip_grad_norm
        _get_grad_norm = Trainer._get_grad_norm

    return Unguarded


def time_calls(owner: Any, names: tuple[str, ...], spent: list[float]) -> None:
    """Wrap methods of ``owner`` so that each call appends its CPU seconds to ``spent``."""

    def wrap(method: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                spent.append(time.process_time() - start)

        return timed

    for name in names:
        setattr(owner, name, wrap(getattr(owner, name)))


def measure(name: str, folder: Path, num_steps: int) -> dict[str, float]:
    """Train one variant in this process; return the median seconds per step and the share inside guards and metrics."""
    from recipes_lib.config.loader import load_config
    from recipes_lib.data.packed.collators import PackedCollator
    from recipes_lib.data.packed.training_data import load_training_data
    from recipes_lib.models.attention.kernels import choose_attention
    from recipes_lib.models.loading import load_causal_lm, load_model_config, load_tokenizer
    from recipes_lib.training.evaluation.build import build_observer
    from recipes_lib.training.layouts.launch_environment import read_launch
    from recipes_lib.training.monitoring.callbacks import Observer
    from recipes_lib.training.monitoring.metrics import StepCounter
    from recipes_lib.training.monitoring.progress import build_progress
    from recipes_lib.training.trainers.arguments import build_training_arguments

    with tempfile.TemporaryDirectory() as output_dir:
        keys = {
            "model_name_or_path": folder / "model",
            "dataset_name": folder / "chats.jsonl",
            "output_dir": output_dir,
            "prepared_dir": folder / "prepared",
            "max_length": MAX_LENGTH,
            "overlong": "truncate",
            "per_device_train_batch_size": 2,
            "max_steps": num_steps,
            "save_strategy": "no",
            "num_sample_prompts": 0,
            "logging_steps": num_steps if name == "neither" else 1,
        }
        config = load_config("sft", [f"--{key}={value}" for key, value in keys.items()])
        tokenizer = load_tokenizer(config.model, config.tokens)
        data = load_training_data(config, tokenizer)
        args = build_training_arguments(config, read_launch(), has_eval=False)
        attention = choose_attention(config.model, load_model_config(config.model)[0], args, packing=True)
        model = load_causal_lm(config.model, attention.implementation)
        collate = PackedCollator(pad_token_id=tokenizer.pad_token_id, layout=attention.layout)
        observer = Observer(StepCounter(), [], [], build_progress(is_main=False))
        if name != "neither":
            observer = build_observer(config, data, args, model, tokenizer, collate)
        is_guarded, meter, spent = name == "guards and metrics", build_meter(), [0.0]
        trainer = build_trainer_class(guarded=is_guarded)(
            model=model,
            args=args,
            train_dataset=data.train,
            data_collator=collate,
            processing_class=tokenizer,
            observer=observer,
        )
        trainer.add_callback(meter)
        for callback in observer.callbacks:
            time_calls(callback, ("on_step_begin", "on_step_end", "on_log"), spent)
        if is_guarded:
            time_calls(trainer.guard, ("check_step", "on_step_begin"), spent)
        else:
            trainer.remove_callback(trainer.guard)
        trainer.train()
        num_parameters = trainer.model.num_parameters()
    seconds = meter.report()["seconds"]
    own = sum(spent) / num_steps
    return {"seconds": seconds, "own_percent": 100 * own / seconds, "num_parameters": num_parameters}


def main() -> None:
    """Measure each variant in its own process; the first steps are not timed."""
    parser = build_parser(__doc__, rounds=3)
    add_workload(parser)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--measure", choices=VARIANTS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.workload, options.steps)))
        return
    build_workload(options.data, options.workload)
    results = run_script(VARIANTS, options.rounds, workload=options.workload, steps=options.steps)
    table = [["variant", "processor seconds a step", "this / neither", "inside guards and metrics, % of a step"]]
    for name in VARIANTS:
        table.append(
            [
                name,
                spread(results[name], "seconds", 3),
                compare(results, "seconds", "neither", name),
                spread(results[name], "own_percent", 3),
            ]
        )
    write_results(options.output, "Guards", table, results)


if __name__ == "__main__":
    main()
