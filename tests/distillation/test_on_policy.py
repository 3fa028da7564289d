"""On-policy distillation: sampling schedule, reproducibility, loss on completions, resume and preemption."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tests.distillation.test_distillation import load
from tests.rl import keys_task
from tests.training.students import make_distiller, save_student
from tests.training.trajectories import assert_equal_weights, make_packs, weights_of
from torch.nn import functional
from transformers import TrainerCallback

from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.distillation.on_policy import ANSWERED, OnPolicyAnswers, read_questions
from recipes_lib.errors import ConfigError, PreemptedError
from recipes_lib.losses.distillation import compute_divergence
from recipes_lib.models.generation import GenerateBackend, Sampling
from recipes_lib.stopping import STOP
from recipes_lib.training.guards.preemption import raise_if_stop_pending
from recipes_lib.training.guards.watchdog import WATCHDOG

KEYS: dict[str, Any] = {"lmbda": 0.5, "distillation_beta": 1.0, "response_length": 6}
STOPS = list(range(40))
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def student_dir(tiny_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random student with many stop tokens, so that its answers often end early."""
    folder = save_student(tmp_path_factory.mktemp("student"), tiny_tokenizer_dir)
    model = load(folder, is_teacher=False)
    model.generation_config.eos_token_id = STOPS
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def keys_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained policy of the keys task: it answers with one of the two keys at the end of a prompt."""
    return keys_task.write_policy(tmp_path_factory.mktemp("teacher"), seed=0, num_steps=120, **SMALL)


def build_answers(**options: Any) -> OnPolicyAnswers:
    defaults: dict[str, Any] = {
        "lmbda": 1.0, "seed": 5, "max_length": 512, "batch_size": 3, "precision": contextlib.nullcontext,
        "collate": PackedCollator(pad_token_id=1),
    }  # fmt: skip
    names = {"response_length": 6, "temperature": 1.0, "num_tokens": 512}
    given = {name: options.pop(name, default) for name, default in names.items()}
    return OnPolicyAnswers(**defaults | options, sampling=Sampling((), 0, beat=raise_if_stop_pending, **given))


def read_documents(batch: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of each document that has one, in order."""
    documents = []
    for row, labels, positions in zip(*(batch[name].tolist() for name in ("input_ids", "labels", "position_ids")),
                                      strict=True):  # fmt: skip
        starts = [at for at, position in enumerate(positions) if position == 0]
        for start, stop in zip(starts, [*starts[1:], len(row)], strict=True):
            targets = [at for at in range(start, stop) if labels[at] >= 0]
            if targets:
                assert targets == list(range(targets[0], stop)), "an answer is the end of its document"
                assert [labels[at] for at in targets] == [row[at] for at in targets]
                documents.append((row[start : targets[0]], row[targets[0] : stop]))
    return documents


@pytest.mark.parametrize("lmbda", [0.0, 0.1, 0.25, 0.5, 0.7, 1.0])
def test_sampled_steps_are_evenly_spaced(lmbda: float) -> None:
    for seed in range(5):
        due = [build_answers(lmbda=lmbda, seed=seed).is_due(step) for step in range(400)]
        for start in range(0, 300, 7):
            assert abs(sum(due[start : start + 40]) - 40 * lmbda) <= 1
    firsts = {tuple(build_answers(lmbda=0.25, seed=seed).is_due(step) for step in range(4)) for seed in range(40)}
    assert len(firsts) == 4, "the seed selects one of four phases"


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_prompt_is_text_before_last_answer(layout: Any) -> None:
    rows = [
        {"input_ids": [9, 8, 7, 6, 5, 4, 3, 2], "loss_mask": [1, 1, 0, 0, 1, 1, 0, 1], "seq_lengths": [6, 2]},
        {"input_ids": [1, 2, 3, 1, 1], "loss_mask": [0, 0, 0, 0, 1], "seq_lengths": [3, 2]},
    ]
    batch = PackedCollator(pad_token_id=1, layout=layout)(rows)
    questions = list(read_questions(batch))
    assert [question.prompt.tolist() for question in questions] == [[9, 8, 7, 6], [3], [1]]
    assert [question.row for question in questions] == ([0, 0, 1] if layout == "rows" else [0, 0, 0])
    alone = [list(read_questions(PackedCollator(pad_token_id=1)([row]))) for row in rows]
    assert [question.number for question in questions] == [question.number for part in alone for question in part]
    assert len({question.number for question in questions}) == 3


