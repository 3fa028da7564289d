"""Context managers for evaluation: module modes, random states, kernels, precision and devices are restored."""

from __future__ import annotations

import random
from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.models.adapter_models import build_deep_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from recipes_lib.errors import ConfigError
from recipes_lib.models import inference as evaluation
from recipes_lib.models.attention import varlen
from recipes_lib.models.attention.kernels import verify_isolation
from recipes_lib.models.attention.shared_prompt import prove_shared_prompt
from recipes_lib.models.heads.loss_head import add_loss_head, verify_loss_head
from recipes_lib.models.inference import (
    compute_probe_logits,
    disable_dropout,
    evaluating,
    find_device,
    find_rounding_error,
    kernel_precision,
    measure_rounding,
    preserve_training_state,
    save_random_states,
    temporarily,
    unwrap_adapter,
)
from recipes_lib.models.vocabulary import VocabularyMap, adopt_vocabulary

TINY = {
    "llama": {"attention_dropout": 0.5, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2},
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "mixtral": {"router_jitter_noise": 0.5, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 8},
    "opt": {"dropout": 0.5, "attention_dropout": 0.5, "hidden_size": 16, "ffn_dim": 32, "word_embed_proj_dim": 16},
    "phimoe": {"router_jitter_noise": 0.5, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 8},
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", TINY)
def test_disable_dropout_makes_training_mode_deterministic(kind, implementation):
    config = AutoConfig.for_model(kind, vocab_size=32, num_hidden_layers=2, **TINY[kind])
    if kind == "opt":
        config.num_attention_heads = 2
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).train()
    ids = torch.arange(12)[None] + 4

    def is_random():
        return not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)

    assert is_random()
    disable_dropout(model)
    assert not is_random()
    assert torch.equal(model(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_attributes_are_restored_after_an_error():
    """Those of its class are not copied to the object, in which a bound method of the original would be saved too."""
    owner = nn.Linear(2, 2)
    owner.limit = 3
    before = vars(owner).copy()
    with suppress(ValueError), temporarily(owner, limit=None, log=[], forward=len):
        assert (owner.limit, owner.log, owner.forward) == (None, [], len)
        raise ValueError
    assert vars(owner) == before


def test_disable_dropout_keeps_other_attributes():
    layer = nn.Linear(2, 2)
    layer.scale, layer.drop_rate, layer.router_jitter_noise = 0.5, 0.5, 0.5
    disable_dropout(layer)
    # The last is a threshold of PhiMoE's router, in evaluation too.
    assert (layer.scale, layer.drop_rate, layer.router_jitter_noise) == (0.5, 0.0, 0.5)


def test_evaluating_restores_mode_of_every_module_after_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5))).train()
    model[1].eval()
    before = [module.training for module in model.modules()]
    assert len(set(before)) == 2
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        assert not model(torch.ones(1, 2)).requires_grad
    assert [module.training for module in model.modules()] == before
    with pytest.raises(RuntimeError), evaluating(model):
        raise RuntimeError
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()


