"""``recipes run`` as a user has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes_lib.cli import main as run_recipes
from recipes_lib.commands.run_pipeline import choose_stages, describe
from recipes_lib.errors import ConfigError
from recipes_lib.pipelines.pipeline import load_pipeline


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "p.yaml"
    path.write_text(
        """
stages:
  one: {run: "mkdir ${output_dir}/one"}
  two: {run: "mkdir ${output_dir}/two", needs: [one]}
  three: {run: "mkdir ${output_dir}/three", needs: [two]}
"""
    )
    return path


def test_parts_are_run_by_name_and_told_at_the_end(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = str(path.parent / "out")
    assert run_recipes(["run", str(path), "--output_dir", out, "--until", "two"]) == 0
    told = capfd.readouterr().out
    assert "1 of 2, one: mkdir" in told
    assert "three  not run" in told
    assert run_recipes(["run", str(path), "--output_dir", out, "--from", "two"]) == 0
    assert "2 of 2, three" in capfd.readouterr().out
    assert run_recipes(["run", str(path), "--output_dir", out, "--list"]) == 0
    assert f"one: mkdir {out}/one\n" in capfd.readouterr().out
    assert run_recipes(["run", str(path), "--only", "fore"]) == 2
    assert "the stages are one, two, three" in capfd.readouterr().err


def test_check_holds_every_stage_against_its_recipe_before_anything_is_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chats.jsonl").touch()
    (tmp_path / "sft.yaml").write_text(
        f"model_name_or_path: none\nmodel_revision: null\ndataset_name: {tmp_path}/chats.jsonl\n"
    )
    stages = {
        "base": {"run": "mkdir x"},
        "sft": {"recipe": "sft", "config": f"{tmp_path}/sft.yaml", "set": {"model_name_or_path": "${base.output}"}},
        "scores": {"recipe": "eval", "set": {"model_name_or_path": "${sft.output}", "tasks": ["core"]}},
    }
    path = tmp_path / "p.yaml"
    path.write_text(json.dumps({"stages": stages}))
    assert run_recipes(["run", str(path), "--check"]) == 0
    assert capfd.readouterr().out == "3 stages, ready to run\n"
    stages["sft"]["set"]["learnin_rate"] = 1
    stages["scores"]["set"]["limit"] = 0
    path.write_text(json.dumps({"stages": stages}))
    assert run_recipes(["run", str(path), "--check"]) == 2
    told = capfd.readouterr().err
    assert "sft: --learnin_rate" in told
    assert "scores: --limit" in told
    assert not (tmp_path / "runs").exists()


def test_check_looks_at_launch_files_commands_and_programs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chats.jsonl").touch()
    keys = {"model_name_or_path": "${base.output}", "dataset_name": f"{tmp_path}/chats.jsonl", "max_length": 64}
    stages = {
        "base": {"run": "no-such-program"},
        "lora": {"recipe": "lora", "launch": "zero3", "set": {**keys, "load_in_8bit": True}},
    }
    path = tmp_path / "p.yaml"
    path.write_text(json.dumps({"stages": stages}))
    assert run_recipes(["run", str(path), "--check"]) == 2
    told = capfd.readouterr().err
    assert "base: run: there is no program 'no-such-program'" in told
    assert "lora: --load_in_8bit" in told
    path.write_text("stages: {a: {command: sample-pair}}")
    assert run_recipes(["run", str(path)]) == 2
    assert "did you mean sample-pairs?" in capfd.readouterr().err


def test_check_looks_at_models_and_data_that_are_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chats.jsonl").write_text("")
    keys = {"model_name_or_path": str(tmp_path), "dataset_name": f"{tmp_path}/chats.jsonl", "max_length": 64}
    path = tmp_path / "p.yaml"
    path.write_text(json.dumps({"stages": {"sft": {"recipe": "sft", "set": keys}}}))
    assert run_recipes(["run", str(path), "--check", "--keys", "--output_dir", str(tmp_path / "o")]) == 0
    assert run_recipes(["run", str(path), "--check", "--output_dir", str(tmp_path / "o")]) == 2
    told = capfd.readouterr()
    assert "sft: recipes check" in told.out
    assert "problems above" in told.err


def test_the_table_shows_the_gate_first(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text('stages: {a: {run: "true", matrix: {seed: [7]}, require: {acc: "> 0"}}}')
    pipeline = load_pipeline(path, str(tmp_path))
    (tmp_path / "a-1").mkdir()
    (tmp_path / "a-1" / "metrics.jsonl").write_text('{"step": 1, "eval_loss": 2, "acc": 0.5}\n')
    (tmp_path / "pipeline.json").write_text('{"stages": {"a-1": {"status": "done", "seconds": 62.4}}}')
    told = [line.split() for line in describe(pipeline)]
    assert told[0] == ["stage", "status", "time", "figure", "keys", "output"]
    assert told[1] == ["a-1", "done", "1", "min", "2", "s", "acc", "0.5", "seed=7", str(tmp_path / "a-1")]
    with pytest.raises(ConfigError, match="there is no stage 'b'"):
        choose_stages(pipeline, "b", None)


def test_stages_in_the_wrong_order_are_no_empty_choice(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text('stages: {a: {run: "true"}, b: {run: "true"}}')
    pipeline = load_pipeline(path, str(tmp_path))
    assert [stage.name for stage in choose_stages(pipeline, "b", None)] == ["b"]
    with pytest.raises(ConfigError, match="b comes after a"):
        choose_stages(pipeline, "b", "a")