def test_completions_are_sampled_from_student_up_to_stop_token(student_dir: Path) -> None:
    student, batch = load(student_dir, is_teacher=False).train(), PackedCollator(pad_token_id=1)(list(make_packs(6)))
    phase = WATCHDOG.phase
    answered = build_answers(max_length=20).replace(student, batch, 3)
    asked = [question.prompt.tolist() for question in read_questions(batch)]
    documents = read_documents(answered)
    assert [prompt for prompt, _ in documents] == [prompt for prompt in asked if len(prompt) <= 14]
    assert len(documents) < len(asked)
    finished = [answer[-1] in STOPS for _, answer in documents]
    assert answered[ANSWERED].tolist() == [len(documents), sum(finished)]
    assert 0 < sum(finished) < len(finished)
    for (_, answer), is_finished in zip(documents, finished, strict=True):
        assert not set(answer[:-1]) & set(STOPS)
        assert len(answer) <= 6
        assert is_finished or len(answer) == 6
    assert student.training
    assert WATCHDOG.phase == phase, "the phase of sampling ends with it"
    assert answered["row_ids"].tolist() == batch["row_ids"].tolist()
    # ``num_tokens`` limits the sampled ids.
    again = build_answers(max_length=20, num_tokens=50).replace(student, batch, 3)
    assert max(max(answer) for _, answer in read_documents(again)) < 50
    assert max(max(answer) for _, answer in documents) >= 50


def test_completion_depends_on_seed_step_and_text_only(student_dir: Path) -> None:
    student, rows, collate = load(student_dir, is_teacher=False), list(make_packs(6)), PackedCollator(pad_token_id=1)
    # As with models without a limit of positions.
    answers = build_answers(max_length=math.inf)
    together = read_documents(answers.replace(student, collate(rows), 3))
    apart = [read_documents(answers.replace(student, collate([row]), 3)) for row in rows]
    assert together == [document for part in apart for document in part]
    for other in (build_answers(seed=6).replace(student, collate(rows), 3), answers.replace(student, collate(rows), 4)):
        assert read_documents(other) != together


def test_batch_without_prompts_has_no_targets(student_dir: Path) -> None:
    student, batch = load(student_dir, is_teacher=False), PackedCollator(pad_token_id=1)(list(make_packs(2)))
    answered = build_answers(max_length=6).replace(student, batch, 0)
    assert torch.equal(answered["input_ids"], batch["input_ids"])
    assert (answered["labels"] < 0).all()
    assert answered[ANSWERED].tolist() == [0, 0]


def test_loss_is_divergence_on_completion_tokens(tiny_model_dir, student_dir, tmp_path) -> None:
    keys = {"lmbda": 1.0, "distillation_beta": 0.7, "distillation_temperature": 2.0, "distillation_alpha": 0.9}
    trainer, _, _ = make_distiller(student_dir, tiny_model_dir, tmp_path, make_packs(), **KEYS | keys)
    texts = [PackedCollator(pad_token_id=1)(list(make_packs(4, seed=seed))) for seed in (1, 2)]
    trainer.state.max_steps = 1
    batches, num_terms = trainer.get_batch_samples(iter(texts), 2, torch.device("cpu"))
    trainer.current_gradient_accumulation_steps = 2
    documents = [document for batch in batches for document in read_documents(batch)]
    loss = sum(trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=num_terms) for batch in batches)
    total, num_tokens = 0.0, 0
    with torch.no_grad():
        for prompt, answer in documents:
            ids = torch.tensor([prompt + answer])
            student, teacher = (
                (model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / 2).log_softmax(-1)
                for model in (trainer.model, trainer.teacher)
            )
            total += 4 * float(compute_divergence(teacher, student, 0.7)[0].sum())
            num_tokens += len(answer)
    assert int(num_terms) == num_tokens
    assert loss.item() == pytest.approx(total / num_tokens, rel=1e-5)


