from __future__ import annotations

import re

import pytest

from recipes_lib.config.loader import load_config
from recipes_lib.errors import ConfigError


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        ("dataset_mixture: [{name: a/b}]", 5, ["dataset_name", "recipe.yaml:2"]),
        ("dataset_test_split: test\ntest_split_size: 10", 6, ["recipe.yaml:5"]),
        ("fp16: true\nbf16: true", 6, ["fp16"]),
        ("dataset_streaming: true\nmax_length: 64", 5, ["max_steps"]),
        (
            "max_steps: 5\ndataset_streaming: true\ntest_split_size: 0.1\nwarmup_steps: 0\nmax_length: 64",
            7,
            ["held out of a stream"],
        ),
        ("overlong: truncate", 5, ["max_length"]),
        ("max_length: null\noverlong: drop", 6, ["max_length"]),
        ("trust_remote_code: true", 5, ["trust_remote_code"]),
        (
            f"trust_remote_code: true\nmodel_revision: {'a' * 40}\ntokenizer_name_or_path: org/tokens",
            5,
            ["trust_remote_code", "repository org/"],
        ),
        (
            f"trust_remote_code: true\nmodel_revision: {'a' * 40}\ntokenizer_revision: main",
            5,
            ["trust_remote_code", "repository"],
        ),
        ("trust_remote_code: true\nmodel_revision: main", 5, ["trust_remote_code"]),
        ("fp16: true\ndtype: float16", 5, ["dtype"]),
        ("eval_strategy: epoch\neval_steps: 10", 6, ["eval_strategy"]),
        ("eval_strategy: no\neval_steps: 10", 6, ["eval_strategy"]),
        ("save_strategy: epoch\nsave_steps: 10", 6, ["save_strategy"]),
        ("eval_strategy: no\neval_on_start: true", 6, ["eval_strategy"]),
        ("max_steps: 10\nnum_train_epochs: 2", 6, ["max_steps"]),
        ("max_broken_fraction: 0.1", 5, ['no effect: `broken_rows` is "error"']),
        ("max_steps: 0", 5, ["max_steps"]),
        ("max_steps: 10\nwarmup_steps: 10", 6, ["warm-up"]),
        ("warmup_steps: 1.0", 5, ["neither a share nor a count"]),
        ("logging_steps: 2.5", 5, ["neither a share nor a count"]),
        ("lr_scheduler_type: warmup_stable_decay", 5, ["num_decay_steps"]),
        ("lr_scheduler_type: cosine_with_min_lr", 5, ["min_lr"]),
        ("lr_scheduler_type: reduce_lr_on_plateau\neval_strategy: no", 5, ["held-out"]),
        ("metrics: [accuracy]", 5, ["import path"]),
        ("num_sample_prompts: 0\nsample_prompts: [hi]", 6, ["num_sample_prompts"]),
        ("load_best_model_at_end: true\nsave_strategy: epoch", 5, ["checkpoint wherever"]),
        ("load_best_model_at_end: true\nsave_steps: 30\neval_steps: 20", 5, ["multiple"]),
        ("load_best_model_at_end: true\nsave_steps: 30", 5, ["multiple"]),
        ("dataloader_prefetch_factor: 2", 5, ["workers"]),
        ("max_rollbacks: 2\nsave_strategy: no", 5, ["no effect: `save_strategy` is"]),
        (
            "max_rollbacks: 2\nmax_steps: 9\ndataset_streaming: true\nwarmup_steps: 0\nmax_length: 64",
            5,
            ["dataset_streaming"],
        ),
        ("save_keep_steps: 100", 5, ["save_keep_steps", "multiple"]),
        ("save_keep_steps: 100\nsave_steps: 30", 5, ["save_keep_steps", "multiple"]),
        ("save_keep_steps: 100\nsave_strategy: no", 5, ["no effect: `save_strategy` is"]),
    ],
)
def test_what_contradicts_is_refused_at_its_line(problems_of, lines: str, line: int, words: list[str]) -> None:
    (problem,) = problems_of(lines + "\n")
    assert problem.where == f"recipe.yaml:{line}"
    assert all(word in problem.found for word in words)
    assert problem.remedy


@pytest.mark.parametrize(
    "lines",
    [
        "max_steps: 10\nwarmup_steps: 0.1\ndataset_streaming: true\nmax_length: 64",
        "max_steps: -1\nnum_train_epochs: 1",
        f"trust_remote_code: true\nmodel_revision: {'a' * 40}",
        "load_best_model_at_end: true",
        "load_best_model_at_end: true\nsave_steps: 40\neval_steps: 20",
        "load_best_model_at_end: true\nsave_strategy: best",
        "save_keep_steps: 100\nsave_steps: 25",
        "save_keep_steps: 100\nsave_strategy: epoch",
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}",
        "lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {num_decay_steps: 10}",
        "dataset_mixture: null",
        "dataloader_num_workers: 2\ndataloader_prefetch_factor: 2",
        "metrics: [my.module:Exact]",
        "fp16: true\nbf16: false",
    ],
)
def test_what_agrees_passes(problems_of, lines: str) -> None:
    assert not problems_of(lines + "\n")


