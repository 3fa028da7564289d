"""Isolation of packed documents per attention kernel and architecture, and the selection of a kernel."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tests.parity import test_loss_head as architectures
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BioGptConfig,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    MixtralForCausalLM,
    MptConfig,
    NemotronConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    RwkvConfig,
    TrainingArguments,
)
from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_VERSIONS

from recipes_lib.config.schema import AdapterConfig, ModelConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.attention.kernels import (
    FLASH_IS_INSTALLED,
    LAYOUTS,
    AttentionChoice,
    _find_fault,
    choose_attention,
    choose_kernel,
    explain_choice,
    find_refusals,
    verify_isolation,
)
from recipes_lib.models.attention.varlen import register_varlen
from recipes_lib.models.heads.score_head import add_score_head
from recipes_lib.models.loading import load_model_config
from recipes_lib.models.parallel.context_parallel import ContextParallelGroup

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIGS: dict[str, PreTrainedConfig] = {
    **{name: architectures.CONFIGS[name] for name in ("llama", "qwen3", "gemma2", "gemma3", "mixtral", "gpt2", "doge")},
    "mistral": MistralConfig(**architectures.SHAPE, sliding_window=4),
}
MIXING = {
    "bloom": BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4),
    "mamba": MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2),
}
HYBRID = {
    "mpt": MptConfig(),
    "falcon_alibi": FalconConfig(alibi=True),  # Isolates documents since transformers 5.24.
    "jamba": JambaConfig(),
    "qwen3_next": Qwen3NextConfig(),
    "rwkv": RwkvConfig(),
    "lfm2": Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
}
IGNORING: dict[str, dict[str, int]] = {
    "afmoe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "biogpt": {},
    "falcon": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": {"word_embed_proj_dim": 32},
    "xglm": {"d_model": 32, "num_layers": 2},
}

UNSUPPORTED = {("gemma2", "sdpa"), ("gemma2", "varlen"), ("doge", "varlen")}
PAIRS = [
    (name, kernel) for name in CONFIGS for kernel in ("eager", "sdpa", "varlen") if (name, kernel) not in UNSUPPORTED
]


def make_model(config: PreTrainedConfig, kernel: str, device: torch.device = CPU) -> PreTrainedModel:
    register_varlen()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=kernel).eval().to(device)


def compute_document_logits(model: PreTrainedModel, kernel: str, *documents: Tensor) -> list[Tensor]:
    """Logits per document of one packed row, which is built independently of the code under test."""
    lengths = torch.tensor([len(document) for document in documents])
    batch: dict[str, Any] = {
        "input_ids": torch.cat(documents)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
    }
    if LAYOUTS[kernel] == "flat":
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        batch |= {"max_length_q": int(lengths.max()), "max_length_k": int(lengths.max())}
    batch = {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    with torch.no_grad():
        return list(model(**batch, use_cache=False).logits[0].split(lengths.tolist()))


def make_documents(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 61, (length,), generator=generator) for length in (6, 1, 11, 8)]


@pytest.mark.parametrize(("name", "kernel"), PAIRS)
def test_packed_document_has_logits_of_unpacked_one_whatever_the_others_are(name: str, kernel: str) -> None:
    model, documents = make_model(CONFIGS[name], kernel), make_documents()
    reference = make_model(CONFIGS[name], "eager")
    before = compute_document_logits(model, kernel, *documents)
    for packed, document in zip(before, documents, strict=True):
        with torch.no_grad():
            alone = reference(input_ids=document[None], use_cache=False).logits[0]
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
    for index, replacement in enumerate(make_documents(seed=1)):
        after = compute_document_logits(model, kernel, *documents[:index], replacement, *documents[index + 1 :])
        # An expert multiplies its tokens of all documents at once: another document changes the shape of the product.
        rounding = 1e-4 if name == "mixtral" else 0.0
        gaps = [float((left - right).abs().max()) for left, right in zip(before, after, strict=True)]
        unchanged = [gap <= rounding for gap in gaps]
        assert unchanged == [other != index for other in range(len(documents))]
    state = torch.get_rng_state()
    verify_isolation(model.train(), LAYOUTS[kernel])
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_rounding_of_experts_is_no_leak(seed: int, dtype: torch.dtype) -> None:
    """Experts multiply the tokens of all documents at once, and by rounding tokens change experts."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, attn_implementation="sdpa"))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    verify_isolation(model.to(dtype), "rows")


