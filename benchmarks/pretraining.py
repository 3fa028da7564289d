"""Pretraining throughput and held-out loss, compared with transformers' Trainer as run_clm.py sets it up.

A Llama of ten million parameters on the source code of the Python standard library; 8 rows of 512 tokens per step. All
variants take the same number of steps over the same text, and are evaluated on the same held-out text by the unmodified
transformers model.

python benchmarks/pretraining.py [--rounds 3] [--steps 40] [--output build/pretraining.json]
"""

from __future__ import annotations

import json
import math
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import build_parser, compare, run_script, spread, write_results
from workload import add_workload, build_workload

MAX_LENGTH = 512
ROWS_PER_STEP = 8
NUM_UNTIMED_STEPS = 2
MEGABYTES = 6
SHARED: dict[str, Any] = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "warmup_steps": 0, "seed": 0}


def build_texts(folder: Path) -> None:
    """Write ``train.jsonl`` and ``held_out.jsonl`` into ``folder``, once; each source file is a document."""
    if (folder / "train.jsonl").exists():
        return
    sources = (path for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")))
    texts, size = [], 0
    for path in sources:
        if "site-packages" not in path.parts and size < MEGABYTES * 10**6:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
            size += len(texts[-1])
    for name, part in (("train", [text for at, text in enumerate(texts) if at % 50]), ("held_out", texts[::50])):
        lines = [json.dumps({"text": text}) for text in part if text.strip()]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def build_meter() -> Any:
    """Return a callback that times optimizer steps."""
    from transformers import TrainerCallback

    class Meter(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.start = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)

        def tokens_per_second(self) -> float:
            timed = self.seconds[NUM_UNTIMED_STEPS:]
            return ROWS_PER_STEP * MAX_LENGTH * len(timed) / sum(timed)

    return Meter()


def measure_ours(
    folder: Path, output_dir: str, steps: int, meter: Any, *, bf16: bool, torch_compile: bool = False
) -> Any:
    """Train with this library's trainer."""
    from transformers import AutoModelForCausalLM

    from recipes_lib.config.loader import load_config
    from recipes_lib.data.packed.collators import PackedCollator
    from recipes_lib.data.tokens.token_data import prepare_tokens
    from recipes_lib.models.loading import load_tokenizer
    from recipes_lib.training.layouts.launch_environment import read_launch
    from recipes_lib.training.monitoring.callbacks import Observer
    from recipes_lib.training.monitoring.metrics import StepCounter
    from recipes_lib.training.monitoring.progress import build_progress
    from recipes_lib.training.trainers.arguments import build_training_arguments
    from recipes_lib.training.trainers.next_token_trainer import PretrainTrainer
    from recipes_lib.training.trainers.pretraining_rows import build_rows

    keys = SHARED | {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "train.jsonl",
        "output_dir": output_dir,
        "prepared_dir": f"{output_dir}/prepared",
        "max_length": MAX_LENGTH,
        "max_steps": steps,
        "per_device_train_batch_size": ROWS_PER_STEP,
        "weight_decay": 0.0,
        "adam_beta2": 0.999,
        # As in run_clm.py, which concatenates documents; isolated documents are cheaper.
        "cross_document_attention": True,
        "bf16": bf16,
        "torch_compile": torch_compile,
        "save_strategy": "no",
    }
    config = load_config("pretrain", [f"--{name}={value}" for name, value in keys.items()])
    tokenizer = load_tokenizer(config.model, config.tokens)
    rows = build_rows(config, prepare_tokens(config, lambda: tokenizer), 1)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa")
    model.config.use_cache = False
    trainer = PretrainTrainer(
        config=config,
        schedule=rows.plan.schedule,
        model=model,
        args=build_training_arguments(config, read_launch(), has_eval=False, num_steps=rows.plan.num_steps),
        train_dataset=rows.train,
        data_collator=PackedCollator(pad_token_id=tokenizer.pad_token_id),
        processing_class=tokenizer,
        observer=Observer(StepCounter(), [], [meter], build_progress(is_main=False)),
    )
    trainer.train()
    return trainer.model


def measure_trainer(folder: Path, output_dir: str, steps: int, meter: Any, bf16: bool) -> Any:
    """Train with transformers' Trainer on blocks of concatenated texts, as run_clm.py does."""
    import itertools

    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    raw = datasets.load_dataset("json", data_files=str(folder / "train.jsonl"), split="train", cache_dir=output_dir)

    def group(batch: dict[str, Any]) -> dict[str, Any]:
        ids = list(itertools.chain.from_iterable([*ids, tokenizer.eos_token_id] for ids in batch["input_ids"]))
        total = len(ids) // MAX_LENGTH * MAX_LENGTH
        blocks = [ids[start : start + MAX_LENGTH] for start in range(0, total, MAX_LENGTH)]
        return {"input_ids": blocks, "labels": blocks, "attention_mask": [[1] * MAX_LENGTH] * len(blocks)}

    tokenized = raw.map(lambda batch: tokenizer(batch["text"]), batched=True, remove_columns=["text"])
    blocks = tokenized.map(group, batched=True, remove_columns=tokenized.column_names)
    args = TrainingArguments(
        output_dir=output_dir,
        use_cpu=True,
        bf16=bf16,
        max_steps=steps,
        per_device_train_batch_size=ROWS_PER_STEP,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **SHARED,
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        args=args,
        train_dataset=blocks,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=[meter],
    )
    trainer.train()
    return trainer.model


def compute_held_out_loss(model: Any, folder: Path) -> float:
    """Return the mean negative log-likelihood of held-out blocks under the unmodified transformers model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    plain = AutoModelForCausalLM.from_config(model.config).eval()
    plain.load_state_dict(model.state_dict())
    ids: list[int] = []
    for line in (folder / "held_out.jsonl").open(encoding="utf-8"):
        ids += [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]
    losses = []
    for start in range(0, min(len(ids), 40 * MAX_LENGTH) - MAX_LENGTH, MAX_LENGTH):
        block = torch.tensor([ids[start : start + MAX_LENGTH]])
        with torch.no_grad():
            losses.append(plain(input_ids=block, labels=block).loss.item())
    return sum(losses) / len(losses)


VARIANTS: dict[str, Any] = {
    "ours": lambda *args: measure_ours(*args, bf16=True),
    "Trainer, defaults": lambda *args: measure_trainer(*args, bf16=False),
    "Trainer, bf16": lambda *args: measure_trainer(*args, bf16=True),
    "ours, fp32": lambda *args: measure_ours(*args, bf16=False),
    "ours, torch_compile": lambda *args: measure_ours(*args, bf16=True, torch_compile=True),
}


def measure(name: str, folder: Path, steps: int) -> dict[str, float]:
    """Train one variant in this process; return its throughput, held-out loss and share of the matmul peak."""
    import torch
    from transformers import AutoConfig

    from recipes_lib.hardware import measure_matmul_flops
    from recipes_lib.planning.compute import compute_flops_per_token

    peak = measure_matmul_flops(torch.bfloat16)
    meter = build_meter()
    with tempfile.TemporaryDirectory() as output_dir:
        model = VARIANTS[name](folder, output_dir, steps, meter)
    loss = compute_held_out_loss(model, folder)
    assert math.isfinite(loss)
    flops = compute_flops_per_token(AutoConfig.from_pretrained(folder / "model"), MAX_LENGTH).total(1, 1)
    speed = meter.tokens_per_second()
    return {"tokens_per_second": speed, "held_out_loss": loss, "mfu": speed * flops / peak, "peak_gflops": peak / 1e9}


def main() -> None:
    """Measure each variant in its own process; the first steps are not timed."""
    parser = build_parser(__doc__, rounds=3)
    add_workload(parser)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--measure", choices=VARIANTS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.workload, options.steps)))
        return
    build_workload(options.data, options.workload)
    build_texts(options.workload)
    results = run_script(VARIANTS, options.rounds, workload=options.workload, steps=options.steps)
    table = [["variant", "tokens/s", "ours / this", "held-out loss", "share of the bf16 matmul peak", "peak, GFLOP/s"]]
    for name, rounds in results.items():
        figures = [spread(rounds, "tokens_per_second", 0), compare(results, "tokens_per_second", name, "ours")]
        figures += [spread(rounds, "held_out_loss", 4), spread(rounds, "mfu"), spread(rounds, "peak_gflops", 0)]
        table.append([name, *figures])
    write_results(options.output, f"Pretraining, {options.steps} steps", table, results)


if __name__ == "__main__":
    main()
