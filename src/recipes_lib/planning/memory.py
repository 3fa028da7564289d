"""GPU memory of a run by component, from architecture, recipe and layout, without weights, data or GPU.

``plan_memory`` returns the bytes of each component on one process. Models are built on the meta device like those of
training; activations are counted in a forward pass on fake tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from recipes_lib.config.schema import ModelConfig, RecipeConfig, TokensConfig
from recipes_lib.errors import ConfigError
from recipes_lib.losses.projection import TEACHER_PART
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.adapters.roles import CRITIC, REWARD, add_critic, add_reward
from recipes_lib.models.adapters.saved import find_base, find_shareable
from recipes_lib.models.architecture import explaining_model
from recipes_lib.models.attention.kernels import find_refusals
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.models.inference import unwrap_adapter
from recipes_lib.models.loading import choose_teacher
from recipes_lib.models.quantization import count_scale_bytes, count_stored_bytes, list_quantized
from recipes_lib.models.structure import find_softcap, reads_mask
from recipes_lib.planning import activations, compute, memory_plan
from recipes_lib.planning.activations import Activations, Checkpointing, read_checkpointing
from recipes_lib.planning.compute import build_on_meta, find_dtype, has_half_products
from recipes_lib.planning.devices import Kind
from recipes_lib.planning.disk import count_state_bytes
from recipes_lib.planning.memory_plan import KINDS, Held, Layout, MemoryPlan, shorten

_BUCKET_SIZE: Final = 500_000_000
"""Elements of a bucket, which is allocated whole: DeepSpeed's default ``reduce_bucket_size``."""
_GROUP_SIZE: Final = 1_000_000_000
"""Parameters that ZeRO-3 updates at once: DeepSpeed's default ``sub_group_size``."""


