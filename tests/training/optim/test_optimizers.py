"""Weight decay, parameter groups, state and requirements of optimizers, compared with transformers' Trainer."""

import copy
import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from tests.training.configurations import build_recipe
from tests.training.optim.small_models import MODELS, build, take_steps
from tests.training.optim.states import measure_group_bytes, measure_state_bytes
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
from transformers.training_args import OptimizerNames

from recipes_lib.config.rules import DECISIONS
from recipes_lib.config.schema import PretrainingConfig
from recipes_lib.errors import ConfigError
from recipes_lib.training.optim.optimizers import (
    build_muon,
    describe_groups,
    get_decay_names,
    plan_groups,
    verify_optimizer,
    warn_of_rounding,
)

EMBEDDINGS = {
    "llama-tied": {"model.embed_tokens.weight"},
    "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"},
    "mamba": {"backbone.embeddings.weight"},
}


def verify(training, *, recipe="sft"):
    verify_optimizer(build_recipe(training, recipe))


class OurGroups(Trainer):
    """transformers' trainer with this library's rule of weight decay."""

    def get_decay_parameter_names(self, model):
        return get_decay_names(model, decay_embeddings=False)


def build_optimizer(model, tmp_path, optim, **training):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, optim=optim, weight_decay=0.1, **training)
    return OurGroups(model=model, args=args).create_optimizer()


@pytest.mark.parametrize(
    ("dtype", "optim", "optim_args", "is_lossy"),
    [
        ("float32", "adamw_torch_fused", None, False),
        ("bfloat16", "adamw_torch_fused", None, True),
        ("float16", "adamw_torch_8bit", "bf16_stochastic_round=False", True),
        ("float16", "adamw_torch_8bit", "bf16_stochastic_round=True", True),
        ("bfloat16", "adamw_torch_8bit", "bf16_stochastic_round=True", False),
        ("bfloat16", "adamw_torch_4bit", "bf16_stochastic_round = true", False),
        ("bfloat16", "adamw_torch_fused", "bf16_stochastic_round=True", True),
        ("bfloat16", "adamw_bf16_stochastic", None, False),
    ],
)
def test_rounded_updates_have_a_warning(dtype, optim, optim_args, is_lossy):
    dtypes = [torch.float32, getattr(torch, dtype)]
    assert len([*warn_of_rounding(dtypes, optim, optim_args)]) == is_lossy


@pytest.mark.parametrize("name", sorted(MODELS))
def test_decay_names_equal_transformers(name):
    model = build(name)
    shapes = {parameter_name: parameter.ndim for parameter_name, parameter in model.named_parameters()}
    decaying = get_decay_names(model, decay_embeddings=True)
    assert min(shapes[parameter_name] for parameter_name in decaying) >= 2
    assert not any(re.search("norm|bias|A_log", parameter_name) for parameter_name in decaying)
    if name != "mamba":  # transformers also decays its vectors ``D`` and its ``A_log``
        upstream = set(Trainer.get_decay_parameter_names(None, model))
        sinks = {n for n in shapes if n.endswith("sinks")}  # attention sinks of gpt-oss, a scalar per head
        assert decaying == [n for n in shapes if n in upstream - sinks]
    without = set(decaying) - set(get_decay_names(model, decay_embeddings=False))
    assert without == EMBEDDINGS.get(name, {"model.embed_tokens.weight", "lm_head.weight"})


def test_norm_of_unusual_name_does_not_decay():
    model = torch.nn.ModuleDict({"ln": torch.nn.RMSNorm(4), "norm1": torch.nn.RMSNorm(4), "mlp": torch.nn.Linear(4, 4)})
    assert get_decay_names(model, decay_embeddings=True) == ["mlp.weight"]
    assert Trainer.get_decay_parameter_names(None, model) == ["ln.weight", "norm1.weight", "mlp.weight"]


def test_decay_names_of_wrapped_model():
    model = build("gpt2")
    wrapped = torch.nn.ModuleDict({"module": model})
    expected = [f"module.{name}" for name in get_decay_names(model, decay_embeddings=False)]
    assert get_decay_names(wrapped, decay_embeddings=False) == expected


