"""FSDP2: mixed precision, frozen models and the gradient norm, in one process (sharding: ``tests/distributed``)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.training.checkpoints.sharded import gather_trained_state
from recipes_lib.training.layouts import fsdp
from recipes_lib.training.layouts.fsdp import (
    compute_total_norm,
    gathered,
    prepare_frozen,
    set_precision,
    shard,
    shard_chunk,
    sharding,
)

NUM_LAYERS = 3


def build_accelerator(policy: MixedPrecisionPolicy | None, *, is_fsdp2: bool) -> SimpleNamespace:
    return SimpleNamespace(
        is_fsdp2=is_fsdp2, state=SimpleNamespace(fsdp_plugin=SimpleNamespace(mixed_precision_policy=policy))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_policy_casts_parameters_only(dtype):
    narrow = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    ours = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # Without mixed precision, and without FSDP, the policy is unchanged.
    for policy, is_fsdp2, expected in ((narrow, True, ours), (None, True, None), (narrow, False, narrow)):
        accelerator = build_accelerator(policy, is_fsdp2=is_fsdp2)
        set_precision(accelerator)
        assert accelerator.state.fsdp_plugin.mixed_precision_policy == expected


@pytest.fixture
def mesh():
    """Device mesh of one process, whose shards are whole tensors."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("is_read_once", [True, False])
@pytest.mark.usefixtures("mesh")
def test_buffers_and_absent_layers_are_left_out_while_sharding(is_read_once):
    """accelerate takes tensors of the state for parameters, and fails on classes that the model lacks."""
    model, name = make_model(), "model.norm.bias"
    model.model.norm.register_buffer("bias", torch.ones(2, device="meta"))
    model._no_split_modules = ["LlamaDecoderLayer", "VisionBlock"]
    accelerator = build_accelerator(None, is_fsdp2=True)
    accelerator.state.fsdp_plugin.cpu_ram_efficient_loading, accelerator.device = is_read_once, torch.device("cpu")
    with sharding(accelerator, model):
        assert model._no_split_modules == ["LlamaDecoderLayer"]
        assert (name in model.state_dict()) != is_read_once
        assert model.model.norm.bias.is_meta != is_read_once
    assert name in model.state_dict()


@pytest.mark.parametrize("is_read_once", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_trained_copies_of_embeddings_stay_tied(mesh, is_read_once, is_tied):
    model = make_model(tie_word_embeddings=is_tied)
    adapted = add_adapter(model, AdapterConfig(use_peft=True, lora_modules_to_save=["embed_tokens", "lm_head"]), seed=0)
    ids = torch.arange(24).view(2, 12)
    expected, state = adapted(input_ids=ids).logits, {name: one.clone() for name, one in adapted.state_dict().items()}
    accelerator = build_sharding(cpu_ram_efficient_loading=is_read_once)
    set_precision(accelerator)
    sharded = shard(accelerator, adapted)
    torch.testing.assert_close(sharded(input_ids=ids).logits, expected, atol=0.02, rtol=0)
    inputs, outputs = sharded.get_input_embeddings(), sharded.get_output_embeddings()
    for read in (lambda one: one.modules_to_save["default"].weight, lambda one: one.original_module.weight):
        assert (read(inputs) is read(outputs)) is is_tied
    found = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in sharded.state_dict().items()}
    torch.testing.assert_close(found, state, atol=0, rtol=0)
    # As PEFT saves them, under both names.
    trained = {name: one for name, one in state.items() if "lora_" in name or "modules_to_save" in name}
    torch.testing.assert_close(gather_trained_state(sharded), trained, atol=0, rtol=0)


def make_model(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=48, **sizes, **options)).train()


def build_sharding(*, cpu_ram_efficient_loading: bool) -> Any:
    wide = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        mixed_precision_policy=wide,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=cpu_ram_efficient_loading,
    )
    return SimpleNamespace(
        is_fsdp2=True,
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="bf16",
        is_main_process=True,
        device=torch.device("cpu"),
    )


def prepare(sharder: str, mesh: Any) -> LlamaForCausalLM:
    accelerator, model = build_sharding(cpu_ram_efficient_loading=False), make_model()
    if sharder == "wide everywhere":
        return fsdp2_prepare_model(accelerator, model)
    if sharder == "chunk":
        shard_chunk(model, [*model.model.layers, model.model.embed_tokens], mesh, torch.bfloat16)
        return model
    if sharder == "frozen":
        set_precision(accelerator)
        return shard(accelerator, model)
    set_precision(accelerator, model)
    return fsdp2_prepare_model(accelerator, model)


