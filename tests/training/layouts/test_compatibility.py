"""Incompatible options of recipe and launch file: every refused combination, and similar ones that are accepted."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from tests.test_accelerate_configs import FILES

from recipes_lib.commands import launch as launching
from recipes_lib.commands.check import check
from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import WEIGHTS, RecipeConfig, flatten_config
from recipes_lib.errors import ConfigError
from recipes_lib.training.layouts.compatibility import BLOCKED, Blocked, verify_combination
from recipes_lib.training.layouts.launch_environment import (
    Launch,
    name_pipeline,
    name_variables,
    plan_launch,
    read_launch,
)
from recipes_lib.training.run import start_run


def launch(kind: str = "FSDP", *, precision: str = "bf16", **settings: Any) -> dict[str, Any]:
    """Return a launch file for four processes."""
    document = {"distributed_type": kind, "mixed_precision": precision, "num_processes": 4, "use_cpu": False}
    mesh = {key: value for key, value in settings.items() if key.startswith("parallelism_config_")}
    rest = {key: value for key, value in settings.items() if key not in mesh and key != "use_cpu"}
    document |= {"use_cpu": settings.get("use_cpu", False)}
    if kind == "FSDP":
        document["fsdp_config"] = {"fsdp_version": 2} | rest
    if kind == "DEEPSPEED":
        document["deepspeed_config"] = {"zero_stage": 2} | rest
    return document | ({"parallelism_config": mesh} if mesh else {})


def pipeline(num: int = 2, schedule: str = "1f1b", kind: str = "MULTI_GPU", **settings: Any) -> dict[str, Any]:
    """Return a launch file for four processes in pipelines of ``num`` stages."""
    return launch(kind, **settings) | {"pipeline": name_pipeline(num, schedule)}


def read_document(document: dict[str, Any]) -> Launch:
    return read_launch(name_variables(document) | document.get("pipeline", {}))


def mesh(**sizes: int) -> dict[str, Any]:
    return launch(**{f"parallelism_config_{name}_size": size for name, size in sizes.items()})


def cut(precision: str = "bf16", **settings: Any) -> dict[str, Any]:
    return launch(precision=precision, parallelism_config_tp_size=2, parallelism_config_dp_shard_size=2, **settings)


DDP, EIGHT_BITS = launch("MULTI_GPU"), launch("MULTI_GPU", precision="fp8")
TENSORS = cut()
ROWS_SHARED = mesh(dp_shard=2, cp=2)
FSDP, ZERO = launch(), launch("DEEPSPEED")
ZERO_3 = launch("DEEPSPEED", zero_stage=3, zero3_save_16bit_model=True)
HEADS_SHARED = ZERO_3 | {"parallelism_config": mesh(dp_shard=2, sp=2)["parallelism_config"]}
LIVE = {"precompute_ref_log_probs": False}
STOCHASTIC = {"recipe": "pretrain", "optim": "adamw_bf16_stochastic", "dtype": "bfloat16"}
PRETRAIN, SFT = {"recipe": "pretrain", "gradient_accumulation_steps": 4}, {"recipe": "sft"}
PPO, RLOO, DISTIL, LORA = ({"recipe": recipe} for recipe in ("ppo", "rloo", "distill", "lora"))
# For each row of BLOCKED, in order: recipe keys and launch file that it refuses, and similar pairs that it accepts.
CASES: list[tuple[tuple[dict[str, Any], dict[str, Any]], list[tuple[dict[str, Any], dict[str, Any]]]]] = [
    (
        ({"bf16": True}, launch("MULTI_GPU", precision="fp16")),
        [({"bf16": True}, DDP), ({}, launch("MULTI_GPU", precision="fp16"))],
    ),
    (({"fp16": True}, DDP), [({"fp16": True}, launch("MULTI_GPU", precision="no")), ({}, DDP)]),
    (
        ({"fp16": True}, launch("NO", precision="fp8")),
        [({"bf16": value}, launch("NO", precision="fp8")) for value in (False, True)],
    ),
    (({"bf16": False}, DDP), [({"bf16": False}, launch("MULTI_GPU", precision="no"))]),
    (({"fp16": False}, launch("NO", precision="fp16")), [({"fp16": False}, DDP)]),
    ((RLOO, launch("MULTI_GPU", precision="fp16")), [(RLOO, DDP), (SFT, launch("MULTI_GPU", precision="fp16"))]),
    (({"use_peft": True}, EIGHT_BITS), [({"use_peft": True}, DDP), (SFT, EIGHT_BITS)]),
    (
        ({"dtype": "bfloat16"}, FSDP),
        [
            ({"dtype": "bfloat16", "use_peft": True}, FSDP),
            ({"dtype": "bfloat16"}, DDP),
            ({"dtype": "float32"}, FSDP),
            ({"dtype": "bfloat16", "bf16": False}, launch(precision="no")),
        ],
    ),
    (
        ({"gradient_accumulation_steps": 2}, launch("DEEPSPEED", gradient_accumulation_steps=4)),
        [
            ({"gradient_accumulation_steps": 4}, launch("DEEPSPEED", gradient_accumulation_steps=4)),
            ({"gradient_accumulation_steps": 2}, launch("DEEPSPEED", gradient_accumulation_steps="auto")),
            ({}, launch("DEEPSPEED", gradient_accumulation_steps=1)),
        ],
    ),
    (
        ({}, launch("DEEPSPEED", gradient_clipping=0.5)),
        [
            ({"max_grad_norm": 0.5}, launch("DEEPSPEED", gradient_clipping=0.5)),
            ({"max_grad_norm": 0.5}, launch("DEEPSPEED", gradient_clipping="auto")),
        ],
    ),
    (({}, launch("DEEPSPEED", use_cpu=True)), [({}, ZERO), ({}, launch("MULTI_GPU", use_cpu=True))]),
    (({}, mesh(dp_replicate=2, dp_shard=4)), [({}, mesh(dp_replicate=2, dp_shard=2))]),
    (({}, mesh(dp_replicate=4)), [({}, mesh(dp_shard=4)), ({}, FSDP)]),
    (({}, launch("DEEPSPEED", precision="fp8")), [({}, ZERO), ({}, EIGHT_BITS)]),
    (
        ({}, launch(precision="fp8")),
        [
            ({}, launch(precision="fp8", fsdp_cpu_ram_efficient_loading=False)),
            ({}, EIGHT_BITS),
        ],
    ),
    (({}, {**DDP, "parallelism_config": {"parallelism_config_tp_size": 4}}), [({}, mesh(tp=4)), ({}, TENSORS)]),
    (({}, mesh(dp_replicate=2, tp=2)), [({}, TENSORS), ({}, mesh(dp_replicate=2, dp_shard=2))]),
    (({}, cut("fp16")), [({}, cut("no")), ({}, TENSORS), ({}, launch(precision="fp16"))]),
    (
        ({}, cut(fsdp_offload_params=True)),
        [({}, launch(fsdp_offload_params=True)), ({"activation_checkpointing": True}, TENSORS)],
    ),
    (
        ({"use_peft": True}, TENSORS),
        [({"use_peft": True}, mesh(dp_shard=4, tp=1)), ({"optim": "adamw_torch"}, TENSORS)],
    ),
    (({"fp16": True, "bf16": False}, cut("no")), [({"fp16": True, "bf16": False}, launch(precision="no"))]),
    (({"optim": "sgd"}, TENSORS), [({"optim": "sgd"}, FSDP), ({"optim": "adamw_torch_fused"}, TENSORS)]),
    (({"verify_steps": 8}, TENSORS), [({"verify_steps": 8}, FSDP), ({}, TENSORS)]),
    (({}, {**DDP, "parallelism_config": {"parallelism_config_cp_size": 4}}), [({}, mesh(cp=4)), ({}, ROWS_SHARED)]),
    (({}, mesh(dp_shard=2, sp=2)), [({}, mesh(dp_shard=4, cp=1, sp=1)), ({}, HEADS_SHARED)]),
    (({}, mesh(cp=2, tp=2)), [({}, ROWS_SHARED), ({}, TENSORS)]),
    (({"use_peft": True}, ROWS_SHARED), [({"optim": "muon"}, ROWS_SHARED)]),
    (
        ({"dataset_streaming": True, "max_steps": 1, "max_length": 64}, ROWS_SHARED),
        [
            ({"dataset_streaming": True, "max_steps": 1, "max_length": 64}, FSDP),
            ({"dataset_streaming": False}, HEADS_SHARED),
        ],
    ),
    (({"attn_implementation": "sdpa"}, ROWS_SHARED), [({"attn_implementation": "sdpa"}, FSDP), ({}, ROWS_SHARED)]),
    (({"torch_compile": True}, ROWS_SHARED), [({"torch_compile": True}, FSDP)]),
    (({}, launch(fsdp_version=1)), [({}, FSDP), ({}, DDP)]),
    (
        ({}, launch(fsdp_sharding_strategy="HYBRID_SHARD")),
        [
            ({}, launch(fsdp_sharding_strategy="FULL_SHARD")),
            ({}, launch(fsdp_sharding_strategy=1)),
            ({}, launch(fsdp_sharding_strategy=None, fsdp_reshard_after_forward=False)),
            ({}, DDP),
        ],
    ),
    (
        ({}, launch("DEEPSPEED", zero_stage=3)),
        [({}, launch("DEEPSPEED", zero_stage=3, zero3_save_16bit_model=True)), ({}, ZERO)],
    ),
    (
        ({"activation_checkpointing": True}, launch(fsdp_activation_checkpointing=True)),
        [({"activation_checkpointing": True}, FSDP), ({}, launch(fsdp_activation_checkpointing=True))],
    ),
    (
        ({"optim": "paged_adamw_8bit"}, FSDP),
        [
            ({"optim": "paged_adamw_8bit"}, ZERO),
            ({"optim": "paged_adamw_8bit"}, DDP),
            ({"optim": "muon"}, FSDP),
            ({"optim": "adamw_torch_8bit"}, FSDP),
        ],
    ),
    (({"optim": "adafactor"}, ZERO), [({"optim": "muon"}, FSDP), ({"optim": "adamw_torch"}, ZERO)]),
    ((STOCHASTIC, ZERO), [(STOCHASTIC, DDP), ({"optim": "adamw_8bit"}, ZERO)]),
    (
        ({"optim": "adafactor"}, launch("DEEPSPEED", offload_optimizer_device="cpu")),
        [
            ({"optim": "adamw_8bit"}, launch("DEEPSPEED", offload_optimizer_device="none")),
            ({}, launch("DEEPSPEED", offload_optimizer_device="cpu")),
        ],
    ),
    (
        ({"load_in_8bit": True, "use_peft": True}, FSDP),
        [({"load_in_4bit": True, "use_peft": True}, FSDP), ({"load_in_8bit": True, "use_peft": True}, DDP)],
    ),
    (
        (LIVE, ZERO),
        [(LIVE, FSDP), ({}, ZERO), (LIVE | {"use_peft": True}, ZERO), (LIVE | {"ref_model_name_or_path": "o/r"}, ZERO)],
    ),
    (({"max_rollbacks": 1}, ZERO), [({"max_rollbacks": 1}, FSDP), ({"max_rollbacks": 0}, ZERO)]),
    ((PPO, ZERO), [(PPO, DDP), (PPO | {"use_peft": True}, FSDP), (RLOO, FSDP), ({}, ZERO)]),
    (
        (PPO | {"use_transformers_continuous_batching": True}, FSDP),
        [(PPO | {"use_transformers_continuous_batching": True}, DDP), (PPO | {"use_vllm": True}, FSDP)],
    ),
    ((DISTIL | {"angle_weight": 0.5}, ZERO), [(DISTIL | {"angle_weight": 0.5}, DDP), (DISTIL, FSDP), (DISTIL, ZERO)]),
    (
        ({"kl_to_base": 0.1}, ZERO),
        [({"kl_to_base": 0.1}, FSDP), ({"ewc_lambda": 1.0}, DDP), ({"kl_to_base": 0.0}, ZERO)],
    ),
    (({"verify_steps": 8}, ZERO), [({"verify_steps": 8}, FSDP), ({}, ZERO)]),
    (
        (DISTIL | {"lmbda": 0.5}, ZERO_3),
        [(DISTIL | {"lmbda": 0.5}, ZERO), (DISTIL | {"lmbda": 0.5}, FSDP), (DISTIL, ZERO_3)],
    ),
    (
        (LORA | {"use_dora": True}, ZERO_3),
        [(LORA | {"use_dora": True}, ZERO), (LORA | {"use_dora": True}, FSDP), (LORA, ZERO_3)],
    ),
    (
        ({"eval_tasks": "[core]"}, FSDP),
        [({"eval_tasks": "[core]"}, DDP), ({"eval_tasks": "[core]"}, launch("NO")), ({}, FSDP)],
    ),
    ((SFT, pipeline()), [(PRETRAIN, pipeline()), (SFT, DDP), (SFT, pipeline(1))]),
    ((PRETRAIN, pipeline(3)), [(PRETRAIN, pipeline(4)), (PRETRAIN, pipeline(2)), (PRETRAIN, DDP)]),
    (
        (PRETRAIN, pipeline(kind="DEEPSPEED")),
        [(PRETRAIN, pipeline(kind="FSDP")), (PRETRAIN, ZERO), (PRETRAIN, pipeline(kind="FSDP") | mesh(tp=2))],
    ),
    ((PRETRAIN, pipeline(kind="FSDP", fsdp_offload_params=True)), [(PRETRAIN, launch(fsdp_offload_params=True))]),
    (
        (PRETRAIN, pipeline(precision="fp16")),
        [(PRETRAIN, pipeline(precision="no")), (PRETRAIN, pipeline(precision="bf16"))],
    ),
    ((PRETRAIN | {"fp16": True}, pipeline(precision="no")), [(PRETRAIN | {"bf16": True}, pipeline(precision="no"))]),
    (
        (PRETRAIN | {"gradient_accumulation_steps": 3}, pipeline(4)),
        [
            (PRETRAIN | {"gradient_accumulation_steps": 3}, launch)
            for launch in (pipeline(2), pipeline(4, "gpipe"), DDP)
        ],
    ),
    (
        (PRETRAIN | {"gradient_accumulation_steps": 3}, pipeline(2, "interleaved")),
        [(PRETRAIN, pipeline(4, "interleaved")), (PRETRAIN | {"gradient_accumulation_steps": 3}, pipeline(2))],
    ),
    ((PRETRAIN | {"batch_ramp_tokens": 4096}, pipeline()), [(PRETRAIN | {"batch_ramp_tokens": 4096}, DDP)]),
    ((PRETRAIN | {"verify_steps": 2}, pipeline()), [(PRETRAIN | {"verify_steps": 2}, DDP)]),
    ((PRETRAIN | {"metrics": "[mine:Score]"}, pipeline()), [(PRETRAIN | {"metrics": "[mine:Score]"}, DDP)]),
    ((PRETRAIN | {"ewc_lambda": 1.0}, pipeline()), [(PRETRAIN | {"ewc_lambda": 1.0}, FSDP)]),
    ((PRETRAIN | {"torch_compile": True}, pipeline()), [(PRETRAIN | {"torch_compile": False}, pipeline())]),
    ((PRETRAIN | {"use_liger_kernel": True}, pipeline()), [(PRETRAIN | {"use_liger_kernel": False}, pipeline())]),
    (
        (PRETRAIN | {"optim": "adafactor"}, pipeline()),
        [(PRETRAIN | {"optim": "muon"}, pipeline()), (PRETRAIN | {"optim": "adafactor"}, DDP)],
    ),
]
# Further refused combinations, with the reason of their row.
OTHERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(({"recipe": recipe}, TENSORS, "does not support adapters") for recipe in ("reward", "dpo", "distill")),
    ({"recipe": "pretrain"}, TENSORS | {"pipeline": name_pipeline(4, "gpipe")}, "device mesh needs another number"),
    (
        {"recipe": "pretrain"},
        pipeline(2, "gpipe", "FSDP", fsdp_activation_checkpointing=True),
        "does not shard pipeline stages",
    ),
    ({"recipe": "sft", "neftune_noise_alpha": 5.0}, TENSORS, "would draw different noise"),
    ({"recipe": "sft", "torch_compile": True}, TENSORS, "would draw different noise"),
    ({"recipe": "sft", "eval_tasks": "[core]"}, ROWS_SHARED, "benchmarks run on one process"),
    ({"recipe": "sft", "eval_tasks": "[core]"}, ZERO, "benchmarks run on one process"),
    (
        {"recipe": "pretrain", "eval_tasks": "[core]", "gradient_accumulation_steps": 4},
        pipeline(),
        "benchmarks run on one process",
    ),
    *(({"recipe": recipe}, ROWS_SHARED, "more than tokens and labels") for recipe in ("reward", "dpo", "distill")),
    *(({"recipe": recipe}, HEADS_SHARED, "more than tokens and labels") for recipe in ("reward", "dpo", "distill")),
    ({"recipe": "sft", "attn_implementation": "sdpa"}, HEADS_SHARED, "needs its own attention"),
    (
        {"recipe": "sft", "dataset_streaming": True, "max_steps": 1, "max_length": 64},
        HEADS_SHARED,
        "would read different rows",
    ),
    ({}, HEADS_SHARED | {"deepspeed_config": {"zero_stage": 2}}, "is tested with ZeRO-3"),
    ({"recipe": "sft", "torch_compile": True}, HEADS_SHARED, "not tested with context parallelism"),
    ({}, mesh(dp_replicate=2, cp=2), "with tensor parallelism or replication"),
    ({"recipe": "sft", "neftune_noise_alpha": 5.0}, ROWS_SHARED, "not tested with context parallelism"),
    ({}, cut("fp8"), "8-bit layers do not support tensor"),
    ({}, cut(fsdp_activation_checkpointing=True), "ignores both"),
    *((each, EIGHT_BITS, "no loss scaler") for each in (PPO, {"recipe": "grpo"})),
    (RLOO, ZERO, "DeepSpeed supports one model"),
    (PPO | {"use_transformers_continuous_batching": True}, FSDP, "generates in another thread"),
    *((DISTIL | {key: 0.5}, ZERO, "outside of the forward") for key in WEIGHTS if key != "attention_weight"),
    (DISTIL | {"attention_weight": 0.5, "attn_implementation": "eager"}, ZERO, "outside of the forward"),
]
ROWS = [f"{number}: {row.recipe_text} {row.launch}" for number, row in enumerate(BLOCKED)]


def read(keys: dict[str, Any], output_dir: Path) -> RecipeConfig:
    recipe = "dpo" if "precompute_ref_log_probs" in keys else "pretrain" if keys.get("optim") == "muon" else "sft"
    recipe = "lora" if keys.get("use_peft") and recipe == "sft" else recipe
    recipe = keys.get("recipe", recipe)
    given = {"dataset_name": "o/d", "output_dir": output_dir, "model_name_or_path": "o/m"}
    given |= {"max_length": 64, "max_steps": 1} if recipe == "pretrain" else {}
    given |= {"reward_funcs": "[mine:score]"} if recipe in ("ppo", "rloo", "grpo") else {}
    given |= {"teacher_model_name_or_path": "o/t"} if recipe == "distill" else {}
    given |= {
        name: value for name, value in keys.items() if (recipe, name) != ("lora", "use_peft") and name != "recipe"
    }
    return load_config(recipe, [f"--{name}={value}" for name, value in given.items()])


def find_rows(config: RecipeConfig, document: dict[str, Any]) -> list[str]:
    """Return the problems of the rows that refuse the combination."""
    try:
        verify_combination(config, read_document(document), "mine.yaml")
    except ConfigError as error:
        return [problem.found for problem in error.problems]
    return []


def test_every_row_has_a_case() -> None:
    assert len(CASES) == len(BLOCKED)


@pytest.mark.parametrize(("row", "case"), list(zip(BLOCKED, CASES, strict=True)), ids=ROWS)
def test_row_refuses_its_case_and_accepts_neighbours(row: Any, case: Any, tmp_path: Path, monkeypatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    (keys, document), neighbours = case
    config = read(keys, tmp_path)
    problem = f"with {row.launch}: {row.why}" if row.keys else f"{row.launch}: {row.why}"
    assert [found for found in find_rows(config, document) if found.endswith(problem)]
    # ``start_run`` refuses it too, before it writes anything.
    with pytest.raises(ConfigError) as started:
        start_run(config, read_document(document))
    assert problem in str(started.value)
    assert not list(tmp_path.iterdir())
    for others, other_document in neighbours:
        assert find_rows(read(others, tmp_path), other_document) == []


@pytest.mark.parametrize(("keys", "document", "why"), OTHERS)
def test_other_keys_of_row_are_refused_and_named(keys, document, why, tmp_path: Path) -> None:
    (found,) = find_rows(read(keys, tmp_path), document)
    assert why in found
    assert all(f"`{key}: " in found for key in list(keys)[1:2])


def test_all_problems_are_reported_with_location(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text("model_name_or_path: o/m\ndataset_name: o/d\noutput_dir: out\ndtype: bfloat16\noptim: adafactor\n")
    config = load_config("sft", ["--config", str(file)])
    with pytest.raises(ConfigError) as error:
        verify_combination(config, read_launch(name_variables(launch(fsdp_version=1))), "mine.yaml")
    assert [problem.where for problem in error.value.problems] == [f"{file}:4", "mine.yaml", f"{file}:5"]
    assert "`optim: adafactor`" in error.value.problems[2].found


def test_check_reports_incompatible_options(tmp_path: Path) -> None:
    file, output = tmp_path / "mine.yaml", io.StringIO()
    file.write_text(yaml.safe_dump(launch(fsdp_version=1)))
    found = check(read({"optim": "adafactor"}, tmp_path), plan_launch(file, 4), Console(file=output, width=200), file)
    assert [problem.where for problem in found][:2] == [str(file), "--optim"]
    output.truncate(0)
    file.write_text(yaml.safe_dump(FSDP))
    check(read({}, tmp_path), plan_launch(file, 4), Console(file=output, width=200), file)
    assert "4 processes, sharded by FSDP, mixed_precision bf16" in output.getvalue()


def test_launch_refuses_incompatible_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("recipes_lib.hardware.count_accelerators", lambda: 4)
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("started"))
    Path("mine.yaml").write_text(yaml.safe_dump(FSDP))
    Path("sft.yaml").write_text("model_name_or_path: o/m\ndataset_name: o/d\noutput_dir: out\noptim: adafactor\n")
    with pytest.raises(ConfigError, match=r"sft.yaml:4: `optim: adafactor` and a launch with FSDP"):
        launching.main(["--config", "sft.yaml", "--hardware", "mine.yaml"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_launch_files_accept_plain_recipe(file: Path, tmp_path: Path) -> None:
    assert find_rows(read({}, tmp_path), yaml.safe_load(file.read_text())) == []


def test_run_without_launcher_is_never_refused(tmp_path: Path) -> None:
    alone = Launch(rank=0, local_rank=0, world_size=1, engine="")
    for (keys, _), _ in CASES:
        verify_combination(read(keys, tmp_path), alone)


PLAIN = ["--model_name_or_path=o/m", "--dataset_name=o/d", "--output_dir=out"]


def block(**more: object) -> Blocked:
    return Blocked(launch="the one", when="FSDP", why="it would fail", remedy="use another", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "where", "found"),
    [
        (block(), "mine.yaml", "the one: it would fail"),
        (block(recipes=("sft",)), "mine.yaml", "recipes/sft.py and a launch with the one: it would fail"),
        (block(keys=("seed",)), "--seed", "`seed: 7` and a launch with the one: it would fail"),
        (block(keys=("optim", "seed")), "--seed", "`seed: 7` and a launch with the one: it would fail"),
        (block(keys=("optim",)), "optim", "`optim`, which is not given, and a launch with the one: it would fail"),
    ],
)
def test_problem_is_located_at_given_key(row: Blocked, where: str, found: str, tmp_path: Path) -> None:
    config = load_config("sft", [*PLAIN, "--seed=7"])
    keys = {name: value for name, value in flatten_config(config).items() if name != "optim"}
    problem = row.build_problem(keys, config, "mine.yaml")
    assert (problem.where, problem.found, problem.remedy) == (where, found, "use another")
