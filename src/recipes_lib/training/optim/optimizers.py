"""Optimizers: Muon, AdamW with stochastic rounding, parameter groups, and requirements of each optimizer."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import ParamsT, StateDict
from transformers import TrainingArguments

from recipes_lib.config.rules import STOCHASTIC_ADAMW, loses_updates
from recipes_lib.config.schema import RecipeConfig, read_training
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.training.layouts.compatibility import BITSANDBYTES

_DROPPED_BITS = 16
"""Bits of a float32 that a bfloat16 lacks: bfloat16 is its upper half."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAX_PARAMETERS = 2**20
"""Upper bound of the number of tensors of a model; the seeds of consecutive steps differ by it."""


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round ``values`` stochastically to bfloat16, so that the expectation equals the value.

    Args:
        values: ``float32``, finite, of any shape. Values that bfloat16 represents do not change.
        generator: On the device of ``values``.

    Source: Gupta et al. 2015, section 2.1; as torchao's ``_fp32_to_bf16_sr``. The expectation and its standard error
    are measured in ``tests/training/optim/test_stochastic_rounding.py``.
    """
    noise = torch.randint(2**_DROPPED_BITS, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    # A carry out of the dropped bits, with probability of their fraction, increments the magnitude by one ulp.
    bits: torch.Tensor = (values.view(torch.int32) + noise) & -(2**_DROPPED_BITS)
    return bits.view(torch.float32).to(torch.bfloat16)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW for bfloat16 weights, with float32 arithmetic and stochastic rounding; other weights are not rounded.

    A bfloat16 weight and gradient and two float32 moments take 12 bytes, instead of 16 with float32 weights. The noise
    is a function of step and tensor, so replicas stay equal and a resumed run is bit-identical. Parameters must not be
    sharded. torchao's optimizers (0.18) instead store the moments of bfloat16 weights in bfloat16 or fewer bits, and
    draw noise from the global generator, whose state may differ between ranks.

    Source: Loshchilov and Hutter 2019, algorithm 2; equal to ``torch.optim.AdamW`` on float32 weights in
    ``tests/training/optim/test_stochastic_rounding.py``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter that has a gradient; return what ``closure`` returns."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        owned = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for index, (parameter, group) in enumerate(owned, start=1):
            if parameter.grad is not None:
                self._update(parameter, index, group)
        return loss

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a saved state; torch alone would cast the moments to the dtype of the weights."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter = parameters[index]
            self.state[parameter] |= {name: saved[name].to(parameter.device) for name in _MOMENTS}

    def _update(self, parameter: torch.Tensor, index: int, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state |= {"step": 0} | {name: torch.zeros_like(parameter, dtype=torch.float32) for name in _MOMENTS}
        state["step"] += 1
        (beta1, beta2), step = group["betas"], state["step"]
        # Algorithm 2 with decoupled decay in float32; weights are rounded only once, after the update.
        gradient, (mean, square) = parameter.grad.float(), (state[name] for name in _MOMENTS)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weights = parameter.float() * (1 - group["lr"] * group["weight_decay"])
        scale = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weights.addcdiv_(mean, scale, value=-group["lr"] / (1 - beta1**step))
        if parameter.dtype == torch.bfloat16:
            # One seed per step and tensor: replicas and resumed runs draw the same noise.
            generator = torch.Generator(parameter.device).manual_seed(step * _MAX_PARAMETERS + index)
            weights = round_stochastically(weights, generator)
        parameter.copy_(weights)


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon and AdamW as one optimizer, so that schedulers, scalers and accelerate see one.

    The entry ``optimizer`` of each group is ``Muon`` or ``AdamW``. Muon's updates are scaled to the root mean square of
    AdamW's, so both share one learning rate and weight decay. States are those of the two optimizers: momentum (Muon),
    two moments and step (AdamW).

    Source: Jordan et al. 2024 (Muon); Liu et al. 2025 (Muon is scalable for LLM training), section 2.2, the scale
    ``0.2 sqrt(max(rows, columns))``; numpy's singular values in ``tests/training/optim/test_muon.py``.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """Build both optimizers.

        Args:
            matrices: Two-dimensional parameters, updated by Muon.
            others: Parameter groups of AdamW, with ``params`` and ``weight_decay``.
            lr: Learning rate of both optimizers.
            weight_decay: Weight decay of ``matrices``.
            betas: Coefficients of AdamW's moments.
            eps: Epsilon of AdamW.
        """
        self._owners: dict[str, torch.optim.Optimizer] = {
            "Muon": torch.optim.Muon(
                [{"params": matrices}], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            "AdamW": torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps),
        }
        # Schedulers and accelerate modify the groups of this optimizer, which are copies; ``step`` passes them back.
        groups = [group | {"optimizer": name} for name, owner in self._owners.items() for group in owner.param_groups]
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter that has a gradient; return what ``closure`` returns."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for name, owner in self._owners.items():
            # ``load_state_dict`` and sharding replace groups, states and parameters of this optimizer.
            owner.state = self.state
            owner.param_groups = [group for group in self.param_groups if group["optimizer"] == name]
            owner.step()
        return loss


# Lower-case names of biases, norms, and the logarithms of decay rates, ``A_log``, of Mamba and Kimi Linear.
_WITHOUT_DECAY: Final = re.compile(r"bias|layernorm|rmsnorm|(?:^|[._])norm(?:$|\.)|\ba_log$")

_PACKAGES: Final[tuple[tuple[str, str, str], ...]] = (
    ("bitsandbytes", "pip install bitsandbytes", " ".join(BITSANDBYTES)),
    ("torchao", "pip install torchao", "adamw_torch_4bit adamw_torch_8bit"),
    ("schedulefree", "pip install schedulefree", "schedule_free_radam schedule_free_adamw schedule_free_sgd"),
    ("galore_torch", "pip install galore-torch", "galore_adamw galore_adamw_8bit galore_adafactor"),
    ("apollo_torch", "pip install apollo-torch", "apollo_adamw"),
    ("grokadamw", "pip install grokadamw", "grokadamw"),
    ("optimi", "pip install torch-optimi", "stable_adamw"),
    ("torchdistx", "pip install git+https://github.com/pytorch/torchdistx", "adamw_anyprecision"),
    ("torch_xla", "pip install torch_xla", "adamw_torch_xla"),
    ("torch_npu", "pip install torch_npu", "adamw_torch_npu_fused"),
)
"""Required module, its installation command, and the values of ``optim`` that need it."""

_IN_BACKWARD: Final = ("lomo", "_layerwise")
"""Suffixes of values of ``optim`` that update weights during the backward pass."""

_FLATTENED: Final = "this rank's partition of DeepSpeed's flattened parameters"

_WITHOUT_RESUME: Final = ("galore", "apollo", "grokadamw")
"""Prefixes of values of ``optim`` whose state cannot be restored from a checkpoint: it contains objects that
``weights_only`` rejects, or is not in ``state_dict``."""

_ARGUMENTS: Final[Mapping[str, str]] = {
    "sgd": "momentum dampening weight_decay nesterov",
    "adagrad": "lr_decay weight_decay eps",
    "rmsprop_bnb": "",
    "rmsprop": "momentum alpha eps weight_decay centered",
    "ademamix": "beta1 beta2 beta3 alpha eps t_alpha t_beta3",
    "adamw_torch_4bit": "bf16_stochastic_round",
    "adamw_torch_8bit": "bf16_stochastic_round",
    "adamw_anyprecision": "use_kahan_summation momentum_dtype variance_dtype compensation_buffer_dtype",
    "galore": "rank update_proj_gap scale proj_type",
    "apollo": "rank proj scale_type update_proj_gap scale proj_type",
    "grokadamw": "alpha_init lamb gamma grokking_signal_decay_rate gradient_clipping",
    "schedule_free": "weight_lr_power r",
    "stable_adamw": "max_lr kahan_sum decouple_lr",
}
"""Prefix of values of ``optim`` -> names in ``optim_args`` that transformers reads; it ignores all others."""
_NUMBER: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?", re.IGNORECASE)
_TEXT_ARGUMENTS: Final = re.compile(
    r"nesterov|centered|bf16_stochastic_round|proj\w*|scale_type|.*_dtype|.*kahan.*|decouple_lr"
)
"""Names in ``optim_args`` whose values are not numbers."""


def get_decay_names(model: nn.Module, *, decay_embeddings: bool) -> list[str]:
    """Return the names of the parameters with weight decay: matrices, and optionally embeddings.

    Biases and norms never decay, nor does ``A_log`` of Mamba, which is no matrix, as in its authors' code. A tied
    embedding is listed once, as in ``named_parameters``.

    Args:
        model: The model, wrapped or not.
        decay_embeddings: Whether input, position and output embeddings decay.

    Source: transformers ``Trainer.get_decay_parameter_names``, which also decays embeddings, norms of unknown names and
    ``A_log``; ``tests/training/optim/test_optimizers.py``.
    """
    embeddings = _find_embeddings(model)
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2
        and not _WITHOUT_DECAY.search(name.lower())
        and (decay_embeddings or id(parameter) not in embeddings)
    ]


def group_by_decay(
    parameters: Mapping[str, nn.Parameter], decaying: Set[str], weight_decay: float
) -> list[dict[str, Any]]:
    """Return two parameter groups: those with ``weight_decay``, whose names are in ``decaying``, and the others."""
    return [
        {"params": [each for name, each in parameters.items() if (name in decaying) is decays], "weight_decay": decay}
        for decays, decay in ((True, weight_decay), (False, 0.0))
    ]


def build_muon(model: nn.Module, args: TrainingArguments, *, decay_embeddings: bool) -> MuonAdamW:
    """Build Muon for the hidden matrices of a model and AdamW for the other trained parameters.

    Muon updates two-dimensional parameters except embeddings. Stacked experts and convolutions have three dimensions:
    orthogonalising them needs a batched or reshaped iteration, which torch's Muon lacks, so AdamW updates them. A fused
    matrix, such as GPT-2's ``c_attn`` of queries, keys and values, is orthogonalised as one matrix.

    Args:
        model: The model to train, wrapped or not.
        args: Learning rate, weight decay, and AdamW's betas and epsilon.
        decay_embeddings: As ``get_decay_names``.
    """
    embeddings = _find_embeddings(model)
    decaying = set(get_decay_names(model, decay_embeddings=decay_embeddings))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    matrices = {
        name: parameter
        for name, parameter in trained.items()
        if parameter.ndim == 2 and name in decaying and id(parameter) not in embeddings
    }
    others = {name: parameter for name, parameter in trained.items() if name not in matrices}
    return MuonAdamW(
        list(matrices.values()),
        group_by_decay(others, decaying, args.weight_decay),
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )


def split_loraplus_groups(optimizer: torch.optim.Optimizer, model: nn.Module, ratio: float) -> None:
    """Multiply the learning rate of the B matrices of low-rank adapters by ``ratio``, in separate groups.

    Works with any optimizer; weight decay is unchanged. The optimizer must not have stepped yet.

    Args:
        optimizer: Optimizer not yet prepared by accelerate; changed in place.
        model: The model it trains, which provides parameter names.
        ratio: Value of ``loraplus_lr_ratio``.

    Source: Hayou et al. 2024 (LoRA+), section 4; ``tests/training/optim/test_optimizers_loraplus.py``. PEFT's
    ``create_loraplus_optimizer`` is not used: it builds new groups with its own rule of weight decay.
    """
    is_b = {id(parameter) for name, parameter in model.named_parameters() if ".lora_B." in name}
    split_groups(optimizer, is_b, lambda group: {"lr": group["lr"] * ratio})


def split_groups(
    optimizer: torch.optim.Optimizer, moved: Set[int], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Move parameters into new groups, which inherit the options of their previous groups.

    Args:
        optimizer: Optimizer that has not stepped and is not yet prepared by accelerate; changed in place.
        moved: ``id`` of each parameter to move.
        change: Maps the options of a previous group to those options of the new group that differ.
    """
    for group in list(optimizer.param_groups):
        own = [parameter for parameter in group["params"] if id(parameter) in moved]
        if own:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in moved]
            optimizer.add_param_group({**group, "params": own, **change(group)})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """Description of a parameter group of an optimizer.

    Attributes:
        optimizer: Name of the optimizer class that updates it.
        num_tensors: Number of parameter tensors.
        num_parameters: Number of scalar parameters.
        weight_decay: Weight decay, before multiplication by the learning rate.
        learning_rate: Peak learning rate of the schedule.
        parameters: Distinct parameter names, with ``*`` in place of layer numbers.
    """

    optimizer: str
    num_tensors: int
    num_parameters: int
    weight_decay: float
    learning_rate: float
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        """A log line: ``AdamW: 124,318,464 parameters in 50 tensors, weight decay 0.1, rate 6.0e-04``."""
        size = f"{self.num_parameters:,} parameters in {self.num_tensors} tensors"
        return f"{self.optimizer}: {size}, weight decay {self.weight_decay:g}, rate {self.learning_rate:.1e}"


