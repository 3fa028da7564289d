"""``recipes plan``: output compared with the plan of training, published figures and documentation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.commands.planning.conftest import unwrap
from tests.commands.planning.test_planned_hardware import write_run
from tests.forked import ROOT
from tests.tiny import sizes
from transformers import MambaConfig, T5Config

from recipes_lib.config.loader import load_config
from recipes_lib.planning.schedule import plan_pretraining
from recipes_lib.report import charts

CONFIGS = ROOT / "recipes" / "configs"
TINY = sizes(64, 2, 4, model_type="llama", vocab_size=512)
KEYS: dict[str, Any] = {
    "model_config": TINY,
    "model_name_or_path": None,
    "tokenizer_name_or_path": "owner/missing",
    "max_length": 128,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_tokens": 10_000_000,
    "warmup_steps": 100,
    "learning_rate": 1e-3,
}
RECIPE_KEYS: Mapping[str, Mapping[str, Any]] = {
    "sft": {"max_length": 64, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
    "rloo": {"max_length": 512, "reward_funcs": ["a.b:c"]},
    "grpo": {"max_length": 512, "reward_funcs": ["a.b:c"]},
    "ppo": {"reward_funcs": ["a.b:c"], "per_device_eval_batch_size": 4, "response_length": 32, "bf16": False},
}


MIXED = (("web", 1), ("books", 1))


@pytest.fixture
def plan(plan_recipe):
    """Plan pretraining with ``KEYS`` and changes."""
    return lambda *flags, **changes: plan_recipe("pretrain", *flags, **KEYS | changes)


@pytest.fixture
def plan_other(plan_recipe):
    """Plan another recipe with its ``RECIPE_KEYS`` and changes."""
    return lambda recipe, *flags, **changes: plan_recipe(recipe, *flags, **{**RECIPE_KEYS[recipe], **changes})


@pytest.fixture
def find_run(tmp_path: Path):
    """Return the plan that training makes from the last configuration."""
    return lambda size=1: plan_pretraining(load_config("pretrain", ["--config", f"{tmp_path}/pretrain.yaml"]), size)


def read_count(pattern: str, output: str) -> int:
    return int(re.search(pattern, output)[1].replace(",", ""))


def test_plan_matches_training(plan, find_run) -> None:
    output = plan("--num_processes", 3, lr_scheduler_type="warmup_stable_decay", decay_steps=200, min_lr_ratio=0.1)
    run = find_run(3)
    assert f"steps           {run.num_steps:,}\n" in output
    assert f"batch           {3 * 2 * 4 * 128:,} tokens\n" in output
    assert f"tokens          {run.num_tokens:,}, " in output
    assert f"warm-up         100 steps, {100 * 3 * 2 * 4 * 128:,} tokens" in output
    assert f"from step {run.num_steps - 200:,}, " in output
    steps = [round(share * (run.num_steps - 1)) for share in (0, 0.25, 0.5, 0.75, 1)]
    rates = ", ".join(f"{1e-3 * run.schedule(step):.3g}" for step in steps)
    assert f"learning rate   {rates} at 0, 25, 50, 75, 100 %" in output


def test_batch_ramp_reports_its_end(plan, find_run) -> None:
    output = plan(batch_ramp_tokens=2_000_000, batch_ramp_start=0.25, batch_ramp_lr="constant")
    run = find_run()
    full = next(step for step in range(run.num_steps) if run.row_starts[step + 1] - run.row_starts[step] == 8)
    assert f"from 256 to 1,024 tokens, reached at step {full:,}, {run.row_starts[full] * 128:,} tokens" in output
    assert "tokens per step" not in plan()


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt3-175b", "3.14e+23"),
        pytest.param("chinchilla-70b", "5.46e+23", marks=pytest.mark.slow),
        pytest.param("llama2-70b", "8.28e+23", marks=pytest.mark.slow),
    ],
)
def test_operations_match_papers(run_command, name: str, published: str) -> None:
    output = run_command("plan", "--config", CONFIGS / name / "pretrain.yaml", "--num_processes", 16)
    assert f"{published} by 6 x parameters x tokens" in output


def test_documented_output_matches_command(run_command) -> None:
    page = (ROOT / "docs" / "pretraining_runs.md").read_text(encoding="utf-8")
    command, shown = re.search(r"\$ (recipes plan [^\n]*)\n(.*?)```", page, re.DOTALL).groups()
    _, _, _, config, *flags = command.split()
    assert run_command("plan", "--config", ROOT / config, *flags).startswith(unwrap(shown))


@pytest.mark.parametrize(
    ("page", "config", "flags", "peak"),
    [
        ("gsm8k", "qwen2.5-0.5b/grpo_rlvr", "--gpu H100", 57.2),
        ("gsm8k", "qwen2.5-0.5b/grpo_rlvr", "--gpu RTX4090 --per_device_eval_batch_size 128", 20.3),
        ("qlora", "llama3-8b/lora_4bit", "--gpu RTX4090 --hardware single_gpu", 12.2),
        ("distil_1b", "llama3-1b/distill", "--gpu H100 --hardware fsdp2 --num_processes 8", 43.9),
        ("zephyr", "mistral-7b/sft", "--gpu H100 --hardware fsdp2 --num_processes 8", 31.0),
    ],
)
def test_tutorial_states_planned_memory(run_command, page: str, config: str, flags: str, peak: float) -> None:
    output = run_command("plan", "--config", CONFIGS / f"{config}.yaml", *flags.split())
    planned = re.search(r"^    ([\d.]+) GB .*: fits ", output, re.MULTILINE)
    # The cache is smaller in transformers 5.24.
    assert float(planned[1]) == pytest.approx(peak, rel=0.05)
    assert f"{peak} GB" in (ROOT / "docs" / "tutorials" / f"{page}.md").read_text(encoding="utf-8")


def test_memory_of_pretraining_is_planned_for_gpu_or_launch_file(plan) -> None:
    found = [": fits" in plan(*flags) for flags in ([], ["--gpu", "H100"], ["--hardware", "single_gpu"])]
    assert found == [False, True, True]


def test_save_interval_is_at_most_the_run(plan) -> None:
    assert "save_steps: 9,766, " in plan("--num_processes", 1, "--gpu", "H100", "--save_seconds", 60)


def test_failures_reduce_goodput_and_set_save_interval(run_command) -> None:
    flags = "--num_processes", 16, "--gpu", "H100", "--num_gpus", 128, "--save_seconds", 60, "--failure_hours", 12_800
    output = run_command("plan", "--config", CONFIGS / "gpt3-175b" / "pretrain.yaml", *flags)
    assert "one in 100.0 hours" in output
    hours = float(re.search(r"time +([\d.,]+) hours", output)[1].replace(",", ""))
    share = float(re.search(r"goodput ([\d.]+)%", output)[1]) / 100
    total = float(re.search(r"goodput [\d.]+%: ([\d.,]+) hours in all", output)[1].replace(",", ""))
    assert total == pytest.approx(hours / share, rel=1e-3)
    steps, minutes = re.search(r"save_steps: ([\d,]+), every ([\d.]+) minutes", output).groups()
    # A full step is 3,276,800 of 300,000,772,096 tokens.
    assert float(minutes) == pytest.approx(int(steps) * hours * 60 * 3_276_800 / 300_000_772_096, rel=1e-2)
    # Young's rule; Daly's further terms are small here.
    assert float(minutes) == pytest.approx((2 * 1 * 6000) ** 0.5, rel=0.02)


@pytest.mark.parametrize("flag", ["save_seconds", "restart_seconds", "failure_hours"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_failure_times_must_be_finite_and_positive(plan, flag, value) -> None:
    values = {"save_seconds": "60"} | {flag: value}
    flags = [f"--{name}={value}" for name, value in values.items()]
    assert f"--{flag}: is {float(value):g}" in plan("--gpu", "H100", *flags, code=2)
    assert "--save_seconds: needs --gpu\n" in plan(*flags, code=2)
    assert "--save_seconds: needs" not in plan("--gpus", "2xH100", *flags, code=2), "--gpus excludes --gpu"


@pytest.mark.parametrize(
    ("flag", "value"), [("price_per_gpu_hour", -2), ("pue", 0.5), ("grid_gco2", "nan"), ("mfu", 1.5), ("mfu", 0)]
)
def test_prices_and_factors_must_be_in_range(plan, flag, value) -> None:
    assert f"--{flag}: is {value}" in plan("--gpu", "H100", f"--{flag}", value, code=2)


def test_hours_follow_from_printed_formula(plan) -> None:
    output = plan("--num_processes", 4, "--gpu", "NVIDIA A100-SXM4-80GB", "--mfu", 0.45)
    line = next(line for line in output.splitlines() if line.startswith("time"))
    hours, days = re.search(r"([\d.,e-]+) hours, ([\d.,e-]+) days, on 4 NVIDIA A100", line).groups()
    flops, gpus, peak, mfu = map(
        float, re.search(r": (\S+) / \((\d+) GPUs? x (\S+) FLOP/s x (\S+) MFU x 3600 s\)", line).groups()
    )
    assert (gpus, peak, mfu) == (4, 312e12, 0.45)
    assert float(hours) == pytest.approx(flops / (gpus * peak * mfu * 3600), rel=0.05)
    assert float(days) == pytest.approx(float(hours) / 24, rel=0.1)
    assert "on 16 A100-40GB" in plan("--num_processes", 4, "--gpu", "A100-40GB", "--num_gpus", 16)
    assert "name a GPU" in plan()


def test_num_gpus_defaults_to_one_process_each(plan) -> None:
    assert plan("--gpu", "H200", "--num_gpus", 4) == plan("--gpu", "H200", "--num_processes", 4)
    hint = re.search("name a GPU: (.*)", plan())[1].split()
    assert plan(*hint) == plan("--gpu", "H100", "--num_processes", 8, "--num_gpus", 8)


def test_fp16_uses_peak_of_fp16(plan) -> None:
    assert "6.5e+13 FLOP/s" in plan("--gpu", "T4", fp16=True)
    assert "'T4' in bfloat16 is not known" in plan("--gpu", "T4", code=2)


@pytest.mark.parametrize(
    ("num_tokens", "verdict"), [(10_000_000, "over-trained by 3."), (1_000_000, "under-trained by 2.")]
)
def test_tokens_are_compared_with_chinchilla_rule(plan, num_tokens: int, verdict: str) -> None:
    output = plan(max_tokens=num_tokens)
    parameters = read_count(r"([\d,]+) parameters", output)
    tokens, ratio = re.search(r"tokens +([\d,]+), ([\d.,]+) per parameter", output).groups()
    assert float(ratio) == pytest.approx(int(tokens.replace(",", "")) / parameters, abs=0.05)
    factor = float(ratio) / 20
    factor_in_output = float(re.search(r"-trained by ([\d.]+)", output)[1])
    assert factor_in_output == pytest.approx(max(factor, 1 / factor), rel=0.02)
    assert verdict in output


def test_operations_of_experts_count_active_parameters(plan) -> None:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    architecture = TINY | {"model_type": "mixtral"} | experts
    output = plan(model_config=architecture)
    total, active = (read_count(rf"([\d,]+) {word}", output) for word in ("parameters", "active"))
    assert total - active == 2 * 6 * 3 * 64 * 128
    tokens = read_count(r"tokens +([\d,]+),", output)
    assert f"{6 * active * tokens:.3g} by 6" in output
    assert "active" not in plan()


def test_vocab_size_replaces_tokenizer(plan, tiny_tokenizer_dir: Path) -> None:
    without = {key: value for key, value in TINY.items() if key != "vocab_size"}
    assert plan() == plan(model_config=without, tokenizer_name_or_path=str(tiny_tokenizer_dir))
    output = plan(model_config=without, code=2)
    assert "write `vocab_size` in `model_config`" in output


def test_epochs_of_corpora_are_reported_by_source(plan, tmp_path: Path) -> None:
    shards = [
        {"path": "data/web/train-00000-of-00001.parquet", "tokens": 3_000_000},
        {"path": "data/books/train-00000-of-00002.parquet", "tokens": 400_000},
        {"path": "data/books/train-00001-of-00002.parquet", "tokens": 600_000},
    ]
    for folder in ("web", "books"):
        (tmp_path / "clean" / "data" / folder).mkdir(parents=True)
    manifest = tmp_path / "clean" / "corpus.json"
    manifest.write_text(json.dumps({"shards": shards}))
    output = plan(dataset_name=str(tmp_path / "clean"))
    assert f"2.50 of the 4,000,000 tokens of {tmp_path}/clean\n" in output
    mixture = [{"name": str(tmp_path / "clean" / "data" / name), "weight": weight} for name, weight in MIXED]
    output = plan(dataset_name=None, dataset_mixture=mixture)
    assert "1.67 of the 3,000,000 tokens" in output
    assert f"5.00 of the 1,000,000 tokens of {tmp_path}/clean/data/books; above 4, repeated tokens" in output
    # The first half from the first source only, the second half evenly.
    phases = [{"start_tokens": 0, "weights": [1, 0]}, {"start_tokens": 5_000_000, "weights": [1, 1]}]
    output = plan(dataset_name=None, dataset_mixture=mixture, dataset_curriculum=phases)
    assert "2.50 of the 3,000,000 tokens" in output
    assert "2.50 of the 1,000,000 tokens" in output
    manifest.write_text(json.dumps({"shards": [{**shard, "tokens": None} for shard in shards]}))
    assert "epochs" not in plan(dataset_name=str(tmp_path / "clean"))


def test_continued_pretraining_is_planned_from_model_config(plan, tiny_model_dir: Path) -> None:
    named = {"model_config": None, "tokenizer_name_or_path": None, "model_name_or_path": str(tiny_model_dir)}
    assert "llama, " in plan(**named)


def test_all_invalid_flags_are_reported_together(plan) -> None:
    output = plan("--num_processes", 0, "--num_gpus", -1, "--mfu", 1.5, code=2, max_tokens=None)
    for problem in ("planning reads no data", "--num_processes: is 0", "--num_gpus: is -1", "--mfu: is 1.5"):
        assert problem in output
    assert "steps           50" in plan(max_tokens=None, max_steps=50, warmup_steps=5)


def test_run_of_too_many_steps_raises(plan) -> None:
    assert "the run would have 14,648,437,500 optimizer steps" in plan(max_tokens=15_000_000_000_000, code=2)
    assert "steps           57,221" in plan("--num_processes", 256_000, max_tokens=15_000_000_000_000)


def test_flags_override_recipe_and_invalid_keys_are_problems(plan) -> None:
    assert "learning rate   5e-06, " in plan("--learning_rate", "5e-4")
    assert "learning_rate" in plan(learning_rat=1e-3, code=2)
    assert "longer than the run" in plan(warmup_steps=1_000_000, code=2)
    assert "cannot be built" in plan(model_config=TINY | {"hidden_act": "unknown"}, code=2)


def test_schedule_plot_contains_corners(plan, find_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plots" / "schedule.png"
    drawn: list[Any] = []
    draw = charts.draw_schedule
    monkeypatch.setattr(charts, "draw_schedule", lambda *curves: drawn.extend(curves) or draw(*curves))
    output = plan(
        "--schedule", path, max_tokens=3_000_000_000, lr_scheduler_type="warmup_stable_decay", decay_steps=0.2
    )
    run = find_run()
    drawn_path, tokens, rates, batches = drawn
    assert drawn_path == path
    assert str(path) in output
    assert path.read_bytes().startswith(b"\x89PNG")
    assert tokens == sorted(tokens)
    assert (tokens[0], tokens[-1]) == (0, run.num_tokens)
    starts = run.schedule.token_starts
    assert {starts[run.schedule.num_warmup_steps], starts[run.schedule.first_decay_step]} <= set(tokens)
    assert rates[:-1] == [1e-3 * run.schedule(step) for step in starts.searchsorted(tokens[:-1])]
    assert set(batches) == {1024}
    assert len(tokens) < 2000


def test_finetuning_reports_time_layouts_and_fit(plan_other) -> None:
    output = plan_other("sft", "--num_processes", 4, "--gpu", "H100", "--mfu", 0.5, max_steps=1000)
    assert "step            24 rows of 64 tokens, 1,536 in all" in output
    assert re.search(r"operations +\S+ a step, with attention within rows of 64 tokens", output)
    assert re.search(r"4 GPUs x 9\.89e\+14 FLOP/s x 0\.5 MFU", output)
    hours, energy = re.search(r"([\d.e-]+) hours for 1,000 steps\nenergy +at most ([\d.e-]+) kWh", output).groups()
    # Not rounded to 0.
    assert float(energy) == pytest.approx(float(hours) * 4 * 0.7, rel=0.1)
    assert "cost" not in output
    assert "accelerate_configs/ddp.yaml: a copy" in output
    assert "accelerate_configs/fsdp2.yaml: shared by 4" in output
    for part in output.split("accelerate_configs/")[1:]:
        terms = [float(size) for size in re.findall(r"([\d.]+) GB  ", part)]
        assert float(re.search(r"([\d.]+) GB with all", part)[1]) == pytest.approx(sum(terms), abs=0.1)
        assert "fits H100" in part


@pytest.mark.parametrize("flags", [(), ("--gpu", "H100"), ("--gpus", "2xH100")])
def test_model_without_causal_language_model_is_an_error(plan_other, tmp_path: Path, flags) -> None:
    T5Config(vocab_size=300, d_model=64, num_layers=1, num_heads=4, d_ff=64).save_pretrained(tmp_path / "t5")
    assert "a t5 model cannot be built" in plan_other("sft", *flags, model_name_or_path=str(tmp_path / "t5"), code=2)


def test_recurrent_model_is_searched(plan_other, tmp_path: Path) -> None:
    MambaConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2).save_pretrained(tmp_path / "mamba")
    assert "fastest with 10% free" in plan_other("sft", "--gpus", "1xH100", model_name_or_path=str(tmp_path / "mamba"))


def test_calibrate_uses_mfu_of_finished_runs(plan_other, tmp_path: Path) -> None:
    run = write_run(tmp_path / "earlier", 0.1, 0.25, recipe="lora", activation_checkpointing=True)
    output = plan_other("sft", "--gpu", "H100", "--calibrate", run)
    assert "0.375: 38% eager by 1 finished run" in output
    assert re.search(r"1 GPU x 9\.89e\+14 FLOP/s x 0\.375 MFU", output)
    searched = plan_other("sft", "--gpus", "1xH100", "--calibrate", run)
    assert "0.434: 43% compiled by 1 finished run, from its eager runs by the ratio that torchtitan" in searched


def test_rl_iteration_has_time_if_peak_is_known(plan_other) -> None:
    flags = "--num_processes", 2, "--gpu", "H100", "--mfu", 0.3, "--price-per-gpu-hour", 3
    output = plan_other("grpo", *flags, max_steps=9)
    answers = re.search(
        r"iteration +(\d+) answers of \d+ tokens after prompts of \d+, all of full length, passes: 1", output
    )[1]
    assert f"{int(answers) // 2} answers on each GPU, of 3.35 TB/s" in output
    names = ("sampling", "scoring", "updates", "time")
    *parts, whole = (float(re.search(rf"^{name} +([\d.e-]+) s", output, re.MULTILINE)[1]) for name in names)
    assert whole == pytest.approx(sum(parts), rel=0.01)
    assert "hours for 9 iterations" in output
    assert "at 3 for a GPU hour" in output


@pytest.mark.parametrize("recipe", ["ppo", "sft"])
def test_gpu_named_by_its_memory_has_no_hours(plan_other, recipe) -> None:
    output = plan_other(recipe, "--gpu", "80GB")
    assert "fits 80GB" in output
    assert not re.search("an iteration|hours", output)


def test_cost_is_price_times_hours(plan_other) -> None:
    output = plan_other("sft", "--num_processes", 4, "--gpu", "H100", device_hour_price=2)
    cost = float(re.search(r"cost +([\d.]+) for 1,000,000,000 tokens of rows, at 2 for a GPU hour", output)[1])
    seconds, tokens = float(re.search(r"operations +([\d.e+]+) a step", output)[1]) / (9.89e14 * 0.338), 24 * 64
    assert cost == pytest.approx(seconds / 3600 * 2 / tokens * 1e9, abs=0.01)


@pytest.mark.parametrize(
    ("recipe", "flags", "changes", "words"),
    [
        ("sft", ["--mfu", "2"], {}, "write a finite number > 0 and <= 1"),
        ("sft", ["--gpu", "Abacus"], {}, "the GPU 'Abacus' is not known"),
        ("sft", ["--num_gpus=8"], {}, "write --num_processes"),
        ("sft", [], {"max_length": None}, "write `max_length: ...`"),
        ("sft", ["--save_seconds", "60"], {}, "--save_seconds: is only for pretrain"),
        ("sft", ["--schedule", "a.png"], {}, "--schedule: is only for pretrain"),
        ("grpo", ["--hardware", "zero3"], {}, "DeepSpeed supports one model; these recipes"),
        ("sft", ["--hardware", "nothing"], {}, "there is no launch file"),
        ("sft", ["--pipeline_stages", "2", "--num_processes", "4"], {}, "only pretraining supports pipeline"),
        ("sft", ["--hardware", "fsdp2_tp", "--num_processes", "6"], {}, "not `num_processes` together"),
        ("ppo", ["--num_processes", "0"], {}, "write a finite number >= 1"),
        ("ppo", ["--gpu", "409"], {}, "or `RTX 4090`?"),
        ("grpo", ["--gpus", "1xH100", "--deadline", "1"], {}, "--deadline: needs the length of the run"),
        ("ppo", ["--deadline", "1"], {}, "--deadline: needs --gpus"),
        ("ppo", ["--gpus", "2xH100", "--num_processes", "4"], {}, "one for each of --gpus"),
        ("ppo", ["--gpus", "2xMI999"], {}, "'MI999' is not known"),
        ("sft", ["--gpus", "8xA100"], {}, "'A100' is one of several"),
        ("sft", ["--gpus", "2xH100", "--mfu", "0.5"], {}, "--mfu: excludes --gpus"),
        ("sft", ["--calibrate", "out"], {}, "--calibrate: needs --gpu or --gpus"),
        ("sft", ["--mfu", "50%"], {}, "--mfu: needs --gpu"),
        ("sft", ["--gpus", "2xH100", "--hardware", "zero3"], {}, "zero3 is not among the layouts of 2 GPUs"),
        ("grpo", ["--gpu", "H100", "--num_rows", "10"], {}, "--num_rows: is only for sft, lora, reward, dpo, distill"),
        ("sft", ["--calibrate", "out", "--mfu", "0.5", "--gpu", "H100"], {}, "--mfu: excludes --calibrate"),
        ("sft", ["--calibrate", "out", "--gpu", "H100"], {}, "neither run.json nor metrics.jsonl"),
        ("ppo", [], {"kl_coeff": 1}, "kl_coeff"),
        ("sft", ["--save_seconds", "60", "--gpu", "H100"], {}, "is only for pretrain"),
    ],
)
def test_invalid_combination_raises(plan_other, recipe, flags, changes, words) -> None:
    assert words in plan_other(recipe, *flags, code=2, **changes)


def read(output: str, name: str) -> float:
    return float(re.search(rf"([\d.]+) GB  {name}$", output, re.MULTILINE)[1])


def test_peak_is_largest_phase(plan_other) -> None:
    output = plan_other("ppo")
    assert output.startswith(
        "accelerate_configs/single_gpu.yaml: a copy of everything on each process\n    models of their own\n"
    )
    assert "shared by" not in output
    assert "shared by 4 processes" in plan_other("ppo", "--num_processes", 4, use_peft=True)
    phases = [float(size) for size in re.findall(r"([\d.]+) GB  ", output.split("at once")[1])]
    assert len(phases) == 5
    assert max(phases) == pytest.approx(float(re.search(r"([\d.]+) GB at most", output)[1]), abs=0.06)
    assert "fits 24 GB, 48 GB, 80 GB, 141 GB, 192 GB" in output
    assert "reward model" not in output
    assert "adapters of policy and critic" in plan_other("ppo", use_peft=True)


def test_too_large_batch_fits_no_gpu(plan_other) -> None:
    rows = {"per_device_eval_batch_size": 10_000_000}
    assert "does not fit 24 GB, 48 GB, 80 GB, 141 GB, 192 GB" in plan_other("ppo", **rows)
    # Scripts read the exit code.
    error = plan_other("ppo", "--gpu", "H100 SXM", code=2, **rows)
    assert "the run does not fit H100 SXM" in error
    # Can be copied to a shell.
    assert "`recipes plan --gpus '1xH100 SXM'`" in error
    # The search needs a peak.
    assert "`recipes plan --gpus 1xNAME`" in plan_other("ppo", "--gpu", "80GB", code=2, **rows)
    assert "fits NVIDIA A100-SXM4-80GB" in plan_other("ppo", "--gpu", "NVIDIA A100-SXM4-80GB")


def test_several_processes_are_planned_for_ddp_and_fsdp2(plan_other) -> None:
    output = plan_other("ppo", "--num_processes", 4, per_device_eval_batch_size=1000)
    alone, shared = output.split("shared by 4 processes")
    assert read(alone, "logits of a batch") == read(shared, "logits of a batch")
    assert "gathered for sampling" in shared
    assert "gathered" not in alone
    # FSDP2 would train 16-bit weights in float32, and is refused; the precision of the usual files is not the recipe's.
    for keys in ({"dtype": "bfloat16"}, {"bf16": False, "optim": "adamw_8bit"}):
        output = plan_other("sft", "--num_processes", 4, **keys)
        assert re.findall(r"accelerate_configs/(\w+)", output) == ["ddp"]


def test_hardware_determines_layout_rows_and_time(plan, plan_other) -> None:
    """Context parallelism over 4 of 8 GPUs leaves two groups that read rows."""
    output = plan_other("sft", "--hardware", "fsdp2_cp", "--gpu", "H100")
    assert "step            12 rows of 64 tokens" in output
    assert "/ (8 GPUs x" in output
    assert output.count("accelerate_configs/") == 1
    assert "fsdp2_cp.yaml: shared by 8 processes; context parallel over 4\n" in output
    flags = ("--num_processes", 4, "--hardware", "fsdp2", "--gpu", "H100")
    assert "39% compiled by" in plan(*flags, warmup_steps=10)
    staged = plan(*flags, "--pipeline_stages", 2, warmup_steps=10)
    assert "34% eager by" in staged, "pipeline stages are not compiled"
    assert "fsdp2.yaml: shared by 2 processes; pipeline parallel over 2\n" in staged
    assert "batch           2,048 tokens" in staged


def test_group_methods_have_no_critic(plan_other) -> None:
    output = plan_other("grpo", per_device_eval_batch_size=64, beta=0.01)
    assert "critic" not in output
    assert read(output, "reference, weights") == read(output, "policy, weights")
    assert read(output, "logits of a batch") == pytest.approx(44 * 64 * 512 / 1e9, abs=0.005)
    assert "reference" not in plan_other("rloo", beta=0)


@pytest.mark.parametrize("recipe", ["sft", "ppo", "grpo"])
def test_explain_adds_formula_to_every_component(plan_other, recipe) -> None:
    brief, explained = (plan_other(recipe, "--num_processes", 4, *flags).splitlines() for flags in ([], ["--explain"]))
    for line, full in zip(brief, explained, strict=True):
        assert full == line or (full.startswith(f"{line} = ") and " GB  " in line)
    layouts = len([line for line in brief if "accelerate_configs" in line])
    assert len([full for line, full in zip(brief, explained, strict=True) if full != line]) >= 6 * layouts
