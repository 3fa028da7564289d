"""``recipes check`` of distillation: the checks of SFT, and those of the teacher."""

from __future__ import annotations

import json
import re

import pytest
from tests.training.students import save_student
from transformers import AutoTokenizer

ROWS = [{"prompt": f"{n}?", "completion": f" {n}."} for n in range(4)]


def test_valid_run_names_both_vocabularies(run_check, tmp_path, tiny_model_dir) -> None:
    student = save_student(tmp_path / "student", tiny_model_dir, vocab_size=520)
    problems, output = run_check("distill", ROWS, model_name_or_path=student, teacher_model_name_or_path=tiny_model_dir)
    assert not problems
    assert "knows the student's 512 tokens by the same ids" in output
    assert "student 520, teacher 512" in output
    keys = {"model_name_or_path": student, "teacher_model_name_or_path": tiny_model_dir, "teacher_top_k": 4}
    problems, output = run_check("distill", ROWS, **keys)
    assert not problems
    assert re.search(r"teacher: [\d.]+ k?B, not stored yet: run `recipes distill-store`", output)


@pytest.mark.parametrize("fault", ["tokens", "length"])
def test_incompatible_teacher_is_reported(run_check, tmp_path, tiny_model_dir, fault) -> None:
    teacher = save_student(tmp_path / "teacher", tiny_model_dir)
    student = save_student(tmp_path / "student", tiny_model_dir, vocab_size=600)
    if fault == "tokens":
        tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
        tokenizer.add_tokens(["<new>"])
        tokenizer.save_pretrained(student)
        problems, _ = run_check("distill", ROWS, model_name_or_path=student, teacher_model_name_or_path=teacher)
        assert "the teacher has no token '<new>'" in problems[0].found
    else:
        path = teacher / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 3}))
        problems, _ = run_check("distill", ROWS, model_name_or_path=student, teacher_model_name_or_path=teacher)
        assert "3 positions" in problems[0].found
    assert len(problems) == 1


def test_compared_layers_are_listed_and_validated(run_check, tmp_path, tiny_model_dir) -> None:
    student = save_student(tmp_path / "student", tiny_model_dir)
    keys = {"model_name_or_path": student, "teacher_model_name_or_path": tiny_model_dir, "feature_weight": 1.0}
    problems, output = run_check("distill", ROWS, **keys, angle_weight=0.5)
    assert not problems
    assert "states of layers: the student's and the teacher's 1 and 2" in output
    assert "relations of layers: the student's and the teacher's 1 and 2" in output
    (problem,), _ = run_check("distill", ROWS, **keys, feature_layers="[1, 2]")
    assert "names layer 2, and the student has 1" in problem.found
