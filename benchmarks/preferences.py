"""DPO and reward model training: pairs per second and peak memory, compared with TRL's trainers.

A Llama of ten million parameters, pairs of fixed lengths, the same tokens for both trainers, bf16 where the CPU
supports it and float32 elsewhere, no activation checkpointing. A live reference is a frozen copy of the model; for a
stored one, log-probabilities are computed before training.

python benchmarks/preferences.py [--rounds 3] [--steps 8] [--variants NAME ...] [--output build/preferences.json]
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import build_parser, compare, run_script, spread, write_results
from loss_head import resident_gb
from workload import add_workload, build_workload

from recipes_lib.hardware import supports_bf16

SHAPES = {"512/64": (512, 64), "128/128": (128, 128)}
"""Tokens of the prompt and of each answer."""
PAIRS_PER_STEP = 4
NUM_UNTIMED_STEPS = 2
SHARED: dict[str, Any] = {
    "learning_rate": 1e-5,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "seed": 0,
    "per_device_train_batch_size": PAIRS_PER_STEP,
    "per_device_eval_batch_size": PAIRS_PER_STEP,
    "bf16": supports_bf16(),
    "use_cpu": True,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "activation_checkpointing": False,
    "train_sampling_strategy": "sequential",
}


def build_pairs(shape: str, num_pairs: int, vocab_size: int) -> Any:
    """Return random tokens in the columns of both trainers: ``prompt_ids``, ``chosen_ids``, ``rejected_ids``."""
    import datasets

    generator = np.random.default_rng(0)
    prompt, answer = SHAPES[shape]
    lengths = {"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": answer}
    columns = {name: generator.integers(4, vocab_size, (num_pairs, size)).tolist() for name, size in lengths.items()}
    return datasets.Dataset.from_dict(columns)


def build_meter() -> Any:
    """Return a callback that times optimizer steps and records peak memory."""
    from transformers import TrainerCallback

    class Meter(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.start = self.before = self.peak = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not self.seconds:
                Path("/proc/self/clear_refs").write_text("5")  # Resets the peak (VmHWM) to the current RSS.
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)
            self.peak = resident_gb("VmHWM")

    return Meter()


def measure_dpo(folder: Path, pairs: Any, output_dir: str, steps: int, meter: Any, *, is_stored: bool) -> list[float]:
    """Train with this library's trainer; return the loss of each step."""
    import copy

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig

    from recipes_lib.config.schema import PreferenceConfig
    from recipes_lib.data.pairs.collator import PairCollator
    from recipes_lib.models.heads.loss_head import add_loss_head
    from recipes_lib.training.monitoring.callbacks import Observer
    from recipes_lib.training.monitoring.metrics import StepCounter
    from recipes_lib.training.monitoring.progress import build_progress
    from recipes_lib.training.trainers.dpo_trainer import DPOTrainer, build_objective
    from recipes_lib.training.trainers.reference import ReferenceLogps

    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa")
    model.config.use_cache = False
    args = DPOConfig(
        output_dir,
        max_steps=steps,
        logging_steps=1,
        precompute_ref_log_probs=is_stored,
        remove_unused_columns=False,
        **SHARED,
    )
    objective = build_objective(args, PreferenceConfig())
    rows, stored = pairs.with_format("numpy"), None
    if is_stored:
        stored = ReferenceLogps("0" * 64, {"train": rows}, root=Path(output_dir), output_dir=Path(output_dir))
        rows = stored.rows["train"]
    else:
        reference = copy.deepcopy(model)
        reference.requires_grad_(False)
        add_loss_head(reference)
        objective.reference = reference
    trainer = DPOTrainer(
        model=model,
        args=args,
        objective=objective,
        stored=stored,
        is_own_reference=True,
        train_dataset=rows,
        data_collator=PairCollator(pad_token_id=0),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        observer=Observer(StepCounter(), [], [meter], build_progress(is_main=False)),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def measure_trl_dpo(
    folder: Path, pairs: Any, output_dir: str, steps: int, meter: Any, *, is_stored: bool
) -> list[float]:
    """Train with TRL's trainer, without its tokenization: both are given tokens."""
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    class TokensTrainer(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    trainer = TokensTrainer(
        str(folder / "model"),
        args=DPOConfig(
            output_dir,
            max_steps=steps,
            logging_steps=1,
            max_length=None,
            precompute_ref_log_probs=is_stored,
            **SHARED,
        ),
        train_dataset=pairs,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[meter],
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def measure_reward(folder: Path, pairs: Any, output_dir: str, steps: int, meter: Any) -> list[float]:
    """Train a reward model with this library's trainer."""
    from transformers import AutoTokenizer
    from trl import RewardConfig

    from recipes_lib.config.schema import ModelConfig
    from recipes_lib.data.pairs.collator import PairCollator
    from recipes_lib.models.heads.score_head import add_score_head, load_reward_model
    from recipes_lib.training.monitoring.callbacks import Observer
    from recipes_lib.training.monitoring.metrics import StepCounter
    from recipes_lib.training.monitoring.progress import build_progress
    from recipes_lib.training.trainers.pair_trainer import PairTrainer, score_rewards

    model = load_reward_model(ModelConfig(model_name_or_path=str(folder / "model")), "sdpa", seed=0)
    add_score_head(model)
    trainer = PairTrainer(
        model=model,
        args=RewardConfig(output_dir, max_steps=steps, logging_steps=1, remove_unused_columns=False, **SHARED),
        score=score_rewards,
        train_dataset=pairs.with_format("numpy"),
        data_collator=PairCollator(pad_token_id=0),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        observer=Observer(StepCounter(), [], [meter], build_progress(is_main=False)),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def measure_trl_reward(folder: Path, pairs: Any, output_dir: str, steps: int, meter: Any) -> list[float]:
    """Train a reward model with TRL's trainer, whose rows are prompt and answer concatenated."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    whole = pairs.map(
        lambda row: {f"{name}_ids": row["prompt_ids"] + row[f"{name}_ids"] for name in ("chosen", "rejected")},
        remove_columns=["prompt_ids"],
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(output_dir, max_steps=steps, logging_steps=1, max_length=None, **SHARED),
        train_dataset=whole,
        processing_class=tokenizer,
        callbacks=[meter],
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


VARIANTS: dict[str, Any] = {
    "DPO, ours, stored reference": lambda *args: measure_dpo(*args, is_stored=True),
    "DPO, ours, live reference": lambda *args: measure_dpo(*args, is_stored=False),
    "DPO, TRL, stored reference": lambda *args: measure_trl_dpo(*args, is_stored=True),
    "DPO, TRL, live reference": lambda *args: measure_trl_dpo(*args, is_stored=False),
    "reward model, ours": measure_reward,
    "reward model, TRL": measure_trl_reward,
}


def measure(name: str, shape: str, folder: Path, steps: int) -> dict[str, float]:
    """Train one variant in this process; return pairs per second, peak resident memory, first and last loss."""
    from transformers import AutoConfig

    pairs = build_pairs(shape, steps * PAIRS_PER_STEP, AutoConfig.from_pretrained(folder / "model").vocab_size)
    meter = build_meter()
    with tempfile.TemporaryDirectory() as output_dir:
        losses = VARIANTS[name](folder, pairs, output_dir, steps, meter)
    timed = meter.seconds[NUM_UNTIMED_STEPS:]
    return {
        "pairs_per_second": PAIRS_PER_STEP * len(timed) / sum(timed),
        "peak_gb": meter.peak,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def main() -> None:
    """Measure each variant in its own process; the first steps are not timed."""
    parser = build_parser(__doc__, rounds=3)
    add_workload(parser)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--measure", choices=VARIANTS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.shapes[0], options.workload, options.steps)))
        return
    build_workload(options.data, options.workload)
    table = [["tokens", "variant", "pairs/s", "ours / this", "peak GB", "last loss"]]
    everything: dict[str, Any] = {}
    for shape in options.shapes:
        flags = {"workload": options.workload, "steps": options.steps, "shapes": shape}
        results = run_script(options.variants, options.rounds, **flags)
        for name, rounds in results.items():
            ours = "reward model, ours" if name.startswith("reward") else "DPO, ours, stored reference"
            figures = [spread(rounds, "pairs_per_second"), compare(results, "pairs_per_second", name, ours)]
            table.append([shape, name, *figures, spread(rounds, "peak_gb"), spread(rounds, "last_loss", 4)])
        everything[shape] = results
    write_results(options.output, f"Preferences, {options.steps} steps of {PAIRS_PER_STEP} pairs", table, everything)


if __name__ == "__main__":
    main()
