"""``recipes distill-write``: determinism, resumption, and rows as data for SFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distillation.test_distillation import load
from tests.rl import keys_task
from tests.rows import read_rows, write_rows
from transformers import AutoTokenizer

from recipes_lib.commands import sampling
from recipes_lib.config.loader import load_config
from recipes_lib.data.packed.training_data import load_training_data
from recipes_lib.errors import ConfigError
from recipes_lib.models.generation import GenerateBackend, Generated
from recipes_lib.models.loading import load_tokenizer

KEYS = set(range(keys_task.FIRST_KEY, keys_task.FIRST_KEY + keys_task.NUM_KEYS))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Policy that answers with one of the two keys that end its prompt."""
    return keys_task.write_policy(tmp_path_factory.mktemp("teacher"), 0, num_steps=80)


@pytest.fixture
def run(teacher: Path, tmp_path: Path) -> Any:
    prompts = keys_task.write_prompts(tmp_path / "prompts.jsonl", 20, seed=5)

    def call(name: str = "answers.jsonl", *flags: str, **keys: Any) -> list[dict[str, Any]]:
        keys_ = {
            "model_name_or_path": "of/no-account", "teacher_model_name_or_path": teacher, "dataset_name": prompts,
            "output_dir": tmp_path / "out", "response_length": keys_task.MAX_ANSWER, "bf16": False, "use_cpu": True,
            "per_device_eval_batch_size": 8, **keys,
        }  # fmt: skip
        words = [f"--output={tmp_path / name}", *flags, *(f"--{key}={value}" for key, value in keys_.items())]
        sampling.main_answers(words)
        return read_rows(tmp_path / name)

    return call


def test_rows_are_sampled_from_recorded_teacher(run, teacher, tmp_path, capsys) -> None:
    rows = run()
    record = json.loads((tmp_path / "answers.jsonl.record.json").read_text())
    assert len(rows) == record["num_rows"] == 20 - record["num_unfinished"] - record["num_empty"]
    assert len(rows) > 15
    tokenizer = keys_task.build_tokenizer()
    model = load(teacher, is_teacher=True)
    nlls = []
    for row in rows:
        prompt, answer = (tokenizer(row[name]).input_ids for name in ("prompt", "completion"))
        with torch.no_grad():
            logps = model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        nlls += [-float(logps[len(prompt) - 1 + at, token]) for at, token in enumerate(answer)]
    assert sum(nlls) / len(nlls) < 1.5, "uniformly random words have 3.5 nats"
    assert {name: record[name] for name in ("seed", "temperature", "response_length", "reasoning")} == {
        "seed": 42, "temperature": 1.0, "response_length": keys_task.MAX_ANSWER, "reasoning": "keep",
    }  # fmt: skip
    assert record["teacher"]["name"] == str(teacher)
    assert len(record["teacher"]["model.safetensors"]) == 64
    assert f"{len(rows)} answers to 20 prompts" in capsys.readouterr().out


def test_rows_do_not_depend_on_batch_size(run) -> None:
    rows = run()
    assert run() == rows
    assert run("others.jsonl", per_device_eval_batch_size=64) == rows
    assert run("another.jsonl", seed=3) != rows


def test_interrupted_command_resumes_with_remaining_prompts(run, tmp_path, monkeypatch) -> None:
    whole = run("whole.jsonl")
    generate, batch_sizes = GenerateBackend.generate, []

    def die(backend: Any, policy: Any, prompts: Any, uniforms: Any) -> Any:
        batch_sizes.append(len(prompts))
        if len(batch_sizes) == 2:
            raise KeyboardInterrupt
        return generate(backend, policy, prompts, uniforms)

    monkeypatch.setattr(GenerateBackend, "generate", die)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert run() == whole
    assert batch_sizes == [8, 8, 8, 4]


def test_changed_sampling_parameters_are_rejected(run, tmp_path) -> None:
    run()
    changes = {"seed": 1, "sampling_temperature": 0.5, "response_length": 4, "reasoning": "drop"}
    for key, value in {**changes, "bf16": True, "teacher_dtype": "float16"}.items():
        with pytest.raises(ConfigError, match="other sampling parameters"):
            run(**{key: value})
    with pytest.raises(ConfigError, match="a mixture is not supported"):
        run(dataset_name="null", dataset_mixture=json.dumps([{"name": str(tmp_path / "prompts.jsonl")}]))


