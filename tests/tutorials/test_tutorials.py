"""Files and commands of each tutorial page in order, with small models, data and benchmarks."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.forked import ROOT
from tests.rows import write_rows
from tests.tiny import sizes

STEP = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
NAMES = {"csv": "mine.csv", "yaml": "mine.yaml"}
ACCOUNTS = ("HuggingFaceTB", "Qwen", "mistralai", "alignment-handbook", "meta-llama", "openai-community")
MODELS = re.compile(rf"({'|'.join(ACCOUNTS)})/[\w.-]+")
SMALL: Mapping[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_length": 256,
    "max_steps": 2,
    "model_config": sizes(32, 2, 2, model_type="llama"),
    "optim": "adamw_torch",
    "response_length": 8,
    "steps_per_generation": 4,
    "num_generations": 4,
    "num_sample_prompts": 2,
    "test_split_size": 4,
    "warmup_steps": 0,
}
"""Values that replace those of a tutorial, for keys that its file has; those of ``EVERYWHERE`` are always set."""
EVERYWHERE = {"use_cpu", "max_steps", "test_split_size"}
DROPPED_SUFFIXES = ("_revision", "chat_template_path", "eos_token", "num_train_epochs", "max_tokens", "bf16")
PAD_TOKENS = {"meta-llama": "<|finetune_right_pad_id|>", "mistralai": "<unk>"}
"""Padding token of each account's models, in whose place the small model has its own; ``<|pad|>`` elsewhere."""
FOR_RANDOM_MODEL: Mapping[str, Mapping[str, Any]] = {
    "ppo": {"response_length": 160},
    "dpo": {"broken_rows": "drop", "max_broken_fraction": 0.9},
    "lora": {"learning_rate": 0.01},
}
"""Further values by recipe: half of the random answers end within 160 tokens; some decode to invalid text; two steps
have little effect on a base in 4 bits."""
CONVERTER = """
import sys
open(sys.argv[sys.argv.index("--outfile") + 1], "wb").write(b"GGUF")
"""
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: rows.jsonl}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match}}]
"""
QUESTION = "How many days are in a week?"


def converse(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_data(folder: Path) -> dict[str, list[Any]]:
    """Return rows in the layouts of the tutorials' datasets, by recipe; write two local lm-eval tasks."""
    answers = [f"There are seven days, number {number}. #### {number}" for number in range(16)]
    chats = [{"messages": converse(QUESTION, answer)} for answer in answers]
    pairs = [
        {
            "prompt": prompt,
            **{name: converse(prompt, text) for name, text in (("chosen", answer), ("rejected", "Red."))},
        }
        for number, answer in enumerate(answers)
        if (prompt := f"{QUESTION} {number}")
    ]
    texts = [{"text": f"{answer} {QUESTION} " * 20} for answer in answers]
    rows = {
        **dict.fromkeys(("sft", "lora", "distill"), chats),
        **dict.fromkeys(("dpo", "reward"), pairs),
        "ppo": [row | {"prompt": f"{row['prompt']}{letter}"} for row in pairs for letter in "abc"],
        "grpo": [{"question": QUESTION + str(number), "answer": answer} for number, answer in enumerate(answers)],
        **dict.fromkeys(("pretrain", "corpus"), texts),
    }
    write_rows(folder / "rows.jsonl", rows["grpo"][:4])
    for name in ("mine_one", "mine_two"):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name))
    return rows


def write_models(model: Path, folder: Path) -> dict[str, Path]:
    """Write the small model once per account of a tutorial's models, with the padding token of their tokenizers."""
    models = {}
    for account in ACCOUNTS:
        models[account] = folder / account
        shutil.copytree(model, models[account])
        for file in models[account].glob("*.json"):
            file.write_text(file.read_text().replace("<|pad|>", PAD_TOKENS.get(account, "<|pad|>")))
    return models


def write_splits(rows: list[Any], keys: Mapping[str, Any], folder: Path) -> Path:
    """Write rows into a folder with the configuration and the splits that a recipe's file names."""
    folder.mkdir(exist_ok=True)
    splits = [keys.get("dataset_train_split", "train"), keys.get("dataset_test_split")]
    parts = [rows[:-6], rows[-6:]] if splits[1] else [rows]
    files = [write_rows(folder / f"{split}.jsonl", part).name for split, part in zip(splits, parts, strict=False)]
    listed = [{"split": split, "path": file} for split, file in zip(splits, files, strict=False)]
    card = {"configs": [{"config_name": keys.get("dataset_config", "default"), "data_files": listed}]}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
    return folder


