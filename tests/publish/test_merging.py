"""Merging of LoRA, DoRA and QLoRA adapters, against the adapted model and PEFT."""

import json
import weakref

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.models.adapter_models import build_model, compute_logits, load_model, save_model, train
from transformers import AutoTokenizer

from recipes_lib.config.schema import AdapterConfig, ModelConfig, QuantizationConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.inference import compute_probe_logits
from recipes_lib.models.loading import load_causal_lm
from recipes_lib.models.quantization import build_quantization_config
from recipes_lib.publish.final_model import verify_adapter_export
from recipes_lib.publish.merging import compare, compute_next_token_logps, merge, plan_merge

TEXTS = [[3, 4, 5, 6, 7], list(range(20, 50)), [9]]


def make_adapter(tmp_path, kind, bits=None, **keys):
    """Save a base and a trained adapter; return their folders and the trained model."""
    base = save_model(kind, tmp_path)
    quantization = build_quantization_config(bits or QuantizationConfig(), torch.float32, "")
    model = load_causal_lm(ModelConfig(model_name_or_path=str(base)), "sdpa", quantization)
    adapted = add_adapter(model, AdapterConfig(use_peft=True, lora_r=4, **keys), seed=0)
    train(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    return base, tmp_path / "adapter", adapted


def run_merge(base, adapter, folder, tokenizer_dir, *, bits=None, dtype=None):
    plan = plan_merge(ModelConfig(model_name_or_path=str(base)), adapter, bits or QuantizationConfig(), dtype)
    return merge(plan, AutoTokenizer.from_pretrained(tokenizer_dir), TEXTS, folder)


ADAPTERS = ({}, {"use_dora": True}, {"use_rslora": True}, {"lora_modules_to_save": ["norm"]})
QUICK = {("llama", 0), ("llama", 1), ("tied", 2), ("tied", 3), ("gpt2", 0), ("gpt2", 1), ("gpt2", 3)}
"""Each adapter with each kind of weights that it treats differently: tied, and transposed ones of GPT-2."""


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        pytest.param(kind, keys, marks=() if (kind, at) in QUICK else pytest.mark.slow)
        for kind in ("llama", "tied", "gpt2")
        for at, keys in enumerate(ADAPTERS)
    ],
    ids=str,
)
def test_merged_model_equals_adapter(tmp_path, tiny_tokenizer_dir, kind, keys):
    keys = {"lora_modules_to_save": ["ln_f"]} if kind == "gpt2" and "lora_modules_to_save" in keys else keys
    base, adapter, adapted = make_adapter(tmp_path, kind, **keys)
    record = run_merge(base, adapter, tmp_path / "merged", tiny_tokenizer_dir)
    merged = load_model(tmp_path / "merged")
    torch.testing.assert_close(compute_logits(merged), compute_logits(adapted), rtol=1e-4, atol=1e-4)
    assert record["mean_kl"] < 1e-6
    assert record["same_choice"] == 1
    assert record["mean_kl_of_the_base"] > 1e-3
    assert record["num_tokens"] == 36
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= names
    assert not [name for name in names if "adapter" in name]
    assert merged.config.use_cache
    assert merged.num_parameters() == load_model(base).num_parameters()
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert stored.keys() == load_file(base / "model.safetensors").keys()


def test_merge_is_computed_in_float32(tmp_path, tiny_tokenizer_dir):
    base, adapter, _ = make_adapter(tmp_path, "llama")
    load_model(base, dtype=torch.bfloat16).save_pretrained(base)
    record = run_merge(base, adapter, tmp_path / "merged", tiny_tokenizer_dir)
    assert record["dtype"] == "bfloat16"
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    plain = PeftModel.from_pretrained(load_model(base, dtype=torch.float32), adapter).merge_and_unload().state_dict()
    assert all(torch.equal(tensor, plain[name].bfloat16()) for name, tensor in stored.items())
    assert 0 < record["mean_kl"] < 0.01
    in_full = run_merge(base, adapter, tmp_path / "in full", tiny_tokenizer_dir, dtype="float32")
    assert in_full["mean_kl"] < record["mean_kl"] / 100


def test_quantised_base_is_rejected(tmp_path):
    base, adapter, _ = make_adapter(tmp_path, "llama")
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(ConfigError, match="quantised weights, into which nothing can be merged"):
        plan_merge(ModelConfig(model_name_or_path=str(base)), adapter, QuantizationConfig(), None)


@pytest.mark.parametrize("bits", [QuantizationConfig(load_in_4bit=True), QuantizationConfig(load_in_8bit=True)])
def test_qlora_adapter_is_merged_into_full_precision_base(tmp_path, tiny_tokenizer_dir, bits):
    base, adapter, adapted = make_adapter(tmp_path, "llama", bits)
    verify_adapter_export(adapter, adapted, compute_probe_logits(adapted))
    record = run_merge(base, adapter, tmp_path / "merged", tiny_tokenizer_dir, bits=bits)
    stored, full = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", base))
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert stored.keys() == full.keys()
    assert record["trained_on"] == record["compared_on"] == ("4 bits" if bits.load_in_4bit else "8 bits")
    # What the bits lack is in the figure, and nothing else is.
    assert 1e-6 < record["mean_kl"] < record["mean_kl_of_the_base"]
    in_full = run_merge(base, adapter, tmp_path / "again", tiny_tokenizer_dir)
    assert in_full["mean_kl"] < 1e-6


def test_divergence_matches_torch_kl_div():
    one, other = ([*compute_next_token_logps(build_model(kind).eval(), TEXTS)] for kind in ("llama", "tied"))
    p, q = torch.cat(one), torch.cat(other)
    for (first, second), (a, b) in {((p, q)): (one, other), ((q, p)): (other, one)}.items():
        expected = torch.nn.functional.kl_div(second, first, reduction="batchmean", log_target=True)
        mean_kl, same_choice = compare(a, b)
        assert mean_kl == pytest.approx(expected.item(), rel=1e-5)
        assert same_choice == (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert compare(one, other)[0] != pytest.approx(compare(other, one)[0], rel=1e-3)


def test_comparison_holds_two_texts_of_the_second_model_at_most():
    model, held = build_model("llama").eval(), []

    def watch():
        for logps in compute_next_token_logps(model, TEXTS):
            held.append(weakref.ref(logps))
            assert sum(one() is not None for one in held) <= 2
            yield logps
            del logps

    compare([*compute_next_token_logps(model, TEXTS)], watch())
    assert len(held) == len(TEXTS)
