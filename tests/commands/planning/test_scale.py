"""``recipes scale``: fits to records of runs, published laws, sweeps, predictions, errors."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
import yaml
from tests.forked import ROOT
from tests.rows import write_rows
from transformers import LlamaConfig, PretrainedConfig

from recipes_lib.commands.planning.scale import read_scaling_run
from recipes_lib.config.loader import load_config
from recipes_lib.pipelines.pipeline import load_pipeline
from recipes_lib.planning import scaling
from recipes_lib.planning.compute import compute_model_size, find_planned_model
from recipes_lib.planning.scaling import PUBLISHED, fit_law

LAW = PUBLISHED["Besiroglu et al. 2024"]


def write_run(folder: Path, config: PretrainedConfig, num_tokens: int) -> None:
    """Write records of a run whose loss follows ``LAW``; the model is a ``config.json`` only."""
    config.save_pretrained(folder)
    (folder / "run.json").write_text(json.dumps({"status": "done", "config": {}}))
    loss = LAW.compute_loss(compute_model_size(config).total, num_tokens)
    events = [
        {"kind": "train", "step": 4, "loss": 9.0, "num_tokens": num_tokens},
        {"kind": "eval", "step": 2, "eval_loss": 8.0},
        {"kind": "eval", "step": 4, "eval_loss": loss},
    ]
    write_rows(folder / "metrics.jsonl", events)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Folders of twelve runs."""
    folders = []
    for width in (32, 64, 128):
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=512, **sizes)
        for ratio in (10, 20, 40, 80):
            folders.append(tmp_path / f"{width}-{ratio}")
            write_run(folders[-1], config, ratio * compute_model_size(config).total)
    return folders


@pytest.fixture
def scale(run_command, monkeypatch):
    """Run ``recipes scale`` with few starts and resamples; ``tests/planning/test_scaling.py`` uses all starts."""
    monkeypatch.setattr(scaling, "_STARTS", scaling._STARTS[::12])
    monkeypatch.setattr(scaling, "fit_law", partial(fit_law, num_resamples=3))
    return lambda *flags, code=0: run_command("scale", *flags, code=code)


def test_run_has_parameters_tokens_and_last_evaluation_loss(runs) -> None:
    run = read_scaling_run(runs[0])
    assert run.num_tokens == 10 * run.num_parameters
    assert run.loss == LAW.compute_loss(run.num_parameters, run.num_tokens)
    without = read_scaling_run(runs[0], counts_embeddings=False)
    assert run.num_parameters - without.num_parameters == 2 * 512 * 32


def test_fit_recovers_law_and_extrapolates_far_only_with_interval(runs, scale, tmp_path) -> None:
    law = tmp_path / "law.json"
    output = scale("fit", *runs, "--output", law)
    assert "IsoFLOP         fewer than two budgets have three sizes" in output
    assert re.search(r"power law +L = \(\S+ / N\)\^0\.\d+ by the longest run", output)
    assert float(re.search(r"size exponent +([\d.]+)", output)[1]) == pytest.approx(0.3478, abs=0.003)
    size = read_scaling_run(runs[-1]).num_parameters
    output = scale("predict", "--parameters", 2 * size, "--tokens", 100 * size, "--fit", law)
    assert float(re.search(r"loss +([\d.]+)", output)[1]) == pytest.approx(
        LAW.compute_loss(2 * size, 100 * size), rel=0.002
    )
    largest = max(run.num_flops for run in map(read_scaling_run, runs))
    output = scale("plan", "--flops", 25 * largest, "--fit", law)
    assert "(90 %: " in output
    assert "extrapolated  to 25.0 times the operations of the largest run" in output
    assert "extrapolated" not in scale("plan", "--flops", 25 * largest)
    law.write_text(json.dumps(json.loads(law.read_text()) | {"resampled": []}))
    assert "fit it again by `recipes scale fit`" in scale("plan", "--flops", 25 * largest, "--fit", law, code=2)
    assert "extrapolated  to 9.0 times" in scale("plan", "--flops", 9 * largest, "--fit", law)


@pytest.mark.parametrize("exponent", ["size_exponent", "token_exponent"])
def test_law_without_a_term_has_no_optimum(scale, tmp_path, exponent) -> None:
    law = dataclasses.asdict(LAW) | {exponent: 0.0}
    (tmp_path / "law.json").write_text(json.dumps({"law": law, "resampled": [], "max_flops": 1e18}))
    assert "no optimum: its loss depends on only one" in scale("plan", "--flops", 1e18, "--fit", tmp_path / "law.json")


