"""The SFT recipe end to end: answers in plain transformers, files of a run, prepared sets."""

import json

import numpy as np
import pytest
from tests.forked import ROOT, run_script
from tests.recipes.preferences import read_record, write_config
from tests.recipes.stranger import ANSWERS, QUESTIONS, ask, write_chats
from tests.rows import read_rows

from recipes_lib.config.loader import load_config
from recipes_lib.data.packed.prepared_set import prepare

RECIPE = ROOT / "recipes" / "sft.py"
SHORT = {
    "learning_rate": 5e-3,
    "max_steps": 8,
    "per_device_train_batch_size": 8,
    "num_sample_prompts": 2,
    "sample_max_new_tokens": 4,
    "save_strategy": "steps",
}


@pytest.fixture
def chats(tmp_path):
    return write_chats(tmp_path / "chats, with spaces.jsonl", 8)


@pytest.fixture
def write(tmp_path, tiny_model_dir, chats):
    return lambda **keys: write_config(tmp_path, tiny_model_dir, chats, **SHORT | keys)


def test_memorised_chats_are_answered_in_plain_transformers(write, tmp_path):
    keys = {"learning_rate": 1e-2, "max_steps": 80, "lr_scheduler_type": "linear"}
    keys |= {"max_length": 64, "save_strategy": "no"}
    config = write(**keys)
    run_script(RECIPE, "--config", config)

    answers = ask(tmp_path / "a run", tmp_path / "a run", QUESTIONS)
    assert [answer["text"] for answer in answers] == ANSWERS
    assert all(answer["stopped"] for answer in answers)

    packs = prepare(load_config("sft", ["--config", str(config)]), lambda: pytest.fail("tokenised again")).train
    prefixes = {}
    for pack in packs:
        ends = np.cumsum(pack["seq_lengths"])
        for row, start, end in zip(pack["row_ids"], [0, *ends[:-1]], ends, strict=True):
            first_target = start + int(np.argmax(pack["loss_mask"][start:end]))
            prefixes[int(row)] = pack["input_ids"][start:first_target].tolist()
    assert [answer["prompt_ids"] for answer in answers] == [prefixes[row] for row in range(8)]


def test_run_writes_documented_files_and_rerun_changes_nothing(write, tmp_path):
    config = write(test_split_size=2)
    run_script(RECIPE, "--config", config)
    output = tmp_path / "a run"
    names = {path.name for path in output.iterdir()}
    assert {"run.json", "metrics.jsonl", "samples.jsonl", "model.safetensors", "config.json", "README.md"} <= names
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json", "report.html", "checkpoint-8"} <= names
    assert not {path.suffix for path in output.iterdir() if path.is_file()} & {".bin", ".pt", ".pkl"}
    assert (output / "checkpoint-8" / "COMPLETE.json").exists()
    # safetensors 0.8 creates files with mode 600; the model inherits the read permissions of the folder.
    assert (output / "model.safetensors").stat().st_mode & 0o044 == output.stat().st_mode & 0o044
    assert json.loads((output / "config.json").read_text())["use_cache"]
    record = read_record(tmp_path / "a run")
    assert record["status"] == "done"
    assert record["config"]["learning_rate"] == 5e-3
    assert record["provenance"]["learning_rate"].startswith(str(config))
    events = read_rows(output / "metrics.jsonl")
    train = [event for event in events if event["kind"] == "train"]
    assert [event["step"] for event in train] == list(range(1, 9))
    expected = {"loss", "learning_rate", "grad_norm", "num_target_tokens", "tokens_per_second", "mfu", "memory_bytes"}
    assert expected <= train[0].keys()
    evaluations = [event for event in events if event["kind"] == "eval"]
    assert evaluations[0]["step"] == 0
    assert evaluations[-1]["step"] == 8
    assert {"eval_loss", "eval_perplexity", "eval_bits_per_byte", "eval_token_accuracy"} <= evaluations[0].keys()

    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    run_script(RECIPE, "--config", config)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before

    other = run_script(RECIPE, "--config", config, "--learning_rate", "1e-3", code=2)
    assert "learning_rate was 0.005" in other.stderr
    assert "Traceback" not in other.stderr


@pytest.mark.multiprocess
def test_two_processes_reuse_prepared_set(write, tmp_path, tiny_model_dir):
    config = write(test_split_size=2, max_steps=2)
    from transformers import AutoTokenizer

    parsed = load_config("sft", ["--config", str(config)])
    prepared = prepare(parsed, lambda: AutoTokenizer.from_pretrained(tiny_model_dir))
    made = {path: path.stat().st_mtime_ns for path in prepared.path.rglob("*")}
    run_script(RECIPE, "--config", config, num_processes=2)
    record = read_record(tmp_path / "a run")
    assert record["num_processes"] == 2
    assert record["data"]["key"] == prepared.key
    assert {path: path.stat().st_mtime_ns for path in prepared.path.rglob("*")} == made
    assert record["status"] == "done"
