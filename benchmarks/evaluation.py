"""Time of ``recipes eval`` compared with ``lm_eval run``: same model, local tasks and batch size, as whole processes.

python benchmarks/evaluation.py [--rounds 3] [--questions 100] [--data ../shared/data/gsm8k_train.jsonl]

Before the first round both run once, and all scores and answers must be equal. CPU seconds include all threads; other
load on the machine changes them less than wall-clock time.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import build_parser, compare, run_interleaved, spread, write_results
from workload import add_workload, build_workload

OURS, THEIRS = "recipes eval", "lm_eval run"
TASKS = ("maths_choice", "maths_written")
COMMON = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl, train: {folder}/{name}.jsonl}}}}
test_split: test
fewshot_split: train
num_fewshot: 1
doc_to_text: "Q: {{{{question}}}}\\nA:"
metadata: {{version: 1.0}}
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITTEN = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 32}
metric_list: [{metric: exact_match}]
"""


def write_tasks(data: Path, folder: Path, num_questions: int) -> None:
    """Write two tasks: multiple choice of four answers, and generation of the answer for a fifth of the questions."""
    drawn = random.Random(0)
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()[:num_questions]]
    answers = [row["answer"] for row in rows]
    choices = []
    for row in rows:
        others = drawn.sample([answer for answer in answers if answer != row["answer"]], 3)
        gold = drawn.randrange(4)
        choices.append({**row, "choices": [*others[:gold], row["answer"], *others[gold:]], "gold": gold})
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind, questions in zip(TASKS, (CHOICE, WRITTEN), (choices, rows[: num_questions // 5]), strict=True):
        lines = (json.dumps(question) for question in questions)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / f"{name}.yaml").write_text(COMMON.format(name=name, folder=folder) + kind, encoding="utf-8")


def build_command(name: str, workload: Path, output: Path) -> list[str]:
    """Return the command of a variant."""
    model, tasks = workload / "model", workload / "tasks"
    asked = ["--tasks", ",".join(TASKS), "--include_path", str(tasks), "--batch_size", "8"]
    if name == OURS:
        return [
            *(sys.executable, "-m", "recipes_lib.cli", "eval", str(model), *asked),
            *("--use_cpu", "--dtype", "float32", "--output_dir", str(output)),
        ]
    return [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args"),
        *(f"pretrained={model},dtype=float32", *asked, "--device", "cpu", "--output_path", str(output)),
        "--log_samples",
    ]


def read_answers(name: str, output: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return scores by task and metric, and answers by task and question."""
    if name == OURS:
        record = json.loads((output / "eval.json").read_text())
        scores = {
            f"{task} {metric}": score["value"]
            for task, found in record["tasks"].items()
            for metric, score in found["scores"].items()
        }
        rows = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
        return scores, {f"{row['task']} {row['doc_id']}": row["answers"] for row in rows}
    (results,) = output.rglob("results_*.json")
    scores = {
        f"{task} {metric.removesuffix(',none')}": value
        for task, found in json.loads(results.read_text())["results"].items()
        for metric, value in found.items()
        if metric.endswith(",none") and "stderr" not in metric
    }
    return scores, dict(_read_their_samples(output))


def _read_their_samples(output: Path) -> Iterator[tuple[str, Any]]:
    for task in TASKS:
        (file,) = output.rglob(f"samples_{task}_*.jsonl")
        for line in file.read_text().splitlines():
            row = json.loads(line)
            # lm-eval writes everything as strings, log-probabilities too.
            answers = [
                answer if isinstance(answer, str) else [float(answer[0]), answer[1] == "True"]
                for answer in row["filtered_resps"]
            ]
            yield f"{task} {row['doc_id']}", answers


def measure(command: list[str]) -> None:
    """Run a command and print its wall-clock seconds, CPU seconds and peak memory."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=sys.stderr)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {"seconds": time.perf_counter() - start, "cpu": used.ru_utime + used.ru_stime}
    print(json.dumps({**figures, "peak_gb": used.ru_maxrss / 2**20}))


def main() -> None:
    """Verify that both give the same answers, then compare their times."""
    parser = build_parser(__doc__, rounds=3)
    add_workload(parser)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--measure", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return
    workload = options.workload.resolve()
    build_workload(options.data, workload)
    write_tasks(options.data, workload / "tasks", options.questions)
    for earlier in workload.glob("answers *"):
        shutil.rmtree(earlier)
    variants = {}
    for name in (OURS, THEIRS):
        output = workload / "answers {round}" / name.replace(" ", "_")
        variants[name] = [sys.executable, __file__, "--measure", *build_command(name, workload, output)]
    first = {name: [part.replace("{round}", "0") for part in command] for name, command in variants.items()}
    run_interleaved(first, 1)
    found = [read_answers(name, workload / "answers 0" / name.replace(" ", "_")) for name in (OURS, THEIRS)]
    if found[0] != found[1]:
        raise SystemExit("scores or answers differ")
    print(f"{len(found[0][0])} scores and {len(found[0][1])} answers are equal", file=sys.stderr)
    results = run_interleaved(variants, options.rounds)
    table = [["command", "seconds", "lm_eval / this", "CPU seconds", "lm_eval / this", "peak GB"]]
    for name in variants:
        table.append(
            [
                *(f"`{name}`", spread(results[name], "seconds"), compare(results, "seconds", name, THEIRS)),
                *(
                    spread(results[name], "cpu"),
                    compare(results, "cpu", name, THEIRS),
                    spread(results[name], "peak_gb"),
                ),
            ]
        )
    write_results(options.output, f"Evaluation, {options.questions} questions", table, results)


if __name__ == "__main__":
    main()