def test_all_unusable_runs_are_reported_together(runs, scale, tmp_path) -> None:
    """A missing folder, damaged files, another recipe, and losses that are not finite."""
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text('{"status": "done"')
    (tmp_path / "torn" / "metrics.jsonl").write_bytes(b"\xff\xfe\n[1, 2]\n")
    (runs[0] / "run.json").write_text(json.dumps({"status": "done", "stage": "sft"}))
    events = [
        {"kind": "train", "step": 4, "loss": "nan", "num_tokens": 9},
        {"kind": "eval", "step": 4, "eval_loss": 1e300},
    ]
    write_rows(runs[1] / "metrics.jsonl", events)
    events = [{"kind": "train", "step": 4, "loss": 2.0, "num_tokens": "nan"}]
    write_rows(runs[2] / "metrics.jsonl", events)
    # Diverged after the evaluation at step 2.
    events = [
        {"kind": "train", "step": 4, "loss": 2.0, "num_tokens": 9},
        {"kind": "eval", "step": 2, "eval_loss": 8.0},
        {"kind": "eval", "step": 4, "eval_loss": "nan"},
    ]
    write_rows(runs[3] / "metrics.jsonl", events)
    rates = [{"kind": "train", "step": n, "loss": 2.0, "learning_rate": rate} for n, rate in enumerate((0, 1e-3, 6e-4))]
    write_rows(runs[4] / "metrics.jsonl", rates)
    (runs[5] / "config.json").write_text('{"model_type": "lla')
    (runs[6] / "config.json").write_text('{"model_type": "vit"}')
    write_rows(runs[7] / "metrics.jsonl", events[:2])
    output = scale("fit", tmp_path / "nowhere", tmp_path / "torn", *runs, "--output", tmp_path / "law.json", code=2)
    for folder, words in {
        "nowhere": "has neither run.json",
        "torn": "is not a finished run",
        runs[0].name: "is a run of sft",
        runs[1].name: "has no finite loss",
        runs[2].name: "has no `num_tokens`",
        runs[3].name: "has no finite loss",
        runs[4].name: "learning rate ends at 0.0006 of 0.001",
        runs[5].name: "config.json",
        runs[6].name: "a vit model cannot be built",
        runs[7].name: "its last held-out loss is that of step 2 of 4",
    }.items():
        assert re.search(f"{folder}: .*{words}", output)
    assert not (tmp_path / "law.json").exists()


def test_run_that_is_named_twice_counts_once(runs, scale, tmp_path) -> None:
    law = ["--output", tmp_path / "law.json"]
    assert scale("fit", *runs, *runs[:3], *law) == scale("fit", *runs, *law)


def test_held_out_and_training_losses_are_not_mixed(runs, scale, tmp_path) -> None:
    write_rows(runs[3] / "metrics.jsonl", [{"kind": "train", "step": 4, "loss": 3.0, "num_tokens": 1e6}])
    output = scale("fit", *runs, "--output", tmp_path / "law.json", code=2)
    assert f"{runs[3]}: has no held-out losses, and other runs have" in output


def test_repeated_runs_determine_no_law(runs, scale, tmp_path) -> None:
    three = [runs[0], runs[5], runs[10]]
    output = scale("fit", *three, *three, *three, "--output", tmp_path / "law.json", code=2)
    assert "3 different runs of 3 sizes, 3 numbers of tokens and 3 losses determine no law" in output


