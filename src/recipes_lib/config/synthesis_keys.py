"""Configuration of ``recipes synthesize``: model, method, filters and limits, as one flat YAML file and flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from recipes_lib.config.loader import parse_keys
from recipes_lib.config.paths import check_exists, looks_local
from recipes_lib.config.settings import Settings
from recipes_lib.errors import Problem


@dataclass(frozen=True, kw_only=True)
class WriterKeys:
    """The model that writes."""

    model_name_or_path: str = ""
    """Folder, Hub id or adapter; with ``base_url`` the name that the endpoint knows."""
    model_revision: str | None = None
    """Commit, tag or branch of a model of the Hub."""
    trust_remote_code: bool = False
    """Run code that comes with a model of the Hub; its commit must be named as ``model_revision``."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights; ``auto`` is that of the checkpoint."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Inference engine on this machine."""
    vllm_gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that vLLM takes."""
    base_url: str | None = None
    """OpenAI-compatible endpoint instead: ``http://localhost:8000/v1``. Its key is the variable ``OPENAI_API_KEY``."""
    use_cpu: bool = False
    """Run on the CPU even if there is a GPU."""
    max_new_tokens: int = 1024
    """Longest text of a step."""
    temperature: float = 0.7
    """Of sampling."""
    seed: int = 42
    """Of sampling, of the seeds that are shown, and of choices of a method."""
    batch_size: int = 16
    """Rows that are written together."""


@dataclass(frozen=True, kw_only=True)
class RequestKeys:
    """Requests to endpoints, and their cost."""

    num_concurrent: int = 8
    """Requests at a time."""
    requests_per_minute: float | None = None
    """Upper bound, evenly spaced."""
    request_timeout: float = 300.0
    """Seconds that an attempt may take without receiving anything."""
    request_fields: dict[str, Any] | None = None
    """Further fields of requests to the writer, such as ``{top_p: 0.95}``; ``null`` removes one."""
    input_price: float = 0.0
    """Price of a million tokens that the writer reads."""
    output_price: float = 0.0
    """Price of a million tokens that the writer writes."""
    max_cost: float | None = None
    """Stop before the writer's cost could exceed this; needs prices. The same command with more continues."""
    max_total_tokens: int | None = None
    """Stop before the tokens that the writer reads and writes could exceed this."""


@dataclass(frozen=True, kw_only=True)
class MethodKeys:
    """Method and source."""

    method: str = "answers"
    """``instructions``, ``evolution``, ``explanation``, ``textbook`` or ``answers``; or a YAML file of your own."""
    dataset_name: str = ""
    """Seeds, prompts or documents, as the method reads them: file, folder or Hub id."""
    dataset_config: str | None = None
    """Configuration of a Hub dataset."""
    dataset_revision: str | None = None
    """Commit, tag or branch of a Hub dataset."""
    dataset_train_split: str = "train"
    """Split to read."""
    dataset_columns: dict[str, Any] | None = None
    """Column mapping: ``{prompt: question}``."""
    num_candidates: int | None = None
    """Rows to write, before filters; the source is repeated if it is shorter. Unset: one for each of its rows."""
    num_seeds: int = 3
    """Seeds shown for each row, drawn without replacement."""
    num_answers: int = 1
    """Answers to each prompt; the last step of the method is sampled this many times."""