def plan_memory(
    config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, *, device_bytes: float = 80e9
) -> MemoryPlan:
    """Plan the memory of one process of a run, without loading anything.

    Args:
        config: Configuration of the run.
        model_config: Configuration of the trained model.
        layout: Layout of the models over the processes.
        device_bytes: Memory of the GPU, which determines the size of a chunk of logits.

    Raises:
        ConfigError: The adapter does not fit the model, or the teacher's configuration cannot be loaded.

    Source: closed forms in ``tests/planning/test_memory.py``; PPO compared with real models in
    ``tests/rl/test_memory.py``.
    """
    is_rl = config.recipe in compute.RL_RECIPES
    samples = is_rl or bool(config.distillation.lmbda)
    narrowed = layout.narrow(model_config)
    text = narrowed.get_text_config()
    # The same in most layouts and candidates of a search.
    neutral = dataclasses.replace(config, tokens=TokensConfig()).with_training(dict.fromkeys(_SEARCHED))

    def build() -> _Built:
        with torch.device("meta"):
            return (_build_rl if is_rl else _build_trainer)(config, narrowed, layout)

    built: _Built = _once(("built", narrowed.to_json_string(), layout.is_deepspeed, repr(neutral)), build)
    width = _count_width(config, narrowed)
    temporary = _count_exchange(config, built, layout, width)
    if layout.shards.weights != 1 and config.quantization.load_in_4bit:
        # Of the scales, weights already have the share that they would have of parameters.
        number = sum(layer.weight.numel() for layer in list_quantized(built.trained) if not layer.weight.requires_grad)
        scales, shards = round(number * count_scale_bytes(config.quantization)), layout.shards.weights
        temporary["scales of 4-bit weights, not sharded"] = scales - (scales // shards if shards else 0)
    kept = count_kept(config, narrowed, layout)
    if samples:
        temporary |= _count_rollouts(config, narrowed, layout, built, kept)
    if not is_rl and layout.shards.weights != 1:
        parts = [_count_parts(module) for module in (built.trained, built.teacher) if module]
        # FSDP2 prefetches the next layer; layers of a pipeline stage stay gathered until the last micro-batch.
        several = sum if layout.pipeline_stages > 1 else (lambda layers: 2 * max(layers))
        numbers = max(several(layers) + ends for layers, ends in parts)
        temporary["gathered: layers, embeddings and output projection"] = numbers * width
    choices = _count_choices(config, narrowed, layout, kept)
    phases = _name_phases(config) if samples else {}
    # With `auto`, `place` below replaces these by those of the chosen kind.
    temporary |= next(reversed(choices.values()))
    if memory_plan.UPDATE in temporary:
        backward = [name for name in (*temporary, memory_plan.LOGITS) if name != memory_plan.UPDATE]
        phases = {"backward pass": backward, "optimizer step": [memory_plan.UPDATE]}
    temporary |= {
        memory_plan.CONTEXT: memory_plan.CONTEXT_BYTES,
        memory_plan.COMMUNICATION: memory_plan.COMMUNICATION_BYTES if layout.num_gpus > 1 else 0,
    }
    states = [
        (f"{name}, {kind}", size, shards)
        for name, model in built.models.items()
        for kind, size, shards in zip(KINDS, model, layout.shards, strict=True)
    ]
    held = {name: size // shards for name, size, shards in states if shards}
    components = {name: size for name, size in (held | temporary).items() if size}
    is_colocated = memory_plan.ENGINE in components
    packages = sorted({package for *_, package in activations.list_recurrences(built.trained)})
    kernels = f"counted with {' and '.join(packages)}, without which layers save several times as much"
    return MemoryPlan(
        layout,
        "; ".join(filter(None, [built.about, kernels if packages else ""])),
        components,
        phases,
        num_predicted=0 if config.recipe == "reward" else Batch.of(config, layout).num_targets,
        vocabulary=text.vocab_size,
        logit_bytes=count_logit_bytes(config, text),
        chunk_part=TEACHER_PART if compute.reads_teacher(config) else 1,
        engine_share=config.engine.vllm_gpu_memory_utilization if is_colocated else 0,
        engine_row=components[memory_plan.ENGINE_CACHE] if is_colocated else 0,
        host_bytes=sum(size for _, size, shards in states if not shards) // layout.num_gpus,
        choices=choices if len(choices) > 1 else {},
    ).place(device_bytes)


def count_logit_bytes(config: RecipeConfig, model_config: PreTrainedConfig) -> int:
    """Return the peak bytes of the loss for each logit of a chunk.

    Cross-entropy and log-probabilities of tokens turn float32 logits into their gradient in place; entropy also needs
    the exponentials. A divergence to a teacher also holds the teacher's logits, both log-probabilities and a gradient;
    a Jensen-Shannon divergence also holds the log-ratios to the mixture.

    Source: counted in ``tests/planning/test_memory.py``.
    """
    narrow = 2 * has_half_products(config)
    # Soft-capping of logits: its derivative, and a square while that is computed, at the peak of token losses.
    slope = 4 if find_softcap(model_config.get_text_config()) else 0
    if compute.reads_teacher(config):
        is_mixture = config.recipe == "distill" and config.distillation.distillation_beta not in (0, 1)
        return (40 if is_mixture else 28) + 2 * (narrow + slope)
    if config.recipe == "distill":
        return 8 + narrow + slope
    return (8 if config.recipe in compute.RL_RECIPES else 4) + narrow + 2 * slope


class Batch(NamedTuple):
    """Micro-batch of one process.

    Attributes:
        num_rows: Rows; each answer of a pair is one.
        length: Tokens per row.
        num_predicted: Largest number of predicted tokens per row.
    """

    num_rows: int
    length: int
    num_predicted: int

    @classmethod
    def of(cls, config: RecipeConfig, layout: Layout) -> Batch:
        """Return the largest micro-batch of a run; under context parallelism, the tokens of one rank."""
        num_rows = config.read("per_device_train_batch_size") * (2 if config.recipe in compute.PAIR_RECIPES else 1)
        if config.recipe in compute.RL_RECIPES:
            answer = config.rewards.response_length
            return cls(num_rows, config.tokens.max_length or 2 * answer, answer)
        length = (config.tokens.max_length or 0) // layout.context
        return cls(num_rows, length, 1 if config.recipe == "reward" else length - 1)

    @property
    def num_targets(self) -> int:
        """Number of predicted tokens, over all rows."""
        return self.num_rows * self.num_predicted


def count_answers(config: RecipeConfig) -> int:
    """Return the answers of a micro-batch of on-policy distillation.

    Rows count as full of documents whose prompts are as long as their answers; without packing, a row is one document.
    """
    num_documents = (config.tokens.max_length or 0) // (2 * config.rewards.response_length)
    return int(config.read("per_device_train_batch_size")) * (max(num_documents, 1) if config.tokens.packing else 1)


def resolve_checkpointing(config: RecipeConfig, plan: MemoryPlan) -> RecipeConfig:
    """Resolve ``auto`` to the activation checkpointing that the plan chose for a device."""
    if not plan.checkpointing:
        return config
    return config.with_training(activations.list_keys(plan.checkpointing))


class _Built(NamedTuple):
    """Models of a process on the meta device.

    Attributes:
        models: Bytes of each model by name, the trained one first.
        trained: Trained model, with its frozen base.
        about: Which models share a base model, for the report.
        teacher: Teacher of distillation; ``None`` without one.
    """

    models: dict[str, Held]
    trained: Any
    about: str = ""
    teacher: Any = None


_FOUND: Final[dict[tuple[object, ...], Any]] = {}
"""Built models and counted bytes by all that they depend on, which most layouts and candidates of a search share."""


def _once(key: tuple[object, ...], find: Callable[[], Any]) -> Any:
    if key not in _FOUND:
        _FOUND[key] = find()
    return _FOUND[key]


_SEARCHED: Final = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "torch_compile", "use_liger_kernel"),
    *("activation_checkpointing", "activation_checkpointing_kwargs", "per_device_eval_batch_size"),
)
"""Keys of training that no built model depends on."""


