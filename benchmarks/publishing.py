"""What publishing adds to a step of training: without it, to a Hub that answers, and to one that stalls.

A Llama of ten million weights, checkpoints every few steps; the Hub is one on loopback, of the tests. When it stalls,
nothing that is sent is answered until training is over.

python benchmarks/publishing.py [--rounds 3] [--steps 24] [--output build/publishing.json]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import build_parser, compare, run_script, spread, write_results
from workload import add_workload, build_workload

ROOT = Path(__file__).parents[1]
SENDS = ("preupload", "batch", "upload", "commit")
SAVE_STEPS, NUM_UNTIMED_STEPS = 4, 4
VARIANTS = ("no publishing", "publishing", "publishing, the Hub stalls")


def measure(name: str, folder: Path, steps: int) -> dict[str, Any]:
    """Train once by the recipe and return the seconds of a step, saves included, and what the Hub was asked."""
    # The tests are no package of the library.
    sys.path.insert(0, str(ROOT))
    from tests.publish.hub_server import Fault, open_hub

    with tempfile.TemporaryDirectory() as output_dir, open_hub() as hub:
        keys: dict[str, Any] = {
            "model_name_or_path": folder / "model",
            "dataset_name": folder / "chats.jsonl",
            "output_dir": output_dir,
            "prepared_dir": folder / "prepared",
            "max_length": 512,
            "overlong": "truncate",
            "per_device_train_batch_size": 2,
            "max_steps": steps,
            "logging_steps": 1,
            "save_steps": SAVE_STEPS,
            "num_sample_prompts": 0,
        }
        if name != VARIANTS[0]:
            keys |= {"push_to_hub": "true", "hub_model_id": "me/mine", "hub_strategy": "every_save"}
        if name == VARIANTS[2]:
            hub.sabotage = lambda kind: Fault(stalls=True) if kind in SENDS else None
        environment = os.environ | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": "hf_" + "x" * 34,
        }
        command = [sys.executable, str(ROOT / "recipes" / "sft.py"), *(f"--{key}={keys[key]}" for key in keys)]
        events = train(command, environment, Path(output_dir) / "metrics.jsonl", steps)
        requests = len(hub.requests)
    seconds = [event["seconds"] for event in events]
    # Over whole rounds of steps with one save each.
    first = NUM_UNTIMED_STEPS - 1
    groups = [
        (seconds[at + SAVE_STEPS] - seconds[at]) / SAVE_STEPS for at in range(first, steps - SAVE_STEPS, SAVE_STEPS)
    ]
    return {"milliseconds": 1000 * statistics.median(groups), "requests": requests}


def train(command: list[str], environment: Mapping[str, str], metrics: Path, steps: int) -> list[dict[str, Any]]:
    """Run a recipe until its last step, and no further: a Hub that never answers would keep its end waiting."""
    with (
        tempfile.TemporaryFile() as told,
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=told) as run,
    ):
        events: list[dict[str, Any]] = []
        while run.poll() is None and len(events) < steps:
            time.sleep(0.5)
            lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.exists() else []
            events = [json.loads(line) for line in lines if line.endswith("\n") and '"train"' in line]
        if len(events) < steps:
            told.seek(0)
            raise RuntimeError(told.read().decode()[-3000:])
        run.kill()
    return events


def main() -> None:
    """Measure all in turn."""
    parser = build_parser(__doc__, rounds=3)
    add_workload(parser)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--measure", choices=VARIANTS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.workload.resolve(), options.steps)))
        return
    build_workload(options.data, options.workload)
    results = run_script(VARIANTS, options.rounds, workload=options.workload, steps=options.steps)
    table = [["run", "ms a step (min / median / max)", f"this / {VARIANTS[0]}", "requests"]]
    for name in VARIANTS:
        ratio = compare(results, "milliseconds", VARIANTS[0], name)
        table.append([name, spread(results[name], "milliseconds", 0), ratio, spread(results[name], "requests", 0)])
    write_results(options.output, f"Publishing, {options.steps} steps, a checkpoint every {SAVE_STEPS}", table, results)


if __name__ == "__main__":
    main()
