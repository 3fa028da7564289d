"""Time for which saving a checkpoint blocks training, compared with ``save_pretrained`` and ``torch.save``.

python benchmarks/checkpoints.py [--rounds 3] [--output build/checkpoints.json]
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from harness import build_parser, compare, run_interleaved, spread, write_results
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainingArguments,
    default_data_collator,
)
from transformers.utils.logging import disable_progress_bar

from recipes_lib.training.checkpoints.checkpointing import CheckpointingTrainer
from recipes_lib.training.checkpoints.saver import HostCopy
from recipes_lib.training.monitoring.callbacks import Observer
from recipes_lib.training.monitoring.progress import TrainingProgress

SIZES = {"10 M": {"hidden_size": 320, "num_hidden_layers": 6}, "100 M": {"hidden_size": 768, "num_hidden_layers": 12}}
VARIANTS = {
    "ours": "ours, asynchronous",
    "waiting": "ours, while training waits",
    "plain": "save_pretrained and torch.save",
    "sharded": "ours under FSDP2, two processes, asynchronous",
    "sharded waiting": "ours under FSDP2, two processes, while training waits",
}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
"""Environment that accelerate sets for ``accelerate_configs/fsdp2.yaml``."""
NUM_SAVES = 3


class Timed(CheckpointingTrainer):
    """Trainer that measures, for each save, the pause of training and the time until all files are on disk."""

    observer = cast(Observer, SimpleNamespace(progress=TrainingProgress()))
    is_plain = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pauses: list[float] = []
        self.writes: list[float] = []

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        began = time.perf_counter()
        if self.is_plain:
            folder = Path(str(self.args.output_dir)) / f"plain-{self.state.global_step}"
            self.model.save_pretrained(folder)
            torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        else:
            super()._save_checkpoint(model, trial)
        self.pauses.append(time.perf_counter() - began)
        self.finish_saving()
        self.writes.append(time.perf_counter() - began)


def measure(variant: str, size: str) -> dict[str, float]:
    """Train on a short row with a checkpoint every two steps; return the median seconds over the checkpoints."""
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if variant.startswith("sharded"):
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.distributed.sharding import take_cpus_for_gpus

        os.environ.update(FSDP2)
        take_cpus_for_gpus()
    if variant.endswith("waiting"):
        HostCopy.explain_refusal = lambda *_, **__: "for comparison"  # type: ignore[method-assign]
    width = SIZES[size]["hidden_size"]
    config = LlamaConfig(
        vocab_size=8192, intermediate_size=3 * width, num_attention_heads=width // 64, max_position_embeddings=64,
        **SIZES[size],
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    row = {"input_ids": torch.arange(16), "labels": torch.arange(16)}
    # Of all processes of a launch, which have one parent.
    folder = str(Path(tempfile.gettempdir()) / f"checkpoints-{os.getppid()}")
    Path(folder).mkdir(exist_ok=True)
    try:
        args = TrainingArguments(
            output_dir=folder, max_steps=2 * NUM_SAVES, save_strategy="steps", save_steps=2, save_total_limit=1,
            per_device_train_batch_size=1, use_cpu=not variant.startswith("sharded"), report_to="none",
            disable_tqdm=True, bf16=False,
        )  # fmt: skip
        rows = cast(Any, [row] * 32)
        trainer = Timed(
            model=model, args=args, train_dataset=rows, processing_class=tokenizer, data_collator=default_data_collator
        )
        trainer.is_plain = variant == "plain"
        trainer.train()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "parameters": float(model.num_parameters()),
        "pause": statistics.median(trainer.pauses),
        "written": statistics.median(trainer.writes),
    }


def main() -> None:
    """Compare all variants, or measure one in this process."""
    parser = build_parser(__doc__, rounds=3)
    parser.add_argument("--measure", nargs=2, metavar=("VARIANT", "SIZE"))
    options = parser.parse_args()
    if options.measure:
        measured = json.dumps(measure(*options.measure))
        if int(os.environ.get("RANK", "0")) == 0:
            print(measured)
        return
    table = [["parameters", "variant", "pause, ms", "this / ours", "on the disk after, s"]]
    raw: dict[str, Any] = {}
    for size in SIZES:
        launched = {name: TORCHRUN if name.startswith("sharded") else () for name in VARIANTS}
        commands = {
            name: [sys.executable, *launch, __file__, "--measure", name, size] for name, launch in launched.items()
        }
        raw[size] = results = run_interleaved(commands, options.rounds)
        for name, label in VARIANTS.items():
            milliseconds = [{"pause": 1000 * result["pause"]} for result in results[name]]
            ratio = "1" if name == "ours" else compare(results, "pause", "ours", name)
            row = [size, label, spread(milliseconds, "pause", 0), ratio, spread(results[name], "written")]
            table.append(row)
    write_results(options.output, "How long a checkpoint blocks training", table, raw)


if __name__ == "__main__":
    main()