OPTIMIZERS: dict[str, tuple[str | None, float | None]] = {
    "adamw_torch_fused": (None, 8),
    "adafactor": (None, None),
    "sgd": (None, 4),
    "adagrad": (None, None),
    "rmsprop": (None, None),
    "ademamix": ("bitsandbytes", None),
    "adamw_8bit": ("bitsandbytes", None),
    "paged_adamw_8bit": ("bitsandbytes", None),
    "lion_32bit": ("bitsandbytes", 4),
    "lion_8bit": ("bitsandbytes", None),
    "adamw_torch_8bit": ("torchao", None),
    "stable_adamw": ("optimi", 8),
}
"""Package of each optimizer, and bytes of state per parameter if that of all is known; SGD with momentum."""


@pytest.mark.parametrize(
    "optim", [pytest.param(name, marks=pytest.mark.slow) if name == "adamw_torch_8bit" else name for name in OPTIMIZERS]
)
def test_optimizer_learns_and_resumes_bit_identically(tmp_path, optim):
    package, state_bytes = OPTIMIZERS[optim]
    if package:
        pytest.importorskip(package)
    options = {"learning_rate": {"sgd": 0.1, "adagrad": 0.1, "lion_32bit": 5e-3, "lion_8bit": 5e-3}.get(optim, 1e-2)}
    options |= {"optim_args": "momentum=0.9"} if optim == "sgd" else {}
    model = build("llama-tied")
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = build_optimizer(model, tmp_path, optim, **options)
    first, _ = take_steps(model, optimizer, 6)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    _, last = take_steps(model, optimizer, 6)
    assert last < 0.85 * first
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert [row.weight_decay for row in describe_groups(optimizer, model)] == [0.1, 0.0]
    if state_bytes is not None:
        assert measure_state_bytes(optimizer) == pytest.approx(state_bytes, abs=0.1)

    again = build("llama-tied")
    resumed = build_optimizer(again, tmp_path, optim, **options)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    take_steps(again, resumed, 6)
    for (name, expected), found in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_group_rows_list_each_trained_parameter_once(tmp_path):
    model = build("mixtral")
    model.model.layers[0].requires_grad_(False)
    optimizer = build_optimizer(model, tmp_path, "adamw_torch", learning_rate=3e-4)
    rows = describe_groups(optimizer, model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(row.num_tensors for row in rows) == len(trained)
    assert sum(row.num_parameters for row in rows) == sum(parameter.numel() for parameter in trained)
    assert [row.optimizer for row in rows] == ["AdamW", "AdamW"]
    assert rows[1].parameters == (
        "model.embed_tokens.weight",
        "model.layers.*.input_layernorm.weight",
        "model.layers.*.post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    )


def test_group_rows_have_peak_learning_rate(tmp_path):
    model = build("llama")
    optimizer = build_optimizer(model, tmp_path, "adamw_torch", learning_rate=3e-4)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [row.learning_rate for row in describe_groups(optimizer, model)] == [3e-4] * 2
    assert measure_state_bytes(optimizer) == 0
    take_steps(model, optimizer, 1)
    assert measure_group_bytes(optimizer) == pytest.approx([8, 8], abs=0.3)


def test_group_rows_are_equal_after_accelerate_prepare(tmp_path):
    model = build("llama")
    optimizer = build_optimizer(model, tmp_path, "adafactor")
    prepared = Accelerator(cpu=True).prepare(optimizer)
    assert prepared is not optimizer
    assert describe_groups(prepared, model) == describe_groups(optimizer, model)


def test_state_bytes_count_shared_tensor_once():
    parameters = [torch.nn.Parameter(torch.zeros(10)) for _ in range(3)]
    optimizer = torch.optim.SGD(parameters)
    levels = torch.zeros(15)
    for parameter in parameters:
        optimizer.state[parameter] = {"codes": torch.zeros(10, dtype=torch.uint8), "scales": [levels], "step": 3}
    assert measure_state_bytes(optimizer) == (3 * 10 + 4 * 15) / 30


PACKAGE_OF_HANDLER = {
    "_get_bitsandbytes_optimizer": "bitsandbytes",
    "_get_torchao_optimizer": "torchao",
    "_get_schedule_free_optimizer": "schedulefree",
    "_get_galore_optimizer": "galore_torch",
    "_get_apollo_optimizer": "apollo_torch",
    "_get_grokadamw": "grokadamw",
    "_get_stable_adamw": "optimi",
    "_get_adamw_anyprecision": "torchdistx",
    "_get_adamw_torch_xla": "torch_xla",
    "_get_adamw_torch_npu_fused": "torch_npu",
}
BUILT_IN = {"_get_adamw_torch", "_get_adafactor", "_get_sgd", "_get_adagrad", "_get_rmsprop"}
NAMES = [member.value for member in OptimizerNames]
ACCEPTED = {"lr_scheduler_type": "constant", "optim_target_modules": "all-linear", "save_strategy": "no"}
"""Keys with which an optimizer needs its package only."""


def read_handler(name):
    return _OPTIMIZER_HANDLERS[name].__name__


@pytest.fixture
def packages(monkeypatch):
    """Make all packages look missing, or installed with ``packages["all"] = True``."""
    installed = {"all": False}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed["all"] else None)
    return installed


@pytest.mark.parametrize("name", NAMES)
def test_missing_package_is_named_for_every_optimizer(packages, name):
    if name.endswith(("lomo", "layerwise")):
        with pytest.raises(ConfigError, match="during the backward pass"):
            verify({"optim": name} | ACCEPTED)
        return
    handler = read_handler(name)
    if handler in BUILT_IN:
        verify({"optim": name})
        return
    with pytest.raises(ConfigError, match=f"{name} needs the package {PACKAGE_OF_HANDLER[handler]}, ") as caught:
        verify({"optim": name} | ACCEPTED)
    (problem,) = caught.value.problems
    assert problem.remedy.startswith("pip install ")
    packages["all"] = True
    verify({"optim": name} | ACCEPTED)


def test_documented_table_lists_all_refused_optimizers(packages):
    packages["all"] = True
    page = (Path(__file__).parents[3] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    rows = page.partition("**Refused**")[2].partition("**On weights")[0].splitlines()
    named = {name for row in rows if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    refused = set()
    for name in NAMES:
        try:
            verify({"optim": name} | {key: value for key, value in ACCEPTED.items() if key != "save_strategy"})
        except ConfigError:
            refused.add(name)
    assert named - {"optim"} == refused
    assert "| Sophia | no value of `optim`" in page
    assert not any("sophia" in name for name in NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith(("lomo", "layerwise"))])
def test_accepted_optimizers_are_those_upstream_builds(tmp_path, name):
    model = build("llama")
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, optim=name, optim_target_modules="all-linear")
    try:
        verify({"optim": name} | ACCEPTED)
    except ConfigError:
        with pytest.raises((ImportError, ValueError)):
            Trainer.get_optimizer_cls_and_kwargs(args, model)
    else:
        taken = Trainer.get_optimizer_cls_and_kwargs(args, model)[1]
        overruled = {row["key"] for row in DECISIONS if name in row.get("when", {}).get("optim", ())}
        for key in ("adam_beta1", "adam_beta2", "adam_epsilon"):
            other = replace(args, **{key: 0.5})
            assert (Trainer.get_optimizer_cls_and_kwargs(other, model)[1] == taken) == (key in overruled), key


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"optim": "galore_adamw", "optim_target_modules": None}, "optim_target_modules"),
        ({"optim": "apollo_adamw", "optim_target_modules": None}, "optim_target_modules"),
        ({"optim": "galore_adafactor", "weight_decay": 0.1}, "does not pass weight_decay"),
        ({"optim": "galore_adamw", "save_strategy": "steps"}, "cannot resume from a checkpoint"),
        ({"optim": "apollo_adamw", "save_strategy": "epoch"}, "cannot resume from a checkpoint"),
        ({"optim": "grokadamw", "save_strategy": "steps"}, "cannot resume from a checkpoint"),
        ({"optim": "schedule_free_adamw", "lr_scheduler_type": "cosine"}, "lr_scheduler_type: constant"),
        ({"optim": "schedule_free_sgd", "warmup_steps": 0.03}, "not a fraction"),
        ({"optim": "muon", "optim_args": "momentum=0.9"}, "muon takes no arguments"),
        ({"optim": "adamw_torch_fused", "optim_args": "amsgrad=True"}, "adamw_torch_fused takes no arguments"),
        ({"optim": "adamw_torch", "optim_args": "bf16_stochastic_round=True"}, "adamw_torch takes no arguments"),
        ({"optim": "sgd", "optim_args": "momentom=0.9"}, "no argument 'momentom'\n *write momentum, dampening"),
        ({"optim": "sgd", "optim_args": "momentum"}, "'momentum' does not give a number"),
        ({"optim": "sgd", "optim_args": "momentum=0.9, dampening=much"}, "'dampening=much' does not give a number"),
        ({"optim": "sgd", "optim_args": "momentum=0.9,"}, "no argument ''"),
    ],
)
def test_missing_or_ignored_option_of_optimizer_is_refused(packages, training, message):
    packages["all"] = True
    with pytest.raises(ConfigError, match=message) as caught:
        verify(ACCEPTED | training)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("optim", "arguments"),
    [
        ("sgd", "momentum=0.9, nesterov=True"),
        ("paged_ademamix_8bit", "beta3=0.999,t_alpha=100"),
        ("apollo_adamw", "proj=random,rank=1,scale=128.0,scale_type=tensor,update_proj_gap=200"),
        ("adamw_torch_8bit", "bf16_stochastic_round=True"),
        ("rmsprop", "alpha=.9,eps=1e-6"),
    ],
)
def test_arguments_that_transformers_reads_are_accepted(packages, optim, arguments):
    packages["all"] = True
    verify(ACCEPTED | {"optim": optim, "optim_args": arguments})


