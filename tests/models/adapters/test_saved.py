"""Loading of saved adapters on their base, refusals with the reason, and merging weight by weight."""

import errno
import json
import os
import shutil
from pathlib import Path

import peft
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tests.models.adapter_models import adapt, build_model, compute_logits, load_model, save_model, train
from transformers import LlamaForSequenceClassification

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.adapters.lora import add_adapter, load_adapter, read_adapter_state
from recipes_lib.models.adapters.saved import find_shareable, iterate_weights

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Base, adapter folder, and the logits of the model that was saved."""
    folder = tmp_path_factory.mktemp("trained")
    base = save_model("tied", folder)
    config = AdapterConfig(use_peft=True, lora_r=4, lora_dropout=0.5, lora_modules_to_save=["embed_tokens"])
    adapted = add_adapter(load_model(base), config, seed=0)
    train(adapted)
    adapted.save_pretrained(folder / "an adapter")
    return base, folder / "an adapter", compute_logits(adapted)


@pytest.fixture
def saved(trained, tmp_path):
    """``trained`` with a copy of the adapter's folder that a test may change."""
    base, folder, logits = trained
    return base, shutil.copytree(folder, tmp_path / folder.name), logits


def edit_settings(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def load_problem(base, folder, **options):
    with pytest.raises(ConfigError) as caught:
        load_adapter(load_model(base), str(folder), **options)
    (problem,) = caught.value.problems
    assert problem.where == "adapter_name_or_path"
    return problem


def test_saved_adapter_resumes_with_dropout_of_new_configuration(saved):
    base, folder, logits = saved
    config = AdapterConfig(use_peft=True, adapter_name_or_path=str(folder))
    adapted = add_adapter(load_model(base), config, seed=0)
    assert torch.equal(compute_logits(adapted), logits)
    assert {p for p in adapted.parameters() if p.requires_grad} == {
        parameter for name, parameter in adapted.named_parameters() if "lora_" in name or "modules_to_save" in name
    }
    assert not any(isinstance(module, torch.nn.Dropout) for module in adapted.modules())
    before = {name: tensor.clone() for name, tensor in read_adapter_state(adapted).items()}
    train(adapted)
    assert all(not torch.equal(before[name], tensor) for name, tensor in read_adapter_state(adapted).items())


def test_loaded_adapter_is_frozen_and_equals_plain_peft(saved):
    base, folder, logits = saved
    adapted = load_adapter(load_model(base), str(folder))
    assert torch.equal(compute_logits(adapted), logits)
    assert torch.equal(compute_logits(PeftModel.from_pretrained(load_model(base), folder)), logits)
    assert not any(parameter.requires_grad for parameter in adapted.parameters())


def test_unreadable_weights_are_not_missing(saved, monkeypatch):
    """Such as those of another user: safetensors 0.8 creates files with mode 600."""
    base, folder, _ = saved
    model = load_model(base)

    def refuse(path, *_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError, match=r"Permission denied: .*adapter_model\.safetensors"):
        load_adapter(model, str(folder))


def test_bfloat16_adapter_is_trained_in_float32(saved):
    base, folder, _ = saved
    edit_weights(folder, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    adapted = load_adapter(load_model(base), str(folder), is_trainable=True)
    assert {parameter.dtype for parameter in adapted.parameters() if parameter.requires_grad} == {torch.float32}


def test_different_base_is_refused_unless_on_any_base(saved, tmp_path):
    base, folder, logits = saved
    other = shutil.copytree(base, tmp_path / "other")
    problem = load_problem(other, folder)
    assert str(base) in problem.found
    assert str(other) in problem.found
    assert torch.equal(compute_logits(load_adapter(load_model(other), str(folder), on_any_base=True)), logits)


def test_base_is_recognised_under_relative_path(saved, monkeypatch):
    base, folder, _ = saved
    monkeypatch.chdir(base.parent)
    load_adapter(load_model(base.name), str(folder))


def test_base_at_different_commit_is_refused_if_both_are_known(saved):
    base, folder, _ = saved
    model = load_model(base)
    model.config._commit_hash = "a" * 40
    for revision in (None, "main", "a" * 40):
        edit_settings(folder, revision=revision)
        load_adapter(load_model(base), str(folder))
    edit_settings(folder, revision="b" * 40)
    with pytest.raises(ConfigError, match="trained on commit bbbbbbbb") as caught:
        load_adapter(model, str(folder))
    assert caught.value.problems[0].remedy == f"set model_revision: {'b' * 40}"


def test_adapter_without_task_type_is_accepted(saved):
    base, folder, logits = saved
    edit_settings(folder, task_type=None)
    adapted = load_adapter(load_model(base), str(folder), is_trainable=True)
    assert torch.equal(compute_logits(adapted), logits)
    assert adapted.peft_config["default"].task_type == "CAUSAL_LM"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"task_type": "SEQ_CLS"}, "was trained for SEQ_CLS, not CAUSAL_LM"),
        ({"bias": "all"}, "trains biases of the base"),
        ({"init_lora_weights": "pissa_niter_16"}, "no file contains"),
        ({"init_lora_weights": "olora"}, "no file contains"),
        ({"init_lora_weights": "corda"}, "no file contains"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "no file contains"),
        ({"lora_bias": True}, "trains biases of B"),
        ({"alora_invocation_tokens": [5, 6]}, "is an activated LoRA"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "replicates layers"),
    ],
)
def test_unsupported_adapter_settings_are_refused(saved, changes, found):
    base, folder, _ = saved
    edit_settings(folder, **changes)
    assert found in load_problem(base, folder).found