def test_chat_rows_are_valid_sft_data(tiny_model_dir, tmp_path, monkeypatch) -> None:
    """The teacher answers with reasoning in its own template; the rows are rendered in that of the student."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    questions = [{"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": f"{n}?"},
                               {"role": "assistant", "content": "old"}]} for n in range(6)]  # fmt: skip
    write_rows(tmp_path / "chats.jsonl", questions)
    reply_ids = tokenizer("<think>\nHm.\n</think>\n\nIt is so.<|im_end|>").input_ids
    prompts: list[str] = []

    def answer(backend: Any, policy: Any, batch: Any, uniforms: Any) -> Any:
        prompts.extend(tokenizer.batch_decode(batch))
        return Generated(torch.tensor([reply_ids] * len(batch)), torch.zeros(len(batch), len(reply_ids)))

    monkeypatch.setattr(GenerateBackend, "generate", answer)
    flags = [
        f"--model_name_or_path={tiny_model_dir}", f"--teacher_model_name_or_path={tiny_model_dir}", "--bf16=false",
        f"--output_dir={tmp_path / 'out'}", f"--prepared_dir={tmp_path / 'prepared'}", "--use_cpu=true",
        f"--dataset_name={tmp_path / 'chats.jsonl'}", f"--chat_template_path={tmp_path / 'student.jinja'}",
    ]  # fmt: skip
    student = "{% for message in messages %}student: {{ message['content'] }}<|im_end|>{% endfor %}"
    (tmp_path / "student.jinja").write_text(student + "{% if add_generation_prompt %}student: {% endif %}")
    for reasoning, content in (("keep", "<think>\nHm.\n</think>\n\nIt is so."), ("drop", "It is so.")):
        output = tmp_path / f"{reasoning}.jsonl"
        sampling.main_answers([f"--output={output}", f"--reasoning={reasoning}", *flags])
        rows = read_rows(output)
        assert [row["messages"][:2] for row in rows] == [row["messages"][:2] for row in questions]
        assert {row["messages"][2]["content"] for row in rows} == {content}
        sft = [flag for flag in flags if "teacher" not in flag and "dataset_name" not in flag]
        config = load_config("sft", [*sft, f"--dataset_name={output}", "--packing=false", "--max_length=128"])
        data = load_training_data(config, load_tokenizer(config.model, config.tokens))
        for row in data.train:
            assert tokenizer.decode(row["input_ids"][row["loss_mask"]]).startswith(content)
    assert all(prompt.endswith("<|im_start|>assistant\n") and "Be kind." in prompt for prompt in prompts)


def test_empty_and_invalid_answers_are_dropped_and_counted(tiny_model_dir, tmp_path, monkeypatch, capsys) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{n}?"} for n in range(3)])
    answers = ["ab<|endoftext|>", "a\0<|endoftext|>", " \n<|endoftext|>"]

    def answer(backend: Any, policy: Any, batch: Any, uniforms: Any) -> Any:
        ids = [tokenizer(text).input_ids for text in answers]
        assert len(batch) == len({len(row) for row in ids}) * 3 == 3
        return Generated(torch.tensor(ids), torch.zeros(len(ids), len(ids[0])))

    monkeypatch.setattr(GenerateBackend, "generate", answer)
    sampling.main_answers([
        f"--model_name_or_path={tiny_model_dir}", f"--teacher_model_name_or_path={tiny_model_dir}", "--bf16=false",
        f"--output_dir={tmp_path / 'out'}", "--use_cpu=true", f"--dataset_name={tmp_path / 'prompts.jsonl'}",
        f"--output={tmp_path / 'rows.jsonl'}", "--per_device_eval_batch_size=3",
    ])  # fmt: skip
    assert [row["completion"] for row in read_rows(tmp_path / "rows.jsonl")] == ["ab"]
    assert "2 empty or invalid" in capsys.readouterr().out
