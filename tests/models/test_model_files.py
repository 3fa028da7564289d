"""Model files of a folder, and detection of missing and damaged ones."""

from __future__ import annotations

import json

import pytest
from safetensors.numpy import save_file
from tests.publish.runs import finish, make_run

from recipes_lib.models.model_files import find_damage, find_missing, is_model, list_model_files

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def split_off_shard(file):
    """Turn the weights into the first of two shards, without the second."""
    file.rename(file.with_name(SHARDS[0]))
    weight_map = dict(zip("ab", SHARDS, strict=True))
    file.with_name(INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("names", "holds"),
    [
        (["model.safetensors", "config.json"], True),
        (["model-00001-of-00002.safetensors", "config.json"], True),
        (["adapter_model.safetensors", "adapter_config.json"], True),
        (["policy.safetensors", "ppo_state.json"], False),
        (["config.json"], False),
        ([], False),
    ],
)
def test_is_model_requires_weights_and_configuration(tmp_path, names, holds):
    for name in names:
        (tmp_path / name).touch()
    assert is_model(tmp_path) is holds
    assert not is_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda file: None, None),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "model.safetensors cannot be opened"),
        (lambda file: file.write_bytes(b""), "model.safetensors cannot be opened"),
        (
            lambda file: file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{0:064}\n"),
            "git lfs pull",
        ),
        (
            lambda file: (file.unlink(), file.symlink_to(file.name)),
            "model.safetensors cannot be opened: [Errno 40]",
        ),
        (lambda file: save_file({}, file), "model.safetensors holds no tensor"),
        (split_off_shard, f"{SHARDS[1]} is missing"),
        (lambda file: (file.rename(file.with_name(SHARDS[0])), file.with_name(INDEX).write_text("{")), "is not JSON"),
        # transformers loads the whole file and ignores these, which an earlier save may have left.
        (lambda file: file.with_name(INDEX).write_text("{"), None),
        (lambda file: file.with_name(SHARDS[1]).write_bytes(b""), None),
    ],
)
def test_find_damage_reads_weight_headers(run, change, found):
    file = finish(run) / "model.safetensors"
    change(file)
    damage = find_damage(run)
    assert damage is None if found is None else found in damage


def test_find_missing_names_every_model_file(run):
    finish(run)
    names = list_model_files(run)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(names)
    assert not {"run.json", "metrics.jsonl", "README.md"} & set(names)
    assert find_missing(run, names) is None
    for name in names:
        content = (run / name).read_bytes()
        (run / name).unlink()
        assert find_missing(run, names) == f"{name} is missing"
        (run / name).write_bytes(content)
    # A record of an older release names none.
    (run / "config.json").unlink()
    assert find_missing(run, ()) == "there are no weights with a configuration"