def test_max_new_tokens_without_room_for_prompt_is_refused(tiny_model_dir, student_dir, tmp_path) -> None:
    keys = KEYS | {"response_length": 512}
    with pytest.raises(ConfigError, match="512 tokens leave no room for a prompt in the 512 positions"):
        make_distiller(student_dir, tiny_model_dir, tmp_path, make_packs(), **keys)


def test_lambda_without_sampled_step_changes_nothing(tiny_model_dir, student_dir, tmp_path) -> None:
    keys = {"max_steps": 2, "per_device_train_batch_size": 2}
    never, first, _ = make_distiller(student_dir, tiny_model_dir, tmp_path / "never", make_packs(), **keys, lmbda=1e-9)
    without, second, _ = make_distiller(student_dir, tiny_model_dir, tmp_path / "without", make_packs(), **keys)
    assert without.answers is None
    assert never.answers is not None
    never.train()
    without.train()
    assert first.steps == second.steps
    assert_equal_weights(weights_of(never), weights_of(without))


def test_metrics_of_completions_and_texts_are_separate(tiny_model_dir, student_dir, tmp_path) -> None:
    trainer, recorder, lines = make_distiller(
        student_dir,
        tiny_model_dir,
        tmp_path,
        make_packs(),
        **KEYS,
        distillation_temperature=2.0,
        distillation_alpha=0.3,
    )
    trainer.train()
    sampled = [trainer.answers.is_due(step) for step in range(4)]
    assert sum(sampled) == 2
    for is_sampled, log in zip(sampled, recorder.train_logs, strict=True):
        assert ("on_policy/divergence" in log) == is_sampled
        assert ("distillation/divergence" in log) == (not is_sampled)
        if is_sampled:
            assert log["loss"] == pytest.approx(4 * log["on_policy/divergence"], rel=1e-4)
            assert 1 <= log["on_policy/length"] <= 6
            assert 0 < log["on_policy/finished"] < 1
    assert sum(line.startswith("step 0: ") for line in lines) == 1


def test_on_policy_loss_is_independent_of_micro_batches(tiny_model_dir, student_dir, tmp_path) -> None:
    # One step on texts, and one on sampled completions.
    steps = []
    for size in (4, 1):
        cut = {"max_steps": 2, "per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
        folder = tmp_path / f"{size}"
        trainer, recorder, _ = make_distiller(student_dir, tiny_model_dir, folder, make_packs(), **KEYS | cut)
        assert {trainer.answers.is_due(step) for step in range(2)} == {False, True}
        trainer.train()
        steps.append(recorder.steps)
    for expected, got in zip(*steps, strict=True):
        assert got == pytest.approx(expected, rel=1e-5)


def test_resume_restores_weights_bitwise(tiny_model_dir, student_dir, tmp_path) -> None:
    keys = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 2, **KEYS}
    straight, recorder, _ = make_distiller(student_dir, tiny_model_dir, tmp_path / "run", make_packs(), **keys)
    straight.train()
    # Before a step on texts, and before one on sampled completions.
    for step in (2, 3):
        resumed, second, _ = make_distiller(
            student_dir, tiny_model_dir, tmp_path / "run", make_packs(), **keys | {"save_strategy": "no"}
        )
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        assert second.steps == recorder.steps[step:]
        assert_equal_weights(weights_of(resumed), weights_of(straight))
    assert straight.answers.is_due(2) != straight.answers.is_due(3)


