"""``recipes plan --gpus`` prints candidates, keys and hours, writes them, and says what would fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from recipes_lib.cli import main

KEYS = {
    "dataset_name": "a/b",
    "output_dir": "out",
    "max_length": 256,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
}


@pytest.fixture
def tell(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Search for a recipe with changes, and return what was told."""

    def tell(*flags: object, code: int = 0, **changes: object) -> str:
        path = tmp_path / "sft.yaml"
        path.write_text(yaml.safe_dump({"model_name_or_path": str(tiny_model_dir), **KEYS, **changes}))
        assert main(["plan", "--config", str(path), "--gpus", *map(str, flags)]) == code
        told = capsys.readouterr()
        return told.err if code else told.out

    return tell


def test_the_best_is_told_with_its_keys_and_written(tell, tmp_path: Path) -> None:
    told = tell("2xH100", "--num_rows", 1600, "--price-per-gpu-hour", 3, "--write", tmp_path / "plan")
    assert "batch           16 rows an optimizer step" in told
    assert told.count("the fastest that fits") == 1
    # Three epochs.
    assert "300 steps" in told
    assert re.search(r"cost +0.0\d, at 3 for a GPU hour", told)
    keys = yaml.safe_load((tmp_path / "plan" / "keys.yaml").read_text())
    assert keys["per_device_train_batch_size"] * keys["gradient_accumulation_steps"] * 2 == 16
    launch = yaml.safe_load((tmp_path / "plan" / "accelerate.yaml").read_text())
    assert launch["num_processes"] == 2
    # Written for eight processes, the recipe asks for four times the batch.
    assert "batch           64 rows" in tell("2xH100", "--num_processes", 8)


@pytest.mark.parametrize(
    ("flags", "changes", "words"),
    [
        (["H100"], {}, "write it as 8xH100"),
        (["3xH100", "--num_processes", 1], {}, "cannot be divided by 3 processes"),
        (["2xH100", "--deadline", 1], {}, "needs the length of the run"),
        (["2xH100", "--budget", 1, "--num_rows", 100], {}, "write --price_per_gpu_hour"),
        (["2xH100", "--deadline", 1e-9, "--num_rows", 100], {}, "more than 1e-09"),
        (["2x1GB"], {}, "is not known"),
        pytest.param(["2xL4"], {"max_length": 16_000_000}, "max_length: ", marks=pytest.mark.slow),
        (["2xT4"], {"fp16": True}, "`mixed_precision: bf16`"),
    ],
)
def test_what_cannot_be_is_told_with_what_would(tell, flags, changes, words) -> None:
    assert words in tell(*flags, code=2, **changes)
