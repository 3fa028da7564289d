"""``recipes plan`` of a stage that upstream's trainer runs: memory by layout, operations and time of a step.

Counted from the YAML and the model's configuration alone; no data, weights or GPU.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from recipes_lib.config.loader import add_recipe_flags, load_for_command, split_stage
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.losses.projection import CHUNK_BYTES
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.models.loading import load_model_config
from recipes_lib.models.quantization import count_quantized_bytes
from recipes_lib.planning.compute import FORWARD_AND_BACKWARD, compute_flops_per_token, device_memory, find_peak
from recipes_lib.planning.disk import count_state_bytes
from recipes_lib.rl.memory import SHARE_OF_DEVICE, count_activations, count_bytes
from recipes_lib.training.trainers.trained_model import choose_teacher

STAGES: Final = ("sft", "lora", "reward", "dpo", "distill")
_PAIRS: Final = ("reward", "dpo")
_USUAL_GB: Final = (24, 48, 80, 141, 192)
_CHUNKS: Final = 4
"""Buffers of a chunk of logits at once: logits, their narrow copy, exponentials, products."""


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step.

    Attributes:
        num_rows: Rows of it, over all processes; of a pair each answer is one.
        length: Tokens of a row, all of which are counted.
        num_flops: Operations, forward and backward, without what is computed twice to save memory.
    """

    num_rows: int
    length: int
    num_flops: float

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, filled up."""
        return self.num_rows * self.length


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: The configuration or a flag is wrong, or the model's configuration cannot be had.
    """
    parser = argparse.ArgumentParser(prog="recipes plan", description=__doc__, allow_abbrev=False)
    add_recipe_flags(parser)
    parser.add_argument("--num_processes", type=int, default=1, help="processes of the run, a GPU each (default: 1)")
    parser.add_argument("--gpu", help="GPU that has to hold it, and to tell the time on, such as H100")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak that is of use (default: 0.4)")
    options, overrides = parser.parse_known_args(argv)
    stage, _ = split_stage(argv)
    if stage not in STAGES:
        found = f"{stage} is a trainer of TRL's whose memory is not counted here"
        raise ConfigError(Problem("--stage", found, f"plan one of pretrain, ppo, {', '.join(STAGES)}"))
    config = load_for_command(stage, overrides, options.config)
    lines = describe_run(config, options.num_processes, options.gpu, options.mfu)
    sys.stdout.write("".join([f"{line}\n" for line in lines]))


def describe_run(config: RecipeConfig, num_processes: int, gpu: str | None, mfu: float) -> Iterator[str]:
    """Yield what a step is and takes, and what a process holds, line by line.

    Args:
        config: The run.
        num_processes: Its processes, a GPU each.
        gpu: Name of the GPU; ``None`` tells no time, and the memory of GPUs that are usual.
        mfu: Share of the GPU's peak that is of use, above 0 and at most 1.

    Raises:
        ConfigError: A flag makes no sense, ``max_length`` is not set, or the model's configuration cannot be had.
    """
    problems = list(_find_problems(config, num_processes, gpu, mfu))
    if problems:
        raise ConfigError(*problems)
    model_config, _ = load_model_config(config.model)
    step = count_step(config, model_config, num_processes)
    yield f"a step: {step.num_rows:,} rows of {step.length:,} tokens, {step.num_tokens:,} in all, if all are full"
    yield f"operations: {step.num_flops:.3g} a step"
    if gpu is not None:
        peak = find_peak(gpu, config)
        seconds = step.num_flops / (num_processes * peak * mfu)
        told = f"{step.num_flops:.3g} / ({num_processes} GPUs x {peak:.3g} FLOP/s x {mfu:g} MFU)"
        yield f"time: {seconds:{'.1f' if seconds >= 1 else '.2g'}} s a step: {told}"
        yield f"      {seconds / step.num_tokens * 1e9 / 3600:.1f} hours for 1,000,000,000 tokens of rows"
        if (num_steps := config.read("max_steps")) > 0:
            yield f"      {seconds * num_steps / 3600:.1f} hours for {num_steps:,} steps"
        if (price := config.evaluation.device_hour_price) is not None:
            a_token = seconds * num_processes / 3600 * price / step.num_tokens
            yield f"cost: {a_token * 1e9:,.2f} for 1,000,000,000 tokens of rows, at {price:g} for a device hour"
    yield from describe_memory(config, model_config, num_processes, gpu)