@pytest.fixture
def flash_model(tiny_model_dir, monkeypatch):
    """A model set to flash-attention, which is not installed and does not run on a CPU."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()

    def choose(self, name):
        self.config._attn_implementation = name

    monkeypatch.setattr(type(model), "set_attn_implementation", choose)
    model.set_attn_implementation("flash_attention_2")
    return model


def test_flash_attention_is_replaced_while_weights_are_on_cpu(flash_model, tiny_model_dir):
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="sdpa").eval()
    tokens = {"input_ids": torch.arange(1, 9)[None], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 5, "max_length_k": 5}
    with torch.no_grad():
        with kernel_precision(flash_model):
            packed = flash_model(**tokens, **lengths, use_cache=False).logits[0]
        for first, behind in ((0, 3), (3, 8)):
            alone = plain(tokens["input_ids"][:, first:behind]).logits[0]
            torch.testing.assert_close(packed[first:behind], alone, rtol=0, atol=1e-5)
    assert flash_model.config._attn_implementation == "flash_attention_2"
    # The verifications of a run before its weights are sharded.
    verify_isolation(flash_model, "flat")
    add_loss_head(flash_model)
    verify_loss_head(flash_model)
    # A teacher with embeddings for more tokens than the student has.
    adopt_vocabulary(flash_model, VocabularyMap(range(500)), "teacher")
    assert len(flash_model.lm_head.weight) == 500
    assert flash_model.config._attn_implementation == "flash_attention_2"


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kernel", ["sdpa", "varlen", "flash_attention_2"])
def test_kernel_precision_autocasts_kernels_that_need_half(flash_model, monkeypatch, kernel, device, is_packed):
    contexts = []
    monkeypatch.setattr(torch, "autocast", lambda *given: contexts.append(given) or nullcontext())
    monkeypatch.setattr(evaluation, "find_device", lambda _: torch.device(device))
    flash_model.set_attn_implementation(kernel)
    with kernel_precision(flash_model, is_packed=is_packed):
        is_replaced = (kernel, device) == ("flash_attention_2", "cpu")
        assert flash_model.config._attn_implementation == ("varlen" if is_replaced else kernel)
    needs_half = kernel == "flash_attention_2" or (kernel == "varlen" and is_packed)
    assert contexts == ([("cuda", torch.bfloat16)] if needs_half and device == "cuda" else [])


def test_rounding_error_is_that_of_coarser_dtype(monkeypatch):
    whole, half = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    assert [find_rounding_error(whole), find_rounding_error(half)] == [2**-23, 2**-7]
    with torch.autocast("cpu", torch.bfloat16):
        assert [find_rounding_error(whole), find_rounding_error(half)] == [2**-7, 2**-7]
    with torch.autocast("cpu", torch.float16):
        assert [find_rounding_error(whole), find_rounding_error(half)] == [2**-10, 2**-7]
    # TF32 rounds the factors of float32 products.
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    assert [find_rounding_error(whole), find_rounding_error(half)] == [2**-10, 2**-7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_measured_rounding_is_that_of_every_embedding_with_alternating_sign(tiny_model_dir, dtype):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=dtype)
    embed, ids, seen = model.get_input_embeddings(), torch.arange(1, 9), []

    def compute():
        seen.append(embed(ids).detach())
        return seen[-1]

    rounding = measure_rounding(model, compute, plain := compute())
    change = (seen[-1] - plain).double()
    assert rounding == 2 * change.abs().max()
    signs = torch.tensor([1, -1]).repeat(plain.shape[-1] // 2)
    # Half an eps, rounded to the dtype; at powers of two it may be rounded to 0. Values below 1e-3 are subnormal.
    relative = (signs * change / plain.double())[plain.abs() > 1e-3] / torch.finfo(dtype).eps
    assert relative.min() >= 0
    assert relative.max() <= 1
    assert (relative >= 0.5).double().mean() > 0.9


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_measured_rounding_is_0_if_the_measurement_overflows(tiny_model_dir, value):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert measure_rounding(model, lambda: torch.tensor([0.0, value]), torch.zeros(2)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_measured_rounding_bounds_another_kernel_and_no_fault(dtype):
    model = build_deep_model(dtype)

    def compute():
        return compute_probe_logits(model)

    logits = compute()
    rounding = measure_rounding(model, compute, logits)
    assert torch.equal(compute(), logits), "the embeddings are restored"
    model.set_attn_implementation("eager")
    other = (compute() - logits).abs().max()
    assert other < rounding
    shifted = compute_probe_logits(model, torch.arange(2, 10)).roll(1, dims=1)
    assert (shifted - logits).abs().max() > 2 * rounding


@pytest.mark.parametrize("model_class", [AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_half_precision_kernel_is_verified_on_float32_model(tiny_model_dir, monkeypatch, model_class):
    """Simulates ``varlen`` on a GPU, which takes half precision only."""
    attend, autocast = varlen.attend_documents, torch.autocast

    def attend_in_halves(query, key, value, *settings, **options):
        if {state.dtype for state in (query, key, value)} != {torch.bfloat16}:
            raise RuntimeError("the kernel takes halves")
        return attend(query, key, value, *settings, **options)

    monkeypatch.setattr(varlen, "attend_documents", attend_in_halves)
    monkeypatch.setattr(evaluation, "find_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch, "autocast", lambda device_type, *given, **named: autocast("cpu", *given, **named))
    varlen.register_varlen()
    model = model_class.from_pretrained(tiny_model_dir, attn_implementation="varlen").eval()
    assert prove_shared_prompt(model) is None
    verify_isolation(model, "flat")
    # Differences above rounding are still detected.
    plain = model.base_model.forward

    def join(**inputs):
        return plain(**(inputs | {name: inputs[name][[0, -1]] for name in inputs if name.startswith("cu_seq_lens")}))

    model.base_model.forward = join
    assert "one moves by" in prove_shared_prompt(model)
    with pytest.raises(ConfigError, match="beside another: one moves by"):
        verify_isolation(model, "flat")


def test_unwrap_adapter_returns_wrapped_model(tiny_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert unwrap_adapter(model) is model
    assert unwrap_adapter(get_peft_model(model, LoraConfig(target_modules=["q_proj"]))) is model


def test_find_device_of_plain_weights() -> None:
    assert find_device(nn.Linear(2, 2)) == torch.device("cpu")
    assert find_device(nn.Linear(2, 2, device="meta")) == torch.device("meta")


def test_find_device_of_offloaded_shards_is_their_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 with CPU offload: the shard is on the CPU, its mesh on GPUs, and this process has device 3."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    model = nn.Linear(2, 2)
    mesh = DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
    spec = DTensorSpec(mesh, (Replicate(),), tensor_meta=TensorMeta(torch.Size([2, 2]), (2, 1), torch.float32))
    model.weight = nn.Parameter(DTensor(torch.ones(2, 2), spec, requires_grad=False))
    assert model.weight.to_local().device.type == "cpu"
    assert find_device(model) == torch.device("cuda", 3)


def draw_from_every_rng() -> tuple[float, float, float]:
    from_numpy = np.random.rand()  # noqa: NPY002
    return random.random(), from_numpy, float(torch.rand(()))


def test_preserve_training_state_restores_rngs_and_mode_after_error() -> None:
    model = nn.Dropout().train()
    restore = save_random_states()
    expected = draw_from_every_rng()
    restore()
    for error in (None, KeyError):
        with suppress(KeyError), preserve_training_state(model):
            assert not model.training
            assert draw_from_every_rng() == expected
            if error:
                raise error
        assert model.training
        assert draw_from_every_rng() == expected
        restore()


def test_compiled_layers_are_eager_outside_of_training() -> None:
    class Layer(nn.Linear):
        def forward(self, states):
            return super().forward(states) + states

    torch._dynamo.reset()
    layer, graphs = Layer(2, 2), []
    layer.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    with preserve_training_state(layer):
        for length in (3, 5, 7):
            layer(torch.ones(length, 2))
    assert not graphs
    layer(torch.ones(9, 2))
    assert len(graphs) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_preserve_training_state_restores_cuda_rng() -> None:
    before = torch.cuda.get_rng_state()
    with preserve_training_state(nn.Identity()):
        torch.rand(3, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)
