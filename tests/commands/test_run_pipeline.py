"""``recipes run``: selection of stages, ``--check``, ``--plan`` and the shipped pipelines."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from tests.forked import ROOT
from transformers import LlamaConfig

from recipes_lib import cli
from recipes_lib.commands.run_pipeline import describe, find_slots, plan_stages
from recipes_lib.config.loader import load_config
from recipes_lib.errors import ConfigError
from recipes_lib.pipelines.pipeline import load_pipeline
from recipes_lib.planning.devices import find_efficiency


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


def test_from_until_only_and_list_select_stages(path: Path, recipes) -> None:
    out = str(path.parent / "out")
    output = recipes("run", path, "--output_dir", out, "--until", "two")
    assert "1 of 2, one: mkdir" in output
    assert "three  not run" in output
    assert "2 of 2, three" in recipes("run", path, "--output_dir", out, "--from", "two")
    assert f"one: mkdir {out}/one\n" in recipes("run", path, "--output_dir", out, "--list")


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        (["--only", "sweep"], ["sweep-1", "sweep-2"]),
        (["--from", "sweep", "--until", "loop"], ["sweep-1", "sweep-2", "a-1", "a-2"]),
        (["--from", "loop"], ["a-1", "a-2", "end"]),
        (["--until", "sweep"], ["begin", "sweep-1", "sweep-2"]),
        (["--only", "a-2"], ["a-2"]),
    ],
)
def test_sweeps_and_loops_are_selected_by_their_names(flags, chosen, tmp_path, recipes) -> None:
    stages = {
        "begin": {"run": "true"},
        "sweep": {"recipe": "sft", "matrix": {"seed": [1, 2]}},
        "loop": {"rounds": 2, "stages": {"a": {"run": "true ${round}"}}},
        "end": {"run": "true"},
    }
    path = tmp_path / "p.yaml"
    path.write_text(json.dumps({"output_dir": str(tmp_path), "stages": stages}))
    assert [line.partition(":")[0] for line in recipes("run", path, "--list", *flags).splitlines()] == chosen


def test_shipped_pipeline_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipes) -> None:
    monkeypatch.chdir(tmp_path)
    assert "recipes/configs/mistral-7b/sft.yaml" in recipes("run", "zephyr", "--list")
    for name, message in {
        "demo": "`recipes demo` writes its data and runs it",
        "sft": "`recipes launch sft` starts a recipe",
        "zephir": "did you mean `recipes run zephyr`?",
        "mine.yaml": "mine.yaml: there is no such pipeline\n    write the path of a YAML file",
    }.items():
        assert message in recipes("run", name, code=2)
    assert not list(tmp_path.iterdir())


def test_folder_with_name_of_shipped_pipeline_is_not_opened(tmp_path, monkeypatch, recipes) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "zephyr", "runs"):
        (tmp_path / name).mkdir()
    recipes("run", "zephyr", "--list")
    assert "`recipes demo` writes its data" in recipes("run", "demo", code=2)
    assert "runs: is a folder\n    write the path" in recipes("run", "runs", code=2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "nine"], "there is no stage 'nine'\n    the stages are one, two, three"),
        (["--only", "tree"], "there is no stage 'tree'\n    did you mean three?"),
        (["--from", ""], "there is no stage ''\n    the stages are one, two, three"),
        (["--from", "two", "--until", "one"], "two comes after one"),
        (["--only", "one", "--until", "two"], "--only: excludes --until"),
        (["--gpus_per_node", "8"], "--gpus_per_node: has no effect on stages that run here"),
        (["--gpu", "H100"], "--gpu: has no effect on stages that run here"),
        (["--plan", "--num_nodes", "2"], "--num_nodes: has no effect on stages that run here"),
        (["--hours", "1"], "--hours: has no effect on stages that run here"),
        (["--secret", "HF_TOKEN"], "--secret: has no effect on stages that run here"),
        (["--executor", "slurm", "--num_processes", "8"], "--num_processes: needs --plan"),
        (["--plan", "--num_processes", "0", "--keys"], "--keys: needs --check\n"),
        (["--plan", "--num_processes", "0"], "--num_processes: is 0\n    write a finite number >= 1"),
        (["--plan", "--device_hour_price", "-1"], "--device_hour_price: is -1\n    write a finite number >= 0"),
        (["--executor", "slurm", "--jobs", "2"], "--jobs: has no effect on stages that slurm starts"),
        (["--launcher", "'srun"], "argument --launcher: invalid"),
    ],
)
def test_invalid_flags_are_rejected(path: Path, recipes, flags: list[str], message: str) -> None:
    assert message in recipes("run", path, *flags, code=2)


def test_check_validates_keys_before_outputs_exist(tmp_path: Path, recipes) -> None:
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
    assert recipes("run", path, "--check") == "3 stages, ready to run\n"
    stages["sft"]["set"]["learnin_rate"] = 1
    stages["scores"]["set"]["limit"] = 0
    path.write_text(json.dumps({"stages": stages}))
    error = recipes("run", path, "--check", code=2)
    assert "sft: --learnin_rate" in error
    assert "scores: --limit" in error
    assert not (tmp_path / "runs").exists()


def test_check_validates_launch_files_commands_and_programs(tmp_path: Path, recipes) -> None:
    (tmp_path / "chats.jsonl").touch()
    keys = {"model_name_or_path": "${base.output}", "dataset_name": f"{tmp_path}/chats.jsonl", "max_length": 64}
    stages = {
        "base": {"run": "no-such-program"},
        "lora": {"recipe": "lora", "launch": "zero3", "set": {**keys, "load_in_8bit": True}},
    }
    path = tmp_path / "p.yaml"
    path.write_text(json.dumps({"stages": stages}))
    error = recipes("run", path, "--check", code=2)
    assert "base: run: there is no program 'no-such-program'" in error
    assert "lora: --load_in_8bit" in error
    flags = {"one": "merge ${base.output} merged", "two": "merge --adaptr x --output y", "three": "export --dtype a"}
    flags = {name: {"command": words} for name, words in flags.items()}
    right = {"command": "merge --adapter ${base.output}", "set": {"output": "${output_dir}/right", "max-kl": 0.1}}
    path.write_text(json.dumps({"stages": {"base": {"run": "true"}, **flags, "right": right}}))
    error = recipes("run", path, "--check", code=2)
    assert "error: the following arguments are required: --adapter, --output" in error
    assert "one: recipes merge: refuses its flags" in error
    assert "two: --adaptr: is unknown" in error
    assert "three: recipes export: refuses" in error
    assert "right: " not in error
    path.write_text("stages: {a: {command: sample-pair}}")
    assert "did you mean sample-pairs?" in recipes("run", path, code=2)


def test_check_and_plan_leave_outputs_outside_output_dir_unchanged(recipes, tmp_path: Path) -> None:
    """An existing output keeps its content, a missing one stays missing; a dot in a name makes no file."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").write_text("{}")
    path = write_pipeline(tmp_path)
    document = json.loads(path.read_text())
    base = document["stages"].pop("base")
    base["output"] = str(tmp_path / "there")
    run = {"run": "true", "output": str(tmp_path / "new" / "rows.jsonl")}
    sft = document["stages"]["sft"]
    sft["set"]["model_name_or_path"] = "${base-v1.5.output}"
    copy = {**base, "output": str(tmp_path / "other" / "model"), "needs": ["rows"]}
    stages = {"rows": run, "there": base, "copy": copy, "base-v1.5": {**base, "output": None}, "sft": sft}
    path.write_text(json.dumps({"output_dir": str(tmp_path / "out"), "stages": stages}))
    before = sorted(tmp_path.rglob("*"))
    recipes("run", path, "--check", "--keys")
    assert any(line.startswith("sft ") for line in plan_stages(path, "H100", 1, None))
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there" / "config.json").read_text() == "{}"


