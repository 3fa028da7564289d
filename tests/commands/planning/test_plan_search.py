"""``recipes plan --gpus``: candidates, RL iterations, plans that pass ``recipes check``, and errors with remedies."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import re
import shlex
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.planning.runs import build_config
from tests.rows import write_rows
from transformers import AutoConfig

from recipes_lib.commands.planning.plan import _read_gpus
from recipes_lib.commands.planning.plan_search import (
    PlannedRun,
    _describe,
    describe_misfit,
    list_launches,
    search_rollouts,
    verify_limits,
    write_plan,
)
from recipes_lib.commands.planning.planned_hardware import Hardware
from recipes_lib.errors import ConfigError
from recipes_lib.planning.compute import SHIPPED_SHAPES
from recipes_lib.planning.devices import choose_device
from recipes_lib.planning.memory import plan_memory
from recipes_lib.planning.memory_plan import Layout
from recipes_lib.planning.search import Candidate, search
from recipes_lib.training.layouts.compatibility import verify_combination

KEYS = {"max_length": 256, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


@pytest.fixture
def search_plan(plan_recipe):
    """Search a plan of SFT with changes, and return the output."""
    return lambda *flags, code=0, **changes: plan_recipe("sft", "--gpus", *flags, code=code, **KEYS | changes)


@pytest.mark.parametrize(
    ("text", "number", "name"),
    [
        ("8xH100", 8, "H100"),
        (" 8X H100 SXM ", 8, "H100 SXM"),
        ("8*A100-80GB", 8, "A100-80GB"),
        ("2 x 4090", 2, "4090"),
        ("4 × RTX 4090", 4, "RTX 4090"),
        ("8 H100", 8, "H100"),
        ("A100-80GB:8", 8, "A100-80GB"),
        ("a100-40 x 8", 8, "a100-40"),
        ("RTX 4090x2", 2, "RTX 4090"),
        ("2x8xH100", 16, "H100"),
    ],
)
def test_number_and_name_of_gpus_are_read(text, number, name) -> None:
    assert _read_gpus(text) == (number, name)


@pytest.mark.parametrize(
    "text",
    [
        "H100",
        "RTX 4090",
        "MI300X",
        "0xH100",
        "-1xH100",
        "8x",
        "xH100",
        "1.5xH100",
        "99999999xH100",
        "2 nodes x 8 H100",
        "",
    ],
)
def test_invalid_number_of_gpus_raises(text) -> None:
    with pytest.raises(ConfigError, match="write it as 8xH100"):
        _read_gpus(text)


def test_best_plan_is_printed_and_written(search_plan, tmp_path: Path) -> None:
    output = search_plan("2xH100", "--num_rows", 1600, "--price-per-gpu-hour", 3, "--write", tmp_path / "plan")
    assert "batch           16 rows an optimizer step" in output
    assert output.count("fastest with 10% free") == 1
    # By default, three epochs.
    assert "300 steps" in output
    assert re.search(r"cost +0.0\d, at 3 for a GPU hour", output)
    keys = yaml.safe_load((tmp_path / "plan" / "keys.yaml").read_text())
    # The printed keys can be copied to a shell.
    words = shlex.split(re.search(r"^keys +(.*)$", output, re.MULTILINE)[1])
    assert dict(zip(words[::2], map(json.loads, words[1::2]), strict=True)) == {f"--{key}": keys[key] for key in keys}
    assert keys["per_device_train_batch_size"] * keys["gradient_accumulation_steps"] * 2 == 16
    launch = yaml.safe_load((tmp_path / "plan" / "accelerate.yaml").read_text())
    assert launch["num_processes"] == 2


@pytest.mark.parametrize(
    ("flags", "changes", "words"),
    [
        (["3xH100", "--num_processes", 1], {}, "cannot be divided among 3 processes"),
        (["1xH100", "--num_processes", 1, "--deadline", 1], {}, "--deadline: needs the length of the run"),
        (["1xH100", "--num_processes", -1], {}, "--num_processes: is -1"),
        ([""], {}, "--gpus: '' is not a number of GPUs"),
        (["2x1GB"], {}, "is not known"),
        (["2xL4", "--hardware", "fdsp2"], {}, "there is no launch file"),
        (["2xL4", "--hardware", "ddp"], {"max_length": 16_000_000}, "remove --hardware, to search the other layouts"),
        pytest.param(["2xL4"], {"max_length": 16_000_000}, "max_length: ", marks=pytest.mark.slow),
    ],
)
def test_impossible_search_raises_with_remedy(search_plan, flags, changes, words) -> None:
    assert words in search_plan(*flags, code=2, **changes)


def test_search_of_one_layout_lists_and_writes_no_other(search_plan, tmp_path: Path) -> None:
    output = search_plan("2xH100", "--hardware", "accelerate_configs/zero2.yaml", "--write", tmp_path)
    assert {"fsdp2", "ddp", "zero2"} & set(output.split()) == {"zero2"}
    assert "deepspeed_config" in (tmp_path / "accelerate.yaml").read_text()


def test_indivisible_batch_is_reported_beside_unsupported_layouts(plan_recipe) -> None:
    output = plan_recipe("lora", "--gpus", "16xH100", "--num_processes", 1, code=2, **KEYS)
    assert "8 rows of an optimizer step cannot be divided among 16 processes" in output
    assert "only pretraining supports pipeline parallelism" in output


def test_plan_without_margin_says_so() -> None:
    keys = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "torch_compile": True}
    memory: Any = argparse.Namespace(checkpointing="none", peak=79e9)
    best = Candidate(Layout("ddp"), keys, memory, fits=True, costs={"compute": 1.0}, is_tight=True)
    free = dataclasses.replace(best, costs={"compute": 2.0}, is_tight=False)
    assert _describe("ddp", best, best)[-1] == "fastest that fits, less than 10% free"
    assert _describe("ddp", free, best)[-1] == "+1 s compute"
    assert _describe("ddp", best, free)[-1] == "-1 s compute, less than 10% free"
    assert _describe("ddp", free, free)[-1] == "fastest with 10% free"
    assert _describe("ddp", dataclasses.replace(best, fits=False), best)[-1] == "does not fit"


def test_layout_without_offload_is_named_beside_faster_offload(search_plan, monkeypatch) -> None:
    monkeypatch.setattr("recipes_lib.planning.search._rank", lambda one: (one.layout.shards.weights, one.seconds))
    output = search_plan("2xH100", "--num_processes", 1)
    assert "launch          --hardware fsdp2_offload" in output
    assert re.search(r"without it +ddp, \S+ s a step", output)


@pytest.mark.parametrize(
    ("recipe", "pattern"),
    [("sft", r"^time +([\d.e-]+) s a step.* traffic"), ("pretrain", r" x ([\d.e-]+): ([\d.e-]+) s a step \+")],
)
def test_plan_of_best_layout_has_time_of_search(plan_recipe, run_command, tmp_path, recipe, pattern) -> None:
    """Of which traffic takes most, because rows are short."""
    keys = {"max_length": 64, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 1000}
    output = plan_recipe(recipe, "--gpus", "2x4090", "--num_processes", 2, "--write", tmp_path / "plan", **keys)
    found = re.search(pattern, run_command("plan", "--gpu", "4090", *read_launch(tmp_path / "plan")), re.M)
    seconds = float(re.search(r"(\S+) +fastest with 10% free", output)[1])
    assert math.prod(map(float, found.groups())) == pytest.approx(seconds, rel=0.06)


@pytest.mark.parametrize(
    ("limit", "hours", "price", "words"),
    [
        ({"deadline": 10}, 0, None, "--deadline: needs the length of the run"),
        ({"budget": 10}, 1, None, "--budget: needs a price\n.*write --price_per_gpu_hour"),
        ({"deadline": 10}, 11, None, "--deadline: .* takes 11 hours, more than 10\n.*or name more GPUs"),
        ({"budget": 40}, 11, 2, "--budget: .* costs 44.00, more than 40\n"),
        ({"budget": 44, "deadline": 11}, 11, 2, None),
    ],
)
def test_limits_are_compared_with_hours_and_cost_of_all_gpus(limit, hours, price, words) -> None:
    options = argparse.Namespace(**{"deadline": None, "budget": None, **limit})
    hardware = Hardware(choose_device("H100"), 2, 0.5, "a test", None, price, 1.0, None)
    with nullcontext() if words is None else pytest.raises(ConfigError, match=words):
        verify_limits(options, hours, hardware)


LAYERS = SHIPPED_SHAPES["meta-llama/Llama-3.1-8B"] | {"vocab_size": 32_000, "num_hidden_layers": 4}


ANSWERS = {
    "reward_funcs": '["a.b:c"]', "max_length": 4096, "response_length": 2048, "num_generations": 8,
    "per_device_train_batch_size": 32, "per_device_eval_batch_size": 1,
}  # fmt: skip


SAMPLED = {
    "per_device_train_batch_size": 8, "per_device_eval_batch_size": 64, "steps_per_generation": 8,
    "activation_checkpointing": True,
}  # fmt: skip


LONG_ROWS = {"max_length": 8192, "dtype": "bfloat16"}


def find_remedy(config, gigabytes: float, **shape) -> str:
    """Return the remedy for four layers of an 8B model on two small GPUs, with 16 rows per step."""
    device = dataclasses.replace(choose_device("RTX 4090"), memory=gigabytes * 1e9)
    hardware = Hardware(device, 2, 0.5, "a test", None, None, 1.0, None)
    run = PlannedRun(config, AutoConfig.for_model(**LAYERS, **shape), argparse.Namespace(hardware=None))
    return describe_misfit(run, hardware, 80.0, 16).remedy


@pytest.mark.parametrize(
    ("recipe", "gigabytes", "keys", "words"),
    [
        # Shorter rows do not help.
        ("sft", 7, {}, "the `lora` recipe on 16-bit weights (`dtype: bfloat16`) would fit"),
        ("sft", 4.6, {}, "the `lora` recipe on 4-bit weights (`dtype: bfloat16`, `load_in_4bit: true`) would fit"),
        ("pretrain", 8.3, {"max_steps": 4}, "8 of these GPUs would fit"),
        # Sixteen rows do not divide among 32 GPUs: all changes together are the nearest.
        ("pretrain", 6, {"max_steps": 4}, "name GPUs with more memory: max_length: 64 and 16 of these GPUs would need"),
        # FSDP2 does not support the 8-bit optimizer, so that more GPUs help only with another.
        (
            "pretrain",
            8.3,
            {"max_steps": 4, "optim": "adamw_8bit"},
            "optim: adamw_torch_fused and 8 of these GPUs would",
        ),
        # Of changes that are enough together, more GPUs and a quarter of the rows are not needed.
        ("lora", 5, LONG_ROWS, "max_length: 4096 and the adapter on 4-bit weights (`load_in_4bit: true`) would fit"),
        ("grpo", 30, {**ANSWERS, "steps_per_generation": 4}, "name GPUs with more memory"),
    ],
)
def test_misfit_suggests_smallest_change_that_fits(recipe, gigabytes, keys, words) -> None:
    assert find_remedy(build_config(recipe, **KEYS | keys), gigabytes).startswith(words)


MICRO, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
SAMPLED_AT_ONCE = "per_device_eval_batch_size"


@pytest.mark.parametrize(
    ("keys", "changed"),
    [
        (ANSWERS, {"activation_checkpointing", MICRO, ACCUMULATION}),
        ({**ANSWERS, "activation_checkpointing": True}, {MICRO, ACCUMULATION}),
        ({**ANSWERS, **SAMPLED}, {SAMPLED_AT_ONCE}),
    ],
)
def test_largest_batches_of_rl_that_fit_are_chosen(keys, changed) -> None:
    """With equally many answers per iteration; twice as many at once do not fit."""
    device = dataclasses.replace(choose_device("RTX 4090"), memory=30e9)
    hardware, model = Hardware(device, 2, 0.5, "a test", None, None, 1.0, None), AutoConfig.for_model(**LAYERS)
    given, nothing = build_config("grpo", **KEYS | keys), dict.fromkeys(("write", "deadline", "budget", "hardware"))
    options = argparse.Namespace(**nothing)
    found, plan, rows = search_rollouts(PlannedRun(given, model, options), hardware)
    assert {*re.findall(r"--(\w+)", dict(rows)["keys"])} == changed
    assert plan.fits(30e9)
    assert found.read(MICRO) * found.read(ACCUMULATION) == given.read(MICRO) * given.read(ACCUMULATION)
    larger = {MICRO: 2 * found.read(MICRO), ACCUMULATION: found.read(ACCUMULATION) // 2}
    if changed == {SAMPLED_AT_ONCE}:
        larger = {SAMPLED_AT_ONCE: 2 * found.read(SAMPLED_AT_ONCE)}
    assert not plan_memory(found.with_training(larger), model, plan.layout, device_bytes=30e9).fits(30e9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"), [([], "8 of these GPUs would fit"), (["--num_processes", 2], "2 of these")]
)
def test_batch_grows_with_gpus_unless_its_processes_are_named(plan_recipe, flags, words) -> None:
    """A row on each of the GPUs, or two rows in all, which do not divide among more GPUs."""
    keys = {"max_length": 256, "max_steps": 4, "model_name_or_path": None, "tokenizer_name_or_path": "a/b"}
    keys |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "model_config": dict(LAYERS)}
    keys["model_config"] |= {"num_hidden_layers": 32}
    assert words in plan_recipe("pretrain", "--gpus", "1xRTX4090", *flags, code=2, **keys)


def test_launch_file_has_precision_of_run(search_plan, tmp_path: Path) -> None:
    output = search_plan("1xT4", "--write", tmp_path, fp16=True)
    assert "--hardware single_gpu --num_processes 1 with mixed_precision fp16\n" in output
    assert yaml.safe_load((tmp_path / "accelerate.yaml").read_text())["mixed_precision"] == "fp16"


def test_misfit_of_quantized_checkpoint_suggests_no_other_bits() -> None:
    bits = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    config = build_config("lora", **KEYS, load_in_8bit=True)
    assert "-bit weights" not in find_remedy(config, 4.4, quantization_config=bits)
    assert "4-bit weights" in find_remedy(config, 4.4)


def test_plan_that_cannot_be_written_is_an_error(search_plan, tmp_path: Path) -> None:
    (tmp_path / "plan" / "keys.yaml").mkdir(parents=True)
    words = "name another folder after --write"
    assert words in search_plan("1xH100", "--num_processes", 1, "--write", tmp_path / "plan", code=2)


def test_launch_command_repeats_no_flag(search_plan, tmp_path: Path) -> None:
    """The batch is that of the keys for the number of processes that they are written for."""
    flags = ["--per_device_train_batch_size=2", "--gradient-accumulation-steps", 4, "--seed", 7]
    output = search_plan("1xH100", "--num_processes", 8, *flags, "--write", tmp_path / "plan")
    assert "batch           64 rows an optimizer step, the recipe's for 8 processes" in output
    words = shlex.split((tmp_path / "plan" / "launch.sh").read_text())
    names = [word.partition("=")[0].replace("-", "_") for word in words if word.startswith("--")]
    assert len(names) == len(set(names))
    assert words[words.index("--seed") + 1] == "7"


def test_model_parallel_layouts_are_searched_and_impossible_ones_listed(search_plan, tmp_path: Path) -> None:
    """One row per step on two GPUs, which data parallelism cannot divide."""
    keys = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    output = search_plan("2xH100", "--num_processes", 1, "--write", tmp_path / "plan", **keys)
    assert re.search(r"fsdp2_[ct]p [ct]p 2 .*fastest with 10% free", output)
    assert re.search(r"not possible +ddp stages 2, fsdp2 stages 2: .*only pretraining supports", output)
    document = yaml.safe_load((tmp_path / "plan" / "accelerate.yaml").read_text())
    sizes = document["parallelism_config"]
    assert sizes["parallelism_config_tp_size"] * sizes["parallelism_config_cp_size"] == 2
    assert document["num_processes"] == 2
    # torch.compile is not supported there.
    assert "--torch_compile false" in (tmp_path / "plan" / "launch.sh").read_text()


def test_search_compiles_nothing_that_excludes_compilation(plan_recipe, tiny_model_dir) -> None:
    keys = KEYS | {"teacher_model_name_or_path": str(tiny_model_dir), "feature_weight": 1.0}
    output = plan_recipe("distill", "--gpus", "1xH100", "--num_processes", 1, **keys)
    assert "--torch_compile false" in output


def test_sampled_answers_of_distillation_cost_time(plan_recipe, tiny_model_dir) -> None:
    keys = KEYS | {"teacher_model_name_or_path": str(tiny_model_dir), "lmbda": 0.5, "response_length": 8}
    planned = plan_recipe("distill", "--gpu", "H100", **keys)
    sampling, step = (float(number) for number in re.findall(r"^(?:sampling|time) +(\S+) s", planned, re.M))
    assert step == pytest.approx(sampling / 2, rel=0.05)
    assert re.search(r"sampling +\S+ s in 0.5 of the steps: .* s sampling", re.sub(r"\s+", " ", planned))
    searched = plan_recipe("distill", "--gpus", "1xH100", "--num_processes", 1, **keys)
    assert float(re.findall(r"time +(\S+) s", searched)[0]) == pytest.approx(step, rel=0.05)


def test_growing_batch_keeps_several_micro_batches(plan_recipe) -> None:
    """A configuration with one micro-batch per step, and a ramp of the batch, is refused."""
    keys = KEYS | {"max_steps": 100, "batch_ramp_tokens": 10_000, "learning_rate": 1e-3}
    output = plan_recipe("pretrain", "--gpus", "8xH100", "--num_processes", 1, **keys)
    assert not re.search(r"\d x 1 ", output)
    refused = (
        "not possible    ddp, fsdp2, zero2, fsdp2_offload: `batch_ramp_tokens` has no effect: the batch grows by whole"
    )
    assert refused in output


def test_meshes_use_all_gpus_and_stay_within_machines(tiny_model_dir) -> None:
    launches, refused = list_launches(build_config(), AutoConfig.from_pretrained(tiny_model_dir), 16)
    for layout, planned in launches.items():
        sizes = planned.launch.layout.sizes
        assert math.prod(sizes.values()) * layout.pipeline_stages in (16, layout.pipeline_stages)
        assert layout.num_gpus == 16
        assert layout.tensor <= 8
        assert planned.document["num_machines"] == 2
    (hybrid,) = (layout for layout in launches if layout.launch_file == "hsdp")
    assert (hybrid.shards.weights, hybrid.replicas) == (8, 2)
    # The model has two layers and four heads.
    assert refused["ddp stages 4"].found == "2 layers cannot be split into 4 equal chunks"
    assert "no multiple of 8 tensor-parallel ranks" in refused["fsdp2_tp tp 8"].found


REWARDED = {"reward_funcs": "recipes_lib.rl.verifiers:final_number", "response_length": 16}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "sft fp16": ("sft", {"fp16": True}),
    "lora": ("lora", {}),
    "lora 4 bit": ("lora", {"load_in_4bit": True}),
    "pretrain": ("pretrain", {}),
    "dpo": ("dpo", {}),
    "reward": ("reward", {}),
    "distill": ("distill", {"teacher_model_name_or_path": "MODEL"}),
    "ppo": ("ppo", REWARDED),
    "grpo": ("grpo", REWARDED),
}
"""Recipe and keys of each case."""
PAIR = {"prompt": "a b c", "chosen": "d e f", "rejected": "f e d"}
QUESTION = {"prompt": "1 + 1", "answer": "2"}
ROWS: dict[str, dict[str, str]] = {
    "pretrain": {"text": "a b c " * 40},
    **dict.fromkeys(("dpo", "reward"), PAIR),
    **dict.fromkeys(("ppo", "grpo"), QUESTION),
}


@pytest.fixture
def keys_of(tiny_model_dir: Path, tmp_path: Path):
    """Return the keys of a case, and write its data."""

    def keys_of(stage: str) -> dict[str, Any]:
        recipe, changes = SHAPES[stage]
        row = ROWS.get(recipe, {"prompt": "a b c", "completion": "d e f"})
        data = write_rows(tmp_path / "rows of text.jsonl", ({**row, "id": str(number)} for number in range(64)))
        keys = {"dataset_name": data, "model_name_or_path": tiny_model_dir, "output_dir": tmp_path / "out"} | changes
        keys |= {"max_steps": 2} | ({} if changes == REWARDED else {"max_length": 64})
        return {key: str(tiny_model_dir if value == "MODEL" else value) for key, value in keys.items()}

    return keys_of


def read_launch(folder: Path) -> list[str]:
    """Return the flags of the launch of a written plan."""
    program, command, *flags = shlex.split((folder / "launch.sh").read_text())
    assert (program, command) == ("recipes", "launch")
    return flags


@pytest.mark.parametrize(
    ("recipe", "least"),
    [pytest.param("sft", 6, marks=pytest.mark.slow), ("pretrain", 8), pytest.param("dpo", 3, marks=pytest.mark.slow)],
)
def test_written_plan_of_every_layout_passes_check(recipe, least, keys_of, tiny_model_dir, tmp_path, recipes) -> None:
    keys = keys_of(recipe)
    config, model = build_config(recipe, **keys), AutoConfig.from_pretrained(tiny_model_dir)
    launches, _ = list_launches(config, model, 2)

    def is_supported(layout, keys) -> bool:
        with suppress(ConfigError):
            verify_combination(config.with_training(keys), launches[layout].launch)
            return True
        return False

    found = search(config, model, list(launches), 4, choose_device("H100"), is_supported=is_supported)
    best = {one.layout: one for one in reversed(found)}
    assert len(best) >= least
    for layout, one in best.items():
        flags = ["--recipe", recipe, *(f"--{key}={value}" for key, value in keys.items())]
        write_plan(tmp_path / launches[layout].name, flags, one.keys, layout, launches[layout])
        recipes("check", *read_launch(tmp_path / launches[layout].name))


FAST = {("lora 4 bit", "2x4090"), ("grpo", "8xH100"), ("distill", "16xH100"), ("sft fp16", "1xT4")}
"""Cases of the default tier; all others are slow."""


@pytest.mark.parametrize(
    ("stage", "gpus"),
    [
        pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
        for case in [*itertools.product(SHAPES, ["2x4090", "8xH100", "1xA100-40GB", "16xH100"]), ("sft fp16", "1xT4")]
    ],
)
def test_written_plan_of_every_recipe_passes_check(stage, gpus, keys_of, plan_recipe, tmp_path, recipes) -> None:
    is_rl = SHAPES[stage][1] == REWARDED
    batch = {} if is_rl else {"gradient_accumulation_steps": 16}
    written = () if is_rl else ("--num_processes", 1)
    keys = {key: yaml.safe_load(value) for key, value in keys_of(stage).items()}
    plan_recipe(SHAPES[stage][0], "--gpus", gpus, *written, "--write", tmp_path / "plan", **keys, **batch)
    recipes("check", *read_launch(tmp_path / "plan"))


RL_KEYS = {
    "max_length": 256,
    "response_length": 128,
    "reward_funcs": ["a.b:c"],
    "per_device_train_batch_size": 8,
    "num_generations": 8,
}


@pytest.fixture
def plan_rl(plan_recipe):
    """Plan GRPO."""
    return lambda *flags, **keys: plan_recipe("grpo", *flags, **RL_KEYS, **keys)


def test_fastest_fitting_layout_is_chosen_and_written(plan_rl, tmp_path: Path) -> None:
    output = plan_rl("--gpus", "2xH100", "--write", tmp_path / "plan")
    layouts = dict(re.findall(r"(\w+) [\d.]+ GB, ([\d.e-]+) s", re.search(r"^layouts +(.*)$", output, re.MULTILINE)[1]))
    assert {"ddp", "fsdp2"} <= layouts.keys()
    assert "zero2" not in layouts
    fastest = min(layouts, key=lambda name: float(layouts[name]))
    assert f"--hardware {fastest} --num_processes 2" in output
    assert yaml.safe_load((tmp_path / "plan" / "accelerate.yaml").read_text())["num_processes"] == 2
    assert re.search(rf"time +{re.escape(layouts[fastest])} s an iteration, an estimate for {fastest}", output)


def test_run_in_epochs_has_cost_of_thousand_iterations(plan_rl) -> None:
    output = plan_rl("--gpu", "H100", "--price_per_gpu_hour", 3)
    seconds = float(re.search(r"time +([\d.e-]+) s an iteration", output)[1])
    hours = float(re.search(r"([\d.e-]+) hours for 1,000 iterations", output)[1])
    assert hours == pytest.approx(seconds * 1000 / 3600, rel=0.05)
    assert re.search(r"cost +[\d.]+ for 1,000 iterations, at 3 for a GPU hour", output)
    assert "forward passes of policy\n" in output
    seconds, cost, rest = re.search(
        r"time +([\d.e-]+) s an iteration.*\ncost +([\d.]+) for 1,000 iterations(.*?), at 3",
        plan_rl("--gpu", "H100", "--price_per_gpu_hour", 3, use_vllm=True, vllm_mode="server"),
        re.DOTALL,
    ).groups()
    assert float(cost) == pytest.approx(2 * 3 * float(seconds) * 1000 / 3600, abs=0.01)
    assert rest == " on 2 GPUs, half of them for the vLLM server"


SHARED = ["--use_vllm", "true", "--vllm_gpu_memory_utilization", 1e-6]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpus", "2x4090", "--hardware", "ddp", "--max_length", 4_000_000], "in no layout"),
        (["--gpus", "1xH100", *SHARED], "--gpus: vLLM's weights and one answer do not fit its 0% of 1xH100"),
        (["--gpu", "H100", *SHARED], "--gpu: vLLM's weights and one answer do not fit its 0% of H100"),
    ],
)
def test_impossible_plan_raises(plan_rl, flags, words) -> None:
    assert words in plan_rl(*flags, code=2)