def test_missing_keys_are_named_together(problems_of) -> None:
    problems = problems_of(text="learning_rate: 1e-5\n")
    assert [problem.found.split("`")[1] for problem in problems] == ["model_name_or_path", "output_dir", "dataset_name"]
    assert {problem.where for problem in problems} == {"recipe.yaml"}


@pytest.mark.parametrize("key", ["dataset_config", "dataset_revision", "dataset_train_split"])
def test_what_a_mixture_says_of_each_part_is_not_said_beside_it(problems_of, key: str) -> None:
    text = f"model_name_or_path: a/b\noutput_dir: o\ndataset_mixture: [{{name: c/d}}]\n{key}: validation\n"
    (problem,) = problems_of(text=text)
    assert (problem.where, "both set" in problem.found) == ("recipe.yaml:3", True)
    assert "in the mixture's entries" in problem.remedy


def test_a_broken_value_is_not_reported_as_a_contradiction_too(problems_of) -> None:
    assert len(problems_of("max_steps: x\ndataset_streaming: true\nmax_length: 64\n")) == 1
    assert len(problems_of("max_length: x\noverlong: drop\n")) == 1


def test_a_flag_overrules_the_line_that_it_voids(write, sound: str) -> None:
    path = write(sound + "num_train_epochs: 3\neval_steps: 10\n")
    config = load_config("sft", ["--config", str(path), "--max_steps", "2", "--eval_strategy", "no"])
    assert "num_train_epochs" not in config.training
    assert "eval_steps" not in config.training
    assert config.training["eval_on_start"] is False
    assert config.provenance["num_train_epochs"] == "derived: `max_steps` decides the length"


def test_a_flag_that_the_file_voids_is_refused(problems_of) -> None:
    (problem,) = problems_of("max_steps: 100\n", flags=["--num_train_epochs", "1"])
    assert problem.where == "--num_train_epochs"


@pytest.mark.parametrize(
    ("weights", "refused_sum"),
    [
        (["0.8", "0.2"], None),
        (["80", "20"], None),
        (["0.33", "0.33", "0.33"], None),
        (["1"], None),
        (["0.5", "1"], "1.5"),
        (["2", "2"], "4"),
        (["1", "1"], "2"),
        (["0.5"], "0.5"),
        (["1", "null"], "1"),
    ],
)
def test_weights_of_fine_tuning_are_refused_where_they_may_be_meant_as_repeats(
    weights: list[str], refused_sum: str | None
) -> None:
    def load(recipe: str, key: str) -> None:
        entries = [f"{{name: a/b{at}, {key}: {value}}}" for at, value in enumerate(weights) if value != "null"]
        entries += [f"{{name: c/d{at}}}" for at, value in enumerate(weights) if value == "null"]
        flags = [f"--dataset_mixture=[{', '.join(entries)}]", "--model_name_or_path=a/b", "--output_dir=o"]
        load_config(recipe, [*flags, "--max_length=64"])

    load("sft", "repeat")
    load("pretrain", "weight")
    if refused_sum is None:
        load("sft", "weight")
    else:
        with pytest.raises(ConfigError, match=f"add up to {refused_sum}\n") as caught:
            load("sft", "weight")
        (problem,) = caught.value.problems
        assert "`repeat`" in problem.remedy


@pytest.mark.parametrize("recipe", ["sft", "pretrain"])
def test_a_mixture_goes_by_shares_or_by_repeats(recipe: str) -> None:
    mixture = "--dataset_mixture=[{name: a/b, weight: 1}, {name: c/d, repeat: 2}]"
    with pytest.raises(ConfigError, match="both `weight` and `repeat`"):
        load_config(recipe, [mixture, "--model_name_or_path=a/b", "--output_dir=o", "--max_length=64"])