def test_check_inspects_existing_models_and_data(recipes, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("")
    keys = {"model_name_or_path": str(tmp_path), "dataset_name": f"{tmp_path}/chats.jsonl", "max_length": 64}
    path = tmp_path / "p.yaml"
    # The output of a stage that has not run, outside of `output_dir`.
    model = {"run": "true", "output": str(tmp_path / "elsewhere" / "model")}
    later = {"recipe": "sft", "set": keys | {"model_name_or_path": "${model.output}"}}
    path.write_text(json.dumps({"stages": {"sft": {"recipe": "sft", "set": keys}, "model": model, "later": later}}))
    recipes("run", path, "--check", "--keys", "--output_dir", tmp_path / "o")
    output = recipes("run", path, "--check", "--output_dir", tmp_path / "o", code=2)
    assert "sft: recipes check" in output
    assert "problems above" in output
    assert "later: recipes check" not in output


def test_table_shows_metric_of_gate_first(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text('stages: {a: {run: "true", matrix: {seed: [7]}, require: {acc: "> 0"}}}')
    pipeline = load_pipeline(path, str(tmp_path))
    (tmp_path / "a-1").mkdir()
    (tmp_path / "a-1" / "metrics.jsonl").write_text('{"step": 1, "eval_loss": 2, "acc": 0.5}\n')
    (tmp_path / "pipeline.json").write_text('{"stages": {"a-1": {"status": "done", "seconds": 62.4}}}')
    table = [line.split() for line in describe(pipeline)]
    assert table[0] == ["stage", "status", "time", "figure", "keys", "output"]
    assert table[1] == ["a-1", "done", "1", "min", "2", "s", "acc", "0.5", "seed=7", str(tmp_path / "a-1")]


SHAPE = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


def write_pipeline(folder: Path, **of_sft: object) -> Path:
    (folder / "rows.jsonl").touch()
    shared = {"dataset_name": str(folder / "rows.jsonl"), "max_length": 128, "per_device_train_batch_size": 4}
    pretraining = {**shared, "model_config": SHAPE, "tokenizer_name_or_path": str(folder), "max_tokens": 1_024_000}
    # Enough rows to hide the traffic of gradients.
    pretraining["per_device_train_batch_size"] = 16
    sft = {**shared, "model_name_or_path": "${base.output}", "max_steps": 1000, **of_sft}
    stages = {
        "base": {"recipe": "pretrain", "launch": "ddp", "set": {**pretraining, "learning_rate": 1e-3}},
        "sft": {"recipe": "sft", "launch": "single_gpu", "set": sft},
        "scores": {"recipe": "eval", "set": {"model_name_or_path": "${sft.output}", "tasks": ["core"]}},
    }
    path = folder / "p.yaml"
    path.write_text(json.dumps({"output_dir": str(folder / "out"), "stages": stages}))
    return path


def test_plan_hours_and_cost_follow_flops(tmp_path: Path, recipes) -> None:
    flags = ["--plan", "--gpu", "H100", "--num_processes", 2, "--device_hour_price", 1e9]
    lines = [line.split() for line in recipes("run", write_pipeline(tmp_path), *flags).splitlines()]
    assert lines[0] == ["stage", "GPUs", "GB", "each", "hours", "cost"]
    (base, gpus, _, _, cost), (sft, one, _, _, sft_cost) = lines[1:3]
    assert (base, gpus, sft, one) == ("base", "2", "sft", "1")
    # 6 FLOPs per parameter and token, including the output projection; attention over 128 tokens is in the margin.
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 128) + 1000 * 64
    keys = [f"--dataset_name={tmp_path / 'rows.jsonl'}", "--max_length=128", f"--output_dir={tmp_path}"]
    begun = [*keys, f"--model_config={json.dumps(SHAPE)}", f"--tokenizer_name_or_path={tmp_path}", "--max_tokens=1024"]
    share, _ = find_efficiency(load_config("pretrain", begun))
    sft_share, _ = find_efficiency(load_config("sft", [*keys, f"--model_name_or_path={tmp_path}"]))
    bound = 6 * weights * 1_024_000 / (989e12 * share * 3600) * 1e9
    assert bound <= float(cost.replace(",", "")) <= 1.6 * bound
    # 1,000 steps of four rows of 128 tokens on one GPU are half of 1,024,000 tokens.
    assert float(sft_cost.replace(",", "")) == pytest.approx(
        float(cost.replace(",", "")) / 2 * share / sft_share, rel=0.2
    )
    total = float(lines[4][-1].replace(",", ""))
    assert total == pytest.approx(float(cost.replace(",", "")) + float(sft_cost.replace(",", "")), abs=0.02)
    assert lines[-1][:5] == ["without", "the", "time", "of", "scores:"]
    assert not (tmp_path / "out").exists()


def test_plan_names_the_stages_that_do_not_fit(tmp_path: Path, recipes) -> None:
    assert "does not fit" not in recipes("run", write_pipeline(tmp_path), "--plan", "--gpu", "H100")
    large = write_pipeline(tmp_path, per_device_train_batch_size=10**7)
    assert "does not fit H100: sft: " in recipes("run", large, "--plan", "--gpu", "H100")


def test_plan_costs_match_recipes_plan(tmp_path: Path, recipes) -> None:
    """The cost of a stage that samples equals that of `recipes plan` for the recipe alone."""
    (tmp_path / "rows.jsonl").touch()
    shape = tmp_path / "shape"
    LlamaConfig(**SHAPE).save_pretrained(shape)
    keys = {"model_name_or_path": str(shape), "dataset_name": str(tmp_path / "rows.jsonl"), "max_steps": 200}
    grpo = {**keys, "response_length": 64, "num_generations": 4, "reward_funcs": "math:sqrt"}
    on_policy = {"teacher_model_name_or_path": str(shape), "lmbda": 0.5, "max_length": 128, "response_length": 64}
    stages = {
        "grpo": {"recipe": "grpo", "set": grpo},
        "longer": {"recipe": "grpo", "set": {**grpo, "max_steps": 400}},
        "served": {"recipe": "grpo", "set": {**grpo, "use_vllm": True, "vllm_mode": "server"}},
        "distill": {"recipe": "distill", "set": keys | on_policy},
    }
    path = tmp_path / "p.yaml"
    path.write_text(json.dumps({"output_dir": str(tmp_path / "out"), "stages": stages}))
    lines = plan_stages(path, "H100", None, 1e9)[1 : 1 + len(stages)]
    costs = {line.split()[0]: float(line.split()[-1].replace(",", "")) for line in lines}
    assert costs.keys() == stages.keys()
    assert costs["longer"] == pytest.approx(2 * costs["grpo"], rel=1e-3)
    shared = ["--gpu", "H100", "--price-per-gpu-hour", "1e9", "--output_dir", "out"]
    for name, stage in stages.items():
        flags = [word for key, value in stage["set"].items() for word in (f"--{key}", str(value))]
        planned = re.search(r"cost +([\d,.]+)[, ]", recipes("plan", "--recipe", stage["recipe"], *shared, *flags))
        assert planned is not None
        assert costs[name] == pytest.approx(float(planned[1].replace(",", "")), rel=1e-3), name


@pytest.mark.parametrize(
    "changes",
    [
        {"base": {"max_tokens": None, "num_train_epochs": 2}},
        {"sft": {"max_steps": -1}},
        {"sft": {"max_length": None}},
        {"base": {"max_tokens": None, "num_train_epochs": 2}, "sft": {"max_steps": -1}},
    ],
)
def test_plan_of_unknown_length_has_no_hours(changes: dict[str, dict[str, object]], tmp_path: Path) -> None:
    path = write_pipeline(tmp_path)
    document = json.loads(path.read_text())
    for stage, keys in changes.items():
        document["stages"][stage]["set"] |= keys
    path.write_text(json.dumps(document))
    *lines, note = plan_stages(path, "H100", 2, None)
    assert note.startswith(f"without the time of {', '.join(changes)}, scores: set max_steps and max_length")
    assert any(line.startswith("in all") for line in lines) == (len(changes) == 1)  # No sum of nothing.


def test_configurations_and_models_that_commands_will_write_are_unknown(recipes, tmp_path: Path) -> None:
    path = write_pipeline(tmp_path)
    document = json.loads(path.read_text())
    stages, sft = document["stages"], document["stages"]["sft"]
    stages["keys"] = {"run": "true", "output": "${output_dir}/sft.yaml"}
    stages["written"] = {"recipe": "sft", "config": "${keys.output}"}
    stages["merged"] = {"command": "merge --adapter ${sft.output} --output ${output_dir}/merged"}
    for start in ("merged", "scores", "written", "of-scores"):
        stages[f"of-{start}"] = {**sft, "set": {**sft["set"], "model_name_or_path": f"${{{start}.output}}"}}
    path.write_text(json.dumps(document))
    recipes("run", path, "--check", "--keys")
    *_, note = plan_stages(path, "H100", None, None)
    assert note.startswith("without the time of scores, keys, written, merged, of-scores, of-written, of-of-scores:")


def test_plan_reports_invalid_keys_but_not_stages_that_follow(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path, learnin_rate=1)
    document = json.loads(path.read_text())
    sft = {name: value for name, value in document["stages"]["sft"]["set"].items() if name != "learnin_rate"}
    document["stages"]["more"] = {"recipe": "sft", "set": {**sft, "model_name_or_path": "${sft.output}"}}
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="sft: --learnin_rate") as caught:
        plan_stages(path, "H100", None, None)
    assert len(caught.value.problems) == 1


