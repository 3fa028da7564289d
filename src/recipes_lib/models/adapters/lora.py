"""LoRA adapters: target layers (including mixture-of-experts models), creation, loading and disabling."""

from __future__ import annotations

import functools
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from accelerate.utils import convert_to_fp32
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from recipes_lib.config.schema import AdapterConfig, ModelConfig
from recipes_lib.errors import ConfigError, Problem, read_last_line, suggest
from recipes_lib.models.adapters.saved import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE_LAYER,
    INITS_CHANGING_BASE,
    TaskType,
    changes_base_weights,
    check_base,
    check_saved,
)
from recipes_lib.models.heads.score_head import HEAD
from recipes_lib.models.inference import (
    compute_probe_logits,
    evaluating,
    find_device,
    find_logit_shift,
    measure_rounding,
    preserve_random_states,
)
from recipes_lib.models.loading import explained, load_model_config, without_report
from recipes_lib.models.quantization import build_dequantization, keep_differentiable
from recipes_lib.models.structure import find_outside_text, is_outside

_INITS: Final = {"default": True, "pissa": "pissa_niter_16"}
"""Values of PEFT's ``init_lora_weights`` with other names. 16 subspace iterations approximate the leading singular
vectors in seconds, an exact decomposition of a large model takes hours."""
_SAVED_HEAD: Final = "base_model.model.score.weight"
ALL_LINEAR: Final = "all-linear"
"""PEFT's name for all linear layers except the head."""
_MAMBA: Final = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Model types whose fused kernel reads the weight of ``out_proj``, on which peft 0.21 refuses an adapter."""
_USE_DEFAULT: Final = "remove it; by default, lora_target_modules are all layers that can have an adapter"
_NEED_FULL_PRECISION: Final = ("pissa", "olora", "orthogonal")
"""Initialisations that need unquantised weights."""


def add_adapter(
    model: PreTrainedModel, config: AdapterConfig, *, seed: int, task_type: TaskType = "CAUSAL_LM"
) -> PeftModel:
    """Add an adapter to a model as its only trained part: a new one, or a saved one for further training.

    Adapter weights are ``float32`` in models of any dtype. ``model`` is modified, not copied. Tied embeddings stay tied
    if one of them is fully trained. A new adapter changes no logits with any initialisation; ``pissa`` and ``olora``
    move a part of the base weights to the adapter, so that the base alone differs from the model.

    Args:
        model: Model with or without a loss head; for ``lora_modules_to_save: [lm_head]``, the loss head comes later.
        config: Configuration of the adapter.
        seed: Seed of new weights, which are equal on all processes.
        task_type: Task of the model in PEFT.

    Raises:
        ConfigError: A named layer does not exist or does not support such an adapter, or the saved adapter does not fit
            the model; one problem each.

    Source: Hu et al. 2022 (LoRA), Kalajdzievski 2023 (rsLoRA), Liu et al. 2024 (DoRA), Meng et al. 2024 (PiSSA), by
    PEFT's ``get_peft_model``; ``tests/models/adapters/test_lora.py``.
    """
    if config.adapter_name_or_path is not None:
        return load_adapter(
            model, config.adapter_name_or_path, task_type=task_type, is_trainable=True, dropout=config.lora_dropout
        )
    if problems := [*check_layers(model, config)]:
        raise ConfigError(*problems)
    whole, tied = name_whole_modules(model, config)
    # Some initialisations need weights, which a model on the meta device, of which shapes are counted, lacks.
    init = "default" if model.device.type == "meta" else config.init_lora_weights
    # These initialisations change the base weights, which get_peft_model does in place.
    before, compute, rounding = None, functools.partial(compute_probe_logits, model), 0.0
    if init in INITS_CHANGING_BASE:
        before = compute()
        # Not of the adapted model: OLoRA's large factors, of which the base is the difference, increase it.
        rounding = measure_rounding(model, compute, before)
    settings = LoraConfig(
        task_type=task_type,
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=name_targets(model, config),
        modules_to_save=list(whole) or None,
        init_lora_weights=_INITS.get(init, init),
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        fan_in_fan_out=stores_transposed(model, config),
        ensure_weight_tying=tied,
    )
    # Equal new weights on every process, without consuming the random state of the run.
    with preserve_random_states(), suppress_peft_warnings():
        torch.manual_seed(seed)
        adapted = get_peft_model(model, settings, revision=getattr(model.config, "_commit_hash", None))
    # Named layers may have been converted to expert parameters by PEFT.
    verify_layers(adapted, "lora_target_modules")
    if tied:
        _verify_tie(adapted)
        # PEFT (0.21) removes the tied head from the list, but needs it on loading to tie the embeddings again.
        settings.modules_to_save = whole
    _train_whole_modules_in_float32(adapted)
    _leave_casts_to_autocast(adapted)
    if before is not None:
        if (shift := find_logit_shift(adapted, before, rounding=rounding)) is not None:
            found = f"{init} moves the model's logits before training, by {shift:.2g} of the largest"
            remedy = "write dtype: float32, or init_lora_weights: default"
            raise ConfigError(Problem("init_lora_weights", found, remedy))
        # For ``convert_to_original_base``, which converts the saved adapter to the original base weights.
        adapted.initial_factors = {
            name: tensor.detach().cpu().clone()
            for name, tensor in read_adapter_state(adapted).items()
            if name.endswith((".lora_A.weight", ".lora_B.weight"))
        }
    return adapted


def load_adapter(
    model: PreTrainedModel,
    name: str,
    *,
    key: str = "adapter_name_or_path",
    task_type: TaskType = "CAUSAL_LM",
    is_trainable: bool = False,
    dropout: float = 0.0,
    on_any_base: bool = False,
) -> PeftModel:
    """Load a model with a saved adapter, and verify that every adapter weight comes from the file.

    Args:
        model: Base model, modified, not copied.
        name: Folder or Hub id of the adapter.
        key: Configuration key or flag that names it, for error messages.
        task_type: Task of the model in PEFT.
        is_trainable: Whether the adapter is trained further; otherwise it is frozen.
        dropout: LoRA dropout of further training, which replaces the saved value.
        on_any_base: Whether to accept a base of another name or commit than the adapter was trained on.

    Raises:
        ConfigError: It cannot be found, is no LoRA adapter in safetensors, has another base or task, belongs to base
            weights that no file contains, is on bare parameters or tied embeddings, or lacks weights.
    """
    with explained(key, name):
        is_folder = Path(name).is_dir()
        folder = Path(name if is_folder else snapshot_download(name, allow_patterns=[ADAPTER_CONFIG, ADAPTER_WEIGHTS]))
        saved = PeftConfig.from_pretrained(str(folder))
    problems = [*check_saved(saved, folder, task_type), *([] if on_any_base else check_base(saved, model.config))]
    if problems:
        raise ConfigError(*(Problem(key, f"{name} {found}", remedy) for found, remedy in problems))
    # An adapter without a task gets that of the model, which selects PEFT's wrapper class.
    saved.lora_dropout, saved.task_type = dropout, task_type
    with explained(key, name), suppress_peft_warnings():
        try:
            adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=is_trainable, config=saved)
        # Caught inside of ``explained``, which would report a damaged file rather than another architecture.
        except (RuntimeError, KeyError) as error:
            found = f"{name} does not fit the model: {read_last_line(error)}"
            remedy = "name a complete adapter of this model; if its vocabulary is larger, merge it with PEFT first"
            raise ConfigError(Problem(key, found, remedy)) from error
    verify_layers(adapted, key)
    if _adapts_tied_embeddings(adapted):
        found = f"{name} has low-rank matrices on tied embeddings, and merging them would change both embeddings"
        raise ConfigError(Problem(key, found, "name an adapter without them, or with modules_to_save"))
    _train_whole_modules_in_float32(adapted)
    _leave_casts_to_autocast(adapted)
    # PEFT only warns about missing weights, and ignores unexpected ones.
    weights = {name: tensor for name, tensor in load_file(folder / ADAPTER_WEIGHTS).items() if BASE_LAYER not in name}
    state = read_adapter_state(adapted)
    if differing := state.keys() ^ weights.keys():
        raise _refuse_weights(key, name, differing)
    if infinite := [one for one, tensor in weights.items() if not tensor.isfinite().all()]:
        found = f"{name} has NaN or infinity in {len(infinite)} weights, such as {min(infinite)}"
        raise ConfigError(Problem(key, found, "name an earlier checkpoint"))
    # It rounds whole modules to half precision, and renames the weights of some models wrongly (Laguna).
    for one, tensor in state.items():
        tensor.copy_(weights[one])
    # A model on the meta device, of which shapes are counted, has no values.
    values = {one: tensor.cpu() for one, tensor in read_adapter_state(adapted).items() if not tensor.is_meta}
    if lost := [one for one, tensor in values.items() if not torch.equal(tensor.to(weights[one]), weights[one])]:
        found = f"PEFT does not restore {len(lost)} weights of {name}, such as {min(lost)}"
        raise ConfigError(Problem(key, found, "leave these layers out of lora_target_modules"))
    return adapted


def attach_scorer(model: PeftModel, folder: Path, name: str) -> Tensor:
    """Add a saved adapter with a score head to a causal language model with adapters; the new one is frozen.

    Args:
        model: PEFT model on the base that the adapter was trained on (``find_shareable``).
        folder: Folder of the saved adapter.
        name: Name of the added adapter in PEFT.

    Returns:
        Weight of the head, ``(1, D)``, which a causal language model has no module for.

    Raises:
        ConfigError: The weights and the configuration disagree, there is no head, or the adapter is on bare parameters.
    """
    # A causal language model has no `score` module: the head is separate, and the adapter is loaded without it.
    weights = load_file(folder / ADAPTER_WEIGHTS)
    head = weights.pop(_SAVED_HEAD, None)
    saved = PeftConfig.from_pretrained(str(folder))
    saved.task_type, saved.modules_to_save, saved.lora_dropout, saved.inference_mode = "CAUSAL_LM", None, 0.0, True
    with suppress_peft_warnings():
        model.add_adapter(name, saved)
    verify_layers(model, "reward_model_name_or_path")
    announced = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    expected, found = ({(key, part.shape) for key, part in each.items()} for each in (announced, weights))
    if head is None or expected != found:
        differing = {key for key, _ in expected ^ found} or {_SAVED_HEAD}
        raise _refuse_weights("reward_model_name_or_path", folder, differing)
    set_peft_model_state_dict(model, weights, adapter_name=name)
    return head


def _refuse_weights(key: str, name: str | Path, differing: Collection[str]) -> ConfigError:
    found = f"{name} and its {ADAPTER_CONFIG} disagree about {len(differing)} weights, such as {min(differing)}"
    return ConfigError(Problem(key, found, "name a complete adapter of this model, or merge it with PEFT first"))


def load_fresh_base(model: PeftModel) -> PreTrainedModel:
    """Load the base model of an adapter from its checkpoint, with the dtype and quantisation of ``model``.

    It is on the device of ``model`` if there is memory for both, otherwise on the CPU.

    Raises:
        ConfigError: The base model cannot be loaded.
    """
    settings, base = model.peft_config[model.active_adapter], model.get_base_model()
    auto_class = AutoModelForSequenceClassification if settings.task_type == "SEQ_CLS" else AutoModelForCausalLM
    device = find_device(base)
    if device.type == "cuda":
        # Memory that torch has cached does not count as free.
        torch.cuda.empty_cache()
        # 20 % for activations of the verification.
        if torch.cuda.mem_get_info(device)[0] < 1.2 * base.get_memory_footprint():
            device = torch.device("cpu")
    options = {"num_labels": base.config.num_labels} if settings.task_type == "SEQ_CLS" else {}
    # Code from the Hub is enabled for this run if the loaded model already uses it.
    has_code = any(kind.__module__.startswith("transformers_modules") for kind in type(base).__mro__)
    name, revision = settings.base_model_name_or_path, settings.revision
    named = ModelConfig(model_name_or_path=name, model_revision=revision, trust_remote_code=has_code)
    saved, _ = load_model_config(named)
    with explained("model_name_or_path", str(settings.base_model_name_or_path)), without_report():
        fresh: PreTrainedModel = auto_class.from_pretrained(
            settings.base_model_name_or_path,
            revision=settings.revision,
            dtype=base.config.dtype,
            quantization_config=getattr(base.config, "quantization_config", None) or build_dequantization(saved),
            attn_implementation=base.config._attn_implementation,
            device_map={"": device},
            trust_remote_code=has_code,
            **options,
        )
    # The same 4-bit kernel as in training, so that results are comparable.
    keep_differentiable(fresh)
    return fresh


@contextmanager
def adapters_off(model: PeftModel) -> Iterator[None]:
    """Context in which all adapters are disabled, in evaluation mode without gradients.

    The modes of all modules and ``requires_grad`` of all parameters are restored.

    Raises:
        ValueError: The initialisation of the adapter changed the base weights (``pissa``, ``olora``).
    """
    if has_changed_base(model):
        raise ValueError("the base of an adapter initialised by pissa or olora is no reference model")
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def restore_flags() -> None:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)

    # Not ``model.disable_adapter()``, which first reads the state of every layer: as long as all the rest.
    layers: Any = model.base_model
    try:
        with evaluating(model):
            layers.disable_adapter_layers()
            # It freezes the adapter, but FSDP2 reads ``requires_grad`` in its first forward pass.
            restore_flags()
            yield
    finally:
        layers.enable_adapter_layers()
        restore_flags()


def has_changed_base(model: PeftModel) -> bool:
    """Return whether the initialisation of the adapter changed the base weights (``pissa``, ``olora``)."""
    return changes_base_weights(model.peft_config[model.active_adapter])


def read_adapter_state(model: PeftModel) -> dict[str, Tensor]:
    """Return the weights of the active adapter by their names in a saved file."""
    # With save_embedding_layers="auto", PEFT queries the Hub to detect resized embeddings.
    state: dict[str, Tensor] = get_peft_model_state_dict(
        model, adapter_name=model.active_adapter, save_embedding_layers=False
    )
    return state


def describe_adapter(model: PeftModel) -> dict[str, Any]:
    """Return the adapter's record for ``run.json``: base model and commit, rank, and numbers of parameters."""
    settings = model.peft_config[model.active_adapter]
    num_trained, num_parameters = model.get_nb_trainable_parameters()
    return {
        "base_model": settings.base_model_name_or_path,
        "base_revision": settings.revision,
        "r": settings.r,
        "lora_alpha": settings.lora_alpha,
        "num_trained_parameters": num_trained,
        "num_parameters": num_parameters,
    }


