"""Scripts that checks start in a separate process: ``python -m recipes_lib.proving.scripts``.

``RECIPE FLAG ...`` runs a recipe with warnings for every host synchronisation; ``JSON`` trains on random tokens with
transformers' own trainer, for comparison.
"""

from __future__ import annotations

import json
import runpy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


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
    """Train with transformers' trainer and write ``peer.json``: tokens per second and peak memory in GB."""
    shape = dict(given["model"])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    num_rows = 2 * given["rows"] * given["steps"]
    ids = torch.randint(shape["vocab_size"], (num_rows, given["length"]), generator=generator)
    args = TrainingArguments(
        output_dir=given["output"],
        max_steps=given["steps"],
        per_device_train_batch_size=given["rows"],
        gradient_accumulation_steps=2,
        bf16=True,
        use_cpu=given["cpu"],
        torch_compile=given["compile"],
        dataloader_num_workers=2,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
    )
    clock = Clock()
    rows = [{"input_ids": row, "labels": row} for row in ids]
    Trainer(model=model, args=args, train_dataset=rows, callbacks=[clock]).train()
    laps = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    seconds = statistics.median(laps[len(laps) // 2 :])
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    found = {"tokens_per_second": 2 * given["rows"] * given["length"] / seconds, "memory_gb": memory / 1e9}
    (Path(given["output"]) / "peer.json").write_text(json.dumps(found))


def main(arguments: list[str]) -> None:
    """Run the script of the arguments."""
    if arguments[0].startswith("{"):
        train_by_peer(json.loads(arguments[0]))
        return
    sys.argv = arguments
    torch.cuda.set_sync_debug_mode("warn")
    torch.ones((), device="cuda").item()  # A synchronisation on purpose: if it is not in the log, warnings are lost.
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
