"""Scripts that checks run in a separate process: ``python -m recipes_lib.proving.scripts``.

``RECIPE FLAG ...`` runs a recipe with a warning for every host synchronisation; ``JSON`` trains on random tokens with
transformers' or TRL's trainer, for comparison.
"""

from __future__ import annotations

import json
import runpy
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils.import_utils import is_flash_attn_2_available


class Clock(TrainerCallback):
    """Records the end of each step, after synchronisation."""

    def __init__(self) -> None:
        """Start without steps."""
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Synchronise and record the time."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def train_by_peer(given: dict[str, Any]) -> None:
    """Train with another trainer on rows of random tokens; write ``peer.json``: tokens per second, peak memory in GB.

    PyTorch counts the memory of a GPU only.

    Args:
        given: Either ``model``, a configuration to pretrain with transformers' trainer, or ``path``, a model to
            fine-tune with TRL's, ``adapter``, ``four_bit`` and ``optim``; and ``rows``, ``length``, ``steps``,
            ``compile``, ``cpu`` and ``output``.
    """
    keys: dict[str, Any] = {
        "output_dir": given["output"],
        "max_steps": given["steps"],
        "per_device_train_batch_size": given["rows"],
        "gradient_accumulation_steps": 2,
        "bf16": True,
        "use_cpu": given["cpu"],
        "torch_compile": given["compile"],
        "dataloader_num_workers": 2,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1000,
        "disable_tqdm": True,
    }
    generator = torch.Generator().manual_seed(0)
    # The time does not depend on which tokens there are.
    vocabulary = given["model"]["vocab_size"] if "model" in given else 256
    ids = torch.randint(vocabulary, (2 * given["rows"] * given["steps"], given["length"]), generator=generator)
    trainer = _build_trl(given, keys, ids) if "path" in given else _build_trainer(given["model"], keys, ids)
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    laps = [after - before for before, after in pairwise(clock.times)]
    # The first half is warm-up and compilation.
    seconds = statistics.median(laps[len(laps) // 2 :])
    found = {"tokens_per_second": 2 * given["rows"] * given["length"] / seconds}
    if torch.cuda.is_available():
        found["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    (Path(given["output"]) / "peer.json").write_text(json.dumps(found))


def _build_trainer(shape: dict[str, Any], keys: dict[str, Any], ids: torch.Tensor) -> Trainer:
    config = AutoConfig.for_model(**shape)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    rows: Any = [{"input_ids": row, "labels": row} for row in ids]
    return Trainer(model=model, args=TrainingArguments(**keys), train_dataset=rows)


def _build_trl(given: dict[str, Any], keys: dict[str, Any], ids: torch.Tensor) -> Trainer:
    """TRL's trainer at its defaults, on rows without padding."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    attention = "flash_attention_2" if is_flash_attn_2_available() and not given["cpu"] else "sdpa"
    options: dict[str, Any] = {"dtype": "bfloat16", "attn_implementation": attention}
    if given["four_bit"]:
        options["quantization_config"] = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    args = SFTConfig(**keys, max_length=given["length"], optim=given["optim"], model_init_kwargs=options)
    adapter = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if given["adapter"] else None
    rows = Dataset.from_dict({"input_ids": ids.tolist()})
    trainer: Any = SFTTrainer(model=given["path"], args=args, train_dataset=rows, peft_config=adapter)
    return trainer  # type: ignore[no-any-return]


def main(arguments: list[str]) -> None:
    """Run the script that the first argument selects: a JSON object, or the path of a recipe."""
    if arguments[0].startswith("{"):
        train_by_peer(json.loads(arguments[0]))
        return
    sys.argv = arguments
    torch.cuda.set_sync_debug_mode("warn")
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
