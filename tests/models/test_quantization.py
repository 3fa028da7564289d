"""Quantised loading by bitsandbytes: quantised layers, memory, gradients and adapters."""

import importlib.util
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import AdapterConfig, ModelConfig, QuantizationConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models import loading
from recipes_lib.models.adapters.lora import adapters_off, add_adapter, load_fresh_base
from recipes_lib.models.heads.loss_head import add_loss_head, verify_loss_head
from recipes_lib.models.inference import compute_probe_logits
from recipes_lib.models.loading import load_causal_lm
from recipes_lib.models.quantization import (
    build_quantization_config,
    check_quantization,
    count_stored_bytes,
    find_unquantized,
)
from recipes_lib.planning.compute import find_planned_model
from recipes_lib.training.trainers.trained_model import load_verified_config

BITS = {
    "nf4": QuantizationConfig(load_in_4bit=True),
    "nf4 plain": QuantizationConfig(load_in_4bit=True, use_bnb_nested_quant=False),
    "fp4": QuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "int8": QuantizationConfig(load_in_8bit=True),
}


def build(config, compute_dtype=torch.float32, engine=""):
    return build_quantization_config(config, compute_dtype, engine)


def load(model_dir, config, *, dtype="float32", **options):
    return load_causal_lm(ModelConfig(model_name_or_path=str(model_dir), dtype=dtype), "sdpa", build(config, **options))


def catch_problems(config, engine=""):
    with pytest.raises(ConfigError) as caught:
        build(config, engine=engine)
    return caught.value.problems


def test_no_quantization_config_by_default():
    assert build(QuantizationConfig()) is None


@pytest.mark.parametrize(("name", "key"), [("nf4", "load_in_4bit"), ("int8", "load_in_8bit")])
def test_missing_bitsandbytes_is_reported(monkeypatch, name, key):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = catch_problems(BITS[name])
    assert problem.where == key
    assert problem.found == "bitsandbytes not installed"
    assert problem.remedy == "pip install 'recipes-lib[gpu]'"


@pytest.mark.parametrize(
    ("engine", "compute_dtype", "stored_as"),
    [
        ("", torch.bfloat16, torch.uint8),
        ("FSDP", torch.bfloat16, torch.bfloat16),
        ("FSDP", torch.float32, torch.float32),
        ("DEEPSPEED", torch.float16, torch.float16),
    ],
)
def test_quant_storage_is_compute_dtype_under_sharding_engines(tiny_model_dir, engine, compute_dtype, stored_as):
    model = load(tiny_model_dir, BITS["nf4"], compute_dtype=compute_dtype, engine=engine)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == stored_as
    assert weight.quant_state.nested
    # Half a byte per weight in any storage dtype; the engine's cast to that dtype is the identity.
    assert weight.nbytes == 128 * 64 // 2
    if engine:
        assert torch.equal(weight.to(compute_dtype).view(torch.uint8), weight.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "run_on", "expected"), [("nf4", "cpu", {"": "cpu"}), ("int8", "cpu", {"": "cpu"}), ("nf4", "cuda", None)]
)
def test_run_on_cpu_of_machine_with_gpu_loads_to_cpu(tiny_model_dir, monkeypatch, name, run_on, expected):
    """transformers chooses the GPU unless a map is given."""
    given = []
    for quantizer in (Bnb4BitHfQuantizer, Bnb8BitHfQuantizer):
        choose = quantizer.update_device_map
        monkeypatch.setattr(
            quantizer, "update_device_map", lambda self, map_, choose=choose: given.append(map_) or choose(self, map_)
        )
    monkeypatch.setattr(loading, "PartialState", lambda: SimpleNamespace(device=torch.device(run_on)))
    load(tiny_model_dir, BITS[name])
    assert given == [expected]