def test_all_problems_of_optimizer_are_reported(packages):
    with pytest.raises(ConfigError) as caught:
        verify({"optim": "galore_adamw", "weight_decay": 0.1})
    assert len(caught.value.problems) == 4


def test_schedule_free_divides_first_step_by_fractional_warmup(tmp_path):
    """The reason of the refusal: upstream passes the fraction as a number of steps."""
    pytest.importorskip("schedulefree")
    optimizer = build_optimizer(build("llama"), tmp_path, "schedule_free_adamw", learning_rate=1e-3, warmup_steps=0.01)
    optimizer.train()
    optimizer.param_groups[0]["params"][0].grad = torch.ones_like(optimizer.param_groups[0]["params"][0])
    optimizer.step()
    assert optimizer.param_groups[0]["scheduled_lr"] == pytest.approx(0.1)


def test_fractional_warmup_of_schedule_free_is_allowed_in_pretraining(packages):
    packages["all"] = True
    training = ACCEPTED | {"optim": "schedule_free_adamw", "warmup_steps": 0.01}
    verify(training, recipe="pretrain")
    with pytest.raises(ConfigError, match="not a fraction"):
        verify(training)


def test_group_row_of_flattened_deepspeed_partition():
    """Its tensor is not a parameter of the model."""
    flat = torch.nn.Parameter(torch.zeros(10))
    (row,) = describe_groups(torch.optim.AdamW([flat], lr=3e-4, weight_decay=0.1), build("llama-tied"))
    assert (row.num_parameters, row.weight_decay, row.learning_rate) == (10, 0.1, 3e-4)
    assert row.parameters == ("this rank's partition of DeepSpeed's flattened parameters",)