def describe_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[GroupRow]:
    """Return one row per non-empty parameter group.

    Args:
        optimizer: An optimizer, prepared by accelerate or not.
        model: The model it trains, which provides parameter names.
    """
    names = {id(parameter): re.sub(r"\.\d+\.", ".*.", name) for name, parameter in model.named_parameters()}
    inner = getattr(optimizer, "optimizer", optimizer)
    return [
        GroupRow(
            optimizer=group.get("optimizer", type(inner).__name__),
            num_tensors=len(parameters),
            num_parameters=sum(parameter.numel() for parameter in parameters),
            weight_decay=group["weight_decay"],
            learning_rate=group.get("initial_lr", group["lr"]),
            parameters=tuple(dict.fromkeys(names.get(id(parameter), _FLATTENED) for parameter in parameters)),
        )
        for group in inner.param_groups
        if (parameters := group["params"])
    ]


def warn_of_rounding(dtypes: Iterable[torch.dtype], optim: str, optim_args: str | None) -> Iterator[str]:
    """Yield a warning if trained weights have 16 bits, and their optimizer does not round stochastically.

    Args:
        dtypes: Dtypes of the trained weights.
        optim: Key of the recipe.
        optim_args: Key of the recipe.
    """
    if any(loses_updates(str(dtype).removeprefix("torch."), optim, optim_args) for dtype in dtypes):
        yield (
            "warning: trained weights have 16 bits, so that most updates, in bfloat16 those below 1/512 of a weight, "
            "are rounded to 0: write `dtype: float32` (`bf16` computes in bfloat16 anyway), or train an adapter"
        )