def describe_memory(
    config: RecipeConfig, model_config: PreTrainedConfig, num_processes: int, gpu: str | None
) -> Iterator[str]:
    """Yield what a process holds, by layout, and which GPUs hold it; arguments as ``describe_run``."""
    sizes = {f"{size} GB": size * 1e9 for size in _USUAL_GB}
    if gpu is not None and (size := device_memory(gpu)) is not None:
        sizes = {gpu: size}
    name = "ddp" if num_processes > 1 else "single_gpu"
    layouts = {f"accelerate_configs/{name}.yaml: a copy of everything on each process": False}
    if num_processes > 1:
        layouts[f"accelerate_configs/fsdp2.yaml: shared by {num_processes} processes"] = True
    activations = count_kept(config, model_config)
    for told, is_sharded in layouts.items():
        terms = count_memory(config, model_config, num_processes, activations, is_sharded=is_sharded)
        total = sum(terms.values())
        fitting = [name for name, size in sizes.items() if total <= SHARE_OF_DEVICE * size]
        yield told
        yield from (f"{size / 1e9:13.2f} GB  {name}" for name, size in terms.items())
        verdict = f"fits {', '.join(fitting)}" if fitting else f"does not fit {', '.join(sizes)}"
        yield f"    {total / 1e9:.1f} GB with all of it at once: {verdict}"


def count_step(config: RecipeConfig, model_config: PreTrainedConfig, num_processes: int) -> Step:
    """Count the operations of an optimizer step.

    Args:
        config: The run.
        model_config: Of the model that is trained.
        num_processes: Its processes.

    Raises:
        ConfigError: The teacher's configuration cannot be had.

    Source: ``compute_flops_per_token``; ``tests/commands/test_plan_tuning.py``.
    """
    length = config.tokens.max_length
    assert length is not None
    pairs = config.read("per_device_train_batch_size") * config.read("gradient_accumulation_steps")
    num_rows = pairs * num_processes * (2 if config.stage in _PAIRS else 1)
    flops = compute_flops_per_token(model_config, length, is_frozen=config.adapter.use_peft)
    a_token = flops.body + (0 if config.stage == "reward" else flops.head)
    if _has_live_reference(config):
        reference = compute_flops_per_token(model_config, length)
        a_token += (reference.body + reference.head) / FORWARD_AND_BACKWARD
    if config.stage == "distill":
        teacher = compute_flops_per_token(load_model_config(choose_teacher(config))[0], length)
        a_token += (teacher.body + teacher.head) / FORWARD_AND_BACKWARD
    return Step(num_rows, length, a_token * num_rows * length)


