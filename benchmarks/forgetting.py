"""Catastrophic forgetting: bits per byte gained on a new domain and lost on the old one by fine-tuning.

A Llama of two layers of width 80 is pretrained on plays by Shakespeare, then fine-tuned on the source code of Python's
standard library: without a remedy, with replay of the plays, with a penalty on weights (EWC) or predictions (KL), or
with an adapter. All arms have the same steps, batches and order of code; each round is a seed. Nothing is timed, so all
runs share one process.

python benchmarks/forgetting.py [--data FILE] [--rounds 3] [--steps 30] [--base_steps 200] [--work DIR]

With ``--work``, the same command resumes an interrupted run, and ``--rounds 3`` after ``--rounds 1`` adds two seeds.
"""

from __future__ import annotations

import json
import math
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import build_parser, spread, write_results
from knowledge import DEFAULT_DATA, ROW_CHARACTERS, RUN, train, write_model, write_texts

NUM_HELD_OUT = 40
"""Rows of each domain."""
RATE = 1e-3
ARMS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "replay 5 %": {"replay_share": 0.05},
    "replay 25 %": {"replay_share": 0.25},
    "EWC, 1": {"ewc_lambda": 1.0},
    "EWC, 30": {"ewc_lambda": 30.0},
    "L2-SP, 0.01": {"ewc_lambda": 0.01, "ewc_fisher": "identity"},
    "KL, 0.3": {"kl_to_base": 0.3},
    "LoRA, rank 8": {"lora_r": 8, "learning_rate": 10 * RATE},
}
"""Keys of each arm."""


def write_code(folder: Path) -> None:
    """Write rows of source code, and held-out rows of both domains, if they do not exist."""
    if (folder / "code_held_out.jsonl").exists():
        return
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8") for file in files)[: 1 << 20]
    rows = [text[at : at + ROW_CHARACTERS] for at in range(0, len(text), ROW_CHARACTERS)]
    plays = [json.loads(line)["text"] for line in (folder / "held_out.jsonl").read_text().splitlines()]
    for name, part in (
        ("plays_held_out", plays[:NUM_HELD_OUT]),
        ("code", rows[:-NUM_HELD_OUT]),
        ("code_held_out", rows[-NUM_HELD_OUT:]),
    ):
        lines = "".join(json.dumps({"text": row}) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def measure(model_dir: Path, data: Path) -> float:
    """Return a model's bits per byte on rows of text, split into windows as in training."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    nats, num_bytes = 0.0, 0
    for line in data.read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["text"]
        ids = torch.tensor(tokenizer(text)["input_ids"])
        num_bytes += len(text.encode())
        for window in ids.split(RUN["max_length"]):
            if len(window) > 1:
                with torch.no_grad():
                    nats += float(model(input_ids=window[None], labels=window[None]).loss) * (len(window) - 1)
    return nats / math.log(2) / num_bytes


def make_keys(work: Path, model: Path, domain: str, output_dir: Path) -> dict[str, Any]:
    """Return the configuration of a run on one domain."""
    return {
        **{name: value for name, value in RUN.items() if not name.startswith(("eval_", "attn_"))},
        "model_name_or_path": str(model),
        "dataset_name": str(work / f"{domain}.jsonl"),
        "prepared_dir": str(work / "prepared"),
        "overlong": "split",
        "eval_strategy": "no",
        "output_dir": str(output_dir),
    }


def train_base(work: Path, steps: int) -> Path:
    """Train the model on the plays and compute its Fisher information, if not done before."""
    from recipes_lib.training.forgetting import fisher_command

    base = work / f"base after {steps} steps"
    if not (base / "fisher.json").exists():
        keys = make_keys(work, write_model("student", 0, work / "start", work / "tokenizer"), "train", base)
        keys |= {"max_steps": steps, "learning_rate": 3e-3}
        train("sft", keys)
        flags = [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in keys.items()]
        fisher_command.main([*flags, "--num_documents=200"])
    return base


def run_arm(work: Path, base: Path, arm: str, seed: int, steps: int) -> dict[str, float]:
    """Fine-tune the base model on code, and return its bits per byte on both domains."""
    run = work / f"{base.name}, {steps} more" / f"{arm} {seed}"
    result = run / "bits.json"
    if not result.exists():
        given = ARMS[arm]
        keys = make_keys(work, base, "code", run) | {"max_steps": steps, "learning_rate": RATE, "seed": seed} | given
        if "replay_share" in given:
            keys["replay_dataset"] = str(work / "train.jsonl")
        train("lora" if "lora_r" in given else "sft", keys)
        bits = {domain: measure(run, work / f"{domain}_held_out.jsonl") for domain in ("code", "plays")}
        result.write_text(json.dumps(bits), encoding="utf-8")
    found: dict[str, float] = json.loads(result.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Run all arms and print the table."""
    parser = build_parser(__doc__, rounds=3)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--base_steps", type=int, default=200)
    parser.add_argument("--work", type=Path, help="folder in which models and measurements are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        write_texts(options.data, work)
        write_code(work)
        base = train_base(work, options.base_steps)
        before = {domain: measure(base, work / f"{domain}_held_out.jsonl") for domain in ("code", "plays")}
        results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        for seed in range(1, options.rounds + 1):
            for arm, found in results.items():
                bits = run_arm(work, base, arm, seed, options.steps)
                found.append({"gained": before["code"] - bits["code"], "lost": bits["plays"] - before["plays"]})
    table = [["arm", "gained on code, min / median / max", "lost on plays"]]
    table += [
        [arm, spread(found, "gained", digits=3), spread(found, "lost", digits=3)] for arm, found in results.items()
    ]
    start = f"at the start {before['code']:.3f} on code and {before['plays']:.3f} on plays"
    title = f"Held-out bits per byte, {start}; {options.steps} steps, {options.rounds} seeds"
    write_results(options.output, title, table, results)


if __name__ == "__main__":
    main()
