"""Teacher model: loading, forward passes, and the store of its top-k log-probabilities."""

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
from recipes_lib.data.store import PreparedSet, Rows, compute_key, explain_disk_errors, find_root, find_set, make_set
from recipes_lib.errors import ConfigError, DataError, Problem, reported_at
from recipes_lib.files import fsync
from recipes_lib.losses.distillation import TopLogps, compute_top_logps
from recipes_lib.models.attention.kernels import AttentionChoice, choose_attention, verify_isolation
from recipes_lib.models.heads.loss_head import verify_loss_head
from recipes_lib.models.loading import choose_teacher, find_commit, load_causal_lm, load_model_config, load_tokenizer
from recipes_lib.models.parallel.zero3 import zero3_init_disabled
from recipes_lib.models.vocabulary import VocabularyMap, adopt_vocabulary, map_vocabulary
from recipes_lib.training.trainers.trained_model import TEACHER, freeze

FORMAT: Final = 1
SHARD_TOKENS: Final = 2**18
"""Tokens of the rows in a shard file; an interruption loses at most one shard."""
COUNTS_FILE: Final = "num_targets.npy"
TEACHER_FIELD: Final = "teacher"
"""Column of a row with the records of its targets, and key of a batch with the decoded log-probabilities."""
_HIGH_BITS: Final = ((16, 0), (18, 2), (20, 4), (24, 8))
"""Bits of the largest token id, and how many of its bits are stored separately from the lower 16."""