@pytest.mark.parametrize(
    ("name", "kind", "is_nested"), [("nf4", "nf4", True), ("nf4 plain", "nf4", False), ("fp4", "fp4", True)]
)
def test_quant_type_and_nesting_follow_configuration(tiny_model_dir, name, kind, is_nested):
    state = load(tiny_model_dir, BITS[name]).model.layers[0].mlp.up_proj.weight.quant_state
    assert (state.quant_type, state.nested) == (kind, is_nested)


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_linear_layers_are_quantised(tiny_model_dir, name, dtype):
    model = load(tiny_model_dir, BITS[name], dtype=dtype)
    full = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    rest = {parameter.dtype for key, parameter in model.named_parameters() if "_proj" not in key}
    assert rest == {getattr(torch, dtype)}
    bits = sum(parameter.nbytes for key, parameter in model.named_parameters() if "_proj" in key) * 8
    assert bits == (8 if name == "int8" else 4) * sum(
        parameter.numel() for key, parameter in full.named_parameters() if "_proj" in key
    )
    difference = (compute_probe_logits(model) - compute_probe_logits(full)).abs().max()
    assert 0 < difference < 0.3 * compute_probe_logits(full).abs().max()


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_adapter_on_quantised_base_learns_and_keeps_base_weights(tiny_model_dir, name):
    model = load(tiny_model_dir, BITS[name])
    before = compute_probe_logits(model)
    adapted = add_adapter(model, AdapterConfig(use_peft=True, lora_r=4), seed=0)
    assert torch.equal(compute_probe_logits(adapted), before)
    add_loss_head(adapted)
    verify_loss_head(adapted)
    trained = {key: parameter for key, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    assert all("lora_" in key for key in trained)
    frozen = {key: p.detach().clone() for key, p in adapted.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    input_ids = torch.arange(4, 36)[None]
    losses = []
    for _ in range(30):
        sums = adapted(input_ids=input_ids, labels=input_ids, loss_head=True)
        (sums.nll_sum / sums.num_targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sums.nll_sum.item())
    assert losses[-1] < 0.95 * losses[0]
    now = dict(adapted.named_parameters())
    assert all(torch.equal(now[key], tensor) for key, tensor in frozen.items())
    with adapters_off(adapted):
        assert torch.equal(compute_probe_logits(adapted), before)


@pytest.mark.parametrize("name", ["nf4", "nf4 plain", "fp4"])
def test_adapter_gradients_equal_dequantised_base_after_evaluation(tiny_model_dir, name):
    from bitsandbytes.functional import dequantize_4bit

    model = load(tiny_model_dir, BITS[name])
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    for path, module in model.named_modules():
        if hasattr(module.weight if hasattr(module, "weight") else None, "quant_state"):
            codes = module.weight
            reference.get_submodule(path).weight.data = dequantize_4bit(codes.data, codes.quant_state).float()
    input_ids = torch.arange(4, 36)[None]
    gradients = []
    for base in (model, reference):
        adapted = add_adapter(base, AdapterConfig(use_peft=True, lora_r=4), seed=0)
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                parameter.data.fill_(0.01)
        adapted.train()
        compute_probe_logits(adapted)
        adapted(input_ids=input_ids, labels=input_ids).loss.backward()
        gradients.append({key: p.grad for key, p in adapted.named_parameters() if p.grad is not None})
    assert len(gradients[0]) == 2 * 2 * 7
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("bits", "other"), [("load_in_4bit", "load_in_8bit"), ("load_in_8bit", "load_in_4bit")])
def test_quantised_checkpoint_requires_key_of_its_bits(tiny_model_dir, tmp_path, bits, other):
    few = QuantizationConfig(**{bits: True})
    load(tiny_model_dir, few).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="quantised") as caught:
        load(tmp_path, QuantizationConfig())
    assert f"set {bits}: true and use_peft: true, or" in caught.value.problems[0].remedy
    # transformers would ignore the other key and keep the bits of the checkpoint.
    with pytest.raises(ConfigError, match=rf"is quantised \({bits}\), not to {other}") as caught:
        load(tmp_path, QuantizationConfig(**{other: True}))
    assert caught.value.problems[0].where == other
    keys = {
        "model_name_or_path": tmp_path,
        "dataset_name": tmp_path / "config.json",
        "output_dir": tmp_path,
        other: "true",
    }
    run = load_config("lora", [f"--{name}={value}" for name, value in keys.items()])
    with pytest.raises(ConfigError, match=f"not to {other}"):
        find_planned_model(run)
    with pytest.raises(ConfigError, match=f"not to {other}"):
        load_verified_config(run, AutoTokenizer.from_pretrained(tiny_model_dir), 64)
    config = AutoConfig.from_pretrained(tmp_path)
    assert [len([*check_quantization("x", config, one)]) for one in (few, QuantizationConfig())] == [0, 1]
    assert torch.equal(compute_probe_logits(load(tmp_path, few)), compute_probe_logits(load(tiny_model_dir, few)))


@pytest.mark.parametrize("init", ["pissa", "olora", "orthogonal"])
def test_weight_reading_init_is_refused_on_quantised_base(tiny_model_dir, init):
    # With codes stored as float32, as under FSDP, PEFT would decompose the codes themselves.
    model = load(tiny_model_dir, BITS["nf4"], engine="FSDP")
    with pytest.raises(ConfigError, match="unquantised weights"):
        add_adapter(model, AdapterConfig(use_peft=True, init_lora_weights=init), seed=0)