def make_small(text: str, recipe: str, models: Mapping[str, Path], data: Mapping[str, list[Any]], folder: Path) -> str:
    """Return the text of a recipe's file with a small model, few rows and few steps."""
    keys = yaml.safe_load(text)
    if recipe == "corpus":
        sources = [{"name": str(write_rows(folder / "corpus.jsonl", data["corpus"])), "kind": "text"}]
        return yaml.safe_dump({"sources": sources, "output_dir": keys["output_dir"], "workers": 1})
    if "dataset_revision" not in keys:  # A file that the tutorial has the reader write.
        return yaml.safe_dump(keys | {"bf16": False, "use_cpu": True})
    # Pretraining files set their own `test_split_size`.
    has_held_out = recipe == "pretrain" or "dataset_test_split" in keys
    everywhere = EVERYWHERE - ({"test_split_size"} if has_held_out else set())
    kept = {name: value for name, value in keys.items() if not name.endswith(DROPPED_SUFFIXES)}
    kept |= {name: value for name, value in SMALL.items() if name in kept or name in everywhere}
    kept |= FOR_RANDOM_MODEL.get(recipe, {})
    kept |= {"dataset_name": str(write_splits(data[recipe], keys, folder / f"{keys['dataset_revision']}_{recipe}"))}
    return replace_models(yaml.safe_dump(kept), models)


def replace_models(text: str, models: Mapping[str, Path]) -> str:
    return MODELS.sub(lambda name: str(models[name[1]]), text)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "tutorials").glob("*.md")), ids=lambda path: path.stem)
def test_tutorial_commands_run(page: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    data, models = write_data(tmp_path), write_models(tiny_model_dir, tmp_path / "models")
    text = textwrap.dedent(page.read_text(encoding="utf-8").replace("\n   ", "\n"))
    for name in set(re.findall(r"recipes/configs/[\w./-]+\.yaml", text + read_pipelines(text))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        recipe = Path(name).stem.split("_")[0]
        (tmp_path / name).write_text(make_small((ROOT / name).read_text(), recipe, models, data, tmp_path))
    for name in find_pipelines(text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        stages = (ROOT / name).read_text().replace("launch: fsdp2", "launch: cpu").replace('"> 0.6"', '"> -1"')
        stages = replace_models(stages, models).replace("num_train_epochs: 2", "max_steps: 4")
        stages = re.sub(r"tasks: \[.*?\]", "tasks: [mine_one, mine_two], include_path: [.], use_cpu: true", stages)
        (tmp_path / name).write_text(stages)
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "convert_hf_to_gguf.py").write_text(CONVERTER)
    steps = STEP.findall(replace_models(text, models))
    assert len(steps) > 3
    for language, body in steps:
        if language in NAMES:
            is_recipe = language == "yaml"
            body = make_small(body, "sft", models, data, tmp_path) if is_recipe else body
            (tmp_path / NAMES[language]).write_text(body, encoding="utf-8")
        elif language in ("console", "python"):
            commands = [line.removeprefix("$ ") for line in body.splitlines()] if language == "console" else []
            calls = [[sys.executable, "-m", "recipes_lib.cli", *shlex.split(adapt(line))[1:]] for line in commands]
            for command in calls or [[sys.executable, "-c", body]]:
                done = subprocess.run(
                    command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
                )
                assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert list((tmp_path / "runs").rglob("report.html"))


def adapt(command: str) -> str:
    """Return a command with local tasks instead of Hub benchmarks, in one process on the CPU."""
    command = re.sub(r"--hardware (fsdp2|single_gpu)", "--hardware cpu", command).replace("--num_processes 8", "")
    for original, small in (("--max_steps 500", "--max_steps 2"), ("--test_split_size 0.001", "--test_split_size 4")):
        command = command.replace(original, small)
    return re.sub(r"--tasks [\w,]+", "--tasks mine_one --include_path . --use_cpu true", command)


def find_pipelines(text: str) -> set[str]:
    return set(re.findall(r"recipes/pipelines/[\w-]+\.yaml", text))


def read_pipelines(text: str) -> str:
    return "".join((ROOT / name).read_text() for name in find_pipelines(text))
