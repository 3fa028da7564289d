"""A run that is killed without warning and started again by the same command ends where it would have ended."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from tests.recipes.preferences import finish, make_rows, read_events, start, write_config, write_rows
from tests.training.pairs import load_weights


def configure(folder, model_dir, data, **keys):
    """Thirty pairs in steps of eight, the last of each epoch a smaller one, with a checkpoint every fifth step."""
    folder.mkdir()
    keys = {
        "max_steps": 24,
        "save_strategy": "steps",
        "save_steps": 5,
        "gradient_accumulation_steps": 2,
        "loss_type": ["sigmoid", "sft"],
        "learning_rate": 1e-4,
    } | keys
    return write_config(folder, model_dir, data, prepared_dir=str(folder.parent / "prepared sets"), **keys)


def start_and_kill(config, metrics, step):
    """Start the recipe and end it, without warning, once it has logged that step."""
    process = start("--config", config)
    while process.poll() is None:
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            os.kill(process.pid, signal.SIGKILL)
            break
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"use_peft": True, "lora_r": 4}], ids=["full", "adapter"])
def test_killed_twice_the_same_command_ends_with_the_very_weights(tiny_model_dir, tmp_path, keys):
    data = write_rows(tmp_path / "pairs.jsonl", make_rows(34))
    keys = keys | {"test_split_size": 4}
    finish(start("--config", configure(tmp_path / "straight", tiny_model_dir, data, **keys)))

    config = configure(tmp_path / "killed", tiny_model_dir, data, **keys)
    for step in (3, 12):  # Before the first checkpoint, and behind the second.
        start_and_kill(config, tmp_path / "killed" / "a run" / "metrics.jsonl", step)
    finish(start("--config", config))

    straight, resumed = (tmp_path / name / "a run" for name in ("straight", "killed"))
    expected, got = load_weights(straight), load_weights(resumed)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    for kind, name in (("train", "loss"), ("train", "grad_norm"), ("train", "rewards/margins"), ("eval", "eval_loss")):
        figures = [{event["step"]: event[name] for event in read_events(run, kind)} for run in (straight, resumed)]
        assert len(figures[0]) > 4
        # A run that goes on evaluates once more where it does.
        assert {step: figures[1][step] for step in figures[0]} == figures[0], name
