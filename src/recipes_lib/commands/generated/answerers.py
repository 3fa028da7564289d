"""Answering and judging models of ``recipes synthesize`` and ``recipes eval compare --judge``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from recipes_lib.config.schema import ModelConfig
from recipes_lib.config.synthesis_keys import SynthesisConfig
from recipes_lib.evaluation.endpoint import Answerer, Endpoint
from recipes_lib.evaluation.judges import PROMPTS, Judge, PromptedJudge, load_reward_judge, split_place

if TYPE_CHECKING:
    from recipes_lib.models.generation import Generator, Sampling

Settings = SynthesisConfig | argparse.Namespace
"""Settings of sampling, requests and judge; flags are named like the keys."""
Task = Literal["grade", "pairwise"]
"""Task of a judge, which is also the name of its shipped prompt."""


def load_answerer(
    settings: Settings,
    place: tuple[str, str] | None,
    named: ModelConfig,
    start: Callable[[Sampling, int], Generator] | None = None,
) -> Answerer:
    """Load a local model, or build the client of an endpoint.

    Args:
        settings: Settings of sampling and requests.
        place: URL of an endpoint and the name of its model; ``None`` for a local model.
        named: Local model; ignored for an endpoint.
        start: As in ``load_local_model``.

    Raises:
        ConfigError: The model cannot be loaded, or the endpoint is invalid.
    """
    if place is not None:
        return _build_endpoint(settings, place, settings.max_new_tokens, settings.temperature, settings.request_fields)
    from recipes_lib.evaluation.answering import load_local_model

    names = ("max_new_tokens", "temperature", "seed", "batch_size", "use_cpu")
    return load_local_model(named, start=start, **{name: getattr(settings, name) for name in names})


def load_judge(settings: Settings, task: Task) -> Judge:
    """Build the judge: a prompted model behind an endpoint, or a local reward model.

    Raises:
        ConfigError: The reward model cannot be loaded, the prompt file is invalid, or the endpoint has no model name.
    """
    if (place := split_place(str(settings.judge))) is not None:
        # Temperature 0: the same answer gets the same grade.
        endpoint = _build_endpoint(settings, place, settings.judge_max_new_tokens, 0.0, settings.judge_fields)
        prompt = Path(settings.judge_prompt or PROMPTS / f"{task}.yaml")
        return PromptedJudge(endpoint, **{"grading" if task == "grade" else task: prompt})
    import torch

    device = "cuda" if torch.cuda.is_available() and not settings.use_cpu else "cpu"
    return load_reward_judge(str(settings.judge), device=device)


def verify_judge(settings: Settings, task: Task) -> None:
    """Raise for an invalid judge before any model is asked; loads no weights.

    Raises:
        ConfigError: As ``load_judge``.
    """
    if settings.judge is None:
        return
    if split_place(settings.judge) is None:
        from recipes_lib.models.heads.scoring import find_saved
        from recipes_lib.models.loading import load_model_config

        load_model_config(find_saved(settings.judge, None)[1])
    else:
        load_judge(settings, task).describe()


def _build_endpoint(
    settings: Settings, place: tuple[str, str], length: int, temperature: float, fields: Mapping[str, Any] | None
) -> Endpoint:
    return Endpoint(
        *place,
        max_new_tokens=length,
        temperature=temperature,
        seed=settings.seed,
        num_concurrent=settings.num_concurrent,
        requests_per_minute=settings.requests_per_minute,
        timeout=settings.request_timeout,
        request=fields or {},
    )
