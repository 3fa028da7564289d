"""Reference log-probabilities: computed once and stored under a hash of everything that determines them."""

from __future__ import annotations

import functools
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
from recipes_lib.data.pairs.preference_sets import PairData
from recipes_lib.data.store import Rows, compute_key, explain_disk_errors, find_set, make_set
from recipes_lib.models.inference import evaluating, find_device, preserve_random_states
from recipes_lib.training.collectives import broadcast_object, compute_on_main, get_rank, sum_tensor
from recipes_lib.training.evaluation.held_out import share_rows
from recipes_lib.training.monitoring.progress import TrainingProgress
from recipes_lib.training.trainers.pair_batches import measure_answer_rounding

REFERENCE_FOLDER: Final = "reference"
"""Folder of ``output_dir`` with a copy, from which the run resumes."""
_OWN_NAME: Final = "run"
"""Name of this copy, whose key changes with the machine and with versions of the code."""

NUM_CHECKED: Final = 64
"""Pairs that are recomputed to verify stored log-probabilities."""

_Logps = npt.NDArray[np.float32]
Score = Callable[[Sequence[Any]], Tensor]
"""Function of ``P`` pairs that returns log-probabilities of chosen and rejected answers, ``float32 (2, P)``."""


@dataclass(frozen=True, slots=True)
class RowsWithReference:
    """Dataset that adds ``ref_chosen_logp`` and ``ref_rejected_logp`` to each pair.

    Attributes:
        rows: The pairs.
        logps: Reference log-probabilities of chosen and rejected answers in nats, ``float32 (P, 2)``; NaN until
            ``ReferenceLogps`` fills them.
    """

    rows: Rows
    logps: _Logps

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        chosen, rejected = self.logps[index]
        return {**self.rows[index], "ref_chosen_logp": chosen, "ref_rejected_logp": rejected}


