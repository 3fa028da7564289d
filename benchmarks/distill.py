"""Time and memory of a distillation step, live and stored teacher, compared with TRL's DistillationTrainer and GKD.

Forward KL to a teacher with about four times the student's parameters, vocabularies of 32k and 128k, the same tokens,
all of them targets. TRL's DistillationTrainer samples its texts on-policy; here it is given them, so that only its
update is timed. bf16, no activation checkpointing.

python benchmarks/distill.py [--rounds 3] [--steps 5] [--output build/distill.json]
"""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness import build_parser, compare, run_script, spread, write_results
from preferences import SHARED, build_meter
from workload import add_workload, build_workload

SHAPES: dict[str, dict[str, Any]] = {
    "32k": {"vocab_size": 32_768, "student": (256, 4), "teacher": (512, 8)},
    "128k": {"vocab_size": 131_072, "student": (256, 4), "teacher": (640, 12)},
}
"""Vocabulary -> its size, and width and number of layers of each model."""
ROWS, TOKENS = 2, 512
TOP_K = 64
NUM_UNTIMED_STEPS = 2
KEYS: dict[str, Any] = {
    **SHARED,
    "per_device_train_batch_size": ROWS,
    "per_device_eval_batch_size": ROWS,
    "logging_steps": 1,
    "remove_unused_columns": False,
}
PREPARED: dict[str, Any] = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None, "packing": False}


def build_model(shape: str, role: str) -> Any:
    """Return a random Llama; the teacher's head is scaled so that its logits spread like a trained model's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    width, num_layers = SHAPES[shape][role]
    set_seed(0)
    config = LlamaConfig(
        vocab_size=SHAPES[shape]["vocab_size"],
        hidden_size=width,
        intermediate_size=width * 27 // 10,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 64,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    if role == "teacher":
        with torch.no_grad():
            model.lm_head.weight.mul_(6)
        model.eval().requires_grad_(False)
    model.config.use_cache = False
    return model


def build_rows(shape: str, steps: int) -> Any:
    """Return random rows in the format of prepared sets; every token but the first is a target."""
    import datasets

    generator = np.random.default_rng(0)
    num_rows = steps * ROWS
    return datasets.Dataset.from_dict(
        {
            "input_ids": generator.integers(4, SHAPES[shape]["vocab_size"], (num_rows, TOKENS)).tolist(),
            "loss_mask": [[False] + [True] * (TOKENS - 1)] * num_rows,
            "seq_lengths": [[TOKENS]] * num_rows,
            "row_ids": [[number] for number in range(num_rows)],
        }
    ).with_format("numpy")


def build_batch(rows: Any) -> Any:
    """Collate rows into the inputs of TRL's trainers."""
    import torch

    from recipes_lib.data.packed.collators import IGNORE_INDEX

    ids = torch.from_numpy(np.stack([row["input_ids"] for row in rows]))
    labels = ids.clone()
    labels[:, 0] = IGNORE_INDEX
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def measure_ours(shape: str, rows: Any, tokenizer: Any, output_dir: str, meter: Any, *, is_stored: bool) -> Any:
    """Build this library's trainer."""
    import torch
    from trl import SFTConfig

    from recipes_lib.config.schema import DistillationConfig
    from recipes_lib.data.packed.collators import PackedCollator
    from recipes_lib.distillation.distill_trainer import DistillationTrainer, TeacherSource
    from recipes_lib.distillation.teacher_store import (
        RecordFormat,
        StoreIdentity,
        TeacherCollator,
        ask_teacher,
        read_store,
        read_targets,
        write_store,
    )
    from recipes_lib.models.heads.loss_head import add_loss_head
    from recipes_lib.training.monitoring.callbacks import Observer
    from recipes_lib.training.monitoring.metrics import StepCounter
    from recipes_lib.training.monitoring.progress import build_progress

    teacher, collate = build_model(shape, "teacher"), PackedCollator(pad_token_id=0)
    add_loss_head(teacher)
    teaching = TeacherSource(teacher, rows, collate)
    if is_stored:
        record = RecordFormat(TOP_K, SHAPES[shape]["vocab_size"])
        identity = StoreIdentity(Path(output_dir), "0" * 64, {}, record, len(rows))

        def compute(some: Any) -> Any:
            batch = collate(some)
            inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
            with torch.autocast("cpu", torch.bfloat16):
                top = ask_teacher(teacher, inputs, batch["labels"], k=TOP_K, temperature=1.0)
            return top, read_targets(batch["labels"])

        write_store(identity, rows, compute, batch_size=ROWS, tell=lambda _: None)
        teaching = TeacherSource(None, read_store(identity, rows), TeacherCollator(collate, record))
        del teacher
        gc.collect()
    return DistillationTrainer(
        model=build_model(shape, "student"),
        teaching=teaching,
        distillation=DistillationConfig(distillation_alpha=0.0),
        is_own_teacher=False,
        args=SFTConfig(output_dir, **PREPARED, **KEYS),
        processing_class=tokenizer,
        observer=Observer(StepCounter(), [], [meter], build_progress(is_main=False)),
    )


