"""Scores of single rows under a model: negative log-likelihood, target tokens and bytes of their text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import send_to_device

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.data.packed.encoding import build_encoder
from recipes_lib.data.sources.rows import EncodedRow, Row
from recipes_lib.errors import DataError, Problem
from recipes_lib.models.adapters.lora import load_adapter
from recipes_lib.models.adapters.saved import find_base
from recipes_lib.models.attention.kernels import choose_attention
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.models.heads.scoring import read_positions
from recipes_lib.models.inference import find_device
from recipes_lib.models.loading import load_causal_lm, load_model_config, load_tokenizer
from recipes_lib.training.evaluation.build import count_text_bytes
from recipes_lib.training.layouts.launch_environment import Launch
from recipes_lib.training.trainers.arguments import build_autocast, build_training_arguments

MAX_LENGTH: Final = 4096
"""Tokens of a window if ``max_length`` is unset and the model has no fewer positions."""


class Score(NamedTuple):
    """Sums over the target tokens of a row: nats, tokens, and bytes of their text (0 if unknown)."""

    nll: float
    num_targets: int
    num_bytes: int

    @property
    def loss(self) -> float | None:
        """Nats per target token; ``None`` without targets."""
        return self.nll / self.num_targets if self.num_targets else None

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the targets' text; ``None`` if it is empty or its length is unknown."""
        return self.nll / math.log(2) / self.num_bytes if self.num_bytes else None


@dataclass(frozen=True)
class RowScorer:
    """Scores rows of any length; the score of a row does not depend on the batch.

    A row longer than a window is scored in several windows, each of which starts with the last token of the previous
    one. Every target counts once; targets after a boundary are predicted from a shorter context.

    Attributes:
        model: Causal language model with a loss head, in evaluation mode, on its device.
        encoder: Encoder of rows to token ids and loss masks.
        collate: Collator of windows.
        byte_lengths: Bytes of each token's text, ``int64 (V,)``, 0 for special tokens; ``None`` if unknown.
        length: Maximum tokens of a window, at least 2.
        batch_size: Windows per batch.
        autocast: Factory of the context of the forward pass.

    Source: ``tests/training/evaluation/test_row_scores.py``.
    """

    model: Any
    encoder: RowEncoder
    collate: PackedCollator
    byte_lengths: torch.Tensor | None
    length: int
    batch_size: int
    autocast: Callable[[], AbstractContextManager[Any]]

    def score(self, rows: Sequence[Row]) -> list[Score]:
        """Return the scores of rows, in their order.

        Raises:
            DataError: Rows cannot be rendered, tokenised or masked (all are reported), or a loss is not finite.
        """
        windows = [
            (number, _cut(row, slice(start, start + self.length)))
            for number, row in enumerate(self.encoder.encode(rows))
            # One token of overlap: it predicts the first target of a window, and is a target only in the previous one.
            for start in range(0, max(1, len(row.input_ids) - 1), self.length - 1)
        ]
        # Sorted by length, to minimise padding.
        windows.sort(key=lambda window: len(window[1]["input_ids"]))
        sums = np.zeros((len(rows), len(Score._fields)))
        for start in range(0, len(windows), self.batch_size):
            numbers, batch = zip(*windows[start : start + self.batch_size], strict=True)
            np.add.at(sums, np.array(numbers), self._score_windows(batch))
        scores = [Score(float(nll), int(num_targets), int(num_bytes)) for nll, num_targets, num_bytes in sums]
        if broken := [row.where for row, score in zip(rows, scores, strict=True) if not math.isfinite(score.nll)]:
            raise DataError(Problem(broken[0], "the model's log-probabilities are not finite", "check its weights"))
        return scores

    @torch.inference_mode()
    def _score_windows(self, windows: Sequence[dict[str, Any]]) -> npt.NDArray[np.float64]:
        """Return the sums of each window, ``(B, 3)``, in the order of ``Score``."""
        inputs = self.collate(windows)
        labels, width = inputs.pop("labels").flatten(), inputs["input_ids"].shape[1]
        # Window of each position of the flattened batch: a row per window, or all windows packed into one row.
        sizes = [width] * len(windows) if len(inputs["input_ids"]) > 1 else [len(one["input_ids"]) for one in windows]
        owners = np.repeat(np.arange(len(windows)), sizes)
        places = (labels >= 0).nonzero().flatten()
        targets = labels[places]
        del inputs["num_tokens"]
        # The first token of a window is never a target, so ``places - 1`` is in the same window.
        inputs |= {"predictors": places - 1, "targets": targets}
        with self.autocast():
            scored = self.model(**send_to_device(inputs, find_device(self.model)), token_logps=True)
        num_bytes = np.zeros(len(targets)) if self.byte_lengths is None else self.byte_lengths[targets].numpy()
        figures = np.stack([-scored.logps.cpu().double().numpy(), np.ones(len(targets)), num_bytes], axis=1)
        sums = np.zeros((len(windows), figures.shape[1]))
        np.add.at(sums, owners[places.numpy()], figures)
        return sums


def _cut(row: EncodedRow, part: slice) -> dict[str, Any]:
    """Return a window of a row in the collator's format."""
    ids = row.input_ids[part]
    return {"input_ids": ids, "loss_mask": row.loss_mask[part], "seq_lengths": [len(ids)]}


def load_row_scorer(config: RecipeConfig, launch: Launch) -> RowScorer:
    """Build a scorer with the model of a configuration; an adapter is loaded on its recorded base model.

    Args:
        config: Configuration: model, tokenisation, precision and ``per_device_eval_batch_size``.
        launch: Launch of this process.

    Raises:
        ConfigError: The model cannot be loaded, or its architecture has no loss head.
    """
    named, adapter = find_base(config.model)
    tokenizer = load_tokenizer(config.model, config.tokens)
    args = build_training_arguments(config, launch, has_eval=False)
    settings, _ = load_model_config(named)
    attention = choose_attention(named, settings, args, packing=config.tokens.packing, flattens=True)
    model: Any = load_causal_lm(named, attention.implementation)
    if adapter is not None:
        model = load_adapter(model, str(adapter), key="model_name_or_path")
    add_loss_head(model)
    return RowScorer(
        model=model.to(args.device).eval(),
        encoder=build_encoder(config, tokenizer),
        collate=PackedCollator(pad_token_id=tokenizer.pad_token_id, layout=attention.layout),
        byte_lengths=count_text_bytes(tokenizer),
        length=int(min(config.tokens.max_length or MAX_LENGTH, read_positions(settings))),
        batch_size=args.per_device_eval_batch_size,
        autocast=build_autocast(args),
    )
