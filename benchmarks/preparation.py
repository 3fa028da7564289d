"""Data preparation (read, render, tokenize, mask, pack), compared with TRL's and with the tokenizer alone.

python benchmarks/preparation.py [--data FILE] [--rounds 5] [--output build/preparation.json]

With ``--rows 20000 80000``, only ours, on these numbers of chats: seconds and peak memory, interleaved; with
``--against PYTHON``, the interpreter of another checkout's environment, compared with that checkout.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from harness import build_parser, compare, run_interleaved, run_script, spread, write_results
from workload import add_workload, build_workload

MAX_LENGTH = 512


def measure_bare(folder: Path) -> float:
    """Return the seconds of one ``encode_batch`` over the rendered chats."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").open(encoding="utf-8")]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    start = time.perf_counter()
    tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return time.perf_counter() - start


def measure_ours(folder: Path, chats: str = "chats.jsonl") -> float:
    """Return the seconds of ``prepare`` into an empty folder."""
    import datasets  # noqa: F401 (imports are not timed in any variant)
    import pyarrow  # noqa: F401

    from recipes_lib.config.loader import load_config
    from recipes_lib.data.packed.prepared_set import prepare
    from recipes_lib.models.loading import load_tokenizer

    with tempfile.TemporaryDirectory() as prepared_dir:
        keys = {
            "model_name_or_path": folder / "model",
            "dataset_name": folder / chats,
            "output_dir": prepared_dir,
            "max_length": MAX_LENGTH,
            "overlong": "truncate",
            "prepared_dir": prepared_dir,
        }
        config = load_config("sft", [f"--{name}={value}" for name, value in keys.items()])
        tokenizer = load_tokenizer(config.model, config.tokens)
        start = time.perf_counter()
        prepare(config, lambda: tokenizer)
        return time.perf_counter() - start


def measure_trl(folder: Path, num_proc: int | None) -> float:
    """Return the seconds of loading the file and of building TRL's trainer, which prepares the rows."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory() as cache:
        datasets.disable_progress_bars()
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        args = SFTConfig(
            output_dir=cache,
            use_cpu=True,
            report_to="none",
            max_length=MAX_LENGTH,
            packing=True,
            assistant_only_loss=True,
            dataset_num_proc=num_proc,
        )
        start = time.perf_counter()
        rows = datasets.load_dataset("json", data_files=str(folder / "chats.jsonl"), split="train", cache_dir=cache)
        SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
        return time.perf_counter() - start


def write_chats(folder: Path, num_rows: int) -> str:
    """Write ``num_rows`` chats, repeated from the workload and numbered so that all differ; return the file's name."""
    path = folder / f"chats-{num_rows}.jsonl"
    if not path.exists():
        chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").open(encoding="utf-8")]
        with path.open("w", encoding="utf-8") as file:
            for number in range(num_rows):
                question, answer = chats[number % len(chats)]
                numbered = {**question, "content": f"{number}. {question['content']}"}
                file.write(json.dumps({"messages": [numbered, answer]}) + "\n")
    return path.name


def measure_rows(options: argparse.Namespace) -> None:
    """Compare peak memory and seconds by number of rows, optionally with another checkout."""
    sides = {"ours": sys.executable} | ({"the other checkout": options.against} if options.against else {})
    variants = {}
    for num_rows in options.rows:
        chats = write_chats(options.workload, num_rows)
        for side, python in sides.items():
            command = [python, __file__, "--workload", str(options.workload), "--measure", "ours", "--chats", chats]
            variants[f"{side}, {num_rows:,} rows"] = command
    results = run_interleaved(variants, options.rounds)
    table = [["variant", "seconds (min / median / max)", "peak memory, GB (min / median / max)"]]
    table += [[name, spread(results[name], "seconds"), spread(results[name], "peak_gb")] for name in variants]
    write_results(options.output, "Preparation by number of rows", table, results)


VARIANTS = {
    "ours": measure_ours,
    "bare encode_batch": measure_bare,
    "TRL": lambda folder: measure_trl(folder, None),
    "TRL, dataset_num_proc 2": lambda folder: measure_trl(folder, 2),
}


def main() -> None:
    """Measure each variant in its own process, imports excluded."""
    parser = build_parser(__doc__, rounds=5)
    add_workload(parser)
    parser.add_argument("--rows", type=int, nargs="+", help="measure ours on so many chats")
    parser.add_argument("--against", help="interpreter of another checkout, to measure its preparation in turn")
    parser.add_argument("--measure", choices=VARIANTS)
    parser.add_argument("--chats", help="file in the workload, for --measure ours")
    options = parser.parse_args()
    if options.measure:
        seconds = (
            measure_ours(options.workload, options.chats)
            if options.chats
            else VARIANTS[options.measure](options.workload)
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        print(json.dumps({"seconds": seconds, "peak_gb": peak}))
        return
    build_workload(options.data, options.workload)
    if options.rows:
        measure_rows(options)
        return
    results = run_script(VARIANTS, options.rounds, workload=options.workload)
    table = [["variant", "seconds (min / median / max)", "this / ours"]]
    for name in VARIANTS:
        table.append([name, spread(results[name], "seconds"), compare(results, "seconds", "ours", name)])
    write_results(options.output, "Preparation", table, results)


if __name__ == "__main__":
    main()