@pytest.mark.parametrize("decay_embeddings", [True, False])
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "muon"])
def test_planned_groups_equal_built_groups(tiny_model_dir, tmp_path, optim, decay_embeddings):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    keys = {"optim": optim, "learning_rate": 1e-3, "weight_decay": 0.1, "output_dir": str(tmp_path), "use_cpu": True}
    config = build_recipe(keys, "pretrain", pretraining=PretrainingConfig(decay_embeddings=decay_embeddings))
    planned = plan_groups(model.to("meta"), config)

    class Decaying(Trainer):
        def get_decay_parameter_names(self, model):
            return get_decay_names(model, decay_embeddings=decay_embeddings)

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    args = TrainingArguments(**keys | ({"optim": "adamw_torch"} if optim == "muon" else {}))
    if optim == "muon":
        optimizer = build_muon(model, args, decay_embeddings=decay_embeddings)
    else:
        optimizer = Decaying(model=model, args=args).create_optimizer()
    built = describe_groups(optimizer, model)
    names = [row.optimizer for row in built] if optim == "muon" else [optim] * len(built)
    assert planned == [replace(row, optimizer=name) for row, name in zip(built, names, strict=True)]
    line = str(planned[0])
    assert f"{planned[0].num_parameters:,} parameters in {planned[0].num_tensors} tensors" in line
    assert "rate 1.0e-03" in line
