"""Verification of saved weights by reloading them."""

import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig

from recipes_lib.models.model_files import INDEX, WEIGHTS
from recipes_lib.models.saved_weights import BrokenSaveError, read_published_shapes, read_shapes, verify_weights

BAD = (float("nan"), float("inf"), -float("inf"))


@pytest.fixture
def saved(tiny_model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_tensor(name, change):
    """Return a function that changes one tensor of a saved file."""
    return lambda folder: rewrite(folder, lambda tensors: tensors.update({name: change(tensors[name])}))


def overwrite(content):
    return lambda folder: (folder / WEIGHTS).write_bytes(content)


NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        *(
            (edit_tensor(NORM, lambda norm, x=x: norm.index_fill(0, torch.tensor(3), x)), "norm.weight is not finite")
            for x in BAD
        ),
        (edit_tensor(NORM, lambda norm: torch.empty(0)), "norm.weight is empty"),
        (edit_tensor(NORM, lambda norm: torch.zeros(8, 8)), r"norm\.weight has the shape \(8, 8\) and not \(64,\)"),
        (lambda folder: rewrite(folder, lambda tensors: tensors.pop(QUERY)), f"{QUERY} is missing"),
        (overwrite(b""), "cannot be opened again"),
        (overwrite(b"not safetensors at all"), "cannot be opened again"),
        (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
    ],
)
def test_verify_weights_names_damaged_tensor(saved, damage, words):
    model, folder = saved
    damage(folder)
    with pytest.raises(BrokenSaveError, match=words):
        verify_weights(folder, read_shapes(model))


def test_file_that_the_system_cannot_open_is_no_broken_save(saved):
    model, folder = saved
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(folder, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            verify_weights(folder, read_shapes(model))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_verify_weights_counts_parameters(saved):
    model, folder = saved
    assert verify_weights(folder, read_shapes(model)) == model.num_parameters()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (Path.unlink, "model-00002-.* is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-8]), "model-00002-.* cannot be opened again"),
        (lambda file: save_file({"other": torch.ones(1)}, file), r"\.weight is missing"),
    ],
    ids=["missing", "truncated", "tensor of index missing"],
)
def test_verify_weights_reads_shards_of_index(tiny_model_dir, tmp_path, damage, words):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert verify_weights(tmp_path, read_shapes(model)) == model.num_parameters()
    damage(next(tmp_path.glob("model-00002-*.safetensors")))
    with pytest.raises(BrokenSaveError, match=words):
        verify_weights(tmp_path, read_shapes(model))


def test_verify_weights_ignores_stale_index_beside_whole_file(saved):
    """transformers also prefers a whole file to shards."""
    model, folder = saved
    (folder / INDEX).write_text('{"weight_map": {"gone": "model-00001-of-00002.safetensors"}}')
    assert verify_weights(folder, read_shapes(model)) == model.num_parameters()
    (folder / WEIGHTS).unlink()
    with pytest.raises(BrokenSaveError, match=r"model-00001-of-00002\.safetensors is missing"):
        verify_weights(folder, read_shapes(model))
    (folder / INDEX).write_text('{"metadata": {}}')
    with pytest.raises(BrokenSaveError, match="cannot be opened again"):
        verify_weights(folder, read_shapes(model))


def test_verify_weights_reads_experts_under_published_names(tmp_path):
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16) | {"num_hidden_layers": 1, "num_local_experts": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(MixtralConfig(vocab_size=32, **sizes, **heads))
    model.save_pretrained(tmp_path)
    assert read_published_shapes(model).keys() != read_shapes(model).keys()
    assert verify_weights(tmp_path, read_published_shapes(model)) == model.num_parameters()
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.0.block_sparse_moe.experts.1.w2.weight"))
    with pytest.raises(BrokenSaveError, match=r"experts\.1\.w2\.weight is missing"):
        verify_weights(tmp_path, read_published_shapes(model))