class ReferenceLogps:
    """Reference log-probabilities of all pairs of a run, in the shared cache and in the run's own folder.

    Source: ``tests/training/trainers/test_reference.py``, ``tests/distributed/test_pairs.py``.
    """

    def __init__(self, key: str, rows: Mapping[str, Rows], *, root: Path, output_dir: Path) -> None:
        """Create without loading or computing.

        Args:
            key: From ``compute_reference_key``.
            rows: Pairs by the name of their set.
            root: Cache folder that runs share.
            output_dir: Output directory of the run.
        """
        self.rows = {
            name: RowsWithReference(pairs, np.full((len(pairs), 2), np.nan, np.float32)) for name, pairs in rows.items()
        }
        self._key = key
        # The run's copy first: the cache may have been recomputed since, on another device.
        self._places = {output_dir / REFERENCE_FOLDER: _OWN_NAME, root: key}

    def attach(self, data: PairData) -> PairData:
        """Return the data with pairs that include the log-probabilities, once loaded or computed."""
        sets = {name: self.rows[f"eval-{name}"] for name in data.eval_sets}
        return replace(data, train=self.rows["train"], eval=self.rows.get("eval"), eval_sets=sets)

    def load_or_compute(
        self, model: nn.Module, score: Score, *, batch_size: int, dtype: torch.dtype, progress: TrainingProgress
    ) -> None:
        """Load the log-probabilities and verify a sample with ``model``, or compute and store them.

        All ranks must call.

        Args:
            model: The reference, before any step; its training state is restored.
            score: Scores pairs with ``model``.
            batch_size: Pairs per batch on each process.
            dtype: Dtype that bounds the rounding error, from ``get_rounding_dtype``.
            progress: Displays the progress and the result.

        Raises:
            DataError: They cannot be stored; raised on every rank.
        """
        is_found = self.find()
        if is_found:
            difference, is_found = self.compare(model, score, batch_size=batch_size, dtype=dtype)
            verdict = "are used" if is_found else "are computed again"
            found = f"stored log-probabilities differ by {difference:.1e} nats at most from new ones"
            progress.say(f"reference: {found}; they {verdict}")
        if not is_found:
            self.compute(model, score, batch_size=batch_size, progress=progress)
        # Every rank raises if rank 0 cannot write; otherwise the others would wait in the next collective.
        compute_on_main(lambda: self.store(replaces=not is_found))

    def find(self, *, is_resumed: bool = False) -> bool:
        """Load the log-probabilities from the run's folder or the cache; return whether they were found.

        Rank 0 reads and broadcasts, because other nodes may have no access to the cache; all ranks must call.

        Args:
            is_resumed: Whether to take the run's own ones even if they have another key, as those that a machine with
                another attention kernel or another version of the code has computed.
        """
        places = self._places.items() if get_rank() == 0 else ()
        read = (self._read_from(*place, any_key=is_resumed) for place in places)
        found = broadcast_object(next(filter(None, read), None))
        for name, logps in (found or {}).items():
            self.rows[name].logps[:] = logps
        return found is not None

    def compute(self, model: nn.Module, score: Score, *, batch_size: int, progress: TrainingProgress) -> None:
        """Score every pair, divided over all processes; all ranks must call.

        Args:
            model: The reference; its training state is restored.
            score: Scores pairs with ``model``.
            batch_size: Pairs per batch on each process.
            progress: Displays the progress.
        """
        # Not eagerly, if layers are compiled: the policy, which must agree up to rounding, is compiled too.
        with preserve_random_states(), evaluating(model):
            for name, rows in self.rows.items():
                # Each pair is scored on one rank and 0 on the others: the sum over ranks is exact.
                logps = np.zeros((len(rows), 2), np.float32)
                for numbers, is_counted in share_rows(len(rows), batch_size, progress, f"reference, {name}"):
                    scores = score([rows.rows[number] for number in numbers])
                    if is_counted:
                        logps[list(numbers)] = scores.T.float().cpu().numpy()
                rows.logps[:] = sum_tensor(torch.from_numpy(logps).to(find_device(model))).cpu().numpy()

    def store(self, *, replaces: bool) -> None:
        """Write the log-probabilities to the cache and to the run's folder; on rank 0 only.

        Args:
            replaces: Whether to overwrite different log-probabilities with the same key.

        Raises:
            DataError: A file cannot be written, for example because the disk is full.
        """
        for root, name in self._places.items():
            stored = self._read_from(root, name)
            if stored is not None and (self._equals(stored) or not replaces):
                continue
            with explain_disk_errors(root):
                if (other := find_set(root, name)) is not None:  # With another key, or other log-probabilities.
                    shutil.rmtree(other.path)
            make_set(root, name, {}, self._write)

    def compare(self, model: nn.Module, score: Score, *, batch_size: int, dtype: torch.dtype) -> tuple[float, bool]:
        """Compare a random sample of training pairs with newly computed log-probabilities; all ranks must call.

        The key seeds the sample, which is the same on all ranks. Arguments are as for ``load_or_compute``.

        Returns:
            The largest difference in nats, and whether every difference is within the rounding error.
        """
        rows = next(iter(self.rows.values()))
        generator = np.random.default_rng(int(self._key[:8], 16))
        numbers = np.sort(generator.permutation(len(rows))[:NUM_CHECKED])
        differences, allowed = [], []
        with preserve_random_states(), evaluating(model):
            for start in range(0, len(numbers), batch_size):
                batch = numbers[start : start + batch_size].tolist()
                pairs = [rows.rows[number] for number in batch]
                lengths = torch.tensor([[len(pair[name]) for pair in pairs] for name in ("chosen_ids", "rejected_ids")])
                logps = score(pairs)
                differences.append((logps.float().cpu() - torch.from_numpy(rows.logps[batch]).T).abs())
                rounding = measure_answer_rounding(model, functools.partial(score, pairs), logps, lengths, dtype)
                allowed.append(rounding.cpu())
        difference, limit = torch.cat(differences, dim=1), torch.cat(allowed, dim=1)
        return broadcast_object((float(difference.max()), bool((difference <= limit).all())))

    def _read_from(self, root: Path, name: str, *, any_key: bool = False) -> dict[str, _Logps] | None:
        """Log-probabilities of each set; ``None`` if missing, damaged, or of another key or number of pairs."""
        found = find_set(root, name, check_bytes=True)
        if found is None or (found.manifest.get("key") != self._key and not any_key):
            return None
        logps = {name: np.load(found.path / f"{name}.npy") for name in self.rows}
        is_complete = all(logps[name].shape == rows.logps.shape for name, rows in self.rows.items())
        return logps if is_complete else None

    def _equals(self, logps: dict[str, _Logps]) -> bool:
        return all(np.array_equal(logps[name], rows.logps) for name, rows in self.rows.items())

    def _write(self, folder: Path) -> dict[str, str]:
        """Write the log-probabilities into a new folder, and return their key for its manifest."""
        with explain_disk_errors(folder.parent):
            folder.mkdir()
            for name, rows in self.rows.items():
                np.save(folder / f"{name}.npy", rows.logps)
        return {"key": self._key}


def compute_reference_key(model: nn.Module, *, pairs: str, is_without_adapter: bool = False, **facts: Any) -> str:
    """Return the cache key: a hash of everything that determines the log-probabilities; all ranks must call.

    Args:
        model: The reference; rank 0 hashes its weights and architecture.
        pairs: Key of the prepared pairs, which depends on their tokens.
        is_without_adapter: Whether the reference is the model without its adapter, whose weights are then excluded.
        **facts: Compute dtype, attention kernel, batch layout and ``ld_alpha``; JSON values.
    """
    digest = hashlib.sha256()
    # Another version of this code may compute other values.
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
    # With FSDP's ``cpu_ram_efficient_loading``, only rank 0 has loaded weights so far.
    return broadcast_object(compute_key(inputs))


def hash_weights(model: nn.Module, *, is_without_adapter: bool = False) -> str:
    """Return the SHA-256 of a model's weights in hex, optionally without its trainable (adapter) weights."""
    digest = hashlib.sha256()
    adapter = {name for name, parameter in model.named_parameters() if is_without_adapter and parameter.requires_grad}
    for name, tensor in sorted(model.state_dict().items()):
        if name not in adapter and isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            if not tensor.is_meta:
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_architecture(model: Any) -> dict[str, Any]:
    """The model's configuration without the path it was loaded from."""
    read: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return {name: value for name, value in read.items() if name not in ("_name_or_path", "name_or_path")}
