"""What a run that compares answers trains on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.audit import Finding
from recipes_lib.data.encoding import TokenizerLoader
from recipes_lib.data.pair_audit import PairAudit
from recipes_lib.data.pair_sets import identify_pairs, prepare_pairs
from recipes_lib.data.prepare import wait_for_set


class PairRows(Protocol):
    """Pairs that are read by their number: a ``datasets.Dataset`` with the columns that ``prepare_pairs`` names."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class PairData:
    """Pairs and what is known of them.

    Attributes:
        train: Pairs to train on, in the order of the data.
        eval: Held-out pairs, or ``None``.
        max_length: Tokens that a prompt and either of its answers have room for.
        audit: Figures of the training pairs.
        findings: What the audit of all pairs makes of them.
        record: JSON values for ``run.json``: where the pairs came from, their counts, and what was left out.
    """

    train: PairRows
    eval: PairRows | None
    max_length: int
    audit: PairAudit
    findings: Sequence[Finding]
    record: dict[str, Any]

    @property
    def held_out(self) -> Mapping[str, PairRows]:
        """The held-out pairs by name; empty when nothing is held out."""
        return {} if self.eval is None else {"held-out set": self.eval}

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with one answer, held-out pairs included."""
        return max(int(self.record[side]["length_max"]) for side in ("train", "eval") if self.record.get(side))

    @property
    def warnings(self) -> list[str]:
        """What the audit warns of."""
        return [finding.found for finding in self.findings if finding.severity == "warning"]

    @property
    def typical_length(self) -> int:
        """Tokens that attend to each other: the median pair's prompt and longer answer."""
        return self.audit.length_p50

    def iterate_examples(self) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]]:
        """Yield ids of the held-out prompts with their chosen answers, and True where it is the answer; each ``(T,)``.

        A prompt that several pairs share comes once, with the answer of the first.
        """
        seen: set[bytes] = set()
        for number in range(0 if self.eval is None else len(self.eval)):
            assert self.eval is not None
            pair = self.eval[number]
            prompt, chosen = pair["prompt_ids"], pair["chosen_ids"]
            if prompt.tobytes() not in seen:
                seen.add(prompt.tobytes())
                ids = np.concatenate([prompt, chosen]).astype(np.uint32)
                yield ids, np.arange(len(ids)) >= len(prompt)


def load_pair_data(config: RecipeConfig, load_tokenizer: TokenizerLoader, *, local_rank: int = 0) -> PairData:
    """Find or make the prepared pairs of a run; call it before any process group exists.

    Args:
        config: The run.
        load_tokenizer: Called only when something has to be tokenised.
        local_rank: Number of this process on its node; the first one prepares, the others wait for it.

    Raises:
        ConfigError: The options do not fit together.
        DataError: Rows are broken, too long, or held out as well as trained on; no pair is left; or, on the other
            processes, that the first one gave up.
    """
    if local_rank == 0:
        prepared = prepare_pairs(config, load_tokenizer)
    else:
        identity = identify_pairs(config)
        prepared = wait_for_set(identity.root, identity.key)
    return PairData(
        train=prepared.train,
        eval=prepared.eval,
        max_length=prepared.manifest["max_length"],
        audit=PairAudit(**prepared.manifest["train"]),
        findings=[Finding(**finding) for finding in prepared.manifest["findings"]],
        record={"prepared_set": str(prepared.path), **prepared.manifest},
    )