Records = npt.NDArray[np.void]
ComputeTop = Callable[[Sequence[Any]], tuple[TopLogps, npt.NDArray[np.int64]]]
"""Function from rows to the teacher's top-k log-probabilities at their targets, row by row, and the targets."""


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """Binary layout of the record of a target: the teacher's top k tokens and the tail.

    Attributes:
        k: Stored tokens per target.
        num_tokens: Vocabulary size of the teacher.
    """

    k: int
    num_tokens: int

    @property
    def num_high_bits(self) -> int:
        """Bits of an id above the lower sixteen."""
        return next(high for bits, high in _HIGH_BITS if self.num_tokens <= 2**bits)

    @property
    def dtype(self) -> np.dtype[np.void]:
        """Structured dtype: ids as 16 plus 0, 2, 4 or 8 bits, log-probabilities float16, that of the tail float32."""
        high = [("high", "u1", (-(-self.k * self.num_high_bits // 8),))] if self.num_high_bits else []
        tops = [("low", "<u2", (self.k,)), *high, ("logps", "<f2", (self.k,))]
        return np.dtype([*tops, ("log_tail", "<f4"), ("target_logp", "<f2"), ("target", "<u2")])

    def encode(self, top: TopLogps, targets: npt.NDArray[np.integer]) -> Records:
        """Return the records of ``N`` targets.

        Args:
            top: Top-k log-probabilities of the teacher.
            targets: Token ids of the targets, ``(N,)``; their lower 16 bits are stored for verification on reading.
        """
        ids = top.ids.cpu().numpy()
        records = np.zeros(len(ids), self.dtype)
        records["target"] = targets & 0xFFFF
        records["low"] = ids & 0xFFFF
        if bits := self.num_high_bits:
            per_byte = 8 // bits
            # (N, bytes, ids per byte): the high bits of several ids are shifted and combined into one byte.
            high = np.zeros((len(ids), records["high"].shape[1] * per_byte), np.uint8)
            high[:, : self.k] = ids >> 16
            shifts = np.arange(per_byte, dtype=np.uint8) * bits
            records["high"] = np.bitwise_or.reduce(high.reshape(len(ids), -1, per_byte) << shifts, axis=2)
        records["logps"] = top.logps.float().cpu().numpy()
        records["log_tail"] = top.log_tails.float().cpu().numpy()
        records["target_logp"] = top.target_logps.float().cpu().numpy()
        return records

    def decode(self, records: Records) -> TopLogps:
        """Return the log-probabilities of ``encode``, rounded."""
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
    """Location and format of the store that a run needs.

    Attributes:
        root: Folder of prepared sets.
        key: Hash of ``inputs``; names the folder of the store.
        inputs: Everything that determines the numbers: teacher, vocabulary, rows, ``k`` and temperature.
        format: Layout of the records.
        rows_per_shard: Rows of the prepared set whose targets are in one shard file.
    """

    root: Path
    key: str
    inputs: Mapping[str, Any]
    format: RecordFormat
    rows_per_shard: int


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """Prepared rows with the records of their targets.

    Attributes:
        rows: Prepared rows.
        folder: Folder of the shard files.
        counts: Number of targets of each row, ``int64 (R,)``.
        rows_per_shard: Rows per shard file.
    """

    rows: Rows
    folder: Path
    counts: npt.NDArray[np.int64]
    rows_per_shard: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard, place = divmod(index, self.rows_per_shard)
        # Opened for each row: a mapping keeps its file open, and a store can have more files than a process may open.
        records = np.load(self.folder / _name_shard(shard), mmap_mode="r")
        start = self.counts[index - place : index].sum()
        return {**self.rows[index], TEACHER_FIELD: records[start : start + self.counts[index]]}


@dataclass(frozen=True, slots=True)
class TeacherCollator:
    """Collator that adds the teacher's stored top-k log-probabilities to a batch.

    Attributes:
        collate: Collator from rows to the batch without them.
        format: Layout of the records.
    """

    collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
    format: RecordFormat

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Build the batch; ``teacher`` has the fields of the ``TopLogps`` of its targets, row by row.

        Raises:
            DataError: A record belongs to another target than the one at its position.
        """
        batch = self.collate(rows)
        if TEACHER_FIELD in rows[0]:
            records = np.concatenate([row[TEACHER_FIELD] for row in rows])
            targets = read_targets(batch["labels"])
            if len(records) != len(targets) or (records["target"] != targets & 0xFFFF).any():
                found = "the stored log-probabilities of the teacher belong to other targets than those of these rows"
                raise DataError(Problem("teacher_top_k", found, "write them again with `recipes distill-store`"))
            batch[TEACHER_FIELD] = self.format.decode(records)._asdict()
        return batch


def read_targets(labels: torch.Tensor) -> npt.NDArray[np.int64]:
    """Return the targets of a batch, row by row, ``int64 (N,)``."""
    shifted: npt.NDArray[np.int64] = labels[:, 1:].cpu().numpy()
    return shifted[shifted >= 0]


def identify_store(config: RecipeConfig, vocabulary: VocabularyMap, rows: Mapping[str, Any]) -> StoreIdentity:
    """Return the identity of the store of a run, without loading the teacher.

    Args:
        config: Configuration of the run.
        vocabulary: Result of ``map_teacher_vocabulary``.
        rows: Manifest of the prepared set, whose key covers tokenizer, template and data.

    Raises:
        ConfigError: As ``identify_teacher``.
    """
    distillation = config.distillation
    assert distillation.teacher_top_k is not None
    num_tokens = len(vocabulary)
    k = min(distillation.teacher_top_k, num_tokens)
    inputs = {
        "format": FORMAT,
        "teacher": identify_teacher(config),
        "dtype": distillation.teacher_dtype,
        "vocabulary": hashlib.sha256(np.asarray(vocabulary, np.int64).tobytes()).hexdigest(),
        "rows": rows["key"],
        "k": k,
        "temperature": distillation.distillation_temperature,
    }
    # Fixed by the identity, so that a resumed run finds the same shards.
    rows_per_shard = max(1, SHARD_TOKENS // int(rows["max_length"]))
    return StoreIdentity(find_root(config), compute_key(inputs), inputs, RecordFormat(k, num_tokens), rows_per_shard)


def identify_teacher(config: RecipeConfig) -> dict[str, str]:
    """Return the identity of the teacher's weights: hashes of the files of a folder, or name and commit on the Hub.

    Raises:
        ConfigError: The teacher cannot be found.
    """
    chosen = choose_teacher(config)
    folder = Path(str(chosen.model_name_or_path))
    if folder.is_dir():
        # Content rather than path: a retrained teacher in the same folder is another teacher.
        files = sorted(path for path in (*folder.glob("*.safetensors"), folder / "config.json") if path.is_file())
        return {path.name: compute_digest(path).hex() for path in files}
    load_model_config(chosen)  # Downloads config.json, so that the cache knows the commit of the revision.
    commit = find_commit(str(chosen.model_name_or_path), chosen.model_revision)
    assert commit is not None, "its config.json is in the cache"
    return {"name": str(chosen.model_name_or_path), "commit": commit}


def write_store(
    identity: StoreIdentity, rows: Rows, compute: ComputeTop, *, batch_size: int, tell: Callable[[int], None]
) -> PreparedSet:
    """Return the existing store, or write it; an interrupted run resumes after the last complete shard.

    Args:
        identity: Result of ``identify_store``.
        rows: Prepared rows.
        compute: Function that runs the teacher on a batch of rows.
        batch_size: Rows per batch.
        tell: Progress callback with the number of finished rows.

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
                    # .npy at the end, since np.save appends it otherwise.
                    partial = path.with_name(".partial.npy")
                    np.save(partial, np.concatenate(parts))
                    # A resumed run takes an existing shard as complete, so its data must be on disk before the rename.
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
        ConfigError: The store does not exist or is damaged; the collator finds records of other targets.
    """
    found = find_set(identity.root, identity.key)
    if found is None:
        absent = f"nothing is stored for this teacher, vocabulary, data, k and temperature ({identity.key[:16]})"
        raise ConfigError(Problem("teacher_top_k", absent, "run `recipes distill-store` with this configuration first"))
    counts: npt.NDArray[np.int64] = np.load(found.path / COUNTS_FILE)
    return TeacherRows(rows, found.path, counts, identity.rows_per_shard)


def compare_with_teacher(
    identity: StoreIdentity, taught: TeacherRows, compute: ComputeTop, *, num_rows: int, allowed: float
) -> float:
    """Recompute some rows with the teacher; return the mean absolute error of the store in nats per target.

    Args:
        identity: Result of ``identify_store``; its key seeds the choice of rows.
        taught: Result of ``read_store``.
        compute: Function that runs the teacher on a batch of rows.
        num_rows: Number of rows to recompute.
        allowed: Error explained by rounding, in nats per target.

    Raises:
        DataError: The error is larger: the store belongs to another teacher or to other rows.
    """
    # Seeded by the key, so that every process, and every run with this store, compares the same rows.
    generator = np.random.default_rng(int(identity.key[:8], 16))
    numbers = np.sort(generator.permutation(len(taught))[:num_rows])
    sums, num_targets = 0.0, 0
    for number in map(int, numbers):
        row = taught[number]
        stored, (fresh, _) = identity.format.decode(row[TEACHER_FIELD]), compute([taught.rows[number]])
        errors = (stored.logps - fresh.logps.float().cpu()).abs().mean(dim=-1)
        sums += float((errors + (stored.target_logps - fresh.target_logps.float().cpu()).abs()).sum())
        num_targets += len(errors)
    difference = sums / max(1, num_targets)
    if not difference <= allowed:
        found = f"the stored log-probabilities differ from the teacher's by {difference:.3g} nats per target"
        remedy = f"rounding explains {allowed:g}; delete {identity.root / identity.key[:16]} and write them again"
        raise DataError(Problem("teacher_top_k", found, remedy))
    return difference


def _name_shard(number: int) -> str:
    return f"shard-{number:05}.npy"


def map_teacher_vocabulary(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase) -> VocabularyMap:
    """Compare the tokenizers of teacher and student, before any weight is loaded.

    Raises:
        ConfigError: As ``map_vocabulary`` and ``load_tokenizer``, with the key that names the teacher; or as
            ``load_model_config`` for the student.
    """
    where = config.locate(TEACHER)
    with reported_at(where):
        other = load_tokenizer(choose_teacher(config), TokensConfig(eos_token=tokenizer.eos_token))
    student, _ = load_model_config(config.model)
    return map_vocabulary(tokenizer, other, where, student.get_text_config().vocab_size)


def load_teacher(
    config: RecipeConfig, attention: AttentionChoice, args: TrainingArguments, vocabulary: VocabularyMap
) -> PreTrainedModel:
    """Load the teacher: frozen, in evaluation mode, with the student's vocabulary.

    Args:
        config: Configuration of the run.
        attention: Attention kernel of the student, whose batch layout the teacher must support.
        args: Training arguments, for the precision of matrix products.
        vocabulary: Result of ``map_teacher_vocabulary``.

    Raises:
        ConfigError: The teacher cannot be loaded, does not support the batch layout, has a vocabulary other than its
            tokenizer's, or an unsupported output projection.
    """
    chosen, where = choose_teacher(config), config.locate(TEACHER)
    with reported_at(where):
        model_config, _ = load_model_config(chosen)
        # The student's kernel, because both models read the same batches.
        requested = replace(chosen, attn_implementation=attention.implementation)
        choose_attention(requested, model_config, args, packing=config.tokens.packing, flattens=True)
        # adopt_vocabulary permutes the rows of the embeddings, which needs unsharded weights.
        with zero3_init_disabled():
            teacher = load_causal_lm(chosen, attention.implementation)
        adopt_vocabulary(teacher, vocabulary, where)
        freeze(teacher)
        verify_loss_head(teacher)
        if config.tokens.packing or attention.layout == "flat":
            verify_isolation(teacher, attention.layout)
    return teacher


def is_own_teacher(config: RecipeConfig) -> bool:
    """Return whether the student starts as a copy of its teacher: not with an adapter, whose base may be quantised."""
    teacher, student = choose_teacher(config), config.model
    names = [(model.model_name_or_path, model.model_revision) for model in (teacher, student)]
    return names[0] == names[1] and not config.adapter.use_peft


@torch.no_grad()
def ask_teacher(teacher: Any, inputs: Mapping[str, Any], labels: Tensor, *, k: int, temperature: float) -> TopLogps:
    """Return the teacher's top-k log-probabilities at the targets of a batch, row by row.

    Args:
        teacher: Frozen model with a loss head (``add_loss_head``).
        inputs: ``input_ids`` and other arguments of the model.
        labels: Unshifted labels, ``int64 (B, L)``; negative where there is no target.
        k: Number of tokens per target, at most the vocabulary size of the teacher.
        temperature: Divisor of the logits.
    """
    is_target = labels[:, 1:] >= 0

    # Called inside the output projection, where FSDP2 and ZeRO-3 have gathered its weight.
    def read(hidden: Tensor, weight: Tensor, **options: Any) -> TopLogps:
        targets = labels[:, 1:][is_target]
        return compute_top_logps(hidden[:, :-1][is_target], weight, targets, k=k, temperature=temperature, **options)

    top: TopLogps = teacher(**inputs, head=read).result
    return top
