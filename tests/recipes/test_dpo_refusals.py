"""Invalid data and references of the DPO recipe: one error each, and no effect on the next start."""

from __future__ import annotations

import json

import pytest
from tests.recipes.preferences import make_rows, read_record, run_here, write_config
from tests.rows import read_events, write_rows
from tests.training.pairs import perturb_model
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

pytestmark = pytest.mark.usefixtures("quick")


def change(number, **columns):
    """Return valid rows of which one has other columns; columns that are ``None`` are removed."""
    rows = make_rows()
    rows[number] = {name: value for name, value in (rows[number] | columns).items() if value is not None}
    return rows


LONG = [{"role": "user", "content": "on and on " * 200}]
BAD_DATA = {
    "empty file": ("", "", "check how it was written"),
    "invalid JSON": (json.dumps(make_rows()[0]) + "\n{oops\n", ":2", "write one JSON object a line"),
    "no rejected answer": (change(3, rejected=None), ":4", "fill it or remove the row"),
    "prompt longer than max_length": (
        change(7, prompt=LONG),
        ":8",
        "raise max_length, or write another value of overlong",
    ),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_invalid_data_are_reported_and_next_start_is_fresh(recipe, tmp_path, tiny_model_dir, capsys, name):
    content, line, remedy = BAD_DATA[name]
    data = tmp_path / "pairs of answers.jsonl"
    data.write_text(content) if isinstance(content, str) else write_rows(data, content)
    config = write_config(tmp_path, tiny_model_dir, data, max_length=256)
    assert run_here(recipe, config) == 2
    error = capsys.readouterr().err
    assert f"{data}{line}: " in error
    assert remedy in error
    assert error.count("\n    ") == 1
    assert "Traceback" not in error
    assert read_record(tmp_path / "a run")["status"] == "refused"

    if name == "invalid JSON":
        write_rows(data, make_rows())
        assert run_here(recipe, config) == 0
        assert read_record(tmp_path / "a run")["status"] == "done"
        assert len(read_events(tmp_path / "a run")) == 2


def test_one_row_trains(recipe, tmp_path, tiny_model_dir):
    data = write_rows(tmp_path / "pairs.jsonl", make_rows(1))
    assert run_here(recipe, write_config(tmp_path, tiny_model_dir, data)) == 0
    assert len(read_events(tmp_path / "a run")) == 2


@pytest.mark.parametrize(
    ("kind", "keys", "found"),
    [
        (LlamaConfig, {"vocab_size": 600}, "has a vocabulary of 600 tokens and the policy one of 512"),
        (MistralConfig, {"sliding_window": 4}, "does not support the batch layout of the policy: a mistral model sees"),
    ],
)
def test_reference_with_other_vocabulary_or_layout_is_rejected(
    recipe, tmp_path, tiny_model_dir, capsys, kind, keys, found
):
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = kind(**{"vocab_size": 512, "num_key_value_heads": 2, **shape, **keys})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    data = write_rows(tmp_path / "pairs.jsonl", make_rows())
    config = write_config(tmp_path, tiny_model_dir, data, ref_model_name_or_path=str(tmp_path / "other"))
    assert run_here(recipe, config) == 2
    line = next(number for number, text in enumerate(config.read_text().splitlines(), 1) if "ref_model" in text)
    error = capsys.readouterr().err
    assert f"{config}:{line}: {tmp_path / 'other'} {found}" in error


def test_unreadable_reference_is_rejected_at_its_key(recipe, tmp_path, tiny_model_dir, capsys):
    other = perturb_model(tiny_model_dir, tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"")
    data = write_rows(tmp_path / "pairs.jsonl", make_rows())
    config = write_config(tmp_path, tiny_model_dir, data, ref_model_name_or_path=str(other))
    assert run_here(recipe, config) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{config}:")
    assert str(other) in error
    assert "Traceback" not in error