def test_preemption_during_sampling_stops_and_resumes(tiny_model_dir, student_dir, tmp_path, monkeypatch) -> None:
    keys = {"save_strategy": "steps", "save_steps": 100, "max_steps": 2, **KEYS, "lmbda": 1.0}
    keys |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 2}
    straight, recorder, _ = make_distiller(student_dir, tiny_model_dir, tmp_path / "straight", make_packs(), **keys)
    straight.train()
    stopped, _, _ = make_distiller(student_dir, tiny_model_dir, tmp_path / "run", make_packs(), **keys)
    generate, calls = GenerateBackend.generate, []

    def request_stop(backend: Any, *args: Any) -> Any:
        if stopped.state.global_step == 1:
            calls.append(1)
            STOP.request("SIGTERM")
        return generate(backend, *args)

    monkeypatch.setattr(GenerateBackend, "generate", request_stop)
    with pytest.raises(PreemptedError, match="stopped after step 1; checkpoint-1 is complete"):
        stopped.train()
    monkeypatch.undo()
    STOP.reset()
    assert len(calls) == stopped.args.gradient_accumulation_steps, (
        "sampling stops at the first token of each micro-batch"
    )
    resumed, second, _ = make_distiller(student_dir, tiny_model_dir, tmp_path / "run", make_packs(), **keys)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert second.steps == recorder.steps[1:]
    assert_equal_weights(weights_of(resumed), weights_of(straight))


class PermuteTeacher(TrainerCallback):
    """Permutes the teacher's vocabulary before every step, so that there is nothing to learn."""

    def __init__(self, head: Any) -> None:
        self._weight = head.weight.data
        self._original = self._weight.clone()
        self._random = torch.Generator().manual_seed(0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._weight.copy_(self._original[torch.randperm(len(self._original), generator=self._random)])


def measure_reverse_kl(student: Any, teacher: Any, num_prompts: int = 256) -> float:
    """Reverse KL per token in nats, on the student's answers to held-out prompts."""
    batch = PackedCollator(pad_token_id=0)(write_rows(num_prompts, seed=77))
    answers = build_answers(response_length=keys_task.MAX_ANSWER, num_tokens=keys_task.VOCABULARY, batch_size=256)
    answered = answers.replace(student, batch, 0)
    is_target = answered["labels"][:, 1:] >= 0
    inputs = {name: answered[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        own, taught = (
            model(**inputs, use_cache=False).logits[:, :-1][is_target].log_softmax(-1) for model in (student, teacher)
        )
    return float(functional.kl_div(taught, own, log_target=True, reduction="sum")) / int(is_target.sum())


def write_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Prompts of the keys task, each with an empty answer."""
    rows = [[*prompt, keys_task.EOS] for prompt in keys_task.draw_prompts(count, seed)]
    return [
        {
            "input_ids": np.array(row),
            "loss_mask": np.arange(len(row)) == len(row) - 1,
            "seq_lengths": np.array([len(row)]),
        }
        for row in rows
    ]


@pytest.mark.parametrize(
    ("seed", "is_control"),
    [(0, False), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((1, False), (0, True)))],
)
def test_on_policy_training_reduces_reverse_kl(keys_teacher: Path, tmp_path: Path, seed: int, is_control: bool) -> None:
    """Reverse KL falls from about 1.3 nats per token to below 0.5, except with a permuted teacher (control)."""
    student_dir = keys_task.write_policy(tmp_path / "student", seed=50 + seed, num_steps=0, **SMALL)
    rows = Dataset.from_list(write_rows(60 * 32, seed=seed)).with_format("numpy")
    keys = {
        "lmbda": 1.0, "distillation_beta": 1.0, "response_length": keys_task.MAX_ANSWER, "max_steps": 60, "seed": seed,
        "learning_rate": 6e-3, "lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0.0,
        "per_device_train_batch_size": 32, "per_device_eval_batch_size": 32, "logging_steps": 40,
    }  # fmt: skip
    trainer, _, _ = make_distiller(student_dir, keys_teacher, tmp_path / "run", rows, **keys)
    before = measure_reverse_kl(trainer.model, trainer.teacher)
    if is_control:
        trainer.add_callback(PermuteTeacher(trainer.teacher.lm_head))
    trainer.train()
    after = measure_reverse_kl(trainer.model, load(keys_teacher, is_teacher=True))
    assert before > 1.2
    assert after > 1.0 if is_control else after < 0.5, after