def _build_trainer(config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout) -> _Built:
    """Build the models of a recipe with upstream's trainer: one trained model and frozen ones."""
    is_reward = config.recipe == "reward"
    kind = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
    model, teacher = build_on_meta(model_config, config.model.dtype, auto_class=kind), None
    base = Held(count_stored_bytes(model, config.quantization))
    frozen = {"vision and audio": Held(_count_outside_text(model))}
    if config.adapter.use_peft:
        frozen = {"frozen base": base}
        model = add_adapter(model, config.adapter, seed=0, task_type="SEQ_CLS" if is_reward else "CAUSAL_LM")
    elif config.forgetting.kl_to_base:
        frozen["base model"] = base
    if compute.has_own_reference(config):
        frozen["reference"] = base
    if compute.has_live_teacher(config):
        named = choose_teacher(config)
        teacher = build_on_meta(compute.find_shape(named), named.dtype)
        frozen["teacher"] = Held(count_stored_bytes(teacher, config.quantization))
    keeps_master = layout.is_deepspeed and has_half_products(config)
    trained = _count_trained(_find_trained(model), config, keeps_master=keeps_master)
    if config.forgetting.ewc_lambda:
        frozen["EWC reference"] = Held(trained.weights)
        if config.forgetting.ewc_fisher == "diagonal":
            frozen["Fisher information"] = Held(trained.weights)
    return _Built({"model": trained, **frozen}, model, teacher=teacher)


