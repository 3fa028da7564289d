"""Faster layers: regional torch.compile, and Liger's fused norms, rotary embeddings and MLPs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils.import_utils import is_liger_kernel_available

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.hardware import INSTALL_COMPILER, find_compiler_obstacle, find_extension_obstacle
from recipes_lib.models.inference import unwrap_adapter
from recipes_lib.models.structure import find_layers
from recipes_lib.planning.compute import RL_RECIPES
from recipes_lib.quantities import pluralize
from recipes_lib.training.layouts.launch_environment import Launch
from recipes_lib.training.monitoring.progress import TrainingProgress

_CROSS_ENTROPIES: Final = ("cross_entropy", "fused_linear_cross_entropy")


def choose_compilation(config: RecipeConfig, launch: Launch, *, is_cuda: bool) -> dict[str, Any] | None:
    """Return the options of ``nn.Module.compile`` for the layers; ``None``: eager execution.

    If ``torch_compile`` is not set, two kinds of runs are compiled: pretraining on a GPU, if kernels can be compiled
    (``find_compiler_obstacle``); and fp8, because torchao's uncompiled 8-bit products are slower than bf16.

    Args:
        config: The recipe: ``torch_compile``, ``torch_compile_backend``, ``torch_compile_mode``.
        launch: The launch; under tensor, context and pipeline parallelism, the default is not to compile.
        is_cuda: Whether the run is on a GPU.

    Raises:
        ConfigError: fp8 with ``torch_compile: false``; or torch has no such backend or mode.
    """
    training, is_fp8 = config.training, launch.precision == "fp8"
    given = {name: training[key] for name in ("backend", "mode") if training.get(key := f"torch_compile_{name}")}
    is_compiled = training.get("torch_compile")
    if is_compiled is None:
        is_supported = is_cuda and _has_whole_layers(launch) and not find_compiler_obstacle()
        is_default = is_supported and config.recipe == "pretrain"
        is_compiled = is_default or is_fp8 or bool(given)
    if is_fp8 and not is_compiled:
        found = "fp8 without torch.compile is slower than bf16"
        raise ConfigError(Problem("torch_compile", found, "delete the line, or use another launch file"))
    if not is_compiled:
        return None
    for name, value in given.items():
        try:
            torch.compile(_count_graphs, **{name: value})  # Compiles nothing before the first call.
        except RuntimeError as error:
            found, remedy = str(error).splitlines()[0], f"delete the line: torch's default {name} suits most models"
            raise ConfigError(Problem(f"torch_compile_{name}", found, remedy)) from error
    return given


def verify_compiler(compilation: Mapping[str, Any] | None, launch: Launch) -> None:
    """Verify that this machine can compile the kernels of a run, and DeepSpeed's optimizer on the host.

    Args:
        compilation: Options from ``choose_compilation``.
        launch: Launch of the run.

    Raises:
        ConfigError: It cannot.
    """
    uses_inductor = compilation is not None and compilation.get("backend") in (None, "inductor")
    if uses_inductor and (obstacle := find_compiler_obstacle()):
        found = f"its kernels cannot be compiled: this machine has {obstacle}"
        raise ConfigError(Problem("torch_compile", found, f"{INSTALL_COMPILER}, or train without torch.compile"))
    if launch.layout.offloads_optimizer and (obstacle := find_extension_obstacle()):
        found = f"DeepSpeed cannot compile its optimizer: this machine has {obstacle}"
        remedy = f"{INSTALL_COMPILER}, or use a launch file without offload"
        raise ConfigError(Problem("offload_optimizer_device", found, remedy))


def choose_liger(config: RecipeConfig, launch: Launch, *, is_cuda: bool) -> dict[str, Any]:
    """Return upstream's ``use_liger_kernel`` and ``liger_kernel_config``; the default is Liger where it is supported.

    The default in compiled layers is not to use it: Inductor fuses the same operations, and Liger's kernels break its
    graphs (11 % slower on an H200: docs/results_gpu.md). Liger's cross-entropies are always disabled: the loss head
    computes the loss without full logits.

    Args:
        config: The recipe.
        launch: The launch; under tensor, context and pipeline parallelism the kernels are not used.
        is_cuda: Whether the run is on a GPU.

    Raises:
        ConfigError: ``use_liger_kernel: true`` on a GPU without the package or a compiler, or a cross-entropy is
            enabled.
    """
    requested, options = config.training.get("use_liger_kernel"), dict(config.training.get("liger_kernel_config") or {})
    problems = [
        Problem("liger_kernel_config", f"`{name}` would replace the loss head", f"delete `{name}`")
        for name in _CROSS_ENTROPIES
        if options.get(name)
    ]
    is_installed, obstacle = is_liger_kernel_available(), find_compiler_obstacle()
    # On a CPU they are silently disabled: they change speed on a GPU, not results.
    if requested and is_cuda and not is_installed:
        found = "it needs the package liger-kernel, which is not installed"
        problems.append(Problem("use_liger_kernel", found, "pip install liger-kernel"))
    elif requested and is_cuda and obstacle:
        found = f"Triton cannot compile its kernels: this machine has {obstacle}"
        problems.append(Problem("use_liger_kernel", found, INSTALL_COMPILER))
    if problems:
        raise ConfigError(*problems)
    is_supported = is_cuda and is_installed and not obstacle and _has_whole_layers(launch)
    if requested is None:
        requested = choose_compilation(config, launch, is_cuda=is_cuda) is None
    if not requested or not is_supported or config.recipe in RL_RECIPES:
        return {"use_liger_kernel": False, "liger_kernel_config": None}
    return {"use_liger_kernel": True, "liger_kernel_config": options | dict.fromkeys(_CROSS_ENTROPIES, False)}


@contextmanager
def preserve_architecture(model: nn.Module) -> Iterator[None]:
    """Context after which a model, and new models of its architecture, compute by transformers' own code, uncompiled.

    Liger replaces methods of layers, and classes and functions in transformers' modules. A model that is loaded later,
    such as the base on which a saved adapter is verified, would fail on a CPU; and by other kernels, logits of a model
    with 32 layers differ by more than a damaged file would explain.
    """
    names = {type(module).__module__ for module in model.modules()}
    before = {name: dict(vars(sys.modules[name])) for name in names if name.startswith("transformers.models.")}
    try:
        yield
    finally:
        for name, members in before.items():
            vars(sys.modules[name]).update(members)
        for module in model.modules():
            vars(module).pop("_compiled_call_impl", None)
            for name, member in [*vars(module).items()]:
                if str(getattr(member, "__module__", "")).startswith("liger_kernel"):
                    delattr(module, name)


def _has_whole_layers(launch: Launch) -> bool:
    """Whether each rank computes all layers, tokens and tensors of its rows (no model parallelism)."""
    return launch.tensor_size == launch.context_size == launch.layout.pipeline_stages == 1


def compile_layers(model: Any, options: Mapping[str, Any]) -> int:
    """Compile each layer of a model in place (regional compilation); return the number of layers.

    Identical layers share one compilation, which is much faster than compiling the whole model, and code outside of
    layers (embedding, masks, loss head) causes no graph breaks. Parameter names do not change.

    Args:
        model: A causal language model, with or without an adapter.
        options: Keyword arguments of ``nn.Module.compile``.

    Raises:
        ConfigError: The layers are not in one ``nn.ModuleList``.
    """
    layers = find_layers(unwrap_adapter(model))
    # Under DDP, torch would split each layer at the buckets of gradients, so that their reduction overlaps with the
    # backward pass. It does without: the layers before are graphs of their own.
    torch._dynamo.config.optimize_ddp = False
    # All layers share one limit, above which torch runs them eagerly. Gemma 3 has two kinds of layers, each with and
    # without gradients, adapters and gradients of its input, and for one or any length: 12 graphs.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    for layer in layers:
        layer.compile(**options)
    return len(layers)


def match_kernels(frozen: Iterable[Any], trained: Any, args: TrainingArguments) -> None:
    """Compile frozen models like the trained one, and replace their layers by Liger's kernels if it has them; in place.

    A reference that equals the policy must have equal log-probabilities in the first step. By other kernels, those of
    32 layers in bfloat16 differ by more than ``compute_rounding`` allows. Models of another architecture are unchanged:
    their results are not expected to be equal.

    Args:
        frozen: Reference, base or teacher models.
        trained: Trained model.
        args: Options of ``choose_compilation`` and ``choose_liger``.

    Source: ``tests/training/optim/test_compilation.py``.
    """
    compilation = getattr(args, "compilation", None)
    for model in frozen:
        if model.config.model_type != trained.config.model_type:
            continue
        if args.use_liger_kernel:
            apply_liger_kernel(model, args.liger_kernel_config)  # type: ignore[no-untyped-call]
        if compilation is not None:
            compile_layers(model, compilation)


class Compilation(TrainerCallback):
    """Compiles layers, and logs the number of their graphs after the first step: torch falls back to eager silently."""

    def __init__(self, model: Any, options: Mapping[str, Any], progress: TrainingProgress) -> None:
        """Compile the layers of a model, as ``compile_layers``, and start counting.

        Args:
            model: As for ``compile_layers``.
            options: As for ``compile_layers``.
            progress: Receives the log line.

        Raises:
            ConfigError: As ``compile_layers``.
        """
        # Graphs of an earlier run in this process would count towards the limit, and those reused would not be counted.
        torch.compiler.reset()
        self._num_layers, self._progress = compile_layers(model, options), progress
        self._before: int | None = _count_graphs()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the number after the first step."""
        if self._before is not None:
            compiled = _count_graphs() - self._before
            self._before = None
            found = pluralize(compiled, "graph") if compiled else "no graph: torch fell back to eager mode"
            self._progress.say(f"torch.compile of {self._num_layers} layers made {found}")


def _count_graphs() -> int:
    # Not ``frames``: a frame whose graph break is inside of a checkpoint counts there, and runs in eager mode.
    number: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return number
