"""GPU memory of a run by component, counted from architecture, stage and layout: no weights, data or GPU.

``plan_memory`` names what one process holds, in bytes. Models are built on the device ``meta`` as training builds them;
what a backward pass needs is counted in a forward pass on tensors without memory.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from recipes_lib.config.schema import ModelConfig, RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.losses.projection import CHUNK_BYTES
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.adapters.roles import CRITIC, REWARD, add_critic, add_reward
from recipes_lib.models.adapters.saved import find_adapter, find_shareable, read_base
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.models.inference import unwrap_adapter
from recipes_lib.models.loading import choose_teacher, load_model_config
from recipes_lib.models.quantization import count_quantized_bytes
from recipes_lib.planning.compute import PAIR_STAGES, device_memory, has_live_reference
from recipes_lib.planning.disk import count_state_bytes

SAMPLING_BYTES: Final = 44
"""Of each logit while a token is sampled: logits, their softmax in single and double precision, its sum, the choice."""
SHARE_OF_DEVICE: Final = 0.9
"""What of a device a run may fill; the rest is the allocator's and the driver's."""
_USUAL_GB: Final = (24, 48, 80, 141, 192)
_CHUNK: Final = 4 * CHUNK_BYTES
"""Bytes of a chunk of logits: the logits, their copy in 16 bits, exponentials, products."""
_KINDS: Final = ("weights", "gradients", "optimizer states")

_ACTIVATIONS: Final = "activations of a micro-batch"
_LOGITS: Final = "logits of a chunk"
_CACHE: Final = "KV cache of a batch"
_SAMPLED: Final = "logits of a batch"
_LAYER: Final = "a layer of a batch"
_GATHERED: Final = "gathered for {}"
_PHASES: Final[Mapping[str, Sequence[str]]] = {
    "sampling": (_GATHERED.format("sampling"), _CACHE, _SAMPLED, _LAYER),
    "scoring": (_GATHERED.format("scoring"), _LAYER),
    "reading": (_GATHERED.format("a layer"), _LAYER, _LOGITS),
    "policy's update": (_GATHERED.format("a layer"), _ACTIVATIONS, "policy, gradients", _LOGITS),
    "critic's update": (_GATHERED.format("a layer"), _ACTIVATIONS, "critic, gradients"),
}
"""Phases of an iteration of PPO, and what each holds besides all that none of them names."""


class Held(NamedTuple):
    """Bytes of a model, or of what stands for it on another's base model; or how many processes share each of them."""

    weights: int = 0
    gradients: int = 0
    states: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """How the processes of a run hold its models.

    Attributes:
        launch_file: Of ``accelerate_configs/``.
        num_processes: Data-parallel processes, a GPU each.
        shards: Processes that share weights, gradients and optimizer states; 1: each process holds all of them.
    """

    launch_file: str
    num_processes: int = 1
    shards: Held = Held(1, 1, 1)  # noqa: RUF009 - immutable

    def __str__(self) -> str:
        is_sharded = self.shards.weights > 1
        how = f"shared by {self.num_processes} processes" if is_sharded else "a copy of everything on each process"
        return f"accelerate_configs/{self.launch_file}.yaml: {how}"


def list_layouts(config: RecipeConfig, num_processes: int) -> Iterator[Layout]:
    """Yield the layouts that a run of so many processes may have."""
    yield Layout("ddp" if num_processes > 1 else "single_gpu", num_processes)
    # Models of PPO that share a base model are not sharded (``training.layouts.compatibility``).
    if num_processes > 1 and not (config.stage == "ppo" and config.adapter.use_peft):
        yield Layout("fsdp2", num_processes, Held(num_processes, num_processes, num_processes))


