"""GPU memory of a run by component, from architecture, recipe and layout: no weights, data or GPU.

``plan_memory`` gives the bytes of each component on one process. Models are built on the meta device as training builds
them; activations are counted in a forward pass on fake tensors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from recipes_lib.config.schema import ModelConfig, RecipeConfig
from recipes_lib.errors import ConfigError
from recipes_lib.losses.projection import TEACHER_PART
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.adapters.roles import CRITIC, REWARD, add_critic, add_reward
from recipes_lib.models.adapters.saved import find_adapter, find_shareable, read_base
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.models.inference import unwrap_adapter
from recipes_lib.models.loading import choose_teacher
from recipes_lib.models.quantization import count_quantized_bytes
from recipes_lib.planning.activations import (
    AUTO,
    CAUSAL,
    MODES,
    Activations,
    Checkpointing,
    count_activations,
    count_bytes,
    count_cache,
    fuse_as_liger,
    list_keys,
    list_layers,
    on_fakes,
)
from recipes_lib.planning.compute import (
    PAIR_RECIPES,
    RL_RECIPES,
    find_shape,
    has_live_reference,
    has_live_teacher,
    read_shapes,
    reads_teacher,
)
from recipes_lib.planning.devices import choose_device
from recipes_lib.planning.disk import count_state_bytes
from recipes_lib.planning.memory_plan import (
    ACTIVATIONS,
    BUCKETS,
    CACHE,
    COMMUNICATION,
    COMMUNICATION_BYTES,
    CONTEXT,
    CONTEXT_BYTES,
    COPIES,
    ENGINE,
    ENGINE_CACHE,
    ENGINE_COPY,
    GATHERED,
    GATHERED_LAYERS,
    HEAD_GRADIENT,
    KINDS,
    LAYER,
    OTHER_KEYS,
    PHASES,
    SAMPLED,
    SAMPLING_BYTES,
    UNREDUCED,
    ZERO_BUCKET,
    Held,
    Layout,
    MemoryPlan,
    shorten,
)

_USUAL_GB: Final = (24, 48, 80, 141, 192)
_BUCKET_SIZE: Final = 500_000_000
"""Numbers of a bucket: DeepSpeed's default ``reduce_bucket_size``."""


def list_layouts(num_processes: int) -> Iterator[Layout]:
    """Yield the possible layouts of a run with this number of processes."""
    yield Layout("ddp" if num_processes > 1 else "single_gpu", num_processes)
    if num_processes > 1:
        yield Layout("fsdp2", num_processes, Held(num_processes, num_processes, num_processes))


def list_devices(gpu: str | None) -> dict[str, float]:
    """Return the bytes of a GPU by name; ``None``: of common sizes.

    Raises:
        ConfigError: The GPU is not known.
    """
    if gpu is None:
        return {f"{size} GB": size * 1e9 for size in _USUAL_GB}
    return {gpu: choose_device(gpu).memory}