class Collectives(TorchDispatchMode):
    """Records the collectives that are called, with the shape of their first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.Size]] = []

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "c10d":
            self.calls.append((str(operator), args[0].shape))
        return operator(*args, **(kwargs or {}))


class Casts(TorchDispatchMode):
    """Counts casts of hidden states to another dtype."""

    num = 0

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        is_cast = operator is torch.ops.aten._to_copy.default and result.shape == (2, 12, 32)
        self.num += is_cast and args[0].dtype != result.dtype
        return result


def train_step(model: LlamaForCausalLM) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
    """Return the logits, the number of casts of hidden states, and the gradients."""
    ids = torch.arange(24).view(2, 12)
    with Casts() as casts:
        output = model(input_ids=ids, use_cache=False)
        output.logits.square().mean().backward()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return output.logits.detach(), casts.num, gradients


@pytest.mark.parametrize("sharder", ["trained", "frozen", "chunk"])
def test_only_root_module_casts_output_to_float32(mesh: Any, sharder: str) -> None:
    logits, casts, gradients = train_step(prepare("wide everywhere", mesh))
    found_logits, found_casts, found_gradients = train_step(prepare(sharder, mesh))
    assert found_logits.dtype == logits.dtype == torch.float32
    torch.testing.assert_close(found_logits, logits, rtol=0, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=0, atol=0)
    # Two casts forward and two backward, after the embedding and each layer.
    assert casts - found_casts >= 4 * (NUM_LAYERS + 1)


@pytest.mark.parametrize("num_passes", [1, 3])
def test_passes_over_gathered_weights_leave_later_collectives_unchanged(num_passes: int) -> None:
    """Ranks sample different numbers of tokens; the next step must make the same collectives on each."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh, calls, ids = init_device_mesh("cpu", (2,)), [], torch.arange(24).view(2, 12)
        for number in (0, num_passes):
            model = make_model()
            head: list[nn.Module] = [model.model.norm, model.lm_head]
            for unit in (model.model.embed_tokens, *model.model.layers, head, model):  # As accelerate's.
                fully_shard(unit, mesh=mesh)
            with gathered(model), torch.no_grad():
                for _ in range(number):
                    model(input_ids=ids, use_cache=False)
            with Collectives() as collectives:
                model(input_ids=ids, use_cache=False).logits.square().mean().backward()
            calls.append(collectives.calls)
        # Every unit is gathered for each pass, and its gradient reduced.
        assert len(calls[0]) > 2 * NUM_LAYERS
        assert calls[0] == calls[1]
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("recipe", [None, SimpleNamespace(config="tensorwise", module_filter_func=None)])
def test_frozen_model_has_products_of_trained_one_and_is_in_no_checkpoint(monkeypatch, recipe):
    """Otherwise, under fp8, log-probabilities of a reference would differ from those of the equal policy."""
    models: list[nn.Module] = []
    converted: list[tuple[nn.Module, Any]] = []

    def prepare_model(model: nn.Module, **_: bool) -> nn.Module:
        models.append(model)
        return model

    def convert(model: nn.Module, config: Any, module_filter_func: Any) -> None:
        converted.append((model, config))

    monkeypatch.setattr(fsdp, "convert_model_to_fp8_ao", convert)
    stand_ins: dict[str, Any] = {"prepare_model": prepare_model, "_models": models}
    accelerator: Any = SimpleNamespace(is_fsdp2=False, ao_recipe_handler=recipe, **stand_ins)
    model = nn.Linear(2, 2)
    assert prepare_frozen(accelerator, model) is model
    assert not models
    assert converted == ([] if recipe is None else [(model, "tensorwise")])
    assert prepare_frozen(accelerator, model, is_compiled=False) is model
    model.is_quantized = True
    assert prepare_frozen(accelerator, model) is model
    assert len(converted) == (recipe is not None)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.float16, 40_000)])
def test_total_norm_equals_norm_of_concatenation(dtype, scale):
    """Also of 16-bit tensors: a norm of their dtype would be rounded, or exceed the largest float16."""
    torch.manual_seed(0)
    tensors = [torch.rand(3, 4).mul(scale).to(dtype), torch.rand(5).mul(scale).to(dtype)]
    expected = torch.cat([tensor.flatten() for tensor in tensors]).double().norm()
    assert float(compute_total_norm(tensors)) == pytest.approx(float(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_total_norm_mixes_sharded_and_plain_tensors(dtype):
    """A fake all-reduce adds nothing: the norm is that of the local shard and the plain tensor."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        whole, plain = torch.full((4,), 40_000, dtype=dtype), torch.tensor([60_000.0], dtype=dtype)
        cut = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        # 2, 2 of this rank's shard, and 3, times 20,000: the norm exceeds the largest float16.
        assert float(compute_total_norm([cut, plain])) == pytest.approx(20_000 * 17**0.5, rel=1e-3)
    finally:
        distributed.destroy_process_group()
