"""What a run trains on, whether it was prepared beforehand or is tokenised on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.audit import Finding, SplitAudit
from recipes_lib.data.encoding import TokenizerLoader
from recipes_lib.data.prepare import prepare_once
from recipes_lib.data.streaming import audit_first_window, build_train_stream, read_eval_packs

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Packed rows and what is known of them.

    Attributes:
        train: Training packs: columns ``input_ids``, ``loss_mask``, ``seq_lengths``, ``row_ids``.
        eval: Held-out packs, or ``None``.
        max_length: Tokens that a pack has room for.
        num_packs: Training packs; ``None`` for a stream.
        audit: Figures of the training rows; of a stream, of its first ones.
        findings: What the audit of all rows makes of them.
        record: JSON values for ``run.json``: where the rows came from, and their counts.
    """

    train: datasets.Dataset | datasets.IterableDataset
    eval: datasets.Dataset | None
    max_length: int
    num_packs: int | None
    audit: SplitAudit
    findings: Sequence[Finding]
    record: dict[str, Any]

    @property
    def held_out(self) -> Mapping[str, datasets.Dataset]:
        """The held-out packs by name; empty when nothing is held out."""
        return {} if self.eval is None else {"held-out set": self.eval}

    @property
    def longest(self) -> int:
        """Tokens of the longest row, held-out rows included; of a stream, the most that a row may have."""
        audits = [self.record[side] for side in ("train", "eval") if self.record.get(side)]
        return max((audit["length_max"] for audit in audits), default=self.max_length)

    @property
    def warnings(self) -> list[str]:
        """What the audit warns of."""
        return [finding.found for finding in self.findings if finding.severity == "warning"]

    @property
    def typical_length(self) -> int:
        """Tokens that attend to each other: the median row's."""
        return self.audit.length_p50

    def iterate_examples(self) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]]:
        """Yield ids and targets of the held-out rows, each ``(T,)``, in the order of the data, not of the packing."""
        if self.eval is None:
            return
        places = sorted(
            (int(row_id), pack, place)
            for pack, row_ids in enumerate(self.eval["row_ids"])
            for place, row_id in enumerate(row_ids)
        )
        for _, pack, place in places:
            row = self.eval[pack]
            end = int(np.sum(row["seq_lengths"][: place + 1]))
            span = slice(end - int(row["seq_lengths"][place]), end)
            yield row["input_ids"][span], row["loss_mask"][span]


def load_training_data(config: RecipeConfig, load_tokenizer: TokenizerLoader, *, local_rank: int = 0) -> TrainingData:
    """Find or make the prepared set of a run, or open its stream; call it before any process group exists.

    Args:
        config: The run.
        load_tokenizer: Called only when something has to be tokenised.
        local_rank: Number of this process on its node; the first one prepares, the others wait for it.

    Raises:
        ConfigError: The options do not fit together.
        DataError: Rows are broken, too long, held out as well as trained on, or hold nothing to learn.
    """
    if config.data.dataset_streaming:
        return _open_stream(config, load_tokenizer)
    prepared = prepare_once(config, load_tokenizer, local_rank=local_rank)
    figures = {name: value for name, value in prepared.manifest["train"].items() if name != "cut"}
    return TrainingData(
        train=prepared.train,
        eval=prepared.eval,
        max_length=prepared.manifest["max_length"],
        num_packs=len(prepared.train),
        audit=SplitAudit(**figures),
        findings=[Finding(**finding) for finding in prepared.manifest["findings"]],
        record={"prepared_set": str(prepared.path), **prepared.manifest},
    )


def _open_stream(config: RecipeConfig, load_tokenizer: TokenizerLoader) -> TrainingData:
    tokenizer = load_tokenizer(config)
    first = audit_first_window(config, tokenizer)
    assert config.tokens.max_length is not None
    return TrainingData(
        train=build_train_stream(config, tokenizer),
        eval=read_eval_packs(config, tokenizer),
        max_length=config.tokens.max_length,
        num_packs=None,
        audit=first.audit,
        findings=first.findings,
        record={"streamed": True, "first_window": asdict(first.audit)},
    )