def _count_choices(
    config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, kept: Activations
) -> dict[str, dict[str, int]]:
    """Return the bytes that a micro-batch saves for its backward pass, by kind of checkpointing and component.

    Of the kinds of activation checkpointing, ``auto`` has all.
    """
    kinds = {"": read_checkpointing(config)}
    if config.read("activation_checkpointing") == activations.AUTO:
        kinds = {mode: Checkpointing.of(options) for mode, options in activations.MODES.items()}
    choices = {
        name: {"activations of a micro-batch": kept.count(checkpointing, layout.in_flight)}
        for name, checkpointing in kinds.items()
    }
    if layout.gathers_keys:
        batch, text = Batch.of(config, layout), model_config.get_text_config()
        others = batch.num_rows * batch.length * (layout.context - 1)
        size = _count_width(config, model_config) * others * compute.count_attended(text, 1, of_keys=True)
        for name, checkpointing in kinds.items():
            num_layers, num_recomputed = text.num_hidden_layers, 0
            if checkpointing.every and not checkpointing.keeps_products:
                num_recomputed = max(-(-num_layers // checkpointing.every) - 1, 0)
            share = 1 - num_recomputed / num_layers
            choices[name]["keys and values of the other ranks' tokens"] = round(size * share)
    return choices


def _count_exchange(config: RecipeConfig, built: _Built, layout: Layout, width: int) -> dict[str, int]:
    """Count buffers of gradient reduction, autocast's 16-bit copies, and the gradient of the output projection."""
    model, gradients = built.trained, next(iter(built.models.values())).gradients
    is_half, temporary, head = has_half_products(config), {}, model.get_output_embeddings()
    projected = head.weight.numel() if head is not None and head.weight.requires_grad else 0
    if layout.is_deepspeed:
        temporary["bucket in which gradients are reduced"] = _BUCKET_SIZE * width
        if layout.shards.states:
            # Joined to one tensor, and cast; ZeRO-3 updates a part of them at a time.
            number = gradients // (width * layout.shards.states)
            at_once = min(number, _GROUP_SIZE) if layout.shards.weights != 1 else number
            temporary[memory_plan.UPDATE] = (width + 4) * at_once
    elif layout.shards.gradients == 1 < layout.num_processes and config.recipe not in compute.RL_RECIPES:
        temporary["buckets in which gradients are summed"] = gradients
    if layout.shards.weights != 1:
        layers, ends = _count_parts(model, _find_trained)
        in_layers = sum(layers) if layout.pipeline_stages > 1 else max(layers)
        size = (width if layout.is_deepspeed else 4) * max(in_layers, ends)
        if not layout.is_deepspeed and layout.pipeline_stages == 1:
            # FSDP2 copies those of a layer to one 32-bit tensor, and holds those of the output projection to the end.
            size = max(size, (width + 4) * in_layers + width * projected)
        temporary["gradients before they are reduced"] = size
    elif is_half and not layout.is_deepspeed:
        # Autocast holds those of trained weights in products, which embeddings are not, and the loss that of the output
        # projection; those of other frozen weights count as activations: recomputed layers do not hold them.
        embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
        copied = {*_find_trained(model)}.difference(*(module.parameters() for module in embeddings))
        copied |= {*(head.parameters() if head is not None else ())}
        number = sum(one.numel() for one in copied if one.dtype == torch.float32)
        temporary["16-bit copies of the weights in a pass"] = 2 * number
    # The loss sums this gradient over its chunks, beside what earlier micro-batches have accumulated.
    if (layout.shards.weights == 1 or layout.is_deepspeed) and projected:
        temporary["gradient of the output projection in a pass"] = 4 * projected
    return temporary


def count_kept(
    config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, *, num_built: int = 1
) -> Activations:
    """Return the bytes that a micro-batch saves for its backward pass, independent of the placement of weights.

    Args:
        config: Configuration of the run.
        model_config: Configuration of the part of the trained model that a process computes (``Layout.narrow``).
        layout: Layout, whose context-parallel ranks divide the tokens of a row.
        num_built: Number of layers that are built, or more to have each kind after the first layer; the others save as
            much as the last of their kind.

    Raises:
        ConfigError: The adapter does not fit the model, or its activations cannot be counted.
    """
    kernel, is_half = _find_kernel(config, model_config), has_half_products(config)
    # FSDP2 and ZeRO cast the weights before a pass, so that hidden states do not have their dtype, as under autocast.
    dtype = "bfloat16" if is_half and (layout.shards.weights != 1 or layout.is_deepspeed) else config.model.dtype
    is_fused = bool(config.training.get("use_liger_kernel")) or Kind.of(config).compiles
    is_quantized = is_half and config.quantization.is_quantized
    described = (type(model_config), model_config.to_json_string(), repr(config.adapter))

    def count_shortened(shortened: PreTrainedConfig, batch: Batch) -> Activations:
        with torch.device("meta"):
            model = build_on_meta(shortened, dtype, kernel)
            # Dequantised to 16 bits for each product, so that no copy is saved for the backward pass.
            for layer in list_quantized(model) if is_quantized else ():
                layer.to(torch.bfloat16)
            if config.adapter.use_peft:
                model = add_adapter(model, config.adapter, seed=0)
            add_loss_head(model)
        with activations.on_fakes(model, is_half=is_half):
            if is_fused:
                activations.fuse_layers(model)
            return activations.count_activations(model, *batch)

    def count(batch: Batch) -> Activations:
        with explaining_model(model_config, "saves activations that cannot be counted", _MEASURE):
            kinds = _once(("kinds", *described), partial(_list_kinds, model_config))
            # The first layer stands for no other: below the first adapter are no gradients, so that it saves less.
            number = max([num_built, *(1 + kinds.index(kind, 1) for kind in {*kinds[1:]})])
            if getattr(model_config.get_text_config(), "hidden_size_per_layer_input", 0):
                number = len(kinds)  # Outside of layers, embeddings of each layer are saved.
            shorter = partial(count_shortened, shorten(model_config, min(len(kinds), number)))
            is_recurrent = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None), "_is_stateful", False)
            counted = _count_tokens(shorter, batch) if is_recurrent else shorter(batch)
            return counted.extend(kinds)

    batch, key = Batch.of(config, layout), (*described, num_built, dtype, kernel, is_half, is_quantized, is_fused)
    numbers = [batch.num_rows] if batch.num_rows <= _LINEAR_FROM else [_LINEAR_FROM, _LINEAR_FROM + 1]
    sizes = [batch._replace(num_rows=number) for number in numbers]
    counted: list[Activations] = [_once(("kept", *key, size), partial(count, size)) for size in sizes]
    return counted[0].extrapolate(counted[-1], batch.num_rows - _LINEAR_FROM)


