"""GPU memory of a run by component, counted from architecture, stage and layout: no weights, data or GPU.

``plan_memory`` names what one process holds, in bytes. Models are built on the device ``meta`` as training builds them;
what a backward pass needs is counted in a forward pass on tensors without memory.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from recipes_lib.config.schema import ModelConfig, RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.losses.projection import CHUNK_BYTES
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.adapters.roles import CRITIC, REWARD, add_critic, add_reward
from recipes_lib.models.adapters.saved import find_adapter, find_shareable, read_base
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.models.inference import unwrap_adapter
from recipes_lib.models.loading import choose_teacher, load_model_config
from recipes_lib.models.parallel.pipeline_parallel import PipelinePart
from recipes_lib.models.parallel.tensor_parallel import verify_tensor_parallel
from recipes_lib.models.quantization import count_quantized_bytes
from recipes_lib.planning.activations import count_activations, count_bytes, count_cache, list_layers, on_fakes
from recipes_lib.planning.compute import PAIR_STAGES, RL_STAGES, device_memory, has_live_reference
from recipes_lib.planning.disk import count_state_bytes

SAMPLING_BYTES: Final = 44
"""Of each logit while a token is sampled: logits, their softmax in single and double precision, its sum, the choice."""
SHARE_OF_DEVICE: Final = 0.9
"""What of a device a run may fill; the rest is the allocator's and the driver's."""
_USUAL_GB: Final = (24, 48, 80, 141, 192)
_CHUNK: Final = 4 * CHUNK_BYTES
"""Bytes of a chunk of logits: the logits, their copy in 16 bits, exponentials, products."""
_BUCKET_SIZE: Final = 500_000_000
"""Numbers of a bucket: ``reduce_bucket_size`` of DeepSpeed unless told otherwise."""
_KINDS: Final = ("weights", "gradients", "optimizer states")

_BUCKETS: Final = "buckets in which gradients are summed"
_ZERO_BUCKET: Final = "bucket in which gradients are reduced"
_GATHERED_LAYERS: Final = "gathered: layers, embeddings and output projection"
_UNREDUCED: Final = "gradients before they are reduced"
_COPIES: Final = "16-bit copies of the weights in a pass"
_OTHER_KEYS: Final = "keys and values of the other ranks' tokens"
_ACTIVATIONS: Final = "activations of a micro-batch"
_LOGITS: Final = "logits of the loss"
_CACHE: Final = "KV cache of a batch"
_SAMPLED: Final = "logits of a batch"
_LAYER: Final = "a layer of a batch"
_GATHERED: Final = "gathered for {}"
_ENGINE: Final = "vLLM's weights"
_ENGINE_CACHE: Final = "vLLM's KV cache of one row"
_ENGINE_COPY: Final = "16-bit copy that answers"
_PHASES: Final[Mapping[str, Sequence[str]]] = {
    "sampling": (_GATHERED.format("sampling"), _CACHE, _SAMPLED, _LAYER),
    "scoring": (_GATHERED.format("scoring"), _LAYER),
    "reading": (_GATHERED.format("a layer"), _LAYER, _LOGITS),
    "policy's update": (_GATHERED.format("a layer"), _ACTIVATIONS, "policy, gradients", _LOGITS),
    "critic's update": (_GATHERED.format("a layer"), _ACTIVATIONS, "critic, gradients"),
}
"""Phases of an iteration of PPO, and what each holds besides all that none of them names."""
FORMULAS: Final[Mapping[str, str]] = {
    "weights": "parameters x bytes of their type / processes that share them",
    "gradients": "as weights, of what is trained",
    "optimizer states": "parameters trained x bytes of a state / processes that share them; by ZeRO 4 more, of a copy",
    _BUCKETS: "gradients once more (DDP)",
    _ZERO_BUCKET: "bytes of a product x min(500,000,000, parameters trained) (reduce_bucket_size)",
    _GATHERED_LAYERS: "bytes of a product x (2 layers, of a pipeline stage all, + embeddings + output projection)",
    _UNREDUCED: "4 x parameters of the largest layer; of a pipeline stage all layers",
    _COPIES: "2 x parameters in 32 bits (autocast)",
    _ACTIVATIONS: "tensors saved for the backward pass; recomputed: the inputs of all layers + one layer",
    _OTHER_KEYS: "2 x bytes of a product x tokens of other ranks x key-value features x layers kept",
    _LOGITS: "4 buffers of a chunk",
    _CACHE: "rows x what the model caches of the longest row",
    _SAMPLED: f"{SAMPLING_BYTES} x rows x vocabulary",
    _LAYER: "tensors of the largest layer, of all rows",
    _ENGINE: "bytes of a product x parameters of the policy; with its cache vllm_gpu_memory_utilization x device",
    _ENGINE_CACHE: "what the model caches of the longest row, at least",
    _ENGINE_COPY: "2 x parameters of the policy (use_transformers_continuous_batching)",
    _GATHERED.format("sampling"): "bytes of a product x parameters of the policy",
    _GATHERED.format("scoring"): "weights of the reward model",
    _GATHERED.format("a layer"): "bytes of a product x (2 layers + output projection)",
}
"""How each component is counted, by its name or, of a model, by what follows the model's."""


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
        num_processes: Data-parallel processes, a GPU or a group of GPUs each.
        shards: Processes that share weights, gradients and optimizer states; 1: each holds all; 0: the host does.
        tensor: Ranks of a tensor-parallel group.
        context: Ranks of a context-parallel group.
        gathers_keys: Whether those gather the keys and values of a row; by Ulysses they exchange heads instead.
        stages: Pipeline stages.
        in_flight: Micro-batches whose activations the first pipeline stage holds at once.
        is_deepspeed: Whether ZeRO casts the weights to 16 bits and keeps a 32-bit copy with the optimizer states.
    """

    launch_file: str
    num_processes: int = 1
    shards: Held = Held(1, 1, 1)  # noqa: RUF009 - immutable
    tensor: int = 1
    context: int = 1
    gathers_keys: bool = False
    stages: int = 1
    in_flight: float = 1
    is_deepspeed: bool = False

    def __str__(self) -> str:
        shared = [kind for kind, shards in zip(_KINDS, self.shards, strict=True) if shards > 1]
        how = "a copy of everything on each process"
        if shared:
            told = "" if len(shared) == len(_KINDS) else f"{' and '.join(shared)} "
            how = f"{told}shared by {max(self.shards)} processes"
        if on_host := [kind for kind, shards in zip(_KINDS, self.shards, strict=True) if not shards]:
            how += f"; on the host {', '.join(on_host)}"
        for name, size in {"tensor": self.tensor, "context": self.context, "pipeline": self.stages}.items():
            how += f"; {name} parallel over {size}" if size > 1 else ""
        return f"accelerate_configs/{self.launch_file}.yaml: {how}"

    def narrow(self, model_config: PreTrainedConfig) -> PreTrainedConfig:
        """Return the model that one process computes: heads, MLP and vocabulary of its tensors, layers of its stage.

        Raises:
            ConfigError: The model does not divide.
        """
        narrowed = copy.deepcopy(model_config)
        text = narrowed.get_text_config()
        if self.tensor > 1:
            verify_tensor_parallel(model_config, self.tensor)
            text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
                setattr(text, name, getattr(text, name) // self.tensor)
        if self.stages > 1:
            (layers,) = PipelinePart(0, self.stages).share_layers(text.num_hidden_layers)
            narrowed = _shorten(narrowed, len(layers))
            # The first stage has the embedding, the last one the projection: none has both.
            narrowed.tie_word_embeddings = True
        return narrowed


def list_layouts(config: RecipeConfig, num_processes: int) -> Iterator[Layout]:
    """Yield the layouts that a run of so many processes may have."""
    yield Layout("ddp" if num_processes > 1 else "single_gpu", num_processes)
    # A critic and a policy that share a base model are not sharded (``training.layouts.compatibility``).
    is_whole = config.stage == "ppo" and config.adapter.use_peft
    if num_processes > 1 and not is_whole:
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
        engine_share: Of the device, what a colocated engine takes while it is awake: in the phases of its components.
    """

    layout: Layout
    about: str
    components: Mapping[str, int]
    phases: Mapping[str, Sequence[str]]
    engine_share: float = 0

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes of each phase; of an engine, the least that it needs."""
        return self._count_peaks(self.components)

    def _count_peaks(self, components: Mapping[str, int]) -> dict[str, int]:
        temporary = {name for names in self.phases.values() for name in names}
        resident = sum(size for name, size in components.items() if name not in temporary)
        return {
            phase: resident + sum(components.get(name, 0) for name in names)
            for phase, names in (self.phases or {"": ()}).items()
        }

    @property
    def peak(self) -> int:
        """Bytes of the largest phase."""
        return max(self.peaks.values())

    def fits(self, device_bytes: float) -> bool:
        """Return whether a device of this size holds the run, with some room for the allocator."""
        components, engine = dict(self.components), round(self.engine_share * device_bytes)
        if engine:
            rest = engine - components[_ENGINE]
            if rest < components[_ENGINE_CACHE]:
                return False
            components[_ENGINE_CACHE] = rest
        return max(self._count_peaks(components).values()) <= SHARE_OF_DEVICE * device_bytes

    def describe(self, devices: Mapping[str, float], *, explains: bool = False) -> Iterator[str]:
        """Yield layout, components, phases and which of ``devices`` fit, line by line, in units of 10^9 bytes.

        Args:
            devices: Bytes of each by name.
            explains: Whether to say how each component is counted.
        """
        yield str(self.layout)
        if self.about:
            yield f"    {self.about}"
        for name, size in self.components.items():
            formula = FORMULAS.get(name) or FORMULAS[name.rpartition(", ")[2]]
            yield f"{size / 1e9:13.2f} GB  {name}" + (f" = {formula}" if explains else "")
        if self.phases:
            yield "    at once, with weights and optimizer states:"
            yield from (f"{size / 1e9:13.2f} GB  {name}" for name, size in self.peaks.items())
        if self.engine_share:
            yield f"    vLLM takes {self.engine_share:g} of the device (vllm_gpu_memory_utilization)"
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
    count = _count_rl if config.stage in RL_STAGES else _count_trainer
    about, models, temporary = count(config, layout.narrow(model_config), layout, is_half)
    held = {
        f"{name}, {kind}": size // shards if shards else 0
        for name, model in models.items()
        for kind, size, shards in zip(_KINDS, model, layout.shards, strict=True)
    }
    components = {name: size for name, size in (held | temporary).items() if size}
    phases = _name_phases(config) if config.stage in RL_STAGES else {}
    if "critic" not in models:
        phases.pop("critic's update", None)
    share = config.engine.vllm_gpu_memory_utilization if _ENGINE in components else 0
    return MemoryPlan(layout, about, components, phases, share)


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
    keeps_master = layout.is_deepspeed and is_half
    trained = _count_trained(_find_trained(model), config, keeps_master=keeps_master)
    models = {"model": trained, **{name: Held(_count_stored(config, other)) for name, other in frozen.items()}}
    temporary, width = {}, _count_width(config, model_config, is_half)
    if layout.is_deepspeed:
        temporary[_ZERO_BUCKET] = min(trained.gradients, _BUCKET_SIZE * width)
    elif layout.shards.gradients == 1 < layout.num_processes:
        temporary[_BUCKETS] = trained.gradients
    if layout.shards.weights != 1:
        parts = map(_count_parts, (model, *frozen.values()))
        # The next layer is fetched while one computes; the layers of a pipeline stage stay until the last micro-batch.
        several, one = (sum, sum) if layout.stages > 1 else (lambda layers: 2 * max(layers), max)
        gathered = max(several(layers) + ends for layers, ends in parts)
        temporary[_GATHERED_LAYERS] = width * gathered
        layers, ends = _count_parts(model, _find_trained)
        temporary[_UNREDUCED] = 4 * max(one(layers), ends)
    elif is_half and not keeps_master:
        copied = sum(parameter.numel() for parameter in model.parameters() if parameter.dtype == torch.float32)
        temporary[_COPIES] = 2 * copied
    temporary[_ACTIVATIONS] = count_kept(config, model_config, layout, is_half=is_half)
    if layout.gathers_keys:
        text: Any = model_config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        num_layers = 1 if config.read("activation_checkpointing") else text.num_hidden_layers
        num_tokens = config.read("per_device_train_batch_size") * (config.tokens.max_length or 0)
        others = num_tokens * (layout.context - 1) // layout.context
        temporary[_OTHER_KEYS] = 2 * width * others * text.num_key_value_heads * head_dim * num_layers
    temporary[_LOGITS] = 0 if is_reward else _CHUNK
    return "", models, temporary


def count_kept(config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, *, is_half: bool) -> int:
    """Return the bytes that micro-batches keep for their backward passes, whoever holds the weights.

    Args:
        config: A run of a stage that upstream's trainer runs.
        model_config: What a process computes of the model that is trained.
        layout: Shares out the tokens of a row, and tells how many micro-batches a pipeline stage holds at once.
        is_half: As for ``plan_memory``.

    Raises:
        ConfigError: The adapter does not fit the model.
    """
    num_layers: int = model_config.get_text_config().num_hidden_layers
    # Below the first adapter nothing needs a gradient, so the first layer keeps less than the others.
    two, three = (_count_kept(config, _shorten(model_config, number), layout, is_half) for number in (2, 3))
    return two + (num_layers - 2) * (three - two)


def _count_kept(config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, is_half: bool) -> int:
    length = (config.tokens.max_length or 0) // layout.context
    num_rows = config.read("per_device_train_batch_size") * (2 if config.stage in PAIR_STAGES else 1)
    with torch.device("meta"):
        # Weights have the precision of the products here, so that no copy of one counts.
        model = _build(AutoModelForCausalLM, model_config, "bfloat16" if is_half else config.model.dtype)
        add_loss_head(model)
        if config.adapter.use_peft:
            model = add_adapter(model, config.adapter, seed=0)
    with on_fakes(model, is_half=is_half):
        kept = count_activations(model, num_rows, length, 1 if config.stage == "reward" else length - 1)
    if config.read("activation_checkpointing"):  # One layer of one micro-batch is computed again at a time.
        return round(layout.in_flight * (kept.recomputing - kept.largest_layer)) + kept.largest_layer
    return round(layout.in_flight * kept.total)


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


def _name_phases(config: RecipeConfig) -> dict[str, Sequence[str]]:
    """The phases of an iteration, in which another engine than ``generate`` needs nothing of the policy to sample."""
    phases, engine = dict(_PHASES), config.engine
    if engine.use_vllm:
        # The policy goes over a layer at a time.
        phases["sampling"] = (_GATHERED.format("a layer"),)
        if engine.vllm_enable_sleep_mode:
            phases["sampling"] += (_ENGINE, _ENGINE_CACHE)
    return phases


def _count_rl(config: RecipeConfig, model_config: PreTrainedConfig, layout: Layout, is_half: bool) -> _Counted:
    """Count a run of reinforcement learning, whose phases do not hold everything at once."""
    answer = config.rewards.response_length
    length = config.tokens.max_length or 2 * answer
    text, micro = model_config.get_text_config(), config.read("per_device_train_batch_size")
    batch = config.read("per_device_eval_batch_size")
    with torch.device("meta"):
        about, models, policy = _build_rl(config, model_config)
    with on_fakes(policy, is_half=is_half):
        row = count_cache(policy, length)
        kept = count_activations(policy, micro, length, answer)
    temporary, engine = {}, config.engine
    width, (layers, ends) = _count_width(config, model_config, is_half), _count_parts(unwrap_adapter(policy))
    if layout.shards.weights != 1:
        gathered = {
            "sampling": 0 if engine.use_vllm else width * (sum(layers) + ends),
            "scoring": models["reward model"].weights,
            # This layer, the next, which is fetched meanwhile, and the output projection.
            "a layer": width * (2 * max(layers) + text.vocab_size * text.hidden_size),
        }
        temporary = {_GATHERED.format(name): size for name, size in gathered.items()}
    if not engine.use_vllm:
        temporary |= {_CACHE: batch * row, _SAMPLED: batch * text.vocab_size * SAMPLING_BYTES}
    elif engine.vllm_mode == "colocate":
        temporary |= {_ENGINE: width * (sum(layers) + ends), _ENGINE_CACHE: row}
    if engine.use_transformers_continuous_batching and width < _find_dtype(model_config, config.model.dtype).itemsize:
        temporary[_ENGINE_COPY] = 2 * (sum(layers) + ends)
    temporary |= {
        _LAYER: round(kept.largest_layer * batch / micro),
        _ACTIVATIONS: kept.recomputing if config.read("activation_checkpointing") else kept.total,
        _LOGITS: _CHUNK,
    }
    return about, models, temporary


def _build_rl(config: RecipeConfig, model_config: PreTrainedConfig) -> tuple[str, dict[str, Held], Any]:
    """Build what ``load_actor_critic`` and ``load_rewards`` load, on the device ``meta``; RLOO and GRPO have no critic.

    Returns:
        Which models share a base model, in words; their bytes; and the policy with a loss head.
    """
    policy = _build(AutoModelForCausalLM, model_config, config.model.dtype)
    base, shares = _count_stored(config, policy), config.adapter.use_peft
    add_loss_head(policy)
    folder = None
    if shares:
        folder = _find_shared_reward(config, model_config) if config.stage == "ppo" else None
        policy = add_adapter(policy, config.adapter, seed=0)
    trained = _count_trained(_find_trained(policy), config)
    models = {"policy": trained._replace(weights=trained.weights + (base if shares else 0))}
    if config.stage == "ppo":
        own = _list_role(policy, add_critic(policy, folder), CRITIC) if shares else _build_critic(config, model_config)
        models["critic"] = _count_trained(own, config)
    if not shares and (config.stage == "ppo" or config.read("beta")):
        models["reference"] = Held(base)
    about = "adapters of policy and critic on one trunk" if shares else "models of their own"
    if folder is not None:
        about = "adapters of policy, critic and reward model on one trunk"
        reward = count_bytes(_list_role(policy, add_reward(policy, folder), REWARD))
    elif (reward := _count_own_reward(config, model_config)) and shares:
        about += "; a reward model of its own"
    return about if config.stage == "ppo" else "", {**models, "reward model": Held(reward)}, policy


def _build_critic(config: RecipeConfig, model_config: PreTrainedConfig) -> Iterable[Tensor]:
    """Parameters of a critic of its own: of the model that it starts from, or of the policy's."""
    named = config.critic.critic_model_name_or_path or config.rewards.reward_model_name_or_path
    critic_config = _look_at(named, None, model_config)
    critic: nn.Module = _build(AutoModelForSequenceClassification, critic_config, config.model.dtype)
    return critic.parameters()


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


def _count_stored(config: RecipeConfig, model: Any) -> int:
    quantized = count_quantized_bytes(model, config.quantization)
    return count_bytes(model) if quantized is None else quantized


def _count_trained(parameters: Iterable[Tensor], config: RecipeConfig, *, keeps_master: bool = False) -> Held:
    """Bytes of what is trained; ``keeps_master``: in 16 bits, with 32-bit weights among the optimizer states."""
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
    """Parameters of each layer, and of what is in no layer: embeddings, output projection, last norm."""
    whole, *layers = (sum(chosen.numel() for chosen in choose(part)) for part in (module, *list_layers(module)))
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


def _find_trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _list_role(adapted: nn.Module, head: nn.Module, role: str) -> list[nn.Parameter]:
    """Parameters of an adapter that is not the active one, and of its head."""
    return [*head.parameters(), *(p for name, p in adapted.named_parameters() if f".{role}." in name)]
