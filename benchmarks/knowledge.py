"""Ablation of distillation losses on real text: held-out bits per byte at equal tokens.

A teacher of four layers of width 128 is trained on plays by Shakespeare. Students of two layers of width 80, a quarter
of its parameters, start from random weights and train for fewer steps: on labels only, with the teacher's
probabilities, and with each hidden-state loss in addition. All arms have the same rows, order, learning rate and steps;
each round is a seed.

python benchmarks/knowledge.py [--data FILE] [--rounds 3] [--steps 150] [--teacher_steps 400] [--work DIR]

With ``--work``, the same command resumes an interrupted run, and ``--rounds 3`` after ``--rounds 1`` adds two seeds.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import build_parser, run_interleaved, spread, write_results

ROOT = Path(__file__).parents[1]
DEFAULT_DATA = Path("../shared/data/tinyshakespeare.txt")
HELD_OUT_SHARE = 0.05
ROW_CHARACTERS = 1500
BITS = "bits.json"
WIDTHS: Mapping[str, dict[str, Any]] = {
    "teacher": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4},
    "student": {"hidden_size": 80, "intermediate_size": 240, "num_hidden_layers": 2, "num_attention_heads": 4},
}
ARMS: Mapping[str, dict[str, Any]] = {
    "labels": {},
    "response": {"distillation_alpha": 0.5},
    "feature": {"feature_weight": 1.0},
    "feature, cosine": {"feature_weight": 1.0, "feature_loss": "cosine"},
    "attention": {"attention_weight": 1.0},
    "similarity": {"similarity_weight": 10.0},
    "distance": {"distance_weight": 1.0},
    "angle": {"angle_weight": 1.0},
}
"""Arm -> its keys; all but the first use the teacher's probabilities."""
RUN: Mapping[str, Any] = {
    "max_length": 128,
    "bf16": False,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "eval_steps": 0.999,
    "eval_on_start": False,
    "num_sample_prompts": 0,
    "logging_steps": 10,
    "save_strategy": "no",
    "attn_implementation": "eager",
}


def write_texts(data: Path, folder: Path) -> None:
    """Write training rows, held-out rows and a tokenizer of 512 tokens, if they do not exist."""
    if (folder / "tokenizer").exists():
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    text = data.read_text(encoding="utf-8")
    rows = [text[at : at + ROW_CHARACTERS] for at in range(0, len(text), ROW_CHARACTERS)]
    cut = int(len(rows) * (1 - HELD_OUT_SHARE))
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[:cut]), ("held_out", rows[cut:])):
        lines = "".join(json.dumps({"text": row}) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(rows[:cut], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.save_pretrained(folder / "tokenizer")


def write_model(role: str, seed: int, folder: Path, tokenizer: Path) -> Path:
    """Write a random model with its tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(seed)
    sizes = WIDTHS[role]
    ids = {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}
    config = LlamaConfig(vocab_size=512, max_position_embeddings=128, tie_word_embeddings=True, **ids, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def train(recipe: str, keys: Mapping[str, Any]) -> None:
    """Run a recipe in this process."""
    from recipes_lib.config.loader import load_config

    spec = importlib.util.spec_from_file_location(f"{recipe}_recipe", ROOT / "recipes" / f"{recipe}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    flags = [f"--{name}={json.dumps(value) if not isinstance(value, str) else value}" for name, value in keys.items()]
    module.main(load_config(recipe, flags))


def read_bits(output_dir: Path) -> float:
    """Return the held-out bits per byte at the end of a run."""
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    evaluations = [event for event in map(json.loads, lines) if event["kind"] == "eval"]
    return float(evaluations[-1]["eval_bits_per_byte"])


def run_arm(work: Path, arm: str, number: int, steps: int, teacher_steps: int) -> float:
    """Return the held-out bits per byte of a student, or of the teacher; train it if not done before."""
    teacher = work / f"teacher after {teacher_steps} steps"
    keys: dict[str, Any]
    if arm == "teacher":
        number, result = 0, teacher / BITS
        keys = {"max_steps": teacher_steps, "per_device_train_batch_size": 16}
    else:
        run_arm(work, "teacher", 0, steps, teacher_steps)
        result = work / f"after {steps} steps of {teacher_steps}" / f"{arm} {number}" / BITS
        keys = {"max_steps": steps, "seed": number}
        keys |= {} if arm == "labels" else {"teacher_model_name_or_path": str(teacher), **ARMS[arm]}
    if not result.exists():
        role = "teacher" if arm == "teacher" else "student"
        data = {
            "model_name_or_path": str(write_model(role, number, work / f"{role} {number}", work / "tokenizer")),
            "dataset_name": str(work / "train.jsonl"),
            "dataset_test_split": str(work / "held_out.jsonl"),
            "prepared_dir": str(work / "prepared"),
            "overlong": "split",
            "learning_rate": 3e-3,
            "output_dir": str(result.parent),
        }
        train("sft" if arm in ("teacher", "labels") else "distill", {**RUN, **data, **keys})
        bits = read_bits(result.parent)
        result.write_text(json.dumps(bits), encoding="utf-8")
    return float(json.loads(result.read_text(encoding="utf-8")))


def main() -> None:
    """Run all rounds and print the table; with ``--arm``, print one measurement as JSON."""
    parser = build_parser(__doc__, rounds=3)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--teacher_steps", type=int, default=400)
    parser.add_argument("--work", type=Path, help="folder in which models and measurements are kept")
    parser.add_argument("--arm", choices=["teacher", *ARMS])
    parser.add_argument("--round", type=int, default=1)
    options = parser.parse_args()
    if options.arm is not None:
        write_texts(options.data, options.work)
        bits = run_arm(options.work, options.arm, options.round, options.steps, options.teacher_steps)
        print(json.dumps({"bits": bits}))
        return
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        write_texts(options.data, work)
        counts = ["--steps", str(options.steps), "--teacher_steps", str(options.teacher_steps)]
        command = [sys.executable, __file__, "--work", str(work), "--round", "{round}", *counts, "--arm"]
        results = run_interleaved({arm: [*command, arm] for arm in ("teacher", *ARMS)}, options.rounds)
    table = [["arm", "bits per byte, min / median / max", "below response, seed by seed"]]
    for arm, found in results.items():
        pairs = zip(results["response"], found, strict=True)
        gains = " ".join(f"{response['bits'] - own['bits']:+.4f}" for response, own in pairs)
        table.append([arm, spread(found, "bits", digits=4), gains])
    title = f"Held-out bits per byte of students after {options.steps} steps, {options.rounds} seeds"
    write_results(options.output, title, table, results)


if __name__ == "__main__":
    main()