def test_plan_refuses_incompatible_launch_files(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path, load_in_8bit=True, use_peft=True)
    document = json.loads(path.read_text())
    document["stages"]["sft"] |= {"recipe": "lora", "launch": "zero3"}
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="sft: --load_in_8bit"):
        plan_stages(path, "H100", None, None)


SHIPPED = {"speedrun": 7, "teaching_assistants": 3, "zephyr": 4, "iterated_dpo": 6}


@pytest.mark.parametrize(("name", "num_stages"), SHIPPED.items())
def test_keys_of_shipped_pipeline_are_valid(name, num_stages, monkeypatch, recipes) -> None:
    monkeypatch.chdir(ROOT)
    assert (
        recipes("run", f"recipes/pipelines/{name}.yaml", "--check", "--keys") == f"{num_stages} stages, ready to run\n"
    )


def test_rounds_replace_what_the_recipes_name_of_another_model_and_dataset() -> None:
    pairs, policy = load_pipeline(ROOT / "recipes" / "pipelines" / "iterated_dpo.yaml").stages[:2]
    # The policy lacks the padding token of the recipe that samples; a file of rows has only the split `train`.
    assert "--pad_token null" in " ".join(pairs.words)
    assert "--dataset_train_split train --dataset_test_split null" in " ".join(policy.words)