def plan_memory(
    config: RecipeConfig,
    model_config: PreTrainedConfig,
    layout: Layout,
    *,
    is_half: bool | None = None,
    device_bytes: float = 80e9,
) -> MemoryPlan:
    """Plan the memory of one process of a run, without loading anything.

    Args:
        config: The run.
        model_config: Of the model that is trained.
        layout: How its processes hold the models.
        is_half: Whether products are in 16 bits by autocast; ``None``: unless the recipe says ``bf16: false``.
        device_bytes: Of the GPU, on which the size of a chunk of logits depends.

    Raises:
        ConfigError: The adapter does not fit the model, or the teacher's configuration cannot be had.

    Source: closed forms in ``tests/planning/test_memory.py``; PPO, counted on real models, in
    ``tests/rl/test_memory.py``.
    """
    if is_half is None:
        is_half = config.training.get("bf16") is not False or bool(config.training.get("fp16"))
    count = _count_rl if config.recipe in RL_RECIPES else _count_trainer
    narrowed = layout.narrow(model_config)
    about, models, temporary, choices = count(config, narrowed, layout, is_half)
    # Without a choice, the last kind is described.
    temporary |= next(reversed(choices.values()))
    temporary |= {CONTEXT: CONTEXT_BYTES, COMMUNICATION: COMMUNICATION_BYTES if layout.num_gpus > 1 else 0}
    held = {
        f"{name}, {kind}": size // shards if shards else 0
        for name, model in models.items()
        for kind, size, shards in zip(KINDS, model, layout.shards, strict=True)
    }
    components = {name: size for name, size in (held | temporary).items() if size}
    phases = _name_phases(config) if config.recipe in RL_RECIPES else {}
    if "critic" not in models:
        phases.pop("critic's update", None)
    num_predicted = 0 if config.recipe == "reward" else Batch.of(config, layout).num_targets
    text = narrowed.get_text_config()
    logit_bytes = count_logit_bytes(config, text, is_half=is_half)
    part = TEACHER_PART if reads_teacher(config) else 1
    plan = MemoryPlan(layout, about, components, phases, num_predicted, text.vocab_size, logit_bytes, part)
    if config.read("activation_checkpointing") == AUTO:
        plan = dataclasses.replace(plan, choices=choices)
    if ENGINE in components:
        share = config.engine.vllm_gpu_memory_utilization
        plan = dataclasses.replace(plan, engine_share=share, engine_row=components[ENGINE_CACHE])
    return plan.place(device_bytes)


def count_logit_bytes(config: RecipeConfig, model_config: PreTrainedConfig, *, is_half: bool) -> int:
    """Return the bytes that the loss holds for each logit of a chunk at its peak.

    Cross-entropy and log-probabilities of tokens turn float32 logits into their gradient in place; entropy needs the
    exponentials beside them. A divergence to a teacher's logits holds those, both log-probabilities and its own
    gradient too, a Jensen-Shannon divergence the mixture besides.

    Source: counted in ``tests/planning/test_memory.py``.
    """
    narrow = 2 * is_half
    # The derivative of a cap on the logits; a square of them too while it is computed, where the losses of tokens peak.
    slope = 4 if getattr(model_config, "final_logit_softcapping", None) else 0
    if reads_teacher(config):
        is_mixture = config.recipe == "distill" and config.distillation.distillation_beta not in (0, 1)
        return (44 if is_mixture else 28) + 2 * (narrow + slope)
    if config.recipe == "distill":
        return 8 + narrow + slope
    return (8 if config.recipe in RL_RECIPES else 4) + narrow + 2 * slope


class Batch(NamedTuple):
    """Micro-batch of one process.

    Attributes:
        num_rows: Its rows; of a pair each answer is one.
        length: Tokens of each.
        num_predicted: Those of them that are predicted, at most.
    """

    num_rows: int
    length: int
    num_predicted: int

    @classmethod
    def of(cls, config: RecipeConfig, layout: Layout) -> Batch:
        """Return the largest micro-batch of a run; under context parallelism, the tokens of one rank."""
        num_rows = config.read("per_device_train_batch_size") * (2 if config.recipe in PAIR_RECIPES else 1)
        if config.recipe in RL_RECIPES:
            answer = config.rewards.response_length
            return cls(num_rows, config.tokens.max_length or 2 * answer, answer)
        length = (config.tokens.max_length or 0) // layout.context
        return cls(num_rows, length, 1 if config.recipe == "reward" else length - 1)

    @property
    def num_targets(self) -> int:
        """Number of predicted tokens, over all rows."""
        return self.num_rows * self.num_predicted


def read_checkpointing(config: RecipeConfig) -> Checkpointing:
    """Return the recomputed layers of the run, from ``activation_checkpointing`` and its ``kwargs``, not ``auto``."""
    if not config.read("activation_checkpointing"):
        return Checkpointing()
    options = config.training.get("activation_checkpointing_kwargs") or {}
    return Checkpointing(
        options.get("every_n_layers") or 1, bool(options.get("save_matmuls")), bool(options.get("offload"))
    )


