"""Files and commands of each tutorial page in order, with small models, data and benchmarks."""

from __future__ import annotations

import os
import re
import shlex
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

STEP = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
NAMES = {"csv": "mine.csv", "yaml": "mine.yaml"}
MODELS = re.compile(r"(HuggingFaceTB|Qwen|mistralai|alignment-handbook|meta-llama|openai-community)/[\w.-]+")
SMALL: Mapping[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_length": 256,
    "max_steps": 2,
    "model_config": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "optim": "adamw_torch",
    "response_length": 8,
    "steps_per_generation": 4,
    "num_generations": 4,
    "num_sample_prompts": 2,
    "test_split_size": 4,
    "pad_token": "<|pad|>",
    "warmup_steps": 0,
}
"""Values that replace those of a tutorial, for keys that its file has; those of ``EVERYWHERE`` are always set."""
EVERYWHERE = {"use_cpu", "max_steps", "test_split_size"}
DROPPED_SUFFIXES = (
    "_revision",
    "_split",
    "_config",
    "chat_template_path",
    "eos_token",
    "num_train_epochs",
    "max_tokens",
    "bf16",
)
FOR_RANDOM_MODEL: Mapping[str, Mapping[str, Any]] = {
    "ppo": {"response_length": 160},
    "dpo": {"broken_rows": "drop", "max_broken_fraction": 0.9},
}
"""Further values by recipe: half of the random answers end within 160 tokens; some decode to invalid text."""
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


def write_data(folder: Path) -> dict[str, Path]:
    """Write rows in the layouts of the tutorials' datasets, by recipe, and two local lm-eval tasks."""
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
    return {recipe: write_rows(folder / f"{recipe}_rows.jsonl", contents) for recipe, contents in rows.items()}


def make_small(text: str, recipe: str, model: Path, data: Mapping[str, Path]) -> str:
    """Return the text of a recipe's file with a small model, few rows and few steps."""
    keys = yaml.safe_load(text)
    if recipe == "corpus":
        sources = [{"name": str(data["corpus"]), "kind": "text"}]
        return yaml.safe_dump({"sources": sources, "output_dir": keys["output_dir"], "workers": 1})
    if "dataset_revision" not in keys:  # A file that the tutorial has the reader write.
        return yaml.safe_dump(keys | {"bf16": False, "use_cpu": True})
    # Pretraining files set their own `test_split_size`.
    everywhere = EVERYWHERE - ({"test_split_size"} if recipe == "pretrain" else set())
    models = ("model_name_or_path", "tokenizer_name_or_path", "teacher_model_name_or_path")
    kept = {
        name: value for name, value in keys.items() if not name.endswith(DROPPED_SUFFIXES) or name == "model_config"
    }
    kept |= {name: value for name, value in SMALL.items() if name in kept or name in everywhere}
    kept |= FOR_RANDOM_MODEL.get(recipe, {})
    kept |= {name: str(model) for name in models if name in kept} | {"dataset_name": str(data[recipe])}
    return yaml.safe_dump(kept)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "tutorials").glob("*.md")), ids=lambda path: path.stem)
def test_tutorial_commands_run(page: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    data = write_data(tmp_path)
    text = textwrap.dedent(page.read_text(encoding="utf-8").replace("\n   ", "\n"))
    for name in set(re.findall(r"recipes/configs/[\w./-]+\.yaml", text + read_pipelines(text))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        recipe = Path(name).stem.split("_")[0]
        (tmp_path / name).write_text(make_small((ROOT / name).read_text(), recipe, tiny_model_dir, data))
    for name in find_pipelines(text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        stages = (ROOT / name).read_text().replace("launch: fsdp2", "launch: cpu").replace('"> 0.6"', '"> -1"')
        stages = MODELS.sub(str(tiny_model_dir), stages).replace("num_train_epochs: 2", "max_steps: 4")
        stages = re.sub(r"tasks: \[.*?\]", "tasks: [mine_one, mine_two], include_path: [.], use_cpu: true", stages)
        (tmp_path / name).write_text(stages)
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "convert_hf_to_gguf.py").write_text(CONVERTER)
    steps = STEP.findall(MODELS.sub(str(tiny_model_dir), text))
    assert len(steps) > 3
    for language, body in steps:
        if language in NAMES:
            is_recipe = language == "yaml"
            body = make_small(body, "sft", tiny_model_dir, data) if is_recipe else body
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