def check_layers(model: PreTrainedModel, config: AdapterConfig) -> Iterator[Problem]:
    """Yield problems of target layers: unknown names, and layers that do not support the adapter of ``config``.

    PEFT silently ignores unknown names in ``lora_modules_to_save``, and in ``lora_target_modules`` beside known ones.
    """
    modules = _list_modules(model)
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[no-untyped-call]
    for name in config.lora_modules_to_save or []:
        if not find_modules(model, name):
            yield _explain_unknown("lora_modules_to_save", name, modules)
    for name in config.lora_target_modules or []:
        found = find_modules(model, name)
        others = [module for module in found.values() if not isinstance(module, nn.Linear | Conv1D)]
        if not found:
            linear = [path for path, module in modules.items() if isinstance(module, nn.Linear | Conv1D)]
            yield _explain_unknown("lora_target_modules", name, linear)
        elif any(module is embedding for module in found.values() for embedding in embeddings):
            remedy = f"train it fully: lora_modules_to_save: [{name}]"
            yield Problem("lora_target_modules", f"{name} is an embedding or the output projection", remedy)
        elif find_experts(model, found):
            what = f"PEFT treats {name} of {type(model).__name__} as experts, which are not linear layers"
            yield Problem("lora_target_modules", what, _USE_DEFAULT)
        elif others:
            what = type(others[0]).__name__
            yield Problem("lora_target_modules", f"{name} is a {what}, not a linear layer", "name the layers inside it")
        elif _find_shared(found):
            what = f"layers called {name} share their weights, to which merging would add the adapters of all of them"
            yield Problem("lora_target_modules", what, _USE_DEFAULT)
    yield from _check_init(model, config)


