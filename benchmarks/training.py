"""SFT throughput in supervised tokens per second and held-out loss, compared with TRL's trainer.

All variants train on the answers of the same chats, and stop at the same number of supervised tokens.

``python benchmarks/training.py [--data FILE] [--rounds 3] [--targets 30000] [--output build/training.json]``
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import build_parser, compare, run_script, spread, write_results
from workload import add_workload, build_workload

MAX_LENGTH = 512
NUM_UNTIMED_STEPS = 2
SHARED = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_steps": 1000, "seed": 0, "logging_steps": 1}
TRL_DEFAULTS: dict[str, Any] = {"max_length": 1024}
TRL_TUNED: dict[str, Any] = {
    "max_length": MAX_LENGTH,
    "packing": True,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "activation_checkpointing": False,
}


def build_meter(num_targets: int) -> Any:
    """Return a callback that times optimizer steps and stops at ``num_targets`` supervised tokens.

    Targets are counted in the model's inputs, so that all variants are counted in the same way.
    """
    from transformers import TrainerCallback

    class Meter(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.targets: list[int] = []
            self.seconds: list[float] = []
            self.pending = 0
            self.start = 0.0

        def count(self, _module: Any, _args: Any, inputs: dict[str, Any]) -> None:
            self.pending += int((inputs["labels"][..., 1:] >= 0).sum())

        def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
            model.register_forward_pre_hook(self.count, with_kwargs=True)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, _args: Any, _state: Any, control: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)
            self.targets.append(self.pending)
            self.pending = 0
            if sum(self.targets) >= num_targets:
                control.should_training_stop = True

        def report(self) -> dict[str, float]:
            timed = slice(NUM_UNTIMED_STEPS, None)
            return {
                "targets_per_second": sum(self.targets[timed]) / sum(self.seconds[timed]),
                "num_targets": sum(self.targets),
                "num_steps": len(self.targets),
            }

    return Meter()


def measure_ours(folder: Path, output_dir: str, meter: Any, rows_per_step: int) -> Any:
    """Train with this library's trainer; rows of 512 tokens."""
    from recipes_lib.config.loader import load_config
    from recipes_lib.data.packed.collators import PackedCollator
    from recipes_lib.data.packed.prepared_set import prepare
    from recipes_lib.models.attention.kernels import choose_attention
    from recipes_lib.models.loading import load_causal_lm, load_model_config, load_tokenizer
    from recipes_lib.training.layouts.launch_environment import read_launch
    from recipes_lib.training.monitoring.callbacks import Observer
    from recipes_lib.training.monitoring.metrics import StepCounter
    from recipes_lib.training.monitoring.progress import build_progress
    from recipes_lib.training.trainers.arguments import build_training_arguments
    from recipes_lib.training.trainers.next_token_trainer import SFTTrainer

    keys = SHARED | {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "chats.jsonl",
        "output_dir": output_dir,
        "prepared_dir": f"{output_dir}/prepared",
        "max_length": MAX_LENGTH,
        "overlong": "truncate",
        "per_device_train_batch_size": rows_per_step,
        "save_strategy": "no",
    }
    config = load_config("sft", [f"--{name}={value}" for name, value in keys.items()])
    tokenizer = load_tokenizer(config.model, config.tokens)
    data = prepare(config, lambda: tokenizer)
    args = build_training_arguments(config, read_launch(), has_eval=False)
    model_config, _ = load_model_config(config.model)
    attention = choose_attention(config.model, model_config, args, packing=True)
    trainer = SFTTrainer(
        model=load_causal_lm(config.model, attention.implementation),
        args=args,
        train_dataset=data.train,
        data_collator=PackedCollator(pad_token_id=tokenizer.pad_token_id, layout=attention.layout),
        processing_class=tokenizer,
        observer=Observer(StepCounter(), [], [meter], build_progress(is_main=False)),
    )
    trainer.train()
    return trainer.model


def measure_trl(folder: Path, output_dir: str, meter: Any, keys: dict[str, Any], peft_config: Any = None) -> Any:
    """Train with TRL's trainer on the same chats."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        assistant_only_loss=True,
        **(SHARED | keys),
    )
    rows = datasets.load_dataset(
        "json", data_files=str(folder / "chats.jsonl"), split="train", cache_dir=f"{output_dir}/cache"
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        args=args,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[meter],
        peft_config=peft_config,
    )
    trainer.train()
    return trainer.model


def compute_held_out_loss(model: Any, folder: Path) -> float:
    """Return the mean negative log-likelihood of held-out answers, chat by chat, under the unmodified model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    plain = AutoModelForCausalLM.from_config(model.config).eval()
    plain.load_state_dict(model.state_dict())
    nll, count = 0.0, 0
    for line in (folder / "eval.jsonl").open(encoding="utf-8"):
        row = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        targets = row["assistant_masks"][0, 1:].bool()
        with torch.no_grad():
            logps = plain(row["input_ids"]).logits[0, :-1].log_softmax(-1)
        nll -= logps.gather(1, row["input_ids"][0, 1:, None])[:, 0][targets].sum().item()
        count += int(targets.sum())
    return nll / count


VARIANTS = {
    "ours": lambda *args: measure_ours(*args, rows_per_step=8),
    # TRL's default batch is eight chats, about two and a half rows: more and smaller steps on the same tokens.
    "ours, 2 rows a step": lambda *args: measure_ours(*args, rows_per_step=2),
    "TRL, tuned by hand": lambda *args: measure_trl(*args, TRL_TUNED),
    "TRL, script defaults": lambda *args: measure_trl(*args, TRL_DEFAULTS),
}


def measure(name: str, folder: Path, num_targets: int) -> dict[str, float]:
    """Train one variant in this process; return its throughput and held-out loss."""
    meter = build_meter(num_targets)
    with tempfile.TemporaryDirectory() as output_dir:
        model = VARIANTS[name](folder, output_dir, meter)
    loss = compute_held_out_loss(model, folder)
    assert math.isfinite(loss)
    return meter.report() | {"held_out_loss": loss}


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
    table = [["variant", "supervised tokens/s", "ours / this", "held-out loss", "supervised tokens", "steps"]]
    for name in VARIANTS:
        table.append(
            [
                name,
                spread(results[name], "targets_per_second", 0),
                compare(results, "targets_per_second", name, "ours"),
                spread(results[name], "held_out_loss", 4),
                spread(results[name], "num_targets", 0),
                spread(results[name], "num_steps", 0),
            ]
        )
    write_results(options.output, "Training", table, results)


if __name__ == "__main__":
    main()