def report_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, args: TrainingArguments) -> Iterator[str]:
    """Yield a log line for each parameter group, and the warning of ``warn_of_rounding``.

    Args:
        optimizer: As for ``describe_groups``.
        model: As for ``describe_groups``.
        args: Arguments of the trainer.
    """
    rows = describe_groups(optimizer, model)
    yield from map(str, rows)
    # Of the optimizer's tensors: DeepSpeed trains a model of 16 bits by copies in float32.
    dtypes = (parameter.dtype for group in optimizer.param_groups for parameter in group["params"])
    if rows:  # The groups of ZeRO-3 are empty.
        # ``args`` has another optimizer in place of one that upstream does not have.
        optim = STOCHASTIC_ADAMW if rows[0].optimizer == StochasticAdamW.__name__ else args.optim
        yield from warn_of_rounding(dtypes, optim, args.optim_args)


def plan_groups(model: nn.Module, config: RecipeConfig) -> list[GroupRow]:
    """Return the parameter groups of a run without building its optimizer.

    Args:
        model: The model to train, possibly on the meta device.
        config: The run.
    """
    optim, rate = str(config.read("optim")), config.read("learning_rate")
    decay, decay_embeddings = config.read("weight_decay"), config.pretraining.decay_embeddings
    if optim == "muon":
        keys = ("adam_beta1", "adam_beta2", "adam_epsilon", "learning_rate", "weight_decay")
        settings: Any = SimpleNamespace(**{key: config.read(key) for key in keys})
        return describe_groups(build_muon(model, settings, decay_embeddings=decay_embeddings), model)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = group_by_decay(trained, set(get_decay_names(model, decay_embeddings=decay_embeddings)), decay)
    # SGD only holds the groups; no optimizer allocates state before its first step.
    optimizer = torch.optim.SGD([group for group in groups if group["params"]], lr=rate)
    return [replace(row, optimizer=optim) for row in describe_groups(optimizer, model)]


