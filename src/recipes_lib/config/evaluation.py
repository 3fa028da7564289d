"""Configuration of ``recipes eval``: model, tasks and output, as one flat YAML file and flags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from recipes_lib.config.loader import CommandConfig
from recipes_lib.config.paths import is_local
from recipes_lib.config.values import Settings
from recipes_lib.errors import Problem


@dataclass(frozen=True, kw_only=True)
class EvaluatedModelKeys:
    """Evaluated model and inference engine."""

    model_name_or_path: str = ""
    """Folder, Hub id, adapter or checkpoint; with ``base_url`` the model name that the endpoint expects."""
    model_revision: str | None = None
    """Commit, tag or branch of a Hub model."""
    tokenizer_name_or_path: str | None = None
    """Tokenizer, if it is not the model's. Required for a completions endpoint."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights; ``auto`` is that of the checkpoint."""
    attn_implementation: str | None = None
    """Attention implementation, in transformers' spelling."""
    trust_remote_code: bool = False
    """Run code shipped with a Hub model; needs ``model_revision`` to be a commit."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Inference engine."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint instead of an engine, such as ``http://localhost:8000/v1/completions``."""
    num_concurrent: int = 8
    """Concurrent requests to an endpoint."""
    use_cpu: bool = False
    """Run on the CPU even if there is a GPU."""


@dataclass(frozen=True, kw_only=True)
class TaskKeys:
    """Tasks: benchmarks, few-shot examples and prompts."""

    tasks: list[str] = field(default_factory=list)
    """Suites (core, knowledge, math, code, chat, safety), tasks of lm-eval, or your own tasks."""
    include_path: list[str] | None = None
    """Folders of your own task files, which may read local data."""
    num_fewshot: int | None = None
    """Number of few-shot examples before each question. Unset: the published number of the suite or task."""
    limit: int | None = None
    """Number of questions per task, from the first one. Unset: all."""
    apply_chat_template: bool = False
    """Format questions by the chat template, for instruction-tuned models."""
    fewshot_as_multiturn: bool = True
    """Format few-shot examples as turns of the chat."""
    system_instruction: str | None = None
    """System prompt."""
    confirm_run_unsafe_code: bool = False
    """Run code that the model generates, for tasks that require it; read docs/evaluation.md first."""
    gen_kwargs: dict[str, Any] | None = None
    """Overrides of the task's generation settings: ``{temperature: 0.6, do_sample: true}``."""
    seed: int = 1234
    """Seed of few-shot examples and sampling."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOutputKeys:
    """Output folder and batch size."""

    output_dir: str | None = None
    """Folder of ``eval.json``, ``samples.jsonl`` and ``report.html``. Unset: ``eval`` in the folder of the model."""
    batch_size: int | None = None
    """Batch size. Unset: the largest that fits on a GPU, 8 on a CPU."""
    max_batch_size: int = 64
    """Largest batch size that the automatic search tries."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(EvaluatedModelKeys, TaskKeys, EvaluationOutputKeys, CommandConfig):
    """Configuration of an evaluation."""

    TABLE = "eval"
    USAGE = """recipes eval MODEL --tasks core,gsm8k [--key value ...]
       recipes eval --config FILE [--key value ...]
       recipes eval watch RUN --tasks core,gsm8k [--key value ...]
       recipes eval compare A B [...]
       recipes eval compare A B [...] --judge J --prompts FILE --output_dir DIR"""

    @property
    def folder(self) -> Path:
        """Folder of the results."""
        return Path(self.output_dir or Path(self.model_name_or_path) / "eval")

    @property
    def is_chat_endpoint(self) -> bool:
        """Whether ``base_url`` is a chat endpoint, which applies chat template and tokenizer itself."""
        return self.base_url is not None and self.base_url.rstrip("/").endswith("chat/completions")

    def find_problems(self, settings: Settings) -> Iterator[Problem]:
        """Yield problems of the configuration as a whole."""
        name = self.model_name_or_path
        if self.is_chat_endpoint and not self.apply_chat_template:
            remedy = "write apply_chat_template: true, or name the endpoint's .../v1/completions"
            yield settings.problem("base_url", "a chat endpoint expects messages", remedy)
        if self.base_url is not None and not self.is_chat_endpoint and self.tokenizer_name_or_path is None:
            remedy = "name the tokenizer of the model that the endpoint serves"
            yield settings.problem("base_url", "counting tokens needs the tokenizer of the endpoint's model", remedy)
        tokenizer = self.tokenizer_name_or_path
        if tokenizer is not None and self.trust_remote_code and not is_local(tokenizer):
            found = f"`trust_remote_code` would run code of {tokenizer}, which may change"
            remedy = "download the commit that you have reviewed, and name its folder"
            yield settings.problem("tokenizer_name_or_path", found, remedy)
        if name and self.output_dir is None and (self.base_url is not None or not is_local(name)):
            yield settings.problem(
                "output_dir", "the model has no folder here for the results", "write output_dir: ..."
            )


def read_evaluated_tasks(path: str) -> EvalConfig:
    """Read a configuration for its tasks only; its model may not exist yet.

    Raises:
        ConfigError: The file cannot be read, has an unknown key, or names no task.
    """
    return EvalConfig.parse(["--config", path], required=["tasks"])
