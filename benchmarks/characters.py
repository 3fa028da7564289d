"""Reproduction of a published result: the character-level GPT-2 of nanoGPT's README, by its train.py and by our recipe.

4 layers, 4 heads, width 128, blocks of 64, 12 a batch, 2,000 steps, AdamW from 1e-3 to 1e-4, no dropout, on a CPU. The
README reports a validation loss of 1.88. Nothing is downloaded: ``--nanogpt`` is the path of a checkout.

python benchmarks/characters.py --nanogpt PATH [--data FILE] [--bias True] [--rounds 3] [--steps 2000]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness import build_parser, compare, run_interleaved, spread, write_results

ROOT = Path(__file__).parents[1]
DEFAULT_DATA = Path("../shared/data/tinyshakespeare.txt")
BLOCK = 64
TRAIN_SHARE = 0.9
END = "<|endoftext|>"


def build_corpus(data: Path, folder: Path, nanogpt: Path) -> None:
    """Write the same split for both: texts and a character tokenizer for our recipe, token ids for nanoGPT."""
    text = data.read_text(encoding="utf-8")
    cut = int(len(text) * TRAIN_SHARE)
    characters = sorted(set(text))
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", text[:cut]), ("val", text[cut:])):
        (folder / f"{name}.txt").write_text(part, encoding="utf-8", newline="")
        ids = np.array([characters.index(character) for character in part], np.uint16)
        (nanogpt / "data" / "shakespeare_char" / f"{name}.bin").write_bytes(ids.tobytes())
    import pickle

    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters))}
    (nanogpt / "data" / "shakespeare_char" / "meta.pkl").write_bytes(pickle.dumps(meta))
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={c: number for number, c in enumerate([*characters, END])}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.save_pretrained(folder / "tokenizer")


MODELS: dict[str, dict[str, Any]] = {
    "True": {
        "model_type": "gpt2",
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 128,
        "vocab_size": 66,
        # nanoGPT's exact GELU. GPT-2's tanh form, as transformers computes it, takes a third of the step's time.
        "activation_function": "gelu",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "False": {
        "model_type": "opt",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "hidden_size": 128,
        "word_embed_proj_dim": 128,
        "ffn_dim": 4 * 128,
        "vocab_size": 66,
        "max_position_embeddings": BLOCK + 1,
        "activation_function": "gelu",
        "enable_bias": False,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
}
"""nanoGPT's ``bias`` -> the same architecture in transformers: GPT-2 always has biases, OPT can do without."""


def measure_ours(folder: Path, steps: int, seed: int, bias: str) -> dict[str, float]:
    """Run the recipe; the loss is over all held-out windows, the time excludes evaluation."""
    with tempfile.TemporaryDirectory() as output_dir:
        keys: dict[str, Any] = {
            "model_config": MODELS[bias],
            "tokenizer_name_or_path": folder / "tokenizer",
            "dataset_name": folder / "train.txt",
            "dataset_test_split": folder / "val.txt",
            "output_dir": output_dir,
            "prepared_dir": f"{output_dir}/prepared",
            # nanoGPT predicts BLOCK characters from BLOCK; a row here needs one more, which is only a target.
            "max_length": BLOCK + 1,
            "cross_document_attention": True,
            "per_device_train_batch_size": 12,
            "max_steps": steps,
            "learning_rate": 1e-3,
            "warmup_steps": min(100, steps // 10),
            "adam_beta1": 0.9,
            "adam_beta2": 0.99,
            "optim": "adamw_torch_fused",
            "bf16": False,
            "logging_steps": 10,
            "eval_strategy": "steps",
            "eval_steps": steps,
            "per_device_eval_batch_size": 64,
            "num_sample_prompts": 0,
            "save_strategy": "no",
            "seed": seed,
        }
        flags = [f"--{key}={json.dumps(value) if isinstance(value, dict) else value}" for key, value in keys.items()]
        subprocess.run([sys.executable, str(ROOT / "recipes" / "pretrain.py"), *flags], check=True, capture_output=True)
        events = [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]
    losses = [event["eval_loss"] for event in events if event["kind"] == "eval"]
    train = [event for event in events if event["kind"] == "train"]
    timed = train[-1]["step"] - train[0]["step"]
    return {
        "milliseconds": 1000 * (train[-1]["seconds"] - train[0]["seconds"]) / timed,
        "loss": losses[-1],
        "mfu": train[-1]["mfu"],
    }


def measure_nanogpt(nanogpt: Path, steps: int, seed: int, bias: str) -> dict[str, float]:
    """Run train.py with the command of its README; steps that evaluate are not timed."""
    source = (nanogpt / "train.py").read_text(encoding="utf-8")
    script = nanogpt / "train_seeded.py"
    script.write_text(source.replace("torch.manual_seed(1337 + seed_offset)", f"torch.manual_seed({seed})"))
    flags = (
        "--device=cpu --compile=False --eval_iters=200 --log_interval=10 --block_size=64 --batch_size=12 --n_layer=4 "
        f"--n_head=4 --n_embd=128 --max_iters={steps} --lr_decay_iters={steps} --dropout=0.0 --learning_rate=1e-3 "
        f"--min_lr=1e-4 --beta2=0.99 --warmup_iters={min(100, steps // 10)} --eval_interval={steps} --bias={bias} "
        "--gradient_accumulation_steps=1 --dataset=shakespeare_char --out_dir=out-benchmark"
    )
    command = [sys.executable, script.name, *flags.split()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=nanogpt)
    times = re.findall(r"^iter (\d+): loss \S+, time (\S+)ms", done.stdout, re.MULTILINE)
    # train.py times every tenth step, which reads the loss; the first one includes the setup.
    timed = [float(time) for number, time in times if int(number) not in (0, steps)]
    losses = re.findall(r"^step \d+: train loss \S+, val loss (\S+)", done.stdout, re.MULTILINE)
    return {"milliseconds": sum(timed) / len(timed), "loss": float(losses[-1])}


def main() -> None:
    """Measure both, interleaved; each round has its own seed."""
    parser = build_parser(__doc__, rounds=3)
    parser.add_argument("--nanogpt", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--bias", choices=MODELS, default="False")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--measure", choices=["ours", "nanoGPT"])
    options = parser.parse_args()
    folder = (ROOT / "build" / "characters").resolve()
    if options.measure == "ours":
        print(json.dumps(measure_ours(folder, options.steps, options.seed, options.bias)))
    elif options.measure == "nanoGPT":
        print(json.dumps(measure_nanogpt(options.nanogpt, options.steps, options.seed, options.bias)))
    if options.measure:
        return
    build_corpus(options.data, folder, options.nanogpt)
    shared = ["--nanogpt", str(options.nanogpt.resolve()), "--steps", str(options.steps)]
    shared += ["--bias", options.bias]
    variants = {
        name: [sys.executable, __file__, *shared, "--seed", "{round}", "--measure", name]
        for name in ("ours", "nanoGPT")
    }
    results = run_interleaved(variants, options.rounds)
    table = [["program", "ms a step (min / median / max)", "this / ours", "validation loss"]]
    for name in variants:
        times, losses = spread(results[name], "milliseconds"), spread(results[name], "loss", 4)
        table.append([name, times, compare(results, "milliseconds", "ours", name), losses])
    write_results(options.output, f"Character-level GPT-2, {options.steps} steps", table, results)


if __name__ == "__main__":
    main()
