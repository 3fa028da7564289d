"""Stored top-k teacher probabilities: encoding, training equivalence, identity checks, damage and resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.students import build_config, make_distiller, save_student, store_teacher
from tests.training.trajectories import assert_equal_weights, make_packs, weights_of
from transformers import AutoTokenizer

from recipes_lib.commands.generated.distill_store import build_compute
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.distillation import teacher_store
from recipes_lib.distillation.teacher_store import (
    RecordFormat,
    StoreIdentity,
    TeacherCollator,
    compare_with_teacher,
    identify_store,
    load_teacher,
    map_teacher_vocabulary,
    read_store,
    read_targets,
    write_store,
)
from recipes_lib.errors import ConfigError, DataError
from recipes_lib.losses.distillation import TopLogps
from recipes_lib.models.attention.kernels import AttentionChoice
from recipes_lib.models.vocabulary import VocabularyMap
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.trainers.arguments import build_training_arguments

ROWS = {"key": "packs", "max_length": 64}
OBJECTIVE: dict[str, Any] = {"distillation_alpha": 0.3, "distillation_temperature": 2.0}


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_store, "SHARD_TOKENS", 5 * 64)


@pytest.mark.parametrize(
    ("num_tokens", "num_bytes"), [(32_000, 264), (65_536, 264), (151_936, 280), (262_145, 296), (1_000_000, 296)]
)
def test_64_probabilities_round_trip_in_at_most_300_bytes(num_tokens: int, num_bytes: int) -> None:
    record, generator = RecordFormat(64, num_tokens), torch.Generator().manual_seed(0)
    assert record.dtype.itemsize == num_bytes
    ids = torch.stack([torch.randperm(num_tokens, generator=generator)[:64] for _ in range(9)])
    ids[0, :2] = torch.tensor([0, num_tokens - 1])
    logps = -torch.rand(9, 64, generator=generator) * 12
    top = TopLogps(ids, logps, logps[:, 0] / 3, logps[:, 1], num_tokens)
    targets = ids[:, 1].numpy()
    records = record.encode(top, targets)
    assert records.nbytes == 9 * num_bytes
    back = record.decode(records)
    assert torch.equal(back.ids, ids)
    torch.testing.assert_close(back.logps, logps, atol=0.004, rtol=0)
    assert torch.equal(back.log_tails, top.log_tails)
    assert (records["target"] == targets & 0xFFFF).all()


def test_token_0_is_a_target() -> None:
    assert read_targets(torch.tensor([[7, 0, -100, 3], [0, -100, 0, 1]])).tolist() == [0, 3, 0, 1]


@pytest.mark.parametrize("k", [1, 3, 5, 64])
def test_any_number_of_probabilities_round_trips(k: int) -> None:
    record = RecordFormat(k, 200_000)
    ids = torch.randint(0, 200_000, (4, k), generator=torch.Generator().manual_seed(k))
    zeros = torch.zeros(4)
    top = TopLogps(ids, torch.zeros(4, k), zeros, zeros, 200_000)
    assert torch.equal(record.decode(record.encode(top, np.zeros(4, np.int64))).ids, ids)


def train(student_dir: Path, teacher_dir: Path, folder: Path, **keys: Any) -> tuple[Any, list[Any]]:
    trainer, recorder, _ = make_distiller(student_dir, teacher_dir, folder, make_packs(), **OBJECTIVE | keys)
    trainer.train()
    return trainer, recorder.train_logs


def test_store_of_full_vocabulary_trains_as_live_teacher(tiny_model_dir, student_dir, tmp_path) -> None:
    keys = {"teacher_top_k": 512, "prepared_dir": str(tmp_path / "sets")}
    store_teacher(student_dir, tiny_model_dir, make_packs(), tmp_path / "sets", **OBJECTIVE, teacher_top_k=512)
    stored, stored_logs = train(student_dir, tiny_model_dir, tmp_path / "stored", **keys)
    live, logs = train(student_dir, tiny_model_dir, tmp_path / "live")
    assert stored.teacher is None
    for expected, got in zip(logs, stored_logs, strict=True):
        for name in ("loss", "distillation/nll", "distillation/divergence", "distillation/teacher_nll"):
            assert got[name] == pytest.approx(expected[name], rel=2e-3), name
    for name, tensor in weights_of(live).items():
        torch.testing.assert_close(weights_of(stored)[name], tensor, atol=2e-3, rtol=0)


def test_stored_top_k_is_lower_bound_and_resumes_bitwise(tiny_model_dir, student_dir, tmp_path) -> None:
    keys: dict[str, Any] = {"teacher_top_k": 8, "prepared_dir": str(tmp_path / "sets")}
    store_teacher(student_dir, tiny_model_dir, make_packs(), tmp_path / "sets", **OBJECTIVE, teacher_top_k=8)
    straight, logs = train(student_dir, tiny_model_dir, tmp_path / "run", save_strategy="steps", save_steps=2, **keys)
    _, live = train(student_dir, tiny_model_dir, tmp_path / "live", max_steps=1)
    assert 0 < logs[0]["distillation/divergence"] < live[0]["distillation/divergence"]
    resumed, recorder, _ = make_distiller(
        student_dir, tiny_model_dir, tmp_path / "run", make_packs(), **OBJECTIVE, **keys
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert recorder.steps == [{name: log[name] for name in recorder.steps[0]} for log in logs[2:]]
    assert_equal_weights(weights_of(resumed), weights_of(straight))


CHANGES: dict[str, dict[str, Any]] = {
    "k": {"teacher_top_k": 9},
    "temperature": {"distillation_temperature": 1.5},
    "precision": {"teacher_dtype": "bfloat16"},
}


def test_store_of_different_inputs_is_refused(tiny_model_dir, student_dir, tmp_path) -> None:
    keys: dict[str, Any] = {"teacher_top_k": 8, "prepared_dir": str(tmp_path / "sets")}
    store_teacher(student_dir, tiny_model_dir, make_packs(), tmp_path / "sets", teacher_top_k=8)
    for change in (*CHANGES, "teacher", "rows", "vocabulary"):
        teacher = save_student(tmp_path / "other", tiny_model_dir, seed=9) if change == "teacher" else tiny_model_dir
        config = build_config(student_dir, teacher, tmp_path, **keys | CHANGES.get(change, {}))
        vocabulary = VocabularyMap(range(511 if change == "vocabulary" else 512))
        identity = identify_store(config, vocabulary, ROWS | ({"key": "others"} if change == "rows" else {}))
        with pytest.raises(ConfigError, match="nothing is stored") as caught:
            read_store(identity, make_packs())
        assert "recipes distill-store" in caught.value.problems[0].remedy, change
    same = identify_store(build_config(student_dir, tiny_model_dir, tmp_path, **keys), VocabularyMap(range(512)), ROWS)
    assert len(read_store(same, make_packs())) == 16


def build_store_writer(config: RecipeConfig) -> tuple[StoreIdentity, Any]:
    tokenizer = AutoTokenizer.from_pretrained(config.model.model_name_or_path)
    vocabulary = map_teacher_vocabulary(config, tokenizer)
    identity = identify_store(config, vocabulary, ROWS)
    args = build_training_arguments(config, read_launch(), has_eval=False)
    teacher = load_teacher(config, AttentionChoice("sdpa", "rows"), args, vocabulary)
    return identity, build_compute(config, identity.format, teacher, PackedCollator(pad_token_id=1), args)


def shift(identity: StoreIdentity) -> None:
    """Shift the records of every shard by one position."""
    for path in (identity.root / identity.key[:16]).glob("shard-*.npy"):
        np.save(path, np.roll(np.load(path), 1))


def test_store_shifted_by_one_is_detected(tiny_model_dir, student_dir, tmp_path) -> None:
    config = build_config(student_dir, tiny_model_dir, tmp_path, teacher_top_k=8, prepared_dir=str(tmp_path))
    identity, compute = build_store_writer(config)
    packs = make_packs()
    write_store(identity, packs, compute, batch_size=4, tell=lambda _: None)
    taught = read_store(identity, packs)
    assert compare_with_teacher(identity, taught, compute, num_rows=16, allowed=0.01) < 0.005
    shift(identity)
    taught = read_store(identity, packs)
    # Detected by querying the teacher again, and without it by the targets of the first batch.
    with pytest.raises(DataError, match="differ from the teacher's"):
        compare_with_teacher(identity, taught, compute, num_rows=16, allowed=0.01)
    collate = TeacherCollator(PackedCollator(pad_token_id=1), identity.format)
    for rows in ([taught[0], taught[1]], [{**taught[0], "teacher": taught[0]["teacher"][1:]}]):
        with pytest.raises(DataError, match="other targets"):
            collate(rows)


def test_writing_resumes_after_last_complete_shard(tiny_model_dir, student_dir, tmp_path, monkeypatch) -> None:
    config = build_config(student_dir, tiny_model_dir, tmp_path, teacher_top_k=8, prepared_dir=str(tmp_path / "a"))
    identity, compute = build_store_writer(config)
    (tmp_path / "a").mkdir()
    flushed: list[int] = []
    monkeypatch.setattr(teacher_store, "fsync", lambda path: flushed.append(len(np.load(path))))
    write_store(identity, make_packs(), compute, batch_size=2, tell=lambda _: None)
    # A shard is synced to disk before the rename that publishes it.
    assert flushed == [len(np.load(path)) for path in sorted(read_store(identity, make_packs()).folder.glob("shard-*"))]
    computed: list[int] = []

    def interrupted(rows: Any) -> Any:
        if len(computed) == 10:
            raise KeyboardInterrupt
        computed.extend(int(row["row_ids"][0]) for row in rows)
        return compute(rows)

    other = build_config(student_dir, tiny_model_dir, tmp_path, teacher_top_k=8, prepared_dir=str(tmp_path / "b"))
    again = identify_store(other, VocabularyMap(range(512)), ROWS)
    (tmp_path / "b").mkdir()
    with pytest.raises(KeyboardInterrupt):
        write_store(again, make_packs(), interrupted, batch_size=2, tell=lambda _: None)
    with pytest.raises(ConfigError, match="nothing is stored"):
        read_store(again, make_packs())
    computed[:] = [-1]  # Complete shards are not computed again.
    write_store(again, make_packs(), interrupted, batch_size=2, tell=lambda _: None)
    assert computed == [-1, *range(10, 16)]
    one, two = (read_store(each, make_packs()) for each in (identity, again))
    for number in range(16):
        assert one[number]["teacher"].tobytes() == two[number]["teacher"].tobytes()


def test_read_store_keeps_no_shard_open(tiny_model_dir, student_dir, tmp_path, monkeypatch) -> None:
    """A store can have more shards than a process may open."""
    monkeypatch.setattr(teacher_store, "SHARD_TOKENS", 64)
    rows = make_packs()
    identity = store_teacher(student_dir, tiny_model_dir, rows, tmp_path / "sets", teacher_top_k=8)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    taught = read_store(identity, rows)
    assert sum(len(taught[row]["teacher"]) for row in range(16)) == taught.counts.sum()
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open
    assert len(list(taught.folder.glob("shard-*"))) == 16


def test_damaged_store_is_refused(tiny_model_dir, student_dir, tmp_path) -> None:
    identity = store_teacher(student_dir, tiny_model_dir, make_packs(), tmp_path / "sets", teacher_top_k=8)
    next((identity.root / identity.key[:16]).glob("shard-*.npy")).write_bytes(b"")
    with pytest.raises(ConfigError, match="nothing is stored"):
        read_store(identity, make_packs())


def test_hub_teacher_is_identified_by_commit(tiny_model_dir, student_dir, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository, commits = tmp_path / "hub" / "models--owner--teacher", ("e" * 40, "f" * 40)
    (repository / "refs").mkdir(parents=True)
    for commit in commits:
        shutil.copytree(tiny_model_dir, repository / "snapshots" / commit)
    config = build_config(student_dir, Path("owner/teacher"), tmp_path, teacher_top_k=8)
    for commit in commits:
        (repository / "refs" / "main").write_text(commit)
        assert identify_store(config, VocabularyMap(range(512)), ROWS).inputs["teacher"]["commit"] == commit
