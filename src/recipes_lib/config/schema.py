"""Our own configuration keys, in sections of at most twelve fields; every other key is upstream's.

A field's docstring (the string under it) is its help text; ``docs/configs.md`` and ``--help`` are generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Required, TypedDict

DatasetFormat = Literal["auto", "messages", "prompt_completion", "text", "sharegpt", "alpaca", "preference"]
LossOn = Literal["assistant", "last_assistant", "completion", "all"]
Overlong = Literal["error", "truncate", "drop", "split"]


class MixtureEntry(TypedDict, total=False):
    """One dataset of ``dataset_mixture``."""

    name: Required[str]
    """Hub id or path, as ``dataset_name``."""
    weight: float
    """How often its rows come up: 0.5 takes a random half of them, 2 takes each twice. Default 1."""
    config: str
    """As ``dataset_config``."""
    revision: str
    """As ``dataset_revision``."""
    split: str
    """As ``dataset_train_split``."""
    format: DatasetFormat
    """As ``dataset_format``."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which rows are trained on and which are held out."""

    dataset_name: str | None = None
    """Hub id, or path of a file or folder (JSON, JSONL, CSV, Parquet, text, ``save_to_disk``)."""
    dataset_config: str | None = None
    """Configuration of a Hub dataset."""
    dataset_revision: str | None = None
    """Commit, tag or branch of a Hub dataset; a commit makes the run reproducible."""
    dataset_train_split: str = "train"
    """Split to train on."""
    dataset_test_split: str | None = None
    """Held-out split, by name; or the path of a held-out file. Unset: see ``test_split_size``."""
    test_split_size: float | int | None = None
    """Hold out this share (below 1) or number (1 and above) of rows when no test split is named."""
    dataset_mixture: list[dict[str, Any]] | None = field(default=None, metadata={"items": MixtureEntry})
    """Several datasets instead of one: a list of ``{name, weight, config, revision, split, format}``."""
    dataset_format: DatasetFormat = "auto"
    """Row layout; ``auto`` detects it from the columns and names what it found."""
    dataset_streaming: bool = False
    """Tokenise while training, for data larger than the disk; needs ``max_steps``."""
    allow_eval_overlap: bool = False
    """Accept training rows that are also held-out rows."""


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """How rows become token ids, which of them are trained on, and how they share a row of the batch."""

    loss_on: LossOn | None = None
    """Tokens trained on. Unset: ``assistant`` for chats, ``completion`` for prompt/completion, ``all`` for text."""
    max_length: int | None = None
    """Tokens in a row of the batch. Unset: the longest example, rounded up to 64; nothing is cut."""
    overlong: Overlong = "error"
    """What happens to examples longer than ``max_length``."""
    max_truncated_fraction: float = 0.01
    """Largest share of target tokens that ``overlong: truncate`` or ``drop`` may lose before it is an error."""
    packing: bool = True
    """Fill each row of the batch with several examples, kept apart in attention and positions."""
    chat_template_path: str | None = None
    """Jinja file that replaces the tokenizer's chat template, in training and in the exported model."""
    eos_token: str | None = None
    """Token that ends text and completions. Unset: the tokenizer's."""
    pad_token: str | None = None
    """Padding token. Unset: the tokenizer's; it is never trained on, whatever its id."""
    prepared_dir: str | None = None
    """Where prepared sets are kept. Unset: ``~/.cache/recipes_lib/prepared``."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained and how it is loaded; TRL's ``ModelConfig`` spelling."""

    model_name_or_path: str
    """Hub id or folder of the model to start from."""
    model_revision: str | None = None
    """Commit, tag or branch of a Hub model."""
    tokenizer_name_or_path: str | None = None
    """Hub id or folder of the tokenizer. Unset: the model's."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Precision of the master weights; the compute precision is ``bf16`` / ``fp16``."""
    attn_implementation: str | None = None
    """``sdpa``, ``eager``, ``flash_attention_2`` or ``varlen``. Unset: the fastest that isolates packed documents."""
    trust_remote_code: bool = False
    """Run code shipped with the model; needs ``model_revision`` to be a commit."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What the evaluation hooks do; when they run is upstream's ``eval_strategy`` and ``eval_steps``."""

    num_sample_prompts: int = 4
    """Held-out prompts answered at each evaluation; 0 turns samples off."""
    sample_prompts: list[str] | None = None
    """Prompts to answer instead of held-out ones."""
    sample_max_new_tokens: int = 128
    """Length limit of a sample; samples are greedy."""
    metrics: list[str] | None = None
    """Metrics on the samples: import paths of ``evaluate.Metric`` classes, as ``package.module:Class``."""


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """One run: our sections, upstream's training keys, and where each value came from.

    Attributes:
        stage: Name of the recipe, ``sft``.
        path: The YAML file; ``None`` when everything came from flags.
        training: Upstream's keys (``TrainingArguments`` / ``SFTConfig`` spelling) with effective values: those the
            user gave plus our defaults where they differ from upstream's.
        provenance: For every effective key, ``default``, ``file:line``, a flag, or ``derived: why``.
    """

    stage: str
    path: Path | None
    data: DataConfig
    tokens: TokensConfig
    model: ModelConfig
    evaluation: EvaluationConfig
    training: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)


SECTIONS: Final[dict[str, type]] = {
    "data": DataConfig,
    "tokens": TokensConfig,
    "model": ModelConfig,
    "evaluation": EvaluationConfig,
}
"""Our sections by the name of their field in ``RecipeConfig``."""
