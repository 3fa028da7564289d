"""Fresh LoRA adapters: identity at initialisation, trained parameters, exact disabling, saving and merging."""

import json

import peft
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.models.adapter_models import INPUT_IDS, build_model, compute_logits, load_model, save_model, train
from torch.utils._python_dispatch import TorchDispatchMode

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.adapters import lora
from recipes_lib.models.adapters.lora import (
    adapters_off,
    add_adapter,
    describe_adapter,
    has_changed_base,
    load_adapter,
    load_fresh_base,
    read_adapter_state,
)
from recipes_lib.models.adapters.saved import convert_to_original_base
from recipes_lib.models.attention.kernels import verify_isolation
from recipes_lib.models.heads.loss_head import add_loss_head, verify_loss_head
from recipes_lib.models.inference import compute_probe_logits

INITS = ["default", "gaussian", "pissa", "olora", "orthogonal"]


def adapt(model, seed=0, **keys):
    return add_adapter(model, AdapterConfig(use_peft=True, **{"lora_r": 4, **keys}), seed=seed)


def trained_of(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


# Pairwise. Without olora on GPT-2 and in bfloat16, which are refused.
@pytest.mark.parametrize(
    ("kind", "init", "use_dora", "dtype"),
    [
        ("llama", "default", False, torch.bfloat16),
        ("llama", "gaussian", True, torch.bfloat16),
        ("llama", "pissa", False, torch.float32),
        ("llama", "olora", True, torch.float32),
        ("llama", "orthogonal", False, torch.float32),
        ("gpt2", "default", True, torch.float32),
        ("gpt2", "gaussian", False, torch.float32),
        ("gpt2", "pissa", True, torch.bfloat16),
        ("gpt2", "orthogonal", True, torch.bfloat16),
    ],
)
def test_fresh_adapter_is_identity_and_only_it_is_trained_in_float32(kind, init, use_dora, dtype):
    model = build_model(kind).to(dtype)
    before = compute_logits(model)
    adapted = adapt(model, init_lora_weights=init, use_dora=use_dora)
    after = compute_logits(adapted)
    if init in ("default", "gaussian") and (dtype == torch.float32 or not use_dora):
        assert torch.equal(after, before)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(after, before, rtol=0, atol=tolerance * before.abs().max().item())
    trained = trained_of(adapted)
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    assert all("lora_" in name for name in trained)
    assert len(trained) == 2 * (7 if kind == "llama" else 4) * (3 if use_dora else 2)
    assert adapted.get_base_model() is model


class CastCounter(TorchDispatchMode):
    """Counts conversions of activations from 16 bits to ``float32``."""

    num = 0

    def __torch_dispatch__(self, operator, _types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if operator is torch.ops.aten._to_copy.default and args[0].dim() == 3:
            self.num += (args[0].dtype, result.dtype) == (torch.bfloat16, torch.float32)
        return result


@pytest.mark.parametrize(("kind", "num_fewer"), [("llama", 14), ("gpt2", 8)])
def test_inputs_of_adapter_keep_their_dtype_under_autocast(kind, num_fewer):
    """Results are equal to those of PEFT's conversions; without autocast there are as many."""

    def run(is_ours, is_half):
        torch.manual_seed(0)
        adapted = adapt(build_model(kind).bfloat16(), init_lora_weights="gaussian")
        for layer in () if is_ours else adapted.modules():
            vars(layer).pop("_cast_input_dtype", None)
        with CastCounter() as counter, torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            loss = adapted(input_ids=INPUT_IDS).logits.float().logsumexp(-1).sum()
        loss.backward()
        return counter.num, [loss, *(parameter.grad for parameter in trained_of(adapted).values())]

    (num_ours, ours), (num_theirs, theirs) = run(True, True), run(False, True)
    assert num_theirs - num_ours == num_fewer
    assert all(map(torch.equal, ours, theirs))
    if kind == "llama":
        (num_ours, ours), (num_theirs, theirs) = run(True, False), run(False, False)
        assert num_ours == num_theirs
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("init", INITS)
def test_adapter_init_depends_on_seed_only_and_keeps_global_rng_state(init):
    states = []
    for seed, draws in ((3, 0), (3, 5), (4, 0)):
        model = build_model("llama")
        torch.manual_seed(7)
        torch.rand(draws)
        expected = torch.get_rng_state()
        states.append(read_adapter_state(adapt(model, seed=seed, init_lora_weights=init)))
        assert torch.equal(torch.get_rng_state(), expected)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    if init != "olora":  # olora decomposes the weights and draws no random numbers.
        assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_new_adapter_reads_no_random_states_of_unused_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert trained_of(adapt(build_model("llama")))


def test_free_gpu_memory_includes_that_of_the_cache(monkeypatch, tmp_path):
    build_model("llama").save_pretrained(tmp_path)
    model, is_cached = adapt(load_model(tmp_path)), [True]
    monkeypatch.setattr(lora, "find_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "empty_cache", is_cached.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0 if is_cached else 2**40, 2**40))
    monkeypatch.setattr(lora.AutoModelForCausalLM, "from_pretrained", lambda *_, device_map, **__: device_map[""])
    monkeypatch.setattr(lora, "keep_differentiable", lambda _: None)
    assert load_fresh_base(model) == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 2**40))
    assert load_fresh_base(model) == torch.device("cpu")


def test_init_that_changes_the_logits_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="olora moves the model's logits"):
        adapt(build_model("llama").to(torch.bfloat16), init_lora_weights="olora")

    def scaled(model, *args, **options):
        adapted = peft.get_peft_model(model, *args, **options)
        adapted.get_base_model().model.layers[0].mlp.up_proj.scaling["default"] *= 1.1
        return adapted

    monkeypatch.setattr("recipes_lib.models.adapters.lora.get_peft_model", scaled)
    with pytest.raises(ConfigError, match="pissa moves the model's logits"):
        adapt(build_model("llama"), init_lora_weights="pissa")


