"""Log-probabilities of the reference model: computed once, stored, found again by a hash of what determines them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import recipes_lib.losses
import recipes_lib.models
from recipes_lib.data.pairs.preference_sets import PairData, PairRows
from recipes_lib.data.store import (
    choose_staging,
    compute_key,
    explain_disk_errors,
    find_set,
    hold_lock,
    publish_set,
)
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.inference import find_device, preserve_training_state
from recipes_lib.training.collectives import broadcast_object, get_rank, sum_tensor
from recipes_lib.training.evaluation.held_out import count_rounds, share_rows
from recipes_lib.training.monitoring.progress import TrainingProgress
from recipes_lib.training.trainers.pair_batches import compute_rounding

REFERENCE_FOLDER: Final = "reference"
"""Copy under ``output_dir``, from which the run resumes without the cache."""

NUM_CHECKED: Final = 64
"""Pairs that are recomputed to verify stored log-probabilities."""

_Figures = npt.NDArray[np.float32]
Score = Callable[[Sequence[Any]], Tensor]
"""Rows to the log-probabilities of their answers, ``float32 (2, P)``."""


@dataclass(frozen=True, slots=True)
class RowsWithReference:
    """Pairs, each with ``ref_chosen_logp`` and ``ref_rejected_logp``.

    Attributes:
        rows: The pairs.
        logps: Log-probabilities of both answers under the reference, ``float32 (P, 2)``, in nats; filled later.
    """

    rows: PairRows
    logps: _Figures

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        chosen, rejected = self.logps[index]
        return {**self.rows[index], "ref_chosen_logp": chosen, "ref_rejected_logp": rejected}


class ReferenceLogps:
    """Log-probabilities of the answers of all pairs of a run under its reference.

    Source: ``tests/training/trainers/test_reference.py``, ``tests/distributed/test_reference.py``.
    """

    def __init__(self, key: str, rows: Mapping[str, PairRows], *, root: Path, output_dir: Path) -> None:
        """Create without reading or computing.

        Args:
            key: From ``compute_reference_key``.
            rows: The pairs by the name of their set.
            root: Cache that runs share.
            output_dir: Of this run.
        """
        self.rows = {
            name: RowsWithReference(some, np.full((len(some), 2), np.nan, np.float32)) for name, some in rows.items()
        }
        self._key = key
        self._root = root
        self._own = output_dir / REFERENCE_FOLDER

    def attach(self, data: PairData) -> PairData:
        """Return the data whose pairs will have the log-probabilities."""
        sets = {name: self.rows[f"eval-{name}"] for name in data.eval_sets}
        return replace(data, train=self.rows["train"], eval=self.rows.get("eval"), eval_sets=sets)

    def settle(
        self, model: nn.Module, score: Score, *, batch_size: int, dtype: torch.dtype, progress: TrainingProgress
    ) -> None:
        """Load the log-probabilities and verify a sample with ``model``, or compute and store them.

        Every process must call.

        Args:
            model: The reference, before any step; left as it was.
            score: Scores some rows with it.
            batch_size: Rows at a time on each process.
            dtype: Precision of the products, which decides by how much a number may be off.
            progress: Told what was done.

        Raises:
            DataError: They cannot be stored.
        """
        is_found = self.find()
        if is_found:
            difference, is_found = self.compare(model, score, batch_size=batch_size, dtype=dtype)
            verdict = "are used" if is_found else "are computed again"
            progress.say(f"reference: stored numbers are off by {difference:.1e} nats at most; they {verdict}")
        if not is_found:
            self.compute(model, score, batch_size=batch_size, progress=progress)
        if get_rank() == 0:
            self.store(replaces=not is_found)

    def find(self) -> bool:
        """Read the numbers from the run's own copy or from the cache; return whether they were there.

        The main process reads, so that all have the same, on whichever node; every process must call.
        """
        found = broadcast_object(self._read() if get_rank() == 0 else None)
        for name, logps in (found or {}).items():
            self.rows[name].logps[:] = logps
        return found is not None

    def compute(self, model: nn.Module, score: Score, *, batch_size: int, progress: TrainingProgress) -> None:
        """Score every pair, on all processes together; every process must call.

        Args:
            model: The reference; left as it was.
            score: Scores some rows with it.
            batch_size: Rows at a time on each process.
            progress: Shows how far it is.
        """
        with preserve_training_state(model):
            for name, rows in self.rows.items():
                num_rounds = count_rounds(len(rows), batch_size)
                # Zero where another process scores, so that the sum over processes is the whole, to the bit.
                logps = np.zeros((len(rows), 2), np.float32)
                shares = share_rows(len(rows), batch_size)
                for numbers, is_counted in progress.track(shares, f"reference, {name}", num_rounds):
                    scores = score([rows.rows[number] for number in numbers])
                    if is_counted:
                        logps[list(numbers)] = scores.T.float().cpu().numpy()
                rows.logps[:] = sum_tensor(torch.from_numpy(logps).to(find_device(model))).cpu().numpy()

    def store(self, *, replaces: bool) -> None:
        """Write the numbers to the cache and to the run's own folder, where there are none; for the main process.

        Args:
            replaces: Whether others make room.

        Raises:
            DataError: The disk is full.
        """
        for root in (self._root, self._own):
            with hold_lock(root, self._key), explain_disk_errors(root):
                held = self._read_from(root)
                if held is None or (replaces and not self._equals(held)):
                    self._write_to(root)

    def compare(self, model: nn.Module, score: Score, *, batch_size: int, dtype: torch.dtype) -> tuple[float, bool]:
        """Return by how much the numbers differ from new ones, in nats, and whether rounding explains all of that.

        A sample of the training pairs is looked at, drawn by the key, so that all processes take the same; every
        process must call. Arguments are as for ``settle``.
        """
        rows = next(iter(self.rows.values()))
        draw = np.random.default_rng(int(self._key[:8], 16))
        numbers = np.sort(draw.permutation(len(rows))[:NUM_CHECKED])
        differences, allowed = [], []
        with preserve_training_state(model):
            for start in range(0, len(numbers), batch_size):
                some = [int(number) for number in numbers[start : start + batch_size]]
                pairs = [rows.rows[number] for number in some]
                lengths = torch.tensor([[len(pair["chosen_ids"]), len(pair["rejected_ids"])] for pair in pairs])
                differences.append((score(pairs).T.float().cpu() - torch.from_numpy(rows.logps[some])).abs())
                allowed.append(compute_rounding(lengths, dtype))
        off, limit = torch.cat(differences), torch.cat(allowed)
        return broadcast_object((float(off.max()), bool((off <= limit).all())))

    def _read(self) -> dict[str, _Figures] | None:
        # The run's own first: the cache may have been made again since, on another device.
        return next((logps for root in (self._own, self._root) if (logps := self._read_from(root))), None)

    def _read_from(self, root: Path) -> dict[str, _Figures] | None:
        """The numbers of each set; ``None`` where they are not there, not whole, or not of these pairs."""
        found = find_set(root, self._key, check_bytes=True)
        if found is None:
            return None
        try:
            logps = {name: np.load(found.path / f"{name}.npy") for name in self.rows}
        except (OSError, ValueError):
            return None
        is_whole = all(logps[name].shape == rows.logps.shape for name, rows in self.rows.items())
        return logps if is_whole else None

    def _equals(self, logps: dict[str, _Figures]) -> bool:
        return all(np.array_equal(logps[name], rows.logps) for name, rows in self.rows.items())

    def _write_to(self, root: Path) -> None:
        """Write the numbers under ``root``; others of the same key make room."""
        staging = choose_staging(root, self._key, is_kept=False)
        try:
            staging.mkdir()
            for name, rows in self.rows.items():
                np.save(staging / f"{name}.npy", rows.logps)
            if (previous := find_set(root, self._key)) is not None:
                shutil.rmtree(previous.path)
            publish_set(staging, root, self._key, {"key": self._key})
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def compute_reference_key(model: nn.Module, *, pairs: str, is_without_adapter: bool = False, **facts: Any) -> str:
    """Return the key of the reference's numbers: a hash of exactly what determines them.

    Args:
        model: The reference; the weights and the architecture of the main process count.
        pairs: Key of the prepared pairs, which holds their tokens.
        is_without_adapter: Whether the model without its adapter is the reference: a fresh adapter changes nothing yet,
            so that the seed it was drawn by is none of the facts.
        **facts: Precision, kernel, layout, ``ld_alpha``; JSON values. The learning rate is none of them.
    """
    digest = hashlib.sha256()
    # The code is among what determines the numbers: another version of it stores its own.
    for package in (recipes_lib.losses, recipes_lib.models):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(path.read_bytes())
    inputs = {
        "weights": hash_weights(model, is_without_adapter=is_without_adapter),
        "architecture": _read_architecture(model),
        "pairs": pairs,
        "code": digest.hexdigest(),
        **facts,
    }
    # Where loading is sparing with memory, the others have no weights yet.
    return broadcast_object(compute_key(inputs))


def refuse_missing(step: int) -> None:
    """Refuse to resume after ``step`` steps without the reference's log-probabilities of the start.

    Raises:
        ConfigError: Always.
    """
    found = f"the run stands at step {step} and the reference's log-probabilities are gone: its weights were other ones"
    raise ConfigError(Problem(REFERENCE_FOLDER, found, "restore the folder, or start again in a new output_dir"))


def hash_weights(model: nn.Module, *, is_without_adapter: bool = False) -> str:
    """Return 64 hex digits that change with any weight of a model; without those of a fresh adapter if asked to."""
    digest = hashlib.sha256()
    adapter = {name for name, parameter in model.named_parameters() if is_without_adapter and parameter.requires_grad}
    for name, tensor in sorted(model.state_dict().items()):
        if name not in adapter and isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            if not tensor.is_meta:
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_architecture(model: Any) -> dict[str, Any]:
    """What a model's configuration says, but for where it was loaded from."""
    read: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return {name: value for name, value in read.items() if name not in ("_name_or_path", "name_or_path")}