def _adapts_tied_embeddings(model: PeftModel) -> bool:
    base = model.get_base_model()
    embeddings = [base.get_input_embeddings(), base.get_output_embeddings()]
    is_tied = getattr(base.config.get_text_config(), "tie_word_embeddings", False)
    return is_tied and any(hasattr(embedding, "base_layer") for embedding in embeddings)


def _verify_tie(model: PeftModel) -> None:
    """Verify that tied embeddings are still tied: PEFT detects ties by module names.

    Raises:
        ConfigError: Input and output embedding are different tensors.
    """
    if model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
        found = f"the embeddings of {type(model.get_base_model()).__name__} are tied, and PEFT unties them"
        raise ConfigError(Problem("lora_modules_to_save", found, "remove the embeddings"))


def _train_whole_modules_in_float32(model: PeftModel) -> None:
    """Convert fully trained modules of a half-precision model to ``float32``, like PEFT's low-rank matrices.

    In half precision, most of Adam's updates would be rounded away.
    """
    for wrapper in [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]:
        dtype = next(wrapper.original_module.parameters()).dtype
        if dtype in (torch.bfloat16, torch.float16):
            for trained in wrapper.modules_to_save.values():
                trained.float()
                trained.register_forward_pre_hook(lambda _module, inputs: convert_to_fp32(inputs))
                trained.register_forward_hook(functools.partial(_narrow_output, dtype))


