"""``recipes scale`` fits the records of runs, names both published laws, and refuses what it cannot know."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig

from recipes_lib.cli import main
from recipes_lib.commands.planning.scale import read_scaling_run
from recipes_lib.planning.compute import compute_model_size
from recipes_lib.planning.scaling import PUBLISHED

LAW = PUBLISHED["Besiroglu et al. 2024"]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Records of twelve runs of a known law: models by their ``config.json`` alone."""
    folders = []
    for width in (32, 64, 128):
        config = LlamaConfig(
            vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4
        )
        size = compute_model_size(config).total
        for ratio in (10, 20, 40, 80):
            folder = tmp_path / f"{width}-{ratio}"
            config.save_pretrained(folder)
            (folder / "run.json").write_text(json.dumps({"status": "done", "config": {}}))
            loss = LAW.compute_loss(size, ratio * size)
            events = [
                {"kind": "train", "step": 4, "loss": 9.0, "num_tokens": ratio * size},
                {"kind": "eval", "step": 2, "eval_loss": 8.0},
                {"kind": "eval", "step": 4, "eval_loss": loss},
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
            folders.append(folder)
    return folders


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]):
    def tell(*flags: object, code: int = 0) -> str:
        assert main(["scale", *map(str, flags)]) == code
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        return told.err if code else told.out

    return tell


def test_a_run_is_its_parameters_tokens_and_last_held_out_loss(runs) -> None:
    run = read_scaling_run(runs[0])
    assert run.num_tokens == 10 * run.num_parameters
    assert run.loss == LAW.compute_loss(run.num_parameters, run.num_tokens)
    without = read_scaling_run(runs[0], counts_embeddings=False)
    assert run.num_parameters - without.num_parameters == 2 * 512 * 32


def test_a_fit_predicts_what_the_law_says_and_refuses_far_runs_without_an_interval(runs, tell, tmp_path) -> None:
    law = tmp_path / "law.json"
    told = tell("fit", *runs, "--resamples", 0, "--output", law)
    assert float(re.search(r"size exponent +([\d.]+)", told)[1]) == pytest.approx(0.3478, abs=0.003)
    size = read_scaling_run(runs[-1]).num_parameters
    told = tell("predict", "--parameters", 2 * size, "--tokens", 100 * size, "--fit", law)
    assert float(re.search(r"loss +([\d.]+)", told)[1]) == pytest.approx(
        LAW.compute_loss(2 * size, 100 * size), rel=0.002
    )
    assert "fit again with --resamples 200" in tell("plan", "--flops", 1e18, "--fit", law, code=2)
    tell("fit", *runs, "--resamples", 3, "--output", law)
    assert "(90 %: " in tell("plan", "--flops", 1e18, "--fit", law)


def test_the_published_laws_are_both_named_and_disagree(tell) -> None:
    told = tell("plan", "--flops", 5.76e23)
    first, second = told.split("Hoffmann et al. 2022, as printed")
    assert "Besiroglu et al. 2024" in first
    assert "18.4 a parameter" in first
    assert "92.6 a parameter" in second


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["plan", "--flops", "-1"], "write a finite number above 0"),
        (["fit", "no/such/run"], "neither run.json nor metrics.jsonl"),
        (["plan", "--flops", "1e18", "--fit", "no-law.json"], "no-law.json"),
    ],
)
def test_what_makes_no_sense_is_refused(tell, flags, words) -> None:
    assert words in tell(*flags, code=2)