def test_saved_dora_adapter_is_refused_under_zero3(saved, monkeypatch):
    base, folder, _ = saved
    edit_settings(folder, use_dora=True)
    monkeypatch.setattr("recipes_lib.models.adapters.saved.is_deepspeed_zero3_enabled", lambda: True)
    assert "is a DoRA adapter" in load_problem(base, folder).found


FOREIGN = {
    "rank_and_alpha_pattern": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r".*layers\.1\..*v_proj": 5}},
    "rslora": {"use_rslora": True},
    "all-linear": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*\.(q|v)_proj"},
    "layers_to_transform": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "embeddings_with_dora": {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "use_dora": True},
    "modules_to_save": {"modules_to_save": ["norm", "lm_head"]},
}


def save_foreign(folder, kind, **options):
    """Save a base and a random adapter by plain PEFT; return the base's folder, the adapter's and the logits."""
    base = save_model(kind, folder)
    settings = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    adapted = peft.get_peft_model(load_model(base), peft.LoraConfig(**settings | options))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 20)
    adapted.save_pretrained(folder / "foreign")
    return base, folder / "foreign", compute_logits(adapted)


@pytest.mark.parametrize("options", FOREIGN.values(), ids=FOREIGN)
def test_adapter_of_plain_peft_is_loaded_and_merged_with_equal_logits(tmp_path, options):
    base, folder, logits = save_foreign(tmp_path, "llama", **options)
    adapted = load_adapter(load_model(base), str(folder), is_trainable=True)
    assert torch.equal(compute_logits(adapted), logits)
    other = load_model(base)
    if "modules_to_save" not in options:
        other.load_state_dict(dict(iterate_weights(adapted)))
        torch.testing.assert_close(compute_logits(other), logits, rtol=0, atol=1e-4)
        assert torch.equal(compute_logits(adapted), logits), "the base is also the reference model"
    torch.testing.assert_close(compute_logits(adapted.merge_and_unload()), logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "tied"])
@pytest.mark.parametrize("is_adapted", [False, True])
def test_merged_weights_are_yielded_once_and_can_be_filtered_by_name(kind, is_adapted):
    model = build_model(kind)
    expected = [(name, value.shape) for name, value in model.named_parameters()]
    streamed = adapt(model) if is_adapted else model
    assert [(name, tensor.shape) for name, tensor in iterate_weights(streamed)] == expected
    assert [name for name, _ in iterate_weights(streamed, {"model.norm.weight"})] == ["model.norm.weight"]


def test_trainable_tokens_are_refused_by_merging():
    settings = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3])
    with pytest.raises(ValueError, match="fully trained modules or tokens"):
        dict(iterate_weights(peft.get_peft_model(build_model("llama"), settings)))