def test_teaching_assistants_pass_teacher_between_stages() -> None:
    assistant, student, direct = load_pipeline(ROOT / "recipes" / "pipelines" / "teaching_assistants.yaml").stages
    assert student.argv[student.argv.index("--teacher_model_name_or_path") + 1] == str(assistant.output)
    assert list(student.needs) == ["assistant"]
    assert "--teacher_model_name_or_path" not in [*assistant.argv, *direct.argv]


def test_missing_extra_of_a_late_stage_is_named_before_the_first(path: Path, recipes, monkeypatch) -> None:
    path.write_text(path.read_text() + "  scores: {recipe: eval, set: {model_name_or_path: a/b, tasks: [core]}}\n")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    out = path.parent / "out"
    printed = recipes("run", path, "--output_dir", out, code=2)
    assert "lm_eval not installed\n    pip install 'recipes-lib[eval]'" in printed
    assert not out.exists()
    recipes("run", path, "--output_dir", out, "--until", "one")


def test_keys_of_late_stages_are_checked_before_the_first_starts(tmp_path, monkeypatch, recipes) -> None:
    """But not files, which a program writes, nor stages that are not chosen."""
    monkeypatch.chdir(tmp_path)
    Path("dpo.yaml").write_text("dataset_name: pairs.jsonl\nmax_length: 8\n")
    wrong = {"recipe": "dpo", "config": "dpo.yaml", "set": {"model_name_or_path": "${make.output}", "betta": 1}}
    stages = {
        "make": {"run": "mkdir ${output_dir}/make"},
        "outside": {"run": "true", "output": "a/b/c"},
        "sft": {"recipe": "sft", "config": "dpo.yaml", "set": {"model_name_or_path": "${outside.output}"}},
        "dpo": wrong,
        "late": {"run": "./written-later"},
        "written": {"recipe": "sft", "config": "written.yaml"},
    }
    Path("p.yaml").write_text(json.dumps({"output_dir": "out", "stages": stages}))
    error = recipes("run", "p.yaml", code=2)
    assert "dpo: --betta: unknown key `betta`" in error
    assert "pairs.jsonl" not in error
    assert "written" not in error
    assert "a/b/c" not in error
    assert not Path("a").exists()
    assert not Path("out", "make").exists()
    recipes("run", "p.yaml", "--until", "make")
    assert Path("out", "make").exists()


