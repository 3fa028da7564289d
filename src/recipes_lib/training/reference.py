"""What the reference model says of every answer: computed once, kept on disk, found by what determines it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, distributed, nn

import recipes_lib.losses
import recipes_lib.models
from recipes_lib.data.pair_data import PairData, PairRows
from recipes_lib.data.store import choose_staging, compute_key, explain_disk_errors, find_set, publish_set
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.training.hooks.training_state import preserve_training_state
from recipes_lib.training.progress import TrainingProgress
from recipes_lib.training.row_sharing import count_rounds, share_rows

REFERENCE_FOLDER: Final = "reference"
"""Under ``output_dir``: the run's own copy, with which it goes on where the cache is gone."""

NUM_CHECKED: Final = 64
"""Pairs computed again before stored numbers are trusted."""

_Figures = npt.NDArray[np.float32]
Score = Callable[[Sequence[Any]], Tensor]
"""Rows to the log-probabilities of their answers, ``float32 (2, P)``."""


@dataclass(frozen=True, slots=True)
class ReferencedRows:
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


class StoredReference:
    """Log-probabilities of the answers of all pairs of a run under its reference.

    Source: ``tests/training/test_reference.py``.
    """

    def __init__(self, key: str, rows: Mapping[str, PairRows], *, root: Path, output_dir: Path) -> None:
        """Nothing is read or computed yet.

        Args:
            key: From ``compute_reference_key``.
            rows: The pairs by the name of their set.
            root: Cache that runs share.
            output_dir: Of this run.
        """
        self.rows = {
            name: ReferencedRows(some, np.full((len(some), 2), np.nan, np.float32)) for name, some in rows.items()
        }
        self._key = key
        self._root = root
        self._own = output_dir / REFERENCE_FOLDER

    def attach(self, data: PairData) -> PairData:
        """Return the same data, each pair with the numbers that it will have."""
        return replace(data, train=self.rows["train"], eval=self.rows.get("eval"))

    def find(self) -> bool:
        """Read the numbers from the run's own copy or from the cache; return whether they were there."""
        for root in (self._own, self._root):
            if found := find_set(root, self._key):
                for name, rows in self.rows.items():
                    rows.logps[:] = np.load(found.path / f"{name}.npy")
                return True
        return False

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
                logps = np.zeros((len(rows), 2), np.float32)
                shares = share_rows(len(rows), batch_size)
                for numbers, is_counted in progress.track(shares, f"reference, {name}", num_rounds):
                    scores = score([rows.rows[number] for number in numbers])
                    if is_counted:
                        logps[list(numbers)] = scores.T.float().cpu().numpy()
                rows.logps[:] = _sum_over_processes(logps, next(model.parameters()).device)

    def store(self) -> None:
        """Write the numbers to the cache and to the run's own folder; for the main process.

        Raises:
            DataError: The disk is full.
        """
        for root in (self._root, self._own):
            staging = choose_staging(root, self._key, is_kept=False)
            with explain_disk_errors(root):
                try:
                    staging.mkdir(parents=True)
                    for name, rows in self.rows.items():
                        np.save(staging / f"{name}.npy", rows.logps)
                    publish_set(staging, root, self._key, {"key": self._key})
                finally:
                    shutil.rmtree(staging, ignore_errors=True)

    def find_largest_difference(self, model: nn.Module, score: Score, *, batch_size: int) -> float:
        """Return by how much the stored numbers differ from new ones, in nats a token, over a sample of the pairs.

        The sample is drawn by the key, so that all processes take the same.
        """
        rows = next(iter(self.rows.values()))
        draw = np.random.default_rng(int(self._key[:8], 16))
        numbers = np.sort(draw.permutation(len(rows))[:NUM_CHECKED])
        largest = 0.0
        with preserve_training_state(model):
            for start in range(0, len(numbers), batch_size):
                some = [int(number) for number in numbers[start : start + batch_size]]
                pairs = [rows.rows[number] for number in some]
                lengths = np.array([[len(pair["chosen_ids"]), len(pair["rejected_ids"])] for pair in pairs])
                differences = np.abs(score(pairs).T.float().cpu().numpy() - rows.logps[some]) / lengths
                largest = max(largest, float(differences.max()))
        return largest


def compute_reference_key(model: nn.Module, *, pairs: str, **facts: Any) -> str:
    """Return the key of the reference's numbers: a hash of exactly what determines them.

    Args:
        model: The reference; the weights of the main process count, adapters among them.
        pairs: Key of the prepared pairs, which holds their tokens.
        **facts: Precision, kernel, layout, ``ld_alpha``; JSON values. The learning rate is none of them.
    """
    digest = hashlib.sha256()
    for package in (recipes_lib.losses, recipes_lib.models):
        for path in sorted(Path(package.__path__[0]).glob("*.py")):
            digest.update(path.read_bytes())
    inputs = {"weights": _hash_weights(model), "pairs": pairs, "code": digest.hexdigest(), **facts}
    shared = [compute_key(inputs)]
    if distributed.is_initialized():
        # Where loading is sparing with memory, the others have no weights yet.
        distributed.broadcast_object_list(shared, src=0)
    return shared[0]


def refuse_missing(step: int) -> None:
    """Refuse to go on after ``step`` steps without the numbers that the run began with.

    Raises:
        ConfigError: Always.
    """
    found = f"the run stands at step {step} and the reference's log-probabilities are gone: its weights were other ones"
    raise ConfigError(Problem(REFERENCE_FOLDER, found, "restore the folder, or start again in a new output_dir"))


def _hash_weights(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if not tensor.is_meta:
            digest.update(memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
    return digest.hexdigest()


def _sum_over_processes(values: _Figures, device: torch.device) -> _Figures:
    if not distributed.is_initialized():
        return values
    tensor = torch.from_numpy(values).to(device)
    distributed.all_reduce(tensor)
    summed: _Figures = tensor.cpu().numpy()
    return summed