@pytest.mark.parametrize(
    ("kind", "init", "use_dora", "use_rslora"),
    [
        ("tied", "pissa", False, False),
        ("tied", "pissa", True, True),
        ("llama", "olora", True, False),
        ("gpt2", "pissa", False, True),
    ],
)
def test_residual_inits_are_saved_relative_to_original_base_weights(tmp_path, kind, init, use_dora, use_rslora):
    base = save_model(kind, tmp_path)
    whole = {"gpt2": ["ln_f"], "tied": ["embed_tokens"], "llama": ["norm"]}[kind]
    keys = {"init_lora_weights": init, "use_dora": use_dora, "use_rslora": use_rslora, "lora_modules_to_save": whole}
    adapted = adapt(load_model(base), **keys)
    train(adapted)
    live = compute_logits(adapted)
    assert (live - compute_logits(load_model(base))).abs().max() > 0.05

    adapted.save_pretrained(tmp_path / "adapter")
    convert_to_original_base(tmp_path / "adapter", adapted.initial_factors)
    reopened = PeftModel.from_pretrained(load_model(base), tmp_path / "adapter")
    torch.testing.assert_close(compute_logits(reopened), live, rtol=1e-4, atol=1e-4)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["r"] == 8
    assert settings["init_lora_weights"] is True
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys() == read_adapter_state(adapted).keys()


@pytest.mark.parametrize("whole", [None, ["embed_tokens", "norm"]])
def test_adapters_off_restores_base_logits_bitwise(whole):
    model = build_model("tied")
    before = compute_probe_logits(model)
    adapted = adapt(model, lora_modules_to_save=whole, lora_dropout=0.5)
    train(adapted)
    adapted.get_base_model().model.layers[0].eval()
    adapted.get_base_model().model.layers[1].mlp.up_proj.lora_A.requires_grad_(False)
    modes = [module.training for module in adapted.modules()]
    flags = [parameter.requires_grad for parameter in adapted.parameters()]
    live = compute_probe_logits(adapted)
    for error in (None, KeyError):
        try:
            with adapters_off(adapted):
                assert not adapted.training
                assert [parameter.requires_grad for parameter in adapted.parameters()] == flags
                logits = adapted(input_ids=torch.arange(1, 9)[None]).logits
                assert not logits.requires_grad
                assert torch.equal(logits, before)
                if error:
                    raise error
        except KeyError:
            pass
        assert [module.training for module in adapted.modules()] == modes
        assert [parameter.requires_grad for parameter in adapted.parameters()] == flags
        assert torch.equal(compute_probe_logits(adapted), live)
    assert not torch.equal(live, before)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_residual_base_is_refused_as_reference_model(init):
    adapted = adapt(build_model("llama"), init_lora_weights=init)
    assert has_changed_base(adapted)
    with pytest.raises(ValueError, match="no reference model"), adapters_off(adapted):
        pass


