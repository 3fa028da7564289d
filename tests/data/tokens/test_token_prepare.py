"""``recipes prepare`` of a pretraining run says what it made, and that a second time nothing is to do."""

from __future__ import annotations

import pytest
from tests.training.pretraining import write_documents
from transformers import AutoTokenizer

from recipes_lib.commands.prepare import prepare


def test_every_source_and_side_is_told_and_a_second_time_no_tokenizer_is_loaded(tmp_path, tiny_tokenizer_dir, capsys):
    keys = {
        "model_config": "{model_type: llama}",
        "tokenizer_name_or_path": tiny_tokenizer_dir,
        "dataset_name": write_documents(tmp_path / "documents.jsonl"),
        "test_split_size": 0.2,
        "output_dir": tmp_path / "out",
        "prepared_dir": tmp_path / "prepared",
        "max_length": 32,
    }
    argv = [f"--{name}={value}" for name, value in keys.items()]
    prepare(["--recipe", "pretrain", *argv], lambda _: AutoTokenizer.from_pretrained(tiny_tokenizer_dir))
    first = capsys.readouterr().out
    assert "prepared in" in first
    assert "held out of" in first
    prepare(["--recipe", "pretrain", *argv], lambda _: pytest.fail("tokenised again"))
    second = capsys.readouterr().out
    assert "already prepared" in second
    assert first.split("prepared in")[0] == second.split("nothing to do")[0]