def verify_optimizer(config: RecipeConfig, *, is_installed: bool = False) -> None:
    """Raise for an optimizer that is not installed, or that is incompatible with other keys.

    Args:
        config: The recipe.
        is_installed: Whether to assume that its package is installed, as on the machine of the run.

    Raises:
        ConfigError: A package is missing; the optimizer requires another key or ignores one; its state cannot be
            restored from checkpoints; or it updates weights during the backward pass.
    """
    # Pretraining has its own schedule; upstream's warm-up is disabled there.
    training = {**config.training, **({"warmup_steps": 0} if config.recipe == "pretrain" else {})}
    optim = str(read_training(training, "optim"))
    problems = [] if is_installed else [*_find_missing_packages(optim)]
    if problems := [*problems, *_find_problems(optim, training)]:
        raise ConfigError(*problems)


def _find_missing_packages(optim: str) -> Iterator[Problem]:
    for module, command, names in _PACKAGES:
        if optim in names.split() and importlib.util.find_spec(module) is None:
            yield Problem("optim", f"{optim} needs the package {module}, which is not installed", command)


def _find_problems(optim: str, training: Mapping[str, Any]) -> Iterator[Problem]:
    if optim.endswith(_IN_BACKWARD):
        found = f"{optim} updates weights during the backward pass, before accumulation, clipping and the guards"
        yield Problem("optim", found, "use adafactor or an 8-bit optimizer to save memory")
        return
    if optim.startswith(_WITHOUT_RESUME) and read_training(training, "save_strategy") != "no":
        found = f"a run with {optim} cannot resume from a checkpoint"
        yield Problem("optim", found, "write save_strategy: 'no', or use another optimizer")
    if optim.startswith(("galore", "apollo")) and not training.get("optim_target_modules"):
        found = f"{optim} needs the names of the matrices that it projects"
        yield Problem("optim_target_modules", found, "write optim_target_modules: all-linear")
    if optim.startswith(("galore", "apollo")) and training.get("weight_decay"):
        found = f"transformers does not pass weight_decay to {optim}"
        yield Problem("weight_decay", found, "write weight_decay: 0, or use another optimizer")
    if optim.startswith("schedule_free") and read_training(training, "lr_scheduler_type") != "constant":
        found = f"{optim} averages weights instead of lowering the learning rate"
        yield Problem("lr_scheduler_type", found, "write lr_scheduler_type: constant")
    # The package divides the first steps by this number: 0.01 would multiply the first learning rate by 100.
    if optim.startswith("schedule_free") and 0 < read_training(training, "warmup_steps") < 1:
        yield Problem("warmup_steps", f"{optim} takes a number of steps, not a fraction", "write a whole number, or 0")
    yield from _find_argument_problems(optim, str(training.get("optim_args") or ""))


