"""`recipes distill-chain`: each hop learns from the one before, and what is compared costs the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.forked import ROOT, run_script
from tests.rows import write_rows
from tests.training.students import save_student
from transformers import AutoModelForCausalLM

from recipes_lib.commands.distill import distill_chain
from recipes_lib.commands.distill.distill_chain import ChainRun, go_through, measure, write_run
from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError


@pytest.fixture
def flags(tmp_path: Path, tiny_model_dir: Path) -> list[str]:
    """A student, an assistant and a teacher; text to learn from."""
    texts = [f"The {word} is {word} and more {word} than {number}." for number, word in enumerate("abcdefghij" * 4)]
    write_rows(tmp_path / "texts.jsonl", ({"text": text} for text in texts))
    keys = {
        "model_name_or_path": save_student(tmp_path / "student", tiny_model_dir, seed=1),
        "assistant_model_names_or_paths": json.dumps([str(save_student(tmp_path / "assistant", tiny_model_dir))]),
        "teacher_model_name_or_path": tiny_model_dir,
        "dataset_name": tmp_path / "texts.jsonl",
        "output_dir": tmp_path / "a chain",
        "prepared_dir": tmp_path / "prepared",
        "test_split_size": 8,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "lmbda": 0.5,
        "response_length": 8,
        "bf16": False,
        "use_cpu": True,
    }
    return [f"--{name}={value}" for name, value in keys.items()]


@pytest.fixture
def config(flags: list[str]) -> RecipeConfig:
    return load_config("distill", flags)


class Runs:
    """Stands in for training: every run leaves the figures of one that took a token a step."""

    def __init__(self, config: RecipeConfig) -> None:
        self.made: list[ChainRun] = []
        self.codes: dict[str, int] = {}
        self._config = config

    def __call__(self, run: ChainRun) -> int:
        self.made.append(run)
        if code := self.codes.get(run.name):
            return code
        loaded = load_config(run.recipe, ["--config", str(write_run(self._config, run))])
        folder = Path(loaded.training["output_dir"])
        folder.mkdir(exist_ok=True)
        tokens, model = loaded.training["max_steps"], str(loaded.model.model_name_or_path)
        if model.endswith(("student", "assistant")):
            (folder / "config.json").write_text((Path(model) / "config.json").read_text())
        flops = distill_chain.count_flops(model, 9, tokens, tokens)
        lines = [
            {"kind": "train", "num_tokens": tokens, "num_target_tokens": tokens, "num_flops": flops},
            {"kind": "eval", "eval_loss": 1.0 + len(self.made), "eval_bits_per_byte": 0.5},
        ]
        write_rows(folder / "metrics.jsonl", lines)
        (folder / "run.json").write_text('{"data": {"train": {"length_p50": 9}}}')
        return 0


def test_each_hop_learns_from_the_one_before(config, flags, tmp_path, capsys, tiny_model_dir) -> None:
    runs = Runs(config)
    assert go_through(config, runs, is_compared=False) == 0
    out = tmp_path / "a chain"
    assert runs.made == [
        ChainRun("hop_1", "distill", str(tmp_path / "assistant"), str(tiny_model_dir)),
        ChainRun("hop_2", "distill", str(tmp_path / "student"), str(out / "hop_1")),
    ]
    last = load_config("distill", ["--config", str(out / "hop_2.yaml")])
    assert last.distillation.assistant_model_names_or_paths is None
    assert (last.distillation.lmbda, last.rewards.response_length) == (0.5, 8)
    assert last.training["output_dir"] == str(out / "hop_2")
    results = json.loads((out / "chain.json").read_text())
    assert [result["eval_loss"] for result in results] == [2.0, 3.0]
    assert "| hop_2 | hop_1 | 4 |" in capsys.readouterr().out


def test_what_is_compared_has_as_many_tokens_or_takes_as_much_compute(config, tmp_path) -> None:
    runs = Runs(config)
    assert go_through(config, runs, is_compared=True) == 0
    out = tmp_path / "a chain"
    by_name = {run.name: measure(run, out) for run in runs.made}
    assert list(by_name) == [
        "hop_1", "hop_2", "direct", "labels", "direct_at_equal_compute", "labels_at_equal_compute",
    ]  # fmt: skip
    assert by_name["direct"]["num_tokens"] == by_name["labels"]["num_tokens"] == by_name["hop_2"]["num_tokens"] == 4
    spent = by_name["hop_1"]["flops"] + by_name["hop_2"]["flops"]
    for name in ("direct", "labels"):
        a_step = by_name[name]["flops"] / 4
        assert abs(by_name[f"{name}_at_equal_compute"]["flops"] - spent) <= a_step / 2
    # Forward, and backward twice as much; a teacher is asked forward alone.
    own, teacher = (distill_chain.count_flops(str(by_name["direct"][role]), 9, 4, 4) for role in ("model", "teacher"))
    assert by_name["labels"]["flops"] == own
    assert by_name["direct"]["flops"] == pytest.approx(own + teacher / 3)
    labels = load_config("sft", ["--config", str(out / "labels.yaml")])
    assert labels.training["learning_rate"] == config.training["learning_rate"]
    assert labels.data == config.data
    assert len(json.loads((out / "chain.json").read_text())) == 6


def test_a_run_that_fails_ends_the_chain_with_its_exit_code(config) -> None:
    runs = Runs(config)
    runs.codes["hop_2"] = 75
    assert go_through(config, runs, is_compared=True) == 75
    assert [run.name for run in runs.made] == ["hop_1", "hop_2"]


def test_the_length_in_epochs_is_stretched_too(flags, tmp_path) -> None:
    config = load_config("distill", [flag for flag in flags if "max_steps" not in flag] + ["--num_train_epochs=2"])
    path = write_run(config, ChainRun("labels", "sft", str(tmp_path / "student"), factor=1.75))
    assert load_config("sft", ["--config", str(path)]).training["num_train_epochs"] == 3.5


@pytest.mark.parametrize(
    ("changed", "words"),
    [("--assistant_model_names_or_paths=null", "no assistant"), ("--test_split_size=null", "nothing is held out")],
)
def test_what_cannot_be_compared_is_refused(flags, changed: str, words: str) -> None:
    name = changed.partition("=")[0]
    with pytest.raises(ConfigError, match=words):
        distill_chain.main(["--compare", *(flag for flag in flags if not flag.startswith(name)), changed])


def test_elsewhere_than_in_the_project_there_is_no_recipe_to_run(flags, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="start from the project's folder"):
        distill_chain.main(flags)


def test_the_recipe_of_one_teacher_refuses_assistants(flags) -> None:
    done = run_script(ROOT / "recipes" / "distill.py", *flags)
    assert done.returncode == 2
    assert "run `recipes distill-chain`" in done.stderr


@pytest.mark.slow
def test_a_chain_trains_and_the_same_command_does_no_more(flags, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    assert distill_chain.main(["--compare", *flags]) == 0
    out = tmp_path / "a chain"
    results = {result["run"]: result for result in json.loads((out / "chain.json").read_text())}
    assert all(result["eval_bits_per_byte"] > 0 for result in results.values())
    assert AutoModelForCausalLM.from_pretrained(out / "hop_2").config.hidden_size == 32
    told = capsys.readouterr().out
    assert "labels_at_equal_compute" in told
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    assert distill_chain.main(["--compare", *flags]) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")} == before