# Not Falcon with ALiBi, which transformers 5.24 isolates.
@pytest.mark.parametrize("name", ["bloom", "mamba"])
def test_verify_isolation_detects_leaking_kernel(name: str) -> None:
    with pytest.raises(ConfigError, match="does not keep its logits"):
        verify_isolation(make_model(MIXING[name], "eager"), "rows")


def test_weight_that_is_not_finite_is_no_fault_of_packing() -> None:
    model = make_model(CONFIGS["llama"], "sdpa")
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(ConfigError, match="outputs are not finite"):
        verify_isolation(model, "rows")


def test_verify_isolation_detects_cache_and_mask_of_ones() -> None:
    for extra in ({"use_cache": True}, {"attention_mask": torch.ones(1, 16, dtype=torch.long)}):
        model = make_model(CONFIGS["llama"], "sdpa")
        plain = model.forward

        def leaking(plain: Any = plain, extra: dict[str, Any] = extra, **inputs: Any) -> Any:
            length = inputs["input_ids"].shape[1]
            cut = {key: value[:, :length] if isinstance(value, Tensor) else value for key, value in extra.items()}
            return plain(**(inputs | cut))

        model.forward = leaking
        with pytest.raises(ConfigError, match="does not keep its logits"):
            verify_isolation(model, "rows")


def make_scorer(kernel: str) -> Any:
    register_varlen()
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS["llama"])
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation=kernel)
    add_score_head(model)
    return model.eval()


@pytest.mark.parametrize("kernel", ["sdpa", "eager", "varlen"])
@pytest.mark.parametrize("is_adapted", [False, True])
def test_verify_isolation_reads_every_token_score_of_reward_model(kernel: str, is_adapted: bool) -> None:
    model = make_scorer(kernel)
    if is_adapted:
        model = add_adapter(model, AdapterConfig(use_peft=True), seed=0, task_type="SEQ_CLS")
    verify_isolation(model, LAYOUTS[kernel])
    assert not any(module._forward_hooks for module in model.base_model.modules()), "they break compiled graphs"


@pytest.mark.parametrize(
    ("kernel", "one_document"),
    [
        ("sdpa", {"position_ids": torch.arange(16)[None]}),
        ("varlen", dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 16], dtype=torch.int32))),
    ],
)
def test_verify_isolation_detects_leak_in_reward_model(kernel: str, one_document: dict[str, Tensor]) -> None:
    model = make_scorer(kernel)
    base = model.base_model
    plain = base.forward
    base.forward = lambda **inputs: plain(**(inputs | (one_document if inputs["input_ids"].shape[1] == 16 else {})))
    with pytest.raises(ConfigError, match="does not keep its hidden states beside another: one moves by"):
        verify_isolation(model, LAYOUTS[kernel])


def test_verify_isolation_detects_leak_below_rounding_error() -> None:
    model = make_model(CONFIGS["llama"], "sdpa")
    plain = model.forward

    def leaking(**inputs: Any) -> Any:
        outputs = plain(**inputs)
        outputs.logits = outputs.logits + 1e-7 * inputs["input_ids"].sum()
        return outputs

    model.forward = leaking
    with pytest.raises(ConfigError, match="does not keep its logits"):
        verify_isolation(model, "rows")