def _find_argument_problems(optim: str, text: str) -> Iterator[Problem]:
    # The first prefix: "rmsprop_bnb" precedes "rmsprop".
    name = optim.removeprefix("paged_")
    known = next((names for prefix, names in _ARGUMENTS.items() if name.startswith(prefix)), "").split()
    for entry in text.replace(" ", "").split(",") if text else ():
        argument, _, value = entry.partition("=")
        is_valid = _TEXT_ARGUMENTS.fullmatch(argument) or _NUMBER.fullmatch(value)
        if argument not in known:
            remedy = f"write {', '.join(known)}" if known else "delete the line"
            found = f"{optim} takes no argument {argument!r}" if known else f"{optim} takes no arguments"
            yield Problem("optim_args", found, remedy)
        elif not value or not is_valid:
            kind = "value" if _TEXT_ARGUMENTS.fullmatch(argument) else "number"
            yield Problem("optim_args", f"{entry!r} does not give a {kind}", f"write {argument}= and a {kind}")


def _find_embeddings(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of input, position and output embeddings."""
    embeddings = {module for module in model.modules() if isinstance(module, nn.Embedding)}
    heads: Any = {getattr(module, "get_output_embeddings", lambda: None)() for module in model.modules()} - {None}
    return {id(parameter) for module in embeddings | heads for parameter in module.parameters()}
