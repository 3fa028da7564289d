"""Short training runs of an adapter on rows of unequal length, with the checks of adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.training.trajectories import KEYS, Narrator, Recorder
from transformers import AutoTokenizer

from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import AdapterConfig
from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.loading import load_causal_lm
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.monitoring.callbacks import Observer
from recipes_lib.training.monitoring.metrics import StepCounter
from recipes_lib.training.trainers.arguments import build_training_arguments
from recipes_lib.training.trainers.next_token_trainer import SFTTrainer


def make_adapter_trainer(
    model_dir: Path, output_dir: Path, packs: Any, adapter: AdapterConfig, *, quantization: Any = None, **training: Any
) -> tuple[SFTTrainer, Recorder, list[str]]:
    """Return a trainer of ``adapter`` on the model, the recorder of its steps, and its progress lines."""
    keys = KEYS | {"model_name_or_path": model_dir, "dataset_name": model_dir, "output_dir": output_dir}
    keys |= {"warmup_steps": 0, "per_device_train_batch_size": 4} | training
    config = load_config("lora", [f"--{name}={value}" for name, value in keys.items()])
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    recorder = Recorder()
    args = build_training_arguments(config, read_launch(), has_eval=False)
    model = add_adapter(load_causal_lm(config.model, "sdpa", quantization), adapter, seed=args.seed)
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=packs,
        data_collator=PackedCollator(pad_token_id=tokenizer.pad_token_id),
        processing_class=tokenizer,
        observer=Observer(StepCounter(), [], [recorder], Narrator(recorder.lines)),
        adapter=adapter,
    )
    return trainer, recorder, recorder.lines