_LINEAR_FROM: Final = 2
"""Rows from which saved activations are linear in the number of rows; a single row may save fewer copies."""


def _list_kinds(model_config: PreTrainedConfig) -> list[object]:
    """Return what distinguishes each layer: the names and shapes of its weights."""
    layers = activations.list_layers(build_on_meta(model_config).get_decoder())
    if not layers:
        raise ValueError("it has no layers that support activation checkpointing")
    return [tuple((name, weight.shape) for name, weight in layer.named_parameters()) for layer in layers]


_MEASURE: Final = "measure the memory of a few steps: `max_steps: 3`"
_PROBED: Final = (16, 32)
"""Tokens of which a recurrent model is counted first."""


def _count_tokens(count: Callable[[Batch], Activations], batch: Batch) -> Activations:
    """Count a micro-batch of a recurrent model; one that computes token by token, as Mamba does, from few tokens."""
    short, longer = (
        count(batch._replace(length=length, num_predicted=min(batch.num_predicted, length - 1))) for length in _PROBED
    )
    # The scan of a GPU's kernel saves less than the sequential one, which takes minutes on fake tensors.
    if short.num_operations == longer.num_operations or batch.length <= _PROBED[-1]:
        return count(batch)
    return short.extrapolate(longer, (batch.length - _PROBED[0]) / (_PROBED[1] - _PROBED[0]))


def _find_kernel(config: RecipeConfig, model_config: PreTrainedConfig) -> str:
    """Return the attention to count: eager if configured, or if the model supports no other that is installed."""
    named = config.model.attn_implementation
    refusals = find_refusals(model_config.get_text_config(), torch.device("cuda"), torch.bfloat16)
    is_fused = named != "eager" if named else any(not refusals[name] for name in refusals if name != "eager")
    causal = "sdpa" if reads_mask(model_config.get_text_config()) else activations.CAUSAL
    return _OWN_ATTENTION.get(model_config.model_type, causal) if is_fused else "eager"


_OWN_ATTENTION: Final = {"falcon": "sdpa", "gpt_neo": "eager", "gptj": "eager"}
"""Architectures with attention classes of their own, which cannot call ``CAUSAL`` -> the kernel to count instead."""


def _name_phases(config: RecipeConfig) -> dict[str, Sequence[str]]:
    """Return the phases of a step or iteration with their components; vLLM samples with its own weights."""
    engine, phases = config.engine, dict(memory_plan.PHASES["distill" if config.recipe == "distill" else "rl"])
    if config.recipe != "ppo":
        phases.pop("critic's update", None)
    if engine.use_vllm:
        asleep = (memory_plan.ENGINE, memory_plan.ENGINE_CACHE) if engine.vllm_enable_sleep_mode else ()
        # A sharded policy is gathered and sent one layer at a time.
        phases["sampling"] = ("gathered for a layer", *asleep)
    return phases


