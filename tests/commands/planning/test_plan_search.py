"""``recipes plan --gpus`` prints candidates, keys and hours, writes them, and says what would fit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from recipes_lib.cli import main
from recipes_lib.commands.planning.plan_search import describe_misfit, list_starts, write_plan
from recipes_lib.config.loader import load_config
from recipes_lib.errors import ConfigError
from recipes_lib.planning.compute import read_shapes
from recipes_lib.planning.devices import choose_device
from recipes_lib.planning.search import search
from recipes_lib.training.layouts.compatibility import verify_combination

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
    assert told.count("fastest that fits") == 1
    # Three epochs.
    assert "300 steps" in told
    assert re.search(r"cost +0.0\d, at 3 for a GPU hour", told)
    keys = yaml.safe_load((tmp_path / "plan" / "keys.yaml").read_text())
    # What is printed is what a shell reads as the keys.
    words = shlex.split(re.search(r"^keys +(.*)$", told, re.MULTILINE)[1])
    assert dict(zip(words[::2], map(json.loads, words[1::2]), strict=True)) == {f"--{key}": keys[key] for key in keys}
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


@pytest.mark.parametrize(("gigabytes", "words"), [(24, "16-bit weights"), (12, "`load_in_4bit: true`")])
def test_the_nearest_change_is_an_adapter_on_as_many_bits_as_fit(tiny_model_dir: Path, gigabytes, words) -> None:
    """Fine-tuning of 8B on two small GPUs: no shorter row helps."""
    shape = AutoConfig.for_model(**{**read_shapes()["meta-llama/Llama-3.1-8B"], "vocab_size": 32_000})
    flags = [f"--{key}={value}" for key, value in {**KEYS, "model_name_or_path": tiny_model_dir}.items()]
    device = dataclasses.replace(choose_device("RTX 4090"), memory=gigabytes * 1e9)
    told = describe_misfit(load_config("sft", flags), shape, "2x4090", device, 2, 80.0)
    assert words in told.remedy


def test_a_flag_that_the_plan_changes_is_not_repeated(tell, tmp_path: Path) -> None:
    flags = ["--per_device_train_batch_size=2", "--gradient-accumulation-steps", 4, "--seed", 7]
    tell("1xH100", "--num_processes", 1, *flags, "--write", tmp_path / "plan")
    words = shlex.split((tmp_path / "plan" / "launch.sh").read_text())
    names = [word.partition("=")[0].replace("-", "_") for word in words if word.startswith("--")]
    assert len(names) == len(set(names))
    assert words[words.index("--seed") + 1] == "7"


def test_groups_are_searched_and_what_is_not_possible_is_told(tell, tmp_path: Path) -> None:
    """A row a step on two GPUs: data parallelism cannot divide it."""
    keys = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    told = tell("2xH100", "--num_processes", 1, "--write", tmp_path / "plan", **keys)
    assert re.search(r"fsdp2_[ct]p [ct]p 2 .*fastest that fits", told)
    told = re.sub(r"\n {16}", " ", told)
    assert re.search(r"not possible +ddp stages 2, fsdp2 stages 2: .*only pretraining supports", told)
    document = yaml.safe_load((tmp_path / "plan" / "accelerate.yaml").read_text())
    sizes = document["parallelism_config"]
    assert sizes["parallelism_config_tp_size"] * sizes["parallelism_config_cp_size"] == 2
    assert document["num_processes"] == 2
    # torch.compile is not proved there.
    assert "--torch_compile false" in (tmp_path / "plan" / "launch.sh").read_text()


def test_meshes_fill_the_gpus_and_stay_in_their_machines(tiny_model_dir) -> None:
    starts, refused = list_starts(AutoConfig.from_pretrained(tiny_model_dir), 16)
    for layout, start in starts.items():
        sizes = start.launch.layout.sizes
        assert math.prod(sizes.values()) * layout.pipeline_stages in (16, layout.pipeline_stages)
        assert layout.num_gpus == 16
        assert layout.tensor <= 8
        assert start.document["num_machines"] == 2
    (hybrid,) = (layout for layout in starts if layout.launch_file == "hsdp")
    assert (hybrid.shards.weights, hybrid.replicas) == (8, 2)
    # Two layers and four heads.
    assert refused["ddp stages 4"].found == "2 layers cannot be split into 4 equal chunks"
    assert "no multiple of 8 tensor-parallel ranks" in refused["fsdp2_tp tp 8"].found


@pytest.mark.parametrize(
    ("recipe", "least"), [pytest.param("sft", 6, marks=pytest.mark.slow), ("pretrain", 8), ("dpo", 3)]
)
def test_the_plan_of_every_layout_passes_the_check(recipe, least, tiny_model_dir, tmp_path, capsys) -> None:
    """The law of ``--write``: what it writes is what `recipes check` accepts."""
    rows = {
        "sft": {"prompt": "a b c", "completion": "d e f"},
        "pretrain": {"text": "a b c " * 40},
        "dpo": {"prompt": "a b c", "chosen": "d e f", "rejected": "f e d"},
    }
    data = tmp_path / "rows of text.jsonl"
    data.write_text("".join(json.dumps(rows[recipe]) + "\n" for _ in range(16)))
    keys = {"dataset_name": data, "model_name_or_path": tiny_model_dir, "max_length": 64, "max_steps": 2}
    flags = [f"--{key}={value}" for key, value in {**keys, "output_dir": tmp_path / "out"}.items()]
    config, model = load_config(recipe, flags), AutoConfig.from_pretrained(tiny_model_dir)
    starts, _ = list_starts(model, 2)

    def is_supported(layout, keys) -> bool:
        changed = dataclasses.replace(config, training={**config.training, **keys})
        try:
            verify_combination(changed, starts[layout].launch)
        except ConfigError:
            return False
        return True

    found = search(config, model, list(starts), 4, choose_device("H100"), 989e12, is_supported=is_supported)
    best = {one.layout: one for one in reversed(found)}
    assert len(best) >= least
    for layout, one in best.items():
        folder = tmp_path / starts[layout].name
        write_plan(folder, ["--recipe", recipe, *flags], one.keys, layout, starts[layout])
        recipes, launch, *words = shlex.split((folder / "launch.sh").read_text())
        assert (recipes, launch) == ("recipes", "launch")
        code = main(["check", *words])
        assert code == 0, f"{starts[layout].name}\n{capsys.readouterr().out}"


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "lora": ("lora", {}),
    "lora 4 bit": ("lora", {"load_in_4bit": True}),
    "pretrain": ("pretrain", {}),
    "dpo": ("dpo", {}),
    "reward": ("reward", {}),
    "distill": ("distill", {"teacher_model_name_or_path": "MODEL"}),
    "ppo": ("ppo", {"reward_funcs": "recipes_lib.rl.verifiers:final_number", "response_length": 16}),
    "grpo": ("grpo", {"reward_funcs": "recipes_lib.rl.verifiers:final_number", "response_length": 16}),
}
"""Recipe and keys of each stage."""
OF_THE_DATA: dict[str, dict[str, str]] = {
    "pretrain": {"text": "a b c " * 40},
    "dpo": {"prompt": "a b c", "chosen": "d e f", "rejected": "f e d"},
    "ppo": {"prompt": "1 + 1", "answer": "2"},
}


FAST = {("lora 4 bit", "2x4090"), ("grpo", "8xH100"), ("distill", "16xH100")}
"""The short form: every stage on every machine is in the slow tier."""


@pytest.mark.parametrize(
    ("stage", "gpus"),
    [
        pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
        for case in itertools.product(SHAPES, ["2x4090", "8xH100", "1xA100-40GB", "16xH100"])
    ],
)
def test_what_the_search_writes_passes_the_check(stage, gpus, tiny_model_dir, tmp_path, capsys) -> None:
    """The law of ``--write`` for every stage, from one GPU to two machines: the files as a user has them."""
    recipe, changes = SHAPES[stage]
    alias = {"reward": "dpo", "grpo": "ppo"}.get(recipe, recipe)
    row = OF_THE_DATA.get(alias, {"prompt": "a b c", "completion": "d e f"})
    data = tmp_path / "rows of text.jsonl"
    data.write_text("".join(json.dumps({**row, "id": str(number)}) + "\n" for number in range(64)))
    keys = {"dataset_name": data, "model_name_or_path": tiny_model_dir, "max_steps": 2, "output_dir": tmp_path / "out"}
    keys |= {} if alias == "ppo" else {"max_length": 64, "gradient_accumulation_steps": 16}
    keys |= {key: tiny_model_dir if value == "MODEL" else value for key, value in changes.items()}
    path = tmp_path / f"{recipe}.yaml"
    path.write_text(
        yaml.safe_dump({key: str(value) if isinstance(value, Path) else value for key, value in keys.items()})
    )
    written = [] if alias == "ppo" else ["--num_processes", "1"]
    assert main(["plan", "--config", str(path), "--gpus", gpus, *written, "--write", str(tmp_path / "plan")]) == 0
    _, _, *words = shlex.split((tmp_path / "plan" / "launch.sh").read_text())
    capsys.readouterr()
    code = main(["check", *words])
    told = capsys.readouterr()
    assert code == 0, f"{words}\n{told.out}{told.err}"
