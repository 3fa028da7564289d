"""Loading of the teacher: frozen, own precision, student's vocabulary; errors under its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.test_vocabulary import permute
from tests.training.students import build_config, save_student
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from recipes_lib.config.schema import TokensConfig
from recipes_lib.distillation.teacher_store import is_own_teacher, load_teacher, map_teacher_vocabulary
from recipes_lib.errors import ConfigError
from recipes_lib.models.attention.kernels import AttentionChoice
from recipes_lib.models.loading import choose_teacher, load_tokenizer
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.trainers.arguments import build_training_arguments
from recipes_lib.training.trainers.trained_model import load_verified_config

SDPA = AttentionChoice("sdpa", "rows")


def load(student_dir: Path, teacher_dir: Path, tmp_path: Path, **keys: Any) -> Any:
    config = build_config(student_dir, teacher_dir, tmp_path / "run", **keys)
    args = build_training_arguments(config, read_launch(), has_eval=False)
    tokenizer = load_tokenizer(config.model, TokensConfig())
    vocabulary = map_teacher_vocabulary(config, tokenizer)
    load_verified_config(config, tokenizer, longest=None, vocabulary=vocabulary)
    return load_teacher(config, SDPA, args, vocabulary)


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_teacher_is_frozen_and_verified_in_its_own_dtype(
    tiny_model_dir, tmp_path, dtype, expected, monkeypatch
) -> None:
    verified = list[Any]()
    monkeypatch.setattr("recipes_lib.distillation.teacher_store.verify_loss_head", verified.append)
    teacher = load(tiny_model_dir, tiny_model_dir, tmp_path, teacher_dtype=dtype)
    assert verified == [teacher]
    assert teacher.dtype == expected
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


@pytest.mark.parametrize("num_rows", [512, 520])
def test_tokens_without_an_embedding_of_the_student_are_left_out(tiny_model_dir, tmp_path, num_rows) -> None:
    """As Gemma's token of images, which texts do not contain."""
    student, teacher = tmp_path / "student", tmp_path / "teacher"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.add_tokens("<image>", special_tokens=True)
    for folder, rows in ((student, 512), (teacher, num_rows)):
        save_student(folder, tiny_model_dir, vocab_size=rows)
        tokenizer.save_pretrained(folder)
    assert len(tokenizer) == 513
    assert len(load(student, teacher, tmp_path).lm_head.weight) == 512


def test_padded_and_permuted_teacher_keeps_probabilities(tiny_model_dir, tmp_path) -> None:
    folder, order = tmp_path / "teacher", torch.randperm(512, generator=torch.Generator().manual_seed(0))
    save_student(folder, tiny_model_dir, vocab_size=520)
    permute(AutoTokenizer.from_pretrained(tiny_model_dir), order).save_pretrained(folder)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(input_ids=order[ids]).logits[..., order]
        got = load(tiny_model_dir, folder, tmp_path)(input_ids=ids).logits
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("gone", "neither a folder nor|cannot be loaded|not in the cache"),
        ("weights", "weights"),
        ("config", "`recipes merge` an adapter first"),
        ("tokens", "no token"),
    ],
)
def test_teacher_problems_are_reported_under_teacher_keys(tiny_model_dir, tmp_path, damage, words) -> None:
    folder = tmp_path / "teacher"
    if damage != "gone":
        save_student(folder, tiny_model_dir)
    if damage == "weights":
        (folder / "model.safetensors").unlink()
    if damage == "config":
        (folder / "config.json").unlink()
    if damage == "tokens":
        tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
        tokenizer.add_tokens(["<new>"])
        tokenizer.save_pretrained(tmp_path / "student")
        AutoModelForCausalLM.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "student")
    student = tmp_path / "student" if damage == "tokens" else tiny_model_dir
    with pytest.raises(ConfigError, match=words) as caught:
        load(student, folder, tmp_path)
    assert {problem.where for problem in caught.value.problems} == {"teacher_model_name_or_path"}


def test_teacher_without_isolation_of_documents_is_refused(tiny_model_dir, tmp_path, monkeypatch) -> None:
    config = GPT2Config(vocab_size=512, n_embd=16, n_layer=1, n_head=2, alibi=True)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "teacher")
    with pytest.raises(ConfigError, match="position_ids") as caught:
        load(tiny_model_dir, tmp_path / "teacher", tmp_path)
    assert caught.value.problems[0].where == "teacher_model_name_or_path"


def test_student_is_its_own_teacher_by_name_and_revision(tiny_model_dir, tmp_path) -> None:
    config = build_config(tiny_model_dir, tiny_model_dir, tmp_path)
    assert is_own_teacher(config)
    assert choose_teacher(config).tokenizer_name_or_path is None
    assert not is_own_teacher(build_config(tiny_model_dir, tmp_path, tmp_path))
    assert not is_own_teacher(build_config(tiny_model_dir, tiny_model_dir, tmp_path, teacher_model_revision="main"))
    assert not is_own_teacher(build_config(tiny_model_dir, tiny_model_dir, tmp_path, use_peft=True))
