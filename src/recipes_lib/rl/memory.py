"""GPU memory of a PPO run, counted on meta-device models built as training builds them."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Mapping
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
from recipes_lib.errors import ConfigError
from recipes_lib.losses.projection import CHUNK_BYTES
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.adapters.roles import CRITIC, REWARD, add_critic, add_reward
from recipes_lib.models.adapters.saved import find_adapter, find_shareable, read_base
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.models.inference import unwrap_adapter
from recipes_lib.models.loading import load_model_config
from recipes_lib.models.quantization import count_quantized_bytes
from recipes_lib.planning.disk import count_state_bytes

SAMPLING_BYTES: Final = 44
"""Of each logit while a token is sampled: logits, their softmax in single and double precision, its sum, the choice."""
SHARE_OF_DEVICE: Final = 0.9
"""What of a device a run may fill; the rest is the allocator's and the driver's."""
_CHUNKS: Final = 4
"""Buffers of a chunk of logits at once: logits, their narrow copy, exponentials, products."""


class Weights(NamedTuple):
    """Bytes of a model, or of what stands for it on another's trunk; whole, whatever is sharded."""

    weights: int = 0
    gradients: int = 0
    states: int = 0


class Activations(NamedTuple):
    """Bytes that a forward pass keeps for the backward pass, parameters apart.

    Attributes:
        total: All of them.
        recomputing: When each layer's are computed again in the backward pass: their inputs, and one layer's.
        largest_layer: Of one layer.
    """

    total: int
    recomputing: int
    largest_layer: int


