"""Student of another shape than its teacher, the tiny model, and short runs of distillation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.tiny import save_model, sizes
from tests.training import trajectories
from tests.training.configurations import build_recipe
from tests.training.trajectories import Narrator, Recorder, make_packs
from torch import distributed
from transformers import AutoTokenizer

from recipes_lib.commands.generated.distill_store import build_compute
from recipes_lib.config.schema import (
    AdapterConfig,
    DistillationConfig,
    LayersConfig,
    ModelConfig,
    RecipeConfig,
    RewardsConfig,
    TokensConfig,
)
from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.distillation.distill_trainer import DistillationTrainer, prepare_teacher
from recipes_lib.distillation.teacher_store import (
    StoreIdentity,
    identify_store,
    is_own_teacher,
    load_teacher,
    map_teacher_vocabulary,
    write_store,
)
from recipes_lib.models.attention.kernels import AttentionChoice
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.monitoring.callbacks import Observer
from recipes_lib.training.monitoring.metrics import StepCounter
from recipes_lib.training.trainers.arguments import build_training_arguments
from recipes_lib.training.trainers.trained_model import load_policy

# With activation checkpointing, which runs the forward pass of a layer twice.
KEYS = {**trajectories.KEYS, "activation_checkpointing": True}


def save_student(folder: Path, tokenizer_dir: Path, *, vocab_size: int = 512, seed: int = 7) -> Path:
    """Save a random one-layer Llama of half the width, with the tokenizer."""
    shape = sizes(32, 1, 2, num_key_value_heads=2, vocab_size=vocab_size)
    return save_model(folder, AutoTokenizer.from_pretrained(tokenizer_dir), seed, **shape)


def build_config(student_dir: Path, teacher_dir: Path, output_dir: Path, **keys: Any) -> RecipeConfig:
    """Return a run in float32 on rows passed in; ``keys`` are those of distillation, layers and training."""
    sections = (DistillationConfig, LayersConfig, AdapterConfig)
    fields, layers, adapter = (section.__dataclass_fields__ for section in sections)
    attention, prepared_dir = keys.pop("attn_implementation", "sdpa"), keys.pop("prepared_dir", None)
    rewards = RewardsConfig(response_length=keys.pop("response_length", 8))
    training = {name: value for name, value in keys.items() if name not in (*fields, *layers, *adapter)}
    return build_recipe(
        {**KEYS, "output_dir": str(output_dir), **training},
        "distill",
        tokens=TokensConfig(prepared_dir=prepared_dir),
        model=ModelConfig(model_name_or_path=str(student_dir), attn_implementation=attention),
        rewards=rewards,
        distillation=DistillationConfig(
            teacher_model_name_or_path=str(teacher_dir),
            **{name: value for name, value in keys.items() if name in fields},
        ),
        layers=LayersConfig(**{name: value for name, value in keys.items() if name in layers}),
        adapter=AdapterConfig(**{name: value for name, value in keys.items() if name in adapter}),
    )


def store_teacher(student_dir: Path, teacher_dir: Path, packs: Any, root: Path, **keys: Any) -> StoreIdentity:
    """Write what the teacher says of the rows, as a run with these keys would read it."""
    config = build_config(student_dir, teacher_dir, root / "unused", prepared_dir=str(root), **keys)
    tokenizer = AutoTokenizer.from_pretrained(student_dir)
    args = build_training_arguments(config, read_launch(), has_eval=False)
    vocabulary = map_teacher_vocabulary(config, tokenizer)
    identity = identify_store(config, vocabulary, {"key": "packs", "max_length": 64})
    teacher = load_teacher(config, AttentionChoice("sdpa", "rows"), args, vocabulary)
    collate = PackedCollator(pad_token_id=tokenizer.pad_token_id)
    compute = build_compute(config, identity.format, teacher, collate, args)
    root.mkdir(parents=True, exist_ok=True)
    write_store(identity, packs, compute, batch_size=3, tell=lambda _: None)
    return identity


def make_distiller(
    student_dir: Path, teacher_dir: Path, output_dir: Path, packs: Any, **keys: Any
) -> tuple[DistillationTrainer, Recorder, list[str]]:
    """Return the trainer, the recorder of its metrics, and its progress lines."""
    config = build_config(student_dir, teacher_dir, output_dir, **keys)
    tokenizer = AutoTokenizer.from_pretrained(student_dir)
    args = build_training_arguments(config, read_launch(), has_eval=False)
    recorder = Recorder()
    implementation = str(config.model.attn_implementation)
    vocabulary, attention = map_teacher_vocabulary(config, tokenizer), AttentionChoice(implementation, "rows")
    collate = PackedCollator(pad_token_id=tokenizer.pad_token_id)
    data: Any = SimpleNamespace(train=packs, record={"key": "packs", "max_length": 64})
    teaching = prepare_teacher(config, data, attention, args, vocabulary, collate)
    trainer = DistillationTrainer(
        model=load_policy(config, implementation, args, read_launch()),
        teaching=teaching,
        distillation=config.distillation,
        adapter=config.adapter,
        is_own_teacher=is_own_teacher(config),
        args=args,
        processing_class=tokenizer,
        observer=Observer(StepCounter(), [], [recorder], Narrator(recorder.lines)),
    )
    return trainer, recorder, recorder.lines


def main() -> None:
    """Train in this rank and write its metrics: ``STUDENT TEACHER OUTPUT JSON_KEYS``."""
    student_dir, teacher_dir, output_dir = map(Path, sys.argv[1:4])
    keys = json.loads(sys.argv[4])
    trainer, recorder, _ = make_distiller(student_dir, teacher_dir, output_dir / "run", make_packs(), **keys)
    trainer.train()
    if trainer.is_world_process_zero():
        (output_dir / "logs.json").write_text(json.dumps(recorder.train_logs))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