def _count_rollouts(
    config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, built: _Built, kept: Activations
) -> dict[str, int]:
    """Count the memory of sampling by ``generate`` or an engine, and of forward passes over the answers."""
    text, micro, policy = model_config.get_text_config(), Batch.of(config, layout), built.trained
    temporary = dict[str, int]()
    batch = config.read("per_device_eval_batch_size")
    if config.recipe == "distill":
        batch = min(batch, count_answers(config))
    width, (layers, ends) = _count_width(config, model_config), _count_parts(unwrap_adapter(policy))
    copied = width * (sum(layers) + ends)
    if layout.shards.weights != 1:
        gathered = {"sampling": 0 if config.engine.use_vllm else copied}
        if config.recipe in compute.RL_RECIPES:
            gathered["scoring"] = built.models["reward model"].weights
            # This layer, the prefetched next one, and the output projection.
            gathered["a layer"] = width * (2 * max(layers) + text.vocab_size * text.hidden_size)
        temporary |= {f"gathered for {name}": size for name, size in gathered.items()}
    row = _count_row(config, model_config, layout, micro.length)
    if not config.engine.use_vllm:
        temporary |= {
            "KV cache of a batch": batch * row,
            "logits of a batch": batch * text.vocab_size * memory_plan.SAMPLING_BYTES,
        }
    elif config.engine.vllm_mode == "colocate":
        temporary |= {memory_plan.ENGINE: copied, memory_plan.ENGINE_CACHE: row}
    is_narrow = width < find_dtype(model_config, config.model.dtype).itemsize
    if config.engine.use_transformers_continuous_batching and is_narrow:
        temporary["16-bit copy that answers"] = copied
    return temporary | {"a layer of a batch": round(max(layer.total for layer in kept.layers) * batch / micro.num_rows)}


def _count_row(config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, length: int) -> int:
    """Return the bytes of the KV cache of a row of ``length`` tokens."""
    text = model_config.get_text_config()
    if config.engine.use_vllm and (latents := compute.count_latents(text)):
        return 2 * length * latents
    is_half = has_half_products(config)
    # Gathered weights are in 16 bits, which determines the dtype of keys also under autocast.
    dtype = "bfloat16" if is_half and layout.shards.weights != 1 else config.model.dtype

    def count() -> int:
        with explaining_model(model_config, "has a cache that cannot be counted", _MEASURE):
            model = build_on_meta(model_config, dtype)
            with activations.on_fakes(model, is_half=is_half):
                if not model._is_stateful or length <= _PROBED[-1]:
                    return activations.count_cache(model, length)
                # A state of one size, and keys and values of each token; as in `_count_tokens`, of few tokens.
                short, longer = (activations.count_cache(model, few) for few in _PROBED)
            return short + (longer - short) * (length - _PROBED[0]) // (_PROBED[1] - _PROBED[0])

    number: int = _once(("row", type(model_config), model_config.to_json_string(), dtype, is_half, length), count)
    return number