def test_dora_and_rslora_are_identity_on_quantised_base(tiny_model_dir):
    model = load(tiny_model_dir, BITS["nf4"])
    before = compute_probe_logits(model)
    adapted = add_adapter(model, AdapterConfig(use_peft=True, use_dora=True, use_rslora=True), seed=0)
    torch.testing.assert_close(compute_probe_logits(adapted), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_count_stored_bytes_equals_loaded_model(tiny_model_dir, bits):
    config = BITS[bits]
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model_dir))
    assert count_stored_bytes(empty, QuantizationConfig()) == empty.get_memory_footprint()
    held = []
    for module in load(tiny_model_dir, config).modules():
        held += [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if config.load_in_8bit and hasattr(module, "weight") and getattr(module.weight, "SCB", None) is not None:
            held.append(module.weight.SCB)
        if config.load_in_4bit and (state := getattr(getattr(module, "weight", None), "quant_state", None)):
            held += [state.absmax, *([state.state2.absmax] if state.nested else [])]
    real = sum(t.numel() * t.element_size() for t in {id(t): t for t in held if t is not None}.values())
    assert count_stored_bytes(empty, config) == pytest.approx(real, rel=5e-3)


@pytest.mark.parametrize("bits", ["nf4", "int8"])
def test_experts_that_stay_unquantised_are_counted(tiny_model_dir, tmp_path, caplog, bits):
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    full = MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    full.save_pretrained(tmp_path)
    load(tiny_model_dir, BITS[bits])
    assert "experts" not in caplog.text
    model = load(tmp_path, BITS[bits])
    kept = sum(
        p.numel() for layer in model.model.layers for p in layer.mlp.experts.parameters() if p.dtype.itemsize > 1
    )
    assert find_unquantized(model) == find_unquantized(full), "also before loading, as in recipes check"
    assert f"{kept / 1e6:,.1f} M of {full.num_parameters() / 1e6:,.1f} M parameters" in caplog.text


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_mamba_is_refused_before_it_is_quantised(tmp_path, bits):
    sizes = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(tmp_path)
    assert [*check_quantization("x", MambaConfig(**sizes), QuantizationConfig())] == []
    with pytest.raises(ConfigError, match="quantised weights of Mamba") as caught:
        load(tmp_path, QuantizationConfig(**{bits: True}))
    assert caught.value.problems[0].where == bits


def save_as_fp8(model_dir, folder):
    """Save a model as DeepSeek does: linear layers in float8 with a scale per block of 128 x 128."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model.config.save_pretrained(folder)
    tensors = {}
    for key, weight in model.state_dict().items():
        if "_proj" in key:
            scale = weight.abs().max() / 448
            tensors[f"{key}_scale_inv"] = scale.expand([-(-size // 128) for size in weight.shape]).contiguous()
            weight = (weight / scale).to(torch.float8_e4m3fn)
        tensors[key] = weight.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model


def test_fp8_checkpoint_is_trained_dequantised_on_any_device(tiny_model_dir, tmp_path, monkeypatch):
    full = save_as_fp8(tiny_model_dir, tmp_path)
    # On such a GPU, transformers would keep the codes, and compute with kernels that have no gradient.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(loading, "PartialState", lambda: SimpleNamespace(device=torch.device("cpu")))
    model = load(tmp_path, QuantizationConfig())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not hasattr(model.config, "quantization_config")
    difference = (compute_probe_logits(model) - compute_probe_logits(full)).abs().max()
    assert 0 < difference < 0.1 * compute_probe_logits(full).abs().max()
    expected = compute_probe_logits(model)
    fresh = load_fresh_base(add_adapter(model, AdapterConfig(use_peft=True), seed=0))
    assert torch.equal(compute_probe_logits(fresh), expected)


@pytest.mark.parametrize(
    ("method", "bits", "found"),
    [
        ("gptq", {}, r"is quantised \(gptq\)"),
        ("awq", {}, r"is quantised \(awq\)"),
        ("compressed-tensors", {}, r"is quantised \(compressed-tensors\)"),
        ("unheard-of", {}, r"is quantised \(unheard-of\)"),
        ("gptq", {"load_in_4bit": True}, r"is quantised \(gptq\), not to load_in_4bit"),
        ("mxfp4", {"load_in_4bit": True}, r"is quantised \(mxfp4\), not to load_in_4bit"),
        ("mxfp4", {}, None),
        ("fp8", {}, None),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_checkpoint_of_other_method_is_refused_unless_dequantised(method, bits, found, is_nested):
    saved = {"quantization_config": {"quant_method": method}}
    config = MistralConfig(**saved)
    if is_nested:
        config = AutoConfig.for_model("llava", text_config={"model_type": "mistral", **saved})
    problems = [*check_quantization("x", config, QuantizationConfig(**bits))]
    assert [bool(re.search(found or "", one.found)) for one in problems] == [True] * bool(found)