def settle_checkpointing(config: RecipeConfig, plan: MemoryPlan) -> RecipeConfig:
    """Resolve ``auto`` to the activation checkpointing that the plan chose for a device."""
    if not plan.checkpointing:
        return config
    return config.with_training(list_keys(plan.checkpointing))


_Counted = tuple[str, dict[str, Held], dict[str, int], dict[str, dict[str, int]]]
"""Which models share a base model, in words; the bytes of each model in all; what a process holds besides, by name; and
what it holds by the kind of activation checkpointing: all kinds where the recipe says ``auto``."""


def _count_trainer(config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, is_half: bool) -> _Counted:
    """Plan a recipe with upstream's trainer: one trained model and frozen ones."""
    is_reward = config.recipe == "reward"
    with torch.device("meta"):
        kind = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
        model = _build(kind, model_config, config.model.dtype)
        if config.adapter.use_peft:
            model = add_adapter(model, config.adapter, seed=0, task_type="SEQ_CLS" if is_reward else "CAUSAL_LM")
        frozen = dict(_build_frozen(config, model_config))
    keeps_master = layout.is_deepspeed and is_half
    trained = _count_trained(_find_trained(model), config, keeps_master=keeps_master)
    models = {"model": trained, **{name: Held(_count_stored(config, other)) for name, other in frozen.items()}}
    if config.forgetting.ewc_lambda:
        models["EWC reference"] = Held(trained.weights)
        if config.forgetting.ewc_fisher == "diagonal":
            models["Fisher information"] = Held(trained.weights)
    width = _count_width(config, model_config, is_half)
    temporary = _count_exchange(config, model, layout, is_half=is_half)
    if layout.shards.weights != 1:
        parts = map(_count_parts, (model, *frozen.values()))
        # The next layer is prefetched during compute; layers of a pipeline stage stay gathered until the last
        # micro-batch.
        several = sum if layout.pipeline_stages > 1 else (lambda layers: 2 * max(layers))
        temporary[GATHERED_LAYERS] = width * max(several(layers) + ends for layers, ends in parts)
    kept = count_kept(config, model_config, layout, is_half=is_half)
    choices = count_choices(config, model_config, layout, kept, _list_checkpointing(config), is_half=is_half)
    return "", models, temporary, choices


def count_choices(
    config: RecipeConfig,
    model_config: PreTrainedConfig,
    layout: Layout,
    kept: Activations,
    kinds: Mapping[str, Checkpointing],
    *,
    is_half: bool,
) -> dict[str, dict[str, int]]:
    """Return what a micro-batch holds for its backward pass, by component, for each kind of checkpointing.

    Args:
        config: The run, of a recipe with upstream's trainer.
        model_config: What a process computes of the model that is trained.
        layout: How its processes hold the model.
        kept: From ``count_kept``.
        kinds: By name.
        is_half: As for ``plan_memory``.
    """
    width = _count_width(config, model_config, is_half)
    return {
        name: {
            ACTIVATIONS: kept.count(checkpointing, layout.in_flight),
            **_count_other_keys(config, model_config, layout, checkpointing, width),
        }
        for name, checkpointing in kinds.items()
    }


def _list_checkpointing(config: RecipeConfig) -> dict[str, Checkpointing]:
    """Possible kinds of checkpointing of a run: all of them, or that of the recipe."""
    if config.read("activation_checkpointing") == AUTO:
        return {name: checkpointing for name, (checkpointing, _) in MODES.items()}
    return {"": read_checkpointing(config)}