def _narrow_output(dtype: torch.dtype, _module: nn.Module, _inputs: Any, output: Any) -> Any:
    # Other outputs are those of the loss head, whose sums stay float32.
    return output.to(dtype) if isinstance(output, Tensor) else output


def _leave_casts_to_autocast(model: PeftModel) -> None:
    """Convert the inputs of low-rank matrices to ``float32`` only without autocast, as PEFT's 4-bit layers do.

    Autocast converts them back to 16 bits: equal results, but two more copies per layer, and one more saved activation.
    A DoRA layer computes the norms of its weights in the dtype of its input, and keeps the conversion.
    """
    for layer in model.modules():
        if isinstance(layer, LoraLayer) and not layer.lora_variant:
            layer._cast_input_dtype = _cast_without_autocast


def _cast_without_autocast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return x if x is None or torch.is_autocast_enabled(x.device.type) else x.to(dtype)


@contextmanager
def suppress_peft_warnings() -> Iterator[None]:
    """Suppress a deprecation that PEFT 0.21 triggers in transformers, and that the meta device takes no values."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        yield


def find_targets(model: PreTrainedModel, config: AdapterConfig) -> dict[str, Any]:
    """Return the layers that get an adapter, by path."""
    if config.lora_target_modules is not None:
        return {
            path: module for name in config.lora_target_modules for path, module in find_modules(model, name).items()
        }
    linear = _find_linear(model)
    excluded = {*find_experts(model, linear), *_find_unsupported(model, linear)}
    return {path: module for path, module in linear.items() if path not in excluded}


def find_bare_layers(model: PreTrainedModel, config: AdapterConfig) -> str | None:
    """Return a caution if named targets miss layers: only each fourth layer of Qwen 3.5 has a `q_proj`."""
    indices = {index[1] for path in find_targets(model, config) if (index := re.search(r"\.(\d+)\.", path))}
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)  # BLT has several lists of layers.
    if config.lora_target_modules is None or not 0 < len(indices) < num_layers:
        return None
    found = f"lora_target_modules: the names are those of modules in {len(indices)} of {num_layers} layers"
    return f"{found}; without the key, all have an adapter"


def _find_unsupported(model: PreTrainedModel, linear: Mapping[str, nn.Module]) -> list[str]:
    """Return the paths of linear layers whose adapter would fail, be ignored, or get no gradient; and of routers.

    Routers that inherit from a linear layer return tuples, and grouped layers (DeepSeek V4) multiply each group of
    features by its own block. Mamba's kernel reads the weight of ``dt_proj``, LongCat's router that of its classifier,
    Gemma 3n in training that of ``correction_coefs``.
    The indexer of sparse attention only selects tokens, which is not differentiable. Adapters of layers that share a
    weight (``_find_shared``) would add up when merged.
    """
    names: tuple[str, ...] = ("correction_coefs", "dt_proj", "gate.wg", "router.classifier", "router.layer")
    names += ("out_proj",) if model.config.model_type in _MAMBA else ()
    shared = _find_shared(linear)
    return [
        path
        for path, module in linear.items()
        if path.endswith(names)
        or path in shared
        or ".indexer." in path
        or type(module).__name__.endswith(("Router", "GroupedLinear"))
    ]


def _find_shared(modules: Mapping[str, Any]) -> set[str]:
    """Return the paths of modules that share their weight with another, as the attention layers of Zamba do."""
    counts = Counter(id(module.weight) for module in modules.values())
    return {path for path, module in modules.items() if counts[id(module.weight)] > 1}


def name_targets(model: PreTrainedModel, config: AdapterConfig) -> list[str] | str:
    """Return PEFT's ``target_modules``: names, or full paths if names would match unsupported layers too.

    Such layers are the experts of a mixture, layers outside the text model, and those of ``_find_unsupported``.
    """
    targets = config.lora_target_modules or ALL_LINEAR
    is_exact = not takes_experts(model, targets) and not find_outside_text(model)
    is_supported = targets != ALL_LINEAR or not _find_unsupported(model, _find_linear(model))
    return targets if is_exact and is_supported else [*find_targets(model, config)]


def name_whole_modules(model: PreTrainedModel, config: AdapterConfig) -> tuple[list[str], bool]:
    """Return the names of fully trained modules, and whether they include tied embeddings.

    If one of two tied embeddings is named, both are included, because they share one matrix.
    """
    named = config.lora_modules_to_save or []
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[no-untyped-call]
    paths = [path for path, module in model.named_modules() if any(module is one for one in embeddings)]
    others = [name for name in named if not find_modules(model, name).keys() & set(paths)]
    # A reward model has the key of its start model, and no output embedding.
    is_tied = len(paths) > 1 and getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    return ([*others, *paths], True) if is_tied and len(others) < len(named) else ([*named], False)


def stores_transposed(model: PreTrainedModel, config: AdapterConfig) -> bool:
    """Return whether target layers store their weights as ``(in, out)``, as ``Conv1D`` of GPT-2 does."""
    return any(isinstance(module, Conv1D) for module in find_targets(model, config).values())


def verify_layers(model: PeftModel, key: str) -> None:
    """Verify that all adapters are on layers.

    Args:
        model: PEFT model with its adapters.
        key: Configuration key that names the adapter.

    Raises:
        ConfigError: An adapter is on bare parameters, such as stacked experts.
    """
    if stacks := {name for settings in model.peft_config.values() for name in settings.target_parameters or ()}:
        found = f"the adapter is on {', '.join(sorted(stacks))}, which are parameters, not linear layers"
        raise ConfigError(Problem(key, found, "name linear layers only, or an adapter of linear layers"))


def takes_experts(model: PreTrainedModel, targets: list[str] | str) -> bool:
    """Return whether PEFT, given ``targets``, would adapt stacked experts or their routers.

    Source: ``peft.utils.transformers_weight_conversion``; ``tests/models/adapters/test_adapter_experts.py``.
    """
    # The same conversion as in get_peft_model, which turns targets of experts into target_parameters.
    settings = LoraConfig(target_modules=targets)
    try:
        convert_peft_config_for_transformers(settings, model, None)
    except ValueError:  # Raised if only one of two matrices that share a stack is targeted.
        return True
    return bool(settings.target_parameters)


def find_experts(model: PreTrainedModel, paths: Iterable[str]) -> set[str]:
    """Return the paths that PEFT would treat as experts, by the last part of their names.

    Shared experts or dense layers can have the same name; their adapter could then not be loaded again.
    """
    # One PEFT query per distinct name rather than per layer.
    last_names = {path: path.rpartition(".")[2] for path in paths}
    taken = {name for name in set(last_names.values()) if takes_experts(model, [name])}
    return {path for path, name in last_names.items() if name in taken}


def find_modules(model: PreTrainedModel, name: str) -> dict[str, nn.Module]:
    """Return the modules of the text model whose path is ``name`` or ends with ``.name``, by path."""
    return {path: module for path, module in _list_modules(model).items() if f".{path}".endswith(f".{name}")}


def _list_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    parts = find_outside_text(model)
    return {path: module for path, module in model.named_modules() if not is_outside(path, parts)}


def _find_linear(model: PreTrainedModel) -> dict[str, nn.Module]:
    heads = [model.get_output_embeddings(), getattr(model, HEAD, None)]  # type: ignore[no-untyped-call]
    return {
        path: module
        for path, module in _list_modules(model).items()
        if isinstance(module, nn.Linear | Conv1D) and not any(module is head for head in heads)
    }


def _check_init(model: PreTrainedModel, config: AdapterConfig) -> Iterator[Problem]:
    init, key = config.init_lora_weights, "init_lora_weights"
    if init in _NEED_FULL_PRECISION and getattr(model, "is_quantized", False):
        found = f"{init} needs unquantised weights, and these are quantised"
        yield Problem(key, found, "write init_lora_weights: default, or load the model without quantisation")
        return
    if init == "orthogonal" and config.lora_r % 2:
        found = f"init_lora_weights: orthogonal needs an even rank, and lora_r is {config.lora_r}"
        yield Problem("lora_r", found, f"write {config.lora_r + 1}")
    if init == "olora" and stores_transposed(model, config):
        yield Problem(key, f"olora cannot read the weights of {type(model).__name__}", "write init_lora_weights: pissa")
    if init in ("pissa", "olora"):
        # Other targets are reported by ``check_layers``.
        layers = [layer for layer in find_targets(model, config).values() if isinstance(layer, nn.Linear | Conv1D)]
        # Under ZeRO-3 weights are empty placeholders, which PEFT gathers.
        shapes = [getattr(layer.weight, "ds_shape", layer.weight.shape) for layer in layers]
        largest = min(map(min, shapes), default=config.lora_r)
        if config.lora_r > largest:
            found = f"{init} finds at most {largest} directions in the smallest layer, and lora_r is {config.lora_r}"
            yield Problem("lora_r", found, f"write {largest} or less")


def _explain_unknown(key: str, name: str, modules: Iterable[str]) -> Problem:
    last_names = sorted({last for path in modules if (last := path.rpartition(".")[2]) and not last.isdigit()})
    remedy = suggest(name.rpartition(".")[2], last_names, f"there are {', '.join(last_names)}")
    return Problem(key, f"the model has no module {name!r}", remedy)