def list_devices(gpu: str | None) -> dict[str, float]:
    """Return the bytes of a GPU by name; ``None``: of the usual sizes.

    Raises:
        ConfigError: The memory of the GPU is not known.
    """
    if gpu is None:
        return {f"{size} GB": size * 1e9 for size in _USUAL_GB}
    if (memory := device_memory(gpu)) is None:
        found = f"the memory of {gpu!r} is not known"
        raise ConfigError(Problem("--gpu", found, "write a name as `nvidia-smi -L` has it, or a size such as 80GB"))
    return {gpu: memory}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one process.

    Attributes:
        layout: How the processes hold the models.
        about: Which models share a base model, in words; may be empty.
        components: Bytes by name.
        phases: Components by phase; those that no phase names are held in each. Without phases all are held at once.
    """

    layout: Layout
    about: str
    components: Mapping[str, int]
    phases: Mapping[str, Sequence[str]]

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes of each phase."""
        temporary = {name for names in self.phases.values() for name in names}
        resident = sum(size for name, size in self.components.items() if name not in temporary)
        return {
            phase: resident + sum(self.components.get(name, 0) for name in names)
            for phase, names in (self.phases or {"": ()}).items()
        }

    @property
    def peak(self) -> int:
        """Bytes of the largest phase."""
        return max(self.peaks.values())

    def fits(self, device_bytes: float) -> bool:
        """Return whether a device of this size holds the run, with some room for the allocator."""
        return self.peak <= SHARE_OF_DEVICE * device_bytes

    def describe(self, devices: Mapping[str, float]) -> Iterator[str]:
        """Yield layout, components, phases and which of ``devices`` fit, line by line, in units of 10^9 bytes."""
        yield str(self.layout)
        if self.about:
            yield f"    {self.about}"
        yield from (f"{size / 1e9:13.2f} GB  {name}" for name, size in self.components.items())
        if self.phases:
            yield "    at once, with weights and optimizer states:"
            yield from (f"{size / 1e9:13.2f} GB  {name}" for name, size in self.peaks.items())
        fitting = [name for name, size in devices.items() if self.fits(size)]
        verdict = f"fits {', '.join(fitting)}" if fitting else f"does not fit {', '.join(devices)}"
        yield f"    {self.peak / 1e9:.1f} GB {'at most' if self.phases else 'with all of it at once'}: {verdict}"


def plan_memory(
    config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, *, is_half: bool | None = None
) -> MemoryPlan:
    """Count the memory of one process of a run, of which nothing is loaded.

    Args:
        config: The run.
        model_config: Of the model that is trained.
        layout: How its processes hold the models.
        is_half: Whether products are in 16 bits by autocast; ``None``: unless the recipe says ``bf16: false``.

    Raises:
        ConfigError: The adapter does not fit the model, or the teacher's configuration cannot be had.

    Source: closed forms in ``tests/planning/test_memory.py``; PPO, counted on real models, in
    ``tests/rl/test_memory.py``.
    """
    if is_half is None:
        is_half = config.training.get("bf16") is not False or bool(config.training.get("fp16"))
    about, models, temporary = (_count_ppo if config.stage == "ppo" else _count_trainer)(
        config, model_config, layout, is_half
    )
    held = {
        f"{name}, {kind}": size // shards
        for name, model in models.items()
        for kind, size, shards in zip(_KINDS, model, layout.shards, strict=True)
    }
    components = {name: size for name, size in (held | temporary).items() if size}
    return MemoryPlan(layout, about, components, _PHASES if config.stage == "ppo" else {})


_Counted = tuple[str, dict[str, Held], dict[str, int]]
"""Which models share a base model, in words; the bytes of each model in all; what a process holds besides, by name."""