def test_demo_runs_shipped_pipeline_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    started: list[tuple[Path, Path]] = []
    monkeypatch.setattr("recipes_lib.demo.walkthrough.run_demo", lambda *arguments, **_: started.append(arguments) or 3)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo"]) == 3
    ((file, output_dir),) = started
    assert (file.name, output_dir) == ("demo.yaml", Path("demo"))
    assert (file.parents[1] / "configs" / "demo" / "corpus.yaml").is_file()
    assert cli.main(["demo", "--output", "x"]) == 2
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    assert cli.main(["demo"]) == 2
    assert "pip install 'recipes-lib[corpus,eval]'" in capsys.readouterr().err
    assert len(started) == 1
    assert not list(tmp_path.iterdir())


def test_stages_at_the_same_time_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes_lib.hardware.count_accelerators", lambda: 2)
    assert find_slots(1, {}) == [{}]
    assert find_slots(2, {}) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert find_slots(2, {"CUDA_VISIBLE_DEVICES": "3,GPU-5"})[1] == {"CUDA_VISIBLE_DEVICES": "GPU-5"}
    with pytest.raises(ConfigError, match=r"--jobs: 3 stages at the same time, where torch finds 2 GPUs"):
        find_slots(3, {})
    monkeypatch.setattr("recipes_lib.hardware.count_accelerators", lambda: 0)
    assert find_slots(3, {}) == [{}, {}, {}]
