"""What is broken in a saved model is found when it is opened again."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig

from recipes_lib.models.saved_weights import BrokenSaveError, read_published_shapes, read_shapes, verify_weights


@pytest.fixture
def saved(tiny_model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_whole_model_is_accepted_and_its_parameters_are_counted(saved):
    model, folder = saved
    assert verify_weights(folder, read_shapes(model)) == model.num_parameters()


def test_shards_are_opened_through_their_index(tiny_model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert verify_weights(tmp_path, read_shapes(model)) == model.num_parameters()
    next(tmp_path.glob("model-00002-*.safetensors")).unlink()
    with pytest.raises(BrokenSaveError, match=r"model-00002-.* is missing"):
        verify_weights(tmp_path, read_shapes(model))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-8]), "model-00002-.* cannot be opened again"),
        (lambda file: save_file({"other": torch.ones(1)}, file), r"\.weight is missing"),
    ],
    ids=["truncated", "without what the index names"],
)
def test_a_shard_that_is_not_what_its_index_says_is_refused(tiny_model_dir, tmp_path, damage, words):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    damage(next(tmp_path.glob("model-00002-*.safetensors")))
    with pytest.raises(BrokenSaveError, match=words):
        verify_weights(tmp_path, read_shapes(model))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_number_is_refused_and_names_the_tensor(saved, value):
    model, folder = saved
    rewrite(folder, lambda tensors: tensors["model.norm.weight"].__setitem__(3, value))
    with pytest.raises(BrokenSaveError, match=r"model\.norm\.weight is not finite"):
        verify_weights(folder, read_shapes(model))


def test_an_emptied_or_lost_tensor_is_refused(saved):
    model, folder = saved
    rewrite(folder, lambda tensors: tensors.__setitem__("model.norm.weight", torch.empty(0)))
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"))
    with pytest.raises(BrokenSaveError) as caught:
        verify_weights(folder, read_shapes(model))
    assert "model.norm.weight is empty" in str(caught.value)
    assert "model.layers.1.self_attn.q_proj.weight is missing" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", None])
def test_a_file_that_cannot_be_opened_is_refused(saved, content):
    model, folder = saved
    path = folder / "model.safetensors"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(BrokenSaveError, match="cannot be opened again"):
        verify_weights(folder, read_shapes(model))


def test_an_index_that_names_no_files_is_refused(saved):
    model, folder = saved
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}}))
    with pytest.raises(BrokenSaveError, match="cannot be opened again"):
        verify_weights(folder, read_shapes(model))


def test_a_tensor_of_another_shape_is_refused(saved):
    model, folder = saved
    rewrite(folder, lambda tensors: tensors.__setitem__("model.norm.weight", torch.zeros(8, 8)))
    with pytest.raises(BrokenSaveError, match=r"norm\.weight has the shape \(8, 8\) and not \(64,\)"):
        verify_weights(folder, read_shapes(model))


def test_experts_are_looked_for_under_the_names_that_they_are_saved_by(tmp_path):
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16) | {"num_hidden_layers": 1, "num_local_experts": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(MixtralConfig(vocab_size=32, **sizes, **heads))
    model.save_pretrained(tmp_path)
    assert read_published_shapes(model).keys() != read_shapes(model).keys()
    assert verify_weights(tmp_path, read_published_shapes(model)) == model.num_parameters()
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.0.block_sparse_moe.experts.1.w2.weight"))
    with pytest.raises(BrokenSaveError, match=r"experts\.1\.w2\.weight is missing"):
        verify_weights(tmp_path, read_published_shapes(model))