def _count_trainer(config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, is_half: bool) -> _Counted:
    """Count a stage that upstream's trainer runs: one model is trained, others are read."""
    is_reward = config.stage == "reward"
    with torch.device("meta"):
        kind = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
        model = _build(kind, model_config, config.model.dtype)
        if config.adapter.use_peft:
            model = add_adapter(model, config.adapter, seed=0, task_type="SEQ_CLS" if is_reward else "CAUSAL_LM")
        frozen = dict(_build_frozen(config, model_config))
    trained = _count_trained(_find_trained(model), config)
    models = {"model": trained, **{name: Held(_count_stored(config, other)) for name, other in frozen.items()}}
    temporary = {}
    if layout.shards.gradients == 1 < layout.num_processes:
        temporary["buckets in which gradients are summed"] = trained.gradients
    if layout.shards.weights > 1:
        parts = map(_count_parts, (model, *frozen.values()))
        # The next layer is fetched while one computes.
        gathered = max(2 * max(layers) + ends for layers, ends in parts)
        width = _count_width(config, model_config, is_half)
        temporary["gathered: two layers, embeddings and output projection"] = width * gathered
        layers, ends = _count_parts(model, _find_trained)
        temporary["gradients before they are reduced"] = 4 * max(*layers, ends)
    elif is_half:
        copied = sum(parameter.numel() for parameter in model.parameters() if parameter.dtype == torch.float32)
        temporary["16-bit copies of the weights in a pass"] = 2 * copied
    temporary[_ACTIVATIONS] = count_kept(config, model_config, is_half=is_half)
    temporary[_LOGITS] = 0 if is_reward else _CHUNK
    return "", models, temporary


def count_kept(config: RecipeConfig, model_config: PreTrainedConfig, *, is_half: bool) -> int:
    """Return the bytes that a micro-batch keeps for its backward pass, whoever holds the weights.

    Args:
        config: A run of a stage other than PPO.
        model_config: Of the model that is trained.
        is_half: As for ``plan_memory``.

    Raises:
        ConfigError: The adapter does not fit the model.
    """
    num_layers: int = model_config.get_text_config().num_hidden_layers
    # Below the first adapter nothing needs a gradient, so the first layer keeps less than the others.
    two, three = (_count_kept(config, _shorten(model_config, number), is_half) for number in (2, 3))
    return two + (num_layers - 2) * (three - two)


def _count_kept(config: RecipeConfig, model_config: PreTrainedConfig, is_half: bool) -> int:
    length: Any = config.tokens.max_length
    num_rows = config.read("per_device_train_batch_size") * (2 if config.stage in PAIR_STAGES else 1)
    with torch.device("meta"):
        # Weights have the precision of the products here, so that no copy of one counts.
        model = _build(AutoModelForCausalLM, model_config, "bfloat16" if is_half else config.model.dtype)
        add_loss_head(model)
        if config.adapter.use_peft:
            model = add_adapter(model, config.adapter, seed=0)
    with _on_fakes(model, is_half):
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


