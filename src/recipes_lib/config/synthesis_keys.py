"""Configuration of ``recipes synthesize``: model, method, filters and limits, as one flat YAML file and flags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from recipes_lib.config.loader import CommandConfig
from recipes_lib.config.paths import check_exists, looks_local
from recipes_lib.config.values import Settings
from recipes_lib.errors import Problem


@dataclass(frozen=True, kw_only=True)
class WriterKeys:
    """Model that generates the rows (the writer)."""

    model_name_or_path: str = ""
    """Folder, Hub id or adapter; with ``base_url`` the model name that the endpoint expects."""
    model_revision: str | None = None
    """Commit, tag or branch of a Hub model."""
    trust_remote_code: bool = False
    """Run code shipped with a Hub model; needs ``model_revision`` to be a commit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights; ``auto`` is that of the checkpoint."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Inference engine on this machine."""
    vllm_gpu_memory_utilization: float = 0.9
    """Share of GPU memory that vLLM allocates."""
    base_url: str | None = None
    """OpenAI-compatible endpoint instead: ``http://localhost:8000/v1``. Its key is read from ``OPENAI_API_KEY``."""
    use_cpu: bool = False
    """Run on the CPU even if there is a GPU."""
    max_new_tokens: int = 1024
    """Maximum new tokens of a step."""
    temperature: float = 0.7
    """Sampling temperature."""
    seed: int = 42
    """Seed of sampling, of the seed examples shown, and of a method's random choices."""
    batch_size: int = 16
    """Rows generated per batch."""


@dataclass(frozen=True, kw_only=True)
class RequestKeys:
    """Requests to endpoints, and their cost."""

    num_concurrent: int = 8
    """Concurrent requests; to the writer at most ``batch_size`` times ``num_answers``."""
    requests_per_minute: float | None = None
    """Maximum requests per minute, evenly spaced."""
    request_timeout: float = 300.0
    """Timeout of an attempt, in seconds without receiving data."""
    request_fields: dict[str, Any] | None = None
    """Additional fields of requests to the writer, such as ``{top_p: 0.95}``; ``null`` removes a field."""
    input_price: float = 0.0
    """Price per million input tokens of the writer."""
    output_price: float = 0.0
    """Price per million output tokens of the writer."""
    max_cost: float | None = None
    """Stop before the writer's cost could exceed this; needs prices. Raise it to resume."""
    max_total_tokens: int | None = None
    """Stop before the input and output tokens of the writer could exceed this."""


@dataclass(frozen=True, kw_only=True)
class MethodKeys:
    """Method and source."""

    method: str = "answers"
    """``instructions``, ``evolution``, ``explanation``, ``textbook`` or ``answers``; or your own YAML file."""
    dataset_name: str = ""
    """Seeds, prompts or documents, depending on the method: file, folder or Hub id."""
    dataset_config: str | None = None
    """Configuration of a Hub dataset."""
    dataset_revision: str | None = None
    """Commit, tag or branch of a Hub dataset."""
    dataset_train_split: str = "train"
    """Split to read."""
    dataset_columns: dict[str, Any] | None = None
    """Column mapping: ``{prompt: question}``."""
    num_candidates: int | None = None
    """Rows to generate, before filters; a shorter source is repeated. Unset: one per row of the source."""
    num_seeds: int = 3
    """Seed examples shown for each row, drawn without replacement."""
    num_answers: int = 1
    """Answers per prompt: the last step of the method is sampled this many times."""


@dataclass(frozen=True, kw_only=True)
class QualityKeys:
    """Filters and selection; changing these does not repeat generation."""

    min_words: int = 1
    """Minimum words of an answer or text."""
    max_words: int | None = None
    """Maximum words of an answer or text."""
    languages: list[str] | None = None
    """Languages to keep, as ISO codes: ``[en]``; needs the extra ``corpus``."""
    language_threshold: float = 0.65
    """Minimum probability of the language."""
    reasoning: Literal["keep", "drop"] = "keep"
    """Keep or remove ``<think> ... </think>`` before an answer; filters and judges never read it."""
    drop_refusals: bool = True
    """Remove answers that begin with a refusal."""
    refusals_path: str | None = None
    """File of regular expressions for refusals, one per line, instead of the shipped ones."""
    near_duplicates_threshold: float | None = 0.7
    """Remove rows whose prompt or text is this similar to a seed or an earlier row (Jaccard of word trigrams)."""
    min_agreement: float | None = None
    """Minimum share of the ``num_answers`` answers that agree in the final number or last line; keeps these answers."""
    judge: str | None = None
    """Judge that grades answers: a reward model, or ``URL#NAME`` of an endpoint."""
    judge_prompt: str | None = None
    """File of the judge's prompt, in the format of ``evaluation/judge_prompts/grade.yaml``."""
    judge_fields: dict[str, Any] | None = None
    """Additional fields of requests to the judge."""
    judge_max_new_tokens: int = 1024
    """Maximum new tokens of the judge."""
    min_score: float | None = None
    """Minimum grade of a row's best answer."""
    max_rows: int | None = None
    """Maximum rows to keep, the best by grade and diversity."""
    diversity: float = 0.5
    """Weight of dissimilarity to the rows already selected, against the grade; from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class SynthesisOutputKeys:
    """Output."""

    output_dir: str = ""
    """Folder of ``rows.jsonl``, ``pairs.jsonl``, ``synthesis.json``, ``report.html`` and all replies."""


@dataclass(frozen=True, kw_only=True)
class SynthesisConfig(WriterKeys, RequestKeys, MethodKeys, QualityKeys, SynthesisOutputKeys, CommandConfig):
    """Configuration of ``recipes synthesize``."""

    TABLE = "synthesize"

    def find_problems(self, settings: Settings) -> Iterator[Problem]:
        """Yield problems of the configuration as a whole."""
        if self.judge_prompt is not None and "#" not in (self.judge or ""):
            yield settings.problem("judge_prompt", "`judge_prompt` has no effect alone", "name a judge as URL#NAME")
        is_url = (self.judge or "").startswith(("http://", "https://"))
        if is_url and "#" not in str(self.judge):
            yield settings.problem("judge", "the endpoint of the judge has no model name", f"write {self.judge}#NAME")
        for key, place in (("judge", self.judge), ("method", self.method)):
            if place is not None and looks_local(place) and not (key == "judge" and is_url):
                yield from check_exists(settings.where(key), key, place)
