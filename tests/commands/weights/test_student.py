"""``recipes student``: selected layers of a teacher, and invalid selections."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

LAYER = "model.layers.{}.self_attn.q_proj.weight"


@pytest.fixture
def cut(recipes, tiny_model_dir: Path):
    """Write a student of the tiny model, and return the output of the command."""
    return functools.partial(recipes, "student", "--teacher", tiny_model_dir, "--output")


def test_student_has_selected_layers_and_all_other_weights(cut, tiny_model_dir, tmp_path) -> None:
    assert "layers       2 of 2" in cut(tmp_path / "a student", "--num_layers", "1")
    teacher, student = (AutoModelForCausalLM.from_pretrained(path) for path in (tiny_model_dir, tmp_path / "a student"))
    own, others = student.state_dict(), teacher.state_dict()
    assert torch.equal(own[LAYER.format(0)], others[LAYER.format(1)]), (
        "the last layer of the student is the last of the teacher"
    )
    assert torch.equal(own["model.embed_tokens.weight"], others["model.embed_tokens.weight"])
    assert student.config.num_hidden_layers == 1
    assert student.dtype == teacher.dtype
    assert AutoTokenizer.from_pretrained(tmp_path / "a student").get_vocab() == (
        AutoTokenizer.from_pretrained(tiny_model_dir).get_vocab()
    )
    record = json.loads((tmp_path / "a student" / "student.json").read_text())
    assert record == {"teacher": str(tiny_model_dir), "teacher_revision": None, "layers": [2], "of": 2}
    assert {path.name for path in tmp_path.iterdir()} == {"a student"}


def test_all_layers_equal_teacher_and_order_is_kept(cut, tiny_model_dir, tmp_path) -> None:
    ids = torch.arange(4, 20)[None]
    cut(tmp_path / "all", "--num_layers", "2")
    cut(tmp_path / "turned", "--layers", "2", "1")
    paths = (tiny_model_dir, tmp_path / "all", tmp_path / "turned")
    teacher, whole, turned = (AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in paths)
    assert torch.equal(teacher, whole)
    assert not torch.allclose(teacher, turned)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--num_layers", "3"), "3 layers are requested, and the teacher has 2"),
        (("--num_layers", "0"), "write a number from 1 to 2"),
        (("--layers", "1", "3"), "has layers 1 to 2"),
    ],
)
def test_invalid_layers_leave_no_files(cut, tmp_path, flags, words) -> None:
    assert words in cut(tmp_path / "student", *flags, code=2)
    assert not any(tmp_path.iterdir())
    assert "--teacher: absent" in cut(tmp_path / "student", "--num_layers", "1", "--teacher", "absent", code=2)
    (tmp_path / "file").touch()
    assert "is not empty" in cut(tmp_path, "--num_layers", "1", code=2)