def test_verify_isolation_detects_positions_that_do_not_restart() -> None:
    model = make_model(CONFIGS["gpt2"], "varlen")
    plain = model.forward
    model.forward = lambda position_ids, **inputs: plain(**inputs)
    with pytest.raises(ConfigError, match="does not keep its logits"):
        verify_isolation(model, "flat")


def test_model_that_cannot_run_packed_is_a_config_error() -> None:
    model = make_model(CONFIGS["gemma2"], "varlen")
    with pytest.raises(
        ConfigError, match="fails on a packed batch: attn_implementation: varlen has no dropout, softcap"
    ):
        verify_isolation(model, "flat")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "a bloom model takes no position_ids"),
        ("falcon_alibi", "a falcon model takes no position_ids"),
        ("mpt", "a mpt model takes no position_ids"),
        ("mamba", "a mamba model has linear_attention layers"),
        ("rwkv", "a rwkv model has recurrent layers"),
        ("jamba", "a jamba model has linear_attention layers"),
        ("qwen3_next", "a qwen3_next model has linear_attention layers"),
        ("lfm2", "a lfm2 model has conv layers"),
    ],
)
def test_packing_is_refused_from_model_config_alone(name: str, reason: str) -> None:
    config = (MIXING | HYBRID)[name]
    with pytest.raises(ConfigError, match=reason) as caught:
        choose_kernel(config, None, device=CPU, compute_dtype=torch.float32, packing=True)
    assert [problem.where for problem in caught.value.problems] == ["packing"]
    for device, dtype in ((CPU, torch.float32), (CUDA, torch.bfloat16)):
        alone = choose_kernel(config, None, device=device, compute_dtype=dtype, packing=False, flattens=True)
        assert alone.layout == "rows", "in a flat row, documents would attend to each other"


@pytest.mark.parametrize("name", IGNORING)
def test_packing_is_refused_from_model_config_alone_where_masks_mix_documents(name: str) -> None:
    config = AutoConfig.for_model(name, **{**architectures.WITHOUT_HEAD_DIM, **IGNORING[name]})
    # transformers 5.24 passes the positions to the masks of Falcon.
    isolates = name == "falcon" and Version(transformers.__version__) >= Version("5.24")

    def refused(match: str) -> Any:
        return nullcontext() if isolates else pytest.raises(ConfigError, match=match)

    with refused("does not keep its logits beside another"):
        verify_isolation(make_model(config, "eager"), "rows")
    with refused(f"packing: eager cannot separate documents: .* of {name} models"):
        choose_kernel(config, "eager", device=CPU, compute_dtype=torch.float32, packing=True)
    choose_kernel(config, "eager", device=CPU, compute_dtype=torch.float32, packing=False)


def select(
    name: str,
    requested: str | None,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.bfloat16,
    packing: bool = True,
    flattens: bool = False,
) -> AttentionChoice:
    return choose_kernel(
        CONFIGS[name], requested, device=device, compute_dtype=dtype, packing=packing, flattens=flattens
    )