@dataclass(frozen=True, kw_only=True)
class QualityKeys:
    """Filters and selection; changing these repeats no generation."""

    min_words: int = 1
    """Shortest answer or text, in words."""
    max_words: int | None = None
    """Longest answer or text, in words."""
    languages: list[str] | None = None
    """Languages to keep, as ISO codes: ``[en]``; needs the extra ``corpus``."""
    language_threshold: float = 0.65
    """Least probability of the language."""
    reasoning: Literal["keep", "drop"] = "keep"
    """What becomes of ``<think> ... </think>`` before an answer; filters and judges never read it."""
    drop_refusals: bool = True
    """Remove answers that begin like a refusal."""
    refusals_path: str | None = None
    """Regular expressions of refusals, one a line, instead of the shipped ones."""
    near_duplicates_threshold: float | None = 0.7
    """Remove rows whose prompt or text is this similar to a seed or an earlier row: Jaccard of word trigrams."""
    min_agreement: float | None = None
    """Least share of the ``num_answers`` answers with the same final number or last line; keeps those that have it."""
    judge: str | None = None
    """Grades answers: a reward model, or ``URL#NAME`` of an endpoint."""
    judge_prompt: str | None = None
    """Prompt of the judge, as ``evaluation/judge_prompts/grade.yaml``."""
    judge_fields: dict[str, Any] | None = None
    """Further fields of requests to the judge."""
    judge_max_new_tokens: int = 1024
    """Longest text of the judge."""
    min_score: float | None = None
    """Least grade of a row's best answer."""
    max_rows: int | None = None
    """Keep this many rows, the best by grade and diversity."""
    diversity: float = 0.5
    """Weight of dissimilarity to the rows chosen already against grade, from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class SynthesisOutputKeys:
    """Output."""

    output_dir: str = ""
    """Folder of ``rows.jsonl``, ``pairs.jsonl``, ``synthesis.json``, ``report.html``, and of every reply."""


@dataclass(frozen=True, kw_only=True)
class SynthesisConfig(WriterKeys, RequestKeys, MethodKeys, QualityKeys, SynthesisOutputKeys):
    """Configuration of synthetic data.

    Attributes:
        path: The YAML file; ``None`` when everything came from flags.
    """

    path: Path | None = field(default=None)

    def list_values(self) -> dict[str, Any]:
        """Return every key with its value, as JSON holds it."""
        return {name: value for name, value in asdict(self).items() if name != "path"}


SYNTHESIS_SECTIONS: Final[Mapping[str, type]] = {
    "model": WriterKeys,
    "requests": RequestKeys,
    "method": MethodKeys,
    "quality": QualityKeys,
    "output": SynthesisOutputKeys,
}
"""Heading in ``--help`` -> the keys below it."""
_READ: Final = ("model_name_or_path", "dataset_name", "refusals_path", "judge_prompt", "judge", "method")
_PATHS: Final = (*_READ, "output_dir")


def parse_synthesis_command(argv: Sequence[str]) -> SynthesisConfig | str:
    """Parse the arguments into the configuration, or return the text of ``--help`` or ``--print-config``.

    Raises:
        ConfigError: The file, a flag or a combination of them is wrong; every problem at once.
    """
    required = {
        "model_name_or_path": "name a folder, a Hub id, or with base_url the endpoint's model",
        "dataset_name": "name seeds, prompts or documents",
        "output_dir": "name a folder for the rows",
    }
    return parse_keys("synthesize", argv, SynthesisConfig, _PATHS, _find_contradictions, **required)


def _find_contradictions(config: SynthesisConfig, settings: Settings) -> Iterator[Problem]:
    for key, is_missing, remedy in (
        ("max_cost", not (config.input_price or config.output_price), "write input_price and output_price"),
        ("min_score", config.judge is None, "name a judge"),
        ("min_agreement", config.num_answers < 2, "write num_answers: 2 or more"),
        ("judge_prompt", "#" not in (config.judge or ""), "name a judge as URL#NAME"),
    ):
        if getattr(config, key) is not None and is_missing:
            yield settings.problem(key, f"`{key}` lacks what it is about", remedy)
    if config.base_url is not None and config.engine == "vllm":
        yield settings.problem(
            "engine", "`engine` is of this machine, and `base_url` is set", "leave one of the two out"
        )
    is_url = (config.judge or "").startswith(("http://", "https://"))
    if is_url and "#" not in str(config.judge):
        yield settings.problem("judge", "does not name a model of the endpoint", f"write {config.judge}#NAME")
    for key in _READ:
        place = getattr(config, key)
        is_elsewhere = (key == "judge" and is_url) or (key == "model_name_or_path" and config.base_url is not None)
        if place is not None and looks_local(place) and not is_elsewhere:
            yield from check_exists(settings.where(key), key, place)