def _build_rl(config: RecipeConfig, model_config: PreTrainedConfig, _layout: Layout) -> _Built:
    """Build the models that ``load_actor_critic`` and ``load_rewards`` load; RLOO and GRPO have no critic."""
    policy = build_on_meta(model_config, config.model.dtype)
    base = count_stored_bytes(policy, config.quantization)
    shares, is_ppo = config.adapter.use_peft, config.recipe == "ppo"
    frozen = base if shares else _count_outside_text(policy)
    add_loss_head(policy)
    rewards, folder = config.rewards, None
    if shares:
        if is_ppo and rewards.reward_model_name_or_path:
            with suppress(ConfigError):  # For example not trained yet: counted as a separate model.
                named = rewards.reward_model_name_or_path, rewards.reward_model_revision
                folder, _ = find_shareable(*named, model_config, is_quantized=config.quantization.is_quantized)
        policy = add_adapter(policy, config.adapter, seed=0)
    trained = _count_trained(_find_trained(policy), config)
    models = {"policy": trained._replace(weights=trained.weights + frozen)}
    if is_ppo:
        if shares:
            own = _list_role(policy, add_critic(policy, folder), CRITIC)
        else:
            own = [*_build_scorer(*find_critic_start(config), model_config, config.model.dtype).parameters()]
        models["critic"] = _count_trained(own, config)
    if not shares and compute.has_policy_reference(config):
        models["reference"] = Held(base)
    about, reward = "adapters of policy and critic on one trunk" if shares else "models of their own", 0
    if folder is not None:
        about = "adapters of policy, critic and reward model on one trunk"
        reward = activations.count_bytes(_list_role(policy, add_reward(policy, folder), REWARD))
    elif name := rewards.reward_model_name_or_path:
        reward = activations.count_bytes(_build_scorer(name, rewards.reward_model_revision, model_config, "auto"))
        about += "; a reward model of its own" if shares else ""
    return _Built({**models, "reward model": Held(reward)}, policy, about if is_ppo else "")


def find_critic_start(config: RecipeConfig) -> tuple[str, str | None]:
    """Return name and revision of the model that initialises the critic: by default the reward model, or the policy."""
    model, rewards = config.model, config.rewards
    revisions = {
        model.model_name_or_path: model.model_revision,
        rewards.reward_model_name_or_path: rewards.reward_model_revision,
    }
    name = config.critic.critic_model_name_or_path or rewards.reward_model_name_or_path or model.model_name_or_path
    # Of a model that the recipe also names as policy or reward model, the critic reads the same revision.
    return str(name), revisions.get(name)


def _build_scorer(name: str, revision: str | None, default: PreTrainedConfig, dtype: str) -> Any:
    """Build a separate critic or reward model, like ``default`` if the configuration of its base is not available."""
    with suppress(ConfigError):
        named = ModelConfig(model_name_or_path=name, model_revision=revision)
        default = compute.find_shape(named if name in compute.SHIPPED_SHAPES else find_base(named)[0])
    return build_on_meta(default, dtype, auto_class=AutoModelForSequenceClassification)


def _count_outside_text(model: nn.Module) -> int:
    """Return the bytes of the frozen modules of a multimodal model, before an adapter freezes the others too."""
    return activations.count_bytes(parameter for parameter in model.parameters() if not parameter.requires_grad)


def _count_trained(parameters: Iterable[Tensor], config: RecipeConfig, *, keeps_master: bool = False) -> Held:
    """Return the bytes of trained parameters; with ``keeps_master`` in 16 bits, and states with 32-bit weights."""
    trained = list(parameters)
    if keeps_master:
        number = sum(tensor.numel() for tensor in trained)
        return Held(2 * number, 2 * number, round(number * (4 + count_state_bytes(config.training, 4))))
    size = activations.count_bytes(trained)
    states = sum(tensor.numel() * count_state_bytes(config.training, tensor.element_size()) for tensor in trained)
    # Gradients have the dtype of the parameters.
    return Held(size, size, round(states))


@cache  # Models that are planned are on the meta device, and do not change once they are built.
def _count_parts(
    module: nn.Module, choose: Callable[[nn.Module], Iterable[Tensor]] = nn.Module.parameters
) -> tuple[list[int], int]:
    """Return the parameters of each layer, and those outside of layers: embeddings, output projection, final norm."""
    parts = (module, *activations.list_layers(module))
    whole, *layers = (sum(chosen.numel() for chosen in choose(part)) for part in parts)
    # CTRL has no such layers: ``count_kept`` says so.
    return layers or [0], whole - sum(layers)


def _count_width(config: RecipeConfig, model_config: PreTrainedConfig) -> int:
    """Return the bytes of an element of the compute dtype, which without autocast is that of the weights."""
    return 2 if has_half_products(config) else find_dtype(model_config, config.model.dtype).itemsize


def _find_trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _list_role(adapted: nn.Module, head: nn.Module, role: str) -> list[nn.Parameter]:
    """Return the parameters of a role's adapter, which may be inactive, and of its head."""
    return [*head.parameters(), *(p for name, p in adapted.named_parameters() if f".{role}." in name)]
