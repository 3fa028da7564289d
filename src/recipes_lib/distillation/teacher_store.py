"""Teacher: loading, forward passes, and its stored top-k probabilities."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from recipes_lib.config.schema import RecipeConfig, TokensConfig
from recipes_lib.data.packed.collators import find_targets
from recipes_lib.data.sources.local_files import compute_digest
from recipes_lib.data.store import (
    PreparedSet,
    compute_key,
    explain_disk_errors,
    find_root,
    find_set,
    make_set,
)
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.files import fsync
from recipes_lib.losses.distillation import TopLogps, compute_top_logps
from recipes_lib.models.attention.kernels import AttentionChoice, choose_attention, prove_isolation
from recipes_lib.models.heads.loss_head import verify_loss_head
from recipes_lib.models.loading import choose_teacher, find_commit, load_causal_lm, load_model_config, load_tokenizer
from recipes_lib.models.parallel.zero3 import zero3_init_disabled
from recipes_lib.models.vocabulary import VocabularyMap, adopt_vocabulary, map_vocabulary
from recipes_lib.training.evaluation.held_out import Rows
from recipes_lib.training.trainers.trained_model import TEACHER, freeze

FORMAT: Final = 1
SHARD_TOKENS: Final = 2**18
"""Tokens of the rows of a shard; what is lost when writing is interrupted."""
COUNTS_FILE: Final = "num_targets.npy"
TEACHER_FIELD: Final = "teacher"
"""Column of a row that holds the records of its targets."""
_HIGH_BITS: Final = ((16, 0), (18, 2), (20, 4), (24, 8))
"""Bits of the largest id, and those of them that go beside the lower sixteen."""

Records = npt.NDArray[np.void]
ComputeTop = Callable[[Sequence[Any]], tuple[TopLogps, npt.NDArray[np.int64]]]
"""Rows to what the teacher says of their targets, in their order, and the targets."""


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """Binary layout of the record of a target.

    Attributes:
        k: Tokens in it.
        num_tokens: Tokens in the vocabulary.
    """

    k: int
    num_tokens: int

    @property
    def num_high_bits(self) -> int:
        """Bits of an id above the lower sixteen."""
        return next(high for bits, high in _HIGH_BITS if self.num_tokens <= 2**bits)

    @property
    def dtype(self) -> np.dtype[np.void]:
        """Ids in 16 and 2, 4 or 8 bits; log-probabilities in half precision; the tail's in single precision."""
        high = [("high", "u1", (-(-self.k * self.num_high_bits // 8),))] if self.num_high_bits else []
        tops = [("low", "<u2", (self.k,)), *high, ("logps", "<f2", (self.k,))]
        return np.dtype([*tops, ("log_tail", "<f4"), ("target_logp", "<f2"), ("target", "<u2")])

    def encode(self, top: TopLogps, targets: npt.NDArray[np.integer]) -> Records:
        """Return the records of ``N`` targets; each has the lower bits of its target, for verification."""
        ids = top.ids.cpu().numpy()
        records = np.zeros(len(ids), self.dtype)
        records["target"] = targets & 0xFFFF
        records["low"] = ids & 0xFFFF
        if bits := self.num_high_bits:
            each = 8 // bits
            # (N, bytes, ids a byte): the bits of each id are shifted to their place, and a byte is their union.
            high = np.zeros((len(ids), records["high"].shape[1] * each), np.uint8)
            high[:, : self.k] = ids >> 16
            shifts = np.arange(each, dtype=np.uint8) * bits
            records["high"] = np.bitwise_or.reduce(high.reshape(len(ids), -1, each) << shifts, axis=2)
        records["logps"] = top.logps.float().cpu().numpy()
        records["log_tail"] = top.log_tails.float().cpu().numpy()
        records["target_logp"] = top.target_logps.float().cpu().numpy()
        return records

    def decode(self, records: Records) -> TopLogps:
        """Return the arguments of ``encode``, rounded."""
        ids = records["low"].astype(np.int64)
        if bits := self.num_high_bits:
            shifts = np.arange(8 // bits, dtype=np.uint8) * bits
            high = (records["high"][:, :, None] >> shifts) & (2**bits - 1)
            ids |= high.reshape(len(records), -1)[:, : self.k].astype(np.int64) << 16
        logps, log_tails, target_logps = (
            torch.from_numpy(records[name].astype(np.float32)) for name in ("logps", "log_tail", "target_logp")
        )
        return TopLogps(torch.from_numpy(ids), logps, log_tails, target_logps, self.num_tokens)


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Identity of the store that a run needs.

    Attributes:
        root: Folder of prepared sets.
        key: Hash of ``inputs``.
        inputs: What decides the numbers: the teacher, its vocabulary, the rows, ``k`` and the temperature.
        format: Of its records.
        rows_per_shard: Rows of the prepared set whose targets are in one file.
    """

    root: Path
    key: str
    inputs: Mapping[str, Any]
    format: RecordFormat
    rows_per_shard: int


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """Rows with the records of their targets.

    Attributes:
        rows: The prepared ones.
        shards: Records, memory-mapped.
        starts: Where in its shard the first target of each row is.
        counts: Targets of each row.
        rows_per_shard: As in ``StoreIdentity``.
    """

    rows: Rows
    shards: Sequence[Records]
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    rows_per_shard: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        records = self.shards[index // self.rows_per_shard]
        start = self.starts[index]
        return {**self.rows[index], TEACHER_FIELD: records[start : start + self.counts[index]]}


@dataclass(frozen=True, slots=True)
class TeacherCollator:
    """Collator that adds the teacher's top-k log-probabilities to a batch.

    Attributes:
        collate: Rows to the batch without it.
        format: Of the records.
    """

    collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
    format: RecordFormat

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Build the batch; ``teacher`` has the fields of a ``TopLogps`` of its targets, row by row.

        Raises:
            DataError: A record is of another target than the one at its place.
        """
        batch = self.collate(rows)
        if TEACHER_FIELD in rows[0]:
            records = np.concatenate([row[TEACHER_FIELD] for row in rows])
            targets = read_targets(batch["labels"])
            if len(records) != len(targets) or (records["target"] != targets & 0xFFFF).any():
                found = "what is stored of the teacher is of other places than the targets of these rows"
                raise DataError(Problem("teacher_top_k", found, "write it again with `recipes distill-store`"))
            batch[TEACHER_FIELD] = self.format.decode(records)._asdict()
        return batch


def read_targets(labels: torch.Tensor) -> npt.NDArray[np.int64]:
    """Return the targets of a batch, row by row, ``int64 (N,)``."""
    shifted: npt.NDArray[np.int64] = labels[:, 1:].cpu().numpy()
    return shifted[shifted >= 0]


def identify_store(config: RecipeConfig, vocabulary: VocabularyMap, rows: Mapping[str, Any]) -> StoreIdentity:
    """Return the identity of the store of a run, without loading the teacher.

    Args:
        config: The run.
        vocabulary: From ``map_teacher_vocabulary``.
        rows: Manifest of the prepared set: its key is that of tokenizer, template and data.

    Raises:
        ConfigError: The teacher cannot be found.
    """
    distillation = config.distillation
    assert distillation.teacher_top_k is not None
    num_tokens = len(vocabulary.teacher_ids)
    k = min(distillation.teacher_top_k, num_tokens)
    inputs = {
        "format": FORMAT,
        "teacher": identify_teacher(config),
        "dtype": distillation.teacher_dtype,
        "vocabulary": hashlib.sha256(np.asarray(vocabulary.teacher_ids, np.int64).tobytes()).hexdigest(),
        "rows": rows["key"],
        "k": k,
        "temperature": distillation.distillation_temperature,
    }
    rows_per_shard = max(1, SHARD_TOKENS // int(rows["max_length"]))
    return StoreIdentity(find_root(config), compute_key(inputs), inputs, RecordFormat(k, num_tokens), rows_per_shard)


def identify_teacher(config: RecipeConfig) -> dict[str, str]:
    """Return the identity of the teacher's weights: the Hub commit, or a hash of the folder.

    Raises:
        ConfigError: Neither is known.
    """
    chosen = choose_teacher(config)
    folder = Path(str(chosen.model_name_or_path))
    if folder.is_dir():
        files = sorted(path for path in (*folder.glob("*.safetensors"), folder / "config.json") if path.is_file())
        return {path.name: compute_digest(path).hex() for path in files}
    load_model_config(chosen)  # From here on the cache knows the commit.
    commit = find_commit(str(chosen.model_name_or_path), chosen.model_revision)
    if commit is None:
        where = config.provenance.get(TEACHER, TEACHER)
        found = f"no commit is known of {chosen.model_name_or_path}, which the cache key needs"
        raise ConfigError(Problem(where, found, "write `teacher_model_revision:` as a commit of 40 hex digits"))
    return {"name": str(chosen.model_name_or_path), "commit": commit}


def write_store(
    identity: StoreIdentity, rows: Rows, compute: ComputeTop, *, batch_size: int, tell: Callable[[int], None]
) -> PreparedSet:
    """Find the store, or compute it for every row; an interrupted run resumes after the last complete shard.

    Args:
        identity: From ``identify_store``.
        rows: The prepared rows.
        compute: Asks the teacher about some of them.
        batch_size: Rows at a time.
        tell: Told how many rows are done.

    Raises:
        DataError: The disk is full.
    """

    def build(staging: Path) -> dict[str, Any]:
        with explain_disk_errors(identity.root):
            staging.mkdir(exist_ok=True)
            for start in range(0, len(rows), identity.rows_per_shard):
                numbers = range(start, min(start + identity.rows_per_shard, len(rows)))
                path = staging / _name_shard(start // identity.rows_per_shard)
                if not path.exists():
                    asked = [numbers[first : first + batch_size] for first in range(0, len(numbers), batch_size)]
                    parts = [identity.format.encode(*compute([rows[number] for number in some])) for some in asked]
                    partial = path.with_name(".partial.npy")
                    np.save(partial, np.concatenate(parts))
                    # A shard that is there counts as whole when writing resumes: its data must reach the disk first.
                    fsync(partial)
                    partial.replace(path)
                tell(numbers.stop)
            counts = [int(find_targets(rows[number]).sum()) for number in range(len(rows))]
            np.save(staging / COUNTS_FILE, np.array(counts, np.int64))
        return {"bytes_per_target": identity.format.dtype.itemsize}

    return make_set(identity.root, identity.key, identity.inputs, build, resumes=True, check_bytes=True)


def read_store(identity: StoreIdentity, rows: Rows) -> TeacherRows:
    """Return the rows with their stored log-probabilities.

    Raises:
        ConfigError: There is no such store, or it is damaged.
    """
    found = find_set(identity.root, identity.key)
    if found is None:
        told = f"nothing is stored for this teacher, vocabulary, data, k and temperature ({identity.key[:16]})"
        raise ConfigError(Problem("teacher_top_k", told, "run `recipes distill-store` with this configuration first"))
    counts: npt.NDArray[np.int64] = np.load(found.path / COUNTS_FILE)
    size = identity.rows_per_shard
    shards = [np.load(found.path / _name_shard(number), mmap_mode="r") for number in range(-(-len(counts) // size))]
    starts = np.cumsum(counts) - counts
    # From places in all records to places in the shard: less where its first row starts.
    starts -= np.repeat(starts[::size], size)[: len(starts)]
    if len(counts) != len(rows) or sum(map(len, shards)) != counts.sum():
        raise ConfigError(Problem(str(found.path), "holds other rows than it was made of", "delete the folder"))
    return TeacherRows(rows, shards, starts, counts, size)


def compare_with_teacher(
    identity: StoreIdentity, taught: TeacherRows, compute: ComputeTop, *, num_rows: int, allowed: float
) -> float:
    """Recompute some rows with the teacher; return the mean error of the store in nats.

    Args:
        identity: From ``identify_store``; its key draws the rows.
        taught: From ``read_store``.
        compute: As for ``write_store``.
        num_rows: How many.
        allowed: What rounding explains.

    Raises:
        DataError: The store is off by more: it is not of this teacher, or not of these places.
    """
    # By the key, so that every process, and every run with this store, looks at the same rows.
    draw = np.random.default_rng(int(identity.key[:8], 16))
    numbers = np.sort(draw.permutation(len(taught))[:num_rows])
    sums, num_targets = 0.0, 0
    for number in map(int, numbers):
        row = taught[number]
        stored, (fresh, _) = identity.format.decode(row[TEACHER_FIELD]), compute([taught.rows[number]])
        apart = (stored.logps - fresh.logps.float().cpu()).abs().mean(dim=-1)
        sums += float((apart + (stored.target_logps - fresh.target_logps.float().cpu()).abs()).sum())
        num_targets += len(apart)
    difference = sums / max(1, num_targets)
    if not difference <= allowed:
        found = f"what is stored differs from what the teacher says by {difference:.3g} nats a target"
        remedy = f"rounding explains {allowed:g}; delete {identity.root / identity.key[:16]} and write it again"
        raise DataError(Problem("teacher_top_k", found, remedy))
    return difference


def _name_shard(number: int) -> str:
    return f"shard-{number:05}.npy"


def map_teacher_vocabulary(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase) -> VocabularyMap:
    """Compare the tokenizers of teacher and student, before any weight is loaded.

    Raises:
        ConfigError: As ``map_vocabulary``; or the teacher's tokenizer cannot be loaded.
    """
    where = config.provenance.get(TEACHER, TEACHER)
    try:
        other = load_tokenizer(choose_teacher(config), TokensConfig(eos_token=tokenizer.eos_token))
    except ConfigError as error:
        raise ConfigError(*(replace(problem, where=where) for problem in error.problems)) from error
    return map_vocabulary(tokenizer, other, where)


def load_teacher(
    config: RecipeConfig, attention: AttentionChoice, args: TrainingArguments, vocabulary: VocabularyMap
) -> PreTrainedModel:
    """Load the teacher: frozen, in evaluation mode, with the student's vocabulary.

    Args:
        config: The run.
        attention: Of the student, whose batches the teacher reads.
        args: Precision of the products.
        vocabulary: From ``map_teacher_vocabulary``.

    Raises:
        ConfigError: It cannot be loaded, cannot read batches so laid out, has another vocabulary than its tokenizer, or
            an output projection that is unknown here.
    """
    chosen, where = choose_teacher(config), config.provenance.get(TEACHER, TEACHER)
    try:
        model_config, _ = load_model_config(chosen)
        requested = replace(chosen, attn_implementation=attention.implementation)
        choose_attention(requested, model_config, args, packing=config.tokens.packing, flattens=True)
        # Rows are permuted to the student's order, which is impossible on a sharded weight.
        with zero3_init_disabled():
            teacher = load_causal_lm(chosen, attention.implementation)
        adopt_vocabulary(teacher, vocabulary, where)
        freeze(teacher)
        verify_loss_head(teacher)
        if config.tokens.packing or attention.layout == "flat":
            prove_isolation(teacher, attention.layout)
    except ConfigError as error:
        raise ConfigError(*(replace(problem, where=where) for problem in error.problems)) from error
    return teacher


def is_own_teacher(config: RecipeConfig) -> bool:
    """Return whether the student starts as a copy of its teacher."""
    teacher, student = choose_teacher(config), config.model
    return (teacher.model_name_or_path, teacher.model_revision) == (student.model_name_or_path, student.model_revision)


@torch.no_grad()
def ask_teacher(teacher: Any, inputs: Mapping[str, Any], labels: Tensor, *, k: int, temperature: float) -> TopLogps:
    """Return the teacher's log-probabilities at the targets of a batch, row by row: its ``k`` most likely tokens.

    Args:
        teacher: As for ``models.heads.loss_head.score_beside_teacher``.
        inputs: As for ``score_beside_teacher``.
        labels: As for ``score_beside_teacher``.
        k: At most the teacher's vocabulary.
        temperature: Divides the logits.
    """
    is_target = labels[:, 1:] >= 0

    def read(hidden: Tensor, weight: Tensor, **options: Any) -> TopLogps:
        targets = labels[:, 1:][is_target]
        return compute_top_logps(hidden[:, :-1][is_target], weight, targets, k=k, temperature=temperature, **options)

    top: TopLogps = teacher(**inputs, head=read).result
    return top
