"""``recipes fisher``: writes the Fisher information beside a model, for a later run with ``ewc_lambda``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.rows import write_rows
from tests.training.pretraining import write_documents
from transformers import AutoModelForCausalLM

from recipes_lib.config.loader import load_config
from recipes_lib.data.packed.training_data import load_training_data
from recipes_lib.data.sources.replay_dataset import EpochOrder
from recipes_lib.errors import ConfigError
from recipes_lib.models.loading import load_tokenizer
from recipes_lib.training.forgetting import fisher_command as fisher
from recipes_lib.training.forgetting.weight_penalty import load_penalty


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n} a"}]}
        for n in range(20)
    ]
    return write_rows(tmp_path / "chats.jsonl", rows)


def make_flags(tmp_path: Path, **keys: Any) -> list[str]:
    keys = {"prepared_dir": tmp_path / "prepared", "bf16": "false", "use_cpu": "true"} | keys
    return [f"--{name}={value}" for name, value in keys.items()]


def read_record(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "fisher.json").read_text())
    return record


def test_command_writes_fisher_beside_model(tmp_path: Path, tiny_model_dir: Path, chats: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    # Before the run starts, the Fisher information is that of its initial model.
    flags = make_flags(tmp_path, model_name_or_path=tiny_model_dir, dataset_name=chats, output_dir=run)
    fisher.main([*flags, "--num_documents=7"])
    output = capsys.readouterr().out
    before = read_record(run)
    assert before["model_name_or_path"] == str(tiny_model_dir)
    assert (before["num_documents"], before["labels"]) == (7, "sampled")
    assert "7 documents" in output
    later = make_flags(tmp_path, model_name_or_path=tiny_model_dir, dataset_name=chats, output_dir=tmp_path / "later")
    config = load_config("sft", [*later, "--ewc_lambda=1", f"--ewc_reference={run}"])
    assert load_penalty(config) is not None
    shutil.copytree(tiny_model_dir, run, dirs_exist_ok=True)
    fisher.main([*flags, "--num_documents=7", "--labels=empirical"])
    after = read_record(run)
    assert after["model_name_or_path"] is None
    assert after["weights"] == before["weights"]
    tensors = load_file(run / "fisher.safetensors")
    model = AutoModelForCausalLM.from_pretrained(run)
    assert {name: value.shape for name, value in tensors.items()} == {
        name: part.shape for name, part in model.named_parameters()
    }
    assert all(torch.isfinite(value).all() and (value >= 0).all() for value in tensors.values())
    config = load_config(
        "sft",
        [
            *make_flags(tmp_path, model_name_or_path=run, dataset_name=chats, output_dir=tmp_path / "later"),
            "--ewc_lambda=1",
        ],
    )
    assert load_penalty(config) is not None


def test_document_longer_than_positions_is_rejected(tmp_path: Path, tiny_model_dir: Path, chats: Path) -> None:
    short = shutil.copytree(tiny_model_dir, tmp_path / "short")
    settings = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 4}))
    flags = make_flags(tmp_path, model_name_or_path=short, dataset_name=chats, output_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="4 positions"):
        fisher.main(flags)


@pytest.mark.parametrize(("key", "seed"), [("data_seed=7", 7), ("train_sampling_strategy=sequential", None)])
def test_rows_have_order_of_run(tmp_path: Path, tiny_model_dir: Path, chats: Path, key: str, seed: int | None) -> None:
    flags = make_flags(tmp_path, model_name_or_path=tiny_model_dir, dataset_name=chats, output_dir=tmp_path / "run")
    config = load_config("sft", [*flags, "--packing=false", f"--{key}"])
    tokenizer = load_tokenizer(config.model, config.tokens)
    train: Any = load_training_data(config, tokenizer, local_rank=0).train
    expected = EpochOrder(20, seed).locate(np.arange(20))
    for row, number in zip(fisher.read_rows(config, tokenizer, 0), expected, strict=True):
        assert row["input_ids"].tolist() == train[int(number)]["input_ids"].tolist()


def test_stream_is_read_once(tmp_path: Path, tiny_model_dir: Path, chats: Path) -> None:
    keys = {"model_name_or_path": tiny_model_dir, "dataset_name": chats, "output_dir": tmp_path / "run"}
    stream = {"dataset_streaming": "true", "max_steps": 3, "warmup_steps": 0, "max_length": 64}
    flags = [flag for flag in make_flags(tmp_path, **keys, **stream) if "prepared_dir" not in flag]
    fisher.main([*flags, "--num_documents=50"])
    assert read_record(tmp_path / "run")["num_documents"] == 20


def test_pretraining_documents_are_not_packed(tmp_path: Path, tiny_model_dir: Path) -> None:
    documents = write_documents(tmp_path / "documents.jsonl")
    run = tmp_path / "run"
    keys = {"model_name_or_path": tiny_model_dir, "dataset_name": documents, "output_dir": run}
    flags = make_flags(tmp_path, **keys, max_length=32, max_steps=4)
    fisher.main(["--recipe=pretrain", *flags, "--num_documents=5"])
    assert read_record(run)["num_documents"] == 5


def test_run_from_random_weights_needs_trained_model(tmp_path: Path, tiny_model_dir: Path) -> None:
    documents = write_documents(tmp_path / "documents.jsonl")
    keys = {"model_config": '{"model_type": "llama"}', "tokenizer_name_or_path": tiny_model_dir}
    keys |= {"dataset_name": documents, "output_dir": tmp_path / "run", "max_length": 32, "max_steps": 4}
    with pytest.raises(ConfigError, match="has no model yet"):
        fisher.main(["--recipe=pretrain", *make_flags(tmp_path, **keys)])


@pytest.mark.parametrize(
    ("flags", "message"), [(["--recipe=dpo"], "not one of sft"), (["--num_documents=0"], "finite number >= 1")]
)
def test_invalid_flag_is_rejected(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fisher.main(flags)
