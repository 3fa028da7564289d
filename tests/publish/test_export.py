"""A broken model is never called done."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from recipes_lib.publish.export import BrokenExportError, verify_export


def names_of(model):
    return [name for name, _ in model.named_parameters()]


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
    assert verify_export(folder, names_of(model)) == model.num_parameters()


def test_shards_are_opened_through_their_index(tiny_model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert verify_export(tmp_path, names_of(model)) == model.num_parameters()
    next(tmp_path.glob("model-00002-*.safetensors")).unlink()
    with pytest.raises(BrokenExportError, match=r"model-00002-.* is missing"):
        verify_export(tmp_path, names_of(model))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_number_breaks_the_export_and_names_the_tensor(saved, value):
    model, folder = saved
    rewrite(folder, lambda tensors: tensors["model.norm.weight"].__setitem__(3, value))
    with pytest.raises(BrokenExportError, match=r"model\.norm\.weight is not finite"):
        verify_export(folder, names_of(model))


def test_an_emptied_or_lost_tensor_breaks_the_export(saved):
    model, folder = saved
    rewrite(folder, lambda tensors: tensors.__setitem__("model.norm.weight", torch.empty(0)))
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"))
    with pytest.raises(BrokenExportError) as caught:
        verify_export(folder, names_of(model))
    assert "model.norm.weight is empty" in str(caught.value)
    assert "model.layers.1.self_attn.q_proj.weight is missing" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", None])
def test_a_file_that_cannot_be_opened_breaks_the_export(saved, content):
    model, folder = saved
    path = folder / "model.safetensors"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(BrokenExportError, match="cannot be opened again"):
        verify_export(folder, names_of(model))


def test_an_index_that_names_no_files_breaks_the_export(saved):
    model, folder = saved
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}}))
    with pytest.raises(BrokenExportError, match="cannot be opened again"):
        verify_export(folder, names_of(model))