def test_runs_with_different_tokenizers_are_refused(runs, scale, tmp_path) -> None:
    """Limits of length in ``tokenizer.json`` make no difference; without the file, the vocabulary size decides."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    for number, run in enumerate(runs):
        tokenizer = {"truncation": number, "pre_tokenizer": None, "model": model}
        (run / "tokenizer.json").write_text(json.dumps(tokenizer))
    fit = ["fit", *runs, "--output", tmp_path / "law.json"]
    scale(*fit)
    (runs[5] / "tokenizer.json").write_text(json.dumps({"model": model | {"vocab": {"a": 1, "b": 0}}}))
    assert f"{runs[5]}: has another tokenizer than {runs[0]}" in scale(*fit, code=2)
    (runs[5] / "tokenizer.json").write_text("{")
    assert f"{runs[5] / 'tokenizer.json'}: is not JSON" in scale(*fit, code=2)
    for run in runs:
        (run / "tokenizer.json").unlink()
    config = json.loads((runs[7] / "config.json").read_text())
    (runs[7] / "config.json").write_text(json.dumps(config | {"vocab_size": 513}))
    assert f"{runs[7]}: has another tokenizer than" in scale(*fit, code=2)


LAW_VALUES = dict.fromkeys(("size_factor", "token_factor", "size_exponent", "token_exponent"), 0.5)


@pytest.mark.parametrize(
    ("law", "resampled", "max_flops", "code"),
    [
        ({"irreducible": 1.5}, [], 1e18, 0),
        # As non-finite values are stored.
        ({"irreducible": 1.5}, [LAW_VALUES | {"irreducible": "inf"}], 1e18, 0),
        ({"irreducible": "much"}, [], 1e18, 2),
        ({"irreducible": None}, [], 1e18, 2),
        ({}, [], 1e18, 2),
        ({"irreducible": 1.5}, [[1.5]], 1e18, 2),
        ({"irreducible": 1.5}, [], 0.0, 2),
        ({"irreducible": 1.5}, [], -1.0, 2),
    ],
)
def test_file_of_law_is_read_or_refused(law, resampled, max_flops, code, scale, tmp_path) -> None:
    path = tmp_path / "law.json"
    path.write_text(json.dumps({"law": LAW_VALUES | law, "resampled": resampled, "max_flops": max_flops}))
    output = scale("plan", "--flops", 1e18, "--fit", path, code=code)
    assert ("is not a scaling law" in output) is (code == 2)


@pytest.mark.parametrize("curve", [5, {"metric": "loss"}])
def test_file_of_law_with_an_invalid_curve_is_refused(curve, scale, tmp_path) -> None:
    law = {"law": LAW_VALUES | {"irreducible": 1.5}, "resampled": [], "max_flops": 1e18, "curve": curve}
    (tmp_path / "law.json").write_text(json.dumps(law))
    run = ["--parameters", 1e6, "--tokens", 1e6]
    assert "is not a scaling law" in scale("predict", *run, "--fit", tmp_path / "law.json", code=2)


@pytest.mark.parametrize("flags", [["plan", "--flops", 1e18], ["predict", "--parameters", 1e6, "--tokens", 1e6]])
def test_file_of_another_kind_is_refused_with_the_remedy(flags, scale, tmp_path) -> None:
    for text in ("depth: 2", "{}"):
        (tmp_path / "law.json").write_text(text)
        assert "write it by `recipes scale fit`" in scale(*flags, "--fit", tmp_path / "law.json", code=2)


def test_both_published_laws_are_reported(scale) -> None:
    output = scale("plan", "--flops", 5.76e23)
    first, second = output.split("Hoffmann et al. 2022, as printed")
    assert "Besiroglu et al. 2024" in first
    assert "18.4 per parameter" in first
    assert "92.6 per parameter" in second
    parameters, tokens = map(float, re.findall(r"20 per param. +(\S+) parameters, (\S+) tokens", second)[0])
    assert (tokens / parameters, 6 * parameters * tokens) == pytest.approx((20, 5.76e23), rel=1e-3)


def test_budget_of_money_buys_flops_and_repeated_data_change_the_optimum(scale) -> None:
    output = scale("plan", "--budget", "$500", "--gpu", "H100", "--price_per_gpu_hour", 2.5, "--mfu", "40%")
    assert "200.0 GPU hours of H100, 9.89e+14 FLOP/s at 40% MFU" in " ".join(output.split())
    assert f"operations      {200 * 3600 * 989e12 * 0.4:.3g}" in output
    assert "repeated" not in output
    output = scale("plan", "--flops", 9.3e21, "--unique_tokens", "25B")
    parameters, tokens = re.findall(r"repeated data (\S+) parameters, (\S+) tokens", output)[0]
    assert 6 * float(parameters) * float(tokens) == pytest.approx(9.3e21, rel=1e-3)
    assert f"{float(tokens) / 25e9:.3g} epochs, worth " in output
    assert "learning rate 0.00056, batch of 4.5e+06 tokens" in " ".join(output.split())


def test_run_with_many_steps_of_one_process_is_predicted(scale) -> None:
    config = ROOT / "recipes" / "configs" / "smollm2-135m" / "pretrain.yaml"
    assert "134,515,008 parameters, 2,097,152,000,000 tokens" in scale("predict", "--config", config)


def test_length_of_predicted_run_is_in_tokens_or_steps(scale, recipe) -> None:
    recipe.write_text(yaml.safe_dump(RECIPE | {"per_device_train_batch_size": 2}))
    assert " 128,000 tokens" in scale("predict", "--config", recipe)
    recipe.write_text(yaml.safe_dump(RECIPE | {"max_steps": -1, "warmup_steps": 0}))
    assert "the length of the run is in epochs" in scale("predict", "--config", recipe, code=2)


RECIPE = {
    "model_config": {"model_type": "llama", "vocab_size": 512, "hidden_size": 32, "tie_word_embeddings": True},
    "tokenizer_name_or_path": "owner/missing",
    "dataset_name": "owner/missing",
    "output_dir": "out",
    "max_length": 64,
    "max_steps": 1000,
    "warmup_steps": 200,
    "seed": 7,
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "pretrain.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


def test_sweep_has_requested_sizes_and_its_runs_are_fitted(recipe, scale, tmp_path) -> None:
    sizes = ["--depths", 3, 1, 2, 2, "--ratios", 5, 20, 80]
    output = scale("sweep", "--config", recipe, "--output", tmp_path / "a sweep", *sizes)
    *stages, law = load_pipeline(tmp_path / "a sweep" / "pipeline.yaml").stages
    found = []
    for stage in stages:
        config = load_config("pretrain", stage.argv)
        model = find_planned_model(config)
        size, num_tokens = compute_model_size(model).total, config.pretraining.max_tokens
        found.append((model.num_hidden_layers, model.hidden_size, num_tokens / size))
        assert model.intermediate_size == 64 * {1: 3, 2: 6, 3: 8}[model.num_hidden_layers]
        rate = 0.3118 * max(6 * size * num_tokens, 1e17) ** -0.125  # Bi et al. 2024, equation 1.
        assert config.training["learning_rate"] == pytest.approx(rate, rel=2e-3)
        assert (config.training["warmup_steps"], config.training["seed"], config.read("max_steps")) == (0.05, 7, -1)
        assert f"{size:,} parameters, {num_tokens:,} tokens" in output
        write_run(stage.output, model, num_tokens)
    assert found == [(depth, 64 * depth, ratio) for depth in (1, 2, 3) for ratio in (5, 20, 80)]
    fitted = scale(*law.words[law.words.index("scale") + 1 :])
    assert float(re.search(r"size exponent +([\d.]+)", fitted)[1]) == pytest.approx(LAW.size_exponent, abs=0.01)
    assert law.output.is_file()


def test_target_is_predicted_before_and_compared_after_training(recipe, scale, tmp_path) -> None:
    folder = tmp_path / "sweep"
    sizes = ["--depths", 1, 2, 3, "--ratios", 5, 20, 80, "--head_dim", 16, "--target", 4, 90]
    output = scale("sweep", "--config", recipe, "--output", folder, *sizes)
    stages = {stage.name: stage for stage in load_pipeline(folder / "pipeline.yaml").stages}
    assert [*stages][-4:] == ["law", "predicted", "target", "compared"]
    assert "predicted" in stages["target"].needs
    assert f"--expected_curve {stages['predicted'].output}" in " ".join(stages["target"].argv)
    assert "runs/target" not in " ".join(stages["law"].words)
    stages["predicted"].output.parent.mkdir()
    stages["predicted"].output.touch()
    target = load_config("pretrain", stages["target"].argv)
    model = find_planned_model(target)
    assert (model.num_hidden_layers, model.num_attention_heads, model.hidden_size) == (4, 4, 64)
    sizes = []
    for stage in stages.values():
        if stage.recipe:
            config = load_config("pretrain", stage.argv)
            built, num_tokens = find_planned_model(config), config.pretraining.max_tokens
            sizes.append(compute_model_size(built).total * num_tokens)
            if stage.name != "target":
                write_run(stage.output, built, num_tokens)
    ratio = sizes[-1] / max(sizes[:-1])
    assert f"{ratio:.1f} times the operations of the largest run" in output
    run = {name: stage.words[stage.words.index("scale") + 1 :] for name, stage in stages.items() if stage.command}
    scale(*run["law"])
    output = scale(*run["predicted"])
    assert f"to {ratio:,.1f} times the operations" in output
    before = json.loads((folder / "runs" / "predicted.json").read_text())
    assert "measured" not in before
    write_run(stages["target"].output, model, target.pretraining.max_tokens)
    output = scale(*run["compared"])
    after = json.loads((folder / "runs" / "compared.json").read_text())
    assert after["predicted"] == pytest.approx(before["predicted"], rel=1e-3)
    assert after["error"] == pytest.approx(0, abs=5e-3)
    assert re.search(r"measured +[\d.]+: error of the prediction [+-]0\.\d\d%, (in|outside of) the interval", output)


@pytest.mark.parametrize("counts", [True, False])
def test_prediction_counts_embeddings_like_its_law(runs, scale, tmp_path, counts) -> None:
    law, found = tmp_path / "new" / "law.json", tmp_path / "other" / "found.json"
    scale("fit", *runs, "--output", law, *([] if counts else ["--no_count_embeddings"]))
    output = scale("predict", "--run", runs[0], "--fit", law, "--output", found)
    size = read_scaling_run(runs[0], counts_embeddings=counts).num_parameters
    record = json.loads(found.read_text())
    assert record["num_parameters"] == size
    # Evaluated at half of the steps first.
    assert record["curve"]["shares"][0] == 0.5
    assert record["curve"]["losses"][-1] == pytest.approx(record["predicted"], rel=1e-3)
    assert re.search(rf"at 50% +{record['curve']['losses'][0]:.4g} .band: ", output)


@pytest.mark.parametrize(
    ("changes", "flags", "words"),
    [
        ({}, ["--head_dim", 15], "rotary embeddings need an even number"),
        ({}, ["--target", 0, 5], "must be 1 or more"),
        ({}, ["--depths", 2, 4], "--depths: a law needs 3 different numbers"),
        ({}, ["--ratios", 0, 5, 10], "--ratios: a law needs 3 different numbers, each 1 or more"),
        ({"model_config": {"model_type": "gpt2", "vocab_size": 512}}, [], "has no `hidden_size`"),
        ({"lr_scheduler_type": "constant"}, [], "the learning rate does not decay"),
        ({"warmup_steps": 0.5, "decay_steps": 0.9, "lr_scheduler_type": "warmup_stable_decay"}, [], "decay"),
    ],
)
def test_invalid_sweep_writes_no_configuration(recipe, scale, tmp_path, changes, flags, words) -> None:
    recipe.write_text(yaml.safe_dump(RECIPE | changes))
    assert words in scale("sweep", "--config", recipe, "--output", tmp_path / "sweep", *flags, code=2)
    assert not list((tmp_path / "sweep").glob("*.yaml"))


def test_file_in_output_path_is_an_error(runs, recipe, scale, tmp_path) -> None:
    assert "name another --output" in scale("sweep", "--config", recipe, "--output", recipe, code=2)
    law = tmp_path / "law.json"
    scale("fit", *runs, "--output", law)
    predict = ["predict", "--run", runs[0], "--fit", law, "--output", recipe / "loss.json"]
    assert "name another --output" in scale(*predict, code=2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["plan", "--flops", "-1"], "write a finite number > 0"),
        (["plan"], "neither FLOPs nor budget, GPU and price are given"),
        (["plan", "--budget", "500", "--gpu", "H100"], "neither FLOPs nor budget, GPU and price are given"),
        (["plan", "--budget", "500"], "--budget: needs --gpu"),
        (["plan", "--flops", "1e20", "--gpu", "H100"], "--gpu: needs --budget"),
        (["plan", "--budget", "500", "--gpu", "80GB", "--price_per_gpu_hour", "2"], "the peak of '80GB' is not known"),
        (["predict", "--parameters", "1e6"], "--parameters: needs --tokens"),
        (["predict"], "write --parameters and --tokens, --config or --run"),
        (["predict", "--run", "a", "--config", "b"], "--config: excludes --run"),
        (["predict", "--run", "a", "--output", "b"], "--output: needs --fit"),
        (["fit", "no/such/run"], "neither run.json nor metrics.jsonl"),
        (["plan", "--flops", "1e18", "--fit", "no-law.json"], "no-law.json"),
    ],
)
def test_invalid_flags_are_errors(scale, flags, words) -> None:
    assert words in scale(*flags, code=2)


def test_remedy_of_a_missing_budget_can_be_followed_in_a_shell(scale) -> None:
    remedy = scale("plan", code=2).partition("write ")[2]
    for flags in remedy.strip().split(", or "):
        echo = ["sh", "-c", f"printf '%s\n' {flags}"]
        words = subprocess.run(echo, capture_output=True, text=True, check=True).stdout.split()
        assert "parameters" in scale("plan", *words)