def test_default_kernel_is_fastest_that_isolates() -> None:
    assert select("llama", None) == AttentionChoice("sdpa", "rows")
    assert select("llama", None, CUDA) == AttentionChoice("varlen", "flat")
    assert select("llama", None, CUDA, torch.float32) == AttentionChoice("sdpa", "rows")
    assert select("llama", None, CUDA, packing=False) == AttentionChoice("sdpa", "rows")
    assert select("llama", None, CUDA, packing=False, flattens=True) == AttentionChoice("varlen", "flat")
    assert select("llama", None, packing=False, flattens=True) == AttentionChoice("sdpa", "rows")
    assert select("gemma2", None, CUDA) == AttentionChoice("eager", "rows")
    with_dropout = GPT2Config(attn_pdrop=0.1)
    chosen = choose_kernel(with_dropout, None, device=CUDA, compute_dtype=torch.bfloat16, packing=True)
    assert chosen == AttentionChoice("sdpa", "rows")
    sinks = choose_kernel(GptOssConfig(), None, device=CUDA, compute_dtype=torch.bfloat16, packing=False, flattens=True)
    assert sinks == AttentionChoice("eager", "rows")
    without_bounds = choose_kernel(NemotronConfig(), None, device=CUDA, compute_dtype=torch.bfloat16, packing=True)
    assert without_bounds == AttentionChoice("sdpa", "rows")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(), "flash_attention_3"),
        # FlashAttention 3 ignores dropout; for gpt-oss, transformers would take a kernel from the Hub instead.
        (LlamaConfig(attention_dropout=0.1), "flash_attention_2"),
        (BioGptConfig(), "flash_attention_2"),
        (GptOssConfig(), "eager"),
    ],
)
def test_installed_flash_attention_is_chosen_unless_it_computes_something_else(monkeypatch, config, expected) -> None:
    for name in ("flash_attention_2", "flash_attention_3"):
        monkeypatch.setitem(FLASH_IS_INSTALLED, name, lambda: True)
    chosen = choose_kernel(config, None, device=CUDA, compute_dtype=torch.bfloat16, packing=False, flattens=True)
    assert chosen.implementation == expected


def test_flash_attention_of_another_torch_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FLASH_IS_INSTALLED, "flash_attention_2", lambda: True)
    _find_fault.cache_clear()
    try:
        assert select("llama", None, CUDA) == AttentionChoice("varlen", "flat")
        broken = r"flash_attention_2 cannot be imported \(flash_attn_2_cuda.so: undefined symbol: _ZN3c10\)"
        assert re.search(broken, explain_choice("varlen", CONFIGS["llama"], CUDA, torch.bfloat16))
        with pytest.raises(ConfigError, match=f"attn_implementation: {broken}\n    use sdpa, eager"):
            select("llama", "flash_attention_2", CUDA)
    finally:
        _find_fault.cache_clear()


def test_default_kernel_depends_on_model_device_and_precision(tiny_model_dir: Path, tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=True)
    for requested, chosen in ((None, "sdpa"), ("varlen", "varlen")):
        config = ModelConfig(model_name_or_path=str(tiny_model_dir), attn_implementation=requested)
        model_config, _ = load_model_config(config)
        assert choose_attention(config, model_config, args, packing=True) == AttentionChoice(chosen, LAYOUTS[chosen])
    with pytest.raises(ConfigError, match="runs on CUDA devices only"):
        choose_attention(replace(config, attn_implementation="flash_attention_2"), model_config, args, packing=True)


def test_context_parallelism_on_gpus_requires_half_precision() -> None:
    args: Any = SimpleNamespace(device=CUDA, bf16=False, fp16=False, mixed_precision="no")
    group: Any = None
    share = ContextParallelGroup(group, 0, 2, group, by_heads=False)
    with pytest.raises(ConfigError, match="needs bf16 or fp16"):
        choose_attention(ModelConfig(dtype="float32"), LlamaConfig(), args, packing=True, context=share)
    for half in ({"bf16": True}, {"fp16": True}, {"mixed_precision": "fp8"}):
        given: Any = SimpleNamespace(**{**vars(args), **half})
        chosen = choose_attention(ModelConfig(dtype="float32"), LlamaConfig(), given, packing=True, context=share)
        assert chosen == AttentionChoice("context", "rows")
    with pytest.raises(ConfigError, match="context parallelism does not support a gemma2 model"):
        choose_attention(ModelConfig(dtype="float32"), CONFIGS["gemma2"], given, packing=True, context=share)


