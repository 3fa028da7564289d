"""Pipeline parallelism: the layers of a model split into pipeline stages, each rank loading its own part.

Modules of other pipeline stages are replaced by identities, so that the attention mask, positions and the order of
layers stay the model's own code, and every weight keeps its name: the union of all stages is the whole model. Hidden
states are what one pipeline stage sends to the next.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

import torch
from accelerate import PartialState
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.utils import TransformersDeviceMesh

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.inference import find_device
from recipes_lib.models.parallel.pipeline_part import PipelinePart

_PLAN: Final = ["embed_tokens", "layers", "norm"]
"""Keys of transformers' ``base_model_pp_plan`` in models that pipeline parallelism supports."""


@functools.cache
def build_pipeline_mesh(num_stages: int, tensor_size: int) -> DeviceMesh:
    """Build the mesh of all ranks with the dimensions ``pp``, ``fsdp`` and ``tp``; every rank must call it alike.

    The dimensions have transformers' names. ``tp`` is the innermost, and ``fsdp`` is the data-parallel dimension.

    Args:
        num_stages: Number of pipeline stages.
        tensor_size: Tensor-parallel ranks per stage; the world size is a multiple of ``num_stages * tensor_size``.
    """
    shape = (num_stages, distributed.get_world_size() // (num_stages * tensor_size), tensor_size)
    return init_device_mesh(PartialState().device.type, shape, mesh_dim_names=("pp", "fsdp", "tp"))


class AbsentModule(nn.Module):
    """Placeholder for a module of another pipeline stage: the identity."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return ``hidden``."""
        return hidden


def build_pipeline_stage_class(config: PreTrainedConfig, part: PipelinePart) -> type[PreTrainedModel]:
    """Return a subclass of the model's class that builds only the modules of one pipeline stage.

    Loading such a model reads the tensors of this stage only. Its instances have additional attributes: ``part``;
    ``whole_shapes``, the shapes of all tensors of the whole model by name, tied ones once; ``whole_names``, the names
    of all weights of the whole model; and ``is_tied``, whether its embeddings are tied.

    Args:
        config: Configuration of the whole model.
        part: Pipeline stage of this rank.

    Raises:
        ConfigError: transformers has no pipeline-parallel plan for this architecture; it has modules other than
            embedding, layers, norm and projection; its layers do not divide; or it has a load-balancing loss of
            experts, which is computed over all layers at once.
    """
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or list(config.base_model_pp_plan or ()) != _PLAN:
        raise _refuse(config, "transformers has no pipeline-parallel plan of embedding, layers and norm for it")
    if getattr(config, "output_router_logits", False):
        raise _refuse(config, "the load-balancing loss of its experts is computed over all layers at once")
    layers = {number for chunk in part.share_layers(config.num_hidden_layers) for number in chunk}

    def initialise(self: Any, config: PreTrainedConfig, *args: Any, **options: Any) -> None:
        model_class.__init__(self, config, *args, **options)
        self.part = part
        whole = self.state_dict()
        # Excluded by name: transformers may tie the tensors later, on loading.
        self.whole_shapes = {name: whole[name].shape for name in whole if name not in self.all_tied_weights_keys}
        self.whole_names = frozenset(whole)
        self.is_tied = bool(self.all_tied_weights_keys)
        _leave_out(self, part, layers)

    # transformers 5.23 cannot build a mesh with both pipeline stages and FSDP. With this one it applies tensor
    # parallelism only: modules of other stages are absent already, and FSDP2 is applied to chunks (``Pipeline.shard``).
    def prepare(_: Any, config: DistributedConfig, device_map: Any = None) -> tuple[Any, ...]:
        mesh = build_pipeline_mesh(part.num_stages, part.tensor_size)
        return replace(config, fsdp_size=1), PartialState().device, TransformersDeviceMesh(mesh, mesh)

    attributes = {
        "__init__": initialise,
        "prepare_distribute_model": classmethod(prepare),
        # Hidden from transformers' Trainer, which would have accelerate build a mesh without pipeline stages.
        "tp_size": None,
        # save_pretrained writes the class name to the configuration as `architectures`.
        "__module__": model_class.__module__,
        "__qualname__": model_class.__name__,
    }
    return type(model_class.__name__, (model_class,), attributes)


def verify_pipeline_parallel(config: PreTrainedConfig, part: PipelinePart) -> None:
    """Verify that pipeline parallelism supports a model, before any weight is loaded.

    Args:
        config: Configuration of the whole model.
        part: Any pipeline stage of the planned split.

    Raises:
        ConfigError: As ``build_pipeline_stage_class`` and ``split_into_chunks``.
    """
    # One stage is representative. The last one has the norm, a parameter from which `model.dtype` is read.
    last = replace(part, stage=part.num_stages - 1)
    with torch.device("meta"):
        model: Any = build_pipeline_stage_class(config, last)(config)
    model.base_model.embed_tokens, model.base_model.layers = AbsentModule(), nn.ModuleList()
    model.lm_head = AbsentModule()
    # Only the norm and rotary frequencies remain, whose uninitialised values do not affect the check.
    _verify_nothing_between(model.to_empty(device="cpu"))


def build_whole_on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """Return the whole model of a pipeline stage on the meta device."""
    whole_class: Any = type(model).__bases__[0]
    with torch.device("meta"):
        whole: PreTrainedModel = whole_class(model.config)
    return whole


def split_into_chunks(model: Any) -> list[PreTrainedModel]:
    """Return the chunks of a pipeline stage in order, as models of the original class that share its modules.

    The first chunk of the pipeline takes ``input_ids``; any other takes the hidden states of the chunk before it,
    ``(B, L, D)``, as ``inputs_embeds``.

    Raises:
        ConfigError: The model transforms hidden states outside of its layers, which every chunk would repeat.
    """
    part: PipelinePart = model.part
    _verify_nothing_between(model)
    shares = zip(part.chunks, part.share_layers(model.config.num_hidden_layers), strict=True)
    return [
        _view(model, layers, is_first=number == 0, is_last=number == part.total_chunks - 1) for number, layers in shares
    ]


def _leave_out(model: Any, part: PipelinePart, layers: Collection[int]) -> None:
    """Replace modules of other pipeline stages by placeholders; the first and the last stage have tied embeddings."""
    base, is_tied = model.base_model, model.is_tied
    known = rf"({model.base_model_prefix}\.({'|'.join(_PLAN)})|lm_head)\."
    if unknown := [name for name in model.whole_names if not re.match(known, name)]:
        raise _refuse(model.config, f"it has {unknown[0]}, which belongs to no layer")
    _keep(model, base, layers, is_first=part.is_first, is_last=part.is_last)
    # The projection of a tied model is in the last stage; elsewhere transformers must not tie a placeholder.
    if is_tied and not part.is_last:
        model.all_tied_weights_keys = {}
    # Loading would otherwise shard modules that this stage does not have.
    absent = {name for name, module in model.named_modules() if isinstance(module, AbsentModule)}
    model.tp_plan = {name: style for name, style in model.tp_plan.items() if name not in absent}


def _view(model: Any, layers: Collection[int], *, is_first: bool = False, is_last: bool = False) -> PreTrainedModel:
    """Return the model with some layers, plus the embedding in the first chunk, norm and projection in the last."""
    view: Any = _share(model, type(model).__bases__[0])
    base: Any = _share(model.base_model, type(model.base_model))
    setattr(view, model.base_model_prefix, base)
    _keep(view, base, layers, is_first=is_first, is_last=is_last)
    return view  # type: ignore[no-any-return]


def _keep(model: Any, base: Any, layers: Collection[int], *, is_first: bool, is_last: bool) -> None:
    """Replace other layers by placeholders; also the embedding unless first, norm and projection unless last."""
    base.layers = nn.ModuleList(layer if at in layers else AbsentModule() for at, layer in enumerate(base.layers))
    if not is_last:
        base.norm, model.lm_head = AbsentModule(), AbsentModule()
    # A tied embedding is also the projection of the last chunk.
    if not is_first and not (is_last and model.is_tied):
        base.embed_tokens = AbsentModule()


def _share(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Return a shallow copy of a module, whose children can be replaced without changing the original."""
    shared = kind.__new__(kind)
    vars(shared).update(vars(module))
    vars(shared)["_modules"] = dict(module._modules)
    return shared


@torch.no_grad()
def _verify_nothing_between(model: PreTrainedModel) -> None:
    """Verify that a model without layers returns its input embeddings unchanged."""
    device = find_device(model)
    view = _view(model, ())
    states = torch.linspace(-1, 1, 8 * model.config.hidden_size, device=device, dtype=model.dtype).view(1, 8, -1)
    positions = torch.arange(8, device=device)[None]
    given = view.base_model(inputs_embeds=states, position_ids=positions, use_cache=False).last_hidden_state
    if not torch.equal(given, states):
        raise _refuse(model.config, "it transforms hidden states between its embedding and its layers")


def _refuse(config: PreTrainedConfig, why: str) -> ConfigError:
    found = f"a {config.model_type} model does not support pipeline parallelism: {why}"
    remedy = "launch without pipeline stages, with accelerate_configs/fsdp2.yaml where the model does not fit"
    return ConfigError(Problem("pipeline stages", found, remedy))