class _Kept:
    """A tensor that the backward pass needs."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a run, without memory.

    Attributes:
        layout: In words.
        held: By the names ``policy``, ``critic``, ``reference`` and ``reward model``.
        policy: With a loss head, to run on tensors without memory.
    """

    layout: str
    held: Mapping[str, Weights]
    policy: Any


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one process.

    Attributes:
        layout: Which models stand on which trunk, in words.
        terms: What is held, by name; not all of it at once.
        phases: The peak of each phase of an iteration, by name.
    """

    layout: str
    terms: Mapping[str, int]
    phases: Mapping[str, int]

    @property
    def peak(self) -> int:
        """The largest phase."""
        return max(self.phases.values())

    def fits(self, device_bytes: float) -> bool:
        """Return whether a device of this size holds the run, with some room for the allocator."""
        return self.peak <= SHARE_OF_DEVICE * device_bytes

    def describe(self) -> Iterator[str]:
        """Yield layout, terms and phases, a line each, in units of 10^9 bytes."""
        yield self.layout
        yield from (f"{size / 1e9:9.2f} GB  {name}" for name, size in self.terms.items())
        yield "at once, with weights and optimizer states:"
        yield from (f"{size / 1e9:9.2f} GB  {name}" for name, size in self.phases.items())


@dataclass(frozen=True, slots=True)
class Counts:
    """What a run holds, however many processes share it.

    Attributes:
        models: With their bytes.
        gathered: Weights of the policy, in the type of products.
        at_work: Weights of two decoder layers and of the output projection, in that type.
        cache: Keys and values of a batch of answers.
        logits: What is made of a batch's logits while a token of each row is sampled.
        read: What a layer makes of a batch of whole answers.
        activations: Kept for the backward pass of a micro-batch.
    """

    models: Models
    gathered: int
    at_work: int
    cache: int
    logits: int
    read: int
    activations: int

    def plan(self, num_shards: int) -> MemoryPlan:
        """Arrange it for processes of which ``num_shards`` share each model, as FSDP2 does; 1: each holds all of them.

        Models that share a trunk are not shared by processes (``training.combinations``).
        """
        models, whole = self.models, self.models.held
        held = {name: Weights(*(size // num_shards for size in part)) for name, part in whole.items()}
        # Who samples or scores has all weights at hand; who reads or learns, those of a layer, the next and the last.
        gathered = {"sampling": self.gathered, "scoring": whole["reward model"].weights, "a layer": self.at_work}
        at_hand = gathered if num_shards > 1 else dict.fromkeys(gathered, 0)
        chunk = _CHUNKS * CHUNK_BYTES
        terms = {
            **{f"{name}, {kind}": size for name, part in held.items() for kind, size in part._asdict().items() if size},
            **{f"gathered for {name}": size for name, size in at_hand.items() if size},
            "keys and values of a batch": self.cache,
            "logits of a batch": self.logits,
            "a layer of a batch": self.read,
            "activations": self.activations,
            "logits of a chunk": chunk,
        }
        learning = at_hand["a layer"] + self.activations
        phases = {
            "sampling": at_hand["sampling"] + self.cache + self.logits + self.read,
            "scoring": at_hand["scoring"] + self.read,
            "reading": at_hand["a layer"] + self.read + chunk,
            "policy's update": learning + held["policy"].gradients + chunk,
            "critic's update": learning + held["critic"].gradients,
        }
        resident = sum(part.weights + part.states for part in held.values())
        return MemoryPlan(models.layout, terms, {name: resident + size for name, size in phases.items()})


def count_memory(config: RecipeConfig, model_config: PreTrainedConfig, *, is_half: bool) -> Counts:
    """Count the memory of a run of PPO, whose weights nobody loads.

    Args:
        config: The run.
        model_config: Of the policy.
        is_half: Whether products are in ``bfloat16``.

    Raises:
        ConfigError: The adapters do not fit the model.

    Source: counted on real models in ``tests/rl/test_memory.py``.
    """
    answer = config.rewards.response_length
    length = config.tokens.max_length or 2 * answer
    micro, batch = config.read("per_device_train_batch_size"), config.read("per_device_eval_batch_size")
    with torch.device("meta"):
        models = build_models(config, model_config)
    # On a device of its own kind, autocast would not act.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        models.policy.to_empty(device="cpu")
        cache = batch * count_cache(models.policy, length)
        kept = count_activations(models.policy, micro, length, answer)
    text, policy, width = model_config.get_text_config(), unwrap_adapter(models.policy), 2 if is_half else 4
    layer = max(_count_numbers(module) for module in policy.modules() if _is_layer(module))
    return Counts(
        models=models,
        gathered=width * _count_numbers(policy),
        at_work=width * (2 * layer + text.vocab_size * text.hidden_size),
        cache=cache,
        logits=batch * text.vocab_size * SAMPLING_BYTES,
        read=round(kept.largest_layer * batch / micro),
        activations=kept.recomputing if config.read("activation_checkpointing") else kept.total,
    )


def build_models(config: RecipeConfig, model_config: PreTrainedConfig) -> Models:
    """Build what ``load_actor_critic`` and ``load_rewards`` load; on the device ``meta``, where nothing takes memory.

    Raises:
        ConfigError: As ``count_memory``.
    """
    training, dtype = config.training, config.model.dtype
    policy = _build(AutoModelForCausalLM, model_config, dtype)
    quantized = count_quantized_bytes(policy, config.quantization)
    trunk = count_bytes(policy) if quantized is None else quantized
    add_loss_head(policy)
    if not config.adapter.use_peft:
        critic = _build(AutoModelForSequenceClassification, _find_critic(config, model_config), dtype)
        held = {
            "policy": _count_trained(policy.parameters(), training),
            "critic": _count_trained(critic.parameters(), training),
            "reference": Weights(trunk),
            "reward model": Weights(_count_own_reward(config, model_config)),
        }
        return Models("models of their own", held, policy)
    folder = _find_shared_reward(config, model_config, is_quantized=quantized is not None)
    adapted = add_adapter(policy, config.adapter, seed=0)
    of_policy = _count_trained((p for p in adapted.parameters() if p.requires_grad), training)
    head = add_critic(adapted, folder)
    of_critic = [*head.parameters(), *(p for name, p in adapted.named_parameters() if f".{CRITIC}." in name)]
    held = {
        "policy": of_policy._replace(weights=of_policy.weights + trunk),
        "critic": _count_trained(of_critic, training),
        "reference": Weights(),
    }
    if folder is None:
        reward = _count_own_reward(config, model_config)
        layout = "adapters of policy and critic on one trunk" + ("; a reward model of its own" if reward else "")
        return Models(layout, {**held, "reward model": Weights(reward)}, adapted)
    head = add_reward(adapted, folder)
    of_reward = [*head.parameters(), *(p for name, p in adapted.named_parameters() if f".{REWARD}." in name)]
    held["reward model"] = Weights(count_bytes(of_reward))
    layout = "adapters of policy, critic and reward model on one trunk"
    return Models(layout, held, adapted)


def count_bytes(held: nn.Module | Iterable[Tensor]) -> int:
    """Count the bytes of tensors, or of a module's parameters and buffers, each that is shared once."""
    tensors = [*held.parameters(), *held.buffers()] if isinstance(held, nn.Module) else held
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(tensor): tensor for tensor in tensors}.values())