@pytest.mark.parametrize("kernel", ["kernels-community/flash-attn3", "flash_attention_4"])
def test_kernels_of_hub_and_betas_are_chosen_only_by_name(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    monkeypatch.setitem(FLASH_IS_INSTALLED, kernel, lambda: True)
    assert select("llama", kernel, CUDA, torch.bfloat16) == AttentionChoice(kernel, "flat")
    assert select("llama", None, CUDA, torch.bfloat16).implementation == "varlen"
    assert {name for name in LAYOUTS if name.startswith("kernels-")} <= FLASH_ATTN_KERNEL_VERSIONS.keys()


@pytest.mark.parametrize(
    ("capability", "config", "reason"),
    [
        ((8, 0), LlamaConfig(), "needs a GPU of compute capability 9.0 or later"),
        ((9, 0), LlamaConfig(attention_dropout=0.1), "has no attention dropout, which this model's configuration sets"),
        ((9, 0), GptOssConfig(), None),
        ((10, 0), LlamaConfig(), None),
    ],
)
def test_flash_attention_4_needs_hopper_or_later(monkeypatch, capability, config, reason) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setitem(FLASH_IS_INSTALLED, "flash_attention_4", lambda: True)
    assert find_refusals(config, CUDA, torch.bfloat16)["flash_attention_4"] == reason


@pytest.mark.parametrize(
    ("name", "kernel", "device", "dtype", "reason"),
    [
        ("llama", "sdpaa", CPU, torch.float32, "sdpaa is not a known kernel"),
        ("llama", "flash_attention_2", CPU, torch.bfloat16, "flash_attention_2 runs on CUDA devices only"),
        ("llama", "flash_attention_3", CUDA, torch.bfloat16, "flash_attention_3 is not installed"),
        ("llama", "flash_attention_4", CUDA, torch.bfloat16, "flash_attention_4 is not installed"),
        ("llama", "kernels-community/flash-attn3", CPU, torch.bfloat16, "runs on CUDA devices only"),
        ("llama", "kernels-community/flash-attn2", CUDA, torch.bfloat16, "needs the package kernels"),
        ("llama", "varlen", CUDA, torch.float32, "varlen needs bf16 or fp16"),
        ("doge", "varlen", CPU, torch.float32, "varlen is not supported for doge models"),
        ("gemma2", "sdpa", CPU, torch.float32, "sdpa is not supported for gemma2 models by transformers"),
    ],
)
def test_unusable_kernel_is_refused_with_reason_and_remedy(name, kernel, device, dtype, reason) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        select(name, kernel, device, dtype)
    (problem,) = caught.value.problems
    assert problem.remedy.startswith("use ")
    assert "eager" in problem.remedy


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"head_dim": 256}, "varlen"),
        ({"head_dim": 512}, "sdpa"),
        ({"hidden_size": 1024, "num_attention_heads": 2}, "sdpa"),
    ],
)
def test_flash_kernels_are_not_chosen_for_large_heads(keys: dict[str, int], expected: str) -> None:
    chosen = choose_kernel(LlamaConfig(**keys), None, device=CUDA, compute_dtype=torch.bfloat16, packing=True)
    assert chosen.implementation == expected


def test_kernel_and_packing_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_kernel(MIXING["mamba"], "sdpaa", device=CPU, compute_dtype=torch.float32, packing=True)
    assert [problem.where for problem in caught.value.problems] == ["packing", "attn_implementation"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("kernel", ["sdpa", "varlen", "flash_attention_2"])
def test_verify_isolation_on_cuda(name: str, kernel: str) -> None:
    config = copy.deepcopy(CONFIGS[name])
    config.head_dim = 32
    try:
        choose_kernel(config, kernel, device=CUDA, compute_dtype=torch.bfloat16, packing=True)
    except ConfigError as error:
        pytest.skip(str(error))
    model, documents = make_model(config, kernel, CUDA), make_documents()
    verify_isolation(model, LAYOUTS[kernel])
    with torch.autocast("cuda", dtype=torch.bfloat16):
        before = compute_document_logits(model, kernel, *documents)
        after = compute_document_logits(model, kernel, make_documents(seed=1)[0], *documents[1:])
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [False, True, True, True]