def _count_other_keys(
    config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, checkpointing: Checkpointing, width: int
) -> dict[str, int]:
    """Count gathered keys and values for the attention of layers that are not recomputed."""
    if not layout.gathers_keys:
        return {}
    text: Any = model_config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    num_layers = text.num_hidden_layers
    if checkpointing.every and not checkpointing.keeps_products:
        num_layers -= max(-(-num_layers // checkpointing.every) - 1, 0)
    batch = Batch.of(config, layout)
    others = batch.num_rows * batch.length * (layout.context - 1)
    return {OTHER_KEYS: 2 * width * others * text.num_key_value_heads * head_dim * num_layers}


def _count_exchange(config: RecipeConfig, model: Any, layout: Layout, *, is_half: bool) -> dict[str, int]:
    """Count the buffers of a layout's gradient reduction, autocast's 16-bit copies, and the loss's own gradient."""
    keeps_master = layout.is_deepspeed and is_half
    gradients = _count_trained(_find_trained(model), config, keeps_master=keeps_master).gradients
    temporary = {}
    if layout.is_deepspeed:
        width = 2 if is_half else next(model.parameters()).element_size()
        temporary[ZERO_BUCKET] = min(gradients, _BUCKET_SIZE * width)
    elif layout.shards.gradients == 1 < layout.num_processes and config.recipe not in RL_RECIPES:
        temporary[BUCKETS] = gradients
    if layout.shards.weights != 1:
        layers, ends = _count_parts(model, _find_trained)
        temporary[UNREDUCED] = 4 * max(sum(layers) if layout.pipeline_stages > 1 else max(layers), ends)
    elif is_half and not keeps_master:
        copied = sum(parameter.numel() for parameter in model.parameters() if parameter.dtype == torch.float32)
        temporary[COPIES] = 2 * copied
    head = model.get_output_embeddings()
    if layout.shards.weights == 1 and head is not None and head.weight.requires_grad:
        temporary[HEAD_GRADIENT] = 4 * head.weight.numel()
    return temporary


def count_kept(
    config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, *, is_half: bool, num_built: int = 3
) -> Activations:
    """Return the bytes that a micro-batch saves for its backward pass, independent of the placement of weights.

    Args:
        config: The run.
        model_config: What a process computes of the model that is trained.
        layout: Context-parallel layouts divide the tokens of a row.
        is_half: As for ``plan_memory``.
        num_built: Layers that are counted; those beyond are like the last.

    Raises:
        ConfigError: The adapter does not fit the model.
    """
    num_layers: int = model_config.get_text_config().num_hidden_layers
    # Below the first adapter there are no gradients, so the first layer saves less than the others.
    shortened = shorten(model_config, min(num_layers, num_built))
    batch, kernel = Batch.of(config, layout), "eager" if config.model.attn_implementation == "eager" else CAUSAL
    with torch.device("meta"):
        # Under autocast hidden states have the dtype of the weights, under FSDP2 and ZeRO the compute dtype.
        dtype = "bfloat16" if is_half and layout.casts_weights else config.model.dtype
        model = _build(AutoModelForCausalLM, shortened, dtype, kernel)
        add_loss_head(model)
        if config.adapter.use_peft:
            model = add_adapter(model, config.adapter, seed=0)
    with on_fakes(model, is_half=is_half):
        if config.training.get("use_liger_kernel"):
            fuse_as_liger(model)
        return count_activations(model, *batch).extend(num_layers)


def _build_frozen(config: RecipeConfig, model_config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """Yield the frozen models by name, including the base model of an adapter."""
    if config.adapter.use_peft:
        yield "frozen base", _build(AutoModelForCausalLM, model_config, config.model.dtype)
    elif has_live_reference(config):
        yield "reference", _build(AutoModelForCausalLM, model_config, config.model.dtype)
    elif config.forgetting.kl_to_base:
        yield "base model", _build(AutoModelForCausalLM, model_config, config.model.dtype)
    if has_live_teacher(config):
        teacher = choose_teacher(config)
        yield "teacher", _build(AutoModelForCausalLM, find_shape(teacher), teacher.dtype)


def _name_phases(config: RecipeConfig) -> dict[str, Sequence[str]]:
    """Phases of an iteration; a colocated vLLM does not use the policy's weights while sampling."""
    phases, engine = dict(PHASES), config.engine
    if engine.use_vllm:
        asleep = (ENGINE, ENGINE_CACHE) if engine.vllm_enable_sleep_mode else ()
        # The policy is sent one layer at a time.
        phases["sampling"] = (GATHERED.format("a layer"), *asleep)
    return phases


def _count_rl(config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, is_half: bool) -> _Counted:
    """Plan a run of reinforcement learning, whose phases have different components."""
    text, micro = model_config.get_text_config(), Batch.of(config, layout)
    batch = config.read("per_device_eval_batch_size")
    with torch.device("meta"):
        about, models, policy = _build_rl(config, model_config)
    temporary = _count_exchange(config, policy, layout, is_half=is_half)
    kept = count_kept(config, model_config, layout, is_half=is_half)
    width, (layers, ends) = _count_width(config, model_config, is_half), _count_parts(unwrap_adapter(policy))
    if layout.shards.weights != 1:
        gathered = {
            "sampling": 0 if config.engine.use_vllm else width * (sum(layers) + ends),
            "scoring": models["reward model"].weights,
            # This layer, the prefetched next one, and the output projection.
            "a layer": width * (2 * max(layers) + text.vocab_size * text.hidden_size),
        }
        temporary |= {GATHERED.format(name): size for name, size in gathered.items()}
    with on_fakes(policy, is_half=is_half):
        row = count_cache(policy, micro.length)
    if not config.engine.use_vllm:
        temporary |= {CACHE: batch * row, SAMPLED: batch * text.vocab_size * SAMPLING_BYTES}
    elif config.engine.vllm_mode == "colocate":
        temporary |= {ENGINE: width * (sum(layers) + ends), ENGINE_CACHE: row}
    is_narrow = width < _find_dtype(model_config, config.model.dtype).itemsize
    if config.engine.use_transformers_continuous_batching and is_narrow:
        temporary[ENGINE_COPY] = width * (sum(layers) + ends)
    temporary[LAYER] = round(kept.largest_layer * batch / micro.num_rows)
    choices = {name: {ACTIVATIONS: kept.count(one)} for name, one in _list_checkpointing(config).items()}
    return about, models, temporary, choices


def _build_rl(config: RecipeConfig, model_config: PreTrainedConfig) -> tuple[str, dict[str, Held], Any]:
    """Build the models of ``load_actor_critic`` and ``load_rewards`` on the meta device; RLOO and GRPO have no critic.

    Returns:
        Which models share a base model, in words; their bytes; and the policy with a loss head.
    """
    policy = _build(AutoModelForCausalLM, model_config, config.model.dtype)
    base, shares = _count_stored(config, policy), config.adapter.use_peft
    add_loss_head(policy)
    folder = None
    if shares:
        folder = _find_shared_reward(config, model_config) if config.recipe == "ppo" else None
        policy = add_adapter(policy, config.adapter, seed=0)
    trained = _count_trained(_find_trained(policy), config)
    models = {"policy": trained._replace(weights=trained.weights + (base if shares else 0))}
    if config.recipe == "ppo":
        own = _list_role(policy, add_critic(policy, folder), CRITIC) if shares else _build_critic(config, model_config)
        models["critic"] = _count_trained(own, config)
    if not shares and (config.recipe == "ppo" or config.read("beta")):
        models["reference"] = Held(base)
    about = "adapters of policy and critic on one trunk" if shares else "models of their own"
    if folder is not None:
        about = "adapters of policy, critic and reward model on one trunk"
        reward = count_bytes(_list_role(policy, add_reward(policy, folder), REWARD))
    elif (reward := _count_own_reward(config, model_config)) and shares:
        about += "; a reward model of its own"
    return about if config.recipe == "ppo" else "", {**models, "reward model": Held(reward)}, policy


def _build_critic(config: RecipeConfig, model_config: PreTrainedConfig) -> Iterable[Tensor]:
    """Parameters of a separate critic: of its start model, or of the policy's."""
    named = config.critic.critic_model_name_or_path or config.rewards.reward_model_name_or_path
    critic_config = _look_at(named, None, model_config)
    critic: nn.Module = _build(AutoModelForSequenceClassification, critic_config, config.model.dtype)
    return critic.parameters()


def _count_own_reward(config: RecipeConfig, model_config: PreTrainedConfig) -> int:
    name, revision = config.rewards.reward_model_name_or_path, config.rewards.reward_model_revision
    settings = _look_at(name, revision, model_config)
    return count_bytes(_build(AutoModelForSequenceClassification, settings, "auto")) if name else 0


def _look_at(name: str | None, revision: str | None, otherwise: PreTrainedConfig) -> PreTrainedConfig:
    """Configuration of a model, or of the base of an adapter; ``otherwise`` if there is none available."""
    if name is None:
        return otherwise
    named = ModelConfig(model_name_or_path=name, model_revision=revision)
    try:
        if name not in read_shapes() and (adapter := find_adapter(name, revision)) is not None:
            named = dataclasses.replace(named, **read_base(adapter)._asdict())
        return find_shape(named)
    except ConfigError:
        return otherwise


def _find_shared_reward(config: RecipeConfig, model_config: PreTrainedConfig) -> Path | None:
    name, revision = config.rewards.reward_model_name_or_path, config.rewards.reward_model_revision
    is_quantized = config.quantization.load_in_4bit or config.quantization.load_in_8bit
    try:
        return None if name is None else find_shareable(name, revision, model_config, is_quantized=is_quantized)[0]
    except ConfigError:  # For example not trained yet: counted as a separate model.
        return None


def _count_stored(config: RecipeConfig, model: Any) -> int:
    quantized = count_quantized_bytes(model, config.quantization)
    return count_bytes(model) if quantized is None else quantized


def _count_trained(parameters: Iterable[Tensor], config: RecipeConfig, *, keeps_master: bool = False) -> Held:
    """Bytes of trained parameters; ``keeps_master``: in 16 bits, with 32-bit master weights in the optimizer states."""
    trained = list(parameters)
    if keeps_master:
        number = sum(tensor.numel() for tensor in trained)
        return Held(2 * number, 2 * number, round(number * (4 + count_state_bytes(config.training, 4))))
    size = count_bytes(trained)
    states = sum(tensor.numel() * count_state_bytes(config.training, tensor.element_size()) for tensor in trained)
    return Held(size, size, round(states))


def _count_parts(
    module: nn.Module, choose: Callable[[nn.Module], Iterable[Tensor]] = nn.Module.parameters
) -> tuple[list[int], int]:
    """Parameters of each layer, and of modules outside of layers: embeddings, output projection, final norm."""
    whole, *layers = (sum(chosen.numel() for chosen in choose(part)) for part in (module, *list_layers(module)))
    return layers, whole - sum(layers)


def _build(auto_class: Any, model_config: PreTrainedConfig, dtype: str, kernel: str = CAUSAL) -> Any:
    settings = copy.deepcopy(model_config)
    if auto_class is AutoModelForSequenceClassification:
        settings.num_labels = 1
    return auto_class.from_config(settings, dtype=_find_dtype(model_config, dtype), attn_implementation=kernel)


def _find_dtype(model_config: PreTrainedConfig, dtype: str) -> torch.dtype:
    return (getattr(model_config, "dtype", None) or torch.float32) if dtype == "auto" else getattr(torch, dtype)


def _count_width(config: RecipeConfig, model_config: PreTrainedConfig, is_half: bool) -> int:
    """Bytes per number of the compute dtype; without autocast that of the weights."""
    return 2 if is_half else _find_dtype(model_config, config.model.dtype).itemsize


def _find_trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _list_role(adapted: nn.Module, head: nn.Module, role: str) -> list[nn.Parameter]:
    """Parameters of an inactive adapter, and of its head."""
    return [*head.parameters(), *(p for name, p in adapted.named_parameters() if f".{role}." in name)]