@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        ("tied", ["embed_tokens"]),
        ("tied", ["lm_head"]),
        ("tied", ["embed_tokens", "lm_head"]),
        ("llama", ["embed_tokens", "lm_head"]),
        ("gpt2", ["wte"]),
    ],
)
def test_fully_trained_embeddings_stay_tied_after_save_and_merge(tmp_path, kind, whole):
    base = save_model(kind, tmp_path)
    config = AdapterConfig(use_peft=True, lora_r=4, lora_modules_to_save=[*whole])
    adapted = add_adapter(load_model(base), config, seed=0)
    assert config.lora_modules_to_save == whole  # PEFT modifies the list that it gets.
    train(adapted)
    live = compute_logits(adapted)
    embeddings = [adapted.get_input_embeddings().weight, adapted.get_output_embeddings().weight]
    assert torch.equal(*embeddings) == (kind != "llama")
    trained = [p for name, p in trained_of(adapted).items() if "lora_" not in name]
    assert len(trained) == (len(whole) if kind == "llama" else 1)

    adapted.save_pretrained(tmp_path / "adapter")
    reopened = PeftModel.from_pretrained(load_model(base), tmp_path / "adapter")
    assert torch.equal(compute_logits(reopened), live)
    assert torch.equal(reopened.get_input_embeddings().weight, reopened.get_output_embeddings().weight) == (
        kind != "llama"
    )
    reopened.merge_and_unload().save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(compute_logits(load_model(tmp_path / "merged")), live, rtol=1e-5, atol=1e-5)
    assert load_model(tmp_path / "merged").config.tie_word_embeddings == (kind != "llama")


def test_weight_tying_unknown_to_peft_is_refused(monkeypatch):
    monkeypatch.setattr("peft.tuners.tuners_utils.EMBEDDING_LAYER_NAMES", ["embed_in", "embed_out"])
    with pytest.raises(ConfigError, match="LlamaForCausalLM are tied, and PEFT unties them"):
        adapt(build_model("tied"), lora_modules_to_save=["embed_tokens"])


@pytest.mark.parametrize("kind", ["tied", "llama"])
def test_modules_to_save_are_float32_in_half_precision_model(kind, tmp_path):
    model = build_model(kind).to(torch.bfloat16)
    before = compute_logits(model)
    adapted = adapt(model, lora_modules_to_save=["embed_tokens", "lm_head", "norm"])
    assert {parameter.dtype for parameter in trained_of(adapted).values()} == {torch.float32}
    torch.testing.assert_close(compute_logits(adapted), before, rtol=0, atol=0.02 * before.abs().max().item())
    hidden = adapted.get_base_model().model(input_ids=INPUT_IDS).last_hidden_state
    assert hidden.dtype == torch.bfloat16
    moved = {name: parameter.detach().clone() for name, parameter in trained_of(adapted).items() if "lora" not in name}
    assert len(moved) == (7 if kind == "llama" else 6)
    for parameter in trained_of(adapted).values():
        parameter.grad = None
    optimizer = torch.optim.AdamW(trained_of(adapted).values(), lr=1e-5)
    adapted(input_ids=INPUT_IDS, labels=INPUT_IDS).loss.backward()
    optimizer.step()
    now = trained_of(adapted)
    assert all(not torch.equal(now[name], tensor) for name, tensor in moved.items())
    adapted.save_pretrained(tmp_path)
    loaded = load_adapter(build_model(kind).to(torch.bfloat16), str(tmp_path), is_trainable=True)
    assert all(torch.equal(trained_of(loaded)[name], tensor) for name, tensor in now.items())


@pytest.mark.parametrize("first", ["head", "adapter"])
@pytest.mark.parametrize("kind", ["tied", "gpt2"])
def test_loss_head_and_verifications_accept_adapted_model(kind, first):
    model = build_model(kind)
    if first == "head":
        add_loss_head(model)
    adapted = adapt(model, use_dora=True)
    if first == "adapter":
        add_loss_head(adapted)
    train(adapted)
    verify_isolation(adapted, "rows")
    verify_loss_head(adapted)
    adapted.eval()  # GPT-2 has dropout of its own.
    own = adapted(input_ids=INPUT_IDS, labels=INPUT_IDS)
    own.loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in trained_of(adapted).items()}
    adapted.zero_grad()
    sums = adapted(input_ids=INPUT_IDS, labels=INPUT_IDS, loss_head=True)
    (sums.nll_sum / sums.num_targets).backward()
    ours = {name: parameter.grad for name, parameter in trained_of(adapted).items()}
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def test_adapter_record_names_base_and_sizes(tmp_path):
    base = save_model("llama", tmp_path)
    model = load_model(base)
    model.config._commit_hash = "c" * 40
    adapted = adapt(model, lora_alpha=8)
    record = describe_adapter(adapted)
    assert record == {
        "base_model": str(base),
        "base_revision": "c" * 40,
        "r": 4,
        "lora_alpha": 8,
        "num_trained_parameters": sum(parameter.numel() for parameter in trained_of(adapted).values()),
        "num_parameters": sum(parameter.numel() for parameter in adapted.parameters()),
    }