PRETRAIN_CASES = [
    ("model_config: {model_type: llama}\n", "are both set", "keep one"),
    ("model_name_or_path: null\n", "neither `model_config` nor", "write `model_config"),
    ("max_tokens: 1000\nmax_steps: 5\n", "`max_steps` has no effect", "keep one"),
    ("max_tokens: 1000\nnum_train_epochs: 2\n", "`num_train_epochs` has no effect", "keep one"),
    ("warmup_tokens: 10\nwarmup_steps: 5\n", "`warmup_steps` has no effect", "keep one"),
    ("warmup_tokens: 1000\nmax_tokens: 1000\n", "as long as the run", "lower it"),
    ("decay_steps: 5\n", "`decay_steps` has no effect", "warmup_stable_decay"),
    ("batch_ramp_start: 0.5\n", "no effect: `batch_ramp_tokens` is null", "write `batch_ramp_tokens"),
    ("dtype: bfloat16\n", "rounded away", "adamw_bf16_stochastic"),
    ("dtype: bfloat16\noptim_args: bf16_stochastic_round=True\n", "rounded away", "adamw_bf16_stochastic"),
    ("optim_args: bf16_stochastic_round=True\n", "belongs to `optim: adamw_torch_4bit", "choose one of those"),
    ("optim: adamw_bf16_stochastic\n", "rounds bfloat16 weights", "write `dtype: bfloat16`"),
    ("dataset_curriculum: [{start_tokens: 0, weights: [1]}]\n", "needs a mixture", "write `dataset_mixture`"),
    ("dataset_streaming: true\n", "needs `max_steps`", "write `max_steps"),
]


@pytest.mark.parametrize(("lines", "found", "remedy"), PRETRAIN_CASES)
def test_a_contradiction_in_pretraining_is_named_with_its_remedy(
    problems_of, lines: str, found: str, remedy: str
) -> None:
    text = "dataset_name: owner/dataset\noutput_dir: out\nmax_length: 64\n"
    text += "" if "model_name_or_path" in lines else "model_name_or_path: owner/model\n"
    problems = problems_of(lines, text=text, recipe="pretrain")
    assert [problem.found for problem in problems if found in problem.found], problems
    assert [problem.remedy for problem in problems if remedy in problem.remedy], problems


@pytest.mark.parametrize(
    ("phases", "found"),
    [
        ([(0, [1, 2]), (100, [2, 1])], None),
        ([(5, [1, 2])], "start at [5]"),
        ([(0, [1, 2]), (0, [2, 1])], "start at [0, 0]"),
        ([(0, [1])], "phase 0"),
        ([(0, [1, -1])], "phase 0"),
        ([(0, [0, 0])], "phase 0"),
    ],
)
def test_a_curriculum_starts_at_zero_rises_and_weighs_every_source(problems_of, phases, found) -> None:
    curriculum = [{"start_tokens": start, "weights": weights} for start, weights in phases]
    text = "model_name_or_path: owner/model\noutput_dir: out\nmax_length: 64\n"
    text += f"dataset_mixture: [{{name: a/b}}, {{name: c/d}}]\ndataset_curriculum: {curriculum}\n"
    problems = problems_of("", text=text, recipe="pretrain")
    assert [problem.found for problem in problems if found and found in problem.found] or (
        found is None and not problems
    )


def test_an_exponential_decay_to_zero_is_refused(problems_of) -> None:
    lines = "lr_scheduler_type: warmup_stable_decay\ndecay_type: exponential\nmin_lr_ratio: 0\n"
    (problem,) = problems_of(lines, recipe="pretrain")
    assert "from its first step" in problem.found


@pytest.mark.parametrize(
    ("recipe", "lines", "told"),
    [
        ("lora", "use_peft: false\n", "`use_peft` is false"),
        ("lora", "load_in_4bit: true\nload_in_8bit: true\n", "are both set"),
        ("lora", "adapter_name_or_path: owner/adapter\nlora_r: 8\n", "`lora_r` has no effect"),
        ("lora", "bnb_4bit_quant_type: fp4\n", "`bnb_4bit_quant_type` has no effect: `load_in_4bit` is false"),
        ("lora", "load_in_8bit: true\nuse_bnb_nested_quant: false\n", "has no effect: `load_in_4bit` is false"),
        ("dpo", "f_alpha_divergence_coef: 0.3\n", "`f_alpha_divergence_coef` has no effect: `f_divergence_type` is"),
        ("dpo", "lora_r: 8\n", "`lora_r` has no effect: `use_peft` is false"),
        ("reward", "load_in_4bit: true\n", "`load_in_4bit` has no effect: `use_peft` is false"),
        ("dpo", "use_peft: true\nlora_dropout: 0.1\n", "scores random"),
        ("reward", "max_length: 64\noverlong: truncate\n", "truncate the prompts or answers"),
        ("dpo", "loss_type: [sigmoid, sft]\nloss_weights: [1.0]\n", "1 numbers for 2 losses"),
        ("dpo", "simpo_gamma: 1.0\n", "`simpo_gamma` has no effect: `loss_type` is"),
        ("dpo", "loss_type: sigmoid\nlabel_smoothing: 0.1\n", "`label_smoothing` has no effect: `loss_type` is"),
        ("dpo", "loss_type: exo_pair\n", "needs `label_smoothing`"),
        ("dpo", "loss_type: orpo\nref_model_name_or_path: a/b\n", 'no effect: `loss_type` is ["orpo"]'),
        ("dpo", "loss_type: sigmiod\n", "`loss_type` is 'sigmiod'"),
    ],
)
def test_adapters_and_preferences_are_refused_where_an_option_would_do_nothing(
    problems_of, recipe, lines, told
) -> None:
    problems = problems_of(lines, recipe=recipe)
    assert any(told in problem.found for problem in problems), problems


