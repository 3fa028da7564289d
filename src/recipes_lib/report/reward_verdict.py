"""The end of a reward model's training: its scale, its report, and whether it may serve PPO."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from recipes_lib.errors import DataError
from recipes_lib.files import read_record
from recipes_lib.models.scoring import RewardModel, compute_reward_statistics, store_reward_statistics
from recipes_lib.report.reward_probes import score_held_out
from recipes_lib.report.reward_report import build_reward_report, check_gates

REWARD_FILE: Final = "reward_report.json"
MAX_REFERENCE_ANSWERS: Final = 1024
MAX_PAIRS: Final = 1000
"""Held-out pairs that the report looks at; each is scored in eight forms."""


class PairRows(Protocol):
    """Prepared pairs that are read by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def settle_scale(reward_model: RewardModel, pairs: PairRows) -> None:
    """Store mean and deviation of the scores of chosen training answers with the model, which scores by them then.

    Args:
        reward_model: After training; its configuration is saved with it afterwards. Where its weights are sharded
            every process must call.
        pairs: It was trained on; of the first ``MAX_REFERENCE_ANSWERS`` the chosen answers are the reference.

    Raises:
        DataError: All of them have the same score: the model has learnt nothing.
    """
    chosen = [pairs[number] for number in range(min(MAX_REFERENCE_ANSWERS, len(pairs)))]
    rows = [np.concatenate([pair["prompt_ids"], pair["chosen_ids"]]).tolist() for pair in chosen]
    store_reward_statistics(reward_model.model, compute_reward_statistics(reward_model.compute_raw_scores(rows)))


def write_verdict(
    reward_model: RewardModel, pairs: PairRows | None, folder: Path, *, is_main: bool = True
) -> Sequence[str] | None:
    """Score held-out pairs, as they are and altered, and write ``reward_report.json``.

    Args:
        reward_model: After ``settle_scale``; where its weights are sharded every process must call.
        pairs: Held-out pairs; ``None`` when nothing was held out, so that nothing is known.
        folder: The output directory.
        is_main: Whether this process writes.

    Returns:
        A sentence for each gate that it failed; ``None`` when nothing was held out.
    """
    if pairs is None:
        return None
    held_out = [pairs[number] for number in range(min(MAX_PAIRS, len(pairs)))]
    report = build_reward_report(score_held_out(reward_model, held_out))
    failed = check_gates(report)
    config = reward_model.model.config
    verdict: Mapping[str, Any] = {
        "may_serve_ppo": not failed,
        "failed_gates": failed,
        "scale": {"mean": config.reward_mean, "std": config.reward_std},
        **report,
    }
    if is_main:
        (folder / REWARD_FILE).write_text(json.dumps(verdict, indent=1), encoding="utf-8")
    return failed


def read_verdict(folder: Path) -> Mapping[str, Any] | None:
    """Return what ``write_verdict`` wrote into a run's directory; ``None`` where there is nothing whole."""
    with suppress(DataError):
        return read_record(folder / REWARD_FILE, {"failed_gates": list})
    return None