def _build_frozen(config: RecipeConfig, model_config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """Yield the models without gradients, by name; the base model under an adapter among them."""
    if config.adapter.use_peft:
        yield "frozen base", _build(AutoModelForCausalLM, model_config, config.model.dtype)
    elif has_live_reference(config):
        yield "reference", _build(AutoModelForCausalLM, model_config, config.model.dtype)
    if config.stage == "distill":
        teacher = choose_teacher(config)
        yield "teacher", _build(AutoModelForCausalLM, load_model_config(teacher)[0], teacher.dtype)


def _count_ppo(config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, is_half: bool) -> _Counted:
    """Count a run of PPO, whose phases do not hold everything at once."""
    answer = config.rewards.response_length
    length = config.tokens.max_length or 2 * answer
    micro, batch = config.read("per_device_train_batch_size"), config.read("per_device_eval_batch_size")
    with torch.device("meta"):
        about, models, policy = _build_ppo(config, model_config)
    with _on_fakes(policy, is_half):
        cache = batch * count_cache(policy, length)
        kept = count_activations(policy, micro, length, answer)
    text, temporary = model_config.get_text_config(), {}
    if layout.shards.weights > 1:
        width, (layers, ends) = _count_width(config, model_config, is_half), _count_parts(unwrap_adapter(policy))
        gathered = {
            "sampling": width * (sum(layers) + ends),
            "scoring": models["reward model"].weights,
            # This layer, the next, which is fetched meanwhile, and the output projection.
            "a layer": width * (2 * max(layers) + text.vocab_size * text.hidden_size),
        }
        temporary = {_GATHERED.format(name): size for name, size in gathered.items()}
    temporary |= {
        _CACHE: cache,
        _SAMPLED: batch * text.vocab_size * SAMPLING_BYTES,
        _LAYER: round(kept.largest_layer * batch / micro),
        _ACTIVATIONS: kept.recomputing if config.read("activation_checkpointing") else kept.total,
        _LOGITS: _CHUNK,
    }
    return about, models, temporary


def _build_ppo(config: RecipeConfig, model_config: PreTrainedConfig) -> tuple[str, dict[str, Held], Any]:
    """Build what ``load_actor_critic`` and ``load_rewards`` load, on the device ``meta``.

    Returns:
        Which models share a base model, in words; their bytes; and the policy with a loss head.
    """
    policy = _build(AutoModelForCausalLM, model_config, config.model.dtype)
    base = _count_stored(config, policy)
    add_loss_head(policy)
    reward = config.rewards.reward_model_name_or_path
    if not config.adapter.use_peft:
        critic_config = _look_at(config.rewards.critic_model_name_or_path or reward, None, model_config)
        critic = _build(AutoModelForSequenceClassification, critic_config, config.model.dtype)
        models = {
            "policy": _count_trained(policy.parameters(), config),
            "critic": _count_trained(critic.parameters(), config),
            "reference": Held(base),
            "reward model": Held(_count_own_reward(config, model_config)),
        }
        return "models of their own", models, policy
    folder = _find_shared_reward(config, model_config)
    adapted = add_adapter(policy, config.adapter, seed=0)
    trained = _count_trained(_find_trained(adapted), config)
    critic = _count_trained(_list_role(adapted, add_critic(adapted, folder), CRITIC), config)
    if folder is not None:
        about = "adapters of policy, critic and reward model on one trunk"
        own = count_bytes(_list_role(adapted, add_reward(adapted, folder), REWARD))
    else:
        own = _count_own_reward(config, model_config)
        about = "adapters of policy and critic on one trunk" + ("; a reward model of its own" if own else "")
    policy_bytes = trained._replace(weights=trained.weights + base)
    return about, {"policy": policy_bytes, "critic": critic, "reward model": Held(own)}, adapted


def _count_own_reward(config: RecipeConfig, model_config: PreTrainedConfig) -> int:
    name, revision = config.rewards.reward_model_name_or_path, config.rewards.reward_model_revision
    settings = _look_at(name, revision, model_config)
    return count_bytes(_build(AutoModelForSequenceClassification, settings, "auto")) if name else 0


def _look_at(name: str | None, revision: str | None, otherwise: PreTrainedConfig) -> PreTrainedConfig:
    """Configuration of a model, or of the base of an adapter; ``otherwise`` where none is named or at hand."""
    if name is None:
        return otherwise
    named = ModelConfig(model_name_or_path=name, model_revision=revision)
    try:
        if (adapter := find_adapter(name, revision)) is not None:
            named = dataclasses.replace(named, **read_base(adapter)._asdict())
        return load_model_config(named)[0]
    except ConfigError:
        return otherwise


def _find_shared_reward(config: RecipeConfig, model_config: PreTrainedConfig) -> Path | None:
    name, revision = config.rewards.reward_model_name_or_path, config.rewards.reward_model_revision
    is_quantized = config.quantization.load_in_4bit or config.quantization.load_in_8bit
    try:
        return None if name is None else find_shareable(name, revision, model_config, is_quantized=is_quantized)[0]
    except ConfigError:  # Not trained yet, for example: taken to be a model of its own.
        return None


def count_cache(policy: Any, length: int) -> int:
    """Count the bytes of keys and values of a row of ``length`` tokens, by whatever the model caches."""
    with torch.no_grad():
        output = unwrap_adapter(policy).base_model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=True)
    held = (value for layer in output.past_key_values.layers for value in vars(layer).values())
    return count_bytes(value for value in held if isinstance(value, Tensor))


class Activations(NamedTuple):
    """Bytes that a forward pass keeps for the backward pass, parameters apart.

    Attributes:
        total: All of them.
        recomputing: With activation checkpointing: the inputs of all layers, and the activations of one.
        largest_layer: Of one layer.
    """

    total: int
    recomputing: int
    largest_layer: int