@pytest.mark.parametrize("layer", ["embed_tokens", "lm_head"])
def test_low_rank_matrices_on_tied_embeddings_are_refused(tmp_path, layer):
    """PEFT merges them into the shared matrix, which changes the other embedding too."""
    base, folder, _ = save_foreign(tmp_path, "tied", target_modules=["q_proj", layer])
    assert "low-rank matrices on tied embeddings" in load_problem(base, folder).found


def test_adapter_other_than_lora_is_refused(tmp_path):
    base = save_model("llama", tmp_path)
    settings = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    peft.get_peft_model(load_model(base), settings).save_pretrained(tmp_path / "adapter")
    assert "IA3 adapter" in load_problem(base, tmp_path / "adapter").found


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_adapter_that_is_not_finite_is_refused(saved, value):
    base, folder, _ = saved
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    edit_weights(folder, lambda tensors: tensors[name].view(-1)[:1].fill_(value))
    assert f"has NaN or infinity in 1 weights, such as {name}" in load_problem(base, folder).found


def test_missing_and_unexpected_adapter_weights_are_errors(saved):
    base, folder, _ = saved
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    edit_weights(folder, lambda tensors: tensors.pop(name))
    assert name in load_problem(base, folder).found
    edit_weights(folder, lambda tensors: tensors.update({name: torch.zeros(16, 4), "extra": torch.zeros(1)}))
    assert "extra" in load_problem(base, folder).found


def test_adapter_weight_of_wrong_shape_is_an_error(saved):
    base, folder, _ = saved
    edit_settings(folder, r=8)
    assert "size mismatch" in load_problem(base, folder).found or "shape" in load_problem(base, folder).found


def test_pickled_adapter_weights_are_never_opened(saved):
    base, folder, _ = saved
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    assert "has no adapter_model.safetensors" in load_problem(base, folder).found


@pytest.mark.parametrize("name", ["owner/missing", "not/a/hub/id", "{}"])
def test_missing_adapter_is_reported_in_one_line(saved, tmp_path, name):
    base = saved[0]
    problem = load_problem(base, name.format(tmp_path))
    assert "\n" not in problem.found
    assert problem.remedy


@pytest.mark.parametrize(("kind", "whole"), [("llama", None), ("tied", ["embed_tokens"])])
def test_classification_head_is_trained_and_saved_with_adapter(tmp_path, kind, whole):
    base = save_model(kind, tmp_path)
    model = LlamaForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    config = AdapterConfig(use_peft=True, lora_modules_to_save=whole)
    adapted = add_adapter(model, config, seed=0, task_type="SEQ_CLS")
    assert hasattr(model.get_input_embeddings(), "modules_to_save") == bool(whole)
    assert adapted.get_base_model().score.modules_to_save.default.weight.requires_grad
    assert "base_model.model.score.weight" in read_adapter_state(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    again = LlamaForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    reloaded = load_adapter(again, str(tmp_path / "adapter"), task_type="SEQ_CLS")
    assert torch.equal(compute_logits(reloaded), compute_logits(adapted))
    assert "SEQ_CLS" in load_problem(base, tmp_path / "adapter").found


@pytest.mark.parametrize(
    ("changes", "is_quantized", "reason"),
    [
        ({}, False, ""),
        ({"base_model_name_or_path": None}, False, ""),
        ({"base_model_name_or_path": "another"}, False, "was trained on another"),
        ({"task_type": "CAUSAL_LM"}, False, "was trained for CAUSAL_LM"),
        ({"modules_to_save": ["score", "embed_tokens"]}, False, "has a fully trained embed_tokens"),
        ({}, True, "has statistics of unquantised weights"),
    ],
)
def test_reward_adapter_is_shared_only_if_scores_are_those_of_its_own_base(saved, changes, is_quantized, reason):
    base, folder, _ = saved
    edit_settings(folder, **{"task_type": "SEQ_CLS", "modules_to_save": ["score"]} | changes)
    found, why = find_shareable(str(folder), None, load_model(base).config, is_quantized=is_quantized)
    assert found == (None if reason else folder)
    assert reason in why