def count_cache(policy: Any, length: int) -> int:
    """Count the bytes of keys and values of a row of ``length`` tokens, by whatever the model caches."""
    model = unwrap_adapter(policy)
    with torch.no_grad():
        output = model.base_model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=True)
    held = (value for layer in output.past_key_values.layers for value in vars(layer).values())
    return count_bytes(value for value in held if isinstance(value, Tensor))


def count_activations(policy: Any, num_rows: int, length: int, answer: int) -> Activations:
    """Count what the policy's loss keeps for its backward pass.

    Args:
        policy: With a loss head; it is put into training mode.
        num_rows: Rows of the micro-batch.
        length: Tokens of each.
        answer: Those of them that are predicted.
    """
    own = {parameter.untyped_storage()._cdata for parameter in policy.parameters()}
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

    policy.train()
    hooks = [
        hook
        for module in policy.modules()
        if _is_layer(module)
        for hook in (module.register_forward_pre_hook(enter), module.register_forward_hook(leave))
    ]
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda holder: holder.tensor):
        output = policy(
            input_ids=torch.zeros(num_rows, length, dtype=torch.int64),
            predictors=torch.zeros(num_rows * answer, dtype=torch.int64),
            targets=torch.zeros(num_rows * answer, dtype=torch.int64),
            with_statistics=True,
            token_logps=True,
        )
    for hook in hooks:
        hook.remove()
    total, in_layers = count(), [size for size, _ in layers]
    assert output.logps.requires_grad  # Until here it keeps them.
    inputs = sum(size for _, size in layers)
    return Activations(total, total - sum(in_layers) + inputs + max(in_layers), max(in_layers))


def _build(auto_class: Any, model_config: PreTrainedConfig, dtype: str) -> Any:
    settings = copy.deepcopy(model_config)
    if auto_class is AutoModelForSequenceClassification:
        settings.num_labels = 1
    named = (getattr(model_config, "dtype", None) or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    return auto_class.from_config(settings, dtype=named, attn_implementation="sdpa")


def _count_numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, GradientCheckpointingLayer)


def _count_trained(parameters: Iterable[Tensor], training: Mapping[str, Any]) -> Weights:
    trained = list(parameters)
    size = count_bytes(trained)
    states = sum(tensor.numel() * count_state_bytes(training, tensor.element_size()) for tensor in trained)
    return Weights(size, size, round(states))


def _find_critic(config: RecipeConfig, model_config: PreTrainedConfig) -> PreTrainedConfig:
    """Configuration of what a critic of its own starts from; the policy's where that is not at hand."""
    rewards = config.rewards
    named = rewards.critic_model_name_or_path or rewards.reward_model_name_or_path
    return _look_at(named, None, model_config) if named else model_config


def _count_own_reward(config: RecipeConfig, model_config: PreTrainedConfig) -> int:
    named, revision = config.rewards.reward_model_name_or_path, config.rewards.reward_model_revision
    if named is None:
        return 0
    settings = _look_at(named, revision, model_config)
    return count_bytes(_build(AutoModelForSequenceClassification, settings, "auto"))


def _look_at(name: str, revision: str | None, otherwise: PreTrainedConfig) -> PreTrainedConfig:
    """Configuration of a model, or of the base of an adapter; ``otherwise`` where it is not at hand."""
    try:
        adapter = find_adapter(name, revision)
        named = ModelConfig(model_name_or_path=name, model_revision=revision)
        return load_model_config(
            named if adapter is None else dataclasses.replace(named, **read_base(adapter)._asdict())
        )[0]
    except ConfigError:
        return otherwise


def _find_shared_reward(config: RecipeConfig, model_config: PreTrainedConfig, *, is_quantized: bool) -> Path | None:
    rewards = config.rewards
    if rewards.reward_model_name_or_path is None:
        return None
    try:
        name, revision = rewards.reward_model_name_or_path, rewards.reward_model_revision
        return find_shareable(name, revision, model_config, is_quantized=is_quantized)[0]
    except ConfigError:  # Not trained yet, for example: taken to be a model of its own.
        return None