class _Kept:
    """A tensor that the backward pass needs."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def count_activations(model: Any, num_rows: int, length: int, num_predicted: int) -> Activations:
    """Count what the loss of a model keeps for its backward pass.

    Args:
        model: With a loss head; it is put into training mode.
        num_rows: Rows of the micro-batch.
        length: Tokens of each.
        num_predicted: Those of them that are predicted.
    """
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    # What is dropped in the forward pass already, as nothing that is learnt needs it, does not count.
    kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
    layers: list[tuple[int, int]] = []

    def pack(tensor: Tensor) -> _Kept:
        holder = _Kept(tensor)
        kept.add(holder)
        return holder

    def count() -> int:
        storages = (holder.tensor.untyped_storage() for holder in kept)
        sizes = {storage._cdata: storage.nbytes() for storage in storages}
        return sum(size for storage, size in sizes.items() if storage not in own)

    def enter(_layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        layers.append((count(), inputs[0].numel() * inputs[0].element_size()))

    def leave(*_: Any) -> None:
        before, size = layers[-1]
        layers[-1] = (count() - before, size)

    model.train()
    for layer in _list_layers(model):
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda holder: holder.tensor):
        output = model(
            input_ids=torch.zeros(num_rows, length, dtype=torch.int64),
            predictors=torch.zeros(num_rows * num_predicted, dtype=torch.int64),
            targets=torch.zeros(num_rows * num_predicted, dtype=torch.int64),
            with_statistics=True,
            token_logps=True,
        )
    total, in_layers = count(), [size for size, _ in layers]
    assert output.logps.requires_grad  # Until here it keeps them.
    inputs = sum(size for _, size in layers)
    return Activations(total, total - sum(in_layers) + inputs + max(in_layers), max(in_layers))


def count_bytes(held: nn.Module | Iterable[Tensor]) -> int:
    """Count the bytes of tensors, or of a module's parameters and buffers, each that is shared once."""
    tensors = [*held.parameters(), *held.buffers()] if isinstance(held, nn.Module) else held
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def _count_stored(config: RecipeConfig, model: Any) -> int:
    quantized = count_quantized_bytes(model, config.quantization)
    return count_bytes(model) if quantized is None else quantized


def _count_trained(parameters: Iterable[Tensor], config: RecipeConfig) -> Held:
    trained = list(parameters)
    size = count_bytes(trained)
    states = sum(tensor.numel() * count_state_bytes(config.training, tensor.element_size()) for tensor in trained)
    return Held(size, size, round(states))


def _count_parts(
    module: nn.Module, choose: Callable[[nn.Module], Iterable[Tensor]] = nn.Module.parameters
) -> tuple[list[int], int]:
    """Parameters of each layer, and of what is in no layer: embeddings, output projection, last norm."""
    whole, *layers = (sum(chosen.numel() for chosen in choose(part)) for part in (module, *_list_layers(module)))
    return layers, whole - sum(layers)


def _build(auto_class: Any, model_config: PreTrainedConfig, dtype: str) -> Any:
    settings = copy.deepcopy(model_config)
    if auto_class is AutoModelForSequenceClassification:
        settings.num_labels = 1
    return auto_class.from_config(settings, dtype=_find_dtype(model_config, dtype), attn_implementation="sdpa")


def _find_dtype(model_config: PreTrainedConfig, dtype: str) -> torch.dtype:
    return (getattr(model_config, "dtype", None) or torch.float32) if dtype == "auto" else getattr(torch, dtype)


def _count_width(config: RecipeConfig, model_config: PreTrainedConfig, is_half: bool) -> int:
    """Bytes of a number in a product; without autocast products have the type of the weights."""
    return 2 if is_half else _find_dtype(model_config, config.model.dtype).itemsize


@contextmanager
def _on_fakes(model: nn.Module, is_half: bool) -> Iterator[None]:
    """Let a model compute on tensors without memory."""
    # On a device of its own kind, autocast would not act.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        model.to_empty(device="cpu")
        yield


def _find_trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _list_role(adapted: nn.Module, head: nn.Module, role: str) -> list[nn.Parameter]:
    """Parameters of an adapter that is not the active one, and of its head."""
    return [*head.parameters(), *(p for name, p in adapted.named_parameters() if f".{role}." in name)]


def _list_layers(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