def count_memory(
    config: RecipeConfig, model_config: PreTrainedConfig, num_processes: int, activations: int, *, is_sharded: bool
) -> Mapping[str, int]:
    """Count the bytes of a process by what they are for, as if all were held at once.

    Args:
        config: The run.
        model_config: Of the model that is trained.
        num_processes: Its processes.
        activations: From ``count_kept``.
        is_sharded: Whether they share weights, gradients and states, as FSDP2 does; else each holds all.

    Raises:
        ConfigError: The adapter does not fit the model, or the teacher's configuration cannot be had.

    Source: closed forms in ``tests/commands/test_plan_tuning.py``.
    """
    training, is_half = config.training, _is_half(config)
    shards = num_processes if is_sharded else 1
    with torch.device("meta"):
        model = _build(config, model_config, config.model.dtype)
        others = dict(_build_frozen(config, model_config))
    trained = _learning(model.parameters())
    weights = count_bytes(trained)
    states = sum(parameter.numel() * count_state_bytes(training, parameter.element_size()) for parameter in trained)
    held = {
        "trained weights": weights,
        "gradients": weights,
        "optimizer states": round(states),
        **{name: _count_stored(config, other) for name, other in others.items()},
    }
    terms = {name: size // shards for name, size in held.items()}
    half = 2 if is_half else 4
    if is_sharded:
        terms["gathered: two layers and the two ends"] = half * max(map(_count_gathered, (model, *others.values())))
        terms["gradients before they are shared out"] = 4 * _count_largest(model)
    elif num_processes > 1:
        terms["buckets in which gradients are summed"] = weights
    if is_half and not is_sharded:
        copies = sum(parameter.numel() for parameter in model.parameters() if parameter.dtype == torch.float32)
        terms["16-bit copies of the weights in a pass"] = half * copies
    terms["activations of a micro-batch"] = activations
    terms["logits of a chunk"] = 0 if config.stage == "reward" else _CHUNKS * CHUNK_BYTES
    return {name: size for name, size in terms.items() if size}


def count_kept(config: RecipeConfig, model_config: PreTrainedConfig) -> int:
    """Count the bytes that a micro-batch keeps for its backward pass, whoever holds the weights.

    Args:
        config: The run.
        model_config: Of the model that is trained.

    Raises:
        ConfigError: The adapter does not fit the model.
    """
    assert config.tokens.max_length is not None
    num_layers: int = model_config.get_text_config().num_hidden_layers
    # Below the first adapter nothing needs a gradient, so the first layer keeps less than the others.
    two, three = (_count_kept(config, _shorten(model_config, number)) for number in (2, 3))
    return two + (num_layers - 2) * (three - two)


def _count_kept(config: RecipeConfig, model_config: PreTrainedConfig) -> int:
    is_half, length = _is_half(config), config.tokens.max_length or 0
    num_rows = config.read("per_device_train_batch_size") * (2 if config.stage in _PAIRS else 1)
    with torch.device("meta"):
        # Weights have the precision of the products here, so that no copy of one counts.
        dtype = torch.bfloat16 if is_half else torch.float32
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
        add_loss_head(model)
        if config.adapter.use_peft:
            model = add_adapter(model, config.adapter, seed=0)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        model.to_empty(device="cpu")
        kept = count_activations(model, num_rows, length, 1 if config.stage == "reward" else length - 1)
    return kept.recomputing if config.read("activation_checkpointing") else kept.total


def _shorten(model_config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """The same model with fewer layers, since all keep alike."""
    shortened = copy.deepcopy(model_config)
    settings = shortened.get_text_config()
    settings.num_hidden_layers = num_layers
    if getattr(settings, "layer_types", None):
        settings.layer_types = settings.layer_types[:num_layers]
    return shortened


def _is_half(config: RecipeConfig) -> bool:
    return config.training.get("bf16") is not False or bool(config.training.get("fp16"))


def _build(config: RecipeConfig, model_config: PreTrainedConfig, dtype: str) -> Any:
    """Build the model that is trained, with its adapter; on the device ``meta``."""
    auto_class: Any = AutoModelForSequenceClassification if config.stage == "reward" else AutoModelForCausalLM
    named = (getattr(model_config, "dtype", None) or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    model = auto_class.from_config(model_config, dtype=named)
    if not config.adapter.use_peft:
        return model
    return add_adapter(model, config.adapter, seed=0, task_type="SEQ_CLS" if config.stage == "reward" else "CAUSAL_LM")


def _build_frozen(config: RecipeConfig, model_config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """Yield the models that learn nothing, by name; of an adapter's run its trunk."""
    if config.adapter.use_peft:
        dtype = getattr(torch, config.model.dtype, None) or getattr(model_config, "dtype", None)
        yield (
            "frozen weights",
            AutoModelForCausalLM.from_config(model_config, dtype=dtype),  # type: ignore[no-untyped-call]
        )
    elif _has_live_reference(config):
        yield "reference", _build(config, model_config, config.model.dtype)
    if config.stage == "distill":
        chosen = choose_teacher(config)
        yield "teacher", _build(config, load_model_config(chosen)[0], chosen.dtype)


def _count_stored(config: RecipeConfig, model: Any) -> int:
    quantized = count_quantized_bytes(model, config.quantization)
    return count_bytes(model) if quantized is None else quantized


def _count_gathered(model: Any) -> int:
    """Parameters that are whole at once: two layers, since the next is fetched while one computes, and the ends."""
    of_layers, ends = _split(model, list)
    return 2 * max(of_layers) + ends


def _count_largest(model: Any) -> int:
    """Parameters whose gradients are there before they are shared out: those of a layer, or of the ends."""
    of_layers, ends = _split(model, _learning)
    return max(*of_layers, ends)


def _split(model: Any, choose: Callable[[Iterable[Any]], list[Any]]) -> tuple[list[int], int]:
    """Parameters of each layer, and of what is not in a layer: embeddings, output projection, last norm."""
    of_layers = [sum(parameter.numel() for parameter in choose(layer.parameters())) for layer in _list_layers(model)]
    return of_layers, sum(parameter.numel() for parameter in choose(model.parameters())) - sum(of_layers)


def _list_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _learning(parameters: Iterable[Any]) -> list[Any]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _has_live_reference(config: RecipeConfig) -> bool:
    return config.stage == "dpo" and not config.read("precompute_ref_log_probs")


def _find_problems(config: RecipeConfig, num_processes: int, gpu: str | None, mfu: float) -> Iterator[Problem]:
    if config.tokens.max_length is None:
        found = "the length of the rows follows from the data, and a plan reads none"
        yield Problem("max_length", found, "write `max_length: ...`")
    if num_processes < 1:
        yield Problem("--num_processes", f"is {num_processes}", "write 1 or more")
    if not 0 < mfu <= 1:
        yield Problem("--mfu", f"is {mfu}", "write a share above 0, at most 1; 0.4 is usual")
    if gpu is not None:
        try:
            find_peak(gpu, config)
        except ConfigError as error:
            yield from error.problems
