"""A student of another shape beside the tiny model as its teacher, and short runs of distillation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tests.training.trajectories import Recorder, make_packs
from torch import distributed
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from recipes_lib.config.schema import (
    DataConfig,
    DistillationConfig,
    EvaluationConfig,
    ModelConfig,
    RecipeConfig,
    TokensConfig,
)
from recipes_lib.data.collators import PackedCollator
from recipes_lib.models.attention import AttentionChoice
from recipes_lib.training.arguments import build_training_arguments
from recipes_lib.training.distill import DistillationTrainer
from recipes_lib.training.launch import read_launch
from recipes_lib.training.metrics import StepCounter
from recipes_lib.training.observer import Observer
from recipes_lib.training.progress import build_progress
from recipes_lib.training.teacher import is_own_teacher, load_teacher, map_teacher_vocabulary

KEYS: dict[str, Any] = {
    "bf16": False,
    "use_cpu": True,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "max_steps": 4,
    "lr_scheduler_type": "linear",
}


def save_student(folder: Path, tokenizer_dir: Path, *, vocab_size: int = 512, seed: int = 7) -> Path:
    """Write a random one-layer Llama of half the width, and the tokenizer beside it."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(folder)
    return folder


def build_config(student_dir: Path, teacher_dir: Path, output_dir: Path, **keys: Any) -> RecipeConfig:
    """A run in full precision on rows that are handed in; keys of distillation among those of training."""
    fields = DistillationConfig.__dataclass_fields__
    return RecipeConfig(
        stage="distill",
        path=None,
        data=DataConfig(dataset_name="packs"),
        tokens=TokensConfig(),
        model=ModelConfig(model_name_or_path=str(student_dir)),
        evaluation=EvaluationConfig(),
        distillation=DistillationConfig(
            teacher_model_name_or_path=str(teacher_dir),
            **{name: value for name, value in keys.items() if name in fields},
        ),
        training=KEYS
        | {"output_dir": str(output_dir)}
        | {name: value for name, value in keys.items() if name not in fields},
    )


class Logs(Recorder):
    """Keeps every figure of every logged step besides."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs, **kwargs)
        if "loss" in logs:
            self.logs.append(dict(logs))


def make_distiller(
    student_dir: Path, teacher_dir: Path, output_dir: Path, packs: Any, **keys: Any
) -> tuple[DistillationTrainer, Logs, list[str]]:
    """The trainer, what it logs, and what it says."""
    config = build_config(student_dir, teacher_dir, output_dir, **keys)
    tokenizer = AutoTokenizer.from_pretrained(student_dir)
    args = build_training_arguments(config, read_launch(), has_eval=False)
    progress, lines = build_progress(is_main=False), list[str]()
    progress.say = lines.append  # type: ignore[method-assign]
    recorder = Logs()
    teacher = load_teacher(config, AttentionChoice("sdpa", "rows"), args, map_teacher_vocabulary(config, tokenizer))
    trainer = DistillationTrainer(
        model=AutoModelForCausalLM.from_pretrained(student_dir, attn_implementation="sdpa"),
        teacher=teacher,
        distillation=config.distillation,
        is_own_teacher=is_own_teacher(config),
        args=args,
        train_dataset=packs,
        data_collator=PackedCollator(pad_token_id=tokenizer.pad_token_id),
        processing_class=tokenizer,
        observer=Observer(StepCounter(), [], [recorder], progress),
    )
    return trainer, recorder, lines


def main() -> None:
    """Train in this process (one of several) and write what it logs: ``STUDENT TEACHER OUTPUT JSON_KEYS``."""
    student_dir, teacher_dir, output_dir = map(Path, sys.argv[1:4])
    keys = json.loads(sys.argv[4])
    trainer, recorder, _ = make_distiller(student_dir, teacher_dir, output_dir / "run", make_packs(), **keys)
    trainer.train()
    if trainer.is_world_process_zero():
        (output_dir / "logs.json").write_text(json.dumps(recorder.logs))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