@pytest.mark.parametrize(
    ("recipe", "lines"),
    [
        ("lora", "load_in_4bit: true\nlora_dropout: 0.05\n"),
        ("reward", "label_smoothing: 0.1\nuse_peft: true\nlora_modules_to_save: [score]\n"),
        ("dpo", "loss_type: sigmoid\n"),
        ("dpo", "loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.2]\n"),
        ("dpo", "f_divergence_type: alpha_divergence\nf_alpha_divergence_coef: 0.5\n"),
        ("lora", "load_in_4bit: true\nbnb_4bit_quant_type: fp4\n"),
        ("dpo", "loss_type: simpo\nsimpo_gamma: 1.0\nbeta: 2.5\n"),
        ("dpo", "use_peft: true\nlora_r: 8\nload_in_8bit: true\n"),
    ],
)
def test_sound_adapters_and_preferences_load(problems_of, recipe, lines) -> None:
    assert problems_of(lines, recipe=recipe) == []


@pytest.mark.parametrize("optim", ["adamw_torch_4bit", "adamw_torch_8bit"])
def test_optimizers_that_round_at_random_may_hold_bfloat16(problems_of, optim: str) -> None:
    lines = f"dtype: bfloat16\noptim: {optim}\noptim_args: bf16_stochastic_round=True\n"
    assert not problems_of(lines, recipe="pretrain")


def test_a_single_loss_may_be_a_scalar(write) -> None:
    path = write("model_name_or_path: o/m\ndataset_name: o/d\noutput_dir: out\nloss_type: ipo\n")
    assert load_config("dpo", ["--config", str(path)]).training["loss_type"] == ["ipo"]


def test_what_needs_the_whole_stream_is_refused_together(problems_of) -> None:
    text = "model_name_or_path: a/b\noutput_dir: o\ndataset_mixture: [{name: a/b}]\nmax_steps: 1\n"
    problems = problems_of("dataset_streaming: true\ntest_split_size: 5\n", text=text)
    assert sorted((problem.where, problem.remedy) for problem in problems) == [
        ("recipe.yaml", "set max_length"),
        ("recipe.yaml:5", "set it to false, or mix the data on disk first"),
        ("recipe.yaml:6", "name held-out data: dataset_test_split"),
    ]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ('dataset_mixture=[{"name": "a/b", "weight": 60}, {"name": "c/d"}]', "a `weight` is a share of the mixture"),
        ('dataset_mixture=[{"name": "a/b", "weight": true}]', "weight` is 'true'"),
        ('dataset_mixture=[{"name": "a/b", "repeat": NaN}]', "repeat` is 'NaN'"),
        ('dataset_mixture=[{"name": "a/b", "format": "chat"}]', "format` is 'chat'"),
        ('dataset_mixture=["a/b", null]', "`dataset_mixture[1]` has no value"),
        ("dataset_mixture=[]", "is empty"),
        ("dataset_columns=[1]", "a list"),
        ('eval_datasets={"x": {"name": "a/b", "split": 3}}', "`eval_datasets: x` has `split: 3`"),
        ('eval_datasets={"x": {"name": "a/b", "format": "chat"}}', "`eval_datasets: x` has `format: chat`"),
        ('eval_datasets={"x": {"name": "a/b", "columns": [1]}}', "`eval_datasets: x` has `columns: [1]`"),
        ('eval_datasets={"x": {"split": "a"}}', "`eval_datasets: x` is no dataset"),
        ('eval_datasets={"x": null}', "`eval_datasets: x` is no dataset"),
        *((f"test_split_size={size}", "`test_split_size` is") for size in ("0", "-1", "1.5", "nan", "inf", "true")),
    ],
)
def test_what_reads_data_is_given_nothing_that_cannot_be_meant(data: str, told: str) -> None:
    """``data.sources`` asserts none of it again."""
    named = [] if data.startswith("dataset_mixture") else ["--dataset_name=a/b"]
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_config("sft", [f"--{data}", *named, "--model_name_or_path=a/b", "--output_dir=o"])