def measure_gkd(shape: str, rows: Any, tokenizer: Any, output_dir: str, meter: Any) -> Any:
    """Build TRL's GKD trainer, off-policy."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    trainer = GKDTrainer(
        model=build_model(shape, "student"),
        teacher_model=build_model(shape, "teacher"),
        args=GKDConfig(output_dir, lmbda=0.0, beta=0.0, temperature=1.0, **PREPARED, **KEYS),
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[meter],
    )
    trainer.data_collator = build_batch
    return trainer


def measure_trl(shape: str, rows: Any, tokenizer: Any, output_dir: str, meter: Any) -> Any:
    """Build TRL's DistillationTrainer, with given texts instead of sampled ones."""
    import datasets
    import torch
    from trl import DistillationConfig, DistillationTrainer

    class GivenTexts(DistillationTrainer):  # type: ignore[misc]
        num_done = 0

        def _prepare_inputs(self, _: Any) -> Any:
            first = self.num_done * ROWS
            self.num_done += 1
            ids = build_batch([rows[first + number] for number in range(ROWS)])["input_ids"]
            ones = torch.ones_like(ids)
            return {
                "prompt_ids": ids[:, :1],
                "prompt_mask": ones[:, :1],
                "completion_ids": ids[:, 1:],
                "completion_mask": ones[:, 1:],
                "num_items_in_batch": torch.tensor(float(ROWS * (TOKENS - 1))),
            }

    prompts = datasets.Dataset.from_dict({"prompt": ["a"] * len(rows)})
    return GivenTexts(
        model=build_model(shape, "student"),
        teacher_model=build_model(shape, "teacher"),
        args=DistillationConfig(output_dir, beta=0.0, temperature=1.0, **KEYS),
        train_dataset=prompts,
        processing_class=tokenizer,
        callbacks=[meter],
    )


VARIANTS: dict[str, Any] = {
    "ours, live": lambda *args: measure_ours(*args, is_stored=False),
    f"ours, stored, k = {TOP_K}": lambda *args: measure_ours(*args, is_stored=True),
    "TRL, DistillationTrainer": measure_trl,
    "TRL, GKD": measure_gkd,
}


def measure(name: str, shape: str, folder: Path, steps: int) -> dict[str, float]:
    """Train one variant in this process; return seconds per step, peak resident memory, first and last loss."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    meter = build_meter()
    with tempfile.TemporaryDirectory() as output_dir:
        KEYS["max_steps"] = steps
        trainer = VARIANTS[name](shape, build_rows(shape, steps), tokenizer, output_dir, meter)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    timed = meter.seconds[NUM_UNTIMED_STEPS:]
    return {"seconds": sum(timed) / len(timed), "peak_gb": meter.peak, "first_loss": losses[0], "last_loss": losses[-1]}


def main() -> None:
    """Measure each variant in its own process; the first steps are not timed."""
    parser = build_parser(__doc__, rounds=3)
    add_workload(parser)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--measure", choices=VARIANTS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.shapes[0], options.workload, options.steps)))
        return
    build_workload(options.data, options.workload)
    table = [["vocabulary", "variant", "s a step", "this / ours live", "peak GB", "first loss", "last loss"]]
    everything: dict[str, Any] = {}
    for shape in options.shapes:
        flags = {"workload": options.workload, "steps": options.steps, "shapes": shape}
        results = run_script(VARIANTS, options.rounds, **flags)
        for name, rounds in results.items():
            figures = [spread(rounds, "seconds"), compare(results, "seconds", "ours, live", name)]
            losses = [spread(rounds, figure, 4) for figure in ("first_loss", "last_loss")]
            table.append([shape, name, *figures, spread(rounds, "peak_gb"), *losses])
        everything[shape] = results
    title = f"Distillation, forward KL, {options.steps} steps of {ROWS} x {TOKENS} tokens"
    write_results(options.output, title, table, everything)


if __name__ == "__main__":
    main()
